"""The Python snippets and programs of the READMEs and of the site, run as users run them."""

import contextlib
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dist_utils.testing import run_ranks

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts),
]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Snippet(NamedTuple):
    """A code block of a page.

    Attributes:
        place: The page's path and the snippet's number there, for messages.
        section: The title of the section; empty before the first one.
        text: The code, after as many empty lines as there are lines before it on the page.
    """

    place: str
    section: str
    text: str


def snippets(page: Path) -> list[Snippet]:
    """Return the snippets of a page."""
    text, found = page.read_text(), []
    for block in _BLOCK.finditer(text):
        before = text[: block.start(1)]
        sections = ["", *re.findall(r"^## (.*)$", before, re.MULTILINE)]
        place = f"{page.relative_to(ROOT)} {len(found)}"
        found.append(Snippet(place, sections[-1], "\n" * before.count("\n") + block[1]))
    return found


def run(chosen: Iterable[Snippet], **names: Any) -> dict[str, Any]:
    """Run snippets one after another, with names from the program around them; return all names.

    Errors show the lines of the page.
    """
    names["__name__"] = "__main__"
    for snippet in chosen:
        exec(compile(snippet.text, snippet.place, "exec"), names)
    return names


@contextlib.contextmanager
def program(
    script: Path,
    *arguments: object,
    ranks: int = 2,
    restarts: int = 0,
    folder: Path | None = None,
    **environ: str,
) -> Iterator[subprocess.Popen[str]]:
    """Start a program under torchrun; on exit, end what is left of it: torchrun ends its ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--monitor-interval=0.1"]
    options = [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    with subprocess.Popen(
        [sys.executable, *launcher, *options, str(script), *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        try:
            yield started
        finally:
            started.terminate()


def end_of(started: subprocess.Popen[str]) -> tuple[str, str]:
    """Wait for the end of a program, which must be a good one; return what it has printed, and its errors."""
    output, errors = started.communicate(timeout=600)
    assert started.returncode == 0, output + errors
    return output, errors


def run_program(
    script: Path, *arguments: object, ranks: int = 2, folder: Path | None = None, **environ: str
) -> tuple[str, str]:
    """Run a program to its end on ranks; return what it has printed, and its errors.

    The ranks have what torchrun gives them, and have imported torch, which takes most of a short program.
    """
    with tempfile.TemporaryDirectory() as outputs:
        command = [str(script), *map(str, arguments)]
        environ = {"TORCHELASTIC_RESTART_COUNT": "0", **environ}
        run_ranks(_be_rank, ranks, command, folder, outputs, environ, backend=None, timeout=600)
        printed, errors = ((Path(outputs) / name).read_text() for name in "12")
    return printed, errors


def _be_rank(_: int, command: list[str], folder: Path | None, outputs: str, environ: dict[str, str]) -> None:
    """Run a program as one rank, with outputs in files that are named for their descriptors."""
    for descriptor in (1, 2):
        os.dup2(os.open(Path(outputs) / str(descriptor), os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.update(environ)
    if folder is not None:
        os.chdir(folder)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")
