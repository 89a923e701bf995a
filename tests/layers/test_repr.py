"""`print(model)` on a cube tells faces, and logical and local shapes."""

from __future__ import annotations

from torch import nn

from tensor3d import (
    Cube,
    Embedding3D,
    LayerNorm3D,
    Linear3D,
    LookupEmbedding3D,
    Projection3D,
    RMSNorm3D,
    SmallHead3D,
    explain,
)
from tensor3d.parallelize.torch_layer_rules import TurnedLinear3D, TurnedProjection3D
from tests.ranks import run_ranks


def printed() -> str:
    cube = Cube(1, 2, 1, 2)
    layers = {
        "embedding": Embedding3D(11, 16, cube),
        "table": LookupEmbedding3D(8, 16, cube),
        "norm": LayerNorm3D(16, cube, "y", eps=1e-5, bias=False),
        "rms": RMSNorm3D(16, cube),
        "up": Linear3D(16, 64, cube, "z"),
        "down": Linear3D(64, 16, cube, "y", bias=False),
        "tied": Projection3D(16, 11, cube, holds_weight=False),
        "projection": Projection3D(16, 11, cube),
        "head": SmallHead3D(16, 3, cube, "y"),
    }
    return repr(nn.ModuleDict(layers))


def test_layers_say_how_they_lie() -> None:
    first, second, *_ = run_ranks(4, printed)
    assert first == EXPECTED
    # The last slice of a vocabulary of 11 over two members is the shorter one; nothing else differs between ranks.
    assert second == EXPECTED.replace("face y (M/2, 6)", "face y (M/2, 5)").replace("here (6, 16)", "here (5, 16)")


EXPECTED = """\
ModuleDict(
  (embedding): Embedding3D(11, 16, ids -> face z (M/4, 16), weight (11, 16) here (6, 16))
  (table): LookupEmbedding3D(8, 16, numbers -> face z (M/4, 16), weight (8, 16))
  (norm): LayerNorm3D(16, face y (M/2, 8), eps=1e-05, bias=False)
  (rms): RMSNorm3D(16, face z (M/4, 16), eps=1e-06)
  (up): Linear3D(16 -> 64, face z (M/4, 16) -> face y (M/2, 32), weight (64, 16) here (32, 16))
  (down): Linear3D(64 -> 16, face y (M/2, 32) -> face z (M/4, 16), weight (16, 64) here (16, 32), bias=False)
  (tied): Projection3D(16 -> 11, face z (M/4, 16) -> face y (M/2, 6), tied)
  (projection): Projection3D(16 -> 11, face z (M/4, 16) -> face y (M/2, 6), weight (11, 16) here (6, 16))
  (head): SmallHead3D(16 -> 3, face y (M/2, 8) -> copies over y, weight (3, 16) here (3, 8))
)"""


def turned() -> list[tuple[str, str]]:
    """On a cube whose faces have different local shapes."""
    cube = Cube(1, 2, 1)
    layers = [TurnedLinear3D(16, 64, cube, "z"), TurnedProjection3D(16, 11, cube)]
    return [(repr(layer), explain(layer, tokens=8).rows[0].faces) for layer in layers]


def test_a_turned_layer_says_what_it_reads() -> None:
    (linear, faces), (projection, other_faces) = run_ranks(2, turned)[0]
    assert linear == (
        "TurnedLinear3D(turned from face y (M, 8), 16 -> 64, face z (M/2, 16) -> face y (M, 32), weight (64, 16) here "
        "(32, 16))"
    )
    assert projection.startswith("TurnedProjection3D(turned from face y (M, 8), 16 -> 11, face z (M/2, 16) -> face y")
    assert faces == other_faces == ("y", "y")
