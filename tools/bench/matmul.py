"""`bench matmul`: one matrix product on several cubes, side by side in one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tools.bench.pass_command import PassCommand
from tools.bench.subjects import Product


@dataclass(frozen=True, kw_only=True)
class MatmulCommand(PassCommand):
    """Time one matrix product on one cube or several, in turns, forward and backward; count what it sends, and weigh
    what it keeps."""

    rows: int = 2048
    """Tokens of the whole job."""
    inputs: int = 512
    """Input features, K."""
    outputs: int = 2048
    """Output features, N."""
    face: Literal["y", "z"] = "z"
    """That the product reads."""

    def subject(self) -> Product:
        return Product(rows=self.rows, k=self.inputs, n=self.outputs, face=self.face, keep_gathered=self.keep_gathered)
