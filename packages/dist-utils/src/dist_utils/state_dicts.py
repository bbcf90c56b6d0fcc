"""Keys of state dicts: another prefix, in place."""

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
    """Replace a prefix of the keys of a state dict, in place and without a change of their order.

    All keys are renamed at once, so a new key may be the old key of another entry. Keys that are no
    strings stay. The state dict's ``_metadata`` (the versions of its modules) is renamed alike; there, a
    renamed module takes the place of its former wrapper.

    Args:
        state_dict: What ``module.state_dict()`` returned, or any dictionary.
        old_prefix: With its dot, as in ``"module."``. ``""`` puts ``new_prefix`` before every key.
        new_prefix: With its dot; ``""`` to take ``old_prefix`` away.
        on_collision: If a new key is the key of an entry that is not renamed: ``"raise"``,
            ``"overwrite"`` that entry, or ``"keep"`` it and drop the renamed one.

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
    new_keys = {
        key: new_prefix + key[len(old_prefix) :]
        for key in state_dict
        if isinstance(key, str) and key.startswith(old_prefix)
    }
    collisions = {new: old for old, new in new_keys.items() if new in state_dict and new not in new_keys}
    if collisions and on_collision == "raise":
        new, old = next(iter(collisions.items()))
        raise ValueError(
            f"{old!r} would become {new!r}, which the state dict has already "
            f"({len(collisions)} such keys): see on_collision"
        )
    dropped = set(collisions if on_collision == "overwrite" else collisions.values())
    renamed = {new_keys.get(key, key): value for key, value in state_dict.items() if key not in dropped}
    metadata = getattr(state_dict, "_metadata", None)

    state_dict.clear()
    state_dict.update(renamed)
    if metadata is not None:
        _rename_modules(metadata, old_prefix, new_prefix)


def _rename_modules(metadata: dict[str, Any], old_prefix: str, new_prefix: str) -> None:
    """Rename module names, which have no dot at their end; the root's is empty."""
    kept, renamed = {}, {}
    for name, value in metadata.items():
        prefix = f"{name}." if name else ""
        if prefix.startswith(old_prefix):
            renamed[(new_prefix + prefix[len(old_prefix) :]).removesuffix(".")] = value
        else:
            kept[name] = value
    metadata.clear()
    metadata.update(kept | renamed)
