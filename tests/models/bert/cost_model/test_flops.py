"""The closed form of BERT's FLOPs against PyTorch's own counter on the real model, on one device.

The counter knows products of matrices. It does not know the CPU kernel behind `grouped` attention, so the model runs
with `reference` attention, whose products are counted: dense, over all rows of each sequence, squared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from models.bert import PRESETS, BertConfig, BertForPreTraining, ElectraForPreTraining, ReplacedTokens
from models.bert.cost_model.electra import electra_flops
from models.bert.cost_model.flops import model_flops, work
from tensor3d import Cube, CubeShape
from tensor3d.data import Pack, PackedBatch, collate
from tensor3d.packing import Work, attended
from tests.models.toy import FAMILIES, toy_config


def one_pack(lengths: list[int], masked: int, config: BertConfig) -> PackedBatch:
    """A full pack with as many slots for masked tokens and sequences as are used: nothing is padded."""
    tokens = sum(lengths)
    random = np.random.default_rng(tokens)
    pack = Pack(
        ids=random.integers(0, config.vocab, tokens),
        types=np.zeros(tokens, dtype=np.int64),
        lengths=np.array(lengths),
        masked=np.arange(1, masked + 1),
        masked_labels=np.zeros(masked, dtype=np.int64),
        next_labels=np.zeros(len(lengths), dtype=np.int64),
        draws=np.zeros(masked, dtype=np.int64),
    )
    limits: dict[str, Any] = {"capacity": tokens, "masked_per_pack": masked, "max_sequences": len(lengths)}
    return collate([pack], **limits, shape=CubeShape(), rank=0, pad=0, with_read_rows=True)


def counted(pass_: Callable[[], Tensor]) -> int:
    with FlopCounterMode(display=False) as counter:
        pass_().backward()
    return int(counter.get_total_flops())


def model_of(config: BertConfig) -> BertForPreTraining:
    return BertForPreTraining(config, Cube.single(), backend="reference")


CONFIGS: dict[str, dict[str, Any]] = {
    "toy": {},
    "deeper": {"layers": 3, "norm": "pre"},
    "wide inside": {"inner": 160, "heads": 2},
    "default inside": {"inner": None, "vocab": 131},
    "modern": {"encoder": "modern", "inner": None},
    "a decoder alone, fewer heads of keys": {
        **{"encoder": "modern", "family": "eurobert", "activation": "silu", "types": 0, "tied": False, "kv_heads": 2}
    },
    "norms of heads, fewer of keys": FAMILIES["qwen"],
    "heads of another width": FAMILIES["gemma"] | dict.fromkeys(("window", "global_every", "local_rotary_base")),
    "a gate behind norms": FAMILIES["nomic"],
    "masked-LM alone": {"next_sentence": False, "tied": False},
    "narrow embeddings": {"family": "electra", "embedding": 24},
}


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("lengths", [[24], [13], [9, 4, 8]])
def test_a_step_costs_what_pytorch_counts(changes: dict[str, Any], lengths: list[int]) -> None:
    config = toy_config(**{"vocab": 67, **changes})
    model, batch = model_of(config), one_pack(lengths, 5, config)
    rows, squares = sum(lengths), sum(length**2 for length in lengths)
    expected = model_flops(config, tokens=rows, squares=squares, masked=5, sequences=len(lengths))
    assert counted(lambda: model(batch, 5, len(lengths)).loss) == expected


@pytest.mark.parametrize("encoder", ["classic", "modern"])
def test_a_last_layer_of_read_rows_costs_what_pytorch_counts(encoder: Literal["classic", "modern"]) -> None:
    """Of one sequence, over which they are spread evenly."""
    config = toy_config(67, encoder=encoder)
    model = BertForPreTraining(config, Cube.single(), backend="reference", read_rows_only=True)
    batch = one_pack([24], 5, config)
    expected = model_flops(config, tokens=24, squares=24**2, masked=5, sequences=1, read_rows_only=True)
    assert counted(lambda: model(batch, 5, 1).loss) == expected


@pytest.mark.parametrize("embedding", [None, 24])
def test_a_step_of_both_encoders_costs_what_pytorch_counts(embedding: int | None) -> None:
    config = toy_config(67, family="electra", next_sentence=False, embedding=embedding)
    settings = ReplacedTokens(generator_size=0.5, generator_heads=2)
    model = ElectraForPreTraining(config, settings, Cube.single(), backend="reference")
    batch = one_pack([9, 4, 8], 5, config)
    expected = electra_flops(config, model.generator.config, tokens=21, squares=81 + 16 + 64, masked=5)
    assert counted(lambda: model(batch, 5, 21).loss) == expected


def test_distances_cost_two_products_more_of_each_pair() -> None:
    """Per layer, forward and twice as much backward; and tokens cost what they do in a BERT."""
    config, plain = toy_config(67, **FAMILIES["deberta-v2"]), toy_config(67, next_sentence=False)
    more = 3 * 2 * 2 * config.layers * config.hidden
    assert work(config) == replace(work(plain), per_square=work(plain).per_square + more)
    for read in (False, True):
        found, without = (model_flops(each, 24, 24**2, 5, 3, read_rows_only=read) for each in (config, plain))
        spared = more // config.layers * 24**2 * 16 // 24 if read else 0  # of the last layer's 16 rows of 24
        assert found - without == more * 24**2 - spared


@pytest.mark.parametrize("length", [1, 7, 24])
def test_of_pairs_a_causal_encoder_computes_those_that_see_each_other(length: int) -> None:
    """n (n + 1) / 2 of n squared."""
    config = toy_config(67, **FAMILIES["qwen"], pooling="last")
    both, before = (work(each).of([length], [length**2])[0] for each in (config, replace(config, causal=True)))
    unseen = length * (length - 1) // 2
    assert both - before == 3 * 2 * 2 * config.layers * config.mixed_size * unseen


@pytest.mark.parametrize("rows", [7, 24])
def test_the_encoder_alone_is_what_packs_are_balanced_by(rows: int) -> None:
    config = toy_config(67)
    model, batch = model_of(config), one_pack([rows], 1, config)
    cost = work(config)
    assert counted(lambda: model.bert(batch).sum()) == cost.per_token * rows + cost.per_square * rows**2
    assert cost.of([rows], [rows**2]).tolist() == [model_flops(config, rows, rows**2, 0, 0)]


# --- windows: the reference attention computes all pairs, so that they are counted here -----------------------------

LOCAL: dict[str, Any] = {"encoder": "modern", "layers": 3, "window": 4, "global_every": 2}


@pytest.mark.parametrize("window", [1, 2, 3, 5, 9, 10, 40])
def test_pairs_within_a_window_are_those_that_attend(window: int) -> None:
    lengths = np.arange(13)
    places = np.arange(12)
    near = np.abs(places[:, None] - places) < window
    assert attended(lengths, window).tolist() == [int(near[:n, :n].sum()) for n in lengths]
    assert attended(lengths).tolist() == (lengths**2).tolist()


def test_a_local_layer_costs_what_attends() -> None:
    """Against the same model without windows, whose FLOPs PyTorch counts: one of three layers costs less."""
    whole, local = toy_config(67, **{**LOCAL, "window": None, "global_every": None}), toy_config(67, **LOCAL)
    tokens, squares, near = 9 + 4 + 8, 81 + 16 + 64, sum(attended([9, 4, 8], 4).tolist())
    assert near == (81 - 5 * 6) + 16 + (64 - 4 * 5)
    for masked, sequences in ((0, 0), (5, 3)):
        dearer = model_flops(whole, tokens, squares, masked, sequences)
        saved = 3 * 2 * 2 * local.hidden * (squares - near)
        assert model_flops(local, tokens, squares, masked, sequences, near) == dearer - saved
    assert work(local).of([tokens], [squares], [near]).tolist() == [model_flops(local, tokens, squares, 0, 0, near)]


def test_pairs_that_are_not_told_are_refused() -> None:
    config = toy_config(67, **LOCAL)
    with pytest.raises(ValueError, match=r"layers with window=4 need near: .* Got none"):
        model_flops(config, 4, 16, 1, 1)
    with pytest.raises(ValueError, match=r"work with window=4.*\(2,\)"):
        work(config).of([4, 5], [16, 25])
    with pytest.raises(ValueError, match="per_near and window belong together"):
        Work(per_token=1, per_square=1, window=3)


def test_bert_large_by_hand() -> None:
    cost = work(PRESETS["large"])
    # 24 layers of 12 * 1024² weights: two operations each, forward once and backward twice
    assert cost.per_token == 6 * 24 * 12 * 1024**2
    # q kᵀ and weights · v, each 2 * 1024, in 24 layers, forward once and backward twice
    assert cost.per_square == 3 * 24 * 2 * 2 * 1024
    # At 512 tokens attention is a twelfth of the linear layers.
    assert cost.per_square * 512 / cost.per_token == pytest.approx(1 / 12)


def test_long_steps_are_counted_exactly() -> None:
    config = PRESETS["large"]
    tokens = 2**40 + 1
    assert model_flops(config, tokens, 0, 0, 0) == 6 * 24 * 12 * 1024**2 * tokens
    assert isinstance(model_flops(config, *np.array([5, 25, 1, 1])), int)


@pytest.mark.parametrize("name", ["tokens", "squares", "masked", "sequences"])
def test_negative_counts_are_refused(name: str) -> None:
    counts: dict[str, Any] = {"tokens": 4, "squares": 16, "masked": 1, "sequences": 1, name: -3}
    with pytest.raises(ValueError, match=f"{name} must be at least 0. Got -3"):
        model_flops(PRESETS["tiny"], **counts)


@pytest.mark.parametrize("changes", [{}, {"encoder": "modern"}, {"encoder": "modern", "window": 4, "global_every": 2}])
def test_what_nobody_reads_is_no_work(changes: dict[str, Any]) -> None:
    """Where all tokens are read nothing is spared; where none is, the last layer's QKV and the others are left."""
    config = toy_config(67, layers=2, **changes)
    tokens, squares, near = 100, 1000, 500

    def of(masked: int, sequences: int, **options: bool) -> int:
        return model_flops(config, tokens, squares, masked, sequences, near, **options)

    assert of(90, 10, read_rows_only=True) == of(90, 10)
    one = replace(config, layers=1, window=None, global_every=None)
    hidden = config.hidden
    layer = model_flops(one, tokens, squares if config.window_of(1) is None else near, 0, 0)
    assert of(0, 0) - of(0, 0, read_rows_only=True) == layer - 6 * 3 * hidden**2 * tokens
