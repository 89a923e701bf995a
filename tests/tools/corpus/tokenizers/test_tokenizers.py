"""Tokenizers of three makes: their ids are those of their own libraries, and no text turns into a special token."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from tokenizers import AddedToken, BertWordPieceTokenizer, Tokenizer, decoders, models, pre_tokenizers

from tensor3d.data.masking import GOES_ON
from tests.tools.corpus.tokenized import CASED, PIECES, SPECIAL, TEXTS, write_vocabulary
from tools.corpus.quick.sentencepiece_tokenizer import train_tokenizer
from tools.corpus.tokenizers import Kind, copy_tokenizer, install_tokenizer, load_tokenizer
from tools.corpus.tokenizers import wordpiece as module
from tools.corpus.tokenizers.sentencepiece import SentencePieceTokenizer
from tools.corpus.tokenizers.tokenizer_json import JsonTokenizer
from tools.corpus.tokenizers.wordpiece import WordPieceTokenizer, read_vocabulary

ODD = "aA fF.xX sS'Z \t\n\u3000\u200b\x00\x1c\u0301\u0345éÉßİΣσς漢ꓤ😀_-[]MASKUN#12½ﬁǅ"


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    return write_vocabulary(tmp_path / "vocab.txt")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "any.model"
    train_tokenizer(TEXTS, file, vocab_size=60)
    return file


def test_wordpiece_by_eye(vocabulary: Path) -> None:
    made = WordPieceTokenizer(vocabulary, lowercase=True)
    [ids] = made.encode(["The FOXES went, [MASK]!"])
    assert made.pieces(ids) == ["the", "fox", "##e", "##s", "went", ",", "[", "m", "##a", "##s", "##k", "]", "!"]
    assert made.encode_with_offsets("Foxs, é")[1] == [(0, 3), (3, 4), (4, 5), (6, 7)]
    assert made.pieces(made.encode_with_offsets("Foxs, é")[0]) == ["fox", "##s", ",", "e"]
    assert made.decode([2, *made.encode(["the foxs"])[0], 3]) == "[CLS] the foxs [SEP]"
    assert made.unknown == 1
    assert made.encode(["\u20ac " + 101 * "f"]) == [[1, 1]]
    assert (made.special.pad, made.special.cls, made.special.sep, made.special.mask) == (0, 2, 3, 4)
    assert made.special.vocab_size == made.vocab_size == len(PIECES)
    assert [PIECES[i] for i in np.flatnonzero(made.continuations)] == [p for p in PIECES if p.startswith("##")]


@pytest.mark.parametrize("cased", [False, True])
def test_remembered_words_have_the_ids_that_bert_gives_them(tmp_path: Path, cased: bool) -> None:
    file = write_vocabulary(tmp_path / "vocab.txt", CASED if cased else PIECES)
    made = WordPieceTokenizer(file, lowercase=not cased)
    reference = BertWordPieceTokenizer(str(file), lowercase=not cased)
    draw = random.Random(3)
    texts = ["".join(draw.choices(ODD, k=draw.randrange(40))) for _ in range(3000)]
    texts += [*TEXTS, "", " ", 101 * "f", 100 * "f", "a" + 300 * " " + "b"]
    # The reference takes its special tokens out of a text; here they are text.
    texts = [text for text in texts if not any(name in text for name in SPECIAL)]
    expected = [reference.encode(text, add_special_tokens=False).ids for text in texts]
    assert made.encode(texts) == expected
    for _ in range(2):
        flat = made.encode_flat(texts)
        assert flat.ids.dtype == np.uint16
        assert [part.tolist() for part in np.split(flat.ids, np.cumsum(flat.lengths)[:-1])] == expected


def test_what_is_remembered_has_a_limit(vocabulary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KNOWN", 10)
    made = WordPieceTokenizer(vocabulary, lowercase=True)
    for text in TEXTS:
        assert made.encode_flat([text]).ids.tolist() == made.encode([text])[0]
    assert len(made._known) < 40


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    pieces = (*PIECES, *(f"word{number}" for number in range(2**16)))
    made = WordPieceTokenizer(write_vocabulary(tmp_path / "vocab.txt", pieces), lowercase=True)
    flat = made.encode_flat(["fox word65535", "", "漢."])
    assert flat.ids.dtype == np.int32
    assert flat.ids.tolist() == [6, len(pieces) - 1, PIECES.index("漢"), PIECES.index(".")]
    assert flat.lengths.tolist() == [2, 0, 2]


def test_kind_1_only_line_feeds_end_the_lines_of_a_vocabulary(tmp_path: Path) -> None:
    """Google's Chinese vocabulary has a piece that is U+2028, which some readers take for the end of a line."""
    odd = ["\u2028", "\u2029", "\u0085", "\u00a0", "\u3000", "\x0b", "\x0c", "\x1c"]
    file = tmp_path / "vocab.txt"
    for end in ("\n", "\r\n"):
        file.write_bytes(end.join([*PIECES, *odd, ""]).encode())
        assert read_vocabulary(file.read_bytes(), file) == [*PIECES, *odd]
        assert WordPieceTokenizer(file, lowercase=True).vocab_size == len(PIECES) + len(odd)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert read_vocabulary(file.read_bytes(), file) == [*PIECES, *odd], "a byte order mark is of no piece"


