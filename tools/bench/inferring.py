"""What `bench infer` compares with: `transformers`, with padded batches; and random texts and weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tools.corpus.tokenizers import Tokenizer

_WORDS = 2000
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class Library:
    """Mean vectors by `transformers`: its own tokenizer, its own model, an attention mask.

    Raises:
        ValueError: `transformers` is not installed, or cannot read the folder.
    """

    def __init__(self, folder: Path) -> None:
        library = _transformers()
        try:
            self._tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model = library.AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
        except (OSError, ValueError) as problem:
            raise ValueError(f"{folder} must be a folder that transformers reads: {problem}") from None
        self._longest = int(self._model.config.max_position_embeddings)

    def vectors(self, texts: Sequence[str], batch: int) -> NDArray[np.float32]:
        """(N, H), of batches as the texts come, each padded to its longest."""
        parts = [self._batch(texts[first : first + batch]) for first in range(0, len(texts), batch)]
        return np.concatenate(parts)

    def vectors_sorted(self, texts: Sequence[str], batch: int) -> NDArray[np.float32]:
        """(N, H), the same of batches of texts of like lengths, in characters."""
        order = np.argsort([len(text) for text in texts], kind="stable")
        by_length = self.vectors([texts[place] for place in order.tolist()], batch)
        found = np.empty_like(by_length)
        found[order] = by_length
        return found

    def lengths(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """(N,): tokens of each text, special ones included."""
        encoded = self._tokenizer(list(texts), truncation=True, max_length=self._longest)
        return np.array([len(ids) for ids in encoded["input_ids"]], dtype=np.int64)

    def _batch(self, texts: Sequence[str]) -> NDArray[np.float32]:
        with torch.inference_mode():
            inputs = self._tokenizer(
                list(texts), padding=True, truncation=True, max_length=self._longest, return_tensors="pt"
            )
            h = self._model(**inputs).last_hidden_state
            mask = inputs["attention_mask"].unsqueeze(2)
            found: NDArray[np.float32] = ((h * mask).sum(1) / mask.sum(1)).numpy()
        return found


def write_random_model(folder: Path) -> Path:
    """BERT-mini (Turc et al. 2019) with random weights and a vocabulary of random words, as `transformers` writes it.

    Raises:
        ValueError: `transformers` is not installed.
    """
    library = _transformers()
    (folder / "vocab.txt").write_text("\n".join((*_SPECIAL, *_random_words())) + "\n", encoding="utf-8")
    sizes = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        library.BertModel(library.BertConfig(**sizes)).save_pretrained(folder)
    tokenizer = library.BertTokenizerFast(vocab=str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    return folder


def _random_words() -> list[str]:
    draw = np.random.default_rng(0)
    words: dict[str, None] = {}
    while len(words) < _WORDS:
        words["".join(map(chr, draw.integers(ord("a"), ord("z") + 1, size=draw.integers(2, 9))))] = None
    return list(words)


def written_texts(tokenizer: Tokenizer, histogram: NDArray[np.integer], number: int) -> list[str]:
    """Texts of random words, each one piece, with lengths in tokens, special ones included, drawn from a histogram.

    Raises:
        ValueError: the vocabulary has no whole words.
    """
    draw = np.random.default_rng(0)
    pieces = [piece for piece in tokenizer.pieces(range(tokenizer.vocab_size)) if piece.isascii() and piece.isalpha()]
    words = [piece for piece, ids in zip(pieces, tokenizer.encode(pieces), strict=True) if len(ids) == 1]
    if not words:
        raise ValueError("no piece of the vocabulary is a word by itself. Give --texts.")
    weights = histogram.astype(np.float64)
    lengths = np.maximum(draw.choice(len(weights), size=number, p=weights / weights.sum()) - 2, 1)
    return [" ".join(words[place] for place in draw.integers(len(words), size=length)) for length in lengths.tolist()]


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as problem:
        raise ValueError(f"transformers is what is compared with ({problem}): pip install transformers") from None
    return transformers
