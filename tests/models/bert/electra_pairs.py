"""A small ELECTRA or DeBERTa by chance, and what its generator and discriminator compute of packs on a cube.

Nothing here needs the library: ranks import it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.bert import ElectraForPreTraining, ReplacedTokens, open_weights
from tensor3d import Cube, gather
from tensor3d.data import Pack
from tests.default_type import default_type
from tests.models.bert.huggingface.families import DEBERTA, drawn
from tests.models.bert.huggingface.subject import gradient_errors, gradients
from tests.models.toy import CAPACITY, Shape, lay, toy_packs
from tests.single_device_reference import error, ranks_of

PARTS = ("discriminator", "generator")


def sizes(shape: Shape, number: int, family: str) -> tuple[dict[str, Any], dict[str, Any], ReplacedTokens]:
    """Settings of both, that can be cut on this cube, with a vocabulary that divides by no axis; and the objective."""
    if family == DEBERTA:
        settings = {**drawn(DEBERTA, "ForMaskedLM", shape, 2 * number), "max_position_embeddings": CAPACITY}
        layers = int(settings["num_hidden_layers"])
        few = [max(1, layers // 2), layers + 1][number % 2]
        objective = ReplacedTokens(generator_layers=[None, few][number % 2], weight=[50.0, 3.0][number % 2])
        return settings, settings | {"num_hidden_layers": few}, objective
    random = np.random.default_rng([*shape, number])
    x, y, z, _ = shape
    many, few, d = int(random.integers(2, 4)), int(random.integers(1, 3)), z * int(random.integers(3, 7))
    inner = y * int(random.integers(5, 20))
    shared = {
        "hidden_act": str(random.choice(["gelu", "gelu_new", "relu", "silu"])),
        "vocab_size": int(random.integers(10, 30)) * 2 * x * y * z + 1,
        "num_hidden_layers": int(random.integers(1, 3)),
        "embedding_size": y * z * int(random.integers(2, 9)),
        "max_position_embeddings": CAPACITY,
        "layer_norm_eps": 1e-5,
    }
    of_both = [
        {
            **shared,
            "hidden_size": y * heads * d,
            "num_attention_heads": y * heads,
            "intermediate_size": inner * heads,
        }
        for heads in (many, few)
    ]
    objective = ReplacedTokens(generator_size=few / many, generator_heads=y * few, weight=[50.0, 3.0][number % 2])
    return of_both[0], of_both[1], objective


def packs_of(vocab: int) -> list[Pack]:
    """Sixteen, with random bits of their masked places."""
    random, packs = np.random.default_rng(6), toy_packs(vocab, 16)
    return [replace(each, draws=random.integers(-(2**63), 2**63 - 1, len(each.masked))) for each in packs]


def model_of(folder: Path, objective: ReplacedTokens, cube: Cube) -> ElectraForPreTraining:
    """Filled from folders of the library."""
    cube.manual_seed(0)
    weights = [open_weights(folder / part) for part in PARTS]
    model = ElectraForPreTraining(weights[0].config, objective, cube)
    assert model.generator.config == replace(weights[1].config, next_sentence=False)
    assert weights[1].fill(model.generator_alone(), cube).fresh == ()
    assert weights[0].fill(model.discriminator_alone(), cube).fresh == ()
    model.part_embeddings(has_generator=True)
    return model.eval()


def parity(folder: Path, shape: Shape, number: int, dtype: torch.dtype, family: str) -> dict[str, float]:
    """Errors by tensor, against what lies in `folder / "wanted"`."""
    cube = Cube(*shape) if ranks_of(shape) > 1 else Cube.single()
    settings, _, objective = sizes(shape, number, family)
    wanted, theirs = torch.load(folder / "wanted")
    with default_type(dtype):
        model = model_of(folder, objective, cube)
    states: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        return lambda _, __, h: states.__setitem__(name, h.detach())

    for part, layers in zip(PARTS, (model.bert.layers, model.generator_alone().bert.layers), strict=True):
        for i, layer in enumerate(layers):
            layer.register_forward_hook(note(f"{part} {i + 1}"))
    packs = packs_of(settings["vocab_size"])
    output = model(lay(packs, cube), sum(len(p.masked) for p in packs), sum(len(p.ids) for p in packs))
    output.loss.backward()
    rows = torch.cat([i * CAPACITY + torch.arange(len(pack.ids)) for i, pack in enumerate(packs)])
    got = {name: gather(h, cube, "z")[rows] for name, h in states.items()}
    names = ("loss", "generator_loss", "discriminator_loss", "generator_correct", "discriminator_correct", "replaced")
    got |= dict(zip(names, output.sums, strict=True))
    assert got.keys() == wanted.keys()
    errors = {name: error(value, wanted[name], name) for name, value in got.items()}
    for part, alone in zip(PARTS, (model.discriminator_alone(), model.generator_alone()), strict=True):
        alone.config = model.config if part == PARTS[0] else model.generator.config  # type: ignore[assignment]
        mine = gradients(alone, cube)
        if part == PARTS[1]:  # what is shared has one gradient, of both
            mine = {name: each for name, each in mine.items() if name in theirs[part]}
        assert mine.keys() == theirs[part].keys()
        errors |= {f"{part}: {name}": value for name, value in gradient_errors(mine, theirs[part]).items()}
    return errors
