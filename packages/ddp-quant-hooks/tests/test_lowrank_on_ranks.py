"""``LowRankState`` and its hook on real ranks."""

import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from averaging_callers import make_low_rank_state, nodes_of_one_rank
from quant_buckets import assert_same, flat_residuals
from resumed_runs import COMPLEX, Run, differences_after_resume, resumed
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks import (
    AutoState,
    LowRankState,
    auto_hook,
    low_rank_hook,
    reduce_scatter_tensor,
)
from ddp_quant_hooks.fsdp import quantize_all_reduce
from dist_utils.testing import grad_bucket, run_ranks, same_on_all_ranks

SECTIONS = [[(1024, 512)], [(128,), (768, 1024)]]
"""Shapes in a bucket that is averaged in two sections, by section."""


def _in_sections_and_alone(rank, options):
    """Return whether sections of one bucket have the bits of buckets of their own, and all ranks those."""
    state, alone = LowRankState(**options), [LowRankState(**options) for _ in SECTIONS]
    generator = torch.Generator().manual_seed(rank)
    equal = []
    for _ in range(3):
        gradients = [[torch.randn(shape, generator=generator) for shape in of_one] for of_one in SECTIONS]
        together = grad_bucket([one for of_one in gradients for one in of_one])
        mean = low_rank_hook(state, together).wait()
        apart = [
            low_rank_hook(own, grad_bucket(of_one)).wait()
            for own, of_one in zip(alone, gradients, strict=True)
        ]
        equal += [torch.equal(mean, torch.cat(apart)), same_on_all_ranks(mean)]
    decided = state.average.decide(dist.group.WORLD, together.parameters(), [mean])
    return equal, len(decided.plan.warm.sections)


@pytest.mark.parametrize(("ranks", "residual_bits"), [(2, None), (2, 1), (3, None)])
def test_sections_have_the_bits_of_buckets_of_their_own(ranks, residual_bits):
    options = {"rank": 24, "warm_up_steps": 1, "residual_bits": residual_bits}
    for equal, sections in run_ranks(_in_sections_and_alone, ranks, options):
        assert all(equal)
        assert sections == 2


def _many_models(_):
    """Models of all kinds are averaged alike on all ranks."""
    convolutions = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.Conv2d(16, 24, 3), torch.nn.Flatten(), torch.nn.Linear(24 * 16, 5)
    )
    channels_last = torch.nn.Sequential(*convolutions).to(memory_format=torch.channels_last)
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    words = torch.randint(100, (40,), generator=torch.Generator().manual_seed(dist.get_rank()))
    embedding = torch.nn.Embedding(100, 40)
    tied = torch.nn.Linear(40, 100, bias=False)
    tied.weight = embedding.weight
    vectors = torch.randn(8, 40, generator=torch.Generator().manual_seed(dist.get_rank()))
    one_layer = [
        (str(dtype), torch.nn.Linear(40, 64, dtype=dtype), vectors.to(dtype))
        for dtype in (torch.bfloat16, torch.float16, COMPLEX, torch.float64)
    ]
    for name, model, batch in (
        *one_layer,
        ("channels last", channels_last, images.contiguous(memory_format=torch.channels_last)),
        ("tied", torch.nn.Sequential(embedding, tied), words),
        (
            "frozen",
            torch.nn.Sequential(torch.nn.Linear(40, 40).requires_grad_(False), torch.nn.Linear(40, 64)),
            vectors,
        ),
    ):
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=name == "tied", bucket_cap_mb=0.01)
        state = make_low_rank_state(residual_bits=1 if batch.dtype in {torch.float16, COMPLEX} else None)
        ddp.register_comm_hook(state.bind(ddp), low_rank_hook)
        for _ in range(4):
            ddp.zero_grad()
            ddp(batch).abs().square().mean().backward()
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        assert all(one.isfinite().all() for one in gradients), name
        assert same_on_all_ranks(gradients), name
        assert (state.statistics.plain_buckets > 0) == (name == "torch.float64"), name
        state.close()


def _unused(_):
    """Ranks stay alike while some parameters take no part, and some ranks have joined."""
    run = Run(
        make_low_rank_state,
        hook=low_rank_hook,
        use=lambda number: number % 2 == 0,
        find_unused_parameters=True,
    )
    for number in range(5):
        run.step(number)
    assert same_on_all_ranks([run.weights()])
    context = run.ddp.join() if dist.get_world_size() > 1 else nullcontext()
    with context:
        for number in range(3 + dist.get_rank()):
            run.step(number)
    assert same_on_all_ranks([run.weights()])
    run.state.close()


