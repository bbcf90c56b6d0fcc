"""Compatible versions follow from metadata alone."""

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from releasing.pairs import all_pairs, beside, solve


def needs(**ranges):
    return {name: SpecifierSet(text) for name, text in ranges.items()}


def versions(**of):
    return {Version(name[1:].replace("_", ".")): needed for name, needed in of.items()}


CATALOG = {
    "base": versions(v0_1_0={}, v0_2_0={}, v0_3_0={}),
    "hooks": versions(v0_1_0=needs(base=">=0.1,<0.2"), v0_2_0=needs(base=">=0.2,<1")),
    "overlap": versions(
        v0_1_0=needs(base=">=0.2,<0.3", hooks=">=0.1,<0.2"), v0_2_0=needs(base=">=0.3,<1", hooks=">=0.2,<1")
    ),
}


def test_every_pair_is_listed_with_whether_the_range_admits_it():
    pairs = [pair for pair in all_pairs(CATALOG) if pair.dependent == "hooks"]
    admitted = {(str(pair.dependent_version), str(pair.sibling_version)): pair.admitted for pair in pairs}
    assert admitted == {
        ("0.1.0", "0.1.0"): True,
        ("0.1.0", "0.2.0"): False,
        ("0.1.0", "0.3.0"): False,
        ("0.2.0", "0.1.0"): False,
        ("0.2.0", "0.2.0"): True,
        ("0.2.0", "0.3.0"): True,
    }


def test_the_newest_versions_that_fit_all_ranges_are_chosen():
    chosen = solve(CATALOG, {"hooks": Version("0.2.0")}, ["overlap", "hooks"])
    assert chosen == {
        name: Version(text) for name, text in (("overlap", "0.2.0"), ("hooks", "0.2.0"), ("base", "0.3.0"))
    }


def test_the_oldest_versions_that_fit_all_ranges_are_chosen():
    chosen = solve(CATALOG, {"overlap": Version("0.2.0")}, ["overlap", "base"], oldest=True)
    assert chosen == {
        name: Version(text) for name, text in (("overlap", "0.2.0"), ("base", "0.3.0"), ("hooks", "0.2.0"))
    }


def test_a_range_may_admit_a_sibling_that_another_range_makes_impossible():
    assert solve(CATALOG, {"overlap": Version("0.1.0"), "base": Version("0.2.0")}, ["overlap"]) is None


def test_a_changed_checkout_counts_as_its_public_version():
    catalog = {**CATALOG, "base": {Version("0.1.0+tree"): {}}}
    chosen = solve(catalog, {}, ["hooks"])
    assert chosen == {"hooks": Version("0.1.0"), "base": Version("0.1.0+tree")}


def test_series_beside_each_other():
    table = {(one, other): chosen for one, other, chosen in beside(CATALOG, "hooks", "overlap")}
    assert list(table) == [("0.1", "0.1"), ("0.1", "0.2"), ("0.2", "0.1"), ("0.2", "0.2")]
    assert [pair for pair, chosen in table.items() if chosen] == [("0.2", "0.2")]
