"""torch.distributed.utils in public: containers, storage, module sync; and ordered work on process groups."""

from dist_utils.agreement import TensorMismatchError, verify_param_shape_across_processes
from dist_utils.call_arguments import cast_forward_inputs, pack_kwargs, unpack_kwargs
from dist_utils.checks import p_assert
from dist_utils.containers import apply_to_tensors, register_container
from dist_utils.device_moves import recursive_to, to_kwargs
from dist_utils.messages import start_messages
from dist_utils.module_sync import sync_module_states, sync_params_and_buffers
from dist_utils.module_tree import get_root_modules
from dist_utils.ordered_worker import OrderedWorker
from dist_utils.process_groups import GroupLike, global_rank, group_rank, resolve_group
from dist_utils.state_dicts import replace_by_prefix
from dist_utils.storage import alloc_storage, data_ptr_allocated, free_storage
from dist_utils.terms import AgreementError, require_same_terms

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
    "require_same_terms",
    "resolve_group",
    "start_messages",
    "sync_module_states",
    "sync_params_and_buffers",
    "to_kwargs",
    "unpack_kwargs",
    "verify_param_shape_across_processes",
]

__version__ = "0.4.0"
