"""The step `extract`: from inputs of many kinds to files of documents."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from tools.common.files import write_file
from tools.corpus.extract.dedup import HashStore, documents_name, hashes_name, remove_duplicates
from tools.corpus.extract.filters import Filters
from tools.corpus.extract.format_readers import (
    load_parser,
    read_books,
    read_jsonl,
    read_mediawiki,
    read_text,
    read_wikiextractor,
)
from tools.corpus.extract.inputs import InputFile, Pieces, cut_sources, find_sources, tell_empty
from tools.corpus.extract.parquet import read_parquet
from tools.corpus.extract.read_context import (
    Document,
    Fields,
    ReadContext,
    keep_commonest,
    printable,
    skip_damaged,
    skip_encoded,
)
from tools.corpus.pipeline import Context, Manifest, Options, Stage, Team, draft, fingerprint_file

# --- The step `extract` -----------------------------------------------------------------------------------------------

MEGABYTE = 1_000_000
COUNTS = (
    "files_passed_over", "read", "redirects", "other_namespaces", "other_content", "disambiguations", "empty",
    "too_short", "too_long", "few_letters", "other_language", "duplicates", "characters_dropped", "documents",
    "characters", "bytes",
)  # fmt: skip
"""What step.json counts, in the order in which it is shown: files and folders that are no input, pages or documents
read, those left out by reason, characters left out because they are no text, then what is in the output."""
WIKITEXT_COUNTS = (
    "templates_written", "templates_dropped", "variants_written", "variants_dropped", "variants_unclosed",
    "tables_dropped", "references_dropped", "tags_dropped", "comments_dropped", "files_dropped", "categories_dropped",
    "language_links_dropped", "namespaces_guessed", "headings_dropped", "sections_dropped", "list_items_dropped",
    "paragraphs_without_words", "paragraphs_unparsed", "nested_too_deep", "brackets_unclosed", "gap_characters_dropped",
)  # fmt: skip
"""What it counts besides where there are dumps: what of the wikitext of all articles, filtered ones too, was written
out, cut or guessed."""
COMMONEST = 100
"""Names of templates that were left out, as step.json lists them."""
_READERS: dict[str, Callable[[ReadContext], Iterator[Document]]] = {
    "mediawiki": read_mediawiki,
    "wikiextractor": read_wikiextractor,
    "text": read_text,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "books": read_books,
    "damaged": skip_damaged,
    "encoded": skip_encoded,
}


@dataclass(frozen=True, kw_only=True)
class ExtractOptions(Options):
    """Makes documents of plain text, documents-00000.jsonl and so on, out of dumps, books, tables and text files."""

    input: Positional[tuple[Path, ...]]
    """Files and folders, in the order of the corpus. .bz2 and .gz are unpacked on the way. A .bz2 of any size is read
    by all workers at once, a .gz by one. Folders are searched to all depths, through links too; names that begin with
    a dot are passed over, and counted."""
    format: Literal["auto", "mediawiki", "wikiextractor", "text", "jsonl", "parquet", "books"] = "auto"
    """auto: told from how each file begins, then from its name. mediawiki: an XML dump, of which the articles are read.
    wikiextractor: its <doc> blocks; its --json form is jsonl. text: a blank line ends a document. books: a file is a
    document, and blank lines separate its paragraphs. With text, books and parquet said here, files of a folder that
    do not end in .txt (packed or not) or .parquet are passed over too."""
    text_field: str = "text"
    """Field of the text in JSON lines, or column in Parquet files."""
    title_field: str = "title"
    """Field or column of the title, where there is one."""
    id_field: str = "id"
    """Field or column of the id, where there is one."""
    language: str = ""
    """Of the wikis that dumps are of, as a code ("de"), or the variant of it that is wanted where a text has several
    ("zh-hans", "zh-tw", "sr-el"). By default each dump says its own."""
    encoding: Literal["utf-8"] = "utf-8"
    """The only one that is read: convert other files first."""
    min_characters: int = 0
    """Documents with fewer are left out."""
    max_characters: int | None = None
    """Documents with more are left out. Default: no limit."""
    least_letters: float = 0.0
    """Documents with a smaller share of letters among their visible characters are left out; prose has above 0.8."""
    language_characters: tuple[str, ...] = ()
    """Scripts (latin, greek, cyrillic, han, kana, ...) or ranges (U+0400-U+04FF) that the language is written in.
    Documents in other characters are left out. Default: all stay."""
    least_language: float = 0.8
    """Share of a document's letters that must be of --language-characters."""
    deduplicate: bool = True
    """Leave out a document whose text, but for white space, has come before."""
    largest_document: float = 16.0
    """MB of the input. A page or document that is larger is taken for damage."""
    unit_megabytes: float = 16.0
    """MB of input that a worker takes at a time (of a .bz2 a quarter); also about the text of an output file."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What happens to the documents of a unit."""

    fields: Fields
    filters: Filters
    largest: int
    deduplicate: bool


def extract(options: ExtractOptions, team: Team) -> Manifest:
    """Reads the inputs, filters their documents, and leaves each text in once.

    Memory does not grow with the corpus: a worker holds a document and a few MB, and for the duplicates the hashes of
    half a million documents.

    Raises:
        ValueError: inputs that are missing or of an unknown kind, no document at all, options out of range; bad input
            (`BadInput`) unless it is to be left out.
    """
    rules = _rules(options)
    unit_bytes = int(options.unit_megabytes * MEGABYTE)
    units, settings, passed_over = team.on_first(lambda: _plan(options, unit_bytes))
    with Stage.open(options, "extract", settings, team) as step:
        if step.done:
            return step.manifest
        counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        counts["files_passed_over"] = passed_over
        results = step.run("read", units, functools.partial(read_unit, rules=rules))
        for result in results:
            counts.update(result)
        _check_some(counts, options)
        if options.deduplicate:
            for lost in remove_duplicates(step, units, counts["documents"]):
                counts.update(duplicates=lost["duplicates"])
                counts.subtract({**lost, "documents": lost["duplicates"], "duplicates": 0})
        found: dict[str, Any] = {name: counts[name] for name in COUNTS}
        if settings["parser_version"] is not None:
            found |= {name: counts[name] for name in WIKITEXT_COUNTS}
            found["commonest_templates_dropped"] = step.on_first(lambda: _commonest(step.scratch, units))
        return step.finish(found)


