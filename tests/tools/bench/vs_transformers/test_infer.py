"""`bench infer`: texts that it writes, figures, refusals, and a run beside `transformers`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from models.bert.embedding import DenseConfig
from models.bert.huggingface.export import WEIGHTS
from tests.tools.asked import write_models
from tools.bench.__main__ import main
from tools.bench.vs_transformers.infer import (
    HEADER,
    InferCommand,
    InferFigures,
    Variant,
    VectorLibrary,
    _padding_ratio,
    measure,
    rows,
    write_random_model,
    written_texts,
)
from tools.corpus.tokenizers import load_tokenizer
from tools.predict.sentence_folder import SentenceSettings, sentence_json
from tools.predict.text_encoder import TextEncoder


def test_texts_have_the_lengths_of_the_histogram(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_models(tmp_path) / "language" / "tokenizer")
    histogram = np.zeros(20)
    histogram[[3, 19]] = (1, 3)
    texts = written_texts(tokenizer, histogram, 400)
    lengths = np.array([len(text.ids) for text in TextEncoder(tokenizer, 512).texts(texts)])
    assert set(lengths.tolist()) == {3, 19}
    assert np.mean(lengths == 19) == pytest.approx(0.75, abs=0.1)
    assert len(set(texts)) > 200
    assert texts == written_texts(tokenizer, histogram, 400)


def test_a_mark_of_the_space_before_a_word_is_no_letter_of_it() -> None:
    class Marked:
        vocab_size = 5

        def pieces(self, ids: Sequence[int]) -> list[str]:
            return ["[CLS]", "\u2581red", "\u2581blue", "s", "red"]

        def encode(self, texts: Sequence[str]) -> list[list[int]]:
            known = {"red": [1], "blue": [2], "s": [9, 3]}
            return [[number for word in text.split() for number in known[word]] for text in texts]

        def special_tokens(self, *, pair: bool) -> int:
            return 2

    tokenizer: Any = Marked()
    assert set(" ".join(written_texts(tokenizer, np.array([0, 0, 0, 0, 1]), 20)).split()) == {"red", "blue"}


def test_padding_is_that_of_the_batches() -> None:
    assert _padding_ratio(np.array([2, 4, 3, 3, 8]), 2) == (8 + 6 + 8) / 20
    assert _padding_ratio(np.full(2500, 7), 32) == 1


def test_ratios_are_of_the_same_round() -> None:
    def arm(name: str, *seconds: float) -> Variant:
        return Variant(name=name, seconds=seconds, texts_per_second=10, speed_up=2, latency_p50=0.01, latency_p99=None)

    figures = InferFigures(
        texts=10,
        tokens=100,
        threads=1,
        arms=(arm("packed", 1, 2), arm("padded", 3, 2)),
        padding_ratio=2,
        sorted_padding_ratio=1,
        difference_alone=0,
        difference_library=0,
        difference_padded=0,
    )
    assert rows(figures)[0] == ("packed", "10", "2.00", "1.00-3.00", "10.0", "-")
    assert len(rows(figures)[1]) == len(HEADER)


def test_no_arm_is_always_first_and_all_results_are_compared() -> None:
    order: list[str] = []

    def vectors(name: str, texts: Sequence[str]) -> list[np.ndarray]:
        order.append(name)
        return [np.array([len(text), 0.5 if name == "sorted" and len(text) == 7 else 0.0]) for text in texts]

    class Theirs:
        difference = VectorLibrary.difference

        def results(self, texts: Sequence[str], batch: int) -> list[np.ndarray]:
            return vectors("padded", texts)

        def results_sorted(self, texts: Sequence[str], batch: int) -> list[np.ndarray]:
            return vectors("sorted", texts)

        def lengths(self, texts: Sequence[str]) -> np.ndarray:
            return np.array([len(text) for text in texts])

    texts = ["a"] * 1500 + ["another"] + ["a"] * 200
    theirs: Any = Theirs()
    found = measure(InferCommand(rounds=3, singles=2), lambda part: vectors("ours", part), theirs, texts)
    one = ["ours", "padded", "sorted"]
    assert order[: 3 * 7] == [*one, *(one + one[::-1]) * 3]
    assert (found.difference_alone, found.difference_padded) == (0, 0.5), "a text that is not given alone"


def test_calls_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, message in (
        (["--sentences", "0"], "--sentences must be at least 1. Got 0"),
        (["--threads", "0"], "--threads must be at least 1. Got 0"),
        (["--texts", "a", "--histogram", "b"], "--texts have lengths of their own"),
        (
            ["--model", str(tmp_path)],
            f"has no config.json. Write one of a model or a run: python -m tools.convert to-hf {tmp_path} DIR",
        ),
        (["--output", str(tmp_path / "no" / "file")], "a file in a folder that exists"),
    ):
        assert main(["infer", *more]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("task", ["embed", "tag"])
def test_packed_and_padded_say_the_same(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    sizes = ["--task", task, "--sentences", "80", "--rounds", "2", "--singles", "10", "--batch", "8", "--threads", "1"]
    output = tmp_path / "figures.json"
    assert main(["infer", *sizes, "--output", str(output)]) == 0
    told = capsys.readouterr().out
    assert "80 texts, 1 threads" in told
    figures = json.loads(output.read_text())["figures"]
    assert [arm["name"] for arm in figures["arms"]] == ["packed", "padded", "padded, sorted"]
    assert figures["arms"][1]["speed_up"] == 1
    assert all(len(arm["seconds"]) == 2 and min(arm["seconds"]) > 0 for arm in figures["arms"])
    assert figures["arms"][0]["latency_p50"] <= figures["arms"][0]["latency_p99"]
    assert 1 < figures["sorted_padding_ratio"] < figures["padding_ratio"]
    assert figures["difference_alone"] <= 1e-5
    assert figures["difference_library"] <= 1e-5
    assert figures["difference_padded"] <= 1e-5

    file = tmp_path / "texts.txt"
    file.write_text("aa bb\n\ncc\n")
    assert main(["infer", *sizes, "--texts", str(file), "--rounds", "1"]) == 0
    assert "2 texts" in capsys.readouterr().out


@pytest.mark.slow
def test_a_folder_of_sentence_transformers_is_obeyed_on_both_sides(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder, output = tmp_path / "model", tmp_path / "figures.json"
    (folder / "1_Pooling").mkdir(parents=True)
    write_random_model(folder)
    dense = (DenseConfig(outputs=70, activation="gelu"), DenseConfig(outputs=40, bias=False))
    settings = SentenceSettings(encoder=folder, normalize=True, max_length=10, dense=dense)
    for name, content in sentence_json(settings, 256).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    save_file({"linear.weight": torch.randn(70, 256), "linear.bias": torch.ones(70)}, folder / "2_Dense" / WEIGHTS)
    save_file({"linear.weight": torch.randn(40, 70) / 8}, folder / "3_Dense" / WEIGHTS)
    sizes = ["--sentences", "40", "--rounds", "1", "--singles", "5", "--batch", "8", "--threads", "1"]
    assert main(["infer", *sizes, "--model", str(folder), "--output", str(output)]) == 0
    assert json.loads(output.read_text())["figures"]["difference_library"] <= 1e-5
