"""Models of the library by chance, on cubes: its hidden states, pooled vectors, losses and gradients."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.bert import BertConfig, BertForPreTraining, BertModel, open_weights
from models.bert.model import Pooler
from tensor3d import Cube, gather
from tensor3d.data import Pack
from tests.models.bert.huggingface.subject import gradient_errors as compared_gradients
from tests.models.bert.huggingface.subject import gradients, saved
from tests.models.padded import PACKS, of_sequences, of_tokens, padded
from tests.models.toy import CAPACITY, Shape, lay, totals, toy_packs
from tests.ranks import run_ranks
from tests.single_device_reference import error, ranks_of, worst

pytest.importorskip("transformers")

TOLERANCE = 1e-5
ACTIVATIONS = ("gelu", "gelu_new", "relu", "silu")
KINDS = ("BertForPreTraining", "BertForMaskedLM", "BertModel")


def drawn(shape: Shape, number: int) -> tuple[str, dict[str, Any]]:
    """A class of the library, and the settings of a model of it that can be cut on this cube."""
    random = np.random.default_rng([*shape, number])
    x, y, z, _ = shape
    heads = y * int(random.integers(1, 4))
    settings = {
        "hidden_act": ACTIVATIONS[number % len(ACTIVATIONS)],
        "hidden_size": heads * z * int(random.integers(3, 12)),
        "num_attention_heads": heads,
        "intermediate_size": y * int(random.integers(5, 40)),
        "num_hidden_layers": int(random.integers(1, 4)),
        "vocab_size": int(random.integers(10, 50)) * 2 * x * y * z + 1,  # which divides by no axis
        "max_position_embeddings": CAPACITY + int(random.integers(0, 9)),
        "type_vocab_size": int(random.integers(1, 4)),
        "layer_norm_eps": float(random.choice([1e-12, 1e-6, 1e-3])),
        "initializer_range": 0.05,
    }
    return KINDS[(number + y + z) % len(KINDS)], settings


def packs_for(settings: dict[str, Any]) -> list[Pack]:
    packs = toy_packs(settings["vocab_size"], PACKS)
    for pack in packs:
        pack.types[:] = pack.types % settings["type_vocab_size"]
    return packs


def direction(hidden: Tensor) -> Tensor:
    """For a loss of an encoder without heads, of which nothing cancels out."""
    return torch.randn(hidden.shape, generator=torch.Generator().manual_seed(9))


# --- the library's -------------------------------------------------------------------------------------------------


def library_step(model: Any, kind: str, packs: list[Pack]) -> dict[str, Tensor]:
    """Of the padded batch: hidden states of all tokens, pooled vectors, the losses."""
    given = padded(packs)
    labels, pairs = given.pop("labels"), given.pop("next_sentence_label")
    output = model(**given, output_hidden_states=True)
    real = given["attention_mask"].bool()
    found = {f"layer {number}": h[real] for number, h in enumerate(output.hidden_states)}
    if kind == "BertModel":
        last = found[f"layer {len(output.hidden_states) - 1}"]
        found |= {"pooled": output.pooler_output, "loss": (last * direction(last)).square().mean()}
    elif kind == "BertForMaskedLM":
        found["loss"] = found["mlm"] = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    else:
        found["mlm"] = F.cross_entropy(output.prediction_logits.flatten(0, 1), labels.flatten())
        found["nsp"] = F.cross_entropy(output.seq_relationship_logits, pairs)
        found["loss"] = found["mlm"] + found["nsp"]
        with torch.no_grad():
            found["pooled"] = model.bert.pooler(output.hidden_states[-1])
    found["loss"].backward()
    return found


# --- the cube's ----------------------------------------------------------------------------------------------------


class Encoder(torch.nn.Module):
    """The encoder and the pooler, as the library's BertModel has them."""

    def __init__(self, config: BertConfig, cube: Cube) -> None:
        super().__init__()
        self.config = config
        self.bert, self.pooler = BertModel(config, cube), Pooler(config, cube)


