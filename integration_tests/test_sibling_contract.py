"""A package imports from a sibling only promised names: CONTRIBUTING.md, "Between packages"."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text())
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
IMPORTS = {package.replace("-", "_"): package for package in PROJECTS}


def public_modules(package: str) -> list[str]:
    modules: list[str] = PROJECTS[package]["tool"]["torch-dist-extras"]["public-modules"]
    return modules


def promised(module: str) -> set[str]:
    return set(importlib.import_module(module).__all__)


Taken = tuple[int, str, str | None]
"""Line, module and name of an import or lookup; no name for a whole module."""


def sibling_imports(source: str, own: str) -> list[Taken]:
    """Return everything that is imported from a sibling."""
    tree = ast.parse(source)
    modules_by_name: dict[str, str] = {}
    found = [one for node in ast.walk(tree) for one in _imported(node, modules_by_name)]
    found += [one for node in ast.walk(tree) for one in _looked_up(node, modules_by_name)]
    return [one for one in found if one[1].split(".")[0] in IMPORTS and one[1].split(".")[0] != own]


def _imported(node: ast.AST, modules_by_name: dict[str, str]) -> Iterator[Taken]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield node.lineno, alias.name, None
            name = alias.asname or alias.name.split(".")[0]
            modules_by_name[name] = alias.name if alias.asname else name
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        for alias in node.names:
            module = f"{node.module}.{alias.name}"
            if _is_module(module):
                yield node.lineno, module, None
                modules_by_name[alias.asname or alias.name] = module
            else:
                yield node.lineno, node.module, alias.name
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_module(node.value):
        yield node.lineno, node.value, None  # importlib.import_module("...")


def _looked_up(node: ast.AST, modules_by_name: dict[str, str]) -> Iterator[Taken]:
    if isinstance(node, ast.Attribute):
        root, *attributes = ast.unparse(node).split(".")
        module = modules_by_name.get(root, "")
        while module and attributes and _is_module(f"{module}.{attributes[0]}"):
            module += f".{attributes.pop(0)}"
        if module:
            yield node.lineno, module, attributes[0] if attributes else None


def _is_module(name: str) -> bool:
    path = name.split(".")
    if path[0] not in IMPORTS or not all(path):
        return False
    place = ROOT / "packages" / IMPORTS[path[0]] / "src" / Path(*path)
    return place.is_dir() or place.with_suffix(".py").is_file()


def broken_promises(source: str, own: str) -> list[str]:
    """Return what a package uses from its siblings although they do not promise it."""
    wrong = []
    for line, module, name in sibling_imports(source, own):
        if module not in public_modules(IMPORTS[module.split(".", maxsplit=1)[0]]):
            wrong.append(f"line {line}: {module} is not public")
        elif name is not None and name not in promised(module):
            wrong.append(f"line {line}: {module}.{name} is not promised")
    return wrong


@pytest.mark.parametrize("package", PROJECTS)
def test_a_package_imports_only_what_its_siblings_promise(package):
    own = package.replace("-", "_")
    wrong = {
        str(path.relative_to(ROOT)): problems
        for folder in ("src", "tests")
        for path in sorted((ROOT / "packages" / package / folder).rglob("*.py"))
        if (problems := broken_promises(path.read_text(), own))
    }
    assert not wrong


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (
            "from dist_utils.process_groups.agreement import compare",
            "line 1: dist_utils.process_groups.agreement is not public",
        ),
        ("from dist_utils import module_state", "line 1: dist_utils.module_state is not public"),
        ("from dist_utils.torch_compat import _x", "line 1: dist_utils.torch_compat._x is not promised"),
        ("import dist_utils as d\nd.no_such", "line 2: dist_utils.no_such is not promised"),
        (
            "import dist_utils\ndist_utils.module_state.storage.x",
            "line 2: dist_utils.module_state.storage is not public",
        ),
        (
            "def f():\n    from ddp_compress_hooks.hooks import x",
            "line 2: ddp_compress_hooks.hooks is not public",
        ),
        (
            'importlib.import_module("dist_utils.module_state")',
            "line 1: dist_utils.module_state is not public",
        ),
        ("from dist_utils import torch_compat, OrderedWorker\ntorch_compat.GradBucket", ""),
    ],
)
def test_other_imports_are_found(source, problem):
    first = (broken_promises(source, "ddp_quant_hooks") or [""])[0]
    assert first == problem


@pytest.mark.parametrize("package", PROJECTS)
def test_every_promised_name_is_documented(package):
    page = (ROOT / "docs" / f"{package}.md").read_text()
    documented = {
        found.split(".")[-1]
        for found in re.findall(r"auto(?:function|class|exception|data):: ([\w.]+)", page)
    }
    for module, members in re.findall(
        r"automodule:: ([\w.]+)\n(?:   :[a-z-]+:.*\n)*?   :members:(.*(?:\n      .*)*)", page
    ):
        # A bare ":members:" documents all of __all__.
        documented |= set(re.findall(r"\w+", members)) or promised(module)
    assert {name for module in public_modules(package) for name in promised(module)} <= documented
