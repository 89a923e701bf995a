"""`bench encoders`: what is common to the recipes and what is each one's own, and a short run."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

from tensor3d.data.masking import MASKED_SHARE
from tools.bench.__main__ import main
from tools.bench.encoders import ENCODERS, EncodersCommand, Run, as_recipe, figures
from tools.bench.harness.benchmark import Report
from tools.training.config import DataConfig, TrainConfig, read_config

RECIPES = Path(__file__).parents[3] / "launch" / "recipes"


def test_all_learn_masked_tokens_of_the_same_packs() -> None:
    common = read_config(RECIPES / "quickstart.toml")
    bert, roberta, modern = (as_recipe(common, encoder) for encoder in ENCODERS)
    assert bert == dataclasses.replace(common, data=dataclasses.replace(common.data, objective="masked-lm"))
    for recipe, family, share in ((roberta, "roberta", MASKED_SHARE), (modern, "modernbert", 0.3)):
        assert recipe.model.family == family
        assert dataclasses.replace(recipe.data, masked_share=MASKED_SHARE) == bert.data
        assert (recipe.data.masked_share, recipe.batch, recipe.run) == (share, bert.batch, bert.run)
        sizes = [(c.layers, c.hidden, c.heads) for c in (r.model.config(r.data) for r in (bert, recipe))]
        assert sizes[0] == sizes[1]
    assert (roberta.optimizer.kind, modern.optimizer.kind) == ("adamw", "stable_adamw")
    assert (modern.optimizer.schedule, modern.optimizer.decay) == ("wsd", 0.2), "it comes down within the run"
    weights = [figures("", each, [Run(loss=1.0, tokens=1.0)] * 2).parameters for each in (bert, roberta, modern)]
    assert max(weights) < 1.1 * min(weights)


def test_figures_by_hand() -> None:
    found = figures("bert", TrainConfig(), [Run(loss=loss, tokens=tokens) for loss, tokens in ((3.0, 10), (5.0, 30))])
    assert (found.mean, found.deviation, found.tokens, found.losses) == (4.0, pytest.approx(2**0.5), 20, (3.0, 5.0))


def test_the_table_of_the_docs_is_of_its_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = (RECIPES.parents[1] / "docs" / "models.md").read_text()
    (words,) = re.findall(r"python -m tools.bench (encoders launch/recipes/\S+ .*)", page)
    seen: list[EncodersCommand] = []
    monkeypatch.setattr(EncodersCommand, "measure", lambda self, plan: seen.append(self) or Report(content={}))
    monkeypatch.chdir(RECIPES.parents[1])
    assert main([*shlex.split(words), "--corpus", str(tmp_path)]) == 0
    rows = re.findall(
        r"^\| .* \((.*\.toml)\) \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (.*) \|$", page, re.MULTILINE
    )
    assert [row[0] for row in rows] == ["quickstart.toml", "roberta-tiny.toml", "modernbert-tiny-phase1.toml"]
    for encoder, (_, weights, share, mean, deviation, losses) in zip(ENCODERS, rows, strict=True):
        runs = [Run(loss=float(loss), tokens=0.0) for loss in losses.split(", ")]
        found = figures(encoder, as_recipe(seen[0].settings, encoder), runs)
        assert (f"{found.parameters:,}", f"{found.masked_share:g}") == (weights, share)
        assert (found.mean, found.deviation) == pytest.approx((float(mean), float(deviation)), abs=1e-3)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--encoders", "bert,electra"], "--encoders must be some of bert,roberta,modernbert. Got 'bert,electra'"),
        (["--seeds", "1"], "--seeds must be at least two different whole numbers .* Got '1'"),
        (["--seeds", "1,1"], "Got '1,1'"),
        (["--evaluated-share", "0"], "--evaluated-share must be .* Got 0"),
        (["--data.held-out", "0"], "data.held_out is 0, and the loss is that of held-out texts. Give it a share."),
    ],
)
def test_bad_calls_are_refused(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["encoders", str(RECIPES / "quickstart.toml"), *more]) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


def test_a_short_run(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "encoders.json"
    call = ["encoders", str(recipe), "--corpus", str(recipe.parent / "corpus"), "--run.steps", "2", "--seeds", "0,1"]
    assert main([*call, "--encoders", "roberta,modernbert", "--output", str(output)]) == 0
    assert "2 steps from seeds 0,1; held-out masked-LM loss" in capsys.readouterr().out
    content = json.loads(output.read_text())
    roberta, modern = content["results"]
    assert roberta["tokens"] == modern["tokens"] > 0
    assert len(set(roberta["losses"])) == len(set(modern["losses"])) == 2
    assert {section["data"]["objective"] for section in content["trained"].values()} == {"masked-lm"}
    assert DataConfig(**content["trained"]["roberta"]["data"]).masked_share == MASKED_SHARE
