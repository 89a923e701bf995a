"""Memory does not grow with what is not cut into units: a row group, a .gz file."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.tools.corpus.dumps import documents, run
from tools.corpus.extract.parquet import read_parquet
from tools.corpus.extract.read_context import Fields, FileRange, ReadContext
from tools.corpus.pipeline import Context


def test_a_row_group_is_not_held_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    values = [np.random.default_rng(row).integers(97, 123, 50_000, dtype="u1").tobytes().decode() for row in range(600)]
    pyarrow.parquet.write_table(
        pyarrow.table({"text": values}), path, compression="none", use_dictionary=False, write_batch_size=8
    )
    assert pyarrow.parquet.read_metadata(path).num_row_groups == 1
    piece = FileRange(path=path, name="rows", format="parquet", packing="", begin=0, end=1, size=path.stat().st_size)
    context = Context(folder=tmp_path, scratch=tmp_path, skip_bad=False)
    fields = Fields(text="text", title="title", id="id")
    before = pyarrow.total_allocated_bytes()
    most = 0
    reading = ReadContext(piece=piece, fields=fields, largest=100_000, context=context, counts=Counter())
    for number, document in enumerate(read_parquet(reading)):
        assert document.text == values[number]
        most = max(most, pyarrow.total_allocated_bytes() - before)
    assert number == 599
    assert 0 < most < path.stat().st_size / 2


def peak(tmp_path: Path, count: int, different: int) -> float:
    """MB of memory that documents of a single unit take, where so many of them have texts of their own."""
    path = tmp_path / f"{count}.jsonl.gz"
    rows = (json.dumps({"text": f"Row {row % different}"}) for row in range(count))
    path.write_bytes(gzip.compress("\n".join(rows).encode(), 1))
    tracemalloc.start()
    try:
        manifest = run(tmp_path / f"out{count}", path)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(documents(manifest)) == different
    assert manifest.counts["duplicates"] == count - different
    return most / 1e6


@pytest.mark.slow
@pytest.mark.parametrize("different", [(3_000, 12_000), (1, 1)])
def test_hashes_of_a_unit_without_limit_are_written_in_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, different: tuple[int, int]
) -> None:
    monkeypatch.setattr("tools.corpus.extract.record_splitter.CHUNK", 1 << 14)
    for name in ("RUN", "BUCKET"):
        monkeypatch.setattr(f"tools.corpus.extract.dedup.{name}", 1000)
    few, many = peak(tmp_path, 4_000, different[0]), peak(tmp_path, 24_000, different[1])
    # A list of hashes and a set of repeats took 3 MB more for these 20,000.
    assert many - few < 0.6
