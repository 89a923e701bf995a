"""ModernBERT's three phases in small, each on another cube and begun with the one before; the second one is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tensor3d import checkpoint
from tests.ranks import run_ranks
from tests.tools.runs import on_rank, write_text
from tools.corpus.tokenizers.model_dir import tokenizer_of
from tools.training.config import read_config

ROOT = Path(__file__).parents[2]


def recipe_of(phase: int) -> Path:
    return ROOT / "launch" / "recipes" / f"modernbert-tiny-phase{phase}.toml"


def logged(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def killed_after_a_checkpoint(command: list[str], run: Path) -> int:
    """Starts a run, kills it when it has saved, and returns the last step that it saved."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.pretrain", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 60
        while (found := checkpoint.latest(run / "checkpoints")) is None:
            assert process.poll() is None, "it ended by itself"
            assert time.monotonic() < until, "it saves nothing"
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    found = checkpoint.latest(run / "checkpoints")
    assert found is not None
    return int(checkpoint.read_progress(found)["step"])


@pytest.mark.slow
def test_three_phases_and_a_kill(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt", documents=200)
    corpus, runs = tmp_path / "corpus", [tmp_path / str(phase) for phase in (1, 2, 3)]
    small = ["--data.source", str(tmp_path / "text.txt"), "--data.vocab-size", "67", "--model.hidden", "64"]
    small += ["--model.heads", "2", "--precision.compute", "fp32", "--run.evaluate-every", "0"]

    def phase(number: int, cube: str, output: Path, *more: str) -> None:
        words = [*small, "--cube", cube, "--run.checkpoint-every", "4", *more]
        assert run_ranks(2, on_rank, recipe_of(number), output, words, corpus) == [0, 0]

    phase(1, "1x2x1", runs[0], "--run.steps", "8", "--batch.ramp-steps", "4")
    first = logged(runs[0])
    assert [step["learning_rate"] for step in first] == [read_config(recipe_of(1)).optimizer.lr] * 8
    # Of 24 packs, in three sizes: a step of fewer has fewer tokens, whatever its time.
    tokens = [step["tokens_per_second"] * step["seconds"] for step in first]
    shares = [each / max(tokens) for each in tokens]
    assert shares[:2] == pytest.approx([1 / 3] * 2, abs=0.1)
    assert shares[2:4] == pytest.approx([2 / 3] * 2, abs=0.1)
    assert shares[4:] == pytest.approx([1.0] * 4, abs=0.1)

    begun = ["--start-from", str(runs[0])]
    where = ["--corpus", str(corpus), "--output", str(runs[1]), "--cube", "1x1x1"]
    saved = killed_after_a_checkpoint(
        [str(recipe_of(2)), *small, *where, *begun, "--run.steps", "1000", "--run.checkpoint-every", "1"], runs[1]
    )
    steps = str(saved + 4)
    phase(2, "1x1x2", runs[1], "--resume", str(runs[1]), "--run.steps", steps)
    phase(2, "2x1x1", tmp_path / "whole", *begun, "--run.steps", steps)
    last = {step["step"]: step["loss"] for step in logged(runs[1])}  # what was done twice comes twice
    whole = {step["step"]: step["loss"] for step in logged(tmp_path / "whole")}
    assert last.keys() == whole.keys()
    assert list(last.values()) == pytest.approx(list(whole.values()), rel=1e-3)
    assert whole[1] < first[0]["loss"] - 0.3, "it goes on with what phase 1 has learnt"

    phase(3, "2x1x1", runs[2], "--start-from", str(runs[1]), "--run.steps", "4")
    peak = read_config(recipe_of(3)).optimizer.lr
    wanted = [peak * (1 - (done / 4) ** 0.5) for done in range(4)]
    assert [step["learning_rate"] for step in logged(runs[2])] == pytest.approx(wanted)
    told = json.loads((runs[2] / "model.json").read_text())["config"]
    assert (told["rotary_base"], told["local_rotary_base"], told["positions"]) == (160_000.0, 10_000.0, 256)
    assert tokenizer_of(runs[2]).fingerprint == tokenizer_of(runs[0]).fingerprint
