"""Machine code that another user could have written is not run: a chosen library, and cached GPU programs."""

import os
import shutil
import stat

import pytest
import torch

from ddp_quant_hooks import kernels
from ddp_quant_hooks.kernels import Layout, dispatch
from ddp_quant_hooks.kernels.cpu import CpuKernels, library_path
from ddp_quant_hooks.kernels.owned_files import ForeignFileError, refuse_foreign_file
from ddp_quant_hooks.kernels.programs import affine_program, compile_program

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
    assert CpuKernels().available


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_library_that_others_may_write_is_refused(library, mode):
    library.chmod(mode)
    with pytest.raises(
        ForeignFileError, match=f"can be written by other users \\(mode 0{mode:o}\\).*chmod -R go-w"
    ):
        CpuKernels()
    library.chmod(0o755)
    library.parent.chmod(mode)
    with pytest.raises(ForeignFileError, match="mine can be written by other users"):
        CpuKernels()
    library.parent.chmod(mode | stat.S_ISVTX)  # like /tmp
    assert CpuKernels().available


@as_root
def test_a_library_of_another_user_is_refused(library):
    os.chown(library, OTHER, -1)
    with pytest.raises(ForeignFileError, match=f"belongs to user {OTHER}"):
        CpuKernels()
    os.chown(library, 0, -1)
    os.chown(library.parent, OTHER, -1)
    with pytest.raises(ForeignFileError, match=f"mine belongs to user {OTHER}"):
        CpuKernels()


def test_a_link_counts_as_what_it_leads_to(library, tmp_path):
    link = tmp_path / "link.so"
    link.symlink_to(library)
    refuse_foreign_file(link)
    library.parent.chmod(0o777)
    with pytest.raises(ForeignFileError, match="mine can be written"):
        refuse_foreign_file(link)


def test_instead_of_a_refused_library_torchs_operators_compute_and_the_log_says_why(library, caplog):
    layout, values = Layout("int8", 32), torch.arange(100.0)
    message = torch.zeros(layout.message_bytes(100), dtype=torch.uint8)
    library.chmod(0o777)
    dispatch._cpu_kernels.cache_clear()
    try:
        kernels.encode(values, message, layout)
        assert "can be written by other users" in kernels.describe()
    finally:
        dispatch._cpu_kernels.cache_clear()
    (line,) = caplog.messages
    assert line.startswith("DDP_QUANT_HOOKS_LIBRARY is not used")
    assert "chmod -R go-w" in line
    assert layout.scales(message, 100)[-1] == 99


@pytest.fixture
def cache(tmp_path, monkeypatch):
    pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'ddp-quant-hooks[cuda]'")
    monkeypatch.setenv("DDP_QUANT_HOOKS_CACHE", str(tmp_path / "above" / "cache"))
    return tmp_path / "above" / "cache"


def compiled():
    return compile_program(affine_program("decode", torch.float32), "sm_90")


def _entry(cache):
    (entry,) = (path for path in cache.rglob("*") if path.is_file() and path.stat().st_size > 1000)
    return entry


def test_the_cache_is_made_for_its_user_alone(cache, caplog):
    before = os.umask(0)  # the user's own setting must not matter
    try:
        code = compiled()
        assert compiled() == code
    finally:
        os.umask(before)
    assert not caplog.text
    entry = _entry(cache)
    made = [cache.parent, cache, cache / "entries", cache / "tmp"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700] * 4
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600


def test_a_cache_that_others_may_write_is_not_used(cache, caplog):
    code = compiled()
    entry = _entry(cache)
    cache.chmod(0o755)  # as made by earlier versions
    for path in (cache, cache / "entries", entry.parent, entry):
        mode = stat.S_IMODE(path.stat().st_mode)
        path.chmod(0o777)
        caplog.clear()
        assert compiled() == code
        assert f"{path} can be written by other users" in caplog.text
        path.chmod(mode)
    cache.parent.chmod(0o777)
    caplog.clear()
    assert compiled() == code
    assert "above can be written by all users" in caplog.text
    cache.parent.chmod(0o755)
    caplog.clear()
    assert compiled() == code
    assert not caplog.text


@as_root
def test_a_cache_with_a_file_of_another_user_is_not_used(cache, caplog):
    code = compiled()
    entry = _entry(cache)
    for path in (cache, entry):
        os.chown(path, OTHER, -1)
        caplog.clear()
        assert compiled() == code
        assert f"{path} belongs to user {OTHER}" in caplog.text
        os.chown(path, 0, -1)
