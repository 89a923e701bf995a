"""Padded batches as packs: the way there and back for any mask, and the results of padded code on real ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tensor3d import Attention3D, Cube, CubeShape, gather, select
from tensor3d.batches.padded import PaddedPacks, local_shard, pack_padded
from tensor3d.distributed.collectives import Axis
from tensor3d.distributed.comm_stats import CommCounter
from tensor3d.distributed.cube_shape import chunk_bounds
from tensor3d.packing.one_batch import _capacity_bound
from tensor3d.sharding.activation_layout import local_block
from tests.ranks import run_ranks
from tests.single_device_reference import error, fast_alone, full, gradient_errors, make_twins, ranks_of, worst

Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class Place:
    """Of a rank what packing looks at: no process group, for it sends nothing."""

    shape: CubeShape
    rank: int = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def coordinate(self) -> Any:
        return self.shape.coordinate(self.rank)

    def axis(self, name: Any) -> Axis:
        ranks = self.shape.members((name,), self.rank)
        return Axis(name=name, ranks=ranks, index=ranks.index(self.rank), group=None, traffic=CommCounter())


def places(x: int = 1, y: int = 1, z: int = 1, data: int = 1) -> list[Cube]:
    shape = CubeShape(x=x, y=y, z=z, data=data)
    return [cast("Cube", Place(shape, rank)) for rank in range(shape.ranks)]


# Padding on the right, on the left, a hole, no padding.
IDS = torch.tensor([[11, 12, 13, 0, 0], [0, 0, 0, 21, 22], [31, 0, 32, 0, 33], [41, 42, 43, 44, 45]])
MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 1, 1], [1, 0, 1, 0, 1], [1, 1, 1, 1, 1]])


def test_four_sequences_by_eye() -> None:
    """13 tokens on a plane of 1 x 2: two packs of 7, one with a free slot."""
    first, second = (pack_padded(IDS, MASK, cube, pad=99) for cube in places(z=2))
    assert (first.capacity, first.rows) == (7, 14)
    assert first.ids[:7].tolist() == [41, 42, 43, 44, 45, 21, 22]
    assert first.ids[7:].tolist() == [11, 12, 13, 31, 32, 33, 99]
    assert (first.sequences.lengths, second.sequences.lengths) == ((5, 2), (3, 3, 1))
    assert first.ids[first.first].tolist() == [11, 21, 31, 41]
    assert first.owner.tolist() == [3] * 5 + [1] * 2 + [0] * 3 + [2] * 3 + [-1]
    assert first.lengths.tolist() == [3, 2, 3, 5]
    assert torch.equal(first.ids, second.ids)
    assert first.positions[first.places[2, [0, 2, 4]]].tolist() == [0, 1, 2]
    assert torch.equal(first.pad(first.ids), IDS)


def test_first_is_filled_up_for_select() -> None:
    packs = pack_padded(IDS[:3], MASK[:3], places(y=2, z=4)[0])
    assert packs.first.tolist()[3:] == [-1]
    assert packs.lengths.tolist() == [3, 2, 3, 0]
    assert pack_padded(IDS[:3], None, places(y=2, z=3)[0]).first.shape == (6,)


def test_a_given_capacity_makes_as_many_packs_as_are_needed() -> None:
    packs = pack_padded(IDS[:3], None, places(z=2)[1], capacity=5)
    # The last pack is empty: it fills up the second member's share.
    assert (packs.rows, packs.sequences.lengths, packs.source[15:].tolist()) == (20, (5, 5), [-1] * 5)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Ids and a mask with at least one token a sequence."""
    batch, slots = draw(st.integers(1, 9)), draw(st.integers(1, 12))
    row = st.lists(st.booleans(), min_size=slots, max_size=slots).filter(any)
    mask = torch.tensor(draw(st.lists(row, min_size=batch, max_size=batch)))
    kind = draw(st.sampled_from([torch.int64, torch.bool, torch.float32]))
    return torch.arange(1, batch * slots + 1).view(batch, slots), mask.to(kind)


