"""Optimizers that step per parameter are accepted and stay bitwise equal; all others are refused."""

import resource
import time
from collections import deque
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from overlap_runs import (
    backward,
    batches,
    differences,
    make_ddp,
    named,
    one_group,
    require_held,
    run_parts,
    same,
    snapshot,
    train,
)
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import allreduce_hook
from ddp_optim_overlap import (
    OptimizerHookState,
    OverlapMode,
    UnsupportedOptimizerError,
    apply_optimizer_in_backward,
    hook_then_optimizer,
    overlap_optimizer,
)
from ddp_optim_overlap.equality import equal
from dist_utils.testing import run_ranks


class Steps(torch.optim.Optimizer):
    """SGD per parameter, as a base for optimizers that do more; counts steps in each parameter's state."""

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    parameter.sub_(self.update(parameter, parameter.grad, state, group, place) * group["lr"])

    def update(self, parameter, gradient, state, group, place):
        raise NotImplementedError


def _make(kind, **options):
    return one_group(kind, options)


def _is_refused(make, match, ddp=None, **options):
    ddp = make_ddp() if ddp is None else ddp
    optimizer = make(ddp) if not isinstance(make, type) else make(ddp.parameters())
    before = snapshot(ddp)
    with pytest.raises(UnsupportedOptimizerError, match=match):
        overlap_optimizer(ddp, optimizer, **options)
    return same(before, snapshot(ddp)) and not optimizer.state


# Communication


def _summed(tensor):
    dist.all_reduce(tensor)
    return tensor


class SumsMatrices(Steps):
    """Like an optimizer that distributes the orthogonalization of matrices over the ranks."""

    def update(self, parameter, gradient, state, group, place):
        return _summed(gradient.clone()) if parameter.dim() == group.get("of", 2) else gradient


class SumsLarge(Steps):
    def update(self, parameter, gradient, state, group, place):
        return _summed(gradient.clone()) if parameter.numel() > 2**16 else gradient


class SumsLater(Steps):
    def update(self, parameter, gradient, state, group, place):
        return _summed(gradient.clone()) if state["step"] == 15 else gradient


class SumsLaterInCpp(Steps):
    def update(self, parameter, gradient, state, group, place):
        if state["step"] == 15:
            torch.ops._c10d_functional.wait_tensor(
                torch.ops._c10d_functional.all_reduce(gradient, "sum", group["group_name"])
            )
        return gradient


def _communicates(seen):
    for width in (64, 768):
        net = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width))
        ddp = DistributedDataParallel(net)
        matrices, vectors = ([p for p in ddp.parameters() if p.dim() == dim] for dim in (2, 1))
        for name, groups in {
            "one group": list(ddp.parameters()),
            "matrices": [{"params": vectors, "of": 5}, {"params": matrices}],
        }.items():
            seen[width, name] = _is_refused(lambda _, groups=groups: SumsMatrices(groups), "c10d", ddp)
    seen["convolutions"] = _is_refused(_make_of_conv, "c10d")


def _make_of_conv(ddp):
    return SumsMatrices(ddp.parameters(), of=4)


def _communicates_later(seen):
    """Communication that no trial shows is refused in the step, before it happens, on every rank."""
    net = torch.nn.Sequential(torch.nn.Linear(400, 400), torch.nn.Linear(400, 4))
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.001)
    optimizer = SumsLarge(ddp.parameters())
    overlap_optimizer(ddp, optimizer)
    with pytest.raises(RuntimeError, match="communicates"):
        ddp(torch.ones(2, 400)).square().sum().backward()
    with pytest.raises(UnsupportedOptimizerError, match="communicates") as caught:
        optimizer.step()
    seen["large"] = caught.value.report is not None
    for kind in (SumsLater, SumsLaterInCpp):
        ddp = make_ddp()
        optimizer = kind(ddp.parameters(), lr=1e-3, group_name=dist.group.WORLD.group_name)
        overlap_optimizer(ddp, optimizer)
        seen[kind.__name__] = _raises_in(ddp, optimizer, "communicates", at=15)
    ddp = make_ddp()
    apply_optimizer_in_backward(SumsLater, ddp.parameters(), {"lr": 1e-3})
    for x in batches(14):
        backward(ddp, x)
    with pytest.raises(RuntimeError, match="communicates"):
        backward(ddp, batches(1)[0])
    seen["in backward"] = True


