"""`bench rivals`: the plain model, how it is split, what is counted, and a short run on real processes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models.bert import BertForPreTraining
from tensor3d import Cube, TransformerLayer3D
from tests.ranks import run_ranks
from tests.single_device_reference import error, gradient_errors
from tests.tools.bench.vs_pytorch.on_ranks import CONFIG, all_counts, split_errors, work_of
from tools.bench.__main__ import main
from tools.bench.harness.benchmark import Report
from tools.bench.harness.figures import cells, header
from tools.bench.vs_pytorch import command
from tools.bench.vs_pytorch.command import RivalFigures, RivalsCommand, faults, figures, loss_difference
from tools.bench.vs_pytorch.plain_bert import PlainBert, PlainLayer, copy_weights
from tools.bench.vs_pytorch.trial import RIVALS, Implementation, RankFacts, resting_bytes
from tools.bench.vs_pytorch.work import packed_batch, packed_hidden, plain_batch, whole_hidden

# The plain model


def disturbed(model: nn.Module) -> nn.Module:
    """With vectors of random values: biases start at 0 and gains at 1, which would hide much."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.add_(0.3 * noise)
    return model


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_the_plain_model_is_ours(activation: Any) -> None:
    config = dataclasses.replace(CONFIG, activation=activation)
    work, cube = dataclasses.replace(work_of(), config=config), Cube.single()
    cube.manual_seed(0)
    ours, plain = disturbed(BertForPreTraining(config, cube)), PlainBert(config)
    copy_weights(plain, ours)
    wanted = ours(packed_batch(work, cube), work.sequences * work.masked, work.sequences).loss
    loss = plain(*plain_batch(work, 0, work.sequences, cube.device))
    wanted.backward()
    loss.backward()
    assert abs(loss - wanted) <= 1e-12 * wanted
    assert max(gradient_errors(plain, ours).values()) <= 1e-9


@pytest.mark.usefixtures("fp64")
def test_the_plain_layer_is_ours() -> None:
    work, cube = work_of("layer"), Cube.single()
    ours = disturbed(TransformerLayer3D(CONFIG.hidden, CONFIG.heads, cube, CONFIG.inner_size, std=CONFIG.std))
    plain = PlainLayer(CONFIG)
    copy_weights(plain, ours)
    rows, row_gradient, sequences = packed_hidden(work, cube)
    x, gradient = whole_hidden(work)
    rows.requires_grad_()
    x.requires_grad_()
    ours(rows, sequences).backward(row_gradient)
    plain(x).backward(gradient)
    assert x.grad is not None
    assert rows.grad is not None
    assert error(x.grad.flatten(0, 1), rows.grad) <= 1e-12
    assert max(gradient_errors(plain, ours).values()) <= 1e-9


@pytest.mark.parametrize("changes", [{"dropout": 0.1}, {"attention_dropout": 0.1}, {"norm": "pre"}])
def test_what_the_plain_model_does_not_compute(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"classic encoder.*norms after.*no dropout"):
        PlainBert(dataclasses.replace(CONFIG, **changes))


def test_weights_of_another_model() -> None:
    with pytest.raises(ValueError, match=r"differ in \['bert.layers.1"):
        copy_weights(PlainBert(dataclasses.replace(CONFIG, layers=1)), PlainBert(CONFIG))


# How it is split


@pytest.mark.slow
def test_gradients_of_all_are_those_of_one_process() -> None:
    """The vocabulary, 67, divides by nothing."""
    for errors in run_ranks(4, split_errors, ("1x2x2", *RIVALS), timeout=300.0):
        assert len(errors) == 1 + len(RIVALS)
        assert max(errors.values()) <= 1e-9, errors


# What is counted


def test_counts_by_hand() -> None:
    for rank, (ddp, fsdp2, dtensors, exchanges) in enumerate(run_ranks(2, all_counts)):
        assert ddp == ({"all-reduce": 64}, {"all-reduce": 1})
        assert fsdp2 == ({"all-gather": 80, "reduce-scatter": 40}, {"all-gather": 2, "reduce-scatter": 1})
        assert dtensors == ({"all-gather": 48, "all-reduce": 16}, {"all-gather": 1, "all-reduce": 1})
        received = {"all-to-all": 4 * (2 if rank == 0 else 1), "broadcast": 20 * rank}
        assert exchanges == (received, {"all-to-all": 1, "broadcast": 1}, received["all-to-all"])


