"""The CUDA backend with an emulated GPU: all of it but the launch itself, on CPU tensors.

The C++ compiler compiles ``emulated_gpu.h`` followed by the text for NVRTC, and it runs thread by thread.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from ddp_quant_hooks.kernels.cuda import CudaKernels
from ddp_quant_hooks.kernels.programs import THREADS, source

COMPILER = next(filter(shutil.which, ("c++", "g++", "clang++")), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler to emulate a GPU with")
FLAGS = (
    *("-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE"),
    *("-ffp-contract=off", "-fno-strict-aliasing"),
    # Find what makes a GPU fault, or what C++ leaves undefined.
    *("-fsanitize=alignment,bounds,shift,signed-integer-overflow", "-fno-sanitize-recover=all"),
)


class EmulatedGpu(CudaKernels):
    """CUDA kernels on the CPU.

    ``plan(job)`` notes which programs a job needs, and compiles them all at once; it runs nothing. Programs
    that were not planned are compiled one by one.
    """

    def __init__(self, folder):
        self._folder = folder
        self._libraries = {}
        self._planned = None
        self.launches = []
        self.first_thread_block = 0

    def plan(self, job):
        self._planned = []
        job()
        programs, self._planned = dict.fromkeys(self._planned), None
        self._compile([program for program in programs if program not in self._libraries])

    def _compile(self, programs):
        for file in {program.file for program in programs}:
            some = [program for program in programs if program.file == file]
            text = [f'#include "{Path(__file__).with_name("emulated_gpu.h")}"', source(file)]
            for index, program in enumerate(some):
                text.append(program.entry(f"kernel_{index}"))
                text.append(
                    f'extern "C" void launch_{index}(const void* work, unsigned threads, unsigned first, '
                    f"unsigned last, unsigned height) {{ auto kernel = {Path(file).stem}::kernel_{index}; "
                    "emulated_gpu::launch(kernel, work, threads, first, last, height); }"
                )
            path = self._folder / f"{Path(file).stem}-{len(self._libraries)}.cpp"
            path.write_text("\n".join(text))
            subprocess.run([COMPILER, *FLAGS, str(path), "-o", str(path.with_suffix(".so"))], check=True)
            library = ctypes.CDLL(str(path.with_suffix(".so")))
            for index, program in enumerate(some):
                self._libraries[program] = getattr(library, f"launch_{index}")

    def _start(self, program, work, width, height):
        if self._planned is not None:
            self._planned.append(program)
            return
        if program not in self._libraries:
            self._compile([program])
        self.launches.append((program, width, height))
        first = min(self.first_thread_block, width)
        self._libraries[program](work, THREADS, first, width, height)
