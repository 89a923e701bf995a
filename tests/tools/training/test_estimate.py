"""The dry run: what it says is what the run will do, it refuses what the run would, and it starts nothing."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models.bert.cost_model.comm_volume import STEP_NUMBERS, step_traffic
from models.bert.cost_model.memory import held_bytes, shadow_bytes
from models.bert.cost_model.param_shapes import held, parameters
from tensor3d import Cube, CubeShape
from tensor3d.cost_model.comm_volume import CommModel
from tools import pretrain
from tools.common.units import in_bytes, in_time
from tools.corpus.quick.corpus_info import CorpusInfo
from tools.corpus.quick.prepare import prepare
from tools.corpus.training_corpus import open_corpus
from tools.training import estimate
from tools.training.config import (
    BatchConfig,
    DataConfig,
    PrecisionConfig,
    RunConfig,
    SpeedConfig,
    TrainConfig,
    read_config,
)
from tools.training.data import TrainData
from tools.training.estimate import (
    SHARE_OF_MEASURED,
    SHARE_OF_PEAK,
    Throughput,
    TimeAsMade,
    _run,
    expect,
    expected_contents,
    expected_memory,
    expected_speed,
    measured_flops,
    report,
    time_as_made,
)
from tools.training.factory import speed

RECIPES = Path(__file__).parents[3] / "launch" / "recipes"
SHIPPED = sorted(RECIPES.glob("*.toml"))
EMBEDDED = CorpusInfo(
    source="embedded",
    vocab_size=2048,
    held_out=0.02,
    seed=0,
    shards=1,
    documents=720,
    sentences=30331,
    words=320823,
    pieces=600353,
    train_documents=699,
    train_pieces=588514,
    held_out_documents=21,
    held_out_pieces=11839,
    unigram_entropy=6.177,
    fingerprint="0",
)
ONE, EIGHT, MANY = CubeShape(), CubeShape(x=2, y=2, z=2), CubeShape(x=1, y=2, z=4, data=4)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product is measured for a moment only."""
    monkeypatch.setattr(estimate, "_SECONDS", 0.01)


def _told() -> list[Any]:
    """Every recipe on a cube in the fast or slow tier, the large ones on one rank before a release: a dry step of one
    takes ten seconds and more."""
    fast = {"quickstart.toml"}
    cases = []
    for path in SHIPPED:
        for shape in (ONE, EIGHT):
            # Of ModernBERT's phases the sizes are those of the second one; RoBERTa's small layers are BERT's.
            like_another = path.name.startswith("modernbert") and path.name != "modernbert-tiny-phase2.toml"
            like_another |= path.name == "roberta-tiny.toml"
            late = pytest.mark.slow if shape == EIGHT and not like_another else pytest.mark.long
            is_fast = path.name in fast and shape == ONE
            cases.append(pytest.param(path, shape, id=f"{shape}-{path.name}", marks=() if is_fast else late))
    return cases


@pytest.mark.parametrize(("path", "shape"), _told())
def test_every_shipped_recipe_can_be_told_beforehand(path: Path, shape: CubeShape) -> None:
    text = report(read_config(path), shape)
    for title in ("model and cube:", "a step:", "memory of rank 0", "received by rank 0 in a step:", "the run:"):
        assert f"\n{title}" in text
    assert max(map(len, text.splitlines())) <= 132
    assert "nan" not in text
    assert "inf " not in text


@pytest.mark.slow
def test_bert_large_on_32_gpus() -> None:
    recipe = read_config(RECIPES / "bert-large-phase2.toml")
    recipe = replace(recipe, run=replace(recipe.run, peak_tflops=312.0))
    text = report(recipe, MANY)
    assert "336,226,108 (336.2 M)" in text
    assert "1,563, " in text
    assert "312.0 TFLOP/s in bf16 (run.peak_tflops) on each of 32 ranks" in text
    assert "counted as on a    GPU" in text
    expected = expect(recipe, MANY)
    # 487 tokens a sequence: 1.04 sequences a pack of 512, and 32,768 of them a step, in packs of 512 slots.
    assert expected.packs % 512 == 0
    assert expected.sequences == pytest.approx(32768, rel=0.01)
    assert expected.micro_batches * 8 * 4 * 4 == expected.packs
    # By NVIDIA's figure, 1,657 sequences/s on eight A100: of the same order.
    seconds = expected.flops / (0.4 * 312e12 * 32)
    assert 0.3 < (32768 / seconds) / (1657 * 4) < 3


