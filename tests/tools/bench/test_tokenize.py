"""`bench tokenize`: what it measures, checks and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.corpus.tokenized import TEXTS, write_documents, write_vocabulary
from tools.bench.__main__ import main
from tools.bench.tokenize import TokenizeFigures, open_library, read_sentences, rows
from tools.corpus.pipeline import local_team
from tools.corpus.tokenize.train import TokenizerOptions, tokenizer


def make(folder: Path) -> list[str]:
    """Inputs, as options of the command."""
    docs = write_documents(folder / "docs", TEXTS)
    file = write_vocabulary(folder / "vocab.txt")
    tokenizer(TokenizerOptions(output=folder / "tokenizer", vocab_file=file), local_team(1))
    return ["tokenize", "--docs", str(docs), "--tokenizer", str(folder / "tokenizer"), "--rounds", "1"]


@pytest.mark.slow
def test_both_are_timed_and_give_the_same_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = make(tmp_path)
    assert main([*arguments, "--output", str(tmp_path / "figures.json")]) == 0
    text = capsys.readouterr().out
    assert f"{5 * len(TEXTS)} sentences" in text
    assert "encode_batch_fast" in text
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert figures["ids_equal"] is True
    assert figures["bytes"] == sum(len(sentence) for sentence in read_sentences(tmp_path / "docs", "en"))
    assert f"our encoder on one core: {figures['encoder_ratio']:.2f} times as fast as encode_batch" in text
    assert f"{figures['step_share']:.2f} of what our encoder alone would do" in text
    assert len(figures["own_seconds"]) == len(figures["library_seconds"]) == 1
    assert len(figures["raw_seconds"]) == len(figures["step_seconds"]) == len(figures["whole_seconds"]) == 1


def test_a_bad_call_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = make(tmp_path)
    assert main([*arguments[:-1], "0"]) == 2
    assert "--rounds must be at least 1. Got 0" in capsys.readouterr().err
    assert main([*arguments[:2], str(tmp_path), *arguments[3:]]) == 2
    assert "is no output of `python -m tools.corpus extract`" in capsys.readouterr().err
    with pytest.raises(ValueError, match="holds no tokenizer"):
        open_library(tmp_path)


def test_the_ratio_is_of_rates() -> None:
    figures = TokenizeFigures(
        bytes=12_000_000,
        raw_seconds=(2.0, 9.0, 3.0),
        step_seconds=(4.0, 1.0, 2.0),
        whole_seconds=(4.0, 6.0, 7.0),
        library_seconds=(8.0, 9.0, 7.0),
        own_seconds=(2.0, 2.5, 1.0),
        cores=4,
        ids_equal=True,
    )
    assert figures.encoder_ratio == 4
    assert figures.share(figures.step_seconds) == 0.25
    assert figures.ratio(figures.step_seconds) == 1.5
    assert figures.ratio(figures.whole_seconds) == 0.5
    assert rows(figures) == [
        ("encode_batch, one core", "8.00", "7.00", "1.50", "0.38"),
        ("our encoder, one core", "2.00", "1.00", "6.00", "1.50"),
        ("encode_batch_fast alone", "3.00", "2.00", "4.00", "1.00"),
        ("the step tokenize", "2.00", "1.00", "6.00", "1.50"),
        ("with the start of Python", "6.00", "4.00", "2.00", "0.50"),
    ]
