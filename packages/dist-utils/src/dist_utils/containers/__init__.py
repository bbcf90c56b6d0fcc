"""Containers of tensors: their contents are changed, moved or found, and their types are kept."""

from dist_utils.containers.arguments import (
    cast_forward_inputs,
    pack_kwargs,
    recursive_to,
    to_kwargs,
    unpack_kwargs,
)
from dist_utils.containers.kinds import register_container
from dist_utils.containers.walk import apply_to_tensors

__all__ = [
    "apply_to_tensors",
    "cast_forward_inputs",
    "pack_kwargs",
    "recursive_to",
    "register_container",
    "to_kwargs",
    "unpack_kwargs",
]
