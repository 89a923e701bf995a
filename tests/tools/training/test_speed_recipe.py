"""`[speed]`: each switch reaches the model, the cube and the batches, is refused in time, and changes no result."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tensor3d import Attention3D, Cube, Linear3D, MixedPrecisionPolicy
from tensor3d.data import TrainBatch
from tensor3d.distributed.fp8_scales import history_tensor
from tests.ranks import run_ranks
from tests.tools.runs import arguments, losses
from tools import pretrain
from tools.bench.harness.step_trial import StepTrial, Training
from tools.corpus.training_corpus import open_corpus
from tools.training.config import ModelConfig, PrecisionConfig, SpeedConfig, TrainConfig, read_config
from tools.training.data import TrainData
from tools.training.estimate import expect
from tools.training.factory import (
    asked_of_attention,
    check_attention,
    check_graph,
    fp8_cut,
    fp8_remarks,
    precision,
    set_flash_attention,
)
from tools.training.pretraining import PretrainTrainer

QUIET = ["--run.evaluate-every", "0", "--model.dropout", "0", "--model.attention-dropout", "0"]


def _without_dropout(recipe: Path, **speed: Any) -> TrainConfig:
    settings = read_config(recipe)
    model = dataclasses.replace(settings.model, layers=2, dropout=0.0, attention_dropout=0.0)
    return dataclasses.replace(settings, model=model, speed=SpeedConfig(**speed))


# --- what they reach -----------------------------------------------------------------------------------------------


def _trained(recipe: TrainConfig, corpus: Path) -> tuple[PretrainTrainer, list[TrainBatch], list[float]]:
    """A trainer, its steps' batches and losses: two steps on one process, and an evaluation."""
    cube, loaded, seen = Cube.single(), open_corpus(corpus), []
    with TrainData.of_corpus(recipe, cube, loaded) as feed:
        trainer = PretrainTrainer(recipe, cube, feed, loaded)
        with feed.loader(0, 2) as loader:
            seen = list(loader)
        with feed.loader(0, 2) as loader:
            found = [metrics.loss for metrics in trainer.steps(loader)]
    return trainer, seen, found


