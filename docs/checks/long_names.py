"""A Sphinx extension: long names in code may break behind underscores, dots and before capitals.

Tables get narrow by that, and words stay whole.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

LONG = 20
"""Letters. Only longer names break before a capital."""
PLACES = re.compile(r"(?<=[\w.\]][_/=(,])(?=\w)|(?<=[a-z)]\.)(?=[a-z_])")
CAPITALS = re.compile(r"(?<=[a-z])(?=[A-Z])")


def _broken(name: re.Match[str]) -> str:
    places = re.compile(f"{PLACES.pattern}|{CAPITALS.pattern}") if len(name[0]) > LONG else PLACES
    return places.sub("<wbr>", name[0])


def break_names(_app: Sphinx, _page: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    """Mark the places in the HTML of a page."""
    if "body" in context:
        context["body"] = re.sub(r'(?<=<span class="pre">)[^<]+', _broken, context["body"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("html-page-context", break_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
