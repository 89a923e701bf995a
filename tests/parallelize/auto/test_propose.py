"""`propose_plan` reads models of others: what it chooses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor3d import Cube
from tensor3d.parallelize import parallelize, rules
from tensor3d.parallelize.auto.propose import propose_plan
from tests.parallelize.foreign import HIDDEN, Language, TinyRMSNorm, Vision
from tests.parallelize.stacks import Stack, hidden, linear, open_at, spelled


def test_linears_come_in_pairs() -> None:
    proposal = propose_plan(nn.Sequential(linear(16, 64), nn.GELU(), linear(64, 16)), hidden())
    assert proposal.plan == {"0": rules.linear("z"), "2": rules.linear("y")}
    assert not proposal.unresolved
    assert "the argument input: this rank's block on face z, as local_block cuts it" in proposal.remarks


def test_the_original_is_left_as_it_was() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        model.count += 1
        model.last = torch.rand(2)
        model.register_buffer("cache", torch.zeros(3), persistent=False)
        model.length = x.shape[1]
        model.seen.append(x)
        return model.b(model.drop(model.a(x)))

    original = Stack(forward, a=linear(), b=linear(), drop=nn.Dropout(0.5))
    original.b.eval()
    original.seen = [1]
    for name in ("count", "last"):
        original.register_buffer(name, torch.zeros(2))
    x = torch.randn(2, 5, HIDDEN, requires_grad=True)
    attributes = {name: list(value) for name, value in vars(original).items() if isinstance(value, (list, dict, set))}
    before, state = copy.deepcopy(original.state_dict()), torch.get_rng_state()
    propose_plan(original, x)
    assert [part.training for part in original.modules()] == [True, True, False, True]
    assert all(torch.equal(before[name], value) for name, value in original.state_dict().items())
    assert list(original._buffers) == ["count", "last"]
    assert not hasattr(original, "length")
    assert attributes == {name: list(vars(original)[name]) for name in attributes}
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad is None
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in original.modules())
    assert all(parameter.grad is None for parameter in original.parameters())


@pytest.mark.parametrize("norm_first", [False, True])
def test_torchs_encoder_is_planned_as_it_is(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(HIDDEN, 4, 32, batch_first=True, norm_first=norm_first)
    proposal = propose_plan(nn.TransformerEncoder(layer, 3, nn.LayerNorm(HIDDEN), enable_nested_tensor=False), hidden())
    assert spelled(proposal) == {
        "layers.*.self_attn": "attention(rows)",
        "layers.*.linear1": 'linear("z")',
        "layers.*.linear2": 'linear("y")',
        "layers.*.norm1": 'norm("z")',
        "layers.*.norm2": 'norm("z")',
        "norm": 'norm("z")',
    }
    assert not proposal.unresolved
    assert proposal.plan["layers.*.self_attn"] == rules.attention(proposal.rows)


def test_a_tied_language_model_is_planned_whole() -> None:
    proposal = propose_plan(Language(), torch.ones(3, 5, dtype=torch.long), torch.arange(5).expand(3, 5))
    assert spelled(proposal) == {
        "embed": "embedding()",
        "positions": "table()",
        "blocks.*.norm": 'norm("z")',
        "blocks.*.attention": "attention(rows)",
        "blocks.*.scale": 'wrapped({"gamma": vector("z")})',
        "blocks.*.norm2": 'norm("z")',
        "blocks.*.up": 'linear("z")',
        "blocks.*.down": 'linear("y")',
        "norm": 'norm("z")',
        "head": "projection()",
    }
    assert not proposal.unresolved
    assert any("embed.weight and head.weight are one parameter" in remark for remark in proposal.remarks)


def test_positions_that_the_module_numbers_itself_are_a_table() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        return x + model.positions(torch.arange(x.shape[1]))

    assert propose_plan(Stack(forward, positions=nn.Embedding(9, HIDDEN)), hidden()).plan == {
        "positions": rules.table()
    }


def test_causal_masks_are_taken_for_causal_attention() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        return model.encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]), is_causal=True)

    layer = nn.TransformerEncoderLayer(HIDDEN, 4, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    made_inside = propose_plan(Stack(forward, encoder=encoder), hidden())
    made_outside = propose_plan(encoder, hidden(), mask=nn.Transformer.generate_square_subsequent_mask(5))
    for proposal, name in ((made_inside, "encoder.layers.*.self_attn"), (made_outside, "layers.*.self_attn")):
        assert spelled(proposal)[name] == "attention(rows, causal=True)"
        assert not proposal.unresolved
        assert any("needs no mask; one that does just that may be passed" in remark for remark in proposal.remarks)
    assert [remark for remark in made_outside.remarks if "argument" in remark] == [
        "the argument src: this rank's block on face z, as local_block cuts it"
    ]


def test_an_odd_chain_gets_one_turn() -> None:
    def masked_head(model: Any, ids: Tensor) -> Tensor:
        h = model.embed(ids)
        return model.decoder(model.norm(F.gelu(model.dense(h))))

    model = Stack(masked_head, embed=nn.Embedding(50, HIDDEN), dense=linear(), norm=TinyRMSNorm(HIDDEN), decoder=None)
    model.decoder = nn.Linear(HIDDEN, 50)
    model.decoder.weight = model.embed.weight
    proposal = propose_plan(model, torch.zeros(2, 3, dtype=torch.long))
    assert proposal.plan == {
        "embed": rules.embedding(),
        "dense": rules.linear("z"),
        "norm": rules.norm("y"),
        "decoder": rules.projection(turn=True),
    }
    assert "its input lies on face y and is turned first" in str(proposal)


def test_the_turn_is_where_the_fewest_columns_are() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        return x + model.c(model.b(model.a(x)))

    model = Stack(forward, a=linear(16, 8), b=linear(8, 64), c=linear(64, 16))
    assert propose_plan(model, hidden()).plan == {
        "a": rules.linear("z"),
        "b": rules.linear("z", turn=True),
        "c": rules.linear("y"),
    }


def test_one_early_turn_spares_two_late_ones() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        h = model.a(x)
        return x + model.c(model.b(h)) + model.e(model.d(h))

    model = Stack(forward, a=linear(), b=linear(), c=linear(), d=linear(), e=linear())
    assert propose_plan(model, hidden()).plan == {
        "a": rules.linear("y", turn=True),
        "b": rules.linear("z"),
        "c": rules.linear("y"),
        "d": rules.linear("z"),
        "e": rules.linear("y"),
    }


def test_narrow_outputs_are_heads_and_hidden_states_are_not() -> None:
    def forward(model: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(model.dense(x))
        return model.spans(h).softmax(-1), model.classifier(h), model.back(h)

    model = Stack(forward, dense=linear(16, 32), spans=linear(32, 2), classifier=linear(32, 100), back=linear(32, 16))
    proposal = propose_plan(model, hidden())
    assert proposal.plan == {
        "dense": rules.linear("z"),
        "spans": rules.head("y"),
        "classifier": rules.head("y"),
        "back": rules.linear("y"),
    }
    assert not proposal.unresolved, "a softmax over a head's outputs has them all"


def test_what_is_replicated_is_planned_where_a_module_holds_it() -> None:
    model, images = Vision(), torch.randn(4, 3, 8, 8)
    proposal = propose_plan(model, images)
    assert proposal.plan["patches"] == rules.replicated(("data", "x", "y", "z"), enters="z")
    assert spelled(proposal)[""] == 'wrapped({"gate": vector("z")})'
    assert not proposal.unresolved
    model.patches.norm.train()
    (point,) = propose_plan(model, images).unresolved
    assert point.startswith("patches.norm (BatchNorm2d) is in training. ")


def test_a_module_of_two_names_is_planned_under_both() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        return model.second(F.relu(model.first(x)))

    block = nn.Sequential(linear(16, 32), nn.ReLU(), linear(32, 16))
    model = Stack(forward, first=block, second=block)
    plan = propose_plan(model, hidden()).plan
    assert plan == {
        "first.0": rules.linear("z"),
        "first.2": rules.linear("y"),
        "second.0": rules.linear("z"),
        "second.2": rules.linear("y"),
    }
    parallelize(model, Cube.single(), plan)


def test_transformers_bert_is_planned_but_for_its_pooler() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=67,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=12,
    )
    ids = torch.ones(2, 6, dtype=torch.long)
    model = transformers.BertForPreTraining(config)
    proposal = propose_plan(model, input_ids=ids, attention_mask=ids, token_type_ids=ids)
    assert "pass `packs.positions`" in open_at(proposal, "bert.embeddings.position_embeddings")
    places = torch.arange(6).expand(2, 6)
    proposal = propose_plan(model, input_ids=ids, attention_mask=ids, token_type_ids=ids, position_ids=places)
    layer = "bert.encoder.layer.*"
    assert spelled(proposal) == {
        "bert.embeddings.word_embeddings": "embedding()",
        "bert.embeddings.position_embeddings": "table()",
        "bert.embeddings.token_type_embeddings": "table()",
        "bert.embeddings.LayerNorm": 'norm("z")',
        f"{layer}.attention.self": "own_attention(rows, head_dim=4)",
        f"{layer}.attention.output.dense": 'linear("y")',
        f"{layer}.attention.output.LayerNorm": 'norm("z")',
        f"{layer}.intermediate.dense": 'linear("z")',
        f"{layer}.output.dense": 'linear("y")',
        f"{layer}.output.LayerNorm": 'norm("z")',
        "cls.predictions.transform.dense": 'linear("z")',
        "cls.predictions.transform.LayerNorm": 'norm("y")',
        "cls.predictions.decoder": "projection(turn=True)",
        "cls.seq_relationship": 'head("y")',
    }
    assert len(proposal.unresolved) == 1
    assert "tensor3d.select" in open_at(proposal, "bert.pooler")
