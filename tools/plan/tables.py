"""The models that the planner knows by name, and what it found, as text."""

from __future__ import annotations

import dataclasses
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from models.bert import PRESETS, BertConfig
from models.bert.cost_model.param_shapes import held
from models.bert.cost_model.step_cost import BertCosts
from models.bert.huggingface import read_model_config
from tensor3d import CubeShape
from tensor3d.cost_model.comm_volume import Bytes
from tensor3d.cost_model.hardware import Cluster
from tensor3d.cost_model.literature import MethodTime
from tensor3d.cost_model.search import BoxPlan, Refused, Search
from tensor3d.cost_model.step_time import Overlap, step_time
from tensor3d.distributed.cube_shape import AXES
from tools.common.machine import format_table
from tools.common.plotting import check_drawing, mark, new_figure, plain, plain_numbers, save
from tools.common.units import in_bytes, in_time, number_of

_ROBERTA: dict[str, Any] = {"family": "roberta", "first_position": 2, "types": 1, "vocab": 50265, "eps": 1e-5}
_XLMR_XL: dict[str, Any] = {**_ROBERTA, "family": "xlm-roberta-xl", "norm": "pre", "vocab": 250880}
_MEGATRON: dict[str, Any] = {"family": "megatron-bert", "norm": "pre"}
_MODERN: dict[str, Any] = {
    **{"family": "modernbert", "encoder": "modern", "types": 0, "vocab": 50368, "positions": 8192, "eps": 1e-5},
    **{"window": 65, "global_every": 3, "rotary_base": 160_000.0, "local_rotary_base": 10_000.0},
    **{"dropout": 0.0, "attention_dropout": 0.0, "attention_out_dropout": 0.1},
}
_EURO: dict[str, Any] = {
    **{"family": "eurobert", "encoder": "modern", "types": 0, "vocab": 128256, "positions": 8192, "eps": 1e-5},
    **{"activation": "silu", "rotary_base": 250_000.0, "tied": False, "pooling": "late"},
    **{"dropout": 0.0, "attention_dropout": 0.0},
}
_GEMMA: dict[str, Any] = {
    **{"family": "gemma3_text", "encoder": "modern", "types": 0, "vocab": 262144, "positions": 2048, "eps": 1e-6},
    **{"activation": "gelu_tanh", "window": 257, "rotary_base": 1_000_000.0, "local_rotary_base": 10_000.0},
    **{"dropout": 0.0, "attention_dropout": 0.0},
}
_QWEN: dict[str, Any] = {
    **{"family": "qwen3", "encoder": "modern", "types": 0, "positions": 32768, "eps": 1e-6, "kv_heads": 8},
    **{"activation": "silu", "head_dim": 128, "rotary_base": 1_000_000.0, "pooling": "last"},
    **{"dropout": 0.0, "attention_dropout": 0.0},
}
_DEBERTA: dict[str, Any] = {"family": "deberta-v2", "types": 0, "vocab": 128100, "eps": 1e-7, "position_buckets": 256}
_MPNET: dict[str, Any] = {"family": "mpnet", "first_position": 2, "types": 0, "vocab": 30527, "eps": 1e-5}
_JINA: dict[str, Any] = {"family": "jina_embeddings_v3", "types": 1, "vocab": 250002, "positions": 8194, "eps": 1e-5}
_NOMIC: dict[str, Any] = {
    **{"family": "nomic_bert", "vocab": 30528, "positions": 2048, "activation": "silu"},
    **{"dropout": 0.0, "attention_dropout": 0.0},
}
_GTE: dict[str, Any] = {
    **{"family": "gte", "types": 1, "vocab": 250048, "positions": 8192, "attention_dropout": 0.0},
    "rotary_factor": 8 ** (2 / 64),
}
MODELS: Mapping[str, BertConfig] = MappingProxyType(
    {
        **PRESETS,
        # 12 L h² weights in L layers of h columns, with heads of 128.
        "10b": BertConfig(layers=50, hidden=4096, heads=32),
        "100b": BertConfig(layers=80, hidden=10240, heads=80),
        # Liu et al. 2019, arXiv 1907.11692.
        "roberta-base": BertConfig(layers=12, hidden=768, heads=12, **_ROBERTA),
        "roberta-large": BertConfig(layers=24, hidden=1024, heads=16, **_ROBERTA),
        # Goyal et al. 2021, arXiv 2105.00572.
        "xlm-roberta-xl": BertConfig(layers=36, hidden=2560, heads=32, **_XLMR_XL),
        "xlm-roberta-xxl": BertConfig(layers=48, hidden=4096, heads=32, **_XLMR_XL),
        # Shoeybi et al. 2019, arXiv 1909.08053, §5.3; Yang et al. 2022, arXiv 2203.03540.
        "megatron-bert-345m": BertConfig(layers=24, hidden=1024, heads=16, vocab=29056, **_MEGATRON),
        "megatron-bert-3.9b": BertConfig(layers=48, hidden=2560, heads=40, vocab=29056, **_MEGATRON),
        "gatortron-large": BertConfig(layers=56, hidden=3584, heads=56, vocab=50176, **_MEGATRON),
        # Warner et al. 2024, arXiv 2412.13663.
        "modernbert-base": BertConfig(layers=22, hidden=768, heads=12, inner=1152, **_MODERN),
        "modernbert-large": BertConfig(layers=28, hidden=1024, heads=16, inner=2624, **_MODERN),
        # Boizard et al. 2025, arXiv 2503.05500.
        "eurobert-210m": BertConfig(layers=12, hidden=768, heads=12, inner=3072, **_EURO),
        "eurobert-610m": BertConfig(layers=26, hidden=1152, heads=18, kv_heads=6, inner=4096, **_EURO),
        "eurobert-2.1b": BertConfig(layers=32, hidden=2304, heads=18, kv_heads=6, inner=6144, **_EURO),
        # Schechter Vera et al. 2025, arXiv 2509.20354.
        "embeddinggemma-300m": BertConfig(
            layers=24, hidden=768, heads=3, kv_heads=1, head_dim=256, inner=1152, **_GEMMA
        ),
        # Zhang et al. 2025, arXiv 2506.05176: planned as encoders that see both sides, which learn masked tokens.
        "qwen3-embedding-0.6b": BertConfig(layers=28, hidden=1024, heads=16, inner=3072, vocab=151669, **_QWEN),
        "qwen3-embedding-4b": BertConfig(layers=36, hidden=2560, heads=32, inner=9728, vocab=151665, **_QWEN),
        "qwen3-embedding-8b": BertConfig(
            layers=36, hidden=4096, heads=32, inner=12288, vocab=151665, tied=False, **_QWEN
        ),
        # Song et al. 2020, arXiv 2004.09297.
        "mpnet-base": BertConfig(layers=12, hidden=768, heads=12, **_MPNET),
        # Sturua et al. 2024, arXiv 2409.10173; Nussbaum et al. 2024, arXiv 2402.01613; Zhang et al. 2024, arXiv
        # 2407.19669.
        "jina-embeddings-v3": BertConfig(layers=24, hidden=1024, heads=16, **_JINA),
        "nomic-bert-base": BertConfig(layers=12, hidden=768, heads=12, **_NOMIC),
        "gte-multilingual-base": BertConfig(layers=12, hidden=768, heads=12, **_GTE),
        # He et al. 2021, arXiv 2006.03654, of the second version.
        "deberta-v2-xlarge": BertConfig(layers=24, hidden=1536, heads=24, conv_kernel=3, **_DEBERTA),
        "deberta-v2-xxlarge": BertConfig(layers=48, hidden=1536, heads=24, conv_kernel=3, **_DEBERTA),
        # He et al. 2021, arXiv 2111.09543.
        "deberta-v3-xsmall": BertConfig(layers=12, hidden=384, heads=6, **_DEBERTA),
        "deberta-v3-small": BertConfig(layers=6, hidden=768, heads=12, **_DEBERTA),
        "deberta-v3-base": BertConfig(layers=12, hidden=768, heads=12, **_DEBERTA),
        "deberta-v3-large": BertConfig(layers=24, hidden=1024, heads=16, **_DEBERTA),
        "mdeberta-v3-base": BertConfig(layers=12, hidden=768, heads=12, **{**_DEBERTA, "vocab": 251000}),
    }
)
_MOST_LAYERS = 10_000  # each is gone through, for every box
_MOST = 10**15  # parameters: more than any cluster has memory for, and a slip of the finger


