"""With which versions of Python and PyTorch the library works, seen before PyTorch is imported; standard library alone.

`setup.py` says the same to pip, README.md has the versions that the tests were run with (`make test-versions`), and
tests/test_versions.py holds that all agree.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

LEAST_PYTHON = (3, 10)
LEAST_TORCH = (2, 11)


def check_versions(torch: str | None = None, python: tuple[int, ...] = tuple(sys.version_info[:2])) -> None:
    """Raises ImportError where Python or PyTorch is older than what the library needs.

    Args:
        torch: PyTorch's version; None: of the one that `import torch` would find, if there is one that says it.
    """
    if python < LEAST_PYTHON:
        raise ImportError(
            f"tensor3d needs Python {_dotted(LEAST_PYTHON)} or newer. This is Python {_dotted(python)}. Make an "
            "environment with a newer one: python3.12 -m venv, for example."
        )
    torch = installed_torch() if torch is None else torch
    found = re.match(r"(\d+)\.(\d+)", torch or "")
    if found is not None and (int(found[1]), int(found[2])) < LEAST_TORCH:
        raise ImportError(
            f"tensor3d needs PyTorch {_dotted(LEAST_TORCH)} or newer. torch {torch} is installed. Run "
            f"pip install 'torch>={_dotted(LEAST_TORCH)}'."
        )


def installed_torch() -> str | None:
    """The version of the PyTorch that `import torch` would find; None where there is none, or it does not say.

    Read from its own file, in less than a millisecond: importlib.metadata takes 25 to be imported, and knows nothing
    of a PyTorch that was built in place.
    """
    try:
        spec = find_spec("torch")
    except ValueError:  # one that a program has put together itself
        return None
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^__version__ *(?::[^=]*)?= *['\"]([^'\"]+)", text, re.MULTILINE)
    return None if found is None else found[1]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
