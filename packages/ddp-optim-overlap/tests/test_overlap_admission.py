"""Which optimizers are taken: torch's reviewed ones, and declared ones that pass a short trial."""

import threading

import pytest
import torch
import torch.distributed as dist
from declared_optimizers import ACCEPTED, Knows, Lamb, Lion, Steps

from ddp_optim_overlap.errors import UnsupportedGradientError, UnsupportedOptimizerError
from ddp_optim_overlap.optimizers.reviewed import (
    NOT_PER_PARAMETER,
    PER_PARAMETER,
    declare_steps_per_parameter,
    is_reviewed,
    require_plain_step,
    require_sparse_support,
    require_step_per_parameter,
)
from ddp_optim_overlap.optimizers.trial import require_passed_trial
from dist_utils.testing import run_ranks

KINDS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}


def make_parameters():
    generator = torch.Generator().manual_seed(0)
    shapes = [(40, 50), (6, 5), (4, 3, 3, 3), (5,), (8,), (3, 3)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def declared(optimizer):
    """Take an optimizer by declaration."""
    require_plain_step(optimizer)
    require_step_per_parameter(optimizer, declared=True, sparse=())


# torch's own


def test_every_class_of_torch_was_reviewed():
    new = KINDS.keys() - PER_PARAMETER - NOT_PER_PARAMETER
    assert not new, (
        f"torch.optim has new optimizers: {sorted(new)}. Read whether anything couples parameters, with "
        "foreach and fused, too, and add them to PER_PARAMETER or NOT_PER_PARAMETER"
    )


OPTIONS = [{}, {"foreach": True}, {"fused": True}, {"weight_decay": 0.1, "maximize": True}]
MORE_OPTIONS = {
    "SGD": [{"momentum": 0.9, "nesterov": True, **extra} for extra in OPTIONS[:3]],
    "Adam": [{"amsgrad": True, **extra} for extra in OPTIONS[:3]],
    "RMSprop": [{"momentum": 0.9, "centered": True, **extra} for extra in OPTIONS[:2]],
    "Muon": [{"nesterov": False}],
}


@pytest.mark.parametrize("name", sorted(PER_PARAMETER & KINDS.keys() - {"SparseAdam"}))
def test_reviewed_optimizers_are_taken_and_would_pass_the_trial(name):
    tried = 0
    for options in [*OPTIONS, *MORE_OPTIONS.get(name, [])]:
        parameters = [one for one in make_parameters() if name != "Muon" or one.dim() == 2]
        try:
            optimizer = KINDS[name]([{"params": parameters[:2]}, {"params": parameters[2:]}], **options)
        except TypeError:  # not an option of this class
            continue
        assert is_reviewed(optimizer)
        require_plain_step(optimizer)
        require_step_per_parameter(optimizer, declared=False, sparse=())
        require_passed_trial(optimizer, ())
        tried += 1
    assert tried


def test_lbfgs_is_not_taken():
    optimizer = torch.optim.LBFGS(make_parameters())
    assert not is_reviewed(optimizer)
    with pytest.raises(UnsupportedOptimizerError, match=r"needs a closure.* ordinary loop with the same"):
        require_plain_step(optimizer)


def test_adafactor_is_refused_where_its_eps_is_that_of_another_dtype():
    parameters = [
        torch.nn.Parameter(torch.randn(4, 4, dtype=dtype)) for dtype in (torch.float32, torch.float64)
    ]
    with pytest.raises(UnsupportedOptimizerError, match="eps"):
        require_step_per_parameter(torch.optim.Adafactor(parameters), declared=False, sparse=())
    for optimizer in (
        torch.optim.Adafactor(parameters, eps=(1e-7, 1e-3)),
        torch.optim.Adafactor([{"params": [one]} for one in parameters]),
    ):
        require_step_per_parameter(optimizer, declared=False, sparse=())


def test_adagrad_is_refused_where_one_sparse_gradient_changes_the_operators_of_others():
    def require(device, **options):
        parameters = [torch.nn.Parameter(torch.ones(4, 4, device=device)) for _ in range(2)]
        optimizer = torch.optim.Adagrad(parameters, **options)
        require_step_per_parameter(optimizer, declared=False, sparse=parameters[:1])

    with pytest.raises(UnsupportedOptimizerError, match="foreach=False"):
        require("meta")  # as on any device but the CPU
    require("meta", foreach=False)
    require("cpu")


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_sparse_gradients_are_supported(kind):
    parameters = make_parameters()
    optimizer = kind(parameters)
    require_sparse_support(optimizer, parameters[0], "embedding.weight")
    require_step_per_parameter(optimizer, declared=True, sparse=parameters)


def test_sparse_gradients_that_an_optimizer_cannot_step_are_refused():
    parameters = make_parameters()
    with pytest.raises(UnsupportedGradientError, match=r"Adam cannot step embedding\.weight"):
        require_sparse_support(torch.optim.Adam(parameters), parameters[1], "embedding.weight")


# Declared ones


@pytest.mark.parametrize("kind", ACCEPTED)
def test_optimizers_that_step_per_parameter_are_taken_by_declaration(kind):
    declared(kind(make_parameters(), lr=0.0))  # as at the begin of a warm-up
    groups = [{"params": [one]} for one in make_parameters()]
    optimizer = kind([one for group in groups for one in group["params"]])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces step() on the instance
    declared(optimizer)


@pytest.mark.parametrize("kind", [Lion, Lamb, torch.optim.Adam, torch.optim.Adadelta])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_parameters_may_have_any_dtype_shape_and_group(kind, dtype):
    if kind is Lion and dtype.is_complex:
        pytest.skip("a complex number has no sign")
    parameters = [torch.nn.Parameter(one.detach().to(dtype)) for one in make_parameters()]
    parameters += [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in [(), (0, 3), (1,) * 5]]
    parameters.append(torch.nn.Parameter(torch.ones(2, 2, dtype=torch.int64), requires_grad=False))
    with torch.device("meta"):
        declared(kind([{"params": parameters[:3]}, {"params": []}, {"params": parameters[3:]}]))


def test_the_error_says_what_to_write():
    optimizer = Lion(make_parameters())
    with pytest.raises(UnsupportedOptimizerError, match="Lion is not one") as caught:
        require_step_per_parameter(optimizer, declared=False, sparse=())
    for remedy in ("steps_per_parameter=True", "declare_steps_per_parameter(Lion)", "ordinary loop"):
        assert remedy in str(caught.value)


def test_a_class_is_declared_once_and_without_its_subclasses():
    @declare_steps_per_parameter
    class Declared(Lion):
        pass

    class Subclass(Declared):
        pass

    class OfTorch(torch.optim.SGD):
        pass

    require_step_per_parameter(Declared(make_parameters()), declared=False, sparse=())
    for kind in (Subclass, OfTorch):
        with pytest.raises(UnsupportedOptimizerError, match="is not one"):
            require_step_per_parameter(kind(make_parameters()), declared=False, sparse=())
    for other in (Lion(make_parameters()), torch.nn.Linear, None):
        with pytest.raises(TypeError, match=r"subclass of torch\.optim\.Optimizer"):
            declare_steps_per_parameter(other)


# What the trial refuses


class Prodigy(Steps):
    """Estimates one distance from all parameters."""

    def before_group(self, group, gradients):
        total = sum(float(gradient.square().sum()) for gradient in gradients)
        group["distance"] = max(group.get("distance", 1e-6), total)

    def update(self, parameter, gradient, state, group):
        return gradient.sign() * group["distance"]


class LambOfAll(Lamb):
    """Limits the norm of all gradients first."""

    def before(self):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)


