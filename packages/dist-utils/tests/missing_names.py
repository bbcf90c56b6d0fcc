"""Private names of torch that a package uses, and how its import fares where torch lacks one of them.

As a command: prints, as JSON, for each name that the packages in its arguments, or those that they need, look
up by ``private``, what went wrong in the imports without it; and names that they use in another way.
"""

import ast
import contextlib
import functools
import importlib
import importlib.util
import itertools
import json
import multiprocessing
import re
import sys
import traceback
from pathlib import Path

import torch


@functools.cache
def sources(package):
    """Return the syntax tree of every module of a package."""
    (folder,) = map(Path, importlib.util.find_spec(package).submodule_search_locations)
    trees = {}
    for path in sorted(folder.rglob("*.py")):
        module = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
        trees[module.removesuffix(".__init__")] = ast.parse(path.read_text())
    return trees


@functools.cache
def needed(package):
    """Return a package and the siblings that it imports."""
    imported = {
        node.module.split(".")[0]
        for tree in sources(package).values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None
    }
    return {package, *(name for name in imported if name.startswith(("ddp_", "dist_")))}


def private_names(package):
    """Return what a package looks up by ``private``, as pairs of owner and name; not those of objects."""
    found = set()
    for node in [node for tree in sources(package).values() for node in ast.walk(tree)]:
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "private":
            owner, name = node.args[:2]
            path = owner.value if isinstance(owner, ast.Constant) else ast.unparse(owner)
            if path.startswith("torch") and isinstance(name, ast.Constant):
                found.add((path, name.value))
                # Also the private modules on the way there; but there is no torch without its torch._C.
                parts = path.split(".")
                found |= {
                    (".".join(parts[:place]), part)
                    for place, part in enumerate(parts)
                    if part.startswith("_") and part not in ("_C", "_c10d_functional")
                }
    return found


def private_names_bound_elsewhere(package):
    """Return where a package takes a private name of torch without ``private``."""
    found = []
    for module, tree in sources(package).items():
        only_types = {
            part
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for statement in node.body
            for part in ast.walk(statement)
        }
        for node in set(ast.walk(tree)) - only_types:
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
            found += [f"{module}:{node.lineno}: {name}" for name in names if _is_private(name)]
    # torch.ops makes a namespace of any name.
    return [one for one in found if not one.endswith("torch.ops._c10d_functional")]


def _is_private(name):
    return re.fullmatch(r"(torch|dist|distributed_c10d)\.([\w.]+\.)?_(?!_)[\w.]+", name) is not None


def import_all(packages, owner=None, name=None):
    """Import packages with all their modules, but for commands, where torch lacks a name or a module.

    Returns what went wrong, and the modules that are imported then, without the packages' own.
    """
    if owner is not None:
        with contextlib.suppress(AttributeError, TypeError):  # lacked before; an attribute in C++ stays
            delattr(sys.modules.get(owner) or eval(owner, {"torch": torch}), name)
        if f"{owner}.{name}" in sys.modules:
            sys.modules[f"{owner}.{name}"] = None
    try:
        for module in itertools.chain(*map(sources, packages)):
            if not module.endswith((".__main__", ".server")):
                importlib.import_module(module)
    except BaseException:  # noqa: BLE001
        return traceback.format_exc(), []
    own = set().union(*map(needed, packages))
    return "", [module for module in sys.modules if module.split(".")[0] not in own]


def main(*packages):
    """Try every name, each in a forked process, where torch may be changed."""
    fork = multiprocessing.get_context("fork")
    with fork.Pool(1) as pool:
        problem, imported = pool.apply(import_all, (packages,))
    assert not problem, problem
    # In this process torch is whole: what torch itself imports for the package is imported here.
    for module in imported:
        importlib.import_module(module)
    pairs = sorted(set().union(*map(private_names, set().union(*map(needed, packages)))))
    with fork.Pool(2, maxtasksperchild=1) as pool:
        tried = pool.starmap(import_all, [(packages, *pair) for pair in pairs], chunksize=1)
    imports = {".".join(pair): problem for pair, (problem, _) in zip(pairs, tried, strict=True)}
    elsewhere = [place for package in packages for place in private_names_bound_elsewhere(package)]
    print(json.dumps({"imports": imports, "bound elsewhere": elsewhere}))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
