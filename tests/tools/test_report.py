"""The page of runs: its numbers are those of the journal, nothing is loaded, no name becomes code, and it ends."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tensor3d import CubeShape
from tests.programs import ran
from tests.tools.bench.measured import step as step_metrics
from tests.tools.refused import refused
from tools.report import __main__ as report
from tools.report import charts, page
from tools.report.__main__ import Command, main
from tools.report.cube_picture import cube_picture
from tools.report.runs import read_runs
from tools.training.metrics import JOURNAL, first_step, summary

STUB = "window.vegaEmbed = () => Promise.resolve();\n"
CHROMIUM = "/usr/bin/chromium"
HOSTILE = "a<img src=x onerror=alert(1)>&\"'"


@pytest.fixture(autouse=True)
def stub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes seconds to put together, and no number on the page depends on it."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(page, "vega", lambda: STUB)
        monkeypatch.setattr(page, "find_spec", lambda name: name)


def step_line(step: int, **more: Any) -> dict[str, Any]:
    """Numbers with all their digits, as steps of a cube have them."""
    return {
        "kind": "step",
        "time": 1e9 + step,
        "step": step,
        "loss": 8 - step / 7,
        "masked_lm_loss": 7 - step / 7,
        "learning_rate": 1e-3 * step / 7,
        "skipped_steps": 0,
        "seconds": 1.5,
        "data_wait_seconds": 0.25,
        "forward_seconds": 0.5,
        "backward_seconds": 0.5,
        "bytes_received": 3_000_000,
        "bytes_received/y": 2_000_000,
        "bytes_received/data+x": 1_000_000,
        **more,
    }


LINES = [
    *(step_line(step) for step in range(1, 31)),
    {"kind": "evaluation", "time": 1e9 + 30, "step": 30, "loss": 4.25, "masked_lm_loss": 3.5, "samples": 90},
    {"kind": "memory", "time": 1e9 + 30, "step": 30, "peak_bytes": [3_000_000_000, 4_000_000_000]},
    {"kind": "checkpoint", "time": 1e9 + 30, "step": 30, "path": "step-30", "seconds": 0.5, "bytes": 10, "error": None},
    {"kind": "event", "time": 1e9 + 30, "step": 12, "event": "remark", "text": "the loss jumps"},
]
END = {"kind": "event", "time": 1e9 + 99, "step": 30, "event": "end", "reason": "steps"}


def write(folder: Path, *lines: dict[str, Any], lr: float = 1e-3, note: str = "", cube: str = "1x2x1") -> Path:
    """A run of pre-training with these lines in its journal."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = {"optimizer": {"lr": lr, "note": note}, "run": {"steps": 40}}
    facts = {"recipe": recipe, "cube": cube, "data_parallel": 1, "unigram_entropy": 6.5, "environment": {"cpu": "one"}}
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


class Elements(HTMLParser):
    """What a browser makes of a page: its elements, and the text in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def tags(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.found if tag == name]


def made(tmp_path: Path, *runs: Path) -> str:
    output = tmp_path / "page.html"
    assert main([*map(str, runs), "--output", str(output)]) == 0
    return output.read_text()


def drawn(text: str) -> dict[str, dict[str, list[Any]]]:
    """The data of the page's charts by title."""
    (block,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', text)
    titles = re.findall(
        r'<figcaption>([^<]*?)(?: <small>.*?)?</figcaption>\n<div class="chart" data-chart="(\d+)"', text
    )
    data = json.loads(block)
    assert [int(number) for _, number in titles] == list(range(len(data)))
    return {title: data[int(number)]["data"] for title, number in titles}


def points(data: dict[str, list[Any]], run: str, what: str = "step") -> dict[int, float]:
    rows = zip(data["run"], data["what"], data["step"], data["value"], strict=True)
    return {step: value for name, kind, step, value in rows if (name, kind) == (run, what)}


def cells(text: str) -> list[list[str]]:
    """All rows of tables."""
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)]