class LimitsGroups(Steps):
    def before_group(self, group, gradients):
        if gradients and group["limit"]:
            torch._foreach_mul_(
                gradients, (group["limit"] / torch.stack(torch._foreach_norm(gradients)).norm()).clamp(max=1)
            )


class Skips(Steps):
    """Steps only if a condition on all gradients holds."""

    @torch.no_grad()
    def step(self, closure=None):
        gradients = [one.grad for group in self.param_groups for one in group["params"]]
        if not self.skips([one for one in gradients if one is not None], len(gradients)):
            super().step()


class SkipsNaN(Skips):
    def skips(self, gradients, count):
        return any(gradient.isnan().any() for gradient in gradients)


class SkipsLargeNorm(Skips):
    def skips(self, gradients, count):
        return torch.nn.utils.get_total_norm(gradients) > 1e18


class SkipsZeros(Skips):
    def skips(self, gradients, count):
        return not any(gradient.any() for gradient in gradients)


class SkipsUnlessAll(Skips):
    def skips(self, gradients, count):
        return len(gradients) < count


class SkipsGroupsWithNaN(Steps):
    def before_group(self, group, gradients):
        if any(gradient.isnan().any() for gradient in gradients):
            torch._foreach_zero_(gradients)


class CountsCalls(Steps):
    calls = 0

    def before(self):
        self.calls += 1


