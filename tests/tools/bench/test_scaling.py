"""`bench strong` and `bench weak`: their boxes, their work, a run on real processes, and their pictures."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matplotlib.image import imread

from models.bert import BertForPreTraining
from tensor3d import Cube, CubeShape
from tests.models.toy import lay, totals, toy_config, toy_packs
from tests.ranks import run_ranks
from tests.tools.bench.measured import facts, sample
from tools.bench import scaling
from tools.bench.__main__ import main, parse
from tools.bench.harness import scaling_plots
from tools.bench.harness.memory import counting_kept
from tools.bench.harness.scaling_plots import KINDS, OTHER, kinds_of
from tools.bench.harness.step_trial import figures
from tools.bench.scaling import (
    Point,
    ScalingCommand,
    StrongCommand,
    WeakCommand,
    base_of,
    compute_the_same,
    efficiency,
    numbers,
)
from tools.bench.vs_transformers.figures import read_results
from tools.common import plotting
from tools.training.config import ModelConfig

QUIET = ["--model.dropout", "0", "--model.attention-dropout", "0"]


def arguments(kind: str, recipe: Path, *more: str) -> list[str]:
    return [kind, str(recipe), "--corpus", str(recipe.parent / "corpus"), *more]


# Boxes


@pytest.mark.parametrize(
    ("ranks", "box"),
    [
        (1, "1x1x1"),
        (2, "1x2x1"),
        (4, "1x2x2"),
        (6, "1x3x2"),
        (8, "2x2x2"),
        (16, "2x4x2"),
        (27, "3x3x3"),
        (64, "4x4x4"),
    ],
)
def test_the_box_nearest_to_a_cube(ranks: int, box: str) -> None:
    assert str(KINDS["cube"](ranks)) == box


def test_kinds_of_boxes() -> None:
    assert [str(KINDS[kind](9)) for kind in KINDS] == ["1x3x3", "1x9x1", "1x3x3", "9x1x1", "9*(1x1x1)"]
    assert kinds_of(CubeShape(y=3, z=3)) == ("cube", "2d")
    assert kinds_of(CubeShape(x=4, y=2)) == (OTHER,)
    assert kinds_of(CubeShape()) == tuple(KINDS)
    with pytest.raises(ValueError, match="8 ranks are no square"):
        KINDS["2d"](8)


# What to measure


def command(kind: str, recipe: Path, *more: str) -> Any:
    return parse(arguments(kind, recipe, *more))


def boxes_of(asked: ScalingCommand, recipe: Path) -> dict[int, list[str]]:
    tasks, _ = asked.check(["strong", str(recipe)])
    return {task.ranks: [str(shape) for shape in task.shapes] for task in tasks}


def test_boxes_are_measured_once_and_what_does_not_fit_is_told(recipe: Path) -> None:
    asked: StrongCommand = command("strong", recipe, "--ranks", "4,1,8")
    tasks, skipped = asked.check(["strong", str(recipe)])
    assert [(task.ranks, [str(shape) for shape in task.shapes]) for task in tasks] == [
        (1, ["1x1x1"]),
        (4, ["1x2x2", "1x4x1", "4x1x1", "4*(1x1x1)"]),
        (8, ["2x2x2", "8x1x1", "8*(1x1x1)"]),
    ]
    assert [str(each) for each in skipped] == [
        "skipped: 2d on 8 ranks: 8 ranks are no square.",
        "skipped: 1x8x1 on 8 ranks: heads must divide by y=8. Got 4. Change heads or the cube.",
    ]
    assert {task.recipe for task in tasks} == {asked.settings}
    assert boxes_of(command("strong", recipe, "--cubes", "1x2x1,4x1x1,1x2x1"), recipe) == {2: ["1x2x1"], 4: ["4x1x1"]}
    assert boxes_of(command("strong", recipe, "--cube", "1x2x1", "--data-parallel", "2"), recipe) == {4: ["2*(1x2x1)"]}


def test_work_grows_with_the_ranks(recipe: Path) -> None:
    tokens: WeakCommand = command("weak", recipe)
    assert [tokens.grown(ranks).batch.global_batch for ranks in (1, 2, 8)] == [8, 16, 64]
    assert {tokens.grown(ranks).model for ranks in (1, 2, 8)} == {tokens.settings.model}
    width = replace(tokens, grow="width")
    grown = {ranks: width.grown(ranks) for ranks in (1, 2, 4, 8, 27, 64)}
    sizes = {ranks: (each.model.hidden, each.model.heads, each.batch.global_batch) for ranks, each in grown.items()}
    # By hand: hidden 32 and 4 heads, m times; 8 packs, P/m² times.
    assert sizes[1] == (32, 4, 8)
    assert sizes[2] == (32, 4, 16)
    assert sizes[4] == (64, 8, 8)
    assert sizes[8] == (64, 8, 16)
    assert sizes[27] == (96, 12, 24)
    assert sizes[64] == (256, 32, 8)
    own = replace(width, settings=replace(width.settings, model=ModelConfig(hidden=32, heads=4, inner=48)))
    assert own.grown(4).model.inner == 96


def test_numbers_of_ranks() -> None:
    assert numbers("8,1,8") == [1, 8]
    for text in ("", "0", "1,x", "-1", "1,"):
        with pytest.raises(ValueError, match="whole numbers of at least 1"):
            numbers(text)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--ranks", "1,0"], "--ranks are whole numbers of at least 1 with commas, like 1,2,4. Got '1,0'"),
        (["--shapes", "cube,3d"], "--shapes are some of cube,1d,2d,fsdp,data, or all. Got '3d'"),
        (["--cubes", "1x2"], "Got '1x2'"),
        (["--cube", "1x2x1", "--cubes", "1x2x1"], "--cube names one box and --cubes several"),
        (["--data-parallel", "2"], "--data-parallel is the number of copies of --cube. Got 2 without it"),
        (["--cubes", "1x3x1"], "no box is left to measure. skipped: 1x3x1 on 3 ranks: heads must divide by y=3"),
        (["--steps", "0"], "--steps must be at least 1. Got 0"),
        (["--threads", "0"], "--threads must be at least 1. Got 0"),
        (["--output", "missing/a.json"], "a file in a folder that exists. Got missing/a.json"),
        (["--plot", "missing/a.png"], "--plot must be a file in a folder that exists. Got missing/a.png"),
    ],
)
def test_bad_calls_start_no_process(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    monkeypatch.setattr(scaling, "start_on_corpus", lambda *_, **__: pytest.fail("started processes"))
    assert main(arguments("strong", recipe, *more)) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_under_torchrun_one_number_of_ranks(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(arguments("strong", recipe, "--ranks", "1,2")) == 2
    assert "these need 1, 2 ranks" in capsys.readouterr().err


# Figures, by hand


def point(ranks: int, seconds: float, flops: int, loss: float = 5.0) -> Point:
    turns = [[[replace(sample(seconds), flops=flops)]] * ranks]
    step = figures(CubeShape(y=ranks), turns, [facts(loss)] * ranks, turns)
    return Point(kinds=("1d",), global_batch=8, hidden=32, step=step)


def test_efficiency_is_of_flops_a_rank() -> None:
    alone, strong, weak = point(1, 8.0, 1000), point(4, 4.0, 1000), point(4, 10.0, 4000)
    assert base_of([strong, alone]) is alone
    assert efficiency(alone, alone) == 1
    assert efficiency(strong, alone) == pytest.approx(8 / (4 * 4))
    assert efficiency(weak, alone) == pytest.approx(8 / 10)
    assert base_of([strong, point(4, 3.0, 1000)]).step.seconds_median == 3.0


def test_losses_are_compared_where_the_work_is_the_same(recipe: Path) -> None:
    one, two, other = point(1, 1.0, 1), point(2, 1.0, 1, 6.0), point(2, 1.0, 1, 6.0)
    assert not compute_the_same(command("strong", recipe).same_work([one, two, other]))
    assert compute_the_same(command("weak", recipe).same_work([one, two, other]))


# On real processes


@pytest.fixture(scope="module")
def measured(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the JSON and the picture of one run on 1 and 2 processes."""
    folder = tmp_path_factory.mktemp("scaling")
    more = ["--ranks", "1,2", "--shapes", "1d,2d,fsdp", "--steps", "2", "--rounds", "2", "--warmup", "1"]
    files = ["--output", str(folder / "strong.json"), "--plot", str(folder / "strong.png")]
    assert main(arguments("strong", recipe, *more, *files, *QUIET)) == 0
    return folder


