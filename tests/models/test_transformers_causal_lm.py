"""Causal language models of the transformers library on a cube equal the originals, one text after another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from models.gpt import count_targets, lay, pack_texts
from models.transformers_causal_lm import PackedCausalLM
from tensor3d import Cube, gather
from tensor3d.parallelize import full_state_dict, full_tensor, own_attention
from tensor3d.parallelize.auto.op_rules import name_of as name_of_op
from tests.parallelize.foreign import as_in_model, varied
from tests.ranks import run_ranks
from tests.single_device_reference import error, name_of, worst

transformers = pytest.importorskip("transformers")

Shape = tuple[int, int, int, int]
VOCAB, CAPACITY = 67, 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Of all families. Heads have a size of their own where the family lets them."""

OF_16 = {"head_dim": 4}
HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 4},
    "qwen2": OF_16,
    "qwen3": {"tie_word_embeddings": True},
    "olmo2": OF_16,
    "olmo3": OF_16 | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": OF_16 | {"no_rope_layers": [1, 0], "pad_token_id": 0},
    "granite": OF_16 | {"logits_scaling": 2.0, "residual_multiplier": 0.7, "embedding_multiplier": 3.0},
    "helium": OF_16,
    "exaone4": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "hunyuan_v1_dense": OF_16,
    "seed_oss": {"residual_dropout": 0.0, "attention_dropout": 0.0},
    "ernie4_5": {"use_bias": True},
    "arcee": OF_16 | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "stablelm": OF_16 | {"rope_parameters": HALF},
    "phi": OF_16,
    "glm": OF_16 | {"rope_parameters": HALF},
    "glm4": OF_16 | {"rope_parameters": HALF},
    "gpt_neox": OF_16 | {"use_parallel_residual": True},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere": OF_16,
    "cohere2": OF_16 | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "nemotron": OF_16,
    "olmo": OF_16,
    "starcoder2": OF_16 | {"residual_dropout": 0.0, "embedding_dropout": 0.0},
}
"""Each family that is tried, with what it is made with beside the sizes."""


def original(family: str, **changes: Any) -> Any:
    """A small model of the library in fp64, with no parameter at a value such as 0 or 1."""
    torch.manual_seed(0)
    config = type(transformers.AutoConfig.for_model(family))
    model = transformers.AutoModelForCausalLM.from_config(config(**SIZES | FAMILIES.get(family, {}) | changes))
    return varied(model.double().train())


def texts() -> list[list[list[int]]]:
    lengths, generator = [7, 5, 3, 9, 12, 4, 4, 4, 1, 6, 5, 2, 11], torch.Generator().manual_seed(1)
    drawn = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [list(map(list, pack)) for pack in pack_texts(drawn, CAPACITY, multiple_of=8)]


def alone(model: nn.Module, packs: list[list[list[int]]]) -> tuple[Tensor, list[Tensor]]:
    """The mean loss of the original, and its scores, of each text by itself."""
    every = [torch.tensor(text) for pack in packs for text in pack]
    logits = [model(input_ids=text[None], use_cache=False).logits[0] for text in every]
    losses = [
        nn.functional.cross_entropy(scores[:-1], text[1:], reduction="sum")
        for scores, text in zip(logits, every, strict=True)
    ]
    return torch.stack(losses).sum() / count_targets(packs), logits


def own_rows(rows: Tensor, packs: list[list[list[int]]]) -> list[Tensor]:
    """(M, ...) of all packs to those of each text."""
    found = []
    for pack, of_pack in zip(packs, rows.split(CAPACITY), strict=True):
        start = 0
        for text in pack:
            found.append(of_pack[start : start + len(text)])
            start += len(text)
    return found


def implementations(model: nn.Module) -> list[str]:
    """Of attention, that the library's configs name."""
    return [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]


