"""What hooks would cost on another cluster, by a cost model fitted to the measurements here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddp_quant_hooks.measure.cost_model import Cluster, HookCost, Machine, traffic
from ddp_quant_hooks.measure.estimate import Model
from ddp_quant_hooks.measure.links import BETWEEN, INSIDE, Link
from ddp_quant_hooks.measure.step_model import BucketCost, StepTimes, bucket_sizes, play_step
from ddp_quant_hooks.measure.timing import DIRECT, GRID, Exchange, HookTimes

__all__ = ["Cluster", "Prediction", "fit", "predict"]


@dataclass(frozen=True)
class Prediction:
    """What hooks would cost on another cluster. None of it was measured.

    Attributes:
        cluster: The other cluster.
        assumptions: What the numbers are based on, in sentences.
        predicted_seconds: By the hook's name, then by the size of the bucket in bytes.
        predicted_steps: Whole steps by the hook's name, if there is a model.
    """

    cluster: Cluster
    assumptions: list[str]
    predicted_seconds: dict[str, dict[int, float]]
    predicted_steps: dict[str, StepTimes]


def predict(
    links: Sequence[Link],
    hooks: Sequence[HookTimes],
    nodes: Sequence[Sequence[int]],
    cluster: Cluster,
    model: Model | None = None,
    copy_per_byte: float = 0.0,
) -> Prediction:
    """Return what hooks would cost on another cluster.

    Args:
        links: The measured links.
        hooks: The measured hooks.
        nodes: The ranks of each measured node.
        cluster: The other cluster. If its nodes have several ranks, hierarchical hooks are predicted too,
            from the work of the other hooks with the same bits.
        model: A model whose steps to predict, too.
        copy_per_byte: Seconds for copying a byte of a gradient.
    """
    alike = len({len(members) for members in nodes}) == 1
    # Its bandwidth is in the machine. Nodes of different sizes count as ranks with a link each.
    here = Cluster(sum(map(len, nodes)), 1.0, len(nodes[0]) if alike else 1)
    measured = machine_of(links)
    wanted = {
        hook.name: fit(hook, here, measured) for hook in hooks if hook.exchanges and hook.pattern != GRID
    }
    there, assumptions = _machine_there(measured, links, cluster)
    if cluster.nodes > 1 and cluster.ranks_per_node > 1:
        wanted |= {
            f"{name} between nodes": cost.in_grid(cluster)
            for name, cost in wanted.items()
            if cost.pattern == DIRECT
        }
    sizes = sorted({exchange.size for hook in hooks for exchange in hook.exchanges})
    seconds = {
        name: {size: cost.seconds(size, cluster, there) for size in sizes} for name, cost in wanted.items()
    }
    by_name = {hook.name: hook for hook in hooks}
    steps = {}
    if model is not None:
        for name, cost in wanted.items():
            hook = by_name[name.removesuffix(" between nodes")]
            buckets = [
                _beside(size, cost, hook, here, cluster, there) for size in bucket_sizes(model.parameters)
            ]
            steps[name] = play_step(model.step_seconds, buckets, copy_per_byte)
    return Prediction(cluster, assumptions, seconds, steps)


def machine_of(links: Sequence[Link]) -> Machine:
    """Return what the measured links say about a rank. A missing link costs nothing."""
    by_place = {link.place: link for link in links}
    inside, between = by_place.get(INSIDE), by_place.get(BETWEEN)
    outer = between or inside
    if outer is None:
        raise ValueError("no link was measured")
    return Machine(
        latency=outer.latency,
        cpu_per_message=outer.cpu_per_message,
        cpu_per_byte=outer.cpu_per_byte,
        inside=1 / inside.bandwidth if inside else 0.0,
        between=1 / between.bandwidth if between else 0.0,
    )


def fit(hook: HookTimes, here: Cluster, machine: Machine) -> HookCost:
    """Return the costs with which the model reproduces the measured times.

    Args:
        hook: A measured hook, with at least one size; not one that averages inside nodes first.
        here: The measured cluster.
        machine: The measured machine.
    """
    smallest, largest = hook.exchanges[0], hook.exchanges[-1]
    ratio = largest.bytes_sent / traffic(hook.pattern, largest.size, 1.0, here).sent
    on_streams = not machine.cpu_per_byte  # an accelerator sends
    few = traffic(hook.pattern, smallest.size, ratio, here, on_streams=on_streams)
    moved = traffic(hook.pattern, largest.size, ratio, here, on_streams=on_streams)
    waiting, wire = moved.waiting(machine), moved.seconds(machine)
    fixed = max(0.0, _intercept(hook.exchanges) - few.waiting(machine))
    left = max(0.0, largest.seconds - fixed - waiting)
    # Threads share the work: processor time beyond the exchange's own time ran in parallel.
    at_once = min(1.0, left / largest.cpu_seconds) if largest.cpu_seconds else 0.0
    sending = at_once * min(machine.cpu_per_byte, largest.cpu_seconds / moved.sent)
    work = max(0.0, at_once * largest.cpu_seconds - sending * moved.sent) / largest.size
    rest = max(0.0, left - max(wire, work * largest.size + sending * moved.sent)) / largest.size
    return HookCost(hook.pattern, ratio, fixed, work, sending, rest, on_streams)


def _intercept(exchanges: Sequence[Exchange]) -> float:
    """Return the time that is left for an empty bucket on the line through the two smallest."""
    if len(exchanges) == 1:
        return 0.0
    small, large, *_ = exchanges
    slope = (large.seconds - small.seconds) / (large.size - small.size)
    return max(0.0, small.seconds - slope * small.size)


def _machine_there(measured: Machine, links: Sequence[Link], cluster: Cluster) -> tuple[Machine, list[str]]:
    inside, how = measured.inside, "as measured here"
    if not any(link.place == INSIDE for link in links):
        inside, how = measured.cpu_per_byte, "as fast as the processor sends, as none were measured here"
        if not inside:  # an accelerator sends
            how = "taken as no limit, as none were measured here"
    there = Machine(
        measured.latency, measured.cpu_per_message, measured.cpu_per_byte, inside, 8e-9 / cluster.gbit
    )
    return there, [
        f"Each node's link carries {cluster.gbit:g} Gbit/s in each direction, as given.",
        f"A short message takes {1e6 * there.latency:.0f} us, as measured here.",
        f"Links inside nodes: {how}.",
        "Hooks work as fast as here: processors, threads and accelerators are alike.",
    ]


def _beside(
    size: int, cost: HookCost, hook: HookTimes, here: Cluster, cluster: Cluster, there: Machine
) -> BucketCost:
    """Return a bucket's predicted cost; work of the processor disturbs computation as much as here."""
    alone = cost.seconds(size, cluster, there)
    known = [exchange for exchange in hook.exchanges if exchange.beside is not None]
    if not known:
        return BucketCost(size, alone, alone, 0.0)
    nearest = known[-1]
    assert nearest.beside is not None
    here_works = cost.processor(nearest.size, replace(cost, pattern=hook.pattern).traffic(nearest.size, here))
    works = cost.processor(size, cost.traffic(size, cluster))
    scale = works / here_works if here_works else size / nearest.size
    beside = alone + scale * max(0.0, nearest.beside.seconds - nearest.seconds)
    return BucketCost(size, alone, beside, min(scale * nearest.beside.lost, beside))
