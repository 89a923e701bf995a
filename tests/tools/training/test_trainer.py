"""What a run does on its way: steps that are skipped, evaluations, ends, a start from other weights."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import json
import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.bert import BertForPreTraining
from tensor3d import Cube, checkpoint, local
from tests.programs import ran
from tests.ranks import run_ranks
from tests.single_device_reference import full
from tests.tools.runs import arguments, journal, losses
from tools import pretrain
from tools.corpus.training_corpus import open_corpus
from tools.training.config import PrecisionConfig, TrainConfig, read_config
from tools.training.data import TrainData
from tools.training.pretraining import PretrainTrainer
from tools.training.resume import POSITIONS

ROOT = Path(__file__).parents[3]
QUIET = ["--run.evaluate-every", "0", "--run.checkpoint-every", "0"]


# --- steps that are skipped ----------------------------------------------------------------------------------------


def _weights(trainer: PretrainTrainer) -> list[Tensor]:
    return [full(p).clone() for p in trainer.model.parameters()]


def _skipping(recipe: TrainConfig, corpus: Path, bad: int) -> list[dict[str, Any]]:
    """Four steps, of which the second overflows on one rank alone, in what the ranks have copies of."""
    cube = Cube(1, 2, 2)
    loaded = open_corpus(corpus)
    told = []
    with TrainData.of_corpus(recipe, cube, loaded) as feed:
        trainer = PretrainTrainer(recipe, cube, feed, loaded)
        backward = trainer._step._forward_backward

        def overflowing(step: Any) -> Tensor:
            sums = backward(step)
            if step.index == 1 and cube.rank == bad:
                gradient = trainer.model.bert.embeddings.types.weight.grad
                assert gradient is not None
                local(gradient)[0, 0] = math.inf
            return sums

        trainer._step._forward_backward = overflowing  # type: ignore[method-assign]
        before = _weights(trainer)
        with feed.loader(0, 4) as loader:
            for metrics in trainer.steps(loader):
                after = _weights(trainer)
                moved = not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
                told.append(
                    {
                        "skipped": metrics.skipped,
                        "so far": metrics.skipped_steps,
                        "moved": moved,
                        "scale": metrics.loss_scale,
                        "remarks": list(trainer.state.remarks),
                        "loss": metrics.loss,
                    }
                )
                trainer.state.remarks.clear()
                before = after
    return told


@pytest.mark.parametrize(
    "compute", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("fp32", "bf16")), "fp16"]
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(recipe: Path, corpus: Path, compute: str) -> None:
    precision = PrecisionConfig(compute=compute, loss_scale=1024.0)  # type: ignore[arg-type]
    settings = dataclasses.replace(read_config(recipe), precision=precision)
    results = run_ranks(4, _skipping, settings, corpus, 3)
    for steps in results:
        assert [step["skipped"] for step in steps] == [False, True, False, False]
        assert [step["moved"] for step in steps] == [True, False, True, True]
        assert [step["so far"] for step in steps] == [0, 1, 1, 1]
        scales = [1024.0, 1024.0, 512.0, 512.0] if compute == "fp16" else [1.0] * 4
        assert [step["scale"] for step in steps] == scales
        assert [step["loss"] for step in steps] == [step["loss"] for step in results[0]]
    said = [step["remarks"] for step in results[0]]
    if compute == "fp16":  # where it belongs to the search for a scale
        assert said == [[], [], [], []]
    else:
        assert len(said[1]) == 1
        assert not any(said[0] + said[2] + said[3])
        assert "step 2:" in said[1][0]
        assert "bert.embeddings.types.weight is not finite on rank 3 of 4" in said[1][0]


def _nan_loss(recipe: TrainConfig, corpus: Path, bad: int) -> list[tuple[bool, list[str]]]:
    """Labels that are none give a loss of nan and finite gradients: on a device nobody has looked at them. Here
    one member of y alone has such a loss, of which each has a copy."""
    cube, loaded = Cube(1, 2, 1), open_corpus(corpus)
    found = []
    with TrainData.of_corpus(recipe, cube, loaded) as feed:
        trainer = PretrainTrainer(recipe, cube, feed, loaded)
        backward = trainer._step._forward_backward

        def wrong(step: Any) -> Tensor:
            sums = backward(step)
            return sums * math.nan if step.index == 1 and cube.rank == bad else sums

        trainer._step._forward_backward = wrong  # type: ignore[method-assign]
        with feed.loader(0, 3) as loader:
            for metrics in trainer.steps(loader):
                found.append((metrics.skipped, list(trainer.state.remarks)))
                trainer.state.remarks.clear()
    return found


def test_a_loss_that_is_not_finite_skips_the_step(recipe: Path, corpus: Path) -> None:
    for first, second, third in run_ranks(2, _nan_loss, read_config(recipe), corpus, 1):
        assert first == third == (False, [])
        assert second[0], "both ranks skip it"
        assert "loss nan" in second[1][0]
        assert "every gradient of a parameter is finite" in second[1][0]


def _diverged(recipe: TrainConfig, corpus: Path) -> str:
    cube, loaded = Cube.single(), open_corpus(corpus)
    with TrainData.of_corpus(recipe, cube, loaded) as feed:
        trainer = PretrainTrainer(recipe, cube, feed, loaded)
        with torch.no_grad():
            trainer.model.pooler.dense.weight.fill_(math.nan)
        with feed.loader(0, 40) as loader:
            for number, _ in enumerate(trainer.steps(loader), start=1):
                assert number < 25, "a run that cannot recover goes on"
    return ""


def test_a_run_that_cannot_recover_ends_with_the_weight_that_is_not_finite(recipe: Path, corpus: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"the weight pooler\.dense\.weight is not finite.*25"):
        _diverged(read_config(recipe), corpus)


# --- ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("evaluate", "told"), [("2", "the held-out loss"), ("0", "the loss of a micro-batch")])
def test_weights_that_the_last_step_has_spoilt_are_not_saved(
    evaluate: str, told: str, recipe: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No loss of a step follows it; of two checkpoints, of which one may stay, the good one does."""
    run, steps = tmp_path / "run", ["--run.steps", "2", "--optimizer.warmup", "0"]
    keeps = ["--run.evaluate-every", evaluate, "--run.checkpoint-every", "1", "--run.checkpoint-keep", "1"]
    with pytest.MonkeyPatch.context() as rate:
        rate.setattr("tensor3d.optim.LRSchedule.at", lambda _, step: 1e38 if step else 1e-3)
        assert pretrain.main(arguments(recipe, run, *steps, *keeps, corpus=corpus)) == 2
    assert f"{told} with the weights after step 2 is nan" in capsys.readouterr().err
    assert [found.name for found in (run / "checkpoints").glob("step-*")] == ["step-00000001"]
    if evaluate != "0":
        assert pretrain.main(arguments(recipe, run, "--resume", str(run), *steps, *keeps, corpus=corpus)) == 0


