"""Equal texts have equal numbers, whatever batch they are computed in: here each call and place has other last bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.bert.text_batches import EncodedText, distinct_texts
from tests.tools.asked import TEXTS, write_models
from tools.finetune.embed_task import EmbedTask
from tools.finetune.rank_task import RankTask
from tools.predict import load
from tools.predict.rank import Rank, RankQuery
from tools.predict.vector_search import nearest

LONG, SHORT = TEXTS[1], TEXTS[3]


class Rounding:
    """In place of `sentence_vectors` and `class_logits`: each text of each call has other last bits."""

    def __init__(self) -> None:
        self.texts = 0

    def __call__(self, model: Any, texts: Sequence[EncodedText], pooling: str = "mean", dense: Any = None) -> Tensor:
        found = torch.stack(
            [torch.arange(32.0) + len(text.ids) + 1e-3 * (self.texts + i) for i, text in enumerate(texts)]
        )
        self.texts += len(texts)
        return found


def text(*ids: int, types: int = 0, masked: Sequence[int] = ()) -> EncodedText:
    return EncodedText(ids=np.array(ids), types=np.full(len(ids), types), masked=np.array(masked, dtype=np.int64))


def test_what_the_model_reads_differently_is_no_equal_text() -> None:
    texts = [text(1, 2), text(1, 2, 3), text(1, 2), text(1, 2, types=1), text(1, 2, masked=[1]), text(1, 2, 3)]
    first, of_texts = distinct_texts(texts)
    assert of_texts == [0, 1, 0, 2, 3, 1]
    assert first == [texts[0], texts[1], texts[3], texts[4]]


@pytest.mark.parametrize("batch_tokens", [1, 10_000])
def test_vectors_of_equal_texts_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_tokens: int) -> None:
    rounding = Rounding()
    monkeypatch.setattr("tools.predict.embed.sentence_vectors", rounding)
    model = load(write_models(tmp_path) / "language", "embed", batch_tokens=batch_tokens)
    asked = [LONG, SHORT, LONG, LONG, SHORT]
    long, short, *others = [each.vector for each in model.predict(asked)]
    assert rounding.texts == 2
    assert [bytes(each) for each in others] == [bytes(each) for each in (long, long, short)]
    assert bytes(long) != bytes(short)
    again = model.predict([SHORT])[0].vector
    assert bytes(again) == bytes(short)
    monkeypatch.setattr("tools.predict.embed._KEPT_BYTES", 32 * 4)  # of one text: the latest stays
    model.predict([LONG]), model.predict([LONG])
    assert rounding.texts == 2
    model.predict([SHORT]), model.predict([LONG])
    assert rounding.texts == 4


def test_scores_of_equal_passages_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text(1, 2, 3), text(4, 5), text(1, 2, 3), text(4, 5)]
    monkeypatch.setattr("tools.predict.rank.class_logits", Rounding())
    asked: Any = SimpleNamespace(model=None, batch_tokens=1, _ranked=lambda query, scores: scores.tolist())
    passages = [SimpleNamespace(id=None, text="")] * 4
    (scores,) = Rank.results(asked, [RankQuery("q", passages, texts)])  # type: ignore[arg-type]
    assert scores[0] == scores[2] != scores[1] == scores[3]


def test_metrics_are_of_equal_numbers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text(1, 2, 3), text(4, 5), text(1, 2, 3)]
    monkeypatch.setattr("tools.finetune.embed_task.sentence_vectors", Rounding())
    monkeypatch.setattr("tools.finetune.rank_task.class_logits", Rounding())
    task: Any = SimpleNamespace(_parts={"dev": SimpleNamespace(texts=texts)}, _slots=1)
    model: Any = SimpleNamespace(bert=None, pooling="mean", dense=None)
    vectors = EmbedTask.outputs(task, model, "dev")
    assert vectors.shape == (3, 32)
    assert bytes(vectors[0]) == bytes(vectors[2]) != bytes(vectors[1])
    task._parts["dev"].texts = [texts[:2], texts[1:]]
    (first, second), (also_second, also_first) = RankTask.outputs(task, model, "dev")
    assert (first, second) == (also_first, also_second)
    assert first != second


def test_cosines_of_equal_vectors_are_equal_and_the_first_comes_first() -> None:
    """A product in fp32 gives the last of 130 equal documents another cosine than the first ones."""
    draw = np.random.default_rng(0)
    query, one = draw.normal(size=(2, 100)).astype(np.float32)
    scores, places = nearest(torch.from_numpy(query[None]), np.stack([one] * 130), 130)
    assert len(scores.unique()) == 1
    assert places[0].tolist() == list(range(130))
