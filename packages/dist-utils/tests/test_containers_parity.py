"""Results equal those of PyTorch's own functions on inputs that those handle correctly."""

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives  # which PyTorch's storage functions need
from torch.distributed import utils as pytorch
from torch.nn.utils.rnn import pack_sequence

import dist_utils

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Sample:
    x: Any
    label: str = "a"


X, Y = torch.arange(3.0), torch.arange(4)
# Inputs that PyTorch's functions handle correctly in every version of the matrix. Their texts say everything.
BATCHES = {
    "tensor": X,
    "list": [X, Y, 3, None, "a"],
    "tuple": (X, [Y, (X + 1,)]),
    "dict": {"a": X, "b": {"c": [Y]}, "n": 5},
    "OrderedDict": OrderedDict(a=X, b=Y),
    "namedtuple": Point(X, [Y]),
    "no tensor": {"a": [1, "b", None]},
    "empty": {"a": [], "b": {}, "c": ()},
    "parameter": [torch.nn.Parameter(X)],
}


@pytest.mark.parametrize("name", [*BATCHES, "dataclass", "set"])
def test_apply_to_tensors(name):
    batch = {**BATCHES, "dataclass": [Sample(torch.ones(2))], "set": {"a"}}[name]
    ours = dist_utils.apply_to_tensors(torch.neg, batch)
    assert repr(ours) == repr(pytorch._apply_to_tensors(torch.neg, batch))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", [*BATCHES, "PackedSequence"])
def test_recursive_to_and_to_kwargs(name, device):
    batch = {**BATCHES, "PackedSequence": pack_sequence([torch.ones(3), torch.ones(2)])}[name]
    ours = dist_utils.recursive_to(batch, torch.device(device), True)
    assert repr(ours) == repr(pytorch._recursive_to(batch, torch.device(device), True))
    for args, kwargs in [((batch,), {"k": batch}), ((batch, 1), None), ((), {"k": batch})]:
        ours = dist_utils.to_kwargs(args, kwargs, torch.device(device), False)
        assert repr(ours) == repr(pytorch._to_kwargs(args, kwargs, torch.device(device), False))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", BATCHES)
def test_cast_forward_inputs(name, dtype):
    batch = BATCHES[name]
    ours = dist_utils.cast_forward_inputs(dtype, batch, 1, k=batch)
    assert repr(ours) == repr(pytorch._cast_forward_inputs(dtype, batch, 1, k=batch))


def test_pack_and_unpack_kwargs():
    packed = dist_utils.pack_kwargs(1, [2], a=3, b=None)
    assert packed == pytorch._pack_kwargs(1, [2], a=3, b=None)
    assert dist_utils.unpack_kwargs(*packed) == pytorch._unpack_kwargs(*packed)
    assert dist_utils.unpack_kwargs((1, 2), ()) == pytorch._unpack_kwargs((1, 2), ())


@pytest.mark.parametrize(
    ("old", "new"), [("module.", ""), ("", "module."), ("a.", "b.c."), ("absent.", "x.")]
)
def test_replace_by_prefix(old, new):
    mine, theirs = ({"module.w": 1, "a.w": 2, "other": 3} for _ in range(2))
    dist_utils.replace_by_prefix(mine, old, new)
    pytorch._replace_by_prefix(theirs, old, new)
    assert mine == theirs


def test_get_root_modules():
    inner = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    outer, lone = torch.nn.Sequential(inner, torch.nn.Tanh()), torch.nn.Tanh()
    for modules in ([], [lone], [inner, outer], [outer[0][0], lone, outer, inner], [lone, lone]):
        assert dist_utils.get_root_modules(modules) == pytorch._get_root_modules(modules)
