"""docs/custom.md does what it says: its code runs, on one process and on 2x2x2, and its messages are the real ones."""

from __future__ import annotations

import importlib.util
import inspect
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import tensor3d as t3d
from tensor3d import CubeShape
from tensor3d.parallelize import rules
from tensor3d.sharding import param_layout
from tensor3d.testing import per_row
from tests.ranks import check_layer, run_ranks
from tests.testing import broken

PAGE = (Path(__file__).parents[2] / "docs" / "custom.md").read_text()


class CodeBlock(NamedTuple):
    code: str
    message: str | None
    """What it raises, of a mistake."""


def blocks(page: str) -> list[CodeBlock]:
    found = re.findall(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", page, re.DOTALL)
    return [CodeBlock(code, message or None) for code, message in found]


def shown(name: str) -> str:
    """The text block below the mark of that name."""
    (text,) = re.findall(rf"<!-- {name} -->\n```text\n(.*?)```", PAGE, re.DOTALL)
    return str(text)


def one_line(text: str) -> str:
    return " ".join(text.split())


def run_page(cube: str) -> dict[str, Any]:
    """Runs every block that raises nothing, in order; then the mistakes, each for itself."""
    if dist.is_initialized():
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank)
    names: dict[str, Any] = {"history": []}
    for code in (block.code for block in blocks(PAGE) if block.message is None):
        code = code.replace("from_env(2, 2, 2)", f"from_env({cube})")
        code = code.replace("    loss.backward()\n", "    loss.backward()\n    history.append(loss.item())\n")
        with redirect_stdout(io.StringIO()):
            exec(compile(code, "docs/custom.md", "exec"), names)
    raised = []
    for block in blocks(PAGE):
        if block.message is not None:
            try:
                exec(compile(block.code, "docs/custom.md", "exec"), dict(names))
                raised.append("nothing was raised")
            except (ValueError, RuntimeError) as error:
                raised.append(str(error))
    return {
        "losses": names["history"],
        "apart": [
            float((names[f"{model}same"] - names[f"{model}alone"]).detach().abs().max()) for model in ("", "replaced_")
        ],
        "by_hand": by_hand_differs(names),
        "proposal": str(names["proposal"]),
        "loss": float((names["total"] / names["count"]).detach()),
        "loss_alone": float(loss_alone(names["tiny"], names["batch"]).detach()),
        "changed": [name for name, old in names["tiny"].state_dict().items() if not names["state"][name].equal(old)],
        "padded": tuple(names["padded"].shape),
        "bytes": names["traffic"].total_bytes,
        "kept": (names["kept"].kept, names["kept"].held_bytes, names["kept"].spared_collectives),
        "raised": raised,
    }


def by_hand_differs(names: dict[str, Any]) -> float:
    """Of the hand-written attention: logits on the cube less the original's, where there are tokens; then weights."""
    model, cube, ids = names["by_hand"], names["cube"], names["batch"]
    logits = t3d.local_shard(model(ids) * (ids != 0).unsqueeze(-1), cube)
    differences = [names["padded_logits"] - logits, names["replaced_logits"] - logits]
    differences += [names["weights_back"][name] - value for name, value in model.state_dict().items()]
    return max(float(each.detach().abs().max()) for each in differences)


