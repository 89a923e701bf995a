"""An encoder with whichever heads a folder has: what is converted, and computes nothing."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from models.bert.config import BertConfig
from models.bert.model import BertModel, MaskedLMHead, Pooler
from models.bert.pretrained import Filled, Weights
from tensor3d import Cube, Dropout3D, NarrowHead3D


class Parts(nn.Module):
    """Modules under the names that they have in the models of `models.bert`; weights are unfilled.

    Args:
        heads: of "pooler", "masked_lm", "next_sentence", "classifier" and "answers".
        outputs: of the classifier.
        dropout: in front of the classifier. Default: as of hidden states.
    """

    def __init__(
        self, config: BertConfig, heads: Collection[str], outputs: int, cube: Cube, *, dropout: float | None = None
    ) -> None:
        super().__init__()
        self.config, self.cube = config, cube
        with cube.blank():
            self.bert = BertModel(config, cube)
            if "pooler" in heads:
                self.pooler = Pooler(config, cube)
            if "masked_lm" in heads:
                self.masked_lm = MaskedLMHead(config, cube)
            if "next_sentence" in heads:
                self.next_sentence = NarrowHead3D(config.hidden, 2, cube, "y", std=config.std)
            if "classifier" in heads:
                self.dropout = Dropout3D(config.dropout if dropout is None else dropout, cube)
                self.classifier = NarrowHead3D(config.hidden, outputs, cube, "y", std=config.std)
            if "answers" in heads:
                self.answers = NarrowHead3D(config.hidden, 2, cube, "z", std=config.std)


def parts_of(weights: Weights, cube: Cube, heads: Collection[str] | None = None) -> tuple[Parts, Filled]:
    """What a folder has, in fp32, on a cube: all, or the encoder with these heads. Every rank calls it; errors are
    those of `Weights.fill`."""
    outputs, dropout = weights.outputs or 0, weights.facts.get("classifier_dropout")
    cube.manual_seed(0)  # which dropout asks for, though nothing is drawn
    model = Parts(weights.config, weights.heads if heads is None else heads, outputs, cube, dropout=dropout)
    return model, weights.fill(model, cube)
