"""`bench operators`: what a micro-batch is to a GPU, by box, counted without one; it must not become more unseen."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.bert import PRESETS
from tensor3d import CubeShape
from tensor3d.ops.fp8 import Scaling
from tools.bench.operators import OperatorCounter, OperatorFigures, OperatorsCommand, RegionsAsOne, as_on_a_gpu, count
from tools.bench.vs_transformers.contenders import with_sizes
from tools.training.factory import TYPES

PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"
ROW = r"^\| ours((?:, \w+)*) \| (\dx\dx\d) \| (\w+) \| (\d+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$"
ROWS = re.findall(ROW, PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def _takes_long(row: tuple[str, ...]) -> bool:
    return row[1] == "2x2x2" or row[0].split(", ")[-1] in get_args(Scaling)


def counted(layers: int, cube: str, precision: str, longest: int, how: str = "") -> OperatorFigures:
    config = with_sizes(PRESETS["large"], layers=layers, dropout=0.1, attention_dropout=0.0)
    compute = None if precision == "fp32" else TYPES[precision]
    ways = how.split(", ")[1:]
    fp8: list[Any] = [way for way in ways if way in get_args(Scaling)]
    assert set(ways) <= {"kept", "shadows", "compiled", *fp8}
    return count(
        config,
        CubeShape.parse(cube),
        compute,
        4096,
        longest,
        "kept" in ways,
        passes=0,
        fp8=fp8[0] if fp8 else None,
        shadow_weights="shadows" in ways,
        compiled="compiled" in ways,
    )


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id="-".join(row[:4]).strip("-"), marks=[pytest.mark.slow] if _takes_long(row) else [])
        for row in ROWS
    ],
)
def test_the_page_tells_what_is_counted(row: tuple[str, ...]) -> None:
    """Of 24 layers, by two depths: tensors of "meta" take no memory, and PyTorch computes their shapes in Python."""
    how, cube, precision, longest, *wanted = row
    one, two = (counted(layers, cube, precision, int(longest), how) for layers in (1, 2))
    found = [
        getattr(one, name) + 23 * (getattr(two, name) - getattr(one, name))
        for name in ("operators", "further", "collectives", "moved_bytes")
    ]
    assert [f"{number:,}" for number in (*found[:3], round(found[3] / 2**20))] == wanted
    assert (found[2] == 0) == (cube == "1x1x1")
    if row[1] == "1x1x1" and (row[0].endswith("shadows") or (row[0], *row[2:4]) == ("", "fp32", "512")):
        assert found[0] <= 1000, "more than a GPU is told by plain PyTorch"


def test_the_page_has_the_boxes() -> None:
    bf16 = {("", "1x1x1"), ("", "2x2x2"), (", shadows", "1x1x1"), (", compiled, shadows", "1x1x1")}
    assert {row[:3] for row in ROWS} >= {("", "1x1x1", "fp32"), *((*each, "bf16") for each in bf16)}


def test_operators_are_those_of_a_gpu() -> None:
    by_name = counted(1, "1x1x1", "bf16", 512).by_name
    one_each_way = {"_flash_attention_forward": 1, "_flash_attention_backward": 1, "gelu": 2, "native_layer_norm": 4}
    assert {name: by_name[name] for name in one_each_way} == one_each_way
    assert by_name["native_dropout"] == by_name["native_dropout_backward"] == 3
    assert "promote_types" not in by_name


MATRIX, ROW, IDS, TABLE = (4, 8), (8,), (4,), (100, 8)
BYTES = 4 * 4 * 8


def matrix(*shape: int) -> Tensor:
    return torch.empty(shape or MATRIX, device="meta")


def ids(*shape: int) -> Tensor:
    return torch.empty(shape or IDS, dtype=torch.int64, device="meta")


@pytest.mark.parametrize(
    ("call", "moved"),
    [
        (lambda a: a + matrix(), 3 * BYTES),
        (lambda a: a + a, 2 * BYTES),
        (lambda a: a.bfloat16(), BYTES + BYTES // 2),
        (lambda a: a.add_(matrix()), 3 * BYTES),
        (lambda a: a.mul_(2), 2 * BYTES),
        (lambda a: a.exp_(), 2 * BYTES),
        (lambda a: a.add_(a), 2 * BYTES),
        (lambda a: a.copy_(matrix()), 2 * BYTES),
        (lambda a: a.copy_(matrix(*ROW)), BYTES + 4 * 8),
        (lambda a: a.zero_(), BYTES),
        (lambda a: a.fill_(1), BYTES),
        (lambda a: a.uniform_(), BYTES),
        (lambda a: torch.mul(a, matrix(), out=matrix()), 3 * BYTES),
        (lambda a: torch.mul(a, 2, out=a), 2 * BYTES),
        (lambda a: torch.zeros_like(a), BYTES),
        (lambda a: a.new_zeros(4, 8), BYTES),
        (lambda a: a.sum(), BYTES + 4),
        (lambda a: a + matrix(*ROW).expand(4, 8), 2 * BYTES + 4 * 8),
        (lambda a: a.view(32), 0),
        (lambda a: a @ matrix(8, 8), 0),
        (lambda a: torch._foreach_mul_([a, matrix()], 2), 4 * BYTES),
        (lambda a: torch._foreach_add_([a, a.clone()], [matrix(), matrix()]), (2 + 6) * BYTES),
        (lambda a: torch._foreach_copy_([a], [matrix()]), 2 * BYTES),
        (lambda a: torch._foreach_zero_([a]), BYTES),
        (lambda a: matrix(*TABLE).index_select(0, ids()), 2 * BYTES + 4 * 8),
        (lambda a: F.embedding(ids(), matrix(*TABLE)), 2 * BYTES + 4 * 8),
        (lambda a: F.embedding(ids(400), matrix()), BYTES + 400 * (4 * 8 + 8)),
        (lambda a: a.gather(1, ids(4, 1)), 2 * 4 * 4 + 4 * 8),
        (lambda a: matrix(*TABLE).index_add_(0, ids(), a), 3 * BYTES + 4 * 8),
        (lambda a: a.scatter_add_(1, ids(4, 1), matrix(4, 1)), 3 * 4 * 4 + 4 * 8),
        (lambda a: F.nll_loss(a, ids()), 4 * 4 + 4 * 8 + 2 * 4),
        (
            lambda a: torch.ops.aten.nll_loss_backward(a.new_empty(()), a, ids(), None, 1, -100, a.new_empty(())),
            2 * 4 + 4 * 8 + BYTES,
        ),
    ],
)
def test_bytes_are_what_is_read_and_what_is_written(call: Callable[[Tensor], object], moved: int) -> None:
    """By hand: what is changed in place is both, what is filled is written alone, and of a table the chosen rows."""
    a = matrix()
    with OperatorCounter() as counter:
        call(a)
    assert counter.moved_bytes == moved


def test_bytes_of_fused_optimisers() -> None:
    """AdamW's reads weights, gradients, two moments and counts of steps, and writes weights and moments."""
    weights, gradients, first, second = ([matrix(), matrix()] for _ in range(4))
    steps = [torch.zeros((), device="meta") for _ in weights]
    options = {"lr": 1.0, "weight_decay": 0.0, "maximize": False}
    with OperatorCounter() as counter:
        torch._fused_adamw_(
            weights, gradients, first, second, [], steps, **options, beta1=0.9, beta2=0.9, eps=0.0, amsgrad=False
        )
    assert counter.moved_bytes == 7 * 2 * BYTES + 2 * 4