@given(batches(), st.integers(1, 4), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 3)))
def test_round_trip(batch: tuple[Tensor, Tensor], y: int, z: int, looseness: int | None) -> None:
    ids, mask = batch
    kept = mask.bool()
    capacity = None if looseness is None else looseness * y * int(kept.sum(1).max())
    for cube in places(y=y, z=z):
        packs = pack_padded(ids, mask, cube, capacity=capacity, pad=-7)
        assert packs.rows % y == packs.rows % (z * packs.capacity) == 0
        assert torch.equal(packs.pad(packs.ids), ids * kept)
        assert sorted(packs.ids[packs.ids != -7].tolist()) == ids[kept].tolist(), "each token lies in one row"
        values = torch.randn(*ids.shape, 2, 3)
        assert torch.equal(
            packs.pad(packs.pack(values), fill=5), values.where(kept[..., None, None], torch.tensor(5.0))
        )
        assert torch.equal(packs.pack(packs.positions.new_ones(ids.shape), fill=-100) == 1, packs.source >= 0)
        check_sequences(packs, ids, kept, cube)
    if capacity is None:
        assert packs.capacity * z >= kept.sum()


def check_sequences(packs: PaddedPacks, ids: Tensor, kept: Tensor, cube: Cube) -> None:
    """This rank's rows are whole sequences in their order, and unused tails; positions count from 0 in each."""
    z = cube.axis("z")
    own, positions = packs.ids.chunk(z.size)[z.index], packs.positions.chunk(z.size)[z.index]
    wanted = {int(row[mask][0]): row[mask].tolist() for row, mask in zip(ids, kept, strict=True)}
    assert packs.sequences.rows == len(own)
    for part, places_in in zip(
        own.split(packs.sequences.lengths), positions.split(packs.sequences.lengths), strict=True
    ):
        if part[0] == -7:
            assert (part == -7).all()
        else:
            assert part.tolist() == wanted[int(part[0])]
            assert places_in.tolist() == list(range(len(part)))
    assert packs.ids[packs.first[: len(ids)]].tolist() == [
        int(row[mask][0]) for row, mask in zip(ids, kept, strict=True)
    ]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_the_default_capacity_starts_at_a_lower_bound(lengths: list[int], members: int) -> None:
    """Against the best of all assignments, tried out."""
    loads = {(0,) * members}
    for length in lengths:
        loads = {
            tuple(sorted(load[i] + length if i == chosen else load[i] for i in range(members)))
            for load in loads
            for chosen in range(members)
        }
    best = min(max(load) for load in loads)
    ids = torch.zeros(len(lengths), 30, dtype=torch.int64)
    mask = torch.arange(30) < torch.tensor(lengths).unsqueeze(1)
    packs = pack_padded(ids, mask, places(z=members)[0])
    assert _capacity_bound(mask.sum(1).numpy(), members) <= best <= packs.capacity <= 2 * best
    assert packs.rows == members * packs.capacity


# --- on real ranks ---------------------------------------------------------------------------------------------------

HIDDEN, HEADS, SLOTS = 16, 4, 9


def padded_batch() -> tuple[Tensor, Tensor]:
    """(8, 9, 16) inputs, and a mask with padding left and right, holes, one token alone."""
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(8, SLOTS, generator=generator) < 0.6
    mask[0], mask[1] = torch.arange(SLOTS) < 4, torch.arange(SLOTS) >= 7
    mask[2], mask[3, 1:] = True, False
    mask[:, 0] |= ~mask.any(1)
    mask[3, 0] = True
    return torch.randn(8, SLOTS, HIDDEN, generator=generator), mask


