"""`bench extract`: a run on a small dump, what it writes, and what it refuses."""

from __future__ import annotations

import bz2
import json
from pathlib import Path

import pytest

from tools.bench.__main__ import main
from tools.bench.extract import EXTRACT, PYTHON, ExtractFigures, rows

PAGE = """  <page>
    <title>Page {0}</title>
    <ns>0</ns>
    <id>{0}</id>
    <revision><text xml:space="preserve">The '''page''' of number {0} is [[here]].</text></revision>
  </page>
"""


def test_ratios_are_those_of_medians() -> None:
    figures = ExtractFigures(
        packed_bytes=2_000_000,
        xml_bytes=8_000_000,
        documents=3,
        text_bytes=10,
        workers=4,
        seconds={EXTRACT: (4.0, 2.0, 9.0), PYTHON: (1.0, 1.0, 7.0)},
    )
    assert rows(figures) == [
        (f"{EXTRACT}, 4 workers", "4.00", "2.00", "0.50", "2.00", "0.25"),
        (PYTHON, "1.00", "1.00", "2.00", "8.00", "1.00"),
    ]


def test_a_run_on_a_small_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = ("<mediawiki>\n" + "".join(PAGE.format(number) for number in range(7)) + "</mediawiki>\n").encode()
    (tmp_path / "dump.xml.bz2").write_bytes(bz2.compress(dump))
    output = tmp_path / "extract.json"
    options = ["--input", str(tmp_path / "dump.xml.bz2"), "--workers", "1", "--rounds", "1", "--output", str(output)]
    assert main(["extract", *options]) == 0
    figures = json.loads(output.read_text())["figures"]
    assert (figures["documents"], figures["xml_bytes"], figures["workers"]) == (7, len(dump), 1)
    assert all(len(taken) == 1 and taken[0] > 0 for taken in figures["seconds"].values())
    assert figures["ratios"][EXTRACT] > 0
    assert "7 documents" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--rounds", "0"], "--rounds must be at least 1"), ([], "no whole bzip2 file")],
)
def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    (tmp_path / "cut.bz2").write_bytes(bz2.compress(b"some text")[:-4])
    assert main(["extract", "--input", str(tmp_path / "cut.bz2"), *options]) == 2
    assert message in capsys.readouterr().err
