"""A rank that fails in the first step, where ranks still meet: every other raises within one timeout.

They meet in a hook's agreements and its private group, and in those of the overlapped step. What one of them
has waited for in vain the next must not wait for again.
"""

import gc
import time
import weakref
from datetime import timedelta

import pytest
import torch.distributed as dist
from soak import trouble
from soak.records import digests
from soak.trainings import TRAININGS

from dist_utils.testing import patience, run_ranks
from dist_utils.torch_compat import default_store

STEPS = 3


def _train(training):
    for step in range(STEPS):
        training.step(step)


def _fail_everywhere(rank, name, victim):
    """Fail at each place in the first step of a training, with a fresh start after each.

    The rank that fails keeps its process and its groups until the others have raised: they hear nothing of it
    but that it does not come. A failed step of an optimizer ends WORLD, too, in DDP's next collective.
    """
    store, seconds, errors, trained = default_store(), {}, {}, None
    for place in ("hook", "forward", "backward", "nowhere", "optimizer"):
        training = TRAININGS[name].begin()
        if place == "nowhere":
            _train(training)
            trained = digests(training.parameters())
        else:
            if rank == victim:
                trouble.arm(place, 0, trouble.raise_here)
            began = time.monotonic()
            with pytest.raises((RuntimeError, trouble.UserError)) as caught:
                _train(training)
            seconds[place], errors[place] = time.monotonic() - began, str(caught.value)
            del caught
        store.set(f"{place}/{rank}", "over")
        store.wait([f"{place}/{other}" for other in range(dist.get_world_size())], timedelta(seconds=120))
        net = weakref.ref(training.net)
        training.close()
        gc.collect()
        assert net() is None, f"after an error in {place} the model is never freed"
    return seconds, errors, trained


@pytest.mark.parametrize(
    ("training", "size", "victim"),
    [
        ("auto, overlap", 3, 2),
        ("hierarchical, overlap", 4, 3),
        pytest.param("8 bits, overlap", 2, 0, marks=pytest.mark.exhaustive),
        pytest.param("bf16, fp32 sums, released", 2, 1, marks=pytest.mark.exhaustive),
        pytest.param("per channel, overlap", 2, 0, marks=pytest.mark.exhaustive),
    ],
)
def test_every_rank_raises_within_one_timeout(training, size, victim):
    timeout = patience(2.0)
    ranks = run_ranks(
        _fail_everywhere, size, training, victim, group_timeout=timeout, timeout=60 + 10 * timeout
    )
    for seconds, errors, trained in ranks:
        assert max(seconds.values()) < 2 * timeout, (seconds, errors)
        assert trained == ranks[0][2]
