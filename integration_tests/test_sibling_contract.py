"""A package imports from a sibling only promised names: CONTRIBUTING.md, "Between packages"."""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dist_utils import OrderedWorker

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
    return PROJECTS[package]["tool"]["torch-dist-extras"]["public-modules"]


def promises(module: str) -> set[str]:
    return set(importlib.import_module(module).__all__)


def used_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield every import, and everything that is looked up in an imported module, each with its line."""
    nodes, full_names = list(ast.walk(ast.parse(source))), {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                full_names[alias.asname or root] = alias.name if alias.asname else root
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                full_names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_module(node.value):
            yield node.lineno, node.value  # importlib.import_module("...")
    for node in nodes:
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if root in full_names:
                yield node.lineno, f"{full_names[root]}.{rest}"


def private_overrides(kind: type, own: str) -> list[str]:
    """Return the private methods of siblings' classes that a package's class overrides."""
    return [
        f"{kind.__qualname__}.{name} overrides one of {base.__qualname__}, which is private"
        for base in kind.__mro__[1:]
        if base.__module__.partition(".")[0] in IMPORTS.keys() - {own}
        for name in vars(kind).keys() & vars(base).keys()
        if name.startswith("_") and not name.endswith("__") and callable(vars(base)[name])
    ]


def classes_of(own: str) -> Iterator[type]:
    source = ROOT / "packages" / IMPORTS[own] / "src"
    for path in sorted((source / own).rglob("*.py")):
        if path.stem not in {"__main__", "server"}:  # importing these has effects
            module = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
            for one in vars(importlib.import_module(module)).values():
                if isinstance(one, type) and one.__module__ == module:
                    yield one


def _is_module(name: str) -> bool:
    path = name.split(".")
    if path[0] not in IMPORTS or not all(path):
        return False
    place = ROOT / "packages" / IMPORTS[path[0]] / "src" / Path(*path)
    return place.is_dir() or place.with_suffix(".py").is_file()


def broken_promises(source: str, own: str) -> list[str]:
    """Return what a package uses from its siblings although they do not promise it."""
    wrong = []
    for line, full_name in used_names(source):
        module, names = full_name, []
        while module and not _is_module(module):
            module, _, name = module.rpartition(".")
            names.insert(0, name)
        sibling = module.split(".", maxsplit=1)[0]
        if sibling in {"", own}:
            continue
        if module not in public_modules(IMPORTS[sibling]):
            wrong.append(f"line {line}: {module} is not public")
        elif names and names[0] not in promises(module):
            wrong.append(f"line {line}: {module}.{names[0]} is not promised")
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
        ("from dist_utils.torch_compat import _x", "line 1: dist_utils.torch_compat._x is not promised"),
        ("import dist_utils as d\nd.no_such", "line 2: dist_utils.no_such is not promised"),
        ("from dist_utils import torch_compat, OrderedWorker\ntorch_compat.GradBucket", ""),
    ],
)
def test_other_imports_are_found(source, problem):
    first = (broken_promises(source, "ddp_quant_hooks") or [""])[0]
    assert first == problem


@pytest.mark.parametrize("package", PROJECTS)
def test_a_class_overrides_no_private_method_of_a_siblings_class(package):
    own = package.replace("-", "_")
    assert [wrong for one in classes_of(own) for wrong in private_overrides(one, own)] == []


def test_an_override_of_a_private_method_is_found():
    class Mine(OrderedWorker):
        def _enqueue(self, queued):
            pass

    class Derived(Mine):
        def submit(self, job):
            pass

        def _start_thread(self, name):
            pass

    for kind, name in ((Mine, "Mine._enqueue"), (Derived, "Derived._start_thread")):
        (wrong,) = private_overrides(kind, "ddp_quant_hooks")
        assert name in wrong


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
        documented |= set(re.findall(r"\w+", members)) or promises(module)
    assert {name for module in public_modules(package) for name in promises(module)} <= documented
