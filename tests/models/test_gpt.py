"""GPT on a cube equals GPT on one device and in plain PyTorch: loss, every gradient, and what it generates."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.gpt import PRESETS, CausalBatch, Gpt, GptConfig, Sampling, count_targets, generate, lay, pack_texts
from models.gpt.generate import choose, next_logits
from tensor3d import Cube, CubeShape
from tests.models.parity import check_against_plain
from tests.ranks import run_ranks
from tests.single_device_reference import (
    FOUR_SHAPES,
    TOLERANCE,
    error,
    fast_alone,
    gradient_errors,
    make_twins,
    name_of,
    ranks_of,
    worst,
)

Shape = tuple[int, int, int, int]
VOCAB, CAPACITY, PACKS = 37, 24, 8


def config(**changes: object) -> GptConfig:
    sizes: dict[str, object] = {"layers": 2, "hidden": 32, "heads": 4, "inner": 24, "vocab": VOCAB, "positions": 24}
    return GptConfig(**{**sizes, "std": 0.2, "rotary_base": 100.0, **changes})  # type: ignore[arg-type]


def texts(seed: int = 5) -> list[list[int]]:
    """Of very different lengths, the last token of the vocabulary among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [24, 1, 9, 3, 17, 12, 2, 5, 20, 11, 7, 22, 4, 6]
    return [[VOCAB - 1, *torch.randint(0, VOCAB, (n - 1,), generator=generator).tolist()] for n in lengths]


def loss_of(model: Gpt, cube: Cube) -> Tensor:
    packs = pack_texts(texts(), CAPACITY, PACKS)
    loss: Tensor = model(**vars(lay(packs, CAPACITY, cube)), targets=count_targets(packs))
    return loss


# --- parity --------------------------------------------------------------------------------------------------------


def loss_and_gradients(shape: Shape, dtype: torch.dtype, options: list[dict[str, object]]) -> dict[str, float]:
    torch.set_default_dtype(dtype)
    errors: dict[str, float] = {}
    cube = Cube(*shape)
    for option in options:
        _, model, single, twin = make_twins(lambda c, o=option: Gpt(config(**o), c), cube)  # type: ignore[misc]
        assert isinstance(model, Gpt)
        assert isinstance(twin, Gpt)
        ours, theirs = loss_of(model, cube), loss_of(twin, single)
        ours.backward()
        theirs.backward()
        found = gradient_errors(model, twin) | {"loss": error(ours, theirs)}
        assert ("head.weight" in found) == (option.get("tied") is False)
        errors |= {f"{option} {name}": value for name, value in found.items()}
    return errors


OPTIONS: list[dict[str, object]] = [{}, {"tied": False, "window": 3, "kv_heads": 2}]


@pytest.mark.parametrize("shape", FOUR_SHAPES)
def test_parity(shape: Shape) -> None:
    results = run_ranks(ranks_of(shape), loss_and_gradients, shape, torch.float64, OPTIONS)
    name, value = worst(results)
    assert value <= TOLERANCE[torch.float64], f"{name} differs by {value}"


def test_parity_in_fp32() -> None:
    name, value = worst(run_ranks(8, loss_and_gradients, (2, 2, 2, 1), torch.float32, OPTIONS[1:2]))
    assert value <= TOLERANCE[torch.float32], f"{name} differs by {value}"


# --- the single-device model against plain PyTorch -----------------------------------------------------------------


