"""`python -m tools.plan --model large --gpu H100 --nodes 8`: which box, placed how, and why."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from models.bert.costs import BYTES, BertCosts
from tensor3d.planning.cluster import Cluster
from tensor3d.planning.headline import report as headline
from tensor3d.planning.known import Encoder, Timed, timed, ways
from tensor3d.planning.search import Plan, Search, search
from tensor3d.planning.times import Overlap
from tools.bench.machine import aligned, write_json
from tools.entry import guarded
from tools.plan import tables
from tools.plan.command import DEFAULT_GPU, PlanCommand
from tools.plan.kinds import kind_of
from tools.recipe_sections import PrecisionRecipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 where no box holds the model; 2 for a bad call."""
    command = tyro.cli(PlanCommand, args=arguments, prog="python -m tools.plan")
    return guarded("tools.plan", lambda: run(command))


def run(command: PlanCommand) -> int:
    """
    Raises:
        ValueError: what is asked for cannot be.
    """
    command.validate()
    if command.headline:
        print(headline())
        return 0
    if command.check:
        from tools.plan import checking  # reads recipes, and scipy

        cluster = command.machines()
        print("\n".join(checking.report([checking.check(path, cluster) for path in command.check])))
        return 0
    return plan_sizes(command) if command.ranks is not None else plan_one(command)


def plan_one(command: PlanCommand) -> int:
    cluster = command.machines()
    costs = command.costs(cluster)
    found = _searched(command, cluster, costs)
    known = [] if command.cube else known_ways(costs, cluster, command.overlap)
    print("\n".join([*tables.heading(costs, cluster), ""]))
    if found.plans:
        shown = found.plans if command.all else found.plans[: command.top]
        print("\n".join([*tables.table(shown, cluster, costs.compute), "", *tables.reason(found), ""]))
        print("\n".join([*tables.details(found.plans[0], cluster), ""]))
    if known:
        print("\n".join(["the known ways, by their papers' formulas (layers alone, no heads):"]))
        print("\n".join([*tables.known_table(known), ""]))
    print("\n".join(tables.refusals(found.refused, every=command.all or not found.plans)))
    if command.output is not None:
        write_json(command.output, {**_content(command, costs, cluster), "search": as_json(found, cluster, costs)})
        print(f"written: {command.output}")
    if not found.plans:
        print("no box of these ranks holds the model", file=sys.stderr)
        return 1
    if command.dry_run:
        return count_beside(found.plans[0], costs)
    return 0


def plan_sizes(command: PlanCommand) -> int:
    from tools.plan import sweep  # with it comes all that draws and counts

    counts = command.rank_counts()
    points = {}
    for ranks in counts:
        cluster = command.machines(ranks)
        costs = command.costs(cluster)
        points[ranks] = sweep.Point(cluster=cluster, found=_searched(command, cluster, costs))
    largest = points[counts[-1]].cluster
    costs = command.costs(largest)
    print("\n".join([*tables.heading(costs, largest), ""]))
    print("\n".join([*sweep.table(points, costs.compute), "", *sweep.told(sweep.crossings(points))]))
    if command.plot is not None:
        name = (command.gpu or DEFAULT_GPU) if command.cluster is None else Path(command.cluster).stem
        sweep.plot(
            points, f"{command.model} on {name}, {command.global_batch:,} packs of {command.capacity}", command.plot
        )
        print(f"written: {command.plot}")
    if command.output is not None:
        content: dict[str, Any] = {
            str(ranks): as_json(point.found, point.cluster, costs) for ranks, point in points.items()
        }
        crossed = [dataclasses.asdict(each) for each in sweep.crossings(points)]
        write_json(command.output, {**_content(command, costs, largest), "ranks": content, "crossings": crossed})
        print(f"written: {command.output}")
    return 0 if any(point.found.plans for point in points.values()) else 1