class Draws(Steps):
    def update(self, parameter, gradient, state, group):
        return gradient * torch.rand_like(gradient)


class KeepsInState(Steps):
    def update(self, parameter, gradient, state, group):
        return state.setdefault("kept", [gradient])[0]


class ReadsOthers(Steps):
    def __init__(self, params, **options):
        params = list(params)
        super().__init__(params, **options)
        self.everything = params

    def update(self, parameter, gradient, state, group):
        return gradient * len([one for one in self.everything if one.grad is not None])


class WritesOthers(ReadsOthers):
    def before(self):
        for one in self.everything:
            one.mul_(0.99)


class MovesNothing(Steps):
    def step(self, closure=None):
        pass


class Fails(Steps):
    def update(self, parameter, gradient, state, group):
        raise ValueError("of parameters like these")


class Sharpness(Steps):
    """Like SAM, whose step evaluates the model again."""

    def step(self, closure=None):
        assert closure is not None, "needs a closure"


class Lookahead(Steps):
    def __init__(self, params, **options):
        params = list(params)
        super().__init__(params, **options)
        self.fast = {"all": [torch.optim.SGD(params, lr=0.1)]}


class HasLock(Steps):
    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.lock = threading.Lock()


REFUSED = {
    Prodigy: "option 'distance'",
    LambOfAll: "differs if parameters are stepped one by one",
    SkipsNaN: "one of them with a gradient of NaN",
    SkipsLargeNorm: "one of them with an infinite gradient",
    SkipsZeros: "one of them with a gradient of zeros",
    SkipsUnlessAll: "one of them without a gradient",
    CountsCalls: "attribute 'calls'",
    Draws: "draws random numbers",
    KeepsInState: "keeps a gradient itself",
    ReadsOthers: "does not step per parameter",
    WritesOthers: "does not step per parameter",
    MovesNothing: "does not move",
    Fails: "ValueError: of parameters like these",
    Sharpness: "needs a closure",
    Lookahead: "another optimizer in its attribute 'fast'",
    HasLock: "cannot be copied",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_plainly_coupled_is_refused(kind):
    match = f"{kind.__name__}.*{REFUSED[kind]}.*: use the ordinary loop with the same communication hook"
    with pytest.raises(UnsupportedOptimizerError, match=f"(?s){match}"):
        declared(kind(make_parameters()))


def test_coupling_in_one_of_many_groups_is_refused():
    parameters = [make_parameters()[:4] for _ in range(5)]
    groups = [{"params": some, "limit": 0.0} for some in parameters]
    declared(LimitsGroups(groups))
    groups[3]["limit"] = 0.1
    for rate in (0.1, 0.0):  # at 0 nothing would be seen
        groups[3]["lr"] = rate
        with pytest.raises(UnsupportedOptimizerError, match="a parameter or its state differs"):
            declared(LimitsGroups(groups))


def test_a_gradient_that_is_not_finite_is_tried_beside_others_of_its_group():
    parameters = make_parameters()
    with pytest.raises(UnsupportedOptimizerError, match="with a gradient of NaN"):
        declared(SkipsGroupsWithNaN([{"params": parameters[:1]}, {"params": parameters[1:]}]))


class DecaysAll(Steps):
    """Decays also parameters without a gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.99)
        super().step()


def test_moving_parameters_without_a_gradient_is_refused_beside_frozen_ones():
    parameters = make_parameters()
    declared(DecaysAll(parameters))
    parameters[2].requires_grad_(False)
    declared(Lion(parameters))
    with pytest.raises(UnsupportedOptimizerError, match="some of its parameters are frozen"):
        declared(DecaysAll(parameters))


def test_what_is_not_a_plain_step_is_refused():
    def refuses(optimizer, match):
        with pytest.raises(UnsupportedOptimizerError, match=f"{match}.* ordinary loop with the same"):
            require_plain_step(optimizer)

    refuses(torch.optim.Adam(make_parameters(), differentiable=True), "differentiable=True")
    optimizer = torch.optim.SGD(make_parameters())
    optimizer.step = lambda: None
    refuses(optimizer, "step was replaced")
    optimizer.step = torch.compile(torch.optim.SGD(make_parameters()).step, backend="eager")
    refuses(optimizer, "is compiled")


# What the trial leaves alone


def state_of_everything(optimizer):
    """Return all that a trial must not change, in a form that ``==`` compares."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    tensors = [
        *parameters,
        *(one.grad for one in parameters),
        *(
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ),
    ]
    return (
        [(id(one), one._version, one.data_ptr(), one.tolist(), one.requires_grad) for one in tensors],
        [(id(one), list(vars(one).items())) for one in parameters],
        [{**group, "params": list(map(id, group["params"]))} for group in optimizer.param_groups],
        {id(owner): list(map(id, state)) for owner, state in optimizer.state.items()},
        {name: id(value) for name, value in vars(optimizer).items()},
        torch.get_rng_state().tolist(),
    )


