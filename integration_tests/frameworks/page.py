"""The Python snippets of docs/frameworks.md, by section, so that tests run what users copy."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"

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


def run(title: str, *, definitions: bool = False) -> dict[str, Any]:
    """Run the snippets of a section in order, and return the names that they define.

    Args:
        title: The section's title.
        definitions: Leave out the last snippet, which trains.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    snippets = sections()[title]
    for snippet in snippets[:-1] if definitions else snippets:
        exec(compile(snippet, str(PAGE), "exec"), namespace)
    return namespace
