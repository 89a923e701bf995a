"""BERT with the heads of fine-tuning (Devlin et al. 2018, §4): one answer a text, or the span of an answer in it.

M tokens of the cube, H hidden size, C slots for texts of the cube; c outputs
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.bert.config import BertConfig
from models.bert.model import BertModel, Pooler
from models.bert.pretrained.loading import Pretrained, PretrainedClassifier
from models.bert.texts import LaidTexts
from tensor3d import Cube, Dropout3D, NarrowHead3D, gather_rows, own_rows, sum_copies
from tensor3d.attention import Backend
from tensor3d.data.batch import IGNORED, PackedBatch
from tensor3d.layers.attention import Recompute


class BertForSequenceClassification(PretrainedClassifier):
    """The encoder, the pooler and a narrow head: classes of a text or a pair, or a number for it.

    Args:
        outputs: c: classes, or 1 for regression.
        dropout: of the pooled vector. Default: as of hidden states.
        backend, recompute, keep_gathered: as in `BertModel`.

    Raises:
        ValueError: fewer than one output, or see `BertModel`.
    """

    def __init__(
        self,
        config: BertConfig,
        outputs: int,
        cube: Cube,
        *,
        dropout: float | None = None,
        backend: Backend = "auto",
        recompute: Recompute = "none",
        keep_gathered: bool = False,
    ) -> None:
        super().__init__()
        if outputs < 1:
            raise ValueError(f"outputs must be at least 1. Got {outputs}.")
        self.config, self.outputs, self.cube = config, outputs, cube
        self.bert = BertModel(config, cube, backend=backend, recompute=recompute, keep_gathered=keep_gathered)
        self.pooler = Pooler(config, cube)
        self.dropout = Dropout3D(config.dropout if dropout is None else dropout, cube)
        self.classifier = NarrowHead3D(config.hidden, outputs, cube, "y", std=config.std)

    def logits(self, batch: PackedBatch) -> Tensor:
        """(C/xz, c), fp32 at least: those of this rank's slots on face y, the same on all members of y."""
        return self.classifier(self.dropout(self.pooler(self.bert(batch), batch.first)))

    def forward(self, batch: PackedBatch, labels: Tensor, texts: int) -> Tensor:
        """The loss of one micro-batch as its part of a step, the same on every rank.

        Args:
            labels: (C,) of the plane's slots. Whole numbers are classes, -100 where unused, and the loss is
                cross-entropy; others are what is to be met, nan where unused, and the loss is the square of the error.
            texts: of the whole step, all planes and micro-batches.
        """
        logits = self.logits(batch)
        labels = own_rows(labels, self.cube)
        if labels.is_floating_point():
            errors = torch.where(labels.isnan(), 0.0, logits[:, 0] - labels.nan_to_num())
            losses = errors.square().sum()
        else:
            losses = F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)
        return sum_copies(losses / texts, self.cube.over("data", "x", "z"))


class BertForQuestionAnswering(Pretrained):
    """The encoder and a narrow head of two outputs a token: is it the first one of the answer, is it the last?

    Args:
        backend, recompute, keep_gathered: as in `BertModel`.
    """

    def __init__(
        self,
        config: BertConfig,
        cube: Cube,
        *,
        backend: Backend = "auto",
        recompute: Recompute = "none",
        keep_gathered: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.cube = config, cube
        self.bert = BertModel(config, cube, backend=backend, recompute=recompute, keep_gathered=keep_gathered)
        self.answers = NarrowHead3D(config.hidden, 2, cube, "z", std=config.std)

    def logits(self, batch: PackedBatch) -> Tensor:
        """(M/x, 2), fp32 at least: of all rows of the plane, on each of its ranks: two numbers a token travel over y,
        where a sequence may be cut."""
        return gather_rows(self.answers(self.bert(batch)), self.cube, "z")

    def forward(self, laid: LaidTexts, starts: Tensor, ends: Tensor, texts: int) -> Tensor:
        """The loss of one micro-batch as its part of a step: the mean of the cross-entropies of both ends, each over
        the tokens of a sequence. The same on every rank.

        Args:
            starts, ends: int64 (C,): place in its sequence of the answer's first and last token, for each slot of the
                plane; -100 where unused.
            texts: of the whole step.
        """
        batch = laid.batch
        logits = self.logits(batch)  # (rows, 2)
        slots = batch.first.shape[0]
        owner = laid.owner.unsqueeze(1).expand(-1, 2)
        shape = (slots + 1, 2)  # the last one: unused rows
        top = logits.new_full(shape, -torch.inf).scatter_reduce(0, owner, logits.detach(), "amax")
        sums = logits.new_zeros(shape).index_add(0, laid.owner, (logits - top[laid.owner]).exp())
        losses = logits.new_zeros(())
        for side, places in enumerate((starts, ends)):
            counts = places != IGNORED
            rows = torch.where(counts, batch.first + places, 0)
            log_sum = torch.where(counts, top[:slots, side], 0) + torch.where(counts, sums[:slots, side], 1).log()
            losses = losses + torch.where(counts, log_sum - logits[rows, side], 0).sum()
        return sum_copies(losses / (2 * texts), self.cube.over("data", "x"))
