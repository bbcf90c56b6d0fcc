"""Programs whose steps are not averaged, and programs that only look like it.

Each is a function of a job, which trains on this rank: :data:`TOLD` must be told, :data:`LEGAL` must not.
"""

import contextlib
import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_compress_hooks import CompressState, bf16_compress_hook
from ddp_optim_overlap import overlap_optimizer
from ddp_quant_hooks import LowRankState, QuantizedAllreduceState, low_rank_hook, quantized_allreduce_hook
from dist_utils import sync_params_and_buffers

KINDS = ("8 bits", "16 bits", "low rank", "overlap", "overlap of 8 bits")


class Answer:
    """An object in which DDP finds no tensor."""

    def __init__(self, loss):
        self.loss = loss


@dataclass
class Record:
    """Likewise, if the graph is static."""

    loss: torch.Tensor


class Net(nn.Module):
    """A small model with a method besides ``forward``."""

    def __init__(self, *, wraps=None, checkpoints=None):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 4)
        self.aside = nn.Linear(8, 4)
        self.wraps, self.checkpoints, self.uses_aside = wraps, checkpoints, True

    def forward(self, x):
        if self.checkpoints is None:
            code = self.encoder(x)
        else:
            code = checkpoint(self.encoder, x, use_reentrant=self.checkpoints)
        out = self.head(code)
        if self.uses_aside:
            out = out + self.aside(code)
        loss = out.square().mean()
        return self.wraps(loss) if self.wraps else loss

    def loss(self, x):
        return self.forward(x)


class Task(Net):
    """Its encoder, whose gradients are the last to come, may be left out; it has parameters of its own."""

    def __init__(self):
        super().__init__()
        self.encodes, self.shift, self.scale = True, nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = x * self.scale + self.shift
        x = self.encoder(x) if self.encodes else x
        return (self.head(x) + self.aside(x)).square().mean()


class Job:
    """A model, its optimizer, and what answers for its average."""

    def __init__(self, kind: str) -> None:
        self.kind, self.rank = kind, dist.get_rank()
        self.overlapped = kind.startswith("overlap")
        self.random = torch.Generator().manual_seed(100 + self.rank)
        self.handle = None

    def make(self, net=None, *, optimizer=torch.optim.SGD, parameters=None, **options):
        """Make DDP, an optimizer of all or some parameters, and the average."""
        torch.manual_seed(0)
        self.net = net or Net()
        self.ddp = DistributedDataParallel(self.net, **{"bucket_cap_mb": 0.0005, **options})
        given = list(self.net.parameters()) if parameters is None else parameters(self.net)
        self.optimizer = optimizer(given, lr=0.01)
        self.attach(self.ddp, self.optimizer)
        return self

    def attach(self, ddp, optimizer):
        make_state, hook = {
            "16 bits": (CompressState, bf16_compress_hook),
            "low rank": (lambda: LowRankState(min_bytes=0), low_rank_hook),
            "overlap": (lambda: None, None),
        }.get(self.kind, (lambda: QuantizedAllreduceState(min_bytes=0), quantized_allreduce_hook))
        self.state, self.hook = make_state(), hook
        if self.state is not None:
            self.state.bind(ddp)
        if not self.overlapped:
            ddp.register_comm_hook(self.state, hook)
        else:
            self.handle = overlap_optimizer(ddp, optimizer, comm_hook=hook, comm_state=self.state)

    def batch(self):
        return torch.randn(4, 8, generator=self.random)

    def steps(self, count=3, forward=None):
        """Train as usual, or with another forward pass."""
        for _ in self.rounds(count):
            self.backward(forward)

    def rounds(self, count=3):
        """Step after what is done in each of several rounds."""
        for number in range(count):
            self.optimizer.zero_grad()
            yield number
            self.optimizer.step()

    def closure(self, forward, batch=None):
        """Return a closure for the optimizer, with a batch that stays or a new one each time."""

        def run():
            self.optimizer.zero_grad()
            loss = forward(self.batch() if batch is None else batch)
            loss.backward()
            return loss

        return run

    def backward(self, forward=None):
        loss = (self.ddp if forward is None else forward)(self.batch())
        getattr(loss, "loss", loss).backward()

    def pause(self):
        return self.handle.pause() if self.handle else contextlib.nullcontext()


