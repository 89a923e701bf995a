"""What the planner found, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from models.bert.costs import BertCosts
from tensor3d import CubeShape
from tensor3d.planning.cluster import Cluster
from tensor3d.planning.known import Timed
from tensor3d.planning.search import Plan, Refused, Search
from tensor3d.planning.traffic import Bytes
from tensor3d.shape import AXES
from tools.bench.machine import aligned
from tools.dry_run import in_bytes, in_time
from tools.plan.kinds import best_of_kinds, kind_of
from tools.plan.models import parameters_of

HEADER = ("box", "kind", "inside a node", "micro-batches", "memory for", "step", "tokens/s", "MFU", "peak", "limit")


def heading(costs: BertCosts, cluster: Cluster) -> list[str]:
    """What is planned for what."""
    config, batch = costs.config, costs.batch
    return [
        f"{parameters_of(config) / 1e9:,.3g} G parameters: {config.layers} layers, hidden {config.hidden}, inner "
        f"{config.inner_size}, {config.heads} heads, vocabulary {config.vocab:,}",
        f"{batch.packs:,} packs of {batch.capacity} = {batch.tokens:,} tokens a step; {costs.compute}, gradients "
        f"travel in {costs.reduce}, {costs.optimizer}",
        f"{cluster.name}: {cluster.nodes:,} x {cluster.per_node} ranks, {cluster.flops[costs.compute] / 1e12:,.4g} "
        f"TFLOP/s of {costs.compute} at {cluster.efficiency:.0%}, {in_bytes(cluster.memory)} of memory",
    ]


def row(plan: Plan, cluster: Cluster, compute: str) -> tuple[str, ...]:
    """Under `HEADER`."""
    return (
        str(plan.shape),
        kind_of(plan.shape),
        inside(plan.shape, cluster),
        str(plan.choice.micro_batches),
        spent(plan),
        in_time(plan.time.total),
        f"{plan.tokens_per_second:,.0f}",
        f"{mfu(plan, cluster, compute):.1%}",
        in_bytes(plan.cost.memory.peak),
        plan.time.limit,
    )


def table(plans: Iterable[Plan], cluster: Cluster, compute: str) -> list[str]:
    return aligned(HEADER, [row(plan, cluster, compute) for plan in plans])


def mfu(plan: Plan, cluster: Cluster, compute: str) -> float:
    """Model FLOPs a second over the peak of all ranks."""
    return plan.cost.model_flops / plan.time.total / (cluster.flops[compute] * cluster.ranks)


def inside(shape: CubeShape, cluster: Cluster) -> str:
    """The axes of which neighbours share a node, fastest first, such as "z, y, 2 of x"."""
    together = cluster.neighbours(shape)
    found = [
        axis if here == shape.size(axis) else f"{here} of {axis}"
        for axis in reversed(shape.wire)
        if (here := together[axis]) > 1
    ]
    return ", ".join(found) or "nothing"


def spent(plan: Plan) -> str:
    """What memory is spent on, or saved by."""
    if plan.choice.recompute != "none":
        return f"recompute {plan.choice.recompute}"
    return "kept gathers" if plan.choice.keep_gathered else "shards alone"


def details(plan: Plan, cluster: Cluster) -> list[str]:
    """Memory by kind, traffic by axis and link, time by part."""
    memory, time, shape = plan.cost.memory, plan.time, plan.shape
    lines = [
        f"{shape}, ranks dealt along {', '.join(axis for axis in shape.wire)} (slowest first):",
        "  memory of a rank: "
        + ", ".join(
            f"{name} {in_bytes(size)}"
            for name, size in (
                ("weights", memory.weights),
                ("gradients", memory.gradients),
                ("optimiser", memory.optimizer),
                ("kept for backward", memory.saved),
                ("coming and going", memory.passing),
                ("at most at once", memory.peak),
            )
        ),
        "  time: "
        + ", ".join(
            f"{name} {in_time(seconds)}"
            for name, seconds in (
                ("products", time.products),
                ("attention", time.attention),
                ("memory-bound operators", time.touching),
                ("starting operators", time.starting),
                ("the wire", time.exposed),
            )
        )
        + f"; under products, {in_time(time.hidden)} of the wire more",
    ]
    traffic, calls = _by_axis(plan.cost.traffic), _by_axis(plan.cost.calls)
    header = ("received by a rank over", "bytes", "collectives", "link", "seconds on the wire")
    rows = [
        (axis, in_bytes(size), f"{calls[axis]:,}", _link(shape, axis, cluster), in_time(time.by_axis[axis]))
        for axis, size in sorted(traffic.items(), key=lambda pair: -pair[1])
    ]
    return lines + [f"  {line}" for line in (aligned(header, rows) if rows else ["no wire: one rank"])]


def reason(search: Search) -> list[str]:
    """Why the first plan is the first."""
    best = search.plans[0]
    lines = [f"pick: {best.shape} ({kind_of(best.shape)}), limited by {best.time.limit}."]
    for kind, plan in best_of_kinds(search.plans).items():
        if plan is not best:
            lines.append(f"  {kind} at its best, {plan.shape}, takes {_more(plan, best)}.")
    return lines


def refusals(refused: Sequence[Refused], *, every: bool) -> list[str]:
    """Why boxes are none: a line for each, or how many there are of each sort."""
    if every:
        return [f"  {each.shape}: {each.reason}" for each in refused]
    sorts = Counter("need more memory" if each.reason.startswith("needs") else "do not divide" for each in refused)
    return [f"{count:,} boxes {sort} (--all names them)" for sort, count in sorts.most_common()]


def known_table(rows: Sequence[Timed]) -> list[str]:
    """The papers' ways."""
    held = ("weights a rank", "kept a layer")
    header = ("way", "layers a step", "products", "wire seen", "elements received a layer", *held, "source")
    shown = [
        (each.way.name, *(("-",) * 6), f"no: {each.way.refused}")
        if each.way.refused
        else (
            each.way.name,
            in_time(each.seconds),
            in_time(each.compute),
            in_time(each.exposed),
            f"{sum(move.elements for move in each.way.moves):,}",
            f"{each.way.weights:,}",
            f"{each.way.saved:,}",
            each.way.source,
        )
        for each in rows
    ]
    return aligned(header, shown)


def _more(plan: Plan, best: Plan) -> str:
    ratio = plan.time.total / best.time.total
    parts = {
        "the wire": plan.time.exposed - best.time.exposed,
        "products": plan.time.products + plan.time.attention - best.time.products - best.time.attention,
        "memory-bound operators": plan.time.touching - best.time.touching,
        "starting operators": plan.time.starting - best.time.starting,
    }
    most = max(parts, key=parts.__getitem__)
    return f"{ratio:.2f} times as long: {in_time(max(0.0, parts[most]))} more for {most}"


def _by_axis(counts: Bytes) -> Counter[str]:
    total: Counter[str] = Counter()
    for (axis, _), count in counts.items():
        total[axis] += count
    return total


def _link(shape: CubeShape, name: str, cluster: Cluster) -> str:
    axes = tuple(axis for axis in AXES if axis in name.split("+"))
    here, members = cluster.on_one_node(shape, axes), 1
    for axis in axes:
        members *= shape.size(axis)
    return "inside a node" if here >= members else f"across nodes, {here} of {members} on one"