def test_each_switch_reaches_model_cube_and_batches(
    recipe: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def compiling(region: Any, **_: object) -> Any:
        compiled.append(region.__name__)
        return region

    monkeypatch.setattr(torch, "compile", compiling)  # which would take a minute
    monkeypatch.setattr("tensor3d.ops.compiled_regions._check_compiler", lambda *_: None)
    wanted = _trained(_without_dropout(recipe), corpus)[2]
    changed: dict[str, Any]
    for changed in (
        {"overlap": False},
        {"compile": True},
        {"attention": "reference"},
        {"read_rows_only": True},
    ):
        compiled.clear()
        switches = SpeedConfig(**changed)
        trainer, steps, found = _trained(_without_dropout(recipe, **changed), corpus)
        assert found == pytest.approx(wanted, rel=1e-5), changed
        layers = [module for module in trainer.model.modules() if isinstance(module, Attention3D)]
        assert len(layers) == 2
        for layer in layers:
            assert layer.cube is trainer.cube
            assert layer.backend == switches.attention
        assert trainer.cube.speed.overlap == switches.overlap
        assert trainer.cube.speed.compile == bool(compiled) == switches.compile
        assert trainer.model.bert.read_rows_only == switches.read_rows_only
        for step in steps:
            assert all((batch.read is not None) == switches.read_rows_only for batch in step.batches)


@pytest.mark.parametrize("fp8", ["rowwise", "tensorwise", "delayed"])
def test_fp8_reaches_the_layers_and_is_told(recipe: Path, corpus: Path, fp8: Any) -> None:
    plain = dataclasses.replace(_without_dropout(recipe), precision=PrecisionConfig(compute="bf16"))
    asked = dataclasses.replace(plain, precision=PrecisionConfig(compute="bf16", fp8=fp8))
    trainer, _, found = _trained(asked, corpus)
    wanted = _trained(plain, corpus)[2]
    assert found == pytest.approx(wanted, rel=1e-2)
    assert found != wanted
    layers = sum(isinstance(module, Linear3D) for module in trainer.model.modules())
    assert trainer.state.remarks == [f"linear layers in FP8 ({fp8}): {layers} of {layers}"]
    uses = trainer.cube.fp8_uses
    assert uses["fp8"] == layers * uses["kept out"] > 0, "the vocabulary's projection is used once a pass"
    assert fp8_remarks(trainer.model, PrecisionConfig()) == []
    odd = Linear3D(24, 32, trainer.cube)
    assert fp8_remarks(odd, asked.precision)[0].endswith("0 of 1; local sides of 1 do not divide by 16")
    assert f"FP8 {fp8}" in repr(trainer.model)
    assert "FP8" not in repr(odd)


def _received(recipe: TrainConfig, corpus: Path) -> tuple[int, int, int]:
    cube, loaded = Cube(1, 2, 1), open_corpus(corpus)
    with TrainData.of_corpus(recipe, cube, loaded) as feed:
        trainer = PretrainTrainer(recipe, cube, feed, loaded)
        with feed.loader(0, 1) as loader:
            (metrics,) = trainer.steps(loader)
    few = expect(recipe, cube.shape, loaded.info)
    plain = dataclasses.replace(recipe.model, keep_budget=0)
    more = expect(dataclasses.replace(recipe, speed=SpeedConfig(), model=plain), cube.shape, loaded.info)
    return metrics.bytes_received, few.traffic.total(), more.traffic.total()


def test_a_dry_run_tells_the_traffic_of_read_rows_and_of_what_stays(recipe: Path, corpus: Path) -> None:
    plain, few = _without_dropout(recipe), _without_dropout(recipe, read_rows_only=True)
    kept = dataclasses.replace(plain, model=dataclasses.replace(plain.model, keep_budget=1))
    for asked in (few, kept):
        for received, told, told_of_plain in run_ranks(2, _received, asked, corpus):
            assert received == told < told_of_plain


def test_a_run_goes_on_with_other_switches(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    steady = [*QUIET, "--optimizer.schedule", "constant", "--optimizer.warmup", "0"]
    assert pretrain.main(arguments(recipe, whole, *steady, "--run.steps", "4", "--run.checkpoint-every", "2")) == 0
    (run / "checkpoints").mkdir(parents=True)
    (whole / "checkpoints" / "step-00000002").rename(run / "checkpoints" / "step-00000002")
    changed = ["--speed.no-overlap", "--speed.attention", "reference", "--speed.read-rows-only", "--run.steps", "4"]
    assert pretrain.main(arguments(recipe, run, *steady, *changed, "--resume", str(run))) == 0
    told = capsys.readouterr().err
    for difference in ("overlap = False, was True", "attention = 'reference', was 'auto'", "read_rows_only = True"):
        assert f"speed.{difference}" in told
    assert losses(run) == pytest.approx({step: losses(whole)[step] for step in (3, 4)}, rel=1e-5)
    assert json.loads((run / "run.json").read_text())["recipe"]["speed"]["read_rows_only"]


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [["--dry-run"], []])
def test_attention_that_cannot_serve_is_refused_before_anything_is_made(
    recipe: Path, tmp_path: Path, how: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    call = [str(recipe), "--corpus", str(tmp_path / "corpus"), "--output", str(tmp_path / "run"), *how]
    if torch.cuda.is_available():
        pytest.skip("a GPU serves more")
    for name, reason in (("varlen", "runs on cuda, not on cpu"), ("flex", "has no backward pass on cpu")):
        assert pretrain.main([*call, "--cube", "1x2x1", "--speed.attention", name]) == 2
        told = capsys.readouterr().err
        assert f'speed.attention: attention backend "{name}" cannot serve this call: it {reason}' in told
        assert "model.attention_dropout = 0.1" in told
        assert ("State run.peak_tflops to plan for GPUs" in told) == bool(how)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", [["--dry-run", "--run.peak-tflops", "300"], ["--prepare-only"]])
def test_attention_of_a_gpu_that_is_not_here(
    recipe: Path, corpus: Path, how: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    call = [str(recipe), "--corpus", str(corpus), *how, "--speed.attention", "varlen"]
    assert pretrain.main(call) == 2
    assert "takes bfloat16 or float16, not float32. Take 'grouped'" in capsys.readouterr().err
    served = ["--precision.compute", "bf16"]
    assert pretrain.main([*call, *served]) == 0
    heads = ["--model.hidden", "48"]  # heads of 12 columns
    assert pretrain.main([*call, *served, *heads]) == 2
    assert "needs a head dimension that divides by 8" in capsys.readouterr().err


def test_a_trainer_refuses_it_on_its_own_device(recipe: Path, corpus: Path) -> None:
    with pytest.raises(ValueError, match=r"speed\.attention.*cuda.*cpu"):
        _trained(_without_dropout(recipe, attention="varlen"), corpus)


@pytest.mark.parametrize(
    ("ranks", "device", "speed", "compute", "message"),
    [
        (2, "cuda", {}, "bf16", r"for one GPU\. Got 2 ranks on cuda"),
        (1, "cpu", {}, "bf16", r"for one GPU\. Got 1 ranks on cpu"),
        (1, "cuda", {"read_rows_only": True}, "bf16", r"speed\.read_rows_only .* Set one of them to false"),
        (1, "cuda", {"shadow_weights": True}, "bf16", r"shadow_weights exclude .* Set one of them to false"),
        (1, "cuda", {}, "fp32", r"needs attention that is varlen.* Got 'grouped' for precision\.compute = 'fp32'"),
        (1, "cuda", {"attention": "flex"}, "bf16", r"needs attention that is varlen.* Got 'flex'"),
    ],
)
def test_a_graph_that_cannot_be_is_refused(
    ranks: int, device: Any, speed: dict[str, Any], compute: Any, message: str
) -> None:
    model = ModelConfig(attention_dropout=0.0)
    recipe = TrainConfig(model=model, precision=PrecisionConfig(compute=compute), speed=SpeedConfig(**speed))
    check_graph(recipe, ranks, device)  # nobody asks for one
    asking = dataclasses.replace(recipe, speed=SpeedConfig(cuda_graph=True, **speed))
    with pytest.raises(ValueError, match=message):
        check_graph(asking, ranks, device)
    check_graph(
        dataclasses.replace(
            TrainConfig(), precision=PrecisionConfig(compute="bf16"), speed=SpeedConfig(cuda_graph=True)
        ),
        1,
        "cuda",
    )


def test_a_graph_without_a_gpu_is_told_before_anything_is_made(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU serves it")
    call = [str(recipe), "--corpus", str(tmp_path / "corpus"), "--speed.cuda-graph"]
    assert pretrain.main(call) == 2
    assert "speed.cuda_graph is for one GPU. Got 1 ranks on cpu" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_passes_as_one_are_those_of_a_step(recipe: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a graph but the graph: a function that does both passes, with the loss scale, stands in for it."""

    class Stand:
        def __init__(self, model: Any, capacity: int) -> None:
            self._model = model

        def __call__(self, batch: Any, targets: int, sequences: int, scale: Any) -> Any:
            output = self._model(batch, targets, sequences)
            (output.loss if scale is None else output.loss * scale).backward()
            return output.sums

    monkeypatch.setattr("tools.training.pretraining.GraphedBert", Stand)
    one_by_one = _trained(_without_dropout(recipe), corpus)[2]
    assert _trained(_without_dropout(recipe, cuda_graph=True), corpus)[2] == one_by_one


def test_a_missing_compiler_is_told_before_anything_is_made(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(compiled: bool, device: torch.device) -> None:
        raise ValueError(f"compile={compiled} needs a compiler for {device.type}")

    monkeypatch.setattr("tools.training.factory.CompiledRegions", missing)
    call = [str(recipe), "--corpus", str(tmp_path / "corpus"), "--cube", "1x2x1", "--compile"]
    for how in ([], ["--dry-run"]):
        assert pretrain.main([*call, *how]) == 2
        assert "compile=True needs a compiler for " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_the_layers_ask_of_attention() -> None:
    """Local layers see a window unless it holds the whole pack; the last layer alone asks for some rows."""
    model = ModelConfig(encoder="modern", layers=5, window=64, heads=2, attention_dropout=0.0)
    recipe = TrainConfig(model=model, speed=SpeedConfig(read_rows_only=True))
    asked = [(facts.window, facts.queries) for facts in asked_of_attention(recipe, "cpu")]
    assert asked == [(False, False), (True, False), (True, True)]
    wide = dataclasses.replace(recipe, model=dataclasses.replace(model, window=128, layers=4))
    assert [(facts.window, facts.queries) for facts in asked_of_attention(wide, "cpu")] == [
        (False, False),
        (False, True),
    ]
    (facts,) = asked_of_attention(TrainConfig(), "cpu")
    assert (facts.head_dim, facts.dropout, facts.dtype, facts.gradient) == (64, True, torch.float32, True)


@pytest.mark.parametrize(
    ("compute", "dropout", "attention", "device", "told"),
    [
        ("bf16", 0.0, "auto", "cuda", None),
        ("bf16", 0.0, "varlen", "cuda", None),
        ("fp32", 0.0, "auto", "cuda", "FA3 is for attention that is 'varlen', which takes bfloat16 or float16, not"),
        ("bf16", 0.1, "auto", "cuda", "'varlen', which has no dropout of the probabilities by FA3"),
        ("bf16", 0.1, "varlen", "cuda", "has no dropout of the probabilities by FA3.* Take 'grouped'"),
        ("bf16", 0.0, "grouped", "cuda", "'varlen', and speed.attention is 'grouped'"),
        ("bf16", 0.0, "auto", "cpu", "which runs on cuda, not on cpu"),
    ],
)
def test_another_flash_attention_is_refused_where_it_would_not_be_used(
    compute: Any, dropout: float, attention: Any, device: Any, told: str | None
) -> None:
    recipe = TrainConfig(
        model=dataclasses.replace(ModelConfig(), attention_dropout=dropout),
        precision=PrecisionConfig(compute=compute),
        speed=SpeedConfig(attention=attention, flash_attention="FA3"),
    )
    if told is None:
        check_attention(recipe, device)
        return
    with pytest.raises(ValueError, match=rf"^speed\.(flash_)?attention: .*{told}.*model\.attention_dropout = "):
        check_attention(recipe, device)


def test_another_flash_attention_is_put_in_place_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(
        "tools.training.factory.use_flash_attention", lambda version, device: asked.append((version, device.type))
    )
    set_flash_attention(SpeedConfig(), Cube.single())
    assert asked == []
    set_flash_attention(SpeedConfig(flash_attention="FA4"), Cube.single())
    assert asked == [("FA4", "cpu")]


@pytest.mark.parametrize("trial", [StepTrial, Training])
def test_and_by_benchmarks_of_a_recipe(trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they have read anything, here."""

    def missing(version: str, device: torch.device) -> None:
        raise ValueError(f"{version} is asked for")

    monkeypatch.setattr("tools.training.factory.use_flash_attention", missing)
    recipe = TrainConfig(speed=SpeedConfig(flash_attention="FA4"))
    with pytest.raises(ValueError, match="FA4 is asked for"):
        trial(Cube.single(), recipe, *(() if trial is Training else (Path("nowhere"),)), None)


def test_delayed_scaling_is_refused_beside_a_graph() -> None:
    recipe = TrainConfig(
        speed=SpeedConfig(cuda_graph=True, read_rows_only=False),
        precision=PrecisionConfig(compute="bf16", fp8="delayed"),
    )
    with pytest.raises(ValueError, match=r"fp8 = 'delayed' exclude each other.* Take 'tensorwise'"):
        check_graph(recipe, 1, "cuda")


def test_the_history_of_delayed_scaling_reaches_the_cube() -> None:
    assert PrecisionConfig().fp8_history == MixedPrecisionPolicy().fp8_history
    asked = PrecisionConfig(compute="bf16", fp8="delayed", fp8_history=2)
    cube = Cube.single(precision=precision(asked))
    layer = Linear3D(32, 32, cube)
    layer(torch.ones(4, 32)).sum().backward()
    known = history_tensor(layer.weight)
    assert known is not None
    assert known.shape == (3, 2)


def test_what_was_cut_off_is_told_once() -> None:
    cube = Cube.single(precision=MixedPrecisionPolicy(compute=torch.bfloat16, fp8="delayed"))
    layer = Linear3D(32, 32, cube)
    assert fp8_cut(cube, 0) == (0, [])
    for size in (1.0, 1e3):
        layer(torch.full((4, 32), size)).sum().backward()
    cut, told = fp8_cut(cube, 0)
    assert cut == 1
    assert told == ["FP8: something was too large for its scale, and cut off, in 1 more matrices of a pass"]
    assert fp8_cut(cube, cut) == (1, [])