@pytest.mark.parametrize(
    ("content", "lowercase", "message"),
    [
        ("\n".join(PIECES[:4]), True, r"vocab.txt.*'mask': \[MASK\]"),
        ("\n".join([*PIECES, "fox"]), True, f"'fox' in line 7 and in line {len(PIECES) + 1}"),
        ("\n".join([*PIECES[:9], "", *PIECES[9:]]), True, "empty line 10"),
        ("\n".join(["[UNUSED]", *PIECES[2:]]), True, r"has no \[UNK\]"),
        ("\n".join(CASED), True, r"a cased vocabulary.*\b28\b.*Say --cased"),
        ("\n".join(PIECES), False, "uncased vocabulary.*Leave out --cased"),
        ("", True, r"has no \[UNK\]"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(tmp_path: Path, content: str, lowercase: bool, message: str) -> None:
    file = tmp_path / "vocab.txt"
    file.write_bytes(content.encode())
    with pytest.raises(ValueError, match=message):
        WordPieceTokenizer(file, lowercase=lowercase)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"[PAD]\n\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8 at byte 6"):
        WordPieceTokenizer(file, lowercase=True)
    with pytest.raises(ValueError, match="is no sentencepiece model"):
        SentencePieceTokenizer(file)
    with pytest.raises(ValueError, match=r"is no tokenizer.json"):
        JsonTokenizer(file)
    file.write_bytes(b"\xef\xbb\xbf{}")
    with pytest.raises(ValueError, match=r"begins with a byte order mark \(EF BB BF\), .* Save it as UTF-8 without"):
        JsonTokenizer(file)
    for make in (SentencePieceTokenizer, JsonTokenizer):
        with pytest.raises(ValueError, match=r"tokenizer.*nowhere"):
            make(tmp_path / "nowhere")
        file.write_bytes(b"")
        with pytest.raises(ValueError, match="is no "):
            make(file)


def test_sentencepiece_gives_the_ids_of_its_library(model: Path) -> None:
    made = SentencePieceTokenizer(model)
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert made.encode(TEXTS) == [library.encode(text) for text in TEXTS]
    assert (made.vocab_size, made.unknown, made.special_ids) == (60, 1, {"pad": 0, "cls": 2, "sep": 3, "mask": 4})
    text = "The fox [MASK] 漢."
    ids, offsets = made.encode_with_offsets(text)
    assert ids == made.encode([text])[0]
    assert offsets[0][0] == 0
    assert offsets[-1][1] == len(text)
    assert not set(ids) & {0, 2, 3, 4}
    assert made.decode([2, *made.encode(["The fox went."])[0], 3, 4]) == "[CLS] The fox went. [SEP] [MASK]"
    assert made.encode_flat(["", "The fox"]).lengths.tolist() == [0, len(made.encode(["The fox"])[0])]
    for piece, goes_on in zip(made.pieces(range(60)), made.continuations, strict=True):
        assert goes_on & GOES_ON == (piece == "<unk>" or (piece[0] not in "▁[<" and piece not in ".,!"))


def bert_json(file: Path) -> Path:
    """As a model for BERT is published: with cutting, padding and special tokens that are read in text."""
    made = BertWordPieceTokenizer({piece: number for number, piece in enumerate(PIECES)})
    made.enable_truncation(4)
    made.enable_padding(length=9)
    made.save(str(file))
    return file


def roberta_json(file: Path, names: tuple[str, ...] = ("<pad>", "<s>", "</s>", "<mask>")) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*names, *alphabet, "th", "the", "Ġthe"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    made = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in names])
    made.save(str(file))
    return file


