"""docs/benchmarks/many-ranks.md states the numbers of its result files."""

import json

import pytest

from benchmarks.claims import RESULTS, ROOT, Place, cells, stands

PAGE = "docs/benchmarks/many-ranks.md"
TABLES = [part for part in (ROOT / PAGE).read_text().split("\n\n") if part.startswith("|")]
RESULTS_ON_16_CORES, RESULTS_ON_HOSTS = (
    json.loads((RESULTS / f"{name}.json").read_text()) for name in ("many_ranks", "many_ranks_hosts")
)
PREDICTIONS = RESULTS_ON_16_CORES["predictions"]
SIDES = {
    "fp32 ring": "fp32, ring",
    "8 bits, each to each": "8 bits direct",
    "8 bits in levels": "8 bits in levels",
    "fp32 in nodes, 8 bits between, each to each": "fp32 in nodes, 8 bits between, direct",
    "fp32 in nodes, 8 bits between, in levels": "fp32 in nodes, 8 bits between, in levels",
}


def table_of(head):
    """Return the page's table whose first column has this head."""
    (table,) = (table for table in TABLES if table.startswith(f"| {head} |"))
    return table


def test_the_table_of_measured_buckets_is_that_of_the_results():
    table = table_of("ms, 16 cores")
    for ranks in (2, 4, 8, 16):
        times = RESULTS_ON_16_CORES["cases"][f"{ranks} ranks, loopback"]["times"]
        for size, kib in {"64 KiB": 64, "1 MiB": 1 << 10, "4 MiB": 4 << 10, "25 MiB": 25 << 10}.items():
            ours, ring = (times[f"{hook}, {kib << 10}"]["fastest"] for hook in ("8 bits direct", "fp32 ring"))
            assert cells(table, f"{ranks} ranks", size) == [f"{1e3 * ours:.1f} ({ours / ring:.2f})"]
    machine, torch = RESULTS_ON_16_CORES["machine"], RESULTS_ON_16_CORES["versions"]["torch"].split("+")[0]
    text = f"({machine['cores']} cores, {machine['cpu']}, Gloo, torch {torch}, {RESULTS_ON_16_CORES['date']})"
    assert stands(Place(PAGE, ""), text)


@pytest.mark.parametrize(
    ("row", "results"),
    [
        ("16 cores, 2 to 16 ranks on loopback", RESULTS_ON_16_CORES),
        ("two cores, loopback and emulated hosts", RESULTS_ON_HOSTS),
    ],
)
def test_the_table_of_the_models_errors_is_that_of_the_results(row, results):
    for label, hook in {"fp32 ring": "fp32 ring", "8 bits": "8 bits direct"}.items():
        errors = sorted(abs(case["ratio"] - 1) for case in results["fit"][hook]["cases"] if case["held_back"])
        within = sum(error <= 0.15 for error in errors)
        for column, text in {
            "within 15 %": f"{within} of {len(errors)}",
            "median error": f"{100 * errors[len(errors) // 2]:.0f} %",
            "largest": f"{100 * errors[-1]:.0f} %",
        }.items():
            assert cells(table_of("model / measured"), f"{row}: {label}", column) == [text]


def test_the_table_of_predicted_cases_is_that_of_the_results():
    stated, where = {}, ""
    for line in table_of("predicted").splitlines()[2:]:
        first, *rest = (cell.strip() for cell in line.strip("|").split("|"))
        if first.startswith("**"):
            where = first.strip("*")
        else:
            stated[where, first] = rest
    many = "1,024 ranks, eight a node, 100 Gbit/s"
    places = {
        "64 ranks, one rank a node, 25 Gbit/s": "64 ranks, one a node, 25 Gbit/s",
        "1024 ranks, eight ranks a node, 100 Gbit/s": f"{many}, processors as measured",
        "1024 ranks, eight GPUs a node, 100 Gbit/s": f"{many}, GPUs",
    }
    labels = {side: label for label, side in SIDES.items()}
    expected = {}
    for case in PREDICTIONS["cases"]:
        seconds, limit = case["predicted_seconds"], case["wire_limit"]
        together, limit_together = case["predicted_seconds_of_ddp_buckets"], case["wire_limit_of_ddp_buckets"]
        expected[places[case["where"]], labels[case["side"]]] = [
            str(case["messages"]),
            f"{1e3 * seconds:.1f}",
            f"{seconds / limit:.1f}",
            "" if together is None else f"{together / limit_together:.1f}",
        ]
    assert stated == expected


