"""Ranges of documents, and what a worker makes of one: ids, or sentences to train a tokenizer on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tools.common.files import parsed_json, write_file
from tools.corpus.pipeline import BadInput, Context, Unit, draft, fingerprint_file, read_manifest
from tools.corpus.sentences import LEFT_OUT, count_left_out, split_sentences
from tools.corpus.tokenizers import Tokenizer, load_tokenizer
from tools.corpus.tokenizers.base import smallest

RANGE = 16 << 20
"""Bytes of a file that are one unit of work."""
SMALLEST, SHARE = 1 << 20, 64
"""Of a corpus that is small, a unit has the SHARE-th part, and at least so many bytes: the work must come out even."""
_REMEDY = "Run `python -m tools.corpus extract` again"


@dataclass(frozen=True, kw_only=True)
class DocumentRange(Unit):
    """The documents whose lines begin in a range of a file."""

    file: Path
    start: int
    """Byte."""
    end: int
    """Byte after the range; the last line may go beyond it."""


def document_files(folders: Sequence[Path]) -> list[Path]:
    """Every file of documents, in the order of the corpus.

    Raises:
        ValueError: a folder is no finished output of `extract`.
    """
    manifests = [read_manifest(folder, "extract") for folder in folders]
    return [
        manifest.folder / name
        for manifest in manifests
        # More than 99,999 of them have longer numbers.
        for name in sorted(manifest.files, key=lambda name: (len(name), name))
        if name.startswith("documents-") and name.endswith(".jsonl")
    ]


def fingerprint_documents(files: Sequence[Path]) -> str:
    """A hash of the files' fingerprints."""
    return hashlib.blake2b("".join(map(fingerprint_file, files)).encode(), digest_size=16).hexdigest()


