"""Containers of tensors: their contents are changed, moved or found, and their types are kept."""

from dist_utils.containers.apply import apply_to_tensors
from dist_utils.containers.call_arguments import cast_forward_inputs, pack_kwargs, unpack_kwargs
from dist_utils.containers.device_moves import recursive_to, to_kwargs
from dist_utils.containers.kinds import register_container

__all__ = [
    "apply_to_tensors",
    "cast_forward_inputs",
    "pack_kwargs",
    "recursive_to",
    "register_container",
    "to_kwargs",
    "unpack_kwargs",
]
