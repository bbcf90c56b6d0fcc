"""The linear maps, as autograd, transforms and compilers see them: every gradient here consists of them.

A collective that moves and adds numbers is a linear map of all ranks' inputs to all ranks' outputs. Its
gradient is the transposed map, another one of :data:`Kind`, whose transpose is the first one again. So one
autograd function gives gradients of any order. Nonlinear collectives are composed of these and of torch's own
operations.

For ``torch.func``, forward mode, ``torch.compile`` and ``make_fx`` the maps are one operator, too. An
``autograd.Function`` is taken apart by Dynamo, which knows its backward of first order only;
``torch.library.register_autograd`` is refused by ``torch.func``, and has no forward mode. Once they have what
is missing, either of them can replace the operator.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, cast

import torch

# Its mode records graphs, for AOTAutograd too.
from torch.fx.experimental import proxy_tensor

from dist_autograd_collectives import backend
from dist_autograd_collectives.maps import Map, Parts, Tensors, members
from dist_utils.torch_compat import private

_PURPOSE = "collectives under torch.func"
_COMPILED = "collectives under torch.compile, or in batches of gradients"


def function_transforms_active() -> bool:
    """Return whether a transform of ``torch.func`` is running.

    ``torch.autograd.Function`` chooses between its two implementations by it. No public name up to torch
    2.15.
    """
    return bool(private("torch._C", "_are_functorch_transforms_active", _PURPOSE)())


def is_recorded() -> bool:
    """Return whether what runs now becomes part of a graph: of ``torch.compile``, or of ``make_fx``."""
    return torch.compiler.is_compiling() or proxy_tensor.get_proxy_mode() is not None


def is_traced() -> bool:
    """Return whether something records or transforms what runs now, and must see one operator."""
    return is_recorded() or function_transforms_active()


def outside_transforms() -> contextlib.ExitStack:
    """Return a context for making and sending tensors as if neither ``torch.func`` nor ``make_fx`` ran.

    torch's own way to do that for ``torch.func`` has no public name up to torch 2.15.
    """
    stack = contextlib.ExitStack()
    if function_transforms_active():
        clear = private("torch._functorch.pyfunctorch", "temporarily_clear_interpreter_stack", _PURPOSE)
        stack.enter_context(clear())
    if not torch.compiler.is_compiling() and proxy_tensor.get_proxy_mode() is not None:
        stack.enter_context(proxy_tensor.disable_proxy_modes_tracing())
    return stack


def has_batch(tensors: Tensors) -> bool:
    """Return whether one is a batch of ``torch.autograd.grad(is_grads_batched=True)``.

    That is none of ``torch.func``: torch runs the operator once per gradient, seen by autograd. No public
    name up to torch 2.15.
    """
    is_batch = private("torch._C._functorch", "is_legacy_batchedtensor", _COMPILED)
    return any(map(is_batch, tensors))


def in_forward_mode() -> bool:
    """Return whether tensors may have tangents outside of ``torch.func``. No public name up to torch 2.15."""
    return bool(private("torch.autograd.forward_ad", "_current_level", "forward mode") >= 0)


def apply(tensors: Tensors, linear_map: Map, key: int, *, is_traced: bool) -> Tensors:
    """Apply a linear map, seen by autograd and by whatever transforms or traces.

    Args:
        tensors: What the map takes.
        linear_map: The map.
        key: What tells its messages from those of the group's other calls.
        is_traced: Whether something records or transforms the call.
    """
    # torch.compile may trace this part of a call that began outside.
    if is_traced or torch.compiler.is_compiling() or has_batch(tensors):
        # It takes and returns one tensor: separate parts are joined.
        joined = backend.join_parts(tensors, linear_map)
        return backend.separate_parts(_operator(joined, *_arguments(linear_map), key), linear_map)
    if in_forward_mode() or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        results: Tensors = _Linear.apply(linear_map, key, *tensors)  # type: ignore[no-untyped-call]
        return results
    return backend.run(tensors, linear_map, key)


with torch.inference_mode(False):  # the import may be inside of it
    SAVED = torch.empty(0)
"""Saved for backward instead of a value, of which none is needed: a checkpoint reruns only what precedes the
last saved tensor, and if ranks saved different ones, not all of them would come back to the collective."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, linear_map: Map, key: int, *tensors: torch.Tensor) -> Tensors:
        ctx.map, ctx.key, ctx.is_operator = linear_map, key, False
        ctx.save_for_backward(SAVED)
        return backend.run(tensors, linear_map, key)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        ctx.saved_tensors  # noqa: B018 - makes the checkpoint around it, if there is one, run again now
        # Even if this rank needs no gradient, the others wait for it.
        transposed = ctx.map.transposed
        return None, None, *apply(cotangents, transposed, ctx.key, is_traced=ctx.is_operator or is_traced())

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: torch.Tensor) -> Tensors:
        # A key of their own: a rank may leave out the backward of a call's tangents, or that of its values.
        return apply(tangents, ctx.map, hash((ctx.key, 1)), is_traced=ctx.is_operator or is_traced())