def test_a_tokenizer_file_is_read_without_cutting_padding_or_special_tokens(tmp_path: Path, vocabulary: Path) -> None:
    made = JsonTokenizer(bert_json(tmp_path / "tokenizer.json"))
    same = WordPieceTokenizer(vocabulary, lowercase=True)
    texts = [*TEXTS, "[MASK] [SEP] the FOX"]
    assert made.encode(texts) == same.encode(texts)
    assert made.encode_flat(texts).ids.tolist() == same.encode_flat(texts).ids.tolist()
    assert made.encode_with_offsets("Foxs, é") == same.encode_with_offsets("Foxs, é")
    assert (made.special, made.unknown) == (same.special, 1)
    assert (made.continuations == same.continuations).all()
    assert made.decode([2, 6, 3]) == "[CLS] fox [SEP]"


def test_bytes_as_pieces(tmp_path: Path) -> None:
    made = JsonTokenizer(roberta_json(tmp_path / "tokenizer.json"))
    [ids] = made.encode(["the the, 漢<s>"])
    assert made.pieces(ids)[:4] == ["the", "Ġthe", ",", "Ġ"]
    assert made.decode(ids) == "the the, 漢<s>"
    assert made.unknown is None
    assert made.special_ids == {"pad": 0, "cls": 1, "sep": 2, "mask": 3}
    assert not set(ids) & {0, 1, 2, 3}
    goes_on = {
        piece
        for piece, value in zip(made.pieces(range(made.vocab_size)), made.continuations, strict=True)
        if value & GOES_ON
    }
    assert {"th", "the", "t"} <= goes_on
    assert not {"Ġthe", "Ġ", ",", "<s>"} & goes_on


def test_a_tokenizer_file_without_a_special_token_or_word_borders_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"token.*'mask': \[MASK\] or <mask>"):
        JsonTokenizer(roberta_json(tmp_path / "tokenizer.json", ("<pad>", "<s>", "</s>")))
    plan = json.loads(roberta_json(tmp_path / "tokenizer.json").read_text())
    plan["pre_tokenizer"] = {"type": "Whitespace"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(plan))
    made = JsonTokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"which of its pieces go on a word.*Leave out --whole-words"):
        _ = made.continuations


def test_a_folder_is_opened_as_it_was_made(tmp_path: Path, vocabulary: Path, model: Path) -> None:
    cased = write_vocabulary(tmp_path / "cased.txt", CASED)
    cases: list[tuple[Kind, Path, bool]] = [
        ("wordpiece", vocabulary, True),
        ("wordpiece", cased, False),
        ("sentencepiece", model, False),
        ("json", bert_json(tmp_path / "x"), False),
    ]
    for number, (kind, file, lowercase) in enumerate(cases):
        (tmp_path / f"{number}").mkdir()
        made = install_tokenizer(kind, file, tmp_path / f"{number}", lowercase=lowercase)
        copy_tokenizer(tmp_path / f"{number}", tmp_path / "copies" / f"{number}")
        again = load_tokenizer(tmp_path / "copies" / f"{number}")
        assert again.fingerprint == made.fingerprint
        assert again.encode(TEXTS) == made.encode(TEXTS)
    assert len({load_tokenizer(tmp_path / f"{number}").fingerprint for number in range(4)}) == 4


def test_a_folder_that_was_changed_is_refused(tmp_path: Path, vocabulary: Path) -> None:
    folder = tmp_path / "made"
    with pytest.raises(ValueError, match=r"tokenizer.*tokenizer-settings.json"):
        load_tokenizer(folder)
    folder.mkdir()
    install_tokenizer("wordpiece", vocabulary, folder, lowercase=True)
    write_vocabulary(folder / "vocab.txt", [*PIECES[:-1], "ß", "new"])
    with pytest.raises(ValueError, match="it has been changed"):
        load_tokenizer(folder)
    for content in ("{", "[]", '{"kind": "other", "fingerprint": ""}', '{"kind": "wordpiece"}'):
        (folder / "tokenizer-settings.json").write_text(content)
        with pytest.raises(ValueError, match=r"tokenizer-settings.json is damaged"):
            load_tokenizer(folder)
