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


def build(folder, monkeypatch, **environment):
    """Build a wheel from a copy of the package; return its name and the files in it."""
    ignored = shutil.ignore_patterns("*.so*", "__pycache__", "tests")
    shutil.copytree(PACKAGE, folder / "package", ignore=ignored)
    for name in ("CXX", "DDP_QUANT_HOOKS_BUILD"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (wheel,) = WheelBuilder(str(folder / "package")).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        return Path(wheel), archive.namelist()


def describe(wheel):
    """Return what an installation of the wheel says about its kernels, and what it computes."""
    program = (
        "import torch; from ddp_quant_hooks import kernels; from ddp_quant_hooks.kernels import Layout\n"
        "layout = Layout('int8', 128); message = torch.empty(132, dtype=torch.uint8)\n"
        "kernels.encode(torch.arange(100.0), message, layout)\n"
        "print(message.sum().item(), kernels.describe())\n"
        "from ddp_quant_hooks.kernels.programs import source\n"
        "assert all('decode' in source(file) for file in ('block_kernels.cu', 'affine_kernels.cu'))"
    )
    unpacked = wheel.parent / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    code = f"import sys; sys.path.insert(0, {str(unpacked)!r})\n{program}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.exhaustive
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler")
def test_a_wheel_has_the_kernels_and_its_platform_in_its_name(tmp_path, monkeypatch):
    wheel, files = build(tmp_path / "compiled", monkeypatch, DDP_QUANT_HOOKS_BUILD="require")
    assert "py3-none-any" not in wheel.name
    assert "-py3-none-" in wheel.name
    assert "ddp_quant_hooks/kernels/cpu_kernels.so" in files
    said = describe(wheel)
    assert "compiled kernels with" in said
    pure, _ = build(tmp_path / "pure", monkeypatch, DDP_QUANT_HOOKS_BUILD="skip")
    assert describe(pure).split()[0] == said.split()[0], "computes the same"


def test_without_a_compiler_the_wheel_is_pure(tmp_path, monkeypatch):
    wheel, files = build(tmp_path / "a", monkeypatch, CXX="no-such-compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not any(name.endswith(".so") for name in files)
    assert "ddp_quant_hooks/py.typed" in files
    assert "this installation has no compiled kernels" in describe(wheel)
    wheel, files = build(tmp_path / "b", monkeypatch, DDP_QUANT_HOOKS_BUILD="skip")
    assert wheel.name.endswith("-py3-none-any.whl")


def test_a_required_library_that_cannot_be_built_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler among no-such-compiler"):
        build(tmp_path, monkeypatch, CXX="no-such-compiler", DDP_QUANT_HOOKS_BUILD="require")
    with pytest.raises(ValueError, match="must be 'require' or 'skip', got 'maybe'"):
        build(tmp_path / "again", monkeypatch, DDP_QUANT_HOOKS_BUILD="maybe")


def build_cpu_kernels():
    """Import the build hook's module."""
    spec = importlib.util.spec_from_file_location("build_cpu_kernels", PACKAGE / "build_cpu_kernels.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_cxx_of_spaces_is_none(tmp_path, monkeypatch):
    compiler = tmp_path / "c++"
    compiler.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "  ")
    assert build_cpu_kernels().find_compiler() == [str(compiler)]


COMPILER = """#!/bin/sh
case "$*" in *--version) cat "$0.version"; exit;; esac
echo compiled >> "$0.log"
while [ "$1" != -o ]; do shift; done
echo library > "$2"
"""


def test_an_editable_install_compiles_only_what_has_changed(tmp_path, monkeypatch):
    compiler, log = tmp_path / "compiler", tmp_path / "compiler.log"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    (tmp_path / "compiler.version").write_text("1")
    monkeypatch.setenv("CXX", str(compiler))
    csrc = tmp_path / "src/ddp_quant_hooks/csrc"
    shutil.copytree(PACKAGE / "src/ddp_quant_hooks/csrc", csrc)
    library = tmp_path / "cpu_kernels.so"

    def compiled():
        before = len(log.read_text().splitlines()) if log.exists() else 0
        build_cpu_kernels().compile_if_needed(tmp_path, library)
        assert library.read_text() == "library\n"
        return len(log.read_text().splitlines()) - before

    assert [compiled(), compiled()] == [1, 0]
    with (csrc / "rotation.h").open("a") as header:
        header.write("// changed")
    assert [compiled(), compiled()] == [1, 0]
    library.write_text("another")
    assert [compiled(), compiled()] == [1, 0]
    (tmp_path / "cpu_kernels.so.record").write_bytes(b"\xff\x00damaged")
    assert [compiled(), compiled()] == [1, 0]
    (tmp_path / "compiler.version").write_text("2")
    assert [compiled(), compiled()] == [1, 0]
    monkeypatch.setenv("CXX", f"{compiler} -g")
    assert [compiled(), compiled()] == [1, 0]
