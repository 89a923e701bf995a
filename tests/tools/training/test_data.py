"""What a recipe can say about packs, and runs whose ranks read their own shards only."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tensor3d import Cube
from tensor3d.distributed.object_collectives import check_same_on_all_ranks, run_on_all_ranks
from tensor3d.packing import PLANNERS, fingerprint_of, save_plan
from tests.ranks import run_ranks
from tests.tools.runs import arguments, losses, on_rank
from tools import pretrain
from tools.corpus.quick.prepare import prepare
from tools.corpus.training_corpus import open_corpus
from tools.training.config import TrainConfig, read_config
from tools.training.data import TrainData, pretraining_data, training_source

QUIET = ["--model.dropout", "0", "--model.attention-dropout", "0", "--run.steps", "4"]


def trained(recipe: Path, run: Path, *more: str) -> dict[int, float]:
    assert pretrain.main(arguments(recipe, run, *QUIET, *more)) == 0
    return losses(run)


@pytest.mark.parametrize("packing", ["lp", "lpfhp", "stream", "padded", "binned"])
def test_every_packing_trains(recipe: Path, tmp_path: Path, packing: str) -> None:
    more = ["--data.packing", packing, "--data.capacity", "96", "--batch.packing-rule", "sequences"]
    more += ["--data.bin-width", "8"]
    first = trained(recipe, tmp_path / "run", *more, "--batch.global-batch", "24", "--run.evaluate-every", "4")
    assert len(first) == 4
    fill = losses(tmp_path / "run", "data/fill")
    low, high = (0.2, 0.4) if packing == "padded" else (0.7, 1.0)
    assert all(low < share <= high for share in fill.values())
    assert len(losses(tmp_path / "run", "evaluation/loss")) == 1


def feed(recipe: Path, **changes: dict[str, Any]) -> TrainData:
    """The data of one process, from the corpus beside the recipe."""
    settings: TrainConfig = read_config(recipe)
    for section, values in changes.items():
        settings = dataclasses.replace(settings, **{section: dataclasses.replace(getattr(settings, section), **values)})
    return TrainData.of_corpus(settings, Cube.single(), open_corpus(recipe.parent / "corpus"))


@pytest.fixture
def prepared(recipe: Path) -> Path:
    assert pretrain.main([str(recipe), "--corpus", str(recipe.parent / "corpus"), "--prepare-only"]) == 0
    return recipe


def test_the_rules_of_the_optimiser(prepared: Path) -> None:
    plain = feed(prepared, data={"capacity": 96})
    factor = plain.data.packing_factor
    assert factor > 1.5
    assert (plain.global_batch, plain.betas()) == (8, (0.9, 0.999))
    by_sequences = {"packing_rule": "sequences", "global_batch": 64, "multiple_of": 4}
    fewer = feed(prepared, data={"capacity": 96}, batch=by_sequences)
    assert abs(fewer.global_batch - 64 / factor) <= 2
    assert fewer.global_batch % 4 == 0
    assert fewer.betas() == (0.9, 0.999)
    betas = feed(prepared, data={"capacity": 96}, batch={"packing_rule": "betas"})
    assert betas.global_batch == 8
    assert betas.betas() == pytest.approx((0.9**factor, 0.999**factor))


def test_plans_are_made_once_and_read(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = tmp_path / "plans"
    more = ["--data.plans", str(plans), "--batch.global-batch", "64"]
    assert pretrain.main(arguments(recipe, tmp_path / "none", *QUIET, *more, "--prepare-only")) == 0
    told = capsys.readouterr()
    files = sorted(path.name for path in plans.iterdir())
    assert f"plans of {len(files)} epochs in {plans}" in told.err
    first, *lines = told.out.splitlines()
    assert re.fullmatch(rf"{recipe.parent / 'corpus'}: prepared, [\d.]+ kB in \d+ files", first)
    assert re.search(r"^  text +[\d,]+ words, [\d,]+ sentences, 60 documents$", told.out, re.MULTILINE)
    assert f"  plans       {plans}" in lines
    call = arguments(recipe, tmp_path / "none", *QUIET, *more)
    assert lines[-2:] == ["next:", f"  {shlex.join(['python', '-m', 'tools.pretrain', *call])}"]
    assert files[0] == "epoch-00000-group-0.json"
    assert len(files) > 1
    with_files = trained(recipe, tmp_path / "files", *more)
    assert with_files == trained(recipe, tmp_path / "own", "--batch.global-batch", "64")

    # Another seed has other sequences, for which these plans are none.
    capsys.readouterr()
    assert pretrain.main(arguments(recipe, tmp_path / "other", *QUIET, *more, "--run.seed", "7")) == 2
    assert "epoch-00000-group-0.json" in capsys.readouterr().err
    # A plan that is there decides; it is not made again behind the user's back.
    content = json.loads((plans / files[0]).read_text())
    (plans / files[0]).write_text(json.dumps(content)[:-40])
    assert pretrain.main(arguments(recipe, tmp_path / "damaged", *QUIET, *more)) == 2
    assert files[0] in capsys.readouterr().err


SHARDED = ["--data.shards", "4", "--data-parallel", "2"]


def _exchanging(recipe: Path, corpora: list[Path], output: Path, more: list[str]) -> int:
    """Each rank sees a corpus folder of its own, as on a disk of its own."""
    return on_rank(recipe, output, more, corpus=corpora[dist.get_rank()])


@pytest.fixture(scope="module")
def corpora(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A corpus of four shards, whole, and two folders with half of its shards each."""
    folder = tmp_path_factory.mktemp("corpora")
    data = read_config(recipe).data
    prepare(data.source, folder / "whole", vocab_size=data.vocab_size, held_out=data.held_out, shards=4)
    for half in range(2):
        shutil.copytree(folder / "whole", folder / f"{half}")
        for shard in range(4):
            if shard // 2 != half:
                for file in (folder / f"{half}").glob(f"train-0000{shard}-of-00004.*"):
                    file.unlink()
    return [folder / "whole", folder / "0", folder / "1"]


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["lp", "binned"])
def test_ranks_that_exchange_compute_what_ranks_that_read_everything_do(
    recipe: Path, corpora: list[Path], tmp_path: Path, packing: str
) -> None:
    whole, *halves = corpora
    more = [*QUIET, *SHARDED, "--data.packing", packing, "--run.checkpoint-every", "2"]
    reading, exchanging = tmp_path / "reading", tmp_path / "exchanging"
    assert run_ranks(2, _exchanging, recipe, [whole, whole], reading, more) == [0, 0]
    assert run_ranks(2, _exchanging, recipe, halves, exchanging, [*more, "--exchange"]) == [0, 0]
    assert losses(exchanging) == losses(reading)
    assert len(losses(reading)) == 4


