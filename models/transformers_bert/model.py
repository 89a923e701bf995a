"""transformers' BERT on a cube, for packed batches: the encoder, and the losses of pre-training.

M tokens of the cube, H hidden size, R masked slots and C [CLS] slots of the cube, V vocabulary
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.bert import PreTrainingOutput
from models.transformers_bert.adapter import CurrentBatch, plan_for
from tensor3d import Cube, all_reduce_replicated, cross_entropy, local_rows, select
from tensor3d.attention import Backend
from tensor3d.data import PackedBatch
from tensor3d.parallelize import parallelize

# --- Which of transformers' models can be put on a cube here ----------------------------------------------------------

_ENCODER = "in packed rows each sequence attends to all of itself and to nothing else"
# A setting, the value that it must have, and why; the last one is of the heads for pre-training.
_SETTINGS: tuple[tuple[str, Any, str], ...] = (
    ("is_decoder", False, _ENCODER),
    ("add_cross_attention", False, _ENCODER),
    ("position_embedding_type", "absolute", "positions come from the table alone"),
    ("chunk_size_feed_forward", 0, "a rank has its share of the rows already, and works on them in one piece"),
    ("pruned_heads", {}, "all layers have the same heads, which are dealt to the ranks of y"),
    ("tie_word_embeddings", True, "the bias of the predictions is the decoder's, and would go untrained beside it"),
)


def check_transformers(name: str) -> None:
    """Raises ValueError unless the library is there, in a version that the class of this name knows."""
    try:
        from transformers import __version__
    except ImportError as missing:
        raise ValueError(
            f"{name} puts models of the transformers library on a cube, and it is not installed. Run "
            "pip install '.[transformers]'."
        ) from missing
    if int(__version__.partition(".")[0]) < 5:
        raise ValueError(
            f"{name} needs transformers 5 or newer. transformers {__version__} is installed. Run "
            "pip install '.[transformers]'."
        )


def check_supported(model: nn.Module) -> None:
    """Raises ValueError unless PackedBert can take the model: `BertForPreTraining` or `BertModel`, as an encoder.

    Refused are cross-attention, relative positions, a chunked feed-forward and pruned heads too, and all models where
    transformers is not installed.
    """
    check_transformers("PackedBert")
    from transformers import BertForPreTraining, BertModel

    if not isinstance(model, (BertForPreTraining, BertModel)):
        raise ValueError(
            f"PackedBert takes a transformers BertForPreTraining or BertModel. Got a {type(model).__name__}. For "
            "another head, give it the BertModel inside and put the head on its result. For another model, plan "
            "for tensor3d.parallelize.parallelize as models/transformers_bert/adapter.py does."
        )
    for setting, wanted, why in _SETTINGS if hasattr(model, "cls") else _SETTINGS[:-1]:
        found = getattr(model.config, setting, wanted)  # versions of the library differ in which of these they have
        if found != wanted:
            raise ValueError(
                f"PackedBert needs config.{setting}={wanted!r}: {why}. Got {found!r}. Make the model with "
                f"{setting}={wanted!r}."
            )


# --- transformers' BERT on a cube, for packed batches -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """What the encoder makes of one plane's micro-batch."""

    hidden: Tensor
    """(M/xy, H/z) on face z: the last layer's hidden states. `tensor3d.gather` puts them together to be looked at."""
    pooled: Tensor | None
    """(C/xz, H/y) on face y: one vector for each slot of `batch.first`; None for a model without a pooler."""
    layers: tuple[Tensor, ...]
    """Hidden states before the first layer and after each, as `hidden`; empty unless asked for."""