def model_of(
    name: str,
    *,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    inner: int | None = None,
    vocab: int | None = None,
    positions: int | None = None,
    folder: Path | None = None,
) -> BertConfig:
    """A preset with other sizes, where any are given.

    Args:
        folder: of a model, whose sizes are taken instead of a preset's; its weights are not looked at.

    Raises:
        ValueError: an unknown preset, a size that cannot be, more parameters than anybody can hold.
    """
    if folder is None and name not in MODELS:
        near = [each for each in MODELS if each in name.lower()]
        raise ValueError(
            f"--model must be one of {', '.join(MODELS)}, with sizes of your own beside it. Got {name!r}."
            + (f" Did you mean {' or '.join(near)}?" if near else "")
        )
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "inner": inner, "vocab": vocab, "positions": positions}
    given: dict[str, Any] = {key: value for key, value in sizes.items() if value is not None}
    for key, value in given.items():
        most = _MOST_LAYERS if key == "layers" else 10**9
        if not 1 <= value <= most:
            raise ValueError(f"--{key} must be a whole number from 1 to {most:,}. Got {value:,}.")
    config = dataclasses.replace(MODELS[name] if folder is None else read_model_config(folder), **given)
    parameters = parameters_of(config)
    if parameters > _MOST:
        raise ValueError(f"the model has {parameters:.2g} parameters, and the planner stops at {_MOST:.0e}.")
    return config


