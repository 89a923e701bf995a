"""Training and loading the tokenizer."""

from __future__ import annotations

import io
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NoReturn

import sentencepiece

from tensor3d.data import SpecialTokens
from tools.common.files import write_file

PAD, UNKNOWN, CLS, SEP, MASK = range(5)
THREADS = 4
"""Fixed: the pieces depend on how the sums are split."""
LONGEST = 4192
"""Bytes; sentencepiece passes over a longer sentence without a word."""
RESERVED = "\u2585"
"""A character that sentencepiece uses by itself; it passes over each sentence that has one."""
_JOINERS = "\u200c\u200d"
_LETTERS_BEHIND = "\u0e33\u0eb3\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"
"""Vowels of Thai and Lao, and colours of skin, which by their category are no marks."""


def train_tokenizer(
    sentences: Iterable[str],
    path: Path,
    *,
    vocab_size: int,
    model: Literal["unigram", "bpe"] = "unigram",
    lowercase: bool = False,
    character_coverage: float = 0.9995,
) -> dict[str, int]:
    """Trains a sentencepiece model and writes it to `path`.

    The ids 0 to 4 are padding, the unknown piece, [CLS], [SEP] and [MASK]. The same sentences give the same pieces.

    Args:
        sentences: what it learns from; those of more than `LONGEST` bytes are cut, and `RESERVED` is left out.
        path: the file.
        vocab_size: pieces.
        model: "unigram" (Kudo, 2018, arXiv 1804.10959) or "bpe" (Sennrich et al., 2016, arXiv 1508.07909).
        lowercase: the model folds case, also in the text that it is given later.
        character_coverage: share of the characters of the text that have pieces of their own.

    Returns:
        How many `sentences_cut` there were, and `reserved_characters_left_out`; without those that are 0.

    Raises:
        ValueError: no sentence, or a vocabulary that the text is too small or has too many characters for. What is
            raised where sentences are read, Ctrl-C among it, comes out as it is.
    """
    if vocab_size < 1:
        raise ValueError(f"vocab_size must be at least 1. Got {vocab_size}.")
    if not 0.9 <= character_coverage <= 1:
        raise ValueError(f"character_coverage is a share of the characters, 0.9 to 1. Got {character_coverage}.")
    trained = io.BytesIO()
    counts: Counter[str] = Counter()
    failed: list[BaseException] = []
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_readable(sentences, counts, failed),
            model_writer=trained,
            model_type=model,
            normalization_rule_name="nmt_nfkc_cf" if lowercase else "nmt_nfkc",
            character_coverage=character_coverage,
            vocab_size=vocab_size,
            pad_id=PAD,
            unk_id=UNKNOWN,
            bos_id=-1,
            eos_id=-1,
            control_symbols=["[CLS]", "[SEP]", "[MASK]"],
            byte_fallback=False,
            num_threads=THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        if failed:
            raise failed[0] from None
        _explain(error, vocab_size)
    write_file(path, trained.getvalue())
    return {name: counts[name] for name in TRAINING_COUNTS if counts[name]}


TRAINING_COUNTS = ("sentences_cut", "reserved_characters_left_out")


def _readable(sentences: Iterable[str], counts: Counter[str], failed: list[BaseException]) -> Iterator[str]:
    """The same text in sentences none of which sentencepiece passes over; adds to the `TRAINING_COUNTS`, and to
    `failed` what is raised here, for sentencepiece makes a RuntimeError of its own of it, of Ctrl-C too."""
    try:
        for sentence in sentences:
            counts["reserved_characters_left_out"] += sentence.count(RESERVED)
            text = sentence.replace(RESERVED, " ")
            parts = list(cut_at_characters(text, LONGEST))
            counts["sentences_cut"] += len(parts) > 1
            yield from filter(str.strip, parts)
    except (Exception, KeyboardInterrupt) as problem:
        failed.append(problem)
        raise


def cut_at_characters(text: str, longest: int) -> Iterator[str]:
    """The text in parts of at most `longest` bytes of UTF-8 each, which end behind a space where the second half of
    them has one, and else at a character: never inside of one, nor in front of a mark that belongs to it.

    Args:
        longest: at least 4, which any character has room in.
    """
    data = text.encode()
    start = 0
    while len(data) - start > longest:
        end = start + longest
        if (space := data.rfind(b" ", start + longest // 2, end)) >= 0:
            end = space + 1
        else:
            while data[end] & 0xC0 == 0x80:
                end -= 1
            part = data[start:end].decode()
            following = data[end : end + 4].decode(errors="ignore")[0]
            left = len(part)
            while left and (_belongs_to_the_last(following) or part[left - 1] in _JOINERS):
                left -= 1
                following = part[left]
            # A row of nothing but marks has no better place.
            end = start + len(part[:left].encode()) if left else end
        yield data[start:end].decode()
        start = end
    yield data[start:].decode()


def _belongs_to_the_last(character: str) -> bool:
    return character in _JOINERS or character in _LETTERS_BEHIND or unicodedata.category(character)[0] == "M"


def load_tokenizer(path: Path) -> sentencepiece.SentencePieceProcessor:
    """Raises ValueError for a file that is missing or no sentencepiece model with our special pieces."""
    try:
        tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{path} is missing or no sentencepiece model; prepare the corpus again.") from error
    for piece, number in (("[CLS]", CLS), ("[SEP]", SEP), ("[MASK]", MASK)):
        if tokenizer.piece_to_id(piece) != number:
            raise ValueError(f"{path} has the id {tokenizer.piece_to_id(piece)} for {piece}; {number} is needed.")
    return tokenizer


def special_tokens(vocab_size: int) -> SpecialTokens:
    return SpecialTokens(vocab_size=vocab_size, pad=PAD, cls=CLS, sep=SEP, mask=MASK)


def _explain(error: RuntimeError, vocab_size: int) -> NoReturn:
    """Says in the user's words what sentencepiece says in its own."""
    message = str(error)
    if "!sentences_.empty()" in message:
        raise ValueError("there is no sentence to train a tokenizer on; name a source with text in it.") from error
    if match := re.search(r"too high \(\d+\).*<= (\d+)", message, re.DOTALL):
        raise ValueError(
            f"the corpus is too small for a vocabulary of {vocab_size} pieces; the largest that works is {match[1]}. "
            "Lower vocab_size or add text."
        ) from error
    if match := re.search(r"smaller than required_chars\D+\d+\s+vs\s+(\d+)", message):
        raise ValueError(
            f"a vocabulary of {vocab_size} pieces does not hold the characters of the corpus; "
            f"it needs {match[1]} at least. Raise vocab_size."
        ) from error
    raise ValueError(f"sentencepiece cannot train {vocab_size} pieces on this corpus: {message}") from error
