"""A Sphinx extension: where lines may break.

Long names in code may break behind underscores, dots and before capitals. Tables get narrow by that, and
words stay whole. So do options of commands, dates and numbers with their units.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

SHORT, LONG, LONGEST = 12, 20, 36
"""Letters. Shorter names stay whole; only long ones break before a capital, and the longest also in text."""
PLACES = re.compile(r"(?<=[\w.\]][_/=(,])(?=\w)|(?<=[a-z)]\.)(?=[a-z_])")
CAPITALS = re.compile(r"(?<=[a-z])(?=[A-Z])")
WHOLE = re.compile(r"\b\d[\d.]*e-\d+|\b\d{4}-\d\d-\d\d\b")
"""Numbers and dates with a hyphen, behind which lines break."""
UNIT = re.compile(r"\d[\d.,]* (?:(?:Gbit/s|[KMGT]i?B(?:/s)?|[mu]?s|bits?)\b|%)")


def _broken(code: re.Match[str]) -> str:
    name = code[1]
    if name.startswith("-"):
        return f'<span class="pre whole">{name}'
    mark = '<wbr class="anywhere">' if len(name) > LONGEST else "<wbr>"
    places = re.compile(f"{PLACES.pattern}|{CAPITALS.pattern}") if len(name) > LONG else PLACES
    return f'<span class="pre">{places.sub(mark, name) if len(name) > SHORT else name}'


def _unbroken(text: str) -> str:
    return UNIT.sub(r'<span class="unit">\g<0></span>', WHOLE.sub(r'<span class="whole">\g<0></span>', text))


def mark_breaks(_app: Sphinx, _page: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    """Mark the places in the HTML of a page."""
    if "body" in context:
        # Every second part is a tag, or a block of code with all that is in it.
        parts = re.split(r"(<pre>.*?</pre>|<[^>]*>)", context["body"], flags=re.DOTALL)
        parts[::2] = map(_unbroken, parts[::2])
        context["body"] = re.sub(r'<span class="pre">([^<]+)', _broken, "".join(parts))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("html-page-context", mark_breaks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