def loss_alone(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The mean loss of the original, which is given each sequence for itself, without padding."""
    sequences = [row[row != 0] for row in batch]
    logits = [model(ids.unsqueeze(0), torch.arange(len(ids)).unsqueeze(0))[0] for ids in sequences]
    return torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat(sequences))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run_page("1, 1, 1")


@pytest.fixture(scope="module")
def on_cube() -> list[dict[str, Any]]:
    return run_ranks(8, run_page, "2, 2, 2")


def test_the_page_gives_the_same_on_one_process_and_on_the_cube(
    alone: dict[str, Any], on_cube: list[dict[str, Any]]
) -> None:
    assert len(alone["losses"]) == 5
    assert alone["losses"][-1] < alone["losses"][0]
    assert alone["bytes"] == 0
    assert alone["kept"] == ({}, 0, 0)
    assert alone["padded"] == (8, 4, 16)
    for rank in on_cube:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        assert max(rank["apart"]) < 1e-5
        assert rank["by_hand"] < 1e-5
        assert rank["bytes"] > 0
        assert f"# {' '.join(map(str, rank['kept']))}\n" in PAGE
        assert rank["padded"] == (4, 4, 16)


def test_the_converted_model_has_the_loss_of_its_original_and_gives_its_weights_back(
    alone: dict[str, Any], on_cube: list[dict[str, Any]]
) -> None:
    for pattern, kind in (("words", "embedding()"), ("norm", "norm('z')"), ("out", "projection(")):
        assert re.search(rf"'{pattern}' +{re.escape(kind)}", alone["proposal"].replace('"', "'"))
    assert "Nothing is open." in alone["proposal"]
    for result in (alone, *on_cube):
        assert result["loss"] == pytest.approx(result["loss_alone"], rel=1e-5)
        assert result["changed"] == []


def test_the_mistakes_raise_what_the_page_shows_on_every_rank(on_cube: list[dict[str, Any]]) -> None:
    wanted = [one_line(block.message) for block in blocks(PAGE) if block.message is not None]
    assert len(wanted) == 6
    for rank in on_cube:
        assert [one_line(message) for message in rank["raised"][:5]] == wanted[:5]
        assert rank["raised"][5].startswith(wanted[5].removesuffix(" ..."))  # torch's own


# --- tables --------------------------------------------------------------------------------------------------------


def table_below(line: str) -> list[list[str]]:
    """The rows of the first table below a line, cell by cell."""
    found = PAGE.split(line, 1)[1].split("| --- |", 1)[1].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in found]


def test_the_table_of_rules_has_every_rule_with_its_arguments() -> None:
    told = [cells[0].strip("`") for cells in table_below("The rules, of `t3d.rules`:")]
    real = {}
    for name in rules.__all__:
        given = inspect.signature(getattr(rules, name)).parameters.values()
        # To users a maker is the `build` that messages speak of.
        names = ["build" if each.name == "maker" else each.name for each in given]
        defaults = ["" if each.default is inspect.Parameter.empty else f"={each.default}" for each in given]
        real[name] = f"{name}({', '.join(map(''.join, zip(names, defaults, strict=True)))})"
    assert sorted(told) == sorted(real.values())
    assert rules.__doc__ is not None
    assert [name for name in rules.__all__ if not re.search(rf"\b{name}\(", rules.__doc__)] == []


class EveryLayout(torch.nn.Module):
    """The reference: one parameter for each line of the table of layouts, each used as its line says."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        sizes = [(hidden,), (3, hidden), (2, hidden), (2,), (1,), (hidden, hidden)]
        self.of_lines = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(size)) for size in sizes)

    def forward(self, h: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        gain, table, weight, bias, scale, matrix = self.of_lines
        h = h * gain + table[numbers]
        return (h @ weight.t() + bias).square().sum() + ((h * scale) @ matrix.t()).square().sum()


class EveryLayout3D(torch.nn.Module):
    def __init__(self, hidden: int, face: t3d.Face, layouts: list[t3d.Layout], cube: t3d.Cube) -> None:
        super().__init__()
        self.cube, self.face, self.layouts = cube, face, layouts
        sizes = [tuple(each.shape) for each in EveryLayout(hidden).of_lines]
        made = (t3d.constant(size, layout, cube, 1.0) for size, layout in zip(sizes, layouts, strict=True))
        self.of_lines = torch.nn.ParameterList(made)

    def forward(self, h: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        cube, face = self.cube, self.face
        read = zip(self.of_lines[:5], self.layouts[:5], strict=True)
        gain, table, weight, bias, scale = (t3d.local_param(each, layout, cube) for each, layout in read)
        h = h * gain + table[t3d.local_rows(numbers, cube, face)]
        few = t3d.all_reduce_replicated(h @ weight.t(), cube.axis(face)) + bias
        product = t3d.matmul(h * scale, self.of_lines[5], cube, face)
        rows = cube.over("data", "x", "y" if face == "z" else "z")
        everyone = cube.over("data", "x", "y", "z")
        return t3d.all_reduce_replicated(few.square().sum(), rows) + t3d.all_reduce_replicated(
            product.square().sum(), everyone
        )


@pytest.mark.parametrize("face", ["z", "y"])
def test_each_line_of_the_table_of_layouts_gives_the_right_gradient(face: t3d.Face) -> None:
    lines = [cells[1:3] for cells in table_below("### Which layout a parameter needs")]
    cells = [both[0] if face == "z" or both[1] == "the same" else both[1] for both in lines]
    layouts = [eval(cell.strip("`"), dict(vars(param_layout))) for cell in cells]
    h = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    check_layer(
        partial(EveryLayout3D, 8, face, layouts),
        partial(EveryLayout, 8),
        [h, per_row(torch.arange(16) % 3)],
        face=face,
        returns="scalar",
        cubes=(CubeShape(data=2, y=2, z=2), CubeShape(x=2, y=1, z=4)),
    )


# --- the layer that does not exist yet -----------------------------------------------------------------------------


def load_adapter(folder: Path, name: str, changes: dict[str, str], more: str = "") -> ModuleType:
    """The page's adapter and its test, and more, as a module that other processes can import."""
    codes = [block.code for block in blocks(PAGE)]
    wanted = [codes[0], *(code for code in codes if re.search("class Adapter|check_layer", code))]
    text = "\n".join(wanted)
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / f"{name}.py"
    path.write_text(text + more)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("page_adapter")]:
        del sys.modules[name]


def without_numbers(report: str) -> list[list[str]]:
    return [
        [cell for cell in line.split() if not re.fullmatch(r"\d\.\de[-+]\d\d", cell)] for line in report.splitlines()
    ]


@pytest.mark.slow
def test_the_adapter_passes_and_prints_the_report_of_the_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = load_adapter(folder, "page_adapter", {})
    page.test_adapter()
    assert without_numbers(capsys.readouterr().out) == without_numbers(shown("report"))
    page.test_encoder()
    assert "mlp_norm.bias" in capsys.readouterr().out


STATISTIC = """

class Unit(torch.nn.Module):
    def forward(self, x):
        return x / x.square().sum(-1, keepdim=True)

class Unit3D(torch.nn.Module):
    def __init__(self, cube):
        super().__init__()
        self.cube = cube

    def forward(self, x):
        z = self.cube.axis("z")
        return x / {one_liner}
"""


@pytest.mark.slow
def test_the_one_line_for_a_statistic_over_columns_is_right(folder: Path) -> None:
    (one_liner,) = re.findall(r"`(t3d\.sum_gradient\(t3d[^`]*)`", PAGE)
    page = load_adapter(folder, "page_adapter_unit", {}, STATISTIC.format(one_liner=one_liner))
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    assert page.check_layer(page.Unit3D, page.Unit, x, cubes=[CubeShape(x=1, y=2, z=4)]).passed


@pytest.mark.slow
def test_the_adapter_with_a_mistake_fails_as_the_page_says(folder: Path) -> None:
    up = 'UP = t3d.Layout(cut=(("z", 0),), sum_over=("data", "x", "y"))'
    forgotten = load_adapter(folder, "page_adapter_y", {up: up.replace(', "y")', ")")})
    with pytest.raises(AssertionError) as caught:
        forgotten.test_adapter()
    assert one_line(shown("forgotten y")) in one_line(str(caught.value))


@pytest.mark.slow
def test_the_adapter_without_its_own_function_fails_as_the_page_says(folder: Path) -> None:
    whole = "t3d.sum_gradient(F.gelu(t3d.all_reduce_replicated(part, z)), z)"
    forgotten = load_adapter(folder, "page_adapter_z", {whole: "F.gelu(t3d.all_reduce_replicated(part, z))"})
    with pytest.raises(AssertionError) as caught:
        forgotten.test_adapter()
    assert one_line(shown("forgotten function")) in one_line(str(caught.value))


def test_the_hint_for_a_loss_divided_by_the_local_count_is_quoted_as_it_is() -> None:
    (quoted,) = re.findall(r'finds them:\n"(.*?)"', PAGE, re.DOTALL)
    inputs = [torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), per_row(torch.arange(8) % 4)]
    layer, reference = partial(broken.LocalMeanLoss3D, 8, 4), partial(broken.Loss, 8, 4)
    cubes = (CubeShape(data=2, x=1, y=1, z=2), CubeShape(x=2, y=2, z=1))
    with pytest.raises(AssertionError, match=re.escape(one_line(quoted))):
        check_layer(layer, reference, inputs, returns="scalar", cubes=cubes)
