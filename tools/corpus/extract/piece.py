"""What one worker reads of one file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools.corpus.extract.formats import Format, Packing


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one worker reads of one file."""

    path: Path
    name: str
    """Of the file, below the input that it was found in."""
    format: Format
    packing: Packing
    begin: int
    end: int
    """Bytes of the file; row groups of a Parquet file. The piece owns what begins between them."""
    size: int
    """Bytes of the file that it takes."""
