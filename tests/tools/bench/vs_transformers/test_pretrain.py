"""tools.bench library: the same sequences on all sides, what its figures mean, and that contenders must agree."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType

from models.bert import PRESETS
from models.bert.cost_model.param_shapes import parameters
from tensor3d import CubeShape, ExecutionPolicy
from tensor3d.data.loader import tensors_of
from tensor3d.data.packed_batch import Pack, collate
from tools.bench.__main__ import main
from tools.bench.harness.figures import cells, header
from tools.bench.vs_transformers import contenders, pretrain
from tools.bench.vs_transformers import figures as library_operators
from tools.bench.vs_transformers.contenders import Checked, Library, Ours, Unpadded
from tools.bench.vs_transformers.data import FULL, PADDED, SORTED, Work, padded_batch, padded_batches, samples_of, works
from tools.bench.vs_transformers.figures import (
    Operator,
    Sample,
    SideFigures,
    agree,
    all_agree,
    differences,
    draw,
    figures,
    input_figures,
    model_name,
)
from tools.bench.vs_transformers.pretrain import LibraryCommand, Running
from tools.corpus.quick.sentencepiece_tokenizer import special_tokens
from tools.doctor.collective_timing import ProductRate

# Two packs of 8 slots: sequences of 3 and 4 tokens and an unused slot; one of 5 and three unused slots.
PACKS = [
    Pack(
        ids=np.array([10, 11, 12, 20, 21, 22, 23]),
        types=np.array([0, 0, 1, 0, 1, 1, 1]),
        lengths=np.array([3, 4]),
        masked=np.array([1, 4, 6]),
        masked_labels=np.array([91, 92, 93]),
        next_labels=np.array([0, 1]),
    ),
    Pack(
        ids=np.array([30, 31, 32, 33, 34]),
        types=np.array([0, 0, 0, 1, 1]),
        lengths=np.array([5]),
        masked=np.array([4]),
        masked_labels=np.array([94]),
        next_labels=np.array([1]),
    ),
]


def batch() -> Any:
    return collate(PACKS, capacity=8, masked_per_pack=4, max_sequences=3, shape=CubeShape(), rank=0, pad=0)


def test_sequences_are_taken_out_of_packs() -> None:
    samples = samples_of(batch())
    assert [sample.ids.tolist() for sample in samples] == [[10, 11, 12], [20, 21, 22, 23], [30, 31, 32, 33, 34]]
    assert [sample.types.tolist() for sample in samples] == [[0, 0, 1], [0, 1, 1, 1], [0, 0, 0, 1, 1]]
    assert [sample.masked.tolist() for sample in samples] == [[1], [1, 3], [4]]
    assert [sample.labels.tolist() for sample in samples] == [[91], [92, 93], [94]]
    assert [sample.next_label for sample in samples] == [0, 1, 1]


def test_a_padded_batch() -> None:
    padded = padded_batch(samples_of(batch())[:2], width=5, pad=0)
    assert padded.ids.tolist() == [[10, 11, 12, 0, 0], [20, 21, 22, 23, 0]]
    assert padded.types.tolist() == [[0, 0, 1, 0, 0], [0, 1, 1, 1, 0]]
    assert padded.mask is not None
    assert padded.mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
    assert padded.labels.tolist() == [[-100, 91, -100, -100, -100], [-100, 92, -100, 93, -100]]
    assert padded.rows.tolist() == [1, 6, 8]
    assert padded.row_labels.tolist() == padded.labels.flatten()[padded.rows].tolist() == [91, 92, 93]
    assert padded.next_labels.tolist() == [0, 1]
    assert padded.slots == 10


def test_kinds_of_padding() -> None:
    samples = [samples_of(batch())[place] for place in (2, 0, 1)]
    whole = padded_batches(samples, PADDED, size=2, longest=8, pad=0)
    assert [tuple(each.ids.shape) for each in whole] == [(2, 8), (1, 8)]
    assert [each.ids[0, 0].item() for each in whole] == [30, 20]
    by_length = padded_batches(samples, SORTED, size=2, longest=8, pad=0)
    assert [tuple(each.ids.shape) for each in by_length] == [(2, 4), (1, 5)]
    assert by_length[0].ids[:, 0].tolist() == [10, 20]
    assert by_length[1].mask is None


def test_sequences_are_dealt_out_evenly() -> None:
    """Nine in batches of at most four: no batch of a single one is left over."""
    short, middle, long = samples_of(batch())
    parts = padded_batches([long] * 4 + [short] * 3 + [middle] * 2, SORTED, size=4, longest=8, pad=0)
    assert [tuple(each.ids.shape) for each in parts] == [(3, 3), (3, 5), (3, 5)]
    assert [len(each.ids) for each in padded_batches([long] * 8, PADDED, size=4, longest=8, pad=0)] == [4, 4]


def made(kind: str, device: str = "cpu", capacity: int | None = None) -> list[Work]:
    return works(
        kind,
        np.bincount([5, 5, 6, 11, 16]),
        steps=2,
        sequences=12,
        micro_batch=4,
        packs=2,
        longest=16,
        capacity=capacity,
        special=special_tokens(60),
        seed=3,
        device=torch.device(device),
    )


def test_packs_longer_than_the_longest_sequence() -> None:
    for kind in (FULL, PADDED):
        usual, longer = made(kind), made(kind, capacity=64)
        assert {each.ids.numel() for work in longer for each in work.step.batches} == {2 * 64}
        assert {each.ids.shape[1] for work in longer if kind == PADDED for each in work.padded} <= {16}
        most = [max(len(each.sequences.lengths) for work in of for each in work.step.batches) for of in (usual, longer)]
        assert most[1] > most[0]
    assert all(work.step.tokens == work.packed_slots for work in made(FULL, capacity=64))


def test_an_operator_of_no_time_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the profiler may not see a GPU's kernels."""
    idle = SimpleNamespace(key="aten::mm", count=3, self_cpu_time_total=0, device_type=DeviceType.CPU)
    trace = SimpleNamespace(key_averages=lambda: [idle])
    monkeypatch.setattr(library_operators, "profile", lambda **_: nullcontext(trace))
    found = library_operators.operators_of(torch.device("cpu"), lambda: None, 2)
    assert found == [Operator(name="aten::mm", calls=3, seconds=0.0, share=0.0)]


