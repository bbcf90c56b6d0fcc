"""Lists of plain tensors can be written in place if no memory is written twice."""

import pytest
import torch

from dist_utils.comm_hooks import checked_tensors

SQUARE, BOX = torch.zeros(20, 20), torch.zeros(4, 6, 8)

APART = {
    "nothing": [],
    "columns": list(SQUARE.unbind(1)),
    "every other row and column": [SQUARE[::2, ::2], SQUARE[1::2].t(), SQUARE[::2, 1::2]],
    "halves": [SQUARE[:10], SQUARE[10:]],
    "transposed": [SQUARE.t(), BOX.permute(2, 0, 1)],
    "steps that do not nest, and do not meet": [torch.zeros(10).as_strided((2, 5), (1, 2))],
    "of no elements": [torch.zeros(0), SQUARE[:0], torch.zeros(3, 0).t(), torch.zeros(())],
}
TWICE = {
    "itself": [SQUARE, SQUARE],
    "itself transposed": [SQUARE, SQUARE.t()],
    "expanded": [SQUARE[0].expand(4, 20)],
}


@pytest.mark.parametrize("name", APART)
def test_tensors_beside_each_other_are_taken(name):
    assert len(checked_tensors("call", APART[name])) == len(APART[name])


@pytest.mark.parametrize("name", TWICE)
def test_memory_that_would_be_written_twice_is_refused(name):
    with pytest.raises(ValueError, match="share memory"):
        checked_tensors("call", TWICE[name])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused():
    with pytest.raises(TypeError, match="the tensor must be dense"):
        checked_tensors("call", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use
def test_tensors_inside_of_transforms_are_refused():
    def refused(x, match):
        with pytest.raises(ValueError, match=match):
            checked_tensors("call", x)
        return x.sum()

    torch.func.vmap(lambda x: refused(x, "a batch of 2"))(torch.ones(2, 3))
    torch.func.grad(lambda x: refused(x.detach(), "outside of torch.func"))(torch.ones(3))
    torch.func.jvp(lambda x: refused(x, "with a tangent"), (torch.ones(3),), (torch.ones(3),))
