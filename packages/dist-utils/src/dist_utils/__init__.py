"""Public versions of torch.distributed.utils (containers, storage, module sync), and ordered jobs."""

from dist_utils.checks import p_assert
from dist_utils.containers.arguments import (
    cast_forward_inputs,
    pack_kwargs,
    recursive_to,
    to_kwargs,
    unpack_kwargs,
)
from dist_utils.containers.kinds import register_container
from dist_utils.containers.walk import apply_to_tensors
from dist_utils.module_state.replicas import require_same_on_all_ranks
from dist_utils.module_state.storage import alloc_storage, data_ptr_allocated, free_storage
from dist_utils.module_state.sync import sync_module_states, sync_params_and_buffers
from dist_utils.module_state.tree import get_root_modules, replace_by_prefix
from dist_utils.process_groups.agreement import AgreementError, require_same_terms
from dist_utils.process_groups.groups import GroupLike, global_rank, group_rank, resolve_group
from dist_utils.process_groups.matching_tensors import (
    TensorMismatchError,
    verify_param_shape_across_processes,
)
from dist_utils.process_groups.messages import start_messages
from dist_utils.process_groups.ordered_worker import OrderedWorker

__all__ = [
    "AgreementError",
    "GroupLike",
    "OrderedWorker",
    "TensorMismatchError",
    "alloc_storage",
    "apply_to_tensors",
    "cast_forward_inputs",
    "data_ptr_allocated",
    "free_storage",
    "get_root_modules",
    "global_rank",
    "group_rank",
    "p_assert",
    "pack_kwargs",
    "recursive_to",
    "register_container",
    "replace_by_prefix",
    "require_same_on_all_ranks",
    "require_same_terms",
    "resolve_group",
    "start_messages",
    "sync_module_states",
    "sync_params_and_buffers",
    "to_kwargs",
    "unpack_kwargs",
    "verify_param_shape_across_processes",
]

__version__ = "1.4.0"
