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
        line: The line of the page at which the code begins.
        text: The code.
    """

    place: str
    section: str
    line: int
    text: str


def snippets(page: Path) -> list[Snippet]:
    """Return the snippets of a page."""
    text, found = page.read_text(), []
    for block in _BLOCK.finditer(text):
        before = text[: block.start(1)]
        sections = ["", *re.findall(r"^## (.*)$", before, re.MULTILINE)]
        place = f"{page.relative_to(ROOT)} {len(found)}"
        found.append(Snippet(place, sections[-1], before.count("\n"), block[1]))
    return found


def run(chosen: Iterable[Snippet], **names: Any) -> dict[str, Any]:
    """Run snippets one after another, with names from the program around them; return all names.

    Errors show the lines of the page.
    """
    names["__name__"] = "__main__"
    for snippet in chosen:
        exec(compile("\n" * snippet.line + snippet.text, snippet.place, "exec"), names)
    return names


def run_program(
    script: Path,
    *arguments: object,
    ranks: int = 2,
    restarts: int = 0,
    folder: Path | None = None,
    **environ: str,
) -> tuple[str, str]:
    """Run a program under torchrun; return what it has printed, and its errors."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--monitor-interval=0.1"]
    options = [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    done = subprocess.run(
        [sys.executable, *launcher, *options, str(script), *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr
