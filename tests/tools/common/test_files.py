"""Which run has a folder; what is written, read and removed where somebody has planted links, FIFOs and leftovers."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tensor3d import files as library
from tools.common import files
from tools.common.files import FolderInUseError, check_output, check_unlocked, draft, lock_folder, write_file

# --- which run has a folder ------------------------------------------------------------------------------------------

FORK = multiprocessing.get_context("fork")


def starter(folder: Path, offset: float, out: Connection, go_on: Connection) -> None:
    """A run, but for what it learns: takes the folder, writes into it, and ends when it is told to."""
    time.sleep(offset)
    try:
        with lock_folder(folder):
            (folder / "metrics.jsonl").open("a").write(f"{os.getpid()}\n")
            out.send("has it")
            go_on.recv()
    except ValueError as refused:
        out.send(str(refused))


@contextmanager
def starters(folder: Path, *offsets: float) -> Iterator[list[tuple[Connection, Connection, int]]]:
    """For each: what it tells, what tells it to end, its process."""
    processes, ends = [], []
    for offset in offsets:
        (told, out), (go_on, tell) = FORK.Pipe(duplex=False), FORK.Pipe(duplex=False)
        processes.append(FORK.Process(target=starter, args=(folder, offset, out, go_on), daemon=True))
        processes[-1].start()
        ends.append((told, tell, processes[-1].pid or 0))
    try:
        yield ends
    finally:
        for process in processes:
            process.kill()
            process.join()


def outcome(told: Connection) -> str:
    assert told.poll(20)
    return str(told.recv())


def check_one_has_it(folder: Path, *offsets: float) -> None:
    with starters(folder, *offsets) as ends:
        outcomes = [outcome(told) for told, *_ in ends]
        assert outcomes.count("has it") == 1
        owner = ends[outcomes.index("has it")]
        (refused,) = {said for said in outcomes if said != "has it"}
        assert f"{folder} is in use by process {owner[2]} on {socket.gethostname()} since 20" in refused
        assert refused.endswith(". Wait for its end, or choose another --output.")
        assert (folder / "metrics.jsonl").read_text() == f"{owner[2]}\n"


@pytest.mark.parametrize("seed", range(4))
def test_of_two_starters_one_gets_the_folder_and_the_other_is_told_who_has_it(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    check_one_has_it(tmp_path / "a" / "run", draw.uniform(0, 0.02), draw.uniform(0, 0.02))


@pytest.mark.slow
def test_of_many_pairs_of_starters_one_gets_the_folder(tmp_path: Path) -> None:
    draw = random.Random(7)
    for number in range(50):
        check_one_has_it(tmp_path / str(number), *(draw.uniform(0, 0.03) for _ in range(2)))


@pytest.mark.slow
def test_of_many_starters_one_takes_over_from_the_dead(tmp_path: Path) -> None:
    draw = random.Random(8)
    for number in range(12):
        folder = tmp_path / str(number)
        killed(folder)
        (folder / "metrics.jsonl").unlink()
        check_one_has_it(folder, *(draw.uniform(0, 0.02) for _ in range(4)))


def killed(folder: Path) -> None:
    with starters(folder, 0.0) as ends:
        assert outcome(ends[0][0]) == "has it"
        os.kill(ends[0][2], signal.SIGKILL)
        os.waitpid(ends[0][2], os.WNOHANG)
    assert (folder / "run.lock").exists()


def test_a_folder_is_taken_over_from_who_was_killed(tmp_path: Path) -> None:
    killed(tmp_path)
    assert check_unlocked(tmp_path)
    (tmp_path / f"run.json.{'a' * 32}.tmp").write_text("half")
    with lock_folder(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "run.lock"], "no draft is left"
    assert not (tmp_path / "run.lock").exists()


def test_two_starters_after_a_kill(tmp_path: Path) -> None:
    killed(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    check_one_has_it(tmp_path, 0.0, 0.001, 0.002)


def test_the_folder_of_a_run_that_ended_is_free_and_an_empty_one_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with lock_folder(folder):
        with pytest.raises(FolderInUseError, match=f"process {os.getpid()} on .*choose another --output"):
            check_unlocked(folder)
        with pytest.raises(FolderInUseError, match="in use"), lock_folder(folder):
            pass
        assert (folder / "run.lock").exists(), "who was refused takes nothing away"
    assert list(tmp_path.iterdir()) == []
    with lock_folder(folder):
        (folder / "run.json").touch()
    assert [path.name for path in folder.iterdir()] == ["run.json"]


def forged(folder: Path, **other: object) -> Path:
    """A lock as somebody else would have made it."""
    folder.mkdir(exist_ok=True)
    with lock_folder(folder):
        owner = json.loads((folder / "run.lock").read_bytes())
    (folder / "run.lock").write_text(json.dumps(owner | {"token": "another"} | other))
    return folder / "run.lock"


def test_a_process_of_the_same_number_is_another_one(tmp_path: Path) -> None:
    forged(tmp_path, started=1)
    with lock_folder(tmp_path):
        pass


def test_a_rank_whose_launcher_is_gone_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends by itself, and whoever killed the launcher may start the run again at once."""
    monkeypatch.setattr(files, "_LOOK", 0.01)
    monkeypatch.setattr(files, "_LEAVING", 0.05)
    lock = forged(tmp_path, launcher=1 if os.getppid() != 1 else 2)
    with pytest.raises(FolderInUseError, match="in use"), lock_folder(tmp_path):
        pass
    monkeypatch.setattr(files, "_LEAVING", 20.0)
    monkeypatch.setattr(files, "sleep", lambda _: lock.unlink(missing_ok=True))
    with lock_folder(tmp_path):
        pass