def parameters_of(config: BertConfig) -> int:
    """Elements of all of them."""
    return held(config, CubeShape()).total


# --- What boxes are called in the field, and the best plan of each kind -----------------------------------------------

DATA, SHARDED, ONE, TWO, CUBE, OTHER = "data", "fully sharded", "1-D", "2-D", "cube", "other"
KINDS = (DATA, SHARDED, ONE, TWO, CUBE, OTHER)
"""Data parallel alone; (P,1,1); (1,P,1), Megatron's; (1,q,q); (q,q,q); any other box. Each but the first also in copies
over `data`."""


def kind_of(shape: CubeShape) -> str:
    x, y, z = shape.x, shape.y, shape.z
    if x == y == z:
        return DATA if x == 1 else CUBE
    if y == z:
        return SHARDED if y == 1 else TWO if x == 1 else OTHER
    return ONE if x == 1 and 1 in (y, z) else OTHER


def best_of_kinds(plans: Iterable[BoxPlan]) -> dict[str, BoxPlan]:
    """The fastest plan of each kind that has one, in the order of `KINDS`."""
    found: dict[str, BoxPlan] = {}
    for plan in sorted(plans, key=lambda plan: plan.time.total):
        found.setdefault(kind_of(plan.shape), plan)
    return {kind: found[kind] for kind in KINDS if kind in found}


# --- What the planner found -------------------------------------------------------------------------------------------

_WORTH_A_WORD = 0.005  # of a step's time
HEADER = ("box", "kind", "inside a node", "micro-batches", "for backward", "step", "tokens/s", "MFU", "peak", "limit")
_KIND_LEGEND = {
    DATA: "copies of the whole model",
    SHARDED: "(P,1,1), weights in P parts as by ZeRO-3 and FSDP2",
    ONE: "(1,P,1), as by Megatron with sequence parallelism, or (1,1,P)",
    TWO: "(1,q,q)",
    CUBE: "(q,q,q)",
}
_BACKWARD_LEGEND = {
    "kept gathers": "gathered inputs and weights stay (--model.no-reshard-after-forward)",
    "MiB kept": "those that fit in so much memory stay (--model.keep-budget), and the others are gathered again",
    "shards alone": "they are gathered again",
    "recompute attention": "and attention is computed again",
    "recompute layer": "and whole layers are computed again",
}


