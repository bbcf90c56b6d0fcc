"""What a user may decide about low rank, and what happens between its steps, on real ranks."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from averaging_callers import LowRankBuckets, LowRankTensors, make_low_rank_state
from quant_buckets import differences, flat_residuals, through_file
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks import LowRankState, all_reduce, low_rank_hook
from ddp_quant_hooks.lowrank.factors import arrange, rank_of
from ddp_quant_hooks.lowrank.state import divide
from dist_utils.testing import patience, run_ranks, same_on_all_ranks


def test_the_rank_by_width_grows_by_four_with_each_doubling():
    widths = (1, 40, 63, 64, 127, 128, 255, 256, 384, 512, 1024, 4096)
    ranks = [rank_of(width, 4 * width, "auto") for width in widths]
    assert ranks == [4, 4, 4, 4, 4, 8, 8, 12, 12, 16, 20, 28]
    assert rank_of(4096, 128, "auto") == 8
    assert [one.rank for one in arrange([(64, 600), (300, 300)], "auto").matrices] == [4, 12]


# ---- exact names ----


def _exact(_):
    """Return which parameters have exact means, of a model with a pattern for some."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 40), torch.nn.Linear(40, 64), torch.nn.Linear(64, 50))
    words = torch.randint(50, (30,), generator=torch.Generator().manual_seed(dist.get_rank()))
    found = {}
    for exact in ((), ("1.weight", "*.bias"), ("*",)):
        means = {}
        for make in (lambda exact=exact: make_low_rank_state(exact=exact, warm_up_steps=0), None):
            model.zero_grad()
            ddp = DistributedDataParallel(model)
            if make is not None:
                state = make()
                ddp.register_comm_hook(state.bind(ddp), low_rank_hook)
            torch.nn.functional.cross_entropy(ddp(words), words).backward()
            means[make is None] = {name: one.grad.clone() for name, one in model.named_parameters()}
        equal = [
            name for name, mean in means[False].items() if torch.allclose(mean, means[True][name], atol=1e-9)
        ]
        found[exact] = equal, same_on_all_ranks([*means[False].values()]), state.statistics.plain_buckets
        state.close()
    ddp = DistributedDataParallel(model)
    with pytest.raises(ValueError, match="no parameter of the model has such a name"):
        make_low_rank_state(exact=["3.weight"]).bind(ddp)
    ddp.register_comm_hook(make_low_rank_state(exact=["1.weight"]), low_rank_hook)
    with pytest.raises((RuntimeError, ValueError), match="bind the state to its model"):
        torch.nn.functional.cross_entropy(ddp(words), words).backward()
    return found


def test_names_are_kept_exact():
    for found in run_ranks(_exact, 2):
        assert found[()] == ([], True, 0)
        assert found[("1.weight", "*.bias")] == (["1.weight", "1.bias", "2.bias"], True, 0)
        names, same, plain = found[("*",)]
        assert (len(names), same) == (5, True)
        assert plain > 0
    with pytest.raises(TypeError, match="exact must be a sequence of patterns"):
        LowRankState(exact="layer")
    with pytest.raises(ValueError, match=r"^bits must be 8 or 4, got 16$"):
        LowRankState(bits=16)
    with pytest.raises(ValueError, match="residual_bits must be 1 or None, got 2"):
        LowRankState(residual_bits=2)


# ---- between steps ----


def _rescaled(_):
    """Gradients that are scaled by 8 from the fourth step on have means of 8 times, if the state is told."""
    means = []
    for factor, told in ((1.0, False), (8.0, True), (8.0, False)):
        caller = LowRankTensors()
        of_run = []
        for number in range(5):
            scale = factor if number >= 3 else 1.0
            if number == 3 and told:
                caller.state.rescale(factor)
            values = scale * caller.values(number)
            with mock.patch.object(caller, "values", return_value=values):
                of_run.append(caller.mean(number) / scale)
        means.append(of_run)
        caller.state.close()
    told, untold = (differences(means[0], other) for other in means[1:])
    assert told == {}
    assert untold.keys() == {3, 4}


def _save(_):
    caller = LowRankBuckets(residual_bits=1)
    for number in range(3):
        caller.mean(number)
    with torch.device("meta"):  # a default device, as a program may have one
        gathered = caller.state.gather_state_dict()
    return through_file(gathered), through_file(caller.state.state_dict())


def _go_on(rank, gathered):
    caller = LowRankBuckets(residual_bits=1)
    caller.warm_up()
    with torch.device("meta"):
        caller.state.scatter_state_dict(gathered if rank == 0 else None)
    loaded = caller.state.state_dict()
    mean = caller.mean(3)
    return loaded, same_on_all_ranks([mean])


