"""Pieces of a bucket: cut identically on all ranks, cast in place, and cast back."""

import pytest
import torch

from ddp_compress_hooks.payload import Piece, pieces

SIZES = [1, 2, 65_535, 65_536, 65_537, 200_001]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_encode_divides_in_full_precision_and_decode_gives_it_back(dtype, wire, size):
    original = torch.randn(size, dtype=torch.float64).to(dtype)
    precision = torch.promote_types(dtype, wire)
    expected = (original.to(precision) / 3).to(wire)
    piece = Piece(original.clone(), wire)
    piece.encode(3)
    assert torch.equal(piece.payload, expected)
    piece.decode()
    assert torch.equal(piece.values, expected.to(dtype))


def test_a_16_bit_payload_and_received_data_lie_in_the_piece_itself():
    values = torch.randn(1000)
    piece = Piece(values, torch.float16)
    start, end = values.data_ptr(), values.data_ptr() + values.nbytes
    spare = piece.spare(1000)
    assert piece.payload.data_ptr() == start
    assert spare.data_ptr() == start + piece.payload.nbytes
    assert spare.data_ptr() + spare.nbytes == end
    assert piece.spare(1001).numel() == 1001  # separate memory if it does not fit


def test_a_large_bucket_is_cut_into_pieces_of_limited_size_with_shorter_ends():
    values = torch.arange(6_553_603.0)
    parts = pieces(values, torch.float16, 4 << 20)
    first, *middle, last = [part.values.numel() for part in parts]
    assert len(middle) == 3
    assert max(middle) * 2 <= 4 << 20
    assert max(middle) - min(middle) <= 1
    assert abs(2 * first - middle[0]) <= 2
    assert abs(2 * last - middle[0]) <= 2
    assert torch.equal(torch.cat([part.values for part in parts]), values)


def test_a_small_bucket_is_one_piece():
    assert len(pieces(torch.zeros(2 << 20), torch.float16, 4 << 20)) == 1
    assert len(pieces(torch.zeros(0), torch.float16, 4 << 20)) == 1
