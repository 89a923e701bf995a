"""The whole preparation: the same bytes whoever works and however often it is killed; a full disk loses nothing."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.tools.corpus.pipeline_steps import FOLDERS, ROOT, command, content, prepare, run, steps, write_input
from tools.bench.harness.memory import descendants

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs") / "raw"
    write_input(folder)
    return folder


@pytest.fixture(scope="module")
def reference(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one worker writes."""
    output = tmp_path_factory.mktemp("reference")
    prepare(inputs, output, workers=1)
    found = content(output)
    assert len([name for name in found if name.startswith("documents/documents-")]) > 5
    assert {name.split("/")[0] for name in found} == set(FOLDERS)
    return found


MORE = pytest.mark.long(reason="a whole preparation each; two workers and two ranks share the work as more do")


@pytest.mark.parametrize(
    "how",
    [
        {"workers": 2},
        {"ranks": 2},
        *(pytest.param(how, marks=MORE) for how in ({"workers": 4}, {"ranks": 1}, {"ranks": 4})),
    ],
)
def test_the_same_bytes_whoever_works(
    inputs: Path, reference: dict[str, bytes], tmp_path: Path, how: dict[str, int]
) -> None:
    prepare(inputs, tmp_path, **how)
    assert content(tmp_path) == reference


@pytest.mark.parametrize(
    "each", [1, pytest.param(5, marks=pytest.mark.long(reason="2 minutes; one kill of each step sees what it loses"))]
)
def test_kills_at_random_moments(inputs: Path, reference: dict[str, bytes], tmp_path: Path, each: int) -> None:
    """One or five of each step, at a random moment or as soon as there is something to go on with: of a random
    process, or of all at once; by turns with workers and under MPI."""
    chance = random.Random(11)
    midway: Counter[str] = Counter()
    for turn, (arguments, folder) in enumerate(zip(steps(inputs, tmp_path), FOLDERS, strict=True)):
        start = time.monotonic()
        assert run(arguments, workers=2).returncode == 0
        longest = time.monotonic() - start
        shutil.rmtree(tmp_path / folder)
        partial = tmp_path / f".{folder}.partial"
        for number in range(each):
            how = [{"workers": 1}, {"workers": 2}, {"ranks": 2}][(number + turn) % 3]
            # The first one leaves something to go on with.
            first = turn == number == 0
            while not _killed(arguments, chance.uniform(0.1, 1.0) * longest, partial, chance, first, **how):
                shutil.rmtree(tmp_path / folder)  # it was faster: once more, from the beginning
            midway[arguments[0]] += any(partial.glob("marks/*/*.json"))
            if (tmp_path / folder).exists():
                # Killed with its last act: what is to be seen is whole.
                assert content(tmp_path / folder) == _below(reference, folder)
        done = run(arguments, workers=2)
        assert done.returncode == 0, done.stdout + done.stderr
        assert content(tmp_path / folder) == _below(reference, folder)
    print(f"of {each * len(FOLDERS)} kills, with work to go on with: {dict(midway)}")
    assert midway.total() > 0
    assert content(tmp_path) == reference


def _below(found: dict[str, bytes], folder: str) -> dict[str, bytes]:
    return {name.partition("/")[2]: data for name, data in found.items() if name.startswith(f"{folder}/")}


def _killed(
    arguments: list[str], moment: float, partial: Path, chance: random.Random, at_once: bool, **how: int
) -> bool:
    """Runs a step and kills a process of it, or all, after so many seconds, or as soon as one more unit is done; False
    where it had ended well before."""
    at_once, known = at_once or chance.random() < 0.5, _marks(partial)
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            command(arguments, **how), cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        deadline = time.monotonic() + (60.0 if at_once else moment)
        while process.poll() is None and time.monotonic() < deadline and not (at_once and _marks(partial) > known):
            time.sleep(0.001)
        if process.poll() is None:
            members = descendants(process.pid)
            for victim in members if chance.random() < 0.5 else [chance.choice(members)]:
                _kill(victim)
            # What is left alone must end by itself.
            process.wait(timeout=120)
            _wait_for(members)
            return True
        said.seek(0)
        assert process.returncode == 0, said.read()
    return False


def _marks(partial: Path) -> int:
    return sum(1 for _ in partial.glob("marks/*/*.json"))


def _kill(victim: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)


def _wait_for(members: list[int]) -> None:
    """Until none of the processes is left: nobody goes on working on what the next run works on."""
    deadline = time.monotonic() + 60
    while alive := [member for member in members if _runs(member)]:
        assert time.monotonic() < deadline, f"processes {alive} outlived the step"
        time.sleep(0.05)


def _runs(member: int) -> bool:
    try:
        return Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system needs the right to mount one")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("how", [{"workers": 1}, pytest.param({"workers": 2}, marks=MORE), {"ranks": 2}])
def test_a_full_disk_is_said_and_loses_nothing(
    inputs: Path, reference: dict[str, bytes], small_disk: Path, how: dict[str, int]
) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(900_000))
    arguments = next(iter(steps(inputs, small_disk)))
    done = run(arguments, **how)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no space left on the disk" in done.stderr
    assert "run the same command again: what is done is kept" in done.stderr
    assert not (small_disk / "documents").exists()
    ballast.unlink()
    assert run(arguments, **how).returncode == 0
    assert content(small_disk / "documents") == _below(reference, "documents")
