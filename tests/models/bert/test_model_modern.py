"""The modern encoder: on cubes it equals one device, there it equals plain PyTorch, and options of both kinds part."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.bert import PRESETS, BertConfig, BertForPreTraining
from tensor3d import Cube
from tensor3d.data import Pack
from tests.models.parity import ODD, check_bert_against_plain, loss_and_gradients
from tests.models.toy import CAPACITY, Shape, lay, totals, toy_config, toy_packs
from tests.ranks import run_ranks
from tests.single_device_reference import FOUR_SHAPES, ranks_of, worst

# Layers 0 and 2 see whole sequences, layer 1 its next neighbours.
LOCAL: dict[str, Any] = {"encoder": "modern", "layers": 3, "window": 4, "global_every": 2}


@pytest.mark.parametrize("shape", FOUR_SHAPES)
def test_parity(shape: Shape) -> None:
    results = run_ranks(ranks_of(shape), partial(loss_and_gradients, **LOCAL), shape, ODD, torch.float64)
    name, value = worst(results)
    assert value <= 1e-9, f"{name} differs by {value}"


# --- the single-device model against plain PyTorch -----------------------------------------------------------------


def turned(x: Tensor, base: float) -> Tensor:
    """(heads, n, d), each pair (i, i + d/2) as a complex number whose angle grows with its place."""
    half = x.shape[-1] // 2
    waves = 1.0 / base ** (torch.arange(half, dtype=torch.float32) * 2 / x.shape[-1])
    angles = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * waves
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.complex(angles.cos(), angles.sin())
    return torch.cat([pairs.real, pairs.imag], -1)


def plain_layer(p: dict[str, Tensor], config: BertConfig, number: int, h: Tensor) -> Tensor:
    """(n, hidden) of one sequence, to the same."""
    at, n = f"bert.layers.{number}", len(h)
    a = h if number == 0 else norm(p, config, h, f"{at}.attention_norm")
    q, k, v = (a @ p[f"{at}.attention.qkv.weight"].T).view(n, config.heads, 3, -1).permute(2, 1, 0, 3)
    base = config.rotary_base or 10_000.0
    scores = turned(q, base) @ turned(k, base).transpose(1, 2) / q.shape[-1] ** 0.5
    if number % (config.global_every or 3):
        places = torch.arange(n)
        scores = scores.masked_fill((places[:, None] - places).abs() >= (config.window or n), float("-inf"))
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, config.hidden)
    h = h + mixed @ p[f"{at}.attention.out.weight"].T
    gate, up = (norm(p, config, h, f"{at}.mlp_norm") @ p[f"{at}.mlp.gate_up.weight"].T).view(n, -1, 2).unbind(2)
    return h + (F.gelu(gate) * up) @ p[f"{at}.mlp.down.weight"].T


def norm(p: dict[str, Tensor], config: BertConfig, x: Tensor, name: str) -> Tensor:
    return F.layer_norm(x, (config.hidden,), p[f"{name}.weight"], None, config.eps)


def plain_bert(p: dict[str, Tensor], config: BertConfig, pack: Pack) -> tuple[Tensor, Tensor]:
    """Sums of both losses of one sequence, written with nothing of ours."""
    words = p["bert.embeddings.tokens.weight"]
    h = words[torch.from_numpy(pack.ids)] + p["bert.embeddings.types.weight"][torch.from_numpy(pack.types)]
    h = norm(p, config, h, "bert.embeddings.norm")
    for number in range(config.layers):
        h = plain_layer(p, config, number, h)
    h = norm(p, config, h, "bert.final_norm")
    guessed = F.gelu(h[torch.from_numpy(pack.masked)] @ p["masked_lm.dense.weight"].T)
    logits = F.linear(norm(p, config, guessed, "masked_lm.norm"), words, p["masked_lm.projection.bias"])
    mlm = F.cross_entropy(logits, torch.from_numpy(pack.masked_labels), reduction="sum")
    pooled = torch.tanh(h[:1] @ p["pooler.dense.weight"].T)
    pair = F.linear(pooled, p["next_sentence.weight"], p["next_sentence.bias"])
    return mlm, F.cross_entropy(pair, torch.from_numpy(pack.next_labels), reduction="sum")


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("changes", [LOCAL, {"encoder": "modern", "rotary_base": 160_000.0}], ids=["local", "global"])
def test_single_device_equals_plain_pytorch(changes: dict[str, Any]) -> None:
    check_bert_against_plain(toy_config(ODD, **changes), plain_bert)


def gradients(recompute: str) -> list[Tensor]:
    cube = Cube.single()
    cube.manual_seed(3)
    config = toy_config(ODD, dropout=0.2, attention_dropout=0.2, **LOCAL)
    model, packs = BertForPreTraining(config, cube, recompute=recompute), toy_packs(ODD, 4)  # type: ignore[arg-type]
    torch.manual_seed(1)
    model(lay(packs, cube), *totals(packs)).loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_what_is_computed_again_gives_the_same_bits() -> None:
    wanted = gradients("none")
    for recompute in ("layer", "attention"):
        for ours, theirs in zip(gradients(recompute), wanted, strict=True):
            assert torch.equal(ours, theirs), recompute


# --- configuration -------------------------------------------------------------------------------------------------


def test_only_what_gives_logits_has_a_bias() -> None:
    model = BertForPreTraining(toy_config(ODD, **LOCAL), Cube.single())
    names = {name for name, _ in model.named_parameters()}
    biases = {name for name in names if name.endswith("bias")}
    assert biases == {"masked_lm.projection.bias", "next_sentence.bias"}
    assert not [name for name in names if "position" in name]
    assert "bert.layers.0.attention_norm.weight" not in names  # the embeddings end with a norm
    assert "bert.layers.1.attention_norm.weight" in names


@pytest.mark.parametrize("out", [None, 0.3])
def test_dropout_of_attentions_output(out: float | None) -> None:
    """As ModernBERT was trained: behind attention's output projection alone."""
    config = toy_config(ODD, dropout=0.1, attention_out_dropout=out, **LOCAL)
    model = BertForPreTraining(config, Cube.single())
    assert config.out_dropout == (out or 0.1)
    for layer in model.bert.layers:
        found = layer.attention_out_dropout
        assert (layer.dropout.p, None if found is None else found.p) == (0.1, out)