def turned(x: Tensor, base: float) -> Tensor:
    """(n, heads, d): rotary positions of one text, angles in fp32 as the library has them."""
    n, dim = x.shape[0], x.shape[-1]
    angles = torch.arange(n).float()[:, None] * (1.0 / base ** (torch.arange(0, dim, 2).float() / dim))
    cos, sin = (t.to(x.dtype)[:, None].repeat(1, 1, 2) for t in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def plain_gpt(p: dict[str, Tensor], c: GptConfig, ids: Tensor) -> Tensor:
    """Logits (n, V) of one text, written with nothing of ours."""
    n = len(ids)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (c.hidden,), p[f"{name}.weight"], c.eps)

    distance = torch.arange(n)[:, None] - torch.arange(n)
    hidden_from = (distance < 0) | (distance >= (c.window or n))
    h = p["tokens.weight"][ids]
    for i in range(c.layers):
        at = f"blocks.{i}"
        qkv = F.linear(norm(h, f"{at}.attention_norm"), p[f"{at}.attention.qkv.weight"])
        asking = c.heads // (c.kv_heads or c.heads)
        q, k, v = qkv.view(n, c.heads // asking, asking + 2, -1).split([asking, 1, 1], 2)
        q, k, v = q.reshape(n, c.heads, -1), *(t.squeeze(2).repeat_interleave(asking, 1) for t in (k, v))
        q, k = turned(q, c.rotary_base), turned(k, c.rotary_base)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(hidden_from, -math.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, v).reshape(n, c.hidden)
        h = h + F.linear(mixed, p[f"{at}.attention.out.weight"])
        gate, up = F.linear(norm(h, f"{at}.mlp_norm"), p[f"{at}.mlp.gate_up.weight"]).view(n, -1, 2).unbind(-1)
        h = h + F.linear(F.silu(gate) * up, p[f"{at}.mlp.down.weight"])
    return F.linear(norm(h, "norm"), p["tokens.weight" if c.tied else "head.weight"])


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_single_device_equals_plain_pytorch(options: dict[str, object]) -> None:
    cube = Cube.single()
    cube.manual_seed(5)
    model = Gpt(config(**options), cube)

    def plain_loss(leaves: dict[str, Tensor]) -> Tensor:
        total = torch.zeros(())
        for text in texts():
            ids = torch.tensor(text)
            total = total + F.cross_entropy(plain_gpt(leaves, model.config, ids)[:-1], ids[1:], reduction="sum")
        return total / sum(len(text) - 1 for text in texts())

    check_against_plain(model, lambda: loss_of(model, cube), plain_loss)


# --- batches -------------------------------------------------------------------------------------------------------


def test_labels_are_the_next_tokens_of_the_same_text() -> None:
    packs = pack_texts([[5, 6, 7], [8, 9]], capacity=6)
    batch = lay(packs, 6, Cube.single())
    assert batch.ids.tolist() == [5, 6, 7, 8, 9, 0]
    assert batch.labels.tolist() == [6, 7, -100, 9, -100, -100]
    assert batch.sequences.lengths == (3, 2, 1), "the unused slot is a sequence of its own"
    assert count_targets(packs) == 3


def test_texts_are_packed_whole() -> None:
    packs = pack_texts(texts(), CAPACITY, PACKS)
    assert len(packs) % PACKS == 0
    assert max(sum(map(len, pack)) for pack in packs) <= CAPACITY
    assert sorted(text for pack in packs for text in pack) == sorted(texts())


def rows_of(shape: Shape) -> tuple[dict[str, int], list[int], list[int], tuple[int, ...]]:
    cube = Cube(*shape)
    batch: CausalBatch = lay(pack_texts(texts(), CAPACITY, PACKS), CAPACITY, cube)
    return cube.coordinate, batch.ids.tolist(), batch.labels.tolist(), batch.sequences.lengths  # type: ignore[return-value]


@pytest.mark.parametrize("shape", [(1, 2, 2, 1), (2, 1, 2, 1)], ids=name_of)
def test_every_cube_has_the_same_batch(shape: Shape) -> None:
    whole = lay(pack_texts(texts(), CAPACITY, PACKS), CAPACITY, Cube.single())
    ranks = run_ranks(4, rows_of, shape)
    planes = {place["x"]: (ids, labels) for place, ids, labels, _ in ranks}
    assert [i for x in sorted(planes) for i in planes[x][0]] == whole.ids.tolist()
    assert [i for x in sorted(planes) for i in planes[x][1]] == whole.labels.tolist()
    held = {(place["x"], place["z"]): lengths for place, _, _, lengths in ranks}
    assert tuple(n for place in sorted(held) for n in held[place]) == whole.sequences.lengths


def test_packs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a pack holds 4 tokens\. Got texts of 5 together"):
        lay([[[1, 2, 3], [4, 5]]], 4, Cube.single())
    run_ranks(2, packs_that_do_not_divide)


def packs_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"global.*3.*data=1 \* x=2 \* z=1"):
        lay([[[1, 2]]] * 3, 4, Cube(2, 1, 1))


# --- generation ----------------------------------------------------------------------------------------------------


def make(cube: Cube, window: int | None = None) -> Gpt:
    cube.manual_seed(3)
    return Gpt(config(window=window), cube)


def continued(shape: Shape | None, prompt: list[int], sampling: Sampling) -> list[int]:
    torch.set_default_dtype(torch.float64)
    cube = Cube.single() if shape is None else Cube(*shape)
    return list(generate(make(cube, window=5), prompt, 12, sampling))


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("shape", fast_alone((1, 2, 2, 1), (1, 2, 4, 1), (2, 2, 2, 1)))
def test_the_same_text_on_every_cube(shape: Shape) -> None:
    sampling = Sampling(temperature=1.3, top_k=9, seed=4)
    alone = continued(None, [4, 1, 30], sampling)
    assert len(alone) == 12
    assert len(set(alone)) > 3
    ranks = ranks_of(shape)
    assert run_ranks(ranks, continued, shape, [4, 1, 30], sampling) == [alone] * ranks


@pytest.mark.usefixtures("fp64")
def test_next_logits_are_those_of_the_last_token() -> None:
    model = make(Cube.single())
    text = [4, 1, 30, 7, 7]
    weights = {name: p.detach() for name, p in model.named_parameters()}
    wanted = plain_gpt(weights, model.config, torch.tensor(text))[-1]
    assert error(next_logits(model, text), wanted) <= 1e-12


def test_logits_that_are_none_choose_no_token() -> None:
    model = make(Cube.single())
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        next(generate(model, [4, 1], 1))


