"""Operators that are linear in one tensor, and that autograd, ``torch.func`` and compilers see everywhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

# The mode in which AOTAutograd records a graph.
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from dist_utils.torch_compat import private

__all__ = ["linear_operator"]

_PURPOSE = "collectives under torch.compile, or in batches of gradients"


def linear_operator(
    name: str,
    parameters: str,
    compute: Callable[..., torch.Tensor],
    transposed: Callable[..., Sequence[Any]],
) -> Callable[..., torch.Tensor]:
    """Make an operator that is linear in one tensor, and that autograd and ``torch.func`` see everywhere.

    Dynamo records it in its graph as it is, so that every transform that is traced around it applies its
    rules: reverse and forward mode of any order, and vmap in any nesting. For compilers, AOTAutograd records
    what ``compute`` runs instead. An ``autograd.Function`` is taken apart by Dynamo, which knows its backward
    of first order only; ``torch.library.register_autograd`` is refused by ``torch.func``, and has no forward
    mode. Once they have what is missing, either of them can replace this.

    Args:
        name: With a namespace, as in ``"namespace::operator"``, new in this process.
        parameters: What follows the tensor in the operator's schema, as in ``"str kind, SymInt[] splits"``.
        compute: ``(tensor, *arguments)`` -> result, a new tensor; of operators that can be traced. Extra
            dimensions at the tensor's end are a batch, which it must not touch.
        transposed: ``(*arguments)`` -> the arguments of the transposed map.
    """
    namespace, _, short = name.partition("::")
    library: Any = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(f"{short}(Tensor x, {parameters}) -> Tensor")
    operator: Any = getattr(getattr(torch.ops, namespace), short).default

    @functools.cache
    def single_level() -> Any:
        base: Any = private("torch.autograd.function", "_SingleLevelFunction", _PURPOSE)

        class Linear(base):  # type: ignore[misc] # torch's class
            """The operator at one level of ``torch.func``: what is below it is up to the levels below."""

            @staticmethod
            def forward(ctx: Any, x: torch.Tensor, keys: Any, *arguments: Any) -> torch.Tensor:
                ctx.arguments = arguments
                below = keys & private("torch._C", "_after_autograd_keyset", _PURPOSE)
                forward_mode = private("torch.autograd.forward_ad", "_set_fwd_grad_enabled", _PURPOSE)
                with (
                    private("torch._C", "_AutoDispatchBelowAutograd", _PURPOSE)(),
                    torch.enable_grad(),  # for the levels below
                    forward_mode(True),
                ):
                    result: torch.Tensor = operator.redispatch(below, x, *arguments)
                return result

            @staticmethod
            def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
                nothing = (None,) * (1 + len(ctx.arguments))
                return operator(cotangent, *transposed(*ctx.arguments)), *nothing

            @staticmethod
            def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
                result: torch.Tensor = operator(tangent, *ctx.arguments)
                return result

        return Linear

    def differentiable(keys: Any, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        one_level = private("torch._functorch.utils", "enable_single_level_autograd_function", _PURPOSE)
        with one_level():
            result: torch.Tensor = single_level().apply(x, keys, *arguments)
        return result

    def batched(
        info: Any,  # noqa: ARG001
        in_dims: tuple[int | None, ...],
        x: torch.Tensor,
        *arguments: Any,
    ) -> tuple[torch.Tensor, int]:
        result = operator(x.movedim(cast("int", in_dims[0]), -1), *arguments)
        return result, result.ndim - 1

    def traced(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> torch.Tensor:
        del func, types, kwargs
        with mode:
            return compute(*args)

    library.impl(operator, compute, "CompositeExplicitAutograd")
    library.impl(operator, differentiable, "Autograd", with_keyset=True)
    torch.library.register_fake(name, compute, lib=library)
    torch.library.register_vmap(name, batched, lib=library)
    torch.library.register_torch_dispatch(name, ProxyTorchDispatchMode, traced, lib=library)
    _OPERATORS.append(library)
    return cast("Callable[..., torch.Tensor]", operator)


_OPERATORS: list[torch.library.Library] = []
"""Kept: an operator lives as long as its library."""
