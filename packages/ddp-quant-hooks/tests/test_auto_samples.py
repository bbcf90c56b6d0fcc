"""AutoState measures its candidates' errors, and keeps the limit ``max_error``."""

import torch
from auto_runs import SECONDS, Net, Training, exact, quantized
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks import AutoState, Statistics, auto_hook
from dist_utils.testing import run_ranks

FOUR_BITS = 0.06, 0.2
"""The errors for the gradients here, without residuals."""


class _Embeddings(torch.nn.Module):
    """More sparse buckets than there are samples, each larger than the dense one."""

    def __init__(self):
        super().__init__()
        self.tables = torch.nn.ModuleList(torch.nn.Embedding(600, 16, sparse=True) for _ in range(6))
        self.last = torch.nn.Linear(16, 64)

    def forward(self, tokens):
        return self.last(sum(table(tokens) for table in self.tables))


def _chosen(net, loss, *, slow=SECONDS / 2):
    """Return the choice between slow full precision and 4 bits; every step has a different loss."""
    four = quantized(bits=4, error_feedback="none")
    state = AutoState(candidates={"exact": exact(slow), "4 bits": four}, max_error=0.05)
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.005)
    ddp.register_comm_hook(state.bind(ddp), auto_hook)
    for step in range(100):
        ddp.zero_grad()
        loss(ddp, torch.Generator().manual_seed(step)).backward()
        if state.choice is not None:
            break
    state.close()
    return state.choice.candidate, dict(state.choice.errors), state.choice.why


def _loss_of(ddp, generator, factor=1.0):
    return (ddp(torch.randn(8, 32, generator=generator)) * factor).sum()


def _samples(_):
    tokens = _chosen(
        _Embeddings(), lambda ddp, draw: ddp(torch.randint(600, (16,), generator=draw)).square().sum()
    )
    scaled = {
        factor: _chosen(Net(), lambda ddp, draw, factor=factor: _loss_of(ddp, draw, factor))
        for factor in (1e-30, 1e25)
    }
    nothing = _chosen(Net(), lambda ddp, draw: _loss_of(ddp, draw, float("nan")))
    # A candidate that ends one round and begins the next one has a turn without a break.
    candidates = {"exact": exact(SECONDS / 2), "4 bits": quantized(bits=4, error_feedback="both")}
    training = Training(AutoState(candidates=candidates, max_error=0.11))
    fed_back, _ = training.until_chosen()
    training.state.close()
    return tokens, scaled, nothing, fed_back


def test_a_candidate_with_too_large_errors_is_never_chosen():
    for tokens, scaled, nothing, fed_back in run_ranks(_samples, 2, timeout=120):
        for name, errors, why in (tokens, *scaled.values()):
            assert name == "exact", why
            assert errors["exact"] < 1e-6
            assert FOUR_BITS[0] < errors["4 bits"] < FOUR_BITS[1], why
        name, errors, why = nothing
        assert (name, errors) == ("exact", {})
        assert "no finite sample" in why
        assert fed_back.candidate == "4 bits"
        assert fed_back.errors["4 bits"] < 0.11, "residuals were in a sample"


def _nothing_within(_):
    """Return the choice where errors exclude both candidates: measured in a round, or known before."""
    found = []
    for max_error in (0.0036, 0.001):
        candidates = {name: quantized(block_size=size) for name, size in (("coarse", 1024), ("fine", 32))}
        training = Training(AutoState(candidates=candidates, max_error=max_error))
        found.append(training.until_chosen()[0])
        training.state.close()
    return found


def test_if_all_exceed_max_error_the_most_exact_one_is_chosen_and_not_said_to_be_left_out():
    for measured, known in run_ranks(_nothing_within, 2, timeout=60):
        assert measured.candidate == "fine"
        assert measured.errors["coarse"] > measured.errors["fine"] > 0.0036
        for choice in (measured, known):
            assert f"all but {choice.candidate} was left out: nothing is known to be within" in choice.why
            assert f"; {choice.candidate} was left out" not in choice.why


def _default(_):
    state = AutoState()
    training = Training(state)
    choice, _ = training.until_chosen()
    four = state.candidates["4 bits"].state
    found = choice, list(state.candidates), four.statistics, four.state_dict()["parameters"]
    state.close()
    return found


def test_by_default_4_bits_are_excluded_by_max_error_and_never_tried():
    """They would cost a pass of too large errors, and four bytes a value for residuals."""
    for choice, names, statistics, residuals in run_ranks(_default, 2, timeout=60):
        assert names == ["fp32", "bf16", "8 bits", "4 bits"]
        assert statistics == Statistics()
        assert residuals == {}
        assert choice.candidate in {"fp32", "bf16", "8 bits"} == choice.seconds.keys() == choice.errors.keys()
        assert "4 bits was left out: its error is hardly below 0.045, and max_error is 0.03" in choice.why