def test_greedy_takes_the_likeliest_and_top_k_leaves_the_others_out() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.9, -1.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    assert choose(logits, Sampling(temperature=0.0), generator) == 1
    drawn = [choose(logits, Sampling(top_k=2), generator) for _ in range(200)]
    assert set(drawn) == {1, 3}
    assert {choose(logits, Sampling(top_k=1), generator) for _ in range(20)} == {1}
    equal = torch.zeros(5, dtype=torch.float64)
    assert {choose(equal, Sampling(top_k=2), generator) for _ in range(50)} == {0, 1}
    # So cold that logits divided by it are infinite.
    assert [choose(logits, Sampling(temperature=cold), generator) for cold in (1e-300, 1e-308, 5e-324)] == [1] * 3


def test_draws_follow_the_distribution() -> None:
    logits, generator = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64), torch.Generator().manual_seed(1)
    for temperature in (1.0, 0.5):
        sampling = Sampling(temperature=temperature)
        counts = torch.bincount(torch.tensor([choose(logits, sampling, generator) for _ in range(4000)]), minlength=3)
        # 5 standard errors
        assert torch.allclose(counts / 4000, (logits / temperature).softmax(0).float(), atol=5 * 0.5 / 4000**0.5)


def test_a_step_without_a_next_token_has_no_loss() -> None:
    model = make(Cube.single())
    packs = [[[3], [4]]]
    batch = lay(packs, 2, model.cube)
    with pytest.raises(ValueError, match=r"targets must be at least 1, the next tokens of a step\. Got 0"):
        model(batch.ids, batch.labels, batch.sequences, count_targets(packs))


def test_generation_ends_at_the_end_token_and_at_the_last_position() -> None:
    model = make(Cube.single())
    greedy = Sampling(temperature=0.0)
    before = torch.get_rng_state()
    text = list(generate(model, [1, 2], 100, greedy))
    assert len(text) == model.config.positions - 2
    assert torch.equal(torch.get_rng_state(), before), "torch's own stream stays"
    assert model.training
    end = text[3]
    assert list(generate(model, [1, 2], 100, greedy, end=end)) == text[: text.index(end)]


def test_prompts_that_cannot_be_continued_are_refused() -> None:
    model = make(Cube.single())
    with pytest.raises(ValueError, match="the prompt has no token"):
        generate(model, [], 5)
    with pytest.raises(ValueError, match=r"within the model's 24 positions\. Got 24 tokens"):
        generate(model, [1] * 24, 5)
    with pytest.raises(ValueError, match=r"tokens lie from 0 to 36\. Got 3 to 37"):
        generate(model, [3, 37], 5)
    with pytest.raises(ValueError, match=r"tokens.*1.*0"):
        generate(model, [3], 0)
    with pytest.raises(ValueError, match=r"temperature.*0"):
        Sampling(temperature=-1.0)
    with pytest.raises(ValueError, match=r"top_k.*1"):
        Sampling(top_k=0)
    with pytest.raises(ValueError, match=r"seed must be .* below 2\^64"):
        Sampling(seed=2**64)


# --- sizes ---------------------------------------------------------------------------------------------------------


def test_presets_fit_their_own_rules() -> None:
    sizes = {name: (c.layers, c.hidden, c.heads, c.inner_size) for name, c in PRESETS.items()}
    assert sizes == {"tiny": (2, 128, 4, 384), "small": (12, 768, 12, 2048)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, r"hidden.*heads=3.*\b32"),
        ({"heads": 32}, r"even head dimension"),
        ({"kv_heads": 3}, r"kv_heads must be at least 1 and divide heads=4\. Got 3"),
        ({"window": 0}, r"window.*\b1.*\b0"),
        ({"eps": math.inf}, r"eps must be above 0 and finite\. Got inf"),
        ({"positions": 0}, r"positions must be at least 1\. Got 0"),
        ({"dropout": 1.0}, r"dropout.*\b0.*\b1"),
        ({"rotary_base": 0.0}, r"rotary_base must be above 0"),
    ],
)
def test_bad_sizes(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_sizes_that_do_not_divide_are_told_before_any_process() -> None:
    with pytest.raises(ValueError, match=r"heads.*y=8.*4"):
        config().check(CubeShape(y=8))
    with pytest.raises(ValueError, match=r"kv_heads must divide by y=2\. Got 1\. Change kv_heads or the cube"):
        config(kv_heads=1).check(CubeShape(y=2))
    with pytest.raises(ValueError, match=r"inner.*y=2.*25"):
        config(inner=25).check(CubeShape(y=2))


def example_loss(shape: Shape) -> tuple[float, int]:
    cube = Cube(*shape)
    model = make(cube)
    arguments = model.example(48)
    with pytest.raises(ValueError, match=r"tokens.*\d+.*\d+\..*50"):
        model.example(50)
    return float(model(**arguments)), len(arguments["ids"])


def test_an_example_has_the_tokens_that_it_is_asked_for() -> None:
    for loss, rows in run_ranks(4, example_loss, (2, 1, 2, 1)):
        assert 0 < loss < 10
        assert rows == 24
