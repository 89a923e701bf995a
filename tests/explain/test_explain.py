"""`explain` against real steps on real ranks: the same bytes by axis and kind, the same bytes kept, no trace left."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.bert import BertForPreTraining, ElectraForPreTraining, ReplacedTokens
from models.gpt import Gpt, GptConfig
from models.vit import Vit, VitConfig
from tensor3d import (
    Cube,
    CubeShape,
    Dropout3D,
    Embedding3D,
    LayerNorm3D,
    Linear3D,
    LookupEmbedding3D,
    MixedPrecisionPolicy,
    RMSNorm3D,
    Sequences,
    SmallHead3D,
    TransformerLayer3D,
    keep_gathered,
    local,
    select,
)
from tensor3d.cost_model import comm_volume as planned
from tensor3d.distributed.collectives import Axis, all_gather, all_reduce, all_to_all, reduce_scatter
from tensor3d.distributed.comm_stats import CommCounter
from tensor3d.explain import CostReport, ReportRow, explain
from tensor3d.layers.linear import Projection3D
from tests.models.kept import kept_bytes
from tests.models.toy import Shape, lay, totals, toy_config, toy_packs
from tests.ranks import run_ranks
from tests.single_device_reference import ranks_of
from tests.tied_weight_model import Tied

Run = Callable[[], Tensor]
SHAPES = [
    pytest.param((2, 2, 2, 1), id="2x2x2", marks=pytest.mark.slow),
    pytest.param((1, 2, 4, 1), id="1x2x4", marks=pytest.mark.long(reason="2x2x2 has these axes")),
    pytest.param((4, 2, 1, 1), id="4x2x1", marks=pytest.mark.long(reason="2x2x2 has these axes")),
    pytest.param((1, 2, 1, 2), id="1x2x1-data2"),
    pytest.param((1, 2, 2, 2), id="1x2x2-data2", marks=pytest.mark.slow),
]
TOKENS, HIDDEN, INNER = 128, 64, 96


def without_zeros(received: Counter[Any]) -> dict[Any, int]:
    return {key: count for key, count in received.items() if count}


def check(what: str, explained: CostReport, model: nn.Module, cube: Cube, run: Run) -> None:
    """`run` gives the loss of a real forward pass on all ranks: `explained` must have said what it sends and keeps."""
    losses: list[Tensor] = []

    def forward() -> Tensor:
        losses.append(run())
        return losses[0]

    with cube.traffic.counting() as count:
        kept = kept_bytes(model, forward)  # type: ignore[arg-type]
        losses[0].backward()
    assert explained.saved == kept > 0, what
    assert without_zeros(explained.received) == without_zeros(count.received) != {}, what
    rows = explained.folded
    assert sum(row.times * row.saved for row in rows) == kept, what
    assert sum(row.times * row.received.total() for row in rows) == count.total_bytes, what
    assert explained.parameters == sum(parameter.numel() for parameter in model.parameters()), what
    assert explained.parameters_here == sum(local(parameter).numel() for parameter in model.parameters()), what


# --- a real step ----------------------------------------------------------------------------------------------------


class Branching(nn.Module):
    """A collective of its own, a layer used twice, and one that is not used."""

    def __init__(self, cube: Cube) -> None:
        super().__init__()
        self.cube = cube
        self.shared = nn.Sequential(Linear3D(HIDDEN, INNER, cube), nn.GELU(), Linear3D(INNER, HIDDEN, cube, "y"))
        self.idle = Linear3D(HIDDEN, HIDDEN, cube)

    def forward(self, x: Tensor, rows: Tensor) -> dict[str, Tensor]:
        chosen = select(x, rows, self.cube)
        return {"first": self.shared(self.shared(chosen)), "second": chosen}


def _layers(shape: Shape) -> None:
    cube = Cube(*shape)
    cube.manual_seed(0)
    rows = TOKENS // cube.shape.planes
    x = torch.randn(rows // cube.shape.y, HIDDEN // cube.shape.z, requires_grad=True)
    sequences = Sequences.from_lengths([1, rows // cube.shape.z - 1])
    for recompute in ("none", "layer", "attention"):
        layer = TransformerLayer3D(HIDDEN, 8, cube, INNER, dropout=0.1, recompute=recompute)
        explained = explain(layer, inputs=(x, sequences))
        check(recompute, explained, layer, cube, lambda: layer(x, sequences).sum())  # noqa: B023

    pair = nn.Sequential(Linear3D(HIDDEN, INNER, cube), nn.GELU(), Linear3D(INNER, HIDDEN, cube, "y"))
    check("pair", explained := explain(pair, TOKENS), pair, cube, lambda: pair(x).sum())
    kept = keep_gathered(pair, cube, TOKENS, 1 << 20)
    check("kept", less := explain(pair, TOKENS), pair, cube, lambda: pair(x).sum())
    assert explained.received.total() - less.received.total() == kept.spared_bytes
    tied = Tied(cube)
    check("tied", explain(tied, inputs=(0,)), tied, cube, lambda: tied(0))
    branching, numbers = Branching(cube), torch.arange(8)
    explained = explain(branching, inputs={"x": x, "rows": numbers})
    output = lambda: sum(part.sum() for part in branching(x, numbers).values())  # noqa: E731
    check("branching", explained, branching, cube, output)  # type: ignore[arg-type]
    assert explained.row("idle").received == Counter()
    assert explained.row("idle").input_shape is None


def _bert(shape: Shape) -> None:
    made: dict[str, Any]
    for made, precision in (
        ({}, MixedPrecisionPolicy()),
        ({"recompute": "layer"}, MixedPrecisionPolicy()),
        ({"reshard_after_forward": False}, MixedPrecisionPolicy(compute=torch.bfloat16)),
    ):
        cube = Cube(*shape, precision=precision)
        cube.manual_seed(0)
        model = BertForPreTraining(toy_config(67, dropout=0.1), cube, **made)
        step = toy_packs(67, 16)
        inputs = (lay(step, cube), *totals(step))
        explained = explain(model, inputs=inputs)
        check(f"bert {made}", explained, model, cube, lambda: model(*inputs).loss)  # noqa: B023
        assert sum(row.name.startswith("bert.layers.0-1") and row.times == 2 for row in explained.folded) >= 7
        assert not any(row.name.startswith("bert.layers.") and row.times != 2 for row in explained.folded)


def _others(shape: Shape) -> None:
    """With the arguments that the models make themselves."""
    cube = Cube(*shape)
    cube.manual_seed(0)
    sizes: dict[str, Any] = {"layers": 2, "hidden": HIDDEN, "heads": 8}
    models = (
        Gpt(GptConfig(**sizes, vocab=67, window=5, dropout=0.1), cube),
        Vit(VitConfig(**sizes, classes=3, patch=2, grid=4), cube),
        BertForPreTraining(toy_config(67, encoder="modern", window=5, global_every=2, dropout=0.1), cube),
        ElectraForPreTraining(
            toy_config(67, family="electra", embedding=24, next_sentence=False, dropout=0.1),
            ReplacedTokens(generator_size=0.5),
            cube,
        ),
    )
    for model in models:
        inputs = model.example(TOKENS)
        assert explain(model, TOKENS).received == explain(model, inputs=inputs).received
        output = lambda: getattr(out := model(**inputs), "loss", out)  # noqa: B023, E731
        check(type(model).__name__, explain(model, inputs=inputs), model, cube, output)


def _all(shape: Shape) -> None:
    _layers(shape)
    _bert(shape)
    _others(shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.slow
def test_a_real_step_sends_and_keeps_what_was_explained(shape: Shape) -> None:
    run_ranks(ranks_of(shape), _all, shape)


# --- who is charged -------------------------------------------------------------------------------------------------


FLAT = (1, 2, 4, 1)


def _charged() -> dict[str, Any]:
    cube = Cube(*FLAT)
    layers = {each: TransformerLayer3D(HIDDEN, 8, cube, INNER, recompute=each) for each in ("none", "layer")}
    return {
        "alone": _alone(cube),
        **{name: {row.name: row.received for row in explain(layer, TOKENS).rows} for name, layer in layers.items()},
    }


def _alone(cube: Cube) -> list[Any]:
    """Single layers, with inputs made from what they say of themselves."""
    found = []
    for layer in (
        Linear3D(HIDDEN, INNER, cube),
        Linear3D(HIDDEN, INNER, cube, "y"),
        LayerNorm3D(HIDDEN, cube, "y"),
        RMSNorm3D(HIDDEN, cube),
        Embedding3D(67, HIDDEN, cube),
        LookupEmbedding3D(5, HIDDEN, cube),
        SmallHead3D(HIDDEN, 3, cube),
        Projection3D(HIDDEN, 67, cube),
    ):
        row = explain(layer, TOKENS).row("")
        found.append((row.kind, dict(row.received), row.faces, row.input_shape, row.output_shape))
    return found


@pytest.fixture(scope="module")
def charged() -> list[tuple[planned.CommModel, dict[str, Any]]]:
    """What each rank of a flat cube found, with what its closed forms need."""
    shape = CubeShape(y=2, z=4)
    return [(planned.CommModel(shape=shape, rank=rank), found) for rank, found in enumerate(run_ranks(8, _charged))]


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_each_layer_is_charged_with_its_closed_form(recompute: str, charged: list[Any]) -> None:
    for wire, results in charged:
        found = results[recompute]
        repeated = recompute == "layer"

        def product(k: int, n: int, face: Any) -> Counter[Any]:
            once = planned.product(wire, TOKENS, k, n, face)  # noqa: B023
            return once + planned.product(wire, TOKENS, k, n, face, forward_only=True) if repeated else once  # noqa: B023

        norm = planned.layer_norm(wire, TOKENS)
        norm += planned.layer_norm(wire, TOKENS, forward_only=True) if repeated else Counter()
        assert found.pop("(sums of gradients)") != Counter()
        assert {name: received for name, received in found.items() if received} == {
            "attention.qkv": product(HIDDEN, 3 * HIDDEN, "z"),
            "attention.out": product(HIDDEN, HIDDEN, "y"),
            "attention_norm": norm,
            "mlp.up": product(HIDDEN, INNER, "z"),
            "mlp.down": product(INNER, HIDDEN, "y"),
            "mlp_norm": norm,
        }


def test_a_layer_alone_is_given_an_input_that_fits(charged: list[Any]) -> None:
    for wire, results in charged:
        logits = planned.chunk(67, 2, wire.index("y"))
        assert results["alone"] == [
            ("Linear3D", planned.product(wire, TOKENS, HIDDEN, INNER), ("z", "y"), (64, 16), (32, 48)),
            ("Linear3D", planned.product(wire, TOKENS, HIDDEN, INNER, "y"), ("y", "z"), (32, 32), (64, 24)),
            ("LayerNorm3D", planned.layer_norm(wire, TOKENS, "y"), ("y", "y"), (32, 32), (32, 32)),
            ("RMSNorm3D", planned.rms_norm(wire, TOKENS), ("z", "z"), (64, 16), (64, 16)),
            ("Embedding3D", planned.embedding(wire, TOKENS, 67, HIDDEN), ("", "z"), (128,), (64, 16)),
            ("LookupEmbedding3D", {}, ("", "z"), (128,), (64, 16)),
            ("SmallHead3D", planned.narrow_head(wire, TOKENS, 3), ("y", ""), (32, 32), (32, 3)),
            ("Projection3D", planned.vocab_projection(wire, TOKENS, HIDDEN, 67), ("z", "y"), (64, 16), (32, logits)),
        ]


# --- nothing is left ------------------------------------------------------------------------------------------------


class Noted(nn.Module):
    """A layer with dropout and two buffers, one written to and one replaced in every forward pass."""

    def __init__(self, cube: Cube) -> None:
        super().__init__()
        self.cube = cube
        self.layer = Linear3D(HIDDEN, HIDDEN, cube)
        self.dropout = Dropout3D(0.5, cube)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        y = self.dropout(self.layer(x))
        self.last = y.detach().sum()
        return y


def _left() -> None:
    cube = Cube(2, 2, 2)
    cube.manual_seed(0)
    model = Noted(cube)
    x = torch.randn(32, 32, requires_grad=True)
    with cube.no_sync():  # some gradients arrive, others are held back
        model(x).sum().backward()
    tensors: dict[str, Any] = {"x": x.grad, **dict(model.named_buffers())}
    tensors |= {name: parameter.grad for name, parameter in model.named_parameters()}
    before = {name: tensor if tensor is None else local(tensor).clone() for name, tensor in tensors.items()}
    random, issued, ledger = torch.get_rng_state(), cube.traffic.issued, cube.ledger
    assert ledger.holds_back

    # One rank of eight: were anything sent, it would wait for the others here.
    if cube.rank == 5:
        with cube.traffic.counting() as outside, torch.no_grad():
            explained = explain(model, inputs=(x,))
        assert explained.received.total() > 0
        assert outside.total_calls == 0
        with pytest.raises(ArithmeticError):
            explain(model, inputs=(x,), loss=_refuse)

    after: dict[str, Any] = {"x": x.grad, **dict(model.named_buffers())}
    after |= {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, value in before.items():
        assert after[name] is tensors[name], f"{name} is another tensor"
        assert value is None or torch.equal(local(after[name]), value), f"{name} has changed"
    assert torch.equal(torch.get_rng_state(), random)
    assert (cube.traffic.issued, cube.traffic.is_dry, cube.ledger) == (issued, False, ledger)
    assert ledger.holds_back
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model(x).sum().backward()  # all ranks still agree on what comes next


def _refuse(output: Any) -> Tensor:
    raise ArithmeticError("on purpose")


def test_one_rank_alone_explains_and_leaves_no_trace() -> None:
    run_ranks(8, _left)


def test_dry_collectives_have_the_shapes_and_types_of_real_ones() -> None:
    traffic = CommCounter()
    y = Axis(name="y", ranks=(0, 1, 2), index=1, group=None, traffic=traffic)
    own, told = torch.arange(6, dtype=torch.bfloat16).view(3, 2), []
    with traffic.counting() as outside:
        with traffic.dry(lambda *collective: told.append(collective)), traffic.counting() as inside:
            results = [
                all_gather(own, y).wait(),
                reduce_scatter(own, y).wait(),
                all_reduce(own.clone(), y).wait(),
                all_to_all(own.flatten(), [1, 2, 3], [2, 2, 0], y).wait(),
            ]
            assert traffic.is_dry
            assert traffic.waiting is None
        assert not traffic.is_dry
    wanted = [torch.cat([own] * 3), own[1:2], own, own.new_zeros(4)]
    assert all(torch.equal(result, value) for result, value in zip(results, wanted, strict=True))
    assert all(result.dtype == torch.bfloat16 for result in results)
    kinds: list[tuple[Any, int]] = [("all-gather", 24), ("reduce-scatter", 8), ("all-reduce", 24), ("all-to-all", 4)]
    assert told == inside.order == [("y", kind, size) for kind, size in kinds]
    assert (outside.total_calls, traffic.issued) == (0, 0)


# --- one device -----------------------------------------------------------------------------------------------------


def test_one_device_sends_nothing_and_keeps_as_much() -> None:
    cube = Cube.single()
    model = nn.Sequential(Linear3D(8, 12, cube), nn.GELU(), Linear3D(12, 8, cube, "y"))
    explained = explain(model, 16)
    assert explained.received == Counter()
    assert [row.saved for row in explained.rows] == [4 * 16 * 8, 4 * 16 * 12, 4 * 16 * 12]
    assert explained.saved == 4 * 16 * (8 + 12 + 12)
    assert explained.parameters == explained.parameters_here == 12 * 8 + 12 + 8 * 12 + 8


def test_the_mode_and_the_loss_are_those_of_the_caller() -> None:
    cube = Cube.single()
    cube.manual_seed(0)
    model = nn.Sequential(Linear3D(8, 8, cube), Dropout3D(0.5, cube))
    assert "1" in [row.name for row in explain(model, 16).rows]
    assert "1" not in [row.name for row in explain(model.eval(), 16).rows], "no mask is kept"
    squared = explain(model, 16, loss=lambda output: output.square().sum())
    assert squared.row("(loss)").saved == 4 * 16 * 8


class Example(nn.Module):
    """A model that makes its own arguments."""

    def __init__(self, cube: Cube) -> None:
        super().__init__()
        self.cube = cube
        self.layer = Linear3D(8, 8, cube)

    def example(self, tokens: int) -> dict[str, Any]:
        return {"x": torch.ones(tokens, 8), "factor": 2.0}

    def forward(self, x: Tensor, factor: float) -> dict[str, Tensor]:
        return {"loss": (factor * self.layer(x)).sum()}


def test_a_model_with_an_example_is_called_with_it() -> None:
    explained = explain(Example(Cube.single()), 24)
    assert explained.row("layer").input_shape == (24, 8)
    assert explained.tokens == 24


def _bad(what: str) -> None:
    cube = Cube.single()
    layer = Linear3D(8, 8, cube)
    if what == "plain":
        explain(nn.Linear(8, 8), 16)
    elif what == "cubes":
        explain(nn.Sequential(layer, Linear3D(8, 8, Cube.single(), "y")), 16)
    elif what == "nothing":
        explain(layer)
    elif what == "tokens":
        explain(layer, 0)
    elif what == "arguments":
        explain(Branching(cube), 16)
    elif what == "gradient":
        explain(layer, inputs=(torch.ones(4, 8),), loss=None) if layer.requires_grad_(False) else None
    elif what == "loss":
        explain(layer, 16, loss=lambda output: output.detach().sum())
    elif what == "number":
        explain(layer, 16, loss=lambda output: output.sum().item())
    elif what == "container":
        explain(layer, inputs=(MappingProxyType({"x": torch.ones(4, 8, requires_grad=True).exp()}),))
    elif what == "row":
        explain(layer, 16).row("other")


@pytest.mark.parametrize(
    "what, message",
    [
        ("plain", "found none in Linear"),
        ("cubes", "lie on 2 different cubes"),
        ("nothing", "Got neither"),
        ("tokens", "Got 0"),
        ("arguments", r"Branching.*\(x,"),
        ("gradient", "nothing in the output needs a gradient"),
        ("loss", "nothing in the loss needs a gradient"),
        ("number", "needs a gradient.*'float'"),
        ("container", "a mappingproxy among them cannot be copied"),
        ("row", "no row is named 'other'"),
    ],
)
def test_what_cannot_be_explained_is_refused(what: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _bad(what)


# --- the table ------------------------------------------------------------------------------------------------------


def row(name: str, saved: int = 0, **more: Any) -> ReportRow:
    return ReportRow(name=name, kind="Linear3D", saved=saved, **more)


def test_equal_layers_are_one_row() -> None:
    rows = (
        row("embedding"),
        *[row(f"layers.{i}.{name}", saved=10) for i in range(12) for name in ("up", "down")],
        row("layers.12.up", saved=99),
        row("layers.14.up", saved=99),
        *[row(f"stages.{i}.blocks.{j}") for i in range(2) for j in range(3)],
        row("head"),
    )
    explained = CostReport(model="Model", cube="1x1x1", rank=0, ranks=1, tokens=None, rows=rows)
    assert [(each.name, each.times) for each in explained.folded] == [
        ("embedding", 1),
        ("layers.0-11.up", 12),
        ("layers.0-11.down", 12),
        ("layers.12.up", 1),
        ("layers.14.up", 1),
        ("stages.0-1.blocks.0-2", 6),
        ("head", 1),
    ]
    assert sum(each.times * each.saved for each in explained.folded) == explained.saved == 24 * 10 + 2 * 99


def test_the_table_and_the_json_tell_the_same() -> None:
    layer = row(
        "layers.0",
        saved=3 * 1024,
        faces=("z", "y"),
        input_shape=(64, 32),
        output_shape=(32, 48),
        parameters=4000,
        parameters_here=500,
        forward=Counter({("y", "all-gather"): 1000}),
        backward=Counter({("y", "reduce-scatter"): 536, ("x", "all-gather"): 7}),
    )
    sums = ReportRow(name="(sums of gradients)", kind="over x+z", backward=Counter({("x+z", "all-reduce"): 2**21}))
    rows = (layer, replace(layer, name="layers.1"), sums)
    explained = CostReport(model="Model", cube="2x2x2", rank=3, ranks=8, tokens=512, rows=rows)
    assert str(explained).splitlines()[0] == "Model on 2x2x2, rank 3 of 8, 512 tokens: one forward and backward pass"
    lines = [line.split("  ") for line in str(explained).splitlines()[2:]]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines if line != [""]]
    assert cells[0] == [
        *("layer", "kind", "faces", "local shapes", "parameters", "here", "over x", "over y", "over x+z", "saved")
    ]
    assert cells[2] == [
        *("layers.0-1", "x2", "Linear3D", "z -> y", "(64, 32) -> (32, 48)", "4,000", "500", "7 B", "1.5 KiB"),
        "3.0 KiB",
    ]
    assert cells[3] == ["(sums of gradients)", "over x+z", "2.0 MiB"]
    assert cells[5] == ["total", "received 2.0 MiB", "8,000", "1,000", "14 B", "3.0 KiB", "2.0 MiB", "6.0 KiB"]

    told = json.loads(explained.json())
    assert told["total"] == {
        "parameters": 8000,
        "parameters_here": 1000,
        "received": {
            "x all-gather": 14,
            "x+z all-reduce": 2**21,
            "y all-gather": 2000,
            "y reduce-scatter": 1072,
        },
        "received_by_axis": {"y": 3072, "x": 14, "x+z": 2**21},
        "saved": 6 * 1024,
    }
    assert [(each["name"], each["times"]) for each in told["rows"]] == [("layers.0-1", 2), ("(sums of gradients)", 1)]
    assert told["rows"][0]["received_backward"] == {"x all-gather": 7, "y reduce-scatter": 536}
