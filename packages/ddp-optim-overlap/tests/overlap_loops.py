"""Loops as words, which do the same in an ordinary run and in an overlapped one: both must end alike."""

import contextlib
import copy
import itertools
import math
import warnings

import overlap_runs as runs
import torch
import torch.distributed as dist

from ddp_optim_overlap import overlap_optimizer

FOUR_STEPS = "overlap train train train train"


class Loop:
    """A model and its optimizers, and the words of a loop: methods without arguments.

    Args:
        make_optimizers: Called with the DDP model.
        overlap: Options of ``overlap_optimizer``; ``None`` in an ordinary run.
        hook: Makes a communication hook and its state.
        scheduled: Whether the loop has schedulers.
        make_net: Makes the module.
        clip: Clips the parameters' gradients before each step, if that is an ordinary one.
        ddp_options: Of ``DistributedDataParallel``.
    """

    def __init__(
        self,
        make_optimizers,
        overlap=None,
        *,
        hook=None,
        scheduled=False,
        make_net=runs.Net,
        clip=None,
        **ddp_options,
    ):
        self._clip = clip if overlap is None else None
        self._make_optimizers, self._options, self._hook = make_optimizers, overlap, hook
        self._scheduled, self._make_net, self._ddp_options = scheduled, make_net, ddp_options
        self._data, self._set_to_none = iter(runs.batches(40)), True
        self._around, self._handles = contextlib.ExitStack(), []
        self.handle, self._is_overlapped, self._keeps_gradients = None, False, False
        self.kept, self.results = [], []
        self._make()

    def _make(self):
        self.ddp = runs.make_ddp(self._make_net(), **self._ddp_options)
        self.layers, self.optimizers = self.ddp.module.layers, self._make_optimizers(self.ddp)
        self._schedulers = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, _cosine_with_warmup)
            for optimizer in (self.optimizers if self._scheduled else ())
        ]
        if self._hook is not None and self._options is None:
            hook, state = self._hook()
            self.ddp.register_comm_hook(state, hook)

    def follow(self, words):
        for word in words.split():
            getattr(self, word)()

    def outcome(self):
        """Return what two runs must have in common."""
        states = [one.state_dict() for one in (*self.optimizers, *self._schedulers)]
        found = {"parameters": runs.snapshot(self.ddp), "states": states, "results": self.results}
        return {**found, "gradients": self.kept}

    # The overlap, and what passes are in

    def overlap(self):
        self._is_overlapped = True
        if self._options is not None:
            hook, state = (None, None) if self._hook is None else self._hook()
            options = {"comm_hook": hook, "comm_state": state, **self._options}
            self.handle = overlap_optimizer(self.ddp, self.optimizers, **options)
            self._handles.append(self.handle)

    def remove(self):
        """Remove earlier overlaps once more, too, which does nothing."""
        for handle in self._handles:
            handle.remove()
        self.handle, self._is_overlapped = None, False

    def resume(self):
        """Go on with a new model, as from a checkpoint."""
        parts = [self.ddp, *self.optimizers, *self._schedulers]
        saved = copy.deepcopy([one.state_dict() for one in parts])
        self._make()
        if self._is_overlapped:
            self.overlap()
        for one, state in zip([self.ddp, *self.optimizers, *self._schedulers], saved, strict=True):
            one.load_state_dict(state)

    def pause(self):
        self._around.enter_context(runs.paused(self.handle))
        self._keeps_gradients = True

    def no_sync(self):
        self._around.enter_context(self.ddp.no_sync())
        self._keeps_gradients = True

    def join(self):
        self._around.enter_context(self.ddp.join())

    def end(self):
        self._around.close()
        self._keeps_gradients = False

    # Passes

    def backward(self):
        runs.backward(self.ddp, next(self._data))

    def accumulate(self):
        with self.ddp.no_sync():
            self.backward()

    def look(self):
        """It is not a backward pass."""
        loss = self.ddp.module(next(self._data)).sum()
        torch.autograd.grad(loss, list(self.ddp.module.parameters()), allow_unused=True)

    def attack(self):
        """Make a pass for the gradient of a batch; an adversarial one of it comes next."""
        x = next(self._data).requires_grad_()
        runs.backward(self.ddp, x)
        self._attack_with(x, x.grad)

    def attack_by_grad(self):
        x = next(self._data).requires_grad_()
        self._attack_with(x, *torch.autograd.grad(self.ddp(x).square().sum(), [x]))

    def _attack_with(self, x, gradient):
        self._data = itertools.chain([x.detach() + 0.1 * gradient.sign()], self._data)

    # Steps

    def train(self):
        self.backward()
        self.step()
        self.keep()
        self.zero()

    def train_more(self):
        for _ in range(2 * dist.get_rank()):
            self.train()

    def step(self):
        if self._clip is not None:
            self._clip(list(self.ddp.parameters()))
        for optimizer in self.optimizers:
            optimizer.step()

    def left_out(self):
        """Leave a call of ``step()`` out that finds nothing to do."""
        if self._options is None:
            self.step()

    def step_one(self):
        """Leave out the calls of all optimizers but the first."""
        for optimizer in self.optimizers[: None if self._options is None else 1]:
            optimizer.step()

    def closure(self):
        self.results.append(self.optimizers[0].step(self._pass_of_trainer))

    def closure_by_name(self):
        self.results.append(self.optimizers[0].step(closure=self._pass_of_trainer))

    def _pass_of_trainer(self):
        assert torch.is_grad_enabled()
        self.zero()
        return self._loss()

    def adding_closure(self):
        self.results.append(self.optimizers[0].step(self._loss))

    def empty_closure(self):
        """As trainers call it."""
        self.results.append(self.optimizers[0].step(lambda: 2.0))

    def _loss(self):
        loss = self.ddp(next(self._data)).square().sum()
        loss.backward()
        return loss.detach()

    def schedule(self):
        for scheduler in self._schedulers:
            scheduler.step()

    def keep(self):
        """Keep the gradients, of which a pass that has released them leaves none."""
        found = [None if one is None else one.clone() for one in runs.gradients(self.ddp)]
        self.kept.append((self._is_overlapped and not self._keeps_gradients, found))

    def zero(self):
        self.ddp.zero_grad(set_to_none=self._set_to_none)

    def to_zeros(self):
        self._set_to_none = False

    def to_none(self):
        self._set_to_none = True

    # Layers

    def skip(self):
        self.ddp.module.skipped = (1,)

    def skip_on_rank_1(self):
        self.ddp.module.skipped = (2,) if dist.get_rank() == 1 else ()

    def use(self):
        self.ddp.module.skipped = ()

    def freeze(self):
        self.layers[1].requires_grad_(False)

    def unfreeze(self):
        self.layers[1].requires_grad_(True)

    def make_static(self):
        self.ddp._set_static_graph()

    def add_group(self):
        self.optimizers[0].add_param_group({"params": list(self.layers[3].parameters()), "lr": 0.1})

    def swap_groups(self):
        one, other = self.optimizers[0].param_groups
        one["params"], other["params"] = other["params"], one["params"]


