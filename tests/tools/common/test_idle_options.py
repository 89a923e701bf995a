"""Options that change nothing beside others of the same command are told, each with what it is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.common.idle_options import idle_options
from tools.finetune.__main__ import ClassifyCommand as LearnCommand
from tools.finetune.__main__ import (
    EmbedCommand,
    EmbedConfig,
    RankCommand,
    RankConfig,
    TagCommand,
    TagConfig,
    TextConfig,
)
from tools.finetune.data import TextData
from tools.finetune.embed_data import EmbedData
from tools.finetune.rank_data import RankData
from tools.finetune.tag_data import TagData
from tools.gpt.generate import GenerateCommand
from tools.gpt.train import TrainCommand
from tools.packing.__main__ import PlanCommand as PackCommand
from tools.packing.__main__ import StreamCommand
from tools.packing.balance import BalanceCommand
from tools.plan.__main__ import PlanCommand
from tools.predict.__main__ import ClassifyCommand, ScoreCommand
from tools.predict.__main__ import EmbedCommand as VectorCommand
from tools.predict.__main__ import RankCommand as OrderCommand
from tools.predict.__main__ import TagCommand as WordCommand

MODEL, FILE = Path("model"), Path("texts.jsonl")
ALL: dict[str, Any] = {"plain": True, "wait": 1.0, "json": True, "pairs": True}


@pytest.mark.parametrize(
    ("command", "idle"),
    [
        (TrainCommand(window=128), ["--window 128"]),
        (TrainCommand(window=127), []),
        (GenerateCommand(run_folder=MODEL, prompt="a", temperature=0.0, top_k=3, seed=1), ["--top-k 3", "--seed 1"]),
        (GenerateCommand(run_folder=MODEL, prompt="a", temperature=0.5, top_k=1), ["--temperature 0.5"]),
        (GenerateCommand(run_folder=MODEL, prompt="a", temperature=0.5, top_k=3, seed=1), []),
        (ClassifyCommand(model=MODEL, texts=("a",), **ALL), ["--plain", "--wait"]),
        (ClassifyCommand(model=MODEL, file=FILE, **ALL), ["--json", "--pairs"]),
        (ClassifyCommand(model=MODEL, texts=("a",), output=FILE, json=True), ["--json"]),
        (ScoreCommand(model=MODEL, texts=("a",), seed=1), ["--seed 1"]),
        (ScoreCommand(model=MODEL, texts=("a",), seed=1, masked_share=0.5), []),
        (OrderCommand(model=MODEL, texts=("a", "b"), collection=FILE), ["--collection"]),
        (VectorCommand(model=MODEL, texts=("a",), against=FILE, normalize=True), ["--normalize"]),
        (PackCommand(histogram=FILE, output=FILE, seed=1, masked_share=0.2), ["--seed 1", "--masked-share 0.2"]),
        (PackCommand(corpus=FILE, output=FILE, seed=1, masked_share=0.2, masked_per_pack=9), []),
        (StreamCommand(histogram=FILE, seed=1), []),
        (BalanceCommand(histogram=FILE, seed=1, packed=False, max_sequences=2), ["--max-sequences 2"]),
        (PlanCommand(headline=True, top=3, gpu="H100"), ["--gpu H100", "--top 3"]),
        (PlanCommand(check=(FILE,), cluster="a.json", quick=True), ["--quick"]),
        (PlanCommand(model="tiny", model_folder=MODEL, fp8_flops="1P"), ["--model tiny", "--fp8-flops 1P"]),
        (PlanCommand(top=3, all=True, across_latency="1us"), ["--top 3", "--across-latency 1us"]),
        (PlanCommand(top=3, nodes=2, across_latency="1us"), []),
    ],
)  # fmt: skip
def test_what_changes_nothing_is_told(command: Any, idle: list[str]) -> None:
    told = idle_options(command, command.idle_rules())
    assert len(told) == len(idle)
    for line, option in zip(told, idle, strict=True):
        assert line.startswith(option)
        assert " changes nothing: it is for " in line


@pytest.mark.parametrize(
    ("command", "idle"),
    [
        (LearnCommand(recipe=FILE, settings=TextConfig(data=TextData(test_labels=True))), ["test_labels = True"]),
        (TagCommand(recipe=FILE, settings=TagConfig(data=TagData(test_tags=False))), ["test_tags = False"]),
        (
            RankCommand(recipe=FILE, settings=RankConfig(data=RankData(bad="skip", test_grades=False))),
            ["bad = 'skip'", "test_grades = False"],
        ),
        (
            EmbedCommand(recipe=FILE, settings=EmbedConfig(data=EmbedData(score="a", top_score=5.0, dev_split="b"))),
            ["score = 'a'", "top_score = 5.0", "dev_split = 'b'"],
        ),
    ],
)
def test_and_keys_of_recipes_of_fine_tuning(command: Any, idle: list[str]) -> None:
    told = command.idle_settings()
    assert [line.partition(" changes nothing")[0] for line in told] == [f"data.{each}" for each in idle]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (ClassifyCommand(model=MODEL, texts=("a",), output=Path("x.csv")), r"lines of JSON. Name it \*.jsonl"),
        (VectorCommand(model=MODEL, texts=("a",), output=Path("x.tsv")), r"lines of JSON. Name it \*.jsonl"),
        (WordCommand(model=MODEL, texts=("a",), output=Path("x.tsv")), "Give --output-format conll"),
        (WordCommand(model=MODEL, texts=("a",), output=FILE, output_format="conll"), "what is written is words with"),
        (PlanCommand(headline=True, output=FILE), "--headline prints a table, and writes no --output"),
    ],
)  # fmt: skip
def test_a_file_of_another_format_than_its_name_says_is_refused(command: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        (command.validate if isinstance(command, PlanCommand) else command.check)()
