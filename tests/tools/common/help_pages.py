"""Every page of help there is, as text: of all commands, and of their sub-commands.

As a program, `python -m tests.tools.common.help_pages`, it reads them with stand-ins and writes them as JSON.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

from tools.common.quick_help import import_stand_ins

TOOLS = Path(__file__).parents[3] / "tools"
SUBCOMMANDS = re.compile(r"^usage: [^{]*(?:\[-h\]|OPTIONS\]) \{([\w,-]+)\}$", re.MULTILINE)


def commands() -> list[str]:
    """The modules that `python -m` runs."""
    files = [file.stem for file in TOOLS.glob("*.py") if "__main__" in file.read_text(encoding="utf-8")]
    return sorted(f"tools.{name}" for name in [*files, *(file.parent.name for file in TOOLS.glob("*/__main__.py"))])


def pages() -> dict[str, str]:
    """The text of each page by the command line that asks for it."""
    return {" ".join(words): text for command in commands() for words, text in _pages_of([command])}


def _pages_of(words: list[str]) -> Iterator[tuple[list[str], str]]:
    text = _page(words)
    yield words, text
    if words == ["tools.corpus"]:  # whose steps stand in a table of their own
        below = list(import_module("tools.corpus.__main__").STEPS)
    else:
        below = [name for found in SUBCOMMANDS.findall(text) for name in found.split(",")]
    for name in below:
        yield from _pages_of([*words, name])


def _page(words: list[str]) -> str:
    module, *rest = words
    package = find_spec(module)
    assert package is not None, module
    name = f"{module}.__main__" if package.submodule_search_locations is not None else module
    shown = io.StringIO()
    with redirect_stdout(shown), mock.patch.dict("os.environ", COLUMNS="100"), suppress(SystemExit):
        import_module(name).main([*rest, "--help"])
    return shown.getvalue()


def main() -> None:
    import_stand_ins()
    found: Mapping[str, str] = pages()
    json.dump({"pages": found, "torch": "torch._C" in sys.modules}, sys.stdout)


if __name__ == "__main__":
    main()