def test_the_page_says_of_the_first_step_what_a_resumed_run_ends_with(tmp_path: Path) -> None:
    """A process that goes on after step 2 has not seen step 1, which both show."""
    history = [step_metrics(number, loss=8.0 - number, masked_lm_loss=5.0 - number) for number in range(1, 5)]
    run = write(tmp_path / "run", *({"kind": "step", "time": 1e9, **each.record()} for each in history))
    closing = summary(history[2:], [], 5.0, first=first_step(run / JOURNAL))
    told = dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in closing)
    shown = {row[0]: row[1] for row in cells(made(tmp_path, run)) if len(row) == 2}
    assert told["loss, step 1"] == f"{shown['loss, step 1']} nats" == "7.000 nats"
    assert told["masked-LM loss, step 1"] == f"{shown['masked-LM loss, step 1 (nats)']} nats" == "4.000 nats"
    assert told["masked-LM loss, step 3 (resumed)"] == "2.000 nats"
    assert told["masked-LM loss, mean of last 2"] == "1.500 nats"
    assert shown["masked-LM loss, mean of the last 4 (nats)"] == "2.500"
    assert told["received a step by rank 0"] == shown["received a step by rank 0"]


def test_the_overview_counts_as_the_closing_table_does(tmp_path: Path) -> None:
    """A skipped step without a finite loss makes no earlier one the last, and step 1 has packs like any other."""
    lines = [step_line(step, loss=2.0 if step > 1 else 100.0, fill=1.0 if step > 1 else 0.58) for step in range(1, 21)]
    run = write(tmp_path / "run", *lines, step_line(21, loss="inf", fill=1.0))
    shown = {row[0]: row[1] for row in cells(made(tmp_path, run)) if len(row) == 2}
    assert shown["loss, mean of the last 20"] == "2.000"
    assert shown["fill of the packs, mean"] == "98.00%"


def test_points_are_those_of_the_journal(tmp_path: Path) -> None:
    text = made(tmp_path, write(tmp_path / "run", *LINES, END))
    data, steps = drawn(text), LINES[:30]
    for title, key in (
        ("loss", "loss"),
        ("masked-LM loss", "masked_lm_loss"),
        ("learning rate", "learning_rate"),
        ("time of a step", "seconds"),
    ):
        assert points(data[title], "run") == {line["step"]: line[key] for line in steps}, title
    assert points(data["masked-LM loss"], "run", "held out") == {30: 3.5}
    assert points(data["masked-LM loss"], "run", "mean")[15] == pytest.approx(7 - 15 / 7, rel=1e-5)
    assert "steps skipped so far" not in data, "a curve that is 0 throughout says nothing"
    assert data["peak by rank"] == {"rank": [0, 1], "run": ["run", "run"], "GB": [3.0, 4.0]}
    assert data["mean step"]["seconds"] == [0.25, 0.5, 0.5, 0.25]
    assert data["mean step"]["phase"] == ["waiting for data", "forward", "backward", "rest"]
    rows = cells(text)
    assert ["steps", "30 of 40, ended"] in rows
    assert ["y", "2 MB"] in rows
    assert ["data+x", "1 MB"] in rows
    assert ["optimizer.lr", "0.001"] in rows
    assert ["cpu", "one"] in rows
    assert ["12", "2001-09-09 01:47:10", "the loss jumps"] in rows
    assert ["30", "2001-09-09 01:47:10", "saved step-30: 10 B in 500 ms"] in rows


def test_nothing_is_loaded(tmp_path: Path) -> None:
    text = made(tmp_path, write(tmp_path / "run", *LINES))
    elements = Elements(text)
    assert [tag for tag in ("link", "img", "iframe", "base", "object", "embed", "form") if elements.tags(tag)] == []
    assert all("src" not in attributes and "style" not in attributes for _, attributes in elements.found)
    assert all((each["href"] or "").startswith("#section-") for each in elements.tags("a"))
    assert not re.search(r"url\(|@import", text)
    policy = next(each["content"] for each in elements.tags("meta") if "http-equiv" in each) or ""
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.split("; ") == [
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        "img-src data:",
        f"script-src 'sha256-{digest}'",
    ]
    assert 'http-equiv="refresh"' not in text
    assert len(text) < 150_000