def test_both_lie_on_the_device() -> None:
    for work in made(SORTED, device="meta"):
        tensors = list(tensors_of([work.step.batches, work.padded]))
        assert len(tensors) > 20
        assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_what_the_timed_steps_hold() -> None:
    mine = made(PADDED)
    found = input_figures(PADDED, mine)
    assert (found.steps, found.packed_batches) == (2, sum(len(work.step.batches) for work in mine))
    assert found.sequences == sum(len(each.next_labels) for work in mine for each in work.padded)
    tokens = sum(int(each.mask.sum()) for work in mine for each in work.padded if each.mask is not None)
    assert found.tokens == tokens
    assert found.padded_fill == tokens / (found.sequences * 16), "each is padded to 16"
    assert found.packed_fill == tokens / (found.packed_batches * 2 * 16), "two packs of 16 a micro-batch"
    assert f"{found.sequences} sequences of {tokens} tokens in 2 timed steps" in str(found)


@pytest.mark.parametrize("kind", [FULL, PADDED, SORTED])
def test_both_train_on_the_same_sequences(kind: str) -> None:
    first, second = made(kind)
    for work in (first, second):
        assert sum(len(each.next_labels) for each in work.padded) == work.step.sequences
        packed = torch.cat([each.ids[each.positions > 0] for each in work.step.batches])
        padded = torch.cat([each.ids[:, 1:][each.types[:, 1:] + each.ids[:, 1:] > 0] for each in work.padded])
        assert packed.sort().values.tolist() == padded.sort().values.tolist()
        labels = torch.cat([each.masked_labels[each.masked >= 0] for each in work.step.batches])
        row_labels = torch.cat([each.row_labels for each in work.padded])
        assert labels.sort().values.tolist() == row_labels.sort().values.tolist()
    assert not torch.equal(first.step.batches[0].ids, second.step.batches[0].ids)
    if kind == FULL:
        assert first.step.tokens == first.packed_slots == first.padded_slots
        assert all(each.mask is None for each in first.padded)
    if kind == PADDED:
        assert first.padded_slots > first.packed_slots