class PackedBert(nn.Module):
    """`transformers.BertForPreTraining` or `BertModel` on a cube, with the weights that it has; see `plan.py`.

    Every rank constructs it at the same time, after `cube.manual_seed` where the model has dropout. The given model
    stays as it was. `model` is its counterpart on the cube: the library's own modules around 3-D layers, with the
    library's names, so that `tensor3d.parallelize.full_state_dict(packed.model, cube)` loads back into the original.

    Gradient checkpointing works as the library has it, if it is enabled in the given model.

    Args:
        hf_model: the same on all ranks.
        backend: of the attention.

    Raises:
        ValueError: another model, one with parts that do not work on packed rows (`check_supported`), sizes that do
            not divide by the cube's, or transformers is not installed.
    """

    def __init__(self, hf_model: nn.Module, cube: Cube, *, backend: Backend = "auto") -> None:
        super().__init__()
        check_supported(hf_model)
        self.cube, self.current = cube, CurrentBatch()
        self.model: Any = parallelize(hf_model, cube, plan_for(hf_model, self.current, backend))
        self._leave_masks_out()
        self._recompute_with_its_batch()

    def forward(self, batch: PackedBatch, targets: int, sequences: int) -> PreTrainingOutput:
        """The loss of one micro-batch as its part of a step; logits are computed for the masked rows alone.

        Args:
            batch: one plane's, as `tensor3d.data.collate` lays it out for this rank.
            targets: masked positions of the whole step, all planes and micro-batches; so the sum of the micro-batches'
                losses is the step's mean, whatever the accumulation and the cube.
            sequences: next-sentence labels of the whole step.

        Raises:
            ValueError: the model has no heads for pre-training, or see the layers.
        """
        if not hasattr(self.model, "cls"):
            raise ValueError(
                f"the losses of pre-training need the heads of BertForPreTraining. Got a {type(self.model).__name__}. "
                "Use PackedBert.encode and heads of your own."
            )
        encoded = self.encode(batch)
        masked = select(encoded.hidden, batch.masked, self.cube)  # (R/xy, H/z) on face z
        # (R/xz, V/y) and (C/xz, 2), the latter copies over y: rows of face y
        logits, pair_logits = self.model.cls(masked, encoded.pooled)
        return _losses(logits, pair_logits, batch, targets, sequences, self.model.config.vocab_size, self.cube)

    def encode(self, batch: PackedBatch, *, all_layers: bool = False) -> Encoded:
        """One plane's micro-batch through embeddings, layers and pooler.

        Args:
            all_layers: the hidden states between the layers too, as `output_hidden_states` of the library.
        """
        with self.current.holding(batch):
            output = self.model.base_model(
                input_ids=batch.ids.unsqueeze(0),
                token_type_ids=batch.types.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                output_hidden_states=all_layers,
                return_dict=True,
            )
        return Encoded(
            hidden=output.last_hidden_state.squeeze(0),
            pooled=output.pooler_output,
            layers=tuple(h.squeeze(0) for h in output.hidden_states or ()),
        )

    def _leave_masks_out(self) -> None:
        """Without a mask given, the library makes none for SDPA, but one of rows by rows for its eager attention."""
        base = self.model.base_model
        base.config = copy.deepcopy(base.config)
        base.config._attn_implementation = "sdpa"

    def _recompute_with_its_batch(self) -> None:
        """Where the given model had gradient checkpointing enabled: backward comes when no batch is held any more."""
        for module in self.model.modules():
            checkpoint = getattr(module, "_gradient_checkpointing_func", None)
            if checkpoint is not None:
                module._gradient_checkpointing_func = partial(
                    checkpoint, use_reentrant=False, context_fn=self.current.contexts
                )


def _losses(
    logits: Tensor,
    pair_logits: Tensor,
    batch: PackedBatch,
    targets: int,
    sequences: int,
    vocab: int,
    cube: Cube,
) -> PreTrainingOutput:
    labels, pair_labels = local_rows(batch.masked_labels, cube), local_rows(batch.next_labels, cube)
    mlm, predictions = cross_entropy(logits, labels, vocab, cube)
    pair_logits = pair_logits.to(mlm.dtype)  # at least fp32
    nsp = F.cross_entropy(pair_logits, pair_labels, reduction="sum")
    with torch.no_grad():
        correct = torch.stack([(predictions == labels).sum(), (pair_logits.argmax(1) == pair_labels).sum()])
    sums = torch.cat([torch.stack([mlm.sum() / targets, nsp / sequences]), correct.to(mlm.dtype)])
    # Rows of face y lie over data, x and z, and are equal over y: one all-reduce for all four numbers.
    sums = all_reduce_replicated(sums, cube.over("data", "x", "z"))
    return PreTrainingOutput(
        loss=sums[0] + sums[1],
        mlm_loss=sums[0].detach(),
        nsp_loss=sums[1].detach(),
        mlm_correct=sums[2].detach(),
        nsp_correct=sums[3].detach(),
    )