Program = Callable[[Job], object]
TOLD: dict[str, tuple[Program, tuple[str, ...]]] = {}
LEGAL: dict[str, Program] = {}


def told(*words: str) -> Callable[[Program], Program]:
    """Add a program whose error has some of these words."""

    def add(program: Program) -> Program:
        TOLD[program.__name__] = program, words
        return program

    return add


def legal(program: Program) -> Program:
    """Add a program that is told nothing."""
    LEGAL[program.__name__] = program
    return program


# ---- not averaged ----


@told("static_graph=True with a forward pass that returns an object")
def static_graph_and_a_plain_object(job):
    job.make(Net(wraps=Answer), static_graph=True).steps()


@told("static_graph=True with a forward pass that returns an object")
def static_graph_and_a_dataclass(job):
    job.make(Net(wraps=Record), static_graph=True).steps()


@told("a forward pass of ddp.module")
def forward_through_the_module_from_the_start(job):
    job.make().steps(forward=job.net)


@told("a forward pass of ddp.module")
def forward_through_the_module_later(job):
    job.make().steps()
    job.steps(forward=job.ddp.module)


@told("moved, cast or changed after DDP was made")
def cast_and_back_before_training(job):
    job.make()
    job.ddp.double().float()
    job.steps()


@told("moved, cast or changed after DDP was made")
def cast_and_back_during_training(job):
    job.make().steps()
    job.ddp.to(torch.bfloat16).to(torch.float32)
    job.steps()


@told("a forward pass inside no_sync() with backward() outside")
def forward_alone_inside_no_sync(job):
    job.make().steps()
    job.optimizer.zero_grad()
    with job.ddp.no_sync():
        loss = job.ddp(job.batch())
    loss.backward()
    job.optimizer.step()


@told("'head.weight', 'head.bias' got one and came in no bucket", "is not one that this DDP model averages")
def unfrozen_after_ddp_was_made(job):
    net = Net()
    net.head.requires_grad_(False)
    job.make(net, parameters=lambda net: [*net.encoder.parameters(), *net.aside.parameters()]).steps()
    net.head.requires_grad_(True)
    job.optimizer.add_param_group({"params": list(net.head.parameters())})
    job.steps()


@told("moved, cast or changed after DDP was made")
def a_layer_replaced_after_ddp_was_made(job):
    job.make().steps()
    job.net.head = nn.Linear(8, 4)
    job.optimizer.add_param_group({"params": list(job.net.head.parameters())})
    job.steps()


@told("a forward pass of ddp.module or a part of it")
def a_method_of_the_module(job):
    job.make()
    job.steps(forward=job.ddp.module.loss)


@told("a forward pass of ddp.module")
def a_local_pass_after_the_averaged_one(job):
    job.make().steps()
    job.optimizer.zero_grad()
    with job.pause():
        job.backward()
    job.backward(job.net)
    job.optimizer.step()


@told("a forward pass of ddp.module")
def a_closure(job):
    job.make().steps()
    job.optimizer.step(job.closure(job.net))


@told("a forward pass of ddp.module")
def a_functional_call(job):
    job.make()
    parameters = dict(job.net.named_parameters())
    job.steps(forward=lambda x: torch.func.functional_call(job.net, parameters, (x,)))


@told("a forward pass of ddp.module")
def a_compiled_module_beside_ddp(job):
    job.make().steps()
    job.steps(forward=torch.compile(job.net, backend="eager"))


@told("a second DistributedDataParallel")
def a_second_ddp_around_the_model(job):
    job.make().steps()
    second = DistributedDataParallel(job.net)
    job.steps(forward=second)


@told("a forward pass of ddp.module")
def a_small_part_alone(job):
    job.make().steps()
    job.steps(forward=lambda x: job.net.head(x).square().mean())


@told("a forward pass of ddp.module")
def a_parameter_beside_others_alone(job):
    job.make(Task()).steps()
    job.steps(forward=lambda x: (x * job.net.scale).square().mean())


@told("a forward pass of ddp.module")
def unfrozen_after_bind_and_used_locally(job):
    torch.manual_seed(0)
    net = job.net = Net()
    job.ddp = DistributedDataParallel(net, find_unused_parameters=True)
    net.requires_grad_(False)
    job.optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    job.attach(job.ddp, job.optimizer)
    net.requires_grad_(True)
    job.steps()
    job.steps(forward=net)


