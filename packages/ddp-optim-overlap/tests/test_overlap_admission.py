"""Which optimizers are taken: torch's reviewed ones, and declared ones that pass a short trial.

``OptimizerHookState`` takes the same optimizers as ``overlap_optimizer``, and needs no model.
"""

import copy
import random
from contextlib import nullcontext

import numpy as np
import overlap_runs as runs
import pytest
import torch
from overlap_loops import FOUR_STEPS, require_same

from ddp_optim_overlap import (
    OptimizerHookState,
    UnsupportedOptimizerError,
    declare_steps_per_parameter,
)

ADVICE = "use the ordinary loop with the same communication hook"


def make_parameters():
    generator = torch.Generator().manual_seed(0)
    shapes = [(40, 50), (6, 5), (4, 3, 3, 3), (5,), (8,), (3, 3)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def declared(optimizer):
    """Take an optimizer by declaration."""
    OptimizerHookState(optimizer, steps_per_parameter=True)


def refuse(optimizer, words, **options):
    with pytest.raises(UnsupportedOptimizerError, match=f"(?s){words}.*{ADVICE}"):
        OptimizerHookState(optimizer, **options)


# torch's own

KINDS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
]


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_torch_but_lbfgs_are_taken_and_subclasses_are_not(kind):
    """A new class of torch fails here: read whether it couples parameters, with foreach and fused, too."""
    parameters = [one for one in make_parameters() if one.dim() == 2]  # Muon takes no others
    if kind is torch.optim.LBFGS:
        refuse(kind(parameters), "LBFGS.step needs a closure")
        return
    OptimizerHookState(kind(parameters))
    subclass = type(f"Own{kind.__name__}", (kind,), {})
    refuse(subclass(parameters), f"Own{kind.__name__} is not one of the optimizers of torch")
    if kind is not torch.optim.SparseAdam:  # the trial's gradients are dense
        declared(subclass([{"params": parameters[:2]}, {"params": parameters[2:]}]))


def of_two_dtypes():
    return [torch.nn.Parameter(torch.randn(4, 4, dtype=dtype)) for dtype in (torch.float32, torch.float64)]


def on_two_devices():
    return [torch.nn.Parameter(torch.ones(4, device=device)) for device in ("cpu", "meta")]


def test_where_one_of_torch_couples_parameters_the_error_says_how_to_avoid_it():
    refuse(torch.optim.Adafactor(of_two_dtypes()), r"Give it eps=\(1e-7, 1e-3\)")
    OptimizerHookState(torch.optim.Adafactor(of_two_dtypes(), eps=(1e-7, 1e-3)))
    OptimizerHookState(torch.optim.Adafactor([{"params": [one]} for one in of_two_dtypes()]))
    refuse(torch.optim.Adam(on_two_devices()), "Give it foreach=True or foreach=False")
    OptimizerHookState(torch.optim.Adam(on_two_devices(), foreach=False))


# Declared ones


class Steps(torch.optim.Optimizer):
    """Steps per parameter, as a base for optimizers like those of others; counts in every state."""

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        self.before()
        for group in self.param_groups:
            self.before_group(group, [one.grad for one in group["params"] if one.grad is not None])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    parameter.sub_(self.update(parameter, parameter.grad, state, group) * group["lr"])

    def before(self):
        pass

    def before_group(self, group, gradients):
        pass

    def average(self, state, name, value, rate=0.1):
        return state.setdefault(name, torch.zeros_like(value)).lerp_(value, rate)

    def update(self, parameter, gradient, state, group):
        return gradient


class Lamb(Steps):
    def update(self, parameter, gradient, state, group):
        update = self.average(state, "mean", gradient)
        update = update / (self.average(state, "square", gradient.square()).sqrt() + 1e-6)
        return update * (parameter.norm() / (update.norm() + 1e-6)).clamp(max=10)