def test_the_target_accuracy_ends_the_run(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    more = ["--run.target-accuracy", "1e-6", "--run.steps", "30", "--run.checkpoint-every", "30", "--run.mllog"]
    assert pretrain.main(arguments(recipe, run, *more)) == 0
    told = capsys.readouterr().out
    assert "the target accuracy is reached" in told
    evaluations = journal(run, "evaluation")
    done = evaluations[-1]["step"]
    assert done < 30
    assert checkpoint.latest(run / "checkpoints") == run / "checkpoints" / f"step-{done:08d}"
    assert journal(run, "event")[-1]["reason"] == "target"
    lines = [json.loads(line.split(" ", 1)[1]) for line in told.splitlines() if line.startswith(":::MLLOG")]
    assert lines[-1]["key"] == "run_stop"
    assert lines[-1]["metadata"]["status"] == "success"
    assert [line["value"] for line in lines if line["key"] == "eval_accuracy"] == [
        evaluation["masked_lm_accuracy"] for evaluation in evaluations
    ]


def test_patience_ends_the_run_and_the_best_stays(recipe: Path, tmp_path: Path) -> None:
    """At a rate that makes the model worse the first evaluation is the best."""
    run = tmp_path / "run"
    more = ["--run.patience", "2", "--run.evaluate-every", "1", "--run.steps", "30", "--run.checkpoint-keep", "1"]
    assert pretrain.main(arguments(recipe, run, *more, "--optimizer.lr", "3", "--optimizer.warmup", "0")) == 0
    evaluations = journal(run, "evaluation")
    best = min(evaluations, key=lambda evaluation: evaluation["loss"])["step"]
    assert len(evaluations) < 30
    assert evaluations[-1]["step"] == best + 2
    assert checkpoint.best(run / "checkpoints") == run / "checkpoints" / f"step-{best:08d}"
    assert checkpoint.verify(run / "checkpoints" / f"step-{best:08d}") == []


def test_evaluations_can_be_counted_in_samples(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = ["--run.evaluate-every", "0", "--run.evaluate-every-samples", "16", "--run.steps", "8"]
    assert pretrain.main(arguments(recipe, run, *more)) == 0
    *due, last = journal(run, "evaluation")
    assert last["step"] == 8
    passed = [evaluation["samples"] // 16 for evaluation in due]
    assert passed == list(range(1, len(passed) + 1)), "one evaluation for each 16 sequences: a step has about 8"
    assert len(passed) >= 3


# --- going on ------------------------------------------------------------------------------------------------------


def test_the_same_command_starts_and_goes_on(recipe: Path, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert pretrain.main(arguments(recipe, whole, "--resume", "auto", "--output", str(whole))) == 0
    for stop in ("3", "6"):
        # The rate does not depend on the end, so that both runs are one.
        call = arguments(recipe, run, "--resume", "auto", "--output", str(run), "--run.steps", stop)
        assert pretrain.main([*call, "--optimizer.schedule", "constant", "--optimizer.warmup", "0"]) == 0
    assert list(losses(run)) == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in journal(run, "step")] == [1, 2, 3, 4, 5, 6]
    assert list(losses(whole)) == [1, 2, 3, 4, 5, 6]


def test_a_run_that_has_ended_is_left_alone(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that dies after the last checkpoint, or a requeue, must not make a failure of it."""
    run = tmp_path / "run"
    call = arguments(recipe, run, "--resume", "auto", "--output", str(run))
    reached = [*call, "--run.target-accuracy", "1e-6", "--run.steps", "30"]
    assert pretrain.main(reached) == 0
    corpus = recipe.parent / "corpus" / "corpus.json"
    before = (run / "metrics.jsonl").read_bytes(), corpus.read_bytes()
    for ending in ("trash", "partial"):  # killed in a rotation or a save
        (run / "checkpoints" / f"step-00000001.01234567.{ending}").mkdir()
    # Another vocabulary, or seed: nobody else loses the corpus for a run that does nothing.
    for more in ([], ["--data.vocab-size", "99"], ["--prepare-only", "--run.seed", "1"]):
        assert pretrain.main([*reached, *more]) == 0
        told = capsys.readouterr().err
        assert "is the end of its run (the target accuracy is reached): there is nothing left" in told
    assert ((run / "metrics.jsonl").read_bytes(), corpus.read_bytes()) == before
    assert not list((run / "checkpoints").glob("*.01234567.*"))
    finished = tmp_path / "finished"
    call = arguments(recipe, finished, "--resume", "auto", "--output", str(finished), *QUIET, "--run.steps", "2")
    call += ["--run.checkpoint-every", "2"]
    assert pretrain.main(call) == 0
    assert pretrain.main(call) == 0
    capsys.readouterr()
    assert pretrain.main([*call, "--run.steps", "3"]) == 0
    assert [line["step"] for line in journal(finished, "step")] == [1, 2, 3]
    check_console(*capsys.readouterr(), finished)


def check_console(out: str, err: str, run: Path) -> None:
    """At most twelve lines before the first step, at most as wide as a page; at the end what can be done next."""
    header = err.split("run.json, all of them")[0].splitlines()
    assert 6 <= len(header) <= 12, err
    assert "[data]" not in err, "settings are in a file"
    assert "goes on" in err
    assert all(len(line) <= 120 for line in header if str(run) not in line)
    table, following = out.split("next:\n")
    assert "done; shares, medians and means are those of the steps after 2:\n" in table
    assert "loss, step 1 " in table
    assert "masked-LM loss, step 3 (resumed) " in table
    commands = [shlex.split(line.split("  ")[-1])[2:4] for line in following.splitlines()]
    assert commands == [["tools.report", str(run)], ["tools.predict", "fill-mask"], ["tools.convert", "to-hf"]]
    # Numbers are aligned: what follows them begins in one column.
    ends = {match.end() for line in table.splitlines() if (match := re.match(r"  .*?  +[\d,]+\.\d+(?= nats)", line))}
    assert len(ends) == 1, table


def test_a_damaged_checkpoint_is_passed_over(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    call = arguments(recipe, run, "--resume", "auto", "--output", str(run), *QUIET, "--run.checkpoint-every", "2")
    assert pretrain.main([*call, "--run.steps", "4"]) == 0
    file = run / "checkpoints" / "step-00000004" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (run / "checkpoints" / "step-00000006").symlink_to(tmp_path / "disk")
    (run / "checkpoints" / "step-00000009").mkdir()
    assert pretrain.main([*call, "--run.steps", "5"]) == 0
    told = capsys.readouterr()
    assert "step-00000009/progress.json cannot be read: No such file" in told.err
    assert f"Whether it is newer than {run}/checkpoints/step-00000002 nobody can tell." in told.err
    assert "step-00000006 has the name of a checkpoint and is no folder. Trying the one before." in told.err
    assert "rank-00000.safetensors" in told.err
    assert "Trying the one before." in told.err
    assert "after step 2" in told.err
    assert checkpoint.latest(run / "checkpoints") == run / "checkpoints" / "step-00000005"


def test_no_run_begins_anew_where_a_checkpoint_is_no_folder(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("")
    call = arguments(recipe, run, "--resume", "auto", "--output", str(run))
    (run / "checkpoints" / "step-00000004").symlink_to(tmp_path / "disk")
    assert pretrain.main(call) == 2
    told = f"step-00000004 has the name of a checkpoint and is no folder: it is a link to {tmp_path}/disk, which is not"
    assert told in capsys.readouterr().err
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "metrics.jsonl"]


def test_a_last_checkpoint_that_cannot_be_written_is_no_success(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tensor3d.checkpoint.writer.write_file", full)
    run = tmp_path / "run"
    assert pretrain.main(arguments(recipe, run, *QUIET, "--run.checkpoint-every", "2", "--run.steps", "4")) == 74
    told = capsys.readouterr()
    assert told.err.count("NO CHECKPOINT") >= 2
    assert "none could be written" in told.out
    assert "ended after step 4, and its last checkpoint could not be written" in told.err
    assert [line["step"] for line in journal(run, "step")] == [1, 2, 3, 4], "the run went on"


@pytest.mark.slow
def test_an_evaluation_that_a_signal_breaks_off_comes_first_afterwards(recipe: Path, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    steady = ["--optimizer.schedule", "constant", "--optimizer.warmup", "0"]
    assert pretrain.main(arguments(recipe, whole, *steady)) == 0
    script = Path(__file__).parent / "stopped.py"
    call = arguments(recipe, run, *steady, "--resume", "auto", "--output", str(run))
    done = ran([sys.executable, str(script), *call], cwd=ROOT, timeout=120)
    assert done.returncode == 75, done.stderr[-2000:]
    assert [line["step"] for line in journal(run, "step")] == [1, 2, 3]
    assert journal(run, "evaluation") == []
    assert pretrain.main(call) == 0
    keys = ("step", "loss", "samples", "masked_lm_accuracy")
    assert [[line[key] for key in keys] for line in journal(run, "evaluation")] == [
        [line[key] for key in keys] for line in journal(whole, "evaluation")
    ]
    assert losses(run) == losses(whole)


def test_auto_needs_a_folder(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain.main([str(recipe), "--resume", "auto"]) == 2
    assert "--resume auto needs the run's folder. Name it by --output." in capsys.readouterr().err


def test_skipped_steps_samples_and_the_best_are_remembered(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert pretrain.main(arguments(recipe, run)) == 0
    facts = checkpoint.read_progress(run / "checkpoints" / "step-00000006")
    evaluations = journal(run, "evaluation")
    assert facts["standing"]["samples"] == evaluations[-1]["samples"] > 0
    assert facts["standing"]["skipped_steps"] == 0
    assert facts["best"]["loss"] == min(evaluation["loss"] for evaluation in evaluations)


def test_chosen_steps_are_traced(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert pretrain.main(arguments(recipe, run, *QUIET, "--run.steps", "4", "--profile", "2-3")) == 0
    with gzip.open(run / "trace-rank0-steps2-3.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"step 2", "step 3"} <= names
    assert not {"step 1", "step 4"} & names
    steps, (end,) = journal(run, "step"), journal(run, "event")
    assert end["seconds"] >= sum(step["seconds"] for step in steps), "also of a run without a checkpoint"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--profile", "3-2"], "steps to trace are written"),
        (["--profile", "1", "--profile-ranks", "1"], "each below 1. Got '1'"),
        (["--start-from", "nowhere"], "nowhere is not there: a model is a folder"),
        (["--start-from", "a", "--resume", "b"], "--start-from begins a run and --resume goes on with one"),
    ],
)
def test_what_makes_no_sense_is_refused(
    recipe: Path, tmp_path: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrain.main([str(recipe), "--corpus", str(recipe.parent / "corpus"), *more]) == 2
    assert message in capsys.readouterr().err


# --- two phases ----------------------------------------------------------------------------------------------------


def test_a_second_phase_begins_with_the_weights_of_the_first(recipe: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    lamb = ["--optimizer.kind", "lamb", "--run.evaluate-every", "0"]
    assert pretrain.main(arguments(recipe, first, *lamb)) == 0
    longer = ["--data.capacity", "64", "--data.max-length", "64", "--run.steps", "2", "--start-from", str(first)]
    assert pretrain.main(arguments(recipe, second, *lamb, *longer, "--optimizer.lr", "1e-30")) == 0
    old, new = weights(first, recipe, 32), weights(second, recipe, 64)
    rows = old.pop(POSITIONS)
    table = new.pop(POSITIONS)
    assert table.shape[0] == 64
    assert torch.equal(table[:32], rows)
    assert 0.01 < float(table[32:].std()) < 0.03, "further rows are new"
    for name, weight in old.items():
        assert torch.equal(new[name], weight), f"{name} is not that of the first phase"
    found = checkpoint.latest(second / "checkpoints")
    assert found is not None
    facts = checkpoint.read_progress(found)
    assert facts["step"] == 2
    lines = journal(second, "step")
    assert [line["learning_rate"] for line in lines] == [1e-30, 1e-30], "its own schedule, from its begin"


def weights(run: Path, recipe: Path, length: int) -> dict[str, Tensor]:
    """Of the newest checkpoint."""
    settings = read_config(recipe)
    data = dataclasses.replace(settings.data, capacity=length, max_length=length)
    cube = Cube.single()
    model = BertForPreTraining(settings.model.config(data), cube)
    found = checkpoint.latest(run / "checkpoints")
    assert found is not None
    checkpoint.load(found, model, None, cube)
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model.hidden", "64"], "the checkpoint's model has hidden = 32, the recipe's 64"),
        (["--data.max-length", "16"], "a table can only grow"),
    ],
)
def test_a_start_that_does_not_fit_is_refused(
    recipe: Path, tmp_path: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = tmp_path / "first"
    assert pretrain.main(arguments(recipe, first, "--run.steps", "1", "--run.evaluate-every", "0")) == 0
    assert pretrain.main(arguments(recipe, tmp_path / "second", *more, "--start-from", str(first))) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "second").exists()
