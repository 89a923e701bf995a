"""BERT with the heads of fine-tuning (Devlin et al. 2018, §4 and §5.3): one answer a text, the span of an answer in
it, or a tag for each of its tokens.

M tokens of the cube, H hidden size, C slots for texts of the cube; c outputs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.bert.config import BertConfig
from models.bert.embedding import Pooling, last_of_texts, mean_of_texts, pooled_vectors
from models.bert.huggingface.from_pretrained import Pretrained, PretrainedClassifier
from models.bert.model import BertForPreTraining, BertModel, Pooler, PredictionHead
from models.bert.text_batches import EncodedText, TextBatch, collate_texts
from tensor3d import (
    Cube,
    Dropout3D,
    SmallHead3D,
    all_reduce_replicated,
    gather_rows,
    local_rows,
    redistribute,
    select,
)
from tensor3d.attention import Backend
from tensor3d.data.packed_batch import IGNORED, PackedBatch
from tensor3d.distributed.collectives import all_gather
from tensor3d.layers.attention import Recompute
from tensor3d.layers.heads import vocab_topk
from tensor3d.layers.loss import cross_entropy
from tensor3d.sharding.activation_layout import Face, other


class _BertClassifier(PretrainedClassifier):
    """The encoder and the dropout in front of a head, which a subclass adds in `_add_head`.

    Args:
        outputs: c: those of the head.
        dropout: of what the head reads. Default: as of hidden states.
        backend, recompute, reshard_after_forward: as in `BertModel`.

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
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__()
        if outputs < 1:
            raise ValueError(f"outputs must be at least 1. Got {outputs}.")
        self.config, self.outputs, self.cube = config, outputs, cube
        self.bert = BertModel(
            config, cube, backend=backend, recompute=recompute, reshard_after_forward=reshard_after_forward
        )
        self.dropout = Dropout3D(config.dropout if dropout is None else dropout, cube)
        self._add_head()

    def _add_head(self) -> None:
        raise NotImplementedError


class BertForSequenceClassification(_BertClassifier):
    """The encoder, the pooler or a prediction head, or neither of them (`BertConfig.before_classifier`), and a narrow
    head: classes of a text or a pair, or a number for it (`outputs=1`, regression)."""

    def _add_head(self) -> None:
        config, cube = self.config, self.cube
        if config.before_classifier == "prediction_head":
            self.prediction_head = PredictionHead(config, cube)
        elif config.before_classifier == "pooler":
            self.pooler = Pooler(config, cube)
        self.classifier = text_classifier(config, self.outputs, cube)

    def logits(self, batch: PackedBatch) -> Tensor:
        """(C/xz, c), fp32 at least: those of this rank's slots on face y, the same on all members of y."""
        return self.classifier(self.dropout(self._vectors(self.bert(batch), batch)))

    def _vectors(self, h: Tensor, batch: PackedBatch) -> Tensor:
        """(C/xz, H/y) on face y."""
        if self.config.pooling == "score":
            return redistribute(select(h, last_of_texts(batch, self.config.pad_id), self.cube), self.cube, to="y")
        if self.config.pooling == "late":  # the mean of the classifier's answers is its answer to the mean
            return mean_of_texts(self.pooler.of_rows(h), batch, self.cube, "y")
        if self.config.pooling == "mean":
            mean = mean_of_texts(h, batch, self.cube)
            return self.prediction_head(mean) if self.config.traits.prediction_head else self.pooler.of_rows(mean)
        rows = last_of_texts(batch) if self.config.pooling == "last" else batch.first
        if self.config.traits.prediction_head:
            return self.prediction_head(select(h, rows, self.cube))
        return self.pooler(h, rows, self.dropout if self.config.traits.drops_before_pooler else None)

    def logits_of_texts(self, laid: TextBatch) -> Tensor:
        """(N, c): those of all texts of the batch, in their order and with their graph, the same on every rank: for a
        loss that compares texts. Every rank computes that loss of all of them, and passes back what is its own."""
        own = self.logits(laid.batch)
        slots = local_rows(torch.from_numpy(laid.texts).to(own.device), self.cube)
        places = torch.where(slots < 0, len(laid.lengths), slots)
        # Of each text one rank has a value, and the others 0, so that the sum is exact.
        placed = own.new_zeros(len(laid.lengths) + 1, self.outputs).index_add(0, places, own)
        return all_reduce_replicated(placed[:-1], self.cube.over("data", "x", "z"))

    def forward(
        self,
        batch: PackedBatch,
        labels: Tensor,
        texts: float,
        *,
        weights: Tensor | None = None,
        smoothing: float = 0.0,
    ) -> Tensor:
        """The loss of one micro-batch as its part of a step, the same on every rank.

        Args:
            labels: of the plane's slots. (C,) whole numbers are classes, -100 where unused, and the loss is
                cross-entropy; (C,) others are what is to be met, nan where unused, and the loss is the square of the
                error; (C, c) say of each class whether it holds, 1 or 0, nan where unused, and the loss is the mean of
                the binary cross-entropies.
            texts: of the whole step, all planes and micro-batches; with weights of classes the sum of those of their
                classes.
            weights: (c,) of classes, or, for labels (C, c), of those that hold (`pos_weight`).
            smoothing: share of a label that is spread evenly over the classes, or over holding and not.
        """
        logits = self.logits(batch)
        labels = local_rows(labels, self.cube)
        if labels.dim() == 2:
            used = ~labels.isnan()
            smooth = labels.nan_to_num() * (1 - smoothing) + smoothing / 2
            each = F.binary_cross_entropy_with_logits(logits, smooth, pos_weight=weights, reduction="none")
            losses = torch.where(used, each, 0.0).sum() / self.outputs
        elif labels.is_floating_point():
            errors = torch.where(labels.isnan(), 0.0, logits[:, 0] - labels.nan_to_num())
            losses = errors.square().sum()
        else:
            losses = F.cross_entropy(
                logits, labels, weights, reduction="sum", ignore_index=IGNORED, label_smoothing=smoothing
            )
        return all_reduce_replicated(losses / texts, self.cube.over("data", "x", "z"))


