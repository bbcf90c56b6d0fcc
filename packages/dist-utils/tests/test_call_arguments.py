"""Arguments are cast, packed and unpacked without a loss."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from dist_utils import cast_forward_inputs, pack_kwargs, unpack_kwargs


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Any


def test_only_floating_point_tensors_are_cast():
    ids, mask, z = torch.tensor([1]), torch.tensor([True]), torch.ones(1, dtype=torch.complex64)
    args, kwargs = cast_forward_inputs(torch.bfloat16, Batch(torch.ones(1)), ids, m=[mask, z])
    assert args[0].x.dtype == torch.bfloat16
    assert args[1] is ids
    assert kwargs["m"][0] is mask
    assert kwargs["m"][1] is z


def test_a_packed_sequence_is_cast():
    (packed,), _ = cast_forward_inputs(torch.bfloat16, pack_sequence([torch.ones(2)]))
    assert packed.data.dtype == torch.bfloat16
    assert packed.batch_sizes.dtype == torch.int64


def test_a_dtype_argument_of_the_call_itself_passes_through():
    args, kwargs = cast_forward_inputs(torch.float16, torch.ones(1), dtype=torch.float64)
    assert args[0].dtype == torch.float16
    assert kwargs == {"dtype": torch.float64}


def test_gradients_flow_through_the_cast():
    x = torch.ones(2, requires_grad=True)
    (y,), _ = cast_forward_inputs(torch.float64, x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


def test_what_has_the_dtype_is_the_same_object():
    batch = [torch.ones(1), {"a": torch.ones(1)}]
    (same,), kwargs = cast_forward_inputs(torch.float32, batch, k=batch)
    assert same is kwargs["k"] is batch


def test_a_first_argument_that_is_no_dtype_is_refused():
    with pytest.raises(TypeError, match="must be a dtype, got tensor"):
        cast_forward_inputs(torch.ones(1))


def test_unpack_refuses_what_pack_never_made():
    with pytest.raises(ValueError, match="3 keyword names for 2 arguments"):
        unpack_kwargs((1, 2), ("a", "b", "c"))
    with pytest.raises(ValueError, match="occurs twice"):
        unpack_kwargs((1, 2), ("a", "a"))


def test_unpack_takes_lists():
    assert unpack_kwargs([1, 2, 3], ["a"]) == ((1, 2), {"a": 3})
    assert unpack_kwargs(*pack_kwargs()) == ((), {})
