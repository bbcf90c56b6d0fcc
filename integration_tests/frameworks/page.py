"""The Python snippets of docs/frameworks.md, by section, so that tests run what users copy."""

import functools
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"

ON_GPUS = {
    'accelerator="cpu", devices=2': 'accelerator="gpu", devices=1, num_nodes=2',
    "Accelerator(cpu=True, ": "Accelerator(",
    "    use_cpu=True,\n": "",
}
"""What the snippets say for CPUs, and for two nodes with a GPU each."""

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def sections() -> dict[str, list[str]]:
    """Return the snippets of every section that has any, by title.

    Snippets before the first section are prepended to every section. Each keeps its line number on the page.
    """
    found: dict[str, list[str]] = {}
    text = PAGE.read_text()
    for block in _BLOCK.finditer(text):
        before = text[: block.start(1)]
        titles = re.findall(r"^## (.*)$", before, re.MULTILINE)
        found.setdefault(titles[-1] if titles else "", []).append("\n" * before.count("\n") + block[1])
    common = found.pop("")
    return {title: common + snippets for title, snippets in found.items()}


def run(title: str, *, definitions: bool = False, on_gpus: bool = False) -> dict[str, Any]:
    """Run the snippets of a section, one after another, and return what they have defined.

    Args:
        title: Of the section.
        definitions: Without the last snippet, which trains.
        on_gpus: With the changes of ``ON_GPUS``.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    snippets = sections()[title]
    changes = ON_GPUS.items() if on_gpus else ()
    for snippet in snippets[:-1] if definitions else snippets:
        text = functools.reduce(lambda text, change: text.replace(*change), changes, snippet)
        exec(compile(text, str(PAGE), "exec"), namespace)
    return namespace