def read_unit(unit: Pieces, context: Context, *, rules: Rules) -> dict[str, Any]:
    """Writes the documents of a unit, into the output or, with their hashes, where duplicates are looked for first."""
    counts: Counter[str] = Counter()
    templates: Counter[str] = Counter()
    folder = context.scratch if rules.deduplicate else context.folder
    encode = json.JSONEncoder(ensure_ascii=False).encode
    with ExitStack() as files:
        file = files.enter_context(draft(folder / documents_name(unit.name)))
        hashes = HashStore(files.enter_context(draft(folder / hashes_name(unit.name)))) if rules.deduplicate else None
        for document in _documents(unit, context, rules, counts, templates):
            line = encode({"id": document.id, "title": document.title, "text": document.text}).encode() + b"\n"
            file.write(line)
            counts.update(documents=1, characters=len(document.text), bytes=len(line))
            if hashes:
                hashes.add(document.text)
        if hashes:
            hashes.write_run()
    if templates:
        write_file(context.scratch / _templates_name(unit.name), json.dumps(templates))
    return dict(counts)


def _documents(
    unit: Pieces, context: Context, rules: Rules, counts: Counter[str], templates: Counter[str]
) -> Iterator[Document]:
    for piece in unit.pieces:
        reading = ReadContext(
            piece=piece, fields=rules.fields, largest=rules.largest, context=context, counts=counts, templates=templates
        )
        for document in _READERS[piece.format](reading):
            reason = rules.filters.refuse(document.text)
            if reason is None:
                yield document
            else:
                counts[reason] += 1


def _templates_name(unit: str) -> str:
    return f"templates-{unit}.json"


def _commonest(scratch: Path, units: Sequence[Pieces]) -> dict[str, int]:
    """The templates that were left out most often, those first. "Cite web" and "cite web" are one."""
    names: Counter[str] = Counter()
    for unit in units:
        path = scratch / _templates_name(unit.name)
        if path.exists():
            names.update(json.loads(path.read_bytes()))
            keep_commonest(names)
    together: dict[str, Counter[str]] = {}
    for name, count in names.items():
        together.setdefault(name[:1].casefold() + name[1:], Counter())[name] = count
    # By the spelling that is met most.
    spelled = [(min(found, key=lambda name: (-found[name], name)), found.total()) for found in together.values()]
    return dict(sorted(spelled, key=lambda item: (-item[1], item[0]))[:COMMONEST])


def _rules(options: ExtractOptions) -> Rules:
    for name in ("largest_document", "unit_megabytes"):
        value = getattr(options, name)
        if int(value * MEGABYTE) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is a number of MB above 0. Got {value}.")
    return Rules(
        fields=Fields(text=options.text_field, title=options.title_field, id=options.id_field),
        filters=Filters(
            min_characters=options.min_characters,
            max_characters=options.max_characters,
            least_letters=options.least_letters,
            language_characters=options.language_characters,
            least_language=options.least_language,
        ),
        largest=int(options.largest_document * MEGABYTE),
        deduplicate=options.deduplicate,
    )


def _plan(options: ExtractOptions, unit_bytes: int) -> tuple[list[Pieces], dict[str, Any], int]:
    """The units, what decides the output, and how many files are passed over."""
    if re.fullmatch(r"[A-Za-z]{2,8}([-_][A-Za-z0-9]{1,8})*|", options.language) is None:
        raise ValueError(f"--language is a code such as en, bn or zh-tw. Got {options.language!r}.")
    for path in options.input:
        if path.is_dir() and Path(options.output).resolve().is_relative_to(path.resolve()):
            raise ValueError(f"{options.output} lies in the input folder {path}. Choose an --output outside of it.")
    sources, passed_over = find_sources(options.input, options.format)
    tell_empty(sources)
    units = cut_sources(sources, options.format, unit_bytes, options.language.replace("_", "-").lower())
    names = (
        "format", "text_field", "title_field", "id_field", "encoding", "min_characters", "max_characters",
        "least_letters", "language_characters", "least_language", "deduplicate", "largest_document", "unit_megabytes",
    )  # fmt: skip
    settings = {name: getattr(options, name) for name in names}
    has_markup = any(piece.format == "mediawiki" for unit in units for piece in unit.pieces)
    settings["parser_version"] = load_parser().PARSER_VERSION if has_markup else None
    if has_markup:
        settings["language"] = options.language
    return units, {**settings, "input": _fingerprint(sources)}, passed_over


def _fingerprint(sources: Sequence[InputFile]) -> dict[str, Any]:
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        digest.update(f"{source.name}\0{fingerprint_file(source.path)}\0".encode())
    size = sum(source.path.stat().st_size for source in sources)
    return {"files": len(sources), "bytes": size, "fingerprint": digest.hexdigest()}


def _check_some(counts: Counter[str], options: ExtractOptions) -> None:
    if not counts["documents"]:
        found = ", ".join(f"{counts[name]} {name.replace('_', ' ')}" for name in COUNTS if counts[name])
        names = ", ".join(map(printable, options.input))
        raise ValueError(
            f"the input ({names}) has no document that stays ({found or 'none was read'}). "
            "Check --format and the filters."
        )
