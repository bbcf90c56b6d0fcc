"""Compile the CPU kernels while a wheel or an editable install is built.

Without a compiler the wheel is a pure one, whose kernels are torch operators. ``DDP_QUANT_HOOKS_BUILD``
changes that: ``require`` makes a missing compiler an error, ``skip`` makes a pure wheel on purpose.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "ddp_quant_hooks/kernels/cpu_kernels.so"
SOURCE = "src/ddp_quant_hooks/csrc/cpu_kernels.cpp"

DRIVER = "tests/kernel_driver.cpp"
"""A program with the kernels in it, for tools that see every memory access."""

FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"),
    # One rounding per operator, on every processor.
    "-ffp-contract=off",
    # Neither changes a result; without them comparisons of floats are not vectorized.
    *("-fno-math-errno", "-fno-trapping-math"),
    # Otherwise loops over half a block of 32 are unrolled, and then vectorized badly (GCC 12).
    *("-fno-tree-slp-vectorize", "--param", "max-completely-peel-times=8"),
]


def compile_library(
    folder: Path, output: Path, extra: tuple[str, ...] = ("-shared",), source: str = SOURCE
) -> None:
    """Compile the kernels of the package in ``folder`` to ``output``.

    Raises:
        OSError: There is no compiler.
        subprocess.CalledProcessError: It fails; its messages are in ``stderr``.
    """
    # Under another name first: a library that a process has loaded must not change under it.
    part = output.with_suffix(f".{os.getpid()}.part")
    command = [*find_compiler(), *FLAGS, *extra, str(folder / source), "-o", str(part)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - the user's compiler
        part.replace(output)
    finally:
        part.unlink(missing_ok=True)


def compile_if_needed(folder: Path, output: Path) -> None:
    """Do as :func:`compile_library`, unless ``output`` was compiled in the same way from the same sources.

    It takes half a minute, and every new environment of a checkout asks for it.
    """
    record, inputs = output.with_name(output.name + ".record"), _digest_of_inputs(folder)
    with contextlib.suppress(OSError):
        if record.read_bytes() == f"{inputs} {_digest(output)}".encode():  # whatever the record has become
            return
    compile_library(folder, output)
    with contextlib.suppress(OSError):  # then it is compiled again the next time
        record.write_text(f"{inputs} {_digest(output)}")


def find_compiler() -> list[str]:
    """Return the compiler and its own arguments; raises ``FileNotFoundError`` if there is none."""
    chosen = os.environ.get("CXX", "").split()
    compilers = chosen[:1] or ["c++", "g++", "clang++"]
    compiler = next((found for name in compilers if (found := shutil.which(name))), None)
    if compiler is None or sys.platform == "win32":
        raise FileNotFoundError(f"no C++ compiler among {', '.join(compilers)}")
    return [compiler, *chosen[1:]]


def _digest_of_inputs(folder: Path) -> str:
    """Return a digest of the platform, the compiler, its options and all sources."""
    command = find_compiler()
    version = subprocess.run([*command, "--version"], check=False, capture_output=True).stdout  # noqa: S603
    how = repr((sysconfig.get_platform(), command, FLAGS, version))
    sources = sorted(path for path in (folder / SOURCE).parent.iterdir() if path.is_file())
    return hashlib.sha256(repr((how, [(path.name, _digest(path)) for path in sources])).encode()).hexdigest()


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


class CpuKernels(BuildHookInterface[Any]):
    """Adds the compiled library, and the platform to the wheel's name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before hatchling collects the files; ``version`` is "standard" or "editable"."""
        if self.target_name != "wheel":
            return
        wanted = os.environ.get("DDP_QUANT_HOOKS_BUILD", "")
        if wanted not in {"", "require", "skip"}:
            raise ValueError(f"DDP_QUANT_HOOKS_BUILD must be 'require' or 'skip', got {wanted!r}")
        editable = version == "editable"
        in_sources = Path(self.root) / "src" / LIBRARY
        # A wheel's library is made elsewhere: the checkout's belongs to its editable install.
        library = in_sources if editable else Path(tempfile.mkdtemp()) / in_sources.name
        self.made = None if editable else library.parent
        try:
            if wanted == "skip":
                raise FileNotFoundError("DDP_QUANT_HOOKS_BUILD is 'skip'")
            (compile_if_needed if editable else compile_library)(Path(self.root), library)
        except (OSError, subprocess.CalledProcessError) as error:
            if wanted == "require":
                raise RuntimeError(f"{error}\n{getattr(error, 'stderr', '')}") from error
            if editable:
                in_sources.unlink(missing_ok=True)  # built from other sources than these
            self.app.display_warning(f"the {version} wheel has no CPU kernels: {error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        if not editable:
            build_data["force_include"][str(library)] = LIBRARY

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the files of a wheel that has been written."""
        del version, build_data, artifact_path
        if getattr(self, "made", None) is not None:
            shutil.rmtree(self.made, ignore_errors=True)


if __name__ == "__main__":  # python build_cpu_kernels.py OUTPUT [--driver] [FLAG ...]
    chosen = [flag for flag in sys.argv[2:] if flag != "--driver"]
    source = DRIVER if "--driver" in sys.argv else SOURCE
    kind = [] if "--driver" in sys.argv else ["-shared"]
    compile_library(Path(__file__).parent, Path(sys.argv[1]), (*kind, *chosen), source)
