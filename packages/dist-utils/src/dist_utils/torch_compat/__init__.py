"""What two or more packages need of torch beyond its public names: a small surface that siblings may rely on.

What differs between torch versions is chosen by feature (does the name exist?), never by comparing versions.
Private names are looked up when they are used, by :func:`private`: a torch that lacks one breaks only the
function that needs it, which raises :class:`MissingTorchFeatureError`. What one package alone needs of torch
is in that package, by the same function.
"""

from dist_utils.torch_compat.backward import (
    after_backward,
    before_end_of_backward,
    graph_task_id,
    in_final_callback,
    inside_backward,
    inside_nested_backward,
    surrounding_nodes,
)
from dist_utils.torch_compat.execution import (
    every_thread,
    flushes_denormals,
    profiler_range,
    tensor_version,
    transformed_as,
)
from dist_utils.torch_compat.groups import (
    GROUPS_END_WITHOUT_GIL,
    GradBucket,
    all_gather_single,
    default_group_timeout,
    default_store,
    group_timeout,
    reduce_scatter_single,
    traceable_collective,
)
from dist_utils.torch_compat.private_names import MissingTorchFeatureError, private

__all__ = [
    "GROUPS_END_WITHOUT_GIL",
    "GradBucket",
    "MissingTorchFeatureError",
    "after_backward",
    "all_gather_single",
    "before_end_of_backward",
    "default_group_timeout",
    "default_store",
    "every_thread",
    "flushes_denormals",
    "graph_task_id",
    "group_timeout",
    "in_final_callback",
    "inside_backward",
    "inside_nested_backward",
    "private",
    "profiler_range",
    "reduce_scatter_single",
    "surrounding_nodes",
    "tensor_version",
    "traceable_collective",
    "transformed_as",
]