def test_layers_that_see_whole_sequences() -> None:
    config = BertConfig(layers=7, hidden=64, heads=4, encoder="modern", window=65)
    assert [config.window_of(number) for number in range(7)] == [None, 65, 65, None, 65, 65, None]
    assert config.local_layers == 4
    assert BertConfig(layers=7, hidden=64, heads=4, encoder="modern").local_layers == 0


def test_the_default_mlp_has_about_the_weights_of_the_classic_one() -> None:
    sizes = {"hidden": 768, "heads": 12, "layers": 1}
    classic, modern = (BertConfig(encoder=encoder, **sizes) for encoder in ("classic", "modern"))  # type: ignore[arg-type]
    assert (classic.inner_size, modern.inner_size) == (3072, 2048)
    assert 3 * modern.inner_size == 2 * classic.inner_size
    assert all(BertConfig(encoder="modern", layers=1, hidden=p.hidden, heads=p.heads).inner_size % 64 == 0
               for p in PRESETS.values())  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": "ancient"}, 'encoder must be "classic" or "modern". Got \'ancient\''),
        ({"window": 4}, 'window.*encoder="modern".*window=4.*encoder="classic"'),
        ({"global_every": 4}, 'global_every belongs to encoder="modern"'),
        ({"rotary_base": 1e4}, 'rotary_base belongs to encoder="modern"'),
        ({"attention_out_dropout": 0.1}, 'attention_out_dropout belongs to encoder="modern"'),
        ({"encoder": "modern", "attention_out_dropout": 1.0}, r"attention_out_dropout must be .* below 1. Got 1.0"),
        ({"encoder": "modern", "activation": "relu"}, 'activation belongs to encoder="classic"'),
        ({"encoder": "modern", "norm": "pre"}, 'norm belongs to encoder="classic"'),
        ({"encoder": "modern", "window": 0}, "window must be at least 1. Got 0"),
        ({"encoder": "modern", "global_every": 2}, "there is no window. Set window"),
        ({"encoder": "modern", "rotary_base": 0.0}, r"rotary_base.*\b0.*\b0.0"),
        ({"encoder": "modern", "rotary_base": float("nan")}, r"rotary_base.*\b0.*nan"),
        ({"encoder": "modern", "hidden": 24}, "hidden / heads must be even. Got 24 / 8 = 3"),
    ],
)
def test_options_of_the_other_encoder(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy_config(ODD, **changes)


# --- an example to look at -----------------------------------------------------------------------------------------


def run_example(shape: Shape, tokens: int, changes: dict[str, Any]) -> tuple[int, tuple[int, ...], int, int, bool]:
    cube = Cube(*shape)
    cube.manual_seed(0)
    model = BertForPreTraining(toy_config(ODD, **changes), cube)
    arguments = model.example(tokens)
    batch = arguments["batch"]
    loss = model(**arguments).loss
    loss.backward()
    slots = batch.ids.shape[0] * shape[0] * shape[3]
    return slots, batch.sequences.lengths, arguments["targets"], arguments["sequences"], bool(loss.isfinite())


@pytest.mark.parametrize(
    ("shape", "changes", "lengths"),
    [
        ((1, 1, 1, 1), {}, (CAPACITY, CAPACITY, CAPACITY, CAPACITY)),
        ((1, 2, 2, 1), {}, (CAPACITY, CAPACITY)),
        ((2, 1, 2, 1), LOCAL, (CAPACITY,)),
    ],
)
def test_an_example_has_the_tokens_that_were_asked_for(
    shape: Shape, changes: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    tokens = 4 * CAPACITY
    for slots, own, targets, sequences, finite in run_ranks(ranks_of(shape), run_example, shape, tokens, changes):
        assert (slots, own) == (tokens, lengths)
        assert sequences == len(lengths) * shape[0] * shape[2] * shape[3]
        assert 0.1 * tokens < targets < 0.2 * tokens
        assert finite


@pytest.mark.parametrize("tokens", [0, -4])
def test_an_example_without_tokens(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"tokens must divide by .* = 1 on .*. Got {tokens}"):
        BertForPreTraining(toy_config(ODD), Cube.single()).example(tokens)
