"""A Sphinx extension: pages read well on the site, and on a code host, which knows no directives.

On a code host ``[TEXT](FILE) <!-- include: NAME -->``, on a line of its own, is a link. On the site it is
what stands in the file between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``. A comment that begins
with ``site:`` is text for the site alone; a line that ends with the comment ``code host`` is not on the
site. On the site, a name in code that links to the page of its package links to the object there.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

INCLUDED = re.compile(r"^\[[^\]]*\]\(([^)#]+)[^)]*\) <!-- include: (\w+) -->$", re.MULTILINE)
SITE = re.compile(r"^<!-- site:\n(.*?)\n-->$", re.MULTILINE | re.DOTALL)
CODE_HOST = re.compile(r"^.* <!-- code host -->\n", re.MULTILINE)
PACKAGES = [path.name for path in Path(__file__).parents[2].glob("packages/*")]
OBJECT = re.compile(rf"\[`([\w.]+)`\]\((?:\.\./)?({'|'.join(PACKAGES)})\.md\)")


def _include(link: re.Match[str]) -> str:
    file, name = link.groups()
    # The links of the file that lead into docs/ begin with this; from there they are other ones.
    into_docs = "../" if "packages/" in file else "docs/"
    return (
        f"```{{include}} {file}\n"
        f':start-after: "<!-- begin: {name} -->"\n:end-before: "<!-- end: {name} -->"\n'
        f":relative-docs: {into_docs}\n```"
    )


def _refer(link: re.Match[str]) -> str:
    shown, package = link.groups()
    module = package.replace("-", "_")
    name = shown if shown.startswith(f"{module}.") else f"{module}.{shown}"
    return f"{{py:obj}}`{shown} <{name}>`"


def for_site(_app: Sphinx, _page: str, source: list[str]) -> None:
    """Write a page as the site needs it."""
    text = CODE_HOST.sub("", source[0])
    text = INCLUDED.sub(_include, text)
    text = SITE.sub(r"\1", text)
    source[0] = OBJECT.sub(_refer, text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Let Sphinx pass every page through :func:`for_site`."""
    app.connect("source-read", for_site)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
