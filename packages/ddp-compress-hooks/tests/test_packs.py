"""Which plain tensors are sent together."""

import torch

from ddp_compress_hooks.packs import packs

asked = []


class _Counted(torch.Tensor):
    @property
    def nbytes(self):
        asked.append(self)
        return super().nbytes


def test_the_size_of_each_tensor_is_read_once():
    tensors = [torch.ones(3).as_subclass(_Counted) for _ in range(200)]
    (pack,) = packs(tensors)
    assert pack.together().numel() == 600
    assert len(asked) == 200


def test_a_pack_is_as_large_as_a_bucket():
    megabytes = [1, 24, 1, 24, 30, 1, 1]
    found = [pack.together().nbytes >> 20 for pack in packs([torch.empty(m << 18) for m in megabytes])]
    assert found == [25, 25, 30, 2]
