"""Memory is freed and allocated again, and never taken from another tensor."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from dist_utils import alloc_storage, data_ptr_allocated, free_storage


def test_both_return_whether_they_did_something():
    for tensor in (torch.ones(3, 2), torch.nn.Parameter(torch.ones(2, 3)).t(), torch.ones(6).detach()):
        assert alloc_storage(tensor, tensor.shape) is False
        assert data_ptr_allocated(tensor) is True
        assert free_storage(tensor) is True
        assert free_storage(tensor) is False
        assert data_ptr_allocated(tensor) is False
        assert alloc_storage(tensor, list(tensor.shape)) is True
        assert tensor.detach().fill_(2).sum() == 12
    assert data_ptr_allocated(torch.ones(3, device="meta")) is False
    empty = torch.ones(0, 3)
    assert (free_storage(empty), alloc_storage(empty, (0, 3)), data_ptr_allocated(empty)) == (False,) * 3


@pytest.mark.exhaustive
def test_they_work_right_after_the_import():
    """PyTorch's need another import first."""
    program = (
        "import torch, dist_utils; t = torch.ones(3);"
        "assert dist_utils.free_storage(t) and dist_utils.alloc_storage(t, t.shape)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


PARTS = {
    "front": lambda base: base[:2],
    "back": lambda base: base[2:],
    "strided": lambda base: base[::2],
    "expanded": lambda base: base[:2].expand(2, 2),
    "overlapping": lambda base: base.as_strided((2, 2), (1, 1)),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_view_that_does_not_cover_its_storage_is_not_freed(part):
    base = torch.arange(4.0)
    with pytest.raises(ValueError, match="could take the memory of other tensors"):
        free_storage(PARTS[part](base))
    assert torch.equal(base, torch.arange(4.0))


@pytest.mark.parametrize("size", [(1,), ()])
def test_a_size_that_does_not_fit_is_refused(size):
    tensor = torch.ones(4)
    with pytest.raises(ValueError, match="has 16 bytes already"):
        alloc_storage(tensor, (8,))
    free_storage(tensor)
    with pytest.raises(ValueError, match="needs 16"):
        alloc_storage(tensor, size)
    assert not data_ptr_allocated(tensor)


def test_offset_and_stride_count():
    tensor = torch.ones(10)[2:8:2]  # elements 2, 4 and 6
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="needs 28"):
        alloc_storage(tensor, (6,))
    assert alloc_storage(tensor, (7,))
    assert tensor.fill_(2).sum() == 6
    with pytest.raises(ValueError, match="does not cover exactly"):
        free_storage(tensor)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.from_numpy(np.ones(3)), "cannot be resized"),
        (lambda: torch.ones(3).share_memory_(), "cannot be resized"),
        (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
        (lambda: [1.0], "expected a tensor, got list"),
    ],
    ids=["numpy", "shared", "sparse", "nested", "no tensor"],
)
def test_what_has_no_storage_of_its_own_is_refused(make, message):
    with pytest.raises(TypeError, match=message):
        free_storage(make())
    with pytest.raises(TypeError, match=message):
        alloc_storage(make(), (9,))


def test_under_compile_nothing_happens_and_the_graph_is_whole():
    @torch.compile(backend="eager", fullgraph=True)
    def step(x):
        y = x * 2
        freed = free_storage(x)
        allocated = alloc_storage(x, x.shape)
        return y + 1, freed, allocated

    x = torch.ones(3)
    result, freed, allocated = step(x)
    assert torch.equal(result, torch.full((3,), 3.0))
    assert (freed, allocated) == (False, False)
    assert torch.equal(x, torch.ones(3))
