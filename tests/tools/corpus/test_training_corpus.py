"""From a raw dump to training: what the steps have written is what a run reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.corpus.pipeline_steps import steps, write_input
from tests.tools.runs import journal
from tools import pretrain
from tools.bench import __main__ as bench
from tools.corpus.__main__ import main
from tools.corpus.quick.corpus_info import read_info
from tools.corpus.training_corpus import SampledCorpus, open_corpus, read_facts
from tools.training.arguments import fitted, parse, resolve
from tools.training.data import pretraining_data, training_source

RECIPE = """
[data]
capacity = 64
max_length = 64
packing = "{packing}"
[model]
layers = 1
hidden = 32
heads = 2
[optimizer]
schedule = "constant"
warmup = 0.0
[batch]
global_batch = 4
[run]
steps = 6
evaluate_every = 3
checkpoint_every = 3
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    write_input(folder / "raw", pages=40)
    for arguments in steps(folder / "raw", folder):
        assert main([*arguments, "--workers", "1"]) == 0
    return folder


def recipe_in(folder: Path, packing: str = "lp") -> Path:
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(packing=packing))
    return path


@pytest.mark.slow
def test_training_on_samples_and_going_on(prepared: Path, tmp_path: Path) -> None:
    recipe, samples = recipe_in(tmp_path), str(prepared / "samples")
    call = [str(recipe), "--data.source", samples, "--output", str(tmp_path / "run")]
    assert pretrain.main(call) == 0
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["unigram_entropy"] == read_facts(prepared / "samples").unigram_entropy
    assert facts["recipe"]["data"]["vocab_size"] == 500
    assert facts["recipe"]["data"]["shards"] == 3
    whole = journal(tmp_path / "run")
    assert {"step", "evaluation"} <= {row["kind"] for row in whole}
    # A run that ends early and goes on is the same run.
    half = [str(recipe), "--data.source", samples]
    assert pretrain.main([*half, "--output", str(tmp_path / "half"), "--run.steps", "3"]) == 0
    assert pretrain.main([*half, "--resume", str(tmp_path / "half")]) == 0
    losses = [[row["loss"] for row in rows if row["kind"] == "step"] for rows in (whole, journal(tmp_path / "half"))]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


@pytest.mark.slow
def test_the_plan_of_the_samples_is_used_where_the_recipe_packs_alike(prepared: Path, tmp_path: Path) -> None:
    corpus = open_corpus(prepared / "samples")
    assert isinstance(corpus, SampledCorpus)
    plan = corpus.plan("lp")
    assert plan is not None
    assert corpus.plan("spfhp") is None
    command = parse([str(recipe_in(tmp_path)), "--data.source", str(prepared / "samples")])
    data = pretraining_data(
        command.settings, training_source(corpus, command.settings, None), corpus.special, plan=plan
    )
    assert data.packs_per_epoch == plan.packs


def test_a_recipe_is_fitted_to_samples_or_refused(prepared: Path, tmp_path: Path) -> None:
    recipe = parse([str(recipe_in(tmp_path)), "--data.source", str(prepared / "samples")]).settings
    assert (recipe.data.vocab_size, recipe.data.shards, recipe.data.held_out) == (500, 3, 0.1)
    assert fitted(recipe, None) == recipe == fitted(recipe, prepared / "samples")
    more = [str(recipe_in(tmp_path)), "--data.source", str(prepared / "samples")]
    with pytest.raises(ValueError, match=r"data.vocab_size = 4000, the samples.*500"):
        parse([*more, "--data.vocab-size", "4000"])
    with pytest.raises(ValueError, match=r"data.language = 'de', and the samples .*cut into sentences already"):
        parse([*more, "--data.language", "de"])
    with pytest.raises(ValueError, match=r"data.max_length = 32, the samples .* have up to 64 tokens"):
        parse([*more, "--data.max-length", "32"])


def test_text_is_prepared_by_the_rules_of_the_recipes_language(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("Er kam ca. Mittag an, bzw. Abends. Das war gut.\n\n" * 4, encoding="utf-8")
    data = ["--data.source", str(file), "--data.vocab-size", "28", "--data.held-out", "0"]
    call = [str(recipe_in(tmp_path)), *data, "--data.language", "de"]
    pretrain.prepare_corpus(resolve(parse([*call, "--corpus", str(tmp_path / "corpus")])), shown=False)
    assert read_info(tmp_path / "corpus").sentences == 8
    assert resolve(parse(call)).corpus.name == "text-28-de-held-out-0"
    with pytest.raises(ValueError, match=r"data.language must be an ISO 639-1 code.*Got German"):
        parse([*call, "--data.language", "German"])


@pytest.mark.slow
def test_benchmarks_read_samples(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = str(prepared / "samples")
    assert bench.parse(["step", str(recipe_in(tmp_path)), "--corpus", samples]).settings.data.vocab_size == 500
    call = ["step", str(recipe_in(tmp_path)), "--data.source", samples, "--cubes", "1x1x1", "--steps", "2"]
    assert bench.main([*call, "--warmup", "1", "--rounds", "1"]) == 0, capsys.readouterr().err


def test_a_folder_of_another_step_is_refused(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ids.*'tokenize'. Run `python -m tools.corpus samples`"):
        parse([str(recipe_in(tmp_path)), "--data.source", str(prepared / "ids")])