@told("takes them for unused: the model was moved, cast or changed")
def a_layer_cast_and_back_that_may_be_unused(job):
    job.make(find_unused_parameters=True).steps()
    job.net.head.double().float()
    job.steps()


@told("takes them for unused: the model was moved, cast or changed")
def a_layer_cast_and_back_before_a_static_graphs_first_pass(job):
    job.make(static_graph=True)
    job.net.head.double().float()
    job.steps(1)


@told("others got none", "the backward pass ended after 1 buckets")
def a_layer_cast_and_back(job):
    job.make().steps()
    job.net.encoder[0].double().float()
    job.steps(1)


@told("others got none", "the backward pass ended after 1 buckets")
def a_pass_without_the_first_layer(job):
    job.make(Task()).steps()
    job.net.encodes = False
    job.steps(1)


@told("came in no bucket")
def parameters_exchanged_in_the_optimizer(job):
    job.make().steps()
    job.net.load_state_dict(copy.deepcopy(job.net.state_dict()), assign=True)
    job.optimizer.param_groups[0]["params"] = list(job.net.parameters())
    job.steps()


@told("a second backward() without a forward pass of ddp since the first one")
def two_forward_passes_before_two_backward_passes(job):
    job.make().steps()
    for _ in job.rounds():
        with job.pause():
            first, second = job.ddp(job.batch()), job.ddp(job.batch())
            first.backward()
            second.backward()


@told("a second backward() without a forward pass of ddp since the first one")
def two_losses_of_one_forward_pass(job):
    job.make().steps()
    for _ in job.rounds():
        with job.pause():
            loss = job.ddp(job.batch())
            loss.backward(retain_graph=True)
            loss.square().backward()


# ---- averaged, or local on purpose ----


@legal
def an_ordinary_loop(job):
    job.make().steps()


@legal
def accumulation(job):
    job.make()
    for _ in job.rounds():
        for _ in range(2):
            with job.ddp.no_sync():
                job.backward()
        job.backward()


@legal
def accumulation_by_the_attribute(job):
    job.make()
    for _ in job.rounds():
        for last in (False, True):
            job.ddp.require_backward_grad_sync = last
            job.backward()


@legal
def a_local_pass_before_the_averaged_one(job):
    job.make()
    for _ in job.rounds():
        job.backward(job.net)
        job.backward()


@legal
def a_forward_inside_no_sync_before_the_averaged_pass(job):
    job.make()
    for _ in job.rounds():
        with job.ddp.no_sync():
            loss = job.ddp(job.batch())
        loss.backward()
        job.backward()


@legal
def unused_parameters(job):
    net = Net()
    net.uses_aside = False
    job.make(net, find_unused_parameters=True).steps()


@legal
def parameters_used_by_turns(job):
    job.make(find_unused_parameters=True)
    for step in range(4):
        job.net.uses_aside = step % 2 == 0
        job.steps(1)


@legal
def a_local_pass_with_what_the_averaged_one_leaves_out(job):
    job.make(find_unused_parameters=True).steps()
    for _ in job.rounds():
        job.net.uses_aside = True
        job.backward(job.net)
        job.net.uses_aside = False
        job.backward()


@legal
def a_hook_for_some_buckets_only(job):
    if job.overlapped:
        return  # one hook for each bucket
    job.make()

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return allreduce_hook(None, bucket) if bucket.index() else job.hook(state, bucket)

    job.ddp = DistributedDataParallel(job.net, bucket_cap_mb=0.0005)
    job.ddp.register_comm_hook(job.state.bind(job.ddp), hook)
    job.steps()


@legal
def join(job):
    job.make()
    with job.ddp.join():
        job.steps(2 + job.rank)


@legal
def frozen_layers(job):
    net = Net()
    net.encoder.requires_grad_(False)
    job.make(net, parameters=lambda net: [one for one in net.parameters() if one.requires_grad]).steps()


@legal
def frozen_layers_in_the_optimizer(job):
    net = Net()
    net.encoder.requires_grad_(False)
    job.make(net).steps()


