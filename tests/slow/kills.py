"""Kills ranks of a training job: kill -9 at random moments, also inside a save, and compares what it learned.

    python -m tests.slow.kills [--cube 2x2x2] [--kills 20] [--seed 0] [--folder DIR]

One run is left alone. Another one, of the same recipe on the same cube, loses a random rank again and again, and
torchrun starts it again (`--max-restarts`). Every loss that it ever wrote must be that of the first run, to the last
bit, and every checkpoint that has its final name must be whole whenever one looks.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tensor3d import CubeShape, checkpoint
from tests.tools.runs import write_text
from tools.training.metrics.jsonl import read_journal

ROOT = Path(__file__).parents[2]
CUBE = "2x2x2"
EVERY = 2  # steps between two checkpoints
SMALL = """
# Dropout is on, so that the random streams count as well.
[data]
source = "SOURCE"
vocab_size = 67
held_out = 0
capacity = 64
max_length = 64
packing = "spfhp"  # no solver to import in each of so many starts
[model]
layers = 1
hidden = 64
heads = 2
[batch]
global_batch = 8
"""
RUN = """
[run]
steps = STEPS
evaluate_every = 0
checkpoint_every = EVERY
checkpoint_keep = 3
log_every = 1000
"""


def write_recipe(path: Path, run: str) -> Path:
    """A run that takes seconds, with this section [run]; its text lies beside it."""
    text = path.with_suffix(".txt")
    write_text(text)
    path.write_text(SMALL.replace("SOURCE", str(text)) + run)
    return path


@dataclass(kw_only=True)
class Story:
    """What happened to the run that was not left alone."""

    losses: set[tuple[int, str]] = field(default_factory=set)
    """Every (step, loss with all digits) that was ever in its journal."""
    kills: int = 0
    inside_saves: int = 0
    """Kills while a checkpoint was being written: the same one just before and just after."""
    before_training: int = 0
    """Kills in the time between a start and its first step."""
    verified: int = 0
    """Looks at a complete checkpoint."""
    seconds: float = 0.0

    def summary(self) -> str:
        return (
            f"{self.kills} kills in {self.seconds:.0f} s, {self.inside_saves} inside a save, {self.before_training} "
            f"before the first step of a life; {len(self.losses)} steps to the last bit as without kills; "
            f"{self.verified} looks at complete checkpoints, all whole"
        )


def launch(folder: Path, *, cube: str, steps: int, name: str, restarts: int = 0) -> subprocess.Popen[bytes]:
    """Starts a run; its output goes to `folder/NAME.log`."""
    recipe = write_recipe(folder / "kills.toml", RUN.replace("STEPS", str(steps)).replace("EVERY", str(EVERY)))
    places = ["--output", str(folder / name), "--corpus", str(folder / "corpus")]
    with open(folder / f"{name}.log", "wb") as log:
        return subprocess.Popen(
            [
                ROOT / "launch" / "local.sh",
                *("--cpu", "--cube", cube, "--max-restarts", str(restarts)),
                recipe,
                *places,
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def losses(run: Path, since: float = 0.0) -> list[tuple[int, str]]:
    """(step, loss) of each whole line of a run's journal that was written after a time."""
    journal = run / "metrics.jsonl"
    if not journal.exists():
        return []
    steps = [record for record in read_journal(journal) if record["kind"] == "step" and record["time"] > since]
    return [(record["step"], repr(record["loss"])) for record in steps]


