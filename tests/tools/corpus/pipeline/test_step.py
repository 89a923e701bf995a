"""The frame of the steps: the same bytes whoever works, nothing lost by a kill, nothing half done to be seen."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.programs import ran
from tests.tools.corpus.counting import WORDS, Shout, shout
from tools.corpus.pipeline import BadInput, draft, fingerprint_file, local_team, read_manifest
from tools.corpus.pipeline.step import Stage
from tools.corpus.pipeline.units import Unit
from tools.corpus.pipeline.workers import deal_units

ROOT = Path(__file__).parents[4]
MPIRUN = Path(sys.executable).with_name("mpirun")


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def mpirun(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(MPIRUN), "-n", str(ranks), sys.executable, "-m", "tests.tools.corpus.counting", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_number_of_workers_writes_the_same_bytes(tmp_path: Path, workers: int) -> None:
    output = tmp_path / "out"
    manifest = shout(Shout(output=output), local_team(workers))
    assert manifest.counts == {"letters": sum(map(len, WORDS)), "words": len(WORDS)}
    assert set(content(output)) == {"shouted.txt", "step.json"}
    assert (output / "shouted.txt").read_text() == "ALPHA BETA GAMMA DELTA EPSILON ZETA ETA THETA"
    assert read_manifest(output, "shout") == manifest
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    reference = tmp_path / "reference"
    shout(Shout(output=reference), local_team(1))
    assert content(reference) == content(output)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_of_mpi_write_the_same_bytes(tmp_path: Path, ranks: int) -> None:
    shout(Shout(output=tmp_path / "reference"), local_team(1))
    done = mpirun(ranks, str(tmp_path / "out"), " ".join(WORDS))
    assert done.returncode == 0, done.stdout + done.stderr
    if ranks > 1:
        assert sorted(re.findall(r"rank \d of \d", done.stdout)) == [f"rank {rank} of {ranks}" for rank in range(ranks)]
    assert content(tmp_path / "out") == content(tmp_path / "reference")


@pytest.mark.parametrize(
    "word, message", [("bad", "the word is bad"), pytest.param("broken", "a mistake of ours", marks=pytest.mark.slow)]
)
def test_what_fails_on_one_rank_of_mpi_ends_all(tmp_path: Path, word: str, message: str) -> None:
    done = mpirun(3, str(tmp_path / "out"), " ".join([*WORDS, word]))
    assert done.returncode != 0
    assert len(re.findall(message, done.stdout)) >= 3, done.stdout + done.stderr
    assert not (tmp_path / "out").exists()


def _shout(options: Shout) -> None:
    shout(options, local_team(1))


@pytest.mark.parametrize("word", [WORDS[0], WORDS[4], WORDS[-1]])
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, word: str) -> None:
    output = tmp_path / "out"
    process = get_context("forkserver").Process(target=_shout, args=(Shout(output=output, kill_at=word),))
    process.start()
    process.join(60)
    assert process.exitcode == -9
    assert not output.exists()
    marks = tmp_path / ".out.partial" / "marks" / "words"
    # Of the word where it was killed there is a file, but no mark.
    assert sorted(path.stem for path in marks.iterdir()) == [f"{n:05d}" for n in range(WORDS.index(word))]
    # What has a mark is not done again: its file may as well be another one.
    for mark in marks.iterdir():
        (tmp_path / ".out.partial" / "scratch" / f"{mark.stem}.txt").write_text("kept")
    shout(Shout(output=output), local_team(1))
    words = ["kept"] * WORDS.index(word) + [other.upper() for other in WORDS[WORDS.index(word) :]]
    assert (output / "shouted.txt").read_text() == " ".join(words)


def test_a_killed_worker_is_said_and_loses_nothing(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(OSError, match="a worker process was killed"):
        shout(Shout(output=output, kill_at="gamma"), local_team(2))
    shout(Shout(output=output), local_team(2))
    assert (output / "shouted.txt").read_text() == " ".join(WORDS).upper()


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    options = Shout(output=tmp_path / "out")
    first = shout(options, local_team(1))
    stamp = (tmp_path / "out" / "shouted.txt").stat().st_mtime_ns
    assert shout(options, local_team(2)) == first
    assert (tmp_path / "out" / "shouted.txt").stat().st_mtime_ns == stamp


def test_other_settings_are_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    shout(Shout(output=tmp_path / "out"), local_team(1))
    with pytest.raises(ValueError, match=r"out.*'shout'.*words"):
        shout(Shout(output=tmp_path / "out", words=("one",)), local_team(1))
    with pytest.raises(BadInput):
        shout(Shout(output=tmp_path / "half", words=("one", "bad")), local_team(1))
    with pytest.raises(ValueError, match=r"has begun \(words: .*remove that folder"):
        shout(Shout(output=tmp_path / "half", words=("one",)), local_team(1))


def test_a_folder_of_others_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"`python -m tools.corpus shout`.*not overwritten"):
        shout(Shout(output=tmp_path / "out"), local_team(1))
    assert content(tmp_path / "out") == {"thesis.txt": b"years of work"}


def test_bad_input_stops_or_is_left_out_and_listed(tmp_path: Path) -> None:
    words = ("one", "bad", "two", "bad")
    with pytest.raises(BadInput, match=r"words.txt, word 0000\d.*--skip-bad"):
        shout(Shout(output=tmp_path / "strict", words=words), local_team(2))
    manifest = shout(Shout(output=tmp_path / "lenient", words=words, skip_bad=True), local_team(2))
    assert manifest.left_out == 2
    listed = [json.loads(line) for line in (tmp_path / "lenient" / "left-out.jsonl").read_text().splitlines()]
    assert listed == [
        {"file": "words.txt", "at": f"word {number:05d}", "reason": "the word is bad"} for number in (1, 3)
    ]


def test_two_processes_at_one_output(tmp_path: Path) -> None:
    options = Shout(output=tmp_path / "out")
    with (
        Stage.open(options, "shout", {}, local_team(1)),
        pytest.raises(ValueError, match="another process"),
    ):
        Stage.open(options, "shout", {}, local_team(1))
    Stage.open(options, "shout", {}, local_team(1)).__exit__(None, None, None)


def test_a_folder_that_was_changed_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "out"
    shout(Shout(output=output), local_team(1))
    with pytest.raises(ValueError, match=r"step.*'shout';.*the output of `python -m tools.corpus extract`"):
        read_manifest(output, "extract")
    shutil.copytree(output, tmp_path / "short")
    (tmp_path / "short" / "shouted.txt").write_text("AL")
    with pytest.raises(ValueError, match=r"shouted.txt has 2 bytes where step.json speaks of 45"):
        read_manifest(tmp_path / "short", "shout")
    (tmp_path / "short" / "shouted.txt").unlink()
    with pytest.raises(ValueError, match=r"shouted.txt is missing"):
        read_manifest(tmp_path / "short", "shout")
    (tmp_path / "short" / "step.json").write_text("{")
    with pytest.raises(ValueError, match=r"step.json is damaged"):
        read_manifest(tmp_path / "short")
    with pytest.raises(ValueError, match=r"nowhere is no output of"):
        read_manifest(tmp_path / "nowhere")


def test_a_draft_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def fail() -> None:
        with draft(path) as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert content(tmp_path) == {"file": b"before"}
    with draft(path) as file:
        file.write(b"after")
        assert path.read_text() == "before"
    assert content(tmp_path) == {"file": b"after"}


def test_units_are_dealt_by_size() -> None:
    units = [Unit(name=str(size), size=size) for size in (1, 5, 3, 4, 2)]
    assert [[unit.size for unit in rank] for rank in deal_units(units, 2)] == [[5, 2, 1], [4, 3]]


def test_a_team_needs_a_worker(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"workers.*1.*0"):
        dataclasses.replace(Shout(output=tmp_path), workers=0).team()


def test_skip_bad_goes_on_with_what_was_done_without_it(tmp_path: Path) -> None:
    words = ("one", "two", "bad")
    with pytest.raises(BadInput):
        shout(Shout(output=tmp_path / "out", words=words), local_team(1))
    (tmp_path / ".out.partial" / "scratch" / "00000.txt").write_text("kept")
    manifest = shout(Shout(output=tmp_path / "out", words=words, skip_bad=True), local_team(1))
    assert (tmp_path / "out" / "shouted.txt").read_text() == "kept TWO"
    assert manifest.left_out == 1
    with pytest.raises(ValueError, match=r"settings.*\(skip_bad: true.*false now\)"):
        shout(Shout(output=tmp_path / "out", words=words), local_team(1))
    # Where nothing was bad it does not matter.
    fine = shout(Shout(output=tmp_path / "fine", words=("one",)), local_team(1))
    assert shout(Shout(output=tmp_path / "fine", words=("one",), skip_bad=True), local_team(1)) == fine


def test_what_is_left_of_a_finished_run_is_not_taken_for_another(tmp_path: Path) -> None:
    """A kill after the folder got its name and before the marks went; then the folder is removed."""
    output = tmp_path / "out"
    with pytest.raises(BadInput):
        shout(Shout(output=output, words=("one", "bad")), local_team(1))
    shutil.copytree(tmp_path / ".out.partial", tmp_path / "kept")
    shout(Shout(output=output, words=("one", "bad"), skip_bad=True), local_team(1))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".out.p")] == []
    shutil.copytree(tmp_path / "kept", tmp_path / ".out.partial")
    shutil.rmtree(tmp_path / ".out.partial" / "output")
    shutil.rmtree(output)
    shout(Shout(output=output, words=("one", "bad"), skip_bad=True), local_team(1))
    assert (output / "shouted.txt").read_text() == "ONE"


def test_a_link_to_an_empty_folder_is_that_folder(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk", target_is_directory=True)
    shout(Shout(output=tmp_path / "out"), local_team(1))
    assert (tmp_path / "disk" / "shouted.txt").exists()
    assert (tmp_path / "out").is_symlink()


def test_a_change_in_the_middle_of_a_file_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(9 << 20))
    before = fingerprint_file(path)
    with path.open("r+b") as file:
        file.seek((4 << 20) + 5)
        file.write(b"x")
    assert fingerprint_file(path) != before


def test_nobody_reading_is_no_success(tmp_path: Path) -> None:
    """Progress goes to a pipe that is closed: the step fails, and says so by its status."""
    script = f"{sys.executable} -m tools.corpus extract {tmp_path}/in.txt --output {tmp_path}/out"
    (tmp_path / "in.txt").write_text("One document.\n\nAnother one.\n")
    done = ran(["bash", "-c", f"{script} > /dev/null 2> >(exec 0<&-; sleep 0.1); echo $?"], cwd=ROOT)
    assert (done.stdout.strip() == "0") == (tmp_path / "out").exists()


def test_what_cannot_be_shown_is_done_but_no_success(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("One document.\n\nAnother one.\n")
    command = f"{sys.executable} -m tools.corpus extract {tmp_path}/in.txt --output {tmp_path}/out > /dev/full"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "the work is done, but cannot be shown" in done.stderr
    assert (tmp_path / "out").exists()
