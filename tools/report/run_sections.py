"""What the page shows of runs, one or several side by side: a column of a table for each, and a colour in charts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any

from tools.common.plotting import window_of
from tools.common.units import in_bytes, in_time
from tools.plot import AXIS_LABELS, HELD_OUT
from tools.report.charts import Chart, Line, bars, curve, stacks
from tools.report.cube_picture import cube_picture
from tools.report.page import Cell, Picture, Section, Table
from tools.report.runs import Record, Run, number
from tools.training.metrics.records import EVALUATION_TAGS, STEP_TAGS

_PHASES = {
    "data_wait_seconds": "waiting for data",
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "gradient_sum_seconds": "sum of gradients",
    "optimizer_seconds": "optimiser",
}
_REST = "rest"
# Curves in the order of the page, by TensorBoard's names. Phases, traffic and packs have sections of their own.
_LEARNING = (
    *(tag for tag in STEP_TAGS if tag.startswith(("loss/", "accuracy/"))),
    *(tag for tag in STEP_TAGS if tag.startswith("optimizer/")),
    "speed/tokens_per_second",
    "speed/step_seconds",
    "speed/mfu",
)
_PACKS = ("data/fill", "data/imbalance")
_NO_CURVE = {"optimizer/loss_scale": 1.0, "optimizer/skipped_steps": 0.0}
"""Numbers that say nothing as long as they are this throughout."""
_LAST = 20  # steps over which the loss at the end is averaged
_MOST_BARS = 256  # ranks
_MOST_EVENTS = 500  # rows

Runs = Mapping[str, Run]
"""By the name that the page gives them."""


def run_sections(runs: Runs) -> list[Section]:
    """All that there is to show; a section without any number is left out."""
    made = [_overview(runs), _curves(runs), _time(runs), _memory(runs), _traffic(runs), _packs(runs), _events(runs)]
    sections = [*made, _settings(runs), _environment(runs)]
    return [section for section in sections if section.charts or section.tables or section.notes]


def _overview(runs: Runs) -> Section:
    def peak(run: Run) -> str:
        memories = run.records.get("memory", [])
        return in_bytes(max(memories[-1]["peak_bytes"])) if memories else "-"

    # As the table says that a run ends with.
    firsts = {run.steps[0]["step"] for run in runs.values() if run.steps}
    begun = f"step {firsts.pop()}" if len(firsts) == 1 else "first step in the journal"
    last = min(_LAST, max((len(run.steps) for run in runs.values()), default=_LAST))
    quantities: dict[str, Callable[[Run], str]] = {
        "kind": lambda run: run.kind,
        "cube": lambda run: str(run.shape) if run.shape else "-",
        "steps": _progress,
        f"loss, {begun}": partial(_first_loss, "loss"),
        f"masked-LM loss, {begun} (nats)": partial(_first_loss, "masked_lm_loss"),
        f"loss, mean of the last {last}": lambda run: _shown(run.at_the_end("loss", _LAST), ".3f"),
        f"masked-LM loss, mean of the last {last} (nats)": lambda run: _shown(
            run.at_the_end("masked_lm_loss", _LAST), ".3f"
        ),
        "unigram entropy of the corpus (nats)": lambda run: "-" if run.entropy is None else f"{run.entropy:.3f}",
        "time of a step, median": lambda run: _median(run, "seconds", in_time),
        "real tokens/s, median": lambda run: _median(run, "tokens_per_second", lambda value: f"{value:,.0f}"),
        "model FLOPs utilisation, median": lambda run: _median(run, "mfu", lambda value: f"{value:.1%}"),
        "fill of the packs, mean": lambda run: _mean(run, "fill", ".2%"),
        "busiest rank over the mean": lambda run: _mean(run, "imbalance", ".4f"),
        "peak memory of a rank": peak,
        "received a step by rank 0": lambda run: (
            "-" if run.mean("bytes_received") is None else in_bytes(run.mean("bytes_received") or 0)
        ),
        "skipped steps": lambda run: f"{sum(bool(line.get('skipped')) for line in run.steps):,}",
    }
    for name in _evaluated(runs):
        quantities[f"held out, last: {_words(name)}"] = partial(_last_evaluation, name)
    rows = [[name, *(quantity(run) for run in runs.values())] for name, quantity in quantities.items()]
    rows = [row for row in rows if set(row[1:]) != {"-"}]
    notes = [f"{name}: no step has been logged yet." for name, run in runs.items() if not run.steps]
    notes += [
        f"{name}: left out, lines of metrics.jsonl that are not whole: {run.damaged:,}."
        for name, run in runs.items()
        if run.damaged
    ]
    return Section(title="Overview", notes=notes, tables=[Table(header=["", *runs], rows=rows, numbers=True)])


def _first_loss(key: str, run: Run) -> str:
    """Of the first step, as long as it was finite."""
    value = number(run.steps[0].get(key)) if run.steps else None
    return "-" if value is None else f"{value:.3f}"


def _progress(run: Run) -> str:
    done = run.steps[-1]["step"] if run.steps else 0
    planned = "" if run.planned is None else f" of {run.planned:,}"
    return f"{done:,}{planned}{', ended' if run.ended else ''}"


def _curves(runs: Runs) -> Section:
    charts = [chart for tag in _LEARNING if (chart := _curve(runs, tag)) is not None]
    drawn = set(EVALUATION_TAGS.values())
    for name in _evaluated(runs):
        if name not in drawn:
            lines = [_line(title, run, "evaluation", name) for title, run in runs.items()]
            found = [line for line in lines if line is not None]
            charts.append(curve(f"held out: {_words(name)}", "", found, list(runs)))
    windows = dict.fromkeys(window_of(len(run.steps)) for run in runs.values() if run.steps)
    means = f", bold ones means of {' or '.join(map(str, windows))} around each" if set(windows) - {1} else ""
    note = f"Thin lines are single steps{means}, circles held-out evaluations."
    return Section(title="Curves", notes=[note] if charts else [], charts=charts)


def _curve(runs: Runs, tag: str) -> Chart | None:
    """None: no run has this number, or it never was any other than the one that says nothing."""
    key, held_out = STEP_TAGS[tag], EVALUATION_TAGS.get(HELD_OUT.get(tag, ""))
    lines = [_line(name, run, "step", key, held_out) for name, run in runs.items()]
    found = [line for line in lines if line is not None]
    if not found or all(set(line.values) <= {_NO_CURVE.get(tag)} for line in found):
        return None
    title, _, unit = AXIS_LABELS[tag].partition(" (")
    return curve(title, unit.removesuffix(")"), found, list(runs))


def _line(name: str, run: Run, kind: str, key: str, held_out: str | None = None) -> Line | None:
    steps, values, left_out = run.points(kind, key)
    held = run.points("evaluation", held_out) if held_out else ([], [], 0)
    if not steps and not held[0]:
        return None
    return Line(
        run=name,
        steps=steps,
        values=values,
        left_out=left_out,
        held_out_steps=held[0],
        held_out_values=held[1],
        smooth=key not in ("learning_rate", "loss_scale", "skipped_steps"),
    )


def _time(runs: Runs) -> Section:
    data: dict[str, list[Any]] = {"run": [], "phase": [], "seconds": [], "share": []}
    for name, run in runs.items():
        whole = run.mean("seconds")
        phases = {phase: seconds for key, phase in _PHASES.items() if (seconds := run.mean(key)) is not None}
        if whole and phases:
            phases[_REST] = max(0.0, whole - sum(phases.values()))
            for phase, seconds in phases.items():
                data["run"].append(name)
                data["phase"].append(phase)
                data["seconds"].append(seconds)
                data["share"].append(f"{seconds / whole:.1%}")
    if not data["run"]:
        return Section(title="Where a step's time goes")
    parts = [*_PHASES.values(), _REST]
    cells = {(run, phase): at for at, (run, phase) in enumerate(zip(data["run"], data["phase"], strict=True))}
    names = list(dict.fromkeys(data["run"]))
    rows = [
        [phase, *(cell for name in names for cell in _time_cells(data, cells.get((name, phase))))] for phase in parts
    ]
    header = ["", *(title for name in names for title in (name if len(names) > 1 else "time", "share"))]
    chart = stacks("mean step", "s", data, down="run", value="seconds", part="phase", parts=parts)
    return Section(
        title="Where a step's time goes",
        notes=["Mean of the steps but the first, on rank 0; evaluations and checkpoints are no part of a step."],
        charts=[chart],
        tables=[Table(header=header, rows=rows, numbers=True)],
    )


def _time_cells(data: Mapping[str, list[Any]], at: int | None) -> tuple[str, str]:
    return ("-", "-") if at is None else (in_time(data["seconds"][at]), data["share"][at])


def _memory(runs: Runs) -> Section:
    newest = {name: lines[-1]["peak_bytes"] for name, run in runs.items() if (lines := run.records.get("memory"))}
    rows = [
        [name, in_bytes(max(peaks)), f"{peaks.index(max(peaks))}", in_bytes(statistics.fmean(peaks)), f"{len(peaks)}"]
        for name, peaks in newest.items()
    ]
    header = ["run", "most", "on rank", "mean", "ranks"]
    data: dict[str, list[Any]] = {"rank": [], "run": [], "GB": []}
    notes = []
    for name, peaks in newest.items():
        if len(peaks) > _MOST_BARS:
            notes.append(f"{name}: {len(peaks):,} ranks are too many for bars.")
            continue
        data["rank"] += range(len(peaks))
        data["run"] += [name] * len(peaks)
        data["GB"] += [peak / 1e9 for peak in peaks]
    drawn = bars("peak by rank", "GB", data, across="rank", value="GB", by="run", groups=list(runs))
    return Section(
        title="Memory",
        notes=["The most each rank has had at once: tensors on a GPU, else the resident set.", *notes] if rows else [],
        charts=[drawn] if data["rank"] else [],
        tables=[Table(header=header, rows=rows, numbers=True)] if rows else [],
    )


def _traffic(runs: Runs) -> Section:
    received: dict[str, dict[str, float]] = {}
    for name, run in runs.items():
        keys = dict.fromkeys(key for line in run.steps for key in line if key.startswith("bytes_received/"))
        found = {key.partition("/")[2]: run.mean(key) for key in keys}
        received[name] = {axis: count for axis, count in found.items() if count is not None}
    received = {name: counts for name, counts in received.items() if counts}
    pictures = [
        Picture(title=f"{name} on {run.shape}", svg=cube_picture(run.shape, received.get(name, {})))
        for name, run in runs.items()
        if run.shape is not None and run.mean("bytes_received") is not None
    ]
    axes = list(dict.fromkeys(axis for counts in received.values() for axis in counts))
    rows = [
        [axis, *(in_bytes(counts[axis]) if axis in counts else "-" for counts in received.values())] for axis in axes
    ]
    note = (
        "Bytes that rank 0 receives in a step, mean, in the ring model, in which every rank receives about as many. "
        "What goes along axes taken together, such as data+x+z, stands in the table alone."
    )
    return Section(
        title="Traffic by axis",
        notes=[note] if pictures else [],
        pictures=pictures,
        tables=[Table(header=["along", *received], rows=rows, numbers=True)] if rows else [],
    )


def _packs(runs: Runs) -> Section:
    return Section(
        title="Fill and balance of packs",
        charts=[chart for tag in _PACKS if (chart := _curve(runs, tag)) is not None],
    )


def _events(runs: Runs) -> Section:
    rows, notes = list[list[str | Cell]](), []
    for name, run in runs.items():
        lines = [
            *run.records.get("event", []),
            *run.records.get("checkpoint", []),
            *(line for line in run.steps if line.get("skipped")),
        ]
        lines.sort(key=lambda line: number(line.get("time")) or 0.0)
        kept = lines[-_MOST_EVENTS:]
        rows += [[*([name] if len(runs) > 1 else []), *_event(line)] for line in kept]
        if len(kept) < len(lines):
            notes.append(f"{name}: the last {len(kept):,} of {len(lines):,} are shown.")
    header = [*(["run"] if len(runs) > 1 else []), "step", "time (UTC)", "what"]
    return Section(
        title="Events",
        notes=notes,
        tables=[Table(header=header, rows=rows, sorts=True)] if rows else [],
    )


def _event(line: Record) -> tuple[Cell, str, str]:
    when = number(line.get("time"))
    clock = "-" if when is None else datetime.fromtimestamp(when, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    return Cell(f"{line['step']:,}", float(line["step"])), clock, _what(line)


def _what(line: Record) -> str:
    if line["kind"] == "step":
        return "skipped: a gradient was not finite"
    if line["kind"] == "checkpoint":
        if line.get("path") is None:
            return f"NO CHECKPOINT: {line.get('error')}"
        size, seconds = number(line.get("bytes")), number(line.get("seconds"))
        told = f"saved {line['path']}"
        if size is not None and seconds is not None:
            told += f": {in_bytes(size)} in {in_time(seconds)}"
        return told if line.get("error") is None else f"{told}; {line['error']}"
    if line.get("event") == "remark":
        return str(line.get("text"))
    more = {name: value for name, value in line.items() if name not in ("kind", "time", "step", "event")}
    facts = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in more.items()}
    return ", ".join([str(line.get("event")), *(f"{name} {value}" for name, value in facts.items())])


def _settings(runs: Runs) -> Section:
    return _compared("Settings", {name: run.settings for name, run in runs.items()})


def _environment(runs: Runs) -> Section:
    return _compared("Environment", {name: run.environment for name, run in runs.items()})


def _compared(title: str, values: Mapping[str, Mapping[str, str]]) -> Section:
    """Of several runs what differs first, and the rest folded away."""
    names = list(dict.fromkeys(name for each in values.values() for name in each))
    rows = [[name, *(each.get(name, "-") for each in values.values())] for name in names]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    same = [row for row in rows if len(set(row[1:])) == 1]
    tables = [Table(header=["", *values], rows=differing, title="What differs")] if differing else []
    if same:
        one = [row[:2] for row in same]
        title_of_same = f"{len(one)} values" + (f", the same in all {len(values)} runs" if len(values) > 1 else "")
        tables.append(Table(header=["", "value"], rows=one, title=title_of_same, folded=True))
    return Section(title=title, tables=tables)


def _evaluated(runs: Runs) -> list[str]:
    """Numbers of evaluations, in the order of the journal."""
    lines = [line for run in runs.values() for line in run.records.get("evaluation", [])]
    names = dict.fromkeys(name for line in lines for name in line if number(line[name]) is not None)
    return [name for name in names if name not in ("kind", "step", "time", "samples")]


def _last_evaluation(key: str, run: Run) -> str:
    return _shown(run.points("evaluation", key)[1][-1:], ".4f")


def _words(key: str) -> str:
    """As the rest of the page has it: masked-LM loss, next-sentence accuracy."""
    return key.replace("masked_lm", "masked-LM").replace("next_sentence", "next-sentence").replace("_", " ")


def _shown(values: Sequence[float], spec: str) -> str:
    return format(statistics.fmean(values), spec) if values else "-"


def _median(run: Run, key: str, shown: Callable[[float], str]) -> str:
    values = run.points("step", key)[1]
    return shown(statistics.median(values)) if values else "-"


def _mean(run: Run, key: str, spec: str) -> str:
    value = run.mean(key, first=True)
    return "-" if value is None else format(value, spec)
