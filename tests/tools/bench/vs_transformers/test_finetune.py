"""tools.bench finetune: what its figures mean, and that it times all modes on the same texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench.__main__ import main
from tools.bench.vs_transformers.finetune import FinetuneBenchCommand, StepFigures, figures


def step(seconds: float, tokens: int = 100, slots: int = 150) -> StepFigures:
    return StepFigures(seconds=seconds, texts=10, tokens=tokens, slots=slots, loss=0.7)


def test_figures() -> None:
    padded = [[step(0.3), step(0.3)], [step(0.4), step(0.2)], [step(0.2)]]
    packed = [[step(0.2), step(0.2)], [step(0.2), step(0.2)], [step(0.1)]]
    found = figures("packed", packed, padded, 0.5)
    assert found.steps == 5
    assert found.milliseconds == pytest.approx(200)
    assert found.texts_per_second == pytest.approx(50)
    assert found.tokens_per_second == pytest.approx(500)
    assert found.padding_ratio == pytest.approx(1.5)
    assert found.speed_up == pytest.approx(1.5)
    assert found.speed_up_range == (pytest.approx(1.5), pytest.approx(2.0))
    assert found.efficiency == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modes": "packed"}, "padded among them"),
        ({"modes": "padded,short"}, "padded among them"),
        ({"steps": 0}, "--steps must be at least 1"),
        ({"output": Path("/none/there/a.json")}, "--output must be a file"),
    ],
)
def test_bad_calls_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FinetuneBenchCommand(recipe=Path("a.toml"), **options).check()


def test_the_library_is_left_out_on_a_cube() -> None:
    modes, _ = FinetuneBenchCommand(recipe=Path("a.toml"), cube="1x1x2").check()
    assert modes == ["packed", "padded"]


@pytest.mark.slow
def test_all_modes_train_on_the_same_texts(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = ["film", "plot", "good", "bad", "the", "a"]
    rows = [f"{' '.join(words[: 1 + number % 6])}\t{number % 2}" for number in range(64)]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (tmp_path / "vocab.txt").write_text("\n".join([*special, *words]) + "\n")
    lines = ["[data]", *(f'{name} = "{tmp_path}/{name}.tsv"' for name in ("train", "dev"))]
    lines += ["[model]", f'vocab = "{tmp_path}/vocab.txt"', "dropout = 0.0", "attention_dropout = 0.0"]
    (tmp_path / "small.toml").write_text("\n".join(lines) + "\n")
    output = tmp_path / "figures.json"
    call = ["finetune", str(tmp_path / "small.toml"), "--steps", "4", "--rounds", "2", "--warmup", "1"]
    assert main([*call, "--output", str(output)]) == 0
    results = {result["mode"]: result for result in json.loads(output.read_text())["results"]}
    assert list(results) == ["packed", "padded", "transformers"]
    assert len({result["padding_ratio"] for result in results.values()}) == 1
    assert results["padded"]["padding_ratio"] > 1.2
    assert results["packed"]["first_loss"] == pytest.approx(results["padded"]["first_loss"], abs=1e-5)
    assert results["padded"]["speed_up"] == 1.0
    assert results["transformers"]["first_loss"] == pytest.approx(0.7, abs=0.2)
