"""`python -m tools.plan` as users call it."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from html import escape
from pathlib import Path
from typing import Any

import pytest

from models.bert import PRESETS, BertConfig
from models.bert.cost_model.step_cost import Batch, BertCosts
from tensor3d import CubeShape
from tensor3d.cost_model.hardware import Cluster, Link, LinkFit, cluster_of
from tensor3d.cost_model.search import search
from tools.plan.__main__ import PlanCommand, main
from tools.plan.check import Comparison, check, predicted
from tools.plan.tables import MODELS, _more, kind_of, parameters_of
from tools.report import page
from tools.training.arguments import parse, resolve
from tools.training.config import read_config
from tools.training.estimate import expect
from tools.training.idle_settings import idle_settings

ELECTRA = {
    **{
        "model_type": "electra",
        "vocab_size": 30522,
        "hidden_size": 256,
        "embedding_size": 128,
        "num_hidden_layers": 12,
    },
    **{"num_attention_heads": 4, "intermediate_size": 1024, "max_position_embeddings": 512},
}
BASE = ["--model", "base", "--global-batch", "64"]
PAGE = Path(__file__).parents[3] / "docs" / "scaling.md"


def planned(tmp_path: Path, *arguments: str, status: int = 0) -> dict[str, Any]:
    path = tmp_path / "plan.json"
    assert main([*BASE, "--quick", *arguments, "--output", str(path)]) == status
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_every_box_is_in_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = planned(tmp_path, "--gpu", "a100-40GB", "--nodes", "2", "--per-node", "4")
    plans, refused = content["search"]["plans"], content["search"]["refused"]
    assert len(plans) + len(refused) == 20  # ways to write 8 as a product of four
    assert [plan["seconds"] for plan in plans] == sorted(plan["seconds"] for plan in plans)
    for plan in plans:
        box = plan["box"]
        assert box["data"] * box["x"] * box["y"] * box["z"] == 8
        assert sum(plan["time"][part] for part in ("products", "attention", "touching", "starting", "exposed")) == (
            pytest.approx(plan["seconds"])
        )
        assert 0 < plan["mfu"] < 1
        assert plan["tokens_per_second"] == pytest.approx(64 * 512 / plan["seconds"])
        assert all(each["bytes"] > 0 < each["calls"] for each in plan["received"])
    assert content["cluster"]["per_node"] == 4
    printed = capsys.readouterr().out
    assert "pick: " in printed
    assert "at its best" in printed
    assert "Rajbhandari et al. 2020" in printed  # the papers' rows


def test_one_box(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = planned(tmp_path, "--cube", "1x2x2", "--data-parallel", "2")
    assert [plan["box"] for plan in content["search"]["plans"]] == [{"data": 2, "x": 1, "y": 2, "z": 2}]
    assert "2*(1x2x2)" in capsys.readouterr().out


def test_what_is_guessed_and_learnt_is_part_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    box = ["--cube", "1x2x2", "--data-parallel", "2"]
    both, alone, more = (
        planned(tmp_path, *box, *options)["search"]["plans"][0]
        for options in ([], ["--objective", "masked-lm"], ["--objective", "masked-lm", "--masked-share", "0.3"])
    )
    received = [sum(each["bytes"] for each in plan["received"]) for plan in (both, alone, more)]
    assert received[1] < received[0] < received[2]
    assert alone["seconds"] < both["seconds"] < more["seconds"]
    assert main([*BASE, "--quick", "--masked-share", "0.9"]) == 2
    assert "the masked share must be above 0 and at most 0.8. Got 0.9" in capsys.readouterr().err


def test_the_page_of_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "vega", lambda: "")
    monkeypatch.setattr(page, "find_spec", lambda name: name)
    html = tmp_path / "plan.html"
    content = planned(tmp_path, "--nodes", "1", "--memory", "12e9", "--html", str(html))
    plans, refused = content["search"]["plans"], content["search"]["refused"]
    assert plans
    assert refused
    text = html.read_text()
    assert f"<p>Run it: {escape(content['search']['run'])}</p>" in text
    (block,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', text)
    (chart,) = json.loads(block)
    assert chart["data"]["seconds"] == [plan["seconds"] for plan in plans]
    assert chart["data"]["GB"] == [plan["memory"]["peak"] / 1e9 for plan in plans]
    assert chart["spec"]["layer"][1]["data"]["values"][0]["limit"] == pytest.approx(0.9 * 12)
    rows = re.findall(r'<th scope="row">(.*?)</th>\n<td class="right" data-key="(\d+)"', text)
    assert rows == [(str(CubeShape(**plan["box"])), str(place)) for place, plan in enumerate(plans, 1)]
    for each in refused:
        assert f'<th scope="row">{each["box"]}</th>\n<td>{escape(each["reason"])}</td>' in text
    planned(tmp_path, "--ranks", "1,4", "--html", str(html))
    assert re.findall(r"<h2>(.*?)</h2>", html.read_text())[::2] == ["Boxes of 1 rank", "Boxes of 4 ranks", "Asked"]


@pytest.mark.slow
def test_what_is_counted_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, one = tmp_path / "plan.json", ["--layers", "5", "--cube", "2x2x2"]
    peaks = []
    for more, counted in (["--quick"], False), ([], True):
        assert main([*BASE, *one, *more, "--output", str(path)]) == 0
        (plan,) = json.loads(path.read_text())["search"]["plans"]
        assert plan["memory"]["counted"] is counted
        peaks.append(plan["memory"]["peak"])
        printed = capsys.readouterr().out
        assert ("peak: counted in dry steps" in printed) is counted
        assert ("a formula's lower bound" in printed) is not counted
    assert 0.5 * peaks[1] < peaks[0] < peaks[1]


def test_a_measured_machine(tmp_path: Path) -> None:
    cluster = cluster_of("V100-16GB", nodes=1, per_node=8, name="mine")
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"cluster": cluster.to_json(), "command": "bench"}))
    content = planned(tmp_path, "--cluster", str(path), "--memory", "32e9")
    assert content["cluster"]["name"] == "mine"
    assert content["cluster"]["memory"] == 32e9


def test_what_was_measured_on_one_node_says_nothing_of_more(tmp_path: Path) -> None:
    fit = LinkFit(kind="all-gather", members=8, stride=1, latency=1e-6, seconds_per_byte=1e-11)
    machine = dataclasses.replace(cluster_of("H100"), fits=(fit,))
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine.to_json()))
    command = PlanCommand(cluster=str(path))
    shape = CubeShape(x=8)
    assert command.machines(8).collective(shape, ("x",), "all-gather") == (1e-6, 1e-11)
    spread = CubeShape(x=8, data=8, wire=("x", "data", "y", "z"))  # one of each eight on a node
    plain = dataclasses.replace(machine, fits=(), nodes=8)
    assert command.machines(64).collective(spread, ("x",), "all-gather") == plain.collective(
        spread, ("x",), "all-gather"
    )
    with pytest.raises(ValueError, match=r"measured collectives.*latency and bandwidth"):
        dataclasses.replace(command, across_bandwidth="1GB").machines()


def test_a_file_in_other_units_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.json"
    plain = cluster_of("H100", name="mine")
    path.write_text(json.dumps(dataclasses.replace(plain, across=Link(latency=4e-6, bandwidth=25.0)).to_json()))
    assert main([*BASE, "--quick", "--cluster", str(path)]) == 2
    assert (
        "across.bandwidth of mine is in bytes/s, at least 1 MB/s. Got 25. Correct the file." in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("units", "numbers"),
    [
        (["--across-bandwidth", "200Gbit", "--memory", "40GB"], ["--across-bandwidth", "25e9", "--memory", "40e9"]),
        (["--flops", "312T", "--across-latency", "9us"], ["--flops", "312e12", "--across-latency", "9e-6"]),
    ],
)
def test_units_stand_for_numbers(
    units: list[str], numbers: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [planned(tmp_path, "--nodes", "2", *arguments) for arguments in (units, numbers)]
    assert found[0]["cluster"] == found[1]["cluster"]
    printed = capsys.readouterr().out
    if "200Gbit" in units:
        assert "across nodes 25 GB/s and 4 us a step" in printed
    else:
        assert "across nodes 40 GB/s and 9 us a step" in printed


@pytest.mark.parametrize(
    "arguments",
    [
        ["--gpu", "H100", "--nodes", "2", "--cube", "2x2x2", "--data-parallel", "2"],
        [
            "--gpu",
            "V100-16GB",
            "--per-node",
            "4",
            "--global-batch",
            "4096",
            "--optimizer",
            "adamw",
            "--overlap",
            "none",
        ],
        ["--nodes", "2", "--cube", "1x2x2", "--shard-over-data", "--shadow-weights", "--quick"],
        [
            "--nodes",
            "2",
            "--cube",
            "1x2x2",
            "--shard-over-data",
            "gradients",
            "--quick",
            "--fp8",
            "delayed",
            "--compile",
        ],
        ["--gpu", "V100-16GB", "--cube", "2x2x2", "--global-batch", "512", "--memory", "8GB"],
        pytest.param(
            ["--model", "10b", "--nodes", "4", "--reduce", "bf16", "--objective", "masked-lm", "--masked-share", "0.3"],
            marks=pytest.mark.slow,
        ),
        ["--model", "tiny", "--vocab", "500", "--capacity", "320", "--length", "32", "--memory", "150MB"],
        ["--per-node", "1", "--layers", "5", "--inner", "1024", "--positions", "1024"],
        ["--model", "modernbert-large", "--optimizer", "stable_adamw"],
        ["--model", "mdeberta-v3-base", "--layers", "2", "--quick"],
        ["--model", "roberta-base", "--objective", "masked-lm+next-sentence", "--layers", "6"],
        ["--model-folder", "FOLDER", "--capacity", "256"],
    ],
)
def test_the_printed_command_trains_on_the_pick(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real parser of training makes the box, the model, the batch and the choices of it."""
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "FOLDER" / "config.json").write_text(json.dumps(ELECTRA))
    arguments = [str(tmp_path / word) if word == "FOLDER" else word for word in arguments]
    content = planned(tmp_path, *arguments)
    pick, model, asked = content["search"]["plans"][0], content["model"], content["asked"]
    printed = capsys.readouterr().out.split("run it: ")[1].split("\n", 1)[1].split("\n\n")[0]
    words = shlex.split(printed.replace("\\\n", " "))
    assert words == shlex.split(content["search"]["run"])
    begin = words.index("--cube")
    assert words[:begin] == (
        ["launch/local.sh"]
        if content["cluster"]["nodes"] == 1
        else shlex.split("python launch/ssh.py --hostfile hosts")
    )
    recipe_at = next(number for number, word in enumerate(words) if word.endswith(".toml"))
    named = {word for word in words[begin:recipe_at] if word.startswith("--")}
    assert named <= {"--cube", "--data-parallel"}, "all that each launcher takes before the recipe"
    run = resolve(parse(words[begin:]))
    run.check()
    assert run.shape == CubeShape(**pick["box"])
    assert run.rank_order == (tuple(pick["wire"]) if run.shape.ranks > 1 else None)
    recipe, expected = run.recipe, expect(run.recipe, run.shape)
    trained = dataclasses.asdict(expected.config)
    dropouts = {"dropout", "attention_dropout", "attention_out_dropout"}
    same = {each.name for each in dataclasses.fields(BertConfig)} - {"inner", "std", *dropouts}
    assert {key: trained[key] for key in same} == {key: model[key] for key in same}
    assert expected.config.inner_size == BertConfig(**model).inner_size
    assert (expected.packs, expected.micro_batches) == (asked["global_batch"], pick["choice"]["micro_batches"])
    assert recipe.data.capacity == asked["capacity"]
    assert recipe.data.max_length == asked.get("length", asked["capacity"])
    assert recipe.data.max_sequences >= recipe.data.capacity // recipe.data.max_length
    assert recipe.data.masked_share == asked["masked_share"]
    assert (recipe.optimizer.kind, recipe.precision.reduce) == (asked["optimizer"], asked["reduce"])
    assert recipe.optimizer.shard_over_data == asked["shard_over_data"]
    assert recipe.speed.overlap is (asked["overlap"] != "none")
    assert recipe.speed.shadow_weights is asked["shadow_weights"]
    assert recipe.speed.compile is asked["compile"]
    assert recipe.precision.fp8 == asked["fp8"]
    assert (pick["memory"]["shadows"] > 0) is asked["shadow_weights"]
    choice = {key: getattr(recipe.model, key) for key in ("recompute", "reshard_after_forward")}
    assert recipe.model.keep_bytes == pick["choice"]["keep_budget"]
    assert bool(recipe.model.keep_budget) is ("8GB" in arguments)
    assert choice == {key: pick["choice"][key] for key in choice}
    assert not [line for line in idle_settings(recipe) if "multiple_of" in line]


