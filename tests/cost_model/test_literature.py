"""The known ways' rows: the papers' figures, our own boxes, a simulated SUMMA, seconds and crossing points."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from itertools import product

import numpy as np
import pytest

from tensor3d.cost_model.comm_volume import CommModel, transformer_layer
from tensor3d.cost_model.hardware import Cluster, Link
from tensor3d.cost_model.literature import WAYS, Method, TransformerSpec, known, timed, ways
from tensor3d.cost_model.literature.bian2021 import REPORTED, Case, cases, report

# 64 sequences of 16 tokens: every way finds its sizes divide on 8, 16 and 64 ranks.
ENCODER = TransformerSpec(sequences=64, length=16, hidden=64, inner=256, heads=64)
MH, H2 = ENCODER.tokens * ENCODER.hidden, ENCODER.hidden**2
# Sizes without powers of two, for three a side.
ODD = TransformerSpec(sequences=27, length=5, hidden=54, inner=81, heads=27)
# One second a byte, no latency: seconds are bytes.
UNIT = Link(latency=1e-300, bandwidth=1.0)
WIRE = Cluster(
    name="wire",
    nodes=1,
    per_node=64,
    flops={"bf16": 1e12},
    memory=1.0,
    memory_bandwidth=1.0,
    inside=UNIT,
    across=UNIT,
    efficiency=1.0,
)


@pytest.mark.parametrize(
    "name, ranks, kept, elements, calls",
    [
        ("1-D", 8, True, 7 * MH, 4),
        ("1-D", 8, False, 7 * MH, 4),  # nothing is gathered, so nothing is gathered again
        ("1-D, sequence", 8, True, 7 * MH, 8),
        ("1-D, sequence", 8, False, 8.75 * MH, 10),
        ("1-D, sequence", 64, True, 7.875 * MH, 8),
        ("fully sharded", 8, True, 21 * H2, 2),
        ("fully sharded", 8, False, 31.5 * H2, 3),
        ("3-D", 8, True, 4 * MH + 3 * H2, 24),
        ("3-D", 8, False, 4.875 * MH + 4.5 * H2, 32),
        ("3-D", 64, True, 1.5 * MH + 1.125 * H2, 24),
        ("2-D", 16, False, 3 * 3 / 16 * (7 * MH + 12 * H2), 96),
        ("2.5-D", 8, False, 3 / 4 * (7 * MH / 2 + 12 * H2) + 12 * H2 / 4, 52),
    ],
)
def test_a_layers_traffic(name: str, ranks: int, kept: bool, elements: float, calls: int) -> None:
    row = known(name, ENCODER, ranks, kept=kept)
    assert (row.elements, row.calls, row.refused) == (elements, calls, None)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    "name, ranks, encoder",
    [
        ("1-D, sequence", 8, ENCODER),
        ("1-D, sequence", 27, ODD),
        ("fully sharded", 8, ENCODER),
        ("fully sharded", 27, ODD),
        ("3-D", 8, ENCODER),
        ("3-D", 27, ODD),
        ("3-D", 64, ENCODER),
    ],
)
def test_rows_are_corners_of_our_box(
    name: str, ranks: int, encoder: TransformerSpec, kept: bool, recomputed: bool
) -> None:
    """(1, P, 1), (P, 1, 1) and (p, p, p): the same elements by axis and kind as the layers of this library."""
    row = known(name, encoder, ranks, kept=kept, recomputed=recomputed)
    rows, sizes = encoder.tokens // row.box.x, (encoder.hidden, encoder.inner)
    elements: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    for move in row.moves:
        elements[move.axes[0], move.kind] += move.elements
        calls[move.axes[0], move.kind] += move.calls
    one = CommModel(shape=row.box, compute=1, gradient=1, parameter=1)
    assert elements == transformer_layer(one, rows, *sizes, norms=0, kept=kept, recomputed=recomputed)
    ours = transformer_layer(
        dataclasses.replace(one, unit="calls"), rows, *sizes, norms=0, kept=kept, recomputed=recomputed
    )
    assert calls == ours


def summa(A: np.ndarray, B: np.ndarray, q: int) -> tuple[np.ndarray, int]:
    """A product on q x q ranks step by step, and the elements that all of them receive."""
    parts = {(i, j): np.hsplit(np.vsplit(A, q)[i], q)[j] for i, j in product(range(q), repeat=2)}
    weights = {(i, j): np.hsplit(np.vsplit(B, q)[i], q)[j] for i, j in product(range(q), repeat=2)}
    received, C = 0, {}
    for i, j in parts:
        C[i, j] = sum(parts[i, step] @ weights[step, j] for step in range(q))
        received += sum(parts[i, step].size for step in range(q) if step != j)
        received += sum(weights[step, j].size for step in range(q) if step != i)
    return np.block([[C[i, j] for j in range(q)] for i in range(q)]), received


@pytest.mark.parametrize("ranks, encoder", [(4, ENCODER), (9, ODD), (16, ENCODER)])
def test_summa_forward_receives_what_its_row_says(ranks: int, encoder: TransformerSpec) -> None:
    M, h, f, q = encoder.tokens, encoder.hidden, encoder.inner, math.isqrt(ranks)
    generator, total = np.random.default_rng(0), 0
    for k, n in ((h, 3 * h), (h, h), (h, f), (f, h)):
        A, B = generator.normal(size=(M, k)), generator.normal(size=(k, n))
        C, received = summa(A, B, q)
        np.testing.assert_allclose(C, A @ B)
        total += received
    row = known("2-D", encoder, ranks)
    assert sum(move.elements for move in row.forward) * ranks == total
    # Backward moves both operands twice (dC Bᵀ and Aᵀ dC).
    assert row.elements == 3 * sum(move.elements for move in row.forward)


def test_trees_cost_what_the_2_d_paper_counts() -> None:
    """log2(p)/(2 sqrt(p)) (7 bsh + 12 h²) forward, and twice that backward without recomputation."""
    row = known("2-D", ENCODER, 64)
    wanted = 3 * math.log2(64) / (2 * math.sqrt(64)) * (7 * MH + 12 * H2)
    found = timed(row, ENCODER, WIRE, element=1, gradient=1, broadcasts="tree")
    assert found.blocking == pytest.approx(wanted, rel=1e-12)
    assert timed(row, ENCODER, WIRE, element=1, gradient=1).blocking == pytest.approx(wanted / 3, rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 8])
def test_what_a_layer_keeps_is_the_known_formula(ranks: int) -> None:
    """Korthikanti et al. 2022, eq. 1 and 2: sbh (10 + 24/t) and 34 sbh/t bytes, with two and t dropout masks."""
    whole, split = (known(name, ENCODER, ranks) for name in ("1-D", "1-D, sequence"))
    assert 2 * whole.saved + 2 * MH == MH * (10 + 24 / ranks)
    assert 2 * split.saved + 2 * MH / ranks == 34 * MH / ranks


def test_what_else_is_held() -> None:
    layers = dataclasses.replace(ENCODER, layers=3, vocabulary=100)
    held = {row.name: row for row in ways(layers, 64)}
    weights = 3 * 12 * H2 + 100 * 64
    assert {name: row.weights for name, row in held.items()} == dict.fromkeys(WAYS, weights // 64) | {
        "2.5-D": weights // 16  # on four layers of ranks
    }
    saved = {name: row.saved for name, row in held.items()}
    assert saved == dict.fromkeys(WAYS, 16 * MH // 64) | {"1-D": 4 * MH + 12 * MH // 64}
    again = {row.name: row.saved for row in ways(layers, 64, recomputed=True)}
    assert again == dict.fromkeys(WAYS, MH // 64) | {"1-D": MH}


def test_what_keeping_gathered_operands_costs() -> None:
    kept = {row.name: row.saved for row in ways(ENCODER, 64, kept=True)}
    plain = {row.name: row.saved for row in ways(ENCODER, 64)}
    more = {name: kept[name] - plain[name] for name in WAYS if kept[name] != plain[name]}
    assert more == {
        "1-D, sequence": 2 * 63 * MH // 64,  # the inputs of QKV and up
        # 7 Mh and 12 h² on 16 ranks instead of 64; the shards of three inputs, 6 Mh, are not needed beside them.
        "3-D": (7 * MH + 12 * H2) // 16 - 6 * MH // 64,
        "fully sharded": 12 * H2,
    }


@pytest.mark.parametrize(
    "name, ranks, change, told",
    [
        ("1-D", 128, {}, "heads 64 does not divide by 128"),
        ("1-D", 8, {"inner": 36}, "inner 36 does not divide by 8"),
        ("1-D, sequence", 64, {"sequences": 3, "length": 3}, "tokens 9 does not divide by 64"),
        ("2-D", 8, {}, "8 ranks are no square of a number of at least 2"),
        ("2-D", 16, {"sequences": 6}, "sequences 6 does not divide by 4"),
        ("2.5-D", 16, {}, "16 ranks are no q x q x d with 1 < d <= q"),
        ("2.5-D", 64, {"sequences": 8}, "sequences 8 does not divide by 16"),
        ("3-D", 16, {}, "16 ranks are no cube of a number of at least 2"),
        ("3-D", 1, {}, "1 ranks are no cube of a number of at least 2"),
        ("3-D", 64, {"sequences": 8}, "sequences 8 does not divide by 16"),
        ("fully sharded", 64, {"sequences": 32}, "sequences 32 does not divide by 64"),
    ],
)
def test_a_way_that_does_not_exist_says_why(name: str, ranks: int, change: dict[str, int], told: str) -> None:
    encoder = dataclasses.replace(ENCODER, **change)
    row = known(name, encoder, ranks)
    assert row.refused == told
    assert (row.elements, row.calls, row.saved, row.weights) == (0, 0, 0, 0)
    assert timed(row, encoder, dataclasses.replace(WIRE, per_node=128)).seconds == math.inf


def test_bad_questions() -> None:
    with pytest.raises(ValueError, match=r"known ways are 1-D; 1-D, sequence; .*. Got '4-D'"):
        known("4-D", ENCODER, 8)
    with pytest.raises(ValueError, match=r"ranks.*1.*0"):
        ways(ENCODER, 0)
    with pytest.raises(ValueError, match=r"hidden.*48.*64"):
        dataclasses.replace(ENCODER, heads=48)
    with pytest.raises(ValueError, match=r"layers.*1.*0"):
        dataclasses.replace(ENCODER, layers=0)
    with pytest.raises(ValueError, match=r"wire has \b64\b.*65"):
        timed(dataclasses.replace(known("1-D", ENCODER, 64), ranks=65), ENCODER, WIRE)


def test_one_rank_sends_nothing() -> None:
    found = {row.name: row for row in ways(ENCODER, 1)}
    assert {name for name, row in found.items() if not row.refused} == {"1-D", "1-D, sequence", "fully sharded"}
    assert sum(row.elements for row in found.values()) == 0
    alone = timed(found["1-D"], ENCODER, WIRE)
    assert alone.seconds == alone.compute == 3 * ENCODER.flops / 1e12
    again = timed(found["1-D"], ENCODER, WIRE, recomputed=True)
    assert again.compute == 4 * ENCODER.flops / 1e12


def test_flops_are_those_of_the_products() -> None:
    # 24 h² a token with f = 4h, and 4 s h for attention (Narayanan et al. 2021, appendix).
    assert ENCODER.flops == ENCODER.tokens * (24 * H2 + 4 * 16 * 64)


def test_seconds_under_the_products_and_beside_them() -> None:
    layers = dataclasses.replace(ENCODER, layers=2)
    row = known("3-D", layers, 8)
    found = timed(row, layers, WIRE, element=2, gradient=4)
    # 4.875 Mh of activations in 2 bytes block; 3 h² of weights in 2 and 1.5 h² of gradients in 4 do not.
    assert found.blocking == pytest.approx(2 * 2 * 4.875 * MH, rel=1e-12)
    assert found.hidden == pytest.approx(2 * (2 * 3 + 4 * 1.5) * H2, rel=1e-12)
    assert found.seconds == pytest.approx(found.blocking + found.hidden, rel=1e-12)  # the products take no time
    assert found.exposed == pytest.approx(found.seconds - found.compute, rel=1e-12)
    slow = timed(row, layers, dataclasses.replace(WIRE, flops={"bf16": 1.0}))
    assert slow.seconds == pytest.approx(slow.blocking + slow.compute, rel=1e-12)
    assert slow.exposed == slow.blocking
    for together in (
        timed(row, layers, WIRE, overlapped=False),
        timed(row, layers, dataclasses.replace(WIRE, overlaps=False)),
    ):
        assert together.hidden == 0.0
        assert together.blocking == pytest.approx(found.blocking + found.hidden, rel=1e-12)


def test_every_call_has_its_latency() -> None:
    slow = dataclasses.replace(WIRE, inside=Link(latency=1.0, bandwidth=1e300))
    one, grid = known("1-D", ENCODER, 16), known("2-D", ENCODER, 16)
    assert timed(one, ENCODER, slow).blocking == 4 * slow.collective(one.box, ("y",), "all-reduce")[0]
    assert timed(grid, ENCODER, slow).blocking == 96 * 3
    assert timed(grid, ENCODER, slow, broadcasts="tree").blocking == 96 * 2


def ratios(told: str) -> dict[str, float]:
    return next(case for case in cases() if case.told.startswith(told)).ratios()


def test_the_headline_lies_between_the_cases_that_its_report_names() -> None:
    assert ratios("two InfiniBand")["1-D"] < REPORTED["1-D"] < ratios("as assumed")["1-D"]
    assert ratios("as assumed")["2-D"] < REPORTED["2-D"] < ratios("broadcasts as trees")["2-D"]
    assert ratios("1-D at the batch")["1-D"] == pytest.approx(ratios("as assumed")["1-D"], rel=0.01)


def test_every_case_of_the_headline_exists() -> None:
    def refused(case: Case) -> list[Method]:
        return [found.way for found in map(case.times, case.batches) if found.way.refused]

    assert [way for case in cases() for way in refused(case)] == []
    first = cases()[0]
    # The batch of 1-D fills a 16 GB GPU with the inputs of its layers, three quarters of it or more.
    kept = first.times("1-D").way.saved * first.encoder("1-D").layers * 4
    assert 0.75 < kept / first.cluster.memory < 1


def test_the_report_shows_the_models_ratios_beside_the_reported() -> None:
    lines = report().splitlines()
    for way, reported in REPORTED.items():
        line = next(line for line in lines if line.startswith(way))
        assert line.split()[-2:] == [f"{cases()[0].ratios()[way]:.2f}", f"{reported:.2f}"]
    assert all(len(line) <= 120 for line in lines)
