"""What lies between documents and shards: many files, few of them open, and little of them in memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tensor3d.data import IndexedWriter
from tests.data.samples import VOCABULARY, files_to_open
from tests.descriptors import open_files
from tests.tools.corpus.sampled import options, training, unique_ids, write_ids
from tools.corpus.pipeline import local_team
from tools.corpus.samples.document_runs import Choice, IndexView
from tools.corpus.samples.draw import Piece, Sequences, read_piece, write_part
from tools.corpus.samples.reader import open_samples
from tools.corpus.samples.step import samples


@pytest.mark.slow
@pytest.mark.parametrize("single", [False, True])
def test_more_parts_than_files_that_may_be_open(tmp_path: Path, single: bool) -> None:
    ids = write_ids(tmp_path / "ids", unique_ids(120))
    chosen = options(tmp_path / "samples", ids, run_tokens=1, duplicates=2, single_texts=single, masking="static")
    with files_to_open(60):  # of 100 parts or more, each in four files
        samples(chosen, local_team(1))
    opened = open_samples(tmp_path / "samples")
    assert len(training(opened)) == opened.counts["sequences"] > 200


@pytest.mark.parametrize("masks", [[], [1, 9, 1, 8, 1, 7]])
def test_a_piece_keeps_no_file_open(tmp_path: Path, masks: list[int]) -> None:
    sequences = Sequences(
        ids=np.array([6, 7, 8, 9, 10, 11, 12], dtype=np.uint16),
        items=np.array([[1, 1], [1, 2], [1, 1]], dtype="<i4"),
        labels=np.array([0, 1, 0], dtype=np.uint8),
        masks=np.array(masks, dtype=np.uint16),
    )
    write_part(tmp_path, "part", sequences)
    pieces = [read_piece(tmp_path, Piece("part", begin, begin + 1)) for begin in range(3)]
    assert not open_files(tmp_path)
    assert [piece.ids.tolist() for piece in pieces] == [[6, 7], [8, 9, 10], [11, 12]]
    assert [piece.labels.tolist() for piece in pieces] == [[0], [1], [0]]
    assert [piece.masks.tolist() for piece in pieces] == [masks[2 * n : 2 * n + 2] for n in range(3)]


def test_documents_that_are_not_held_out_cost_a_run_of_those_that_are_no_memory(tmp_path: Path) -> None:
    documents = 500_000
    with IndexedWriter(tmp_path / "ids", vocab_size=10) as writer:
        writer.add_documents(np.full(documents, 7), np.ones(documents, dtype=int), np.ones(documents, dtype=int))
    view, choice = IndexView(tmp_path / "ids"), Choice(key=1, limit=2**64 // 1000)
    tracemalloc.start()
    try:
        run = view.read(0, documents, choice, held_out=True, special=VOCABULARY, context=None)
        assert tracemalloc.get_traced_memory()[1] < 4e6  # the number of every document alone would take as much
    finally:
        tracemalloc.stop()
    assert 400 < len(run.ids) == len(run.documents) - 1 < 600
