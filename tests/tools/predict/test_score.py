"""`tools.predict score`: pseudo-log-likelihoods as one pass for each hidden piece has them, packed and on cubes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.bert.text_batches import EncodedText, collate_texts
from tensor3d import Cube
from tests.ranks import run_ranks
from tests.tools.asked import TEXTS, write_models
from tools.predict import Scored, load, score
from tools.predict.__main__ import main

SAME = 1e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("scored"))


def one_by_one(models: Path, text: str) -> list[tuple[float, bool]]:
    """Of each piece, hidden alone: its log-probability by the whole vocabulary's logits, and whether it is first."""
    model: Any = load(models / "language", "fill-mask", k=1)
    task = model.task
    encoded = task.reader.sequence(task.reader.encode([text])[0])
    found = []
    for place in range(1, len(encoded.ids) - 1):
        ids = encoded.ids.copy()
        ids[place] = task.mask
        hidden = EncodedText(ids=ids, types=encoded.types, masked=np.array([place]))
        with torch.no_grad():
            laid = collate_texts([hidden], Cube.single())
            h = task.model.bert(laid.batch)
            rows = laid.batch.masked[:1]
            logits = task.model.masked_lm(h, rows, task.model.bert.embeddings.tokens.weight)[0]
        told = logits.log_softmax(0)
        found.append((float(told[encoded.ids[place]]), int(logits.argmax()) == encoded.ids[place]))
    return found


@pytest.mark.parametrize("batch_tokens", [1, 50, 4000])
def test_each_piece_is_hidden_in_turn(models: Path, batch_tokens: int) -> None:
    model = load(models / "language", "score", batch_tokens=batch_tokens)
    found = model.predict(TEXTS)
    for text, scored in zip(TEXTS, found, strict=True):
        wanted = one_by_one(models, text)
        assert [piece.log_probability for piece in scored.pieces] == pytest.approx([p for p, _ in wanted], abs=SAME)
        assert [piece.likeliest for piece in scored.pieces] == [right for _, right in wanted]
        assert scored.score == pytest.approx(sum(p for p, _ in wanted), abs=SAME)
        assert scored.perplexity == pytest.approx(math.exp(-scored.score / len(wanted)))
        assert scored.accuracy == sum(right for _, right in wanted) / len(wanted)
    assert model.tokens == sum(len(one.pieces) * (len(one.pieces) + 2) for one in found)


def test_a_share_is_hidden_at_once_the_same_whatever_the_batches(models: Path) -> None:
    few, many = (
        load(models / "language", "score", masked_share=0.3, seed=5, batch_tokens=tokens).predict(TEXTS)
        for tokens in (1, 4000)
    )
    other = load(models / "language", "score", masked_share=0.3, seed=6).predict(TEXTS)
    turns = load(models / "language", "score").predict(TEXTS)
    for one, two, whole in zip(few, many, turns, strict=True):
        assert len(one.pieces) == max(1, round(0.3 * len(whole.pieces)))
        assert [each.piece for each in one.pieces] == [each.piece for each in two.pieces]
        assert one.score == pytest.approx(two.score, abs=SAME)
        places = iter(each.piece for each in whole.pieces)
        assert all(each.piece in places for each in one.pieces), "in their order"
    assert [one.pieces for one in few] != [one.pieces for one in other]
    alone = load(models / "language", "score", masked_share=1e-9).predict(["hill"])[0]
    assert alone.score == pytest.approx(load(models / "language", "score").predict(["hill"])[0].score, abs=SAME)


def test_what_is_guessed_counts(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def piece_losses(_model: Any, texts: list[EncodedText]) -> tuple[torch.Tensor, torch.Tensor]:
        """Guesses every piece at an odd place, with a loss of a tenth of the place."""
        places = torch.tensor([int(text.masked[0]) for text in texts])
        hidden = torch.tensor([int(text.hidden[0]) for text in texts if text.hidden is not None])
        return places / 10, torch.where(places % 2 == 1, hidden, -1)

    monkeypatch.setattr(score, "piece_losses", piece_losses)
    model = load(models / "language", "score", batch_tokens=30)
    three, one = model.predict(["the fox went", "hill"])
    assert [piece.log_probability for piece in three.pieces] == pytest.approx([-0.1, -0.2, -0.3])
    assert [piece.likeliest for piece in three.pieces] == [True, False, True]
    assert (three.accuracy, one.accuracy) == (2 / 3, 1)
    assert model.task.findings == "; 4 pieces hidden, loss 0.1750 nats, perplexity 1.19, 75.00% guessed"


def on_cube(shape: tuple[int, int, int, int], models: Path) -> tuple[list[Scored], str]:
    x, y, z, data = shape
    model = load(models / "language", "score", cube=Cube(x, y, z, data=data))
    return model.predict(TEXTS), model.task.findings


@pytest.mark.slow
def test_a_score_does_not_depend_on_the_cube(models: Path) -> None:
    wanted = load(models / "language", "score").predict(TEXTS)
    for found, told in run_ranks(4, on_cube, (1, 2, 1, 2), models):
        assert told.startswith("; 36 pieces hidden, loss ")
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine.score == pytest.approx(theirs.score, abs=len(theirs.pieces) * SAME)
            assert [piece.likeliest for piece in mine.pieces] == [piece.likeliest for piece in theirs.pieces]


def test_the_command(models: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = str(models / "language")
    (wanted, second) = load(folder, "score").predict(["the fox", "hill"])
    assert main(["score", folder, "the fox", "hill", "--pieces"]) == 0
    captured = capfd.readouterr()
    first, other = (json.loads(line) for line in captured.out.splitlines())
    assert first["score"] == pytest.approx(wanted.score, abs=SAME)
    assert [each["piece"] for each in first["pieces"]] == ["the", "fox"]
    assert (first["tokens"], other["tokens"]) == (2, 1)
    loss = -(wanted.score + second.score) / 3
    assert f"; 3 pieces hidden, loss {loss:.4f} nats, perplexity {math.exp(loss):,.2f}, " in captured.err
    assert main(["score", folder, "the fox"]) == 0
    assert capfd.readouterr().out.startswith(f"{wanted.score:.3f} nats, perplexity ")
    assert main(["score", folder, "hill", "--json"]) == 0
    assert list(json.loads(capfd.readouterr().out)) == ["score", "tokens", "perplexity", "accuracy"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"masked_share": 0.0}, r"masked_share must be above 0 and at most 1\. Got 0\.0"),
        ({"masked_share": 1.5}, r"masked_share.*1\.5"),
        ({"masked_share": math.nan}, r"masked_share.*nan"),
        ({"seed": -1}, r"seed.*-1"),
    ],
)
def test_what_cannot_be_asked(models: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(models / "language", "score", **options)
    with pytest.raises(ValueError, match='text 1: "text" has no token'):
        load(models / "language", "score").predict(["a", ""])
    with pytest.raises(ValueError, match=r"text 0: .* tokens with the special ones"):
        load(models / "language", "score", max_length=5, too_long="refuse").predict([TEXTS[1]])
    with pytest.raises(ValueError, match="score needs a model with the head masked_lm"):
        load(models / "classes", "score")
