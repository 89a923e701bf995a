"""Items of a corpus that are no sentences: whole documents, as for GPT, and special tokens among the text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tensor3d.data.sampling import IS_NEXT
from tests.tools.corpus.sampled import FIRST, content, made, training, write_ids
from tools.corpus.samples.document_runs import DocumentRun, cut_run


def run_of(lengths: list[int], documents: list[int]) -> DocumentRun:
    return DocumentRun(
        prefix=Path("x"),
        lengths=np.array(lengths, dtype=np.int32),
        documents=np.array(documents),
        ids=np.arange(sum(lengths), dtype=np.uint16),
    )


def test_long_items_are_cut_by_hand() -> None:
    run = run_of([5, 12, 4, 26], [0, 1, 3, 4])
    cut = cut_run(run, longest=5, room=9, parts=2)
    # Halves of 9, one after another 4 and 5: any two make 9.
    assert cut.lengths.tolist() == [5, *(4, 5, 3), 4, *(4, 5, 4, 5, 4, 4)]
    assert cut.documents.tolist() == [0, 1, 5, 11]
    assert cut.ids is run.ids
    assert cut_run(run, longest=12, room=12, parts=12).lengths.tolist() == [5, 12, 4, *26 * [1]]
    assert cut_run(run, longest=26, room=26, parts=2) is run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of one item each, 1 to 150 ids; every id occurs once."""
    sizes = np.random.default_rng(4).integers(1, 151, size=40).tolist()
    firsts = np.cumsum([FIRST, *sizes]).tolist()
    documents = [[list(range(first, first + size))] for first, size in zip(firsts, sizes, strict=False)]
    return write_ids(tmp_path_factory.mktemp("corpus") / "ids", documents)


@pytest.mark.parametrize("max_length", [16, 17, 32])
def test_no_id_of_a_document_that_is_one_item_is_lost(whole: Path, tmp_path: Path, max_length: int) -> None:
    pairs = training(made(tmp_path / "pairs", whole, max_length=max_length, held_out=0.0))
    in_order = sorted(token for a, b, label in pairs for token in (a + b if label == IS_NEXT else a))
    assert in_order == list(range(FIRST, FIRST + len(in_order)))
    assert len(in_order) > 2000
    assert max(len(a) + len(b) + 3 for a, b, _ in pairs) == max_length
    assert 0.3 < np.mean([label for _, _, label in pairs]) < 0.8

    texts = training(made(tmp_path / "texts", whole, max_length=max_length, held_out=0.0, single_texts=True))
    assert sorted(token for a, _, _ in texts for token in a) == in_order
    sizes = [len(a) + 2 for a, _, _ in texts]
    assert max(sizes) == max_length
    assert np.mean(np.array(sizes) == max_length) > 0.5


def test_duplicates_cut_long_texts_elsewhere(whole: Path, tmp_path: Path) -> None:
    opened = made(tmp_path / "samples", whole, max_length=32, held_out=0.0, single_texts=True, duplicates=2)
    begins = [a[0] for a, _, _ in training(opened)]
    assert len(set(begins)) > 1.3 * len(begins) / 2


@pytest.mark.parametrize(("token", "role"), [(0, "pad"), (2, "cls"), (3, "sep"), (4, "mask")])
def test_a_special_token_in_a_corpus_is_named_or_left_out(tmp_path: Path, token: int, role: str) -> None:
    documents = [[list(range(first, first + 10))] for first in range(FIRST, FIRST + 200, 10)]
    documents[7][0][4] = token
    documents[9][0][4] = 1  # the unknown piece is no special token
    ids = write_ids(tmp_path / "ids", documents)
    with pytest.raises(ValueError, match=rf"documents.bin, byte 148: the id {token} is the special token '{role}'. "):
        made(tmp_path / "stops", ids)
    opened = made(tmp_path / "left", ids, skip_bad=True, duplicates=2)
    left = {t for a, b, _ in training(opened) + content(opened.held_out) for t in a + b}
    assert left == {t for n, document in enumerate(documents) if n != 7 for t in document[0]}
    [line] = (tmp_path / "left" / "left-out.jsonl").read_text().splitlines()
    assert f"special token '{role}'" in json.loads(line)["reason"]
