"""The curves that `tools.plot` draws: read off the logs of runs, smoothed, and in the picture."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread
from torch.utils.tensorboard import SummaryWriter

from tests.tools.refused import refused
from tools import plot, pretrain
from tools.common.log import start_logging
from tools.common.plotting import running_mean, window_of
from tools.plot import MASKED_LM, axis_label, draw, labels, main, read_run, title
from tools.training.metrics import JOURNAL
from tools.training.metrics.records import STEP_TAGS

VALUES = {MASKED_LM: 6.0, "loss/total": 6.5, "accuracy/masked_lm": 0.1}


def write_run(folder: Path, steps: range, cube: str = "1x1x1", layers: int | None = None) -> Path:
    """Logs of `steps`; the masked-LM loss of step s is 6 - s / 100, held out every tenth."""
    folder.mkdir(exist_ok=True)
    model = {"preset": "tiny", "layers": layers, "hidden": None, "heads": None}
    facts = {
        "recipe": {"model": model, "data": {"vocab_size": 2048}},
        "cube": cube,
        "data_parallel": 1,
        "unigram_entropy": 5.5,
    }
    (folder / "run.json").write_text(json.dumps(facts))
    with SummaryWriter(str(folder / "tensorboard")) as writer:
        for step in steps:
            for tag, value in VALUES.items():
                writer.add_scalar(tag, value - step / 100, step)
            if step % 10 == 0:
                writer.add_scalar("evaluation/masked_lm_loss", 7.0 - step / 100, step)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("plot") / "first", range(1, 61), "2x2x2")


def axes_of(runs: list[Path], tag: str = MASKED_LM) -> Axes:
    (axes,) = draw([read_run(folder, tag) for folder in runs], tag).axes
    return axes


@pytest.mark.slow
def test_a_real_run_is_drawn(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "real"
    assert pretrain.main([str(recipe), "--output", str(folder), "--corpus", str(recipe.parent / "corpus")]) == 0
    capsys.readouterr()
    assert main([str(folder)]) == 0
    assert "real on 1x1x1: 6 points, last " in capsys.readouterr().out
    assert sorted(path.name for path in folder.glob("loss*")) == ["loss.png"]
    picture = imread(folder / "loss.png")
    assert picture.shape == (810, 1350, 4)
    assert len(np.unique(picture.reshape(-1, 4), axis=0)) > 50
    curve = read_run(folder, MASKED_LM)
    assert curve.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert curve.held_out_steps.tolist() == [3, 6]
    assert curve.run.vocab_size == 67
    assert curve.run.model == "BERT, 1 layers, hidden 32, 4 heads"


def test_series_are_what_was_logged(run: Path) -> None:
    curve = read_run(run, MASKED_LM)
    assert curve.steps.tolist() == list(range(1, 61))
    assert curve.values == pytest.approx(6.0 - np.arange(1, 61) / 100, abs=1e-6)
    assert curve.held_out_steps.tolist() == [10, 20, 30, 40, 50, 60]
    assert curve.held_out_values == pytest.approx(7.0 - np.arange(10, 61, 10) / 100, abs=1e-6)
    assert (curve.run.name, curve.run.cube, curve.run.unigram_entropy) == ("first", "2x2x2", 5.5)
    assert len(read_run(run, "loss/total").held_out_steps) == 0  # nothing was evaluated under this tag


def test_a_resumed_run_counts_its_later_points(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "resumed", range(1, 9))
    with SummaryWriter(str(folder / "tensorboard"), filename_suffix=".later") as writer:
        for step in (7, 8, 9):
            writer.add_scalar(MASKED_LM, 1.0, step)
    curve = read_run(folder, MASKED_LM)
    assert curve.steps.tolist() == list(range(1, 10))
    assert curve.values[6:].tolist() == [1.0, 1.0, 1.0]
    assert curve.values[5] == pytest.approx(5.94)


def test_running_mean_by_hand() -> None:
    values = np.array([1.0, 2.0, 6.0, 3.0, 8.0])
    assert running_mean(values, 1).tolist() == values.tolist()
    assert running_mean(values, 3) == pytest.approx([1, 3, 11 / 3, 17 / 3, 8])
    assert running_mean(values, 5) == pytest.approx([1, 3, 4, 17 / 3, 8])
    assert running_mean(values[:1], 5).tolist() == [1.0]
    line = np.linspace(0.0, 9.0, 50)
    assert running_mean(line, 11) == pytest.approx(line), "a straight line stays where it is"
    assert [window_of(n) for n in (1, 20, 60, 300, 10_000)] == [1, 1, 5, 25, 101]


def test_picture_holds_points_mean_and_references(run: Path) -> None:
    axes = axes_of([run])
    thin, bold, held_out, entropy, guess = axes.get_lines()
    assert np.asarray(thin.get_ydata()) == pytest.approx(6.0 - np.arange(1, 61) / 100, abs=1e-6)
    assert np.asarray(bold.get_ydata())[30] == pytest.approx(5.69, abs=1e-6)
    assert bold.get_linewidth() > 2 * thin.get_linewidth()
    assert np.asarray(held_out.get_xdata()).tolist() == [10, 20, 30, 40, 50, 60]
    assert np.asarray(entropy.get_ydata()).tolist() == [5.5, 5.5]
    assert np.asarray(guess.get_ydata()).tolist() == [math.log(2048)] * 2
    assert entropy.get_linestyle() == guess.get_linestyle() == "--"
    assert axes.get_title(loc="left") == "BERT, 2 layers, hidden 128, 2 heads, on 2x2x2"
    assert axes.get_xlabel() == "step of the optimiser"
    assert axes.get_ylabel() == "masked-LM loss (nats per masked token)"
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "first on 2x2x2, mean of 5 points",
        "first on 2x2x2, held out",
        "unigram entropy, 5.50",
        "ln(vocabulary of 2,048), 7.62",
    ]


def test_runs_that_share_a_corpus_share_its_lines(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "second", range(1, 31), "1x1x1", layers=3)
    lines = axes_of([run, other]).get_lines()
    assert len(lines) == 2 * 3 + 2
    assert lines[1].get_color() != lines[4].get_color()
    assert lines[1].get_linestyle() != lines[4].get_linestyle()
    curves = [read_run(folder, MASKED_LM) for folder in (run, other)]
    assert labels(curves)[1] == "second on 1x1x1, BERT, 3 layers, hidden 128, 2 heads"
    assert title(curves) == "BERT, on 2x2x2, 1x1x1"


def test_another_tag_gets_a_picture_and_an_axis_of_its_own(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--tag", "accuracy/masked_lm"]) == 0
    assert imread(run / "accuracy-masked_lm.png").size
    assert not (run / "loss.png").exists()
    axes = axes_of([run], "accuracy/masked_lm")
    assert axes.get_ylabel() == "masked-LM accuracy (share of masked tokens)"
    assert len(axes.get_lines()) == 2  # no reference of the loss


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("", "name at least one run"),
        ("{folder}/none", "none is no run: it has no run.json"),
        ("{folder}/damaged", "run.json does not describe a run (it has no 'recipe')"),
        ("{folder}/empty", "empty has logged nothing yet"),
        ("{run} --tag loss/mlm", "no tag 'loss/mlm'. There are: accuracy/masked_lm, evaluation/masked_lm_loss, loss/"),
        ("{run} --output {folder}/none/a.png", "a file in a folder that exists. Got "),
        (f"{{run}} --output {{folder}}/{'a' * 250}", "File name too long"),  # where the picture is drafted
    ],
)
def test_bad_calls_are_refused_in_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], call: str, message: str
) -> None:
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text("{}")
    write_run(tmp_path / "empty", range(0))
    error = refused(capsys, main, *call.format(run=run, folder=tmp_path).split())
    assert error.startswith("tools.plot: ")
    assert message in error


def test_every_logged_number_has_an_axis_label() -> None:
    assert set(plot.AXIS_LABELS) == set(STEP_TAGS)
    assert axis_label("traffic/bytes_received/data+x+z") == "received in a step by rank 0 along data+x+z (bytes)"
    assert axis_label("memory/peak_bytes_most") == "memory/peak_bytes_most"


# metrics.jsonl


def write_journal(folder: Path, *lines: dict[str, object]) -> Path:
    """A run with a journal beside TensorBoard's files, which say something else."""
    write_run(folder, range(1, 4))
    (folder / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_journal_is_read_before_tensorboard(tmp_path: Path) -> None:
    folder = write_journal(
        tmp_path / "run",
        {"kind": "step", "step": 1, "masked_lm_loss": 0.1 + 0.2, "mfu": None, "bytes_received/y": 10},
        {"kind": "step", "step": 2, "masked_lm_loss": "NaN", "mfu": 0.5, "bytes_received/y": 11},
        {"kind": "event", "step": 2, "event": "spike"},
        {"kind": "step", "step": 3, "masked_lm_loss": 5.0, "mfu": 0.5, "bytes_received/y": 12},
        {"kind": "evaluation", "step": 3, "masked_lm_loss": 4.5},
        {"kind": "memory", "step": 3, "peak_bytes": [10, 30]},
    )
    with open(folder / JOURNAL, "a") as journal:
        journal.write('{"kind": "step", "step": 4, "masked')  # a run that writes right now
    curve = read_run(folder, MASKED_LM)
    assert curve.steps.tolist() == [1, 3], "a step without a finite loss is left out"
    assert curve.values.tolist() == [0.1 + 0.2, 5.0]
    assert (curve.held_out_steps.tolist(), curve.held_out_values.tolist()) == ([3], [4.5])
    assert read_run(folder, "speed/mfu").steps.tolist() == [2, 3]
    assert read_run(folder, "traffic/bytes_received/y").values.tolist() == [10, 11, 12]
    assert read_run(folder, "memory/peak_bytes_mean").values.tolist() == [20.0]
    with pytest.raises(ValueError, match="There are: evaluation/masked_lm_loss, loss/masked_lm, memory/"):
        read_run(folder, "loss/total")


def test_old_and_new_runs_are_drawn_in_one_picture(run: Path, tmp_path: Path) -> None:
    other = write_journal(tmp_path / "new", *({"kind": "step", "step": s, "masked_lm_loss": 3.0} for s in range(1, 61)))
    lines = axes_of([run, other]).get_lines()
    assert np.asarray(lines[0].get_ydata())[:2] == pytest.approx([5.99, 5.98])
    assert np.asarray(lines[3].get_ydata()).tolist() == [3.0] * 60


def test_a_number_that_never_was_finite_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_journal(tmp_path / "run", *({"kind": "step", "step": s, "masked_lm_loss": "NaN"} for s in (1, 2)))
    assert main([str(folder)]) == 2
    assert "has no finite number of 'loss/masked_lm': all 2 of it are NaN or infinite." in capsys.readouterr().err
    assert not list(folder.glob("*.png"))


def test_damaged_lines_are_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start_logging()
    odd: list[dict[str, object]] = [
        {"kind": "step", "step": 10**30, "masked_lm_loss": 1.0},
        {"kind": "step", "step": True, "masked_lm_loss": 1.0},
        {"kind": "step", "step": 2, "masked_lm_loss": "four"},
        {"kind": "step", "step": 3, "masked_lm_loss": [1.0]},
        {"kind": "step", "step": 4, "masked_lm_loss": 10**400},
        {"kind": "memory", "step": 4},
        {"kind": "memory", "step": 4, "peak_bytes": "10"},
    ]
    folder = write_journal(tmp_path / "run", {"kind": "step", "step": 1, "masked_lm_loss": 5.0}, *odd)
    assert read_run(folder, MASKED_LM).values.tolist() == [5.0]
    assert f"metrics.jsonl: left out, lines that are damaged: {len(odd)}" in capsys.readouterr().err


def test_an_empty_journal_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write_journal(tmp_path / "run"))]) == 2
    assert "has logged nothing yet (no points in " in capsys.readouterr().err