class InFp64(TorchFunctionMode):
    """Inside, what is fp64 is not rounded to fp32, as the library's norms round hidden states."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        narrows = func is Tensor.float or (func is Tensor.to and torch.float32 in (*args[1:], *(kwargs or {}).values()))
        if wide and name_of_op(func) in ("matmul", "__matmul__"):  # of rotary frequencies, and positions in fp32
            args = args[0], args[1].double()
        return args[0] if wide and narrows else func(*args, **(kwargs or {}))


def whole_vocabulary(logits: Tensor, cube: Cube) -> Tensor:
    """(M/xz, V/y) to (M, V) on every rank: blocks of an uneven vocabulary are filled up on the way."""
    widest = -(-VOCAB // cube.shape.y)
    filled = nn.functional.pad(logits, (0, widest - logits.shape[1]))
    gathered = gather(filled, cube, "y").unflatten(1, (cube.shape.y, widest))
    widths = [
        len(part) for part in torch.arange(VOCAB).tensor_split([widest * (i + 1) for i in range(cube.shape.y - 1)])
    ]
    return torch.cat([gathered[:, i, :width] for i, width in enumerate(widths)], dim=1)


def compared(cube: Cube, family: str) -> dict[str, float]:
    theirs, packs = original(family), texts()
    before = implementations(theirs)
    ours = PackedCausalLM(theirs, cube)
    assert implementations(theirs) == before
    assert set(implementations(ours.model)) == {"tensor3d"}
    batch, targets = lay(packs, CAPACITY, cube), count_targets(packs)
    with InFp64():
        loss = ours(batch, targets)
        wanted, scores = alone(theirs, packs)
        loss.backward()
        wanted.backward()
        with torch.no_grad():
            logits = own_rows(whole_vocabulary(ours.logits(batch), cube), packs)
    back = full_state_dict(ours.model, cube)
    assert all(torch.equal(back[name], value) for name, value in theirs.state_dict().items())
    errors = {"loss": error(loss, wanted), "logits": error(torch.cat(logits), torch.cat(scores))}
    mine = dict(ours.model.named_parameters())
    for name, parameter in theirs.named_parameters():
        got, right = full_tensor(mine[name].grad, cube), as_in_model(ours.model, name, parameter.grad)
        errors[name] = error(got, right, name)
    return errors


def _all(shape: Shape, families: tuple[str, ...]) -> dict[str, float]:
    cube, errors = Cube(*shape), {}
    for family in families:
        errors |= {f"{name} of {family}": value for name, value in compared(cube, family).items()}
    return errors


@pytest.mark.parametrize("family", FAMILIES)
def test_it_equals_its_original_on_one_device(family: str) -> None:
    if family in ("stablelm", "nemotron") and transformers.__version__.startswith("5.0."):
        pytest.skip("the library's oldest version makes its masks there whatever attention wants")
    name, value = max(compared(Cube.single(), family).items(), key=lambda each: each[1])
    assert value <= 1e-9, f"{name} differs by {value}"


def test_it_equals_its_original_on_a_cube() -> None:
    name, value = worst(run_ranks(2, _all, (1, 1, 2, 1), ("exaone4",)))
    assert value <= 1e-9, f"{name} differs by {value}"


SOME = ("mistral", "qwen3", "olmo3", "gpt_neox")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "families"),
    [((2, 2, 2, 1), tuple(FAMILIES)), ((1, 2, 4, 1), SOME), ((4, 2, 1, 1), SOME), ((1, 2, 2, 2), SOME)],
    ids=lambda each: name_of(each) if len(each) == 4 and isinstance(each[0], int) else "",
)
def test_families_equal_their_originals_on_cubes(shape: Shape, families: tuple[str, ...]) -> None:
    name, value = worst(run_ranks(8, _all, shape, families))
    assert value <= 1e-9, f"{name} differs by {value}"


def test_the_page_names_the_families_that_are_tried() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    told = page.split("Tried, against")[1].partition(":")[2].split("Windows,")[0]
    assert len(re.sub(r"2 and 3", "2, OLMo 3", " ".join(told.split())).rstrip(". ").split(", ")) == len(FAMILIES)


def test_layers_that_are_computed_again_have_their_texts() -> None:
    theirs, packs, cube = original("llama"), texts(), Cube.single()
    kept = PackedCausalLM(theirs, cube)
    enable = getattr(theirs, "activation_checkpointing_enable", theirs.gradient_checkpointing_enable)
    enable()
    again = PackedCausalLM(theirs, cube)
    batch, targets = lay(packs, CAPACITY, cube), count_targets(packs)
    for each in (kept, again):
        each(batch, targets).backward()
    for (name, parameter), same in zip(kept.named_parameters(), again.parameters(), strict=True):
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, same.grad), name


def test_what_the_head_reads() -> None:
    theirs, packs, cube = original("qwen2"), texts(), Cube.single()
    batch = lay(packs, CAPACITY, cube)
    ours = PackedCausalLM(theirs, cube)
    with torch.no_grad():
        hidden = torch.cat(own_rows(ours.hidden(batch), packs))
        wanted = [theirs.model(input_ids=torch.tensor([text])).last_hidden_state[0] for pack in packs for text in pack]
    assert error(hidden, torch.cat(wanted)) <= 1e-5


def test_what_attention_calls_is_not_looked_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls are many more of more texts; those of the library's code are not."""
    cube, looked_up = Cube.single(), []
    ours = PackedCausalLM(original("llama"), cube)
    monkeypatch.setattr(own_attention, "name_of", lambda function: looked_up.append(function) or name_of_op(function))
    counts = []
    for packs in ([[[1] * CAPACITY]], [[[1, 2]] * (CAPACITY // 4) + [[1, 2, 3]] * (CAPACITY // 6)]):
        looked_up.clear()
        ours(lay(packs, CAPACITY, cube), count_targets(packs))
        counts.append(len(looked_up))
    assert counts[0] == counts[1] > 0


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma2", {}, r"softcap=50\.0"),
        ("seed_oss", {"residual_dropout": 0.1}, r"draws random numbers \(dropout\)"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic' depend"),
        ("cohere", {"use_qk_norm": True}, "holds q_norm, k_norm too"),
    ],
)
def test_models_whose_code_is_not_right_on_a_block(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedCausalLM(original(family, **changes), Cube.single())


@pytest.mark.parametrize("model", ["LlamaModel", "T5ForConditionalGeneration", "Linear"])
def test_what_is_no_causal_language_model(model: str) -> None:
    if model == "Linear":
        given: nn.Module = nn.Linear(2, 2)
    elif model == "LlamaModel":
        given = original("llama").model
    else:
        given = transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4)
        )
    with pytest.raises(ValueError, match=f"takes a causal language model .* Got a {model}"):
        PackedCausalLM(given, Cube.single())


def test_a_step_without_a_next_token_is_refused() -> None:
    cube = Cube.single()
    with pytest.raises(ValueError, match="targets must be at least 1"):
        PackedCausalLM(original("llama"), cube)(lay([[[3]]], CAPACITY, cube), 0)


def test_a_mask_is_refused() -> None:
    cube = Cube.single()
    ours = PackedCausalLM(original("llama"), cube)
    batch = lay(texts(), CAPACITY, cube)
    mask = torch.zeros(1, 1, len(batch.ids), len(batch.ids))
    with (
        ours.rows.holding(batch.sequences),
        pytest.raises(ValueError, match="asks for an attention mask"),
    ):
        ours.model(input_ids=batch.ids[None], position_ids=batch.sequences.positions[None], attention_mask=mask)
