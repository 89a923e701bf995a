"""Which checkpoint is the newest, which stay, and what is refused before anything is read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tensor3d import checkpoint
from tensor3d.checkpoint import directory as folders
from tests.checkpoint.subject import ALONE, make
from tests.ranks import run_fresh_ranks

FACTS = {"step": 1, "version": 1, "serial": 1, "ranks": 1, "cube": "1x1x1", "optimizer": "AdamW"}


def put(directory: Path, step: int, serial: int | None = None, suffix: str = "") -> Path:
    path = directory / f"step-{step:08d}{suffix}"
    path.mkdir(parents=True)
    if serial is not None:
        (path / "progress.json").write_text(json.dumps({"version": 1, "step": step, "serial": serial}))
    return path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_folder_of_checkpoints_is_told_apart(tmp_path: Path) -> None:
    put(tmp_path, 4), put(tmp_path, 12)
    put(tmp_path, 13, suffix=".partial")
    put(tmp_path, 14, suffix=".trash")
    (tmp_path / "step-00000015").write_text("a file")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000012"
    with pytest.raises(ValueError, match=r"Did you mean .*step-00000012"):
        checkpoint.read_progress(tmp_path)
    assert checkpoint.latest(tmp_path / "nowhere") is None


def test_the_newest_is_the_one_that_was_written_last(tmp_path: Path) -> None:
    """A run that went back to step 100 and did 150 does not go on from the step 300 that it left behind."""
    put(tmp_path, 100, 1), put(tmp_path, 300, 3)
    new = put(tmp_path, 150, 4)
    assert checkpoint.latest(tmp_path) == new
    assert [path.name[-3:] for path in checkpoint.complete(tmp_path)] == ["100", "300", "150"]
    assert folders.next_serial(tmp_path) == 5


def test_a_former_checkpoint_counts_until_the_new_one_is_there(tmp_path: Path) -> None:
    put(tmp_path, 1, 1)
    old = put(tmp_path, 2, 2, suffix=".old")
    assert checkpoint.latest(tmp_path) == old
    folders.clean(tmp_path)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    put(tmp_path, 2, 1, suffix=".old")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000002"
    folders.clean(tmp_path)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_one_that_does_not_say_when_it_was_written_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = put(tmp_path, 3, 1)
    assert checkpoint.latest(tmp_path) == found
    assert not caplog.messages
    (put(tmp_path, 4, 2) / "progress.json").write_text("{")
    put(tmp_path, 5)
    assert checkpoint.latest(tmp_path) == found
    assert len(caplog.messages) == 2
    for step, message in zip((4, 5), sorted(caplog.messages), strict=True):
        assert f"step-0000000{step}/progress.json" in message
        assert message.endswith(f"Whether it is newer than {found} nobody can tell.")


def test_rotation(tmp_path: Path) -> None:
    for step in range(1, 9):
        put(tmp_path, step, step)
    folders.mark_best(tmp_path / "step-00000001")
    folders.rotate(tmp_path, keep_last=None, keep_every=4, protected=())
    assert len(checkpoint.complete(tmp_path)) == 8
    folders.rotate(tmp_path, keep_last=2, keep_every=4, protected={"step-00000003"})
    kept = [int(path.name[-8:]) for path in checkpoint.complete(tmp_path)]
    assert kept == [1, 3, 4, 7, 8]
    assert checkpoint.best(tmp_path) == tmp_path / "step-00000001"


@pytest.mark.parametrize("content", ["", "step-00000009", "../elsewhere", "\xff"])
def test_a_best_that_is_not_there(tmp_path: Path, content: str) -> None:
    (tmp_path / "best").write_bytes(content.encode("latin-1"))
    assert checkpoint.best(tmp_path) is None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "is not a checkpoint: it has no progress.json"),
        ({".metadata": "cos\nsystem\n(S'false'\ntR."}, "is a pickle, which may run code: it is never read"),
        ({"progress.json": "{"}, "is damaged"),
        ({"progress.json": "[" * 100_000}, "is damaged"),
        ({"progress.json": "[]"}, "holds no object"),
        ({"progress.json": json.dumps({"note": 1})}, "names no step"),
        ({"progress.json": json.dumps({"step": 1})}, "from before checkpoints had a version"),
        ({"progress.json": json.dumps({"step": 1, "version": 2})}, "written by a newer tensor3d.*Update tensor3d"),
        ({"progress.json": json.dumps({"step": 1, "version": "1"})}, "written by another tensor3d"),
        ({"progress.json": json.dumps(FACTS)}, "checksums.json.*No such file"),
    ],
)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    cube, model, optimizer = make(ALONE, seed=1)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(tmp_path, model, optimizer, cube)
    assert len(checkpoint.verify(tmp_path)) == 1


@pytest.mark.parametrize(
    ("files", "damaged"),
    [
        ({}, True),
        ({"progress.json": "{"}, True),
        ({"progress.json": json.dumps(FACTS | {"step": True})}, True),
        ({"progress.json": json.dumps(FACTS | {"ranks": 0})}, True),
        ({"progress.json": json.dumps(FACTS | {"cube": None})}, True),
        ({"progress.json": json.dumps(FACTS | {"version": 2})}, False),
        ({".metadata": "a pickle"}, False),
    ],
)
def test_damage_is_told_from_what_does_not_belong_here(tmp_path: Path, files: dict[str, str], damaged: bool) -> None:
    folder = put(tmp_path, 1)
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(ValueError, match="step-00000001") as problem:
        checkpoint.read_progress(folder)
    assert isinstance(problem.value, checkpoint.DamagedError) == damaged
    with pytest.raises(ValueError, match="is not a checkpoint") as problem:
        checkpoint.read_progress(tmp_path / "step-00000002")
    assert not isinstance(problem.value, checkpoint.DamagedError), "a name that was mistyped"


# --- a directory that cannot be written ----------------------------------------------------------------------------


def test_a_writable_directory_is_left_as_it_was(tmp_path: Path) -> None:
    checkpoint.check_writable(tmp_path)
    checkpoint.check_writable(tmp_path / "not" / "yet" / "there")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"directory.*file"):
        checkpoint.check_writable(tmp_path / "file" / "inside")


def _without_permission(directory: Path) -> str:
    if os.geteuid() == 0:
        os.setuid(65534)  # root may write anywhere
    with pytest.raises(ValueError, match="checkpoints cannot be written") as problem:
        checkpoint.check_writable(directory / "checkpoints")
    return str(problem.value)


def test_a_directory_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    for folder in tmp_path.parents[:3]:  # pytest's own, which nobody else may enter
        if folder.stat().st_uid == os.geteuid() and folder.name.startswith("pytest-"):
            folder.chmod(0o755)
    (told,) = run_fresh_ranks(1, _without_permission, tmp_path)
    assert f"Permission denied in {tmp_path}" in told


# --- what others have put there ------------------------------------------------------------------------------------

READ = ("progress.json", "tensors.json", "checksums.json", "rank-00000.safetensors")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    cube, model, optimizer = make(ALONE, seed=1)
    return checkpoint.save(tmp_path / "checkpoints", 3, model, optimizer, cube, {})


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("kind", ["FIFO", "device", "link to a FIFO", "folder"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(saved: Path, name: str, kind: str) -> None:
    path = saved / name
    path.unlink()
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(saved / "pipe")
        path.symlink_to(saved / "pipe")
    cube, model, optimizer = make(ALONE, seed=1)
    with pytest.raises(checkpoint.DamagedError, match=f"{name} (cannot be read|is damaged).*earlier checkpoint"):
        checkpoint.load(saved, model, optimizer, cube)
    assert name in checkpoint.verify(saved)[0]
    folders.next_serial(saved.parent)  # which looks at every one


def test_a_best_that_is_no_regular_file_is_none_and_gives_way(saved: Path) -> None:
    os.mkfifo(saved.parent / "best")
    assert checkpoint.best(saved.parent) is None
    folders.mark_best(saved)
    assert checkpoint.best(saved.parent) == saved


@pytest.mark.parametrize("name", ["best", "best.partial"])
def test_a_planted_link_keeps_its_target_when_the_best_is_marked(saved: Path, name: str) -> None:
    secret = saved.parent.parent / "secret"
    secret.write_text("mine")
    (saved.parent / name).symlink_to(secret)
    folders.mark_best(saved)
    assert (checkpoint.best(saved.parent), secret.read_text()) == (saved, "mine")


NAMES = (
    "step-00000007.trash",
    "step-00000007.0a1b2c3d.trash",
    "step-00000007.old",
    "step-00000007.0a1b2c3d.partial",
    "step-0123456789abcdef.token",
)


@pytest.mark.parametrize("target", ["folder", "file", "nowhere", "itself"])
def test_links_among_the_checkpoints_are_unlinked_and_never_followed(saved: Path, target: str) -> None:
    other = saved.parent.parent / "other"
    (other / "folder").mkdir(parents=True)
    (other / "folder" / "rank-00000.safetensors").write_text("mine")
    (other / "file").write_text("mine")
    for name in NAMES:
        (saved.parent / name).symlink_to(name if target == "itself" else other / target)
    for step in (7, 8):  # 7 takes the place of what has become of .old
        cube, model, optimizer = make(ALONE, seed=1)
        with checkpoint.Checkpoints(saved.parent, cube, keep_last=1) as checkpoints:
            checkpoints.save(step, model, optimizer, {})
            checkpoints.wait()
            assert [outcome.error for outcome in checkpoints.finished()] == [None]
    assert names(saved.parent) == ["step-00000008"]
    assert (other / "folder" / "rank-00000.safetensors").read_text() == (other / "file").read_text() == "mine"


@pytest.mark.parametrize("target", ["another checkpoint", "nowhere", "a file"])
def test_a_link_with_the_name_of_a_checkpoint_is_replaced_and_rotated_as_a_link(saved: Path, target: str) -> None:
    other = saved.parent.parent / "other"
    kept = saved.rename(other) if target == "another checkpoint" else other
    if target == "a file":
        other.write_text("mine")
    for step in (5, 6):
        (saved.parent / f"step-{step:08d}").symlink_to(other)
    cube, model, optimizer = make(ALONE, seed=1)
    with checkpoint.Checkpoints(saved.parent, cube, keep_last=1) as checkpoints:
        checkpoints.save(5, model, optimizer, {})
        checkpoints.wait()
        assert [outcome.error for outcome in checkpoints.finished()] == [None]
    assert checkpoint.latest(saved.parent) == saved.parent / "step-00000005"
    assert not (saved.parent / "step-00000005").is_symlink()
    if target == "another checkpoint":
        assert checkpoint.verify(kept) == []
        assert names(saved.parent) == ["step-00000005"]


def test_leftovers_that_cannot_be_deleted_are_a_warning(
    saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for left in (saved.parent / name for name in (*NAMES, "step-00000003.old")):
        (left / "inside").mkdir(parents=True)
        for path in (left / "inside", left):
            os.utime(path, (0, 0))

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("tensor3d.files.shutil.rmtree", refuse)
    cube, model, optimizer = make(ALONE, seed=1)
    for _ in range(2):
        with checkpoint.Checkpoints(saved.parent, cube, keep_last=2) as checkpoints:
            for step in (3, 4):
                checkpoints.save(step, model, optimizer, {})
            checkpoints.wait()
            assert [outcome.error for outcome in checkpoints.finished()] == [None, None]
    assert "is left over and cannot be removed: Permission denied. It is in nobody's way." in caplog.text
    assert [path.name for path in checkpoint.complete(saved.parent)][-2:] == ["step-00000003", "step-00000004"]


def test_a_folder_that_cannot_be_named_is_one_sentence(tmp_path: Path) -> None:
    cube, _, _ = make(ALONE, seed=1)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path, told in {
        "link": "is a link to",
        "link/inside": "is a link to",
        os.fsdecode(b"\xff"): "is not UTF-8",
    }.items():
        with pytest.raises(ValueError, match=told):
            checkpoint.check_writable(tmp_path / path)
        with pytest.raises(ValueError, match=told):
            checkpoint.Checkpoints(tmp_path / path, cube)
    assert names(tmp_path) == ["link"]