def test_bytes_at_rest() -> None:
    """4 * 3 + 3 parameters, two moments, a counter of steps of both; and gradients whose memory lives on."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    contender = Implementation(model=model, forward=lambda: model(torch.ones(2, 4)).sum(), optimizer=optimizer)
    assert resting_bytes(contender) == 4 * (3 * 15 + 2)
    bucket = torch.zeros(15)

    def in_bucket() -> None:
        model.weight.grad, model.bias.grad = bucket[:12].view(3, 4), bucket[12:]

    contender.complete = in_bucket
    assert resting_bytes(contender) == 4 * (3 * 15 + 2) + 4 * 15


# Figures, by hand


def facts(**changes: Any) -> RankFacts:
    values: dict[str, Any] = {
        "device": "cpu",
        "threads": 1,
        "losses": (2.0, 1.0),
        "received": {"all-gather": 3 * 2**20, "all-reduce": 2**20},
        "calls": {"all-gather": 5, "all-reduce": 1},
        "counted_by_cube": None,
        "rest": 2**20,
        "peak": 2**21,
        "resident": 2**22,
    }
    return RankFacts(**{**values, **changes})


def made(name: str = "ddp", ours: bool = False, *ranks: RankFacts) -> RivalFigures:
    first = [[[0.1, 0.2], [0.1, 0.2]], [[0.3], [0.3]]]
    turns = [[[0.2, 0.4], [0.2, 0.6]], [[0.3], [0.5]]]
    return figures(name, ours, turns, list(ranks or (facts(), facts(rest=2**21, resident=None))), first, tokens=80)


def test_figures_by_hand() -> None:
    found = made()
    assert [list(seconds) for seconds in found.seconds] == [pytest.approx([0.2, 0.5]), pytest.approx([0.4])]
    assert found.seconds_median == pytest.approx(0.4)
    assert found.ratio == pytest.approx(2.0)
    assert found.ratio_range == pytest.approx((0.4 / 0.3, 0.35 / 0.15))
    assert found.tokens_per_second == pytest.approx(200.0)
    assert (found.bytes_received, found.collectives) == (2**22, 6)
    assert (found.rest_bytes, found.peak_bytes, found.resident_growth) == (2**21, 2**21, None)
    assert found.counts_equal is None
    shown = ["ddp", "400.0", "300.0-450.0", "2.00", "1.33-2.33", "200", "6", "4.00", "2.00", "2.00", "2.000000"]
    assert cells(found) == shown
    assert len(shown) == len(header(RivalFigures))


def test_faults_in_words() -> None:
    well = made("1x2x1", True, facts(counted_by_cube=2**22))
    assert faults([well, made()]) == []
    assert faults([made("1x2x1", True, facts(counted_by_cube=2**22), facts(counted_by_cube=1))]) == [
        "1x2x1: bytes received are not those that the cube itself counts"
    ]
    other = made("tp", False, facts(losses=(2.0, 1.001)))
    assert loss_difference([well, other]) == 0.0
    (fault,) = faults([well, other])
    assert "their losses differ by 1.0e-03 in step 2, allowed is 0.0001 (1x2x1 1.000000, tp 1.001000)" in fault
    assert len(faults([well, made("tp", False, facts(losses=(float("nan"), 1.0)))])) == 1


# Real processes


SMALL = ["--hidden", "16", "--layers", "1", "--heads", "4", "--vocab", "67", "--length", "8", "--sequences", "4"]


def run(output: Path, *more: str) -> dict[str, Any]:
    assert main(["rivals", *SMALL, *more, "--output", str(output)]) == 0
    content: dict[str, Any] = json.loads(output.read_text())
    return content


@pytest.mark.slow
def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--processes", "2", "--rivals", "ddp", "--steps", "2", "--warmup", "2"]
    few += ["--cubes", "1x2x1+kept0,2x1x1,1x1x1+zero,1x1x1+zero2"]
    content = run(tmp_path / "rivals.json", *few, "--rounds", "2")
    assert [result["name"] for result in content["results"]] == [*few[-1].split(","), "ddp"]
    assert [result["counts_equal"] for result in content["results"]] == [True, True, True, True, None]
    assert all(len(result["seconds"]) == 2 for result in content["results"])
    assert max(content["loss_differences"]) <= 1e-4
    assert len(content["loss_differences"]) == 2
    assert content["work"]["tokens"] == 32
    zero, shared, ddp = content["results"][2:]
    parameters = sum(
        parameter.numel()
        for parameter in PlainBert(dataclasses.replace(CONFIG, layers=1, inner=64, positions=512)).parameters()
    )
    assert ddp["received"] == {"all-reduce": 4 * parameters + 4 * (parameters % 2)}
    tensors = len(list(PlainBert(dataclasses.replace(CONFIG, layers=1)).parameters()))
    assert ddp["rest_bytes"] == 4 * (4 * parameters + tensors), "weights, moments, counters of steps, the bucket"
    assert ddp["peak_bytes"] > ddp["rest_bytes"]
    assert zero["rest_bytes"] < 4 * (2 * parameters + 3 * tensors), "weights and half of the moments"
    assert shared["rest_bytes"] == zero["rest_bytes"], "between steps there are no gradients"
    assert sum(shared["received"].values()) < 0.7 * sum(zero["received"].values())
    assert "largest relative difference of first losses" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", [pytest.param("step", marks=pytest.mark.long(reason="the gradients of all are compared above")), "layer"]
)
def test_all_contenders(tmp_path: Path, what: str) -> None:
    cubes = "1x2x2,4x1x1,1x2x2+kept,1x1x1" + (",1x1x1+zero" if what == "step" else "")
    more = ["--what", what, "--processes", "4", "--cubes", cubes, "--steps", "1", "--rounds", "1"]
    results = {result["name"]: result for result in run(tmp_path / "rivals.json", *more)["results"]}
    assert list(results) == [*cubes.split(","), *(name for name in RIVALS if what == "step" or name != "ddp+zero")]
    gathers, kept = (results[name]["received"]["all-gather"] for name in ("1x2x2", "1x2x2+kept"))
    assert kept < gathers
    if what == "layer":
        # 4 sequences of 8 tokens of 16 columns: two blocks that each gather and scatter them, and the same backward.
        rows = 4 * 3 * (8 * 8 * 16 // 2)
        assert results["tp"]["received"]["all-gather"] == results["tp"]["received"]["reduce-scatter"] == rows
        # Gain and bias of both norms are whole on all ranks, and their gradients summed once.
        assert results["tp"]["calls"] == {"all-gather": 4, "reduce-scatter": 4, "all-reduce": 4}


def test_what_differs_is_exit_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = [made("2x2x2", True, facts(counted_by_cube=2**22)), made("ddp", False, facts(losses=(3.0, 1.0)))]
    monkeypatch.setattr(command.RivalsCommand, "measure", lambda self, _: self.report(found, [20], shown=True))
    assert main(["rivals", "--warmup", "2", "--rivals", "ddp", "--cubes", "2x2x2"]) == 1
    assert "not all compute the same: their losses differ by 5.0e-01 in step 1" in capsys.readouterr().err


def test_what_is_compared() -> None:
    def made(**options: Any) -> RivalsCommand:
        return RivalsCommand(cubes="1x1x1,2x2x2+kept", **options)

    assert made().plan() == ["1x1x1", "2x2x2+kept", *RIVALS]
    assert made(what="layer").plan()[-1] == "ddp", "a layer has no optimiser"
    small, large = (made(size=size, type="bf16").work for size in ("small", "large"))
    assert [(work.config.hidden, work.config.vocab, work.type) for work in (small, large)] == [
        (256, 8192, "bf16"),
        (512, 30522, "bf16"),
    ]


def test_the_command_of_the_docs_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[list[str]] = []

    def measure(self: RivalsCommand, plan: list[str]) -> Report:
        plans.append(plan)
        return Report(lines=[], content={}, faults=[], shown=True)

    monkeypatch.setattr(RivalsCommand, "measure", measure)
    docs = (Path(__file__).parents[4] / "docs/benchmarks.md").read_text()
    (line,) = (each for each in docs.splitlines() if each.startswith("    python -m tools.bench rivals --size"))
    assert main(line.split()[3:]) == 0
    assert len(plans[0]) == 12 + len(RIVALS)


def test_bf16_is_explained_by_more() -> None:
    well, other = made("1x2x1", True, facts(counted_by_cube=2**22)), made("tp", False, facts(losses=(2.0, 1.01)))
    assert faults([well, other], command.LOSS_TOLERANCE["bf16"]) == []
    assert len(faults([well, other])) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--processes", "1"], "--processes must be at least 2"),
        (["--cubes", "3x1x1"], "cube 3x1x1 has 3 ranks, and --processes is 8. Name cubes of that size or a divisor"),
        (["--cubes", "3x1x1+kept"], "cube 3x1x1 has 3 ranks, and --processes is 8"),
        (
            ["--cubes", "1x1x1+zero+kept"],
            "a cube is written XxYxZ, and behind it there may be +kept or +keptN (MiB), and",
        ),
        (["--cubes", "1x1x1+zero", "--what", "layer"], "no optimiser whose state 1x1x1+zero could share"),
        (["--cubes", "2x2"], "a cube is written XxYxZ"),
        (["--cubes", "2x2x2+keep"], "a cube is written XxYxZ"),
        (["--size", "large", "--hidden", "512"], "--size large says what --hidden would. Leave one of the two out"),
        (
            ["--rivals", "fsdp"],
            "--rivals must be some of tp,fsdp2,fsdp2-prefetch,tp+fsdp2,ddp,ddp+zero. Got 'fsdp'.",
        ),
        (["--steps", "0"], "--steps must be at least 1. Got 0"),
        (["--warmup", "0"], "--warmup must be at least 1. Got 0"),
        (["--sequences", "6"], "cube 2x2x2: --sequences must divide by data * x * z = 4. Got 6"),
        (["--sequences", "4", "--cubes", "2x2x2"], "fsdp2 needs --sequences that divide by 8. Got 4"),
        (["--length", "12"], "tp needs --length that divide by 8. Got 12"),
        (["--heads", "4", "--cubes", "8x1x1"], "tp needs --heads that divide by 8. Got 4"),
        (["--heads", "4"], "cube 1x8x1: heads must divide by y=8. Got 4"),
        (["--tensor-parallel", "3"], "--tensor-parallel must lie between 1 and --processes=8 and divide it. Got 3"),
        (["--output", "missing/rivals.json"], "a file in a folder that exists. Got missing/rivals.json"),
    ],
)
def test_bad_calls_start_no_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    monkeypatch.setattr(command, "start", lambda *_, **__: pytest.fail("started processes"))
    assert main(["rivals", *more]) == 2
    assert message in capsys.readouterr().err
