"""The GPT of the lesson, whole, by its command: it learns the embedded corpus, and tells the same on every cube."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from pathlib import Path

import pytest

from tests.programs import ran
from tests.tools.runs import journal

ROOT = Path(__file__).parents[2]
TORCHRUN = ["launch/torchrun.py", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=8"]
GREEDY = ["--prompt", "Return the", "--tokens", "40", "--temperature", "0"]

pytestmark = pytest.mark.long(reason="200 steps on eight ranks; tests/tools/gpt/test_main.py has short runs on cubes")


def python(*arguments: str | Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = ran([sys.executable, *map(str, arguments)], cwd=ROOT, env=environment, timeout=1800)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return finished.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 steps on 2x2x2."""
    folder = tmp_path_factory.mktemp("gpt")
    places = ["--output", folder / "run", "--corpus", folder / "corpus"]
    python(*TORCHRUN, "-m", "tools.gpt", "train", *places, "--cube", "2x2x2", "--steps", "200")
    return folder / "run"


def test_the_loss_falls_below_the_unigram_entropy(run: Path) -> None:
    entropy = json.loads((run / "run.json").read_text())["unigram_entropy"]
    losses = [record["loss"] for record in journal(run, "step")]
    (held_out,) = [record["loss"] for record in journal(run, "evaluation")]
    assert len(losses) == 200
    assert losses[0] == pytest.approx(math.log(2048), abs=0.3)
    assert statistics.fmean(losses[-20:]) <= entropy - 0.5
    assert held_out <= entropy - 0.3


def test_the_text_is_the_same_on_one_device_and_on_the_cube(run: Path) -> None:
    alone = python("-m", "tools.gpt", "generate", run, *GREEDY)
    together = python(*TORCHRUN, "-m", "tools.gpt", "generate", run, *GREEDY, "--cube", "2x2x2")
    assert alone == together
    assert alone.startswith("Return the")
    assert len(alone.split()) >= 10


def test_drawn_text_has_words_and_is_the_same_on_every_cube(run: Path) -> None:
    drawn = ["--prompt", "The", "--tokens", "30", "--seed", "3"]
    alone = python("-m", "tools.gpt", "generate", run, *drawn)
    assert alone == python(*TORCHRUN, "-m", "tools.gpt", "generate", run, *drawn, "--cube", "2x2x2")
    assert len(set(alone.split())) >= 6