@pytest.mark.slow
def test_strong_scaling_on_processes(measured: Path) -> None:
    content = json.loads((measured / "strong.json").read_text())
    assert content["benchmark"] == "strong"
    assert content["skipped"] == [{"ranks": 2, "box": "2d", "reason": "2 ranks are no square."}]
    alone, split, sharded = content["results"]
    assert [(each["cube"], each["kinds"]) for each in content["results"]] == [
        ("1x1x1", list(KINDS)),
        ("1x2x1", ["cube", "1d"]),
        ("2x1x1", ["fsdp"]),
    ]
    assert alone["efficiency"] == 1
    for each in (alone, split, sharded):
        assert each["traffic_equal"]
        assert each["collectives_equal"]
        assert each["held_equal"]
        assert each["global_batch"] == 8
        assert each["first_loss"] == pytest.approx(alone["first_loss"], rel=1e-5)
        assert each["peak_tensor_bytes"] > each["held_bytes"] + each["saved_bytes"]
    for each in (split, sharded):
        assert each["bytes_received"] == each["bytes_closed_form"] > 10_000
        assert each["collectives"] == each["collectives_closed_form"] > 10
        assert each["saved_bytes"] < 0.6 * alone["saved_bytes"]
        assert each["held_bytes"] == each["held_closed_form"] < 0.6 * alone["held_bytes"]