def test_names_and_recipes_are_text(tmp_path: Path) -> None:
    note = "</script><script>alert(2)</script><!--"
    run = write(tmp_path / HOSTILE, *LINES, {**LINES[-1], "text": note}, note=note)
    text = made(tmp_path, run, write(tmp_path / "other", *LINES))
    elements = Elements(text)
    assert [each.get("type") for each in elements.tags("script")] == ["application/json", None]
    assert not elements.tags("img")
    assert elements.words.count(HOSTILE) > 3
    assert elements.words.count(note) == 2
    assert set(drawn(text)["masked-LM loss"]["run"]) == {HOSTILE, "other"}


def test_a_torn_line_is_counted_and_a_step_that_was_done_again_counts_once(tmp_path: Path) -> None:
    run = write(tmp_path / "run", step_line(1), step_line(2, loss="NaN"), step_line(3), step_line(3, loss=1.0))
    with open(run / JOURNAL, "a") as journal:
        journal.write('{"kind": "step", "st')
    text = made(tmp_path, run)
    assert points(drawn(text)["loss"], "run") == {1: 8 - 1 / 7, 3: 1.0}
    assert "run: left out, lines of metrics.jsonl that are not whole: 1." in text
    assert "run: left out, values that are not finite: 1." in text


@pytest.mark.parametrize("journal", [True, False])
def test_a_run_without_a_step(tmp_path: Path, journal: bool) -> None:
    run = write(tmp_path / "run")
    if not journal:
        (run / JOURNAL).unlink()
    text = made(tmp_path, run)
    assert "run: no step has been logged yet." in text
    assert ["steps", "0 of 40"] in cells(text)
    assert drawn(text) == {}


def test_runs_side_by_side(tmp_path: Path) -> None:
    one = write(tmp_path / "a" / "run", *LINES)
    two = write(tmp_path / "b" / "run", step_line(1, loss=5.0), lr=2e-3, cube="2x2x2")
    text = made(tmp_path, one, two)
    names = [str(one), str(two)]
    assert points(drawn(text)["loss"], names[1]) == {1: 5.0}
    rows = cells(text)
    assert ["", *names] in rows
    assert ["optimizer.lr", "0.001", "0.002"] in rows
    assert ["run.steps", "40"] in rows, "what is the same stands once"
    assert ["cube", "1x2x1", "2x2x2"] in rows


def test_all_kinds_of_runs(tmp_path: Path) -> None:
    gpt = tmp_path / "gpt"
    gpt.mkdir()
    told = {"cube": "1x1x1", "data_parallel": 1, "steps": 2}
    (gpt / "run.json").write_text(json.dumps({"model": {"hidden": 64}, "command": told, "unigram_entropy": 6.0}))
    (gpt / JOURNAL).write_text('{"kind": "step", "step": 2, "loss": 3.5}\n')
    tuned = tmp_path / "tuned"
    for seed in (10, 2):
        (tuned / f"seed-{seed}").mkdir(parents=True)
        lines = [{"kind": "step", "step": n, "loss": 1.0, "seconds": 2.0 * n, "tokens": 100} for n in (1, 2)]
        lines.append({"kind": "evaluation", "step": 2, "accuracy": 0.5 + seed / 100, "best": True})
        (tuned / f"seed-{seed}" / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tuned / "finetune.json").write_text('{"task": "classify", "run": {"batch": 32}}')
    (tuned / "seed-2" / "result.json").write_text('{"cube": "2*(1x2x1)"}')
    result = {"seed": 2, "metrics": {"accuracy": 0.52}, "best_step": 2}
    found = {"metric": "accuracy", "best": "seed-2", "mean": {"accuracy": 0.52}, "deviation": {"accuracy": None}}
    (tuned / "results.json").write_text(json.dumps({**found, "seeds": [result]}))
    text = made(tmp_path, gpt, tuned)
    data = drawn(text)
    assert points(data["loss"], "gpt") == {2: 3.5}
    assert points(data["real tokens/s"], "tuned/seed-10") == {1: 50.0, 2: 50.0}
    assert points(data["held out: accuracy"], "tuned/seed-2") == {2: 0.52}
    rows = cells(text)
    assert ["", "gpt", "tuned/seed-2", "tuned/seed-10"] in rows
    assert ["cube", "1x1x1", "2*(1x2x1)", "-"] in rows
    assert ["deviation", "-", ""] in rows
    (alone,) = read_runs(tuned / "seed-10")
    assert (alone.name, alone.ended) == ("seed-10", False)


