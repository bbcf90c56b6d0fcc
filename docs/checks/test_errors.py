"""The page "Something failed" explains every error class, and every message that does not explain itself.

Errors of wrong arguments (``TypeError``, ``ValueError`` and the like) name the argument and what is allowed.
The page must have the first words of all other messages: of the packages' own error classes, of
``RuntimeError``, ``OSError``, ``MemoryError`` and the like, of warnings, and of all errors of residuals that
are loaded and of FSDP2. Where it does not have them, a new message was written: explain it there, or list it
under "These say what to do".
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    str(path.relative_to(root)): ast.parse(path.read_text())
    for root in ROOT.glob("packages/*/src")
    for path in sorted(root.rglob("*.py"))
}
EXPLAINED_BY_THEMSELVES = {
    "ArgumentTypeError",
    "IndexError",
    "KeyError",
    "NotImplementedError",
    "TypeError",
    "ValueError",
}
IN_JOBS = ("ddp_quant_hooks/feedback/checkpoint.py", "ddp_quant_hooks/fsdp/")
"""Modules whose values are wrong when a job resumes or uses FSDP2, not when a program is written."""
WARNINGS = {"warn", "warning"}
GAP = "…"
"""Stands on the page for what a message fills in."""
OTHERS = "## Gloo, NCCL and torchrun"
"""The section with messages that are not ours."""


class Message(NamedTuple):
    """A message in the sources, with gaps."""

    kind: str
    text: str
    place: str

    def first_words(self):
        """Return four words of the first part without a gap that has as many, or else the longest part."""
        parts = [part.strip(" .,:;()'\n") for part in re.split(f"{GAP}|%s", self.text)]
        part = next((part for part in parts if len(part.split()) > 3), max(parts, key=len))
        return " ".join(part.split()[:4]).strip(" .,:;()'")


def _name(node):
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_error(name):
    return name.endswith(("Error", "Exception"))


def _functions():
    for tree in SOURCES.values():
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


CLASSES = {
    node.name
    for tree in SOURCES.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef) and any(map(_is_error, map(_name, node.bases)))
}
MAKERS = {function.name for function in _functions() if _name(function.returns) in CLASSES}
"""Functions that return an error for others to raise."""


def _text(node, function, functions):
    """Return the text of an expression; of a variable, what it was set to; of a call, what that returns."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, function, functions) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, function, functions)
    if isinstance(node, ast.Name) and function is not None:
        for found in ast.walk(function):
            if isinstance(found, ast.Assign) and node.id in map(_name, found.targets):
                return _text(found.value, None, functions)
    if isinstance(node, ast.Call) and _name(node.func) in functions:
        called = functions[_name(node.func)]
        returned = [found.value for found in ast.walk(called) if isinstance(found, ast.Return)]
        return _text(returned[-1], called, {}) if returned else GAP
    return GAP


def _messages():
    for path, tree in SOURCES.items():
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        around = {id(call): one for one in functions.values() for call in ast.walk(one)}
        for call in ast.walk(tree):
            kind = _name(call.func) if isinstance(call, ast.Call) and call.args else ""
            if _is_error(kind) or kind in CLASSES | MAKERS | WARNINGS:
                text = _text(call.args[0], around.get(id(call)), functions)
                yield Message(kind, text, f"{path}:{call.lineno}")


MESSAGES = list(_messages())


def _needs_explanation(message):
    wrong_in_a_job = message.kind == "ValueError" and message.place.startswith(IN_JOBS)
    return message.kind not in EXPLAINED_BY_THEMSELVES or wrong_in_a_job


@pytest.fixture(scope="module")
def page():
    """Return the page's text, with one blank between words."""
    return " ".join((ROOT / "docs" / "errors.md").read_text().split())


def test_every_class_of_errors_is_on_the_page(page):
    assert [name for name in sorted(CLASSES) if f"`{name}`" not in page] == []


def test_the_first_words_of_every_message_are_on_the_page(page):
    wanted = {message: message.first_words() for message in MESSAGES if _needs_explanation(message)}
    missing = [f"{message.place}: {words}" for message, words in wanted.items() if words not in page]
    assert not missing, "\n".join(sorted(missing))


def test_the_page_quotes_no_message_that_there_is_not():
    ours = (ROOT / "docs" / "errors.md").read_text().partition(OTHERS)[0]
    items = [item.partition("\n\n")[0] for item in re.split(r"^\s*- ", ours, flags=re.MULTILINE)[1:]]
    quoted = []
    for item in items:
        # Up to a colon outside of messages; behind it stands what to do, or messages that say it themselves.
        head = re.match(r"(?:`[^`]*`|[^`:])*", item)[0]
        quoted += re.findall("`([^`]+)`", " ".join((head if "`" in head else item).split()))
    texts = [
        " ".join(_text(node, None, {}).split())
        for tree in SOURCES.values()
        for node in ast.walk(tree)
        if isinstance(node, (ast.Constant, ast.JoinedStr))
    ]
    parts = [part.strip() for message in quoted for part in message.split(GAP) if part.strip()]
    assert parts
    assert [part for part in parts if not any(part in text for text in texts)] == []
