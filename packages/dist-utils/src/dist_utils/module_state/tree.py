"""The tree of modules: which contain which, and the prefixes that it gives to the keys of a state dict."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

import torch


def get_root_modules(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return those modules that are inside none of the others, in their order.

    Args:
        modules: Any modules, related or not.

    Cost:
        One walk through every module's descendants.

    Source:
        ``torch.distributed.utils._get_root_modules``.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1))
        >>> get_root_modules([model[0], model]) == [model]
        True
    """
    inside = {descendant for module in modules for descendant in module.modules() if descendant is not module}
    return [module for module in modules if module not in inside]


def replace_by_prefix(
    state_dict: dict[Any, Any],
    old_prefix: str,
    new_prefix: str,
    *,
    on_collision: Literal["raise", "overwrite", "keep"] = "raise",
) -> None:
    """Replace a prefix of the keys of a state dict, in place and without changing their order.

    All keys are renamed at once, so a new key may be the old key of another entry. Keys that are not strings
    stay. The state dict gets a new ``_metadata`` (the versions of its modules) with names renamed in the same
    way; there, a renamed module always replaces what has its new name, such as its former wrapper.

    Args:
        state_dict: What ``module.state_dict()`` returned, or any dictionary.
        old_prefix: With its dot, as in ``"module."``. ``""`` puts ``new_prefix`` before every key.
        new_prefix: With its dot; ``""`` to remove ``old_prefix``.
        on_collision: What to do if a new key is the key of an entry that is not renamed: ``"raise"``,
            ``"overwrite"`` what is there, or ``"keep"`` it and drop what is renamed.

    Raises:
        ValueError: The prefixes are equal, ``on_collision`` is none of the three, or keys collide. Then
            nothing has been changed.

    Source:
        ``torch.distributed.utils._replace_by_prefix``, which loses entries and leaves ``_metadata``.

    Example:
        >>> state_dict = {"module.weight": 1, "step": 2}
        >>> replace_by_prefix(state_dict, "module.", "")
        >>> state_dict
        {'weight': 1, 'step': 2}
    """
    if old_prefix == new_prefix:
        raise ValueError(f"old_prefix and new_prefix are both {old_prefix!r}")
    if on_collision not in ("raise", "overwrite", "keep"):
        raise ValueError(f"on_collision must be 'raise', 'overwrite' or 'keep', got {on_collision!r}")
    keys = {
        key: new_prefix + key[len(old_prefix) :]
        for key in state_dict
        if isinstance(key, str) and key.startswith(old_prefix)
    }
    metadata = getattr(state_dict, "_metadata", {})
    modules = {
        name: (new_prefix + _key_prefix(name)[len(old_prefix) :]).removesuffix(".")
        for name in metadata
        if _key_prefix(name).startswith(old_prefix)
    }
    clashes = {old for old, new in keys.items() if new in state_dict and new not in keys}
    if clashes and on_collision == "raise":
        old = min(clashes)
        raise ValueError(
            f"key {old!r} would become {keys[old]!r}, which is there already (as are "
            f"{len(clashes) - 1} others): see on_collision"
        )
    renamed = _rename(state_dict, keys, clashes if on_collision == "keep" else ())
    renamed_metadata = _rename(metadata, modules)
    state_dict.clear()
    state_dict.update(renamed)
    if modules:
        # A new object: copies of a state dict, as load_state_dict makes them, share the old one.
        new_metadata = type(metadata)()
        new_metadata.update(renamed_metadata)
        state_dict._metadata = new_metadata  # type: ignore[attr-defined] # noqa: SLF001 - no other way


def _key_prefix(module: str) -> str:
    """Return the prefix of a module's keys. The root's name is empty."""
    return f"{module}." if module else ""


def _rename(mapping: dict[Any, Any], names: dict[Any, str], dropped: Collection[Any] = ()) -> dict[Any, Any]:
    """Return ``mapping`` with new names, which replace others, and without what is dropped."""
    replaced = {new for old, new in names.items() if old not in dropped} - names.keys()
    return {
        names.get(key, key): value
        for key, value in mapping.items()
        if key not in dropped and key not in replaced
    }