def test_sorting_saves_padding() -> None:
    assert made(PADDED)[0].padded_slots > made(SORTED)[0].padded_slots


def side(contender: str, loss: float = 7.0, norm: float = 2.0, precision: str = "fp32") -> SideFigures:
    rounds = [[sample(2.0, 100)]]
    checked = Checked(loss=loss, gradient_norm=norm)
    return figures(("tiny", precision, FULL), contender, rounds, rounds, fill=1.0, products=1e9, checked=checked)


def sample(seconds: float, tokens: int) -> Sample:
    return Sample(seconds=seconds, tokens=tokens, sequences=tokens // 50, flops=tokens * 10**6)


def test_figures_are_those_of_all_steps_and_of_rounds() -> None:
    base = [[sample(s, 100), sample(s, 300)] for s in (2.0, 4.0, 1.0)]
    rounds = [[sample(s, 100), sample(s, 300)] for s in (1.0, 1.0, 1.0)]
    given: Any = {"fill": 0.5, "products": 1e9, "checked": Checked(loss=7.0, gradient_norm=2.0)}
    found = figures(("tiny", "fp32", PADDED), "ours", rounds, base, **given, peak=2**20)
    assert found.tokens_per_second == found.tokens_per_second_median == 200
    assert found.ratio == pytest.approx(14 / 6), "of all seconds; the rounds have 2, 4 and 1"
    assert found.ratio_median == 2.0
    assert found.ratio_range == (1.0, 4.0)
    assert (found.sequences_per_second, found.model_flops, found.mfu) == (4.0, 2e8, 0.2)
    slow = figures(("tiny", "fp32", PADDED), "ours", base, base, **given)
    assert slow.tokens_per_second == pytest.approx(1200 / 14)
    assert (slow.tokens_per_second_median, slow.tokens_per_second_range) == (100, (50, 200))
    assert found.steps == 6
    assert found.seconds_median == 1.0
    assert len(cells(found)) == len(header(SideFigures)) == 14
    assert cells(found)[3:6] == ["2.333", "2.000", "1.000-4.000"]
    assert cells(found)[8:13] == ["50.00%", "4.0", "0", "20.0%", "1"]


def test_contenders_must_agree() -> None:
    assert differences([side("a"), side("b", loss=7.7, norm=2.5)]) == (pytest.approx(0.1), pytest.approx(0.25))
    assert agree("fp32", 5e-5, 5e-4)
    assert not agree("fp32", 2e-4, 0.0)
    assert not agree("fp32", 0.0, 2e-3)
    assert not agree("fp32", math.nan, 0.0)
    assert agree("bf16", 2e-4, 2e-3)
    off = side("b", loss=7.01)
    assert all_agree([side("a"), side("b"), side("a", precision="bf16")])
    assert not all_agree([side("a"), off])
    assert not all_agree([side("a"), side("b", norm=math.nan)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"presets": "small,huge"}, "--presets.*tiny,.*Got 'small,huge'"),
        ({"precisions": "fp16"}, "--precisions.*fp32,bf16"),
        ({"inputs": "short"}, "--inputs must be some of full,padded,sorted"),
        ({"contenders": "transformers,ours"}, "--contenders must have transformers-masked among them"),
        ({"contenders": "mine"}, "--contenders must be some of"),
        (
            {"contenders": "transformers-masked,ours-rows-fp8", "precisions": "fp32,bf16"},
            "ours-rows-fp8 computes the rest in bf16. Got fp32: leave one of them out",
        ),
        (
            {"architecture": "roberta", "contenders": "transformers-masked,transformers-unpadded"},
            "transformers-unpadded is made of the modules of the library's BERT. Got --architecture roberta: leave",
        ),
        ({"micro_batch": 0}, r"--micro-batch.*\b1.*\b0"),
        ({"operators": -1}, r"--operators must be at least 0\. Got -1"),
        ({"warmup": 0}, r"--warmup.*\b1.*state.*\b0"),
        ({"vocab": 3}, "--vocab 3 is too small: sep must be an id below"),
        ({"seed": -1}, r"--seed must be at least 0\. Got -1"),
        ({"length": 4}, r"--length must be at least 5\. Got 4"),
        ({"also": "a.json"}, "--also names what --plot draws"),
        ({"also": "/none/a.json", "plot": Path("a.png")}, "--also.*/none/a.json"),
        ({"dropout": 1.0}, r"dropout.*\b0.*\b1"),
        ({"attention_dropout": 1.0}, r"attention_dropout.*\b0.*\b1"),
        ({"length": 64, "capacity": 63}, r"--capacity.*--length \b64\b.*\b63"),
        ({"backend": "varlen"}, "--backend varlen in fp32.*takes bfloat16"),
        ({"flash_attention": "FA3"}, "--flash-attention FA3 is for varlen, which in fp32.*takes bfloat16"),
        ({"output": Path("/none/there/a.json")}, "--output must be a file"),
    ],
)
def test_bad_calls_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LibraryCommand(**options).check()


