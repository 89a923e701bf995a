"""The tables of docs/recipes.md, from the recipe's dataclasses: `python -m tools.training.config_docs`."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tools.common.files import write_file
from tools.training import config
from tools.training.config import TrainConfig

DOCUMENT = Path(__file__).parents[2] / "docs" / "recipes.md"
BEGIN, END = "<!-- tables: python -m tools.training.config_docs -->", "<!-- end of tables -->"


def main() -> int:
    """Exit status: 0."""
    write_file(DOCUMENT, with_tables(DOCUMENT.read_text(encoding="utf-8")))
    return 0


def with_tables(text: str) -> str:
    """The document, with the tables as they should be between its two marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def tables() -> str:
    """A table a section: key, values, default, meaning."""
    lines: list[str] = []
    for name, section in get_type_hints(TrainConfig).items():
        lines += [f"### [{name}]", "", inspect.getdoc(section) or "", ""]
        lines += ["| key | values | default | meaning |", "| --- | --- | --- | --- |", *_rows(section), ""]
    return "\n".join(lines)


def meanings(section: type) -> dict[str, str]:
    """The sentence under each field of a dataclass of `tools.training.config`, on one line."""
    module = ast.parse(inspect.getsource(config))
    body = next(node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == section.__name__)
    found: dict[str, str] = {}
    for statement, after in pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            found[statement.target.id] = " ".join(str(text).split())
    return found


def _rows(section: Any) -> Iterator[str]:
    hints, said = get_type_hints(section), meanings(section)
    for key in fields(section):
        yield f"| {key.name} | {_values(hints[key.name])} | {_default(key)} | {said[key.name]} |"


def _values(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice!r}`".replace("'", '"') for choice in get_args(hint))
    choices = [choice for choice in get_args(hint) if choice is not type(None)] or [hint]
    kinds = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    return " or ".join(kinds[c] if c in kinds else _values(c) for c in choices)


def _default(key: Field[Any]) -> str:
    assert key.default is not MISSING, f"{key.name} has no default"
    if key.default is None:
        return ""
    text = str(key.default).lower() if isinstance(key.default, bool) else repr(key.default).replace("'", '"')
    return f"`{text}`"


if __name__ == "__main__":
    sys.exit(main())
