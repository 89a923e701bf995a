"""The dry run: sizes, memory, traffic and the time to expect, before anything starts."""

from __future__ import annotations

import os
from collections import Counter

import torch

from models.bert import BertConfig
from models.bert.saved import Device
from tensor3d import CubeShape
from tools.corpus.training import CorpusFacts
from tools.expectation import Expectation, expect
from tools.metrics import table
from tools.recipe import Recipe, SpeedRecipe
from tools.speed import Speed, expected_speed
from tools.switches import planned_device

Rows = list[tuple[str, str]]
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def report(recipe: Recipe, shape: CubeShape, corpus_info: CorpusFacts | None = None) -> str:
    """Of a run of `recipe` on a cube, as text. One process makes it; nothing is started, read or written.

    Args:
        corpus_info: of the prepared corpus, if it is there: without one the lengths of sequences are guessed from the
            recipe alone.

    Raises:
        ValueError: sizes or a batch that do not divide, as the run would refuse them.
    """
    device = planned_device(recipe)
    expected = expect(recipe, shape, corpus_info, device)
    speed = expected_speed(recipe.run, recipe.precision, shape.ranks)
    parts = {
        "model and cube": _model(recipe, shape, expected),
        "a step": _step(recipe, expected),
        "memory of rank 0, the fullest": _memory(recipe, shape, expected, device),
        "received by rank 0 in a step": _traffic(expected),
        "the run": _run(recipe, corpus_info, expected, speed),
    }
    lines = ["dry run: nothing was started"]
    for title, rows in parts.items():
        lines += ["", f"{title}:", *table(rows)]
    return "\n".join([*lines, "", *_remarks(recipe, shape, corpus_info, expected, device)])


def _model(recipe: Recipe, shape: CubeShape, expected: Expectation) -> Rows:
    config = expected.config
    return [
        ("parameters", f"{expected.parameters:,} ({expected.parameters / 1e6:,.1f} M)"),
        (
            "sizes",
            f"{config.layers} layers, hidden {config.hidden}, inner {config.inner_size}, {config.heads} heads, "
            f"vocabulary {config.vocab:,}" + (f", positions {config.positions}" if config.encoder == "classic" else ""),
        ),
        ("encoder", _encoder(config)),
        ("cube", f"{shape} = {shape.ranks} ranks"),
        ("types", f"compute {recipe.precision.compute}, sums of gradients {recipe.precision.reduce}, weights fp32"),
    ]


def _encoder(config: BertConfig) -> str:
    if config.encoder == "classic":
        return f"classic: position table, GELU, LayerNorm {'after' if config.norm == 'post' else 'before'} each block"
    told = "modern: rotary positions, GeGLU, LayerNorm before each block, no bias"
    if not config.local_layers:
        return told
    return f"{told}; {config.local_layers} of {config.layers} layers see less than {config.window} tokens far"


def _step(recipe: Recipe, expected: Expectation) -> Rows:
    contents, micro = expected.contents, expected.micro_batches
    return [
        (
            "packs",
            f"{expected.packs:,} of {recipe.data.capacity} slots: {micro:,} micro-batch{'es' if micro > 1 else ''} of "
            f"{expected.packs // micro:,}, {expected.packs_per_rank} on a rank",
        ),
        (
            "sequences",
            f"about {expected.sequences:,} of {contents.mean_length:.0f} tokens: {contents.packing_factor:.2f} a pack",
        ),
        ("tokens", f"about {expected.tokens:,}, {contents.fill:.1%} of the slots"),
        ("model FLOPs", f"about {_counted(expected.flops)}, {_counted(expected.flops / expected.tokens)} a token"),
    ]


def _memory(recipe: Recipe, shape: CubeShape, expected: Expectation, device: Device) -> Rows:
    memory, saved = expected.memory, expected.memory.saved
    rows = [
        ("counted as on a", "GPU" if device == "cuda" else "CPU"),
        ("weights", in_bytes(memory.weights)),
        ("gradients", in_bytes(memory.gradients)),
        (f"optimiser ({recipe.optimizer.kind})", in_bytes(memory.optimizer)),
    ]
    if recipe.speed.attention == "reference":
        return [*rows, ("kept for backward", "not told, of a backend that keeps all pairs of a rank's rows")]
    rows += [
        (
            "kept for backward",
            f"{in_bytes(saved.total)}: embeddings {in_bytes(saved.embeddings)}, {expected.config.layers} layers "
            f"{in_bytes(saved.layers)}, heads {in_bytes(saved.heads)}",
        ),
        ("coming and going", in_bytes(memory.passing)),
        ("most at once", in_bytes(memory.peak)),
    ]
    what, available = _available(shape.ranks)
    if available:
        fits = "fits" if memory.peak < 0.9 * available else "hardly fits" if memory.peak < available else "does not fit"
        rows.append(("there is", f"{in_bytes(available)} {what}: {fits} here"))
    return rows