@pytest.mark.slow
def test_pictures_come_from_the_json_alone(measured: Path, tmp_path: Path) -> None:
    assert main(["plot", str(measured / "strong.json"), "--output-dir", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["strong.png"]
    again = imread(tmp_path / "strong.png")
    assert again.shape == imread(measured / "strong.png").shape
    assert (again == imread(measured / "strong.png")).all()


def on_rank(recipe: Path, output: Path) -> int:
    """`main` on a rank whose process group stands: from_env finds it and connects no other."""
    os.environ.update(WORLD_SIZE=str(dist.get_world_size()), RANK=str(dist.get_rank()), LOCAL_RANK="0")
    more = ["--ranks", "4", "--shapes", "2d,data", "--steps", "2", "--rounds", "1", "--warmup", "1"]
    return main(arguments("weak", recipe, *more, "--grow", "width", "--output", str(output), *QUIET))


@pytest.mark.slow
def test_weak_scaling_under_torchrun(recipe: Path, tmp_path: Path) -> None:
    output = tmp_path / "weak.json"
    assert run_ranks(4, on_rank, recipe, output) == [0] * 4
    results = json.loads(output.read_text())["results"]
    sizes = [(each["cube"], each["data_parallel"], each["hidden"], each["global_batch"]) for each in results]
    assert sizes == [("1x2x2", 1, 64, 8), ("1x1x1", 4, 64, 8)]
    assert all(each["traffic_equal"] and each["held_equal"] for each in results)


# Pictures


def test_a_line_for_each_kind() -> None:
    results = [
        {"ranks": 2, "kinds": ["cube", "1d"], "bytes_received": 7},
        {"ranks": 1, "kinds": ["cube", "1d"], "bytes_received": 0},
        {"ranks": 8, "kinds": ["1d"], "bytes_received": 9},
        {"ranks": 8, "kinds": [OTHER], "bytes_received": 5},
    ]
    found = scaling_plots.lines(results, "bytes_received")
    assert found == {"cube": [(2, 7)], "1d": [(2, 7), (8, 9)], OTHER: [(8, 5)]}


@pytest.mark.parametrize("content", ["{", "[]", '{"benchmark": "step", "results": [{}]}', '{"benchmark": "weak"}'])
def test_what_cannot_be_drawn_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    assert main(["plot", str(path), "--output-dir", str(tmp_path)]) == 2
    assert f"has written by --output is needed. Got {path}" in capsys.readouterr().err
    assert main(["plot", str(path), "--output-dir", str(path)]) == 2
    assert "--output-dir must be a folder that exists" in capsys.readouterr().err


RESULT = {
    **{"cube": "1x1x1", "global_batch": 4, "kinds": ["cube"], "ranks": 1},
    **{"seconds_median": 0.1, "bytes_received": 0, "saved_bytes": 5, "peak_tensor_bytes": None},
}


def strong(**changes: Any) -> bytes:
    return json.dumps({"benchmark": "strong", "results": [RESULT, RESULT | changes]}).encode()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "it is no JSON"),
        (strong()[:60], "it is no JSON"),
        (b"\xff\xfe{", "'utf-8' codec can't decode byte"),
        (b"[" * 100_000, "too deep in one another"),
        (b'{"benchmark": "weak", "benchmark": "strong"}', "the key 'benchmark' is there twice"),
        (b'{"benchmark": "layer", "results": []}', "it is of tools.bench 'layer'"),
        (b'{"benchmark": "weak", "results": []}', "it has no results"),
        (b'{"benchmark": "weak", "results": [7]}', "its result 0 is no object"),
        (b'{"benchmark": "weak", "results": [{}]}', "it has no 'ranks'"),
        (strong(ranks=10**400), "its result 1 has no number of at least 1 for 'ranks': 1000"),
        (strong(global_batch=0), "its result 1 has no number of at least 1 for 'global_batch': 0"),
        (strong(saved_bytes="5"), "its result 1 has no number of at least 0 for 'saved_bytes': '5'"),
        (strong(saved_bytes=1e300), "'saved_bytes': 1e+300"),
        (strong(bytes_received=math.nan), "'bytes_received': nan"),
        (strong(seconds_median=None), "its result 1 has no time of a step"),
        (strong(kinds=["sphere"]), "its result 1 is of no known kind of box (cube, 1d, 2d, fsdp, data, other)"),
        (strong(kinds=[{}]), "its result 1 is of no known kind of box"),
        (strong(cube=None), "its result 1 has no name for 'cube'"),
    ],
)
def test_why_a_file_cannot_be_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, told: str
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    assert main(["plot", str(path), "--output-dir", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"Got {path}: " in line
    assert told in line
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_what_is_no_file_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, told in ((pipe, "it is a FIFO"), (tmp_path, "Is a directory"), (Path("/dev/zero"), "device")):
        assert main(["plot", str(path), "--output-dir", str(tmp_path)]) == 2
        assert told in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"--also must be files that tools\.bench library has written"):
        read_results(pipe)


def test_one_rank_has_a_picture_too(tmp_path: Path) -> None:
    """It receives nothing, and no peak was measured: two panels without a scale, and no warning."""
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + strong())
    assert main(["plot", str(tmp_path / "a.json"), "--output-dir", str(tmp_path)]) == 0
    assert (tmp_path / "strong.png").stat().st_size > 10_000


def test_without_matplotlib_nothing_is_measured(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)
    assert main(arguments("strong", recipe, "--plot", str(tmp_path / "a.png"))) == 2
    assert "--plot needs the package matplotlib: pip install matplotlib." in capsys.readouterr().err
    assert main(["plot", str(tmp_path / "a.json"), "--output-dir", str(tmp_path)]) == 2
    assert "plot needs the package matplotlib" in capsys.readouterr().err


# What autograd keeps


def test_kept_is_counted_for_each_pass_and_nothing_stays_behind() -> None:
    cube = Cube.single()
    cube.manual_seed(0)
    model = BertForPreTraining(toy_config(vocab=67), cube)
    step = toy_packs(67, 2)
    batch = lay(step, cube)
    with counting_kept(model) as passes:
        for _ in range(2):
            model(batch, *totals(step))
    assert len(passes) == 2
    assert passes[0].kept == passes[1].kept > 0
    assert passes[0].batch is batch
    with counting_kept(model) as broken, pytest.raises(AttributeError):
        model(None, 1, 1)
    assert broken == []
    seen: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
        model(batch, *totals(step))
    assert seen  # these hooks are the innermost: none of the counter's are left
    model(batch, *totals(step))
    assert len(passes) == 2
