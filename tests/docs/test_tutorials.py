"""Each tutorial does what it says: its code gives one device's losses on a cube, its commands run, in small."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tensor3d.cost_model.hardware import cluster_of
from tests.ranks import run_ranks
from tests.tools.asked import write_models
from tests.tools.runs import write_text
from tests.tools.squad.small import squad
from tools.convert.__main__ import main as convert
from tools.predict import load
from tools.training.arguments import parse, resolve
from tools.training.estimate import _traffic_rows, expect

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    return (ROOT / "docs" / f"tutorial-{name}.md").read_text(encoding="utf-8")


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


# --- A model of one's own ---------------------------------------------------------------------------------------------


class PageRun(NamedTuple):
    losses: list[float]
    weights: dict[str, torch.Tensor]
    """Those that are back in the original."""
    pooled: tuple[tuple[float, float], ...]
    """Losses of the classifiers on the cube and of their originals."""
    printed: str


def run_page(code: str) -> PageRun:
    if dist.is_initialized():
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank)
    names: dict[str, Any] = {"history": []}
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "docs/tutorial-own-model.md", "exec"), names)
    pooled = (names["first"], names["mean"])
    return PageRun(names["history"], names["original"].state_dict(), pooled, printed.getvalue())


def alone(code: str) -> list[float]:
    """Losses of the original on the padded batch, in plain PyTorch."""
    names: dict[str, Any] = {}
    exec("".join(python_blocks(code)[:2]), names)
    model, batch, targets = names["original"], names["batch"], names["targets"]
    padding = torch.zeros(batch.shape).masked_fill(batch == 0, -torch.inf)

    def attend(a: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        found, _ = attention(a, a, a, key_padding_mask=padding, need_weights=False)
        return found, None

    attention = model.attend
    object.__setattr__(model, "attend", attend)
    del model._modules["attend"]
    optimizer = torch.optim.AdamW([*model.parameters(), *attention.parameters()], lr=1e-2)
    history = []
    for _ in range(5):
        logits = model(batch, torch.arange(8).expand(16, 8))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*model.parameters(), *attention.parameters()], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
    return history


@pytest.mark.slow
def test_a_model_of_ones_own_trains_as_on_one_device() -> None:
    code = "".join(python_blocks(page("own-model")))
    code = code.replace("    loss.backward()\n", "    loss.backward()\n    history.append(loss.item())\n", 1)
    (copies,) = re.findall(r"`t3d\.Cube\.(from_env\(1, 2, 1, data=2\))`", page("own-model"))
    single = run_page(code.replace("from_env(2, 2, 2)", "from_env(1, 1, 1)"))
    assert single.losses == pytest.approx(alone(page("own-model")), rel=1e-4)
    assert single.losses[-1] < single.losses[0]
    assert "attend" in single.printed
    assert re.findall(r"^(\w+) \((\w+)\) ", single.printed, re.MULTILINE) == [("pool", "First"), ("pool", "Mean")]
    ranks = run_ranks(8, run_page, code) + run_ranks(4, run_page, code.replace("from_env(2, 2, 2)", copies))
    for rank in (single, *ranks):
        assert rank.losses == pytest.approx(single.losses, rel=1e-4)
        for on_cube, on_one_device in rank.pooled:
            assert on_cube == pytest.approx(on_one_device, rel=1e-5)
        for name in set(rank.weights) - {"attend.in_proj_bias"}:  # the keys' part changes nothing: rounding alone
            torch.testing.assert_close(rank.weights[name], single.weights[name], rtol=1e-2, atol=1e-3)


# --- Commands ---------------------------------------------------------------------------------------------------------


def commands_of(name: str) -> list[list[str]]:
    text = re.sub(r" \\\n +", " ", page(name))
    return [shlex.split(line) for line in re.findall(r"^ {4}((?:python|launch/|echo).*)$", text, re.MULTILINE)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command in a folder of its own, with other values behind some options; its standard output."""
    monkeypatch.chdir(tmp_path)

    def run(command: list[str], **changes: str) -> str:
        words = [changes.get(f"{a} {b}", changes.get(b, b)) for a, b in zip(["", *command[:-1]], command, strict=True)]
        words = [str(ROOT / word) if word.startswith("launch/") else word for word in words]
        capfd.readouterr()
        if words[:2] == ["python", "-m"]:
            status = importlib.import_module(f"{words[2]}.__main__").main(words[3:])
        else:
            program = [sys.executable, *words[1:]] if words[0] == "python" else words
            status = subprocess.run(program, timeout=600, check=False).returncode
        told, errors = capfd.readouterr()
        assert status == 0, f"{shlex.join(words)}\n{told[-2000:]}{errors[-2000:]}"
        return told

    return run