class Blockwise8bit(Steps):
    """Keeps momentum as bytes with one scale for every few values, as bitsandbytes does."""

    def update(self, parameter, gradient, state, group):
        flat = gradient.flatten()
        blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % 16)).view(-1, 16)
        codes = state.get("codes", torch.zeros_like(blocks, dtype=torch.int8))
        mean = (codes * state.get("scales", torch.ones(len(blocks), 1))).lerp(blocks, 0.1)
        state["scales"] = mean.abs().amax(1, keepdim=True).clamp_(min=1e-30) / 127
        state["codes"] = (mean / state["scales"]).nan_to_num().round().to(torch.int8)
        return mean.flatten()[: flat.numel()].view_as(gradient)


class ScheduleFree(Steps):
    def update(self, parameter, gradient, state, group):
        z = state.setdefault("z", parameter.clone())
        update = (parameter - z) / state["step"] + gradient * (0.9 * (1 - 1 / state["step"]))
        z.sub_(gradient, alpha=group["lr"])
        return update


class StateOfConstructor(Steps):
    """Makes its state when it is created, as the first MADGRAD did."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["start"] = parameter.detach().clone()

    def update(self, parameter, gradient, state, group):
        return gradient + 0.1 * (parameter - state["start"])


class Knows(Steps):
    """Finds parameters in its attributes and options in theirs, counts there, and calls its own methods."""

    def __init__(self, params, **options):
        params = list(params)
        super().__init__(params, **options)
        self.everything = [one for group in self.param_groups for one in group["params"]]
        self.decayed = {one for one in self.everything if one.dim() > 1}
        self.counts = {}
        self.scale = self.scale_of
        for one in self.everything:
            one.rate = 0.5 if one.dim() == 1 else 1.0

    def scale_of(self, parameter):
        return parameter.rate * sum(one.dim() for one in self.everything)

    def update(self, parameter, gradient, state, group):
        self.counts[parameter] = self.counts.get(parameter, 0) + 1
        history = state["history"] = [*state.get("history", []), gradient.clone()][-3:]
        update = sum(history) + parameter if parameter in self.decayed else gradient
        return update * self.scale(parameter)


class ByGroups(Steps):
    """Counts steps in groups with gradients, as many optimizers do, and looks up groups by number."""

    def before_group(self, group, gradients):
        if gradients:
            group["step"] = group.get("step", 0) + 1

    def update(self, parameter, gradient, state, group):
        place = next(number for number, one in enumerate(self.param_groups) if one is group)
        return gradient * (1.0, 0.2)[place % 2] * self.param_groups[0]["lr"] / group["step"]


class Clamped(Steps):
    """Moves also parameters without a gradient."""

    def before_group(self, group, gradients):
        for parameter in group["params"]:
            parameter.mul_(0.99).clamp_(-0.5, 0.5)


ACCEPTED = [Lamb, Blockwise8bit, ScheduleFree, StateOfConstructor, Knows, ByGroups, Clamped]


@pytest.mark.parametrize("kind", ACCEPTED)
def test_optimizers_that_step_per_parameter_are_taken_by_declaration(kind):
    declared(kind(make_parameters(), lr=0.0))  # as at the begin of a warm-up
    optimizer = kind([{"params": [one]} for one in make_parameters()])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces step() on the instance
    with torch.device("meta"):  # the loop's default device is no matter
        declared(optimizer)


def _in_two_groups(kind, ddp):
    parameters = list(ddp.parameters())
    return [kind([{"params": parameters[:4]}, {"params": parameters[4:], "lr": 0.02}])]


ON_RANKS = (Lamb, Knows, ByGroups, Clamped)


@runs.cases({kind.__name__: (kind,) for kind in ON_RANKS})
def check_bits_of_declared(kind):
    words, unused = "overlap train train skip train use train", {"find_unused_parameters": True}
    if kind is Clamped:
        words, unused = FOUR_STEPS, {}
    require_same(
        words, lambda ddp: _in_two_groups(kind, ddp), options={"steps_per_parameter": True}, **unused
    )


@runs.cases({kind.__name__: (kind,) for kind in ACCEPTED if kind not in ON_RANKS})
def rare_bits_of_declared(kind):
    check_bits_of_declared(kind)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_parameters_may_have_any_dtype_shape_and_group(dtype):
    parameters = [torch.nn.Parameter(one.detach().to(dtype)) for one in make_parameters()]
    parameters += [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in [(), (0, 3), (1,) * 5]]
    parameters.append(torch.nn.Parameter(torch.ones(2, 2, dtype=torch.int64), requires_grad=False))
    declared(Lamb([{"params": parameters[:3]}, {"params": []}, {"params": parameters[3:]}]))


def test_a_class_is_declared_once_and_without_its_subclasses():
    @declare_steps_per_parameter
    class Declared(Lamb):
        pass

    class Subclass(Declared):
        pass

    OptimizerHookState(Declared(make_parameters()))
    remedies = r"steps_per_parameter=True.*declare_steps_per_parameter\(Subclass\).*"
    refuse(Subclass(make_parameters()), remedies)
    for other in (Lamb(make_parameters()), torch.nn.Linear, None):
        with pytest.raises(TypeError, match=r"subclass of torch\.optim\.Optimizer"):
            declare_steps_per_parameter(other)


def test_a_step_that_torch_must_not_compile_is_no_compiled_one():
    """As torch marks some steps of its own."""
    optimizer = type("Own", (torch.optim.SGD,), {"step": torch.compiler.disable(torch.optim.SGD.step)})(
        make_parameters()
    )
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    declared(optimizer)


# What the trial refuses


class Prodigy(Steps):
    """Estimates one distance from all parameters."""

    def before_group(self, group, gradients):
        total = sum(float(gradient.square().sum()) for gradient in gradients)
        group["distance"] = max(group.get("distance", 1e-6), total)

    def update(self, parameter, gradient, state, group):
        return gradient.sign() * group["distance"]


class LimitsGroups(Steps):
    """Limits the norm of all gradients of a group."""

    def before_group(self, group, gradients):
        if gradients and group.get("limit", 1.0):
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            torch._foreach_mul_(gradients, (group.get("limit", 1.0) / norm).clamp(max=1))


class CountsCalls(Steps):
    calls = 0

    def before(self):
        self.calls += 1


class Draws(Steps):
    def update(self, parameter, gradient, state, group):
        return gradient * torch.rand_like(gradient)


class KeepsGradient(Steps):
    def update(self, parameter, gradient, state, group):
        return state.setdefault("kept", [gradient])[0]


class MovesNothing(Steps):
    def step(self, closure=None):
        pass


class Fails(Steps):
    def update(self, parameter, gradient, state, group):
        raise ValueError("of parameters like these")


class NeedsClosure(Steps):
    """Like SAM, whose step evaluates the model again."""

    def step(self, closure):
        pass


class Lookahead(Knows):
    """Has another optimizer, which steps all of its parameters whenever some are stepped."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.fast = torch.optim.SGD(self.everything, lr=0.1)

    def before(self):
        self.fast.step()