@pytest.mark.parametrize("content", ["of another machine", "", "{}", "[" * 100_000, '{"host": 1}', "\0" * 500])
def test_whom_nobody_here_can_look_up_is_gone_when_the_lock_is_not_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    for name, seconds in {"_LOOK": 0.01, "SILENCE": 0.05, "_SETTLING": 0.01}.items():
        monkeypatch.setattr(files, name, seconds)
    lock = forged(tmp_path, host="far", machine="another boot")
    if content != "of another machine":
        lock.write_text(content)
    os.utime(lock, (time.time() + 3600,) * 2)  # of a clock that goes wrong
    with lock_folder(tmp_path):
        assert json.loads(lock.read_bytes())["process"] == os.getpid()


def test_a_lock_of_another_machine_that_is_renewed_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = forged(tmp_path, host="far", machine="another boot", process=4711)
    monkeypatch.setattr(files, "sleep", lambda _: os.utime(lock, (5, 5)))
    with pytest.raises(FolderInUseError, match="process 4711 on far"), lock_folder(tmp_path):
        pass
    assert not check_unlocked(tmp_path), "it looks at this machine alone, and cannot tell"


def test_whoever_was_taken_for_dead_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BEAT", 0.01)

    def lose() -> None:
        before = (tmp_path / "run.lock").stat().st_mtime_ns
        while (tmp_path / "run.lock").stat().st_mtime_ns == before:
            time.sleep(0.01)
        os.replace(forged(tmp_path / "b", process=4711), tmp_path / "run.lock")
        time.sleep(10)

    found = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may have ignored it
    try:
        with pytest.raises(KeyboardInterrupt), lock_folder(tmp_path):
            lose()
    finally:
        signal.signal(signal.SIGINT, found)
    assert json.loads((tmp_path / "run.lock").read_bytes())["process"] == 4711, "the other one's stays"


def test_a_lock_that_somebody_removes_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BEAT", 0.01)
    with lock_folder(tmp_path):
        (tmp_path / "run.lock").unlink()
        end = time.monotonic() + 60
        while not (tmp_path / "run.lock").exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        monkeypatch.setattr(files, "BEAT", 5.0)
        with pytest.raises(FolderInUseError, match=f"process {os.getpid()}"), lock_folder(tmp_path):
            pass


