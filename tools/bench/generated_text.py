"""Text of any size that compresses and tokenises about as prose does: made-up words with natural frequencies."""

from __future__ import annotations

import bz2
import json
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
from tqdm import tqdm

WORDS = 50_000
_SYLLABLES = [consonant + vowel for consonant in "bcdfghklmnprstvw" for vowel in ("a", "e", "i", "o", "u", "an", "er")]
_BLOCK = 1 << 22
_HEAD = b"<mediawiki><siteinfo><sitename>Generated</sitename></siteinfo>\n"
_TAIL = b"</mediawiki>\n"


def write_jsonl(path: Path, size: int, seed: int = 0) -> None:
    """JSON lines with title and text, until there are `size` bytes."""
    with path.open("wb") as file, _bar(size) as bar:
        for number, text in enumerate(documents(seed)):
            row = {"id": str(number), "title": f"Document {number}", "text": text}
            bar.update(file.write(json.dumps(row).encode() + b"\n"))
            if file.tell() >= size:
                return


def write_dump(path: Path, size: int, seed: int = 0, pages_a_stream: int = 100) -> None:
    """A MediaWiki dump, bzip2 of several streams, of `size` bytes before compression."""
    with path.open("wb") as file, _bar(size) as bar:
        pages: list[bytes] = [_HEAD]
        written = 0
        for number, text in enumerate(documents(seed)):
            pages.append(_page(number, text))
            bar.update(len(pages[-1]))
            written += len(pages[-1])
            if len(pages) >= pages_a_stream or written >= size:
                file.write(bz2.compress(b"".join(pages)))
                pages = []
            if written >= size:
                break
        file.write(bz2.compress(_TAIL))


def documents(seed: int) -> Iterator[str]:
    """Documents without end: paragraphs of sentences of words, whose frequencies fall with their rank (Zipf's law)."""
    rng = np.random.default_rng(seed)
    words = np.array(_words(rng))
    below = np.cumsum(1.0 / (np.arange(WORDS) + 2.7))
    while True:
        drawn = words[np.searchsorted(below, rng.random(_BLOCK // 8) * below[-1])].tolist()
        place = 0
        while place < len(drawn) - 2000:
            paragraphs = []
            for _ in range(int(rng.integers(2, 9))):
                sentences = []
                for length in rng.integers(6, 34, size=int(rng.integers(2, 8))).tolist():
                    sentences.append(" ".join(drawn[place : place + length]).capitalize() + ".")
                    place += length
                paragraphs.append(" ".join(sentences))
            yield "\n\n".join(paragraphs)


def _words(rng: np.random.Generator) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < WORDS:
        syllables = rng.integers(0, len(_SYLLABLES), size=int(rng.integers(1, 5))).tolist()
        found["".join(_SYLLABLES[syllable] for syllable in syllables)] = None
    return sorted(found, key=len)


def _page(number: int, text: str) -> bytes:
    """With the kinds of markup that a cleaner has to do something about."""
    first, *rest = text.split(" ", 12)
    marked = (
        f"'''{first}''' [[{rest[0]}|{rest[1]}]] {' '.join(rest[2:])}<ref>{rest[0]} {{{{cite web|title={first}}}}}</ref>"
    )
    content = f"{escape(marked)}\n\n== References ==\n[[Category:{first}]]"
    return (
        f"<page><title>Page {number}</title><ns>0</ns><id>{number}</id><revision><id>{number}</id>"
        f'<text xml:space="preserve">{content}</text></revision></page>\n'
    ).encode()


def _bar(size: int) -> tqdm:
    return tqdm(desc="generating", total=size, unit="B", unit_scale=True, disable=None)
