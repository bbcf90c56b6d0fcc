"""Which optimizers may be overlapped: a reviewed list of torch's, and others by declaration."""

from __future__ import annotations

import inspect
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from ddp_optim_overlap.errors import ConfigError, UnsupportedGradientError
from ddp_optim_overlap.optimizers.partial_steps import parameters_of
from ddp_optim_overlap.optimizers.trial import refusal, require_passed_trial
from ddp_optim_overlap.passes.gradient_watch import tensor_versions

PER_PARAMETER = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
        "SparseAdam",
    }
)
"""Classes of ``torch.optim`` that step each parameter by itself, with ``foreach`` and ``fused``, too: all
but LBFGS.

Read in torch 2.6, 2.13 and 2.15. The exceptions are in :func:`require_step_per_parameter`.
"""

WITH_SPARSE_GRADIENTS = frozenset({"Adagrad", "SGD", "SparseAdam"})
"""Those that step with sparse gradients, too, without ``fused`` and ``weight_decay``."""

_declared: set[type[torch.optim.Optimizer]] = set()

_OptimizerClass = TypeVar("_OptimizerClass", bound=type[torch.optim.Optimizer])


def is_reviewed(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's class is exactly one of torch's that step per parameter."""
    kind = type(optimizer)
    of_torch = kind.__module__.startswith("torch.optim") and getattr(torch.optim, kind.__name__, None) is kind
    return of_torch and kind.__name__ in PER_PARAMETER


def declare_steps_per_parameter(optimizer_class: _OptimizerClass) -> _OptimizerClass:
    """Declare that a class of optimizers steps per parameter, so that its optimizers may be overlapped.

    The declaration says of ``step()``: what it does to a parameter depends only on the value, the gradient
    and the state of that parameter and on the options of its group. It does not depend on other parameters or
    their gradients, on the loss, on random numbers or on other ranks. It writes nothing but trained
    parameters and their state, and keeps no gradient there, only copies. Steps may be counted in each
    parameter's state, or in an option of its group that every call of ``step()`` sets alike.

    A short trial of every declared optimizer refuses what is plainly otherwise. What it cannot show, for
    example coupling that begins after a thousand steps, leads to wrong steps.

    Args:
        optimizer_class: A subclass of ``torch.optim.Optimizer``. Subclasses of it are not declared by this.

    Returns:
        The class, so that this is also a decorator.

    Raises:
        TypeError: It is not such a class.

    Example:
        >>> declare_steps_per_parameter(Lion)  # doctest: +SKIP
        >>> handle = overlap_optimizer(ddp, Lion(ddp.parameters()))  # doctest: +SKIP
    """
    given: Any = optimizer_class
    if not (isinstance(given, type) and issubclass(given, torch.optim.Optimizer)):
        raise TypeError(f"optimizer_class must be a subclass of torch.optim.Optimizer, got {given!r}")
    _declared.add(optimizer_class)
    return optimizer_class


def require_supported(
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    declared: bool,
    sparse: Mapping[torch.Tensor, str],
) -> None:
    """Raise unless some of the parameters of these optimizers can be stepped at a time.

    Args:
        optimizers: Not changed.
        declared: Whether the caller declares that they step per parameter.
        sparse: Parameters with sparse gradients, and their names.

    Raises:
        OverlapError: They cannot.
    """
    require_separate_memory(optimizers)
    for optimizer in optimizers:
        require_plain_step(optimizer)
        require_step_per_parameter(optimizer, declared=declared, sparse=sparse)


def require_plain_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless ``optimizer.step()`` can be called as it is, without a closure.

    Raises:
        UnsupportedOptimizerError: It cannot.
    """
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise refusal(f"{name}.step needs a closure, which evaluates the model again")
    require_plain_options(optimizer)
    on_instance = vars(optimizer).get("step")
    if on_instance is not None and _unwrapped(on_instance) is not _unwrapped(type(optimizer).step):
        raise refusal(
            f"step was replaced on this {name}, or compiled; that would not run for a part of the parameters"
        )


def require_plain_options(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an option asks for more than a step: options may be loaded later.

    Raises:
        UnsupportedOptimizerError: One does.
    """
    if any(group.get("differentiable") for group in optimizer.param_groups):
        name = type(optimizer).__name__
        raise refusal(f"{name} has differentiable=True: autograd would record its steps")


def require_separate_memory(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise if a step of one parameter would be, or count as, one of another, too.

    Raises:
        ConfigError: Parameters begin at the same address: buckets would change the order of their steps. Or
            they were sliced from one tensor: autograd takes a step of one for a change of all.
    """
    of_memory: defaultdict[tuple[torch.device, int], list[torch.Tensor]] = defaultdict(list)
    for one in dict.fromkeys(itertools.chain.from_iterable(map(parameters_of, optimizers))):
        if one.layout is torch.strided and one.numel() and not one.is_meta:
            of_memory[one.device, one.untyped_storage().data_ptr()].append(one)
    for together in of_memory.values():
        addresses = {one.data_ptr() for one in together}
        if len(addresses) < len(together) or (len(together) > 1 and _share_versions(together)):
            raise ConfigError(
                f"parameters share memory, the first of them of shape {tuple(together[0].shape)}: by "
                "buckets their steps come in another order, and autograd takes a step of one for a change of "
                "all, which backward() may still read. Let both places have one Parameter, make each of a "
                "clone() of its slice, or use the ordinary loop"
            )


def _share_versions(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a write into one of these tensors counts as one into another; counts one in each."""
    before = tensor_versions(tensors)
    torch.autograd.graph.increment_version(tensors)
    return [version + 1 for version in before] != tensor_versions(tensors)


def _unwrapped(step: Any) -> Any:
    """Return what wrappers, such as those of schedulers, call; a compiled function is no wrapper."""
    return inspect.unwrap(step, stop=_is_compiled)


def _is_compiled(step: Any) -> bool:
    # torch uses the same mark for functions that must not be compiled, such as some steps of its own.
    return hasattr(step, "_torchdynamo_orig_callable") and not getattr(step, "_torchdynamo_disable", False)


def require_step_per_parameter(
    optimizer: torch.optim.Optimizer, *, declared: bool, sparse: Mapping[torch.Tensor, str]
) -> None:
    """Raise unless the optimizer is known, or declared, to step per parameter.

    Args:
        optimizer: Not changed.
        declared: Whether the caller declares it, as :func:`declare_steps_per_parameter` does for a class.
        sparse: Parameters with sparse gradients, and their names.

    Raises:
        UnsupportedOptimizerError: It is neither, or is declared and does not pass the trial.
        UnsupportedGradientError: It is one of torch's, and cannot step with a sparse gradient.

    Cost:
        For a declared optimizer, that of the trial.
    """
    name = type(optimizer).__name__
    if is_reviewed(optimizer):
        _require_sparse_support(optimizer, sparse)
        _require_uncoupled_options(optimizer, sparse)
    elif declared or type(optimizer) in _declared:
        require_passed_trial(optimizer, sparse)
    else:
        raise refusal(
            f"{name} is not one of the optimizers of torch.optim that are known to step per parameter. If "
            "what it does to a parameter depends on nothing but that parameter, its gradient, its state and "
            "its group's options, declare that, by steps_per_parameter=True or, once for the class, "
            f"declare_steps_per_parameter({name}). Otherwise"
        )


def _require_sparse_support(optimizer: torch.optim.Optimizer, sparse: Mapping[torch.Tensor, str]) -> None:
    """Raise if one of torch's optimizers cannot step its parameters with sparse gradients."""
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        able = name in WITH_SPARSE_GRADIENTS and not (group.get("fused") or group.get("weight_decay"))
        found = [sparse[one] for one in group["params"] if one in sparse]
        if found and not able:
            raise UnsupportedGradientError(
                f"{name} cannot step {', '.join(found)}, whose gradient is sparse. Use SparseAdam for it, "
                "SGD or Adagrad without fused and weight_decay, or an embedding with sparse=False"
            )


def _require_uncoupled_options(optimizer: torch.optim.Optimizer, sparse: Mapping[torch.Tensor, str]) -> None:
    """Raise if one of torch's optimizers steps a parameter differently beside some others."""
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        stepped = [one for one in group["params"] if one.requires_grad]
        if name == "Adafactor" and group["eps"][0] is None and len({one.dtype for one in stepped}) > 1:
            raise refusal(
                "Adafactor takes its eps[0] from the first parameter of a group, also for those with other "
                "dtypes. Give it eps=(1e-7, 1e-3), for example, or each dtype a group of its own. Otherwise"
            )
        alike = {(type(one) in (torch.Tensor, torch.nn.Parameter), one.device.type) for one in stepped}
        chosen = group.get("foreach") is not None or group.get("fused")
        if len(alike) > 1 and not all(one.is_cpu for one in stepped) and not chosen:
            raise refusal(
                f"{name} chooses foreach by all parameters of a group, of which some are on other devices or "
                "of other classes. Give it foreach=True or foreach=False. Otherwise"
            )
        kinds = {one in sparse for one in stepped if not one.is_cpu}
        if name == "Adagrad" and len(kinds) > 1 and group["foreach"] is not False and not group.get("fused"):
            raise refusal(
                "Adagrad steps parameters with other operators if one of their group has a sparse gradient. "
                "Give it foreach=False, or those with sparse gradients a group of their own. Otherwise"
            )
