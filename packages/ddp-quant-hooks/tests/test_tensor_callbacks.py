"""Futures of calls on plain tensors complete in the order of the calls; callbacks cannot make calls."""

import itertools

import pytest
import torch
import torch.distributed as dist

from ddp_quant_hooks import QuantizedAllreduceState, all_reduce, reduce_scatter_tensor
from dist_utils.testing import run_ranks
from dist_utils.torch_compat import default_store

KINDS = {"in few bits": torch.float32, "without compression": torch.float64}


def _calls(state, dtype):
    values, shard = torch.ones(3000, dtype=dtype), torch.ones(1500, dtype=dtype)
    return {
        "all_reduce": lambda: all_reduce(values, group=state, async_op=True),
        "reduce_scatter_tensor": lambda: reduce_scatter_tensor(shard, values, group=state, async_op=True),
    }


def _callbacks(rank):
    state, completed = QuantizedAllreduceState(min_bytes=0), []
    calls = {(name, kind): call for kind in KINDS for name, call in _calls(state, KINDS[kind]).items()}
    for call in calls.values():
        call().wait()  # from now on the call is known: no rank waits for another one
    if rank == 1:
        default_store().wait(["callbacks are there"])
        for call in calls.values():
            call()
        return state.wait()

    others = itertools.cycle([state, None])

    def call_again(name):
        completed.append(name)
        all_reduce(torch.ones(3), dist.ReduceOp.SUM, next(others))

    futures = [call().then(lambda _, name=name: call_again(name)) for name, call in calls.items()]
    default_store().set("callbacks are there", "")
    for future in futures:
        with pytest.raises(RuntimeError, match="in a callback of another call's future"):
            future.wait()
    return completed == list(calls)


def test_futures_complete_in_order_and_a_call_in_a_callback_is_refused():
    assert run_ranks(_callbacks, 2, group_timeout=20.0) == [True, None]