def limited_in_one_group(rate):
    groups = [{"params": make_parameters()[:4], "limit": 0.0, "lr": rate} for _ in range(5)]
    groups[3]["limit"] = 0.1
    return LimitsGroups(groups)


def replaced_step(step):
    optimizer = torch.optim.SGD(make_parameters())
    optimizer.step = step(optimizer)
    return optimizer


OTHER_BITS = (
    r"^\w+ does not step per parameter: a parameter or its state differs if parameters are stepped one by"
)
REFUSED = {
    **{
        kind.__name__: (lambda kind=kind: kind(make_parameters()), words)
        for kind, words in (
            (Prodigy, "option 'distance'"),
            (LimitsGroups, "differs if parameters are stepped one by one"),
            (CountsCalls, "attribute 'calls'"),
            (Draws, OTHER_BITS),
            (KeepsGradient, OTHER_BITS),
            (MovesNothing, "does not move"),
            (Fails, "ValueError: of parameters like these"),
            (NeedsClosure, "needs a closure"),
            (Lookahead, "does not step per parameter"),
        )
    },
    "coupled in one of many groups": (lambda: limited_in_one_group(0.1), OTHER_BITS),
    "coupled, at a rate of 0": (lambda: limited_in_one_group(0.0), OTHER_BITS),
    "differentiable": (
        lambda: torch.optim.Adam(make_parameters(), differentiable=True),
        "differentiable=True",
    ),
    "replaced": (lambda: replaced_step(lambda _: lambda: None), "step was replaced"),
    "compiled": (
        lambda: replaced_step(lambda optimizer: torch.compile(optimizer.step, backend="eager")),
        "step was replaced on this SGD, or compiled",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_plainly_coupled_or_no_plain_step_is_refused(name):
    make, words = REFUSED[name]
    refuse(make(), words, steps_per_parameter=True)


# What the trial leaves alone


def everything_of(optimizer):
    """Return copies of all that a trial must not change."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    seen = [(id(one), one.detach(), one.grad, one.requires_grad, vars(one)) for one in parameters]
    options = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
    generators = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())  # noqa: NPY002
    return copy.deepcopy((seen, options, list(optimizer.state.values()), generators))


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", [*ACCEPTED, torch.optim.AdamW, LimitsGroups, Fails])
def test_a_trial_changes_nothing(kind, steps):
    """The state, of parameters that the trial cuts, may hold tensors in objects and lists."""
    optimizer = type("Own", (kind,), {})(make_parameters())
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad = torch.ones_like(one)
    for _ in range(0 if kind is Fails else steps):
        optimizer.step()
    before = everything_of(optimizer)
    refused = pytest.raises(UnsupportedOptimizerError) if kind in (LimitsGroups, Fails) else nullcontext()
    with refused:
        declared(optimizer)
    runs.assert_same(everything_of(optimizer), before)


class Sizes(Lamb):
    """Records how many values parameters have."""

    sizes = ()

    def update(self, parameter, gradient, state, group):
        self.sizes.append(parameter.numel())
        return super().update(parameter, gradient, state, group)


def test_a_trial_uses_small_copies_only():
    """Of large parameters, a part; of many, some: it stays cheap."""
    sizes = Sizes.sizes = []
    declared(Sizes([torch.nn.Parameter(torch.ones(2000, 2000)), *make_parameters()]))
    assert 0 < max(sizes) <= 1024, sizes
    sizes.clear()
    declared(Sizes([{"params": [torch.nn.Parameter(torch.ones(4))]} for _ in range(200)]))
    assert 0 < len(sizes) < 200 * 5, len(sizes)  # of 12 steps


# On ranks


def zero(parameters):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 - warns, which pytest refuses

    return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)


def check_sharded_optimizers_are_refused():
    refuse(zero(make_parameters()), "failed on small copies", steps_per_parameter=True)


class ReplacesLater(Steps):
    """Replaces an option or an attribute once training has begun, which no trial can foresee."""

    late, calls = "", 0

    def update(self, parameter, gradient, state, group):
        if self.late == "option 'lr'":
            group["lr"] *= 0.5
        if self.late == "attribute 'calls'":
            self.calls += 1
        return gradient


@runs.cases({"option": ("option 'lr'",), "attribute": ("attribute 'calls'",)})
def check_what_is_set_later(late):
    """What buckets set differently, or in attributes, would be lost: an error."""
    options = {"steps_per_parameter": True, "release_gradients": True}  # each bucket is stepped by itself
    ddp, optimizer, handle = runs.start(
        lambda ddp: ReplacesLater(ddp.parameters()), options=options, bucket_cap_mb=0.02
    )
    runs.train_on(ddp, optimizer, runs.batches(2))
    optimizer.late = late
    with pytest.raises(RuntimeError, match=late):
        runs.backward(ddp, runs.batches(1)[0])
    for call in (handle.wait, optimizer.step):
        with pytest.raises(UnsupportedOptimizerError, match=late):
            call()


check = runs.on_ranks(__name__, timeout=120, group_timeout=60)


def test_on_two_ranks(check):
    check()


rare = runs.on_ranks(__name__, prefix="rare_", timeout=120, group_timeout=60)


@pytest.mark.exhaustive
def test_other_declared_optimizers_on_two_ranks(rare):
    rare()
