"""The documents' main claims have the numbers of the result files."""

import ast

import pytest

from benchmarks.claims import CLAIMS, ROOT, Claim, Place, cells, stands


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_documents_and_results_agree(claim):
    missing = [(place, text) for place, text in claim.texts(claim.stored()) if not stands(place, text)]
    assert claim.places
    assert not missing, "the result file has another number: measure again, or mend the document"


def test_every_claim_can_be_measured_again():
    tree = ast.parse((ROOT / "benchmarks/repeat_claims.py").read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {claim.measured_by for claim in CLAIMS} <= functions
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)


def test_stated_spreads_tell_something():
    spreads = {claim.name: claim.spread(claim.stored()) for claim in CLAIMS}
    assert all(0 < spread < 0.5 for spread in spreads.values()), spreads


def test_only_what_is_worse_by_more_than_the_spread_fails(monkeypatch):
    stored = {
        "a": {"median_ms": 300.0, "quartiles_ms": [290, 320]},
        "b": {"median_ms": 100.0, "quartiles_ms": [95, 105]},
    }
    monkeypatch.setattr(Claim, "stored", lambda _: stored)
    faster = Claim("faster", "{value}", (), "", ("a",), "", ("b",))
    assert faster.value(stored) == 3
    assert faster.spread(stored) == pytest.approx(30 / 300 + 10 / 100)
    assert [faster.holds(value) for value in (9.0, 2.41, 2.39)] == [True, True, False]
    shorter = Claim("shorter", "{value}", (), "", ("b",), "", ("a",), better="less", least_spread=0.5)
    assert [shorter.holds(value) for value in (0.1, 0.49, 0.51)] == [True, True, False]


def test_a_number_in_another_column_does_not_count(tmp_path, monkeypatch):
    document = """
| ms | one | two |
|---|---|---|
| **8 bits** | 14 (1.35x) | 37 (1.20x) |

| ms | one |
|---|---|
| other | 1 |

it takes 3
ms
"""
    assert cells(document, "**8 bits**", "two") == ["37 (1.20x)"]
    (tmp_path / "page.md").write_text(document)
    monkeypatch.setattr("benchmarks.claims.ROOT", tmp_path)
    assert stands(Place("page.md", "1.20x", "**8 bits**", "two"), "1.20x")
    assert not stands(Place("page.md", "1.20x", "**8 bits**", "one"), "1.20x")
    assert stands(Place("page.md", ""), "takes 3 ms")
