"""The public surface of modules in comparable form: ``python public_surface.py MODULE ...`` prints it."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator

Surface = dict[str, "list[tuple[str, int, bool]] | None"]
"""By name: each parameter's name, kind and whether it is optional; None if the object is not callable."""

# In the order of their numbers, which are stored in JSON.
KINDS = [
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.KEYWORD_ONLY,
    inspect.Parameter.VAR_KEYWORD,
]


def surface(modules: list[str]) -> Surface:
    """Return the names in ``__all__`` of ``modules``, and the public members of classes among them."""
    return dict(pair for name in modules for pair in _names_of(name))


def broken_calls(old: Surface, new: Surface) -> list[str]:
    """Return names and calls that work with the old surface but not with the new one."""
    wrong = [f"{name} is gone" for name in old if name not in new]
    for name, then in old.items():
        if then is not None and (now := new.get(name)) is not None:
            before, after = _signature(then), _signature(now)
            if not all(_fits(call, before, after) for call in _calls(before)):
                wrong.append(f"{name}{before} became {after}")
    return wrong


def parameters(value: object) -> list[tuple[str, int, bool]] | None:
    """Return the entry of one value in :data:`Surface`."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return None
    try:
        found = inspect.signature(value).parameters.values()
    except ValueError:  # an exception without an __init__ of its own
        return None
    return [(one.name, int(one.kind), one.default is not one.empty) for one in found]


def _names_of(module_name: str) -> Iterator[tuple[str, list[tuple[str, int, bool]] | None]]:
    module = importlib.import_module(module_name)
    package = module_name.split(".", maxsplit=1)[0]
    for name in module.__all__:
        value, path = getattr(module, name), f"{module_name}.{name}"
        yield path, parameters(value)
        ours = [part for part in getattr(value, "__mro__", []) if part.__module__.split(".")[0] == package]
        for part in reversed(ours):  # a class's own members come last and override
            for member in {*vars(part), *getattr(part, "__dataclass_fields__", {})}:
                if not member.startswith("_"):
                    yield f"{path}.{member}", parameters(vars(part).get(member))


def _signature(parameters: list[tuple[str, int, bool]]) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(name, KINDS[kind], default=None if optional else inspect.Parameter.empty)
            for name, kind, optional in parameters
        ]
    )


Call = tuple[list[str], dict[str, str]]


def _calls(signature: inspect.Signature) -> Iterator[Call]:
    # All by position, all by name, and only the required ones. Each value is the name of its parameter.
    for by_position, needed_only in ((True, False), (False, False), (True, True)):
        args, kwargs = list[str](), dict[str, str]()
        for one in signature.parameters.values():
            if needed_only and (
                one.default is not one.empty or one.kind in {one.VAR_POSITIONAL, one.VAR_KEYWORD}
            ):
                continue
            if one.kind is one.POSITIONAL_ONLY or (by_position and one.kind is one.POSITIONAL_OR_KEYWORD):
                args.append(one.name)
            elif one.kind is one.VAR_POSITIONAL:
                args += ["more"] * by_position
            else:
                kwargs[f"other_{one.name}" if one.kind is one.VAR_KEYWORD else one.name] = one.name
        yield args, kwargs


def _fits(call: Call, old: inspect.Signature, new: inspect.Signature) -> bool:
    args, kwargs = call
    try:
        return new.bind(*args, **kwargs).arguments == old.bind(*args, **kwargs).arguments
    except TypeError:
        return False


if __name__ == "__main__":
    json.dump(surface(sys.argv[1:]), sys.stdout)