def test_scaling_results(tmp_path: Path) -> None:
    result = {
        "cube": "1x2x1",
        "data_parallel": 1,
        "kinds": ["1d"],
        "ranks": 2,
        "seconds_median": 0.5,
        "bytes_received": 0,
    }
    (tmp_path / "sweep" / "a").mkdir(parents=True)
    (tmp_path / "sweep" / "a" / "strong.json").write_text(json.dumps({"benchmark": "strong", "results": [result]}))
    text = made(tmp_path, tmp_path / "sweep")
    assert drawn(text) == {"time of a step (s)": {"box": ["1x2x1"], "kind": ["1d"], "ranks": [2], "value": [0.5]}}
    assert made(tmp_path, tmp_path / "sweep" / "a" / "strong.json").count("<h2>Strong scaling</h2>") == 1


# --- while a run goes on ----------------------------------------------------------------------------------------------


def refreshed(run: Path, output: Path, sleep: Callable[[float], None]) -> int:
    return report.run(Command(runs=(run,), output=output, refresh=5.0), sleep)


def test_the_page_follows_a_run_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, output = write(tmp_path / "run", step_line(1)), tmp_path / "page.html"
    more, seen = [step_line(2), step_line(3), END], list[int]()

    def sleep(seconds: float) -> None:
        assert seconds == 5.0
        text = output.read_text()
        assert '<meta http-equiv="refresh" content="5.0">' in text
        seen.append(len(points(drawn(text)["masked-LM loss"], "run")))
        with open(run / JOURNAL, "a") as journal:
            journal.write(json.dumps(more.pop(0)) + "\n")

    assert refreshed(run, output, sleep) == 0
    assert seen == [1, 2, 3]
    assert 'http-equiv="refresh"' not in output.read_text()
    assert capsys.readouterr().out.startswith(f"written: {output} (")
    assert [path.name for path in tmp_path.iterdir() if "page" in path.name] == ["page.html"]


def test_a_run_that_falls_silent_ends_the_page_and_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, output, slept = write(tmp_path / "run", step_line(1)), tmp_path / "page.html", list[float]()
    assert refreshed(run, output, slept.append) == 0
    assert sum(slept) == 50.0  # the first beyond 45 s in which nothing changed
    assert "nothing has changed for 50 s" in capsys.readouterr().out
    assert 'http-equiv="refresh"' not in output.read_text()


def test_a_lock_that_is_renewed_keeps_the_page_alive(tmp_path: Path) -> None:
    run, output, looks = write(tmp_path / "run", step_line(1)), tmp_path / "page.html", list[int]()

    def sleep(seconds: float) -> None:
        looks.append(len(looks))
        if len(looks) < 15:
            (run / "run.lock").write_text("x" * len(looks))  # another size, whatever the clock
        else:
            with open(run / JOURNAL, "a") as journal:
                journal.write(json.dumps(END) + "\n")

    assert refreshed(run, output, sleep) == 0
    assert len(looks) == 15