def _in_other_buckets(_):
    """Residuals and factors belong to parameters: runs go on, and others load the same file."""
    assert differences_after_resume(make_low_rank_state, hook=low_rank_hook) == {}
    run = Run(make_low_rank_state, hook=low_rank_hook)
    for number in range(3):
        run.step(number)
    other = resumed(run.save(), make_low_rank_state, hook=low_rank_hook, bucket_cap_mb=0.01)
    saved = run.state.state_dict()
    for kind in ("own", "factor"):
        assert_same(flat_residuals(saved, kind), flat_residuals(other.state.state_dict(), kind))
    assert {factors.dtype for factors in flat_residuals(saved, "factor").values()} == {torch.float32}
    other.step(3)
    assert same_on_all_ranks([other.weights()])


def _copies(_):
    """Copies have the options alone."""
    ddp = DistributedDataParallel(torch.nn.Linear(40, 64))
    state = LowRankState(rank=2, bits=8, residual_bits=1, warm_up_steps=0, exact=["bias"], min_bytes=9)
    ddp.register_comm_hook(state.bind(ddp), low_rank_hook)
    ddp(torch.ones(2, 40)).sum().backward()
    with pytest.warns(UserWarning, match="a LowRankState pickles its options only"):
        copied = pickle.loads(pickle.dumps(state))
    assert state.arguments() == copied.arguments()
    assert state.arguments()["exact"] == ("bias",)
    assert copied.state_dict()["parameters"] == copied.state_dict()["keys"] == {}


def _refusals(_):
    """Return what is refused."""
    state, texts = make_low_rank_state(), []
    with pytest.raises(ValueError, match="whole matrices"):
        reduce_scatter_tensor(torch.empty(4), torch.ones(8), dist.ReduceOp.AVG, state, key="shards")
    if hasattr(FSDPModule, "set_all_reduce_hook"):  # not in torch 2.6
        net = fully_shard(torch.nn.Linear(40, 64), mesh=nodes_of_one_rank()["shard"])
        with pytest.raises(ValueError, match=r"one flat tensor: exact=\['bias'\] does not work"):
            quantize_all_reduce(net, make_low_rank_state(exact=["bias"]))
    ddp = DistributedDataParallel(torch.nn.Linear(40, 64))
    ddp.register_comm_hook(LowRankState(rank=2 + dist.get_rank(), min_bytes=0), low_rank_hook)
    with pytest.raises(RuntimeError) as caught:
        ddp(torch.ones(2, 40)).sum().backward()
    texts.append(str(caught.value))
    return texts


def test_what_does_not_work_is_refused():
    for (text,) in run_ranks(_refusals, 2):
        assert "rank is 2 on rank 0, 3 on rank 1" in text
    with pytest.raises(ValueError, match="rank must be a number of at least 1, got 0"):
        LowRankState(rank=0)
    with pytest.raises(TypeError, match="rank must be an integer"):
        LowRankState(rank=1.5)
    with pytest.raises(ValueError, match="warm_up_steps must be a number of at least 0"):
        LowRankState(warm_up_steps=-1)
    with pytest.raises(TypeError, match="needs a LowRankState"):
        low_rank_hook(None, object())


def _as_candidate(_):
    """A choice may have it as a candidate, and follows a loss scale."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(200, 200))
    candidate = make_low_rank_state()
    state = AutoState(candidates={"low rank": (candidate, low_rank_hook)}, max_error=None)
    ddp.register_comm_hook(state.bind(ddp), auto_hook)
    for _ in range(4):
        ddp(torch.randn(4, 200)).square().mean().backward()
    before = flat_residuals(candidate.state_dict())
    state.rescale(0.5)
    half = {name: kept / 2 for name, kept in before.items()}
    assert before
    assert_same(half, flat_residuals(candidate.state_dict()))
    assert same_on_all_ranks([ddp.module.weight.grad])


def _states_of_two_ranks(rank):
    for check in (_many_models, _unused, _in_other_buckets, _copies, _as_candidate):
        check(rank)


def test_models_of_all_kinds_resumed_runs_copies_and_choices():
    run_ranks(_states_of_two_ranks, 2, timeout=120)
