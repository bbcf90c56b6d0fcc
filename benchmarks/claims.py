"""The main claims of the documents: their wording, where their numbers are, and how to repeat them.

No number is written here: numbers come from the result files, and a test of ``nox -s docs`` compares
the documents with them. ``nox -s bench -- --quick`` (repeat_claims.py) measures every claim again, with few
repeats, and fails where one is worse by more than its spread. ``python benchmarks/claims.py`` prints each
claim with where it stands and the run that it rests on. This module needs no torch.

A claim's spread comes from its result file: the sum of the interquartile ranges of its entries, as shares of
their medians, but at least ``least_spread``. A claim of a gain also fails where nothing is gained.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Place:
    """A place in a document that states a number.

    Args:
        document: Its path below the root.
        text: The text there, with ``{value}`` for the number, and ``{one}`` and ``{other}`` for the figures
            that it is a ratio of.
        row: In a table: the first cell of its row.
        column: In a table: the head of its column.
    """

    document: str
    text: str
    row: str = ""
    column: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim in a document, and its evidence.

    Args:
        name: Short and unique.
        sentence: The claim, with ``{value}`` for the number.
        places: Where the number is stated.
        results: The file below ``benchmarks/results``.
        one: The keys that lead to an entry of the file: a number, or a median with its quartiles.
        other: The keys of the entry that it is divided by; empty if the number is not a ratio.
        spread_of: Entries whose quartiles give the spread, if ``one`` and ``other`` have none.
        compared: The keys of the entry that a new run is compared by, if the number itself depends on how
            fast a machine computes.
        measured_by: A function of repeat_claims.py that returns the same entries as the file.
        better: Whether more is better. Only worse numbers are failures.
        least_spread: As a share of the number. A tenth, because machines of one kind differ by that much.
        optional: Whether there are machines that cannot measure it, for want of a CPU's instructions.
    """

    name: str
    sentence: str
    places: tuple[Place, ...]
    results: str
    one: tuple[str, ...]
    measured_by: str
    other: tuple[str, ...] = ()
    spread_of: tuple[tuple[str, ...], ...] = ()
    compared: tuple[str, ...] = ()
    better: Literal["more", "less"] = "more"
    least_spread: float = 0.1
    optional: bool = False

    def stored(self) -> dict[str, Any]:
        """Return the result file."""
        found: dict[str, Any] = json.loads((RESULTS / self.results).read_text())
        return found

    def value(self, results: Mapping[str, Any]) -> float:
        """Return the claim's number according to these results."""
        one = median(entry(results, self.one))
        return one / median(entry(results, self.other)) if self.other else one

    def compared_value(self, results: Mapping[str, Any]) -> float:
        """Return the number by which a new run is compared with the stored one."""
        return median(entry(results, self.compared)) if self.compared else self.value(results)

    def spread(self, results: Mapping[str, Any]) -> float:
        """Return by what share the number may be worse than the stored one, for these results."""
        paths = self.spread_of or tuple(path for path in (self.one, self.other) if path)
        return max(self.least_spread, sum(relative_range(entry(results, path)) for path in paths))

    def bound(self, results: Mapping[str, Any]) -> float:
        """Return the worst compared number that is no failure, for these stored results.

        It is worse than ``results`` by the spread, but of a gain at least as good as no gain.
        """
        then, spread = self.compared_value(results), self.spread(results)
        if self.better == "more":
            return max(then * (1 - spread), 1.0 if then > 1 else 0.0)
        return min(then * (1 + spread), 1.0 if then < 1 else math.inf)

    def holds(self, now: float) -> bool:
        """Return whether a new compared number is not worse than the bound of the stored results."""
        bound = self.bound(self.stored())
        return now >= bound if self.better == "more" else now <= bound

    def run(self) -> Mapping[str, Any]:
        """Return the head of the stored run that the claim rests on: its commit, date and machine.

        Of several partial runs in a file, the one that measured the least around the claim's entry.
        """
        found = self.stored()
        heads = {tuple(part.split(" / ")): head for part, head in found.get("measured", {}).items()}
        around = [part for part in heads if part == self.one[: len(part)]]
        return heads[max(around, key=len)] if around else found

    def texts(self, results: Mapping[str, Any]) -> list[tuple[Place, str]]:
        """Return each place with the text that must be there."""
        numbers = {"value": self.value(results), "one": median(entry(results, self.one))}
        if self.other:
            numbers["other"] = median(entry(results, self.other))
        return [(place, place.text.format(**numbers)) for place in self.places]


