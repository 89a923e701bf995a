"""From strings to sequences: special tokens, types, and what is left out where there is no room."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Tokenizers
from tokenizers import models, pre_tokenizers, processors

from tools.corpus.tokenizers import Tokenizer, install_tokenizer
from tools.corpus.tokenizers.base import TextLayout
from tools.predict.text_encoder import TextEncoder

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
CLS, SEP = 2, 3


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """A letter, a piece: a is 5, b is 6."""
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(PIECES) + "\n")
    (tmp_path / "tokenizer").mkdir()
    return install_tokenizer("wordpiece", vocabulary, tmp_path / "tokenizer", lowercase=True)


def test_texts_and_pairs(tokenizer: Tokenizer) -> None:
    reader = TextEncoder(tokenizer, 9)
    (single,) = reader.texts(["a b"])
    assert single.ids.tolist() == [CLS, 5, 6, SEP]
    assert single.types.tolist() == [0, 0, 0, 0]
    (pair,) = reader.texts(["a b"], ["C"])
    assert pair.ids.tolist() == [CLS, 5, 6, SEP, 7, SEP]
    assert pair.types.tolist() == [0, 0, 0, 0, 1, 1]
    assert len(pair.masked) == 0
    assert reader.truncated == 0


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        ("a b c d e f g h", None, ("a b c d e f g", None)),
        ("a b c d e f g h", "i j", ("a b c d", "i j")),
        ("i j", "a b c d e f g h", ("i j", "a b c d")),
        ("a b c d e", "f g h i j", ("a b c", "f g h")),
        ("a b c d e f g", "", None),
    ],
)
def test_what_is_too_long_loses_its_end(
    tokenizer: Tokenizer, first: str, second: str | None, kept: tuple[str, str | None] | None
) -> None:
    reader = TextEncoder(tokenizer, 9)
    if kept is None:  # the second one is empty
        with pytest.raises(ValueError, match=r"text \b0\b.*''"):
            reader.texts([first], [second or ""])
        return
    (text,) = reader.texts([first], None if second is None else [second])
    (wanted,) = TextEncoder(tokenizer, 99).texts([kept[0]], None if kept[1] is None else [kept[1]])
    assert text.ids.tolist() == wanted.ids.tolist()
    assert text.types.tolist() == wanted.types.tolist()
    assert reader.truncated == 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_pairs_are_cut_as_the_tokenizers_library_cuts_them(tokenizer: Tokenizer, side: str) -> None:
    """An odd room, too: the token goes to the longer text, or to the second of two that are equal."""
    tokenizer.layout = TextLayout(cut_left=side == "left")
    library = Tokenizers(models.WordLevel({piece: number for number, piece in enumerate(PIECES)}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    for room in (8, 9, 12):
        library.enable_truncation(room, direction=side)
        reader = TextEncoder(tokenizer, room)
        for first, second in product(range(1, 10), repeat=2):
            texts = " ".join(PIECES[5 : 5 + first]), " ".join(PIECES[-second:])
            (found,) = reader.texts(*([text] for text in texts))
            wanted = library.encode(*texts)
            assert (found.ids.tolist(), found.types.tolist()) == (wanted.ids, wanted.type_ids), (room, texts)


def test_two_separators_and_one_type(tokenizer: Tokenizer) -> None:
    tokenizer.layout = TextLayout(between=2, second_type=0)
    (text,) = TextEncoder(tokenizer, 9).texts(["a b c"], ["e f g"])
    assert text.ids.tolist() == [CLS, 5, 6, SEP, SEP, 9, 10, 11, SEP]
    assert text.types.tolist() == [0] * 9
    assert tokenizer.layout.in_words() == "2 [SEP] between the texts of a pair, type 0 for the second text of a pair"


def test_or_it_is_refused(tokenizer: Tokenizer) -> None:
    reader = TextEncoder(tokenizer, 6, "refuse")
    with pytest.raises(ValueError, match=r"text \b1\b has \b7\b.*6"):
        reader.texts(["a b c d", "a b c d e"])
    with pytest.raises(ValueError, match=r"text \b0\b has \b8\b"):
        reader.texts(["a b c"], ["d e"])


def test_bad_input(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"text \b1\b.*' '"):
        TextEncoder(tokenizer, 9).texts(["a", " "])
    with pytest.raises(ValueError, match=r"max_length.*5.*4"):
        TextEncoder(tokenizer, 4)
