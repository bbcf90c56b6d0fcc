"""Rename the prefix of a state dict's keys, in place."""

from __future__ import annotations

from typing import Any, Literal

__all__ = ["replace_by_prefix"]


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
    way; there, a module replaces its former wrapper.

    Args:
        state_dict: What ``module.state_dict()`` returned, or any dictionary.
        old_prefix: With its dot, as in ``"module."``. ``""`` puts ``new_prefix`` before every key.
        new_prefix: With its dot; ``""`` to remove ``old_prefix``.
        on_collision: What to do if a new key is the key of an entry that is not renamed, or a module gets the
            name of one with another version: ``"raise"``, ``"overwrite"`` what is there, or ``"keep"`` it and
            drop what is renamed.

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
    key_clashes = {old for old, new in keys.items() if new in state_dict and new not in keys}
    metadata = getattr(state_dict, "_metadata", {})
    modules = {
        name: (new_prefix + _dotted(name)[len(old_prefix) :]).removesuffix(".")
        for name in metadata
        if _dotted(name).startswith(old_prefix)
    }
    # A module may replace its former wrapper; another module only if both have the same version.
    module_clashes = {
        old
        for old, new in modules.items()
        if new in metadata
        and new not in modules
        and metadata[new] != metadata[old]
        and not old.startswith(_dotted(new))
    }
    if on_collision == "raise":
        for what, names, clashes in (("key", keys, key_clashes), ("version of", modules, module_clashes)):
            if clashes:
                old = min(clashes)
                raise ValueError(
                    f"{what} {old!r} would become {names[old]!r}, which is there already (as are "
                    f"{len(clashes) - 1} others): see on_collision"
                )
    renamed = _renamed(state_dict, keys, key_clashes, keep=on_collision == "keep")
    state_dict.clear()
    state_dict.update(renamed)
    if modules:
        # A new object: copies of a state dict, as load_state_dict makes them, share the old one.
        new_metadata = type(metadata)()
        new_metadata.update(_renamed(metadata, modules, module_clashes, keep=on_collision == "keep"))
        state_dict._metadata = new_metadata  # type: ignore[attr-defined] # noqa: SLF001 - no other way


def _dotted(module: str) -> str:
    """Return the prefix of a module's keys. The root's name is empty."""
    return f"{module}." if module else ""


def _renamed(
    mapping: dict[Any, Any], names: dict[Any, str], clashes: set[Any], *, keep: bool
) -> dict[Any, Any]:
    dropped = clashes if keep else set()
    replaced = {new for old, new in names.items() if new not in names and old not in dropped}
    return {
        names.get(key, key): value
        for key, value in mapping.items()
        if key not in dropped and key not in replaced
    }
