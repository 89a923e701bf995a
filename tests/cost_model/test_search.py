"""The planner's search on models and clusters small enough to be counted by hand."""

from __future__ import annotations

import dataclasses
import math
from itertools import permutations
from typing import get_args

import pytest

from models.bert import PRESETS, BertConfig
from models.bert.cost_model.step_cost import Batch, BertCosts
from tensor3d import CubeShape
from tensor3d.cost_model.hardware import Cluster, Link, cluster_of
from tensor3d.cost_model.search import boxes, placements, search
from tensor3d.cost_model.step_cost import Memory, Recompute, StepOptions
from tensor3d.cost_model.step_time import OVERLAPS, UnplacedStep, Wires, step_time
from tensor3d.distributed.cube_shape import AXES

NODE = Cluster(
    name="two nodes of four",
    nodes=2,
    per_node=4,
    flops={"bf16": 1e14},
    memory=16e9,
    memory_bandwidth=1e12,
    inside=Link(latency=1e-6, bandwidth=1e11),
    across=Link(latency=1e-5, bandwidth=1e9),
)
BASE = BertCosts(config=PRESETS["base"], batch=Batch(packs=64))


@pytest.mark.parametrize("ranks", [1, 8, 12, 64])
def test_every_box_comes_once(ranks: int) -> None:
    found = [(shape.data, shape.x, shape.y, shape.z) for shape in boxes(ranks)]
    sizes = range(1, ranks + 1)
    expected = [
        (data, x, y, ranks // (data * x * y))
        for data in sizes
        for x in sizes
        for y in sizes
        if ranks % (data * x * y) == 0
    ]
    assert sorted(found) == sorted(expected)


def test_placements_are_those_that_make_a_difference() -> None:
    shape = CubeShape(x=2, y=2, z=2)
    found = placements(shape, NODE)
    # Which axis crosses; the other two share a node.
    assert {each.wire[1] for each in found} == {"x", "y", "z"}
    assert len(found) == 3
    assert found[0].wire == AXES
    assert len(placements(shape, dataclasses.replace(NODE, nodes=1, per_node=8))) == 1
    assert len(placements(CubeShape(x=8), NODE)) == 1
    # Threes do not fit into fours: wherever they lie, some group crosses.
    assert NODE.neighbours(CubeShape(x=3, y=3, z=3)) == {"data": 1, "x": 1, "y": 1, "z": 1}
    assert NODE.neighbours(CubeShape(x=3, y=2, z=2)) == {"data": 1, "x": 1, "y": 2, "z": 2}


def test_the_best_placement_keeps_what_moves_most_inside_a_node() -> None:
    """The wire across nodes is a hundredth: wherever the pick lies, no other order of its axes is faster."""
    for plan in search(BASE, NODE, "bf16", shapes=[CubeShape(x=2, y=2, z=2), CubeShape(x=4, y=2)]).plans:
        used = [axis for axis in AXES if plan.shape.size(axis) > 1]
        unused = [axis for axis in AXES if plan.shape.size(axis) == 1]
        for order in permutations(used):
            shape = dataclasses.replace(plan.shape, wire=(*unused, *order))
            cost = dataclasses.replace(plan.cost, wire=dataclasses.replace(plan.cost.wire, shape=shape))
            assert plan.time.total <= step_time(cost, NODE, "bf16").total


def test_the_pick_is_never_worse_than_any_other_box() -> None:
    found = search(BASE, NODE, "bf16")
    assert {(*dataclasses.astuple(plan.shape)[:4],) for plan in found.plans} | {
        (*dataclasses.astuple(each.shape)[:4],) for each in found.refused
    } == {(*dataclasses.astuple(shape)[:4],) for shape in boxes(8)}
    alone = [
        search(BASE, NODE, "bf16", shapes=[shape]).plans[0].time.total
        for shape in boxes(8)
        if BASE.refuse(shape) is None
    ]
    assert found.plans[0].time.total == min(alone)
    assert [plan.time.total for plan in found.plans] == sorted(alone)


def test_parts_of_the_time_add_up_and_overlap_only_hides() -> None:
    shape = CubeShape(x=2, y=2, z=2)
    times = [step_time(BASE.cost(shape, StepOptions()), NODE, "bf16", overlap) for overlap in OVERLAPS]
    for time in times:
        parts = (time.products, time.attention, time.touching, time.starting, time.exposed)
        assert time.total == pytest.approx(sum(parts))
        assert time.exposed + time.hidden == pytest.approx(sum(time.by_axis.values()))
    assert times[0].hidden == 0 < times[1].hidden < times[2].hidden
    still = dataclasses.replace(NODE, overlaps=False)
    assert step_time(BASE.cost(shape, StepOptions()), still, "bf16", "prefetch").hidden == 0


def test_no_more_is_hidden_than_travels() -> None:
    """Weights of a block that travel together start one collective, not one each."""
    cluster, shape = cluster_of("H100", nodes=8), CubeShape(x=64)
    cost = BertCosts(config=PRESETS["large"], batch=Batch(packs=4096)).cost(shape, StepOptions())
    nothing, products, prefetch = (step_time(cost, cluster, "bf16", overlap) for overlap in OVERLAPS)
    latency, a_byte = cluster.collective(shape, ("x",), "reduce-scatter")
    kind = ("x", "reduce-scatter")
    sums = cost.micro_calls[kind] * latency + cost.micro[kind] * a_byte
    assert products.hidden == pytest.approx(sums)
    assert sums < prefetch.hidden < nothing.exposed
    assert prefetch.exposed > 0


def test_a_step_that_waits_for_the_host_is_limited_by_it() -> None:
    """However long the wire is: shortening it would not help. Collectives are started, too."""
    slow = dataclasses.replace(NODE, launch=1.0)
    shape = CubeShape(x=2, y=2, z=2)
    cost = BASE.cost(shape, StepOptions())
    time = step_time(cost, slow, "bf16")
    assert time.limit == "starting operators"
    started = cost.operators + cost.once_operators + sum(cost.calls.values())
    assert time.total == pytest.approx(started)
    wires = dataclasses.replace(slow, across=Link(latency=1.0, bandwidth=1.0), inside=Link(latency=1.0, bandwidth=1.0))
    assert step_time(cost, wires, "bf16").limit.startswith("the wire")
    # Where one core does it all, nothing waits for anything: the longest part counts.
    assert step_time(cost, dataclasses.replace(slow, overlaps=False), "bf16").limit == "starting operators"


def test_products_take_their_flops() -> None:
    """Of a model of which nearly all is products, and with no wire, seconds are FLOPs over the rate."""
    large = BertCosts(config=PRESETS["large"], batch=Batch(packs=8))
    one = dataclasses.replace(NODE, nodes=1, per_node=1)
    time = step_time(large.cost(CubeShape(), StepOptions()), one, "bf16")
    assert (time.products + time.attention) * one.rate("bf16") == pytest.approx(large.model_flops(), rel=1e-3)
    assert time.exposed == 0
    repeated = step_time(large.cost(CubeShape(), StepOptions(recompute="layer")), one, "bf16")
    assert 1.25 < repeated.products / time.products < 4 / 3


def test_products_in_fp8_have_a_rate_of_their_own() -> None:
    """Four times that of bf16 here. With a scale for each row, that of dW stays; so does the vocabulary's."""
    node = dataclasses.replace(NODE, flops={"bf16": 1e14, "fp8": 4e14})
    shape = CubeShape(x=2, y=2, z=2)
    for recompute, share in (("none", 0), ("layer", 1)):
        choice, found = StepOptions(recompute=recompute), {}  # type: ignore[arg-type]
        for fp8 in (None, "tensorwise", "delayed", "rowwise"):
            cost = dataclasses.replace(BASE, fp8=fp8).cost(shape, choice)  # type: ignore[arg-type]
            time = step_time(cost, node, "bf16", "prefetch")
            assert time.exposed + time.hidden == pytest.approx(sum(time.by_axis.values()))
            found[fp8] = time
        products = BASE.cost(shape, choice).products
        plain = [each.flops(shape) * each.times / node.rate("bf16") for each in products]
        *layers, vocabulary = zip(products, plain, strict=True)
        for fp8, of_dw in (("tensorwise", 1 / 4), ("delayed", 1 / 4), ("rowwise", 1)):
            wanted = sum(((1 + each.repeated) / 4 + 1 / 4 + of_dw) * seconds for each, seconds in layers)
            assert found[fp8].products == pytest.approx(wanted + 3 * vocabulary[1])
        assert found[None].products == pytest.approx(
            sum((3 + share * (each in products[:4])) * s for each, s in zip(products, plain, strict=True))
        )
        assert found["tensorwise"].hidden < found[None].hidden
    with pytest.raises(ValueError, match=r"knows the FLOP/s of bf16\. Got 'fp8'"):
        step_time(dataclasses.replace(BASE, fp8="rowwise").cost(shape, StepOptions()), NODE, "bf16")


@pytest.mark.parametrize("shape", [CubeShape(x=2, y=2, z=2), CubeShape(y=2, z=4), CubeShape(data=2, x=4)], ids=str)
def test_products_are_shared_by_all_ranks(shape: CubeShape) -> None:
    """Eight ranks take an eighth of the time for the same packs."""
    large = BertCosts(config=PRESETS["large"], batch=Batch(packs=8))
    alone, together = (
        step_time(
            large.cost(each, StepOptions()), dataclasses.replace(NODE, nodes=1, per_node=each.ranks), "bf16"
        ).products
        for each in (CubeShape(), shape)
    )
    assert together == pytest.approx(alone / 8, rel=2e-2)


def test_latency_and_bytes_by_hand() -> None:
    shape = CubeShape(x=4, y=2)  # ranks along x, then y: y's two share a node, and so do two of x
    assert NODE.collective(shape, ("y",), "all-gather") == (1e-6, 1e-11)
    assert NODE.collective(shape, ("x",), "all-gather") == pytest.approx(
        (3e-5, 1 / 2e9)
    )  # two rings share the node's wires
    assert NODE.collective(shape, ("x", "y"), "all-reduce") == pytest.approx((2 * 3 * 1e-5, 1 / 4e9))
    turned = dataclasses.replace(shape, wire=("data", "z", "y", "x"))
    assert NODE.collective(turned, ("x",), "reduce-scatter") == pytest.approx((3e-6, 1e-11))
    assert NODE.collective(turned, ("y",), "all-gather") == (1e-5, 1e-9)


@pytest.mark.parametrize(("packs", "layers"), [(64, 24), (2048, 24), (2048, 2)])
def test_of_all_that_fits_the_fastest_is_taken(packs: int, layers: int) -> None:
    """With less and less memory, against every choice without a budget in every placement."""
    config = dataclasses.replace(PRESETS["large"], layers=layers)
    costs, shape = BertCosts(config=config, batch=Batch(packs=packs)), CubeShape(x=2, y=2, z=2)
    every = [
        StepOptions(micro_batches=number, recompute=recompute, reshard_after_forward=reshard)
        for number in costs.micro_batches(shape)
        for recompute in get_args(Recompute)
        for reshard in (False, True)
    ]
    seen = []
    for memory in (400e9, 40e9, 8e9, 2.2e9, 0.7e9):
        node = dataclasses.replace(NODE, memory=memory)
        found = search(costs, node, "bf16", shapes=[shape])
        fitting = [each for each in every if costs.memory(shape, each).peak <= 0.9 * memory]
        assert bool(found.plans) == bool(fitting)
        if not fitting:
            assert found.refused[0].reason.startswith("needs ")
            continue
        plan = found.plans[0]
        assert plan.cost.memory.peak <= 0.9 * memory
        assert plan.cost.memory == costs.memory(shape, plan.choice)
        least = min(
            UnplacedStep.of(costs.cost(shape, each), node, "bf16").on(Wires(node, way)).total
            for each in fitting
            for way in placements(shape, node)
        )
        assert plan.time.total <= least * (1 + 1e-9)
        seen.append((plan.choice.recompute, plan.choice.micro_batches))
    assert seen[0] == ("none", 1)
    assert any(recompute != "none" for recompute, _ in seen) or layers == 2
    assert any(number > 1 for _, number in seen) or packs == 64


LARGE = BertCosts(config=PRESETS["large"], batch=Batch(packs=64))
CUBE = CubeShape(x=2, y=2, z=2)


def _memory_between(share: float) -> Cluster:
    """A cluster whose limit lies between a step that keeps no gathered operand and one that keeps all."""
    plain, whole = (LARGE.memory(CUBE, StepOptions(reshard_after_forward=how)).peak for how in (True, False))
    return dataclasses.replace(NODE, memory=(plain + share * (whole - plain)) / 0.9)


def test_the_largest_budget_that_fits_is_taken_where_it_makes_the_step_faster() -> None:
    mib, times = 2**20, []
    for share in (0.0, 0.3, 0.7, 1.0):
        node = _memory_between(share)
        (plan,) = search(LARGE, node, "bf16", shapes=[CUBE]).plans
        times.append(plan.time.total)
        if share in (0.0, 1.0):
            assert plan.choice == StepOptions(reshard_after_forward=not share)
            continue
        assert plan.choice.keep_budget >= mib
        assert plan.choice.words == f"{plan.choice.keep_budget // mib:,} MiB kept"
        limit, more = 0.9 * node.memory, dataclasses.replace(plan.choice, keep_budget=plan.choice.keep_budget + mib)
        assert plan.cost.memory == LARGE.memory(CUBE, plan.choice)
        assert plan.cost.memory.peak <= limit < LARGE.memory(CUBE, more).peak
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 4
    # On a wire that takes no time, and with weights that are converted in none, nothing is gained.
    free = Link(latency=1e-12, bandwidth=1e30)
    node = dataclasses.replace(_memory_between(0.7), inside=free, across=free, launch=1e-30, memory_bandwidth=1e30)
    (plan,) = search(LARGE, node, "bf16", shapes=[CUBE]).plans
    assert plan.time.total == pytest.approx(step_time(LARGE.cost(CUBE, StepOptions()), node, "bf16").total)


WIDE = BertCosts(config=BertConfig(layers=50, hidden=4096, heads=32), batch=Batch(packs=4096))


@pytest.mark.parametrize(
    ("shape", "memories"),
    [
        (CubeShape(x=2, z=32), (60, 65)),  # fewer micro-batches fit, and more of them with a budget are faster
        (CubeShape(data=2, x=4, y=8), (45, 50)),  # a larger budget keeps more of what products hide anyway
        (CubeShape(data=2, x=4, y=8), (70, 75)),  # with fewer micro-batches than are then the fastest
    ],
)
def test_more_memory_is_never_slower(shape: CubeShape, memories: tuple[int, int]) -> None:
    times = []
    for memory in memories:
        cluster = dataclasses.replace(cluster_of("H100", nodes=8), memory=memory * 1e9)
        (plan,) = search(WIDE, cluster, "bf16", shapes=[shape]).plans
        assert plan.choice.keep_budget
        assert plan.cost.memory.peak <= 0.9 * cluster.memory
        times.append(plan.time.total)
    assert times == sorted(times, reverse=True)


def test_a_budget_is_what_a_count_leaves_room_for() -> None:
    """What the formula does not know of is counted without a budget, once, and is the same with one."""
    node, unknown, looked = _memory_between(0.7), 5 * 10**8, list[StepOptions]()

    def count(shape: CubeShape, choice: StepOptions) -> Memory:
        looked.append(choice)
        memory = LARGE.memory(shape, choice)
        return dataclasses.replace(memory, peak=memory.peak + unknown, counted=True)

    (plan,) = search(LARGE, node, "bf16", shapes=[CUBE], count=count).plans
    ways = [(choice.recompute, choice.micro_batches) for choice in looked if not choice.keep_budget]
    assert len(ways) == len(set(ways))
    assert looked[-1].keep_budget
    more = dataclasses.replace(plan.choice, keep_budget=plan.choice.keep_budget + 2**20)
    assert plan.cost.memory.peak <= 0.9 * node.memory < LARGE.memory(CUBE, more).peak + unknown
    with pytest.raises(ValueError, match=r"keep_budget=1 and reshard_after_forward=false exclude each other"):
        StepOptions(keep_budget=1, reshard_after_forward=False)
    with pytest.raises(ValueError, match=r"keep_budget must be at least 0\. Got -1"):
        StepOptions(keep_budget=-1)


def test_what_is_counted_decides() -> None:
    """A count that finds twice as much: the same boxes, with more micro-batches; where nothing is left, it says so."""
    costs = BertCosts(config=PRESETS["large"], batch=Batch(packs=64))
    node = dataclasses.replace(NODE, memory=16e9)
    looked: list[CubeShape] = []

    def count(shape: CubeShape, choice: StepOptions) -> Memory:
        looked.append(shape)
        memory = costs.memory(shape, choice)
        return dataclasses.replace(memory, peak=2 * memory.peak, counted=True)

    formula = search(costs, node, "bf16")
    found = search(costs, node, "bf16", count=count, most=3)
    assert [plan.cost.memory.counted for plan in found.plans[:4]] == [True, True, True, False]
    for plan in found.plans[:3]:
        assert plan.cost.memory.peak == 2 * costs.memory(plan.shape, plan.choice).peak <= 0.9 * 16e9
    seconds = [plan.time.total for plan in found.plans]
    assert seconds == sorted(seconds)
    assert seconds[0] >= formula.plans[0].time.total
    assert len(found.plans) + len(found.refused) == len(formula.plans) + len(formula.refused)
    assert len(looked) >= 3

    def nothing(shape: CubeShape, choice: StepOptions) -> Memory:
        return dataclasses.replace(costs.memory(shape, choice), peak=10**12, counted=True)

    none = search(costs, node, "bf16", count=nothing, shapes=[CubeShape(x=8)])
    assert not none.plans
    assert none.refused[0].reason == "needs 1e+03 GB on a rank, and there are 14.4 GB"


def test_boxes_that_do_not_divide_say_why() -> None:
    costs = BertCosts(config=BertConfig(layers=1, hidden=96, heads=6), batch=Batch(packs=4, capacity=48))
    found = search(costs, dataclasses.replace(NODE, nodes=1, per_node=8), "bf16")
    reasons = {str(each.shape): each.reason for each in found.refused}
    assert "heads" in reasons["1x8x1"]
    assert reasons["8*(1x1x1)"] == "4 packs do not divide by data * x * z = 8"
    assert {str(plan.shape) for plan in found.plans} == {str(shape) for shape in boxes(8)} - set(reasons)


def test_bad_numbers() -> None:
    with pytest.raises(ValueError, match=r"memory_share must be above 0 and at most 1\. Got 0"):
        search(BASE, NODE, "bf16", memory_share=0)
    with pytest.raises(ValueError, match=r"knows the FLOP/s of bf16\. Got 'fp32'"):
        search(BASE, NODE, "fp32")
    with pytest.raises(ValueError, match=r"has 8 ranks, and 2x1x1 needs 2"):
        search(BASE, NODE, "bf16", shapes=[CubeShape(x=2)])
    with pytest.raises(ValueError, match=r"overlap.*'all'"):
        step_time(BASE.cost(CubeShape(x=8), StepOptions()), NODE, "bf16", "all")  # type: ignore[arg-type]


def test_corners_are_in_the_search_for_every_seed_of_the_table() -> None:
    """At each size the pick is at least as fast as the best of 1-D, 2-D, the cube and fully sharded."""
    for ranks in (8, 64):
        cluster = cluster_of("H100", nodes=ranks // 8)
        found = search(BertCosts(config=PRESETS["large"], batch=Batch(packs=512)), cluster, "bf16")
        side, root = round(ranks ** (1 / 3)), math.isqrt(ranks)
        corners = [CubeShape(y=ranks), CubeShape(x=ranks), CubeShape(x=side, y=side, z=side)]
        corners += [CubeShape(y=root, z=root)] if root**2 == ranks else []
        named = {str(plan.shape): plan.time.total for plan in found.plans}
        seconds = [named[str(shape)] for shape in corners if str(shape) in named]
        assert len(seconds) >= 2
        assert found.plans[0].time.total <= min(seconds)


def test_parts_of_the_time_by_hand() -> None:
    """Four micro-batches on one device: attention and what is touched come with each, the optimiser's bytes once."""
    alone = dataclasses.replace(NODE, nodes=1, per_node=1)
    cost = BASE.cost(CubeShape(), StepOptions(micro_batches=4))
    time = step_time(cost, alone, "bf16")
    assert time.attention == pytest.approx(4 * cost.attention_flops / alone.rate("bf16"))
    assert time.touching == pytest.approx((4 * cost.touched + cost.once_touched) / 1e12)
    assert cost.once_touched > 0


def test_tokens_a_second_are_those_of_a_step() -> None:
    plan = search(BASE, NODE, "bf16").plans[0]
    assert plan.tokens_per_second == plan.cost.tokens / plan.time.total