def known_ways(costs: BertCosts, cluster: Cluster, overlap: Overlap) -> list[Timed]:
    """The analytic rows for the same layers and the same batch, all ranks split that way."""
    config, batch = costs.config, costs.batch
    encoder = Encoder(
        sequences=batch.tokens // batch.lengths[0],
        length=batch.lengths[0],
        hidden=config.hidden,
        inner=config.inner_size,
        heads=config.heads,
        layers=config.layers,
        vocabulary=config.vocab,
    )
    return [
        timed(
            way,
            encoder,
            cluster,
            compute=costs.compute,
            element=BYTES[costs.compute],
            gradient=BYTES[costs.reduce],
            overlapped=None if overlap != "none" else False,
        )
        for way in ways(encoder, cluster.ranks)
    ]


def as_json(found: Search, cluster: Cluster, costs: BertCosts) -> dict[str, Any]:
    """All plans and refusals."""
    return {
        "plans": [_plan(plan, cluster, costs) for plan in found.plans],
        "refused": [{"box": str(each.shape), "reason": each.reason} for each in found.refused],
    }


def _plan(plan: Plan, cluster: Cluster, costs: BertCosts) -> dict[str, Any]:
    shape = plan.shape
    traffic, calls = plan.cost.traffic, plan.cost.calls
    return {
        "box": {"data": shape.data, "x": shape.x, "y": shape.y, "z": shape.z},
        "kind": kind_of(shape),
        "wire": shape.wire,
        "choice": dataclasses.asdict(plan.choice),
        "seconds": plan.time.total,
        "time": dataclasses.asdict(plan.time),
        "limit": plan.time.limit,
        "tokens_per_second": plan.tokens_per_second,
        "mfu": tables.mfu(plan, cluster, costs.compute),
        "memory": dataclasses.asdict(plan.cost.memory),
        "received": [
            {"axis": axis, "kind": kind, "bytes": size, "calls": calls[axis, kind]}
            for (axis, kind), size in sorted(traffic.items())
        ],
    }


def _content(command: PlanCommand, costs: BertCosts, cluster: Cluster) -> dict[str, Any]:
    asked = {
        field.name: getattr(command, field.name)
        for field in dataclasses.fields(command)
        if getattr(command, field.name) is not None
    }
    told = {name: str(value) if isinstance(value, Path) else value for name, value in asked.items()}
    return {"asked": told, "model": dataclasses.asdict(costs.config), "cluster": cluster.to_json()}


def _searched(command: PlanCommand, cluster: Cluster, costs: BertCosts) -> Search:
    return search(
        costs,
        cluster,
        costs.compute,
        overlap=command.overlap,
        memory_share=command.memory_share,
        shapes=command.shapes(cluster),
    )


def count_beside(plan: Plan, costs: BertCosts) -> int:
    """The dry run of the plan's rank 0; 1 unless it counts what was predicted."""
    from tools.plan.beside import dry_beside_prediction  # a training step, of which planning needs nothing

    choice = plan.choice
    found = dry_beside_prediction(
        costs.config,
        plan.shape,
        costs.batch.load(plan.shape, choice.micro_batches),
        micro_batches=choice.micro_batches,
        types=PrecisionRecipe(compute=costs.compute, reduce=costs.reduce),  # type: ignore[arg-type]
        optimizer=costs.optimizer,
        recompute=choice.recompute,
        keep_gathered=choice.keep_gathered,
    )
    rows = [(each.what, f"{each.predicted:,}", f"{each.counted:,}", f"{each.ratio:.4g}") for each in found]
    print(f"a step of rank 0 of {plan.shape}, run without its memory and its peers (as on a CPU):")
    print("\n".join(aligned(("", "predicted", "counted", "ratio"), rows)))
    if all(each.ratio == 1 or (each.what == "peak" and 0.9 <= each.ratio <= 1.1) for each in found):
        return 0
    print("tools.plan: the formulas do not say what the model does; please report it", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
