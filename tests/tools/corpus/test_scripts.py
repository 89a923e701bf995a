"""A small corpus of twenty languages goes through all steps, and nothing of it is lost on the way."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from tensor3d.data import IndexedDataset
from tests.tools.corpus.sampled import training
from tests.tools.corpus.scripts import SCRIPTS, paragraph
from tools.corpus.__main__ import main
from tools.corpus.pipeline import read_manifest
from tools.corpus.samples.reader import open_samples
from tools.corpus.sentences import split_sentences
from tools.corpus.tokenizers import load_tokenizer

SENTENCES = {language: 1 if language == "th" else 3 for language in SCRIPTS}


def normal(text: str) -> str:
    """As models that are trained here have text: compatible letters are one, and U+200C is a space."""
    return unicodedata.normalize("NFKC", text.replace("\u200c", " "))


@pytest.mark.parametrize("language", SCRIPTS)
def test_each_language_is_split_where_its_sentences_end(language: str) -> None:
    text = paragraph(language)
    expected = [" ".join(text.split())] if language == "th" else list(SCRIPTS[language])
    assert split_sentences(text, language) == expected
    assert split_sentences(text, "en") == expected, "the rules of English know all of these marks"


def test_a_corpus_of_many_scripts_goes_through_all_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [text for language in SCRIPTS for text in (paragraph(language), f"{paragraph(language)}\n\n{language}.")]
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8"
    )
    docs, tokenizer, ids, samples = (str(tmp_path / name) for name in ("docs", "tokenizer", "ids", "samples"))
    for words in (
        ["extract", str(tmp_path / "in.jsonl"), "--least-letters", "0.8", "--output", docs],
        [
            *("tokenizer", "--docs", docs, "--output", tokenizer, "--character-coverage", "1.0"),
            *("--vocab-size", "700", "--model", "bpe"),
        ],
        ["tokenize", "--docs", docs, "--tokenizer", tokenizer, "--output", ids],
        [
            *("samples", "--corpora", ids, "--output", samples, "--max-length", "128", "--held-out", "0"),
            *("--whole-words", "--masking", "static", "--single-texts"),
        ],
    ):
        assert main([*words, "--workers", "1"]) == 0, capsys.readouterr().err
    count = 2 * sum(SENTENCES.values()) + len(SCRIPTS)
    counts = {name: read_manifest(tmp_path / name).counts for name in ("docs", "tokenizer", "ids", "samples")}
    assert counts["docs"]["documents"] == 40
    assert counts["docs"]["characters"] == sum(map(len, texts))
    assert counts["tokenizer"] == {"sentences": count, "vocab_size": 700}
    assert (counts["ids"]["documents"], counts["ids"]["sentences"], counts["ids"]["unknown_tokens"]) == (40, count, 0)
    assert (counts["ids"]["documents_without_sentence"], counts["samples"]["documents"]) == (0, 40)
    # Each sentence comes back, as the tokenizer's own normal form has it.
    dataset, made = IndexedDataset(tmp_path / "ids" / "documents"), load_tokenizer(tmp_path / "tokenizer")
    sentences = [sentence for text in texts for sentence in split_sentences(text)]
    found = [made.decode(dataset[item].tolist()) for item in range(len(sentences))]
    for back, sentence in zip(found, sentences, strict=True):
        assert back == normal(sentence)
    assert counts["ids"]["characters"] == sum(map(len, sentences))
    # The same text stands in the samples, and no word that is masked whole is longer than a word.
    opened = open_samples(tmp_path / "samples")
    assert sorted(made.decode(a) for a, _, _ in training(opened)) == sorted(
        normal(" ".join(split_sentences(text))) for text in texts
    )
    assert opened.continuations is not None
    capsys.readouterr()
    for folder in ("docs", "tokenizer", "ids", "samples"):
        assert main(["inspect", str(tmp_path / folder)]) == 0
        told = capsys.readouterr().out
        assert not set(told) & {"\ufffd", "\0"}
        assert folder != "ids" or "share of unknown tokens                      0.0000 %" in told
    assert np.isfinite(opened.counts["unigram_entropy"])
