"""Memory is freed and allocated again, and never taken from another tensor."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from dist_utils import alloc_storage, data_ptr_allocated, free_storage


def test_both_return_whether_they_did_something():
    tensor = torch.ones(3, 2)
    assert alloc_storage(tensor, tensor.shape) is False
    assert free_storage(tensor) is True
    assert free_storage(tensor) is False
    assert alloc_storage(tensor, (3, 2)) is True
    tensor.fill_(2)
    assert tensor.sum() == 12


def test_they_work_right_after_the_import():
    """PyTorch's need another import first."""
    program = (
        "import torch, dist_utils; t = torch.ones(3);"
        "assert dist_utils.free_storage(t) and dist_utils.alloc_storage(t, t.shape)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


@pytest.mark.parametrize("part", [slice(0, 2), slice(2, 4), slice(0, 4, 2)], ids=["front", "back", "strided"])
def test_a_view_of_a_larger_storage_is_not_freed(part):
    base = torch.arange(4.0)
    with pytest.raises(ValueError, match="could take the memory of other tensors"):
        free_storage(base[part])
    assert torch.equal(base, torch.arange(4.0))


@pytest.mark.parametrize(
    "view",
    [lambda base: base[:2].expand(2, 2), lambda base: base.as_strided((2, 2), (1, 1))],
    ids=["expanded", "overlapping"],
)
def test_a_view_with_as_many_elements_as_its_base_is_not_freed(view):
    base = torch.arange(4.0)
    with pytest.raises(ValueError, match="could take the memory of other tensors"):
        free_storage(view(base))
    assert torch.equal(base, torch.arange(4.0))


def test_negative_sizes_are_refused():
    tensor = torch.ones(4)
    free_storage(tensor)
    with pytest.raises(ValueError, match="negative"):
        alloc_storage(tensor, (-2, -2))


def test_a_shrunk_tensor_is_not_freed():
    with pytest.raises(ValueError, match="shape \\(2,\\)"):
        free_storage(torch.ones(4).resize_(2))


def test_detached_and_transposed_tensors_cover_their_storage():
    assert free_storage(torch.ones(3, 2, requires_grad=True).detach())
    assert free_storage(torch.ones(3, 2).t())
    parameter = torch.nn.Parameter(torch.ones(3))
    assert free_storage(parameter)
    assert alloc_storage(parameter, parameter.shape)


@pytest.mark.parametrize("size", [(1,), (2, 1), ()])
def test_a_size_that_does_not_fit_is_refused(size):
    tensor = torch.ones(4)
    free_storage(tensor)
    with pytest.raises(ValueError, match=r"needs 16"):
        alloc_storage(tensor, size)
    assert not data_ptr_allocated(tensor)


def test_offset_and_stride_count():
    tensor = torch.ones(10)[2:8:2]  # elements 2, 4 and 6
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="needs 28"):
        alloc_storage(tensor, (6,))
    assert alloc_storage(tensor, (7,))


def test_more_than_needed_is_allocated_and_tuples_lists_and_sizes_are_taken():
    for size in [(8,), [8], torch.Size([2, 4])]:
        tensor = torch.ones(4)
        free_storage(tensor)
        assert alloc_storage(tensor, size)
        assert tensor.untyped_storage().nbytes() == 32


def test_what_was_allocated_can_be_freed():
    for make in (lambda: torch.ones(2), lambda: torch.ones(10)[2:8:2], lambda: torch.ones(3, 2).t()):
        tensor = make()
        tensor.untyped_storage().resize_(0)
        for size in [(20,), (8,), (4, 5)]:
            assert alloc_storage(tensor, size)
            assert free_storage(tensor)
            assert not data_ptr_allocated(tensor)
        assert alloc_storage(tensor, (8,))
        with pytest.raises(ValueError, match="does not cover exactly"):  # not the memory it was given
            free_storage(tensor[:1])


def test_an_allocated_storage_of_another_size_is_refused():
    with pytest.raises(ValueError, match="has 16 bytes already"):
        alloc_storage(torch.ones(4), (8,))


def test_empty_tensors():
    empty = torch.ones(0, 3)
    assert free_storage(empty) is False
    assert alloc_storage(empty, empty.shape) is False
    assert data_ptr_allocated(empty) is False


@pytest.mark.parametrize(
    "foreign",
    [lambda: torch.from_numpy(np.ones(3)), lambda: torch.ones(3).share_memory_()],
    ids=["numpy", "shared"],
)
def test_memory_that_belongs_to_something_else_is_refused(foreign):
    with pytest.raises(TypeError, match="cannot be resized"):
        free_storage(foreign())
    with pytest.raises(TypeError, match="cannot be resized"):
        alloc_storage(foreign(), (9,))


def test_what_has_no_storage_is_refused():
    with pytest.raises(TypeError, match="sparse_coo"):
        free_storage(torch.eye(2).to_sparse())
    for function in (free_storage, data_ptr_allocated):
        with pytest.raises(TypeError, match="expected a tensor, got list"):
            function([1.0])
    with pytest.raises(TypeError, match="sparse_coo"):
        data_ptr_allocated(torch.eye(2).to_sparse())


def test_data_ptr_allocated():
    tensor = torch.ones(3)
    assert data_ptr_allocated(tensor)
    free_storage(tensor)
    assert not data_ptr_allocated(tensor)
    assert not data_ptr_allocated(torch.ones(3, device="meta"))


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


def test_what_a_view_was_once_given_is_forgotten_when_its_base_is_freed():
    base = torch.ones(5)
    view = base[:2]
    free_storage(base)
    alloc_storage(view, (5,))
    free_storage(base)
    alloc_storage(base, (5,))
    with pytest.raises(ValueError, match="does not cover exactly"):
        free_storage(view)
    assert data_ptr_allocated(base)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused():
    with pytest.raises(TypeError, match="nested"):
        free_storage(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]))
