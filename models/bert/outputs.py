"""What a BERT says of a batch of texts: whole tensors in the order of the texts, the same on every rank, on the host.

Every rank passes the same texts at the same time. Nothing here keeps a graph, and dropout is off while it works.

N texts, c outputs, H hidden size, k pieces asked for
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from models.bert.model import BertForPreTraining, BertModel
from models.bert.tasks import BertForQuestionAnswering, BertForSequenceClassification
from models.bert.texts import Text, lay_texts
from tensor3d import own_rows, select
from tensor3d.collectives import all_gather, all_reduce
from tensor3d.faces import gather_plane
from tensor3d.layers.likeliest import likeliest

Pooling = Literal["cls", "mean"]


def class_logits(model: BertForSequenceClassification, texts: Sequence[Text]) -> Tensor:
    """(N, c): logits of the classes, or the number that regression gives."""
    laid = lay_texts(texts, model.cube)
    with _looking(model):
        own = model.logits(laid.batch)  # (C/xz, c), copies over y
        return laid.of_texts(all_gather(own, model.cube.axis("z")).wait())


def span_logits(model: BertForQuestionAnswering, texts: Sequence[Text]) -> list[Tensor]:
    """Of each text (tokens, 2): how likely each token begins and ends the answer."""
    laid = lay_texts(texts, model.cube)
    with _looking(model):
        return laid.of_tokens(model.logits(laid.batch))


def likely_pieces(model: BertForPreTraining, texts: Sequence[Text], k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest pieces of each masked place, text by text: ids (places, k), likeliest first, and their
    probabilities.

    Raises:
        ValueError: no place is masked, or k is below 1 or above the vocabulary.
    """
    cube, vocab = model.cube, model.config.vocab
    if not any(len(text.masked) for text in texts):
        raise ValueError("no text has a masked place. Got none in the whole batch.")
    laid = lay_texts(texts, cube)
    with _looking(model):
        h = model.bert(laid.batch)
        logits = model.masked_lm(h, model.bert.rows_of_heads(laid.batch)[0], model.bert.embeddings.tokens.weight)
        ids, log_probabilities = likeliest(logits, k, vocab, cube)
        z = cube.axis("z")
        whole = (all_gather(part, z).wait() for part in (ids, log_probabilities.exp()))
        pieces, probabilities = (laid.of_masked(part) for part in whole)
    return pieces, probabilities


def sentence_vectors(model: BertModel, texts: Sequence[Text], pooling: Pooling = "mean") -> Tensor:
    """(N, H): the last hidden state of [CLS], or the mean of those of all tokens of a text, special ones included."""
    cube = model.cube
    laid = lay_texts(texts, cube)
    with _looking(model):
        h = model(laid.batch)  # (M/xy, H/z) on face z
        if pooling == "cls":
            return laid.of_texts(gather_plane(select(h, laid.batch.first, cube), cube, "z"))
        slots = laid.batch.first.shape[0]
        sums = h.new_zeros(slots + 1, h.shape[1], dtype=torch.promote_types(h.dtype, torch.float32))
        sums.index_add_(0, own_rows(laid.owner, cube, "z"), h.to(sums.dtype))
        whole = all_reduce(sums[:slots], cube.axis("y")).wait()
        columns = all_gather(whole, cube.axis("z")).wait().chunk(cube.axis("z").size)
        return laid.of_texts(torch.cat(columns, 1)) / torch.from_numpy(laid.lengths).unsqueeze(1)


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
