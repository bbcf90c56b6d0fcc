"""What modules hold: parameters and buffers identical on all ranks, state dicts, the memory of tensors."""

from dist_utils.module_state.storage import alloc_storage, data_ptr_allocated, free_storage
from dist_utils.module_state.sync import sync_module_states, sync_params_and_buffers
from dist_utils.module_state.tree import get_root_modules, replace_by_prefix

__all__ = [
    "alloc_storage",
    "data_ptr_allocated",
    "free_storage",
    "get_root_modules",
    "replace_by_prefix",
    "sync_module_states",
    "sync_params_and_buffers",
]
