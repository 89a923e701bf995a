"""The README does what it says: its model runs on one process and on 2x2x2, its commands and files exist."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run_example(code: str) -> list[float]:
    """Losses of the example's steps."""
    if dist.is_initialized():
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank)
    recorded = code.replace("    loss.backward()\n", "    loss.backward()\n    history.append(loss.item())\n")
    names: dict[str, Any] = {"history": []}
    exec(compile(recorded, "README.md", "exec"), names)
    return list(names["history"])


def test_the_example_gives_the_same_losses_on_one_process_and_on_the_cube() -> None:
    (code,) = python_blocks(README)
    alone = run_example(code.replace("from_env(2, 2, 2)", "from_env(1, 1, 1)"))
    assert len(alone) == 5
    assert alone[-1] < alone[0]
    for losses in run_ranks(8, run_example, code):
        assert losses == pytest.approx(alone, rel=1e-4)


def test_the_example_is_about_twenty_lines() -> None:
    (code,) = python_blocks(README)
    model = code[code.index("class") : code.index("cube = ")]
    assert len([line for line in model.splitlines() if line.strip()]) <= 20


@pytest.mark.parametrize("page", ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if not target.startswith("https://"):
            assert (path.parent / target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("page", ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_commands_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    targets = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^ {4}|`)make ([a-z-]+)", text, re.MULTILINE):
        assert f"\n{target}:" in targets, target
    for module in re.findall(r"python -m (tools[.\w]*\w)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for file in re.findall(r"launch/[\w./-]+\.(?:sh|toml)", text):
        assert (ROOT / file).exists(), file


# --- Files that commands read -----------------------------------------------------------------------------------------


def commands_in(text: str) -> tuple[list[list[str]], str]:
    """Those of a page, in a line of their own or between backticks, by word; and the page without them."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL).replace(" \\\n", " ")
    pattern = (
        r"^ {4}(?P<line>(?:python|launch/|make|echo).*)$|`(?P<inside>(?:python|launch/|make) [^`]*|launch/\S+ [^`]*)`"
    )
    found = [shlex.split(each["line"] or each["inside"]) for each in re.finditer(pattern, text, re.MULTILINE)]
    return found, re.sub(pattern, "", text, flags=re.MULTILINE)


def strangers(text: str) -> list[str]:
    """Files and runs that a command reads, and that are neither in the checkout, nor made by a command before, nor the
    reader's: named "my...", or between backticks where no command stands."""
    commands, prose = commands_in(text)
    made, found = set(re.findall(r"`([^`\s]+)`", prose)), []
    for words in commands:
        for before, word in zip(["", *words], words, strict=False):
            converted = words[2:3] == ["tools.convert"] and word is words[-1]
            if converted or before in ("--output", ">", "--html", "--plot"):
                made.add(word)
            elif re.search(r"\.(jsonl?|txt|tsv|toml|bz2|png)$|^runs/", word) and not (
                (ROOT / word).exists()
                or Path(word).name.startswith("my")
                or made & {word, *map(str, Path(word).parents)}
            ):
                found.append(word)
    return found


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("tut*.md"))]
)
def test_a_command_reads_what_is_there(page: str) -> None:
    assert strangers((ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`python -m tools.packing report --histogram lengths.json`", ["lengths.json"]),
        ("Needed: `lengths.json`.\n\n    python -m tools.packing report --histogram lengths.json", []),
        ("    python -m tools.report runs/a", ["runs/a"]),
        (
            "    python -m tools.gpt train --output runs/a\n    python -m tools.report runs/a/seed-0",
            [],
        ),
        ("    launch/local.sh \\\n      a.toml --data.source my.txt", ["a.toml"]),
        ("    echo 1 > a.json\n    python -m tools.plan --cluster a.json", []),
    ],
)
def test_a_file_that_nobody_made_is_found(text: str, found: list[str]) -> None:
    assert strangers(text) == found
