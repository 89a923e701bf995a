"""`propose_plan` reads models of others: what it chooses, what it leaves open and says, and that the plan is right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor3d import Cube, gather, sum_copies
from tensor3d.parallel import kinds, parallelize
from tensor3d.parallel.folding import fold
from tensor3d.parallel.parity import Faces
from tensor3d.parallel.proposal import Proposal
from tensor3d.parallel.propose import propose_plan
from tests.parallel.foreign import (
    HIDDEN,
    LENGTHS,
    ROWS,
    VOCAB,
    Language,
    TinyRMSNorm,
    Vision,
    errors_of,
    own_plane,
    own_sequences,
    per_sequence,
    varied,
)
from tests.ranks import run_ranks
from tests.twins import worst


class Stack(nn.Module):
    """Layers by name, and a forward given as a function of them and the input."""

    def __init__(self, forward: Any, **layers: Any) -> None:
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).view(*x.shape[:-1], 3, 4, -1).permute(2, 0, 3, 1, 4)
        scores = (parts[0] @ parts[1].transpose(-2, -1)).softmax(-1)
        return self.out((scores @ parts[2]).transpose(1, 2).flatten(2))


def linear(inputs: int = HIDDEN, outputs: int = HIDDEN) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def hidden(batch: int = 2, sequence: int = 5) -> Tensor:
    return torch.randn(batch, sequence, HIDDEN)


def spelled(proposal: Proposal) -> dict[str, str]:
    assert [line.pattern for line in proposal.lines] == list(proposal.plan)
    return {line.pattern: line.kind for line in proposal.lines}


def open_at(proposal: Proposal, place: str) -> str:
    """The one open point at a place."""
    (found,) = [point for point in proposal.unresolved if point.startswith(f"{place} (")]
    return found


# --- what is chosen ------------------------------------------------------------------------------------------------


def test_linears_come_in_pairs() -> None:
    proposal = propose_plan(nn.Sequential(linear(16, 64), nn.GELU(), linear(64, 16)), hidden())
    assert proposal.plan == {"0": kinds.linear("z"), "2": kinds.linear("y")}
    assert not proposal.unresolved
    assert "the argument input: this rank's block on face z, as own_block cuts it" in proposal.remarks


def test_the_original_is_left_as_it_was() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        model.count += 1
        model.last = torch.rand(2)
        return model.b(model.drop(model.a(x)))

    original = Stack(forward, a=linear(), b=linear(), drop=nn.Dropout(0.5))
    original.b.eval()
    for name in ("count", "last"):
        original.register_buffer(name, torch.zeros(2))
    x = torch.randn(2, 5, HIDDEN, requires_grad=True)
    before, state = copy.deepcopy(original.state_dict()), torch.get_rng_state()
    propose_plan(original, x)
    assert [part.training for part in original.modules()] == [True, True, False, True]
    assert all(torch.equal(before[name], value) for name, value in original.state_dict().items())
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
    assert proposal.plan["layers.*.self_attn"] == kinds.attention(proposal.rows)


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
        "positions": kinds.table()
    }


def test_an_odd_chain_gets_one_turn() -> None:
    def masked_head(model: Any, ids: Tensor) -> Tensor:
        h = model.embed(ids)
        return model.decoder(model.norm(F.gelu(model.dense(h))))

    model = Stack(masked_head, embed=nn.Embedding(50, HIDDEN), dense=linear(), norm=TinyRMSNorm(HIDDEN), decoder=None)
    model.decoder = nn.Linear(HIDDEN, 50)
    model.decoder.weight = model.embed.weight
    proposal = propose_plan(model, torch.zeros(2, 3, dtype=torch.long))
    assert proposal.plan == {
        "embed": kinds.embedding(),
        "dense": kinds.linear("z"),
        "norm": kinds.norm("y"),
        "decoder": kinds.projection(turn=True),
    }
    assert "its input lies on face y and is turned first" in str(proposal)


def test_the_turn_is_where_the_fewest_columns_are() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        return x + model.c(model.b(model.a(x)))

    model = Stack(forward, a=linear(16, 8), b=linear(8, 64), c=linear(64, 16))
    assert propose_plan(model, hidden()).plan == {
        "a": kinds.linear("z"),
        "b": kinds.linear("z", turn=True),
        "c": kinds.linear("y"),
    }


def test_one_early_turn_spares_two_late_ones() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        h = model.a(x)
        return x + model.c(model.b(h)) + model.e(model.d(h))

    model = Stack(forward, a=linear(), b=linear(), c=linear(), d=linear(), e=linear())
    assert propose_plan(model, hidden()).plan == {
        "a": kinds.linear("y", turn=True),
        "b": kinds.linear("z"),
        "c": kinds.linear("y"),
        "d": kinds.linear("z"),
        "e": kinds.linear("y"),
    }


def test_narrow_outputs_are_heads_and_hidden_states_are_not() -> None:
    def forward(model: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(model.dense(x))
        return model.spans(h).softmax(-1), model.classifier(h), model.back(h)

    model = Stack(forward, dense=linear(16, 32), spans=linear(32, 2), classifier=linear(32, 100), back=linear(32, 16))
    proposal = propose_plan(model, hidden())
    assert proposal.plan == {
        "dense": kinds.linear("z"),
        "spans": kinds.head("y"),
        "classifier": kinds.head("y"),
        "back": kinds.linear("y"),
    }
    assert not proposal.unresolved, "a softmax over a head's outputs has them all"


def test_what_is_replicated_is_planned_where_a_module_holds_it() -> None:
    model, images = Vision(), torch.randn(4, 3, 8, 8)
    proposal = propose_plan(model, images)
    assert proposal.plan["patches"] == kinds.replicated(("data", "x", "y", "z"), enters="z")
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
        "first.0": kinds.linear("z"),
        "first.2": kinds.linear("y"),
        "second.0": kinds.linear("z"),
        "second.2": kinds.linear("y"),
    }
    parallelize(model, Cube.single(), plan)


# --- what is left open ---------------------------------------------------------------------------------------------


def test_attention_of_ones_own_is_open_with_its_layers() -> None:
    blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(HIDDEN), "attend": Attend()}) for _ in range(2))

    def forward(model: Any, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = x + block["attend"](block["norm"](x))
        return x

    model = Stack(forward, blocks=blocks)
    proposal = propose_plan(model, hidden())
    assert proposal.plan == {"blocks.*.norm": kinds.norm("z")}
    (point,) = proposal.unresolved
    assert point.startswith("blocks.*.attend (Attend) does attention in its own forward (matmul)")
    assert "kinds.replace(build)" in point
    assert '(its layers: qkv: linear("z"), out: linear("y"))' in point
    with pytest.raises(ValueError, match=r"blocks\.0\.attend\.qkv"):
        parallelize(model, Cube.single(), proposal.plan)  # nothing wrong runs by silence


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda model, x: model.a(x)[:, 0], "takes rows by their place ([:, 0])"),
        (lambda model, x: model.a(x)[..., :3], "takes columns by their place ([..., :3])"),
        (lambda model, x: model.a(x).mean(1), "reduces over rows (mean)"),
        (lambda model, x: model.a(x).mean(), "reduces over rows (mean)"),
        (lambda model, x: model.a(x).softmax(-1), "reduces over columns (softmax)"),
        (lambda model, x: F.layer_norm(model.a(x), (16,)), "LayerNorm3D and RMSNorm3D are for norms"),
        (lambda model, x: model.a(x).view(10, 16), "names sizes (view to (10, 16))"),
        (lambda model, x: model.a(x).view(2, 5, 4, 4), "gives columns another shape (view to (2, 5, 4, 4))"),
        (lambda model, x: model.a(x).chunk(2, -1)[0], "cuts columns apart (chunk)"),
        (lambda model, x: F.glu(model.a(x)), "cuts columns apart (glu)"),
        (lambda model, x: torch.cat([x, model.a(x)], -1), "joins columns (cat)"),
        (lambda model, x: torch.cat([x, model.a(x)], 1), "joins rows (cat)"),
        (lambda model, x: model.a(x).mT, "turns columns into rows (mT)"),
        (lambda model, x: model.a(x) + torch.ones(5, 16), "meet a tensor of shape (5, 16) made here (add)"),
        (lambda model, x: F.linear(model.a(x), model.a.weight), "multiplies by the parameter a.weight (linear)"),
        (lambda model, x: F.mse_loss(model.a(x), x), "computes a loss (mse_loss)"),
    ],
)
def test_what_a_rank_cannot_do_on_its_block_is_open(forward: Any, message: str) -> None:
    point = open_at(propose_plan(Stack(forward, a=linear()), hidden()), "the module itself")
    assert message in point


class Product(nn.Module):
    """A linear by another name, its weight the other way round."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


