"""Pre-training on masked tokens alone: no pairs, no pooler, the same on any cube, and what comes out of it. With a
decoder that is not the embedding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from models.bert import BertForPreTraining
from models.bert.cost_model.param_shapes import parameters
from tensor3d import Cube, checkpoint
from tests.ranks import run_ranks
from tests.tools.runs import arguments, journal, newest, on_rank, resolved
from tools import pretrain
from tools.convert.__main__ import main as convert_main
from tools.corpus.training_corpus import open_corpus
from tools.training.data import held_out_data
from tools.training.resume import check_resume, check_start

SHIPPED = Path(__file__).parents[3] / "launch" / "recipes" / "bert-base-masked-lm.toml"
ALONE = ["--data.objective", "masked-lm", "--data.masked-share", "0.4", "--data.masked-share-end", "0.1"]
MORE = [
    *ALONE,
    "--model.dropout",
    "0",
    "--model.attention-dropout",
    "0",
    "--model.no-tied",
    "--run.steps",
    "4",
    "--run.evaluate-every",
    "2",
]


@pytest.fixture(scope="module")
def run(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on one process; its corpus lies beside it."""
    folder = tmp_path_factory.mktemp("alone")
    assert pretrain.main(arguments(recipe, folder / "run", *MORE, corpus=folder / "corpus")) == 0
    return folder / "run"


def test_nothing_but_masked_tokens_is_learnt(run: Path) -> None:
    steps, evaluations = journal(run, "step"), journal(run, "evaluation")
    assert (len(steps), len(evaluations)) == (4, 2)
    for each in (*steps, *evaluations):
        assert each["loss"] == each["masked_lm_loss"] > 1
        assert each["next_sentence_accuracy"] is None
    assert all(step["next_sentence_loss"] is None for step in steps)
    # In a straight line; each text's number of tokens is rounded.
    assert [step["masked_share"] for step in steps] == pytest.approx([0.4, 0.3, 0.2, 0.1], abs=0.02)


def test_the_model_has_neither_pooler_nor_next_sentence_head(run: Path) -> None:
    told, recipe = json.loads((run / "model.json").read_text()), resolved(run)
    assert told["heads"] == ["masked_lm"]
    config, cube = recipe.model.config(recipe.data), Cube.single()
    model = BertForPreTraining(config, cube)
    checkpoint.load(newest(run), model, None, cube)  # refuses what is missing or too much
    names = [name for name, _ in model.named_parameters()]
    assert names == [each.name for each in parameters(config)]
    assert not any("pooler" in name or "next_sentence" in name for name in names)
    assert "masked_lm.projection.weight" in names


@pytest.mark.parametrize(
    ("ranks", "where"),
    [
        pytest.param(8, ["--cube", "2x2x2"], id="2x2x2", marks=pytest.mark.slow),
        pytest.param(2, ["--data-parallel", "2", "--optimizer.shard-over-data", "gradients"], id="data2"),
    ],
)
def test_losses_and_shares_do_not_depend_on_the_cube(
    recipe: Path, run: Path, tmp_path: Path, ranks: int, where: list[str]
) -> None:
    more = [*MORE, *where, "--run.checkpoint-every", "0"]
    assert run_ranks(ranks, on_rank, recipe, tmp_path / "run", more, run.parent / "corpus") == [0] * ranks
    for kind in ("step", "evaluation"):
        for ours, theirs in zip(journal(tmp_path / "run", kind), journal(run, kind), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
            assert ours.get("masked_share") == theirs.get("masked_share")


def test_the_library_reads_it_as_a_masked_language_model(run: Path, tmp_path: Path) -> None:
    """And has the same loss on a pack of held-out texts, one after another."""
    transformers = pytest.importorskip("transformers")
    assert convert_main(["to-hf", str(run), str(tmp_path / "library")]) == 0
    model, found = transformers.BertForMaskedLM.from_pretrained(tmp_path / "library", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]

    recipe = resolved(run)
    data = held_out_data(recipe, open_corpus(run.parent / "corpus"))
    packs = data.packs(0, range(len(data.epochs[0].packs)))
    total, count = 0.0, 0
    for pack in packs:
        ends = np.cumsum(pack.lengths)
        for first, end in zip(ends - pack.lengths, ends, strict=True):
            here = (pack.masked >= first) & (pack.masked < end)
            with torch.no_grad():
                logits = model.eval()(torch.from_numpy(pack.ids[None, first:end])).logits[0]
            rows, labels = (torch.from_numpy(each[here]) for each in (pack.masked - first, pack.masked_labels))
            total, count = total + float(F.cross_entropy(logits[rows], labels, reduction="sum")), count + len(rows)
    assert journal(run, "evaluation")[-1]["loss"] == pytest.approx(total / count, rel=1e-4)


def test_another_objective_or_share_is_no_continuation(run: Path) -> None:
    recipe, corpus = resolved(run), open_corpus(run.parent / "corpus")
    progress = checkpoint.read_progress(newest(run))
    longer = replace(recipe, run=replace(recipe.run, steps=9))
    check_resume(progress, longer, corpus)
    for change, told in (
        ({"objective": "masked-lm+next-sentence"}, r"data.objective = 'masked-lm', the recipe says 'masked-lm\+next"),
        ({"masked_share": 0.3}, r"data.masked_share = 0.4, the recipe says 0.3"),
        ({"masked_share_end": None}, r"data.masked_share_end = 0.1, the recipe says None"),
        ({"mask_replace": 0.9}, r"data.mask_replace = 0.8, the recipe says 0.9"),
    ):
        other = replace(longer, data=replace(longer.data, **change))
        with pytest.raises(ValueError, match=told):
            check_resume(progress, other, corpus)
        # A run that begins with the weights may guess more or less, but its moments must be of the same heads.
        if "objective" not in change:
            check_start(progress, other, corpus)
            continue
        with pytest.raises(ValueError, match=r"trained with data.objective = 'masked-lm'.*moments.*convert to-hf"):
            check_start(progress, other, corpus)


def test_the_shipped_recipe_trains_in_small(recipe: Path, tmp_path: Path) -> None:
    text = ["--data.source", str(recipe.parent / "text.txt"), "--data.vocab-size", "67", "--data.held-out", "0.1"]
    small = ["--model.layers", "1", "--model.hidden", "32", "--model.heads", "4", "--precision.compute", "fp32"]
    batch = ["--batch.global-batch", "64", "--batch.packs-per-rank", "1", "--batch.multiple-of", "1"]
    end = ["--run.steps", "2", "--run.evaluate-every", "2", "--run.checkpoint-every", "0"]
    more = [*text, *small, *batch, *end]
    assert pretrain.main(arguments(SHIPPED, tmp_path / "run", *more, corpus=tmp_path / "corpus")) == 0
    steps = journal(tmp_path / "run", "step")
    assert [step["masked_share"] for step in steps] == pytest.approx([0.3, 0.3], abs=0.01)
    # Whole documents, of which several fill a pack.
    assert all(step["fill"] > 0.9 for step in steps)
