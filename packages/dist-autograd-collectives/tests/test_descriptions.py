"""What the source of a scatter says of its tensors: believed only as far as a tensor can be made of it."""

import pytest
import torch

from dist_autograd_collectives import CollectiveError, descriptions
from dist_autograd_collectives.calls import members
from dist_utils.testing import run_ranks


def _described(_):
    who, wrong = members(None), {}
    own = descriptions.described(torch.empty(2, 0, 3, dtype=torch.int8), who)
    made = descriptions.stand_in(own, who)
    forged = {
        "dtype": {0: -1},
        "unknown dtype": {0: 10_000},
        "device": {1: 99},
        "dimensions": {2: 30},
        "shape": {3: -1},
        "too large": {3: 2**62, 4: 1},
        "overflows": {3: 2**62, 4: 2**62},
    }
    if not torch.cuda.is_available():  # Gloo takes tensors of CUDA, too
        forged["no such device"] = {1: 1}
    for name, changes in forged.items():
        header = own.clone()
        for place, value in changes.items():
            header[place] = value
        with pytest.raises(CollectiveError, match="scatter: the source") as caught:
            descriptions.stand_in(header, who)
        wrong[name] = str(caught.value)
    return made.shape, made.dtype, wrong


def test_a_description_of_no_tensor_or_of_one_that_cannot_be_made_is_an_error():
    ((shape, dtype, wrong),) = run_ranks(_described, 1)
    assert (shape, dtype) == (torch.Size([2, 0, 3]), torch.int8)
    for name in ("dtype", "unknown dtype", "device", "dimensions", "shape"):
        assert "which is no description" in wrong.pop(name)
    assert all("which this rank cannot hold" in text for text in wrong.values())
