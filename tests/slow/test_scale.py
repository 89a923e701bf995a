"""Boxes of 27 and of 64 ranks: the same layer and the same training, the same numbers, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.bert import BertForPreTraining
from models.bert.cost_model.comm_volume import step_traffic
from models.bert.cost_model.param_shapes import held_elements
from tensor3d import Cube, CubeShape, Sequences, TransformerLayer3D, clip_grad_norm_, local
from tensor3d.optim import AdamW, Lamb
from tests.models.kept import kept_bytes, load_of, wire_of
from tests.models.toy import lay, totals, toy_config, toy_packs
from tests.ranks import run_ranks
from tests.single_device_reference import compare, worst
from tools.training.dry_step import dry_step

LENGTHS = (5, 1, 6)  # of the sequences in each pack of 12


def _built(side: int) -> float:
    """Seconds to construct the cube and every group that a layer needs."""
    start = time.perf_counter()
    cube = Cube(side, side, side)
    TransformerLayer3D(12 * side, 2 * side, cube)
    return time.perf_counter() - start


def _layer(side: int) -> tuple[dict[str, float], float]:
    seconds = _built(side)
    width = 12 * side
    errors = compare(
        lambda cube: TransformerLayer3D(width, 2 * side, cube, 24 * side, std=0.2),
        (side, side, side, 1),
        rows=side * side * sum(LENGTHS),  # a pack for each of the x*z slices
        columns=width,
        face_in="z",
        face_out="z",
        dtype=torch.float64,
        call=lambda layer, x, cube: layer(
            x, Sequences.from_lengths(LENGTHS * (side * side // (cube.shape.x * cube.shape.z)))
        ),
    )
    return errors, seconds


@pytest.mark.slow
def test_a_transformer_layer_on_many_ranks() -> None:
    side = 3
    start = time.perf_counter()
    results = run_ranks(side**3, _layer, side, timeout=900)
    name, value = worst([errors for errors, _ in results])
    print(
        f"{side}x{side}x{side}: cube and layer stood after {max(seconds for _, seconds in results):.2f} s, all done "
        f"after {time.perf_counter() - start:.1f} s; worst error {value:.1e} ({name})"
    )
    assert value <= 1e-9, name


LAMB, ADAMW = "lamb", "adamw"


def _train(boxes: Sequence[tuple[str, str]], ranks: int, hidden: int, heads: int) -> dict[str, Any]:
    """Of this rank, a whole step on each box with its optimiser: what was counted and what the formulas say, and the
    losses before and after it."""
    counted: dict[str, Any] = {}
    predicted: dict[str, Any] = {}
    kept: dict[tuple[str, str], int] = {}
    losses, loads = {}, {}
    config = toy_config(67, layers=1, hidden=hidden, heads=heads, inner=2 * hidden)
    for box, kind in boxes:
        shape = CubeShape.parse(box)
        cube = Cube(shape.x, shape.y, shape.z)
        cube.manual_seed(0)
        model = BertForPreTraining(config, cube)
        optimizer = (Lamb if kind == LAMB else AdamW)(model.parameters(), cube, lr=1e-2)
        step = toy_packs(config.vocab, ranks)
        batch = lay(step, cube)
        with cube.traffic.counting() as traffic:
            loss = model(batch, *totals(step)).loss
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0, cube)
            optimizer.step()
        optimizer.zero_grad()
        after: list[Tensor] = []
        kept[box, kind] = kept_bytes(model, lambda: after.append(model(batch, *totals(step)).loss) or after[0])  # noqa: B023
        losses[box, kind] = (loss.item(), after[0].item())
        states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
        wire, load = wire_of(cube, None), load_of(batch)
        loads[box, kind] = load
        # LAMB takes the norms of what decays, which is everything here.
        lamb = len(list(model.parameters())) if kind == LAMB else 0
        received, calls = (
            step_traffic(config, each, load.rows, load.masked, load.first, summed=2 * lamb)
            for each in (wire, replace(wire, unit="calls"))
        )
        held = held_elements(config, shape, cube.rank)
        predicted[box, kind] = (+received, calls, held, 2 * held)
        counted[box, kind] = (
            +traffic.received,
            traffic.calls,
            sum(local(parameter).numel() for parameter in model.parameters()),
            sum(local(state).numel() for state in states),
        )
    return {"counted": counted, "predicted": predicted, "losses": losses, "kept": kept, "loads": loads}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "heads", "hidden", "boxes"),
    [
        (27, 27, 108, [("3x3x3", LAMB), ("3x3x3", ADAMW)]),
        pytest.param(
            *(64, 64, 128, [("4x4x4", LAMB), ("1x64x1", LAMB), ("1x8x8", ADAMW), ("64x1x1", ADAMW)]),
            marks=pytest.mark.long(reason="64 processes on a small machine: two to three minutes"),
        ),
    ],
    ids=["27", "64"],
)
def test_training_on_many_ranks_is_as_predicted(
    ranks: int, heads: int, hidden: int, boxes: list[tuple[str, str]]
) -> None:
    """Whole steps, embedding to optimiser: what every rank receives, issues and holds is what the formulas say, what
    the last one keeps is what a dry step counts, and the losses before and after the update are those of one device."""
    (alone,) = run_ranks(1, _train, [("1x1x1", LAMB), ("1x1x1", ADAMW)], ranks, hidden, heads)
    start = time.perf_counter()
    results = run_ranks(ranks, _train, boxes, ranks, hidden, heads, timeout=900)
    print(f"{ranks} ranks on {', '.join(box for box, _ in boxes)}: {time.perf_counter() - start:.1f} s")
    for result in results:
        assert result["counted"] == result["predicted"]
        assert result["losses"] == results[0]["losses"]
    for (_, kind), losses in results[0]["losses"].items():
        assert losses == pytest.approx(alone["losses"]["1x1x1", kind], rel=1e-5)
        assert abs(losses[1] - losses[0]) > 0.01
    last, config = results[-1], toy_config(67, layers=1, hidden=hidden, heads=heads, inner=2 * hidden)
    for (box, kind), kept in last["kept"].items():
        dry = dry_step(config, CubeShape.parse(box), last["loads"][box, kind], rank=ranks - 1)
        assert dry.memory.saved == kept
