"""Claims and descriptions forged by another process: a typed error, and nothing is executed."""

import os
import pickle
from contextlib import nullcontext
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dist_utils import (
    AgreementError,
    TensorMismatchError,
    require_same_terms,
    verify_param_shape_across_processes,
)
from dist_utils.process_groups import all_gather_plain, matching_tensors, plain_data, terms
from dist_utils.testing import run_ranks

HOSTILE = 1


class EndsTheProcess:
    """Ends any process that unpickles it."""

    def __reduce__(self):
        return os._exit, (17,)


PICKLED = pickle.dumps(EndsTheProcess())
TEXTS = [
    PICKLED, b"", b"{", b"nul", b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b'"x"', b"null", b"3", b"[]", b"{}",
    b"[1,2,3]", b"[[],[],[]]", b'["a",["b"],"c"]', b'["a",{"b":[1]},""]', b'[["a"],"",""]',
    b'[[["a","b","c"]],1,2]',
]  # fmt: skip
"""Texts in place of a claim."""

plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inside: st.one_of(st.lists(inside), st.dictionaries(st.text(), inside)),
    max_leaves=10,
)
few = settings(deadline=None, derandomize=True, database=None, max_examples=100)


@few
@given(st.one_of(st.binary(max_size=60), plain.map(lambda value: repr(value).encode(errors="replace"))))
def test_any_bytes_in_the_store_are_a_claim_or_an_error(data):
    claim, verdict = terms._claim_from(data), terms._verdict_from(data)
    assert all(isinstance(part, str) for part in (claim.title, claim.problem, *claim.terms.values()))
    assert isinstance(verdict.error, str)
    assert verdict.error or verdict.name or data.replace(b" ", b"") == b'["","",[]]'


@few
@given(plain, plain)
def test_any_plain_data_are_a_claim_about_tensors_or_an_error(one, other):
    claims = [matching_tensors._claim_from(sent) for sent in (one, other)]
    assert matching_tensors._first_difference(claims, [0, 1])


def _sending(data):
    """Make this rank send bytes where plain data are expected."""
    return mock.patch.object(plain_data.json, "dumps", return_value=mock.Mock(encode=lambda: data))


def _gathers(rank, seed):
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(seed)
    noise = [bytes(torch.randint(128, 256, (n,), generator=generator).tolist()) for n in (1, 7, 300)]
    refused = []
    for data in [*TEXTS, *noise]:
        sends = rank == HOSTILE and data
        with _sending(data) if sends else nullcontext():
            try:
                found = all_gather_plain(group, {"rank": rank})
            except AgreementError as error:
                found = [{"rank": 0}, str(error)]
                refused.append(str(error))
        assert found[0] == {"rank": 0}
    assert len(refused) >= len(noise) + 6
    assert all(f"rank {HOSTILE} sent data that is not JSON" in text for text in refused)
    lengths = plain_data._gathered
    for length in (-5, 0, 1 << 62, (1 << 30) + 1):
        if rank == HOSTILE:
            plain_data._gathered = lambda group, own, n=length: lengths(group, torch.full_like(own, n))
        with pytest.raises(AgreementError, match=f"rank {HOSTILE} announced {length} bytes"):
            all_gather_plain(group, rank)
        plain_data._gathered = lengths
    for data in TEXTS[:1] + TEXTS[7:]:
        tensors = [torch.zeros(3 + (rank == HOSTILE))]
        spoiled = _sending(data) if rank == HOSTILE else nullcontext()
        with spoiled, pytest.raises((TensorMismatchError, AgreementError)):
            verify_param_shape_across_processes(group, tensors)
    assert all_gather_plain(group, "well") == ["well"] * 2


def _terms(rank):
    for data in TEXTS:
        text = data.decode("latin-1")
        if rank == HOSTILE:
            with mock.patch.object(terms.json, "dumps", return_value=text), pytest.raises(AgreementError):
                require_same_terms(None, "hook", {"bits": 8}, timeout=timedelta(seconds=20))
        else:
            with pytest.raises(AgreementError):
                require_same_terms(None, "hook", {"bits": 8}, timeout=timedelta(seconds=20))
    assert require_same_terms(None, "hook", {"bits": 8})


def _all(rank, seed):
    _gathers(rank, seed)
    _terms(rank)


@settings(
    deadline=None, derandomize=True, database=None, max_examples=1, phases=[Phase.explicit, Phase.generate]
)
@given(seed=st.integers(0, 2**40))
def test_what_a_peer_makes_up_is_an_error_on_every_rank(seed):
    assert run_ranks(_all, 2, seed) == [None, None]