@legal
def layers_frozen_later(job):
    job.make(find_unused_parameters=True).steps()
    job.net.aside.requires_grad_(False)
    job.steps()


@legal
def checkpoints(job):
    job.make(Net(checkpoints=False)).steps()


@legal
def reentrant_checkpoints_in_a_static_graph(job):
    if job.overlapped:
        return  # refused: DDP hands over several buckets at once
    job.batch = lambda: torch.randn(4, 8, generator=job.random).requires_grad_()
    job.make(Net(checkpoints=True), static_graph=True).steps()


@legal
def a_static_graph(job):
    if not job.overlapped:
        job.make(static_graph=True).steps()


@legal
def a_dataclass(job):
    job.make(Net(wraps=Record)).steps()


@legal
def a_static_graph_whose_first_pass_is_averaged(job):
    if job.overlapped:
        return
    job.make(static_graph=True).steps(1)
    job.optimizer.zero_grad()
    with job.ddp.no_sync():
        job.backward()
    job.backward()
    job.optimizer.step()


def _gan(job, judge_of):
    generator = Job(job.kind).make(nn.Linear(8, 8))
    job.make()
    for _ in range(3):
        job.steps(1)
        generator.optimizer.zero_grad()
        job.net.zero_grad()
        with job.pause():
            judge_of(job)(generator.ddp(job.batch())).backward()
        generator.optimizer.step()


@legal
def two_models_that_play_against_each_other(job):
    _gan(job, lambda job: job.ddp)


@legal
def a_generators_pass_through_the_judges_module(job):
    _gan(job, lambda job: job.net)


@legal
def two_optimizers_of_one_model(job):
    torch.manual_seed(0)
    net = Net()
    ddp = DistributedDataParallel(net)
    first = torch.optim.SGD(net.encoder.parameters(), lr=0.1)
    second = torch.optim.SGD([*net.head.parameters(), *net.aside.parameters()], lr=0.1)
    job.net = net
    job.attach(ddp, [first, second])
    for _ in range(3):
        net.zero_grad()
        ddp(job.batch()).backward()
        first.step()
        second.step()


@legal
def several_averaged_passes(job):
    job.make()
    for _ in job.rounds():
        with job.pause():
            job.backward()
            job.backward()


@legal
def gradients_averaged_by_hand(job):
    job.make()
    for _ in job.rounds():
        with job.ddp.no_sync():
            job.backward()
        for parameter in job.net.parameters():
            dist.all_reduce(parameter.grad)


@legal
def gradients_set_by_hand(job):
    job.make()
    for parameter in job.net.parameters():
        parameter.grad = torch.ones_like(parameter)
    job.optimizer.step()


@legal
def a_look_at_gradients_between_steps(job):
    job.make()
    for set_to_none in (True, False):
        job.steps()
        job.net.zero_grad()
        job.backward(job.net)
        job.net.zero_grad(set_to_none=set_to_none)
        job.optimizer.step()


@legal
def gradients_that_autograd_returns(job):
    job.make()
    for _ in range(2):
        torch.autograd.grad(job.net(job.batch()), list(job.net.parameters()))
        job.steps(1)


@legal
def a_penalty_of_gradients(job):
    job.make()
    for _ in job.rounds(2):
        batch = job.batch().requires_grad_()
        (slope,) = torch.autograd.grad(job.net(batch), batch, create_graph=True)
        (job.ddp(batch) + slope.square().sum()).backward()


@legal
def steps_of_ranks_on_their_own_and_averaged_parameters(job):
    job.make().steps()
    with job.ddp.no_sync():
        job.steps()
    for parameter in job.net.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


@legal
def passes_under_pause(job):
    if job.overlapped:
        job.make().steps()
        with job.pause():
            job.net.zero_grad()
            job.backward()
            job.optimizer.step()
            job.net.zero_grad()
        job.steps()


@legal
def ignored_parameters(job):
    net = Net()
    names = ["aside.weight", "aside.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
    job.make(net, parameters=lambda net: [*net.encoder.parameters(), *net.head.parameters()])
    own = torch.optim.SGD(net.aside.parameters(), lr=0.1)
    for _ in range(3):
        job.steps(1)
        own.step()
        own.zero_grad()
    sync_params_and_buffers(None, list(net.aside.parameters()), 1 << 20, 0)


@legal
def an_ignored_parameter_of_the_model_itself(job):
    net = Task()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, [".scale"])
    job.make(net, parameters=lambda net: [one for one in net.parameters() if one is not net.scale])
    own = torch.optim.SGD([net.scale], lr=0.1)
    for _ in range(3):
        job.steps(1)
        dist.all_reduce(net.scale.grad)
        own.step()
        own.zero_grad()


