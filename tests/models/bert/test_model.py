"""BERT on a cube equals BERT on one device: loss, every gradient, ten optimiser steps; packed equals one by one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.bert import PRESETS, BertConfig, BertForPreTraining
from tensor3d import Cube, clip_grad_norm_, local
from tensor3d.data import Pack
from tensor3d.distributed.collectives import all_reduce
from tests.models.parity import ODD, check_bert_against_plain, loss_and_gradients
from tests.models.toy import FAMILIES, Shape, lay, one_by_one, totals, toy_config, toy_packs
from tests.ranks import run_ranks
from tests.single_device_reference import (
    SHAPES_AND_TYPES,
    TOLERANCE,
    error,
    fast_alone,
    gradient_errors,
    make_twins,
    name_of,
    ranks_of,
    worst,
)

VOCABULARY_SHAPES = [(2, 2, 2, 1), (1, 8, 1, 1)]
BERTS = 30522


@pytest.mark.parametrize(("shape", "dtype"), SHAPES_AND_TYPES)
def test_parity(shape: Shape, dtype: torch.dtype) -> None:
    results = run_ranks(ranks_of(shape), loss_and_gradients, shape, ODD, dtype)
    name, value = worst(results)
    assert value <= TOLERANCE[dtype], f"{name} differs by {value}"
    if dtype == torch.float64:
        assert max(result["norm"] for result in results) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("shape", VOCABULARY_SHAPES, ids=name_of)
def test_parity_with_berts_vocabulary(shape: Shape) -> None:
    name, value = worst(run_ranks(ranks_of(shape), loss_and_gradients, shape, BERTS, torch.float64))
    assert value <= 1e-9, f"{name} differs by {value}"


@pytest.mark.parametrize("shape", fast_alone((2, 1, 2, 1), (1, 2, 2, 2), (2, 2, 2, 1)))
def test_parity_of_masked_tokens_alone(shape: Shape) -> None:
    """With a decoder of its own: the tied one comes with both objectives."""
    body = partial(loss_and_gradients, next_sentence=False, tied=False)
    name, value = worst(run_ranks(ranks_of(shape), body, shape, ODD, torch.float64))
    assert value <= 1e-9, f"{name} differs by {value}"


def test_masked_tokens_alone_are_that_part_of_both_objectives() -> None:
    """With the same weights: its loss, and the gradients that this loss has."""
    cube = Cube.single()
    alone, both = (BertForPreTraining(toy_config(ODD, next_sentence=asked), cube) for asked in (False, True))
    weights = dict(both.named_parameters())
    with torch.no_grad():
        for name, parameter in alone.named_parameters():
            parameter.copy_(weights.pop(name))
    assert {name.split(".")[0] for name in weights} == {"pooler", "next_sentence"}
    packs = toy_packs(ODD, 4)
    batch, wanted, none = lay(packs, cube), totals(packs), 10**12  # so many sequences that their losses are nothing
    ours, theirs = alone(batch, *wanted), both(batch, wanted[0], none)
    assert ours.loss == ours.mlm_loss == theirs.mlm_loss
    assert ours.sums.tolist()[2::2] == [0.0, 0.0]
    ours.loss.backward()
    theirs.loss.backward()
    wanted_gradients = {name: parameter.grad for name, parameter in both.named_parameters()}
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted_gradients[name], rtol=1e-5, atol=1e-8)


def _parts(shape: Shape) -> tuple[bool, float]:
    """Whether gradients are the same bits with the loss left in parts, and how far these are from adding up."""
    cube, found = Cube(*shape), []
    for reduce_loss in (True, False):
        cube.manual_seed(3)
        model, packs = BertForPreTraining(toy_config(ODD), cube), toy_packs(ODD, 16)
        output = model(lay(packs, cube), *totals(packs), reduce_loss=reduce_loss)
        output.loss.backward()
        found.append((output.sums, [local(parameter.grad) for parameter in model.parameters()]))  # type: ignore[arg-type]
    (whole, gradients), (parts, others) = found
    assert not torch.equal(whole, parts)
    same = all(map(torch.equal, gradients, others))
    return same, error(all_reduce(parts, cube.over("data", "x", "z")).wait(), whole)


@pytest.mark.parametrize("shape", fast_alone((1, 2, 1, 2), (2, 2, 2, 1)))
def test_a_loss_in_parts_has_the_same_gradients(shape: Shape) -> None:
    for same, off in run_ranks(ranks_of(shape), _parts, shape):
        assert same
        assert off <= 1e-6


@pytest.mark.slow
def test_parity_of_pre_layer_norm() -> None:
    body = partial(loss_and_gradients, norm="pre")
    name, value = worst(run_ranks(8, body, (2, 2, 2, 1), ODD, torch.float64))
    assert value <= 1e-9, f"{name} differs by {value}"


@pytest.mark.slow
def test_parity_on_27_ranks() -> None:
    body = partial(loss_and_gradients, hidden=144, heads=24, inner=288)
    results = run_ranks(27, body, (3, 3, 3, 1), ODD, torch.float64, timeout=600.0)
    name, value = worst(results)
    assert value <= TOLERANCE[torch.float64], f"{name} differs by {value}"
    assert max(result["norm"] for result in results) <= 1e-10


def ten_steps(shape: Shape) -> list[float]:
    torch.set_default_dtype(torch.float64)
    cube, model, single, twin = make_twins(lambda c: BertForPreTraining(toy_config(ODD), c), shape)
    differences = []
    trainees = [(cube, model, _adam(model)), (single, twin, _adam(twin))]
    for step in range(10):
        packs, losses = toy_packs(ODD, 16, seed=step), []
        for each, trained, optimizer in trainees:
            output = trained(lay(packs, each), *totals(packs))
            output.loss.backward()
            clip_grad_norm_(trained.parameters(), 1.0, each)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(output.loss.detach())
        differences.append(error(*losses))
    return differences


def _adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, 2, 1), (1, 2, 4, 1), (1, 2, 2, 2)], ids=name_of)
def test_ten_optimiser_steps_give_the_same_losses(shape: Shape) -> None:
    for differences in run_ranks(ranks_of(shape), ten_steps, shape):
        assert len(differences) == 10
        assert max(differences) <= 1e-9, differences


def packed_against_singles(shape: Shape, family: str) -> dict[str, float]:
    """The packs on the cube, and each sequence alone, one after another, on one device."""
    torch.set_default_dtype(torch.float64)
    packs = toy_packs(ODD, 16)
    config = toy_config(ODD, **FAMILIES[family])
    cube, model, single, twin = make_twins(lambda c: BertForPreTraining(config, c), shape)
    targets, sequences = totals(packs)
    packed = model(lay(packs, cube), targets, sequences)
    packed.loss.backward()
    alone = torch.zeros(())
    for pack in one_by_one(packs):
        output = twin(lay([pack], single, capacity=int(pack.lengths[0])), targets, sequences)
        output.loss.backward()
        alone += output.loss.detach()
    return {"loss": error(packed.loss, alone)} | gradient_errors(model, twin)


@pytest.mark.parametrize(
    ("shape", "family"),
    [
        ((2, 1, 2, 1), "bert"),
        *(
            pytest.param(shape, family, marks=pytest.mark.slow)
            for shape, family in (
                ((1, 1, 1, 1), "modernbert"),
                ((2, 2, 2, 1), "bert"),
                ((1, 2, 2, 1), "roberta"),
                ((1, 2, 2, 1), "mpnet"),
                ((1, 2, 2, 1), "electra"),
                ((1, 2, 2, 1), "modernbert"),
                ((2, 2, 2, 1), "deberta-v2"),
            )
        ),
    ],
)
def test_packed_equals_one_by_one(shape: Shape, family: str) -> None:
    name, value = worst(run_ranks(ranks_of(shape), packed_against_singles, shape, family))
    assert value <= 1e-9, f"{name} differs by {value}"


# --- the single-device model against plain PyTorch -----------------------------------------------------------------


def plain_bert(p: dict[str, Tensor], config: BertConfig, pack: Pack) -> tuple[Tensor, Tensor]:
    """Sums of both losses of one sequence, written with nothing of ours."""
    ids, types = torch.from_numpy(pack.ids), torch.from_numpy(pack.types)
    n, hidden = len(ids), config.hidden

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (hidden,), p[f"{name}.weight"], p[f"{name}.bias"], config.eps)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])

    tables = "bert.embeddings.{}.weight"
    words = p[tables.format("tokens")]
    h = words[ids] + p[tables.format("positions")][:n] + p[tables.format("types")][types]
    h = norm(h, "bert.embeddings.norm")
    for i in range(config.layers):
        at = f"bert.layers.{i}"
        q, k, v = linear(h, f"{at}.attention.qkv").view(n, config.heads, 3, -1).permute(2, 1, 0, 3)
        weights = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
        mixed = (weights @ v).transpose(0, 1).reshape(n, hidden)
        h = norm(h + linear(mixed, f"{at}.attention.out"), f"{at}.attention_norm")
        h = norm(h + linear(F.gelu(linear(h, f"{at}.mlp.up")), f"{at}.mlp.down"), f"{at}.mlp_norm")
    guessed = norm(F.gelu(linear(h[torch.from_numpy(pack.masked)], "masked_lm.dense")), "masked_lm.norm")
    logits = F.linear(guessed, words, p["masked_lm.projection.bias"])
    mlm = F.cross_entropy(logits, torch.from_numpy(pack.masked_labels), reduction="sum")
    pair = linear(torch.tanh(linear(h[:1], "pooler.dense")), "next_sentence")
    return mlm, F.cross_entropy(pair, torch.from_numpy(pack.next_labels), reduction="sum")


@pytest.mark.usefixtures("fp64")
def test_single_device_equals_plain_pytorch() -> None:
    check_bert_against_plain(toy_config(ODD), plain_bert)


# --- configuration -------------------------------------------------------------------------------------------------


def test_presets_are_the_published_sizes() -> None:
    sizes = {name: (c.layers, c.hidden, c.heads, c.inner_size) for name, c in PRESETS.items()}
    assert sizes == {
        "tiny": (2, 128, 2, 512),
        "mini": (4, 256, 4, 1024),
        "small": (4, 512, 8, 2048),
        "base": (12, 768, 12, 3072),
        "large": (24, 1024, 16, 4096),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 7}, r"hidden must divide by heads=7. Got 64"),
        ({"layers": 0}, r"layers must be at least 1. Got 0"),
        ({"dropout": 1.0}, r"dropout.*\b0.*\b1.*\b1.0"),
        ({"norm": "sideways"}, r"norm must be"),
    ],
)
def test_bad_sizes(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy_config(ODD, **changes)


def build_on_wrong_cube(shape: Shape, changes: dict[str, object]) -> str:
    cube = Cube(*shape)
    with pytest.raises(ValueError, match="must divide by") as problem:
        BertForPreTraining(toy_config(ODD, **changes), cube)
    return str(problem.value)


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        ((1, 4, 1, 1), {"heads": 2}, "heads must divide by y=4. Got 2."),
        ((1, 1, 3, 1), {}, "hidden must divide by z=3. Got 64."),
        ((1, 4, 1, 1), {"inner": 90}, "out_features must divide by y=4. Got 90."),
    ],
)
def test_sizes_that_do_not_divide_are_named_on_every_rank(
    shape: Shape, changes: dict[str, object], message: str
) -> None:
    for told in run_ranks(ranks_of(shape), build_on_wrong_cube, shape, changes):
        assert told.startswith(message)


def position_beyond_the_table() -> str:
    cube = Cube.single()
    model = BertForPreTraining(toy_config(ODD, positions=16), cube)
    with pytest.raises(ValueError, match="and below 16") as problem:
        model(lay(toy_packs(ODD, 1), cube), 1, 1)
    return str(problem.value)


def test_a_sequence_longer_than_the_position_table() -> None:
    assert "Got values from" in position_beyond_the_table()