def test_products_of_ones_own_are_open_and_their_attention_too() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = Product(HIDDEN, 3 * HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).split(HIDDEN, -1)
            return F.scaled_dot_product_attention(q, k, v)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads, self.up = Heads(), Product(HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(self.heads(x))

    proposal = propose_plan(nn.Sequential(Layer(), Layer()), hidden())
    assert not proposal.plan
    assert len(proposal.unresolved) == 2
    assert "does attention in its own forward" in open_at(proposal, "*.heads")
    assert "multiplies by its weight (addmm) outside of a known layer" in open_at(proposal, "*.up")


def test_cross_attention_is_left_out_of_the_plan() -> None:
    def forward(model: Any, x: Tensor, memory: Tensor) -> Tensor:
        return model.norm(x + model.cross(x, memory, memory, need_weights=False)[0])

    model = Stack(forward, cross=nn.MultiheadAttention(HIDDEN, 4), norm=nn.LayerNorm(HIDDEN))
    proposal = propose_plan(model, hidden(), hidden())
    assert proposal.plan == {"norm": kinds.norm("z")}
    assert "has other keys than queries" in open_at(proposal, "cross")


def test_elementwise_work_is_not_open() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        h = F.gelu(model.a(x[:])[:, 0:].contiguous()) * 2 + 1
        h += torch.sigmoid(h.clone()).clamp(min=0.1).to(torch.float32)
        return h.flatten(0, 1).unsqueeze(0).masked_fill(h.flatten(0, 1) > 0, 0.0)

    assert not propose_plan(Stack(forward, a=linear()), hidden()).unresolved


def test_what_cannot_be_followed_is_said() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        return model.b(torch.tensor(model.a(x).tolist()))

    proposal = propose_plan(Stack(forward, a=linear(), b=linear()), hidden())
    assert "reads what is no activation (a tensor of shape (2, 5, 16)" in open_at(proposal, "b")


def test_a_module_without_memory_is_read_too() -> None:
    with torch.device("meta"):
        model, ids = Language(), torch.ones(3, 5, dtype=torch.long)
    proposal = propose_plan(model, ids, ids)
    assert len(proposal.plan) == 10
    assert not proposal.unresolved


def test_a_clash_that_no_linear_can_mend_is_said() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        return model.a(model.a(x))

    (point,) = propose_plan(Stack(forward, a=linear()), hidden()).unresolved
    assert point.startswith("a: the two places that use its weight lie on different faces")
    assert "tensor3d.turn" in point


def test_convolutions_and_batch_norms_are_named_with_the_remedy() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        return model.norm(model.conv(x)).flatten(2).transpose(1, 2) + model.place

    model = Stack(forward, conv=nn.Conv2d(3, HIDDEN, 4, 4), norm=nn.BatchNorm2d(HIDDEN))
    model.place = nn.Parameter(torch.zeros(1, 4, HIDDEN))
    proposal = propose_plan(model, torch.randn(2, 3, 8, 8))
    assert not proposal.plan
    for place in ("conv", "norm"):
        assert "kinds.replicated((" in open_at(proposal, place)
    assert "has parameters of its own (place)" in open_at(proposal, "the module itself")


def test_masks_and_layers_that_never_ran_are_said() -> None:
    layer = nn.TransformerEncoderLayer(HIDDEN, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model.spare = linear(3, 3)
    proposal = propose_plan(model, hidden(), mask=torch.ones(5, 5, dtype=torch.bool).triu(1))
    assert spelled(proposal)["layers.*.self_attn"] == "attention(rows, causal=True)"
    assert "call it without, causal=True hides what comes later" in open_at(proposal, "layers.*.self_attn")
    assert "was not called on the example" in open_at(proposal, "spare")
    assert "spare" not in proposal.plan


def test_a_module_that_fails_on_its_example_is_named_with_the_place() -> None:
    model = nn.Sequential(nn.Sequential(linear(), linear(3, 3)))
    with pytest.raises(ValueError, match=r"raised RuntimeError on its example, in '0\.1'.*input \(2, 5, 16\) float32"):
        propose_plan(model, hidden())
    assert not any(part._forward_hooks for part in model.modules())


def test_transformers_bert_is_planned_but_for_attention_and_pooler() -> None:
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
    layer = "bert.encoder.layer.*"
    assert spelled(proposal) == {
        "bert.embeddings.word_embeddings": "embedding()",
        "bert.embeddings.position_embeddings": "table()",
        "bert.embeddings.token_type_embeddings": "table()",
        "bert.embeddings.LayerNorm": 'norm("z")',
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
    assert len(proposal.unresolved) == 2
    query = 'its layers: query: linear("z"), key: linear("z"), value: linear("z")'
    assert query in open_at(proposal, f"{layer}.attention.self")
    assert "tensor3d.select" in open_at(proposal, "bert.pooler")


# --- the proposal itself -------------------------------------------------------------------------------------------


def test_the_proposal_reads_as_a_table_and_what_is_open() -> None:
    text = str(propose_plan(Stack(lambda model, x: model.a(x)[:, 0], a=linear()), hidden()))
    assert text.splitlines()[:3] == [
        "Plan for Stack",
        "  pattern  kind         why",
        "  'a'      linear(\"z\")  its input lies on face z",
    ]
    assert text.splitlines()[-2] == "Open"
    assert text.splitlines()[-1].startswith("  - the module itself (Stack) takes rows by their place")


def test_what_does_not_divide_is_named_all_at_once() -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 30, batch_first=True)
    proposal = propose_plan(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(1, 2, 12))
    proposal.check(Cube.single())
    cube = _Sizes(y=2, z=4)
    with pytest.raises(ValueError, match=r"num_heads=3 does not divide by y=2 in layers.0.self_attn.* and 1 more") as e:
        proposal.check(cube)  # type: ignore[arg-type]
    assert "out_features=30" not in str(e.value)
    proposal.check(_Sizes(y=3, z=4))  # type: ignore[arg-type]


class _Sizes:
    """What `check` asks of a cube, without ranks."""

    def __init__(self, **sizes: int) -> None:
        self.shape = str(sizes)
        self._sizes = sizes

    def axis(self, name: str) -> Any:
        return type("Axis", (), {"size": self._sizes[name]})


def test_patterns_match_what_is_alike_and_nothing_else() -> None:
    names = ["", "h.0.a", "h.1.a", "h.2.a", "h.0.b", "h.1.b", "h.2.b", "s.0", "s.1", "s.2", "t.0.0", "t.0.1", "t.1.0"]
    treated = {"h.0.a": 1, "h.1.a": 1, "h.2.a": 1, "h.0.b": 1, "h.1.b": 2, "s.0": 3, "s.2": 3, "t.0.0": 4, "t.1.0": 4}
    assert fold(treated, names) == {"h.*.a": 1, "h.0.b": 1, "h.1.b": 2, "s.0": 3, "s.2": 3, "t.*.0": 4}


def test_faces_follow_from_pairs_and_contradictions_are_refused() -> None:
    faces = Faces(5)
    assert faces.join(1, 2, differ=True)
    assert faces.join(2, 3, differ=True)
    assert not faces.join(1, 3, differ=True)
    assert faces.join(3, 0, differ=True)
    assert faces.join(5, 4, differ=True)
    assert [faces.face(number) for number in range(6)] == ["z", "y", "z", "y", "z", "y"]
    assert faces.joined(1, 0)
    assert not faces.joined(4, 0)


# --- and the model it makes ----------------------------------------------------------------------------------------


def _through_parallelize() -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    cube = Cube(2, 2, 2)
    original = varied(Language())
    ids, labels = torch.randint(0, VOCAB, (2, ROWS))
    places = torch.cat([torch.arange(length) for length in LENGTHS])
    proposal = propose_plan(original, ids[None, :5], places[None, :5])
    proposal.check(cube)
    model = parallelize(original, cube, proposal.plan)
    with proposal.rows.holding(own_sequences(cube)):
        logits = model(own_plane(ids, cube)[None], own_plane(places, cube)[None])
    loss = F.cross_entropy(gather(logits.squeeze(0), cube, "y"), labels)
    wanted = F.cross_entropy(per_sequence(original, ids, places), labels)
    loss.backward()
    wanted.backward()
    return errors_of(model, original, cube, {"loss": (loss, wanted)}) | _vision(cube)


def _vision(cube: Cube) -> dict[str, float]:
    original = varied(Vision())
    images = torch.randn(ROWS // 4, 3, 4, 4)
    model = parallelize(original, cube, propose_plan(original, images[:2]).plan)
    results, over = model(own_plane(images, cube)).squeeze(0), cube.over("data", "x", "y")
    labels = torch.randint(0, 3, (ROWS,))
    own = labels.chunk(over.size)[over.index]
    loss = sum_copies(F.cross_entropy(results, own, reduction="sum"), over)
    wanted = F.cross_entropy(original(images).flatten(0, 1), labels, reduction="sum")
    loss.backward()
    wanted.backward()
    errors = errors_of(model, original, cube, {"loss": (loss, wanted)})
    return {f"vision {name}": value for name, value in errors.items()}


def test_a_proposed_plan_gives_the_originals_loss_and_gradients() -> None:
    name, value = worst(run_ranks(8, _through_parallelize))
    assert value <= 1e-9, f"{name} differs by {value}"