def plain_attention(layer: Attention3D, x: Tensor, mask: Tensor) -> Tensor:
    """PyTorch's attention over the padded batch, with the weights of a layer on one device."""
    q, k, v = F.linear(x, layer.qkv.weight, layer.qkv.bias).view(*x.shape[:2], HEADS, 3, -1).unbind(3)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
    return F.linear(mixed.transpose(1, 2).flatten(2), layer.out.weight, layer.out.bias) * mask.unsqueeze(-1)


def packed_against_padded(shape: Shape, capacity: int | None) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    cube, layer, _, twin = make_twins(lambda c: Attention3D(HIDDEN, HEADS, c, std=0.4), shape)
    x, mask = padded_batch()
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(6))

    theirs = x.clone().requires_grad_()
    wanted = plain_attention(cast("Attention3D", twin), theirs, mask)
    (wanted * direction).sum().backward()

    ours = local_shard(x, cube).clone().requires_grad_()
    own_mask = local_shard(mask, cube)
    packs = pack_padded(own_mask.long(), own_mask, cube, capacity=capacity)
    result = packs.pad_hidden(layer(packs.shard_hidden(ours, cube), packs.sequences), cube)
    (result * local_shard(direction, cube)).sum().backward()

    assert ours.grad is not None
    assert theirs.grad is not None
    whole = ours.grad.clone()  # of each rank's block: their sum is the gradient of the copies
    if cube.plane.size > 1:
        torch.distributed.all_reduce(whole, group=cube.plane.group)
    errors = {
        "output": error(result, local_shard(wanted, cube)),
        "input": error(whole, local_shard(theirs.grad, cube)),
    }
    return errors | gradient_errors(layer, twin)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 18], ids=["least", "18"])
@pytest.mark.parametrize("shape", fast_alone((1, 2, 2, 1), (1, 2, 4, 1), (2, 2, 2, 1)))
def test_packed_attention_equals_padded(shape: Shape, capacity: int | None) -> None:
    name, value = worst(run_ranks(ranks_of(shape), packed_against_padded, shape, capacity))
    assert value <= 1e-9, f"{name} differs by {value}"


def hidden_there_and_back(shape: Shape) -> float:
    """Both faces: the shard is `local_block`'s, `gather` sees the packed matrix, and nothing is sent on the way in."""
    cube, (x, mask) = Cube(*shape), padded_batch()
    packs = pack_padded(mask.long(), mask, cube)
    wanted = x * mask.unsqueeze(-1)
    for face in ("y", "z"):
        with cube.traffic.counting() as sent:
            shard = packs.shard_hidden(x, cube, face)
        assert sent.total_bytes == 0
        assert torch.equal(shard, local_block(packs.pack(x), cube, face))
        assert torch.equal(gather(shard, cube, face), packs.pack(x))
        assert torch.equal(packs.pad_hidden(shard, cube, face), wanted)
        assert torch.equal(packs.pad_hidden(shard.unsqueeze(0), cube, face), wanted), "with a batch dim of one"
    firsts = gather(select(packs.shard_hidden(x, cube), packs.first, cube), cube, "z")[: len(x)]
    return error(firsts, torch.stack([row[kept][0] for row, kept in zip(x, mask, strict=True)]))


def odd_logits(shape: Shape) -> dict[str, float]:
    """Columns cut unevenly, as DTensor cuts them, go back to the padded batch too, and their gradient to its block."""
    cube, mask = Cube(*shape), padded_batch()[1]
    packs, y, z = pack_padded(mask.long(), mask, cube), cube.axis("y"), cube.axis("z")
    logits = torch.randn(packs.rows, 5, generator=torch.Generator().manual_seed(8))
    first, last = chunk_bounds(5, y.size, y.index)
    own = logits.chunk(z.size)[z.index][:, first:last].clone().requires_grad_()
    result = packs.pad_hidden(own, cube, "y")
    direction = torch.randn(result.shape, generator=torch.Generator().manual_seed(9))
    (result * direction).sum().backward()
    wanted = packs.pack(direction * mask.unsqueeze(-1)).chunk(z.size)[z.index][:, first:last]
    return {"logits": error(result, packs.pad(logits)), "gradient": error(full(own.grad), wanted)}


