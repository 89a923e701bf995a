"""Pre-training that begins with the weights of a folder, and what a run leaves for whoever reads models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.bert import BertForPreTraining
from models.bert.huggingface import open_weights
from tensor3d import Cube
from tensor3d.checkpoint import read_progress
from tests.tools.runs import arguments
from tools import pretrain
from tools.convert.__main__ import main as convert_main
from tools.corpus.tokenizers.model_dir import tokenizer_of
from tools.corpus.training_corpus import open_corpus
from tools.training.config import TrainConfig, read_config
from tools.training.resume import check_resume, check_start

STILL = ("--run.steps", "1", "--optimizer.lr", "1e-30")
"""A step of no size: weights stay as they were at the start."""


@pytest.fixture(scope="module")
def first(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run."""
    folder = tmp_path_factory.mktemp("first")
    more = ("--run.steps", "2", "--model.positions", "40", "--run.checkpoint-every", "2")
    assert pretrain.main(arguments(recipe, folder / "run", *more, corpus=folder / "corpus")) == 0
    return folder


def exported(first: Path, output: Path, *more: str) -> Path:
    assert convert_main(["to-hf", str(first / "run"), str(output), *more]) == 0
    return output


def started(recipe: Path, first: Path, output: Path, source: Path, *more: str) -> int:
    options = ("--start-from", str(source), "--model.positions", "40", *STILL, *more)
    return pretrain.main(arguments(recipe, output, *options, corpus=first / "corpus"))


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    cube = Cube.single()
    weights = open_weights(run)
    model = BertForPreTraining(weights.config, cube)
    assert weights.fill(model, cube).fresh == ()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_a_run_says_what_its_model_is(recipe: Path, first: Path) -> None:
    told = json.loads((first / "run" / "model.json").read_text())
    assert told["heads"] == ["pooler", "masked_lm", "next_sentence"]
    assert (told["config"]["positions"], told["config"]["vocab"], told["facts"]["max_length"]) == (40, 67, 32)
    corpus = open_corpus(first / "corpus")
    assert (first / "run" / "tokenizer" / "tokenizer.model").read_bytes() == corpus.tokenizer.read_bytes()
    assert tokenizer_of(first / "run").special == corpus.special


