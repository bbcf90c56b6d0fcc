"""What a loop may do around an overlapped step: each backward pass steps once, with the same bits."""

import contextlib
import copy
import functools
import gc
import io
import types
import weakref

import overlap_runs as runs
import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_compress_hooks import allreduce_hook
from ddp_optim_overlap import (
    ConfigError,
    OptimizerHookState,
    StepError,
    hook_then_optimizer,
    overlap_optimizer,
)

# Calls of step()


@runs.as_ordinary
def check_calls_of_step(*, overlapped):
    """A second call after the overlapped step is an ordinary step, as is one without a backward pass.

    Post-hooks run once a call, those of all optimizers, too.
    """
    ddp = runs.make_ddp()
    optimizer, calls = runs.adamw(ddp), []
    optimizer.register_step_post_hook(lambda one, *_: calls.append(len(one.param_groups[0]["params"])))
    if overlapped:
        overlap_optimizer(ddp, optimizer)
    optimizer.register_step_post_hook(lambda *_: calls.append("late"))
    of_all = register_optimizer_step_post_hook(_shrink)
    for x in runs.batches(2):
        runs.backward(ddp, x)
        optimizer.step(None)  # as Accelerate calls it
        optimizer.step(closure=None)
        optimizer.zero_grad()
    with ddp.no_sync():
        runs.backward(ddp, runs.batches(1)[0])
    optimizer.step()
    of_all.remove()
    return runs.ends(ddp, optimizer), calls


@torch.no_grad()
def _shrink(optimizer, *_):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.mul_(0.9)


def _step(*optimizers):
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@runs.cases({"in turns, in the usual order": (True,), "in one pass": (False,)})
@runs.as_ordinary
def check_two_models_of_a_gan(in_turns, *, overlapped):
    """What the generator's loss adds to the critic's used gradients is zeroed before they are used."""
    torch.manual_seed(0)
    generator, generator_optimizer, _ = runs.start(
        runs.adamw, overlapped=overlapped, net=torch.nn.Linear(4, 8)
    )
    critic, critic_optimizer, handle = runs.start(
        runs.adamw, overlapped=overlapped, net=torch.nn.Linear(8, 1)
    )
    for step in range(3):
        made = generator(torch.full((2, 4), 1.0 + step + dist.get_rank()))
        if not in_turns:
            critic(made).square().sum().backward()
            _step(generator_optimizer, critic_optimizer)
            continue
        critic.zero_grad()
        critic(torch.cat([made.detach(), torch.ones(2, 8)])).square().sum().backward()
        critic_optimizer.step()
        with runs.paused(handle):
            critic(made).square().sum().backward()
        _step(generator_optimizer)
    return runs.ends(generator, generator_optimizer), runs.ends(critic, critic_optimizer)


@runs.as_ordinary
def check_gradients_stay_the_same_objects(*, overlapped):
    """Not a bucket's memory, into which the next pass writes."""
    ddp, optimizer, _ = runs.start(overlapped=overlapped, find_unused_parameters=True)
    kept = []
    for number, x in enumerate(runs.batches(4)):
        ddp.module.skipped = (number % 4,)
        before = runs.gradients(ddp)
        runs.backward(ddp, x)
        kept.append([one is other for one, other in zip(before, runs.gradients(ddp), strict=True)])
        kept.append([one.clone() for one in runs.gradients(ddp) if one is not None])
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return runs.ends(ddp, optimizer), kept


@runs.cases({how: (how,) for how in ("pause", "autograd.grad")})
@runs.as_ordinary
def check_adversarial_inputs(how, *, overlapped):
    """A backward pass only for the gradients of inputs, before the one that trains."""
    ddp, optimizer, handle = runs.start(overlapped=overlapped)
    for x in runs.batches(3):
        x.requires_grad_()
        if how == "pause":
            with runs.paused(handle):
                runs.backward(ddp, x)
        else:
            (x.grad,) = torch.autograd.grad(ddp(x).square().sum(), [x])
        optimizer.zero_grad()
        runs.backward(ddp, x.detach() + 0.1 * x.grad.sign())
        optimizer.step()
    return runs.ends(ddp, optimizer)


