"""Operators that autograd and ``torch.func`` see everywhere, and a watch over all that run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

# With it an autograd function works on one level of torch.func; no public name up to torch 2.15.
from torch._functorch.utils import enable_single_level_autograd_function

# The mode in which AOTAutograd records a graph; no public name up to torch 2.15.
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

# The only way to see every operator that runs, C++ ones too; no public name up to torch 2.15.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["OperatorWatch", "linear_operator"]


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

    class Linear(torch.autograd.function._SingleLevelFunction):  # noqa: SLF001
        """The operator at one level of ``torch.func``: what is below it is up to the levels below."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, keys: Any, *arguments: Any) -> torch.Tensor:
            ctx.arguments = arguments
            below = keys & torch._C._after_autograd_keyset  # noqa: SLF001
            with (
                torch._C._AutoDispatchBelowAutograd(),  # noqa: SLF001
                torch.enable_grad(),  # for the levels below
                torch.autograd.forward_ad._set_fwd_grad_enabled(True),  # noqa: SLF001
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

    def differentiable(keys: Any, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        with enable_single_level_autograd_function():
            result: torch.Tensor = Linear.apply(x, keys, *arguments)  # type: ignore[attr-defined]
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


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context manager that calls a function with the name of every operator before this thread runs it.

    Args:
        notice: Gets names such as ``"c10d::allreduce_"``; its errors are raised where the operator is used.
    """

    def __init__(self, notice: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notice = notice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch instead of the operator."""
        del types
        self._notice(func.name())
        return func(*args, **(kwargs or {}))