def test_a_kernel_lock_that_somebody_keeps_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PATIENCE", 0.02)
    with files._one_at_a_time(tmp_path) as alone, lock_folder(tmp_path):
        assert alone


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with lock_folder(tmp_path), pytest.raises(FolderInUseError, match="in use"), lock_folder(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("linked", [True, False], ids=["hard links", "no links"])
def test_a_lock_is_made_once_and_of_whoever_is_gone_alone_it_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    """Also where two starters come to it at the same moment, without a kernel lock between them."""
    if not linked:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "not permitted")))
    lock = tmp_path / "run.lock"
    assert files._put(lock, b"of the dead")
    dead = files._look(lock)
    assert dead is not None
    assert not files._put(lock, b"mine")
    assert lock.read_bytes() == b"of the dead"
    files._take_away(lock, dead)
    assert files._put(lock, b"mine")
    if linked:
        files._take_away(lock, dead)  # of a starter that has judged the same dead owner, and comes late
        assert lock.read_bytes() == b"mine"
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


PLANTED: dict[str, Callable[[Path, Path], None]] = {
    "a link": lambda path, secret: path.symlink_to(secret),
    "a link to nothing": lambda path, secret: path.symlink_to(secret.with_name("nowhere")),
    "a link to itself": lambda path, _: path.symlink_to(path),
    "a FIFO": lambda path, _: os.mkfifo(path),
    "a socket": lambda path, _: os.mknod(path, stat.S_IFSOCK | 0o600),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_planted_as_a_lock_is_removed_and_never_followed(tmp_path: Path, kind: str) -> None:
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "run").mkdir()
    PLANTED[kind](tmp_path / "run" / "run.lock", tmp_path / "secret")
    with lock_folder(tmp_path / "run"):
        assert stat.S_ISREG((tmp_path / "run" / "run.lock").lstat().st_mode)
    assert (tmp_path / "secret").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_as_a_lock_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.lock").mkdir()
    with pytest.raises(ValueError, match=r"run\.lock is a folder.*Remove it"), lock_folder(tmp_path):
        pass


# --- drafts ----------------------------------------------------------------------------------------------------------


def test_there_is_one_draft_and_it_needs_no_torch() -> None:
    assert draft is library.draft
    code = "import sys, tools.common.files, tools.corpus.pipeline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_name_of_a_draft_cannot_be_guessed_and_a_link_there_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, secret = tmp_path / "run.json", tmp_path / "secret"
    assert len({library.beside(target) for _ in range(100)}) == 100
    secret.write_text("mine")
    for name in ("run.json.partial", "run.json.tmp", "run.json"):
        (tmp_path / name).symlink_to(secret)
    write_file(target, "new")
    assert (target.read_text(), target.is_symlink(), secret.read_text()) == ("new", False, "mine")
    for link in (secret, tmp_path / "nowhere"):  # also if it were guessed
        guessed = tmp_path / f"guessed-{link.name}"
        guessed.symlink_to(link)
        monkeypatch.setattr(library, "beside", lambda _, guessed=guessed: guessed)
        with pytest.raises(FileExistsError):
            write_file(target, "newer")
    assert (target.read_text(), secret.read_text(), (tmp_path / "nowhere").exists()) == ("new", "mine", False)


def test_a_file_that_cannot_be_written_is_named_and_not_its_draft(tmp_path: Path) -> None:
    for path in (tmp_path / "folder", tmp_path / "none" / "file"):
        (tmp_path / "folder").mkdir(exist_ok=True)
        with pytest.raises(OSError, match="directory") as told, draft(path) as file:
            file.write(b"words")
        assert str(told.value).endswith(f"directory: '{path}'")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_drafts_that_were_left_behind_are_removed_and_young_ones_of_others_are_not(tmp_path: Path) -> None:
    old, young, other = (tmp_path / f"{name}.{'0a' * 16}.tmp" for name in ("out.json", "out.json.gz", "other.json"))
    (tmp_path / "out.json.mine.tmp").write_text("no draft")
    for path in (old, young, other):
        path.write_text("half")
    os.utime(old, (0, 0)), os.utime(other, (0, 0))
    check_output(tmp_path / "out.json")
    assert not old.exists()
    assert sorted(path.name[:6] for path in tmp_path.iterdir()) == ["other.", "out.js", "out.js"]


