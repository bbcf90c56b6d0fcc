"""The report as tables for people, and the progress bar. Needs rich."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ddp_quant_hooks.measure.quantities import mebibytes, milliseconds
from ddp_quant_hooks.measure.report import Report
from ddp_quant_hooks.measure.schedule import Progress as OnProgress
from ddp_quant_hooks.measure.step_model import StepTimes
from ddp_quant_hooks.measure.timing import Exchange

__all__ = ["print_report", "progress_bar"]


@contextlib.contextmanager
def progress_bar(console: Console) -> Iterator[OnProgress]:
    """Show a bar, and yield a function that moves it. Only that draws: a thread would disturb."""
    columns = (
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def tell(share: float, text: str) -> None:
            bar.update(task, completed=share, description=text)
            bar.refresh()

        yield tell


def print_report(report: Report, console: Console) -> None:
    """Print everything: links, hooks, estimate, prediction, advice."""
    nodes = f"{len(report.nodes)} node{'s' if len(report.nodes) > 1 else ''}"
    console.print(
        f"{report.world_size} ranks on {nodes}, {report.backend}, buckets on {report.device}, "
        f"{report.threads} thread(s), measured in {report.seconds:.0f} s"
    )
    console.print(_links(report))
    console.print(_hooks(report))
    if report.estimate is not None:
        model = report.estimate.model
        known = f"{model.parameters / 1e6:g} M parameters, {milliseconds(model.step_seconds)} ms alone"
        console.print(_steps(f"Estimated: {known}", report.estimate.steps))
    _print_prediction(report, console)
    console.print(f"Take: {report.advice.hook}", style="bold", highlight=False)
    for reason in report.advice.reasons:
        console.print(f"  {reason}", highlight=False)


def _links(report: Report) -> Table:
    table = Table(title="Links, all ranks of a ring sending at once", title_justify="left")
    table.add_column("where")
    for heading in ("latency us", "Gbit/s each way", "processor us a message", "processor ms a MiB"):
        table.add_column(heading, justify="right")
    for link in report.links:
        table.add_row(
            link.place,
            f"{1e6 * link.latency:.0f}",
            f"{link.gbit:.3g}",
            f"{1e6 * link.cpu_per_message:.0f}",
            f"{1e3 * 2**20 * link.cpu_per_byte:.2f}",
        )
    return table


def _hooks(report: Report) -> Table:
    table = Table(title="Averages of one bucket", title_justify="left")
    for heading in ("hook", "MiB"):
        table.add_column(heading)
    for heading in (
        "ms",
        "quartiles",
        "MB sent",
        "error",
        "beside computation ms",
        "computation loses ms",
        "runs",
    ):
        table.add_column(heading, justify="right")
    sizes = sorted({exchange.size for hook in report.hooks for exchange in hook.exchanges})
    for size in sizes:
        for hook in report.hooks:
            exchange = hook.at(size)
            table.add_row(hook.name, f"{size / 2**20:g}", *_cells(exchange))
        table.add_section()
    return table


def _cells(exchange: Exchange | None) -> list[str]:
    if exchange is None:
        return ["not within the budget"]
    beside = exchange.beside
    return [
        milliseconds(exchange.seconds),
        " - ".join(map(milliseconds, exchange.quartiles)),
        f"{exchange.bytes_sent / 1e6:.2f}",
        f"{exchange.relative_error:.1e}",
        "" if beside is None else milliseconds(beside.seconds),
        "" if beside is None else milliseconds(beside.lost),
        f"{exchange.repeats}" + ("" if beside is None else f" + {beside.repeats}"),
    ]


def _steps(title: str, steps: dict[str, StepTimes]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("hook")
    for heading in ("step ms", "of that exposed communication", "slower backward", "copies"):
        table.add_column(heading, justify="right")
    for name, step in steps.items():
        table.add_row(
            name,
            milliseconds(step.seconds),
            milliseconds(step.exposed),
            milliseconds(step.contention),
            milliseconds(step.copying),
        )
    return table


def _print_prediction(report: Report, console: Console) -> None:
    prediction = report.prediction
    if prediction is None:
        return
    cluster = prediction.cluster
    where = f"{cluster.world} ranks on {cluster.nodes} nodes with {cluster.gbit:g} Gbit/s"
    table = Table(title=f"Predicted, not measured: averages on {where}", title_justify="left")
    table.add_column("hook")
    sizes = sorted({size for seconds in prediction.predicted_seconds.values() for size in seconds})
    for size in sizes:
        table.add_column(f"predicted ms, {mebibytes(size)}", justify="right")
    for name, seconds in prediction.predicted_seconds.items():
        table.add_row(name, *(milliseconds(seconds[size]) for size in sizes))
    console.print(table)
    if prediction.predicted_steps:
        console.print(_steps(f"Predicted, not measured: steps on {where}", prediction.predicted_steps))
    for assumption in prediction.assumptions:
        console.print(f"  {assumption}", highlight=False)
