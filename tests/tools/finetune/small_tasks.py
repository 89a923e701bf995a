"""Tasks of fine-tuning on a very small model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from models.bert import BertConfig
from models.bert.text_batches import EncodedText, collate_texts
from tensor3d import Cube
from tests.dtensors import LocalSGD
from tests.tools.squad.small import PIECES

CONFIG = BertConfig(
    layers=1, hidden=16, heads=2, vocab=len(PIECES), positions=32, dropout=0.0, attention_dropout=0.0, std=0.3
)


def steps_of(
    task: Any,
    cube: Cube,
    texts: Callable[[Any], Sequence[EncodedText]],
    *,
    steps: int,
    micro_batches: tuple[int, int],
    padded: bool = False,
) -> tuple[list[float], dict[str, float]]:
    """Losses of a few steps of two micro-batches, and metrics.

    Args:
        texts: those of an example.
        micro_batches: examples of each.
    """
    cube.manual_seed(0)
    model = task.make_model(CONFIG, cube)
    optimizer = LocalSGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(steps):
        examples = [task.train[(step * 7 + place) % len(task.train)] for place in range(sum(micro_batches))]
        targets = sum(example.targets for example in examples)
        total = 0.0
        for some in (examples[: micro_batches[0]], examples[micro_batches[0] :]):
            laid = collate_texts([text for example in some for text in texts(example)], cube, alone=padded)
            loss = task.loss(model, laid, some, targets)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, task.evaluate(model).metrics
