"""Evaluation on the held-out documents."""

from __future__ import annotations

from collections.abc import Callable

import torch

from models.bert import BertForPreTraining
from tensor3d import Cube
from tensor3d.data import PretrainingData, evaluation_batches
from tools.feed import place
from tools.metrics import next_sentence_accuracy


@torch.no_grad()
def held_out_means(
    model: BertForPreTraining, data: PretrainingData, cube: Cube, packs_per_rank: int, goes_on: Callable[[int], bool]
) -> dict[str, float] | None:
    """Means over all packs of `data`, under the names of `EvaluationMetrics`, as far as there are any. Every rank calls
    it.

    Args:
        goes_on: asked before each batch, from 1, with the same answer on every rank; where it is no, None is returned.
    """
    model.eval()
    sums, targets, sequences = torch.zeros(5, dtype=torch.float64), 0, 0
    batches = evaluation_batches(
        data,
        packs_per_rank=packs_per_rank,
        device=cube.device,
        with_read_rows=model.bert.read_rows_only,
        **place(cube),
    )
    for number, batch in enumerate(batches, start=1):
        if not goes_on(number):
            model.train()
            return None
        output = model(batch.batches[0], 1, 1)  # sums, to be divided by what all batches have together
        sums += output.sums.double().cpu()
        targets, sequences = targets + batch.targets, sequences + batch.sequences
    model.train()
    _, mlm, nsp, correct, pairs = sums.tolist()
    means = {
        "loss": mlm / targets + nsp / sequences,
        "masked_lm_loss": mlm / targets,
        "masked_lm_accuracy": correct / targets,
    }
    accuracy = next_sentence_accuracy(pairs, nsp, sequences)
    return means if accuracy is None else means | {"next_sentence_accuracy": accuracy}