def heading(costs: BertCosts, cluster: Cluster) -> list[str]:
    """What is planned for what."""
    config, batch = costs.config, costs.batch
    sharded = "state and gradients" if costs.shard_over_data == "gradients" else "state"
    shares = f", its {sharded} sharded over data" if costs.shard_over_data else ""
    shares += ", shadow weights" if costs.shadow_weights else ""
    shares += ", compiled regions" if costs.compile else ", eager operators"
    fp8 = "" if costs.fp8 is None else f", linear layers in FP8 ({costs.fp8})"
    fast = "" if costs.fp8 is None else f" and {cluster.flops['fp8'] / 1e12:,.4g} of FP8"
    return [
        f"{parameters_of(config) / 1e9:,.3g} G parameters: {config.layers} layers, hidden {config.hidden}, inner "
        f"{config.inner_size}, {config.heads} heads, vocabulary {config.vocab:,}",
        f"{batch.packs:,} packs of {batch.capacity} = {batch.tokens:,} tokens a step; {costs.compute}{fp8}, gradients "
        f"travel in {costs.reduce}, {costs.optimizer}{shares}",
        f"{cluster.name}: {cluster.nodes:,} x {cluster.per_node} ranks, {cluster.flops[costs.compute] / 1e12:,.4g} "
        f"TFLOP/s of {costs.compute}{fast} at {cluster.efficiency:.0%}, {in_bytes(cluster.memory)} of memory",
        network(cluster),
    ]


def network(cluster: Cluster) -> str:
    """What a rank receives through, in words."""
    inside, across = (
        f"{in_bytes(link.bandwidth)}/s and {1e6 * link.latency:.3g} us a step"
        for link in (cluster.inside, cluster.across)
    )
    # One node has no wire to others, and one rank a node none to neighbours.
    ways = [f"inside a node {inside}"] if cluster.per_node > 1 else []
    ways += [f"across nodes {across}, all ranks of a node at once"] if cluster.nodes > 1 else []
    measured = f"; {len(cluster.fits)} measured collectives stand in for these" if cluster.fits else ""
    return f"network of a rank: {'; '.join(ways)}{measured}" if ways else "network: none, one rank"


def row(plan: BoxPlan, cluster: Cluster, compute: str) -> tuple[str, ...]:
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
        peak_of(plan),
        plan.time.limit,
    )


def peak_of(plan: BoxPlan) -> str:
    """The most at once; of a formula's bound the least that it can be."""
    memory = plan.cost.memory
    return in_bytes(memory.peak) if memory.counted else f"> {in_bytes(memory.peak)}"


def table(plans: Sequence[BoxPlan], cluster: Cluster, compute: str) -> list[str]:
    lines = format_table(HEADER, [row(plan, cluster, compute) for plan in plans])
    sources = {
        True: "peak: counted in dry steps of the real code",
        False: "peak with >: a formula's lower bound; a count may find that the box needs more than there is",
    }
    known = {plan.cost.memory.counted for plan in plans}
    kinds, kept = {kind_of(plan.shape) for plan in plans}, {spent(plan) for plan in plans}
    columns = (("kind", _KIND_LEGEND, kinds), ("for backward", _BACKWARD_LEGEND, kept))
    shown = [
        (column, [f"{name} = {meaning}" for name, meaning in legend.items() if any(name in each for each in cells)])
        for column, legend, cells in columns
    ]
    legends = [f"{column}: {'; '.join(told)}" for column, told in shown if told]
    # Times, bytes on the wire and FLOPs are formulas for all.
    return [*lines, *legends, *(sources[each] for each in (True, False) if each in known)]


def run_lines(command: str, cluster: Cluster) -> list[str]:
    """The command in lines that a shell takes together, and what is to be put into it."""
    hosts = f" The file hosts names the {cluster.nodes:,} nodes, a line each." if cluster.nodes > 1 else ""
    lines = textwrap.wrap(command, 116, break_long_words=False, break_on_hyphens=False)
    return [
        f"run it: (text, steps and learning rate are the recipe's; --data.source, --run.steps, --optimizer.lr.{hosts})",
        *(f"  {line}{end}" for line, end in zip(lines, [" \\"] * (len(lines) - 1) + [""], strict=True)),
    ]


