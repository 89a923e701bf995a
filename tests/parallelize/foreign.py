"""Single-device models as others write them, which know nothing of cubes, and how they are compared with their copies.

rows 64 of the cube, in 8 packs of 8: a face-y slice of every cube of 8 ranks holds whole packs
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor3d import Cube, Sequences
from tensor3d.parallelize import PackedRows, full_tensor, rules
from tensor3d.sharding.param_layout import vector
from tests.single_device_reference import error

PACKS = ((5, 3), (8,), (2, 6), (1, 4, 3), (7, 1), (8,), (4, 4), (3, 5))
LENGTHS = [length for pack in PACKS for length in pack]
ROWS = sum(LENGTHS)
HIDDEN, HEADS, VOCAB = 16, 4, 37


class TinyRMSNorm(nn.Module):
    """As models bring it along, with its eps under a name of their own."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.variance_epsilon = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class Scale(nn.Module):
    """A layer scale."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((hidden,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, bias=False)
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)
        self.scale = Scale(HIDDEN)
        self.norm2 = TinyRMSNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.scale(self.drop(self.attention(h, h, h, need_weights=False)[0]))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Language(nn.Module):
    """A tied language model; an odd vocabulary, of which entry 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN, padding_idx=0)
        self.positions = nn.Embedding(8, HIDDEN)
        self.register_buffer("step", torch.tensor(3.0))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.output_weight = self.embed.weight  # a third name of it, on a module without a kind

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, HIDDEN, 2, stride=2)
        self.norm = nn.BatchNorm2d(HIDDEN)

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.conv(images)).flatten(2).transpose(1, 2)


class Vision(nn.Module):
    """Patches of images, a chain of three linears with a parameter of the model's own, and a few classes a patch."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = Patches()
        self.patches.norm.eval()  # its statistics are frozen, and so is this
        self.patches.conv.get_parameter("bias").requires_grad_(False)
        self.first, self.second = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, 2 * HIDDEN)
        self.third = nn.Linear(2 * HIDDEN, HIDDEN)
        self.gate = nn.Parameter(torch.linspace(-1, 1, HIDDEN))
        self.classes = nn.Linear(HIDDEN, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images)
        h = self.third(F.gelu(self.second(F.gelu(self.first(x)))))
        return self.classes(x + self.gate * h)


def varied(module: nn.Module, seed: int = 3) -> nn.Module:
    """`module` with no parameter left at a value such as 0 or 1, which would hide much."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return module


def own_sequences(cube: Cube) -> Sequences:
    """Those of this rank's rows on face y: its share of the packs."""
    data, x, z = cube.axis("data"), cube.axis("x"), cube.axis("z")
    share = len(PACKS) // (data.size * x.size * z.size)
    first = share * ((data.index * x.size + x.index) * z.size + z.index)
    return Sequences.from_lengths([length for pack in PACKS[first : first + share] for length in pack])


def own_plane(values: Tensor, cube: Cube) -> Tensor:
    """Of one value for each row of the cube, those of this rank's plane."""
    data, x = cube.axis("data"), cube.axis("x")
    return values.chunk(data.size * x.size)[data.index * x.size + x.index]


def per_sequence(model: nn.Module, *values: Tensor) -> Tensor:
    """The original on one sequence after the other: rows of results in the order of the packs."""
    split = zip(*(value.split(LENGTHS) for value in values), strict=True)
    return torch.cat([model(*(each.unsqueeze(0) for each in one)).squeeze(0) for one in split])


def as_in_model(model: nn.Module, name: str, rows: Tensor) -> Tensor:
    """Rows of one of the original's parameters in the order of the model's, as of a fused QKV."""
    owner, _, own = name.rpartition(".")
    order = getattr(model.get_submodule(owner), "original_rows", {}).get(own)
    return rows if order is None else rows[order]


def errors_of(
    model: nn.Module, original: nn.Module, cube: Cube, results: dict[str, tuple[Tensor, Tensor]]
) -> dict[str, float]:
    """Of results (ours, wanted) and of every gradient. Names must be the original's; the frozen have no gradient."""
    ours, wanted = dict(model.named_parameters()), dict(original.named_parameters())
    assert list(ours) == list(wanted)
    errors = {name: error(*pair) for name, pair in results.items()}
    for name, parameter in wanted.items():
        assert ours[name].requires_grad == parameter.requires_grad
        gradient = ours[name].grad
        assert (gradient is None) == (parameter.grad is None), name
        if gradient is not None and parameter.grad is not None:
            errors[name] = error(full_tensor(gradient, cube), as_in_model(model, name, parameter.grad), name)
    return errors


def language_plan(rows: PackedRows) -> dict[str, Any]:
    return {
        "embed": rules.embedding(),
        "positions": rules.table(),
        "blocks.*.norm*": rules.norm("z"),
        "**.attention": rules.attention(rows),
        "**.scale": rules.wrapped({"gamma": vector("z")}),
        "**.up": rules.linear("z"),
        "**.down": rules.linear("y"),
        "norm": rules.norm("z"),
        "head": rules.projection(),
    }
