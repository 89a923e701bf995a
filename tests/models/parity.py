"""Models against their twins on one device, and against the same in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from models.bert import BertConfig, BertForPreTraining
from tensor3d import Cube, clip_grad_norm_
from tensor3d.data import Pack
from tests.models.toy import Shape, lay, one_by_one, totals, toy_config, toy_packs
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


def check_against_plain(
    model: nn.Module, loss: Callable[[], Tensor], plain_loss: Callable[[dict[str, Tensor]], Tensor]
) -> None:
    """In fp64 on one device: `loss()` of a model and all gradients are those of a function of its parameters."""
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    ours = loss()
    ours.backward()
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    wanted = plain_loss(leaves)
    wanted.backward()
    assert error(ours, wanted) <= 1e-12
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert leaves[name].grad is not None, name
        assert error(parameter.grad, leaves[name].grad) <= 1e-9, name  # type: ignore[arg-type]


def check_bert_against_plain(
    config: BertConfig, plain_bert: Callable[[dict[str, Tensor], BertConfig, Pack], tuple[Tensor, Tensor]]
) -> None:
    """The same of a BERT, with the sums of both losses of one sequence by `plain_bert`."""
    packs, cube = toy_packs(config.vocab, 9), Cube.single()
    cube.manual_seed(5)
    model = BertForPreTraining(config, cube)
    targets, sequences = totals(packs)

    def plain_loss(leaves: dict[str, Tensor]) -> Tensor:
        loss = torch.zeros(())
        for pack in one_by_one(packs):
            mlm, nsp = plain_bert(leaves, config, pack)
            loss = loss + mlm / targets + nsp / sequences
        return loss

    check_against_plain(model, lambda: model(lay(packs, cube), targets, sequences).loss, plain_loss)
