"""The main job, whole, through its launcher, on three cubes: what the README says of it."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tensor3d import checkpoint

ROOT = Path(__file__).parents[2]
CUBES = ["2x2x2", "1x1x1", "1x2x1"]
Curves = dict[str, list[float]]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of the finished run on each cube."""
    folder = tmp_path_factory.mktemp("quickstart")
    for cube in CUBES:
        command = [ROOT / "launch" / "local.sh", "--cube", cube, ROOT / "launch" / "recipes" / "quickstart.toml"]
        places = ["--output", folder / cube, "--corpus", folder / "corpus"]
        finished = subprocess.run([*command, *places], capture_output=True, text=True, timeout=1500, check=False)
        assert finished.returncode == 0, finished.stderr[-4000:]
        for line in (
            "unigram entropy of the corpus",
            "checkpoint",
            "TensorBoard",
            "real tokens/s",
            "fill of the packs",
        ):
            assert line in finished.stdout
    return {cube: folder / cube for cube in CUBES}


@pytest.fixture(scope="module")
def curves(runs: dict[str, Path]) -> dict[str, Curves]:
    return {cube: read(run) for cube, run in runs.items()}


def read(run: Path) -> Curves:
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("cube", CUBES)
def test_the_loss_falls_below_the_unigram_entropy(cube: str, runs: dict[str, Path], curves: dict[str, Curves]) -> None:
    facts = json.loads((runs[cube] / "run.json").read_text())
    mlm = curves[cube]["loss/masked_lm"]
    assert mlm[0] == pytest.approx(math.log(facts["recipe"]["data"]["vocab_size"]), abs=0.15)
    assert statistics.fmean(mlm[-20:]) <= facts["unigram_entropy"] - 0.3
    assert min(curves[cube]["data/fill"]) > 0.9
    assert statistics.fmean(curves[cube]["data/fill"]) >= 0.98
    last = f"step-{facts['recipe']['run']['steps']:08d}"
    assert checkpoint.verify(runs[cube] / "checkpoints" / last) == []


@pytest.mark.parametrize("cube", CUBES[1:])
def test_the_loss_does_not_depend_on_the_cube(cube: str, curves: dict[str, Curves]) -> None:
    ours, wanted = curves[cube]["loss/total"], curves["2x2x2"]["loss/total"]
    differences = [abs(a - b) / abs(b) for a, b in zip(ours, wanted, strict=True)]
    assert max(differences[:20]) <= 1e-4
    assert max(differences[:50]) <= 1e-3
    assert statistics.fmean(ours[-20:]) == pytest.approx(statistics.fmean(wanted[-20:]), abs=0.02)
    assert curves[cube]["data/fill"] == curves["2x2x2"]["data/fill"]


def test_the_checkpoint_guesses_hidden_words(runs: dict[str, Path]) -> None:
    """What the README shows: five pieces with their probabilities; a model trained on any cube guesses on any."""
    text = "Return the [MASK] of the object."
    guesses = {}
    for cube in ("2x2x2", "1x1x1"):
        command = [sys.executable, "-m", "tools.predict", "fill-mask", str(runs[cube]), text, "--json"]
        finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert finished.returncode == 0, finished.stderr[-4000:]
        (mask,) = json.loads(finished.stdout)["masks"]
        assert len(mask) == 5
        probabilities = [guess["probability"] for guess in mask]
        assert probabilities == sorted(probabilities, reverse=True)
        assert 0.02 < sum(probabilities) < 1  # five of 2,048 pieces drawn blindly have 0.0024
        guesses[cube] = {guess["piece"] for guess in mask}
    assert guesses["2x2x2"] & guesses["1x1x1"]


def test_collectives_of_a_step(curves: dict[str, Curves]) -> None:
    assert max(curves["2x2x2"]["traffic/collectives"]) <= 120
    assert max(curves["1x1x1"]["traffic/collectives"]) == 0