def ranks_of(launcher: int) -> list[int]:
    """The process numbers of the ranks: torchrun's children."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(parent) == launcher and state != "Z" and b"tools.pretrain" in command:
            children.append(int(path.parent.name))
    return sorted(children)


def being_saved(run: Path, since: float) -> str:
    """The checkpoint that is being written now, if it was begun after a time: an earlier death may have left one."""
    for path in (run / "checkpoints").glob("*.partial"):
        with suppress(FileNotFoundError):  # renamed meanwhile
            if path.stat().st_mtime > since:
                return path.name
    return ""


def verify(run: Path) -> int:
    """How many checkpoints have their final name; each of them must be whole. One that is deleted meanwhile is not."""
    whole = 0
    for folder in checkpoint.complete(run / "checkpoints"):
        try:
            problems = checkpoint.verify(folder)
        except (OSError, ValueError) as error:
            problems = [str(error)]
        if folder.exists():
            assert problems == [], f"{folder} is visible and not whole: {problems}"
            whole += 1
    return whole


def moments(kills: int, seed: int, first_step: float) -> Iterator[tuple[str, float]]:
    """When to kill next: so many seconds after the ranks were started, after their first step, or into a save.
    `first_step`: the seconds from a start to the first step on this machine. The first kill comes at once, so that one
    is before training for certain."""
    chance = random.Random(seed)
    for number in range(kills):
        start = chance.uniform(0.0, first_step) if number else 0.0
        ways = [("start", start), ("step", chance.uniform(0.0, 1.5)), ("save", 0.0)]
        yield ways[number % 3]


def kill_again_and_again(
    folder: Path, *, cube: str, steps: int, kills: int, seed: int, first_step: float, timeout: float
) -> Story:
    """A run that loses `kills` ranks, and ends well. Raises AssertionError for a checkpoint that is not whole."""
    story, begin, run, chance = Story(), time.monotonic(), folder / "killed", random.Random(seed)
    launcher = launch(folder, cube=cube, steps=steps, name="killed", restarts=kills)
    previous: list[int] = []
    world = CubeShape.parse(cube).ranks
    since = 0.0

    def look() -> int:
        """Takes down what is in the journal, and returns the newest step of this life."""
        assert time.monotonic() - begin < timeout, f"not done after {timeout:.0f} s and {story.kills} kills"
        assert launcher.poll() is None, f"the job has ended after {story.kills} kills: {tail(folder, 'killed')}"
        story.losses.update(losses(run))
        return max((step for step, _ in losses(run, since)), default=0)

    try:
        for number, (when, delay) in enumerate(moments(kills, seed, first_step)):
            while len(ranks := ranks_of(launcher.pid)) < world or set(ranks) & set(previous):
                look()
                time.sleep(0.01)
            since = time.time()
            # Each life has its share of the steps, or the run would end too early.
            last = (number + 1) * (steps - 2 * EVERY) // kills
            while when != "start" and not look():
                time.sleep(0.1)
            deadline = time.monotonic() + delay
            while time.monotonic() < deadline and look() < last:
                time.sleep(0.01)
            victim, steps_before = chance.choice(ranks), look()
            while when == "save" and not being_saved(run, since) and look() < last + 2 * EVERY:
                time.sleep(0.002)
            saved = being_saved(run, since)
            os.kill(victim, signal.SIGKILL)
            story.inside_saves += saved != "" and saved == being_saved(run, since)
            story.before_training += when == "start" and steps_before == 0
            story.kills += 1
            look()
            story.verified += verify(run)
            previous = ranks
        assert launcher.wait(begin + timeout - time.monotonic()) == 0, tail(folder, "killed")
    finally:
        launcher.terminate()
        launcher.wait(60)
    story.losses.update(losses(run))
    story.verified += verify(run)
    story.seconds = time.monotonic() - begin
    return story


def until(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def tail(folder: Path, name: str) -> str:
    return (folder / f"{name}.log").read_text(errors="replace")[-4000:]


def kill_test(
    folder: Path, *, cube: str = CUBE, steps: int = 44, kills: int = 20, seed: int = 0, timeout: float = 540.0
) -> Story:
    """Both runs. Raises AssertionError where they differ, or take longer than `timeout` seconds together."""
    begin = time.monotonic()
    alone = launch(folder, cube=cube, steps=steps, name="alone")
    try:
        until(lambda: len(ranks_of(alone.pid)) == CubeShape.parse(cube).ranks, timeout)
        started = time.monotonic()
        until(lambda: losses(folder / "alone") or alone.poll() is not None, timeout)
        first_step = time.monotonic() - started
        assert alone.wait(timeout) == 0, tail(folder, "alone")
    finally:
        alone.terminate()
    truth = dict(losses(folder / "alone"))
    assert sorted(truth) == list(range(1, steps + 1))
    left = begin + timeout - time.monotonic()
    story = kill_again_and_again(
        folder, cube=cube, steps=steps, kills=kills, seed=seed, first_step=first_step, timeout=left
    )
    wrong = sorted((step, loss, truth[step]) for step, loss in story.losses if truth[step] != loss)
    assert not wrong, f"step, loss, loss without kills: {wrong}"
    assert {step for step, _ in story.losses} == set(truth)
    assert losses(folder / "killed") == sorted(truth.items()), "the journal has every step once"
    return story


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.slow.kills", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cube", default=CUBE, help=f"of the job (default {CUBE})")
    parser.add_argument("--kills", type=int, default=20, help="how many (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the ranks (default 0)")
    parser.add_argument("--steps", type=int, default=44, help="of the run (default 44)")
    parser.add_argument("--folder", type=Path, help="keep everything there (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        story = kill_test(folder, cube=options.cube, steps=options.steps, kills=options.kills, seed=options.seed)
        print(story.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