def test_steps_are_laid_out_as_the_run_lays_them_out(recipe: Path, tmp_path: Path) -> None:
    """Against the loader's own batches, on one device: packs, micro-batches, slots."""
    settings = read_config(recipe)
    prepare(settings.data.source, tmp_path / "corpus", vocab_size=67, held_out=0.1)
    corpus = open_corpus(tmp_path / "corpus")
    for masked, share in ((None, 0.15), (9, 0.15), (None, 0.4)):
        data = replace(settings.data, masked_per_pack=masked, masked_share=share)
        changed = replace(settings, data=data, batch=BatchConfig(global_batch=8, packs_per_rank=2))
        expected = expect(changed, ONE, corpus.info)
        with TrainData.of_corpus(changed, Cube.single(), corpus) as feed, feed.loader(0, 1) as loader:
            step = next(iter(loader))
        assert len(step.batches) == expected.micro_batches == 4
        assert feed.global_batch == expected.packs
        load, batch = expected.load, step.batches[0]
        assert (load.rows, load.masked, load.first) == tuple(t.shape[0] for t in (batch.ids, batch.masked, batch.first))
        assert sum(load.lengths) == batch.sequences.rows
        assert step.targets == pytest.approx(share * step.tokens, rel=0.05)


@pytest.mark.parametrize(("longest", "capacity", "fill"), [(100, 128, 0.7754), (33, 64, 0.5156)])
def test_packs_without_room_for_two_of_the_longest_are_not_taken_for_full(
    longest: int, capacity: int, fill: float
) -> None:
    """As a run of quickstart.toml says at its end, with these limits and 300 pieces."""
    data = replace(read_config(RECIPES / "quickstart.toml").data, max_length=longest, capacity=capacity)
    assert expected_contents(data, None).fill == pytest.approx(fill, rel=0.06)
    few = replace(data, max_length=128, capacity=512, masked_per_pack=30)
    assert expected_contents(few, None).packing_factor < 1.2, "each of the longest has 19 tokens to guess"


