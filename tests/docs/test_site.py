"""The site has every page of docs/, and its reference every public name; `make docs` builds it, strictly."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import yaml

from tests.programs import ran

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_of_the_site", ROOT / "docs" / "site" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages_of(nav: list[Any]) -> list[str]:
    leaves = [leaf for entry in nav for leaf in entry.values()]
    return [page for leaf in leaves for page in (pages_of(leaf) if isinstance(leaf, list) else [leaf])]


def test_every_page_has_its_place(build: ModuleType) -> None:
    nav = yaml.safe_load((ROOT / "docs" / "site" / "mkdocs.yml").read_text())["nav"]
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    references = [f"reference/{module}.md" for module in build.public_names()]
    assert sorted(pages_of(nav)) == sorted(["index.md", "pages.md", *pages, *references])


def test_every_public_name_is_in_the_reference(build: ModuleType) -> None:
    found = build.public_names()
    assert {"tensor3d", "tensor3d.optim", "models.bert", "tools.predict"} <= set(found)
    for module, names in found.items():
        assert names == list(importlib.import_module(module).__all__)
        assert set(names) <= set(re.findall(r"\w+", build.reference(module, names)))


def test_links_lead_to_pages(build: ModuleType) -> None:
    text = "[a](../README.md), [b](README.md#x), [c](../tensor3d/a.py), [d](data.md#y), ![e](packing.png)"
    assert build.as_page(text) == "[a](index.md), [b](pages.md#x), c, [d](data.md#y), ![e](packing.png)"


SITE = ROOT / "build" / "site"
CHROMIUM = Path("/usr/bin/chromium")
PAGES = ("index", "tutorial-own-model", "layers", "performance", "reference/tensor3d")


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} draws the pages, and is not there")
@pytest.mark.skipif(not SITE.exists(), reason="`make docs` makes the pages, and has not run")
@pytest.mark.parametrize("page", PAGES)
def test_a_browser_draws_it(page: str, tmp_path: Path) -> None:
    """From the disk, wide and narrow, dark and light: what is asked for, with a search, and no error."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=3000"]
    address = (SITE / f"{page}.html").as_uri()
    for width, (scheme, dark) in itertools.product((1400, 420), enumerate((True, False))):
        picture = tmp_path / f"{width}-{scheme}.png"
        look = [f"--window-size={width},1000", f"--blink-settings=preferredColorScheme={scheme}"]
        look += [f"--user-data-dir={picture.with_suffix('')}"]  # a browser remembers which look was chosen
        done = ran([*command, *look, f"--screenshot={picture}", address], timeout=300)
        assert done.returncode == 0, done.stderr
        assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
        drawn = plt.imread(picture)[..., :3]
        assert drawn.shape[:2] == (1000, width)
        assert bool(np.median(drawn) < 0.5) is dark  # of the background
        assert drawn.std() > 0.05, "something is written on it"
    assert "md-search__form" in (SITE / f"{page}.html").read_text()
    assert (SITE / "search" / "search_index.js").exists(), "a search that works without a server"
