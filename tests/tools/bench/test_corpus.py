"""`bench corpus`, the text that it generates, and the memory that it reads."""

from __future__ import annotations

import bz2
import json
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest

from tools.bench.__main__ import main
from tools.bench.corpus import Measured
from tools.bench.harness.figures import cells
from tools.bench.harness.memory import TreeMemory, descendants
from tools.bench.harness.synthetic_data import documents, write_dump, write_jsonl

CHILD = "import time; held = bytearray(60_000_000); held[::4096] = b'x' * len(held[::4096]); time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["dump", pytest.param("jsonl", marks=pytest.mark.long(reason="differs in the first step alone"))]
)
def test_every_step_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    output = tmp_path / "figures.json"
    call = ["corpus", "--megabytes", "2", "--kind", kind, "--directory", str(tmp_path), "--output", str(output)]
    assert main(call) == 0
    figures = json.loads(output.read_text())
    assert [step["step"] for step in figures["steps"]] == ["extract", "tokenizer", "tokenize", "samples"]
    for step in figures["steps"]:
        assert step["seconds"] > 0
        assert step["peak_bytes"] > 10_000_000
        assert step["output_bytes"] > 1000
    assert "peak MiB" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_a_step_that_fails_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert main(["corpus", "--input", str(tmp_path / "empty.txt"), "--directory", str(tmp_path)]) == 2
    assert "ended with status 2" in capsys.readouterr().err
    assert main(["corpus", "--megabytes", "0"]) == 2


@pytest.mark.slow
def test_generated_text_has_the_size_and_is_the_same_each_time(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", 200_000)
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert 200_000 <= (tmp_path / "a.jsonl").stat().st_size < 210_000
    assert [row["text"] for row in rows] == list(islice(documents(0), len(rows)))
    write_dump(tmp_path / "a.xml.bz2", 200_000, pages_a_stream=10)
    xml = bz2.decompress((tmp_path / "a.xml.bz2").read_bytes()).decode()
    assert 200_000 <= len(xml) < 210_000
    assert xml.count("<page>") == xml.count("</page>") > 50
    assert xml.endswith("</mediawiki>\n")


def test_the_memory_of_a_child_counts() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT]) as parent:
        try:
            with TreeMemory(parent.pid, every=0.02) as memory:
                deadline = time.monotonic() + 30
                while memory.peak < 60_000_000:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
            assert len(descendants(parent.pid)) == 2
            assert memory.peak < 200_000_000
        finally:
            for process in descendants(parent.pid)[::-1]:
                subprocess.run(["kill", "-9", str(process)], check=False)


def test_rates_are_of_input() -> None:
    step = Measured(step="extract", input_bytes=8_000_000, output_bytes=2_000_000, seconds=4.0, peak_bytes=3 << 20)
    assert cells(step) == ["extract", "8.0", "2.0", "4.0", "2.00", "3"]
