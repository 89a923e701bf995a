"""From strings to sequences: special tokens, types, and what is left out where there is no room."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.corpus.tokenizers import Tokenizer, install_tokenizer
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


def test_an_odd_room_goes_to_the_first_of_two_that_are_equal(tokenizer: Tokenizer) -> None:
    (text,) = TextEncoder(tokenizer, 8).texts(["a b c d"], ["e f g h"])
    assert text.ids.tolist() == [CLS, 5, 6, 7, SEP, 9, 10, SEP]


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