def test_the_compiler_is_looked_for_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def single(*_: object, speed: ExecutionPolicy) -> None:
        assert speed.compile
        raise ValueError("no compiler here")

    monkeypatch.setattr(pretrain.Cube, "single", single)
    LibraryCommand().check()
    with pytest.raises(ValueError, match="no compiler here"):
        LibraryCommand(contenders="transformers-masked,ours-compiled").check()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [Library, Unpadded])
def test_layers_of_the_library_stay_compiled(
    kind: type[Library | Unpadded], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All contenders have the same layer, of which PyTorch by default compiles 8 kinds, and runs others as written."""
    pytest.importorskip("transformers")
    limits, settings = [], torch._dynamo.config

    def computed(*_: object) -> None:
        limits.append((settings.recompile_limit, settings.fail_on_recompile_limit_hit))
        raise RuntimeError("seen enough")

    monkeypatch.setattr(contenders, "compile_layers", lambda _: None)
    monkeypatch.setattr(Library, "_masked", computed)
    monkeypatch.setattr(Unpadded, "_hidden", computed)
    bert = SimpleNamespace(encoder=None, embeddings=None, pooler=None)
    model: Any = SimpleNamespace(bert=bert, cls=None, config=SimpleNamespace(_attn_implementation="sdpa"))
    more = {"masked_rows": True} if kind is Library else {}
    side: Any = kind(PRESETS["tiny"], model, None, torch.bfloat16, compiled=compiled, **more)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="seen enough"):
        side.gradients(made(PADDED)[0])
    assert limits == [(64, True) if compiled else (settings.recompile_limit, False)]
    assert settings.recompile_limit < 64


def test_each_step_is_of_sequences_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-ups too: what compiles anew for other lengths then seldom does so while it is timed."""
    seen = []

    class Side:
        def prepared(self, work: Any) -> Any:
            return work

        def step(self, work: Any) -> None:
            seen.append(work.number)

        def flops(self, _: Any) -> int:
            return 1

        def slots(self, _: Any) -> int:
            return 4

    asked: dict[str, Any] = {}
    monkeypatch.setattr(pretrain, "works", lambda *_, **options: asked.update(options))
    LibraryCommand(warmup=3, rounds=2, steps=2)._works(PADDED, np.ones(4, dtype=np.int64), torch.device("cpu"))
    assert asked["steps"] == 3 + 2 * 2
    running = Running(("tiny", "fp32"))
    running.add("transformers-masked", lambda _: Side())  # type: ignore[arg-type, return-value]
    turns = pretrain.Rounds(rounds=2, steps=2, warmup=3, memory=False, operators=0)
    steps: Any = [SimpleNamespace(number=n, step=SimpleNamespace(tokens=3, sequences=1)) for n in range(7)]
    checks = {"transformers-masked": Checked(loss=1, gradient_norm=1)}
    (found,) = pretrain._on_input(("tiny", "fp32", PADDED), running, checks, steps, turns, 1.0, torch.device("cpu"))
    assert seen == list(range(7))
    assert (found.steps, found.fill) == (4, 0.75)


@pytest.mark.parametrize(
    ("rates", "wanted"), [({512: 5e10, 1024: 6e10, 2048: 4e10}, 6e10), ({512: 2e9, 1024: 1e9}, 2e9), ({512: 1e9}, 1e9)]
)
def test_larger_products_are_tried_where_they_end_within_seconds(
    rates: dict[int, float], wanted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without instructions for bf16 one of 2,048 rows takes a minute."""
    tried = []

    def product_rate(_device: torch.device, precision: str, n: int, _seconds: float) -> ProductRate:
        tried.append(n)
        return ProductRate(n=n, type=precision, flops=rates[n])

    monkeypatch.setattr(pretrain, "product_rate", product_rate)
    assert pretrain._fastest_product(torch.device("cpu"), "bf16") == wanted
    assert tried == list(rates)


def test_a_picture_of_several_runs(tmp_path: Path) -> None:
    """All kinds of input are panels of one picture; a contender has one colour in all of them."""
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "earlier.json", tmp_path / "bars.png"
    dearest = [Operator(name="aten::mm", calls=2, seconds=0.5, share=0.25)]
    ours = dataclasses.replace(side("ours"), operators=dearest)
    earlier = [side("transformers-masked"), ours, side("ours", precision="bf16")]
    results = [dataclasses.asdict(each) for each in earlier]
    file.write_text(json.dumps({"benchmark": "library", "results": results}))
    command = LibraryCommand(presets="tiny", inputs=SORTED, also=str(file), plot=plot)
    command.check()
    assert [each.operators for each in command.earlier()] == [None, dearest, None]
    with pytest.raises(ValueError, match=r"--also.*fp32, full, transformers-masked"):
        dataclasses.replace(command, inputs=FULL).check()
    with pytest.raises(ValueError, match="--also must have what neither"):
        dataclasses.replace(command, also=f"{file},{file}").check()
    here = [dataclasses.replace(side(name), inputs=SORTED) for name in ("ours-rows", "ours")]
    figure = draw([*command.earlier(), *here])
    full, by_length = figure.axes
    assert full.get_title(loc="left") == "BERT-tiny, no padding"
    assert by_length.get_title(loc="left") == "BERT-tiny, padded, sorted by length"
    (of_full, _), (of_sorted, _) = [axes.get_legend_handles_labels() for axes in (full, by_length)]
    assert [len(bars) for bars in of_full] == [1, 2], "ours in fp32 and bf16"
    ours, rows = of_sorted
    assert of_full[1][0].get_facecolor() == ours[0].get_facecolor() != rows[0].get_facecolor()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["transformers-masked", "ours", "ours-rows"]


def test_without_transformers_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pretrain, "find_spec", lambda name: None)
    assert main(["library"]) == 2
    assert "pip install transformers" in capsys.readouterr().err


def test_sizes_of_the_other_architectures() -> None:
    modern = LibraryCommand(architecture="modernbert", vocab=50368).config("base")
    assert sum(each.elements for each in parameters(modern)) == 149_655_232, "of the library's ModernBertForMaskedLM"
    assert (modern.dropout, modern.attention_dropout, modern.out_dropout) == (0.0, 0.1, 0.1), "where the library has it"
    small = [LibraryCommand(architecture=each).config("small") for each in ("bert", "roberta", "modernbert")]  # type: ignore[arg-type]
    assert {(each.layers, each.hidden, each.heads) for each in small} == {(4, 512, 8)}
    assert [(each.family, each.next_sentence) for each in small] == [
        *(("bert", True), ("roberta", False), ("modernbert", False))
    ]
    assert [model_name(each) for each in ("base", "roberta-base", "modernbert-tiny", "deberta-v2-base")] == [
        *("BERT-base", "RoBERTa-base", "ModernBERT-tiny", "DeBERTa-base")
    ]


SMALL = ["--presets", "tiny", "--vocab", "500", "--length", "32", "--sequences", "12", "--micro-batch", "4"]


@pytest.mark.slow
def test_all_contenders_have_the_same_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    output, plot = tmp_path / "figures.json", tmp_path / "bars.png"
    contenders = ["transformers", "transformers-masked", "ours", "ours-rows"]
    call = ["library", *SMALL, "--layers", "1", "--rounds", "2", "--contenders", ",".join(contenders), "--threads", "1"]
    assert main([*call, "--operators", "3", "--output", str(output), "--plot", str(plot)]) == 0
    assert "do NOT agree" not in capsys.readouterr().out
    content = json.loads(output.read_text())
    assert content["agree"] is True
    assert [each["inputs"] for each in content["inputs"]] == ["full", "padded", "sorted"]
    results = content["results"]
    assert [side["contender"] for side in results] == contenders * 6
    for side in results:
        assert side["steps"] == 2
        assert side["peak_tensor_bytes"] is None, "nobody has asked"
        assert side["ratio"] > 0
        assert side["mfu"] > 0
        assert side["mfu"] < 1 or side["precision"] == "bf16", "without instructions for it small products are faster"
        assert [len(operator) for operator in side["operators"]] == [4, 4, 4]
    fills = {(side["inputs"], side["contender"]): side["fill"] for side in results}
    assert fills["full", "ours"] == fills["full", "transformers"] == 1.0
    assert fills["padded", "transformers"] < fills["sorted", "transformers"] < fills["sorted", "ours"]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["roberta", "modernbert", "deberta-v2"])
def test_other_architectures_have_the_same_loss(
    architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of sequences longer than ModernBERT's window, with dropout in the timed steps."""
    pytest.importorskip("transformers")
    output = tmp_path / "figures.json"
    call = ["library", "--architecture", architecture, *SMALL, "--length", "96", "--layers", "2", "--rounds", "1"]
    call += ["--contenders", "transformers,transformers-masked,ours,ours-rows", "--inputs", "padded", "--threads", "1"]
    assert main([*call, "--output", str(output)]) == 0
    told = capsys.readouterr().out
    assert "do NOT agree" not in told
    assert f"{model_name(f'{architecture}-tiny')}, bf16, padded" in told
    content = json.loads(output.read_text())
    assert content["agree"] is True
    assert [side["preset"] for side in content["results"]] == [f"{architecture}-tiny"] * 8


@pytest.mark.slow
def test_long_packs_and_a_backend_of_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    output = tmp_path / "figures.json"
    call = ["library", *SMALL, "--rounds", "1", "--precisions", "fp32", "--inputs", "full,padded"]
    call += ["--capacity", "128", "--backend", "reference", "--attention-dropout", "0", "--memory"]
    assert main([*call, "--output", str(output)]) == 0
    assert "do NOT agree" not in capsys.readouterr().out
    content = json.loads(output.read_text())
    assert content["agree"] is True
    assert all(side["peak_tensor_bytes"] > 0 for side in content["results"])


def test_who_fails_is_left_out_and_holds_no_memory(capsys: pytest.CaptureFixture[str]) -> None:
    class Side:
        optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])

    def fails(side: Any) -> float:
        made = torch.ones(3)
        alive.append(weakref.ref(made))
        raise RuntimeError("CUDA out of memory. Tried to allocate\nmore than there is")

    alive: list[Any] = []
    running = Running(("large", "bf16"))
    for name in ("one", "two"):
        running.add(name, lambda _: Side())  # type: ignore[arg-type, return-value]
    assert running.attempt("one", fails) is None
    assert running.attempt("one", lambda _: pytest.fail("it is out")) is None
    assert running.attempt("two", lambda _: 7) == 7
    assert list(running.sides) == ["two"]
    told = "RuntimeError: CUDA out of memory. Tried to allocate"
    assert running.failed == [{"preset": "large", "precision": "bf16", "contender": "one", "error": told}]
    assert alive[0]() is None, "the next contender needs the room"
    shown = capsys.readouterr()
    assert f"one has failed and is left out: {told}" in shown.out
    assert "more than there is" in shown.err