def mfu(plan: BoxPlan, cluster: Cluster, compute: str) -> float:
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


def spent(plan: BoxPlan) -> str:
    """What memory is spent on, or saved by."""
    return plan.choice.words


def details(plan: BoxPlan, cluster: Cluster) -> list[str]:
    """Memory by kind, traffic by axis and link, time by part."""
    memory, time, shape = plan.cost.memory, plan.time, plan.shape
    least, source = ("", "counted") if memory.counted else ("> ", "by formulas")
    copies = f", their copies {in_bytes(memory.shadows)}" if memory.shadows else ""
    copies += f", scales of FP8 {in_bytes(memory.scales)}" if memory.scales else ""
    lines = [
        f"{shape}, ranks dealt along {', '.join(axis for axis in shape.wire)} (slowest first):",
        f"  memory of a rank, {source}: weights {in_bytes(memory.weights)}{copies}, gradients "
        f"{in_bytes(memory.gradients)}, optimiser {in_bytes(memory.optimizer)}, kept for backward {least}"
        f"{in_bytes(memory.saved)}, at most at once {least}{in_bytes(memory.peak)}",
        "  time, by formulas: "
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
    return lines + [f"  {line}" for line in (format_table(header, rows) if rows else ["no wire: one rank"])]


def reason(search: Search) -> list[str]:
    """Why the first plan is the first."""
    best = search.plans[0]
    lines = [f"pick: {best.shape} ({kind_of(best.shape)}), limited by {best.time.limit}."]
    for kind, plan in best_of_kinds(search.plans).items():
        if plan is not best:
            lines.append(f"  {kind} at its best, {plan.shape}, takes {_more(plan, best)}.")
    return lines


def offers(best: BoxPlan, costs: BertCosts, cluster: Cluster, overlap: Overlap, memory_share: float) -> Iterator[str]:
    """What shadow weights and compiled regions would give the first plan, each of them if it is without, it fits and is
    worth a word. Regions are those of GPUs."""
    limit = memory_share * cluster.memory
    others = {"--shadow-weights": dataclasses.replace(costs, shadow_weights=True)}
    if cluster.overlaps:
        others["--compile"] = dataclasses.replace(costs, compile=True)
    for option, other in others.items():
        cost = other.cost(best.shape, best.choice)
        seconds, copies = step_time(cost, cluster, costs.compute, overlap).total, cost.memory.shadows
        more = copies - best.cost.memory.shadows
        less = 1 - seconds / best.time.total
        if max(cost.memory.peak, best.cost.memory.peak + more) <= limit and less >= _WORTH_A_WORD:
            beside = f", with {in_bytes(more)} of copies" if more else ""
            yield f"  {option}: {in_time(seconds)}, {less:.1%} less{beside}."


def refusals(refused: Sequence[Refused], *, every: bool) -> list[str]:
    """Why boxes are none: a line for each, or how many there are of each sort."""
    if every:
        return [f"  {each.shape}: {each.reason}" for each in refused]
    words = {True: ("needs more memory", "need more memory"), False: ("does not divide", "do not divide")}
    sorts = Counter(each.reason.startswith("needs") for each in refused)
    return [
        f"{number_of(count, 'box', 'boxes')} {words[sort][count != 1]} (--all says why)"
        for sort, count in sorts.most_common()
    ]


def known_table(rows: Sequence[MethodTime]) -> list[str]:
    """The papers' ways, and what their times are of."""
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
    return [
        "ways of the papers by the papers' formulas, to compare with one another, not with the boxes above: products",
        "and wire of the layers alone; no LayerNorm, embedding, heads, optimiser, start of operators, limit of memory.",
        '"fully sharded" is ZeRO-3, whose like in PyTorch is FSDP2; the box that splits so is (P,1,1).',
        *format_table(header, shown),
    ]


def _more(plan: BoxPlan, best: BoxPlan) -> str:
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


# ----------------------------------------------------------------------------------------------------------------------
# `--ranks 8,64,512`: the best plan of each kind on clusters of several sizes, and where one overtakes another.

_APART = 1.01
SWEEP_HEADER = ("ranks", "pick", "inside a node", "for backward", "step", "MFU", "limit", *KINDS)
_STYLES = {
    "data": ("#E69F00", "v"),
    "fully sharded": ("#CC79A7", "^"),
    "1-D": ("#D55E00", "s"),
    "2-D": ("#009E73", "D"),
    "cube": ("#0072B2", "o"),
    "other": ("0.35", "x"),
}  # Okabe and Ito's colours, which colour-blind readers can tell apart


@dataclass(frozen=True, kw_only=True)
class Point:
    """A cluster of one size."""

    cluster: Cluster
    found: Search

    @property
    def best(self) -> dict[str, BoxPlan]:
        """By kind."""
        return best_of_kinds(self.found.plans)


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Between two sizes next to each other one kind overtakes another."""

    faster: str
    slower: str
    after: int
    """Ranks: the last at which `slower` was ahead."""
    at: int
    """Ranks: the first at which `faster` is ahead."""


def crossings(points: Mapping[int, Point]) -> list[Crossing]:
    """All of them, of kinds that exist at both sizes and are a hundredth apart."""
    found, ranks = [], sorted(points)
    seconds = {size: {kind: plan.time.total for kind, plan in points[size].best.items()} for size in ranks}
    for before, after in pairwise(ranks):
        both = [kind for kind in KINDS if kind in seconds[before] and kind in seconds[after]]
        found += [
            Crossing(faster=one, slower=two, after=before, at=after)
            for one in both
            for two in both
            if seconds[before][one] > _APART * seconds[before][two]
            and _APART * seconds[after][one] < seconds[after][two]
        ]
    return found


def sweep_table(points: Mapping[int, Point], compute: str) -> list[str]:
    """A line for each size: the pick, and how much longer the best of each kind takes."""
    rows = []
    for ranks, point in sorted(points.items()):
        if not point.found.plans:
            rows.append((f"{ranks:,}", "none fits", *(("-",) * (len(SWEEP_HEADER) - 2))))
            continue
        pick, best = point.found.plans[0], point.best
        others = [f"{best[kind].time.total / pick.time.total:.2f}" if kind in best else "-" for kind in KINDS]
        share = mfu(pick, point.cluster, compute)
        place = inside(pick.shape, point.cluster)
        told = (spent(pick), in_time(pick.time.total), f"{share:.1%}", pick.time.limit)
        rows.append((f"{ranks:,}", str(pick.shape), place, *told, *others))
    return format_table(SWEEP_HEADER, rows)


def told(found: Sequence[Crossing]) -> list[str]:
    return [
        f"{each.faster} overtakes {each.slower} between {each.after:,} and {each.at:,} ranks" for each in found
    ] or ["no kind overtakes another"]


def plot(points: Mapping[int, Point], title: str, path: Path) -> None:
    """How much longer than the pick each kind takes, against ranks: where two lines cross, one kind overtakes another.

    Raises:
        ValueError: matplotlib is not installed.
    """
    check_drawing("--plot")
    figure = new_figure(7.0, 4.5)
    axes = figure.add_subplot()
    for kind in KINDS:
        line = [
            (ranks, point.best[kind].time.total / point.found.plans[0].time.total)
            for ranks, point in sorted(points.items())
            if kind in point.best
        ]
        if line:
            colour, marker = _STYLES[kind]
            axes.plot(*zip(*line, strict=True), color=colour, marker=marker, label=kind, linewidth=1.5, markersize=5)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="predicted time of a step over the pick's", title=title)
    plain_numbers(axes, (1.0, 1.2, 1.5, 2.0, 3.0, 5.0))
    mark(axes, sorted(points))
    plain(axes)
    axes.legend(frameon=False)
    save(figure, path)
