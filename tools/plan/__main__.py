"""`python -m tools.plan --model large --gpu H100 --nodes 8`: the options, and what they ask for."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from models.bert.cost_model.step_cost import BYTES, Batch, BertCosts
from tensor3d import CubeShape
from tensor3d.cost_model.hardware import Cluster, Link, cluster_of, read_cluster
from tensor3d.cost_model.hardware import cluster as ready_made
from tensor3d.cost_model.literature import MethodTime, TransformerSpec, timed, ways
from tensor3d.cost_model.literature.bian2021 import report as headline
from tensor3d.cost_model.search import BoxPlan, Search, search
from tensor3d.cost_model.step_time import Overlap
from tensor3d.data.masking import MASKED_SHARE
from tools.common.cli import run_main
from tools.common.files import check_output, check_suffix, write_file
from tools.common.idle_options import IdleRule, tell_idle_options
from tools.common.log import progress, take_verbose
from tools.common.machine import format_table, write_json
from tools.common.parse import parse_options
from tools.common.plotting import check_picture
from tools.common.quantities import BYTES as MEMORY
from tools.common.quantities import BYTES_A_SECOND, FLOPS, SECONDS, Quantity
from tools.plan import tables
from tools.plan.run_command import run_command
from tools.plan.tables import kind_of, model_of
from tools.report.file_sections import plan_sections
from tools.report.page import PAGES, Page, check_library, render
from tools.training.config import ShardOption

_log = logging.getLogger("tools.plan")
DEFAULT_GPU = "H100"
COUNTED = 5
"""Plans whose memory is counted."""
_MOST_RANKS = 2**20


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Find the best way to lay a model on a cluster: every box of data, x, y and z, and every placement of them on
    nodes, with memory, traffic and time of a step, and why the others are worse or impossible."""

    model: str = "large"
    """tiny, mini, small, base, large (BERT), 10b, 100b, roberta-base, roberta-large, xlm-roberta-xl,
    xlm-roberta-xxl, megatron-bert-345m, megatron-bert-3.9b, gatortron-large, modernbert-base, modernbert-large,
    eurobert-210m, eurobert-610m, eurobert-2.1b, embeddinggemma-300m, qwen3-embedding-0.6b, qwen3-embedding-4b,
    qwen3-embedding-8b, mpnet-base, deberta-v2-xlarge, deberta-v2-xxlarge, deberta-v3-xsmall, deberta-v3-small,
    deberta-v3-base, deberta-v3-large, mdeberta-v3-base, jina-embeddings-v3, nomic-bert-base or
    gte-multilingual-base; sizes below replace the preset's."""
    model_folder: Path | None = None
    """Instead of a preset, the sizes of a model's folder: a Hugging Face folder, a run, or what tools.convert has
    written. Its weights are not read."""
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    inner: int | None = None
    vocab: int | None = None
    positions: int | None = None
    gpu: str | None = None
    """Preset of a GPU: V100-16GB, V100-32GB, A100-40GB, A100-80GB, H100, H200. Default: H100."""
    nodes: int | None = None
    """Default: 1."""
    per_node: int | None = None
    """GPUs of a node. Default: the preset's."""
    cluster: str | None = None
    """A machine instead of GPUs: a JSON file that `bench collectives` has written of this one, or "longhorn", the 64
    V100 of Bian et al. 2021."""
    flops: str | None = None
    """FLOP/s of a rank at its peak, of --compute: 312e12 or 312T. So the next ones replace single figures of the preset
    or the file, each a plain number or one with a unit."""
    fp8_flops: str | None = None
    """The same of products in FP8, of --fp8."""
    efficiency: float | None = None
    """Share of the peak that large products reach."""
    memory: str | None = None
    """Bytes of a rank: 80e9, 80GB or 80GiB."""
    memory_bandwidth: str | None = None
    """Bytes/s of a rank's memory: 2e12 or 2TB."""
    inside_bandwidth: str | None = None
    """Bytes/s that a rank receives from the others of its node: 240e9 or 240GB."""
    inside_latency: str | None = None
    """Seconds of a step of a ring inside a node: 1.9e-6 or 1.9us."""
    across_bandwidth: str | None = None
    """Bytes/s that each rank of a node receives from other nodes when all of them do at once, its share of the node's
    ports: 25e9, 25GB (bytes) or 200Gbit (bits)."""
    across_latency: str | None = None
    """Seconds of a step of a ring that crosses nodes: 4e-6 or 4us."""
    global_batch: int = 4096
    """Packs of a step."""
    capacity: int = 512
    """Token slots of a pack."""
    length: int | None = None
    """Tokens of a sequence. Default: the capacity."""
    objective: Literal["masked-lm+next-sentence", "masked-lm"] | None = None
    """What is learnt: masked tokens and the order of pairs, or masked tokens alone, without a pooler. Default: both of
    a BERT, masked tokens of its relatives."""
    masked_share: float = MASKED_SHARE
    """Share of the tokens that are guessed, at most 0.8."""
    compute: Literal["fp32", "bf16", "fp16"] | None = None
    """Type of products. Default: bf16 where the cluster knows it, else fp16, else fp32."""
    fp8: Literal["off", "rowwise", "tensorwise", "delayed"] = "off"
    """How linear layers multiply in FP8, beside bf16 alone (`precision.fp8` of recipes)."""
    reduce: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type in which gradients travel."""
    optimizer: Literal["lamb", "adamw", "stable_adamw"] = "lamb"
    shard_over_data: ShardOption = False
    """Shard the optimiser's state over the data axis (ZeRO stage 1); "gradients": and gradients too (stage 2)."""
    shadow_weights: bool = False
    """Hold weights in the type of products, too, converted once after an update (`speed.shadow_weights` of recipes)."""
    compile: bool = False
    """Plan with compiled regions (`speed.compile` of recipes), as counted for GPUs."""
    overlap: Overlap = "products"
    """What of the wire is taken to run under products: none; inputs gathered again and sums of gradients (products); or
    weights too, which the layers gather ahead from their second step on (prefetch)."""
    memory_share: float = 0.9
    """Of a rank's memory that tensors may take."""
    cube: str | None = None
    """Look at this box alone, written XxYxZ."""
    data_parallel: int | None = None
    """Copies of it. Default: as many as the cluster's ranks make."""
    top: int = 10
    """Plans to show."""
    quick: bool = False
    """Rank by formulas alone. Otherwise the memory of the best five boxes (of one for each of --ranks) is counted by
    running steps of the real code dry, and those that do not fit make room for others: some seconds a box."""
    all: bool = False
    """Show all plans, and why each of the other boxes is none."""
    dry_run: bool = False
    """Run the real model and training step of rank 0 of the pick, in this process and without its memory, and show what
    it counts beside what was predicted."""
    ranks: str | None = None
    """Plan for several sizes of the cluster, as 8,64,512,4096: the best of each kind of box, and where one overtakes
    another."""
    plot: Path | None = None
    """PNG of these."""
    check: tuple[Path, ...] = ()
    """Files of `bench step --output`: predict their times on --cluster, which was measured on the same machine."""
    headline: bool = False
    """The 64 V100 of Bian et al. 2021 in this model: 3-D against 1-D and 2-D."""
    output: Path | None = None
    """JSON file for all of it."""
    html: Path | None = None
    """HTML page for all of it: a table that sorts, time against memory, and why a box is out. It asks no network."""

    def validate(self) -> None:
        """Raises ValueError for what no cluster is needed to see."""
        for name in ("nodes", "per_node", "global_batch", "capacity", "length", "top", "data_parallel"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1. Got {value}.")
        if self.ranks is not None and (self.cube is not None or self.dry_run):
            raise ValueError("--ranks plans for several clusters. Leave out --cube and --dry-run.")
        if self.plot is not None and self.ranks is None:
            raise ValueError("--plot draws what --ranks asks for. Name some, such as --ranks 8,64,512,4096.")
        if self.cube is None and self.data_parallel is not None:
            raise ValueError(f"--data-parallel {self.data_parallel} says how many copies of --cube. Name one.")
        described = [name for name in ("gpu", "nodes", "per_node") if getattr(self, name) is not None]
        if self.cluster is not None and described:
            raise ValueError(
                f"--cluster is a whole machine. Leave out --{described[0].replace('_', '-')}; --ranks makes it larger."
            )
        if self.headline and (self.check or self.ranks is not None or self.cluster is not None):
            raise ValueError("--headline is about one machine of its own. Leave out --check, --ranks and --cluster.")
        if self.check and self.cluster is None:
            raise ValueError(
                "--check compares times of one machine. Name its --cluster, which bench collectives writes."
            )
        alone = "--headline" if self.headline else "--check" if self.check else None
        for option in ("output", "html"):
            if alone is not None and getattr(self, option) is not None:
                raise ValueError(f"{alone} prints a table, and writes no --{option}. Leave one of them out.")
        read = [*self.check, *([] if self.cluster is None else [Path(self.cluster)])]
        check_output(self.output, others=read)
        check_picture(self.plot, others=[*read, self.output])
        check_output(self.html, "--html", others=[*read, self.output, self.plot])
        check_suffix(self.html, PAGES, "--html")
        if self.html is not None:
            check_library("--html")

    def idle_rules(self) -> Iterator[IdleRule]:
        """What options need; those of a command that `validate` has taken."""
        machine = {"cluster", "gpu", "nodes", "per_node", "flops", "fp8_flops", "efficiency", "memory"}
        links = {"inside_bandwidth", "inside_latency", "across_bandwidth", "across_latency"}
        if self.headline or self.check:
            used = {"headline"} if self.headline else {"check", "compute", "memory_bandwidth"} | machine | links
            rest = tuple(field.name for field in dataclasses.fields(self) if field.name not in used)
            one = "--headline, whose machine and model are those of a paper" if self.headline else "--check"
            yield IdleRule(rest, False, f"a plan, and not for {one}")
            return
        yield IdleRule(("model",), self.model_folder is None, "a preset, and the sizes are those of --model-folder")
        yield IdleRule(("fp8_flops",), self.fp8 != "off", "products in FP8, of --fp8")
        yield IdleRule(("shadow_weights",), self.compute != "fp32", "another --compute than fp32")
        yield IdleRule(("top", "all"), self.ranks is None, "the plans of one cluster, and --ranks are several")
        yield IdleRule(("top",), not self.all, "some of the plans, and --all shows all")
        across = self.cluster is not None or self.ranks is not None or (self.nodes or 1) > 1
        yield IdleRule(("across_bandwidth", "across_latency"), across, "several nodes")

    def machines(self, ranks: int | None = None) -> Cluster:
        """The cluster, or one like it with so many ranks.

        Raises:
            ValueError: a preset, a file or a number that cannot be, ranks that fill no whole node.
        """
        plain = self._machine()
        rates = {self._type(plain): self._given("flops", FLOPS), "fp8": self._given("fp8_flops", FLOPS)}
        given: dict[str, Any] = {
            "flops": {**plain.flops, **{kind: rate for kind, rate in rates.items() if rate is not None}},
            "efficiency": self.efficiency,
            "memory": self._given("memory", MEMORY),
            "memory_bandwidth": self._given("memory_bandwidth", BYTES_A_SECOND),
            "inside": self._link("inside", plain.inside),
            "across": self._link("across", plain.across),
        }
        if plain.fits and (given["inside"] != plain.inside or given["across"] != plain.across):
            raise ValueError(
                f"{self.cluster} holds measured collectives, beside which a link's latency and bandwidth say nothing. "
                "Leave out --inside-... and --across-..., or empty its fits."
            )
        cluster = dataclasses.replace(plain, **{name: value for name, value in given.items() if value is not None})
        _check_units(cluster)
        if ranks is not None:
            cluster = _resized(cluster, ranks)
        if cluster.ranks > _MOST_RANKS:
            raise ValueError(f"the planner stops at {_MOST_RANKS:,} ranks. Got {cluster.ranks:,}.")
        return cluster

    def costs(self, cluster: Cluster) -> BertCosts:
        """The model and its batch, for ranks of the cluster.

        Raises:
            ValueError: sizes that cannot be, a type that the cluster does not know, more ranks than tokens.
        """
        config = model_of(
            self.model,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            inner=self.inner,
            vocab=self.vocab,
            positions=self.positions,
            folder=self.model_folder,
        )
        causal = config.causal
        if causal:
            _log.warning(
                "the model in %s sees no later tokens. Planned is its attention, with the head of one that learns "
                "masked tokens.",
                self.model_folder,
            )
            config = dataclasses.replace(config, causal=False)
        both = config.traits.next_sentence if self.objective is None else self.objective != "masked-lm"
        config = dataclasses.replace(config, next_sentence=both)
        batch = Batch(
            packs=self.global_batch, capacity=self.capacity, length=self.length, masked_share=self.masked_share
        )
        if cluster.ranks > batch.tokens:
            raise ValueError(
                f"{cluster.ranks:,} ranks are more than the {batch.tokens:,} tokens of a step. Plan fewer ranks, or a "
                "larger --global-batch."
            )
        longest = max(batch.lengths)
        if config.positions < longest and self.positions is None:
            config = dataclasses.replace(config, positions=longest)
        compute = self._type(cluster)
        cluster.rate(compute)
        fp8 = None if self.fp8 == "off" else self.fp8
        if fp8 is not None:
            cluster.rate("fp8")
        return BertCosts(
            config=config,
            batch=batch,
            causal=causal,
            compute=compute,
            reduce=self.reduce,
            fp8=fp8,
            optimizer=self.optimizer,
            shard_over_data=self.shard_over_data,
            shadow_weights=self.shadow_weights,
            compile=self.compile,
            device="cuda" if cluster.overlaps else "cpu",
        )

    def trained(self, plan: BoxPlan, costs: BertCosts, cluster: Cluster) -> str:
        """The command that trains so. Raises ValueError where training refuses what can be planned."""
        return run_command(plan, costs, cluster, preset=self.preset, overlap=self.overlap)

    @property
    def preset(self) -> str | None:
        """None: the model is a folder's."""
        return self.model if self.model_folder is None else None

    @property
    def model_name(self) -> str:
        return self.model if self.model_folder is None else str(self.model_folder)

    def shapes(self, cluster: Cluster) -> list[CubeShape] | None:
        """The one box that is asked for; None: all.

        Raises:
            ValueError: a box that the cluster's ranks do not make.
        """
        if self.cube is None:
            return None
        one = CubeShape.parse(self.cube)
        data = self.data_parallel or max(1, cluster.ranks // one.ranks)
        shape = CubeShape.parse(self.cube, data)
        if shape.ranks != cluster.ranks:
            raise ValueError(
                f"{shape} takes {shape.ranks:,} ranks, and {cluster.name} has {cluster.ranks:,}. Choose --nodes and "
                "--per-node so that they agree, or another box."
            )
        return [shape]

    def rank_counts(self) -> list[int]:
        """Of `--ranks`, ascending.

        Raises:
            ValueError: something else than whole numbers of at least 1.
        """
        parts = (self.ranks or "").split(",")
        if not all(part.strip().isdigit() and int(part) for part in parts):
            raise ValueError(f"--ranks must be whole numbers of at least 1, as 8,64,512. Got {self.ranks!r}.")
        return sorted({int(part) for part in parts})

    def _given(self, name: str, quantity: Quantity) -> float | None:
        text: str | None = getattr(self, name)
        return None if text is None else quantity.parse(f"--{name.replace('_', '-')}", text)

    def _link(self, where: str, plain: Link) -> Link:
        latency, bandwidth = (
            self._given(f"{where}_{name}", quantity)
            for name, quantity in (("latency", SECONDS), ("bandwidth", BYTES_A_SECOND))
        )
        return Link(
            latency=plain.latency if latency is None else latency,
            bandwidth=plain.bandwidth if bandwidth is None else bandwidth,
        )

    def _type(self, cluster: Cluster) -> str:
        return self.compute or next(kind for kind in ("bf16", "fp16", "fp32") if kind in cluster.flops)

    def _machine(self) -> Cluster:
        if self.cluster is None:
            return cluster_of(self.gpu or DEFAULT_GPU, nodes=self.nodes or 1, per_node=self.per_node)
        return read_cluster(Path(self.cluster)) if self.cluster.endswith(".json") else ready_made(self.cluster)


def _check_units(cluster: Cluster) -> None:
    """Raises ValueError for figures in other units, as a file by hand has them: GB where bytes are meant. What was
    measured is as slow as it is."""
    figures = {
        "memory": (cluster.memory, MEMORY),
        "memory_bandwidth": (cluster.memory_bandwidth, BYTES_A_SECOND),
        "inside.bandwidth": (cluster.inside.bandwidth, BYTES_A_SECOND),
        "across.bandwidth": (cluster.across.bandwidth, BYTES_A_SECOND),
    }
    for name, (value, quantity) in figures.items():
        if value < quantity.least and not cluster.fits:
            raise ValueError(
                f"{name} of {cluster.name} is in {quantity.of}, {quantity.bounds}. Got {value:g}. Correct the file."
            )


def _resized(cluster: Cluster, ranks: int) -> Cluster:
    if ranks > cluster.per_node and ranks % cluster.per_node:
        raise ValueError(f"{ranks} ranks fill no whole number of nodes of {cluster.per_node}. Name a multiple.")
    per_node = min(ranks, cluster.per_node)
    name = f"{ranks:,} ranks as in {cluster.name}"
    nodes = ranks // per_node
    # What was measured on few nodes says nothing of groups that cross more.
    fits = cluster.fits if nodes <= cluster.nodes else ()
    return dataclasses.replace(cluster, name=name, nodes=nodes, per_node=per_node, fits=fits)


# --- `python -m tools.plan --model large --gpu H100 --nodes 8`: which box, placed how, and why ------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 where no box holds the model; 2 for a bad call."""
    words, verbose = take_verbose(arguments)
    command = parse_options(PlanCommand, words, "python -m tools.plan")
    return run_main("tools.plan", lambda: run(command), verbose=verbose, options=PlanCommand)


def run(command: PlanCommand) -> int:
    """
    Raises:
        ValueError: what is asked for cannot be.
    """
    command.validate()
    tell_idle_options(command, command.idle_rules())
    if command.headline:
        print(headline())
        return 0
    if command.check:
        from tools.plan import check  # reads recipes, and scipy

        cluster = command.machines()
        print("\n".join(check.report([check.check(path, cluster) for path in command.check])))
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
        offer = tables.offers(found.plans[0], costs, cluster, command.overlap, command.memory_share)
        print("\n".join([*tables.table(shown, cluster, costs.compute), "", *tables.reason(found), *offer, ""]))
        print("\n".join([*how_to_run(command, found.plans[0], costs, cluster), ""]))
        print("\n".join([*tables.details(found.plans[0], cluster), ""]))
    if known:
        print("\n".join([*tables.known_table(known), ""]))
    print("\n".join(tables.refusals(found.refused, every=command.all or not found.plans)))
    _write(command, {**_content(command, costs, cluster), "search": as_json(command, found, cluster, costs)})
    if not found.plans:
        _log.warning("no box of these ranks holds the model")
        return 1
    if command.dry_run:
        return count_beside(found.plans[0], costs)
    return 0


def plan_sizes(command: PlanCommand) -> int:
    from tools.plan import tables as sweep  # with it comes all that draws and counts

    counts = command.rank_counts()
    points = {}
    for ranks in counts:
        cluster = command.machines(ranks)
        costs = command.costs(cluster)
        points[ranks] = sweep.Point(cluster=cluster, found=_searched(command, cluster, costs, most=1))
    largest = points[counts[-1]].cluster
    costs = command.costs(largest)
    print("\n".join([*tables.heading(costs, largest), ""]))
    print("\n".join([*sweep.sweep_table(points, costs.compute), "", *sweep.told(sweep.crossings(points))]))
    if command.plot is not None:
        name = (command.gpu or DEFAULT_GPU) if command.cluster is None else Path(command.cluster).stem
        sweep.plot(
            points,
            f"{command.model_name} on {name}, {command.global_batch:,} packs of {command.capacity}",
            command.plot,
        )
        print(f"written: {command.plot}")
    content = {str(ranks): as_json(command, point.found, point.cluster, costs) for ranks, point in points.items()}
    crossed = [dataclasses.asdict(each) for each in sweep.crossings(points)]
    _write(command, {**_content(command, costs, largest), "ranks": content, "crossings": crossed})
    return 0 if any(point.found.plans for point in points.values()) else 1


def how_to_run(command: PlanCommand, plan: BoxPlan, costs: BertCosts, cluster: Cluster) -> list[str]:
    """The command that trains on the plan's box, or why there is none."""
    try:
        return tables.run_lines(command.trained(plan, costs, cluster), cluster)
    except ValueError as problem:
        return [f"run it: tools.pretrain refuses this model or batch: {problem}"]


def known_ways(costs: BertCosts, cluster: Cluster, overlap: Overlap) -> list[MethodTime]:
    """The analytic rows for the same layers and the same batch, all ranks split that way; none of an MLP
    with a gate, which the papers' formulas are not of."""
    config, batch = costs.config, costs.batch
    if config.has_gate:
        return []
    encoder = TransformerSpec(
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


def as_json(command: PlanCommand, found: Search, cluster: Cluster, costs: BertCosts) -> dict[str, Any]:
    """All plans and refusals, and the command that trains on the pick; None where there is none."""
    trained = None
    with suppress(ValueError):  # the screen says why
        trained = command.trained(found.plans[0], costs, cluster) if found.plans else None
    return {
        "run": trained,
        "plans": [_plan(plan, cluster, costs) for plan in found.plans],
        "refused": [{"box": str(each.shape), "reason": each.reason} for each in found.refused],
    }


def _plan(plan: BoxPlan, cluster: Cluster, costs: BertCosts) -> dict[str, Any]:
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
    model = {**dataclasses.asdict(costs.config), "causal": costs.causal}
    return {"asked": told, "model": model, "cluster": cluster.to_json()}


def _write(command: PlanCommand, content: Mapping[str, Any]) -> None:
    """The files of all that was found."""
    if command.output is not None:
        write_json(command.output, dict(content))
        print(f"written: {command.output}")
    if command.html is not None:
        title = f"{command.model_name} on {content['cluster']['name']}"
        page = Page(title=title, subtitle="A plan of tensor3d", sections=plan_sections(content))
        write_file(command.html, render(page))
        print(f"written: {command.html}")


def _searched(command: PlanCommand, cluster: Cluster, costs: BertCosts, most: int = COUNTED) -> Search:
    """
    Args:
        most: plans whose memory is counted.
    """
    look = partial(
        search,
        costs,
        cluster,
        costs.compute,
        overlap=command.overlap,
        memory_share=command.memory_share,
        shapes=command.shapes(cluster),
    )
    if command.quick:
        return look()
    from tools.plan.check import memory_counter  # a training step, of which ranking needs nothing

    with progress(desc="memory counted", unit="box", leave=False, lines=True) as bar:
        return look(count=memory_counter(costs, bar.update), most=most)


def count_beside(plan: BoxPlan, costs: BertCosts) -> int:
    """The dry run of the plan's rank 0; 1 unless it counts what was predicted."""
    from tools.plan.check import dry_beside_prediction, step_of  # a training step, of which planning needs nothing

    choice = plan.choice
    load = costs.batch.load(plan.shape, choice.micro_batches)
    found = dry_beside_prediction(costs.config, plan.shape, load, **step_of(costs, choice))
    rows = [(each.what, f"{each.predicted:,}", f"{each.counted:,}", f"{each.ratio:.4g}") for each in found]
    device = "CPU" if costs.device == "cpu" else "GPU"
    print(f"a step of rank 0 of {plan.shape}, run without its memory and its peers (as on a {device}):")
    print("\n".join(format_table(("", "predicted", "counted", "ratio"), rows)))
    if all(each.ratio == 1 or (each.what == "peak" and 0.9 <= each.ratio <= 1.1) for each in found):
        return 0
    _log.error("tools.plan: the formulas do not say what the model does; please report it")
    return 1


if __name__ == "__main__":
    sys.exit(main())
