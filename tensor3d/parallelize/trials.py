"""What a stranger's norm or embedding computes, found by trying its forward on numbers: names of classes tell nothing.

H columns
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

_SCALES = (1.0, 3.0, 1e-2, 1e-3, 1e-5, 1e-10)
_COLUMNS = 8  # of a norm that does not say its own


@dataclass(frozen=True, kw_only=True)
class NormFormula:
    """x / sqrt(mean(x^2) + eps) * gain + bias, of rows less their mean where it is `centered`.

    Attributes:
        gain: what multiplies: the weight, one and the weight, or nothing.
        columns: H, where the module says it.
    """

    centered: bool
    gain: Literal["weight", "1 + weight", "none"]
    eps: float
    columns: int | None

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        rows = x - x.mean(-1, keepdim=True) if self.centered else x
        normal = rows * (rows.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        if weight is not None:
            normal = normal * (weight if self.gain == "weight" else 1 + weight)
        return normal if bias is None else normal + bias


def norm_formula(module: nn.Module) -> NormFormula | None:
    """What a module computes that holds a weight along its columns, perhaps a bias, and nothing else; or neither, if
    its class calls itself a norm. None: it is no norm, or of another sort.

    A copy is run on rows of random numbers, with a weight and a bias of such; hooks are not called.
    """
    found = _vectors(module)
    if found is None:
        return None
    held, columns = found
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad(), torch.random.fork_rng([]):
            return _formula(module, held, columns, generator)
    except Exception:  # whatever a stranger's code says of rows like these
        return None


def columns_of(norm: nn.Module) -> int | None:
    """H of a norm, where it says it: by its weight, or else by its `normalized_shape`."""
    found = _vectors(norm)
    return None if found is None else found[1]


def _vectors(module: nn.Module) -> tuple[dict[str, nn.Parameter], int | None] | None:
    """The weight and the bias, and H; None where it holds anything else."""
    held = dict(module.named_parameters(remove_duplicate=False))
    plain = held.keys() <= {"weight", "bias"} and all(type(each) is nn.Parameter for each in held.values())
    shaped = all(each.dim() == 1 and each.is_floating_point() for each in held.values())
    others = any(True for _ in (*module.children(), *module.buffers()))
    if not plain or not shaped or others or "forward" in vars(module):
        return None
    if held:
        weight = held.get("weight")
        alike = weight is not None and all(each.shape == weight.shape for each in held.values())
        return (held, len(weight)) if alike and weight is not None and len(weight) > 1 else None
    if "norm" not in type(module).__name__.lower():
        return None
    told = getattr(module, "normalized_shape", None)
    told = (told,) if isinstance(told, int) else told
    if told is None:
        return held, None
    return (held, int(told[0])) if len(told) == 1 and told[0] > 1 else None


def _formula(
    module: nn.Module, held: dict[str, nn.Parameter], columns: int | None, generator: torch.Generator
) -> NormFormula | None:
    width = columns or _COLUMNS
    device = next((each.device for each in held.values() if not each.is_meta), torch.device("cpu"))
    dtype = next((each.dtype for each in held.values()), torch.get_default_dtype())

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    vectors = {name: 0.5 + drawn(width).abs() if name == "weight" else 0.1 * drawn(width) for name in held}
    x = torch.stack([size * (drawn(width) + 0.5) for size in _SCALES for _ in range(2)])

    def gave(rows: Tensor, of: dict[str, Tensor], kind: torch.dtype) -> Tensor:
        probe = _probe(module, {name: each.to(device, kind) for name, each in of.items()})
        result = probe.forward(rows.to(device, kind).unsqueeze(0))
        if not isinstance(result, Tensor) or result.shape != (1, *rows.shape):
            raise ValueError("no rows as it was given")
        return result.squeeze(0).to("cpu", torch.float64)

    without_bias = {name: each * (name == "weight") for name, each in vectors.items()}
    alone = gave(x, without_bias, torch.float64)
    whole = gave(x, vectors, torch.float64)
    for centered in (False, True):
        for gain in ("weight", "1 + weight") if held else ("none",):
            draft = NormFormula(centered=centered, gain=gain, eps=0.0, columns=columns)
            for eps in _eps(module, draft, x, vectors.get("weight"), alone):
                formula = NormFormula(centered=centered, gain=gain, eps=eps, columns=columns)
                right = _agrees(alone, formula(x, vectors.get("weight"), None))
                if right and _agrees(whole, formula(x, vectors.get("weight"), vectors.get("bias"))):
                    known = centered or "bias" not in held
                    return formula if known and _holds_in(dtype, formula, gave, x[:8], vectors) else None
    return None


def _probe(module: nn.Module, vectors: dict[str, Tensor]) -> nn.Module:
    """A copy with these in the place of its parameters."""
    probe = object.__new__(type(module))
    vars(probe).update(vars(module))
    vars(probe)["_parameters"] = {**dict.fromkeys(module._parameters), **vectors}
    return probe


def _eps(module: nn.Module, draft: NormFormula, x: Tensor, weight: Tensor | None, gave: Tensor) -> Iterator[float]:
    """What a row so small that eps alone decides tells of it: as an attribute says it, or to four digits."""
    row, result = x[-1:], gave[-1:]
    rows = row - row.mean(-1, keepdim=True) if draft.centered else row
    gain = torch.ones(()) if weight is None else weight if draft.gain == "weight" else 1 + weight
    factor = (result / (rows * gain)).median()
    eps = float(factor**-2 - rows.square().mean())
    said = [each for each in vars(module).values() if type(each) is float]
    near = [each for each in said if eps > 0 and abs(each - eps) <= 1e-3 * eps]
    yield from near[:1] or ([float(f"{eps:.4g}")] if eps > 1e-14 else [0.0])


def _agrees(found: Tensor, wanted: Tensor) -> bool:
    """Row by row, as rows differ in size; modules may compute in fp32."""
    size = wanted.abs().amax(-1, keepdim=True)
    return bool(((found - wanted).abs() <= 1e-4 * size).all())


def _holds_in(
    dtype: torch.dtype,
    formula: NormFormula,
    gave: Callable[[Tensor, dict[str, Tensor], torch.dtype], Tensor],
    x: Tensor,
    vectors: dict[str, Tensor],
) -> bool:
    """Whether it is the same of rows in the module's own type, for which an eps may be another."""
    narrow = {name: each.to(dtype).double() for name, each in vectors.items()}
    rows = x.to(dtype).double()
    wanted = formula(rows, narrow.get("weight"), narrow.get("bias"))
    rtol, atol = (3e-2, 1e-2) if dtype.itemsize < 4 else (1e-3, 1e-5)
    return torch.allclose(gave(rows, narrow, dtype), wanted, rtol=rtol, atol=atol)


