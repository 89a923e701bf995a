"""The BERT of the transformers library on a cube equals the original: packed batches against padded ones."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.bert import PreTrainingOutput
from models.transformers_bert import PackedBert, plan_for
from models.transformers_bert.adapter import CurrentBatch
from tensor3d import Cube, gather
from tensor3d.data import Pack
from tensor3d.optim import AdamW
from tensor3d.parallelize import full_state_dict, parallelize
from tests.models.bert.huggingface import subject
from tests.models.padded import PACKS, of_sequences, of_tokens, padded
from tests.models.toy import Shape, lay, totals, toy_packs
from tests.ranks import run_ranks
from tests.single_device_reference import error, full, worst

transformers = pytest.importorskip("transformers")

ODD = 67
BERTS = 30522
SHAPES: tuple[Shape, ...] = ((2, 2, 2, 1), (1, 2, 4, 1), (4, 2, 1, 1), (1, 2, 2, 2))


def original(vocab: int = ODD, kind: str = "BertForPreTraining", **changes: Any) -> Any:
    """A small model of the library in fp64, with random values in every vector too, and no dropout."""
    return subject.original(kind, vocab_size=vocab, **changes).double().train()


def packs_with_pad(vocab: int = ODD, seed: int = 3) -> list[Pack]:
    """Packs in which the id of padding, 0, also stands inside sequences: the lookup gives its row no gradient."""
    packs = toy_packs(vocab, PACKS, seed)
    for pack in packs:
        pack.ids[1::5] = 0
    return packs


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Under all of their names: a tied parameter has several."""
    return dict(model.named_parameters(remove_duplicate=False))


def gradient_errors(packed: PackedBert, twin: nn.Module) -> dict[str, float]:
    ours, theirs = named(packed.model), named(twin)
    assert ours.keys() == theirs.keys()
    errors = {}
    for name in theirs:
        got, wanted = full(ours[name].grad), full(theirs[name].grad)
        if name.endswith("key.bias"):
            # Shifts all scores of a row alike, so its gradient is zero but for rounding: measured by the weight's.
            scale = full(theirs[name.replace("bias", "weight")].grad).abs().max()
            errors[name] = float(torch.maximum(got.abs().max(), wanted.abs().max()) / scale)
        else:
            errors[name] = error(got, wanted, name)
    return errors


def without_labels(packs: list[Pack]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in padded(packs).items() if "label" not in name}


def states(twin: Any, packs: list[Pack]) -> dict[str, Tensor]:
    """Hidden states before, between and after the original's layers, of all tokens; a pooled vector a sequence."""
    given = without_labels(packs)
    with torch.no_grad():
        output = twin.base_model(**given, output_hidden_states=True)
    layers = enumerate([*output.hidden_states, output.last_hidden_state])
    return {f"layer {i}": h[given["attention_mask"].bool()] for i, h in layers} | {"pooled": output.pooler_output}


def packed_states(packed: PackedBert, packs: list[Pack], cube: Cube) -> dict[str, Tensor]:
    """The same, of the cube."""
    with torch.no_grad():
        encoded = packed.encode(lay(packs, cube), all_layers=True)
        layers = enumerate([*encoded.layers, encoded.hidden])
        found = {f"layer {i}": of_tokens(gather(h, cube, "z"), packs) for i, h in layers}
        assert encoded.pooled is not None
        return found | {"pooled": of_sequences(gather(encoded.pooled, cube, "y"), packs, cube.shape.planes)}


def step(packed: PackedBert, twin: Any, packs: list[Pack], cube: Cube) -> tuple[PreTrainingOutput, Any]:
    """Forward and backward of both."""
    ours, theirs = packed(lay(packs, cube), *totals(packs)), twin(**padded(packs))
    ours.loss.backward()
    theirs.loss.backward()
    return ours, theirs


# --- on eight ranks ------------------------------------------------------------------------------------------------


def parity(shapes: tuple[Shape, ...], vocab: int) -> dict[str, float]:
    packs, twin, errors = packs_with_pad(vocab), original(vocab), {}
    theirs, wanted = twin(**padded(packs)), states(twin, packs)
    theirs.loss.backward()
    assert len(wanted) == 5  # the embeddings, two layers, the last hidden state, the pooler
    for shape in shapes:
        cube = Cube(*shape)
        packed = PackedBert(twin, cube)
        ours = packed(lay(packs, cube), *totals(packs))
        ours.loss.backward()
        got = packed_states(packed, packs, cube)
        assert got.keys() == wanted.keys()
        found = {"loss": error(ours.loss, theirs.loss)} | gradient_errors(packed, twin)
        found |= {name: error(got[name], wanted[name], name) for name in wanted}
        errors |= {f"{name} on {shape}": value for name, value in found.items()}
    return errors