def test_a_missing_shard_is_named_on_every_rank(recipe: Path, corpora: list[Path], tmp_path: Path) -> None:
    said = run_ranks(2, _refused, recipe, [corpora[1], corpora[1]], tmp_path / "run", [*QUIET, *SHARDED, "--exchange"])
    for status, message in said:
        assert status == 2
        assert "rank 1: data rank 1 of 2 needs shards 2 to 3 of 4, and shard 2, 3 is not on its machine" in message
    assert not (tmp_path / "run").exists()


def _with_own_plans(recipe: Path, whole: Path, plans: list[Path], output: Path, more: list[str]) -> tuple[int, str]:
    own = ["--data.plans", str(plans[dist.get_rank()])]
    return _refused(recipe, [whole, whole], output, [*more, *own])


@pytest.mark.parametrize("exchange", [[], ["--exchange"]])
def test_a_plan_that_one_rank_cannot_read_ends_the_run_on_all(
    recipe: Path, corpora: list[Path], tmp_path: Path, exchange: list[str]
) -> None:
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "epoch-00000-group-0.json").write_text("{")
    plans = [tmp_path / "none", tmp_path / "damaged"]
    more = [*QUIET, *SHARDED, *exchange]
    for status, message in run_ranks(2, _with_own_plans, recipe, corpora[0], plans, tmp_path / "run", more):
        assert status == 2
        assert "rank 1: " in message
        assert "damaged/epoch-00000-group-0.json" in message


@pytest.mark.slow
def test_ranks_that_plan_differently_do_not_begin(recipe: Path, corpora: list[Path], tmp_path: Path) -> None:
    """One rank reads a plan for which the others would have made a better one."""
    more = [*QUIET, *SHARDED, "--data.capacity", "96"]
    plans = [tmp_path / "none", tmp_path / "worse"]
    settings = read_config(recipe)
    worse = dataclasses.replace(
        settings, data=dataclasses.replace(settings.data, capacity=96, shards=4, plans=str(plans[1]))
    )
    corpus = open_corpus(corpora[0])
    data = pretraining_data(worse, training_source(corpus, worse, None), corpus.special)
    lengths = data.epochs.source.draw(0).lengths
    histogram = np.bincount(lengths, minlength=97)
    limits = data.rules.limits
    plan = PLANNERS["padded"](histogram, 96, limits.max_sequences, budget=limits.budget, costs=limits.costs)
    plans[1].mkdir()
    save_plan(plan, plans[1] / "epoch-00000-group-0.json", fingerprint_of(histogram, limits, "lp"))
    for status, message in run_ranks(2, _with_own_plans, recipe, corpora[0], plans, tmp_path / "run", more):
        assert status == 2
        assert "the packing of epoch 0 differs between ranks: rank 1 has" in message


def _refused(recipe: Path, corpora: list[Path], output: Path, more: list[str]) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = _exchanging(recipe, corpora, output, more)
    return status, said.getvalue()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data.shards", "3", "--data-parallel", "2", "--exchange"], "3 shards do not divide among data=2"),
        (["--data.groups", "2"], "data.groups=2 must divide data.shards=1"),
        ([*SHARDED, "--exchange", "--exchange-within", "1"], "needs a number of groups that is a multiple of 2 / 1"),
        ([*SHARDED, "--exchange", "--exchange-every", "0"], "must be at least 1. Got 0"),
        (["--exchange-within", "3"], "Add --exchange, or drop them"),
        (["--data.packing", "magic"], "magic"),
    ],
)
def test_what_cannot_be_is_refused_before_any_process_is_connected(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    try:
        status = pretrain.main(arguments(recipe, tmp_path / "run", *more))
    except SystemExit as refusal:  # tyro's, for a value that is no choice
        status = int(str(refusal.code))
    assert status == 2
    said = capsys.readouterr()
    assert message in said.err + said.out


def _disagreeing() -> list[str]:
    cube = Cube(data=3)

    def fails() -> None:
        if cube.rank > 0:
            raise ValueError(f"no disk {cube.rank}")

    with pytest.raises(ValueError, match="differs") as differ:
        check_same_on_all_ranks(cube, "the plan", "ab" if cube.rank == 1 else "cd")
    with pytest.raises(ValueError, match="no disk") as failed:
        run_on_all_ranks(cube, fails)
    return [str(differ.value), str(failed.value)]


def test_ranks_that_differ_are_named_to_all() -> None:
    for told in run_ranks(3, _disagreeing):
        assert told[0].startswith("the plan differs between ranks: rank 1 has ab, rank 0 cd")
        assert told[1] == "rank 1: no disk 1 (1 other rank failed too)"