def _raises_in(ddp, optimizer, match, at):
    """Whether this pass raises, and step() with the type, but no pass before it."""
    for number, x in enumerate(batches(at), 1):
        optimizer.zero_grad()
        if number == at:
            with pytest.raises(RuntimeError, match=match):
                backward(ddp, x)
            with pytest.raises(UnsupportedOptimizerError, match=match):
                optimizer.step()
            return True
        backward(ddp, x)
        optimizer.step()
    return False


# Options


class Scaled(Steps):
    """Has one factor per parameter."""

    def update(self, parameter, gradient, state, group, place):
        return gradient * group["factors"][place]


class Zipped(Steps):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter, factor in zip(group["params"], group["factors"], strict=True):
                parameter.sub_(parameter.grad * factor)


class ByName(Steps):
    """Decays all parameters but biases."""

    def update(self, parameter, gradient, state, group, place):
        return gradient if group["param_names"][place].endswith("bias") else gradient + parameter


class TwoOptions(Steps):
    """Has an option with as many values as a group of two parameters, unrelated to them."""

    def update(self, parameter, gradient, state, group, place):
        first, second = group["betas"]
        return gradient * first + second


class Drops(Scaled):
    """Writes to its factors."""

    def update(self, parameter, gradient, state, group, place):
        if state["step"] == 20:
            group["factors"][place] = 0.0
        return gradient


def _factors(kind, sequence):
    def make(ddp):
        parameters = list(ddp.parameters())
        factors = sequence([0.1 * (number + 1) for number in range(len(parameters))])
        return [kind(parameters, lr=0.01, factors=factors)]

    return make


def _pairs(kind, **options):
    def make(ddp):
        parameters = list(ddp.parameters())
        groups = [{"params": parameters[index : index + 2]} for index in range(0, len(parameters), 2)]
        return [kind(groups, lr=0.01, **options)]

    return make


def _parallel_options(seen):
    for kind in (Scaled, Zipped):
        for sequence in (list, tuple, deque, torch.tensor):
            seen[kind.__name__, sequence.__name__] = not differences(_factors(kind, sequence))
    seen["names"] = not differences(lambda ddp: [ByName(ddp.named_parameters(), lr=0.01)])
    seen["betas"] = not differences(_pairs(TwoOptions, betas=(0.9, 0.1)))
    seen["betas of AdamW"] = not differences(_pairs(torch.optim.AdamW))
    ddp = make_ddp()
    (optimizer,) = _factors(Drops, list)(ddp)
    overlap_optimizer(ddp, optimizer)
    seen["writes"] = _raises_in(ddp, optimizer, "option 'factors'", at=20)


class WritesLater(Steps):
    def update(self, parameter, gradient, state, group, place):
        if state["step"] == group["at"]:
            self.write(group)
        return gradient

    def write(self, group):
        group["lr"] *= 0.5


class NewOption(WritesLater):
    def write(self, group):
        group["phase"] = "SGD"


class InPlace(WritesLater):
    def write(self, group):
        group["history"].append(1)


class OwnCounter(WritesLater):
    calls = 0

    def write(self, group):
        self.calls += 1


class OwnDict(WritesLater):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.seen = {"calls": {"all": 0}}

    def write(self, group):
        self.seen["calls"]["all"] += 1


class OwnState(WritesLater):
    def write(self, group):
        self.state["all"]["calls"] = 1


