"""`bench kernels`: every region of the source is among those that it finds, and Triton, where it is there, compiles."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from models.bert import PRESETS
from tensor3d.layers.norm_kernels import add_and_measure, norm_sums
from tensor3d.ops.activations import biased
from tensor3d.ops.fp8 import Scaling
from tools.bench import __main__ as bench
from tools.bench import kernels
from tools.bench.harness.absent_gpu import Operand
from tools.bench.harness.benchmark import cubes_of
from tools.bench.kernels import Call, FlexCall, KernelsCommand, collect, compile_all, flex_calls, widest
from tools.bench.vs_transformers.contenders import with_sizes

ROOT = Path(__file__).parents[3]
LIBRARY = sorted(path for folder in ("tensor3d", "models") for path in (ROOT / folder).rglob("*.py"))
# Runs where nothing is compiled; what is in its place then is another region.
NEVER_COMPILED = {"_gradient", "frequencies"}

WIDE = Operand(torch.bfloat16, (64, 32))
BIASED = Call(biased, (WIDE, Operand(torch.float32, (32,)), "gelu"), (WIDE,))


def regions_of(sources: list[str]) -> set[str]:
    """Functions that something which is no function of a module's top, a cube's regions or a parameter, is called
    with first: directly, or by a variable of the same function."""
    trees = [ast.parse(source) for source in sources]
    known = {each.name for tree in trees for each in tree.body if isinstance(each, ast.FunctionDef)}
    return {name for tree in trees for name in given(tree) if name in known}


def given(tree: ast.Module) -> Iterator[str]:
    top = {*dir(builtins), *(each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            top |= {each.asname or each.name for each in node.names}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        variables: dict[str, set[str]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                variables[node.targets[0].id] = names_in(node.value)
            elif isinstance(node, ast.arg):
                variables[node.arg] = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                variables.setdefault(node.id, set())
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Call)
                and node.args
                and not (isinstance(node.func, ast.Name) and node.func.id in top)
            ):
                first = node.args[0]
                if isinstance(first, ast.Name | ast.IfExp):
                    for name in names_in(first):
                        yield from variables.get(name, {name})


def names_in(node: ast.expr) -> set[str]:
    """Of an expression that is a name, or one of two."""
    if isinstance(node, ast.IfExp):
        return names_in(node.body) | names_in(node.orelse)
    return {node.id} if isinstance(node, ast.Name) else set()


@pytest.mark.slow
def test_every_region_of_the_source_is_collected() -> None:
    """A region that no model here calls would be compiled by nobody before a GPU does: give it to one in `_models`."""
    written = regions_of([text for path in LIBRARY if "regions" in (text := path.read_text(encoding="utf-8"))])
    config = with_sizes(replace(PRESETS["tiny"], vocab=600), layers=1, dropout=0.1, attention_dropout=0.0)
    found = collect(config, cubes_of("1x1x1,1x2x2"), 64, types=(torch.bfloat16,))
    assert {call.name for call in found} == written - NEVER_COMPILED
    assert {"norm_alone", "norm_sums", "_row_statistics", "_round_by", "biased"} <= written
    one_each = widest(found)
    assert len({call.kind for call in found}) == len(one_each) < len(found)
    # Both moments of dropout, and each activation.
    assert {call.inputs[0] is None for call in one_each if call.name == "norm_alone"} == {True, False}
    assert {call.inputs[2] for call in one_each if call.name == "biased"} == {"gelu", "gelu_tanh", "relu", "silu"}


@pytest.mark.slow  # all models on both boxes, in three types and FP8
def test_the_page_tells_how_many_there_are() -> None:
    command, page = KernelsCommand(), (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    calls = widest(collect(command.config, cubes_of(command.cubes), command.rows, scalings=get_args(Scaling)))
    told = re.search(r"All (\d+), in bf16, fp16 and fp32, and the (\d+) of FlexAttention", page)
    assert told is not None
    assert [int(each) for each in told.groups()] == [len(calls), len(flex_calls(command.config, command.rows))]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f(x): ...\ndef g(cube): cube.regions(f, 1)", {"f"}),
        ("def f(x): ...\ndef g(run): run(f, 1)", {"f"}),
        ("def f(x): ...\ndef h(x): ...\ndef g(c):\n    r = f if c else h\n    c.cube.regions(r, 1)", {"f", "h"}),
        ("def f(x): ...\ndef g(cube): len(f)\ndef h(x): g(f)", set()),
        ("def f(x): ...\ndef g(cube): cube.regions(1, f)", set()),
        ("def f(x): ...\ndef g(cube, f): cube.regions(f, 1)", set()),
        ("def f(x): ...\ndef g(cube, given):\n    for f in given: cube.regions(f, 1)", set()),
    ],
)
def test_a_region_is_found_in_the_source(text: str, found: set[str]) -> None:
    assert regions_of([text]) == found


def test_the_widest_of_a_kind_is_compiled() -> None:
    narrow, bias = Operand(torch.bfloat16, (64, 16)), Operand(torch.float32, (16,))
    others = [
        Call(biased, (narrow, bias, "gelu"), (narrow,)),
        Call(biased, (narrow, bias, "relu"), (narrow,)),
        Call(add_and_measure, (None, None, narrow), (narrow,)),
    ]
    calls = [others[0], BIASED, *others[1:]]
    assert widest(calls) == [others[2], others[1], BIASED]
    assert (BIASED.bytes, str(BIASED)) == (2 * 2 * 64 * 32 + 4 * 32, "bf16(R,32), fp32(32), gelu")
    assert str(others[2]) == "bf16(R,16)"


def test_flex_attention_is_compiled_in_each_type_mask_and_direction() -> None:
    calls = flex_calls(with_sizes(PRESETS["large"], layers=1, dropout=0.1, attention_dropout=0.0), 4096)
    assert sorted({(each.name, str(each)) for each in calls if each.dtype == torch.bfloat16}) == [
        ("flex", "4 bf16(16,R,64)"),
        ("flex", "4 bf16(16,R,64), causal"),
        ("flex", "4 bf16(16,R,64), window 65"),
        ("flex_backward", "8 bf16(16,R,64)"),
        ("flex_backward", "8 bf16(16,R,64), causal"),
        ("flex_backward", "8 bf16(16,R,64), window 65"),
    ]
    assert [str(each) for each in calls if each.dtype != torch.bfloat16] == [
        f"{number} {name}(16,R,64)" for number in (4, 8) for name in ("fp16", "fp32")
    ]
    # A matrix of bf16 takes 2 bytes an element, the sums of a row 4 bytes of each head.
    assert [each.bytes / each.largest.elements for each in (calls[0], calls[5])] == [8 + 4 / 64, 16 + 8 / 64]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "huge"}, "--preset must be some of tiny"),
        ({"rows": 0}, r"--rows must be at least 1\. Got 0"),
        ({"cubes": "1x3x1"}, "y=3"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KernelsCommand(**options).check()  # type: ignore[arg-type]


def test_without_triton_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tools.bench.harness.absent_gpu.find_spec", lambda name: None)
    assert bench.main(["kernels", "--preset", "tiny"]) == 2
    assert "run pip install triton, on Linux, of the version" in capsys.readouterr().err


def test_a_region_that_fails_is_named_and_the_status_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "missing_triton", lambda: "")
    monkeypatch.setattr(kernels, "collect", lambda *_, **__: [BIASED])
    monkeypatch.setattr(kernels, "flex_calls", lambda *_: [])
    monkeypatch.setattr(kernels, "compile_all", lambda calls, arch, processes: ([], ["region biased: no"]))
    assert bench.main(["kernels", "--preset", "tiny"]) == 1
    told = capsys.readouterr()
    assert "0 of 1 compiled for sm_90" in told.out
    assert "region biased: no" in told.err


def by_its_numbers(x: Tensor) -> Tensor:
    """What no compiler can take in one."""
    return x + 1 if x.sum() > 0 else x


# Not marked slow, to be among the tests of tests/versions.py, whose environments have Triton. Elsewhere it is skipped.
def test_triton_compiles_regions_and_tells_which_it_cannot() -> None:
    pytest.importorskip("triton")
    rows = [Operand(torch.bfloat16, (4096, 512))] * 2 + [Operand(torch.float32, (4096, 1))] * 3
    sums = Call(norm_sums, (*rows, Operand(torch.float32, (512,))), (Operand(torch.float32, (4096, 2)),))
    (one, other), (fault,) = compile_all([BIASED, Call(by_its_numbers, (WIDE,), (WIDE,)), sums], "sm_90", 2)
    assert (one.region, one.type, one.kernels, one.operators, one.spilled) == ("biased", "bf16", 1, 0, 0)
    assert one.registers is not None
    assert 8 <= one.registers <= 255
    assert one.moved == one.bytes == 4 + 4 / 64
    # Rows and columns are summed apart, of what is read twice; nothing as large is written.
    assert (other.region, other.operators) == ("norm_sums", 0)
    assert 8 < other.moved < 9
    assert fault.startswith("region by_its_numbers of bf16(R,32): ")


def test_triton_compiles_flex_attention() -> None:
    pytest.importorskip("triton")
    sizes = {"dtype": torch.bfloat16, "rows": 256, "heads": 2, "head_dim": 32}
    calls = [FlexCall(causal=True, backward=backward, **sizes) for backward in (False, True)]  # type: ignore[arg-type]
    (forward, backward), faults = compile_all(calls, "sm_90", 2)
    assert not faults
    # Backward has a kernel more, for the sums of a row's gradients times its results.
    assert [(each.region, each.kernels, each.operators) for each in (forward, backward)] == [
        ("flex", 1, 0),
        ("flex_backward", 2, 0),
    ]
    assert forward.bytes < forward.moved < 1.1 * forward.bytes
