"""`tools.checkpoint`: what it shows, what it finds, and how it exits."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from tensor3d import Cube, Linear3D, MixedPrecisionPolicy, checkpoint
from tensor3d.checkpoint import validation
from tools.checkpoint.__main__ import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints of a layer of 3 x 5 weights and 3 biases."""
    run, cube = tmp_path_factory.mktemp("run"), Cube.single()
    cube.manual_seed(1)
    model = Linear3D(5, 3, cube)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    for step in (3, 12):
        extra = {"scale": torch.tensor(2.0)}
        checkpoint.save(run / "checkpoints", step, model, optimizer, cube, {"corpus": "abc", "loss": 1.5}, extra)
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def test_inspect_for_people(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run)]) == 0
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == str(run / "checkpoints" / "step-00000012")
    assert lines[1].startswith("step 12, written on 1x1x1 (1 ranks), optimiser AdamW, ")
    assert 'corpus: "abc"' in lines
    assert "loss: 1.5" in lines
    assert "model 2 18 72" in lines
    assert "optimizer 6 38 152" in lines  # two moments of 18 numbers, and two counts of steps
    assert "extra 1 1 4" in lines
    assert "model.weight 3x5 float32 60 1" in lines
    assert "optimizer.bias.step one float32 4 1" in lines


def test_inspect_for_programs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoints" / "step-00000003"
    assert main(["inspect", str(folder), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["progress"]["step"] == 3
    assert content["kinds"]["model"] == {"tensors": 2, "numbers": 18, "bytes": 72}
    assert content["tensors"]["model.weight"] == {"shape": [3, 5], "dtype": "float32", "bytes": 60, "blocks": 1}
    assert content["bytes"] + (folder / "checksums.json").stat().st_size == sum(
        path.stat().st_size for path in folder.iterdir()
    )


def test_inspect_counts_tensors_of_every_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cube = Cube.single(precision=MixedPrecisionPolicy(compute=torch.bfloat16, fp8="delayed"))
    model = Linear3D(16, 16, cube)
    model(torch.ones(16, 16, dtype=torch.bfloat16)).sum().backward()
    folder = checkpoint.save(tmp_path, 1, model, torch.optim.SGD(model.parameters(), lr=1.0), cube, {})
    assert main(["inspect", str(folder), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert {"model", "fp8"} <= content["kinds"].keys()
    for what in ("tensors", "bytes"):
        rows = content["tensors"].values()
        assert sum(kind[what] for kind in content["kinds"].values()) == sum(
            1 if what == "tensors" else row["bytes"] for row in rows
        )


def test_verify_the_newest_or_all(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = checkpoint.complete(run / "checkpoints")
    assert main(["verify", str(run), "--all"]) == 0
    assert capsys.readouterr().out == f"{old}: good\n{new}: good\n"
    file = old / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["verify", str(run)]) == 0
    assert capsys.readouterr().out == f"{new}: good\n"
    assert main(["verify", str(run / "checkpoints"), "--all"]) == 1
    out = capsys.readouterr().out
    assert f"{old}: DAMAGED\n  {file} is damaged: CRC-32" in out
    assert f"{new}: good" in out
    assert main(["verify", str(old)]) == 1


def test_the_newest_may_be_one_that_cannot_be_told(
    run: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (run / "checkpoints" / "step-00000012" / "progress.json").write_text("{")
    for command in ("inspect", "verify"):
        caplog.clear()
        assert main([command, str(run)]) == 0
        assert "step-00000003" in capsys.readouterr().out
        (told,) = caplog.messages
        assert "step-00000012/progress.json is damaged" in told
    assert main(["verify", str(run), "--all"]) == 1


def test_verify_names_a_missing_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoints" / "step-00000012"
    (folder / "progress.json").unlink()
    assert main(["verify", str(folder)]) == 1
    assert "it has no progress.json" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_what_is_no_checkpoint(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(tmp_path / "nowhere")]) == 2
    assert "nowhere holds no checkpoint. Name a checkpoint" in capsys.readouterr().err
    (tmp_path / "step-00000001").mkdir()
    assert main(["inspect", str(tmp_path)]) == 2
    assert "is not a checkpoint: it has no progress.json" in capsys.readouterr().err


def plant(folder: Path) -> list[str]:
    """What no save has written, of every kind."""
    (folder / "notes.txt").write_text("mine")
    (folder / ".metadata").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    (folder / "rank-00007.safetensors").symlink_to(folder / "rank-00000.safetensors")
    (folder / "more").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / os.fsdecode(b"caf\xe9\n\x1b[2J")).touch()
    return [".metadata", r"caf\udce9\n\x1b[2J", "more", "notes.txt", "pipe", "rank-00007.safetensors"]


def test_verify_names_strangers_and_opens_none(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoints" / "step-00000012"
    names = plant(folder)
    assert main(["verify", str(run), "--values"]) == 0
    told = [f"  {name} is a stranger: no save has written it, and nothing reads it" for name in names]
    assert capsys.readouterr().out.splitlines() == [f"{folder}: good", *told]
    model = Linear3D(5, 3, Cube.single())
    assert checkpoint.load(folder, model, None, Cube.single())["step"] == 12


def saved_with(run: Path, name: str, value: float, dtype: torch.dtype) -> Path:
    """A checkpoint of a layer, of which one number is not finite, with right checksums."""
    cube = Cube.single()
    model = Linear3D(5, 3, cube).to(dtype)
    with torch.no_grad():
        tensor = dict(model.named_parameters())[name]
        tensor.view(-1)[-1] = value
    return checkpoint.save(run, 3, model, torch.optim.SGD(model.parameters(), lr=1.0), cube, {})


@pytest.mark.parametrize(
    ("name", "value", "dtype", "told"),
    [
        ("weight", float("nan"), torch.float32, "1 NaN and 0 inf of 15"),
        ("bias", float("-inf"), torch.float64, "0 NaN and 1 inf of 3"),
        ("weight", float("inf"), torch.bfloat16, "0 NaN and 1 inf of 15"),
        ("bias", float("nan"), torch.float16, "1 NaN and 0 inf of 3"),
    ],
)
def test_verify_finds_numbers_that_are_not_finite(
    tmp_path: Path,
    name: str,
    value: float,
    dtype: torch.dtype,
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(validation, "_NUMBERS", 7)  # a row at a time
    folder = saved_with(tmp_path, name, value, dtype)
    assert main(["verify", str(folder)]) == 0, "its files are as they were written"
    assert capsys.readouterr().out == f"{folder}: good\n"
    assert main(["verify", str(folder), "--values"]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{folder}: NOT FINITE\n  model.{name} has numbers that are not finite: {told}.")
    assert out.endswith("Resume from an earlier checkpoint.\n")


def test_verify_finds_a_moment_that_is_not_finite(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cube = Cube.single()
    model = Linear3D(5, 3, cube)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.full((2, 5), float("nan"))).sum().backward()
    optimizer.step()
    checkpoint.save(run / "checkpoints", 20, model, optimizer, cube, {}, {"scale": torch.tensor(float("inf"))})
    assert main(["verify", str(run), "--values", "--all"]) == 1
    out = capsys.readouterr().out
    assert out.count(": good") == 2
    assert "optimizer.weight.exp_avg has numbers that are not finite: 15 NaN" in out
    assert "extra.scale has numbers that are not finite: 0 NaN and 1 inf of 1." in out
