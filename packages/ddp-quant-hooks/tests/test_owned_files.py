"""Machine code that another user could have written is not run: a chosen library, and cached GPU programs."""

import io
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddp_quant_hooks import kernels
from ddp_quant_hooks.kernels.cpu import CpuKernels, library_path
from ddp_quant_hooks.kernels.owned_files import ForeignFileError
from ddp_quant_hooks.kernels.programs import affine_program, compile_program
from dist_utils.testing import run_ranks

as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away"
)
OTHER = 12345


@pytest.fixture
def library(tmp_path, monkeypatch):
    if not library_path().exists():
        pytest.skip("there are no compiled kernels: no C++ compiler")
    folder = tmp_path / "mine"
    folder.mkdir(mode=0o755)
    shutil.copy(library_path(), folder / "kernels.so")
    (folder / "kernels.so").chmod(0o755)
    monkeypatch.setenv("DDP_QUANT_HOOKS_LIBRARY", str(folder / "kernels.so"))
    return folder / "kernels.so"


def test_a_library_of_this_user_is_used(library):
    library.parent.chmod(0o777 | stat.S_ISVTX)  # like /tmp
    assert kernels.describe().startswith(f"cpu: {CpuKernels().describe()}\n")


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
@pytest.mark.parametrize("place", ["file", "folder", "folder of a link"])
def test_a_library_that_others_may_write_is_refused(library, monkeypatch, mode, place):
    changed = library if place == "file" else library.parent
    if place == "folder of a link":  # counts as what it leads to
        link = library.parents[1] / "link.so"
        link.symlink_to(library)
        monkeypatch.setenv("DDP_QUANT_HOOKS_LIBRARY", str(link))
    changed.chmod(mode)
    with pytest.raises(ForeignFileError, match=rf"{changed.name} can be written.*0{mode:o}.*chmod -R go-w"):
        CpuKernels()


@as_root
@pytest.mark.parametrize("folder", [False, True])
def test_a_library_of_another_user_is_refused(library, folder):
    changed = library.parent if folder else library
    os.chown(changed, OTHER, -1)
    with pytest.raises(ForeignFileError, match=f"{changed.name} belongs to user {OTHER}"):
        CpuKernels()


PROGRAM = """
import torch
from ddp_quant_hooks import kernels
layout = kernels.Layout("int8", 32)
message = torch.zeros(layout.message_bytes(100), dtype=torch.uint8)
kernels.encode(torch.arange(100.0), message, layout)
print(layout.scales(message, 100).tolist(), kernels.describe())
"""


def test_instead_of_a_refused_library_torchs_operators_compute_and_say_why(library):
    library.chmod(0o777)
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(
        "[31.0, 63.0, 95.0, 99.0] cpu: torch operators, about ten times slower or more"
    )
    assert "can be written by other users" in done.stdout
    said = (
        "gradients on the CPU are quantized by torch's operators, which is slow: the compiled kernels do not"
    )
    assert done.stderr.count(said) == 1


def test_a_library_of_other_sources_is_not_called(library):
    shutil.copy(next(Path(torch.__file__).parent.glob("lib/libc10.*")), library)
    with pytest.raises(OSError, match="was built from other sources than this version's"):
        CpuKernels()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'ddp-quant-hooks[cuda]'")
    monkeypatch.setenv("DDP_QUANT_HOOKS_CACHE", str(tmp_path / "above" / "cache"))
    return tmp_path / "above" / "cache"


def compiled(architecture="sm_90"):
    """Return the code, and whether a compiler made it: only then is there a report."""
    logs = io.StringIO()
    code = compile_program(affine_program("decode", torch.float32), architecture, logs=logs)
    return code, "registers" in logs.getvalue()


def _entries(cache):
    return [path for path in cache.rglob("*") if path.is_file() and path.stat().st_size > 1000]


def test_the_cache_is_made_for_its_user_alone(cache, caplog):
    before = os.umask(0)  # the user's own setting must not matter
    try:
        code, by_compiler = compiled()
        assert by_compiler
        assert compiled() == (code, False)
    finally:
        os.umask(before)
    assert not caplog.text
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache.parent, cache)] == [0o700] * 2
    (entry,) = _entries(cache)
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600


def test_a_cache_that_others_may_write_or_own_is_not_used(cache, caplog):
    code, _ = compiled()
    (entry,) = _entries(cache)

    def said():
        caplog.clear()
        assert compiled()[0] == code
        return caplog.text

    cache.chmod(0o755)  # as made by earlier versions
    for path in (cache, entry):
        mode = stat.S_IMODE(path.stat().st_mode)
        path.chmod(0o777)
        assert f"{path} can be written by " in said()
        path.chmod(mode)
        if os.geteuid() == 0:
            os.chown(path, OTHER, -1)
            assert f"{path} belongs to user {OTHER}" in said()
            os.chown(path, 0, -1)
    assert not said()


def test_damaged_programs_are_compiled_again(cache, caplog):
    code, _ = compiled()
    assert compiled("sm_80")[0] != code
    assert len(_entries(cache)) == 2
    for damage in (lambda data: data[:-100], lambda data: data[:500] + b"x" + data[501:], lambda _: b""):
        for path in _entries(cache):
            path.write_bytes(damage(path.read_bytes()))
        caplog.clear()
        assert compiled() == (code, True)
        assert "damaged" in caplog.text
    caplog.clear()
    assert compiled() == (code, False)
    assert not caplog.text


def test_a_folder_that_cannot_be_written_is_no_error(cache, caplog):
    cache.parent.write_text("no folder")
    assert compiled()[0]
    assert "not kept on disk" in caplog.text


def test_nothing_is_left_of_code_that_cannot_be_kept_whole(cache, caplog):
    """As on a full disk: the system refuses files of this length."""
    resource = pytest.importorskip("resource", reason="needs POSIX limits")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        assert compiled()[0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "not kept on disk" in caplog.text
    assert [*cache.iterdir()] == []


def _compiled(_):
    return compiled()[0], compiled("sm_80")[0]


@pytest.mark.usefixtures("cache")
def test_ranks_that_start_together_share_one_cache():
    first, second = run_ranks(_compiled, 2, backend=None)
    assert first == second
    assert first[0] != first[1]
