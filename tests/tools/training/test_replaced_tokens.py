"""Pre-training on replaced tokens: what is logged, the same on any cube and after a stop, what comes out of it, and
what a dry run says before."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from models.bert import ElectraForPreTraining, ReplacedTokens
from models.bert.cost_model.electra import electra_parameters
from models.bert.huggingface import open_weights
from tensor3d import Cube, CubeShape, checkpoint, local
from tests.ranks import run_ranks
from tests.tools.runs import arguments, journal, on_rank, resolved
from tools import pretrain
from tools.convert.__main__ import main as convert_main
from tools.corpus.training_corpus import open_corpus
from tools.training.config import read_config
from tools.training.estimate import expect, report
from tools.training.resume import check_resume, check_start

SHIPPED = Path(__file__).parents[3] / "launch" / "recipes" / "electra-tiny.toml"
DISENTANGLED = SHIPPED.with_name("deberta-tiny.toml")
SMALL = {
    "data.vocab-size": 67,
    "data.held-out": 0.1,
    "data.capacity": 64,
    "data.max-length": 64,
    "model.hidden": 32,
    "model.embedding": 8,
    "batch.global-batch": 8,
    "run.steps": 4,
    "run.evaluate-every": 2,
    "run.checkpoint-every": 2,
}


@pytest.fixture(scope="module")
def more(recipe: Path) -> list[str]:
    """The shipped recipe in small, on a small text."""
    options = {"data.source": recipe.parent / "text.txt", **SMALL}
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def run(more: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on one process; its corpus lies beside it."""
    folder = tmp_path_factory.mktemp("replaced")
    assert pretrain.main(arguments(SHIPPED, folder / "run", *more, corpus=folder / "corpus")) == 0
    return folder / "run"


def test_both_losses_and_shares_are_told(run: Path) -> None:
    steps, evaluations = journal(run, "step"), journal(run, "evaluation")
    assert (len(steps), len(evaluations)) == (4, 2)
    for each in (*steps, *evaluations):
        assert each["loss"] == pytest.approx(each["masked_lm_loss"] + 50 * each["replaced_token_loss"], rel=1e-5)
        assert each["next_sentence_accuracy"] is None
        assert 0 < each["replaced_token_accuracy"] < 1
    for step in steps:
        # Of the masked tokens, those in whose place another one was drawn: of 67 pieces nearly all.
        assert 0.8 * step["masked_share"] < step["replaced_share"] <= step["masked_share"]
    assert steps[-1]["loss"] < steps[0]["loss"]


@pytest.mark.parametrize(
    ("ranks", "where"),
    [
        pytest.param(8, ["--cube", "2x2x2"], id="2x2x2", marks=pytest.mark.slow),
        pytest.param(2, ["--data-parallel", "2"], id="data2"),
        pytest.param(4, ["--cube", "1x2x2", "--data.packing", "stream"], id="1x2x2-stream", marks=pytest.mark.slow),
    ],
)
def test_what_is_drawn_does_not_depend_on_the_cube(
    more: list[str], run: Path, tmp_path: Path, ranks: int, where: list[str]
) -> None:
    wanted = run
    if "stream" in where:
        wanted = tmp_path / "one"
        alone = arguments(SHIPPED, wanted, *more, *where[2:], corpus=run.parent / "corpus")
        assert pretrain.main(alone) == 0
    words = [*more, *where, "--run.checkpoint-every", "0"]
    assert run_ranks(ranks, on_rank, SHIPPED, tmp_path / "run", words, run.parent / "corpus") == [0] * ranks
    for kind in ("step", "evaluation"):
        for ours, theirs in zip(journal(tmp_path / "run", kind), journal(wanted, kind), strict=True):
            for name in ("loss", "masked_lm_loss", "replaced_token_loss"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4)
            assert ours.get("replaced_share") == theirs.get("replaced_share")
    if ranks == 8:
        expected = expect(resolved(tmp_path / "run"), CubeShape(x=2, y=2, z=2), open_corpus(run.parent / "corpus").info)
        assert expected.traffic.total() == journal(tmp_path / "run", "step")[0]["bytes_received"]