def test_a_run_begins_with_the_weights_of_a_library_model(
    recipe: Path, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = weights_of(first / "run")
    library = exported(first, tmp_path / "library")
    assert convert_main(["from-hf", str(library), str(tmp_path / "ours")]) == 0
    for number, source in enumerate((library, tmp_path / "ours" / "checkpoints")):
        capsys.readouterr()
        assert started(recipe, first, tmp_path / f"{number}", source) == 0
        assert (
            "loaded: encoder, pooler, masked_lm, next_sentence; the optimiser's moments begin at 0"
            in capsys.readouterr().err
        )
        after = weights_of(tmp_path / f"{number}")
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    # Its own run, by contrast, has moments too.
    assert started(recipe, first, tmp_path / "own", first / "run") == 0
    assert "weights and moments are loaded" in capsys.readouterr().err


def test_heads_that_are_not_there_start_fresh(
    recipe: Path, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = exported(first, tmp_path / "library", "--heads", "masked_lm")
    assert started(recipe, first, tmp_path / "run", library) == 0
    said = capsys.readouterr().err
    assert "loaded: encoder, masked_lm; not in the folder, so as initialised: next_sentence, pooler" in said
    before, after = weights_of(first / "run"), weights_of(tmp_path / "run")
    same = {name for name, tensor in before.items() if torch.equal(after[name], tensor)}
    assert {name for name in before if name.startswith(("bert.", "masked_lm."))} <= same
    assert not {"pooler.dense.weight", "next_sentence.weight"} & same


def test_a_roberta_goes_on(recipe: Path, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of its two heads here the library has one, with which a run on masked tokens alone goes on."""
    kind = ("--model.family", "roberta", "--model.first-position", "1", "--model.types", "1")
    run = arguments(recipe, tmp_path / "run", *kind, "--run.steps", "1", corpus=first / "corpus")
    assert pretrain.main(run) == 0
    assert convert_main(["to-hf", str(tmp_path / "run"), str(tmp_path / "library")]) == 0
    assert "next_sentence, pooler was left out, which the library's RobertaForMaskedLM" in capsys.readouterr().out
    settings = json.loads((tmp_path / "library" / "config.json").read_text())
    assert (settings["max_position_embeddings"], settings["pad_token_id"], settings["type_vocab_size"]) == (33, 0, 1)
    start = ("--start-from", str(tmp_path / "library"), *STILL)
    assert pretrain.main(arguments(recipe, tmp_path / "bert", *start, corpus=first / "corpus")) == 2
    assert "has family = 'roberta', the recipe's 'bert'. Set model.family = 'roberta'" in capsys.readouterr().err
    assert pretrain.main(arguments(recipe, tmp_path / "on", *kind, *start, corpus=first / "corpus")) == 2
    assert "has no head for next sentences, as no model of the family 'roberta' has" in capsys.readouterr().err
    start = (*start, "--data.objective", "masked-lm")
    assert pretrain.main(arguments(recipe, tmp_path / "on", *kind, *start, corpus=first / "corpus")) == 0
    assert "loaded: encoder, masked_lm; the optimiser's moments begin at 0\n" in capsys.readouterr().err
    assert "types" not in (tmp_path / "library" / "tokenizer_config.json").read_text(), "it has one type of tokens"
    before, after = weights_of(tmp_path / "run"), weights_of(tmp_path / "on")
    assert before["bert.embeddings.positions.weight"].shape[0] == 33
    own = {name for name in before if name.startswith(("bert.", "masked_lm."))}
    # A step of 1e-30 may be seen in a bias that is hardly above it.
    assert all(torch.allclose(after[name], before[name], rtol=0, atol=1e-30) for name in own)


def test_another_model_or_tokenizer_is_refused(
    recipe: Path, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = exported(first, tmp_path / "library")

    def refused(source: Path, *more: str) -> str:
        capsys.readouterr()
        assert started(recipe, first, tmp_path / "none", source, *more) == 2
        assert not (tmp_path / "none").exists()
        return capsys.readouterr().err

    assert "has layers = 1, the recipe's 2. Set model.layers = 1" in refused(library, "--model.layers", "2")
    assert "Set model.positions = 40" in refused(library, "--model.positions", "64")
    assert "is no folder of a model" in refused(tmp_path)
    config = json.loads((library / "config.json").read_text())
    (library / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    assert "has activation = 'relu', the recipe's 'gelu'. Set model.activation = 'relu'" in refused(library)
    (library / "config.json").write_text(json.dumps(config | {"type_vocab_size": 3}))
    weights, types = load_file(library / "model.safetensors"), "bert.embeddings.token_type_embeddings.weight"
    save_file({**weights, types: torch.zeros(3, weights[types].shape[1])}, library / "model.safetensors")
    assert "has types = 3, the recipe's 2. Set model.types = 3" in refused(library)
    (library / "config.json").write_text(json.dumps(config))
    save_file(weights, library / "model.safetensors")
    # Of the model's files the first decides what an id means; one of other pieces is not asked.
    content = json.loads((library / "tokenizer.json").read_text())
    pieces = content["model"]["vocab"]
    pieces[-1], pieces[-2] = pieces[-2], pieces[-1]
    before = (library / "tokenizer.json").read_bytes()
    (library / "tokenizer.json").write_text(json.dumps(content))
    assert "the corpus was made with another tokenizer" in refused(library)
    (library / "tokenizer.json").write_bytes(before)
    # The same pieces by another file are another tokenizer: nobody knows whether the ids are the same.
    (library / "tokenizer.model").unlink()
    told = refused(library)
    assert "the corpus was made with another tokenizer" in told
    assert f"launch/corpus.sh --output DIR --tokenizer-file {library / 'tokenizer.json'} TEXT" in told


def test_a_checkpoint_may_have_numbers_that_recipes_may_not_have_any_more(recipe: Path, first: Path) -> None:
    """Limits of a pack above what it holds, with which packs are the same; and what says nothing of sizes."""
    progress, corpus = read_progress(first / "run/checkpoints/step-00000002"), open_corpus(first / "corpus")
    table = progress["recipe"]
    table["data"] |= {"max_sequences": 1000, "masked_per_pack": 2000}
    table["precision"]["loss_scale"] = 2.0**40
    settings = read_config(recipe)
    model = dataclasses.replace(settings.model, positions=40)

    def now(**limits: int) -> TrainConfig:
        return dataclasses.replace(settings, model=model, data=dataclasses.replace(settings.data, **limits))

    check_resume(progress, now(max_sequences=32, masked_per_pack=32), corpus)
    check_start(progress, now(), corpus)
    with pytest.raises(ValueError, match=r"data\.max_sequences = 1000, the recipe says 31"):
        check_resume(progress, now(max_sequences=31, masked_per_pack=32), corpus)
    with pytest.raises(ValueError, match=r"data\.masked_per_pack = 2000, the recipe says None"):
        check_resume(progress, now(max_sequences=32), corpus)
