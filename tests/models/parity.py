"""BERT on a cube against its twin on one device."""

from __future__ import annotations

import math

import torch

from models.bert import BertForPreTraining
from tensor3d import clip_grad_norm_
from tests.models.toy import Shape, lay, totals, toy_config, toy_packs
from tests.single_device_reference import error, gradient_errors, make_twins

ODD = 67


def loss_and_gradients(shape: Shape, vocab: int, dtype: torch.dtype, **changes: object) -> dict[str, float]:
    torch.set_default_dtype(dtype)
    config, packs = toy_config(vocab, **changes), toy_packs(vocab, 72 if shape == (3, 3, 3, 1) else 16)
    cube, model, single, twin = make_twins(lambda c: BertForPreTraining(config, c), shape)
    targets, sequences = totals(packs)
    ours = model(lay(packs, cube), targets, sequences)
    theirs = twin(lay(packs, single), targets, sequences)
    ours.loss.backward()
    theirs.loss.backward()
    errors = {
        name: error(getattr(ours, name), getattr(theirs, name))
        for name in ("loss", "mlm_loss", "nsp_loss", "mlm_correct", "nsp_correct")
    }
    errors |= gradient_errors(model, twin)
    norms = [clip_grad_norm_(m.parameters(), math.inf, c) for m, c in ((model, cube), (twin, single))]
    return errors | {"norm": error(*norms)}
