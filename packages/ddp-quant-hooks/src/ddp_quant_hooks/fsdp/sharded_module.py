"""The modules of a model that ``fully_shard`` was applied to, with FSDP's own records of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddp_quant_hooks.feedback.names import without_wrappers
from dist_utils.torch_compat import private

_PURPOSE = "few bits under fully_shard"


class ShardedModule(NamedTuple):
    """A module that ``fully_shard`` was applied to, with its own parameters.

    Most of it has no public name up to torch 2.15.

    Attributes:
        name: The name of the module in the model; ``"(model)"`` for the model itself.
        module: The module.
        group: FSDP's own record of its parameters.
    """

    name: str
    module: Any
    group: Any

    @property
    def replicated(self) -> bool:
        """Whether FSDP averages over several shard groups itself, on a mesh for HSDP or for replicas."""
        return getattr(self.group.mesh_info, "replicate_process_group", None) is not None

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold its shards; ``None`` where it is only replicated."""
        return getattr(self.group.mesh_info, "shard_process_group", None)

    @property
    def shard_ranks(self) -> list[int]:
        """The global ranks that hold its shards; none where it is only replicated."""
        return [] if self.shard_group is None else dist.get_process_group_ranks(self.shard_group)

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """The shapes of its unsharded parameters, by their names in their modules."""
        return [
            (private(parameter, "_module_info", _PURPOSE).param_name, tuple(parameter.sharded_param.shape))
            for parameter in self.group.fsdp_params
        ]

    @property
    def mesh_groups(self) -> list[dist.ProcessGroup]:
        """This rank's groups in the meshes of its parameters: of shards, replicas and tensor parallelism."""
        meshes = dict.fromkeys(parameter.sharded_param.device_mesh for parameter in self.group.fsdp_params)
        return [mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)]

    @property
    def places(self) -> list[str]:
        """This rank's coordinates in the meshes of its parameters, including those of tensor parallelism."""
        meshes = [parameter.sharded_param.device_mesh for parameter in self.group.fsdp_params]
        return sorted({f"{tuple(mesh.get_coordinate() or ())} of {tuple(mesh.shape)}" for mesh in meshes})

    @property
    def parameter_ids(self) -> set[int]:
        """The ``id`` of everything that stands for one of its parameters, sharded or gathered."""
        forms = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
        return {id(getattr(parameter, form, None)) for parameter in self.group.fsdp_params for form in forms}

    @property
    def trained(self) -> list[tuple[int, torch.Size]]:
        """The numbers of the parameters that need gradients, and the shape of a shard of each."""
        return [
            (number, parameter.padded_sharded_param_size)
            for number, parameter in enumerate(self.group.fsdp_params)
            if parameter.sharded_param.requires_grad
        ]

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups that reduce its gradients now: of its shards, and of their replicas."""
        names = ["shard_process_group", *(["replicate_process_group"] if self.group.all_reduce_grads else [])]
        return [getattr(self.group.mesh_info, name) for name in names if hasattr(self.group.mesh_info, name)]

    @property
    def gathered_dtypes(self) -> list[torch.dtype]:
        """The dtype in which each of its parameters is gathered."""
        policies = [private(parameter, "mp_policy", _PURPOSE) for parameter in self.group.fsdp_params]
        exact = [parameter.sharded_param.dtype for parameter in self.group.fsdp_params]
        return [
            policy.param_dtype or dtype if dtype.is_floating_point else dtype
            for policy, dtype in zip(policies, exact, strict=True)
        ]

    @property
    def has_divide_factor(self) -> bool:
        """Whether the sum of gradients is divided by something else than the number of ranks."""
        older = getattr(self.group, "reduce_scatter_divide_factor", None)  # its name before torch 2.8
        return getattr(self.group, "gradient_divide_factor", older) is not None

    def refuse_several_groups(self) -> None:
        """Raise ``ValueError`` if it has several groups of parameters, each with a mesh of its own."""
        if len(_groups_of(self.module)) > 1:
            raise ValueError(
                f"module {self.name!r} has several groups of parameters, which FSDP gives no hooks"
            )

    def collective(self, record: str) -> Any:
        """Return what FSDP calls for it, by the name in FSDP's record."""
        return private(self.group, record, _PURPOSE)


def _groups_of(module: Any) -> list[Any]:
    """Return FSDP's records of a module's parameters: one, but where ``fully_shard`` made several meshes."""
    state = private(module, "_get_fsdp_state", _PURPOSE)()
    several = getattr(state, "_fsdp_param_groups", None)
    return several or [private(state, "_fsdp_param_group", _PURPOSE)]  # all that torch 2.9 has


def sharded_modules(model: torch.nn.Module, name: str, method: str) -> list[ShardedModule]:
    """Return the modules that ``fully_shard`` was applied to and that have parameters, in the model's order.

    Modules that were given to one ``fully_shard`` call together count as one, with the first one's name.
    Names are those without the wrappers of ``torch.compile`` and of checkpoints.

    Raises:
        TypeError: The model is not a module.
        MissingTorchFeatureError: This torch's FSDP has no such method.
        ValueError: There is none.
    """
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 - takes a second, and few programs need it

    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    private(FSDPModule, method, name)
    found: dict[int, ShardedModule] = {}
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule):
            group = _groups_of(module)[0]
            found.setdefault(id(group), ShardedModule(without_wrappers(path) or "(model)", module, group))
    modules = [module for module in found.values() if module.group is not None]
    if not modules:
        raise ValueError("fully_shard was applied neither to the model nor to a module in it")
    return modules
