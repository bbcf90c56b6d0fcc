"""Models under ``fully_shard`` (FSDP2): what it keeps about a module, and where its reduced gradients go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dist_utils.torch_compat import MissingTorchFeatureError, private

__all__ = ["ShardedModule", "reduce_scatter_base", "require_fsdp_method", "sharded_modules"]

_PURPOSE = "averaging gradients under fully_shard"

_WAITING_SUM = "_partial_reduce_output"

_AVERAGED_DTYPES = (torch.float32, torch.bfloat16)
"""What FSDP averages while it reduces. Other dtypes are divided before and afterwards."""


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""What ``torch.compile`` and ``checkpoint_wrapper`` put into the names of modules."""


def reduce_scatter_base() -> Any:
    """Return the base of what ``FSDPModule.set_custom_reduce_scatter`` takes.

    No public name up to torch 2.15.

    Raises:
        MissingTorchFeatureError: torch has no such class.
    """
    return private(  # not in torch 2.6
        "torch.distributed.fsdp._fully_shard._fsdp_api", "ReduceScatter", "quantize_reduce_scatter"
    )


class ShardedModule:
    """A module that ``fully_shard`` was applied to, with its own parameters.

    Most of it has no public name up to torch 2.15.

    Args:
        name: The name of the module in the model.
        module: The module.
        group: FSDP's own record of its parameters.
    """

    def __init__(self, name: str, module: Any, group: Any) -> None:
        self.name = name
        self.module = module
        self._group = group

    @property
    def replicated(self) -> bool:
        """Whether FSDP averages over several shard groups itself, on a mesh for HSDP or for replicas."""
        return hasattr(self._group.mesh_info, "replicate_process_group")

    @property
    def shard_ranks(self) -> list[int]:
        """The global ranks that hold its shards; none where it is only replicated."""
        group = getattr(self._group.mesh_info, "shard_process_group", None)
        return [] if group is None else dist.get_process_group_ranks(group)

    @property
    def shard_of(self) -> tuple[int, int]:
        """The index of this rank's shard, and the number of shards."""
        ranks = self.shard_ranks
        return (ranks.index(dist.get_rank()), len(ranks)) if ranks else (0, 1)

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """The shapes of its unsharded parameters, by their names in their modules."""
        return [
            (private(kept, "_module_info", _PURPOSE).param_name, tuple(kept.sharded_param.shape))
            for kept in self._group.fsdp_params
        ]

    @property
    def places(self) -> list[str]:
        """This rank's coordinates in the meshes of its parameters, including those of tensor parallelism."""
        meshes = [kept.sharded_param.device_mesh for kept in self._group.fsdp_params]
        places = [f"{tuple(mesh.get_coordinate() or ())} of {tuple(mesh.shape)}" for mesh in meshes]
        return list(dict.fromkeys(places))

    @property
    def all_reduce_wanted(self) -> bool:
        """The value from ``set_requires_all_reduce``, which FSDP itself uses on meshes for HSDP only."""
        return bool(self._group.all_reduce_grads)

    @property
    def divide_factor(self) -> float | None:
        """What the sum of gradients is divided by, if that is not the number of ranks."""
        if hasattr(self._group, "gradient_divide_factor"):
            factor: float | None = self._group.gradient_divide_factor
        else:
            factor = getattr(self._group, "reduce_scatter_divide_factor", None)
        return factor

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Its sharded parameters that require a gradient."""
        sharded = [kept.sharded_param for kept in self._group.fsdp_params]
        return [parameter for parameter in sharded if parameter.requires_grad]

    @property
    def parameter_ids(self) -> set[int]:
        """The ``id`` of everything that stands for one of its parameters, sharded or gathered."""
        forms = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
        return {id(getattr(kept, form, None)) for kept in self._group.fsdp_params for form in forms}

    @property
    def waiting_sum(self) -> torch.Tensor | None:
        """Reduced gradients that wait for a later micro-batch, kept where FSDP keeps them on meshes for HSDP.

        ``FSDPModule.reset_iter_state`` clears them, and so does every other reduction.
        """
        waiting: torch.Tensor | None = private(self._group, _WAITING_SUM, _PURPOSE)
        return waiting

    @waiting_sum.setter
    def waiting_sum(self, waiting: torch.Tensor | None) -> None:
        private(self._group, _WAITING_SUM, _PURPOSE)  # nobody would read an attribute that is new
        setattr(self._group, _WAITING_SUM, waiting)

    @property
    def takes_gradients(self) -> bool:
        """Whether a post-accumulate hook takes the gradient of one of its parameters."""
        return any(map(_has_post_accumulate_hook, self.parameters))

    @property
    def all_reduce_hook(self) -> Callable[[torch.Tensor], None] | None:
        """The hook that gets reduced gradients."""
        hook: Callable[[torch.Tensor], None] | None = private(self._group, "_all_reduce_hook", _PURPOSE)
        return hook

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None] | None) -> None:
        """Set or remove that hook."""
        self.module.set_all_reduce_hook(hook)

    @property
    def reduce_scatter(self) -> Any:
        """What reduces and scatters gradients."""
        return private(self._group, "_reduce_scatter_comm", "quantize_reduce_scatter")

    def set_reduce_scatter(self, reduce_scatter: Any) -> None:
        """Replace what reduces and scatters gradients."""
        self.module.set_custom_reduce_scatter(reduce_scatter)

    def gradients_will_be(self, reduced: torch.Tensor) -> bool:
        """Return, in the all-reduce hook, whether ``reduced`` may still be written until backward ends.

        It may if gradients become views of it, and FSDP no longer reads or changes it.
        """
        if reduced.dtype not in _AVERAGED_DTYPES or getattr(
            self._group, "force_sum_reduction_for_comms", False
        ):
            return False
        return not any(
            kept.offload_to_cpu
            or kept.sharded_param.grad is not None
            or _has_post_accumulate_hook(kept.sharded_param)
            or kept.sharded_param.dtype != reduced.dtype
            or getattr(kept, "sharded_grad_dtype", None) not in (None, reduced.dtype)
            for kept in self._group.fsdp_params
            if kept.sharded_param.requires_grad
        )

    def zero_gradients_in(self, reduced: torch.Tensor) -> None:
        """Set existing gradients that are views of ``reduced`` to zero."""
        memory = reduced.untyped_storage().data_ptr()
        for parameter in self.parameters:
            gradient: Any = parameter.grad
            if gradient is not None and gradient.to_local().untyped_storage().data_ptr() == memory:
                gradient.zero_()


def _has_post_accumulate_hook(parameter: torch.Tensor) -> bool:
    return bool(private(parameter, "_post_accumulate_grad_hooks", _PURPOSE))


def require_fsdp_method(method: str) -> None:
    """Return if ``FSDPModule`` has this method.

    Raises:
        MissingTorchFeatureError: It does not, or there is no such class.
    """
    if not hasattr(_fsdp_module(), method):
        raise MissingTorchFeatureError(
            f"torch {torch.__version__} has no FSDPModule.{method}: a newer one is needed"
        )


def sharded_modules(model: torch.nn.Module) -> list[ShardedModule]:
    """Return the modules that ``fully_shard`` was applied to and that have parameters, in the model's order.

    Modules that were given to one ``fully_shard`` call together count as one, with the first one's name.
    Names are those without the wrappers of ``torch.compile`` and of checkpoints.

    Raises:
        ValueError: A module has several groups of parameters, each with a mesh of its own.
    """
    found: dict[int, ShardedModule] = {}
    for path, module in model.named_modules():
        if not isinstance(module, _fsdp_module() or ()):
            continue
        name = ".".join(part for part in path.split(".") if part not in _WRAPPERS)
        groups = _groups_of(module)
        if len(groups) > 1:
            raise ValueError(
                f"the module {name!r} has several groups of parameters with meshes of their own "
                "(shard_placement_fn), which FSDP gives no hooks"
            )
        for group in groups:
            found.setdefault(id(group), ShardedModule(name, module, group))
    return list(found.values())


def _fsdp_module() -> type | None:
    from torch.distributed import fsdp  # noqa: PLC0415 - takes a second, and few programs need it

    return getattr(fsdp, "FSDPModule", None)


def _groups_of(module: Any) -> list[Any]:
    state = private(module, "_get_fsdp_state", _PURPOSE)()
    several: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return several
    only = private(state, "_fsdp_param_group", _PURPOSE)
    return [] if only is None else [only]
