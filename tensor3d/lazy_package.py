"""Packages whose public names are imported when somebody asks for them: reading text must not wait for torch.

As SPEC 1 of the Scientific Python projects has it: the names are those that the package imports `if TYPE_CHECKING`,
which type checkers and editors read too.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class LazyPackage(ModuleType):
    """A package that knows from which of its modules each public name comes."""

    _modules: dict[str, str]

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__["_modules"].get(name)
        if module is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(module), name)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Whoever imports `tensor3d.attention` must not hide the function of that name behind its module.
        if not (isinstance(value, ModuleType) and name in self.__dict__["_modules"]):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._modules})


def import_lazily(package: str) -> None:
    """Makes a package a lazy one, from within its `__init__.py`."""
    spec = find_spec(package)
    source = spec.loader.get_source(package) if spec is not None else None  # type: ignore[union-attr]
    found = sys.modules[package]
    vars(found)["_modules"] = {
        alias.name: node.module
        for node in ast.walk(ast.parse(source or ""))
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith(f"{package}.")
        for alias in node.names
    }
    found.__class__ = LazyPackage
