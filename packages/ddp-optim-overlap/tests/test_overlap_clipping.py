"""Clipping and loss scaling: exact or approximate, as documented."""

import itertools

import pytest
import torch
from overlap_runs import Net, batches, differences, make_ddp, one_group, same

from ddp_optim_overlap import (
    ByValue,
    GlobalNorm,
    OverlapMode,
    PerBucketNorm,
    PreviousStepNorm,
    overlap_optimizer,
)
from dist_utils.testing import run_ranks

ADAMW = one_group(torch.optim.AdamW, {"lr": 0.01})
AFTER_REDUCE = OverlapMode.AFTER_REDUCE
LIMIT = 0.02  # below the norm of every bucket


def _norm(gradients):
    return torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients]))


def _clip_norm(ddp):
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)


def _clip_value(ddp):
    torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.01)


def _exact(_):
    seen = {}
    for view in (False, True):
        for accumulate in (1, 2):
            ways = {"gradient_as_bucket_view": view, "accumulate": accumulate}
            seen["norm", view, accumulate] = differences(
                ADAMW,
                after_backward=_clip_norm,
                options={"mode": AFTER_REDUCE, "clip": GlobalNorm(0.5)},
                **ways,
            )
            for mode in OverlapMode:
                seen["value", mode.name, view, accumulate] = differences(
                    ADAMW, after_backward=_clip_value, options={"mode": mode, "clip": ByValue(0.01)}, **ways
                )
    seen["it clips"] = bool(differences(ADAMW, options={"clip": ByValue(0.01)}))
    return seen


def test_global_norm_and_value_are_exact():
    for rank in run_ranks(_exact, 2, timeout=90):
        assert rank.pop("it clips")
        assert not any(rank.values()), rank


def _scaled(*, overlap, fused):
    """Train with a scaler; the third batch is infinite on rank 1 alone."""
    ddp = make_ddp()
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    clip = GlobalNorm(0.5)
    if overlap:
        overlap_optimizer(ddp, optimizer, mode=AFTER_REDUCE, clip=clip, scaler=scaler)
    history = []
    for step, x in enumerate(batches(5)):
        if step == 2 and torch.distributed.get_rank() == 1:
            x[0, 0, 0, 0] = torch.inf
        optimizer.zero_grad()
        scaler.scale(ddp(x).square().sum()).backward()
        if not overlap:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
            scaler.step(optimizer)
        scaler.update()
        history.append((scaler.get_scale(), [p.detach().clone() for p in ddp.parameters()]))
    return history, optimizer.state_dict()


def _scaler(_):
    seen = {}
    for fused in (False, True):
        ordinary, overlapped = (_scaled(overlap=overlap, fused=fused) for overlap in (False, True))
        seen[fused] = same(ordinary, overlapped)
        history = overlapped[0]
        seen["skipped", fused] = same(history[1][1], history[2][1])
        seen["halved", fused] = history[2][0] == history[1][0] / 2
    return seen


def test_a_grad_scaler_skips_and_unscales_as_in_the_ordinary_loop():
    for rank in run_ranks(_scaler, 2, timeout=60):
        assert all(rank.values()), rank


def _approximations(_):
    """SGD with a rate of one reveals the gradient that it used."""
    seen = {}
    for name, clip in {"bucket": PerBucketNorm(LIMIT), "previous": PreviousStepNorm(LIMIT)}.items():
        ddp = make_ddp()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        handle = overlap_optimizer(ddp, optimizer, clip=clip)
        norms, reported = [], []
        for x in batches(4):
            before = [p.detach().clone() for p in ddp.parameters()]
            full = [_full_gradient(ddp.module, x)]
            torch.distributed.all_reduce(full[0])
            optimizer.zero_grad()
            ddp(x).square().sum().backward()
            report = handle.wait()
            used = _norm([one - p.detach() for one, p in zip(before, ddp.parameters(), strict=True)])
            norms.append((full[0].norm().item() / 2, used.item(), report.buckets))
            reported.append(report.norm)
        seen[name] = norms, [None if norm is None else norm.item() for norm in reported]
    return seen


def _full_gradient(module, x):
    copied = Net()
    copied.load_state_dict(module.state_dict())
    copied(x).square().sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in copied.parameters()])


def test_approximations_do_what_they_say():
    for rank in run_ranks(_approximations, 2, timeout=60):
        norms, reported = rank["bucket"]
        assert reported == [None] * 4
        for full, used, buckets in norms:
            assert full > LIMIT * buckets**0.5
            assert used == pytest.approx(LIMIT * buckets**0.5, rel=1e-3)  # every bucket is at its limit
        norms, reported = rank["previous"]
        full = [norm for norm, _, _ in norms]
        assert reported == pytest.approx(full, rel=1e-4)
        used = [norm for _, norm, _ in norms]
        assert used[0] == pytest.approx(LIMIT * norms[0][2] ** 0.5, rel=1e-3)  # no norm is known yet
        expected = [LIMIT * now / before for before, now in itertools.pairwise(full)]
        assert used[1:] == pytest.approx(expected, rel=1e-3)


def test_limits_must_be_positive():
    for policy in (ByValue, GlobalNorm, PerBucketNorm, PreviousStepNorm):
        for limit in (0.0, -1.0, float("nan")):
            with pytest.raises(ValueError, match="positive"):
                policy(limit)


def test_a_bucket_without_gradients_has_a_zero_norm_on_its_own_device():
    clip = PreviousStepNorm(1.0)
    clip.begin()
    clip.clip([torch.nn.Parameter(torch.empty(3, device="meta"))])
    assert clip.norm.device.type == "meta"