def test_bytes_of_a_region_are_what_it_is_given_returns_and_changes() -> None:
    def region(changed: Tensor, read: Tensor) -> Tensor:
        return changed.add_(read).sum(0)

    regions = RegionsAsOne(False, torch.device("meta"))
    with OperatorCounter() as counter:
        regions.counter = counter
        regions(region, matrix(), matrix())
    assert counter.operators == {"region": 1}
    assert counter.moved_bytes == 3 * BYTES + 4 * 8


def test_afterwards_all_is_as_it_was() -> None:
    before = torch.nn.functional.dropout, torch.nn.functional.scaled_dot_product_attention, torch.autocast
    with as_on_a_gpu():
        assert torch.nn.functional.dropout is not before[0]
    after = torch.nn.functional.dropout, torch.nn.functional.scaled_dot_product_attention, torch.autocast
    assert after == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "huge"}, "--preset must be some of tiny"),
        ({"contenders": "theirs"}, "--contenders must be some of ours,transformers"),
        ({"rows": 0}, r"--rows must be at least 1\. Got 0"),
        ({"cubes": "1x3x1"}, r"y=3"),
        ({"cubes": "1x4x2", "rows": 513}, r"--rows .* 513 on 1x4x2"),
        ({"longest": 1000}, r"--longest must be at most 512.*1000"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OperatorsCommand(**options).check()  # type: ignore[arg-type]