def test_when_a_run_has_ended(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def ended(*lines: dict[str, Any]) -> bool:
        return read_runs(write(run, *lines))[0].ended

    assert ended(step_line(40))
    assert not ended(step_line(39))
    assert ended(step_line(3), END)
    assert not ended(END, step_line(31, time=1e9 + 200)), "a run that was stopped, and goes on"
    (run / "run.lock").write_text("")
    assert not ended(step_line(40)), "somebody has the folder still"


# --- bad calls, and what pages are made of ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("", "name at least one run"),
        ("{folder}/none", "none does not exist"),
        ("{folder}", "is no run: it has neither run.json nor finetune.json"),
        ("{folder}/run {folder}/run", "run is named twice"),
        ("{folder}/run --refresh 0.5", "--refresh must be at least 1 seconds. Got 0.5"),
        ("{folder}/run --refresh nan", "--refresh must be at least 1 seconds. Got nan"),
        ("{folder}/run --output {folder}/no/a.html", "--output must be a file in a folder that exists"),
        ("{folder}/damaged", "run.json does not describe a run (it has no 'recipe')"),
        ("{folder}/other.json", "other.json is of another kind. Name a folder"),
        ("{folder}/list.json", "list.json holds no JSON object"),
        ("{folder}/plan.json", "plan.json is damaged (it has no 'cluster')"),
        ("{folder}/bare", "run.json does not describe a run (an entry is of another kind"),
        ("{folder}/seeds", "results.json is damaged (it has no 'mean')"),
        ("{folder}/sweep", "sweep is damaged (it has no 'results')"),
    ],
)
def test_bad_calls_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], call: str, message: str
) -> None:
    write(tmp_path / "run", step_line(1))
    (write(tmp_path / "damaged") / "run.json").write_text("{}")
    facts = json.loads((write(tmp_path / "bare") / "run.json").read_text())
    (tmp_path / "bare" / "run.json").write_text(json.dumps(facts | {"environment": None}))
    for name in ("seeds/results", "seeds/finetune", "sweep/a/strong"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.json").write_text("{}")
    for name, content in (("other", "{}"), ("list", "[]"), ("plan", '{"search": {}}')):
        (tmp_path / f"{name}.json").write_text(content)
    error = refused(capsys, main, *call.format(folder=tmp_path).split())
    assert error.startswith("tools.report: ")
    assert message in error
    assert not list(tmp_path.rglob("*.html"))


def test_lines_of_checkpoints_without_numbers_and_huge_ones_are_shown(tmp_path: Path) -> None:
    saved = {"kind": "checkpoint", "step": 1, "path": "run/step-1", "bytes": None, "seconds": [1]}
    run = write(tmp_path / "run", step_line(1, loss=10**400), step_line(2), saved)
    assert "saved run/step-1" in " ".join(Elements(made(tmp_path, run)).words)


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "find_spec", lambda name: None if name == "vl_convert" else name)
    with pytest.raises(
        ValueError, match=r"tools.report needs the package vl-convert-python: pip install 'tensor3d\[rep"
    ):
        report.run(Command(runs=(write(tmp_path / "run"),)))


def test_a_long_curve_keeps_its_ends_and_its_extremes() -> None:
    values = [0.0] * 50_000
    values[12_345], values[40_001] = 9.0, -9.0
    kept = charts.thinned(values)
    assert len(kept) <= charts.MOST
    assert kept == sorted(set(kept))
    assert {0, 12_345, 40_001, 49_999} <= set(kept)
    line = charts.Line(run="run", steps=range(50_000), values=values, smooth=False)
    made = charts.curve("loss", "nats", [line], ["run"])
    assert made.notes == (
        f"run: {len(kept):,} of 50,000 points are drawn, the lowest and the highest of each stretch.",
    )
    assert made.data["step"] == kept


def test_the_cube_greys_what_is_not_split() -> None:
    svg = str(cube_picture(CubeShape(y=3), {"y": 2.5e6, "x+z": 7.0}))
    assert ">y = 3</tspan>" in svg
    assert ">2.5 MB</tspan>" in svg
    assert re.findall(r'<text class="off".*?>(\w+) = 1</tspan>', svg) == ["x", "z", "data"]
    lines = re.findall(r'<line class="(\w+)( off)?" x1="120" y1="[\d.]+" x2="120"', svg)
    assert lines, "the edge along y"
    assert all(not off for _, off in lines)


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not Path(CHROMIUM).exists(), reason=f"{CHROMIUM} draws the page, and is not there")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    if find_spec("vl_convert") is None:
        pytest.skip("vl-convert-python is not installed")
    run = write(tmp_path / "run", *LINES, END)
    text = made(tmp_path, run, write(tmp_path / HOSTILE, *LINES))
    assert len(text.encode()) < 1_500_000
    shutil.rmtree(run)  # the page needs nothing of it
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += ["--enable-logging=stderr", f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=5000"]
    done = ran([*command, "--dump-dom", (tmp_path / "page.html").as_uri()], timeout=300)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert done.stdout.count("<canvas") == len(drawn(text)) > 5
    assert "cannot be drawn" not in re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)