def _writes_later(seen):
    for kind, match in {
        WritesLater: "option 'lr'",
        NewOption: "option 'phase'",
        InPlace: "option 'history'",
        OwnCounter: "attribute 'calls'",
        OwnDict: "attribute 'seen'",
        OwnState: "state 'all'",
    }.items():
        ddp = make_ddp()
        optimizer = kind(ddp.parameters(), lr=0.01, at=20, history=[])
        overlap_optimizer(ddp, optimizer)
        seen[kind.__name__, "late"] = _raises_in(ddp, optimizer, match, at=20)
        early = _make(kind, lr=0.01, at=2, history=[])
        if kind in (
            InPlace,
            OwnDict,
            OwnState,
        ):  # once per parameter, in any order: nothing is lost
            seen[kind.__name__, "soon"] = not differences(early)
            continue
        seen[kind.__name__, "soon"] = _is_refused(
            lambda ddp, early=early: early(ddp)[0], "step per parameter"
        )
        after = {"mode": OverlapMode.AFTER_REDUCE}
        seen[kind.__name__, "after"] = not differences(early, options=after)


class Limited(Steps):
    """Limits the norm over a group that has a limit."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if group.get("limit"):
                torch.nn.utils.clip_grad_norm_(group["params"], group["limit"])
        super().step(closure)

    def update(self, parameter, gradient, state, group, place):
        return gradient


def _turned_on(seen):
    """An option that is turned on later, or comes with a new group, is tried before it is stepped with."""
    for how in ("option", "group"):
        ddp = make_ddp()
        own = list(ddp.parameters())
        optimizer = Limited(own[:-2], lr=0.01, limit=None)
        overlap_optimizer(ddp, optimizer)
        for x in batches(2):
            backward(ddp, x)
            optimizer.step()
            optimizer.zero_grad()
        if how == "option":
            optimizer.param_groups[0]["limit"] = 0.1
        else:
            optimizer.add_param_group({"params": own[-2:], "limit": 0.1})
        before = snapshot(ddp)
        with pytest.raises(RuntimeError, match="per parameter"):
            backward(ddp, batches(1)[0])
        with pytest.raises(UnsupportedOptimizerError, match="per parameter"):
            optimizer.step()
        seen[how] = same(before, snapshot(ddp))


# Gradients


_LATE = []
"""Filled once training has begun, which no trial can foresee."""


class Keeps(Steps):
    """Keeps gradients for the next step, from the first or from a later step on."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.kept = {}

    def update(self, parameter, gradient, state, group, place):
        if not _LATE and (group["at"] is None or state["step"] < group["at"]):
            return gradient
        kept = {"state": state, "attribute": self.kept}[group["where"]]
        before = kept.get(id(parameter), [gradient])
        kept[id(parameter)] = [gradient[...]]
        return gradient + 0.5 * before[0]


class KeepsFirst(Steps):
    """Starts its momentum with the gradient itself, not with a copy."""

    def update(self, parameter, gradient, state, group, place):
        if "buffer" not in state:
            state["buffer"] = gradient
        else:
            state["buffer"].mul_(0.9).add_(gradient)
        return state["buffer"]


_KEPT = {}


class KeepsElsewhere(Steps):
    def update(self, parameter, gradient, state, group, place):
        before = _KEPT.get(parameter, gradient)
        _KEPT[parameter] = gradient
        return gradient - before


def _kept_gradients(seen):
    for where in ("state", "attribute"):
        for at in (1, 16, 5000):
            make = _make(Keeps, lr=0.01, at=at, where=where)
            seen[where, at] = _is_refused(lambda ddp, make=make: make(ddp)[0], "per parameter")
    for view in (False, True):
        ddp = make_ddp(gradient_as_bucket_view=view)
        optimizer = Keeps(ddp.parameters(), lr=0.01, at=None, where="state")
        overlap_optimizer(ddp, optimizer)
        _LATE.append(True)
        seen["late", view] = _raises_in(ddp, optimizer, "keeps a gradient", at=1)
        _LATE.clear()
    seen["first"] = _is_refused(KeepsFirst, "per parameter", make_ddp(find_unused_parameters=True))
    seen["elsewhere"] = _is_refused(KeepsElsewhere, "per parameter")
    ddp = make_ddp()
    apply_optimizer_in_backward(KeepsFirst, ddp.parameters(), {"lr": 1e-3})
    with pytest.raises(RuntimeError, match="keeps a gradient"):
        backward(ddp, batches(1)[0])
    seen["in backward"] = True


