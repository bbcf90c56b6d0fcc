"""The only place that knows how torch versions differ, and that uses private names of torch.

Everything is chosen by feature (does the name exist?), never by comparing versions.
"""

from dist_utils.torch_compat.backward import (
    after_backward,
    after_surrounding_backward,
    before_end_of_backward,
    graph_task_id,
    in_final_callback,
    inside_backward,
    inside_nested_backward,
    outermost_root,
)
from dist_utils.torch_compat.collectives import (
    all_gather_single,
    functional_all_gather,
    functional_all_reduce,
    functional_all_to_all_single,
    reduce_scatter_single,
    start_all_reduce,
    traceable_collectives,
)
from dist_utils.torch_compat.execution import (
    compiling_refused,
    flushes_denormals,
    import_compiler,
    is_accelerator,
    never_traced,
)
from dist_utils.torch_compat.groups import (
    GROUPS_END_WITHOUT_GIL,
    default_group_timeout,
    default_store,
    group_timeout,
    new_named_group,
)
from dist_utils.torch_compat.models import (
    GradBucket,
    comm_hooks,
    hands_over_buckets,
    parameter_names,
    register_comm_hook,
    replicated_ddp,
)
from dist_utils.torch_compat.operators import OperatorWatch, linear_operator
from dist_utils.torch_compat.optimizers import (
    FUSED_CHECK,
    mark_stepped,
    step_post_hooks,
    step_pre_hooks,
    step_without_hooks,
    without_step_hooks,
)
from dist_utils.torch_compat.profiling import every_thread, profiler_range
from dist_utils.torch_compat.sharding import (
    ShardedModule,
    reduce_scatter_base,
    require_fsdp_method,
    sharded_modules,
)
from dist_utils.torch_compat.tensors import (
    copy_flat,
    function_transforms_active,
    gradient_marks,
    is_batched_gradient,
    keep_versions,
    outside_function_transforms,
    saved_tensor_hooks,
    tensor_version,
    tensor_versions,
    transformed_as,
)

__all__ = [
    "FUSED_CHECK",
    "GROUPS_END_WITHOUT_GIL",
    "GradBucket",
    "OperatorWatch",
    "ShardedModule",
    "after_backward",
    "after_surrounding_backward",
    "all_gather_single",
    "before_end_of_backward",
    "comm_hooks",
    "compiling_refused",
    "copy_flat",
    "default_group_timeout",
    "default_store",
    "every_thread",
    "flushes_denormals",
    "function_transforms_active",
    "functional_all_gather",
    "functional_all_reduce",
    "functional_all_to_all_single",
    "gradient_marks",
    "graph_task_id",
    "group_timeout",
    "hands_over_buckets",
    "import_compiler",
    "in_final_callback",
    "inside_backward",
    "inside_nested_backward",
    "is_accelerator",
    "is_batched_gradient",
    "keep_versions",
    "linear_operator",
    "mark_stepped",
    "never_traced",
    "new_named_group",
    "outermost_root",
    "outside_function_transforms",
    "parameter_names",
    "profiler_range",
    "reduce_scatter_base",
    "reduce_scatter_single",
    "register_comm_hook",
    "replicated_ddp",
    "require_fsdp_method",
    "saved_tensor_hooks",
    "sharded_modules",
    "start_all_reduce",
    "step_post_hooks",
    "step_pre_hooks",
    "step_without_hooks",
    "tensor_version",
    "tensor_versions",
    "traceable_collectives",
    "transformed_as",
    "without_step_hooks",
]
