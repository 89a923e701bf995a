"""Words of pieces, as they are masked whole: by the mark of each tokenizer, and never beyond a mark of punctuation, an
ideograph or a byte."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers

from tensor3d.data.masking import GOES_ON, word_rows
from tests.tools.corpus.sampled import options, unique_ids, write_ids
from tests.tools.corpus.tokenized import write_vocabulary
from tools.corpus.pipeline import local_team
from tools.corpus.samples.step import samples
from tools.corpus.tokenizers import Tokenizer, install_tokenizer
from tools.corpus.tokenizers.sentencepiece import SentencePieceTokenizer
from tools.corpus.tokenizers.tokenizer_json import JsonTokenizer
from tools.corpus.tokenizers.wordpiece import WordPieceTokenizer

NAMES = ("<pad>", "<s>", "</s>", "<mask>")


def words(made: Tokenizer, text: str) -> list[list[str]]:
    """The pieces of each word of a text."""
    ids = np.array(made.encode([text])[0])
    first, sizes = word_rows(ids, np.arange(len(ids)), made.continuations)
    return [made.pieces(ids[begin : begin + size].tolist()) for begin, size in zip(first, sizes, strict=True)]


def in_line(made: Tokenizer, text: str) -> str:
    """The same: "|" between words, "+" between the pieces of one."""
    return "|".join("+".join(word) for word in words(made, text))


def sentencepiece_model(file: Path, pieces: Sequence[str], **settings: Any) -> SentencePieceTokenizer:
    """A unigram model of these pieces; the longer, the likelier. `settings` are of the trainer or the normalizer."""
    model: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made by its import
    for number, piece in enumerate(["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]", *pieces]):
        kind = {1: 2}.get(number, 3 if number < 5 else 6 if piece.startswith("<0x") else 1)
        model.pieces.add(piece=piece, score=len(piece) * 2.0 - 20.0, type=kind)
    model.trainer_spec.model_type = 1
    model.trainer_spec.byte_fallback = any(piece.startswith("<0x") for piece in pieces)
    model.trainer_spec.pad_id, model.trainer_spec.unk_id = 0, 1
    model.trainer_spec.bos_id = model.trainer_spec.eos_id = -1
    for name, value in settings.items():
        setattr(model.trainer_spec if hasattr(model.trainer_spec, name) else model.normalizer_spec, name, value)
    file.write_bytes(model.SerializeToString())
    return SentencePieceTokenizer(file)


LATIN = ("▁", "▁the", "▁first", "▁on", "s", "document", "ing", "—", "-", "'", ".", "t", "▁don", *"abcdefghi")


@pytest.mark.parametrize(
    ("pieces", "text", "expected"),
    [
        (LATIN, "the firsts", "▁the|▁first+s"),
        (LATIN, "the first—documents.", "▁the|▁first|—|document+s|."),
        (LATIN, "don't first-documenting", "▁don|'|t|▁first|-|document+ing"),
        (
            ("▁", "▁第一", "第二", "句", "是", "。", "我们", "s", "ab"),
            "第一句是第二s我们ab",
            "▁第一|句|是|第二|s|我们|ab",
        ),
        (("▁", "▁ひら", "がな", "カタ", "カナ", "と", "ー"), "ひらがなとカタカナー", "▁ひら|がな|と|カタ|カナ|ー"),
        (("▁", "▁สวัส", "ดี", "ครับ", "a", "b"), "สวัสดีครับ ab", "▁สวัส|ดี|ครับ|▁+a+b"),
        (("▁", "▁မြန်", "မာ", "စာ"), "မြန်မာစာ", "▁မြန်|မာ|စာ"),
        (("▁", "▁हिन्", "दी", "▁में", "।"), "हिन्दी में।", "▁हिन्+दी|▁में|।"),
        (("▁", "▁한국", "어", "는", "▁말"), "한국어는 말", "▁한국+어+는|▁말"),
        (("▁", "▁prix", "é", "s", "€", "5"), "prixés€5", "▁prix+é+s|€|5"),
        ((*LATIN, *(f"<0x{n:02X}>" for n in range(256))), "aéb", "▁+a|<0xC3>|<0xA9>|b"),
        (LATIN, "aéb 漢a", "▁+a+<unk>+b|▁+<unk>+a"),
    ],
)
def test_kind_7_sentencepiece_words_end_at_its_mark_and_where_letters_do(
    tmp_path: Path, pieces: Sequence[str], text: str, expected: str
) -> None:
    made = sentencepiece_model(tmp_path / "m.model", pieces, add_dummy_prefix=True, remove_extra_whitespaces=True)
    assert in_line(made, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the firsts walk", "the▁|first+s▁|w+alk▁"),
        ("first—firsts.", "first|—|first+s▁|.▁"),
        ("alk first walk", "alk▁|first+▁|w+alk▁"),
        ("漢字s the", "漢字|s▁|the▁"),
    ],
)
def test_kind_7_marks_behind_words_end_them(tmp_path: Path, text: str, expected: str) -> None:
    pieces = ("▁", "the▁", "first", "s▁", "alk▁", "w", "—", ".", ".▁", "漢字")
    settings = {"treat_whitespace_as_suffix": True, "add_dummy_prefix": True, "remove_extra_whitespaces": True}
    made = sentencepiece_model(tmp_path / "m.model", pieces, **settings)
    found = in_line(made, text.replace("s.", "s ."))
    assert found == expected


def test_kind_7_a_trained_model_with_marks_behind_words_keeps_words_apart(tmp_path: Path) -> None:
    lines = [f"the quick brown fox walking over lazy dogs number {number}" for number in range(200)]
    for name, more in (("suffix", {"treat_whitespace_as_suffix": True}), ("prefix", {}), ("chars", {})):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_prefix=str(tmp_path / name),
            model_type="char" if name == "chars" else "bpe",
            vocab_size=70,
            hard_vocab_limit=False,
            pad_id=0,
            unk_id=1,
            bos_id=-1,
            eos_id=-1,
            control_symbols=["[CLS]", "[SEP]", "[MASK]"],
            minloglevel=2,
            **more,
        )
        found = words(SentencePieceTokenizer(tmp_path / f"{name}.model"), lines[7])
        assert ["".join(word).strip("▁") for word in found] == lines[7].split()


def json_tokenizer(
    file: Path, model: Any, pre_tokenizer: Any = None, normalizer: Any = None, added: Sequence[str] = NAMES
) -> JsonTokenizer:
    library = Library(model)
    library.add_special_tokens(list(added))
    if pre_tokenizer is not None:
        library.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        library.normalizer = normalizer
    library.save(str(file))
    return JsonTokenizer(file)


def bytes_model(*merged: str) -> Any:
    """Byte-level BPE with these pieces, each of two others."""
    pieces = [*NAMES, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = []
    for piece in merged:
        cut = next(cut for cut in range(len(piece) - 1, 0, -1) if piece[:cut] in pieces and piece[cut:] in pieces)
        merges.append((piece[:cut], piece[cut:]))
        pieces.append(piece)
    return models.BPE({piece: number for number, piece in enumerate(pieces)}, merges)


def unigram(*pieces: str) -> Any:
    return models.Unigram([(piece, len(piece) * 2.0 - 20) for piece in (*NAMES, "<unk>", *pieces)], unk_id=4)


BYTE_PIECES = ("Ġt", "Ġth", "Ġthe", "fi", "rs", "firs", "first", "Ġfirst", "do", "âĢ", "âĢĶ", "Ã©", "æ¼", "æ¼¢")
MARKED = ("▁", "▁the", "▁fir", "st", "—", "do", "漢", "字", "s")
RAW = ("▁", *"thefirsdo", "—", "漢", "字")


def test_kind_7_in_a_model_of_words_an_unknown_one_goes_on_none(tmp_path: Path) -> None:
    made = sentencepiece_model(tmp_path / "tokenizer.model", ("▁the", "▁fox", "▁went"), model_type=3)
    assert in_line(made, "the fox zebra went") == "▁the|▁fox|<unk>|▁went"


def test_kind_7_byte_level_words_end_where_letters_do(tmp_path: Path) -> None:
    layouts = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        ),
    )
    for layout in layouts:
        made = json_tokenizer(tmp_path / "t.json", bytes_model(*BYTE_PIECES), layout)
        assert in_line(made, "first the firsts") == "first|Ġthe|Ġfirst+s"
        assert in_line(made, "first\u2014do the") == "first|âĢĶ|do|Ġthe"
        assert in_line(made, "dos\u00e9s first\u6f22do") == "do+s+Ã©+s|Ġfirst|æ¼¢|do"
        # Half of a character is a byte: U+5B57 has no piece.
        assert in_line(made, "do\u5b57do") == "do|å|\u0143|Ĺ|do"
        assert in_line(made, "do\ndo") == "do|Ċ|do"


@pytest.mark.parametrize(
    ("pre_tokenizer", "normalizer"),
    [
        (pre_tokenizers.Metaspace(), None),
        (pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]), None),
        (
            pre_tokenizers.Sequence(
                [pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.Metaspace(split=False)])]
            ),
            None,
        ),
        (None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
    ],
)
def test_kind_7_the_mark_is_found_wherever_the_file_puts_it(
    tmp_path: Path, pre_tokenizer: Any, normalizer: Any
) -> None:
    made = json_tokenizer(tmp_path / "t.json", unigram(*MARKED), pre_tokenizer, normalizer)
    assert in_line(made, "the firsts\u2014dos") == "▁the|▁fir+st+s|—|do+s"
    assert in_line(made, "first漢字s the") == "▁fir+st|漢|字|s|▁the"


def test_kind_7_marks_of_the_model_itself(tmp_path: Path) -> None:
    def bpe(pieces: Sequence[str], merges: list[tuple[str, str]], **settings: Any) -> Any:
        return models.BPE({p: n for n, p in enumerate([*NAMES, *pieces])}, merges, unk_token="<unk>", **settings)

    ends = bpe(
        ["<unk>", "a", "b", "—", "a</w>", "b</w>", "—</w>", "ab</w>"], [("a", "b</w>")], end_of_word_suffix="</w>"
    )
    made = json_tokenizer(tmp_path / "t.json", ends, pre_tokenizers.WhitespaceSplit())
    assert in_line(made, "ab bab a—b aa") == "ab</w>|b+ab</w>|a|—|b</w>|a+a</w>"
    goes_on = bpe(["<unk>", "a", "b", "##a", "##b", "##—"], [], continuing_subword_prefix="##")
    made = json_tokenizer(tmp_path / "t.json", goes_on, pre_tokenizers.WhitespaceSplit())
    assert in_line(made, "aba a—b b") == "a+##b+##a|a|##—|##b|b"
    pieces = {piece: n for n, piece in enumerate([*NAMES, "[UNK]", "a", "##b", "##—", "##漢", "first"])}
    wordpiece = models.WordPiece(pieces, unk_token="[UNK]")
    made = json_tokenizer(tmp_path / "t.json", wordpiece, pre_tokenizers.WhitespaceSplit())
    assert in_line(made, "ab a—b a漢b first") == "a+##b|a|##—|##b|a|##漢|##b|first"
    whole = models.WordLevel({piece: n for n, piece in enumerate([*NAMES, "<unk>", "ab", "—"])}, unk_token="<unk>")
    made = json_tokenizer(tmp_path / "t.json", whole, pre_tokenizers.Whitespace())
    assert in_line(made, "ab ab—x") == "ab|ab|—|<unk>"


def test_kind_7_scripts_without_spaces_have_no_long_words_in_wordpiece(tmp_path: Path) -> None:
    thai = "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = list(dict.fromkeys([*special, *thai, *(f"##{letter}" for letter in thai), "a", "##b"]))
    made = WordPieceTokenizer(write_vocabulary(tmp_path / "vocab.txt", pieces), lowercase=False, any_case=True)
    assert [len(word) for word in words(made, 5 * thai)] == [1] * 30
    assert in_line(made, "ab a") == "a+##b|a"
    assert set(made.continuations.tolist()) == {0, GOES_ON}


def untold(file: Path, name: str) -> Tokenizer:
    if name == "sentencepiece without a mark":
        return sentencepiece_model(file, ["a", "b", "ab"], add_dummy_prefix=False)
    layouts = {
        "bpe": pre_tokenizers.Whitespace(),
        "bpe as in BERT": pre_tokenizers.BertPreTokenizer(),
        "bytes after Whitespace": pre_tokenizers.Sequence(
            [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    }
    if name in layouts:
        return json_tokenizer(file, bytes_model("th", "the"), layouts[name])
    if name == "unigram without a pre-tokenizer's mark":
        return json_tokenizer(file, unigram("a", "b"), pre_tokenizers.WhitespaceSplit())
    pieces = {piece: number for number, piece in enumerate([*NAMES, "[UNK]", "a", "b"])}
    model = models.WordPiece(pieces, unk_token="[UNK]", continuing_subword_prefix="")
    return json_tokenizer(file, model, pre_tokenizers.BertPreTokenizer())


@pytest.mark.parametrize(
    "name",
    [
        *("sentencepiece without a mark", "bpe", "bpe as in BERT", "bytes after Whitespace"),
        *("unigram without a pre-tokenizer's mark", "WordPiece without a prefix"),
    ],
)
def test_kind_7_where_words_cannot_be_known_the_option_is_refused_before_anything_is_written(
    tmp_path: Path, name: str
) -> None:
    file = tmp_path / "tokenizer.any"
    made = untold(file, name)
    with pytest.raises(ValueError, match=r"does not tell which of its pieces go on a word.*Leave out --whole-words"):
        _ = made.continuations
    kind = "sentencepiece" if isinstance(made, SentencePieceTokenizer) else "json"
    (tmp_path / "own").mkdir()
    install_tokenizer(kind, file, tmp_path / "own")
    ids = write_ids(tmp_path / "ids", unique_ids(10, first=5), pieces=300)
    for old in (ids / "tokenizer").iterdir():
        old.unlink()
    (ids / "step.json").unlink()
    before = sorted(path.name for path in tmp_path.iterdir())
    wanted = options(
        tmp_path / "samples", ids / "documents", tokenizer=tmp_path / "own", whole_words=True, masking="static"
    )
    with pytest.raises(ValueError, match="Leave out --whole-words"):
        samples(wanted, local_team(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_flags_of_before_which_were_true_or_false_mean_the_same() -> None:
    ids = np.array([6, 7, 9, 8])
    flags = np.array([number % 3 == 0 for number in range(12)])
    assert [part.tolist() for part in word_rows(ids, np.arange(4), flags)] == [[0, 1, 3], [1, 2, 1]]
    np.testing.assert_array_equal(word_rows(ids, np.arange(4), flags), word_rows(ids, np.arange(4), flags.astype("u1")))