class KeepsInFunction:
    """A functional optimizer that communicates, or keeps a gradient, in its fifth step."""

    def __init__(self, at, what):
        self.at, self.what = at, what
        self.steps, self.kept = {}, {}

    def step_param(self, param, grad):
        self.steps[param] = self.steps.get(param, 0) + 1
        if self.steps[param] == self.at:
            self.what(self, grad)


def _functional(seen):
    def keep(owner, gradient):
        owner.kept["all"] = (gradient,)

    for match, what in {
        "communicates": lambda _, gradient: _summed(gradient),
        "keeps a gradient": keep,
    }.items():
        ddp = make_ddp()
        state = OptimizerHookState(KeepsInFunction(5, what))
        ddp.register_comm_hook(None, hook_then_optimizer(allreduce_hook, state))
        for x in batches(4):
            ddp.zero_grad()
            backward(ddp, x)
        ddp.zero_grad()
        with pytest.raises(RuntimeError, match=match):
            backward(ddp, batches(1)[0])
        seen[match] = True


# Coupling


class LimitsAt(Steps):
    """Limits the norm over all parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        limit = self.param_groups[0]["limit"]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_mul_(gradients, self.factor(torch.stack([g.norm() for g in gradients]).norm(), limit))
        super().step(closure)

    def factor(self, norm, limit):
        return (limit / norm).clamp(max=1.0)

    def update(self, parameter, gradient, state, group, place):
        return gradient


class SkipsBelow(LimitsAt):
    """Takes a step only if the norm is large enough."""

    def factor(self, norm, limit):
        return (norm > limit).float()


class ReadsOthers(Steps):
    """Reads gradients of parameters that are not in the groups of a part."""

    def __init__(self, params, **options):
        params = list(params)
        super().__init__(params, **options)
        self.everything = params

    def update(self, parameter, gradient, state, group, place):
        return gradient * len([one for one in self.everything if one.grad is not None])


def _limited_groups(ddp):
    weights = [layer.weight for layer in ddp.module.layers]
    return Limited([{"params": weights[:2]}, {"params": weights[2:]}], limit=0.1)


def _couples(seen):
    for limit in (1e-12, 1e-8, 1e-3, 1.0, 1e4, 1e8, 1e12):
        for kind in (LimitsAt, SkipsBelow):
            make = _make(kind, limit=limit)
            seen[kind.__name__, limit] = _is_refused(lambda ddp, make=make: make(ddp)[0], "other values")
    large = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False), torch.nn.Linear(1024, 1024, bias=False))
    )
    seen["large"] = _is_refused(lambda ddp: LimitsAt(ddp.parameters(), limit=1e4), "other values", large)
    seen["each of two groups"] = _is_refused(_limited_groups, "other values")
    seen["others"] = _is_refused(ReadsOthers, "other values")


# Harmless optimizers


class History(Steps):
    def update(self, parameter, gradient, state, group, place):
        state.setdefault("history", deque(maxlen=3)).append(gradient.clone())
        return sum(state["history"])


@dataclass
class Moments:
    first: torch.Tensor
    count: int = 0


class InDataClass(Steps):
    def update(self, parameter, gradient, state, group, place):
        moments = state.setdefault("moments", Moments(torch.zeros_like(gradient)))
        moments.first.lerp_(gradient, 0.1)
        moments.count += 1
        return moments.first / moments.count


class Knows(Steps):
    """Recognizes biases in many ways."""

    def __init__(self, params, **options):
        params = list(params)
        super().__init__(params, **options)
        biases = [one for one in params if one.dim() == 1]
        self.decayed = {one for one in params if one.dim() > 1}
        self.by_parameter = {one: one.dim() for one in params}
        self.by_id = {id(one): one.dim() for one in params}
        self.ids = frozenset(map(id, biases))
        self.nested = {"biases": [biases, tuple(map(id, biases))]}
        self.is_bias = lambda one: any(one is bias for bias in biases)
        for one in params:
            one.rate = 0.5 if one.dim() == 1 else 1.0

    def update(self, parameter, gradient, state, group, place):
        bias = parameter not in self.decayed
        assert bias == (self.by_parameter[parameter] == 1) == (self.by_id[id(parameter)] == 1)
        assert bias == (id(parameter) in self.ids) == self.is_bias(parameter)
        assert bias == (id(parameter) in self.nested["biases"][1])
        return (gradient if bias else gradient + parameter) * parameter.rate


class OwnLists(Steps):
    """Has a tensor and a factor per parameter, looked up by identity."""

    def __init__(self, params, **options):
        params = list(params)
        super().__init__(params, **options)
        self.everything = params
        self.averages = [one.detach().clone() for one in params]

    def update(self, parameter, gradient, state, group, place):
        place = next(index for index, one in enumerate(self.everything) if one is parameter)
        self.averages[place].lerp_(parameter, 0.1)
        return gradient + self.averages[place]


def _harmless(seen):
    for kind in (History, InDataClass, Knows, OwnLists):
        runs = [train(_make(kind, lr=0.01), overlap=overlap) for overlap in (False, True)]
        seen[kind.__name__] = equal(*runs)
    for around in (torch.device("meta"), torch.device("cpu")):
        for kind in (Knows, torch.optim.AdamW, torch.optim.Adagrad):
            ddp = make_ddp()
            optimizer = kind(ddp.parameters(), lr=0.01)
            with around:
                overlap_optimizer(ddp, optimizer)
            backward(ddp, batches(1)[0])
            optimizer.step()
            seen[around.type, kind.__name__] = True


def _leaves_no_trace(seen):
    """The trial does not change parameters, versions, gradients, state, attributes or random generators."""
    ddp = make_ddp()
    optimizer = Knows(ddp.parameters(), lr=0.01)
    optimizer.generator = torch.Generator().manual_seed(1)
    loss = ddp(batches(1)[0]).square().sum()  # autograd has saved weights
    for parameter in ddp.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = [parameter.grad for parameter in ddp.parameters()]
    values, random = snapshot(ddp), torch.get_rng_state()
    pointers = [parameter.data_ptr() for parameter in ddp.parameters()]
    handle = overlap_optimizer(ddp, optimizer)
    seen["values"] = same(values, snapshot(ddp))
    seen["memory"] = pointers == [parameter.data_ptr() for parameter in ddp.parameters()]
    seen["gradients"] = all(
        parameter.grad is one for parameter, one in zip(ddp.parameters(), gradients, strict=True)
    )
    seen["random numbers"] = torch.equal(random, torch.get_rng_state())
    seen["state"] = not optimizer.state
    with handle.pause():
        optimizer.zero_grad()
        loss.backward()
    seen["graph"] = True


# Cost


def _cost(seen):
    """Two large matrices and nothing small."""
    net = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(2)])
    ddp = DistributedDataParallel(net)
    makers = [
        lambda: torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9),
        lambda: torch.optim.AdamW(ddp.parameters(), fused=True),
        lambda: torch.optim.AdamW(ddp.parameters(), foreach=False),
        lambda: History(ddp.parameters()),
    ]
    if hasattr(torch.optim, "Muon"):
        makers.append(lambda: torch.optim.Muon(ddp.parameters()))
    for number, make in enumerate(makers):
        optimizer = make()
        before, began = _peak(), time.thread_time()
        overlap_optimizer(ddp, optimizer).remove()
        seen["memory", number] = _peak() - before < 64 or _peak() - before
        seen["seconds", number] = time.thread_time() - began < 1.0 or time.thread_time() - began


def _peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB


PARTS = named(
    _cost,
    _communicates,
    _communicates_later,
    _parallel_options,
    _writes_later,
    _turned_on,
    _kept_gradients,
    _functional,
    _couples,
    _harmless,
    _leaves_no_trace,
)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(run_parts, 2, PARTS, timeout=240)


@pytest.mark.parametrize("name", PARTS)
def test_trial(ranks, name):
    require_held(ranks, name)
