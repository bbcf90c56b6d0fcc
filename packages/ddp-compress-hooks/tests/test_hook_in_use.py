"""A state bound to a model warns if its hook is not registered, and is silent if it is in use."""

import pickle
import warnings

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_compress_hooks import CompressState, bf16_compress_hook
from dist_utils.testing import run_ranks


def _warnings_of(ddp, register):
    state = CompressState(accumulate="fp32").bind(ddp)
    if register:
        ddp.register_comm_hook(state, bf16_compress_hook)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        for _ in range(4):
            ddp(torch.ones(2, 40)).sum().backward()
        pickle.loads(pickle.dumps(state))
    return [str(one.message) for one in caught]


def _watched(_):
    ddp = DistributedDataParallel(torch.nn.Linear(40, 40))
    return _warnings_of(ddp, register=False), _warnings_of(ddp, register=True)


def test_a_bound_state_warns_if_its_hook_is_not_in_use():
    for ignored, registered in run_ranks(_watched, 2):
        assert "CompressState that is bound to it has got no bucket" in ignored[0]
        for (pickled,) in (ignored[1:], registered):
            assert "pickles without its process group" in pickled