# --- what is read, written to, and removed ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["a FIFO", "a socket", "a device"])
@pytest.mark.parametrize("linked", [False, True])
def test_only_regular_files_are_read_and_replaced(tmp_path: Path, kind: str, linked: bool) -> None:
    path = tmp_path / "file"
    if kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        PLANTED[kind](path, path)
    if linked:
        (tmp_path / "link").symlink_to(path)
    named = tmp_path / ("link" if linked else "file")
    with pytest.raises(OSError, match=f"it is {kind}, and a regular file is needed"):
        library.read_file(named)
    with pytest.raises(ValueError, match=f"--html must be a file. .* is {kind}, whose place the file would take"):
        check_output(named, "--html")
    (tmp_path / "good").write_bytes(b"content")
    (tmp_path / "to good").symlink_to("good")
    assert library.read_file(tmp_path / "to good") == b"content"
    with pytest.raises(IsADirectoryError):
        library.read_file(tmp_path)


@pytest.mark.parametrize("name", [b"caf\xe9", b"a/\xff\xfe/b", b"\x80"])
def test_a_path_that_is_not_utf8_is_refused_and_nothing_is_made(tmp_path: Path, name: bytes) -> None:
    path = tmp_path / os.fsdecode(name)
    for check in (library.make_folder, library.check_folder, check_output):
        with pytest.raises(ValueError, match=r"is not UTF-8.*Choose a path of such characters") as refused:
            check(path)
        assert str(refused.value).isprintable()
    with pytest.raises(ValueError, match="is not UTF-8"), lock_folder(path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_the_locale_cannot_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    code = "import sys; from tools.common.files import nearest; from pathlib import Path; nearest(Path(sys.argv[1]))"
    path = f"{tmp_path}/Z\xfcrich"
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for more in ({}, {"PYTHONUTF8": "1"}):
        done = subprocess.run(
            [sys.executable, "-c", code, path], env=plain | more, capture_output=True, encoding="utf-8", check=False
        )
        refused = "is read in ascii, the encoding of this locale, and not in UTF-8. Set LC_ALL=C.UTF-8" in done.stderr
        assert (done.returncode, refused) == ((0, False) if more else (1, True))


def test_a_link_to_nothing_is_no_place_to_write_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("link", "link/a/b", "loop", "loop/a"):
        with pytest.raises(ValueError, match=r"is a link to .*, which is not there. Remove it or make that"):
            library.make_folder(tmp_path / name)
        with pytest.raises(ValueError, match="is a link to"):
            check_output(tmp_path / name)
    (tmp_path / "good").symlink_to(tmp_path)
    assert library.make_folder(tmp_path / "good" / "new") == [tmp_path / "good" / "new"]


def test_what_is_changed_between_the_look_and_the_opening_is_neither_followed_nor_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "fifo")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_symlink", lambda _: False)
        with pytest.raises(OSError, match="symbolic links"):
            library.append(tmp_path / "link")
        regular = os.stat(tmp_path / "secret")
        patch.setattr(os, "stat", lambda *_: regular)
        with pytest.raises(OSError, match="it is a FIFO"):
            library.open_regular(tmp_path / "fifo")
    assert (tmp_path / "secret").read_text() == "mine"


def test_a_link_is_removed_and_not_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    for target in ("folder", "folder/file", "nowhere"):
        (tmp_path / "link").symlink_to(target)
        assert library.remove(tmp_path / "link") is None
    assert (tmp_path / "folder" / "file").exists()
    assert not os.path.lexists(tmp_path / "link")
    assert library.remove(tmp_path / "folder") is None
    assert library.remove(tmp_path / "folder") is None


@pytest.mark.parametrize("name", ["in.jsonl", "link", "./in.jsonl"])
def test_no_output_takes_the_place_of_an_input(name: str, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("words")
    (tmp_path / "link").hardlink_to(file)
    with pytest.raises(ValueError, match="is another file of this command, too, and would be lost"):
        check_output(tmp_path / name, others=[None, tmp_path / "none", file])
    check_output(tmp_path / "new.jsonl", others=[file])
    with pytest.raises(ValueError, match=r"--html is .*, and would be lost"):
        check_output(tmp_path / "new.jsonl", "--html", others=[tmp_path / "new.jsonl"])
