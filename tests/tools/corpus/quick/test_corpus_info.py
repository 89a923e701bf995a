"""Training documents in several file pairs, of which a machine may hold some."""

from __future__ import annotations

import shutil
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tensor3d.data import IndexedDataset
from tests.tools.stories import STORIES
from tools.corpus.__main__ import main
from tools.corpus.quick.corpus_info import deal_documents, load_corpus, shard_names
from tools.corpus.quick.prepare import prepare

Document = tuple[tuple[int, ...], ...]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Documents of very different sizes."""
    path = tmp_path / "stories.txt"
    stories = 2 * STORIES.split("\n\n")
    several = ["\n".join(stories[number % 16 :][: 1 + number % 5]) for number in range(40)]
    path.write_text("\n\n".join(several), encoding="utf-8")
    return path


def documents(dataset: IndexedDataset | None) -> list[Document]:
    assert dataset is not None
    bounds = dataset.documents.tolist()
    return [tuple(tuple(dataset[item].tolist()) for item in range(start, end)) for start, end in pairwise(bounds)]


def test_shards_are_the_whole_dealt_out(text: Path, tmp_path: Path) -> None:
    plain = prepare(str(text), tmp_path / "whole", vocab_size=60, held_out=0.1)
    info = prepare(str(text), tmp_path / "dealt", vocab_size=60, held_out=0.1, shards=4)
    assert (plain.shards, info.shards) == (1, 4)
    for name in ("train_documents", "train_pieces", "sentences", "unigram_entropy", "held_out_pieces"):
        assert getattr(info, name) == getattr(plain, name)
    assert {path.name for path in (tmp_path / "dealt").glob("train*")} == {
        f"train-0000{shard}-of-00004.{kind}" for shard in range(4) for kind in ("bin", "idx")
    }
    train = documents(load_corpus(tmp_path / "whole").train[0])
    shards = [documents(shard) for shard in load_corpus(tmp_path / "dealt").train]
    assert sorted(document for shard in shards for document in shard) == sorted(train)
    for shard in shards:
        rest = iter(train)
        assert all(document in rest for document in shard), "documents keep their order"
    sizes = [sum(len(item) for document in shard for item in document) for shard in shards]
    assert sum(sizes) == info.train_pieces
    assert max(sizes) - min(sizes) <= min(sum(map(len, document)) for document in train)
    for name in ("heldout.bin", "heldout.idx", "tokenizer.model"):
        assert (tmp_path / "dealt" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_the_same_again_is_the_same_byte_for_byte(text: Path, tmp_path: Path) -> None:
    made = []
    for name in ("a", "b"):
        prepare(str(text), tmp_path / name, vocab_size=60, shards=3)
        made.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert made[0] == made[1]


def test_documents_are_dealt_evenly_and_none_goes_without() -> None:
    assert deal_documents(np.array([5, 4, 3, 3]), 2).tolist() == [0, 1, 1, 0]
    assert deal_documents(np.array([9, 1, 1]), 2).tolist() == [0, 1, 1]
    assert sorted(deal_documents(np.array([7, 100, 7]), 3).tolist()) == [0, 1, 2]
    tokens = np.random.default_rng(0).integers(1, 5000, size=3000)
    dealt = deal_documents(tokens, 16)
    sums = np.bincount(dealt, weights=tokens)
    assert sums.max() - sums.min() < 50
    with pytest.raises(ValueError, match=r"3 training documents cannot fill 4 shards: each needs one\. Lower"):
        deal_documents(np.array([7, 100, 7]), 4)


def test_more_shards_than_documents_are_refused_early(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="39 training documents cannot fill 40 shards"):
        prepare(str(text), tmp_path / "out", vocab_size=10**9, held_out=1e-6, shards=40)
    assert not (tmp_path / "out").exists()


def test_a_machine_with_some_of_the_shards(text: Path, tmp_path: Path) -> None:
    out, disk = tmp_path / "out", tmp_path / "disk"
    prepare(str(text), out, vocab_size=60, shards=4)
    first, second, third, _ = shard_names(4)
    shutil.copytree(out, disk, ignore=shutil.ignore_patterns(f"{first}.*", f"{third}.*"))
    corpus, everything = load_corpus(disk), load_corpus(out)
    assert [shard is not None for shard in corpus.train] == [False, True, False, True]
    assert documents(corpus.train[1]) == documents(everything.train[1])
    before = {path: path.stat().st_mtime_ns for path in disk.iterdir()}
    assert prepare(str(text), disk, vocab_size=60, shards=4) == everything.info
    assert {path: path.stat().st_mtime_ns for path in disk.iterdir()} == before, "it is a corpus, and up to date"

    (disk / f"{second}.idx").unlink()
    with pytest.raises(ValueError, match=f"incomplete: {second}.idx is missing, though {second}.bin is there. Copy it"):
        load_corpus(disk)
    for path in disk.glob("train*"):
        path.unlink()
    with pytest.raises(ValueError, match=f"none of the training shards is there, of 4; the first is {first}.bin"):
        load_corpus(disk)
    prepare(str(text), disk, vocab_size=60, shards=4)
    assert None not in load_corpus(disk).train


def test_the_command_deals(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["corpus", "prepare", "--source", str(text), "--output", str(tmp_path / "out"), "--vocab-size", "60"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--shards", "2"])
    assert main() == 0
    assert "dealt into 2 shards" in capsys.readouterr().out
    assert len(load_corpus(tmp_path / "out").train) == 2
