"""Checkpoints: whole or not there, exact, and readable on any cube."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tensor3d import Cube, Embedding3D, Linear3D, checkpoint, shard, sum_copies
from tests.ranks import run_ranks
from tests.twins import full

Shape = tuple[int, int, int, int]
VOCAB = 67  # does not divide by anything


class Model(torch.nn.Module):
    def __init__(self, cube: Cube) -> None:
        super().__init__()
        self.tokens = Embedding3D(VOCAB, 16, cube)
        self.linear = Linear3D(16, 24, cube)


def make(shape: Shape, seed: int) -> tuple[Cube, Model, torch.optim.Optimizer]:
    cube = Cube(*shape)
    cube.manual_seed(seed)
    model = Model(cube)
    return cube, model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def step(cube: Cube, model: Model, optimizer: torch.optim.Optimizer) -> None:
    ids = torch.arange(64).chunk(cube.shape.planes)[cube.coordinate["data"] * cube.shape.x + cube.coordinate["x"]]
    x = model.tokens(ids) + shard(torch.ones(64, 16), cube, "z")
    sum_copies(model.linear(x).square().sum(), cube.over("data", "x", "y", "z")).backward()
    optimizer.step()
    optimizer.zero_grad()


def state(model: Model, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [optimizer.state[p][key] for p in model.parameters() for key in ("exp_avg", "exp_avg_sq")]
    return [full(t).clone() for t in [*model.parameters(), *moments]]


def written(shape: Shape, folder: Path) -> list[torch.Tensor]:
    cube, model, optimizer = make(shape, seed=1)
    step(cube, model, optimizer)
    path = checkpoint.save(folder, 1, model, optimizer, cube, {"note": "first"})
    assert path == folder / "step-00000001"
    torch.rand(3)  # the stream moves on
    return state(model, optimizer)


def read(shape: Shape, folder: Path) -> tuple[list[torch.Tensor], torch.Tensor]:
    cube, model, optimizer = make(shape, seed=2)
    progress = checkpoint.load(folder / "step-00000001", model, optimizer, cube)
    assert (progress["step"], progress["note"]) == (1, "first")
    return state(model, optimizer), torch.rand(3)


def test_any_cube_reads_what_another_wrote(tmp_path: Path) -> None:
    wanted = run_ranks(8, written, (2, 2, 2, 1), tmp_path)[0]
    for shape, ranks in [((1, 4, 1, 1), 4), ((1, 2, 2, 2), 8)]:
        for got, _ in run_ranks(ranks, read, shape, tmp_path):
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    alone, _ = read((1, 1, 1, 1), tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(alone, wanted, strict=True))


def streams(shape: Shape, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    cube, model, optimizer = make(shape, seed=1)
    step(cube, model, optimizer)
    checkpoint.save(folder, 1, model, optimizer, cube, {"note": "first"})
    ahead = torch.rand(3)
    checkpoint.load(folder / "step-00000001", model, optimizer, cube)
    return ahead, torch.rand(3)


def test_each_rank_gets_its_random_stream_back(tmp_path: Path) -> None:
    drawn = run_ranks(2, streams, (1, 2, 1, 1), tmp_path)
    for ahead, again in drawn:
        assert torch.equal(ahead, again)
    assert not torch.equal(drawn[0][0], drawn[1][0])


def failing_save(shape: Shape, folder: Path) -> bool:
    """A disk that refuses in the middle: the older checkpoint stays the latest."""
    cube, model, optimizer = make(shape, seed=1)
    step(cube, model, optimizer)
    checkpoint.save(folder, 1, model, optimizer, cube, {})
    before, checkpoint.dcp.save = checkpoint.dcp.save, broken
    try:
        with pytest.raises(OSError, match="no space"):
            checkpoint.save(folder, 2, model, optimizer, cube, {})
    finally:
        checkpoint.dcp.save = before
    failed = checkpoint.latest(folder)
    checkpoint.save(folder, 2, model, optimizer, cube, {})
    checkpoint.save(folder, 2, model, optimizer, cube, {"again": True})
    return failed == folder / "step-00000001" and checkpoint.latest(folder) == folder / "step-00000002"


def broken(*_: object, checkpoint_id: Path, **__: object) -> None:
    checkpoint_id.mkdir(parents=True, exist_ok=True)
    (checkpoint_id / "__0_0.distcp").write_bytes(b"half")
    raise OSError("no space left on device")


def test_a_save_that_fails_leaves_the_older_one(tmp_path: Path) -> None:
    assert all(run_ranks(2, failing_save, (2, 1, 1, 1), tmp_path / "two"))
    assert failing_save((1, 1, 1, 1), tmp_path / "one")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["step-00000001", "step-00000002"]
    assert checkpoint.read_progress(tmp_path / "one" / "step-00000002")["again"] is True


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "is not a checkpoint"),
        ({".metadata": ""}, "is not a checkpoint"),
        ({".metadata": "", "progress.json": "{"}, "is damaged"),
        ({".metadata": "", "progress.json": json.dumps({"note": 1})}, "names no step"),
    ],
)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    cube, model, optimizer = make((1, 1, 1, 1), seed=1)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(tmp_path, model, optimizer, cube)


def read_damaged(shape: Shape, folder: Path) -> str:
    cube, model, optimizer = make(shape, seed=2)
    with pytest.raises(ValueError, match="cannot be read") as problem:
        checkpoint.load(folder / "step-00000001", model, optimizer, cube)
    return str(problem.value)


@pytest.mark.parametrize("damage", ["__0_0.distcp", "__1_0.distcp", ".metadata"])
def test_a_damaged_checkpoint_is_refused_on_every_rank(tmp_path: Path, damage: str) -> None:
    run_ranks(2, written, (1, 2, 1, 1), tmp_path)
    file = tmp_path / "step-00000001" / damage
    file.write_bytes(file.read_bytes()[:0]) if damage == ".metadata" else file.unlink()
    told = [*run_ranks(2, read_damaged, (1, 2, 1, 1), tmp_path), read_damaged((1, 1, 1, 1), tmp_path)]
    assert all("step-00000001" in line and "\n" not in line for line in told)


def test_a_folder_of_checkpoints_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "step-00000012").mkdir()
    (tmp_path / "step-00000013.partial").mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000012"
    with pytest.raises(ValueError, match=r"Did you mean .*step-00000012"):
        checkpoint.read_progress(tmp_path)
    assert checkpoint.latest(tmp_path / "nowhere") is None