@runs.as_ordinary
def check_pause_and_remove(*, overlapped):
    ddp, optimizer, handle = runs.start(overlapped=overlapped)
    first, second, third, fourth, fifth = runs.batches(5)
    runs.train_on(ddp, optimizer, [first])
    with runs.paused(handle):
        runs.backward(ddp, second)  # averages twice, steps once
    runs.train_on(ddp, optimizer, [third])
    if handle is not None:
        handle.remove()
        handle.remove()
    runs.train_on(ddp, optimizer, [fourth])
    with overlap_optimizer(ddp, optimizer) if overlapped else contextlib.nullcontext() as handle:
        runs.backward(ddp, fifth)
        if handle is not None:
            runs.assert_stepped(handle)
        optimizer.step()
    return runs.ends(ddp, optimizer)


@runs.cases({how: (how,) for how in ("pause", "no_sync", "autograd.grad")})
@runs.as_ordinary
def check_ordinary_steps(how, *, overlapped):
    """After a loop without step(); torch.autograd.grad is not a backward pass."""
    ddp, optimizer, handle = runs.start(overlapped=overlapped)
    first, second = runs.batches(2)
    runs.backward(ddp, first)
    if not overlapped:
        optimizer.step()
    if how == "autograd.grad":
        torch.autograd.grad(ddp.module(first).sum(), list(ddp.module.parameters()))
    optimizer.zero_grad()
    with ddp.no_sync() if how == "no_sync" else runs.paused(handle):
        runs.backward(ddp, second)
        optimizer.step()
    return runs.ends(ddp, optimizer)


@runs.as_ordinary
def check_removed_before_step(*, overlapped):
    """The call of one of two optimizers is left out, which is no matter after remove()."""
    ddp = runs.make_ddp()
    one, other = runs.adamw(ddp.module.conv), runs.adamw(ddp.module.layers)
    first, second, third = runs.batches(3)
    for x in (first, second):
        with overlap_optimizer(ddp, [one, other]) if overlapped else contextlib.nullcontext():
            runs.backward(ddp, x)
        one.step()
        if x is first or not overlapped:
            other.step()
        ddp.zero_grad()
    runs.backward(ddp, third)
    _step(one, other)
    return runs.ends(ddp, one, other)


@runs.as_ordinary
def check_an_overlap_for_each_epoch_without_step(*, overlapped):
    ddp = runs.make_ddp()
    optimizer = runs.adamw(ddp)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2):
        with overlap_optimizer(ddp, optimizer) if overlapped else contextlib.nullcontext():
            for x in runs.batches(2):
                optimizer.zero_grad()
                runs.backward(ddp, x)
                if not overlapped:
                    optimizer.step()
                scheduler.step()
    return runs.ends(ddp, optimizer)


def check_overlapped_again_before_step():
    """By another optimizer only: a new overlap would take step() for one that nobody has made yet."""
    ddp, optimizer, handle = runs.start()
    runs.train_on(ddp, optimizer, runs.batches(1))
    runs.backward(ddp, runs.batches(1)[0])
    after = runs.snapshot(ddp)
    handle.remove()
    with pytest.raises(ConfigError, match=r"call step\(\) for its last pass first"):
        overlap_optimizer(ddp, optimizer)
    with overlap_optimizer(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)):
        optimizer.step()
        runs.assert_same(runs.snapshot(ddp), after)
    overlap_optimizer(ddp, optimizer).remove()


def _by_hook(ddp, optimizer):
    ddp.register_comm_hook(None, hook_then_optimizer(allreduce_hook, OptimizerHookState(optimizer)))


