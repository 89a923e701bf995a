"""Damaged, incomplete and malicious checkpoints: refused by name, on every rank, before anything is changed."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tensor3d import checkpoint
from tensor3d.checkpoint.format import checksum
from tests.checkpoint.subject import ALONE, Shape, make, same, state, step
from tests.ranks import run_ranks


def written(shape: Shape, folder: Path) -> None:
    cube, model, optimizer = make(shape, seed=1)
    step(cube, model, optimizer)
    checkpoint.save(folder, 1, model, optimizer, cube, {})


def read_damaged(shape: Shape, folder: Path) -> str:
    cube, model, optimizer = make(shape, seed=2)
    step(cube, model, optimizer)
    before = state(model, optimizer)
    with pytest.raises(checkpoint.DamagedError, match=r"step-00000001") as problem:
        checkpoint.load(folder, model, optimizer, cube)
    assert same(state(model, optimizer), before)
    return str(problem.value)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-ranks")
    run_ranks(2, written, (1, 2, 1, 1), folder)
    return folder / "step-00000001"


@pytest.fixture
def folder(two_ranks: Path, tmp_path: Path) -> Path:
    """A checkpoint of two ranks, to be damaged."""
    copy = tmp_path / two_ranks.name
    copy.mkdir()
    for path in two_ranks.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def empty(path: Path) -> None:
    path.write_bytes(b"")


FILES = ("rank-00000.safetensors", "rank-00001.safetensors", "tensors.json", "progress.json", "checksums.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip, cut, empty, Path.unlink], ids=["flipped", "cut", "empty", "missing"])
def test_every_damage_of_every_file_is_found(folder: Path, name: str, damage: Callable[[Path], None]) -> None:
    assert checkpoint.verify(folder) == []
    damage(folder / name)
    problems = checkpoint.verify(folder)
    assert len(problems) == 1
    assert name in problems[0]
    assert name in read_damaged(ALONE, folder)


@pytest.mark.parametrize(("name", "damage"), [("rank-00001.safetensors", flip), ("tensors.json", Path.unlink)])
def test_every_rank_hears_of_it(folder: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(folder / name)
    told = run_ranks(2, read_damaged, (1, 2, 1, 1), folder)
    assert told[0] == told[1]
    assert name in told[0]


def test_all_damaged_files_are_named(folder: Path) -> None:
    flip(folder / "rank-00000.safetensors")
    flip(folder / "rank-00001.safetensors")
    first, second = checkpoint.verify(folder)
    assert "rank-00000.safetensors is damaged: CRC-32" in first
    assert "rank-00001.safetensors is damaged: CRC-32" in second


# --- malice --------------------------------------------------------------------------------------------------------


class Command:
    """Runs when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.target}",)


def test_the_command_would_run(tmp_path: Path) -> None:
    """What the next test is worth."""
    pickle.loads(pickle.dumps(Command(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", [*FILES, ".metadata", "__0_0.distcp", "rank-00002.safetensors"])
@pytest.mark.parametrize("save", [pickle.dump, torch.save], ids=["pickle", "torch"])
def test_no_pickle_is_ever_read(folder: Path, name: str, save: Callable[..., None], tmp_path: Path) -> None:
    """In the place of any file, with checksums that fit, and as a file beside them."""
    target = tmp_path / "ran"
    known = (folder / name).exists()
    with (folder / name).open("wb") as file:
        save(Command(target), file)
    if known and name != "checksums.json":
        forge(folder, name)
    assert bool(checkpoint.verify(folder)) == known
    cube, model, optimizer = make(ALONE, seed=2)
    if known:
        with pytest.raises(ValueError, match=name):
            checkpoint.load(folder, model, optimizer, cube)
    else:
        checkpoint.load(folder, model, optimizer, cube)
    assert not target.exists()


def forge(folder: Path, name: str) -> None:
    """Makes the checksums fit what a file is now."""
    sums = json.loads((folder / "checksums.json").read_text())
    found = checksum(folder / name)
    sums["files"][name] = {"bytes": found.bytes, "crc32": f"{found.crc32:08x}"}
    (folder / "checksums.json").write_text(json.dumps(sums))


def edit(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))
    if name != "checksums.json":
        forge(folder, name)


TABLE = "model.tokens.weight"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("checksums.json", lambda c: c["files"].update({"../evil": {"bytes": 0, "crc32": "0"}}), "no file of a chec"),
        ("checksums.json", lambda c: c["files"].pop("tensors.json"), "no line for tensors.json"),
        ("checksums.json", lambda c: c["files"]["tensors.json"].update(bytes=-1), "-1 is no count"),
        ("checksums.json", lambda c: c["files"]["tensors.json"].update(crc32="xyz"), "is damaged"),
        ("checksums.json", lambda c: c.update(files=[]), "is damaged"),
        ("tensors.json", lambda c: c["tensors"][TABLE].update(dtype="C64"), "damaged: it has no 'C64'"),
        ("tensors.json", lambda c: c["tensors"][TABLE]["chunks"].pop(), "do not make it up"),
        ("tensors.json", lambda c: c["tensors"][TABLE]["chunks"][0].pop(), "is damaged"),
        ("tensors.json", lambda c: c["tensors"][TABLE]["chunks"][1][1].__setitem__(0, 60), "lies outside of it"),
        ("tensors.json", lambda c: c["tensors"][TABLE].update(shape=[-67, -16]), "is no count"),
        ("tensors.json", lambda c: c["tensors"][TABLE].update(shape=[1e999, 16]), "is no count"),
        ("tensors.json", lambda c: c["tensors"].update({TABLE: None}), "is damaged"),
        ("tensors.json", lambda c: c["tensors"][TABLE].update(shape=[0, 2**63], chunks=[]), "is no count"),
        ("tensors.json", lambda c: c["tensors"].pop("random.cpu.1"), "no random stream of rank 1 of 2"),
        ("tensors.json", lambda c: c["tensors"]["random.cpu.1"].update(dtype="I8"), "no random stream of rank 1 of 2"),
        ("progress.json", lambda c: c.pop("ranks"), "its ranks is None"),
        ("progress.json", lambda c: c.update(ranks="2"), "its ranks is '2'"),
        ("progress.json", lambda c: c.update(serial=-1), "its serial is -1"),
        ("progress.json", lambda c: c.pop("cube"), "its cube is None"),
        ("progress.json", lambda c: c.update(optimizer=[]), r"its optimizer is \[\]"),
    ],
)
def test_lists_that_make_no_sense(
    folder: Path,
    name: str,
    change: Callable[[dict[str, Any]], object],
    message: str,
) -> None:
    edit(folder, name, change)
    (problem,) = checkpoint.verify(folder)
    with pytest.raises(ValueError, match=message):
        raise ValueError(problem)
    assert name in read_damaged(ALONE, folder)


def test_a_file_that_does_not_hold_what_the_list_says(folder: Path) -> None:
    """Blocks of two ranks of the same size, exchanged: sizes alone would not tell."""
    edit(folder, "tensors.json", lambda c: c["tensors"]["random.cpu.0"]["chunks"][0].__setitem__(0, 1))
    (one, two) = checkpoint.verify(folder)
    assert "rank-00000.safetensors contradicts tensors.json on random.cpu.0" in one
    assert "rank-00001.safetensors contradicts tensors.json on random.cpu.0" in two
    assert "contradicts tensors.json" in read_damaged(ALONE, folder)
    edit(folder, "progress.json", lambda c: c.update(ranks=3))
    with pytest.raises(checkpoint.DamagedError, match=r"random.*2 of \b3\b"):
        checkpoint.read_contents(folder)