@pytest.mark.parametrize("ranks", [16, 64, 256, 1024, 4096])
def test_the_table_of_predicted_curves_is_that_of_the_results(ranks):
    curve = {
        (row["side"], row["world"], row["gbit"]): row["predicted_seconds"] for row in PREDICTIONS["curve"]
    }
    table = table_of("predicted ms at 1 / 25 Gbit/s, one rank a node")
    for label in ("fp32 ring", "8 bits, each to each", "8 bits in levels"):
        times = [curve.get((SIDES[label], ranks, gbit)) for gbit in (1.0, 25.0)]
        text = "" if None in times else " / ".join(f"{1e3 * time:.0f}" for time in times)
        assert cells(table, f"{ranks:,} ranks", label) == [text]


def predicted(where):
    """Return the ms of 8 bits in levels, and how much less they would be if messages took no processor."""
    (row,) = (
        row
        for row in PREDICTIONS["cases"]
        if row["where"].startswith(where) and row["side"] == "8 bits in levels"
    )
    return 1e3 * row["predicted_seconds"], 1e3 * row["less_without"]["processor, messages"]


def test_what_is_said_of_messages_is_in_the_results():
    nodes, ranks, gpus = (
        predicted(where) for where in ("64 ranks", "1024 ranks, eight ranks", "1024 ranks, eight GPUs")
    )
    text = (
        f"of the {nodes[0]:.0f} ms on 64 nodes {nodes[1]:.0f}, "
        f"of the {ranks[0]:.0f} ms with eight ranks a node {ranks[1]:.0f}, "
        f"of the {gpus[0]:.0f} ms of GPUs {gpus[1]:.1f}"
    )
    assert stands(Place(PAGE, ""), text)


def test_what_is_said_of_stragglers_is_in_the_results():
    times = {
        row["stragglers"]: 1e3 * row["predicted_seconds_after_the_last_began"]
        for row in PREDICTIONS["stragglers"]
        if row["side"] == "8 bits in levels"
    }
    assert times["one begins 20 ms later"] == pytest.approx(times["none"])
    text = f"on 64 nodes ({times['none']:.0f} to {times['one works half as fast']:.0f} ms)"
    assert stands(Place(PAGE, ""), text)


def test_the_stated_numbers_of_the_model_are_those_of_the_results():
    models = [RESULTS_ON_16_CORES["fit"][hook]["model"] for hook in ("8 bits direct", "fp32 ring")]

    def both(number, factor, digits):
        return " and ".join(f"{factor * model[number]:.{digits}f}" for model in models)

    text = (
        f"{both('cpu_per_message', 1e6, 0)} us of processor time for a message sent and received, "
        f"{both('cpu_per_byte', 1e9, 1)} ns a byte, {both('bucket', 1e3, 1)} ms a bucket"
    )
    assert stands(Place(PAGE, ""), text)


def test_the_stated_share_of_the_limit_is_that_of_the_results():
    (of_limit,) = {
        f"{row['of_the_wire_limit']:.1f}"
        for row in PREDICTIONS["curve"]
        if row["side"] == "8 bits in levels" and row["gbit"] == 1.0 and 16 <= row["world"] <= 256
    }
    assert stands(Place(PAGE, ""), f"{of_limit} times its limit from 16 to 256 ranks")