def _arguments(linear_map: Map) -> tuple[Any, ...]:
    """Return a map of joined parts as the operator's arguments; its inverse is :func:`_map`."""
    names = linear_map.kind, linear_map.transpose, linear_map.title, linear_map.who.name
    return *names, linear_map.order, list(linear_map.sent.lengths), list(linear_map.received.lengths)


def _map(*arguments: Any) -> Map:
    """Return the map of joined parts with these arguments of the operator, of which the key is the last."""
    kind, transpose, title, name, order, sent, received, _ = arguments
    resolve = private("torch.distributed.distributed_c10d", "_resolve_process_group", _PURPOSE)
    who, sides = members(resolve(name)), (Parts(tuple(sent)), Parts(tuple(received)))
    return Map(kind, transpose, title, who, order, *sides)


def _run(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Apply the map to a tensor that has values."""
    return backend.run((x,), _map(*arguments), arguments[-1])[0]


def _for_compiler() -> bool:
    """Return whether a graph that is recorded now goes to a compiler, which knows torch's own operators."""
    context = private("torch._guards", "TracingContext", _COMPILED)
    return torch.compiler.is_compiling() or context.try_get() is not None


def _record(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Apply the map by operators that a compiler knows."""
    linear_map, x = _map(*arguments), x.contiguous()
    if not linear_map.needs_others:
        return backend.begin_alone(linear_map, (x,), 0)()[0]
    return backend.start_traceable(x, linear_map)()


def _view_of_one_call(x: torch.Tensor, number: int) -> torch.Tensor:
    """Return a view of the whole tensor that only one call in a graph has.

    AOTAutograd merges equal expressions. Where two tensors are one on this rank only, two calls would become
    one here and stay two on the other ranks. Inductor first removes slices and copies of the whole, but no
    selections: here the one with this number of more copies than that, which take no memory.
    """
    return x.expand(number + 1, *x.shape).select(0, number)


# One operator for all maps, so that compiled transforms find its rules; linear in its tensor. Dynamo and
# make_fx record it in their graphs as it is, so that every transform that is traced around it applies its
# rules: reverse and forward mode of any order, and vmap in any nesting. Graphs for compilers record what
# _record runs instead.
_NAME = "dist_autograd_collectives::linear"
_LIBRARY: Any = torch.library.Library("dist_autograd_collectives", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "linear(Tensor x, str kind, str transpose, str title, str group, int order, SymInt[] sent, "
    "SymInt[] received, int key) -> Tensor"
)
_operator: Any = torch.ops.dist_autograd_collectives.linear.default


@functools.cache
def _one_level() -> Any:
    """Make the autograd function of the operator: torch's class is bound when it is used."""
    base: Any = private("torch.autograd.function", "_SingleLevelFunction", _COMPILED)

    class OneLevel(base):  # type: ignore[misc] # torch's class
        """The operator at one level of ``torch.func``: what is below it is up to the levels below."""

        @staticmethod
        def forward(ctx: Any, level: tuple[Map, Any], key: int, x: torch.Tensor) -> torch.Tensor:
            ctx.map, keys = level
            ctx.key, ctx.is_operator = key, True
            below = keys & private("torch._C", "_after_autograd_keyset", _COMPILED)
            forward_mode = private("torch.autograd.forward_ad", "_set_fwd_grad_enabled", _COMPILED)
            with (
                private("torch._C", "_AutoDispatchBelowAutograd", _COMPILED)(),
                torch.enable_grad(),  # for the levels below
                forward_mode(True),
            ):
                return cast("torch.Tensor", _operator.redispatch(below, x, *_arguments(ctx.map), key))

        backward = staticmethod(_Linear.backward)
        jvp = staticmethod(_Linear.jvp)

    return OneLevel


def _differentiate(keys: Any, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Apply the operator, seen by autograd."""
    with private("torch._functorch.utils", "enable_single_level_autograd_function", _COMPILED)():
        return cast("torch.Tensor", _one_level().apply((_map(*arguments), keys), arguments[-1], x))


def _batch(_: Any, in_dims: tuple[int, ...], x: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, int]:
    """Apply the operator to a batch, whose dimension goes last, because parts lie along dimension 0."""
    result = _operator(x.movedim(in_dims[0], -1), *arguments)
    return result, result.ndim - 1


def _trace(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> torch.Tensor:
    """Record the operator as one, so that nothing tears its start and its wait apart; or for a compiler."""
    if not _for_compiler():
        return cast("torch.Tensor", mode.__torch_dispatch__(func, types, args, kwargs))
    x, *arguments = args
    with mode:
        return _record(_view_of_one_call(x, len(mode.tracer.graph.nodes)), *arguments)


_LIBRARY.impl(_operator, _run, "CompositeExplicitAutograd")
_LIBRARY.impl(_operator, _differentiate, "Autograd", with_keyset=True)
torch.library.register_fake(_NAME, _record, lib=_LIBRARY)
torch.library.register_vmap(_NAME, _batch, lib=_LIBRARY)
torch.library.register_torch_dispatch(_NAME, proxy_tensor.ProxyTorchDispatchMode, _trace, lib=_LIBRARY)