@legal
def a_layer_of_its_own_outside_of_ddp(job):
    job.make()
    layer = nn.Linear(8, 8)
    own = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        own.zero_grad()
        job.steps(1, forward=lambda x: job.ddp(layer(x)))
        own.step()


@legal
def a_closure_of_an_averaged_pass(job):
    job.make()
    for _ in range(3):
        job.optimizer.step(job.closure(job.ddp))


@legal
def several_closures(job):
    if job.overlapped:
        return  # refused
    make = lambda parameters, lr: torch.optim.LBFGS(parameters, lr=lr, max_iter=3)  # noqa: E731
    job.make(optimizer=make)
    job.optimizer.step(job.closure(job.ddp, job.batch()))
    sync_params_and_buffers(None, list(job.net.parameters()), 1 << 20, 0)  # ranks' own losses choose steps


@legal
def a_step_twice_with_the_same_gradients(job):
    job.make().steps()
    job.optimizer.step()


@legal
def scaled_and_clipped_gradients(job):
    if job.overlapped:
        return  # refused
    job.make()
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(3):
        job.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = job.ddp(job.batch())
        scaler.scale(loss).backward()
        scaler.unscale_(job.optimizer)
        nn.utils.clip_grad_norm_(job.net.parameters(), 1.0)
        scaler.step(job.optimizer)
        scaler.update()


@legal
def a_skipped_step(job):
    job.make().steps()
    with job.pause():
        job.net.zero_grad()
        job.backward()
    job.net.zero_grad()
    job.steps()


@legal
def a_copy_that_is_tuned_on_its_own(job):
    job.make().steps()
    mine = copy.deepcopy(job.net)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        mine(job.batch()).backward()
        optimizer.step()
    job.steps()


@legal
def the_module_alone_when_ddp_is_gone(job):
    job.make().steps()
    if job.overlapped:
        job.handle.remove()
    del job.ddp
    job.steps(forward=job.net)
    sync_params_and_buffers(None, list(job.net.parameters()), 1 << 20, 0)


@legal
def layers_that_were_frozen_before_bind(job):
    torch.manual_seed(0)
    net = job.net = Net()
    job.ddp = DistributedDataParallel(net, find_unused_parameters=True)
    net.encoder.requires_grad_(False)
    job.optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    job.attach(job.ddp, job.optimizer)
    job.steps()
    net.encoder.requires_grad_(True)
    job.steps()


@legal
def a_new_ddp_after_unfreezing(job):
    net = Net()
    net.encoder.requires_grad_(False)
    job.make(net, parameters=lambda net: [one for one in net.parameters() if one.requires_grad]).steps()
    earlier = job.ddp
    if job.overlapped:
        job.handle.remove()
    net.encoder.requires_grad_(True)
    job.make(net).steps()
    assert earlier.module is job.ddp.module


@legal
def evaluation_between_steps(job):
    job.make()
    for _ in range(3):
        job.steps(1)
        with torch.no_grad():
            job.ddp(job.batch())
            job.net(job.batch())


@legal
def a_loop_in_another_thread(job):
    job.make()
    errors = []

    def loop():
        try:
            job.steps()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    for error in errors:
        raise error


@legal
def a_compiled_model(job):
    job.make(bucket_cap_mb=25)
    job.steps(forward=torch.compile(job.ddp, backend="eager"))


@legal
def views_of_buckets(job):
    job.make(gradient_as_bucket_view=True).steps()


@legal
def a_resumed_model(job):
    job.make().steps()
    saved = copy.deepcopy((job.net.state_dict(), job.optimizer.state_dict()))
    job.steps()
    job.net.load_state_dict(saved[0])
    job.optimizer.load_state_dict(saved[1])
    job.steps()


@legal
def tied_weights(job):
    net = Net()
    net.aside.weight = net.head.weight
    job.make(net).steps()
