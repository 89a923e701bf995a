"""Memory counted in dry steps against real models on real ranks: what is kept to the byte, the peak nearly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from models.bert import BertForPreTraining, ElectraForPreTraining, ReplacedTokens
from models.bert.cost_model.comm_volume import scaled_weights
from models.bert.cost_model.memory import MicroBatchShape
from models.bert.cost_model.param_shapes import held
from tensor3d import Cube, CubeShape, MixedPrecisionPolicy
from tensor3d.data import PackedBatch
from tests.models import toy
from tests.models.kept import kept_bytes, load_of
from tests.models.toy import FAMILIES, Shape, lay, totals, toy_config, toy_packs
from tests.ranks import run_ranks
from tests.single_device_reference import ranks_of
from tools.training.config import PrecisionConfig
from tools.training.dry_step import StepMemory, counted_memory, counted_step, counted_traffic, dry_step

Changes = dict[str, Any]
WIDE = {"vocab": 2000, "hidden": 256, "inner": 1024}
MODERN = {"encoder": "modern", "layers": 3, "window": 4, "global_every": 2}
# Of the model, of how it is made, and the compute type.
KEPT: list[tuple[Changes, Changes, torch.dtype | None]] = [
    ({}, {}, None),
    ({"norm": "pre", "vocab": 30522}, {}, None),
    ({"dropout": 0.1, "attention_dropout": 0.1}, {}, None),
    ({"dropout": 0.1}, {"recompute": "attention"}, None),
    ({"dropout": 0.1}, {"recompute": "layer"}, None),
    ({}, {"reshard_after_forward": False}, None),
    ({"dropout": 0.1}, {"reshard_after_forward": False}, torch.bfloat16),
    ({"attention_dropout": 0.1}, {}, torch.bfloat16),
    ({"activation": "relu", "dropout": 0.1}, {}, None),
    ({"activation": "relu"}, {"reshard_after_forward": False}, torch.bfloat16),
    ({**FAMILIES["roberta"], "activation": "silu", "tied": False}, {}, None),
    ({"encoder": "modern"}, {}, None),
    (MODERN, {}, None),
    ({**FAMILIES["modernbert"], "dropout": 0.1, "attention_dropout": 0.1}, {}, None),
    ({**MODERN, "dropout": 0.1}, {"recompute": "attention"}, torch.bfloat16),
    ({**MODERN, "dropout": 0.1}, {"recompute": "layer"}, None),
    ({**MODERN, "dropout": 0.1}, {"reshard_after_forward": False}, torch.bfloat16),
    ({"dropout": 0.1}, {"compile": True}, torch.bfloat16),
    ({"norm": "pre", "dropout": 0.1}, {"compile": True, "recompute": "attention"}, None),
    ({**FAMILIES["modernbert"], "dropout": 0.1}, {"compile": True}, None),
    ({**FAMILIES["gte"], "dropout": 0.1}, {}, None),
    ({**FAMILIES["gemma"], "dropout": 0.1, "attention_dropout": 0.1}, {}, None),
    ({**FAMILIES["gemma"], "dropout": 0.1}, {"compile": True}, torch.bfloat16),
    ({**FAMILIES["nomic"], "dropout": 0.1}, {"compile": True}, torch.bfloat16),
    ({**FAMILIES["deberta-v2"], "dropout": 0.1, "attention_dropout": 0.1}, {}, None),
    (FAMILIES["deberta-v2"], {"recompute": "attention"}, torch.bfloat16),
]


def _kept_of_electra(changes: Changes, settings: ReplacedTokens, tokens: int) -> tuple[MicroBatchShape, int]:
    cube = Cube.single()
    cube.manual_seed(0)
    model = ElectraForPreTraining(toy_config(67, **changes), settings, cube)
    given = model.example(tokens)
    return load_of(given["batch"]), kept_bytes(model, lambda: model(**given).loss)


def test_kept_of_replaced_tokens_to_the_byte() -> None:
    """By generator and discriminator."""
    changes = {**FAMILIES["electra"], "dropout": 0.1, "attention_dropout": 0.1}
    settings = ReplacedTokens(generator_size=0.5)
    ((load, kept),) = run_ranks(1, _kept_of_electra, changes, settings, 96)
    assert dry_step(toy_config(67, **changes), CubeShape(), load, replaced=settings).memory.saved == kept


def _types(dtype: torch.dtype | None) -> PrecisionConfig:
    return PrecisionConfig(compute="fp32" if dtype is None else "bf16")


def _kept(
    shape: Shape, cases: list[tuple[Changes, Changes, torch.dtype | None]], lengths: list[list[int]] | None = None
) -> list[tuple[MicroBatchShape, int]]:
    found = []
    toy.LENGTHS[:] = lengths or toy.LENGTHS
    for changes, made, dtype in cases:
        cube = Cube(*shape, precision=MixedPrecisionPolicy(compute=dtype))
        if "compile" in made:  # as written: what is kept is the same, and nothing need be compiled
            cube.speed = replace(cube.speed, compile=True)
        cube.manual_seed(0)
        config = toy_config(**{"vocab": 67, **changes})
        model = BertForPreTraining(config, cube, **{name: how for name, how in made.items() if name != "compile"})
        step = toy_packs(config.vocab, 16)
        batch = lay(step, cube)
        found.append((load_of(batch), kept_bytes(model, lambda: model(batch, *totals(step)).loss)))  # noqa: B023
    return found


def _check_kept(
    shape: Shape, cases: list[tuple[Changes, Changes, torch.dtype | None]], lengths: list[list[int]] | None = None
) -> None:
    """Of the last rank, whose blocks are the smallest."""
    x, y, z, data = shape
    ranks = ranks_of(shape)
    measured = run_ranks(ranks, _kept, shape, cases, lengths)[-1]
    for (changes, made, dtype), (load, kept) in zip(cases, measured, strict=True):
        config = toy_config(**{"vocab": 67, **changes})
        box = CubeShape(x=x, y=y, z=z, data=data)
        found = dry_step(config, box, load, rank=ranks - 1, types=_types(dtype), **made).memory
        assert found.saved == kept, (changes, made)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((1, 1, 1, 1), id="1x1x1"),
        pytest.param(
            (1, 2, 1, 2),
            id="1x2x1-data2",
            marks=pytest.mark.long(reason="y is one of 2x2x2's axes, and a copy over data keeps what one alone does"),
        ),
        pytest.param(
            (2, 2, 2, 1), id="2x2x2", marks=pytest.mark.long(reason="1x1x1 has all of these models, and 2x2x2 a few")
        ),
    ],
)
def test_kept_for_backward_to_the_byte(shape: Shape) -> None:
    _check_kept(shape, KEPT)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), pytest.param((2, 2, 2, 1), marks=pytest.mark.slow)], ids=["1x1x1", "2x2x2"]
)
def test_kept_for_backward_to_the_byte_of_a_few(shape: Shape) -> None:
    """A plain model, dropout with recomputing, gathered weights in bf16, windows with all of it, and regions."""
    _check_kept(shape, [KEPT[number] for number in (0, 3, 6, 14, 17)])


def test_kept_of_packs_that_need_no_grouping() -> None:
    """Rows that attention takes as they are: v is then a view of QKV, and turned queries and keys lie beside it."""
    cases = [case for case in KEPT if case[0].get("encoder") == "modern"][:2]
    _check_kept((1, 1, 1, 1), cases, lengths=[[toy.CAPACITY]])


def _kept_of_long(changes: Changes, tokens: int) -> tuple[MicroBatchShape, int]:
    model = BertForPreTraining(toy_config(**{"vocab": 67, **changes}), Cube.single())
    given = model.example(tokens)
    return load_of(given["batch"]), kept_bytes(model, lambda: model(**given).loss)


@pytest.mark.slow
def test_kept_of_long_sequences_in_blocks_of_their_window() -> None:
    """To the byte; and what a local layer keeps of twice the rows is twice as much."""
    found = []
    for tokens in (600, 1200):
        ((load, kept),) = run_ranks(1, _kept_of_long, MODERN, tokens)
        found.append(dry_step(toy_config(67, **MODERN), CubeShape(), load).memory.saved)
        assert found[-1] == kept
    assert found[1] < 2.2 * found[0]


def _peak(
    shape: Shape, changes: Changes, made: Changes, dtype: torch.dtype | None, micro: int, runs: int = 1
) -> tuple[MicroBatchShape, int, int]:
    """What a micro-batch gives the rank, its bytes, and the least of several runs."""
    cube = Cube(*shape, precision=MixedPrecisionPolicy(compute=dtype))
    cube.manual_seed(0)
    config = toy_config(**{"vocab": 67, **changes})
    model = BertForPreTraining(config, cube, **made)
    step = toy_packs(config.vocab, 32)
    batch = lay(step, cube)

    def run() -> None:
        for number in range(micro):
            with nullcontext() if number == micro - 1 else cube.no_sync():
                model(batch, *totals(step)).loss.backward()

    run()  # what is made once stays

    def peak() -> int:
        model.zero_grad()
        return peak_bytes(run)

    return load_of(batch), _bytes(batch), min(peak() for _ in range(runs))


def _bytes(batch: PackedBatch) -> int:
    sequences = batch.sequences
    made = [
        sequences.cu_seqlens,
        sequences.grouping.gather,
        sequences.grouping.restore,
        vars(sequences).get("positions"),
    ]
    return sum(each.nbytes for each in [*vars(batch).values(), *made] if isinstance(each, Tensor))


def _expected(
    shape: Shape, changes: Changes, made: Changes, dtype: torch.dtype | None, micro: int, load: MicroBatchShape
) -> StepMemory:
    x, y, z, data = shape
    return dry_step(
        toy_config(**{"vocab": 67, **changes}),
        CubeShape(x=x, y=y, z=z, data=data),
        load,
        micro_batches=micro,
        types=_types(dtype),
        wire_buffers=x * y * z * data > 1,  # on several ranks gloo has its buffers
        **made,
    ).memory


def peak_bytes(run: Callable[[], None]) -> int:
    """The most that `run` holds at once of what it allocates from torch, without the workspaces of products."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
        run()
    events = trace.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    times = [(event.start_ns(), event.duration_ns()) for event in events if event.name() in PRODUCTS]
    return most_at_once(without_workspaces(changes, [(begin, begin + duration) for begin, duration in times]))


PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise")
Change = tuple[int, int]
"""When, and how many bytes were taken, or, below 0, given back."""


def most_at_once(changes: Sequence[Change]) -> int:
    return max(accumulate((size for _, size in changes), initial=0))


def without_workspaces(changes: Sequence[Change], products: Sequence[tuple[int, int]]) -> list[Change]:
    """Without what a product (from when, until when) takes and gives back before it returns. oneDNN has need of that
    for itself, on some processors, and no closed form knows of it."""
    left = list(changes)
    for begin, end in products:
        own = [change for change in left if begin <= change[0] <= end]
        for freed in [change for change in own if change[1] < 0]:
            taken = next((change for change in own if change[0] < freed[0] and change[1] == -freed[1]), None)
            if taken is not None:
                for change in (taken, freed):
                    own.remove(change)
                    left.remove(change)
    return left


def test_workspaces_of_products_do_not_count() -> None:
    """A product from 10 to 20 takes its result (8), and 5 that it gives back; the 3 that it frees are another's."""
    changes = [(1, 3), (11, 8), (12, 5), (15, -5), (16, -3), (30, 4), (31, -4)]
    assert most_at_once(changes) == 16
    assert without_workspaces(changes, [(10, 20)]) == [(1, 3), (11, 8), (16, -3), (30, 4), (31, -4)]
    assert most_at_once(without_workspaces(changes, [(10, 20)])) == 12


