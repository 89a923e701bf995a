"""`--help` without the wait: what only computes is not imported for it.

The text of `--help` comes from names, types, defaults and docstrings of options. The modules that hold them import the
libraries that do the work, torch above all, which take two to four seconds to load. So, where a command line asks for
help, a stand-in takes the place of each such library: it has every name, each name is another stand-in, and it does
nothing. Sphinx reads modules for their documentation in the same way (`autodoc_mock_imports`).

tests/tools/common/test_quick_help.py holds that every page of help is the same, to the letter, with and without.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

# What takes longer to import than a page of help may take to appear.
LIBRARIES = frozenset(
    {
        "datasets",
        "matplotlib",
        "pandas",
        "plotly",
        "pyarrow",
        "requests",
        "safetensors",
        "scipy",
        "sentencepiece",
        "sklearn",
        "tensorboard",
        "tokenizers",
        "torch",
        "transformers",
    }
)


def asks_for_help(words: Sequence[str]) -> bool:
    """Whether a command line, less its program, asks for help. What follows "--" belongs to no option."""
    own = list(words[: words.index("--")]) if "--" in words else list(words)
    return "--help" in own or "-h" in own


def import_stand_ins() -> None:
    """From here on this process imports stand-ins of `LIBRARIES`. It can compute nothing any more, only show help."""
    sys.meta_path.insert(0, _Finder())


class StandIn(ModuleType):
    """A module, a class, a function or a value, whatever is asked of it while modules are imported."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        # An `except` clause takes classes of exceptions alone.
        found: Any = type(name, (Exception,), {"__module__": full}) if name.endswith("Error") else StandIn(full)
        setattr(self, name, found)
        return found

    def __call__(self, *given: Any, **named: Any) -> Any:
        decorates = len(given) == 1 and not named and isinstance(given[0], FunctionType | type)
        return given[0] if decorates else self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()  # as a base class it adds nothing

    def __bool__(self) -> bool:
        return False  # no device is there, and no feature

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, key: Any) -> StandIn:
        return self

    # As an arm of a union, the last as well as the first, and in constants that are computed.
    def _itself(self, *other: Any) -> StandIn:
        return self

    __or__ = __ror__ = __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = __pow__ = __neg__ = _itself


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        known = fullname.partition(".")[0] in LIBRARIES
        return ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""