def test_a_state_in_shares_is_what_the_page_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = re.findall(r"^\| (without|with `.*?`) \| (.*) \| (.*) \| (.*) \| (\d+) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 3
    box = ["--model", "large", "--global-batch", "4096", "--cube", "1x1x1", "--data-parallel", "8"]
    options = [], ["--shard-over-data"], ["--shard-over-data", "gradients"]
    for (_, gradients, state, received, calls), more in zip(rows, options, strict=True):
        planned(tmp_path, "--gpu", "H100", *box, *more)
        printed = capsys.readouterr().out
        assert f"gradients {gradients}, optimiser {state}, " in printed
        assert re.search(rf"^  data +{received} +{calls} ", printed, re.MULTILINE)
        sharded = ["lamb, its state sharded over data", "lamb, its state and gradients sharded over data"]
        assert [text in printed for text in sharded] == [len(more) == 1, len(more) == 2]


def test_times_of_types_are_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text()
    (words,) = re.findall(r"^    python -m tools.plan (--model large .* --quick) --fp8 rowwise$", page, re.MULTILINE)
    times = r" \| ([\d.]+ ms) \| (\d+ ms)"
    rows = re.findall(rf"^\| (bf16|`--.*`) \| ([\d.]+ ms){times}{times} \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for how, products, *told in rows:
        for compiled, (touching, step) in (([], told[:2]), (["--compile"], told[2:])):
            assert main([*words.split(), *([] if how == "bf16" else how.strip("`").split()), *compiled]) == 0
            printed = capsys.readouterr().out
            assert re.search(rf"^8\*\(1x1x1\) .*  {step} ", printed, re.MULTILINE)
            assert re.search(rf"products {products}, .*, memory-bound operators {touching},", printed)
            assert ("compiled regions" in printed, "eager operators" in printed) == (bool(compiled), not compiled)


def test_times_beside_one_gpu_are_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text()
    (words,) = re.findall(
        r"^    python -m tools.plan (--model large .* --quick) --global-batch 64$", page, re.MULTILINE
    )
    rows = re.findall(r"^\| (16|64) packs, (eager|compiled)[^|]*\| [\d,]+ \| ([\d,]+) \|", page, re.MULTILINE)
    assert len(rows) == 3
    for packs, how, tokens in rows:
        assert main([*words.split(), "--global-batch", packs, *(["--compile"] if how == "compiled" else [])]) == 0
        assert re.search(rf"^1x1x1 .*  {tokens}  ", capsys.readouterr().out, re.MULTILINE)


def test_products_in_fp8_have_a_peak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the preset, or a given one; the heading says which. Rounding touches what bf16 does not."""
    box = ["--cube", "1x1x1", "--data-parallel", "8"]
    fast, given = (
        planned(tmp_path, *box, *more, "--fp8", "tensorwise")["search"]["plans"][0]["time"]
        for more in ([], ["--gpu", "A100-80GB", "--fp8-flops", "624T"])
    )
    printed = capsys.readouterr().out
    assert "bf16, linear layers in FP8 (tensorwise), gradients travel in fp32" in printed
    assert "989.4 TFLOP/s of bf16 and 1,979 of FP8 at 80%" in printed
    assert "312 TFLOP/s of bf16 and 624 of FP8 at 80%" in printed
    plain = planned(tmp_path, *box)["search"]["plans"][0]["time"]
    assert plain["products"] / 2 < fast["products"] < plain["products"] < given["products"]
    assert plain["touching"] < fast["touching"]


def test_shadow_weights_and_regions_are_offered_where_they_give_something(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what is offered is what a plan with them takes."""
    short = ["--per-node", "1", "--cube", "1x1x1", "--memory", "6GB", "--global-batch", "64"]
    planned(tmp_path, *short)
    (offered, less) = re.findall(r"--shadow-weights: (.*), (.*)% less, with .* of copies\.", capsys.readouterr().out)[0]
    (plan,) = planned(tmp_path, *short, "--shadow-weights")["search"]["plans"]
    printed = capsys.readouterr().out
    assert f"  {offered}  " in printed
    assert float(less) >= 0.5
    assert "of copies" not in printed
    (compiled,) = re.findall(r"^  --compile: (.*), .*% less\.$", printed, re.MULTILINE)
    planned(tmp_path, *short, "--shadow-weights", "--compile")
    both = capsys.readouterr().out
    assert f"  {compiled}  " in both
    assert "  --compile: " not in both
    planned(tmp_path, *short, "--compute", "fp32")
    assert "of copies" not in capsys.readouterr().out
    assert plan["memory"]["shadows"] > 0


def test_budgets_by_memory_are_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text()
    rows = re.findall(r"^\| (\d+GB) \| (kept gathers|.* MiB kept) \| (\d+ ms) \|$", page, re.MULTILINE)
    assert len(rows) == 4
    (words,) = re.findall(r"^    python -m tools.plan (--model 10b .*) --memory 24GB$", page, re.MULTILINE)
    for memory, kept, step in rows:
        assert main([*words.split(), "--memory", memory]) == 0
        assert re.search(rf"^64x1x1 .*  {kept}  +{step} ", printed := capsys.readouterr().out, re.MULTILINE)
        assert ("MiB kept = those that fit in so much memory stay (--model.keep-budget)" in printed) is (
            memory != "40GB"
        )
        budget = kept.split()[0].replace(",", "")
        assert (f"--model.keep-budget {budget} " in printed) is (memory != "40GB")


@pytest.mark.slow
def test_picks_where_memory_is_short_are_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text()
    (words,) = re.findall(
        r"^    python -m tools.plan (--model 100b .* --ranks 32,64,2048 --quick)$", page, re.MULTILINE
    )
    rows = re.findall(r"^\| ([\d,]+) \| (\S+) \| (recompute.*|.* MiB kept) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 3
    assert main([*words.split(), "--quick"]) == 0
    printed = capsys.readouterr().out.replace("minutes", "min")
    for ranks, box, kept, step in rows[:2]:  # of 2,048 ranks all boxes take a second
        assert re.search(rf"^{ranks} +{re.escape(box)} .* {kept} +{step} ", printed, re.MULTILINE)


def test_the_papers_formulas_are_not_of_gates(capsys: pytest.CaptureFixture[str]) -> None:
    for model, shown in (("roberta-base", True), ("modernbert-base", False)):
        assert main(["--model", model, "--global-batch", "64", "--quick"]) == 0
        assert ("ways of the papers by the papers' formulas" in capsys.readouterr().out) is shown


def test_what_training_refuses_has_no_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(tmp_path, "--capacity", "4")["search"]["run"] is None
    assert "run it: tools.pretrain refuses this model or batch: data.capacity must be at least 5 and" in (
        capsys.readouterr().out
    )


def test_words_for_one_and_for_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(tmp_path, "--per-node", "2", "--heads", "3")
    printed = capsys.readouterr().out
    assert printed.splitlines()[-2] == "1 box does not divide (--all says why)"
    assert "kind: data = copies of the whole model; fully sharded = (P,1,1), weights in P parts as by ZeRO-3" in printed
    assert "kept gathers = gathered inputs and weights stay (--model.no-reshard-after-forward)" in printed
    assert "not with the boxes above" in printed


def test_sizes_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "sizes.png"
    content = planned(tmp_path, "--ranks", "64,8", "--plot", str(plot))
    assert list(content["ranks"]) == ["8", "64"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    for ranks, found in content["ranks"].items():
        for plan in found["plans"]:
            assert plan["box"]["data"] * plan["box"]["x"] * plan["box"]["y"] * plan["box"]["z"] == int(ranks)
        pick = found["plans"][0]["seconds"]
        kinds = {plan["kind"]: plan["seconds"] for plan in reversed(found["plans"])}
        assert all(pick <= seconds for seconds in kinds.values())
    printed = capsys.readouterr().out
    assert "64" in printed
    assert "overtakes" in printed


def test_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = planned(tmp_path, "--memory", "1e8", status=1)
    assert content["search"]["plans"] == []
    captured = capsys.readouterr()
    assert "2x2x2: needs " in captured.out
    assert captured.err == "no box of these ranks holds the model\n"


@pytest.mark.slow
def test_the_real_step_beside_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    """4,096 ranks, in this process."""
    tiny = ["--model", "tiny", "--vocab", "500", "--capacity", "32", "--global-batch", "4096"]
    assert main([*tiny, "--nodes", "512", "--cube", "4x2x2", "--quick", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "a step of rank 0 of 256*(4x2x2)" in printed
    counted = dict(
        line.split("  ", 1) for line in printed.split("ratio\n")[1].splitlines() if line.startswith(("bytes", "calls"))
    )
    assert "bytes data all-reduce" in counted
    assert all(cells.split()[0] == cells.split()[1] for cells in counted.values())


def test_a_wrong_formula_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        Comparison(what="saved", predicted=10, counted=10),
        Comparison(what="peak", predicted=21, counted=20),
        Comparison(what="bytes x all-gather", predicted=8, counted=9),
    ]
    monkeypatch.setattr("tools.plan.check.dry_beside_prediction", lambda *_, **__: found)
    assert main([*BASE, "--quick", "--dry-run"]) == 1
    assert "please report it" in capsys.readouterr().err
    found.pop()
    assert main([*BASE, "--quick", "--dry-run"]) == 0


def test_predicted_beside_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    boxes = ["8x1x1", "1x8x1", "2x2x2", "4x2x1"]
    recipe = read_config(Path("launch/recipes/quickstart.toml"))
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, heads=8))
    machine = cluster_of("V100-16GB", nodes=1, per_node=8, overlaps=False)
    (tmp_path / "machine.json").write_text(json.dumps(machine.to_json()))
    predictions = {box: predicted(recipe, CubeShape.parse(box), machine) for box in boxes}
    order = sorted(boxes, key=lambda box: predictions[box])
    swapped = [order[1], order[0], *order[2:]]
    results = [{"cube": box, "data_parallel": 1, "seconds_median": 2.0**place} for place, box in enumerate(swapped)]
    path = tmp_path / "step.json"
    path.write_text(json.dumps({"recipe": recipe.to_dict(), "results": results}))
    found = check(path, machine)
    assert found.rank_correlation == pytest.approx(0.8)
    assert found.clear == (5, 6)
    assert main(["--check", str(path), "--cluster", str(tmp_path / "machine.json")]) == 0
    assert "of 6 pairs that differ by more than 15%, 5 in the right order" in capsys.readouterr().out
    for changes in ({"read_rows_only": True}, {"compile": True}, {"attention": "reference"}):
        speed = {**recipe.to_dict(), "speed": changes}
        path.write_text(json.dumps({"recipe": speed, "results": results}))
        assert main(["--check", str(path), "--cluster", str(tmp_path / "machine.json")]) == 2
        assert f"step.json was measured with speed.{next(iter(changes))} = " in capsys.readouterr().err
    path.write_text("{}")
    assert main(["--check", str(path), "--cluster", str(tmp_path / "machine.json")]) == 2
    assert "is no file that `bench step --output` has written" in capsys.readouterr().err


def test_steps_measured_without_overlap_are_predicted_without_it() -> None:
    recipe, shape = read_config(Path("launch/recipes/quickstart.toml")), CubeShape(x=2, y=2, z=2)
    machine = cluster_of("V100-16GB", nodes=1, per_node=8)
    waiting = dataclasses.replace(recipe, speed=dataclasses.replace(recipe.speed, overlap=False))
    machine = dataclasses.replace(machine, launch=1e-9)  # else starting operators takes all of the time
    assert predicted(recipe, shape, machine) < predicted(waiting, shape, machine)


def test_recipes_with_shadow_weights_and_fp8_are_predicted_so(tmp_path: Path) -> None:
    base, shape = read_config(Path("launch/recipes/quickstart.toml")), CubeShape(y=2)
    machine = dataclasses.replace(cluster_of("H100", per_node=2), launch=1e-9)  # else all is waiting for the host

    def seconds(fp8: Any = "off", shadow_weights: bool = False, on: Cluster = machine) -> float:
        precision = dataclasses.replace(base.precision, compute="bf16", fp8=fp8)
        speed = dataclasses.replace(base.speed, shadow_weights=shadow_weights)
        return predicted(dataclasses.replace(base, precision=precision, speed=speed), shape, on)

    assert seconds(shadow_weights=True) < seconds() < seconds("rowwise") < seconds("delayed")
    with pytest.raises(ValueError, match=r"A100-40GB knows the FLOP/s of fp32, fp16, bf16. Got 'fp8'"):
        seconds("rowwise", on=cluster_of("A100-40GB", per_node=2))


def test_a_folder_of_a_decoder_is_planned_with_the_attention_that_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"vocab_size": 67, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    settings = {"model_type": "qwen3", "intermediate_size": 96, "max_position_embeddings": 512, **sizes}
    (tmp_path / "config.json").write_text(json.dumps({**settings, "num_key_value_heads": 2}))
    content = planned(tmp_path, "--model-folder", str(tmp_path))
    assert "sees no later tokens. Planned is its attention" in capsys.readouterr().err
    assert (content["model"]["family"], content["model"]["causal"]) == ("qwen3", True)
    (tmp_path / "config.json").write_text(json.dumps({**settings, "num_key_value_heads": 2, "is_causal": False}))
    both = planned(tmp_path, "--model-folder", str(tmp_path))
    assert "sees no later tokens" not in capsys.readouterr().err
    first, second = ({json.dumps(p["box"]): p for p in each["search"]["plans"]} for each in (content, both))
    assert first.keys() == second.keys()
    # 512 * 513 / 2 of 512 * 512 pairs, on every box.
    assert all(first[box]["time"]["attention"] < second[box]["time"]["attention"] * 0.502 for box in first)


def test_headline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--headline"]) == 0
    printed = capsys.readouterr().out
    (page,) = re.findall(r"^\| reported .*?\n\n", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    rows = re.findall(r"([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) == 8
    assert rows == re.findall(r" {2,}(\d\.\d\d) +(\d\.\d\d)$", printed, re.MULTILINE)[-8:]
    assert "2.32" in printed
    assert "1.57" in printed


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("roberta-base", 124_697_433),
        ("roberta-large", 355_412_057),
        ("xlm-roberta-xl", 3_482_741_760),
        ("xlm-roberta-xxl", 10_712_994_816),
        ("megatron-bert-345m", 333_671_808),
        ("megatron-bert-3.9b", 3_858_765_696),
        ("gatortron-large", 8_829_072_896),
        ("modernbert-base", 149_655_232),
        ("modernbert-large", 395_881_664),
        ("eurobert-210m", 310_266_624),
        ("eurobert-610m", 755_625_600),
        ("eurobert-2.1b", 2_403_092_736),
        ("embeddinggemma-300m", 302_863_104),
        ("qwen3-embedding-0.6b", 595_776_512),
        ("qwen3-embedding-8b", 7_567_295_488 + 151_665 * 4096),
        ("mpnet-base", 109_518_527),
        ("deberta-v2-xlarge", 887_085_156),
        ("deberta-v2-xxlarge", 1_567_041_636),
        ("deberta-v3-xsmall", 70_958_820),
        ("deberta-v3-large", 435_191_908),
        ("mdeberta-v3-base", 279_061_880),
        ("jina-embeddings-v3", 559_616_146),
        ("nomic-bert-base", 137_354_304),
        ("gte-multilingual-base", 306_210_496),
    ],
)
def test_the_relatives_of_bert_have_their_published_sizes(name: str, parameters: int) -> None:
    """Weights of the masked language models of the transformers library."""
    assert parameters_of(dataclasses.replace(MODELS[name], next_sentence=False)) == parameters


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model-folder", "nowhere"], "nowhere is no folder of a model: it has neither model.json"),
        (["--gpu", "B9000"], "GPUs with a preset are"),
        (["--model", "huge"], "--model must be one of tiny, mini, small, base, large, 10b, 100b"),
        (["--model", "BERT-Large"], "Got 'BERT-Large'. Did you mean large?"),
        (["--nodes", "0"], "--nodes must be at least 1. Got 0."),
        (["--layers", "0"], "--layers must be a whole number from 1 to 10,000. Got 0."),
        (["--hidden", "-64"], "--hidden must be a whole number from 1 to 1,000,000,000. Got -64."),
        (["--hidden", "100000000", "--heads", "1"], "the planner stops at 1e+15"),
        (["--heads", "7"], "hidden must divide by heads=7. Got 768."),
        (["--nodes", "1000000"], "the planner stops at 1,048,576 ranks. Got 8,000,000."),
        (["--nodes", "8192", "--capacity", "512"], "65,536 ranks are more than the 32,768 tokens of a step."),
        (["--gpu", "A100"], "Got 'A100'. Did you mean A100-40GB or A100-80GB?"),
        (["--memory", "80"], "--memory must be at least 1 MB. Got 80 = 80 bytes. Write the unit, such as 80GB."),
        (["--across-bandwidth", "25"], "--across-bandwidth must be at least 1 MB/s. Got 25 = 25 bytes/s."),
        (["--inside-bandwidth", "25Gb"], "--inside-bandwidth must be bytes/s: a number such as 25e9, or with a unit"),
        (["--memory-bandwidth", "nan"], "--memory-bandwidth must be bytes/s: "),
        (["--flops", "312"], "--flops must be at least 1 MFLOP/s. Got 312 = 312 FLOP/s. Write the unit, such as 312T."),
        (["--memory-share", "2"], "memory_share must be above 0 and at most 1. Got 2.0."),
        (["--cube", "2x2x3"], "2x2x3 takes 12 ranks, and 1 x 8 H100 has 8."),
        (["--cube", "2x2"], "a cube is written XxYxZ"),
        (["--data-parallel", "2"], "--data-parallel 2 says how many copies of --cube. Name one."),
        (["--ranks", "8,x"], "--ranks must be whole numbers of at least 1, as 8,64,512. Got '8,x'."),
        (["--across-latency", "4"], "--across-latency must be above 0 and at most 1 s. Got 4 = 4 seconds. Write the"),
        (["--headline", "--ranks", "8"], "--headline is about one machine of its own."),
        (["--plot", "nowhere/a.png", "--ranks", "8"], "--plot must be a file in a folder that exists."),
        (["--ranks", "12"], "12 ranks fill no whole number of nodes of 8."),
        (["--ranks", "8", "--dry-run"], "Leave out --cube and --dry-run."),
        (["--plot", "a.png"], "--plot draws what --ranks asks for."),
        (["--cluster", "missing.json"], "missing.json"),
        (["--cluster", "longhorn", "--nodes", "4"], "--cluster is a whole machine. Leave out --nodes; --ranks makes"),
        (["--layers", "10001", "--hidden", "64"], "--layers must be a whole number from 1 to 10,000. Got 10,001."),
        (["--global-batch", "100000000000"], "a step has at most 4,194,304 sequences. Got 100,000,000,000 in"),
        (["--capacity", "1000000000000", "--length", "1"], "a step has at most 4,194,304 sequences."),
        (["--gpu", "V100-16GB", "--compute", "bf16"], "knows the FLOP/s of"),
        (["--gpu", "A100-80GB", "--fp8", "rowwise"], "A100-80GB knows the FLOP/s of fp32, fp16, bf16. Got 'fp8'."),
        (["--compute", "fp16", "--fp8", "delayed"], "beside compute='bf16'. Got 'delayed' and compute='fp16'."),
        (["--output", "nowhere/plan.json"], "--output must be a file in a folder that exists."),
    ],
)
def test_bad_calls(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, *arguments]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        (CubeShape(data=8), "data"),
        (CubeShape(x=8), "fully sharded"),
        (CubeShape(y=8, data=2), "1-D"),
        (CubeShape(z=8), "1-D"),
        (CubeShape(y=4, z=4), "2-D"),
        (CubeShape(x=2, y=2, z=2), "cube"),
        (CubeShape(x=4, y=2, z=2), "other"),
        (CubeShape(x=4, y=2), "other"),
        (CubeShape(y=4, z=2), "other"),
    ],
)
def test_names_of_boxes(shape: CubeShape, kind: str) -> None:
    assert kind_of(shape) == kind


def test_how_much_longer_a_box_takes_is_told() -> None:
    """Twice as many seconds a step are twice as long, and the part that grew most is named."""
    node = dataclasses.replace(cluster_of("A100-80GB", nodes=1, per_node=8), name="mine")
    costs = BertCosts(config=PRESETS["base"], batch=Batch(packs=64))
    best = search(costs, node, "bf16").plans[0]
    longer = dataclasses.replace(best.time, products=best.time.products + best.time.total)
    told = _more(dataclasses.replace(best, time=longer), best)
    assert told.startswith("2.00 times as long")
    assert told.endswith("for products")
