"""Small dumps, and what `extract` makes of inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from tools.corpus.extract.step import ExtractOptions, extract
from tools.corpus.pipeline import Manifest, local_team

HEAD = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="en">\n  <siteinfo/>\n'
TAIL = "</mediawiki>\n"
BENGALI_HEAD = (
    '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="bn">\n  <siteinfo>\n'
    "    <sitename>উইকিপিডিয়া</sitename>\n    <dbname>bnwiki</dbname>\n    <case>first-letter</case>\n    <namespaces>\n"
    '      <namespace key="0" case="first-letter" />\n      <namespace key="6" case="first-letter">চিত্র</namespace>\n'
    '      <namespace key="14" case="first-letter">বিষয়শ্রেণী</namespace>\n    </namespaces>\n  </siteinfo>\n'
)


def page(title: str, text: str, *, ns: int = 0, number: int = 1, more: str = "", model: str = "wikitext") -> str:
    """A page as MediaWiki exports it."""
    return (
        f"  <page>\n    <title>{escape(title)}</title>\n    <ns>{ns}</ns>\n    <id>{number}</id>\n{more}"
        f"    <revision>\n      <id>{number + 900}</id>\n      <model>{model}</model>\n"
        f'      <text bytes="{len(text)}" xml:space="preserve">{escape(text)}</text>\n    </revision>\n  </page>\n'
    )


def pages(count: int) -> list[str]:
    """Articles of different lengths, each with a text of its own."""
    words = ["river", "mountain", "Müller & Söhne", "日本語", "bridge", "castle"]
    texts = (
        "\n\n".join(
            f"The {words[(number + part) % 6]} number {number} has a '''part''' {part}, <!-- hidden --> they said."
            for part in range(1 + number % 7)
        )
        for number in range(count)
    )
    return [page(f"Title {number}", text, number=number) for number, text in enumerate(texts)]


def run(output: Path, *inputs: Path, workers: int = 1, **options: Any) -> Manifest:
    return extract(ExtractOptions(output=output, input=inputs, **options), local_team(workers))


def documents(manifest: Manifest) -> list[dict[str, str]]:
    """The documents of an output, in order."""
    files = sorted(manifest.folder.glob("documents-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_bytes().split(b"\n") if line]


def texts(manifest: Manifest) -> list[str]:
    return [document["text"] for document in documents(manifest)]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
