"""Starts two whole runs in one folder, at a random offset, again and again: always one run and one refusal.

    python -m tests.slow.starters [--rounds 50] [--seed 0] [--folder DIR]

Rounds take turns: `tools.pretrain` and `tools.gpt`, in a new folder, with `--resume auto`, and after a kill -9 of
whoever had the folder. The refused one must name the process that has it; the other one's journal must have every step
once, and its newest checkpoint must be whole.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tensor3d import checkpoint
from tests.slow.kills import ROOT, losses
from tests.tools.runs import write_text

STEPS = 1_000_000  # no run comes to its end before the other has begun, however slow the machine is
STOPPED = 75
PATIENCE = 300.0  # seconds, for a machine that others use too
RECIPE = f"""
[data]
source = "SOURCE"
vocab_size = 67
held_out = 0
capacity = 32
max_length = 32
packing = "spfhp"
[model]
layers = 1
hidden = 32
heads = 4
[batch]
global_batch = 4
[run]
steps = {STEPS}
evaluate_every = 0
checkpoint_every = 5
log_every = 1000
"""
MANNERS = (
    ("tools.pretrain", ()),
    ("tools.gpt", ()),
    ("tools.pretrain", ("--resume", "auto")),
    ("tools.gpt", ("after a kill",)),
    ("tools.pretrain", ("--resume", "auto", "after a kill")),
)


@dataclass(frozen=True, kw_only=True)
class Starter:
    """A run that may be refused."""

    tool: str
    folder: Path
    process: subprocess.Popen[str]


def recipe_in(folder: Path) -> Path:
    """Of a run that never ends; it is made, with its text, by the first call."""
    text, recipe = folder / "text.txt", folder / "small.toml"
    if not recipe.exists():
        write_text(text)
        recipe.write_text(RECIPE.replace("SOURCE", str(text)))
    return recipe


def start(folder: Path, *more: str, tool: str = "tools.pretrain") -> Starter:
    """Starts a run in `folder/run`; what it needs lies beside it."""
    recipe, text = recipe_in(folder), folder / "text.txt"
    sizes = ["--source", text, "--vocab-size", "67", "--length", "32", "--batch", "4", "--steps", STEPS]
    words: list[object] = [recipe] if tool == "tools.pretrain" else ["train", *sizes]
    places = ["--output", folder / "run", "--corpus", folder / f"corpus of {tool}"]
    process = subprocess.Popen(
        [sys.executable, "-m", tool, *map(str, [*words, *places, *more])],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # so that the two do not wait for each other's
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Starter(tool=tool, folder=folder, process=process)


def until(condition: Callable[[], bool], runs: Iterable[Starter], what: str) -> None:
    """Waits for it, while these live."""
    limit = time.monotonic() + PATIENCE
    while not condition():
        for run in runs:
            assert run.process.poll() is None, run.process.communicate()[1]
        assert time.monotonic() < limit, what
        time.sleep(0.02)


def check_one_of(runs: list[Starter]) -> None:
    """One trains, and the other has said who does. Ends both."""
    until(lambda: any(run.process.poll() is not None for run in runs), (), "two runs in one folder")
    refused, winner = sorted(runs, key=lambda run: run.process.poll() is None)
    refusal, run, process = refused.process.communicate()[1], winner.folder / "run", winner.process
    assert refused.process.returncode == 2, refusal
    (line,) = (each for each in refusal.splitlines() if "in use by" in each)
    assert f"{refused.tool}: {run} is in use by process {process.pid} on {socket.gethostname()} since" in line
    began = len(losses(run))
    until(lambda: len(losses(run)) >= began + 5, [winner], "the winner does not train")
    if winner.tool == "tools.gpt":  # it saves at its end alone
        process.kill()
        process.communicate()
        done = len(losses(run))
        (run / "run.lock").unlink()
    else:
        process.send_signal(signal.SIGTERM)
        told = process.communicate(timeout=PATIENCE)[1]
        assert process.returncode == STOPPED, told
        newest = checkpoint.latest(run / "checkpoints")
        assert newest is not None
        assert checkpoint.verify(newest) == []
        done = checkpoint.read_progress(newest)["step"]
    assert [step for step, _ in losses(run)] == list(range(1, done + 1)), "every step once"
    left = {path.name for path in run.iterdir()}
    assert not any(name == "run.lock" or name.endswith(".tmp") for name in left), left


def kill_owner(folder: Path, *more: str, tool: str = "tools.pretrain") -> None:
    """A run that has the folder is killed, and its lock stays."""
    owner, run = start(folder, *more, tool=tool), folder / "run"
    saves = tool == "tools.pretrain"
    begun = (lambda: checkpoint.latest(run / "checkpoints") is not None) if saves else (lambda: losses(run) != [])
    until(begun, [owner], "the owner does not train")
    owner.process.kill()
    owner.process.communicate()
    assert (run / "run.lock").exists()
    if not saves:  # what cannot go on has to be removed by whoever starts anew, as it says
        for name in ("run.json", "metrics.jsonl"):
            (run / name).unlink()


def check_round(folder: Path, tool: str, manner: Iterable[str], offset: float) -> None:
    """Two starters, the second one `offset` seconds after the first."""
    more = [word for word in manner if word != "after a kill"]
    runs: list[Starter] = []
    try:
        if more != list(manner):
            kill_owner(folder, *more, tool=tool)
        runs.append(start(folder, *more, tool=tool))
        time.sleep(offset)
        runs.append(start(folder, *more, tool=tool))
        check_one_of(runs)
    finally:
        for run in runs:
            run.process.kill()
            run.process.wait()
            assert run.process.stderr is not None
            run.process.stderr.close()


def rounds(folder: Path, count: int, seed: int, tell: Callable[[str], object] = print) -> None:
    """So many rounds in turn, of which each is told. Offsets are very short, short, or as long as a start takes."""
    draw, passed = random.Random(seed), Counter[str]()
    for number in range(count):
        tool, manner = MANNERS[number % len(MANNERS)]
        offset = draw.uniform(0.0, draw.choice((0.05, 1.0, 15.0)))
        here = folder / str(number)
        here.mkdir()
        check_round(here, tool, manner, offset)
        name = ", ".join((tool, *manner))
        passed[name] += 1
        tell(f"{number + 1:3} of {count}: {name}, {offset:.3f} s later: one run and one refusal")
    tell(json.dumps(passed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as made:
        rounds(Path(made), asked.rounds, asked.seed)


if __name__ == "__main__":
    main()
