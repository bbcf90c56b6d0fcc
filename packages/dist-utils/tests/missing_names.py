"""Private names of torch that a package uses, and how its import fares where torch lacks one of them.

As a command: prints, as JSON, for each name that the package in the first argument, or one that it needs,
looks up by ``private``, what went wrong in the import without it; and names that it uses in another way.
"""

import ast
import contextlib
import functools
import importlib
import importlib.util
import json
import os
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
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            else:
                continue
            found += [f"{module}:{node.lineno}: {name}" for name in names if _is_private(name)]
    # torch.ops makes a namespace of any name.
    return [one for one in found if not one.endswith("torch.ops._c10d_functional")]


def _is_private(name):
    return re.fullmatch(r"(torch|dist|distributed_c10d)\.([\w.]+\.)?_(?!_)[\w.]+", name) is not None


def delete(owner, name):
    """Make torch lack a name, or a module."""
    with contextlib.suppress(AttributeError, TypeError):  # it has lacked it before; an attribute in C++ stays
        delattr(sys.modules.get(owner) or eval(owner, {"torch": torch}), name)
    if f"{owner}.{name}" in sys.modules:
        sys.modules[f"{owner}.{name}"] = None


def in_child(function):
    """Return what a function prints in a forked process, where it may change torch."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            answer = function()
        except BaseException:  # noqa: BLE001
            answer = traceback.format_exc()
        with os.fdopen(writer, "w") as pipe:
            pipe.write(answer)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return answer


def import_all(package):
    """Import a package with all its modules, but for commands."""
    for module in sources(package):
        if not module.endswith((".__main__", ".server")):
            importlib.import_module(module)


def imported_without(package, owner, name):
    """Return what goes wrong in the import of a package where torch lacks a name."""

    def run():
        delete(owner, name)
        import_all(package)
        return ""

    return in_child(run)


def modules_imported(package):
    """Return the modules that the import of a package imports, without its own."""
    own = needed(package)
    import_all(package)
    return "\n".join(name for name in sys.modules if name.split(".")[0] not in own)


def main(package):
    """Try every name."""
    # In this process torch is whole: what torch itself imports for the package is imported here.
    for module in in_child(lambda: modules_imported(package)).splitlines():
        importlib.import_module(module)
    pairs = sorted(set().union(*map(private_names, needed(package))))
    imports = {f"{owner}.{name}": imported_without(package, owner, name) for owner, name in pairs}
    print(json.dumps({"imports": imports, "bound elsewhere": private_names_bound_elsewhere(package)}))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
