"""One HTML file that loads nothing: sections of tables and charts, with the library that draws them inside.

The library is Vega-Lite (BSD-3-Clause), as the package vl-convert-python carries it: 0.9 MB in the page, where Plotly's
script has 4.8 MB and Bokeh's 1.3 MB and two more dependencies. The page's content security policy names the one script
by its hash and allows nothing else, so that neither a network is asked nor a run's name can become code.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tools.report.charts import Chart

if TYPE_CHECKING:
    from markupsafe import Markup

_HERE = Path(__file__).parent
PAGES = (".html", ".htm")
"""How its files are called."""


@dataclass(frozen=True)
class Cell:
    """Text, and what it is sorted by where that is not the text."""

    text: str
    key: float | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class Table:
    """The first column names its row; a column of cells with keys is one of numbers, aligned on the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    title: str = ""
    sorts: bool = False
    """Whether a click on a heading sorts."""
    folded: bool = False
    """Whether it is shown when one asks for it."""
    numbers: bool = False
    """All columns but the first are aligned on the right."""

    def right(self, column: int) -> bool:
        keyed = any(isinstance(row[column], Cell) and row[column].key is not None for row in self.rows)  # type: ignore[union-attr]
        return column > 0 and (self.numbers or keyed)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawing that is there already."""

    title: str
    svg: Markup


@dataclass(frozen=True, kw_only=True)
class Section:
    title: str
    notes: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True, kw_only=True)
class Page:
    title: str
    subtitle: str
    sections: Sequence[Section]
    legend: Sequence[tuple[str, str]] = field(default=())
    """Names of runs and their colours, of several."""
    reload: float | None = None
    """Seconds after which the page loads itself anew. None: what it shows is complete."""


def check_library(what: str) -> None:
    """Raises ValueError where a page cannot be made."""
    for module, package in (("jinja2", "jinja2"), ("vl_convert", "vl-convert-python")):
        if find_spec(module) is None:
            raise ValueError(f"{what} needs the package {package}: pip install 'tensor3d[report]'.")


def render(page: Page) -> str:
    """The file's text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    charts = [chart for section in page.sections for chart in section.charts]
    # The policy's hash is that of the script to the last byte.
    script = (vega() if charts else "") + (_HERE / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("page.html").render(
        page=page,
        charts=[{"spec": chart.spec, "data": chart.data} for chart in charts],
        script=script,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'",
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
    )


@cache
def vega() -> str:
    """The script of Vega, Vega-Lite and vega-embed, which the package puts together in some seconds in each process."""
    import vl_convert

    script: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub lacks the default
    # What would end the script inside a page, and means the same inside of its strings.
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--") + "\n"
