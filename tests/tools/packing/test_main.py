"""`python -m tools.packing`: histograms from files and corpora, the report in all its forms, plans on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from tensor3d.data import sample_pairs
from tensor3d.data.masking import masked_counts
from tensor3d.packing import PLANNERS, Limits, fingerprint_of, load_plan, lpfhp, pack_stream
from tests.tools.runs import write_text
from tools.corpus.quick.corpus_info import load_corpus
from tools.corpus.quick.prepare import prepare
from tools.packing.__main__ import main
from tools.packing.histogram import corpus_histogram, read_histogram
from tools.packing.report import DEPTHS, Row, figure_of

# 12 slots: 7 + 5, 6 + 6, 4 + 4 + 4 and a 10 that leaves 2 empty.
COUNTS = [0, 0, 0, 0, 30, 10, 20, 10, 0, 0, 5, 0, 0]
TOKENS, PACKS = 30 * 4 + 10 * 5 + 20 * 6 + 10 * 7 + 5 * 10, 10 + 10 + 10 + 5


@pytest.fixture
def histogram(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps({"name": "made up", "counts": COUNTS}))
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packing")
    write_text(folder / "text.txt")
    prepare(str(folder / "text.txt"), folder / "corpus", vocab_size=67)
    return folder / "corpus"


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    assert main(["report", "--json", *map(str, arguments)]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What standard error says of a call that must end with status 2 and nothing on standard output."""
    assert main(list(map(str, arguments))) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tools.packing: ")
    return captured.err


# --- histograms ----------------------------------------------------------------------------------------------------


def test_a_histogram_is_read_as_it_is(histogram: Path) -> None:
    counts = read_histogram(histogram)
    assert counts.dtype == np.int64
    assert counts.tolist() == COUNTS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("\udc80", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[0, 1]", "holds a list where an object is needed"),
        ('{"lengths": [0, 1]}', r"has no counts; its entries are \['lengths'\]"),
        ('{"counts": {"1": 2}}', "counts is a dict where a list is needed"),
        ('{"counts": [0, -2]}', r"counts.*\b0.*-2.*length 1"),
        ('{"counts": [0, 1.5]}', r"counts.*\b1.5.*length 1"),
        ('{"counts": [0, NaN]}', "counts.*nan.*length 1"),
        ('{"counts": [0, "3"]}', "counts.*'3'.*length 1"),
        ('{"counts": [0, true]}', "counts.*True.*length 1"),
        ('{"counts": [0, 99999999999999999999]}', r"counts.*\b9{20}.*length 1"),
        ('{"counts": [0, 9223372036854775807, 1]}', r"counts 9,223,372,036,854,775,809 tokens, and at most"),
        ('{"counts": [0, 1], "counts": [0, 2]}', "the key 'counts' is there twice in one object"),
        ('{"counts": []}', "counts no sequence at all"),
        ('{"counts": [0, 0, 0]}', "counts no sequence at all"),
        ('{"counts": [3, 1]}', "counts 3 sequences of length 0"),
    ],
)
def test_a_file_that_is_no_histogram_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message) as refusal:
        read_histogram(path)
    assert str(path) in str(refusal.value)


def test_a_missing_histogram_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"histogram.*nowhere.json"):
        read_histogram(tmp_path / "nowhere.json")
    with pytest.raises(ValueError, match="Is a directory"):
        read_histogram(tmp_path)


def test_a_corpus_is_counted_as_training_draws_it(corpus: Path) -> None:
    counts = corpus_histogram(corpus, 48, seed=3)
    (train,) = load_corpus(corpus).train
    assert train is not None
    lengths = sample_pairs(train, max_length=48, seed=3, epoch=0).lengths
    assert len(counts) == 49
    np.testing.assert_array_equal(np.repeat(np.arange(49), counts), np.sort(lengths))


# --- report --------------------------------------------------------------------------------------------------------