def test_loss_gradients_and_states_equal_the_padded_original() -> None:
    name, value = worst(run_ranks(4, parity, ((1, 2, 2, 1),), ODD))
    assert value <= 1e-9, f"{name} differs by {value}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "vocab",
    [ODD, pytest.param(BERTS, marks=pytest.mark.long(reason="longer tables: 67 rows divide by no axis, as these"))],
)
def test_parity_on_every_cube(vocab: int) -> None:
    name, value = worst(run_ranks(8, parity, SHAPES, vocab))
    assert value <= 1e-9, f"{name} differs by {value}"


def checkpointed(model: Any) -> Any:
    """A copy with gradient checkpointing, which the library calls otherwise since 5.18."""
    found = copy.deepcopy(model)
    getattr(found, "activation_checkpointing_enable", found.gradient_checkpointing_enable)()
    return found


def two_steps_and_back(shape: Shape) -> dict[str, float]:
    """Trains both, with gradient checkpointing on the cube alone, and loads the cube's weights into the library's."""
    cube, twin = Cube(*shape), original()
    checkpointing = checkpointed(twin)
    packed = PackedBert(checkpointing, cube)
    optimizers: list[torch.optim.Optimizer] = [
        AdamW(packed.parameters(), cube, lr=1e-2, eps=1e-6, weight_decay=0.1),
        torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=1e-6, weight_decay=0.1),
    ]
    errors = {}
    for number in range(2):
        ours, theirs = step(packed, twin, packs_with_pad(seed=number), cube)
        errors[f"loss {number}"] = error(ours.loss, theirs.loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    back = original()
    incompatible = back.load_state_dict(full_state_dict(packed.model, cube), strict=False)
    assert not incompatible.missing_keys
    assert not incompatible.unexpected_keys
    trained, start = named(twin), named(original())
    for name, parameter in named(back).items():
        assert not torch.equal(parameter, start[name]), f"{name} was not trained"
        errors[name] = error(parameter, trained[name], name)
    return errors


@pytest.mark.slow
def test_two_steps_and_the_weights_back_in_the_original() -> None:
    name, value = worst(run_ranks(4, two_steps_and_back, (2, 1, 2, 1)))
    assert value <= 1e-9, f"{name} differs by {value}"


def heads_on_eight() -> str:
    cube = Cube(1, 8, 1)
    with pytest.raises(ValueError, match="heads") as problem:
        PackedBert(original(num_attention_heads=4), cube)
    return str(problem.value)


@pytest.mark.slow
def test_heads_that_do_not_divide_are_named_on_every_rank() -> None:
    for told in run_ranks(8, heads_on_eight):
        assert told.startswith("heads must divide by y=8. Got 4 at 'bert.encoder.layer.0.attention.self'.")


# --- on one device -------------------------------------------------------------------------------------------------


@pytest.fixture
def cube() -> Cube:
    return Cube.single()


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu_new"},
        {"attn_implementation": "eager"},
        {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3},
        {"pad_token_id": None},
    ],
    ids=str,
)
def test_settings_of_the_library(cube: Cube, changes: dict[str, Any]) -> None:
    twin, packs = original(**changes).eval(), packs_with_pad()
    packed = PackedBert(twin, cube)
    assert not packed.model.training  # as the given model is
    ours, theirs = step(packed, twin, packs, cube)
    name, value = worst([{"loss": error(ours.loss, theirs.loss)} | gradient_errors(packed, twin)])
    assert value <= 1e-9, f"{name} differs by {value}"


