"""Two phases of the shipped tiny recipes: the second begins with what the first has learned, and goes its own way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.bert import BertForPreTraining
from models.bert.cost_model.param_shapes import parameters
from tensor3d import Cube, checkpoint
from tensor3d.optim import Lamb, decay_groups
from tests.ranks import run_ranks
from tests.tools.runs import journal, newest, on_rank, resolved
from tools import pretrain
from tools.corpus.training_corpus import open_corpus
from tools.training.config import TrainConfig, read_config
from tools.training.resume import check_start

RECIPES = Path(__file__).parents[3] / "launch" / "recipes"
FIRST, SECOND = RECIPES / "tiny-phase1.toml", RECIPES / "tiny-phase2.toml"
POSITIONS = "bert.embeddings.positions.weight"
State = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For steps as small as these, threads cost more than they bring where others use the cores too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a corpus will be prepared; runs lie beside it."""
    return tmp_path_factory.mktemp("phases") / "corpus"


@pytest.fixture(scope="module")
def short(recipe: Path) -> list[str]:
    """Options that make of the shipped recipes some steps on a small text."""
    text = ["--data.source", str(recipe.parent / "text.txt"), "--data.vocab-size", "67"]
    batch = ["--batch.global-batch", "8", "--batch.multiple-of", "2"]
    return [*text, *batch, "--run.steps", "8", "--run.evaluate-every-samples", "0"]


@pytest.fixture(scope="module")
def first(corpus: Path, short: list[str]) -> Path:
    """Some steps of phase 1 on one process."""
    run = corpus.parent / "first"
    assert pretrain.main(command(FIRST, run, corpus, *short)) == 0
    return run


def command(recipe: Path, output: Path, corpus: Path, *more: str) -> list[str]:
    return [str(recipe), "--output", str(output), "--corpus", str(corpus), *more]


def state_of(recipe: TrainConfig, folder: Path | None) -> State:
    """Weights and optimiser state by parameter: of a checkpoint, or as they begin."""
    cube = Cube.single()
    cube.manual_seed(recipe.run.seed)
    model = BertForPreTraining(recipe.model.config(recipe.data), cube)
    optimizer = Lamb(decay_groups(model, 0.01), cube, lr=1.0)
    if folder is not None:
        checkpoint.load(folder, model, optimizer, cube)
    return {name: {"weight": p.detach(), **optimizer.state[p]} for name, p in model.named_parameters()}


def test_phase_2_begins_with_weights_and_moments_of_phase_1(first: Path, corpus: Path, short: list[str]) -> None:
    """After one step of no size, what phase 1 had is there to the bit, and further positions are as they begin."""
    run = corpus.parent / "still"
    still = ("--run.steps", "1", "--optimizer.lr", "1e-30", "--start-from", str(first))
    assert pretrain.main(command(SECOND, run, corpus, *short, *still)) == 0

    one, long = resolved(first), resolved(run)
    before, after, fresh = state_of(one, newest(first)), state_of(long, newest(run)), state_of(long, None)
    assert set(after) == {planned.name for planned in parameters(long.model.config(long.data))}
    for name, state in after.items():
        old, rows = before[name], before[name]["weight"].shape[0]
        torch.testing.assert_close(state["weight"][:rows], old["weight"], rtol=0, atol=0)
        torch.testing.assert_close(state["weight"][rows:], fresh[name]["weight"][rows:], rtol=0, atol=0)
        assert state["step"] == 9, "eight steps of phase 1 and one"
        # v = 0.999 v + 0.001 g²: not less than what is left of phase 1's
        assert bool((state["exp_avg_sq"][:rows] >= 0.998 * old["exp_avg_sq"]).all()), name
    assert after[POSITIONS]["weight"].shape[0] == 256
    assert before[POSITIONS]["weight"].shape[0] == 128
    assert float(before[POSITIONS]["exp_avg_sq"].max()) > 0


def test_phase_2_has_a_schedule_and_data_of_its_own(first: Path, corpus: Path, short: list[str]) -> None:
    run = corpus.parent / "second"
    more = ("--run.steps", "5", "--start-from", str(first))
    assert pretrain.main(command(SECOND, run, corpus, *short, *more)) == 0
    steps, peak = journal(run, "step"), read_config(SECOND).optimizer.lr
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    # One step of warm-up to the peak, then the root of what is left.
    rates = [step["learning_rate"] for step in steps]
    assert rates == pytest.approx([peak * share**0.5 for share in (1.0, 0.8, 0.6, 0.4, 0.2)])
    begin = journal(first, "step")[0]["masked_lm_loss"]
    assert steps[0]["masked_lm_loss"] < begin - 0.2, "it does not begin from nothing"
    progress = checkpoint.read_progress(newest(run))
    assert progress["step"] == 5
    assert progress["recipe"]["data"]["max_length"] == 256


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("model", {"hidden": 64}, "hidden = 128.*recipe's 64"),
        ("model", {"tied": False}, r"has tied = True, the recipe's False"),
        ("model", {"norm": "pre"}, r"has norm = 'post', the recipe's 'pre'"),
        ("data", {"vocab_size": 1024}, r"has vocab_size = 67, the recipe's 1024"),
    ],
)
def test_what_cannot_follow_is_refused(
    first: Path, corpus: Path, section: str, change: dict[str, Any], message: str
) -> None:
    recipe = resolved(first)
    other = replace(recipe, **{section: replace(getattr(recipe, section), **change)})
    with pytest.raises(ValueError, match=message):
        check_start(checkpoint.read_progress(newest(first)), other, open_corpus(corpus))


def test_a_position_table_cannot_shrink(
    first: Path, corpus: Path, short: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = corpus.parent / "shrunk"
    shrunk = ("--data.max-length", "64", "--model.positions", "64", "--start-from", str(first))
    assert pretrain.main(command(SECOND, run, corpus, *short, *shrunk)) == 2
    assert "position table has 128 rows, the recipe's 64: a table can only grow" in capsys.readouterr().err
    assert not (run / "run.json").exists()


def test_without_a_corpus_a_large_recipe_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert pretrain.main([str(RECIPES / "bert-large-phase1.toml"), "--prepare-only"]) == 2
    assert 'data/wikipedia does not exist. The source is "embedded", a text file or' in capsys.readouterr().err


def _phase(recipe: Path, output: Path, corpus: Path, more: tuple[str, ...]) -> int:
    return on_rank(recipe, output, list(more), corpus=corpus)


@pytest.mark.long(
    reason="60 steps of eight ranks; the quickstart trains so, on a cube, and the tests above have each phase's own"
)
def test_both_phases_whole_on_a_cube(tmp_path: Path) -> None:
    """The recipes as they are shipped, phase 1 on 2x2x2 and phase 2 on 1x2x2."""
    corpus, one, two = (tmp_path / name for name in ("corpus", "first", "second"))
    assert run_ranks(8, _phase, FIRST, one, corpus, ("--cube", "2x2x2"), timeout=300) == [0] * 8
    more = ("--cube", "1x2x2", "--start-from", str(one))
    assert run_ranks(4, _phase, SECOND, two, corpus, more, timeout=300) == [0] * 4
    losses = {run: [step["masked_lm_loss"] for step in journal(run, "step")] for run in (one, two)}
    assert (len(losses[one]), len(losses[two])) == (40, 20)
    assert losses[one][-1] < losses[one][0] - 0.8
    assert losses[two][0] < losses[one][0] - 0.8
    assert min(losses[two][-5:]) < losses[one][-1] + 0.1, "phase 2 goes on where phase 1 ended"
