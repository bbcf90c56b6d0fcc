"""A Sphinx extension: readable signatures, and a warning where prose has become a name.

The docstring sections ``Raises`` and ``Returns`` and the docstrings of attributes take what stands before
a colon for the name of an exception or a type. A sentence with a colon, or one that names no exception, is
rendered as nonsense; so is ``Returns`` where its later lines are indented.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging

EXCEPTIONS = re.compile(r"(\w+\.)*[A-Z]\w+(, (\w+\.)*[A-Z]\w+)*")
PROSE = re.compile(r"[a-z] [a-z]|[A-Z]\w* [a-z]|\(")
# Defaults whose representation is no expression: Sphinx cannot parse a signature that has one.
DEFAULTS = {"<RedOpType.SUM: 0>": "ReduceOp.SUM", "<class 'dict'>": "dict", "<class 'str'>": "str"}
MODULE = re.compile(r"(\w+\.)+(?=[A-Z])")
PACKAGES = {path.name for path in Path(__file__).parents[2].glob("packages/*/src/*")}
logger = logging.getLogger(__name__)


def _exceptions(field: nodes.field) -> list[str]:
    entries = list(field.findall(nodes.list_item)) or [field[1]]
    return [entry.astext().split(" \N{EN DASH} ")[0] for entry in entries]


def check(_app: Sphinx, tree: nodes.document, _page: str) -> None:
    """Warn of each field of a page whose name or type is prose."""
    for field in tree.findall(nodes.field):
        name = field[0].astext()
        if name == "Raises":
            wrong = [text for text in _exceptions(field) if not EXCEPTIONS.fullmatch(text)]
        elif name in {"Type", "Return type"}:
            wrong = [text for text in [field[1].astext()] if PROSE.search(text)]
        elif name == "Returns":
            wrong = [term.astext() for term in field.findall(nodes.term)]
        else:
            continue
        for text in wrong:
            logger.warning("%s: prose became a name or a term: %r", name, text, location=field)


def shorten(_app: Sphinx, tree: nodes.document, _page: str) -> None:
    """Take the modules from the types of attributes, as they are taken from those of arguments."""
    for field in tree.findall(nodes.field):
        if field[0].astext() == "Type":
            for text in list(field[1].findall(nodes.Text)):
                text.parent.replace(text, nodes.Text(MODULE.sub("", text)))


def clean(_app: Sphinx, _what: str, _name: str, _obj: object, _options: object, *shown: str | None) -> object:
    """Return a signature and its annotation with the defaults that a reader would write."""
    signature, annotation = shown
    for representation, expression in DEFAULTS.items():
        signature = signature and signature.replace(representation, expression)
    return signature, annotation


def describe(_app: Sphinx, what: str, name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Give a constant the text below it in the module that defines it, instead of its type's or torch's."""
    if what not in {"data", "function"}:
        return
    attribute = name.rpartition(".")[2]
    for module in [module for module in sys.modules if module.partition(".")[0] in PACKAGES]:
        texts = ModuleAnalyzer.for_module(module).find_attr_docs()
        if ("", attribute) in texts:
            lines[:] = texts["", attribute]


def setup(app: Sphinx) -> dict[str, bool]:
    """Let Sphinx call these functions: for objects, and with every page."""
    app.connect("autodoc-process-signature", clean)
    app.connect("autodoc-process-docstring", describe)
    app.connect("doctree-resolved", check)
    app.connect("doctree-resolved", shorten)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