PEAKS: list[tuple[Changes, Changes, torch.dtype | None, int]] = [
    ({"vocab": 30522}, {}, None, 1),  # the cross-entropy is the worst moment
    (WIDE, {}, None, 3),  # a layer, under the gradients of the micro-batches before
    (WIDE, {}, torch.bfloat16, 1),
    (WIDE, {"recompute": "layer"}, None, 1),
    ({**WIDE, **MODERN}, {}, None, 1),
    ({**WIDE, "dropout": 0.1, "attention_dropout": 0.1}, {}, None, 1),
    ({**WIDE, "dropout": 0.1, "attention_dropout": 0.1}, {}, torch.bfloat16, 2),
    ({**WIDE, "attention_dropout": 0.1}, {"recompute": "attention"}, None, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "made", "dtype", "micro"), PEAKS)
def test_the_most_at_once_on_one_device(changes: Changes, made: Changes, dtype: torch.dtype | None, micro: int) -> None:
    case = ((1, 1, 1, 1), changes, made, dtype, micro)
    ((load, batch, measured),) = run_ranks(1, _peak, *case)
    expected = _expected(*case, load)
    assert 0.99 <= (expected.peak - expected.weights - expected.optimizer - batch) / measured <= 1.01


@pytest.mark.slow
def test_the_most_at_once_on_a_cube() -> None:
    """Gloo frees its buffers when its threads get to it, later on a busy machine: the least of several runs. What a sum
    has received between CPUs lies beside it until it is waited for (distributed/gloo.py), and is not expected here."""
    case = ((2, 2, 2, 1), *PEAKS[1])
    load, batch, measured = max(run_ranks(8, _peak, *case, 3), key=lambda of_rank: of_rank[2])
    expected = _expected(*case, load)
    assert 0.75 <= (expected.peak - expected.weights - expected.optimizer - batch) / measured <= 1.05