def _cosine_with_warmup(step):
    return (step + 1) / 3 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 6))


def one_adamw(ddp):
    return [runs.adamw(ddp)]


def two_optimizers(ddp):
    """Return an optimizer with two groups, whose parameters are in other buckets' order, and another one."""
    layers = list(ddp.module.layers[2:].parameters())
    groups = [{"params": layers[1::2], "weight_decay": 0.0, "lr": 0.02}, {"params": layers[::2]}]
    rest = [*ddp.module.conv.parameters(), *ddp.module.layers[:2].parameters()]
    return [
        torch.optim.SGD(rest, lr=0.1, momentum=0.9),
        torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9)),
    ]


def run(words, make_optimizers, overlap=None, **arguments):
    """Run a loop; return its outcome."""
    loop = Loop(make_optimizers, overlap, scheduled="schedule" in words, **arguments)
    loop.follow(words)
    if loop.handle is not None:
        runs.assert_stepped(
            loop.handle
        )  # otherwise optimizer.step() has done it all, and the overlap nothing
    return loop.outcome()


def run_released(words, make_optimizers, overlap, **arguments):
    """Run a loop that releases gradients, and the ordinary one; return what must be the same."""
    # Zeros would be added to: -0.0 becomes 0.0.
    ordinary = run(words.replace("to_zeros", ""), make_optimizers, **arguments)
    ordinary["gradients"] = [
        (released, [None] * len(step) if released else step) for released, step in ordinary["gradients"]
    ]
    return run(words, make_optimizers, {**overlap, "release_gradients": True}, **arguments), ordinary


def require_same(words, make_optimizers, *, options=None, early=True, releases=True, **arguments):
    """Fail unless runs with the overlap end as the ordinary one does.

    One more steps what waits at once, as where steps take long, and one releases gradients bucket by bucket.
    """
    options = options or {}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step")  # of a missing optimizer.step()
        ordinary = run(words, make_optimizers, **arguments)
        runs.assert_same(run(words, make_optimizers, options, **arguments), ordinary, "overlapped")
        if early:
            with runs.early_steps():
                runs.assert_same(run(words, make_optimizers, options, **arguments), ordinary, "stepped early")
        if releases and can_release(arguments):
            runs.assert_same(*run_released(words, make_optimizers, options, **arguments), "released")


def can_release(ddp_options):
    """Return whether gradients can be released on this device with these options."""
    limits = ("gradient_as_bucket_view", "find_unused_parameters", "static_graph")
    return runs.rank_device().type == "cpu" or not any(ddp_options.get(name) for name in limits)
