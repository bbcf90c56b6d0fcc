"""What a loop may do around an overlapped step: each backward pass steps once, with the same bits."""

import functools
import gc
import random
import types
import weakref

import overlap_runs as runs
import pytest
import torch
import torch.distributed as dist
from overlap_loops import FOUR_STEPS, Loop, one_adamw, require_same, two_optimizers
from parity_cases import UNUSED, VIEW
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_compress_hooks import allreduce_hook
from ddp_optim_overlap import (
    ConfigError,
    OptimizerHookState,
    StepError,
    hook_then_optimizer,
    overlap_optimizer,
)

# Loops as words


def _without_last(ddp):
    return [torch.optim.AdamW([*ddp.module.conv.parameters(), *ddp.module.layers[:3].parameters()], lr=0.01)]


def _fused(ddp):
    return [torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, fused=True)]


BOTH = {**UNUSED, **VIEW}
EPOCH = "overlap " + 2 * "zero backward left_out schedule " + "remove "
USED_BY_ONE = "overlap " + 2 * "skip_on_rank_1 pause backward end use train "
USED_BEFORE = "overlap " + 2 * "use pause backward end skip train "
OTHER_PASSES = "overlap train pause backward keep zero end no_sync backward keep zero end backward keep step"
LOOPS = {
    "paused, removed, overlapped again": (
        "overlap train pause backward end train remove remove train overlap train",
    ),
    "step() left out before pause": ("overlap backward left_out zero pause backward step end",),
    "step() left out before no_sync": ("overlap backward left_out zero no_sync backward step end",),
    "step() left out, and a look": ("overlap backward left_out look zero pause backward step end",),
    "removed before step() of one of two optimizers": (
        "overlap backward remove step zero overlap backward remove step_one zero train",
        two_optimizers,
    ),
    "gradients of other passes": (OTHER_PASSES,),
    "gradients of other passes, view": (OTHER_PASSES, one_adamw, VIEW),
    "an overlap for each epoch, without step()": (2 * EPOCH,),
    "adversarial inputs, pause": ("overlap " + 3 * "pause attack end zero train ",),
    "adversarial inputs, autograd.grad": ("overlap " + 3 * "attack_by_grad zero train ",),
    "closures after other passes": (
        # The second empty one steps, with gradients that must be there.
        f"overlap {2 * 'accumulate accumulate adding_closure zero '}"
        + 3 * "zero backward empty_closure empty_closure ",
        one_adamw,
        {"releases": False},
    ),
    "closures": ("overlap" + 5 * " closure schedule",),
    "closures by name, view": ("overlap" + 5 * " closure_by_name schedule", one_adamw, VIEW),
    "closures, unused": ("overlap" + 5 * " closure schedule", one_adamw, UNUSED),
    "closures of ordinary steps, pause": ("overlap closure pause closure end remove closure",),
    "closures of ordinary steps, no_sync": ("overlap closure no_sync closure end remove closure",),
    "layers unfrozen and added, groups changed": (
        "overlap train train add_group train train swap_groups train",
        _without_last,
        {"releases": False, **UNUSED},
    ),
    "a frozen layer": (
        "freeze overlap train unfreeze train train freeze train unfreeze look skip train",
        one_adamw,
        UNUSED,
    ),
    # Gradients from before count as use, unless they are dropped.
    "begun with gradients": ("accumulate overlap skip train", one_adamw, UNUSED),
    "begun with dropped gradients": ("backward step overlap zero skip train", one_adamw, UNUSED),
    # What some ranks leave out in the paused pass, or in the next: its gradients are not used ones.
    "paused, used by one rank": (USED_BY_ONE, one_adamw, BOTH),
    "paused, used by one rank, zeros": (f"to_zeros {USED_BY_ONE}", one_adamw, BOTH),
    "paused, used before only": (USED_BEFORE, one_adamw, UNUSED),
    "paused, used before only, zeros": (f"to_zeros {USED_BEFORE}", one_adamw, BOTH),
    # Fused SGD takes no list in which only some have momentum.
    "momentum of some": ("skip train train overlap train train", _fused, UNUSED),
    "static later": (f"skip {FOUR_STEPS.replace('overlap', 'overlap make_static')}",),
}
TURNS = (
    "train",
    "accumulate train",
    "pause backward end train",
    "pause backward step zero end",
    "no_sync closure end zero",
    "closure zero",
    "pause attack end zero train",
    "remove train overlap",
    "look",
    "skip",
    "use",
    "to_zeros",
    "to_none",
)
"""What loops may consist of, in any order."""


def _any_order(seed):
    return " ".join(["overlap", *random.Random(seed).choices(TURNS, k=12), "train"])


ANY_ORDER = {
    f"any order, {seed}": (_any_order(seed), one_adamw, BOTH if seed % 2 else UNUSED) for seed in range(4)
}


@runs.cases({**LOOPS, **ANY_ORDER})
def check_loop(words, make_optimizers=one_adamw, options=types.MappingProxyType({})):
    require_same(words, make_optimizers, **options)


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


def check_closure_that_fails():
    """An error of the closure itself is raised; an error of its backward pass keeps its type."""
    loop, calls = Loop(one_adamw, {}), []
    loop.overlap()
    (optimizer,), before = loop.optimizers, runs.snapshot(loop.ddp)

    def raises():
        calls.append(1)
        raise RuntimeError("of the loop")

    with pytest.raises(RuntimeError, match="of the loop"):
        optimizer.step(raises)
    runs.assert_same((runs.snapshot(loop.ddp), calls), (before, [1]))
    loop.closure()
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(StepError, match="NoneType"):
        loop.closure()
    dist.barrier()
    runs.assert_same(len(loop.results), 1)


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


check = runs.on_ranks(__name__, timeout=120, group_timeout=60)


def test_the_loop_around_it(check):
    check()
