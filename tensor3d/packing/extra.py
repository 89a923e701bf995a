"""SciPy is not needed to train, so it comes with an extra."""

from __future__ import annotations

from importlib.util import find_spec


def has_scipy() -> bool:
    return find_spec("scipy") is not None


def require_scipy(purpose: str) -> None:
    """Raises ValueError where scipy is not installed."""
    if not has_scipy():
        raise ValueError(f"{purpose} needs scipy: pip install 'tensor3d[packing]', or choose the planner lpfhp.")
