"""Jobs that hang, die, lose their store or are told to stop, on real gloo ranks with times made short."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from tensor3d import Cube
from tensor3d.distributed.signals import Clock
from tensor3d.distributed.watchdog import HANG, ORPHANED, PREEMPTED, REPEAT, Watchdog
from tests.descriptors import open_descriptors
from tests.watchdog_jobs import Job, mark, meet

TERM = 128 + signal.SIGTERM


def stuck() -> None:
    """Blocks inside C, as a collective does whose peer has gone without a word."""
    dist.HashStore().get("what nobody writes")


def wait_for_the_verdict(cube: Cube) -> None:
    """In a collective that does not end, until the watch ends this process. One that reads the verdict a moment earlier
    breaks the collective of the others."""
    with suppress(RuntimeError):
        meet(cube)
    stuck()


# --- hangs --------------------------------------------------------------------------------------------------------


def _one_sleeps(cube: Cube, watch: Watchdog, folder: Path) -> int:
    watch.at(7, "forward")
    if cube.rank == 1:
        watch.at(7, "data")
        time.sleep(60)
    wait_for_the_verdict(cube)
    return 0


def test_a_rank_outside_of_a_collective_is_named_by_all(tmp_path: Path) -> None:
    with Job(3, _one_sleeps, tmp_path, hang_after=1.0, grace=1.0) as job:
        start = time.monotonic()
        assert [job.code(rank) for rank in range(3)] == [HANG] * 3
        assert time.monotonic() - start < 10
        words = [job.words(rank) for rank in range(3)]
    assert all(
        line.count("\n") == 1 and line.startswith(f"rank {rank} (y {rank}): no ") for rank, line in enumerate(words)
    )
    verdicts = {line.split(" s: ", 1)[1] for line in words}
    assert len(verdicts) == 1, "all adopt what one has judged"
    verdict = verdicts.pop()
    assert verdict.startswith("rank 1 (y 1) is alive in no collective for ")
    assert ", 1 issued, step 7, data, at test_watchdog.py:" in verdict
    assert "in _one_sleeps; 2 wait, first rank 0 (y 0) in collective 2 (all-reduce over y), step 7, forward" in verdict


def _one_stops(cube: Cube, watch: Watchdog, folder: Path) -> int:
    watch.at(3, "backward")
    if cube.rank == 2:
        time.sleep(0.5)  # more than a heartbeat, less than a hang
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_for_the_verdict(cube)
    return 0


@pytest.mark.slow
def test_a_stopped_process_is_named(tmp_path: Path) -> None:
    with Job(3, _one_stops, tmp_path, hang_after=2.0, grace=0.5) as job:
        assert [job.code(rank) for rank in range(2)] == [HANG] * 2
        assert job.code(2, 0) is None, "only torchrun can end it"
        for rank in range(2):
            assert "rank 2 (y 2) does not answer (its process is stopped), last seen in step 3, " in job.words(rank)


def _dies_unseen(cube: Cube, watch: Watchdog, folder: Path) -> int:
    watch.at(1, "forward")
    stuck()
    return 0


@pytest.mark.slow
def test_a_death_that_breaks_nothing_ends_as_a_hang(tmp_path: Path) -> None:
    with Job(2, _dies_unseen, tmp_path, hang_after=1.0, grace=0.5) as job:
        time.sleep(0.5)
        job.kill(1)
        assert job.code(0) == HANG
        assert "rank 1 (y 1) does not answer (its process is gone), last seen in step 1, forward" in job.words(0)


def _slow_but_alive(cube: Cube, watch: Watchdog, folder: Path) -> int:
    for step in range(5):
        watch.at(step, "forward")
        time.sleep(0.3)
        meet(cube)
    return 0


@pytest.mark.slow
def test_a_slow_job_is_left_alone(tmp_path: Path) -> None:
    with Job(2, _slow_but_alive, tmp_path, hang_after=1.0, grace=0.5) as job:
        assert [job.code(rank) for rank in range(2)] == [0, 0]
        assert job.words(0) == ""


def _prepares(cube: Cube, watch: Watchdog, folder: Path) -> int:
    if cube.rank == 0:
        time.sleep(1.0)
    meet(cube)
    watch.at(1, "data")
    stuck()
    return 0


@pytest.mark.slow
def test_what_one_rank_does_before_the_first_phase_may_take_any_time(tmp_path: Path) -> None:
    with Job(2, _prepares, tmp_path, hang_after=0.3, grace=0.3) as job:
        assert [job.code(rank, 0.4) for rank in range(2)] == [None, None]
        assert [job.code(rank) for rank in range(2)] == [HANG] * 2
        assert ", 2 issued, step 1, data" in job.words(0)


@pytest.mark.slow
def test_a_job_that_is_suspended_goes_on(tmp_path: Path) -> None:
    """Its time stands still, also for a store that did not answer, and a rank that wakes up late is not dead."""
    with Job(2, _trains, tmp_path, hang_after=0.6, grace=0.6, deaf=0.6) as job:
        job.reached(1, "trains")
        whole = [job.host.pid, *(process.pid for process in job.processes)]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in whole:
                os.kill(pid, number)
                time.sleep(0.05)
            time.sleep(1.5 if number == signal.SIGSTOP else 0.5)
        assert [job.words(rank) for rank in range(2)] == ["", ""]
        job.send(1, signal.SIGTERM)
        assert [job.code(rank) for rank in range(2)] == [PREEMPTED] * 2


@pytest.mark.slow
def test_a_signal_that_wakes_a_suspended_job_saves(tmp_path: Path) -> None:
    """Slurm continues a job that it has suspended before it ends it, one process after another."""
    with Job(2, _trains, tmp_path, hang_after=1.0, grace=0.6, deaf=0.6) as job:
        job.reached(1, "trains")
        for rank in range(2):
            job.send(rank, signal.SIGSTOP)
        time.sleep(1.5)
        for rank in range(2):
            job.send(rank, signal.SIGTERM)
            job.send(rank, signal.SIGCONT)
            time.sleep(0.2)
        assert [job.code(rank) for rank in range(2)] == [PREEMPTED] * 2


def test_a_clock_stands_still_in_a_gap() -> None:
    clock = Clock(longest=0.05)
    start = clock()
    time.sleep(0.01)
    assert 0.01 <= clock() - start < 0.06
    time.sleep(0.4)
    assert clock() - start < 0.12
    assert abs(clock() - time.monotonic()) < 1.0


# --- signals ------------------------------------------------------------------------------------------------------


def _trains(cube: Cube, watch: Watchdog, folder: Path) -> int:
    for step in range(1000):
        watch.at(step, "forward")
        time.sleep(0.02)
        mark(folder, cube.rank, "trains")
        if meet(cube, watch.stop_flag):
            watch.agreed()
            mark(folder, cube.rank, f"saved {step}")
            return PREEMPTED
    return 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_healthy_job_saves_after_the_same_step(number: int, tmp_path: Path) -> None:
    with Job(3, _trains, tmp_path, grace=1.0) as job:
        job.reached(1, "trains")
        job.send(1, number)
        assert [job.code(rank) for rank in range(3)] == [PREEMPTED] * 3
        steps = [path.name.split()[2] for path in tmp_path.glob("* saved *")]
        assert len(steps) == 3
        assert len(set(steps)) == 1
        assert [job.words(rank) for rank in range(3)] == [""] * 3


def test_a_signal_after_a_death_ends_a_blocked_rank_at_once(tmp_path: Path) -> None:
    with Job(2, _dies_unseen, tmp_path, grace=1.0) as job:
        job.kill(1)
        time.sleep(0.5)
        assert job.code(0, 0) is None, "nothing has told it yet"
        start = time.monotonic()
        job.send(0, signal.SIGTERM)
        assert job.code(0) == TERM
        assert time.monotonic() - start < 1.0
        assert "SIGTERM, leaving without a checkpoint: rank 1 (y 1) does not answer (its process is gone)" in job.words(
            0
        )


@pytest.mark.slow
def test_a_death_after_the_signal_ends_the_wait_for_the_step(tmp_path: Path) -> None:
    with Job(2, _dies_unseen, tmp_path, grace=1.0) as job:
        job.send(0, signal.SIGUSR1)
        assert job.code(0, 1.5) is None, "all are alive, so the step may still end"
        start = time.monotonic()
        job.kill(1)
        assert job.code(0) == 128 + signal.SIGUSR1
        assert time.monotonic() - start < 1.0


def _loses_a_collective(cube: Cube, watch: Watchdog, folder: Path) -> int:
    watch.at(4, "forward")
    if cube.rank == 2:
        mark(folder, 2, "is ready")
        time.sleep(60)
    try:
        meet(cube)
    except RuntimeError as error:
        (folder / f"{cube.rank} blames").write_text(watch.failed(str(error)))
        mark(folder, cube.rank, "blamed")
        stuck()
    return 0


def test_a_failed_collective_names_the_dead_and_a_signal_then_ends_at_once(tmp_path: Path) -> None:
    with Job(3, _loses_a_collective, tmp_path, grace=2.0) as job:
        job.reached(2, "is ready")
        time.sleep(1.0)
        job.kill(2)
        job.reached(1, "blamed")
        start = time.monotonic()
        job.send(1, signal.SIGTERM)
        assert job.code(1) == TERM
        assert time.monotonic() - start < 1.0
        job.reached(0, "blamed")  # in the ring it hears from rank 1 alone
        sentences = {(tmp_path / f"{rank} blames").read_text() for rank in range(2)}
        assert len(sentences) == 1
        assert sentences.pop().startswith("rank 2 (y 2) does not answer (its process is gone), last seen in step 4, f")


def _fails(cube: Cube, watch: Watchdog, folder: Path) -> int:
    watch.at(2, "data")
    if cube.rank == 1:
        watch.close("ValueError: shard 3 is damaged")
        os._exit(2)
    try:
        meet(cube)
    except RuntimeError as error:
        (folder / f"{cube.rank} blames").write_text(watch.failed(str(error)))
    return 1


def test_a_rank_that_failed_is_named_with_its_error_and_its_victims_are_not(tmp_path: Path) -> None:
    with Job(3, _fails, tmp_path, grace=2.0) as job:
        assert [job.code(rank) for rank in range(3)] == [1, 2, 1]
        for rank in (0, 2):
            assert (
                (tmp_path / f"{rank} blames")
                .read_text()
                .startswith("rank 1 (y 1) failed in step 2, data: ValueError: shard 3 is damaged")
            )


@pytest.mark.slow
def test_a_second_sigterm_ends_at_once_but_not_its_echo(tmp_path: Path) -> None:
    with Job(1, _dies_unseen, tmp_path) as job:
        for _ in range(3):
            job.send(0, signal.SIGTERM)
            time.sleep(0.1)
        assert job.code(0, REPEAT) is None, "the same signal from torchrun and from the scheduler"
        start = time.monotonic()
        job.send(0, signal.SIGTERM)
        assert job.code(0) == TERM
        assert time.monotonic() - start < 1.0
        assert "it came a second time" in job.words(0)


def test_without_an_agreement_patience_ends(tmp_path: Path) -> None:
    with Job(2, _dies_unseen, tmp_path, patience=0.5) as job:
        job.send(0, signal.SIGTERM)
        assert job.code(0) == TERM
        assert "the ranks have not agreed on a step within 0.5 s; step 1, forward" in job.words(0)
        assert job.code(1, 0) is None


def _comes_late(cube: Cube, watch: Watchdog, folder: Path) -> int:
    watch.at(3, "data" if cube.rank == 1 else "forward")
    if cube.rank == 1:
        time.sleep(30)
    try:
        meet(cube)
    except RuntimeError as error:
        (folder / "blames").write_text(watch.failed(str(error)))
    return 1


@pytest.mark.slow
def test_after_a_time_out_the_one_that_never_came_is_named(tmp_path: Path) -> None:
    with Job(2, _comes_late, tmp_path, grace=0.5, limit=1.0) as job:
        assert job.code(0) == 1
        sentence = (tmp_path / "blames").read_text()
    assert sentence.startswith("rank 1 (y 1) is alive in no collective for ")
    assert (
        ", 1 issued, step 3, data; 1 wait, first rank 0 (y 0) in collective 2 (all-reduce over y), step 3" in sentence
    )
    assert "; rank 0 (y 0) lost a collective in step 3, forward, at collectives.py:" in sentence, "not of the report"


# --- the store ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_orphans_leave(number: int, tmp_path: Path) -> None:
    with Job(2, _dies_unseen, tmp_path, grace=0.5) as job:
        os.kill(job.host.pid, number)
        if number == signal.SIGSTOP:  # with a minute's patience, unless a signal comes
            assert job.code(0, 1.0) is None
            job.send(0, signal.SIGTERM)
            assert job.code(0) == TERM
            assert "the job's store does not answer" in job.words(0)
        else:
            assert [job.code(rank) for rank in range(2)] == [ORPHANED] * 2
            assert "the job's store is gone" in job.words(1)


def test_an_only_rank_is_an_orphan_too(tmp_path: Path) -> None:
    with Job(1, _dies_unseen, tmp_path, grace=0.5) as job:
        job.host.kill()
        assert job.code(0) == ORPHANED
        assert job.words(0).startswith("rank 0: leaving, for nobody would end this process: the job's store is gone")


def test_an_only_rank_that_hangs_is_named(tmp_path: Path) -> None:
    with Job(1, _dies_unseen, tmp_path, grace=0.5, hang_after=0.5) as job:
        assert job.code(0) == HANG
        words = job.words(0)
    assert "rank 0: no progress for 1 s: rank 0 is alive in no collective for 1 s, " in words
    assert "step 1, forward, at test_watchdog.py:" in words


# --- one process --------------------------------------------------------------------------------------------------


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_process_watches_itself() -> None:
    words: list[str] = []
    codes: list[int] = []
    with Watchdog(Cube.single(), hang_after=0.3, say=words.append, abort=codes.append) as watch:
        watch.at(5, "data")
        until(lambda: codes)
    assert codes == [HANG]
    assert words[0].startswith("rank 0: no progress for 0 s in step 5, data, at test_watchdog.py:")


def test_what_comes_before_the_first_phase_may_take_any_time() -> None:
    codes: list[int] = []
    with Watchdog(Cube.single(), hang_after=0.2, say=lambda _: None, abort=codes.append) as watch:
        time.sleep(0.6)
        assert codes == []
        watch.at(1, "data")
        until(lambda: codes)


@pytest.mark.slow
def test_progress_is_a_phase_or_a_collective() -> None:
    codes: list[int] = []
    cube = Cube.single()
    with Watchdog(cube, hang_after=0.5, say=lambda _: None, abort=codes.append) as watch:
        for step in range(3):
            watch.at(step, "data")
            time.sleep(0.25)
        for _ in range(3):
            cube.traffic.add("y", "all-gather", 1)
            time.sleep(0.25)
    assert codes == []


@pytest.mark.slow
def test_patience_is_for_what_comes_after_a_checkpoint_that_makes_progress() -> None:
    words: list[str] = []
    codes: list[int] = []
    with Watchdog(Cube.single(), hang_after=0.5, patience=0.5, say=words.append, abort=codes.append) as watch:
        os.kill(os.getpid(), signal.SIGTERM)
        for done in range(20):
            watch.at(1, f"checkpoint, {done} bytes")
            time.sleep(0.05)
        assert codes == [], "longer than both times, but it goes on"
        watch.at(2, "forward")
        start = time.monotonic()
        until(lambda: codes)
        assert time.monotonic() - start > 0.4, "from its end, not from the signal"
    assert codes == [TERM]
    assert "SIGTERM, leaving without a checkpoint: the ranks have not agreed on a step within 0.5 s; step 2" in words[0]


def test_patience_ends_in_a_checkpoint_that_makes_none() -> None:
    words: list[str] = []
    codes: list[int] = []
    with Watchdog(Cube.single(), patience=0.3, say=words.append, abort=codes.append) as watch:
        watch.at(1, "checkpoint, 7 bytes")
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: codes)
    assert codes == [TERM]
    assert "have not agreed on a step within 0.3 s; step 1, checkpoint, 7 bytes" in words[0]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell without job control starts what runs in the background with SIGINT ignored."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


@pytest.mark.usefixtures("interruptible")
def test_a_signal_sets_the_flag_and_closing_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    pipes: list[os.stat_result] = []  # a number may go to another file of another thread, what it stood for does not

    def recorded(pipe: Callable[[], tuple[int, int]] = os.pipe) -> tuple[int, int]:
        ends = pipe()
        pipes.extend(map(os.fstat, ends))
        return ends

    monkeypatch.setattr("tensor3d.distributed.signals.os.pipe", recorded)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    threads = set(threading.enumerate())
    with Watchdog(Cube.single()) as watch:
        assert (watch.stop_flag, watch.stop_signal) == (0.0, None)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (watch.stop_flag, watch.stop_signal) == (1.0, signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    watch.close()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == before
    assert set(threading.enumerate()) <= threads
    assert pipes
    assert not any(os.path.samestat(pipe, now) for pipe in pipes for now in open_descriptors())


def test_a_signal_to_a_forked_child_is_its_own() -> None:
    with Watchdog(Cube.single()) as watch:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, from Python 3.12 on
            child = os.fork()
        if not child:
            time.sleep(30)
            os._exit(0)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        time.sleep(0.2)
        assert not watch.stop_requested


def test_times_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"hang_after.*0.*0"):
        Watchdog(Cube.single(), hang_after=0)
    with pytest.raises(ValueError, match=r"grace.*0.*-1"):
        Watchdog(Cube.single(), grace=-1)
    with pytest.raises(ValueError, match=r"patience.*0.*nan"):
        Watchdog(Cube.single(), patience=float("nan"))


def test_it_is_made_in_the_main_thread() -> None:
    errors: list[str] = []

    def make() -> None:
        try:
            Watchdog(Cube.single())
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=make, name="worker")
    thread.start()
    thread.join()
    assert errors == ["signals can be caught by the main thread only. Got 'worker'; make the watch there."]
