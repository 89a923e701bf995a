"""A proposal: its words, its checks, what it is made by, and the model that its plan makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensor3d import Cube, all_reduce_replicated, gather
from tensor3d.parallelize import parallelize, rules
from tensor3d.parallelize.auto.proposal import fold
from tensor3d.parallelize.auto.propose import propose_plan
from tensor3d.parallelize.auto.solver import ParityUnionFind
from tests.parallelize.foreign import (
    LENGTHS,
    ROWS,
    VOCAB,
    Language,
    Vision,
    errors_of,
    own_plane,
    own_sequences,
    per_sequence,
    varied,
)
from tests.parallelize.stacks import Stack, hidden, linear
from tests.ranks import run_ranks
from tests.single_device_reference import worst


def test_the_proposal_reads_as_a_table_and_what_is_open() -> None:
    text = str(propose_plan(Stack(lambda model, x: model.a(x)[:, 0], a=linear()), hidden()))
    assert text.splitlines()[:3] == [
        "Plan for Stack",
        "  pattern  kind         why",
        "  'a'      linear(\"z\")  its input lies on face z",
    ]
    assert text.splitlines()[-2] == "Open"
    assert text.splitlines()[-1].startswith("  - the module itself (Stack) takes rows by their place")


def test_a_plan_with_open_points_is_settled_only_once_they_are_mended() -> None:
    proposal = propose_plan(Stack(lambda model, x: model.a(x)[:, 0], a=linear()), hidden())
    with pytest.raises(ValueError, match=r"takes.*\(\[:, 0\]\)(.|\n)*take `proposal.plan`"):
        proposal.settled()
    mended = propose_plan(Stack(lambda model, x: model.a(x), a=linear()), hidden())
    assert mended.settled() == mended.plan == {"a": rules.linear("z")}


def test_what_does_not_divide_is_named_all_at_once() -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 30, batch_first=True)
    proposal = propose_plan(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(1, 2, 12))
    proposal.check(Cube.single())
    cube = _Sizes(y=2, z=4)
    with pytest.raises(ValueError, match=r"num_heads=3.*y=2 in layers.0.self_attn.*and \b1\b") as e:
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
    faces = ParityUnionFind(5)
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
    loss = all_reduce_replicated(F.cross_entropy(results, own, reduction="sum"), over)
    wanted = F.cross_entropy(original(images).flatten(0, 1), labels, reduction="sum")
    loss.backward()
    wanted.backward()
    errors = errors_of(model, original, cube, {"loss": (loss, wanted)})
    return {f"vision {name}": value for name, value in errors.items()}


@pytest.mark.slow
def test_a_proposed_plan_gives_the_originals_loss_and_gradients() -> None:
    name, value = worst(run_ranks(8, _through_parallelize))
    assert value <= 1e-9, f"{name} differs by {value}"
