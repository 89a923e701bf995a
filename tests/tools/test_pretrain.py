"""The main job, small: it trains, resumes exactly, refuses what is wrong, and leaves nothing half written."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from models.bert import BertForPreTraining
from tensor3d import Cube
from tensor3d.checkpoint import read_progress
from tests.ranks import run_ranks
from tests.tools.runs import arguments, losses, on_rank
from tools import pretrain
from tools.corpus.quick.corpus_info import CorpusInfo
from tools.training.config import OptimizerConfig, read_config
from tools.training.factory import learning_rate, make_optimizer
from tools.training.metrics import StepMetrics, summary
from tools.training.run_plan import RunPlan, latest_checkpoint


@pytest.fixture(scope="module")
def finished(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps on one process, with dropout."""
    run = tmp_path_factory.mktemp("run") / "whole"
    assert pretrain.main(arguments(recipe, run)) == 0
    return run


def test_a_run_leaves_logs_a_checkpoint_and_its_recipe(finished: Path) -> None:
    events = EventAccumulator(str(finished / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {
        "loss/total",
        "loss/masked_lm",
        "loss/next_sentence",
        "accuracy/masked_lm",
        "optimizer/learning_rate",
        "optimizer/gradient_norm",
        "speed/tokens_per_second",
        "data/fill",
        "data/masked_share",
        "traffic/bytes_received",
        "evaluation/masked_lm_loss",
    } <= tags
    assert [event.step for event in events.Scalars("loss/total")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Scalars("evaluation/loss")] == [3, 6]
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]
    facts = json.loads((finished / "run.json").read_text())
    assert facts["recipe"]["run"]["steps"] == 6
    assert facts["cube"] == "1x1x1"


def test_a_second_run_does_not_write_into_the_first(
    recipe: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(finished.rglob("*"))
    assert pretrain.main(arguments(recipe, finished)) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert sorted(finished.rglob("*")) == before


def resumed(finished: Path, tmp_path: Path, recipe: Path, cube: str, ranks: int) -> dict[int, float]:
    """Steps 4 to 6 again, from a copy of the run with its first checkpoint alone."""
    run = tmp_path / "resumed"
    shutil.copytree(finished / "checkpoints" / "step-00000003", run / "checkpoints" / "step-00000003")
    more = ["--cube", cube, "--resume", str(run / "checkpoints")]
    if ranks == 1:
        assert pretrain.main(arguments(recipe, run, *more)) == 0
    else:
        assert run_ranks(ranks, on_rank, recipe, run, more) == [0] * ranks
    assert (run / "checkpoints" / "step-00000006").is_dir()
    return losses(run)


def test_resume_on_the_same_cube_is_exact(finished: Path, recipe: Path, tmp_path: Path) -> None:
    """With dropout: the random streams are restored too."""
    whole = losses(finished)
    assert resumed(finished, tmp_path, recipe, "1x1x1", 1) == {step: whole[step] for step in (4, 5, 6)}
    progress = read_progress(tmp_path / "resumed/checkpoints/step-00000006")
    assert progress["losses"] == pytest.approx(list(whole.values())), "against which a spike is seen"


def test_checkpoints_hold_the_histories_of_delayed_scales(recipe: Path, tmp_path: Path) -> None:
    delayed = ["--precision.compute", "bf16", "--precision.fp8", "delayed", "--precision.fp8-history", "3"]
    short = ["--run.steps", "1", "--run.evaluate-every", "0", "--model.dropout", "0"]
    assert pretrain.main(arguments(recipe, tmp_path / "run", *delayed, *short)) == 0
    stored = json.loads((latest_checkpoint(tmp_path / "run") / "tensors.json").read_text())
    assert "fp8.bert.layers.0.mlp.up.weight" in json.dumps(stored)


@pytest.mark.slow
def test_resume_is_exact_on_2x2x2(recipe: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assert run_ranks(8, on_rank, recipe, whole, ["--cube", "2x2x2"]) == [0] * 8
    again = resumed(whole, tmp_path, recipe, "2x2x2", 8)
    assert again == {step: losses(whole)[step] for step in (4, 5, 6)}


@pytest.mark.slow
def test_a_checkpoint_is_resumed_on_another_cube(recipe: Path, tmp_path: Path) -> None:
    quiet = ["--model.dropout", "0", "--model.attention-dropout", "0"]
    whole = tmp_path / "whole"
    assert run_ranks(8, on_rank, recipe, whole, ["--cube", "2x2x2", *quiet]) == [0] * 8
    wanted = losses(whole)
    boxes = [("1x1x1", 1, 1), ("1x4x1", 1, 4), ("2x1x2", 2, 8)]
    for number, (cube, data, ranks) in enumerate(boxes):
        run = tmp_path / str(number)
        shutil.copytree(whole / "checkpoints" / "step-00000003", run / "checkpoints" / "step-00000003")
        more = [*quiet, "--cube", cube, "--data-parallel", str(data), "--resume", str(run / "checkpoints")]
        more += ["--optimizer.shard-over-data"] * (data > 1)
        if ranks == 1:
            assert pretrain.main(arguments(recipe, run, *more)) == 0
        else:
            assert run_ranks(ranks, on_rank, recipe, run, more) == [0] * ranks
        for step, value in losses(run).items():
            assert value == pytest.approx(wanted[step], rel=1e-5)


def test_accumulation_gives_the_same_losses(recipe: Path, tmp_path: Path) -> None:
    quiet = ["--model.dropout", "0", "--model.attention-dropout", "0"]
    assert pretrain.main(arguments(recipe, tmp_path / "a", *quiet)) == 0
    assert pretrain.main(arguments(recipe, tmp_path / "b", *quiet, "--batch.packs-per-rank", "2")) == 0
    first, second = losses(tmp_path / "a"), losses(tmp_path / "b")
    for step, value in first.items():
        assert second[step] == pytest.approx(value, rel=1e-5)


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--cube", "2x2"], "a cube is written XxYxZ"),
        (["--dry-run", "--prepare-only"], "--dry-run stops before the corpus that --prepare-only prepares"),
        (["--cube", "1x2x1"], "2 processes are needed, and WORLD_SIZE is not set"),
        (["--cube", "1x3x1"], "heads must divide by y=3. Got 4."),
        (["--cube", "1x1x3"], "hidden must divide by z=3. Got 32."),
        (["--cube", "3x1x1"], "a global batch of 8 packs does not divide by data=1 * x=3 * z=1 = 3"),
        (["--data-parallel", "0"], "cube axis data must be a whole number of at least 1. Got 0."),
        (["--batch.packs-per-rank", "3"], "a global batch of 8 packs does not divide"),
        (["--run.steps", "0"], "run.steps must be at least 1. Got 0."),
        (["--data.max-length", "64"], "data.max_length=64 is longer than a pack of data.capacity=32"),
        (["--data.source", "/nowhere/text"], "/nowhere/text does not exist"),
        (["--data.vocab-size", "9000"], "the corpus is too small for a vocabulary of 9000 pieces"),
        (["--resume", "/nowhere"], "--output and --resume exclude each other"),
        (["--optimizer.beta2", "1.5"], "optimizer.beta2 must be at least 0 and below 1. Got 1.5."),
        (["--optimizer.lr", "nan"], "optimizer.lr must be above 0 and finite. Got nan."),
    ],
)
def test_bad_calls(
    recipe: Path, tmp_path: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = ["--corpus", str(tmp_path / "corpus")]
    assert pretrain.main([str(recipe), "--output", str(tmp_path / "run"), *corpus, *more]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize("more", [["--data.capcity", "5"], ["--run.steps", "many"], ["--model.preset", "huge"]])
def test_bad_options_are_refused(recipe: Path, tmp_path: Path, more: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        pretrain.main(arguments(recipe, tmp_path / "run", *more))
    assert stop.value.code == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["recipe.yaml", "missing.toml"])
def test_a_recipe_that_is_none(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain.main([str(tmp_path / name)]) == 2
    assert name in capsys.readouterr().err


def test_an_empty_corpus(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    source = ["--data.source", str(tmp_path / "empty.txt"), "--corpus", str(tmp_path / "corpus")]
    assert pretrain.main([str(recipe), *source]) == 2
    assert "the corpus is empty" in capsys.readouterr().err
    assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize("more", [[], ["--prepare-only", "--cube", "1x2x1"]])
def test_an_output_that_cannot_be_is_told_before_anything_is_made(
    recipe: Path, tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    corpus = ["--corpus", str(tmp_path / "corpus")]
    for output in (file, file / "run"):
        assert pretrain.main([str(recipe), "--output", str(output), *corpus, *more]) == 2
        assert f"{file} is a file" in capsys.readouterr().err
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "run.json").write_text("{}")
    assert pretrain.main([str(recipe), "--output", str(taken), *corpus, *more]) == 2
    assert f"{taken} holds a run already" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken"]


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/full/run.json")


def without_space(recipe: Path, output: Path, more: list[str]) -> int:
    pretrain.write_facts = no_space  # type: ignore[assignment]  # in this process alone
    return on_rank(recipe, output, more)


def test_what_the_system_refuses_is_one_line_and_ends_every_rank(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks(2, without_space, recipe, tmp_path / "run", ["--cube", "1x2x1"]) == [2, 2]
    monkeypatch.setattr(pretrain, "write_facts", no_space)
    assert pretrain.main(arguments(recipe, tmp_path / "run")) == 2
    assert capsys.readouterr().err.endswith(
        "tools.pretrain: /full/run.json cannot be read or written: No space left on device.\n"
    )


def test_what_the_trainer_refuses_leaves_no_folder(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with a run.json in it would be taken for a run, and refused to the next attempt."""

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("not on this cube")

    monkeypatch.setattr(pretrain, "PretrainTrainer", refuse)
    assert pretrain.main(arguments(recipe, tmp_path / "run")) == 2
    assert "not on this cube" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_corpus_that_another_run_replaces(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare = pretrain.prepare_corpus

    def replaced(plan: RunPlan, *, shown: bool) -> CorpusInfo:
        return dataclasses.replace(prepare(plan, shown=shown), fingerprint="before")

    monkeypatch.setattr(pretrain, "prepare_corpus", replaced)
    assert pretrain.main(arguments(recipe, tmp_path / "run")) == 2
    assert "was replaced while this run began" in capsys.readouterr().err


def interrupted(process: subprocess.Popen[bytes]) -> int:
    """The status after Ctrl-C. Once in some thirty times Python is in a place that swallows exceptions (a finaliser, a
    callback) and the first Ctrl-C is lost; then one presses it again.
    """
    for _ in range(4):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(20)
    raise AssertionError("the run does not hear Ctrl-C")


@pytest.mark.slow
def test_ctrl_c_is_one_line_and_a_run_can_be_resumed_by_its_folder(recipe: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    more = ["--run.steps", "100000", "--run.evaluate-every", "0", "--run.checkpoint-every", "5"]
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "tools.pretrain", *arguments(recipe, run, *more)],
            stdout=stream,
            stderr=stream,
            # What is started in the background of a script ignores Ctrl-C, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            end = time.monotonic() + 60
            while not (run / "checkpoints" / "step-00000005").is_dir():
                assert time.monotonic() < end, log.read_text()
                assert process.poll() is None, log.read_text()
                time.sleep(0.02)
            assert interrupted(process) == 130
        finally:
            process.kill()
            process.wait()
    assert "tools.pretrain: stopped." in log.read_text()
    assert "Traceback" not in log.read_text()
    assert {1, 2, 3, 4, 5} <= set(losses(run))
    assert latest_checkpoint(run) == latest_checkpoint(run / "checkpoints")


def test_a_folder_that_is_no_checkpoint(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain.main(arguments(recipe, tmp_path / "run", "--resume", str(tmp_path))) == 2
    assert f"{tmp_path} is not a checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model.hidden", "64"], "model.hidden = 32, the recipe says 64"),
        (["--run.seed", "1"], "trained on another corpus or tokenizer"),
        (["--batch.global-batch", "4"], "batch.global_batch = 8, the recipe says 4"),
        (["--run.steps", "3"], "has done 3 steps, and the recipe ends at 3"),
    ],
)
def test_a_checkpoint_of_another_run(
    finished: Path, recipe: Path, tmp_path: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished / "checkpoints" / "step-00000003"
    before = sorted(finished.rglob("*"))
    corpus = tmp_path / "corpus"
    shutil.copytree(recipe.parent / "corpus", corpus)  # another seed would prepare it anew
    made = (corpus / "corpus.json").read_bytes()
    call = [str(recipe), "--corpus", str(corpus), "--resume", str(folder), *more]
    for alone in ([], ["--prepare-only", "--cube", "1x2x1"]):  # also before any other process is started
        assert pretrain.main([*call, *alone]) == 2
        assert message in capsys.readouterr().err
    assert sorted(finished.rglob("*")) == before
    assert (corpus / "corpus.json").read_bytes() == made, "other runs go on with it"


def refused_everywhere(recipe: Path, output: Path, more: list[str]) -> int:
    return on_rank(recipe, output, more)


def test_every_rank_refuses_and_none_hangs(recipe: Path, tmp_path: Path) -> None:
    """Only rank 0 reads the text; the others must hear of what it found."""
    more = ["--cube", "1x2x2", "--data.source", "/nowhere/text", "--corpus", str(tmp_path / "corpus")]
    assert run_ranks(4, refused_everywhere, recipe, tmp_path / "run", more) == [2] * 4
    wrong_world = ["--cube", "1x2x1"]
    assert run_ranks(4, refused_everywhere, recipe, tmp_path / "run", wrong_world) == [2] * 4
    assert not (tmp_path / "run").exists()


# --- parts ---------------------------------------------------------------------------------------------------------


def test_learning_rate_rises_and_falls_linearly() -> None:
    rates = learning_rate(OptimizerConfig(lr=1.0, warmup=0.2), steps=10)
    assert [rates.at(step) for step in range(10)] == pytest.approx(
        [0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    )


def test_the_summary_says_on_which_side_of_the_entropy_the_loss_is() -> None:
    step = StepMetrics(
        **{field.name: 1 for field in dataclasses.fields(StepMetrics)}  # type: ignore[arg-type]
    )
    assert "1.250 nats; the loss is 0.250 below it" in "\n".join(summary([step], [], 1.25))
    assert "0.500 nats; the loss is 0.500 above it" in "\n".join(summary([step], [], 0.5))


def test_no_decay_for_vectors(recipe: Path) -> None:
    config = read_config(recipe).model.config(read_config(recipe).data)
    cube = Cube.single()
    model = BertForPreTraining(config, cube)
    decayed, spared = make_optimizer(model, OptimizerConfig(), cube, (0.9, 0.99)).param_groups
    assert decayed["betas"] == (0.9, 0.99)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in spared["params"]} == {1}
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.01, 0.0)
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters()))
