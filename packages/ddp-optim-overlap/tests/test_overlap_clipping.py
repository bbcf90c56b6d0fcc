"""Clipping inside the overlapped step: exact or approximate, as documented."""

import itertools

import pytest
import torch
from overlap_runs import (
    Net,
    assert_same,
    backward,
    batches,
    differences,
    make_ddp,
    one_group,
    snapshot,
    start,
)

from ddp_optim_overlap import ByValue, ConfigError, PerBucketNorm, PreviousStepNorm, overlap_optimizer
from dist_utils.testing import run_ranks

ADAMW = one_group(torch.optim.AdamW, {"lr": 0.01})
LIMIT = 0.02  # below the norm of every bucket


def _norm(gradients):
    return torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients]))


def _clip_value(ddp):
    torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.01)


def _exact(_):
    clip = {"options": {"clip": ByValue(0.01)}}
    seen = {
        (view, accumulate): differences(
            ADAMW, after_backward=_clip_value, gradient_as_bucket_view=view, accumulate=accumulate, **clip
        )
        for view in (False, True)
        for accumulate in (1, 2)
    }
    return seen, differences(ADAMW, **clip)


def test_clipping_by_value_is_exact():
    for seen, unclipped in run_ranks(_exact, 2, timeout=90):
        assert not any(seen.values()), seen
        assert unclipped


def _looks(_):
    """A limit that is never reached changes no bit, and is refused all the same; looking at a norm is not."""
    for view in (False, True):
        ddp, optimizer, _ = start(gradient_as_bucket_view=view)
        for x in batches(3):
            backward(ddp, x)
            gradients = [parameter.grad for parameter in ddp.parameters()]
            assert torch.nn.utils.get_total_norm(gradients) > 0
            optimizer.step()
            optimizer.zero_grad()
        backward(ddp, batches(1)[0])
        before = snapshot(ddp)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), float("inf"))
        with pytest.raises(ConfigError, match="get_total_norm"):
            optimizer.step()
        assert_same(snapshot(ddp), before)


def test_clipping_in_the_loop_is_refused_even_without_a_limit():
    run_ranks(_looks, 2)


def _approximations(_):
    """SGD with a rate of one reveals the gradient that it used."""
    seen = {}
    for name, clip in {"bucket": PerBucketNorm(LIMIT), "previous": PreviousStepNorm(LIMIT)}.items():
        ddp = make_ddp()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        handle = overlap_optimizer(ddp, optimizer, clip=clip)
        norms, reported = [], []
        for x in batches(4):
            before = snapshot(ddp)
            full = _full_gradient(ddp.module, x)
            torch.distributed.all_reduce(full)
            optimizer.zero_grad()
            ddp(x).square().sum().backward()
            report = handle.wait()
            used = _norm([one - p.detach() for one, p in zip(before, ddp.parameters(), strict=True)])
            norms.append((full.norm().item() / 2, used.item(), report.buckets))
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
    for policy in (ByValue, PerBucketNorm, PreviousStepNorm):
        for limit in (0.0, -1.0, float("nan")):
            with pytest.raises(ValueError, match="positive"):
                policy(limit)


def test_a_bucket_without_gradients_has_a_zero_norm_on_its_own_device():
    clip = PreviousStepNorm(1.0)
    clip.begin()
    clip.clip([torch.nn.Parameter(torch.empty(3, device="meta"))])
    assert clip.norm.device.type == "meta"
