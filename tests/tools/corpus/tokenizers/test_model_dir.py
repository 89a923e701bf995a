"""The tokenizer of a folder with a model in it, whoever wrote the folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models.bert import BertConfig
from models.bert.huggingface import model_folder_of, write_model_json
from tensor3d.checkpoint.directory import PROGRESS
from tests.tools.corpus.tokenized import CASED, PIECES, TEXTS, write_vocabulary
from tools.corpus.quick.sentencepiece_tokenizer import train_tokenizer
from tools.corpus.tokenizers import copy_tokenizer, install_tokenizer, load_tokenizer
from tools.corpus.tokenizers.model_dir import (
    keep_tokenizer,
    keep_tokenizer_of_corpus,
    tokenizer_of,
    tokenizer_of_corpus,
    tokenizers_in,
)
from tools.corpus.tokenizers.wordpiece import WordPieceTokenizer


def write_model(folder: Path, vocab: int = len(PIECES)) -> Path:
    """What says that a folder is one of ours; it has no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model_json(folder, config=BertConfig(layers=1, hidden=8, heads=1, vocab=vocab), heads=())
    return folder


def library_folder(folder: Path, vocab: int = len(PIECES)) -> Path:
    """A Hugging Face folder, but for the weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": vocab}))
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    write_vocabulary(folder / "vocab.txt")
    WordPieceTokenizer(folder / "vocab.txt", lowercase=True).library.save(str(folder / "tokenizer.json"))
    return folder


def test_a_tokenizer_moves_on_with_its_files(tmp_path: Path) -> None:
    library, ours, next_one = library_folder(tmp_path / "library"), tmp_path / "ours", tmp_path / "next"
    keep_tokenizer(library, ours)
    write_model(ours)
    keep_tokenizer(ours / "checkpoints" / "step-00000007", next_one)
    write_model(next_one)
    for folder in (ours, next_one):
        assert tokenizer_of(folder).fingerprint == tokenizer_of(library).fingerprint
        assert [found.kind for found in tokenizers_in(folder)] == ["json", "json", "wordpiece"]
        for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
            assert (folder / "tokenizer" / "huggingface" / name).read_bytes() == (library / name).read_bytes()
    assert tokenizer_of(next_one).encode(TEXTS) == WordPieceTokenizer(library / "vocab.txt", lowercase=True).encode(
        TEXTS
    )
    assert not (next_one / "tokenizer" / "huggingface" / "config.json").exists()


def test_a_checkpoint_belongs_to_the_folder_above(tmp_path: Path) -> None:
    run = write_model(tmp_path / "run")
    for inside in (run, run / "checkpoints", run / "checkpoints" / "step-00000001"):
        assert model_folder_of(inside) == run
    # Another model in the folder of a run is not the run.
    library = library_folder(run / "checkpoints")
    for other in (run / "exported", library, tmp_path / "checkpoints" / "step-00000001"):
        assert model_folder_of(other) == other
    # A checkpoint may lie beside model.json too.
    (run / "step-00000002").mkdir()
    assert model_folder_of(run / "step-00000002") == run / "step-00000002"
    (run / "step-00000002" / PROGRESS).touch()
    assert model_folder_of(run / "step-00000002") == run


def test_too_many_pieces_are_refused_with_both_numbers(tmp_path: Path) -> None:
    told = rf"has ids up to {len(PIECES) - 1}, and the model's embedding has 40 rows, for ids up to 39"
    library = library_folder(tmp_path / "library", vocab=40)
    with pytest.raises(ValueError, match=told):
        tokenizer_of(library)
    with pytest.raises(ValueError, match=told):
        keep_tokenizer(library, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    (tmp_path / "run" / "tokenizer").mkdir(parents=True)
    install_tokenizer("wordpiece", library / "vocab.txt", tmp_path / "run" / "tokenizer", lowercase=True)
    with pytest.raises(ValueError, match=told):
        tokenizer_of(write_model(tmp_path / "run", vocab=40))
    # Rows without a piece do no harm: many models have them, for the sake of even sizes.
    assert tokenizer_of(write_model(tmp_path / "run", vocab=128)).vocab_size == len(PIECES)


def test_a_folder_without_a_tokenizer_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run/tokenizer holds no tokenizer"):
        tokenizer_of(write_model(tmp_path / "run"))
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"library.*tokenizer.json, vocab.txt"):
        tokenizer_of(tmp_path / "library")


def test_a_corpus_gives_its_tokenizer_away(tmp_path: Path) -> None:
    bare, folder = tmp_path / "corpus" / "tokenizer.model", tmp_path / "samples" / "tokenizer"
    bare.parent.mkdir()
    folder.mkdir(parents=True)
    train_tokenizer(TEXTS, bare, vocab_size=60)
    install_tokenizer("wordpiece", write_vocabulary(tmp_path / "vocab.txt", CASED), folder)
    for file, kind in ((bare, "sentencepiece"), (folder / "vocab.txt", "wordpiece")):
        run = write_model(tmp_path / kind, vocab=200)
        keep_tokenizer_of_corpus(file, run)
        assert tokenizer_of(run).fingerprint == tokenizer_of_corpus(file).fingerprint
        assert json.loads((run / "tokenizer" / "tokenizer-settings.json").read_text())["kind"] == kind
        copy_tokenizer(run / "tokenizer", tmp_path / f"{kind}-copy")
        assert load_tokenizer(tmp_path / f"{kind}-copy").encode(TEXTS) == tokenizer_of_corpus(file).encode(TEXTS)
        in_the_way = tmp_path / f"{kind}-file" / "tokenizer"
        in_the_way.parent.mkdir()
        in_the_way.touch()
        for keep, source in ((keep_tokenizer_of_corpus, file), (keep_tokenizer, run)):
            with pytest.raises(ValueError, match=f"the run needs a folder, and {in_the_way} is a file"):
                keep(source, in_the_way.parent)
