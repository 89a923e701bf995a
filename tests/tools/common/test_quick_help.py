"""Help that needs no torch says what help with torch says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.common.help_pages import commands, pages
from tools.common.quick_help import StandIn, asks_for_help

ROOT = Path(__file__).parents[3]


def python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        (["--help"], True),
        (["fill-mask", "-h"], True),
        ([], False),
        (["help"], False),
        (["--", "--help"], False),
        (["--text=--help"], False),
    ],
)
def test_a_command_line_asks_for_help_by_its_own_options_alone(words: list[str], asks: bool) -> None:
    assert asks_for_help(words) is asks


@pytest.mark.slow
def test_every_page_of_help_is_the_same_without_the_libraries_that_compute() -> None:
    done = python("-m", "tests.tools.common.help_pages")
    assert done.returncode == 0, done.stderr
    quick = json.loads(done.stdout)
    assert quick["torch"] is False
    full = pages()
    assert set(commands()) <= set(full)
    assert len(full) > 60
    assert [name for name, text in full.items() if "--help" not in text] == []
    for name, text in full.items():
        assert quick["pages"][name] == text, f"python -m {name} --help"
    assert quick["pages"].keys() == full.keys()


@pytest.mark.parametrize(
    "words", [("tools.plan", "--help"), pytest.param(("tools.bench", "attention", "-h"), marks=pytest.mark.slow)]
)
def test_a_command_that_is_asked_for_help_imports_no_torch(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch is imported')")
    done = python("-m", *words, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (done.returncode, done.stderr) == (0, "")
    assert words[0] in done.stdout
    refused = python("-m", words[0], PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert "torch is imported" in refused.stderr


def test_a_stand_in_serves_as_base_decorator_annotation_and_exception() -> None:
    torch = StandIn("torch")

    class Layer(torch.nn.Module):  # type: ignore[name-defined]
        @torch.no_grad()
        def forward(self, rows: torch.Tensor | None) -> torch.Tensor | None:  # type: ignore[name-defined]
            return rows

    assert Layer().forward(None) is None
    assert not torch.cuda.is_available()
    assert list(torch.float32) == []
    with pytest.raises(torch.distributed.DistError):
        raise torch.distributed.DistError
    with pytest.raises(AttributeError):
        _ = torch.__version__