@runs.cases(
    {
        f"{name}, step() {'called' if calls else 'left out'}": (overlap, calls)
        for name, overlap in (
            ("overlap_optimizer", overlap_optimizer),
            ("released", functools.partial(overlap_optimizer, release_gradients=True)),
            ("hook_then_optimizer", _by_hook),
        )
        for calls in (True, False)
    }
)
@runs.as_ordinary
def check_a_model_that_is_gone_before_step(overlap, calls, *, overlapped):
    """Its last pass has stepped, once; the loop steps what its module trains alone afterwards."""
    net = runs.Net()
    ddp = runs.make_ddp(net)
    optimizer = runs.adamw(ddp)
    if overlapped:
        overlap(ddp, optimizer)
    if calls:
        runs.train_on(ddp, optimizer, runs.batches(1))
    runs.backward(ddp, runs.batches(2)[1])
    gone = weakref.ref(ddp)
    del ddp
    gc.collect()
    assert gone() is None
    if calls or not overlapped:
        optimizer.step()
    optimizer.zero_grad()
    return runs.train_on(net, optimizer, runs.batches(2, seed=1))


@runs.as_ordinary
def check_a_compiled_end_of_the_loop(*, overlapped):
    """An overlapped step is never compiled, and has the bits of an uncompiled step."""
    ddp, optimizer, _ = runs.start(overlapped=overlapped)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    if overlapped:
        step = torch.compile(step, backend="eager")
    for x in runs.batches(2):
        runs.backward(ddp, x)
        step()
    return runs.ends(ddp, optimizer)


# Closures


def _closure(ddp, optimizer, x, calls):
    """Return a trainer's closure."""

    def closure():
        assert torch.is_grad_enabled()
        calls.append(1)
        loss = ddp(x).square().sum()
        optimizer.zero_grad()
        loss.backward()
        return loss.detach()

    return closure


def _momentum(ddp):
    return torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)