def test_json_has_a_row_for_every_plan(histogram: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = report(capsys, "--histogram", histogram)
    assert {(row["method"], row["max_sequences"]) for row in rows} == {(m, d) for m in PLANNERS for d in DEPTHS}
    for row in rows:
        plan = PLANNERS[row["method"]](COUNTS, 12, row["max_sequences"])
        assert set(row) == set(Row.__dataclass_fields__)
        assert (row["packs"], row["packing_factor"]) == (plan.packs, 75 / plan.packs)
        assert row["efficiency"] == pytest.approx(TOKENS / (12 * plan.packs))
        assert row["lower_bound_kind"] in ("lp", "tokens")
        assert row["lower_bound_packs"] <= row["packs"]
        assert 0 <= row["seconds"] < 5
    best = [row for row in rows if row["method"] == "lpfhp" and row["max_sequences"] is None]
    assert [row["packs"] for row in best] == [PACKS]


def test_one_method_at_one_limit(histogram: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = report(capsys, "--histogram", histogram, "--method", "lpfhp", "--max-sequences", 2)
    assert (row["method"], row["max_sequences"], row["packs"]) == ("lpfhp", 2, 40)


def test_the_capacity_may_be_above_the_longest_sequence(histogram: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = report(capsys, "--histogram", histogram, "--capacity", 24, "--method", "padded")
    assert {row["packs"] for row in rows} == {75}
    assert rows[0]["efficiency"] == pytest.approx(TOKENS / (24 * 75))


def test_the_table_shows_every_plan(histogram: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--histogram", str(histogram), "--max-sequences", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"75 sequences, {TOKENS} tokens, packs of 12"
    (line,) = [line for line in lines if line.split()[1:2] == ["lpfhp"]]
    assert line.split()[:5] == ["3", "lpfhp", "35", f"{100 * TOKENS / 12 / 35:.4f}", f"{75 / 35:.4f}"]
    assert {line.split()[1] for line in lines if line.startswith(" " * 8 + "3")} == set(PLANNERS)


def test_a_corpus_in_place_of_a_histogram(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = report(capsys, "--corpus", corpus, "--capacity", 48, "--seed", 3, "--method", "lpfhp", "--max-sequences", 3)
    assert rows[0]["packs"] == lpfhp(corpus_histogram(corpus, 48, seed=3), 48, 3).packs
    assert "give --capacity" in refused(capsys, "report", "--corpus", corpus)


def refuse_above_two(histogram: Any, capacity: int, max_sequences: int | None = None, **limits: Any) -> Any:
    if max_sequences is None or max_sequences > 2:
        raise ValueError("the matrix would take 9 GiB")
    return lpfhp(histogram, capacity, max_sequences, **limits)


def test_a_method_that_refuses_is_left_out_of_all_and_an_error_by_name(
    histogram: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.packing.report.PLANNERS", {"lpfhp": lpfhp, "heavy": refuse_above_two})
    assert main(["report", "--histogram", str(histogram), "--json"]) == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out)
    assert [row["max_sequences"] for row in rows if row["method"] == "heavy"] == [2]
    assert [row["max_sequences"] for row in rows if row["method"] == "lpfhp"] == list(DEPTHS)
    left_out = [line for line in captured.err.splitlines() if line.startswith("left out: heavy, ")]
    assert len(left_out) == len(DEPTHS) - 1
    assert left_out[-1] == "left out: heavy, any sequences a pack: the matrix would take 9 GiB"
    assert "would take 9 GiB" in refused(capsys, "report", "--histogram", histogram, "--method", "heavy")


def test_the_picture(histogram: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = report(capsys, "--histogram", histogram, "--plot", tmp_path / "fill.png")
    assert imread(tmp_path / "fill.png").shape == (810, 1350, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fill.png", "lengths.json"]
    (axes,) = figure_of([Row(**row) for row in rows], 12).axes
    lines = {str(line.get_label()): line for line in axes.lines}
    assert set(lines) == {*PLANNERS, "bound (lp)"} or set(lines) == {*PLANNERS, "bound (tokens)"}
    shown = [1 - row["efficiency"] for row in rows if row["method"] == "lpfhp"]
    assert np.asarray(lines["lpfhp"].get_ydata()).tolist() == pytest.approx(shown)
    (bound,) = [line for name, line in lines.items() if name.startswith("bound")]
    assert bound.get_linestyle() == "--"
    wanted = [1 - TOKENS / 12 / row["lower_bound_packs"] for row in rows if row["method"] == "lpfhp"]
    assert np.asarray(bound.get_ydata()).tolist() == pytest.approx([max(0.00005, share) for share in wanted])


# --- plan ----------------------------------------------------------------------------------------------------------


def test_a_plan_is_written_for_its_input(histogram: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    call = ["plan", "--histogram", str(histogram), "--output", str(path), "--method", "lpfhp", "--max-sequences", "3"]
    assert main(call) == 0
    fingerprint = fingerprint_of(COUNTS, Limits.of(12, 3), "lpfhp")
    assert load_plan(path, fingerprint) == lpfhp(COUNTS, 12, 3)
    shown = capsys.readouterr().out
    assert f"{path}: 35 packs of 12 slots" in shown
    assert fingerprint in shown
    with pytest.raises(ValueError, match="fingerprint"):
        load_plan(path, fingerprint_of(COUNTS, Limits.of(12, 4), "lpfhp"))


def test_a_plan_with_a_budget_of_masked_tokens(histogram: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    call = ["plan", "--histogram", str(histogram), "--output", str(path), "--method", "lpfhp"]
    assert main([*call, "--masked-per-pack", "2"]) == 0
    limits = Limits.of(12, budget=2, costs=masked_counts(np.arange(13)))
    plan = load_plan(path, fingerprint_of(COUNTS, limits, "lpfhp"))
    # Every sequence has at least one token to guess, so no pack holds three.
    assert max(len(strategy.lengths) for strategy in plan.strategies) == 2
    # At another share longer ones have more.
    assert main([*call, "--masked-per-pack", "5", "--masked-share", "0.4"]) == 0
    costs = masked_counts(np.arange(13), 0.4)
    plan = load_plan(path, fingerprint_of(COUNTS, Limits.of(12, budget=5, costs=costs), "lpfhp"))
    assert max(int(costs[list(strategy.lengths)].sum()) for strategy in plan.strategies) == 5


# --- stream --------------------------------------------------------------------------------------------------------


def test_a_stream_is_packed(histogram: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["stream", "--histogram", str(histogram), "--sequences", "900", "--window", "100"]
    assert main([*call, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    drawn = np.random.default_rng(0).choice(13, size=900, p=np.array(COUNTS) / sum(COUNTS))
    packs = list(pack_stream(drawn.tolist(), 12, window=100))
    assert figures["packs"] == len(packs)
    assert figures["efficiency"] == pytest.approx(drawn.sum() / 12 / len(packs))
    assert figures["efficiency"] <= figures["steady_efficiency"] <= 1
    assert figures["left_over"] < 100
    assert main(call) == 0
    assert f"{len(packs)} packs of 12 slots" in capsys.readouterr().out
    # The window was never full.
    assert main([*call[:3], "--sequences", "5"]) == 0
    assert "no pack was finished; 5 sequences were left over" in capsys.readouterr().out
    assert "--sequences must be at least 1" in refused(capsys, *call[:3], "--sequences", 0)


# --- bad calls -----------------------------------------------------------------------------------------------------


def test_bad_calls_are_said_in_one_message(histogram: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "either --histogram FILE.json or --corpus DIR" in refused(capsys, "report")
    assert "--capacity must be at least 5 with --corpus" in refused(
        capsys, "report", "--corpus", tmp_path, "--capacity", 4
    )
    both = ("report", "--histogram", histogram, "--corpus", tmp_path)
    assert "either --histogram FILE.json or --corpus DIR" in refused(capsys, *both)
    assert "there is no histogram file" in refused(capsys, "report", "--histogram", tmp_path / "no.json")
    of_file = ("report", "--histogram", histogram)
    assert "--method must be one of padded" in refused(capsys, *of_file, "--method", "magic")
    assert "does not fit a capacity of 8" in refused(capsys, *of_file, "--capacity", 8)
    assert "max_sequences must be at least 1" in refused(capsys, *of_file, "--max-sequences", 0)
    assert "--plot must be a file in a folder" in refused(capsys, *of_file, "--plot", tmp_path / "no" / "fill.png")
    plan = ("plan", "--histogram", histogram, "--output")
    assert "--output must be a file in a folder" in refused(capsys, *plan, tmp_path)
    assert "--method must be one of padded" in refused(capsys, *plan, tmp_path / "plan.json", "--method", "all")
    assert "capacity must be at least 1" in refused(capsys, *plan, tmp_path / "plan.json", "--capacity", -3)
    assert [path.name for path in tmp_path.iterdir()] == ["lengths.json"]