def text_classifier(config: BertConfig, outputs: int, cube: Cube) -> SmallHead3D:
    """The last linear of `BertForSequenceClassification`."""
    has_bias = config.before_classifier is not None
    return SmallHead3D(config.hidden, outputs, cube, "y", has_bias, std=config.std)


class BertForQuestionAnswering(Pretrained):
    """The encoder, maybe a prediction head, and a narrow head of two outputs a token: is it the first one of the
    answer, is it the last?

    Args:
        dropout: of what the head reads. Default: as of hidden states in the families whose library class drops any of
            it (`FamilyTraits.drops_before_answers`), else 0.
        backend, recompute, reshard_after_forward: as in `BertModel`.
    """

    head = "answers"

    def __init__(
        self,
        config: BertConfig,
        cube: Cube,
        *,
        dropout: float | None = None,
        backend: Backend = "auto",
        recompute: Recompute = "none",
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__()
        self.config, self.cube = config, cube
        self.bert = BertModel(
            config, cube, backend=backend, recompute=recompute, reshard_after_forward=reshard_after_forward
        )
        usual = config.dropout if config.traits.drops_before_answers else 0.0
        self.dropout = Dropout3D(usual if dropout is None else dropout, cube)
        self.face, self.prediction_head = _before_tokens(config, cube)
        self.answers = SmallHead3D(config.hidden, 2, cube, self.face, std=config.std)

    def logits(self, batch: PackedBatch) -> Tensor:
        """(M/x, 2), fp32 at least: of all rows of the plane, on each of its ranks: two numbers a token travel over y,
        where a sequence may be cut."""
        read = self.dropout(_behind(self.prediction_head, self.bert(batch)))
        return gather_rows(self.answers(read), self.cube, self.face)

    def forward(self, laid: TextBatch, starts: Tensor, ends: Tensor, texts: int) -> Tensor:
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
        return all_reduce_replicated(losses / (2 * texts), self.cube.over("data", "x"))


class BertForTokenClassification(_BertClassifier):
    """The encoder, maybe a prediction head, and a narrow head: a tag for each token, as of the names in a text."""

    head = "tags"

    def _add_head(self) -> None:
        self.face, self.prediction_head = _before_tokens(self.config, self.cube)
        self.tags = SmallHead3D(self.config.hidden, self.outputs, self.cube, self.face, std=self.config.std)

    def logits(self, batch: PackedBatch) -> Tensor:
        """(M/xy, c), fp32 at least: those of this rank's rows on face z, the same on all members of z. Behind a
        prediction head face y: (M/xz, c), the same on all members of y."""
        return self.tags(self.dropout(_behind(self.prediction_head, self.bert(batch))))

    def forward(self, batch: PackedBatch, labels: Tensor, targets: int) -> Tensor:
        """The loss of one micro-batch as its part of a step: cross-entropy, the mean over the labelled tokens of the
        whole step. The same on every rank.

        Args:
            labels: int64 (M/x,) of the plane's rows: tags, -100 where there is none to learn.
            targets: labelled tokens of the whole step, all planes and micro-batches.
        """
        own = local_rows(labels, self.cube, self.face)
        losses = F.cross_entropy(self.logits(batch), own, reduction="sum", ignore_index=IGNORED)
        return all_reduce_replicated(losses / targets, self.cube.over("data", "x", other(self.face)))


def _before_tokens(config: BertConfig, cube: Cube) -> tuple[Face, PredictionHead | None]:
    """What heads that look at every token read: the face, and the head in front of them, if the family has one."""
    return ("y", PredictionHead(config, cube)) if config.traits.prediction_head else ("z", None)


def _behind(head: PredictionHead | None, h: Tensor) -> Tensor:
    return h if head is None else head(h)


# ----------------------------------------------------------------------------------------------------------------------
# What a BERT says of a batch of texts: whole tensors in the order of the texts, the same on every rank, on the host.
#
# Every rank passes the same texts at the same time. Nothing here keeps a graph, and dropout is off while it works.
#
# N texts, c outputs, H hidden size, k pieces asked for


def class_logits(model: BertForSequenceClassification, texts: Sequence[EncodedText]) -> Tensor:
    """(N, c): logits of the classes, or the number that regression gives."""
    laid = collate_texts(texts, model.cube)
    with _looking(model):
        own = model.logits(laid.batch)  # (C/xz, c), copies over y
        return laid.of_texts(all_gather(own, model.cube.axis("z")).wait())


def span_logits(model: BertForQuestionAnswering, texts: Sequence[EncodedText]) -> list[Tensor]:
    """Of each text (tokens, 2): how likely each token begins and ends the answer."""
    laid = collate_texts(texts, model.cube)
    with _looking(model):
        return laid.of_tokens(model.logits(laid.batch))


def tag_logits(model: BertForTokenClassification, texts: Sequence[EncodedText]) -> list[Tensor]:
    """Of each text (tokens, c): how likely each tag is for each token."""
    laid = collate_texts(texts, model.cube)
    with _looking(model):
        return laid.of_tokens(gather_rows(model.logits(laid.batch), model.cube, model.face))


def likely_pieces(model: BertForPreTraining, texts: Sequence[EncodedText], k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest pieces of each masked place, text by text: ids (places, k), likeliest first, and their
    probabilities.

    Raises:
        ValueError: no place is masked, or k is below 1 or above the vocabulary.
    """
    cube, vocab = model.cube, model.config.vocab
    _check_masked(texts)
    laid = collate_texts(texts, cube)
    with _looking(model):
        ids, log_probabilities = vocab_topk(_piece_logits(model, laid), k, vocab, cube)
        return _of_places(laid, ids, log_probabilities.exp())


def piece_losses(model: BertForPreTraining, texts: Sequence[EncodedText]) -> tuple[Tensor, Tensor]:
    """Of each masked place, text by text: the negative log-likelihood of the piece that stood there (`hidden` of the
    text), in nats, fp32 at least; and the likeliest piece. Both (places,).

    Raises:
        ValueError: no place is masked.
    """
    _check_masked(texts)
    laid = collate_texts(texts, model.cube)
    with _looking(model):
        labels = local_rows(laid.batch.masked_labels, model.cube)
        return _of_places(laid, *cross_entropy(_piece_logits(model, laid), labels, model.config.vocab, model.cube))


def _check_masked(texts: Sequence[EncodedText]) -> None:
    if not any(len(text.masked) for text in texts):
        raise ValueError("no text has a masked place. Got none in the whole batch.")


def _piece_logits(model: BertForPreTraining, laid: TextBatch) -> Tensor:
    """(R/xz, V/y): on face y, of the plane's masked places."""
    h = model.bert(laid.batch)
    return model.masked_lm(h, model.bert.rows_of_heads(laid.batch)[0], model.bert.embeddings.tokens.weight)


def _of_places(laid: TextBatch, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two values for each of this rank's slots of masked places, as those of all places, text by text."""
    z = laid.cube.axis("z")
    return laid.of_masked(all_gather(first, z).wait()), laid.of_masked(all_gather(second, z).wait())


def sentence_vectors(
    model: BertModel, texts: Sequence[EncodedText], pooling: Pooling = "mean", dense: nn.Module | None = None
) -> Tensor:
    """(N, H): one vector of each text, of the last hidden states of all its tokens, as `pooled_vectors`; (N, D) of what
    `dense` makes of these."""
    laid = collate_texts(texts, model.cube)
    with _looking(model):
        vectors = pooled_vectors(model, laid, pooling)
        return (vectors if dense is None else dense(vectors)).cpu()


@contextmanager
def _looking(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:  # not `train()`: parts may have been in eval before
            module.training = True
