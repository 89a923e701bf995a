"""Recipes of fine-tuning: the shipped ones, the one of the docs, and bad ones."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import tyro

from models.bert import BertConfig
from tools.finetune.__main__ import EmbedConfig, TextConfig, parse
from tools.finetune.config import ModelSection
from tools.predict.__main__ import EmbedCommand
from tools.training.config import read_recipe


def test_shipped_recipes_can_be_read() -> None:
    folder = Path(__file__).parents[3] / "launch/recipes/finetune"
    tasks = {"stsb": "regress", "cola": "classify", "sst2": "classify", "mrpc": "classify", "embedded": "classify"}
    tasks |= {"embedded-tags": "tag", "embedded-labels": "classify", "embedded-rank": "rank", "embedded-pairs": "embed"}
    for name, task in tasks.items():
        assert parse([task, str(folder / f"{name}.toml")]).settings.run.epochs >= 1


def test_dropout_of_a_recipe_is_that_of_attentions_output_too() -> None:
    """Or a ModernBERT whose folder has one for attention would keep that part of it."""
    read = BertConfig(
        **{"layers": 1, "hidden": 16, "heads": 2, "encoder": "modern", "family": "modernbert", "types": 0},
        **{"dropout": 0.0, "attention_dropout": 0.2, "attention_out_dropout": 0.2},
    )
    cases = (({}, (0.0, 0.2, 0.2)), ({"dropout": 0.1}, (0.1, 0.2, 0.1)), ({"attention_dropout": 0.0}, (0.0, 0.0, 0.2)))
    for said, wanted in cases:
        found = ModelSection(start_from="weights", **said).changed(read)
        assert (found.dropout, found.attention_dropout, found.out_dropout) == wanted


def test_the_recipe_of_the_docs_can_be_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/finetuning.md").read_text(encoding="utf-8")
    (block,) = (part.split("```")[0] for part in page.split("```toml\n")[1:])
    (tmp_path / "my.toml").write_text(block, encoding="utf-8")
    found = read_recipe(TextConfig, tmp_path / "my.toml")
    assert (found.model.start_from, found.run.seeds) == ("runs/minilm", (0,))
    default = TextConfig()
    told = (default.run.epochs, default.run.batch, default.run.seeds, default.optimizer.lr, default.data.max_length)
    assert told == (3, 32, (0, 1, 2), 5e-5, 128), "as the page says"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nseeds = 1", r"run\.seeds must be of type array of int\. Got 1"),
        ('[run]\nseeds = [0, "a"]', r"run\.seeds\[1\] must be of type int\. Got 'a'"),
        ("[run]\nseeds = [1, 1]", r"run\.seeds must be different"),
        ("[run]\nbatch = 0", r"run\.batch must be at least 1"),
        ("[data]\nlabels = ['a']", r"data\.labels must be different, at least two"),
        ("[data]\ntrain = 'a.tsv'", r"data\.dev must name a file"),
        ("[model]\npreset = 'tiny'", r"give one of them\. Got None and None\.$"),
        (
            "[model]\nstart_from = 'a'\nvocab = 'embedded'",
            r"Got 'a' and 'embedded'\. One that the recipe or the default has is left out by None: --model\.vocab None",
        ),
        (
            "[model]\nvocab = 'embedded'\n[optimizer]\nschedule = 'wsd'\nwarmup = 0.6\ndecay = 0.6",
            r"optimizer\.warmup=0\.6 and optimizer\.decay=0\.6 are more than all steps",
        ),
        (
            "[model]\nvocab = 'embedded'\n[precision]\nreduce = 'fp16'",
            r"precision\.reduce = 'fp16' needs precision\.compute = 'fp16'",
        ),
        (
            "[model]\nvocab = 'embedded'\n[precision]\nfp8 = 'tensorwise'",
            r"precision\.fp8 = 'tensorwise' needs precision",
        ),
        ("[optimizer]\nlr = 0.0", r"optimizer\.lr must be above 0"),
        ("[optimizer]\nlayer_decay = 1.5", r"optimizer\.layer_decay must be above 0 and at most 1\. Got 1\.5"),
        ("[model]\nvocab = 'embedded'\nfrozen_layers = -1", r"frozen_layers must be at least 0"),
        ("[model]\nvocab = 'embedded'\nkeep_budget = -1", r"keep_budget must be at least 0"),
        (
            "[model]\nvocab = 'embedded'\nkeep_budget = 8\nreshard_after_forward = false",
            r"model.keep_budget=8 and reshard_after_forward=false exclude each other",
        ),
        ("[run]\nspeed = 1", r"unknown key run\.speed"),
    ],
)
def test_a_bad_recipe_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ValueError, match=rf"bad\.toml: .*{message}"):
        read_recipe(TextConfig, tmp_path / "bad.toml")


def test_the_commands_of_the_page_on_vectors_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs/embedding.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [shlex.split(line) for line in page.splitlines() if line.strip().startswith("python -m tools.")]
    calls = [(command[2], command[3:]) for command in commands]
    assert [name for name, _ in calls] == ["tools.finetune"] * 2 + ["tools.predict"] * 4
    for _, arguments in calls[:2]:
        found = parse(arguments).settings
        assert isinstance(found, EmbedConfig)
    assert (found.data.sizes, found.data.max_length, found.data.scored_by) == ((256, 128, 64), None, "score")
    monkeypatch.setattr("tools.predict.__main__.check_folder", lambda *_, **__: None)  # the model is not here
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vectors").mkdir()  # where the page writes to
    for _, arguments in calls[2:]:
        tyro.cli(EmbedCommand, args=arguments[1:]).check()
