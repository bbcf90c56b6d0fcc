"""What communication hooks are built from: futures, finite means, checks of buckets and of plain tensors."""

import inspect
import itertools
import threading

import pytest
import torch
import torch.distributed as dist

from dist_utils.comm_hooks import (
    buckets_only,
    checked_operation,
    checked_tensors,
    clamp_mean,
    joined_future,
    same_kind,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize(("source", "dtype"), list(itertools.permutations(DTYPES, 2)), ids=str)
def test_a_mean_in_another_dtype_stays_finite(source, dtype):
    reach = min(torch.finfo(source).max, torch.finfo(dtype).max * 1.9)
    mean = torch.tensor([reach, -reach, 1.5, torch.inf, -torch.inf, torch.nan], dtype=source)
    out = clamp_mean(mean, dtype).to(dtype)
    assert out[:3].isfinite().tolist() == [True] * 3, out
    assert out[2:5].tolist() == [1.5, torch.inf, -torch.inf]
    assert out[5].isnan()


def test_a_joined_future_is_complete_when_all_parts_are():
    parts = [torch.futures.Future() for _ in range(3)]
    joined = joined_future(parts, "value", torch.device("cpu"))
    for part in reversed(parts):
        assert not joined.done()
        thread = threading.Thread(target=part.set_result, args=(torch.ones(1),))
        thread.start()
        thread.join()
    assert joined.wait() == "value"


def test_a_joined_future_raises_the_error_of_a_part():
    parts = [torch.futures.Future() for _ in range(2)]
    joined = joined_future(parts, "value", torch.device("cpu"))
    parts[1].set_exception(ValueError("second"))
    parts[0].set_result(torch.ones(1))
    with pytest.raises(RuntimeError, match="second"):
        joined.wait()


def _some_hook(state, bucket, size=3):
    return state, bucket, size


def test_hooks_of_buckets_refuse_the_tensors_of_fsdp1_and_stay_what_they_are():
    hook = buckets_only(_some_hook)
    assert hook(None, bucket="bucket", size=4) == (None, "bucket", 4)
    assert inspect.signature(hook) == inspect.signature(_some_hook)
    for arguments in ((None, torch.ones(2)), (None, torch.ones(2), torch.ones(1))):
        with pytest.raises(TypeError, match=r"_some_hook averages buckets.*FSDP1.*use fully_shard"):
            hook(*arguments)


SQUARE, BOX = torch.zeros(20, 20), torch.zeros(4, 6, 8)
APART = {
    "nothing": [],
    "columns": list(SQUARE.unbind(1)),
    "every other row and column": [SQUARE[::2, ::2], SQUARE[1::2].t(), SQUARE[::2, 1::2]],
    "transposed": [SQUARE.t(), BOX.permute(2, 0, 1)],
    "of no elements": [torch.zeros(0), SQUARE[:0], torch.zeros(3, 0).t(), torch.zeros(())],
}


@pytest.mark.parametrize("tensors", APART.values(), ids=APART)
def test_tensors_beside_each_other_are_taken(tensors):
    taken = checked_tensors("call", tensors)
    assert [one.data_ptr() for one in taken] == [one.data_ptr() for one in tensors]


REFUSED = {
    "two of the tensors share memory": (ValueError, lambda: [SQUARE, SQUARE.t()]),
    "tensor 0 is expanded": (ValueError, lambda: [SQUARE[0].expand(4, 20)]),
    "the tensor is part of a graph": (ValueError, lambda: torch.ones(2, requires_grad=True) * 2),
    "the tensor is on the meta device": (ValueError, lambda: torch.ones(2, device="meta")),
    "got a nested tensor": (TypeError, lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    "got a torch.sparse_coo tensor": (TypeError, lambda: torch.eye(2).to_sparse()),
    "got a .* of torch.int64": (TypeError, lambda: torch.ones(2, dtype=torch.int64)),
    "got a list of Tensor, int": (TypeError, lambda: [torch.ones(2), 3]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("message", REFUSED)
def test_tensors_that_cannot_be_written_in_place_are_refused(message):
    kind, make = REFUSED[message]
    with pytest.raises(kind, match=f"^call.*{message}"):
        checked_tensors("call", make())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use
def test_tensors_inside_of_transforms_are_refused():
    def refused(x, match):
        with pytest.raises(ValueError, match=match):
            checked_tensors("call", x)
        return x.sum()

    torch.func.vmap(lambda x: refused(x, "a batch of 2"))(torch.ones(2, 3))
    torch.func.grad(lambda x: refused(x.detach(), "a transform of torch.func"))(torch.ones(3))
    torch.func.jvp(lambda x: refused(x, "with a tangent"), (torch.ones(3),), (torch.ones(3),))


def test_operations_and_kinds_of_tensors():
    assert [checked_operation("call", op) for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)] == [False, True]
    with pytest.raises(ValueError, match=r"call: op must be ReduceOp.SUM or ReduceOp.AVG, got"):
        checked_operation("call", dist.ReduceOp.MAX)
    with pytest.raises(TypeError, match="got 'sum'"):
        checked_operation("call", "sum")
    mixed = [torch.ones(1), torch.ones(0), torch.ones(2).half(), torch.ones(3), torch.ones(1, device="meta")]
    assert same_kind(mixed) == [[0, 3], [2], [4]]