# --- Embeddings -------------------------------------------------------------------------------------------------------


def embedding_scale(module: nn.Embedding) -> float | None:
    """The number by which a forward of its own multiplies the rows that it looks up; None where it does anything else.

    It is run on a few ids, with the weight that it has; hooks are not called. What it returns must be that to the bit.
    """
    weight = module.weight
    if weight.is_meta or not weight.is_floating_point() or "forward" in vars(module):
        return None
    rows = len(weight)
    some = [0, 1, module.padding_idx or 0, rows // 2, rows - 1, 1]
    try:
        with torch.no_grad(), torch.random.fork_rng([]):
            ids = torch.tensor([some, some[::-1]], device=weight.device).clamp_(0, rows - 1)
            gave, looked_up = module.forward(ids), weight[ids]
            if not isinstance(gave, Tensor) or gave.dtype != weight.dtype or not bool(looked_up.any()):
                return None
            fits = (each for each in _scales(module, gave, looked_up) if torch.equal(gave, looked_up * each))
            return next(fits, None)
    except Exception:  # whatever a stranger's code says of these ids
        return None


def _scales(module: nn.Embedding, gave: Tensor, looked_up: Tensor) -> Iterator[float]:
    """Numbers that the module keeps, the root of its columns, and what the results say."""
    dtype = looked_up.dtype
    kept = (each for each in (*vars(module).values(), *module._buffers.values()))
    for each in kept:
        if type(each) in (int, float):
            yield float(each)
        elif isinstance(each, Tensor) and each.numel() == 1:
            yield float(each)
            yield float(each.to(dtype))
    yield looked_up.shape[-1] ** 0.5
    quotients = gave.double() / looked_up.double()
    yield float(quotients[looked_up != 0].median())
