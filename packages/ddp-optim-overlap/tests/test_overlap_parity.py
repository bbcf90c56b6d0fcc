"""Every optimizer, every way to run DDP: the bits of ``backward(); optimizer.step()``."""

import pytest
import torch
from overlap_runs import FUSED, OPTIMIZERS, PoisonedPages, differences, make_ddp, train
from parity_cases import ADAMW, MODES, every_mode, every_optimizer

from dist_utils.testing import run_ranks


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((("unused, no_sync", "resume"), ("unused, no_sync",)), id="some modes"),
        pytest.param((tuple(MODES), tuple(MODES)), id="every mode", marks=pytest.mark.exhaustive),
    ],
)
def optimizers(request):
    modes, released_modes = request.param
    return run_ranks(every_optimizer, 2, modes, released_modes, timeout=600), len(modes)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_in_every_implementation(optimizers, name):
    ranks, modes = optimizers
    for rank in ranks:
        cases = {case: different for case, different in rank.items() if case[0] == name}
        assert len(cases) == (3 if name in FUSED else 2) * modes
        assert not any(cases.values()), cases


SOME_MODES = [name for name in MODES if not name.endswith(", bucket view")]


@pytest.fixture(scope="module")
def some_modes():
    return run_ranks(every_mode, 2, SOME_MODES, timeout=240)


@pytest.fixture(scope="module")
def other_modes():
    return run_ranks(every_mode, 2, [name for name in MODES if name not in SOME_MODES], timeout=240)


@pytest.mark.parametrize(
    ("fixture", "name"),
    [
        *(("some_modes", name) for name in [*SOME_MODES, "step does more"]),
        *(
            pytest.param("other_modes", name, marks=pytest.mark.exhaustive)
            for name in MODES
            if name not in SOME_MODES
        ),
    ],
)
def test_every_way_to_run_ddp(request, fixture, name):
    for rank in request.getfixturevalue(fixture):
        cases = {case: different for case, different in rank.items() if case[-1] == name}
        assert cases
        assert not any(cases.values()), cases


def _three(_):
    """With three ranks, dividing and multiplying, before or after the sum, give different bits."""
    seen = {
        view: differences(ADAMW, gradient_as_bucket_view=view, released=[PoisonedPages])
        for view in (False, True)
    }
    moved = train(ADAMW, overlap=True)["parameters"]
    start = [parameter.detach() for parameter in make_ddp().parameters()]
    seen["moved"] = not any(torch.equal(one, other) for one, other in zip(moved, start, strict=True))
    seen["tensor lr"] = differences(
        lambda ddp: [torch.optim.SGD(ddp.parameters(), lr=torch.tensor(0.1), foreach=True)]
    )
    seen["Muon"] = differences(_muon) if hasattr(torch.optim, "Muon") else []
    return seen


def _muon(ddp):
    weights = [layer.weight for layer in ddp.module.layers]
    rest = [one for one in ddp.parameters() if all(one is not weight for weight in weights)]
    return [torch.optim.Muon(weights, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def test_three_ranks():
    for rank in run_ranks(_three, 3, timeout=120):
        assert rank == {False: [], True: [], "moved": True, "tensor lr": [], "Muon": []}