def _traffic(expected: Expectation) -> Rows:
    by_axis: Counter[str] = Counter()
    for (axis, _), count in expected.traffic.items():
        by_axis[axis] += count
    rows = [(f"over {axis}", in_bytes(count)) for axis, count in by_axis.items() if count]
    return [*rows, ("together", in_bytes(sum(by_axis.values())))] if rows else [("nothing", "one rank, no wire")]


def _run(recipe: Recipe, corpus: CorpusFacts | None, expected: Expectation, speed: Speed) -> Rows:
    steps, run = recipe.run.steps, recipe.run
    seconds = expected.hardware_flops / speed.flops
    tokens = steps * expected.tokens
    epochs = f", {tokens / corpus.train_tokens:,.2f} times the corpus" if corpus is not None else ""
    rows = [
        ("steps", f"{steps:,}, {expected.sequences * steps:,} sequences, {_counted(tokens)} tokens{epochs}"),
        ("time of a step", f"about {in_time(seconds)} of computing"),
        ("time of all steps", f"about {in_time(seconds * steps)}"),
        ("speed", speed.words),
    ]
    if run.checkpoint_every:
        size = 12 * expected.parameters
        kept = f"the newest {run.checkpoint_keep} are kept"
        kept += f", and every {run.checkpoint_keep_every:,}th step's" if run.checkpoint_keep_every else ""
        rows.append(("checkpoints", f"{in_bytes(size)} each, every {run.checkpoint_every:,} steps; {kept}"))
    return rows


def _remarks(
    recipe: Recipe, shape: CubeShape, corpus: CorpusFacts | None, expected: Expectation, device: Device
) -> list[str]:
    """What the figures are worth."""
    remarks = [
        *_worth_of_memory(recipe.speed, shape, device),
        "Left out of the time: evaluations, checkpoints, and what computing does not hide of the wire.",
    ]
    if corpus is None:
        remarks.append(
            "Guessed from the recipe: lengths of sequences, and what follows from them. No corpus is prepared."
        )
    else:
        remarks.append("Estimated from the corpus' mean lengths: how packs are filled. Packing tells it exactly.")
    if not expected.surely_divides:
        unit = shape.planes * shape.z * (recipe.batch.packs_per_rank or 1)
        remarks.append(
            f"Unknown until packing: whether a step's packs divide. They surely do with batch.multiple_of = {unit}."
        )
    return remarks


def _worth_of_memory(speed: SpeedRecipe, shape: CubeShape, device: Device) -> list[str]:
    exact = "Exact: sizes, weights, gradients, optimiser, traffic"
    kept = "what is kept for packs of the longest sequences"
    if speed.attention == "reference":
        return [
            f"{exact}.",
            'Not told: memory beyond that. attention = "reference" keeps all pairs of rows, and its time is longer.',
        ]
    if speed.read_rows_only:
        nearly = "Nearly an" if speed.compile else "An"
        remarks = [f"{exact}.", f"{nearly} upper bound: {kept}, as if the last layer computed all rows."]
    elif speed.compile:
        remarks = [f"{exact}.", f"Nearly: {kept}; compiled operators keep a little more or less."]
    elif device == "cuda":
        remarks = [f"{exact}.", f"Nearly: {kept}; it is checked to the byte on CPUs."]
    else:
        remarks = [f"{exact}, and {kept}."]
    if shape.x == 1:
        within = "At most a few % more" if speed.read_rows_only else "Within a few %"
        beside = "without what allocator and communication library take beside it"
        return [*remarks, f"{within}: what comes and goes, {beside}."]
    ahead = "weights gathered ahead and " if speed.overlap else ""
    return [
        *remarks,
        f"Rather low: what comes and goes, without {ahead}what allocator and communication library take.",
        "In small models on cubes long in x the most at once was measured 15 to 40 % higher.",
    ]


def _available(ranks: int) -> tuple[str, int]:
    """What this machine has for one rank: what it is, and bytes. 0 where the system does not tell."""
    if torch.cuda.is_available():
        return "on this machine's GPU", torch.cuda.get_device_properties(0).total_memory
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return "", 0
    return f"for each of {ranks} rank{'s' if ranks > 1 else ''} on this machine alone", memory // ranks


def in_bytes(count: float) -> str:
    """1234567 as "1.23 MB"."""
    for unit in _UNITS[:-1]:
        if count < 1000:
            return f"{count:.3g} {unit}" if count < 999.5 else f"1 {_UNITS[_UNITS.index(unit) + 1]}"
        count /= 1000
    return f"{count:,.3g} {_UNITS[-1]}"


def in_time(seconds: float) -> str:
    """4000 as "1.1 hours"."""
    for size, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "s")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {name}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _counted(number: float) -> str:
    """3.1e12 as "3.10 * 10^12"."""
    power = 0
    while number >= 1000:
        number, power = number / 1000, power + 3
    return f"{number:.3g} * 10^{power}" if power else f"{number:.3g}"