@pytest.mark.parametrize("which", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
def test_dropout_acts_in_training(cube: Cube, which: str) -> None:
    packs = packs_with_pad()
    packed = PackedBert(original(**{which: 0.3}), cube)
    losses = [packed(lay(packs, cube), *totals(packs)).loss.detach() for _ in range(2)]
    assert losses[0] != losses[1]


def test_logits_are_made_for_masked_rows_alone_and_no_mask_is(cube: Cube) -> None:
    packed = PackedBert(original(attn_implementation="eager"), cube)
    rows, masks = [], []
    packed.model.cls.predictions.decoder.register_forward_hook(lambda _, __, logits: rows.append(logits.shape[0]))
    packed.model.bert.encoder.layer[0].register_forward_pre_hook(
        lambda _, args, kwargs: masks.append([*args[1:], kwargs.get("attention_mask")]), with_kwargs=True
    )
    packs = packs_with_pad()
    batch = lay(packs, cube)
    packed(batch, *totals(packs))
    assert rows == [len(batch.masked)]
    assert len(batch.masked) < len(batch.ids)
    assert all(mask is None for each in masks for mask in each)


def test_gradient_checkpointing_of_the_given_model(cube: Cube) -> None:
    twin, packs, calls = original(), packs_with_pad(), []
    recomputing = checkpointed(twin)
    packed = PackedBert(recomputing, cube)
    packed.model.bert.encoder.layer[1].attention.self.register_forward_hook(lambda *_: calls.append(1))
    step(packed, twin, packs, cube)
    assert len(calls) == 2  # once forward, once in backward, after the batch was let go
    assert max(gradient_errors(packed, twin).values()) <= 1e-9


def test_an_old_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = original()
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.6")  # once used, it is another object
    with pytest.raises(ValueError, match=r"transformers 5 or newer\. transformers 4\.57\.6 is installed\. Run pip"):
        PackedBert(model, Cube.single())


def test_the_original_is_left_as_it_was(cube: Cube) -> None:
    twin = original(attn_implementation="eager")
    before = copy.deepcopy(twin.state_dict())
    packed, packs = PackedBert(twin, cube), packs_with_pad()
    packed(lay(packs, cube), *totals(packs)).loss.backward()
    for parameter in packed.parameters():
        parameter.data.zero_()
    assert twin.config._attn_implementation == "eager"
    assert all(parameter.grad is None for parameter in twin.parameters())
    assert before.keys() == twin.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in twin.state_dict().items())


@pytest.mark.parametrize("pooler", [True, False])
def test_an_encoder_without_heads(cube: Cube, pooler: bool) -> None:
    twin = original(kind="BertModel") if pooler else original()  # whose encoder gets its pooler taken away
    if not pooler:
        twin = twin.bert
        twin.pooler = None
    packs = packs_with_pad()
    packed = PackedBert(twin, cube)
    encoded = packed.encode(lay(packs, cube))
    given = without_labels(packs)
    wanted = twin(**given)
    real = given["attention_mask"].bool()
    assert error(of_tokens(encoded.hidden, packs), wanted.last_hidden_state[real]) <= 1e-9
    assert encoded.layers == ()
    if pooler:
        assert encoded.pooled is not None
        assert error(of_sequences(encoded.pooled, packs, 1), wanted.pooler_output) <= 1e-9
    else:
        assert encoded.pooled is None
    with pytest.raises(ValueError, match=r"heads of BertForPreTraining..*BertModel. Use PackedBert.encode"):
        packed(lay(packs, cube), *totals(packs))


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"is_decoder": True}, "is_decoder=False"),
        ({"is_decoder": True, "add_cross_attention": True}, "is_decoder=False"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='absolute'"),
        ({"chunk_size_feed_forward": 4}, "chunk_size_feed_forward=0"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=True"),
    ],
    ids=str,
)
def test_settings_that_packed_rows_do_not_allow(cube: Cube, changes: dict[str, Any], setting: str) -> None:
    model = original(**changes)
    with pytest.raises(ValueError, match=f"PackedBert needs config.{setting}: .* Make the model with {setting}"):
        PackedBert(model, cube)


def test_another_model(cube: Cube) -> None:
    with pytest.raises(ValueError, match=r"BertForPreTraining or BertModel..*BertForMaskedLM"):
        PackedBert(original(kind="BertForMaskedLM"), cube)


def test_without_transformers(cube: Cube, monkeypatch: pytest.MonkeyPatch) -> None:
    model = original()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"not installed\. Run pip install '\.\[transformers\]'"):
        PackedBert(model, cube)


def test_a_call_without_a_batch(cube: Cube) -> None:
    packed = PackedBert(original(), cube)
    batch = lay(packs_with_pad(), cube)
    with pytest.raises(ValueError, match=r"packed.*Call PackedBert"):
        packed.model(batch.ids.unsqueeze(0), position_ids=batch.positions.unsqueeze(0))


def test_a_plan_that_leaves_a_layer_out(cube: Cube) -> None:
    model = original()
    plan = plan_for(model, CurrentBatch())
    del plan["cls.predictions.transform.dense"]
    with pytest.raises(ValueError, match=r"cls\.predictions\.transform\.dense"):
        parallelize(model, cube, plan)
