"""Results equal those of PyTorch's own functions on inputs that those handle correctly."""

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch.distributed import utils as pytorch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import dist_utils

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Sample:
    x: Any
    label: str = "a"


def batches():
    """Inputs that PyTorch's functions handle correctly in every version of the matrix."""
    x, y = torch.arange(3.0), torch.arange(4)
    return {
        "tensor": x,
        "list": [x, y, 3, None, "a"],
        "tuple": (x, [y, (x + 1,)]),
        "dict": {"a": x, "b": {"c": [y]}, "n": 5},
        "OrderedDict": OrderedDict(a=x, b=y),
        "namedtuple": Point(x, [y]),
        "no tensor": {"a": [1, "b", None]},
        "empty": {"a": [], "b": {}, "c": ()},
        "parameter": [torch.nn.Parameter(x)],
    }


def equal(ours, theirs):
    """Compare types and contents, tensors bitwise."""
    assert type(ours) is type(theirs)
    if isinstance(ours, PackedSequence):
        return all(equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    if isinstance(ours, torch.Tensor):
        same_kind = (ours.dtype, ours.device, ours.requires_grad) == (
            theirs.dtype,
            theirs.device,
            theirs.requires_grad,
        )
        return same_kind and (ours.is_meta or torch.equal(ours, theirs))
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and equal(list(ours.values()), list(theirs.values()))
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    if dataclasses.is_dataclass(ours):
        return equal(vars(ours), vars(theirs))
    return ours == theirs


NAMES = list(batches())


@pytest.mark.parametrize("name", [*NAMES, "dataclass", "set"])
def test_apply_to_tensors(name):
    batch = {**batches(), "dataclass": [Sample(torch.ones(2))], "set": {"a", 1}}[name]
    ours = dist_utils.apply_to_tensors(torch.neg, batch)
    assert equal(ours, pytorch._apply_to_tensors(torch.neg, batch))


@pytest.mark.parametrize("side_stream", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", [*NAMES, "PackedSequence"])
def test_recursive_to(name, device, side_stream):
    batch = {**batches(), "PackedSequence": pack_sequence([torch.ones(3), torch.ones(2)])}[name]
    ours = dist_utils.recursive_to(batch, torch.device(device), side_stream)
    assert equal(ours, pytorch._recursive_to(batch, torch.device(device), side_stream))


@pytest.mark.parametrize("name", NAMES)
def test_to_kwargs(name):
    batch = batches()[name]
    for args, kwargs in [((batch,), {"k": batch}), ((batch, 1), None), ((), {"k": batch})]:
        ours = dist_utils.to_kwargs(args, kwargs, torch.device("meta"), False)
        theirs = pytorch._to_kwargs(args, kwargs, torch.device("meta"), False)
        assert equal(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_cast_forward_inputs(name, dtype):
    batch = batches()[name]
    ours = dist_utils.cast_forward_inputs(dtype, batch, 1, k=batch)
    assert equal(ours, pytorch._cast_forward_inputs(dtype, batch, 1, k=batch))


def test_pack_and_unpack_kwargs():
    packed = dist_utils.pack_kwargs(1, [2], a=3, b=None)
    assert packed == pytorch._pack_kwargs(1, [2], a=3, b=None)
    assert dist_utils.unpack_kwargs(*packed) == pytorch._unpack_kwargs(*packed)
    assert dist_utils.unpack_kwargs((1, 2), ()) == pytorch._unpack_kwargs((1, 2), ())


def test_storage():
    mine, theirs = torch.ones(4, 3), torch.ones(4, 3)
    assert dist_utils.data_ptr_allocated(mine) == _allocated(theirs) == True  # noqa: E712
    dist_utils.free_storage(mine)
    pytorch._free_storage(theirs)
    assert mine.untyped_storage().nbytes() == theirs.untyped_storage().nbytes() == 0
    assert dist_utils.data_ptr_allocated(mine) == _allocated(theirs) == False  # noqa: E712
    dist_utils.alloc_storage(mine, torch.Size([4, 3]))
    pytorch._alloc_storage(theirs, torch.Size([4, 3]))
    assert mine.untyped_storage().nbytes() == theirs.untyped_storage().nbytes() == 48


def _allocated(tensor):
    return getattr(pytorch, "_data_ptr_allocated", lambda t: t.untyped_storage().data_ptr() > 0)(tensor)


def test_replace_by_prefix():
    for old, new in [("module.", ""), ("", "module."), ("a.", "b.c."), ("absent.", "x.")]:
        mine, theirs = ({"module.w": 1, "a.w": 2, "other": 3} for _ in range(2))
        dist_utils.replace_by_prefix(mine, old, new)
        pytorch._replace_by_prefix(theirs, old, new)
        assert mine == theirs


def test_get_root_modules():
    inner = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    outer, lone = torch.nn.Sequential(inner, torch.nn.Tanh()), torch.nn.Tanh()
    for modules in ([], [lone], [inner, outer], [outer[0][0], lone, outer, inner], [lone, lone]):
        assert dist_utils.get_root_modules(modules) == pytorch._get_root_modules(modules)