def ranges_of(files: Sequence[Path], *, evenly: bool = False) -> list[DocumentRange]:
    """The units of the files, in order; how they are cut depends on the sizes alone.

    Args:
        evenly: of a small corpus many small ones.
    """
    sizes = [file.stat().st_size for file in files]
    step = min(RANGE, max(SMALLEST, sum(sizes) // SHARE)) if evenly else RANGE
    bounds = [
        (file, start, min(start + step, size))
        for file, size in zip(files, sizes, strict=True)
        for start in range(0, size, step)
    ]
    of = f"-of-{len(bounds)}" if evenly else ""  # marks of another cut are none of these units
    return [
        DocumentRange(name=f"{number:07d}{of}", size=end - start, file=file, start=start, end=end)
        for number, (file, start, end) in enumerate(bounds)
    ]


def read_lines(unit: DocumentRange) -> Iterator[tuple[int, bytes]]:
    """The lines of a range, each with the byte it begins at."""
    with unit.file.open("rb") as file:
        if unit.start:
            # A line that begins before the range belongs to the range before.
            file.seek(unit.start - 1)
            file.readline()
        at = file.tell()
        while at < unit.end:
            line = file.readline()
            yield at, line
            at += len(line)


def read_texts(unit: DocumentRange, context: Context) -> Iterator[str]:
    """The text of each document of a range. Damaged lines go to `context.bad`."""
    for at, line in read_lines(unit):
        try:
            text = parse_text(line, unit.file, at)
        except BadInput as error:
            context.bad(error)
        else:
            yield text
        context.progress(min(len(line), max(0, unit.end - at)))


def parse_text(line: bytes, file: Path, at: int) -> str:
    """The text of the document in a line.

    Raises:
        BadInput: not UTF-8, no JSON object, without a text, or a text that no file can hold.
    """
    try:
        document = parsed_json(line)
    except UnicodeDecodeError as error:
        raise BadInput(file, f"byte {at + error.start}", "not UTF-8", _REMEDY) from error
    except ValueError as error:
        raise BadInput(file, f"byte {at}", f"a line that is no JSON ({error})", _REMEDY) from error
    text = document.get("text") if isinstance(document, dict) else None
    if not isinstance(text, str):
        raise BadInput(file, f"byte {at}", 'a line that is no object with a string "text"', _REMEDY)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadInput(file, f"byte {at}", f"half a surrogate pair, {text[error.start]!a}", _REMEDY) from error
    return text


# --- A range of documents as ids: what a worker does, and how the parts become one dataset ----------------------------

T = TypeVar("T", bound=Sized)
BATCH = 1 << 20
"""Characters that go to the tokenizer at a time."""
COUNTS = (
    *("documents", "sentences", "tokens", "unknown_tokens", "words", "characters"),
    *("unknown_characters", "characters_in_long_words"),
    *("documents_without_sentence", *LEFT_OUT),
)


@lru_cache(maxsize=1)
def _opened(folder: Path, fingerprint: str) -> Tokenizer:
    """A worker's tokenizer, which remembers words from one unit to the next. The fingerprint makes it another one where
    the folder holds another."""
    return load_tokenizer(folder)


def write_part(
    unit: DocumentRange,
    context: Context,
    *,
    tokenizer: Path,
    fingerprint: str,
    language: str,
    most_unknown: float,
) -> dict[str, int]:
    """Writes the ids of a range to three files in the scratch folder; returns the `COUNTS`.

    NAME.ids holds all ids, NAME.lengths (int32) the ids of each sentence, NAME.items (int64) the sentences of each
    document.
    """
    made = _opened(tokenizer, fingerprint)
    counts = dict.fromkeys(COUNTS, 0)
    parts = [
        encode_documents([split_sentences(text, language, counts) for text in texts], made, counts)
        for texts in batches(read_texts(unit, context))
    ]
    ids = _joined([part[0] for part in parts], smallest(made.vocab_size))
    lengths = _joined([part[1] for part in parts], np.dtype("<i4"))
    items = _joined([part[2] for part in parts], np.dtype("<i8"))
    if (words := _not_for_this_text(counts, most_unknown, made.longest_word)) is not None:
        context.bad(BadInput(unit.file, f"bytes {unit.start} to {unit.end}", *words))
        counts = dict.fromkeys(COUNTS, 0)
        ids, lengths, items = ids[:0], lengths[:0], items[:0]
    for name, values in (("ids", ids), ("lengths", lengths), ("items", items)):
        write_file(context.scratch / f"{unit.name}.{name}", values.tobytes())
    return counts


def read_part(
    unit: DocumentRange, scratch: Path, vocab_size: int
) -> tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.integer]]:
    """What `write_part` has written: ids, lengths, items."""
    path = scratch / unit.name
    ids = np.fromfile(path.with_suffix(".ids"), dtype=smallest(vocab_size))
    return ids, np.fromfile(path.with_suffix(".lengths"), "<i4"), np.fromfile(path.with_suffix(".items"), "<i8")


def encode_documents(
    documents: Sequence[Sequence[str]], tokenizer: Tokenizer, counts: dict[str, int]
) -> tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.integer]]:
    """All ids, the ids of each sentence, and the sentences of each document that has one; adds to the `COUNTS`.

    Args:
        documents: the sentences of each.
    """
    sentences = list(chain.from_iterable(documents))
    # In batches again: a single document may be large.
    flats = [tokenizer.encode_flat(batch) for batch in batches(sentences)]
    ids = _joined([flat.ids for flat in flats], smallest(tokenizer.vocab_size))
    lengths = _joined([flat.lengths for flat in flats], np.dtype("<i4"))
    _count_unknown(sentences, ids, lengths, tokenizer, counts)
    # A sentence of nothing but control characters has no ids.
    nothing = [sentences[place] for place in np.flatnonzero(lengths == 0).tolist()]
    count_left_out(nothing, counts)
    owners = np.repeat(np.arange(len(documents)), list(map(len, documents)))[lengths > 0]
    items = np.bincount(owners, minlength=len(documents))
    lengths = lengths[lengths > 0]
    counts["documents"] += int(np.count_nonzero(items))
    counts["documents_without_sentence"] += int(np.count_nonzero(items == 0))
    counts["sentences"] += len(lengths)
    counts["tokens"] += len(ids)
    counts["words"] += sum(sentence.count(" ") + 1 for sentence in sentences) - sum(s.count(" ") + 1 for s in nothing)
    counts["characters"] += sum(map(len, sentences)) - sum(map(len, nothing))
    return ids, lengths, items[items > 0]