@runs.cases(
    {
        "positional": (runs.adamw, "", {}),
        "by name": (_momentum, "closure", {"gradient_as_bucket_view": True}),
        "unused": (runs.adamw, "", {"find_unused_parameters": True}),
    }
)
@runs.as_ordinary
def check_closure(make, name, options, *, overlapped):
    """Train as a trainer with automatic optimization does, with a scheduler."""
    ddp, optimizer, _ = runs.start(make, overlapped=overlapped, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses, calls = [], []
    for x in runs.batches(5):
        closure = _closure(ddp, optimizer, x, calls)
        losses.append(optimizer.step(**{name: closure}) if name else optimizer.step(closure))
        scheduler.step()
    return runs.ends(ddp, optimizer), losses, len(calls)


@runs.as_ordinary
def check_closures_after_other_passes(*, overlapped):
    """Other passes accumulate before the closure's; a step with an empty closure, as trainers call it."""
    ddp, optimizer, _ = runs.start(overlapped=overlapped)
    calls, data = [], iter(runs.batches(9))

    def closure():
        calls.append(1)
        runs.backward(ddp, next(data))

    for _ in range(2):
        for _ in range(2):
            with ddp.no_sync():
                runs.backward(ddp, next(data))
        optimizer.step(closure)
        optimizer.zero_grad()
    for x in data:
        optimizer.zero_grad()
        runs.backward(ddp, x)
        calls += [optimizer.step(lambda: None), optimizer.step(lambda: 2.0)]  # the second one steps
    return runs.ends(ddp, optimizer), calls


@runs.cases({how: (how,) for how in ("pause", "no_sync")})
@runs.as_ordinary
def check_closure_of_an_ordinary_step(how, *, overlapped):
    """Under pause(), after remove() and in no_sync() the closure runs once and the step is ordinary."""
    ddp, optimizer, handle = runs.start(overlapped=overlapped)
    calls = []
    first, second, third = runs.batches(3)
    optimizer.step(_closure(ddp, optimizer, first, calls))
    with ddp.no_sync() if how == "no_sync" else runs.paused(handle):
        optimizer.step(_closure(ddp, optimizer, second, calls))
    if handle is not None:
        handle.remove()
    optimizer.step(_closure(ddp, optimizer, third, calls))
    return runs.ends(ddp, optimizer), calls


def check_closure_that_fails():
    """An error of the closure itself is raised; an error of its backward pass keeps its type."""
    ddp, optimizer, _ = runs.start()
    before = runs.snapshot(ddp)

    def raises():
        raise RuntimeError("of the loop")

    with pytest.raises(RuntimeError, match="of the loop"):
        optimizer.step(raises)
    runs.assert_same(runs.snapshot(ddp), before)
    calls = []
    optimizer.step(_closure(ddp, optimizer, runs.batches(1)[0], calls))
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(StepError, match="NoneType"):
        optimizer.step(_closure(ddp, optimizer, runs.batches(1)[0], calls))
    dist.barrier()
    runs.assert_same(calls, [1, 1])


# Parameters that come, go, rest or are unused


@runs.as_ordinary
def check_added_group(*, overlapped):
    """Layers that are unfrozen and added during training, and parameters that change their groups."""
    ddp = runs.make_ddp(find_unused_parameters=True)
    layers = ddp.module.layers
    optimizer = torch.optim.AdamW([*ddp.module.conv.parameters(), *layers[:3].parameters()], lr=0.01)
    if overlapped:
        overlap_optimizer(ddp, optimizer)
    for step, x in enumerate(runs.batches(5)):
        if step == 2:
            optimizer.add_param_group({"params": list(layers[3].parameters()), "lr": 0.1})
        if step == 4:
            one, other = optimizer.param_groups
            one["params"], other["params"] = other["params"], one["params"]
        runs.train_on(ddp, optimizer, [x])
        ddp.zero_grad()
    return runs.ends(ddp, optimizer)


@runs.as_ordinary
def check_frozen_layers(*, overlapped):
    """A layer that is frozen at first, and one that is used only by torch.autograd.grad."""
    ddp = runs.make_ddp(find_unused_parameters=True)
    optimizer = runs.adamw(ddp)
    layer = ddp.module.layers[1].requires_grad_(False)
    if overlapped:
        overlap_optimizer(ddp, optimizer)
    for step, x in enumerate(runs.batches(5)):
        layer.requires_grad_(step in (1, 2))
        if step == 4:
            layer.requires_grad_(True)
            torch.autograd.grad(ddp.module(x).sum(), list(ddp.module.parameters()))
            ddp.module.skipped = (1,)
        runs.train_on(ddp, optimizer, [x])
    return runs.ends(ddp, optimizer)


@runs.cases({"accumulated": (True,), "dropped": (False,)})
@runs.as_ordinary
def check_begun_with_gradients(accumulates, *, overlapped):
    """A layer that is not used any more: gradients from before count as use, unless they are dropped."""
    ddp, optimizer, _ = runs.start(overlapped=False, find_unused_parameters=True)
    first, second = runs.batches(2)
    with ddp.no_sync() if accumulates else contextlib.nullcontext():
        runs.backward(ddp, first)
    if not accumulates:
        optimizer.step()
    if overlapped:
        overlap_optimizer(ddp, optimizer)
    if not accumulates:
        optimizer.zero_grad()
    ddp.module.skipped = (1,)
    return runs.train_on(ddp, optimizer, [second])


@runs.cases(
    {
        "used by one rank": ((1,), (), {"gradient_as_bucket_view": True}, True),
        "used by one rank, zeros": ((1,), (), {"gradient_as_bucket_view": True}, False),
        "used before only": ((), (0, 1), {}, True),
        "used before only, view, zeros": ((), (0, 1), {"gradient_as_bucket_view": True}, False),
    }
)
@runs.as_ordinary
def check_accumulation_in_pause(first_skips, second_skips, options, set_to_none, *, overlapped):
    """Some ranks leave a layer out in the paused pass, or in the next: its gradients are not used ones."""
    ddp, optimizer, handle = runs.start(overlapped=overlapped, find_unused_parameters=True, **options)
    data = runs.batches(4)
    for first, second in zip(data[::2], data[1::2], strict=True):
        ddp.module.skipped = (1,) if dist.get_rank() in first_skips else ()
        with runs.paused(handle):
            runs.backward(ddp, first)
        ddp.module.skipped = (1,) if dist.get_rank() in second_skips else ()
        runs.backward(ddp, second)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return runs.ends(ddp, optimizer)


def _fused(ddp):
    return torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, fused=True)