@pytest.mark.slow
def test_pre_training_on_ones_own_text(tmp_path: Path, run: Callable[..., str]) -> None:
    write_text(tmp_path / "my.txt")
    first, report, asked, further, hosts = commands_of("pretrain")
    # launch/local.sh goes to the project's folder first
    changes = {name: str(tmp_path / name) for name in ("my.txt", "runs/mine")}
    changes |= {"--run.steps 400": "4", "--run.steps 800": "6"}
    small = ["--data.vocab-size", "67", "--data.packing", "spfhp", "--run.evaluate-every", "0"]
    run([*first, *small], **changes)
    run(report, **changes)
    assert (tmp_path / "runs/mine/report.html").stat().st_size > 10_000
    assert run(asked, **changes).count("%") == 5
    run([*further, *small], **changes)
    told = [json.loads(line) for line in (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert max(line.get("step") or 0 for line in told) == 6
    assert run(hosts).count("--node-rank") == 4


@pytest.mark.slow
def test_somebodys_bert_is_fine_tuned_and_answers(tmp_path: Path, run: Callable[..., str]) -> None:
    assert convert(["to-hf", str(write_models(tmp_path / "made") / "language"), str(tmp_path / "FOLDER")]) == 0
    text = "a fox went to the hill in the morning."
    asked = [
        {"id": f"q{n}", "question": "who went?", "answers": [{"text": "a fox", "answer_start": 0}]} for n in range(8)
    ]
    for name in ("train.json", "dev.json"):
        (tmp_path / name).write_text(json.dumps(squad((text, asked))))
    looked, tuned, once, written, served, given = commands_of("finetune")
    assert "2 layers" in run(looked)
    sizes = ["--data.max-length", "20", "--data.stride", "4", "--data.question-length", "8", "--run.batch", "4"]
    run([*tuned, *sizes])
    assert "%" in run(once)
    assert written[-2] == ">"
    (tmp_path / written[-1]).write_text(written[1])
    run(served)
    assert json.loads((tmp_path / "answers.jsonl").read_text())["id"] == 1
    names: dict[str, Any] = {}
    with redirect_stdout(io.StringIO()):
        exec(python_blocks(page("finetune"))[0], names)
    assert names["found"].best.text in "A fox went to the hill."
    run(given)
    assert load(tmp_path / "runs/answers-hf", "answer").predict([{"question": "who went?", "context": text}])


@pytest.mark.slow
def test_a_split_for_a_cluster(tmp_path: Path, run: Callable[..., str]) -> None:
    _, every, _, _, _, counted, measured, own, *trained = commands_of("plan")
    assert len(run(every).splitlines()) > 20
    assert re.search(r"^saved +([\d,]+) +\1 +1$", run(counted, large="tiny"), re.MULTILINE), "planned and counted"
    assert measured[:4] == ["python", "-m", "tools.bench", "collectives"]
    assert own[own.index("--cluster") + 1] == measured[measured.index("--output") + 1]
    assert [words[0] for words in trained] == ["launch/local.sh"] * 2
    assert trained[0][:-1] == trained[1][:-2]


def test_the_pick_of_the_page_is_the_planners(tmp_path: Path, run: Callable[..., str]) -> None:
    """The command that the page shows is the one that is printed, and what counts before it is the same run."""
    planned, _, narrow, trained, counted, *_ = commands_of("plan")
    run([*planned, "--quick", "--output", "plan.json"])
    assert shlex.split(json.loads((tmp_path / "plan.json").read_text())["search"]["run"]) == trained
    told = run([*narrow, "--cube", "16x1x1"])
    assert "across nodes 3.12 GB/s" in told
    begin = trained.index("--cube")
    assert counted[3 : 3 + len(trained) - begin] == trained[begin:]
    assert counted[3 + len(trained) - begin :] == ["--run.peak-tflops", "989", "--dry-run"]
    command = parse([str(ROOT / word) if word.endswith(".toml") else word for word in counted[3:]])
    resolve(command).check()


def test_what_the_page_expects_to_be_received_is_what_a_dry_run_says() -> None:
    (dry,) = (words for words in commands_of("plan") if words[0] == "launch/local.sh" and words[-1] == "--dry-run")
    run = resolve(parse([str(ROOT / word) if word.startswith("launch/") else word for word in dry[1:]]))
    told = dict(_traffic_rows(expect(run.recipe, run.shape)))["together"]
    assert f"`received by rank 0 in a step` ({told} in both)" in page("plan")


def test_the_network_of_presets_is_what_the_page_says() -> None:
    text = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    for name, inside, across in (("H100", 360, 40), ("A100-80GB", 240, 20), ("V100-32GB", 120, 5)):
        cluster = cluster_of(name, nodes=2)
        assert (cluster.inside.bandwidth, cluster.across.bandwidth) == (inside * 1e9, across * 1e9)
        assert re.search(rf"{name[:4]} (receives\s+)?{inside}\b.*?\b{across}\b", text, re.DOTALL)