@pytest.mark.parametrize("kind", [Knows, Lion, Draws, Fails, SkipsNaN])
def test_a_trial_changes_nothing(kind):
    optimizer = kind(make_parameters())
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad = torch.randn_like(one)
    if kind is Lion:
        optimizer.step()
    before = state_of_everything(optimizer)
    if kind in ACCEPTED:
        declared(optimizer)
    else:
        with pytest.raises(UnsupportedOptimizerError):
            declared(optimizer)
    assert state_of_everything(optimizer) == before


# Communication


class Sums(Steps):
    """Sums gradients over the ranks, in the first step or for matrices only."""

    def update(self, parameter, gradient, state, group):
        if parameter.dim() == 2:
            dist.all_reduce(gradient)
        return gradient


class HasGroup(Steps):
    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.process_group = dist.group.WORLD


def _communicates(rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 - warns, which pytest refuses

    optimizers = [
        *(kind(make_parameters()) for kind in (Sums, HasGroup)),
        ZeroRedundancyOptimizer(make_parameters(), torch.optim.SGD, lr=0.1),
    ]
    texts = []
    for optimizer in optimizers[rank:] + optimizers[:rank]:  # not the same one on both ranks
        try:
            declared(optimizer)
        except UnsupportedOptimizerError as error:
            texts.append(str(error))
    value = torch.ones(3)
    dist.all_reduce(value)
    return texts[-rank:] + texts[:-rank] if rank else texts, value.tolist()


def test_communication_is_refused_before_it_happens():
    for texts, value in run_ranks(_communicates, 2):
        for text, found in zip(
            texts,
            ["communicates (c10d::", "cannot be copied", "communicates in"],
            strict=True,
        ):
            assert found in text
        assert value == [2.0] * 3