def from_folder(folder: Path, kind: str, cube: Cube) -> Any:
    weights = open_weights(folder)
    model = (Encoder if kind == "BertModel" else BertForPreTraining)(weights.config, cube)
    filled = weights.fill(model, cube)
    assert filled.unused == ()
    if kind == "BertForMaskedLM":
        assert filled.fresh == ("next_sentence", "pooler")
        for parameter in model.next_sentence.parameters():  # its loss is then log 2, and says nothing to the encoder
            parameter.data.zero_()
    else:
        assert filled.fresh == ()
    return model


def cube_step(model: Any, kind: str, packs: list[Pack], cube: Cube) -> dict[str, Tensor]:
    """The same of packed rows on the cube."""
    states: list[Tensor] = []
    for module in (model.bert.embeddings, *model.bert.layers):
        module.register_forward_hook(lambda _, __, h: states.append(h))
    pooled: list[Tensor] = []
    model.pooler.register_forward_hook(lambda _, __, p: pooled.append(p))
    batch = lay(packs, cube)
    if kind == "BertModel":
        h = model.bert(batch)
        with torch.no_grad():
            model.pooler(h, batch.first)
        last = of_tokens(gather(h, cube, "z"), packs)
        losses = {"loss": (last * direction(last)).square().mean()}
    else:
        output = model(batch, *totals(packs))
        losses = {"loss": output.loss, "mlm": output.mlm_loss, "nsp": output.nsp_loss}
    losses["loss"].backward()
    found = {f"layer {number}": of_tokens(gather(h.detach(), cube, "z"), packs) for number, h in enumerate(states)}
    if kind == "BertForMaskedLM":
        return found | {"loss": losses["loss"] - math.log(2), "mlm": losses["mlm"]}
    return found | {"pooled": of_sequences(gather(pooled[0].detach(), cube, "y"), packs, cube.shape.planes)} | losses


# --- compared ------------------------------------------------------------------------------------------------------


def gradient_errors(twin: Any, kind: str, model: Any, cube: Cube) -> dict[str, float]:
    prefix = "bert." if kind == "BertModel" else ""
    theirs = {f"{prefix}{name}": parameter.grad for name, parameter in twin.named_parameters()}
    mine = gradients(model, cube)
    if kind == "BertForMaskedLM":
        mine = {name: gradient for name, gradient in mine.items() if name in theirs}
    assert mine.keys() == {name for name, gradient in theirs.items() if gradient is not None}
    assert len(mine) >= 5 + 16  # of the embeddings and a layer
    return compared_gradients(mine, theirs)


def parity(folder: Path, shape: Shape, count: int) -> dict[str, float]:
    """Errors by activation, model and tensor."""
    import transformers

    cube, errors = Cube(*shape) if ranks_of(shape) > 1 else Cube.single(), {}
    for number in range(count):
        kind, settings = drawn(shape, number)
        packs = packs_for(settings)
        twin = getattr(transformers, kind).from_pretrained(folder / str(number)).eval()
        ours = from_folder(folder / str(number), kind, cube)
        wanted, got = library_step(twin, kind, packs), cube_step(ours, kind, packs, cube)
        assert got.keys() == wanted.keys()
        assert {f"layer {settings['num_hidden_layers']}", "loss"} <= got.keys()
        found = {name: error(got[name], wanted[name], name) for name in wanted}
        found |= gradient_errors(twin, kind, ours, cube)
        errors |= {f"{settings['hidden_act']}, {kind} {number}: {name}": value for name, value in found.items()}
    return errors


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((1, 1, 1, 1), 4),
        ((1, 2, 1, 1), 4),
        pytest.param((2, 2, 2, 1), 8, marks=pytest.mark.slow),
        pytest.param((4, 2, 1, 1), 8, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_random_models_compute_what_the_librarys_do(tmp_path: Path, shape: Shape, count: int) -> None:
    for number in range(count):
        kind, settings = drawn(shape, number)
        saved(tmp_path / str(number), kind, **settings)
    alone = ranks_of(shape) == 1
    results = [parity(tmp_path, shape, count)] if alone else run_ranks(ranks_of(shape), parity, tmp_path, shape, count)
    for activation in ACTIVATIONS:
        own = [{name: e for name, e in each.items() if name.startswith(f"{activation},")} for each in results]
        name, value = worst(own)
        print(f"{shape} {activation}: {value:.1e} ({name})")
        assert value <= TOLERANCE, f"{name} differs by {value}"
