"""What a run leaves on disk while it trains: metrics.jsonl and TensorBoard, after kills and on a full disk too."""

from __future__ import annotations

import errno
import json
import math
import shutil
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from tests.tools.bench.measured import STEP, Outcome, evaluation, step
from tests.tools.runs import journal
from tools.common.log import start_logging
from tools.training.metrics import ConsoleLogger, MemoryMetrics, console, first_step, read_journal
from tools.training.metrics.jsonl import JsonlLogger


def show(folder: Path, first_step: int = 0, log_every: int = 1) -> ConsoleLogger:
    start_logging()
    return ConsoleLogger(directory=folder, steps=10, first_step=first_step, shown=True, log_every=log_every)


def board(folder: Path, tag: str) -> dict[int, float]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_a_journal_has_all_digits_and_every_kind(tmp_path: Path) -> None:
    with show(tmp_path) as shown:
        shown.step(STEP)
        shown.evaluation(evaluation(1, 7.0))
        shown.memory(MemoryMetrics(step=1, peak_bytes=[10, 30]))
        shown.checkpoint(Outcome())
        shown.event("loss spike", loss=9.5, ranks=[0, 1])
        assert len(journal(tmp_path)) == 5, "a line is readable as soon as it is written"
        shown.flush()
    found = journal(tmp_path)
    assert [line["kind"] for line in found] == ["step", "evaluation", "memory", "checkpoint", "event"]
    assert found[0]["loss"] == 0.1 + 0.2 != 0.3
    assert found[0]["mfu"] is None
    assert found[1]["samples"] == 10
    assert found[2]["peak_bytes"] == [10, 30]
    assert found[3]["path"] == "run/checkpoints/step-00000002"
    assert {name: found[4][name] for name in ("event", "step", "loss", "ranks")} == {
        "event": "loss spike",
        "step": 1,
        "loss": 9.5,
        "ranks": [0, 1],
    }
    assert board(tmp_path, "memory/peak_bytes_most") == {1: 30.0}
    assert board(tmp_path, "checkpoint/bytes") == {2: 4096.0}


def test_tensorboard_has_every_nth_step_and_the_journal_all(tmp_path: Path) -> None:
    with show(tmp_path, log_every=4) as shown:
        for number in range(1, 11):
            shown.step(step(number))
    assert list(board(tmp_path, "loss/total")) == [4, 8, 10]
    assert [line["step"] for line in journal(tmp_path)] == list(range(1, 11))


def test_what_is_not_finite_is_valid_json_and_can_be_read_back(tmp_path: Path) -> None:
    with show(tmp_path) as shown:
        shown.step(step(1, loss=math.nan, gradient_norm=math.inf, masked_lm_loss=-math.inf))

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert math.isnan(float(record["loss"]))
    assert (float(record["gradient_norm"]), float(record["masked_lm_loss"])) == (math.inf, -math.inf)


def test_a_run_resumed_within_a_second_hides_no_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as earlier:
        # TensorBoard reads the files of one second in the order of their processes' numbers, which begin again.
        earlier.setattr("tools.training.metrics.tensorboard.os.getpid", lambda: 9999999)
        with show(tmp_path) as shown:
            for number in (1, 2, 3):
                shown.step(step(number))
    with show(tmp_path, first_step=3) as shown:
        for number in (4, 5, 6):
            shown.step(step(number))
    assert list(board(tmp_path, "loss/total")) == [1, 2, 3, 4, 5, 6]


def test_a_run_resumed_when_the_clock_was_set_back_hides_no_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with show(tmp_path) as shown:
        shown.step(step(1))
    now = time.time()
    monkeypatch.setattr("tools.training.metrics.tensorboard.time.time", lambda: now - 3600)
    with show(tmp_path, first_step=1) as shown:
        shown.step(step(2))
    assert list(board(tmp_path, "loss/total")) == [1, 2]
    assert [line["step"] for line in journal(tmp_path)] == [1, 2]


def test_resuming_cuts_off_later_steps_and_keeps_events(tmp_path: Path) -> None:
    with show(tmp_path) as shown:
        for number in range(1, 7):
            shown.step(step(number, loss=1.0))
        shown.evaluation(evaluation(6, 7.0))
        shown.event("killed")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "step": 7, "lo')  # of the moment of the kill
    with show(tmp_path, first_step=4) as shown:
        assert [(line["kind"], line["step"]) for line in journal(tmp_path)] == [
            *(("step", number) for number in range(1, 5)),
            ("event", 6),
        ]
        for number in (5, 6, 7):
            shown.step(step(number, loss=2.0))
    steps = journal(tmp_path, "step")
    assert [(line["step"], line["loss"]) for line in steps] == [
        *((number, 1.0) for number in range(1, 5)),
        *((number, 2.0) for number in (5, 6, 7)),
    ]
    assert board(tmp_path, "loss/total") == {number: 1.0 if number < 5 else 2.0 for number in range(1, 8)}
    assert not list(tmp_path.glob("*.tmp"))