@runs.cases({"momentum of some": (_fused, False), "static later": (runs.adamw, True)})
@runs.as_ordinary
def check_layers_that_are_never_used(make, static, *, overlapped):
    """Fused SGD takes no list in which only some have momentum; a graph may be made static after the call."""
    ddp, optimizer, _ = runs.start(make, overlapped=False, find_unused_parameters=not static)
    ddp.module.skipped = (1, 2)
    for step, x in enumerate(runs.batches(4)):
        if overlapped and step == (0 if static else 2):
            overlap_optimizer(ddp, optimizer)
        if static and step == 0:
            ddp._set_static_graph()
        runs.train_on(ddp, optimizer, [x])
    return runs.ends(ddp, optimizer)


@runs.cases({"skip": ("skip", [0, 1, 2, 3, 6, 7, 8, 9]), "step": ("step", runs.EVERY)})
def check_unused(unused, moved):
    """By default an unused layer is left alone; with unused="step" weight decay moves it."""
    ddp, optimizer, _ = runs.start(options={"unused": unused}, find_unused_parameters=True)
    runs.train_on(ddp, optimizer, runs.batches(1))
    before = runs.snapshot(ddp)
    ddp.module.skipped = (1,)
    runs.train_on(ddp, optimizer, runs.batches(1))
    runs.assert_same(runs.changed(ddp, before), moved)


# Several overlaps, one after another


def _is_ours(found):
    return isinstance(found, types.FunctionType) and str(found.__module__).startswith("ddp_optim_overlap")


def check_nothing_is_left_in_the_model():
    """Overlaps that end before step(), each with an optimizer of its own, leave no hooks behind."""
    ddp = runs.make_ddp()
    counts = []
    for x in runs.batches(4):
        optimizer = runs.adamw(ddp)
        with overlap_optimizer(ddp, optimizer):
            runs.backward(ddp, x)
        del optimizer
        ddp.zero_grad()
        gc.collect()
        counts.append(sum(map(_is_ours, gc.get_objects())))
    assert counts[-1] < counts[0] + len(runs.EVERY), counts  # a thread that ends may still hold one


def check_nothing_is_left_in_the_optimizer():
    ddp = runs.make_ddp()
    optimizer = runs.adamw(ddp)
    for _ in range(2):
        with overlap_optimizer(ddp, optimizer):
            runs.train_on(ddp, optimizer, runs.batches(1))
        assert "step" not in vars(optimizer)
    with overlap_optimizer(ddp, optimizer):
        runs.backward(ddp, runs.batches(1)[0])
    optimizer.step()  # the one that was still to come
    assert "step" not in vars(optimizer)


@runs.cases({"removed": ("removed",), "gone": ("gone",)})
@runs.as_ordinary
def check_a_model_wrapped_anew(how, *, overlapped):
    """The overlap of the earlier model was removed, or is gone with it."""
    net, optimizer = runs.Net(), None
    for _ in range(2):
        ddp = runs.make_ddp(net)
        optimizer = runs.adamw(ddp) if optimizer is None else optimizer
        handle = overlap_optimizer(ddp, optimizer) if overlapped else None
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for x in runs.batches(2):
            runs.train_on(ddp, optimizer, [x])
            scheduler.step()
        if handle is not None and how == "removed":
            handle.remove()
        found = runs.ends(ddp, optimizer)
        del ddp, handle
        gc.collect()
    return found


def check_copies():
    """A copy of an overlapped model averages, and can be overlapped itself."""
    ddp, optimizer, _ = runs.start()
    runs.train_on(ddp, optimizer, runs.batches(2))
    torch.save(ddp, io.BytesIO())
    one, other = copy.deepcopy(ddp), copy.deepcopy(ddp)
    before = runs.snapshot(one)
    runs.backward(one, runs.batches(1)[0])
    runs.assert_same(runs.snapshot(one), before)
    one.zero_grad()
    optimizer = runs.adamw(one)
    overlap_optimizer(one, optimizer)
    runs.assert_same(
        runs.train_on(one, optimizer, runs.batches(2)),
        runs.train_on(other, runs.adamw(other), runs.batches(2)),
    )


check = runs.on_ranks(__name__, timeout=120, group_timeout=60)


def test_the_loop_around_it(check):
    check()