def entry(results: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Return the entry that these keys lead to."""
    found: Any = results
    for key in path:
        found = found[key]
    return found


def median(found: Any) -> float:
    """Return an entry's median; a number is its own median."""
    if isinstance(found, (int, float)):
        return found
    return float(next(value for key, value in found.items() if key.startswith("median")))


def relative_range(found: Any) -> float:
    """Return an entry's interquartile range as a share of its median; 0 for a number."""
    if isinstance(found, (int, float)):
        return 0.0
    low, high = next(
        (value for key, value in found.items() if key.startswith(("quartiles", "range"))), (0.0, 0.0)
    )
    return float((high - low) / median(found))


def stands(place: Place, text: str) -> bool:
    """Return whether a text is in its place."""
    document = (ROOT / place.document).read_text()
    if not place.row:
        return text in re.sub(r"\s+", " ", document)  # lines may break anywhere
    return any(text in cell for cell in cells(document, place.row, place.column))


def cells(document: str, row: str, column: str) -> list[str]:
    """Return the cells of a row and column in all tables of a Markdown document that have both."""
    found, heads = [], []
    for line in document.splitlines():
        if not line.startswith("|"):
            heads = []
            continue
        parts = [part.strip() for part in line.strip("|").split("|")]
        heads = heads or parts
        if parts[0] == row and column in heads:
            found.append(parts[heads.index(column)])
    return found


BENCHMARKS = "docs/benchmarks"
BUCKETS, ACCURACY, WHOLE_STEPS = (
    f"{BENCHMARKS}/{page}.md" for page in ("quantized-buckets", "accuracy", "whole-steps")
)
QUANT, CHOOSE = "packages/ddp-quant-hooks/README.md", "docs/choose.md"
STATED = {
    "7M": (
        Place(CHOOSE, "{value:.2f} (7 million parameters)"),
        Place(QUANT, "{value:.2f} times as fast as with plain DDP (7 million parameters)"),
    ),
    "MLP": (Place(CHOOSE, "{value:.2f} (19 million)"), Place(QUANT, "or {value:.2f} times (19 million)")),
}
"""Sentences about 8 bits between two hosts at 1 Gbit/s, by model."""
FP32 = "fp32, allreduce_hook"
SLOW = "7M, 2 hosts, 0.1 Gbit/s"
GATHERS = ("times", "2 hosts of 2 ranks", "1gbit")
NATIVE_ROW, BOTH_ROW = "native FSDP2, fp32", "both in 8 bits: also `quantize_all_gather`"


def _bucket(bits: str, row: str, key: str, hosts: int, rate: str) -> Claim:
    """Return a claim from the table of 25 MiB buckets."""
    link = rate.replace("gbit", " Gbit/s")
    column = f"{hosts} hosts, {link}"
    return Claim(
        name=f"{bits}, {column}",
        sentence=f"On {column}, {bits} average a bucket of 25 MiB {{value:.2f}} times as fast as fp32.",
        places=(Place(BUCKETS, "{other:.0f} ({value:.2f}x)", row, column),),
        results="quantized_allreduce.json",
        one=("hosts", rate, str(hosts), FP32),
        other=("hosts", rate, str(hosts), key),
        measured_by=f"buckets_on_{hosts}_hosts",
    )


def _step(
    side: str, label: str, row: str, case: str, *stated: Place, measured_by: str = "whole_steps"
) -> Claim:
    """Return a claim of the tables of whole steps, on their page and where else it is stated.

    Args:
        side: The side in the results.
        label: Its name in sentences.
        row: Its row in the tables.
        case: The cell of the results: a model and the place where it trains.
        stated: Other places.
        measured_by: As of :class:`Claim`.
    """
    model, where = case.split(", ", 1)
    return Claim(
        name=f"whole steps, {label}, {case}",
        sentence=f"A training step, {case}, is {{value:.2f}} times as fast as plain DDP's with {label}.",
        places=(*stated, Place(WHOLE_STEPS, "({value:.2f}x)", row, where if model == "7M" else case)),
        results="whole_steps.json",
        one=("cells", case, "sides", side, "faster_than_plain"),
        compared=("cells", case, "sides", side, "gain_of_possible"),
        measured_by=measured_by,
    )


CLAIMS = (
    *(
        _step("8bits", "8 bits", "ours: 8 bits", f"{model}, 2 hosts, 1 Gbit/s", *stated)
        for model, stated in STATED.items()
    ),
    *(
        _step(
            "8bits+overlap",
            "8 bits, overlapped step",
            "ours: 8 bits + overlap",
            f"{model}, 2 hosts, 1 Gbit/s",
        )
        for model in STATED
    ),
    *(
        _step(
            side,
            label,
            row,
            SLOW,
            Place("README.md", "({value:.2f}x)", SLOW, label),
            measured_by="steps_on_a_slow_link",
        )
        for side, label, row in (
            ("8bits", "8 bits", "ours: 8 bits"),
            ("low-rank-one", "low rank", "ours: low rank, rank 8, one bucket"),
        )
    ),
    _bucket("8 bits", "**8 bits**", "ours: 8 bits", 2, "1gbit"),
    _bucket("8 bits", "**8 bits**", "ours: 8 bits", 4, "1gbit"),
    _bucket("8 bits", "**8 bits**", "ours: 8 bits", 2, "10gbit"),
    _bucket(
        "4 bits without feedback",
        '4 bits, `error_feedback="none"`',
        "ours: 4 bits, no error feedback",
        2,
        "1gbit",
    ),
    *(
        Claim(
            name=f"bytes of 8 bits, {ranks} ranks",
            sentence=f"8 bits send {{value:.3f}} of fp32's bytes on {ranks} ranks.",
            places=(Place(BUCKETS, "{value:.3f}", "**8 bits**", f"{ranks} ranks"),),
            results="quantized_allreduce.json",
            one=("bytes", str(ranks), "ours: 8 bits"),
            other=("bytes", str(ranks), FP32),
            measured_by="bytes_of_buckets",
            better="less",
            least_spread=0.01,
        )
        for ranks in (2, 4)
    ),
    *(
        Claim(
            name=f"error of 8 bits, {gradients}, {ranks} ranks",
            sentence=f"A step of 8 bits has a relative error of {{value:.1e}}: {gradients}, {ranks} ranks.",
            places=(Place(ACCURACY, "{value:.1e}", "ours: int8", column),),
            results="quant_accuracy.json",
            one=("schemes", "ours: int8", "relative_error", gradients, str(ranks)),
            measured_by="errors",
            better="less",
            least_spread=0.05,
        )
        for gradients, ranks, column in (
            ("Gaussian", 2, "Gaussian, W=2"),
            ("heavy tails", 8, "heavy tails, W=8"),
        )
    ),
    Claim(
        name="encoding",
        sentence="Encoding with AVX2 reaches {value:.2f} of a copy's bandwidth.",
        places=(
            Place("docs/install.md", "for AVX2, encoding 25 MiB runs at {value:.2f} of the speed of a copy"),
        ),
        results="quant_kernels.json",
        one=("kernels", "ours: encode, AVX2", "of_copy"),
        spread_of=(("kernels", "tensor.copy_"), ("kernels", "ours: encode, AVX2")),
        measured_by="kernels_alone",
        optional=True,
    ),
    Claim(
        name="fp16, 2 hosts",
        sentence="On 2 hosts, 1 Gbit/s, fp16 averages a bucket of 25 MiB {value:.2f} times as fast as fp32.",
        places=(
            *(
                Place(BUCKETS, text, "`fp16_compress_hook`", "2 hosts, 1 Gbit/s")
                for text in ("{other:.0f} / ", "({value:.2f}x)")
            ),
            Place(
                "packages/ddp-compress-hooks/README.md",
                "takes {other:.0f} ms with `fp16_compress_hook`, {one:.0f} with fp32 ({value:.2f}x)",
            ),
        ),
        results="compress_hooks.json",
        one=("hosts", "2", "ours/allreduce_hook"),
        other=("hosts", "2", "ours/fp16_compress_hook"),
        measured_by="half_buckets_on_2_hosts",
    ),
    Claim(
        name="overlapped step, 2 hosts",
        sentence="With AdamW overlapped a step of 60 MB takes {value:.3f} of the ordinary loop's time.",
        places=(
            Place("packages/ddp-optim-overlap/README.md", "a step of 60 MB takes {value:.3f} (PyTorch's"),
            Place(
                f"{BENCHMARKS}/overlapped-steps.md", "({value:.3f})", "**overlapped step**", "60 MB, foreach"
            ),
        ),
        results="overlap.json",
        one=(
            "hosts",
            "cases",
            "60MB, foreach, batch 8",
            "sides",
            "ours: overlapped step",
            "share_of",
            "ordinary loop",
        ),
        spread_of=(("hosts", "cases", "60MB, foreach, batch 8", "sides", "ours: overlapped step"),),
        measured_by="overlapped_steps",
        better="less",
    ),
    Claim(
        name="FSDP2 in 8 bits, 2 x 2 ranks",
        sentence="On 2 hosts of 2 ranks, 1 Gbit/s, 8 bits are {value:.2f} times as fast as HSDP.",
        places=(Place(f"{BENCHMARKS}/fsdp2.md", "{other:.0f} ms, {value:.2f}x", "8 bits", "1 Gbit/s"),),
        results="fsdp.json",
        one=("times", "1gbit", "native HSDP, fp32"),
        other=("times", "1gbit", "ours: 8 bits"),
        measured_by="sharded_steps",
    ),
    *(
        Claim(
            name=f"FSDP2's gathers in 8 bits{', kept' if kept else ''}, 2 x 2 ranks",
            sentence=f"On 2 hosts of 2 ranks, 1 Gbit/s, {what} are {{value:.2f}} times as fast as FSDP2.",
            places=(
                Place(f"{BENCHMARKS}/fsdp2.md", "{other:.0f} ms, {value:.2f}x", row, "1 Gbit/s"),
                Place(f"{BENCHMARKS}/fsdp2.md", "{one:.0f} ms", NATIVE_ROW, "1 Gbit/s"),
            ),
            results="fsdp_gather.json",
            one=(*GATHERS, "native FSDP2, fp32"),
            other=(*GATHERS, side),
            measured_by="gathered_steps",
        )
        for kept, what, row, side in (
            (False, "parameters and gradients in 8 bits", BOTH_ROW, "both in 8 bits"),
            (
                True,
                "both in 8 bits, kept for the backward pass,",
                "both, `keep_for_backward=True`",
                "both in 8 bits, kept for backward",
            ),
        )
    ),
    Claim(
        name="bytes of FSDP2's gathers in 8 bits, 2 x 2 ranks",
        sentence="Parameters and gradients in 8 bits take {value:.2f} bytes a parameter on a host's link.",
        places=(Place(f"{BENCHMARKS}/fsdp2.md", "{value:.2f}", BOTH_ROW, "bytes a parameter"),),
        results="fsdp_gather.json",
        one=(*GATHERS, "both in 8 bits", "bytes_a_parameter"),
        measured_by="gathered_steps",
        better="less",
        least_spread=0.02,
    ),
    Claim(
        name="walk of a batch",
        sentence="PyTorch's walk of a dict of lists takes {value:.1f} times as long.",
        places=(Place("packages/dist-utils/README.md", "{other:.2f} us a tensor (PyTorch: {one:.2f};"),),
        results="containers.json",
        one=("us_per_tensor", "dict of lists", "keep", "torch"),
        other=("us_per_tensor", "dict of lists", "keep", "dist_utils"),
        measured_by="walks",
    ),
    Claim(
        name="module states",
        sentence="sync_module_states of 100 MiB takes {value:.2f} of the time of PyTorch's function.",
        places=(
            Place(
                "packages/dist-utils/README.md",
                "100 MiB takes {one:.1f} ms on loopback (PyTorch: {other:.1f})",
            ),
        ),
        results="module_sync.json",
        one=("ms", "100.2 MiB", "ours, with verification"),
        other=("ms", "100.2 MiB", "pytorch, with verification"),
        measured_by="module_states",
        better="less",
    ),
    Claim(
        name="all_gather with gradients",
        sentence="all_gather of 64 MiB on 2 ranks, with its backward, takes {value:.2f} of PyTorch's time.",
        places=tuple(
            Place(document, text, "`all_gather`", "2 ranks, 64 MiB")
            for document, text in (
                ("packages/dist-autograd-collectives/README.md", "{one:.0f} / {other:.0f} ({value:.2f})"),
                (f"{BENCHMARKS}/collectives.md", "{value:.2f}"),
            )
        ),
        results="autograd_collectives.json",
        one=("ms", "2 ranks, 64 MiB", "all_gather / ours"),
        other=("ms", "2 ranks, 64 MiB", "all_gather / pytorch"),
        measured_by="gathers",
        better="less",
    ),
)


if __name__ == "__main__":
    for claim in CLAIMS:
        print(claim.sentence.format(value=claim.value(claim.stored())))
        print(f"    {', '.join(sorted({place.document for place in claim.places}))}")
        run = claim.run()
        about = f"commit {run.get('tree', 'unknown')}, {run['date']}"
        print(f"    results/{claim.results}, by {claim.measured_by}() of repeat_claims.py; {about}")