# --- The memory of a deep model from two shallow ones -----------------------------------------------------------------

DEEP: list[tuple[Changes, Changes]] = [
    ({}, {"optimizer": "lamb", "micro_batches": 2}),
    ({"dropout": 0.1, "attention_dropout": 0.1}, {"device": "cuda"}),
    ({"norm": "pre"}, {"recompute": "layer", "device": "cuda"}),
    (
        {**MODERN, "layers": 11, "global_every": 3},
        {"reshard_after_forward": False, "types": PrecisionConfig(compute="bf16")},
    ),
    (WIDE, {"types": PrecisionConfig(compute="bf16", fp8="delayed"), "device": "cuda"}),
    ({**MODERN, "layers": 7}, {"reshard_after_forward": False, "types": PrecisionConfig(compute="bf16")}),
    (
        {"family": "electra", "embedding": 16, "next_sentence": False, "layers": 6},
        {"replaced": ReplacedTokens(generator_size=0.5)},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "step"), DEEP)
def test_deep_models_from_shallow_ones(changes: Changes, step: dict[str, Any]) -> None:
    """All figures, to the byte; in models whose windows come in turns of two and three, too."""
    config, shape = toy_config(**{"vocab": 67, "layers": 11, **changes}), CubeShape(x=2, y=2, data=4)
    load = MicroBatchShape(rows=128, masked=16, first=4, lengths=(24, 8) * 4)
    whole = counted_step(config, shape, load, **step)
    assert counted_memory(config, shape, load, **step) == whole.memory
    if "replaced" in step:
        assert counted_traffic(config, shape, load, **step) == whole.received


def test_a_box_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config, load = toy_config(67, layers=1), MicroBatchShape(rows=64, masked=8, first=4, lengths=(32, 32))
    first = counted_memory(config, CubeShape(x=2, data=2), load)
    monkeypatch.setattr("tools.training.dry_step.counted_step", None)
    for data in (2, 16, 4096):
        assert counted_memory(config, CubeShape(x=2, data=data), load) == first


