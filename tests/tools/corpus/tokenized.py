"""Documents, a vocabulary and tokenizers for the tests of `tokenizer` and `tokenize`."""

from __future__ import annotations

import io
import json
import string
from collections.abc import Sequence
from pathlib import Path

import sentencepiece

from tests.tools.stories import STORIES
from tools.corpus.pipeline import Options, Stage, local_team

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("story", "fox", "hill", "tells", "of", "a", "the", "went", "to", "in", "morning", "##s", "##ing")
LETTERS = (*string.ascii_lowercase[1:], *string.digits, *(f"##{letter}" for letter in string.ascii_lowercase[:18]))
MARKS = (*string.punctuation, "漢", "é", "ß")
PIECES = (*SPECIAL, *WORDS, *LETTERS, *MARKS)
CASED = (*PIECES, "The", "Fox", *string.ascii_uppercase)
TEXTS = [f"{story}\n\nAn end." for story in STORIES.split("\n\n")]


def write_vocabulary(file: Path, pieces: Sequence[str] = PIECES) -> Path:
    file.write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    return file


def write_documents(output: Path, *files: Sequence[str | bytes]) -> Path:
    """What the step `extract` would leave: files of texts; bytes stand for a line as it is."""
    with Stage.open(Options(output=output), "extract", {"files": len(files)}, local_team(1)) as step:
        for number, texts in enumerate(files):
            lines = [text if isinstance(text, bytes) else line(text) for text in texts]
            (step.folder / f"documents-{number:05d}.jsonl").write_bytes(b"".join(lines))
        step.finish({})
    return output


def line(text: str) -> bytes:
    return json.dumps({"id": "", "title": "Not text.", "text": text}, ensure_ascii=False).encode() + b"\n"


BERT = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")


def write_sentencepiece(file: Path, *, vocab_size: int = 70, byte_fallback: bool = False) -> Path:
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(f"the quick brown fox jumps over a lazy dog {n} [MASKSEPCL" for n in range(300)),
        model_writer=trained,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        user_defined_symbols=list(BERT[1:]),
        minloglevel=2,
        byte_fallback=byte_fallback,
    )
    file.write_bytes(trained.getvalue())
    return file