@pytest.mark.parametrize("name", ["quickstart", "tiny-phase2"])
def test_contents_of_packs_are_nearly_those_of_the_embedded_corpus(name: str) -> None:
    """As counted once over all packs of epoch 0."""
    recipe = read_config(RECIPES / f"{name}.toml")
    counted = {"quickstart": (112.9, 1.120), "tiny-phase2": (199.5, 1.280)}[name]
    contents = expected_contents(recipe.data, EMBEDDED)
    assert (contents.mean_length, contents.packing_factor) == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "0.15 of the tokens, masked; next sentences"),
        pytest.param(
            {"objective": "masked-lm", "masked_share": 0.3, "masked_share_end": 0.1},
            "0.3 to 0.1 of the tokens, masked",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_objective_is_told(changes: dict[str, Any], told: str) -> None:
    plain = read_config(RECIPES / "quickstart.toml")
    lines = [
        line.split(maxsplit=1) for line in report(replace(plain, data=replace(plain.data, **changes)), ONE).splitlines()
    ]
    assert ["objective", told] in lines


def test_figures_follow_the_masked_share() -> None:
    """The masked-LM head's work is in proportion to it; of one that falls the mean counts, and packs hold the most."""
    plain = read_config(RECIPES / "quickstart.toml")
    found = {
        shares: expect(
            replace(plain, data=replace(plain.data, masked_share=shares[0], masked_share_end=shares[1])), EIGHT
        )
        for shares in ((0.15, None), (0.3, None), (0.4, 0.2))
    }
    base, double, falls = found.values()
    config = base.config
    head = 6 * config.hidden * (config.hidden + config.vocab)
    assert double.flops - base.flops == head * (round(0.3 * base.tokens) - round(0.15 * base.tokens))
    assert falls.flops == double.flops
    # 128 slots: budgets of 20 + 2, 39 + 2 and 52 + 2 of each of the two packs of a plane.
    assert [each.load.masked for each in found.values()] == [2 * 4 * budget for budget in (22, 41, 54)]
    assert sum(base.traffic.values()) < sum(double.traffic.values()) < sum(falls.traffic.values())


def test_traffic_of_a_step_is_that_of_its_micro_batches() -> None:
    recipe = read_config(RECIPES / "tiny-phase1.toml")
    recipe = replace(recipe, batch=BatchConfig(global_batch=24, packs_per_rank=1))
    expected = expect(recipe, EIGHT)
    assert expected.micro_batches == 6
    load, matrices = expected.load, sum(len(p.shape) > 1 for p in parameters(expected.config))
    wire = CommModel(shape=EIGHT, compute=2)
    slots = (load.rows, load.masked, load.first)
    told: dict[str, Any] = {"norm": STEP_NUMBERS, "reduce_loss": False, "summed": 2 * matrices}
    assert expected.traffic == step_traffic(expected.config, wire, *slots, micro_batches=6, **told)


@pytest.mark.slow
def test_a_state_and_gradients_in_shares_are_part_of_it() -> None:
    recipe, shape = TrainConfig(batch=BatchConfig(global_batch=16)), CubeShape(y=2, data=4)
    shared, both = (
        replace(recipe, optimizer=replace(recipe.optimizer, shard_over_data=each)) for each in (True, "gradients")
    )
    plain, found, further = (expect(each, shape) for each in (recipe, shared, both))
    here = held(found.config, shape)
    scattered = further.traffic["data", "reduce-scatter"]
    assert scattered == 4 * 3 * here.scattered(shape)[2]
    assert found.traffic.total() - further.traffic.total() == pytest.approx(scattered, rel=0.01), (
        "half of an all-reduce"
    )
    memory = expected_memory(both, shape, further, "cpu")
    assert (memory.gradients, memory.optimizer) == (
        4 * here.gradients(shape, "gradients"),
        expected_memory(shared, shape, found, "cpu").optimizer,
    )
    assert plain.load == found.load
    wire = CommModel(shape=shape)
    gathered = found.traffic["data", "all-gather"]
    assert gathered - plain.traffic["data", "all-gather"] == 4 * 3 * held(found.config, shape).gathered
    assert found.traffic.total() - plain.traffic.total() == gathered
    for each, expected in ((recipe, plain), (shared, found)):
        memory = expected_memory(each, shape, expected, "cpu")
        assert (memory.weights, memory.optimizer) == held_bytes(
            found.config, wire, shard_over_data=each.optimizer.shard_over_data
        )


def test_padded_packs_hold_one_sequence() -> None:
    contents = expected_contents(DataConfig(packing="padded", capacity=256), None)
    assert contents.packing_factor == 1.0
    assert contents.fill == pytest.approx(0.47, abs=0.02)


@pytest.mark.parametrize(
    ("changes", "cube", "message"),
    [
        ({}, CubeShape(y=4), r"heads must divide by y=4. Got 2"),
        ({}, CubeShape(x=3), r"batch of 16.*data=1.*x=3"),
        ({"batch": BatchConfig(global_batch=2)}, EIGHT, r"a global batch of 2 packs does not divide"),
        ({"data": DataConfig(capacity=129)}, CubeShape(y=2), r"do not divide by y=2"),
    ],
)
def test_what_does_not_divide_is_refused(changes: dict[str, object], cube: CubeShape, message: str) -> None:
    batch = BatchConfig(global_batch=16, packs_per_rank=1)
    recipe = replace(TrainConfig(batch=batch), **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        report(recipe, cube)


@pytest.mark.slow
def test_a_batch_in_sequences_says_whether_it_is_sure_to_divide() -> None:
    batch = BatchConfig(global_batch=100, packing_rule="sequences", packs_per_rank=2, multiple_of=8)
    assert "Unknown until packing" not in report(TrainConfig(batch=batch), EIGHT)
    text = report(TrainConfig(batch=replace(batch, multiple_of=6)), EIGHT)
    assert "surely do with batch.multiple_of = 8" in text


def test_more_is_computed_than_the_model_asks_for_where_it_is_computed_again() -> None:
    plain = TrainConfig()
    layer = replace(plain, model=replace(plain.model, recompute="layer"))
    some = replace(plain, model=replace(plain.model, recompute="attention"))
    assert expect(plain, ONE).hardware_flops == expect(plain, ONE).flops == expect(layer, ONE).flops
    assert expect(plain, ONE).flops < expect(some, ONE).hardware_flops < expect(layer, ONE).hardware_flops
    assert expect(layer, ONE).hardware_flops < 4 / 3 * expect(plain, ONE).flops
    assert expect(layer, EIGHT).traffic.total() > expect(plain, EIGHT).traffic.total()


def test_what_is_computed_again_is_what_the_layers_compute() -> None:
    """Of a last layer that computes the read rows alone, no more than a third of what it costs."""
    plain = TrainConfig(speed=SpeedConfig(read_rows_only=True))
    for recompute in ("layer", "attention"):
        again = replace(plain, model=replace(plain.model, recompute=recompute, layers=1))
        expected, every = expect(again, ONE), expect(replace(again, speed=SpeedConfig()), ONE)
        assert expected.flops < expected.hardware_flops < 4 / 3 * expected.flops
        assert expected.hardware_flops - expected.flops < every.hardware_flops - every.flops


def test_copies_of_weights_are_told() -> None:
    recipe = TrainConfig(precision=PrecisionConfig(compute="bf16"), speed=SpeedConfig(shadow_weights=True))
    config = expect(recipe, ONE).config
    copies = in_bytes(shadow_bytes(config, CommModel(shape=ONE, compute=2)))
    assert re.search(rf"their copies +{re.escape(copies)} \(speed\.shadow_weights\)", report(recipe, ONE))


@pytest.mark.slow
def test_symmetric_memory_changes_no_figure() -> None:
    """Bytes received are the same; the workspaces that it holds are not counted (docs/gpu.md)."""
    run, box = RunConfig(peak_tflops=989.0), CubeShape(y=2)
    recipe = TrainConfig(run=run, speed=SpeedConfig(symmetric_memory=True))
    assert speed(recipe.speed).symmetric_memory
    assert report(recipe, box) == report(TrainConfig(run=run), box)


def test_delayed_scales_travel() -> None:
    """Magnitudes of three matrices for each linear layer, and a number and its opposite between hosts."""
    base = TrainConfig()
    found, plain = (
        expect(replace(base, precision=PrecisionConfig(compute="bf16", fp8=fp8)), CubeShape(y=2)).traffic  # type: ignore[arg-type]
        for fp8 in ("delayed", "off")
    )
    layers = 4 * TrainConfig().model.config(TrainConfig().data).layers + 2
    assert found.total() - plain.total() == 3 * layers * 4 + 2 * 8


@pytest.mark.slow
def test_fp8_is_told() -> None:
    def told(fp8: Any, **run: Any) -> str:
        return report(TrainConfig(precision=PrecisionConfig(compute="bf16", fp8=fp8), run=RunConfig(**run)), ONE)

    text, plain = told("rowwise"), told("off")
    assert "compute bf16, linear layers in FP8 (rowwise), sums of gradients fp32, weights fp32" in text
    assert "FP8" not in plain
    kept = [re.search(r"kept for backward .*", each) for each in (text, plain)]
    assert kept[0] is not None
    assert kept[1] is not None
    assert kept[0].group() == kept[1].group()
    assert "FP8 keeps nothing more for backward. The time is that of products in bf16." in text
    assert "The time is that" not in told("rowwise", peak_tflops=989.0)


@pytest.mark.slow
def test_figures_of_memory_promise_what_they_hold() -> None:
    def told(changes: dict[str, Any], shape: CubeShape = ONE) -> str:
        return report(TrainConfig(speed=SpeedConfig(**changes)), shape)

    exact = "traffic, and what is kept for packs of the longest sequences."
    assert exact in told({})
    assert "Within a few %: what comes and goes" in told({})
    assert exact in told({"compile": True})
    for changes, worth in (
        ({"read_rows_only": True}, "\nAn upper bound: what is kept"),
        ({"read_rows_only": True, "compile": True}, "\nAn upper bound: what is kept"),
    ):
        text = told(changes)
        assert worth in text
        assert exact not in text
        assert ("At most a few % more: what comes and goes" in text) == ("read_rows_only" in changes)
    long = told({}, CubeShape(x=4))
    assert "Rather low: what comes and goes, without weights gathered ahead and" in long
    assert "Within a few %" not in long
    assert "gathered ahead" not in told({"overlap": False}, CubeShape(x=4))
    assert "their copies" not in told({"shadow_weights": True})  # of the same type
    dense = told({"attention": "reference"})
    assert "Not told: memory beyond that." in dense
    assert "most at once  " not in dense
    assert "fits here" not in dense
    assert exact not in dense
    assert max(map(len, (long + dense).splitlines())) <= 132


def test_the_speed_is_stated_with_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    given = expected_speed(RunConfig(peak_tflops=100.0), PrecisionConfig(compute="bf16"), 4)
    assert given.flops == pytest.approx(SHARE_OF_PEAK * 4 * 100e12)
    monkeypatch.setattr(estimate, "measured_flops", lambda dtype: 3e9)
    monkeypatch.setattr(estimate, "_known_peak", lambda precision: None)
    here = expected_speed(RunConfig(), PrecisionConfig(), 4)
    assert here.flops == pytest.approx(SHARE_OF_MEASURED * 3e9), "ranks of one machine share it"
    assert "50% of 3 GFLOP/s, measured for a product in fp32" in here.words
    monkeypatch.setattr(estimate, "_known_peak", lambda precision: ("NVIDIA H100", 989e12))
    known = expected_speed(RunConfig(), PrecisionConfig(compute="bf16"), 2)
    assert known.flops == pytest.approx(SHARE_OF_PEAK * 2 * 989e12)
    assert "989.0 TFLOP/s in bf16 (this machine's NVIDIA H100)" in known.words


def test_the_time_is_that_of_the_step_as_the_recipe_makes_it() -> None:
    """FP8, shadow weights and compiled regions against eager bf16, as the planner has them; on CPUs nothing is told."""
    base, run = TrainConfig(precision=PrecisionConfig(compute="bf16")), RunConfig(peak_tflops=989.0)
    expected = expect(base, ONE)
    gpu = expected_speed(run, base.precision, 1)

    def ratio(fp8: Any = "off", on: Throughput = gpu, **switches: bool) -> TimeAsMade | None:
        precision = PrecisionConfig(compute="bf16", fp8=fp8)
        return time_as_made(replace(base, precision=precision, speed=SpeedConfig(**switches)), ONE, expected, on)

    assert ratio() is None
    both = ratio(compile=True, shadow_weights=True)
    compiled, shadows, rounded = ratio(compile=True), ratio(shadow_weights=True), ratio("rowwise")
    assert both is not None
    assert compiled is not None
    assert shadows is not None
    assert rounded is not None
    assert both.ratio < compiled.ratio < shadows.ratio < 1 < rounded.ratio
    assert both.words == "shadow weights, compiled regions, planned for H100"
    assert ratio(compile=True, on=replace(gpu, peak=None)) is None
    assert ratio("rowwise", on=replace(gpu, peak=312e12)) is None, "there is no peak of FP8"
    text = "\n".join(f"{name} {words}" for name, words in _run(base, None, expected, gpu, compiled))
    assert f"of it {compiled.ratio:.2f} of the time of eager steps, for compiled regions, planned for H100" in text


def test_a_measured_speed_is_one() -> None:
    assert 1e8 < measured_flops(torch.float32) < 1e15


def test_sizes_and_times_in_words() -> None:
    assert [in_bytes(n) for n in (0, 999, 1000, 999_600, 1_234_567, 4.03e9)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1 MB",
        "1.23 MB",
        "4.03 GB",
    ]
    assert [in_time(s) for s in (0.0123, 1.5, 90, 150, 8000, 200_000)] == [
        "12.3 ms",
        "1.5 s",
        "90.0 s",
        "2.5 minutes",
        "2.2 hours",
        "2.3 days",
    ]


def test_it_starts_nothing(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "corpus"
    assert pretrain.main([str(recipe), "--corpus", str(corpus), "--cube", "2x2x2", "--dry-run"]) == 0
    assert "2x2x2 = 8 ranks" in capsys.readouterr().out
    assert not corpus.exists()
    assert pretrain.main([str(recipe), "--corpus", str(corpus), "--cube", "1x3x1", "--dry-run"]) == 2
    assert "heads must divide by y=3" in capsys.readouterr().err


def test_a_system_that_does_not_tell_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(os, "sysconf", unknown)
    monkeypatch.setattr(estimate.torch.cuda, "is_available", lambda: False)
    assert "there is" not in report(TrainConfig(), ONE)


def test_a_product_of_n_rows_takes_twice_the_cube_of_n(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(0.5 * n for n in range(10))
    monkeypatch.setattr(estimate, "_SIDE", 8)
    monkeypatch.setattr(estimate, "_SECONDS", 1.2)
    monkeypatch.setattr(estimate.time, "perf_counter", lambda: next(ticks))
    assert measured_flops(torch.float32) == 2 * 8**3 / 0.5
