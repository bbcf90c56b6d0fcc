"""The Python snippets and programs of the READMEs and of the site, run as users run them."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

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


def start_program(
    script: Path,
    *arguments: object,
    ranks: int = 2,
    restarts: int = 0,
    folder: Path | None = None,
    **environ: str,
) -> subprocess.Popen[str]:
    """Start a program under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--monitor-interval=0.1"]
    options = [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    return subprocess.Popen(
        [sys.executable, *launcher, *options, str(script), *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_program(*arguments: Any, **options: Any) -> tuple[str, str]:
    """Run such a program to its end; return what it has printed, and its errors."""
    return end_of(start_program(*arguments, **options))


def end_of(program: subprocess.Popen[str]) -> tuple[str, str]:
    """Wait for the end of a program, which must be a good one; return what it has printed, and its errors."""
    output, errors = program.communicate(timeout=600)
    assert program.returncode == 0, output + errors
    return output, errors
