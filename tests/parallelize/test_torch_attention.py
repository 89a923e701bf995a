"""nn.TransformerEncoder on a cube, on packed rows, equals itself on a padded batch: loss and every gradient."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensor3d import Cube, Sequences, gather, shard
from tensor3d.parallelize import PackedRows, full_state_dict, parallelize, rules
from tests.parallelize.foreign import HEADS, HIDDEN, LENGTHS, ROWS, errors_of, own_sequences, varied
from tests.ranks import run_ranks
from tests.single_device_reference import FOUR_SHAPES, error, ranks_of, worst

pytestmark = pytest.mark.usefixtures("fp64")
Shape = tuple[int, int, int, int]
LONGEST = max(LENGTHS)
PADDING = torch.stack([torch.arange(LONGEST) >= length for length in LENGTHS])


def encoder(norm_first: bool, activation: str, layers: int = 1, **options: Any) -> nn.Module:
    torch.manual_seed(5)
    layer = nn.TransformerEncoderLayer(
        HIDDEN, HEADS, 3 * HIDDEN, 0.0, activation, norm_first=norm_first, batch_first=True, **options
    )
    return varied(nn.TransformerEncoder(layer, layers, nn.LayerNorm(HIDDEN), enable_nested_tensor=False))


def plan(rows: PackedRows, causal: bool = False) -> dict[str, Any]:
    return {
        "layers.*.self_attn": rules.attention(rows, causal),
        "layers.*.linear1": rules.linear("z"),
        "layers.*.linear2": rules.linear("y"),
        "**norm*": rules.norm("z"),
    }


def padded(rows: Tensor) -> Tensor:
    """(rows, H) in packs to (sequences, longest, H), filled up with noise that a mask has to hide."""
    batch = torch.randn(len(LENGTHS), LONGEST, rows.shape[1], generator=torch.Generator().manual_seed(1))
    batch[~PADDING] = rows
    return batch


def compared(cube: Cube, original: nn.Module, causal: bool = False) -> dict[str, float]:
    torch.manual_seed(6)
    x, direction = torch.randn(ROWS, HIDDEN), torch.randn(ROWS, HIDDEN)
    rows = PackedRows()
    model = parallelize(original, cube, plan(rows, causal))
    with rows.holding(own_sequences(cube)):
        y = gather(model(shard(x, cube, "z")[None]).squeeze(0), cube, "z")
    mask = torch.ones(LONGEST, LONGEST, dtype=torch.bool).triu(1) if causal else None
    wanted = original(padded(x), mask, PADDING)[~PADDING]
    (y * direction).sum().backward()
    (wanted * direction).sum().backward()
    back = full_state_dict(model, cube)
    assert list(back) == list(original.state_dict())
    assert all(torch.equal(back[name], value) for name, value in original.state_dict().items())
    return errors_of(model, original, cube, {"output": (y, wanted)})


def _all_options(shape: Shape) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    cube = Cube(*shape)
    errors = {}
    for norm_first, activation in itertools.product((False, True), ("relu", "gelu")):
        found = compared(cube, encoder(norm_first, activation))
        errors |= {f"{name} norm_first={norm_first} {activation}": value for name, value in found.items()}
    return errors | compared(cube, encoder(True, "relu", 2, bias=False), causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("shape", FOUR_SHAPES)
def test_an_encoder_equals_its_original_on_a_cube(shape: Shape) -> None:
    name, value = worst(run_ranks(ranks_of(shape), _all_options, shape))
    assert value <= 1e-9, f"{name} differs by {value}"


def test_an_encoder_equals_its_original_on_one_device() -> None:
    for norm_first in (False, True):
        assert max(compared(Cube.single(), encoder(norm_first, "relu", 2)).values()) <= 1e-9


def test_evaluation_without_gradients_does_not_take_torchs_fused_path() -> None:
    original = encoder(False, "relu").eval()
    rows = PackedRows()
    model = parallelize(original, Cube.single(), plan(rows))
    x = torch.randn(1, ROWS, HIDDEN)
    with torch.no_grad(), rows.holding(Sequences.from_lengths(LENGTHS)):
        got = model(x)
        wanted = original(padded(x[0]), src_key_padding_mask=PADDING)[~PADDING]
    assert error(got[0], wanted) <= 1e-12


class OwnMask(nn.Module):
    """Makes its causal mask itself, with or without a hint that it is one; Booleans, or numbers as torch makes them."""

    def __init__(self, hint: bool | None, numbers: bool) -> None:
        super().__init__()
        self.encoder, self.hint, self.numbers = encoder(True, "relu"), hint, numbers

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        result: Tensor = self.encoder(x, mask if self.numbers else mask != 0, is_causal=self.hint)
        return result


@pytest.mark.parametrize("numbers", [True, False], ids=["numbers", "Booleans"])
@pytest.mark.parametrize("hint", [None, True, False])
def test_a_causal_encoder_may_make_its_own_mask(hint: bool | None, numbers: bool) -> None:
    original, rows = OwnMask(hint, numbers), PackedRows()
    named = {f"encoder.{name}" if "**" not in name else name: kind for name, kind in plan(rows, causal=True).items()}
    model = parallelize(original, Cube.single(), named)
    x = torch.randn(1, 8, HIDDEN)
    with rows.holding(Sequences.from_lengths([8])):
        assert error(model(x), original(x)) <= 1e-12


def test_dropout_of_attention_probabilities_is_the_originals() -> None:
    original = nn.MultiheadAttention(HIDDEN, HEADS, dropout=0.5)
    rows = PackedRows()
    model = parallelize(original, Cube.single(), {"": rules.attention(rows)})
    x = torch.randn(ROWS, HIDDEN)
    with rows.holding(Sequences.from_lengths(LENGTHS)):
        first, second = model(x, x, x)[0], model(x, x, x)[0]
        model.eval()
        third, fourth = model(x, x, x)[0], model(x, x, x)[0]
    assert not torch.equal(first, second)
    assert torch.equal(third, fourth)


# --- what it does not do -------------------------------------------------------------------------------------------


def attention_on_one_device(causal: bool = False, **options: Any) -> tuple[nn.Module, PackedRows]:
    rows = PackedRows()
    original = nn.MultiheadAttention(HIDDEN, HEADS, **options)
    return parallelize(original, Cube.single(), {"": rules.attention(rows, causal)}), rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"key": torch.zeros(8, HIDDEN)}, "query, key and value must be one tensor"),
        ({"key_padding_mask": torch.zeros(1, 8)}, "pack_padded"),
        ({"attn_mask": torch.zeros(8, 8)}, "causal=True"),
        ({"need_weights": True}, "need_weights=False"),
        ({"is_causal": True}, "causal=True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_call_that_packed_attention_cannot_answer_is_refused(arguments: dict[str, Any], message: str) -> None:
    model, rows = attention_on_one_device()
    x = torch.zeros(8, HIDDEN)
    with rows.holding(Sequences.from_lengths([8])), pytest.raises(ValueError, match=message):
        model(**{"query": x, "key": x, "value": x, **arguments})


LATER = torch.full((8, 8), float("-inf")).triu(1)


@pytest.mark.parametrize(
    ("causal", "mask"),
    [
        (False, LATER),
        (True, torch.zeros(8, 8)),
        (True, LATER.T),
        (True, LATER + torch.full((8, 8), 0.5).tril()),
        (True, LATER.roll(1, 1)),
        (True, LATER[:4]),
    ],
    ids=["not causal", "hides nothing", "hides what came before", "adds to scores", "hides itself", "not square"],
)
def test_a_mask_that_says_more_than_causal_is_refused(causal: bool, mask: Tensor) -> None:
    model, rows = attention_on_one_device(causal)
    x = torch.zeros(8, HIDDEN)
    with rows.holding(Sequences.from_lengths([8])), pytest.raises(ValueError, match="takes no masks"):
        model(x, x, x, attn_mask=mask)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"kdim": 4}, "kdim or vdim"), ({"add_bias_kv": True}, "add_bias_kv"), ({"add_zero_attn": True}, "add_zero_attn")],
    ids=["kdim", "bias_kv", "zero_attn"],
)
def test_an_attention_made_with_other_options_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_on_one_device(**options)


def test_a_forward_pass_without_sequences_says_how_to_hold_them() -> None:
    model, rows = attention_on_one_device()
    x = torch.zeros(8, HIDDEN)
    with pytest.raises(ValueError, match=r"with rows\.holding\(sequences\)"):
        model(x, x, x)
    with pytest.raises(RuntimeError, match="on the way"), rows.holding(Sequences.from_lengths([8])):
        raise RuntimeError("on the way")
    with pytest.raises(ValueError, match="no Sequences are held"):
        _ = rows.sequences
