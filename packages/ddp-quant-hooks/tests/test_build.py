"""Building a wheel: with a compiler it has the kernels, without it is a pure one that works."""

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

PACKAGE = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    not (PACKAGE / "build_cpu_kernels.py").exists(), reason="the sources are not here: this is no checkout"
)

COMPILER = """#!/bin/sh
case "$*" in *--version) cat "$0.version"; exit;; esac
echo compiled >> "$0.log"
while [ "$1" != -o ]; do shift; done
echo library > "$2"
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that is quick, and notes that it was called."""
    monkeypatch.delenv("DDP_QUANT_HOOKS_BUILD", raising=False)
    script = tmp_path / "compiler"
    script.write_text(COMPILER)
    script.chmod(0o755)
    (tmp_path / "compiler.version").write_text("1")
    (tmp_path / "compiler.log").touch()
    monkeypatch.setenv("CXX", str(script))
    return script


def build(folder):
    """Build a wheel from a copy of the package; return its name and the files in it."""
    ignored = shutil.ignore_patterns("*.so*", "__pycache__", "tests")
    shutil.copytree(PACKAGE, folder / "package", ignore=ignored)
    (wheel,) = WheelBuilder(str(folder / "package")).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
        return Path(wheel).name, archive.namelist()


def test_with_a_compiler_the_wheel_has_its_library_and_is_for_this_platform(tmp_path, monkeypatch, compiler):
    monkeypatch.setenv("DDP_QUANT_HOOKS_BUILD", "require")
    name, files = build(tmp_path / "compiled")
    assert "-py3-none-" in name
    assert not name.endswith("-any.whl")
    assert "ddp_quant_hooks/kernels/cpu_kernels.so" in files
    monkeypatch.setenv("DDP_QUANT_HOOKS_BUILD", "skip")
    name, files = build(tmp_path / "skipped")
    assert name.endswith("-py3-none-any.whl")
    assert "ddp_quant_hooks/kernels/cpu_kernels.so" not in files
    assert compiler.with_suffix(".log").read_text() == "compiled\n"


PROGRAM = """
import torch
from ddp_quant_hooks import kernels
message = torch.empty(144, dtype=torch.uint8)
kernels.encode(torch.full((100,), 3.0), message, kernels.Layout("int8", 128))
print(message[:4].tolist(), kernels.describe())
from ddp_quant_hooks.kernels.programs import source
assert all('decode' in source(file) for file in ('block_kernels.cu', 'affine_kernels.cu'))
"""


def test_without_a_compiler_the_wheel_is_pure_and_works(tmp_path, monkeypatch, compiler):
    monkeypatch.setenv("CXX", "no-such-compiler")
    name, files = build(tmp_path / "pure")
    assert name.endswith("-py3-none-any.whl")
    assert [file for file in files if file.endswith(".so")] == []
    assert "ddp_quant_hooks/py.typed" in files
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'pure/unpacked')!r})\n{PROGRAM}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("[127, 127, 127, 127] cpu: torch operators")
    assert "this installation has no compiled kernels" in done.stdout
    assert done.stderr.count("which is slow: this installation has no compiled kernels; install a C++") == 1


def test_a_required_library_that_cannot_be_built_is_an_error(tmp_path, monkeypatch, compiler):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("DDP_QUANT_HOOKS_BUILD", "require")
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler among no-such-compiler"):
        build(tmp_path / "required")
    monkeypatch.setenv("DDP_QUANT_HOOKS_BUILD", "maybe")
    with pytest.raises(ValueError, match="must be 'require' or 'skip', got 'maybe'"):
        build(tmp_path / "again")


def test_an_editable_install_compiles_only_what_has_changed(tmp_path, monkeypatch, compiler):
    spec = importlib.util.spec_from_file_location("build_cpu_kernels", PACKAGE / "build_cpu_kernels.py")
    build_cpu_kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build_cpu_kernels)
    csrc, log = tmp_path / "src/ddp_quant_hooks/csrc", compiler.with_suffix(".log")
    shutil.copytree(PACKAGE / "src/ddp_quant_hooks/csrc", csrc)
    library = tmp_path / "cpu_kernels.so"

    def compiled():
        before = len(log.read_text().splitlines())
        build_cpu_kernels.compile_if_needed(tmp_path, library)
        assert library.read_text() == "library\n"
        return len(log.read_text().splitlines()) - before

    assert [compiled(), compiled()] == [1, 0]
    changes = {
        "a header": lambda: (csrc / "rotation.h").write_text("// changed"),
        "the library": lambda: library.write_text("another"),
        "the record": lambda: (tmp_path / "cpu_kernels.so.record").write_bytes(b"\xff\x00damaged"),
        "the compiler": lambda: (tmp_path / "compiler.version").write_text("2"),
        "an option": lambda: monkeypatch.setenv("CXX", f"{compiler} -g"),
    }
    for name, change in changes.items():
        change()
        assert [compiled(), compiled()] == [1, 0], name