@pytest.mark.slow
def test_memory_of_gradients_that_stays_is_there_in_the_forward_pass() -> None:
    """Where it stays: copies over data, one micro-batch, an optimiser that does not share its state out."""
    config, load = toy_config(67, layers=1), MicroBatchShape(rows=64, masked=8, first=4, lengths=(32, 32))

    def peaks(**step: Any) -> dict[str, int]:
        return dry_step(config, CubeShape(data=2), load, **step).memory.peaks

    stays, goes = peaks(), peaks(keep_buckets=False)
    for part in ("building", "forward"):
        assert stays[part] - goes[part] == 4 * held(config, CubeShape(data=2)).total
    assert abs(stays["update"] - goes["update"]) < 100  # the gradients, either way
    assert peaks(shard_over_data=True) == peaks(shard_over_data=True, keep_buckets=False)
    assert peaks(micro_batches=2) == peaks(micro_batches=2, keep_buckets=False)


@pytest.mark.slow
def test_a_gpu_keeps_no_probabilities() -> None:
    config = toy_config(30522, attention_dropout=0.1)
    load = MicroBatchShape(rows=1024, masked=160, first=8, lengths=(512, 512))
    cpu, gpu = (counted_step(config, CubeShape(), load, device=device).memory for device in ("cpu", "cuda"))  # type: ignore[arg-type]
    assert gpu.layers < cpu.layers
    assert replace(gpu, embeddings=0, layers=0, heads=0, peaks={}) == replace(
        cpu, embeddings=0, layers=0, heads=0, peaks={}
    )


def test_a_gpu_works_on_all_logits_at_once() -> None:
    config, load = toy_config(30522), MicroBatchShape(rows=1024, masked=160, first=8, lengths=(512, 512))
    cpu, gpu = (counted_step(config, CubeShape(), load, device=device).memory for device in ("cpu", "cuda"))  # type: ignore[arg-type]
    assert gpu.peaks["forward"] - gpu.saved > cpu.peaks["forward"] - cpu.saved + 160 * 30522 * 3


@pytest.mark.slow
def test_a_gpu_multiplies_fp8_as_it_is() -> None:
    """Its kernels need no copies in fp32; what is kept is the same, and delayed scaling's magnitudes alone travel."""
    config, shape = toy_config(67, hidden=256, inner=1024), CubeShape(y=2)
    load = MicroBatchShape(rows=128, masked=16, first=4, lengths=(24, 8) * 4)
    asked = [("off", "cuda"), ("delayed", "cuda"), ("delayed", "cpu")]
    plain, gpu, cpu = (
        counted_step(config, shape, load, types=PrecisionConfig(compute="bf16", fp8=fp8), device=device)  # type: ignore[arg-type]
        for fp8, device in asked
    )
    assert plain.memory.saved == gpu.memory.saved
    assert plain.memory.peaks["forward"] < gpu.memory.peaks["forward"] < cpu.memory.peaks["forward"]
    weights = scaled_weights(config, shape, "delayed")
    assert weights == 4 * config.layers + 2
    assert gpu.received.total() - plain.received.total() == 4 * 3 * weights + 2 * 8
    assert gpu.calls.total() - plain.calls.total() == 2


def test_the_batch_is_in_the_peak() -> None:
    """First rows of sequences, which are made before the step: 4 bytes each."""
    config = toy_config(67, layers=1)
    for lengths in ((16,) * 4, (32, 32)):
        load = MicroBatchShape(rows=64, masked=8, first=4, lengths=lengths)
        memory = dry_step(config, CubeShape(), load).memory
        numbers = 8 * (3 * 64 + 2 * 8 + 2 * 4) + 4 * (len(lengths) + 1) + 4 * 5  # the last: sums of losses
        assert memory.peaks["building"] == memory.weights + memory.optimizer + numbers
