"""A bound state warns if its hook is not registered with the model; a state in use does not."""

import warnings

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook
from dist_utils.testing import run_ranks


def _ignored(state, hook, model, arguments):
    """Act as a framework that accepts a hook and does nothing with it."""


def _registered(state, hook, model, arguments):
    model.register_comm_hook(state, hook)


def _with_another_state(state, hook, model, arguments):
    model.register_comm_hook(QuantizedAllreduceState(**arguments).bind(model), hook)


def _warnings_of(register, **options):
    arguments = {"min_bytes": 0, **options}
    ddp = DistributedDataParallel(torch.nn.Linear(40, 40))
    state = QuantizedAllreduceState(**arguments).bind(ddp)
    register(state, quantized_allreduce_hook, ddp, arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            ddp(torch.ones(2, 40)).sum().backward()
    return [str(one.message) for one in caught], state.statistics.bytes_sent


def _watched(_):
    return {
        "ignored": _warnings_of(_ignored),
        "registered": _warnings_of(_registered),
        "small": _warnings_of(_registered, min_bytes=1 << 30),
        "another": _warnings_of(_with_another_state),
    }


def test_a_bound_state_tells_that_its_hook_is_not_in_use():
    for found in run_ranks(_watched, 2):
        for case in ("ignored", "another"):
            (warning,), sent = found[case]
            assert "QuantizedAllreduceState that is bound to it has got no bucket" in warning
            assert sent == 0
        for case in ("registered", "small"):
            assert found[case][0] == []
            assert found[case][1] > 0
