"""Text in, text out, over all of Unicode: nothing is made up on the way, and nothing is lost without being counted."""

from __future__ import annotations

import html
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tensor3d.data import IndexedDataset
from tests.tools.corpus.dumps import documents, run
from tests.tools.corpus.scripts import SCRIPTS, paragraph
from tests.tools.corpus.tokenized import write_documents
from tools.corpus.pipeline import local_team
from tools.corpus.quick.corpus_info import CorpusInfo
from tools.corpus.quick.prepare import prepare
from tools.corpus.quick.sentencepiece_tokenizer import cut_at_characters
from tools.corpus.quick.sentencepiece_tokenizer import load_tokenizer as load_model
from tools.corpus.sentences import LEFT_OUT, split_sentences
from tools.corpus.tokenize.encode import TokenizeOptions, tokenize
from tools.corpus.tokenize.train import TokenizerOptions, tokenizer
from tools.corpus.tokenizers import load_tokenizer

# All of Unicode but halves of surrogate pairs, which no UTF-8 has; what steps look at comes more often.
CHARACTERS = st.one_of(
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from("\0\ufffd\u2581\u2585\u200b\u200c\u200d\ufeff\u0085\u00a0\u3000\u2028\x1c\n\n  ..!?।။。'\"-*"),
    st.sampled_from("".join(map(paragraph, SCRIPTS))),
)
TEXTS = st.text(CHARACTERS, max_size=80)
QUICK = settings(suppress_health_check=list(HealthCheck))


def visible(texts: Sequence[str]) -> str:
    return "".join("".join(text.split()) for text in texts)


def odd(text: str) -> set[str]:
    """What must not come from nowhere."""
    return {character for character in text if character in "\0\ufffd" or "\ud800" <= character <= "\udfff"}


@settings(QUICK, max_examples=10)
@given(st.lists(TEXTS, min_size=1, max_size=6), st.booleans())
@example(["a\0b", "\ufeffA \ufeffb", "\u0085\u3000", "x &amp; &#0; &shy; <y>"], False)
def test_extraction_keeps_every_row_of_text_or_counts_it(texts: list[str], as_wikiextractor: bool) -> None:
    texts = ["There is always one.", *texts]
    wiki = {"id": "1", "revid": "2", "url": "https://en.wikipedia.org/wiki?curid=1", "title": "T"}
    rows = [{**wiki, "text": f"T\n{html.escape(text, quote=False)}"} for text in texts]
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "rows.jsonl"
        plain = [{"text": text} for text in texts]
        file.write_text("\n".join(map(json.dumps, rows if as_wikiextractor else plain)))
        made = run(Path(name) / "out", file, skip_bad=True, deduplicate=False)
        found, left_out = [document["text"] for document in documents(made)], made.folder / "left-out.jsonl"
        refused = len(left_out.read_text().splitlines()) if left_out.exists() else 0
    kept = [text.removeprefix("\ufeff") for text in texts if "\0" not in text]
    assert visible(found) == visible(kept)
    assert refused == len(texts) - len(kept)
    assert made.counts["documents"] + made.counts["empty"] == made.counts["read"] == len(kept)


@QUICK
@given(TEXTS, st.sampled_from([*SCRIPTS, "en", "xx"]))
@example("*** --- ***", "en")
@example("A.\n\n...\n\n\u0301\n\n\ufffd", "de")
def test_sentences_have_all_characters_but_those_that_are_counted(text: str, language: str) -> None:
    counts = dict.fromkeys(LEFT_OUT, 0)
    sentences = split_sentences(text, language, counts)
    assert len(visible(sentences)) + counts["characters_left_out"] == len(visible([text]))
    rest = iter(visible([text]))
    assert all(character in rest for character in visible(sentences)), "in their order, and no others"
    assert (counts["sentences_left_out"] > 0) == (counts["characters_left_out"] > 0)


@QUICK
@given(TEXTS, st.integers(4, 40))
def test_parts_of_a_sentence_make_it(text: str, longest: int) -> None:
    parts = list(cut_at_characters(text, longest))
    assert "".join(parts) == text
    assert all(len(part.encode()) <= longest for part in parts)


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that has every text, from the step."""
    folder = tmp_path_factory.mktemp("bytes")
    names = ("<pad>", "<s>", "</s>", "<mask>")
    pieces = [*names, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in names])
    made.save(str(folder / "tokenizer.json"))
    tokenizer(TokenizerOptions(output=folder / "made", tokenizer_file=folder / "tokenizer.json"), local_team(1))
    return folder / "made"


@settings(QUICK, max_examples=12)
@given(st.lists(TEXTS, min_size=1, max_size=4))
@example(["a\0b\ufffd.", "***", "\u0085x"])
def test_ids_of_bytes_have_the_text_again(of_bytes: Path, texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        docs = write_documents(Path(name) / "docs", [*texts, "There is always one."])
        done = tokenize(TokenizeOptions(output=Path(name) / "ids", docs=(docs,), tokenizer=of_bytes), local_team(1))
        dataset, made = IndexedDataset(Path(name) / "ids" / "documents"), load_tokenizer(of_bytes)
        found = [made.decode(dataset[item].tolist()) for item in range(len(dataset.lengths))]
    counts = done.counts
    assert found == [sentence for text in [*texts, "There is always one."] for sentence in split_sentences(text)]
    assert counts["documents"] + counts["documents_without_sentence"] == len(texts) + 1
    assert counts["characters"] == sum(map(len, found))
    whole = len(visible([*texts, "There is always one."]))
    assert len(visible(found)) + counts["characters_left_out"] == whole


@settings(QUICK, max_examples=6)
@given(st.lists(TEXTS, min_size=1, max_size=4))
@example(["***", "\u0301\n\n-"])
def test_a_corpus_in_one_go_counts_what_is_no_text(texts: list[str]) -> None:
    whole = "\n\n".join(["There is always one.", *texts, "And another one."]).replace("\0", "")  # the reader refuses it
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "text.txt"
        file.write_text(whole, encoding="utf-8", newline="\n")
        info = fitting(file, Path(name) / "out")
        pieces = load_model(Path(name) / "out" / "tokenizer.model")
    sentences = split_sentences(whole)
    assert info.sentences + info.sentences_left_out >= len(sentences)
    assert info.characters_left_out >= len(visible([whole])) - len(visible(sentences))
    assert not any(odd(pieces.id_to_piece(number)) - odd(whole) for number in range(pieces.vocab_size()))


def fitting(file: Path, output: Path) -> CorpusInfo:
    """With as many pieces as the text has."""
    size = 60
    while True:
        try:
            return prepare(str(file), output, vocab_size=size, held_out=0.0)
        except ValueError as error:
            size = int(re.findall(r"(?:that works is|it needs) (\d+)", str(error))[0])
