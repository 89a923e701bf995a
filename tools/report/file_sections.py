"""What the page shows of files: a plan of tools.plan, scaling of tools.bench strong or weak, seeds of a fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensor3d import CubeShape
from tensor3d.cost_model.step_cost import StepOptions
from tensor3d.files import WRONG_ENTRIES, what_is_wrong
from tools.common.units import in_bytes, in_time, number_of
from tools.report.charts import Columns, scatter
from tools.report.page import Cell, Section, Table
from tools.report.runs import REMEDY, flat, read_json


def file_sections(path: Path) -> list[Section]:
    """Of a JSON file.

    Raises:
        ValueError: another file than those.
    """
    content = read_json(path)
    try:
        if "search" in content or "ranks" in content:
            return plan_sections(content)
        if content.get("benchmark") in ("strong", "weak"):
            return [scaling_section(content["benchmark"], content["results"])]
    except WRONG_ENTRIES as problem:
        raise ValueError(f"{path} is damaged ({what_is_wrong(problem)}). {REMEDY}") from None
    raise ValueError(f"{path} is of another kind. {REMEDY}")


# --- A plan -----------------------------------------------------------------------------------------------------------


def plan_sections(content: Mapping[str, Any]) -> list[Section]:
    """Of what `tools.plan --output` writes: boxes as a table that sorts, time against memory, and why a box is out."""
    cluster, asked = content["cluster"], content["asked"]
    limit = asked["memory_share"] * cluster["memory"]
    searches = content["ranks"] if "ranks" in content else {None: content["search"]}
    sections = [section for ranks, search in searches.items() for section in _search(search, limit, ranks)]
    told = {"asked": asked, "model": content["model"], "cluster": {**cluster, "fits": len(cluster.get("fits", ()))}}
    rows = [list(pair) for pair in flat(told).items()]
    return [*sections, Section(title="Asked", tables=[Table(header=["", "value"], rows=rows)])]


def _search(search: Mapping[str, Any], limit: float, ranks: str | None) -> list[Section]:
    plans, refused = search["plans"], search["refused"]
    of = "" if ranks is None else f" of {number_of(int(ranks), 'rank', 'ranks')}"
    if not plans:
        return [Section(title=f"Boxes{of}", notes=["No box of these ranks holds the model."]), _refusals(refused, of)]
    data: Columns = {name: [] for name in ("box", "kind", "seconds", "GB", "memory", "time", "limited by")}
    rows = []
    for place, plan in enumerate(plans, 1):
        shape, memory, choice = CubeShape(**plan["box"]), plan["memory"], StepOptions(**plan["choice"])
        peak = f"{'' if memory['counted'] else '> '}{in_bytes(memory['peak'])}"
        values = (str(shape), plan["kind"], plan["seconds"], memory["peak"] / 1e9, peak, in_time(plan["seconds"]))
        for column, value in zip(data.values(), (*values, plan["limit"]), strict=True):
            column.append(value)
        rows.append(
            [
                str(shape),
                Cell(f"{place}", place),
                plan["kind"],
                plan["limit"],
                Cell(in_time(plan["seconds"]), plan["seconds"]),
                Cell(f"{plan['tokens_per_second']:,.0f}", plan["tokens_per_second"]),
                Cell(f"{plan['mfu']:.1%}", plan["mfu"]),
                Cell(peak, memory["peak"]),
                Cell(f"{choice.micro_batches:,}", choice.micro_batches),
                choice.words,
                " ".join(plan["wire"]),
            ]
        )
    header = [
        "box",
        "place",
        "kind",
        "limited by",
        "step",
        "tokens/s",
        "MFU",
        "peak of a rank",
        "micro-batches",
        "for backward",
    ]
    table = Table(header=[*header, "ranks dealt along"], rows=rows, sorts=True)
    chart = scatter(
        "time against memory",
        data,
        x=("seconds", "time of a step (s)"),
        y=("GB", "peak of a rank (GB)"),
        by="kind",
        groups=list(dict.fromkeys(data["kind"])),
        log=True,
        rule=(limit / 1e9, f"{in_bytes(limit)} may be used"),
    )
    best = plans[0]
    notes = [
        f"Pick: {CubeShape(**best['box'])} ({best['kind']}), {in_time(best['seconds'])} a step, limited by "
        f"{best['limit']}.",
        "A peak with > is a formula's lower bound, any other one was counted in dry steps of the real code. Times are "
        "formulas for all. Ranks are dealt along the axes, the slowest first.",
    ]
    if search.get("run"):  # files of before have none
        notes.append(f"Run it: {search['run']}")
    return [Section(title=f"Boxes{of}", notes=notes, charts=[chart], tables=[table]), _refusals(refused, of)]


def _refusals(refused: Sequence[Mapping[str, str]], of: str) -> Section:
    rows = [[each["box"], each["reason"]] for each in refused]
    return Section(
        title=f"Boxes that are out{of}",
        notes=[f"{number_of(len(rows), 'box', 'boxes')}."],
        tables=[Table(header=["box", "why"], rows=rows, sorts=True)] if rows else [],
    )


# --- Scaling ----------------------------------------------------------------------------------------------------------

_KEYS = {
    "seconds_median": "time of a step (s)",
    "tokens_per_second": "tokens/s",
    "bytes_received": "received in a step, busiest rank (bytes)",
    "saved_bytes": "kept for backward, one rank (bytes)",
    "peak_tensor_bytes": "most tensor memory at once, one rank (bytes)",
}


def scaling_section(kind: str, results: Sequence[Mapping[str, Any]]) -> Section:
    """A point for each box, and a line through those of a kind; both scales are logarithmic."""
    charts, rows = [], []
    kinds = list(dict.fromkeys(sort for each in results for sort in each["kinds"]))
    for key, label in _KEYS.items():
        # What is 0, as the traffic of one rank, has no place on the scale; peaks of many ranks are not measured.
        known = [each for each in results if each.get(key)]
        data: Columns = {name: [] for name in ("box", "kind", "ranks", "value")}
        pairs = [(each, sort) for each in known for sort in each["kinds"]]
        for box, sort in sorted(pairs, key=_by_ranks):
            for column, value in zip(data.values(), (_box(box), sort, box["ranks"], box[key]), strict=True):
                column.append(value)
        if known:
            y = ("value", label)
            charts.append(
                scatter(label, data, x=("ranks", "ranks"), y=y, by="kind", groups=kinds, log=True, joined=True)
            )
    for each in results:
        cells = [
            Cell(_with_unit(each[key], label), each[key]) if each.get(key) is not None else "-"
            for key, label in _KEYS.items()
        ]
        rows.append([_box(each), Cell(f"{each['ranks']:,}", each["ranks"]), ", ".join(each["kinds"]), *cells])
    header = ["box", "ranks", "kind", *(label.partition(" (")[0] for label in _KEYS.values())]
    return Section(
        title=f"{kind.capitalize()} scaling", charts=charts, tables=[Table(header=header, rows=rows, sorts=True)]
    )


def _with_unit(value: float, label: str) -> str:
    return in_time(value) if "(s)" in label else in_bytes(value) if "(bytes)" in label else f"{value:,.0f}"


def _box(result: Mapping[str, Any]) -> str:
    return str(CubeShape.parse(result["cube"], result["data_parallel"]))


def _by_ranks(pair: tuple[Mapping[str, Any], str]) -> tuple[str, int]:
    return pair[1], pair[0]["ranks"]


# --- Seeds ------------------------------------------------------------------------------------------------------------


def seeds_section(title: str, results: Mapping[str, Any]) -> Section:
    """Of results.json: the metrics of each seed's best weights, with mean and deviation."""
    names = list(results["mean"])
    rows = [
        [f"seed {each['seed']}", *(f"{each['metrics'][name]:.4f}" for name in names), f"{each['best_step']:,}"]
        for each in results["seeds"]
    ]
    for label in ("mean", "deviation"):
        values = [results[label][name] for name in names]
        rows.append([label, *("-" if value is None else f"{value:.4f}" for value in values), ""])
    note = f"Best by {results['metric']}: {results['best']}."
    table = Table(header=["", *names, "best step"], rows=rows, numbers=True)
    return Section(title=title, notes=[note], tables=[table])
