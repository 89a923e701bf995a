"""ModernBERT's three phases in small, begun with one another; each is killed, goes on on another cube, and learns what
it learns on a third one without."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tensor3d import checkpoint
from tensor3d.checkpoint.manager import Checkpoints
from tests.ranks import RankError, run_fresh_ranks, run_ranks
from tests.tools.runs import journal, on_rank, write_text
from tools.corpus.tokenizers.model_dir import tokenizer_of
from tools.training.config import read_config

ROOT = Path(__file__).parents[2]
KILLED_IN = 3  # the save: one before it is whole, the other may not be


def recipe_of(phase: int) -> Path:
    return ROOT / "launch" / "recipes" / f"modernbert-tiny-phase{phase}.toml"


def killed_on_rank(*arguments: Any) -> None:
    """`on_rank`, until its process is killed when it would save for the third time."""
    save, saves = Checkpoints.save, 0

    def until_killed(self: Checkpoints, *args: Any, **options: Any) -> Any:
        nonlocal saves
        saves += 1
        if saves == KILLED_IN:
            os.kill(os.getpid(), signal.SIGKILL)
        return save(self, *args, **options)

    Checkpoints.save = until_killed  # type: ignore[method-assign]
    on_rank(*arguments)


@pytest.mark.slow
def test_three_phases_and_a_kill_in_each(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt", documents=200)
    corpus, runs = tmp_path / "corpus", [tmp_path / str(phase) for phase in (1, 2, 3)]
    small = ["--data.source", str(tmp_path / "text.txt"), "--data.vocab-size", "67", "--model.hidden", "64"]
    small += ["--model.heads", "2", "--precision.compute", "fp32", "--run.evaluate-every", "0"]
    small += ["--model.attention-out-dropout", "0"]  # each rank draws its own, and cubes are compared
    small += ["--run.checkpoint-every", "1"]

    def phase(number: int, cubes: tuple[str, str, str], *more: str) -> list[dict[str, Any]]:
        """Killed on the first cube, resumed on the second one; the steps of a run on the third one without a kill."""
        recipe, run, whole = recipe_of(number), runs[number - 1], tmp_path / f"whole {number}"
        begun = ["--start-from", str(runs[number - 2])] if number > 1 else []
        words = [[*small, *more, "--cube", cube] for cube in cubes]
        with pytest.raises(RankError):  # of the rank that is seen first: killed, or left alone
            run_fresh_ranks(2, killed_on_rank, recipe, run, [*words[0], *begun], corpus)
        found = checkpoint.latest(run / "checkpoints")
        assert found is not None
        assert 1 <= checkpoint.read_progress(found)["step"] < KILLED_IN
        assert run_ranks(2, on_rank, recipe, run, [*words[1], "--resume", str(run)], corpus) == [0, 0]
        assert run_ranks(2, on_rank, recipe, whole, [*words[2], *begun], corpus) == [0, 0]
        steps = journal(whole, "step")
        for what, tolerance in (("loss", 1e-3), ("learning_rate", 1e-9)):
            by_step = {step["step"]: step[what] for step in journal(run, "step")}  # what was done twice comes twice
            assert by_step.keys() == {step["step"] for step in steps}
            assert list(by_step.values()) == pytest.approx([step[what] for step in steps], rel=tolerance)
        return steps

    first = phase(1, ("1x2x1", "1x1x2", "2x1x1"), "--run.steps", "8", "--batch.ramp-steps", "4")
    assert [step["learning_rate"] for step in first] == [read_config(recipe_of(1)).optimizer.lr] * 8
    # Of 24 packs, in three sizes: a step of fewer has fewer tokens, whatever its time.
    tokens = [step["tokens_per_second"] * step["seconds"] for step in first]
    shares = [each / max(tokens) for each in tokens]
    assert shares[:2] == pytest.approx([1 / 3] * 2, abs=0.1)
    assert shares[2:4] == pytest.approx([2 / 3] * 2, abs=0.1)
    assert shares[4:] == pytest.approx([1.0] * 4, abs=0.1)

    second = phase(2, ("2x1x1", "1x1x2", "1x2x1"), "--run.steps", "5")
    assert second[0]["loss"] < first[0]["loss"] - 0.3, "it goes on with what phase 1 has learnt"

    third = phase(3, ("1x1x2", "2x1x1", "1x2x1"), "--run.steps", "4")
    peak, floor = read_config(recipe_of(3)).optimizer.lr, read_config(recipe_of(3)).optimizer.floor
    wanted = [peak * (floor + (1 - floor) * (1 - (done / 4) ** 0.5)) for done in range(4)]
    assert [step["learning_rate"] for step in third] == pytest.approx(wanted)
    told = json.loads((runs[2] / "model.json").read_text())["config"]
    assert (told["rotary_base"], told["local_rotary_base"], told["positions"]) == (160_000.0, 10_000.0, 256)
    assert tokenizer_of(runs[2]).fingerprint == tokenizer_of(runs[0]).fingerprint
