"""Optimizers like those of other libraries, which step per parameter."""

from collections import deque
from dataclasses import dataclass

import torch


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


class Lion(Steps):
    def update(self, parameter, gradient, state, group):
        update = state.setdefault("momentum", torch.zeros_like(gradient)).lerp(gradient, 0.1).sign_()
        self.average(state, "momentum", gradient, 0.01)
        return update


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


class Orthogonalized(Steps):
    """Like Muon for matrices; fails on what is not finite, as some decompositions do."""

    def update(self, parameter, gradient, state, group):
        if not gradient.isfinite().all():
            raise ValueError("the gradient is not finite")
        if gradient.dim() != 2:
            return gradient
        left, _, right = torch.linalg.svd(self.average(state, "momentum", gradient), full_matrices=False)
        return left @ right


class SkipsItsOwnNaN(Steps):
    def update(self, parameter, gradient, state, group):
        return gradient if gradient.isfinite().all() else torch.zeros_like(gradient)


class StateOfConstructor(Steps):
    """Makes its state when it is created, as the first MADGRAD did."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["start"] = parameter.detach().clone()

    def update(self, parameter, gradient, state, group):
        return gradient + 0.1 * (parameter - state["start"])


@dataclass
class Moments:
    mean: torch.Tensor
    count: int = 0


class History(Steps):
    def update(self, parameter, gradient, state, group):
        state.setdefault("history", deque(maxlen=3)).append(gradient.clone())
        moments = state.setdefault("moments", Moments(torch.zeros_like(gradient)))
        moments.mean.lerp_(gradient, 0.1)
        moments.count += 1
        return sum(state["history"]) + moments.mean / moments.count


class Knows(Steps):
    """Finds parameters in its attributes, counts there, and calls its own methods through them."""

    def __init__(self, params, **options):
        params = list(params)
        super().__init__(params, **options)
        self.everything = params
        self.decayed = {one for one in params if one.dim() > 1}
        self.counts = {}
        self.scale = self.scale_of
        for one in params:
            one.rate = 0.5 if one.dim() == 1 else 1.0

    def scale_of(self, parameter):
        return parameter.rate * sum(one.dim() for one in self.everything)

    def update(self, parameter, gradient, state, group):
        self.counts[parameter] = self.counts.get(parameter, 0) + 1
        return (gradient + parameter if parameter in self.decayed else gradient) * self.scale(parameter)


class CountsInGroup(Steps):
    """Counts steps in its groups, as many optimizers do, and passes over groups without gradients."""

    def before_group(self, group, gradients):
        if gradients:
            group["step"] = group.get("step", 0) + 1

    def update(self, parameter, gradient, state, group):
        return gradient / group["step"]


ACCEPTED = [
    CountsInGroup,
    Lion,
    Lamb,
    Blockwise8bit,
    Orthogonalized,
    SkipsItsOwnNaN,
    StateOfConstructor,
    History,
    Knows,
]