def both_ways(shape: Shape) -> dict[str, float]:
    return {"hidden": hidden_there_and_back(shape)} | odd_logits(shape)


def test_hidden_states_there_and_back() -> None:
    name, value = worst(run_ranks(8, both_ways, (1, 2, 4, 1)))
    assert value <= 1e-6, f"{name} differs by {value}"


# --- shares and refusals ---------------------------------------------------------------------------------------------


def test_own_share() -> None:
    cubes = places(x=2, y=2, data=2)
    shares = [local_shard(torch.arange(8), cube).tolist() for cube in cubes]
    assert [[cube.coordinate["data"] * 2 + cube.coordinate["x"]] for cube in cubes] == [[s[0] // 2] for s in shares]
    assert sorted(map(tuple, shares)) == [pair for pair in ((0, 1), (2, 3), (4, 5), (6, 7)) for _ in range(2)]
    assert local_shard(list("abcd"), cubes[-1]) == ["d"]


@pytest.mark.parametrize("size", [7, 3, 0])
def test_a_batch_that_does_not_divide(size: int) -> None:
    with pytest.raises(ValueError, match=rf"data=2 \* x=2 = 4 planes.* Got {size} sequences. Take a multiple of 4"):
        local_shard(torch.zeros(size, 3), places(x=2, data=2)[0])


@pytest.mark.parametrize(
    ("ids", "mask", "capacity", "message"),
    [
        (IDS[0], None, None, r"\(batch, sequence\), not empty. Got \(5,\)"),
        (IDS[:0], None, None, r"not empty. Got \(0, 5\)"),
        (IDS, MASK[:, :4], None, r"input_ids' shape \(4, 5\)\. Got \(4, 4\)"),
        (IDS, (MASK - 1) * 10000, None, r"padding.*-10000 to 0"),
        (IDS, MASK * 2, None, "Got values from 0 to 2"),
        (IDS, MASK * torch.tensor([[1], [1], [0], [1]]), None, "sequence 2 has no token"),
        (IDS, MASK, 4, r"sequence 3.*5 tokens.*\b4"),
        (IDS, MASK, 7, r"divide.*\b2.*z=3.*y=2.*\b7. Take 8"),
        (IDS, MASK, 0, r"divide by 2.*\b0.*Take 2"),
    ],
)
def test_refusals(ids: Tensor, mask: Tensor | None, capacity: int | None, message: str) -> None:
    for cube in places(y=2, z=3):
        with pytest.raises(ValueError, match=message):
            pack_padded(ids, mask, cube, capacity=capacity)


def test_refusals_of_the_way_back() -> None:
    cube = places(y=2, z=3)[0]
    packs = pack_padded(IDS, MASK, cube)
    with pytest.raises(ValueError, match=r"\(4, 5\).*packed ids.*\(5, 4\)"):
        packs.pack(IDS.T)
    with pytest.raises(ValueError, match=rf"each of the plane's {packs.rows} rows. Got shape \(3, 2\)"):
        packs.pad(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=rf"{packs.rows}/y = {packs.rows // 2} rows on face z"):
        packs.pad_hidden(torch.zeros(packs.rows // 3, 4), cube, "z")
    with pytest.raises(ValueError, match=r"hidden.*z=3.*4"):
        packs.shard_hidden(torch.zeros(4, 5, 4), cube, "z")
    with pytest.raises(ValueError, match=r"\(batch, sequence, hidden\). Got shape \(4, 5\)"):
        packs.shard_hidden(torch.zeros(4, 5), cube, "z")
    with pytest.raises(ValueError, match="face must be"):
        packs.shard_hidden(torch.zeros(4, 5, 6), cube, cast("Any", "x"))
