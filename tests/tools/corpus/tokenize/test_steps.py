"""The steps `tokenizer` and `tokenize`: what they write, whoever writes it, and what they refuse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from tensor3d.data import IndexedDataset
from tensor3d.data.masking import GOES_ON
from tests.tools.corpus.tokenized import CASED, TEXTS, line, write_documents, write_vocabulary
from tools.corpus.__main__ import in_lines, main
from tools.corpus.pipeline import BadInput, Manifest, local_team
from tools.corpus.quick.corpus_info import read_info
from tools.corpus.quick.sentencepiece_tokenizer import LONGEST, TRAINING_COUNTS, cut_at_characters
from tools.corpus.tokenize import documents
from tools.corpus.tokenize.encode import TokenizeOptions, tokenize
from tools.corpus.tokenize.train import TokenizerOptions, tokenizer
from tools.corpus.tokenizers import load_tokenizer

ROOT = Path(__file__).parents[4]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    file = write_vocabulary(tmp_path / "vocab.txt")
    tokenizer(TokenizerOptions(output=tmp_path / "tokenizer", vocab_file=file), local_team(1))
    return tmp_path / "tokenizer"


def write_ids(output: Path, made: Path, *docs: Path, workers: int = 1, **options: object) -> Manifest:
    return tokenize(TokenizeOptions(output=output, docs=docs, tokenizer=made, **options), local_team(workers))  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    return {f"{file.relative_to(folder)}": file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


# tokenize


def test_sentences_become_items_and_documents_keep_their_bounds(tmp_path: Path, made: Path) -> None:
    docs = write_documents(
        tmp_path / "docs", ["The fox went.\n\nTo the  hill, in\nthe morning!", "***"], ["", "A hill."]
    )
    more = write_documents(tmp_path / "more", ["漢 \u20ac"])
    manifest = write_ids(tmp_path / "ids", made, docs, more, most_unknown=0.5)
    dataset, pieces = (
        IndexedDataset(tmp_path / "ids" / "documents"),
        load_tokenizer(tmp_path / "ids" / "tokenizer").pieces,
    )
    assert [" ".join(pieces(dataset[item].tolist())) for item in range(len(dataset))] == [
        "the fox went .",
        "to the hill , in the morning !",
        "a hill .",
        "漢 [UNK]",
    ]
    assert dataset.documents.tolist() == [0, 2, 3, 4]
    assert dataset.ids.dtype == np.uint16
    assert manifest.counts == {
        "documents": 3,
        "documents_without_sentence": 2,
        "sentences_left_out": 1,
        "characters_left_out": 3,
        "sentences": 4,
        "tokens": 17,
        "unknown_tokens": 1,
        "unknown_characters": 1,
        "characters_in_long_words": 0,
        "words": 13,
        "characters": 51,
        "vocab_size": load_tokenizer(made).vocab_size,
    }
    assert set(manifest.files) == {
        "documents.bin",
        "documents.idx",
        "tokenizer/vocab.txt",
        "tokenizer/tokenizer-settings.json",
    }


def test_the_bytes_do_not_depend_on_who_does_the_work_or_how_it_is_batched(
    tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = write_documents(tmp_path / "docs", TEXTS[:7], TEXTS[7:9], [], TEXTS[9:])
    expected = contents(write_ids(tmp_path / "one", made, docs, most_unknown=1.0).folder)
    assert contents(write_ids(tmp_path / "two", made, docs, workers=2, most_unknown=1.0).folder) == expected
    for size, batch in ((90, 1), (400, 250)):
        monkeypatch.setattr(documents, "RANGE", size)
        monkeypatch.setattr(documents, "BATCH", batch)
        assert contents(write_ids(tmp_path / f"{size}", made, docs, most_unknown=1.0).folder) == expected


def test_every_line_lies_in_one_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lines"
    lines = [b"a\n", b"\n", b"a long one\n", b"bc\n", b"the end"]
    file.write_bytes(b"".join(lines))
    for size in range(1, 30):
        monkeypatch.setattr(documents, "RANGE", size)
        found = [item for unit in documents.ranges_of([file, file]) for item in documents.read_lines(unit)]
        assert [content for _, content in found] == lines * 2
        assert [at for at, _ in found] == [0, 2, 3, 14, 17] * 2


def test_a_finished_output_is_kept_and_other_settings_are_refused(tmp_path: Path, made: Path) -> None:
    docs = write_documents(tmp_path / "docs", TEXTS)
    first = write_ids(tmp_path / "ids", made, docs)
    assert write_ids(tmp_path / "ids", made, docs) == first
    with pytest.raises(ValueError, match=r"settings.*language"):
        write_ids(tmp_path / "ids", made, docs, language="de")


@pytest.mark.parametrize(
    ("bad", "at", "reason"),
    [
        (b'{"text": "cut sho', 0, "a line that is no JSON"),
        (b"\n", 0, "a line that is no JSON"),
        (b'{"id": "7"}\n', 0, 'no object with a string "text"'),
        (b'{"text": 7}\n', 0, 'no object with a string "text"'),
        (b'["text"]\n', 0, 'no object with a string "text"'),
        (b'{"text": "\xff"}\n', 10, "not UTF-8"),
        (b'{"text": "a\\ud800b"}\n', 0, "half a surrogate pair, '\\\\ud800'"),
    ],
)
def test_a_damaged_line_is_named_or_left_out(tmp_path: Path, made: Path, bad: bytes, at: int, reason: str) -> None:
    before = [line("The fox went."), line("A hill.")]
    docs = write_documents(tmp_path / "docs", [*before, bad])
    place = f"byte {sum(map(len, before)) + at}"
    with pytest.raises(BadInput, match=f"documents-00000.jsonl, {place}: .*{reason}.*extract"):
        write_ids(tmp_path / "ids", made, docs)
    manifest = write_ids(tmp_path / "rest", made, docs, skip_bad=True)
    assert (manifest.counts["documents"], manifest.left_out) == (2, 1)
    [listed] = map(json.loads, (tmp_path / "rest" / "left-out.jsonl").read_text().splitlines())
    assert (listed["file"], listed["at"]) == ("documents-00000.jsonl", place)
    sound = write_ids(tmp_path / "sound", made, write_documents(tmp_path / "sound-docs", before))
    for name in ("documents.bin", "documents.idx"):
        assert (manifest.folder / name).read_bytes() == (sound.folder / name).read_bytes()


def test_a_tokenizer_that_is_not_for_the_text_is_told(tmp_path: Path, made: Path) -> None:
    docs = write_documents(tmp_path / "docs", ["Жил был кот. Он был рыж."], ["The fox went."])
    with pytest.raises(BadInput, match=r"\b00000\b.jsonl, bytes \b0\b to \d+: 75%"):
        write_ids(tmp_path / "ids", made, docs)
    manifest = write_ids(tmp_path / "rest", made, docs, skip_bad=True)
    assert (manifest.counts["documents"], manifest.counts["tokens"], manifest.left_out) == (1, 4, 1)
    assert write_ids(tmp_path / "all", made, docs, most_unknown=0.75).counts["unknown_tokens"] == 6


def test_text_of_words_that_are_too_long_is_told_though_few_tokens_are_unknown(tmp_path: Path, made: Path) -> None:
    """One token of eight is unknown, and stands for most of the text."""
    docs = write_documents(tmp_path / "docs", ["***\n\n" + "fox" * 34 + " the fox went to the hill."])
    told = r"documents-00000.jsonl, .*: 80% of the characters stand in words of more than 100, each"
    with pytest.raises(BadInput, match=told + r".*Put spaces between"):
        write_ids(tmp_path / "ids", made, docs)
    counts = write_ids(tmp_path / "all", made, docs, most_unknown=0.85).counts
    assert [counts[name] for name in ("tokens", "unknown_tokens", "characters")] == [8, 1, 128]
    assert (counts["unknown_characters"], counts["characters_in_long_words"]) == (102, 102)


def test_what_cannot_be_tokenised_is_refused(tmp_path: Path, made: Path) -> None:
    docs = write_documents(tmp_path / "docs", ["***", ""])
    with pytest.raises(ValueError, match=r"not one document.*docs.*sentence"):
        write_ids(tmp_path / "ids", made, docs)
    with pytest.raises(ValueError, match="--docs names no folder"):
        write_ids(tmp_path / "ids", made)
    with pytest.raises(ValueError, match=r"--language must be an ISO 639-1 code.*Got 'English'"):
        write_ids(tmp_path / "ids", made, docs, language="English")
    with pytest.raises(ValueError, match=r"--most-unknown is a share.*Got 20"):
        write_ids(tmp_path / "ids", made, docs, most_unknown=20)
    with pytest.raises(ValueError, match=r"step.*'tokenizer'"):
        write_ids(tmp_path / "ids", made, made)
    with pytest.raises(ValueError, match=r"step.*'extract'"):
        write_ids(tmp_path / "ids", docs, docs)


def test_workers_need_no_torch() -> None:
    code = "import sys, tools.corpus.tokenize.documents; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# tokenizer


def train(output: Path, docs: Path, *, workers: int = 1, **options: object) -> Manifest:
    settings: dict[str, object] = {"vocab_size": 60, "seed": 3, **options}
    return tokenizer(TokenizerOptions(output=output, docs=(docs,), **settings), local_team(workers))  # type: ignore[arg-type]


def test_training_is_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    docs = write_documents(tmp_path / "docs", TEXTS[:5], TEXTS[5:])
    first = train(tmp_path / "one", docs, sentences=30, character_coverage=1.0, vocab_size=50)
    again = train(tmp_path / "two", docs, sentences=30, character_coverage=1.0, vocab_size=50, workers=2)
    assert contents(first.folder) == contents(again.folder)
    assert first.counts == {"vocab_size": 50, "sentences": 30}
    other = train(tmp_path / "three", docs, sentences=30, character_coverage=1.0, vocab_size=50, seed=4)
    assert contents(other.folder)["tokenizer.model"] != contents(first.folder)["tokenizer.model"]


def test_models_of_both_kinds_with_and_without_case(tmp_path: Path) -> None:
    docs = write_documents(tmp_path / "docs", TEXTS)
    for model in ("unigram", "bpe"):
        for lowercase in (False, True):
            folder = tmp_path / f"{model}-{lowercase}"
            assert train(folder, docs, model=model, lowercase=lowercase).counts["sentences"] == 5 * len(TEXTS)
            made = load_tokenizer(folder)
            text = "The fox went to the town."
            assert made.decode(made.encode([text])[0]) == (text.lower() if lowercase else text)
            assert made.special_ids == {"pad": 0, "cls": 2, "sep": 3, "mask": 4}


def test_merges_of_bytes_are_the_same_for_any_workers_and_know_every_character(tmp_path: Path) -> None:
    docs = write_documents(tmp_path / "docs", TEXTS[:5], TEXTS[5:])
    options = {"model": "bpe-bytes", "vocab_size": 275}
    first, again = (train(tmp_path / f"{n}", docs, workers=n, **options) for n in (1, 2))
    assert contents(first.folder) == contents(again.folder)
    assert first.counts == {"vocab_size": 275, "sentences": 5 * len(TEXTS)}
    made = load_tokenizer(first.folder)
    assert made.special_ids == {"cls": 0, "pad": 1, "sep": 2, "mask": 4}
    for text in ("The fox went to the town.", "na\u00efve \u6f22\u5b57 \U0001f680 <mask>"):
        ids = made.encode([text])[0]
        assert made.decode(ids).strip() == text
        assert not set(ids) & {*made.special_ids.values(), 3}
    # Where a word stands says nothing of its pieces, and where its pieces begin is told.
    assert made.encode(["fox"])[0] == made.encode(["the fox"])[0][-len(made.encode(["fox"])[0]) :]
    pieces, flags = made.pieces(range(275)), made.continuations
    assert not any(flags[n] & GOES_ON for n, piece in enumerate(pieces) if piece.startswith("\u0120"))
    assert all(flags[n] & GOES_ON for n, piece in enumerate(pieces) if piece.isascii() and piece.isalpha())
    folded = train(tmp_path / "folded", docs, lowercase=True, **options)
    assert (
        load_tokenizer(folded.folder).decode(load_tokenizer(folded.folder).encode(["The FOX"])[0]).strip() == "the fox"
    )


LONG = {
    "Latin with spaces": ("wörter über", " "),
    "Chinese without spaces": ("的一是不了", ""),
    "letters with marks": ("e\u0301n\u0303", ""),
    "pictures of four bytes": ("\U0001f600\U0001f9d1\u200d\U0001f680", ""),
    "one word": ("z", ""),
}


@pytest.mark.parametrize("name", LONG)
def test_kind_8_long_sentences_are_trained_on_in_parts(tmp_path: Path, name: str) -> None:
    """Where there are others, and where all are long; every character of the text has a piece."""
    unit, between = LONG[name]
    long = between.join([unit] * 5000)[: 5000 + len(unit)]
    assert len(long.encode()) > LONGEST
    for others, texts in (("alone", []), ("with others", ["The fox went."] * 10)):
        docs = write_documents(tmp_path / others, [*[f"{long} {number}" for number in range(5)], *texts])
        wanted = {"character_coverage": 1.0, "vocab_size": 26 if texts else 18, "model": "bpe"}
        made = train(tmp_path / f"{others}-made", docs, **wanted)
        assert (made.counts["sentences_cut"], made.counts["sentences"]) == (5, 5 + len(texts))
        assert "sentences cut              5" in in_lines(made)
        tokenizer = load_tokenizer(made.folder)
        assert tokenizer.unknown not in tokenizer.encode([unit])[0]


def test_kind_8_no_part_ends_inside_of_a_character_and_nothing_is_lost() -> None:
    for unit, between in LONG.values():
        text = between.join([unit] * 3000)
        for longest in (4, 7, 16, 100, LONGEST):
            parts = list(cut_at_characters(text, longest))
            assert "".join(parts) == text
            assert all(len(part.encode()) <= longest for part in parts)
            if longest >= 16:
                assert not any(unicodedata.category(part[0]) == "Mn" or part[0] == "\u200d" for part in parts)
                assert not any(part.endswith("\u200d") for part in parts)
                # Parts are about as long as they may be.
                assert len(parts) <= 2 * len(text.encode()) / longest + 1
    assert list(cut_at_characters("aaaa bbb cc", 6)) == ["aaaa ", "bbb cc"]
    assert list(cut_at_characters("漢字漢字", 7)) == ["漢字", "漢字"]
    assert list(cut_at_characters("\u0301" * 5, 4)) == ["\u0301\u0301", "\u0301\u0301", "\u0301"]
    assert list(cut_at_characters("กำกำ", 9)) == ["กำ", "กำ"], "kind 8: a vowel that is no mark in Unicode"
    assert list(cut_at_characters("👍🏽👍🏽", 12)) == ["👍🏽", "👍🏽"], "kind 8: a colour of skin"
    assert list(cut_at_characters("", 4)) == [""]


def test_kind_8_a_sentence_with_the_librarys_own_character_is_trained_on_without_it(tmp_path: Path) -> None:
    docs = write_documents(tmp_path / "docs", [f"Quäxe jjj\u2585\u2585 {number}." for number in range(20)])
    made = train(tmp_path / "made", docs, character_coverage=1.0, vocab_size=26)
    assert made.counts == {"vocab_size": 26, "sentences": 20, "reserved_characters_left_out": 40}
    tokenizer = load_tokenizer(made.folder)
    assert tokenizer.unknown not in tokenizer.encode(["Quäxe jjj 7."])[0]


def test_kind_8_a_corpus_in_one_go_cuts_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join("的一是不了" * 400 + f"{number}" for number in range(12)), encoding="utf-8")
    words = ["--source", str(text), "--output", str(tmp_path / "out"), "--vocab-size", "15"]
    assert main(["prepare", *words]) == 0
    # One of the twelve is held out.
    assert "its training 11 sentences cut" in capsys.readouterr().out
    assert read_info(tmp_path / "out").trained_on == {"sentences_cut": 11}
    assert main(["inspect", str(tmp_path / "out"), "--max-length", "64"]) == 0
    assert re.search(r"sentences cut +11 \(training", capsys.readouterr().out)
    # A folder that was prepared before knows nothing of it.
    info = json.loads((tmp_path / "out" / "corpus.json").read_bytes())
    kept = {name: value for name, value in info.items() if name not in TRAINING_COUNTS}
    (tmp_path / "out" / "corpus.json").write_text(json.dumps(kept))
    assert read_info(tmp_path / "out").trained_on == {}


def test_the_sample_is_even(tmp_path: Path) -> None:
    long = "\n\n".join(f"Sentence {number} of the long one." for number in range(1000))
    docs = write_documents(tmp_path / "docs", [long], ["Short. And more."] * 50)
    units = documents.ranges_of(documents.document_files([docs]))
    from tools.corpus.pipeline import Context
    from tools.corpus.tokenize.documents import read_sample, share_out, write_sample

    shared = share_out(units, 120)
    assert sum(unit.sentences for unit in shared) == 120
    assert shared[0].sentences / 120 == pytest.approx(units[0].size / (units[0].size + units[1].size), abs=0.01)
    context = Context(folder=tmp_path, scratch=tmp_path, skip_bad=False)
    for unit in shared:
        write_sample(unit, context, seed=0, language="en")
    sampled = list(read_sample(shared, tmp_path))
    numbers = [int(sentence.split()[1]) for sentence in sampled if sentence.startswith("Sentence")]
    assert len(numbers) > 90
    assert numbers == sorted(numbers)
    assert numbers[-1] > 950, "the sample reaches to the end"
    assert sampled[len(numbers) :] == ["Short.", "And more."] * ((120 - shared[0].sentences) // 2)


def test_a_tokenizer_is_taken_as_it_is(tmp_path: Path) -> None:
    uncased = write_vocabulary(tmp_path / "vocab.txt")
    cased = write_vocabulary(tmp_path / "cased.txt", CASED)
    for name, options, file in (
        ("uncased", {"vocab_file": uncased}, uncased),
        ("cased", {"vocab_file": cased, "cased": True}, cased),
    ):
        manifest = tokenizer(TokenizerOptions(output=tmp_path / name, **options), local_team(1))
        assert (tmp_path / name / "vocab.txt").read_bytes() == file.read_bytes()
        assert manifest.counts == {"vocab_size": load_tokenizer(tmp_path / name).vocab_size}
    docs = write_documents(tmp_path / "docs", TEXTS)
    model = train(tmp_path / "trained", docs).folder / "tokenizer.model"
    tokenizer(TokenizerOptions(output=tmp_path / "model", model_file=model), local_team(1))
    assert load_tokenizer(tmp_path / "model").fingerprint == load_tokenizer(tmp_path / "trained").fingerprint


def test_a_tokenizer_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    docs = write_documents(tmp_path / "docs", TEXTS)
    file = write_vocabulary(tmp_path / "vocab.txt")
    for options, message in (
        ({}, "exactly one of --vocab-file, .* Got none of them"),
        ({"docs": (docs,), "vocab_file": file}, "Got --vocab-file and --docs"),
        ({"docs": (docs,), "cased": True}, "--cased speaks of a --vocab-file"),
        ({"vocab_file": file, "cased": True}, "is an uncased vocabulary"),
        ({"vocab_file": tmp_path / "nowhere"}, "there is no tokenizer file"),
        ({"docs": (docs,), "vocab_size": 0}, "--vocab-size must be at least 1. Got 0"),
        ({"docs": (docs,), "sentences": 0}, "--sentences must be at least 1. Got 0"),
        ({"docs": (docs,), "vocab_size": 5000}, "too small for a vocabulary of 5000 pieces"),
        ({"docs": (docs,), "vocab_size": 60, "character_coverage": 0.1}, "character_coverage is a share"),
        ({"docs": (docs,), "model": "bpe-bytes", "vocab_size": 260}, "at least 261 with --model bpe-bytes"),
        ({"docs": (docs,), "model": "bpe-bytes", "vocab_size": 9000}, "too few different words for --vocab-size 9000"),
        ({"docs": (docs,), "model": "bpe-bytes", "character_coverage": 1.0}, "coverage says nothing of --model bpe-by"),
    ):
        with pytest.raises(ValueError, match=message):
            tokenizer(TokenizerOptions(output=tmp_path / f"{abs(hash(message))}", **options), local_team(1))
    empty = write_documents(tmp_path / "empty", ["***"])
    with pytest.raises(ValueError, match="no sentence to train"):
        train(tmp_path / "no", empty)
    with pytest.raises(ValueError, match="no sentence to train"):
        train(tmp_path / "none", empty, model="bpe-bytes", vocab_size=261)