def test_lines_of_another_kind_of_file_end_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of another tool's journal, or of an editor."""
    strange = (b'{"kind": "step", "step": 1, "loss": 2.5}', b"\0\0", b'{"step": 1}', b'{"kind": "st')
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(strange))
    assert first_step(tmp_path / "metrics.jsonl") is None, "none of pre-training"
    with show(tmp_path, first_step=1) as shown:
        assert "2 of its lines were damaged, and are left out" in capsys.readouterr().err
        shown.step(step(2))
    told = first_step(tmp_path / "metrics.jsonl")
    assert told is not None
    assert told["step"] == 2


@pytest.mark.slow
def test_points_of_steps_that_never_come_again_are_hidden(tmp_path: Path) -> None:
    with show(tmp_path) as shown:
        for number in range(1, 7):
            shown.step(step(number))
    # TensorBoard reads files in the order of their names, which begin with the second; the counter at their end is no
    # help, for "10" comes before "9".
    time.sleep(1.1)
    with show(tmp_path, first_step=3) as shown:
        shown.step(step(4))
    assert list(board(tmp_path, "loss/total")) == [1, 2, 3, 4]


class Full:
    """A file on a disk that takes `room` bytes more."""

    name = "metrics.jsonl"

    def __init__(self, room: int) -> None:
        self.room, self.content = room, b""

    def write(self, content: bytes) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = content[: self.room]
        self.content += taken
        self.room -= len(taken)
        return len(taken)

    def close(self) -> None:
        pass


def test_a_line_that_was_cut_off_does_not_spoil_the_next(tmp_path: Path) -> None:
    journal = JsonlLogger(tmp_path / "metrics.jsonl", first_step=0)
    journal.close()
    disk = Full(100)
    journal._file = disk  # type: ignore[assignment]
    journal.write("step", {"step": 1})
    for _ in range(2):  # the disk takes a part of the second line, then nothing
        with pytest.raises(OSError, match=r"could not be written whole|No space left"):
            journal.write("step", {"step": 2, "text": "x" * 100})
    disk.room = 1000
    journal.write("step", {"step": 3})
    (tmp_path / "metrics.jsonl").write_bytes(disk.content)
    assert [record["step"] for record in read_journal(tmp_path / "metrics.jsonl")] == [1, 3]


def test_a_full_disk_is_told_once_and_the_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with show(tmp_path) as shown:
        assert shown._journal is not None
        assert shown._board is not None
        written, shown._journal._file = shown._journal._file, Full(0)  # type: ignore[assignment]
        with pytest.MonkeyPatch.context() as full:
            full.setattr(shown._board._records, "_writer", Full(0))
            for number in (1, 2, 3):
                shown.step(step(number))
        shown._journal._file = written
        shown.step(step(4))
    told = capsys.readouterr().err
    assert told.count("metrics.jsonl cannot be written") == 1
    assert told.count("TensorBoard's files cannot be written any more") == 1
    assert "No space left on device" in told
    assert [record["step"] for record in read_journal(tmp_path / "metrics.jsonl")] == [4]


def test_a_folder_that_is_removed_is_made_again_before_the_next_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with show(run) as shown:
        shown.restore = (run / "run.json").touch
        for number in range(1, 5):
            shown.step(step(number))
            shown.flush()
            if number == 2:
                shutil.rmtree(run)
    assert capsys.readouterr().err.count(f"{run / 'metrics.jsonl'} was removed: it begins anew after step 3.") == 1
    assert [line["step"] for line in journal(run)] == [4]
    assert list(board(run, "loss/total")) == [4]
    assert (run / "run.json").exists()


@pytest.mark.parametrize("name", ["tensorboard", "metrics.jsonl"])
def test_a_file_that_cannot_be_made_is_told(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "tensorboard":
        (tmp_path / name).touch()
        with show(tmp_path) as shown:
            shown.step(step(1))
        assert "TensorBoard's files cannot be written any more" in capsys.readouterr().err
    else:
        (tmp_path / name).mkdir()
        with pytest.raises(OSError, match=r"metrics\.jsonl"):
            show(tmp_path).__enter__()


def test_a_failed_checkpoint_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with show(tmp_path) as shown:
        shown.checkpoint(Outcome(path=None, error="rank 3: No space left on device."))
    assert (
        "step 2: NO CHECKPOINT: rank 3: No space left on device. Weights and the checkpoints before"
        in capsys.readouterr().err
    )
    assert journal(tmp_path)[0]["error"] == "rank 3: No space left on device."


def test_a_rank_that_shows_nothing_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hidden = ConsoleLogger(directory=tmp_path / "run", steps=10, first_step=0, shown=False, log_every=1)
    with hidden:
        hidden.step(STEP)
        hidden.evaluation(evaluation(1, 7.0))
        hidden.event("spike")
        hidden.flush()
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr() == ("", "")
    assert hidden.history == [STEP]


def test_a_long_run_is_not_remembered_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_REMEMBERED", 3)
    hidden = ConsoleLogger(directory=tmp_path, steps=100, first_step=0, shown=False, log_every=1)
    with hidden:
        for number in range(1, 101):
            hidden.step(step(number))
            assert len(hidden.history) <= 6
    remembered = [metrics.step for metrics in hidden.history]
    assert remembered[0] == 1
    assert remembered[-3:] == [98, 99, 100]
