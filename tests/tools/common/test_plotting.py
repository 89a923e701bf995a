"""Pictures: no command imports matplotlib before something is drawn, and what cannot be drawn is refused first."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.common import plotting


def test_nobody_waits_for_matplotlib_who_wants_no_picture() -> None:
    found = []
    for path in Path("tools").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [str(path) for name in names if name.partition(".")[0] == "matplotlib"]
    assert found == []


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plotting.check_picture(tmp_path / "a.png")
    for path in (tmp_path, tmp_path / "missing" / "a.png"):
        with pytest.raises(ValueError, match="--plot must be a file in a folder that exists"):
            plotting.check_picture(path)
    for name in ("a.pdf", "notes.txt", "A.SVG"):
        with pytest.raises(ValueError, match=rf"--plot is written as PNG, and .*{name} is called.*{name[0]}.*\.png"):
            plotting.check_picture(tmp_path / name)
    with pytest.raises(ValueError, match=r"--plot must be a file\. /dev/null is a device"):
        plotting.check_picture(Path("/dev/null"))
    with pytest.raises(ValueError, match="which is another file of this command"):
        plotting.check_picture(tmp_path / "a.png", others=[tmp_path / "a.png"])
    for name in ("a", "A.PNG", "run-v1.2"):
        plotting.check_picture(tmp_path / name)
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--plot needs the package matplotlib: pip install matplotlib"):
        plotting.check_picture(tmp_path / "a.png")


def test_curves_can_be_told_apart() -> None:
    styles = [plotting.style(number) for number in range(12)]
    assert all(style not in styles[:number] for number, style in enumerate(styles))