def test_other_numbers_of_ranks_go_on_with_the_mean_of_all_residuals():
    (gathered, first), (_, second) = run_ranks(_save, 2)
    assert len(gathered["ranks"]) == 2
    kept = [flat_residuals(one) for one in (first, second)]
    means = {name: ((kept[0][name].float() + kept[1][name].float()) / 2).bfloat16() for name in kept[0]}
    for ranks in (1, 2, 3):
        for rank, (loaded, same) in enumerate(run_ranks(_go_on, ranks, gathered)):
            assert same
            assert differences(flat_residuals(loaded), kept[rank] if ranks == 2 else means) == {}
            assert differences(flat_residuals(loaded, "factor"), flat_residuals(first, "factor")) == {}


def _save_rests(_):
    """Save what three ranks have left, also of the means of what factors leave out."""
    state = make_low_rank_state(residual_bits=1)
    for number in range(3):
        values = torch.randn(60, 50, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        all_reduce(values, dist.ReduceOp.AVG, state, key="values")
    return through_file(state.gather_state_dict())


def test_errors_of_means_go_on_with_another_number_of_ranks():
    saved = run_ranks(_save_rests, 3)[0]["ranks"]
    for ranks in (1, 2, 4):
        left = [torch.zeros(3000), torch.zeros(3000)]
        for total, of_ranks in zip(left, (saved, divide(saved, ranks)), strict=True):
            for rank in of_ranks:
                slots = rank["keys"]["values"]["slots"]
                assert ("rest" in slots) == (of_ranks is saved)
                for name in {"own", "rest"} & slots.keys():
                    for start, weight, values in slots[name]["pieces"]:
                        total[start : start + len(values)] += weight * values.float()
        torch.testing.assert_close(left[1], left[0], rtol=2.0**-8, atol=0.0)


def test_what_no_rank_has_saved_is_refused():
    for broken in ({}, {"parameters": {"a": {}}, "keys": {}}):
        with pytest.raises(ValueError, match="these are not residuals"):
            divide([broken, broken], 3)


# ---- gradients of all kinds ----


def _zero_first(_):
    """Gradients that begin with zeros on all ranks have finite means."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for rank in (1, 2, 8):
        model = torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.Linear(64, 30))
        ddp, state = DistributedDataParallel(model), make_low_rank_state(rank=rank)
        ddp.register_comm_hook(state.bind(ddp), low_rank_hook)
        zero = []
        for number in range(6):
            ddp.zero_grad()
            x = torch.randn(8, 40, generator=generator)
            (ddp(x).square().mean() * (number >= 3)).backward()
            zero.append(not any(one.grad.any() for one in model.parameters()))
        assert all(one.grad.isfinite().all() for one in model.parameters())
        assert zero == [True] * 3 + [False] * 3
        state.close()


def _turned(rank):
    """A matrix of as many values but another shape begins with factors of its own."""
    known, without_factors = make_low_rank_state(), make_low_rank_state()
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        all_reduce(torch.randn(60, 40, generator=generator), dist.ReduceOp.AVG, known, key="a")
    saved = known.state_dict()
    del saved["keys"]["a"]["slots"]["factor"]
    without_factors.load_state_dict(saved)
    values = torch.randn(40, 60, generator=generator)
    means = [values.clone() for _ in range(2)]
    for state, mean in zip((known, without_factors), means, strict=True):
        all_reduce(mean, dist.ReduceOp.AVG, state, key="a")
    assert torch.equal(*means)


def _first_step(rank):
    """A first step has factors to begin with: a matrix of their rank is averaged at once."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(60, 1, generator=generator) @ torch.randn(1, 40, generator=generator)
    exact = values / 2
    dist.all_reduce(exact)
    all_reduce(values, dist.ReduceOp.AVG, make_low_rank_state(warm_up_steps=0), key="a")
    assert (values - exact).norm() < 0.5 * exact.norm()


def _other_steps(rank):
    for check in (_first_step, _rescaled, _zero_first, _turned):
        check(rank)


def test_first_steps_and_steps_with_another_loss_scale_or_another_shape_or_after_zeros():
    run_ranks(_other_steps, 2)


# ---- ranks that fail ----


def _counts_on_one_rank(rank):
    """Return whether ranks average alike after a last step of the warm-up that has failed on one of them."""
    caller, steps = LowRankTensors(warm_up_steps=2), []
    caller.mean(0)
    caller.between.fails = rank == 1  # after its averages
    with nullcontext() if rank == 0 else pytest.raises(ZeroDivisionError):
        caller.mean(1)
    caller.between.fails = False
    steps.append(caller.state.state_dict()["steps"])
    caller.state.close()
    alike = same_on_all_ranks([caller.mean(2)])
    steps.append(caller.state.state_dict()["steps"])
    return alike, steps


def test_ranks_that_have_counted_other_steps_agree_on_them_with_the_next_group():
    assert run_ranks(_counts_on_one_rank, 2, group_timeout=patience(5.0)) == [(True, [2, 3]), (True, [1, 3])]