def _count_unknown(
    sentences: Sequence[str],
    ids: NDArray[np.integer],
    lengths: NDArray[np.integer],
    tokenizer: Tokenizer,
    counts: dict[str, int],
) -> None:
    missed = np.flatnonzero(ids == tokenizer.unknown) if tokenizer.unknown is not None else np.empty(0)
    counts["unknown_tokens"] += len(missed)
    # Those with an unknown token are cut once more, for the places.
    owners = np.unique(np.searchsorted(np.cumsum(lengths), missed, side="right")).tolist()
    found = tokenizer.count_unknown([sentences[place] for place in owners], [[tokenizer.unknown]] * len(owners))
    counts["unknown_characters"] += found.unknown
    counts["characters_in_long_words"] += found.too_long


def batches(texts: Iterable[T], characters: Callable[[T], int] = len) -> Iterator[list[T]]:
    """Some texts at a time, as many as have about `BATCH` characters."""
    batch: list[T] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += characters(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _joined(parts: Sequence[NDArray[np.integer]], dtype: np.dtype[np.integer]) -> NDArray[np.integer]:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)


def entropy(counts: NDArray[np.integer]) -> float:
    """Nats a token of text in which tokens are as frequent: the loss of a model that knows the frequencies only."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _not_for_this_text(counts: dict[str, int], most: float, longest: int | None) -> tuple[str, str] | None:
    """Why the tokenizer is taken for a wrong one, and the remedy; None where it is not. A word that is unknown for its
    length is one token, and in scripts without spaces a whole sentence: there its characters count."""
    share = counts["unknown_tokens"] / max(1, counts["tokens"])
    if share > most:
        told = f"{share:.0%} of the tokens are unknown: this tokenizer is not for this text"
        return told, "Take or train one for its language and case, raise --most-unknown"
    share = counts["characters_in_long_words"] / max(1, counts["characters"])
    if share > most:
        told = f"{share:.0%} of the characters stand in words of more than {longest}, each of which is an unknown token"
        return told, "Put spaces between the words of scripts without them, train a tokenizer, raise --most-unknown"
    return None


# --- Sentences to train a tokenizer on: an even sample of the documents -----------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SampledRange(DocumentRange):
    """A range with its share of the sample."""

    sentences: int
    """At most."""


def share_out(ranges: Sequence[DocumentRange], sentences: int) -> list[SampledRange]:
    """Gives each range sentences by its bytes; they add up to `sentences`."""
    ends = np.cumsum([unit.size for unit in ranges], dtype=np.float64)
    bounds = np.rint(ends / ends[-1:] * sentences).astype(np.int64) if len(ends) else ends.astype(np.int64)
    shares = np.diff(bounds, prepend=0).tolist()
    return [
        SampledRange(name=unit.name, size=unit.size, file=unit.file, start=unit.start, end=unit.end, sentences=share)
        for unit, share in zip(ranges, shares, strict=True)
    ]


def write_sample(unit: SampledRange, context: Context, *, seed: int, language: str) -> dict[str, int]:
    """Writes the sentences of documents drawn at random to NAME.txt, a sentence a line, in the order of the corpus.

    Documents are drawn until there are enough sentences; of the last one every n-th is taken.
    """
    lines = list(read_lines(unit))
    drawn: dict[int, list[str]] = {}
    left = unit.sentences
    for number in np.random.default_rng([seed, int(unit.name)]).permutation(len(lines)).tolist():
        if not left:
            break
        at, line = lines[number]
        try:
            text = parse_text(line, unit.file, at)
        except BadInput as error:
            context.bad(error)
            continue
        sentences = split_sentences(text, language)
        sentences = sentences[:: -(-len(sentences) // left) or 1]
        drawn[number] = sentences
        left -= len(sentences)
    with draft(context.scratch / f"{unit.name}.txt") as file:
        for number in sorted(drawn):
            file.writelines(f"{sentence}\n".encode() for sentence in drawn[number])
    return {"sentences": unit.sentences - left}


def read_sample(units: Sequence[SampledRange], scratch: Path) -> Iterator[str]:
    """All sentences that were sampled."""
    for unit in units:
        with (scratch / f"{unit.name}.txt").open(encoding="utf-8", newline="\n") as file:
            yield from (line.removesuffix("\n") for line in file)