def test_who_cannot_be_made_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def make(name: str) -> Any:
        if name == "one":
            raise ValueError("no such model")
        return name

    running = Running(("large", "bf16"))
    for name in ("one", "two"):
        running.add(name, make)
    assert running.sides == {"two": "two"}
    assert [each["contender"] for each in running.failed] == ["one"]
    assert "one has failed and is left out: ValueError: no such model" in capsys.readouterr().out


def test_without_the_one_to_compare_with_there_is_no_ratio() -> None:
    rounds = [[sample(2.0, 100)]]
    found = figures(
        ("tiny", "fp32", PADDED), "ours", rounds, None, fill=1, products=1, checked=Checked(loss=1, gradient_norm=1)
    )
    assert found.tokens_per_second == 50
    assert math.isnan(found.ratio)
    assert math.isnan(found.ratio_median)


@pytest.mark.slow
def test_the_others_go_on_where_one_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its second round, and the one to compare with at once; what had been measured until then is told."""
    pytest.importorskip("transformers")
    step, calls = Ours.step, []

    def breaks(self: Ours, work: Work) -> float:
        calls.append(self.read_rows_only)
        if self.read_rows_only and calls.count(True) == 3:
            raise RuntimeError("out of memory")
        return step(self, work)

    monkeypatch.setattr(Ours, "step", breaks)
    monkeypatch.setattr(Library, "_masked", lambda *_: 1 / 0)
    output = tmp_path / "figures.json"
    call = ["library", *SMALL, "--rounds", "2", "--precisions", "fp32", "--inputs", "padded", "--threads", "1"]
    call += ["--contenders", "transformers-masked,ours,ours-rows", "--output", str(output)]
    assert main(call) == 1
    content = json.loads(output.read_text())
    assert [each["contender"] for each in content["failed"]] == ["transformers-masked", "ours-rows"]
    assert [each["contender"] for each in content["results"]] == ["ours"]
    assert len(content["results"][0]["seconds"]) == 2
    told = capsys.readouterr().out
    assert re.search(r"round 1 of 2: ours [\d,]+ ms, ours-rows [\d,]+ ms\n", told)
    assert re.search(r"warm-up 1 of 1: ours [\d,]+ ms, ours-rows [\d,]+ ms\n", told)


@pytest.mark.slow
def test_a_contender_that_trains_on_something_else_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    masked = Library._masked

    def forgetful(self: Library, batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        logits, labels, pairs = masked(self, batch)
        return logits[1:], labels[1:], pairs

    monkeypatch.setattr(Library, "_masked", forgetful)
    assert main(["library", *SMALL, "--rounds", "1", "--precisions", "fp32", "--inputs", "padded"]) == 1
    assert "do NOT agree" in capsys.readouterr().out