def test_a_resumed_run_goes_on_to_the_bit(more: list[str], run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    words = [*more, "--resume", "auto", "--output", str(tmp_path / "run")]
    assert pretrain.main([str(SHIPPED), "--corpus", str(run.parent / "corpus"), *words]) == 0
    for kind in ("step", "evaluation"):
        for ours, theirs in zip(journal(tmp_path / "run", kind), journal(run, kind), strict=True):
            assert ours["loss"] == theirs["loss"]
            assert ours["replaced_token_accuracy"] == theirs["replaced_token_accuracy"]


def test_the_library_reads_both_models_and_they_come_back(run: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes, shared = [], []
    for kind, option in (("ElectraForPreTraining", []), ("ElectraForMaskedLM", ["--generator"])):
        folder = tmp_path / kind
        assert convert_main(["to-hf", str(run), str(folder), *option]) == 0
        model, found = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
        assert not any(found.values()), found
        sizes.append((model.config.hidden_size, model.config.embedding_size))
        shared.append(model.electra.embeddings.word_embeddings.weight)
        assert convert_main(["from-hf", str(folder), str(tmp_path / f"{kind}-back")]) == 0
        assert open_weights(tmp_path / f"{kind}-back").heads == (("masked_lm",) if option else ("replaced_tokens",))
    assert shared[0].equal(shared[1])
    assert sizes == [(32, 8), (16, 8)]


@pytest.fixture(scope="module")
def disentangled(more: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The same of a DeBERTa's recipe, and its options."""
    folder, place = tmp_path_factory.mktemp("disentangled"), more.index("--model.embedding")
    options = [*more[:place], *more[place + 2 :]]
    assert pretrain.main(arguments(DISENTANGLED, folder / "run", *options, corpus=folder / "corpus")) == 0
    return folder / "run", options


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "where"),
    [
        pytest.param(2, ["--cube", "1x1x2"], id="1x1x2"),
        pytest.param(8, ["--cube", "2x2x2"], id="2x2x2"),
    ],
)
def test_a_deberta_learns_the_same_on_any_cube(
    disentangled: tuple[Path, list[str]], tmp_path: Path, ranks: int, where: list[str]
) -> None:
    run, options = disentangled
    words = [*options, *where, "--run.checkpoint-every", "0"]
    assert run_ranks(ranks, on_rank, DISENTANGLED, tmp_path / "run", words, run.parent / "corpus") == [0] * ranks
    for kind in ("step", "evaluation"):
        for ours, theirs in zip(journal(tmp_path / "run", kind), journal(run, kind), strict=True):
            for name in ("loss", "masked_lm_loss", "replaced_token_loss"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4)
    expected = expect(resolved(tmp_path / "run"), CubeShape.parse(where[1], 1), open_corpus(run.parent / "corpus").info)
    assert expected.traffic.total() == journal(tmp_path / "run", "step")[0]["bytes_received"]


def test_a_debertas_folders_are_whole_models_with_which_runs_begin(
    disentangled: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """Its table is the sum of both: a run that begins with both folders takes the first step of one that begins with
    the run."""
    pytest.importorskip("transformers")
    run, options = disentangled
    assert convert_main(["to-hf", str(run), str(tmp_path / "whole")]) == 0
    assert convert_main(["to-hf", str(run), str(tmp_path / "generator"), "--generator"]) == 0
    stored, beside = (load_file(tmp_path / each / "model.safetensors") for each in ("whole", "generator"))
    table = "deberta.embeddings.word_embeddings.weight"
    assert not stored[table].equal(beside[table])
    heads = {"LayerNorm", "dense", "classifier"}
    assert {name.split(".")[1] for name in stored if name.startswith("mask_predictions.")} == heads
    assert open_weights(tmp_path / "whole").heads == ("replaced_tokens",)
    first = {}
    for name, sources in {
        "run": ["--start-from", str(run)],
        "folders": ["--start-from", str(tmp_path / "whole"), "--start-generator-from", str(tmp_path / "generator")],
        "alone": ["--start-from", str(tmp_path / "whole")],
    }.items():
        words = [*options, "--run.steps", "1", "--run.evaluate-every", "0", "--run.checkpoint-every", "0", *sources]
        assert pretrain.main(arguments(DISENTANGLED, tmp_path / name, *words, corpus=run.parent / "corpus")) == 0
        first[name] = journal(tmp_path / name, "step")[0]
    for name in ("loss", "masked_lm_loss", "replaced_token_loss", "gradient_norm"):
        assert first["folders"][name] == pytest.approx(first["run"][name], rel=1e-5)
    assert first["alone"]["masked_lm_loss"] != pytest.approx(first["run"]["masked_lm_loss"], rel=1e-3)


def test_distances_keep_their_buckets(disentangled: tuple[Path, list[str]]) -> None:
    run, _ = disentangled
    recipe, corpus = resolved(run), open_corpus(run.parent / "corpus")
    progress = checkpoint.read_progress(run / "checkpoints" / "step-00000004")
    for changes in ({"positions": 128, "position_buckets": 32}, {"position_buckets": 16}):
        other = replace(recipe, model=replace(recipe.model, **changes))
        with pytest.raises(ValueError, match=r"up to 64 apart in 32 buckets .*\.position_buckets = 32"):
            check_start(progress, other, corpus)


@pytest.fixture(scope="module")
def folders(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By a word for it: the run, and both of its models as folders of the library."""
    folder = tmp_path_factory.mktemp("folders")
    assert convert_main(["to-hf", str(run), str(folder / "whole")]) == 0
    assert convert_main(["to-hf", str(run), str(folder / "own"), "--generator"]) == 0
    return {"RUN": run, "WHOLE": folder / "whole", "OWN": folder / "own"}


BOTH = ["--start-from", "WHOLE", "--start-generator-from", "OWN"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--start-generator-from", "OWN"], "is about a generator beside the model of --start-from"),
        ([*BOTH[:3], "WHOLE"], "has no masked-LM head: it is no generator"),
        (["--start-from", "RUN", *BOTH[2:]], "has a generator, with its moments"),
        ([*BOTH, "--data.objective", "masked-lm"], "belongs to data.objective = 'replaced-tokens'. Got 'masked-lm'"),
        (
            [*BOTH, "--model.generator-heads", "1"],
            "has heads = 2, the recipe's 1. Set model.generator_size, generator_heads and generator_layers",
        ),
    ],
    ids=str,
)
def test_generators_that_do_not_fit_are_refused(
    folders: dict[str, Path],
    more: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    recipe, given = SHIPPED, [*more, *(str(folders.get(word, word)) for word in words)]
    if "masked-lm" in words:  # to which settings of a generator do not belong
        recipe = tmp_path / "recipe.toml"
        text = SHIPPED.read_text().splitlines(keepends=True)
        recipe.write_text("".join(line for line in text if not line.startswith(("generator", "discriminator"))))
    assert pretrain.main(arguments(recipe, tmp_path / "new", *given, corpus=folders["RUN"].parent / "corpus")) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("changed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_electra_begins_with_both_models(
    folders: dict[str, Path], more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], *, changed: bool
) -> None:
    """The first step is that of a run which begins with the run itself; of other embeddings it is said whose stay."""
    own = folders["OWN"]
    if changed:
        own = shutil.copytree(own, tmp_path / "own")
        tensors = load_file(own / "model.safetensors")
        tensors["electra.embeddings.word_embeddings.weight"] += 1.0
        save_file(tensors, own / "model.safetensors", metadata={"format": "pt"})
    first = []
    for number, sources in enumerate((["--start-from", "RUN"], [*BOTH[:3], str(own)])):
        given = [str(folders.get(word, word)) for word in sources]
        words = [*more, "--run.steps", "1", "--run.evaluate-every", "0", "--run.checkpoint-every", "0", *given]
        corpus = folders["RUN"].parent / "corpus"
        assert pretrain.main(arguments(SHIPPED, tmp_path / str(number), *words, corpus=corpus)) == 0
        first.append(journal(tmp_path / str(number), "step")[0])
    for name in ("loss", "masked_lm_loss", "replaced_token_loss", "gradient_norm"):
        assert first[1][name] == pytest.approx(first[0][name], rel=1e-5)
    assert ("the embeddings, which both have in common, are the model's" in capsys.readouterr().err) == changed


def test_a_model_without_generator_has_none_to_write(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert_main(["to-hf", str(run), str(tmp_path / "there")]) == 0
    assert convert_main(["to-hf", str(tmp_path / "there"), str(tmp_path / "out"), "--generator"]) == 2
    assert "has no generator: it is no run that has learnt replaced tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("electra", ReplacedTokens(generator_size=0.5)),
        ("electra", ReplacedTokens(generator_layers=1)),
        ("deberta-v2", ReplacedTokens()),
        ("deberta-v2", ReplacedTokens(generator_layers=3, generator_heads=2)),
    ],
)
def test_parameters_are_those_of_the_model(family: str, settings: ReplacedTokens) -> None:
    recipe = read_config(SHIPPED)
    model = replace(recipe.model, family=family, embedding=None if family == "deberta-v2" else 64)
    config = model.config(recipe.data)
    cube = Cube.single()
    with cube.skip_init():
        model = ElectraForPreTraining(config, settings, cube)
    planned = electra_parameters(config, settings.generator(config))
    found = {name: tuple(local(each).shape) for name, each in model.named_parameters()}
    assert found == {each.name: each.shape for each in planned}
    assert list(found) == [each.name for each in planned]


def test_a_dry_run_tells_what_the_run_receives(run: Path) -> None:
    recipe, corpus = resolved(run), open_corpus(run.parent / "corpus").info
    found = expect(recipe, CubeShape(), corpus)
    step = journal(run, "step")[0]
    assert found.traffic.total() == step["bytes_received"] == 0
    told = report(recipe, CubeShape(), corpus)
    for words in (
        "2 layers, hidden 16, inner 64, 2 heads",
        "whether they are replaced, times 50",
        "embeddings and gen",
    ):
        assert words in told


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"family": "bert", "embedding": None}}, "which alone have a head for them. Got family='bert'"),
        (
            {"data": {"objective": "masked-lm"}},
            "model.generator_size=0.5 belongs to data.objective = 'replaced-tokens'",
        ),
        ({"model": {"generator_size": 2.0}}, "generator_size must be above 0 and at most 1. Got 2.0"),
        ({"model": {"generator_layers": 0}}, "generator_layers must be at least 1. Got 0"),
        (
            {"model": {"family": "deberta-v2", "embedding": None}},
            'family="deberta-v2" is as wide as the model, .* Got generator_size=0.5. Leave it out, and say generator_l',
        ),
        ({"model": {"generator_heads": 3}}, "hidden must divide by heads=3. Got 64. .*say generator_heads"),
        ({"speed": {"read_rows_only": True}}, "speed.read_rows_only and data.objective = 'replaced-tokens' exclude"),
        ({"speed": {"cuda_graph": True}}, "speed.cuda_graph and data.objective = 'replaced-tokens' exclude"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], message: str) -> None:
    recipe = read_config(SHIPPED)
    with pytest.raises(ValueError, match=message):
        replace(recipe, **{name: replace(getattr(recipe, name), **values) for name, values in changes.items()})


def test_another_generator_or_weight_is_no_continuation(run: Path) -> None:
    recipe, corpus = resolved(run), open_corpus(run.parent / "corpus")
    progress = checkpoint.read_progress(run / "checkpoints" / "step-00000004")
    longer = replace(recipe, run=replace(recipe.run, steps=9))
    check_resume(progress, longer, corpus)
    for name, value, begins in (
        ("generator_heads", 1, False),
        ("generator_size", 0.25, False),
        ("generator_layers", 1, False),
        ("discriminator_weight", 9.0, True),
    ):
        other = replace(longer, model=replace(longer.model, **{name: value}))
        with pytest.raises(ValueError, match=f"trained with model.{name} = "):
            check_resume(progress, other, corpus)
        if begins:
            check_start(progress, other, corpus)
            grown = replace(other, model=replace(other.model, positions=128, dropout=0.1))
            check_start(progress, grown, corpus)
        else:
            with pytest.raises(ValueError, match="generator has 2 layers, hidden 16, inner 64, 2 heads, the recipe's"):
                check_start(progress, other, corpus)
