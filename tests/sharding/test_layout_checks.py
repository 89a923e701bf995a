"""A layer that reads the wrong face says so, also where both faces have the same shapes, and on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor3d import (
    Cube,
    Dropout3D,
    Embedding3D,
    LayerNorm3D,
    Linear3D,
    LookupEmbedding3D,
    MixedPrecisionPolicy,
    RMSNorm3D,
    SmallHead3D,
    TransformerLayer3D,
    all_reduce_replicated,
    attention,
    constant,
    cross_entropy,
    gather,
    local_block,
    local_param,
    local_rows,
    pack_padded,
    redistribute,
    select,
    shard,
)
from tensor3d.batches.sequences import Sequences
from tensor3d.sharding.layout_checks import check_origin
from tensor3d.sharding.param_layout import copies, vector
from tests.ranks import run_ranks

HIDDEN, ROWS = 16, 32


def on_z(cube: Cube) -> Tensor:
    return Embedding3D(11, HIDDEN, cube)(torch.arange(ROWS // cube.shape.planes) % 11)


def on_y(cube: Cube) -> Tensor:
    return Linear3D(HIDDEN, HIDDEN, cube, "z")(on_z(cube))


def two_readers_of_z(cube: Cube) -> None:
    Linear3D(HIDDEN, HIDDEN, cube, "z")(F.gelu(on_y(cube)))


def residual_across_faces(cube: Cube) -> None:
    LayerNorm3D(HIDDEN, cube)(on_z(cube) + on_y(cube))


def two_readers_with_dropout_between(cube: Cube) -> None:
    Linear3D(HIDDEN, HIDDEN, cube, "z")(Dropout3D(0.5, cube)(on_y(cube)))


def attention_on_the_wrong_face(cube: Cube, dropout: float = 0.0) -> None:
    """Without dropout by the kernel of a CPU, with it in whole products."""
    q, k, v = Linear3D(HIDDEN, 3 * HIDDEN, cube, "z")(on_z(cube)).unflatten(1, (-1, 3, 4)).unbind(2)
    h = attention(q, k, v, Sequences.from_lengths([q.shape[0]]), dropout=dropout)
    LayerNorm3D(HIDDEN, cube, "z")(h.flatten(1))


def attention_with_dropout_on_the_wrong_face(cube: Cube) -> None:
    attention_on_the_wrong_face(cube, 0.5)


def norm_on_the_wrong_face(cube: Cube) -> None:
    RMSNorm3D(HIDDEN, cube, "z")(on_y(cube))


def head_on_the_wrong_face(cube: Cube) -> None:
    SmallHead3D(HIDDEN, 2, cube, "y")(on_z(cube))


def loss_of_what_was_turned(cube: Cube) -> None:
    logits = redistribute(on_y(cube), cube, to="z")
    cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64), HIDDEN, cube, "y")


def turn_to_where_it_is(cube: Cube) -> None:
    redistribute(on_z(cube), cube, to="z")


def selected_from_the_wrong_face(cube: Cube) -> None:
    select(on_y(cube), torch.zeros(8, dtype=torch.int64), cube, "z")


def gathered_from_the_wrong_face(cube: Cube) -> None:
    gather(on_y(cube), cube, "z")


def parameter_of_the_other_face(cube: Cube) -> None:
    scale = constant((HIDDEN,), vector("y"), cube, 1.0)
    LayerNorm3D(HIDDEN, cube, "z")(on_z(cube) * local_param(scale, vector("y"), cube))


def table_on_the_other_face(cube: Cube) -> None:
    table = LookupEmbedding3D(5, HIDDEN, cube)
    LayerNorm3D(HIDDEN, cube, "y")(on_y(cube) + table(torch.zeros(ROWS // cube.shape.planes, dtype=torch.int64)))


MISTAKES: list[Callable[[Cube], None]] = [
    two_readers_of_z,
    residual_across_faces,
    two_readers_with_dropout_between,
    attention_on_the_wrong_face,
    attention_with_dropout_on_the_wrong_face,
    norm_on_the_wrong_face,
    head_on_the_wrong_face,
    loss_of_what_was_turned,
    turn_to_where_it_is,
    selected_from_the_wrong_face,
    gathered_from_the_wrong_face,
    parameter_of_the_other_face,
    table_on_the_other_face,
]


def refusal(mistake: Callable[[Cube], None], cube: Cube) -> str:
    cube.manual_seed(1)
    with pytest.raises(ValueError, match=r"reads face [yz]\. Got what lies on face [yz]: it comes from") as refused:
        mistake(cube)
    return str(refused.value)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_wrong_face_is_found_on_one_device(mistake: Callable[[Cube], None]) -> None:
    assert "redistribute(h, cube, to=" in refusal(mistake, Cube(1, 1, 1))


def refused_everywhere() -> list[tuple[str, int]]:
    """Messages on a cube whose faces have the same local shapes, and the collectives issued after the last refusal."""
    found = []
    for mistake in MISTAKES:
        cube = Cube(1, 2, 2)
        found.append((refusal(mistake, cube), cube.traffic.issued))
    return found


def test_every_rank_refuses_at_the_same_place() -> None:
    results = run_ranks(4, refused_everywhere)
    assert all(result == results[0] for result in results)


def test_the_message_names_both_ends_and_the_remedy() -> None:
    message = refusal(two_readers_of_z, Cube(1, 1, 1))
    assert message == (
        "the product with a weight of shape (16, 16) reads face z. Got what lies on face y: it comes from a product "
        'with a weight of shape (16, 16). Put `redistribute(h, cube, to="z")` between them, or, where one of the two '
        'can, let it use the other face (face="y").'
    )


def test_right_models_pass_with_residuals_attention_and_recomputation() -> None:
    cube = Cube(1, 1, 1)
    cube.manual_seed(3)
    h = on_z(cube)
    for recompute in ("none", "layer", "attention"):
        for norm in ("pre", "post"):
            layer = TransformerLayer3D(HIDDEN, 2, cube, norm=norm, recompute=recompute)  # type: ignore[arg-type]
            h = layer(h, Sequences.from_lengths([20, 12]))
    back = redistribute(redistribute(h, cube, to="y"), cube, to="z")
    loss = all_reduce_replicated(SmallHead3D(HIDDEN, 3, cube, "z")(back).sum() / ROWS, cube.over("data", "x", "y"))
    loss.backward()
    assert loss.isfinite()


def test_what_comes_from_outside_is_not_judged() -> None:
    cube = Cube(1, 1, 1)
    x = torch.randn(ROWS, HIDDEN, requires_grad=True)
    Linear3D(HIDDEN, HIDDEN, cube, "y")(x)
    Linear3D(HIDDEN, HIDDEN, cube, "z")(x)
    with torch.no_grad():
        two_readers_of_z(cube)
    Linear3D(HIDDEN, HIDDEN, cube, "y")(shard(x, cube, "y"))
    with pytest.raises(ValueError, match=r"comes from shard"):
        Linear3D(HIDDEN, HIDDEN, cube, "y")(shard(x, cube, "z"))


class Unmarked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class Marked(Unmarked):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        ctx.result_face, ctx.made = "z", "my turn"  # type: ignore[attr-defined]
        return x.clone()


def test_functions_of_ones_own_are_believed_if_they_are_marked() -> None:
    cube = Cube(1, 1, 1)
    h = on_y(cube)
    check_origin(Unmarked.apply(h), "z", cube, "a reader")
    check_origin(Marked.apply(h), "z", cube, "a reader")
    with pytest.raises(ValueError, match=r"a reader.*face y\b.*face z\b.*my turn"):
        check_origin(Marked.apply(h) * 2, "y", cube, "a reader")


def streams(cube: Cube) -> tuple[Tensor, Tensor]:
    z = on_z(cube)
    return z, Linear3D(HIDDEN, HIDDEN, cube, "z")(z)


def scalar_on_both(cube: Cube) -> tuple[Tensor, Tensor]:
    scale = local_param(constant((1,), copies("z"), cube, 0.5), copies("z"), cube).exp()
    z, y = streams(cube)
    return z * scale, y * scale


def condition_on_both(cube: Cube) -> tuple[Tensor, Tensor]:
    condition = torch.randn(1, requires_grad=True).exp()
    z, y = streams(cube)
    return z * condition, y + condition


def blocks_on_both(cube: Cube) -> tuple[Tensor, Tensor]:
    plane = torch.randn(ROWS // cube.shape.planes, HIDDEN, requires_grad=True) * 2
    z, y = streams(cube)
    return z + local_block(plane, cube, "z"), y + local_block(plane, cube, "y")


def gates_on_both(cube: Cube) -> tuple[Tensor, Tensor]:
    gates = torch.randn(ROWS // cube.shape.planes, requires_grad=True).sigmoid()
    z, y = streams(cube)
    return z * local_rows(gates, cube, "z")[:, None], y * local_rows(gates, cube, "y")[:, None]


def read_all() -> None:
    cube = Cube(1, 2, 2)
    for make in (scalar_on_both, condition_on_both, blocks_on_both, gates_on_both):
        z, y = make(cube)
        for _ in range(2):  # what the first reading noted down must not stand in the way of the second
            LayerNorm3D(HIDDEN, cube, "z")(z)
            LayerNorm3D(HIDDEN, cube, "y")(y)
        with pytest.raises(ValueError, match=r"reads face y\b.*on face z\b"):
            LayerNorm3D(HIDDEN, cube, "y")(z)
        with pytest.raises(ValueError, match=r"reads face z\b.*on face y\b"):
            LayerNorm3D(HIDDEN, cube, "z")(y)


@pytest.mark.slow
def test_what_lies_on_no_face_may_be_used_on_both() -> None:
    run_ranks(4, read_all)


def test_a_deep_side_branch_hides_nothing() -> None:
    cube = Cube(1, 1, 1)
    branch = torch.ones(1, requires_grad=True)
    for _ in range(3000):
        branch = branch * 1.0
    y = on_y(cube)
    for mixed in (y * branch, branch * y):
        with pytest.raises(ValueError, match=r"reads face z\b.*on face y\b"):
            LayerNorm3D(HIDDEN, cube, "z")(mixed)


def test_results_may_be_changed_in_place_on_one_device_too() -> None:
    cube = Cube(1, 1, 1)
    loss = all_reduce_replicated(on_z(cube).sum(), cube.over("data", "x", "y"))
    loss /= 3
    head = SmallHead3D(HIDDEN, 2, cube, "z", bias=False)
    logits = head(on_z(cube)).masked_fill_(torch.zeros(ROWS, 2, dtype=torch.bool), 1.0)
    turned = redistribute(on_z(cube), cube, to="y").mul_(2)
    (loss + logits.sum() + turned.sum()).backward()
    assert head.weight.grad is not None


def alone_in_a_job() -> None:
    Drifting(Cube(1, 1, 1))(on_z(Cube(1, 1, 1)))


def test_a_job_of_one_rank_keeps_no_copies() -> None:
    run_ranks(1, alone_in_a_job)


class Holding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        ctx.variable = x  # type: ignore[attr-defined]
        ctx.result_face, ctx.made = "y", "my own"  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


def test_a_function_with_a_variable_of_its_own_is_no_parameter() -> None:
    cube = Cube(1, 1, 1)
    with pytest.raises(ValueError, match=r"comes from my own"):
        LayerNorm3D(HIDDEN, cube, "z")(Holding.apply(on_z(cube)))


def test_padded_results_come_from_the_face_that_is_named() -> None:
    cube = Cube(1, 1, 1)
    packs = pack_padded(torch.ones(4, 8, dtype=torch.int64), None, cube)
    y = Linear3D(HIDDEN, HIDDEN, cube, "z")(Embedding3D(11, HIDDEN, cube)(packs.ids))
    assert packs.pad_hidden(y, cube, "y").shape == (4, 8, HIDDEN)
    with pytest.raises(ValueError, match=r"pad_hidden.*face z\b.*face y\b"):
        packs.pad_hidden(y, cube)


def test_a_blank_cube_shares_its_mood_with_those_that_compute_in_other_types() -> None:
    cube = Cube(1, 1, 1)
    cube.manual_seed(1)
    half = cube.with_policy(MixedPrecisionPolicy(compute=torch.bfloat16))
    with cube.skip_init():
        assert half.is_blank
        inside = cube.with_policy(MixedPrecisionPolicy(compute=torch.bfloat16))
    assert not half.is_blank
    assert float(Linear3D(64, 64, inside).weight.detach().std()) < 0.1


def test_a_long_residual_stream_is_walked_once() -> None:
    cube = Cube(1, 1, 1)
    h = on_z(cube)
    for _ in range(700):  # more nodes than are looked at in one go
        h = h + 0.0 * h
        check_origin(h, "z", cube, "a norm")
    with pytest.raises(ValueError, match=r"comes from Embedding3D of 11 entries"):
        check_origin(h, "y", cube, "a norm")


@pytest.mark.parametrize("join", [torch.add, lambda h, residual: F.gelu(h)], ids=["sum", "activation"])
def test_a_later_call_with_what_lies_elsewhere_is_refused(join: Callable[[Tensor, Tensor], Tensor]) -> None:
    cube = Cube(1, 1, 1)
    linear, norm = Linear3D(HIDDEN, HIDDEN, cube, "z"), LayerNorm3D(HIDDEN, cube)
    right, wrong = on_z(cube), on_y(cube)  # of one shape
    for reader in (linear, norm):
        for good, bad in ((join(right, right), join(wrong, right)), (right, wrong)):
            reader(good)
            with pytest.raises(ValueError, match=r"reads face z\. Got what lies on face y"):
                reader(bad)
            reader(good)


class Drifting(nn.Module):
    def __init__(self, cube: Cube) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN // cube.axis("z").size))
        self.linear = Linear3D(HIDDEN, HIDDEN, cube, "z")

    def forward(self, h: Tensor) -> Tensor:
        return self.linear(h * self.scale)


def plain_parameter() -> str:
    cube = Cube(1, 2, 2)
    with pytest.raises(ValueError, match=r"plain.*1x2x2") as refused:
        Drifting(cube)(on_z(cube))
    return str(refused.value)


def test_a_plain_parameter_is_found_at_the_first_forward() -> None:
    (message,) = set(run_ranks(4, plain_parameter))
    assert message.startswith("a parameter of shape (8,) is a plain tensor on 1x2x2")
    single = Cube(1, 1, 1)
    Drifting(single)(on_z(single))  # one device keeps no copies


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, labels: F.cross_entropy(logits, labels),
        lambda logits, labels: F.cross_entropy(logits, labels, reduction="none").mean(),
        lambda logits, labels: torch.stack([logits.sum(), (logits**2).mean()]),
    ],
    ids=["reduction", "mean", "stacked"],
)
def test_a_sum_over_ranks_refuses_means(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    cube = Cube(1, 1, 1)
    logits, labels = SmallHead3D(HIDDEN, 3, cube, "z")(on_z(cube)), torch.zeros(ROWS, dtype=torch.int64)
    over = cube.over("data", "x", "y")
    with pytest.raises(ValueError, match=r"mean over the rows.*sum over ranks"):
        all_reduce_replicated(loss(logits, labels), over)
    all_reduce_replicated(F.cross_entropy(logits, labels, reduction="sum") / ROWS, over)
    all_reduce_replicated(F.cross_entropy(logits, labels) * ROWS / ROWS, over)  # who scales it, knows
    all_reduce_replicated(torch.addcmul(logits.sum(), logits[0, 0], logits.mean()), over)
    all_reduce_replicated(logits.sum().mean(), over)  # of one number


# --- a batch dim of one ------------------------------------------------------------------------------------------


def batched_equals_plain() -> None:
    cube = Cube(1, 2, 2)
    cube.manual_seed(5)
    ids = torch.arange(ROWS) % 11
    embedding, table = Embedding3D(11, HIDDEN, cube), LookupEmbedding3D(11, HIDDEN, cube)
    h = embedding(ids)
    same = [(embedding(ids[None]), h), (table(ids[None]), table(ids))]
    for layer in (
        Linear3D(HIDDEN, 2 * HIDDEN, cube, "z"),
        LayerNorm3D(HIDDEN, cube),
        RMSNorm3D(HIDDEN, cube),
        SmallHead3D(HIDDEN, 2, cube, "z"),
    ):
        same.append((layer(h[None]), layer(h)))
    rows = torch.arange(8)
    same += [
        (redistribute(h[None], cube, to="y"), redistribute(h, cube, to="y")),
        (select(h[None], rows, cube), select(h, rows, cube)),
    ]
    for batched, plain in same:
        assert torch.equal(batched, plain[None])


def test_layers_keep_a_batch_dim_of_one() -> None:
    run_ranks(4, batched_equals_plain)


def test_a_padded_batch_is_refused_with_the_remedy() -> None:
    cube = Cube(1, 1, 1)
    with pytest.raises(ValueError, match=r"Linear3D.*\(4, 8, 16\)"):
        Linear3D(HIDDEN, HIDDEN, cube)(torch.zeros(4, 8, HIDDEN))
    with pytest.raises(ValueError, match=r"Embedding3D reads .* Got shape \(4, 8\)"):
        Embedding3D(11, HIDDEN, cube)(torch.zeros(4, 8, dtype=torch.int64))
