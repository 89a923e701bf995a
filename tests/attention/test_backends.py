"""What each backend of attention serves, what `"auto"` takes, and those that only a GPU runs as they are meant."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tensor3d import Attention3D, Cube, Sequences, attention
from tensor3d.attention.backends import (
    SUPPORT,
    AttentionArgs,
    AttentionRequest,
    Backend,
    BackendSpec,
    Name,
    choose,
    named,
)
from tensor3d.attention.flex import BLOCK, block_mask
from tensor3d.attention.relative import BiasBuckets, RelativeTerms
from tensor3d.attention.varlen import order_of, window_size
from tensor3d.batches.row_selection import RowSelection

PAGE = Path(__file__).parents[2] / "docs" / "attention.md"
LENGTHS = (5, 130, 1, 64, 1, 2, 127, 128, 33, 90)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def cuda(dtype: torch.dtype = torch.bfloat16, **facts: Any) -> AttentionRequest:
    options: dict[str, Any] = {"device": "cuda", "dtype": dtype, "head_dim": 64, "capability": (9, 0)} | facts
    return AttentionRequest(**options)


def cpu(dtype: torch.dtype = torch.float32, **facts: Any) -> AttentionRequest:
    return AttentionRequest(device="cpu", dtype=dtype, head_dim=64, **facts)


# --- the choice ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        (cuda(), "varlen"),
        (cuda(torch.float16), "varlen"),
        (cuda(causal=True), "varlen"),
        (cuda(window=True), "varlen"),
        (cuda(queries=True), "varlen"),
        (cuda(queries=True, causal=True), "grouped"),
        (cuda(queries=True, window=True), "grouped"),
        (cuda(torch.float32), "grouped"),
        (cuda(torch.float64), "grouped"),
        (cuda(dropout=True), "varlen"),
        (cuda(torch.float32, dropout=True), "grouped"),
        (cuda(head_dim=20), "grouped"),
        (cuda(head_dim=264), "grouped"),
        (cuda(capability=(7, 5)), "grouped"),
        (cpu(), "grouped"),
        (cpu(torch.bfloat16), "grouped"),
        (cpu(dropout=True, causal=True, window=True, queries=True), "grouped"),
        (cuda(relative=True), "grouped"),
        (AttentionRequest(device="meta", dtype=torch.float32, head_dim=3), "grouped"),
    ],
)
def test_auto(facts: AttentionRequest, wanted: Name) -> None:
    assert choose("auto", facts) == wanted
    assert choose(wanted, facts) == wanted


@pytest.mark.parametrize(
    ("backend", "facts", "said"),
    [
        ("varlen", cpu(), r"runs on cuda, not on cpu; it takes bfloat16 or float16, not float32\. Take 'grouped', or"),
        (
            "flex",
            cuda(dropout=True),
            r"has no dropout of the probabilities\. Take 'grouped' or 'varlen', or \"auto\", which takes",
        ),
        ("varlen", cuda(torch.float32), r"takes bfloat16 or float16, not float32\. Take 'grouped' or 'flex'"),
        ("varlen", cuda(head_dim=12), r"head dimension that divides by 8 and is at most 256, not 12"),
        ("varlen", cuda(capability=(7, 5)), r"compute capability 8\.0, not 7\.5"),
        ("varlen", cuda(queries=True, causal=True), r"queries without a causal mask and without a window only"),
        ("flex", cuda(torch.float64), r"not float64"),
        ("flex", cuda(head_dim=8), r"needs a head dimension of at least 16, not 8\. Take 'grouped' or 'varlen', or"),
        ("flex", cpu(), r"has no backward pass on cpu \(only under torch\.no_grad\)"),
        ("flex", AttentionRequest(device="mps", dtype=torch.float32, head_dim=8), r"runs on cuda or cpu, not on mps"),
    ],
)
def test_what_a_backend_cannot_do_is_refused_with_what_can(
    backend: Backend, facts: AttentionRequest, said: str
) -> None:
    with pytest.raises(ValueError, match=f'"{backend}" cannot serve this call: .*{said}'):
        choose(backend, facts)


def test_the_function_asks() -> None:
    q, sequences = torch.zeros(4, 2, 8, requires_grad=True), Sequences.from_lengths([4])
    for backend in ("varlen", "flex"):
        with pytest.raises(ValueError, match="cannot serve this call"):
            attention(q, q, q, sequences, backend=backend)
    with pytest.raises(ValueError, match="has no dropout"):
        attention(q.detach(), q.detach(), q.detach(), sequences, backend="flex", dropout=0.1)


BIAS = RelativeTerms(buckets=BiasBuckets(rows=4, farthest=2), bias=torch.zeros(4, 1))


@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"causal": True}, {"window": 2}, {"relative": BIAS}])
def test_what_one_layer_may_ask_another_may_not(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is made once for all layers of a batch, but for each kind of call by itself."""
    q, sequences = torch.ones(5, 1, 8), Sequences.from_lengths([5])
    (name,) = options
    monkeypatch.setitem(SUPPORT, "reference", dataclasses.replace(SUPPORT["reference"], backward=(), **{name: False}))
    attention(q, q, q, sequences, backend="reference")
    with pytest.raises(ValueError, match=name):
        attention(q, q, q, sequences, backend="reference", **options)
    for learning in (q.clone().requires_grad_(), q):
        others = [learning, learning, learning] if learning.requires_grad else [q, q, q.clone().requires_grad_()]
        with pytest.raises(ValueError, match="has no backward pass"):
            attention(*others, sequences, backend="reference")
    with torch.no_grad():
        attention(*others, sequences, backend="reference")


def test_whether_a_call_is_refused_hangs_on_no_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have sequences of other lengths: where one refused a window and another did not, the others would wait."""
    asked: list[tuple[Backend, bool]] = []

    def chosen(backend: Backend, facts: AttentionRequest) -> str:
        asked.append((backend, facts.window))
        return "reference"

    monkeypatch.setattr(importlib.import_module("tensor3d.attention"), "choose", chosen)
    q, names = torch.zeros(4, 2, 8), ("varlen", "auto")
    for lengths in ([1, 3], [4]):
        for name in names:
            attention(q, q, q, Sequences.from_lengths(lengths), backend=name, window=3)  # type: ignore[arg-type]
    assert asked == [("varlen", True), ("auto", False), ("varlen", True), ("auto", True)]


def test_a_gpu_of_any_rank_that_is_too_old_is_refused_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    cube = Cube.single()
    monkeypatch.setitem(vars(cube), "least_capability", (7, 5))
    with pytest.raises(ValueError, match=r"needs GPUs of compute capability 8\.0 on all ranks\. Got one of 7\.5"):
        Attention3D(8, 2, cube, backend="varlen")
    for backend in ("auto", "grouped", "flex"):
        Attention3D(8, 2, cube, backend=backend)  # type: ignore[arg-type]


def test_what_the_oldest_gpu_can_do_is_asked_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Cube.single().least_capability is None
    cube = Cube.single()
    cube.device, cube.mesh = torch.device("cuda"), object()  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr("tensor3d.distributed.cube._told_by_all", lambda own: [own, (8, 6), (10, 0)])
    assert cube.least_capability == (8, 6)


def test_facts_of_a_call() -> None:
    q = torch.zeros(4, 2, 8, requires_grad=True)
    call = AttentionArgs(sequences=Sequences.from_lengths([4]), queries=None, dropout=0.1, causal=True, window=2)
    expected = cpu(dropout=True, causal=True, window=True, gradient=True)
    assert AttentionRequest.of(q, q, q, call) == dataclasses.replace(expected, head_dim=8)
    assert not AttentionRequest.of(q.detach(), q.detach(), q.detach(), call).gradient
    with torch.no_grad():
        assert not AttentionRequest.of(q, q, q, call).gradient


# --- the page ------------------------------------------------------------------------------------------------------


def cells(support: BackendSpec) -> list[str]:
    """A row of the table in docs/attention.md."""
    devices = "any" if support.devices is None else ", ".join(support.devices)
    types = "any" if support.types is None else ", ".join(map(named, support.types))
    dims = "any" if support.least_head_dim == 1 else f"at least {support.least_head_dim}"
    if support.head_dims is not None:
        dims = f"multiples of {support.head_dims[0]}, at most {support.head_dims[1]}"
    queries = ("yes" if support.queries_masked else "without causal and window") if support.queries else "no"
    least = "" if support.capability is None else f" (from {support.capability[0]}.{support.capability[1]})"
    backward = devices if support.backward is None else ", ".join(support.backward)
    flags = ["yes" if each else "no" for each in (support.dropout, support.causal, support.window, support.relative)]
    return [f"`{support.name}`", devices + least, backward, types, dims, *flags, queries]


def test_the_page_has_the_table_of_the_code() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"\| `(\w+)` \|", line)]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert found == [cells(support) for support in SUPPORT.values()]


# --- varlen, as far as it is ours -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("causal", "window", "wanted"),
    [(False, None, (-1, -1)), (True, None, (-1, 0)), (False, 3, (2, 2)), (True, 3, (2, 0)), (False, 1, (0, 0))],
)
def test_windows_in_the_words_of_the_kernel(causal: bool, window: int | None, wanted: tuple[int, int]) -> None:
    call = AttentionArgs(sequences=Sequences.from_lengths([9]), queries=None, dropout=0, causal=causal, window=window)
    assert window_size(call) == wanted


def test_queries_in_the_order_of_their_sequences() -> None:
    sequences = Sequences.from_lengths([3, 2, 4])
    queries = RowSelection.from_numbers([8, -1, 0, 2, 8])
    order = order_of(queries, sequences)
    assert order.cu_seqlens.tolist() == [0, 2, 2, 4]
    assert order.cu_seqlens.dtype == torch.int32
    assert (order.order.tolist(), order.restore.tolist(), order.most) == ([2, 3, 0, 4], [2, 4, 0, 1, 3], 2)
    assert order_of(queries, sequences) is order, "made once for all layers"


@pytest.mark.parametrize(("dropout", "kv_heads"), [(0.0, 2), (0.1, 2), (0.0, 1)])
def test_the_operator_takes_its_arguments(dropout: float, kv_heads: int) -> None:
    """On tensors of CUDA without values: of PyTorch's own operator no version is promised."""
    module = importlib.import_module("tensor3d.attention.varlen")
    with FakeTensorMode():
        ends = torch.empty(4, dtype=torch.int32, device="cuda")
        sequences = Sequences(cu_seqlens=ends, lengths=(3, 2, 4))
        q, k, v = (torch.empty(9, heads, 8, dtype=torch.bfloat16, device="cuda") for heads in (2, kv_heads, kv_heads))
        call = AttentionArgs(sequences=sequences, queries=None, dropout=dropout, causal=False, window=None)
        assert module.varlen(q, k, v, call).shape == q.shape


def kernel_by_hand(q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, *_: object, **__: object) -> Tensor:
    """Of the kernel's signature, without a mask."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    parts = []
    for i in range(len(q_ends) - 1):
        a, b, c = q[q_ends[i] : q_ends[i + 1]], k[k_ends[i] : k_ends[i + 1]], v[k_ends[i] : k_ends[i + 1]]
        weights = (torch.einsum("qhd,khd->hqk", a, b) / a.shape[-1] ** 0.5).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, c))
    return torch.cat(parts)


@pytest.mark.parametrize("kv_heads", [3, 1])
@pytest.mark.parametrize("numbers", [None, [8, -1, 0, 2, 8], [-1, -1]])
def test_what_is_given_to_the_kernel(numbers: list[int] | None, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the kernel, which runs on a GPU alone: as the reference, forward and backward."""
    module = importlib.import_module("tensor3d.attention.varlen")
    monkeypatch.setattr(module, "flash", kernel_by_hand)
    sequences = Sequences.from_lengths([3, 2, 4])
    queries = None if numbers is None else RowSelection.from_numbers(numbers)
    call = AttentionArgs(sequences=sequences, queries=queries, dropout=0.0, causal=False, window=None)
    q, k, v, direction = drawn(sequences, queries, torch.float64)
    k, v = k[:, :kv_heads], v[:, :kv_heads]
    got = results(lambda *qkv: module.varlen(*qkv, call), q, k, v, direction)
    wanted = results(lambda *qkv: attention(*qkv, sequences, backend="reference", queries=queries), q, k, v, direction)
    for a, b in zip(got, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-11)


def test_the_kernel_is_told_of_two_rows_that_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer heads of keys and one row at most it counts on one of every sequence, as while a model writes."""
    module = importlib.import_module("tensor3d.attention.varlen")
    told: list[tuple[int, int]] = []

    def operator(q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, *sizes: int, **_: object) -> Any:
        told.append(sizes[:2])
        return (torch.zeros_like(q),)

    monkeypatch.setattr(module, "flash_attention", operator)
    sequences = Sequences.from_lengths([3, 2, 4])
    for numbers in ([0, 5, -1], [0, 1, 2]):
        queries = RowSelection.from_numbers(numbers)
        call = AttentionArgs(sequences=sequences, queries=queries, dropout=0.0, causal=False, window=None)
        q, k, v, _ = drawn(sequences, queries, torch.bfloat16)
        module.varlen(q, k[:, :1], v[:, :1], call)
    assert told == [(2, 4), (3, 4)]


def drawn(
    sequences: Sequences, queries: RowSelection | None, dtype: torch.dtype, device: str = "cpu", width: int = 8
) -> list[Tensor]:
    """q, k, v and the direction in which the result is differentiated."""
    random = torch.Generator().manual_seed(0)
    asking = sequences.rows if queries is None else len(queries)
    rows = (asking, sequences.rows, sequences.rows, asking)
    return [torch.randn(n, 3, width, generator=random, dtype=torch.float64).to(device, dtype) for n in rows]


def results(run: Callable[..., Tensor], *data: Tensor) -> list[Tensor]:
    """The output and three gradients, wide."""
    qkv = [t.clone().requires_grad_() for t in data[:3]]
    out = run(*qkv)
    out.backward(data[3])
    assert all(t.grad is not None for t in qkv)
    return [out.detach().double(), *(t.grad.double() for t in qkv if t.grad is not None)]


# --- flex ----------------------------------------------------------------------------------------------------------


def some_queries(sequences: Sequences, count: int = 300) -> RowSelection:
    """In any order, some twice, some slots not used."""
    return RowSelection.from_numbers(np.random.default_rng(1).integers(-1, sequences.rows, count))


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 40), (True, 9), (True, 300)])
@pytest.mark.parametrize("asked", [False, True])
def test_blocks_hold_all_there_is_to_see(causal: bool, window: int | None, asked: bool) -> None:
    """A pair that may be seen lies in a block that is listed; a block that is called full holds no other pair."""
    sequences = Sequences.from_lengths((*LENGTHS, 700, 700))
    queries = some_queries(sequences, 5 * BLOCK) if asked else None
    if queries is not None:  # one block of one long sequence, so that there is a full one
        queries.numbers[:BLOCK] = np.arange(sequences.starts[-1] + 300, sequences.starts[-1] + 300 + BLOCK)
    call = AttentionArgs(sequences=sequences, queries=queries, dropout=0, causal=causal, window=window)
    mask = block_mask(call)
    rows = np.arange(sequences.rows) if queries is None else queries.numbers
    member = np.repeat(np.arange(len(sequences.lengths)), sequences.lengths)
    distance = rows[:, None] - np.arange(sequences.rows)
    seen = (rows >= 0)[:, None] & (member[rows][:, None] == member) & (distance >= 0 if causal else True)
    seen &= np.abs(distance) < (window or sequences.rows)
    high, wide = (-(-size // BLOCK) for size in seen.shape)
    padded = np.zeros((high * BLOCK, wide * BLOCK), dtype=bool)
    padded[: seen.shape[0], : seen.shape[1]] = seen
    tiles = padded.reshape(high, BLOCK, wide, BLOCK)
    some, whole = tiles.any((1, 3)), tiles.all((1, 3))
    partial, full = listed(mask.kv_num_blocks, mask.kv_indices), listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert (partial | full)[some].all()
    assert whole[full].all()
    assert not (partial & full).any()
    assert full.any() or window is not None
    if not asked:  # neighbours: nothing is listed in vain
        assert np.array_equal(partial | full, some)
    places = torch.arange(seen.shape[0])[:, None], torch.arange(seen.shape[1])
    assert np.array_equal(mask.mask_mod(torch.tensor(0), torch.tensor(0), *places).numpy(), seen)


def listed(counts: Tensor, which: Tensor) -> np.ndarray:
    dense = np.zeros(which.shape[2:], dtype=bool)
    for i, count in enumerate(counts[0, 0].tolist()):
        dense[i, which[0, 0, i, :count].numpy()] = True
    return dense


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"causal": True, "window": 20}, True),
        *(
            pytest.param(options, asked, marks=pytest.mark.slow)
            for options in ({}, {"causal": True}, {"window": 7}, {"causal": True, "window": 20})
            for asked in (False, True)
            if not (asked and len(options) == 2)
        ),
    ],
    ids=str,
)
def test_flex_on_a_cpu(options: dict[str, Any], asked: bool) -> None:
    """Its forward alone, without a compiled kernel."""
    sequences = Sequences.from_lengths(LENGTHS)
    queries = some_queries(sequences) if asked else None
    q, k, v, _ = drawn(sequences, queries, torch.float32, width=16)
    got, wanted = (
        attention(q, k, v, sequences, backend=backend, queries=queries, **options) for backend in ("flex", "reference")
    )
    assert torch.allclose(got, wanted, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_what_is_not_finite_stays_in_its_sequence_in_flex(which: int, asked: bool) -> None:
    """A whole block, where no mask is looked at, and blocks of several sequences."""
    sequences = Sequences.from_lengths([5, 140, 3, 30])
    queries = some_queries(sequences) if asked else None
    drawn_rows = list(drawn(sequences, queries, torch.float32, width=16)[:3])
    whole = attention(*drawn_rows, sequences, backend="flex", queries=queries)
    numbers = np.arange(sequences.rows) if queries is None else queries.numbers
    for bad, row in ((math.nan, 60), (math.inf, 146), (-math.inf, 2)):
        owner = np.searchsorted(np.cumsum(sequences.lengths), row, side="right")
        start, length = sequences.starts[owner], sequences.lengths[owner]
        slots = np.flatnonzero(numbers == row) if which == 0 else np.array([row])
        given = [each.clone() for each in drawn_rows]
        given[which][torch.from_numpy(slots), 0, 3] = bad
        found = attention(*given, sequences, backend="flex", queries=queries)
        others = torch.from_numpy((numbers < start) | (numbers >= start + length))
        assert torch.equal(found[others], whole[others])
        if len(slots) and which:
            assert not found[~others].isfinite().all(), "and it is seen there"


@pytest.mark.slow
def test_flex_is_compiled_for_each_length_and_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but without a kernel in the end: more kinds than the compiler makes of one function, each once."""
    module = importlib.import_module("tensor3d.attention.flex")
    monkeypatch.setattr(module, "COMPILED_ON", ("cpu",))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    module.compiled.cache_clear()
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True, recompile_limit=2):
        for length, causal in [*((number, False) for number in (5, 9, 130, 300, 5)), (5, True), (9, False)]:
            sequences = Sequences.from_lengths([length, 3])
            q, k, v, _ = drawn(sequences, None, torch.float32, width=16)
            call = AttentionArgs(sequences=sequences, queries=None, dropout=0.0, causal=causal, window=None)
            assert torch.allclose(
                module.flex(q, k, v, call), attention(q, k, v, sequences, backend="reference", causal=causal), atol=1e-5
            )
    assert module.compiled.cache_info().currsize == 5
    module.compiled.cache_clear()


# --- grouped -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [LENGTHS, (3, 9, 5, 7) * 12, (200, 300, 150)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 7}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asked", [False, True])
def test_grouped_in_narrow_types(
    dtype: torch.dtype, lengths: tuple[int, ...], asked: bool, options: dict[str, Any]
) -> None:
    sequences = Sequences.from_lengths(lengths)
    queries = some_queries(sequences, 40) if asked else None
    data = drawn(sequences, queries, dtype)
    got = results(lambda *qkv: attention(*qkv, sequences, queries=queries, **options), *data)
    wide = [t.double() for t in data]
    wanted = results(lambda *qkv: attention(*qkv, sequences, backend="reference", queries=queries, **options), *wide)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    for name, a, b in zip(("output", "q", "k", "v"), got, wanted, strict=True):
        error = float((a - b).abs().max() / b.abs().max())
        assert error < tolerance, f"{name} errs by {error}"


class Stream:
    """Writes down what is asked of a stream of CUDA."""

    def __init__(self, log: list[tuple[object, ...]], name: object) -> None:
        self.log, self.name = log, name

    def record_event(self) -> str:
        self.log.append(("record", self.name))
        return "event"

    def wait_event(self, event: str) -> None:
        self.log.append(("fork", self.name))

    def wait_stream(self, stream: Stream) -> None:
        self.log.append(("join", self.name, stream.name))


def test_every_group_has_its_stream_between_fork_and_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of CUDA, in which order, and the same result; that it does what it is asked, only a GPU shows."""
    module = importlib.import_module("tensor3d.attention.grouped")
    log: list[tuple[object, ...]] = []

    def entered(stream: Stream) -> nullcontext[None]:
        log.append(("enter", stream.name))
        return nullcontext()

    current = Stream(log, "current")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(module, "_stream", lambda device, number: Stream(log, number))
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: log.append(("used by", stream.name)))
    sequences = Sequences.from_lengths((3, 9, 5, 7) * 12)
    grouping = sequences.grouping
    count, masked = len(grouping.groups), sum(group.mask is not None for group in grouping.groups)
    assert grouping.gather is not None
    call = AttentionArgs(sequences=sequences, queries=None, dropout=0, causal=False, window=None)
    q, k, v, _ = drawn(sequences, None, torch.float64)
    asked = list(zip(grouping.groups, zip(*module._slots(q, k, v, grouping), strict=True), strict=True))
    got = torch.cat(module._on_streams(asked, call)).index_select(0, grouping.restore)
    assert torch.equal(got, attention(q, k, v, sequences))
    assert log[0] == ("record", "current")
    assert [each for each in log if each[0] in ("fork", "enter")] == [
        (what, number) for number in range(count) for what in ("fork", "enter")
    ]
    assert log[-count:] == [("join", "current", number) for number in range(count)]
    used = Counter(each[1] for each in log if each[0] == "used by")
    assert used.pop("current") == count, "results, which the current stream puts together"
    assert sum(used.values()) == 3 * count + masked, "q, k and v of each, and its mask"
    assert sorted(used) == list(range(count))


# --- on a GPU ------------------------------------------------------------------------------------------------------

MASKS: list[dict[str, Any]] = [{}, {"causal": True}, {"window": 7}, {"causal": True, "window": 20}]


@gpu
# Of PyTorch's compiler: it looks at `.grad` of whatever goes into compiled code, and uses what it has deprecated.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("options", MASKS)
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("kv_heads", [3, 1])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("grouped", torch.float32),
        ("grouped", torch.float64),
        ("grouped", torch.bfloat16),
        ("varlen", torch.bfloat16),
        ("varlen", torch.float16),
        ("flex", torch.float32),
        ("flex", torch.bfloat16),
    ],
)
def test_backends_on_a_gpu(
    backend: Backend, dtype: torch.dtype, kv_heads: int, asked: bool, options: dict[str, Any]
) -> None:
    """Streams, kernels and compiled code, forward and backward, against the reference in fp64."""
    if backend == "varlen" and asked and options:
        pytest.skip("refused, as another test holds")
    if kv_heads == 1 and backend != "varlen" and (dtype != torch.bfloat16 or options):
        pytest.skip("the same kernels after keys and values are repeated")
    sequences = Sequences.from_lengths(LENGTHS, "cuda")
    queries = some_queries(sequences).to("cuda") if asked else None
    q, k, v, direction = drawn(sequences, queries, dtype, "cuda", width=32)
    data = [q, k[:, :kv_heads], v[:, :kv_heads], direction]
    got = results(lambda *qkv: attention(*qkv, sequences, backend=backend, queries=queries, **options), *data)
    wide = [t.double() for t in data]
    wanted = results(lambda *qkv: attention(*qkv, sequences, backend="reference", queries=queries, **options), *wide)
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-3 if backend == "flex" else 1e-4}.get(dtype, 4e-2)
    for name, a, b in zip(("output", "q", "k", "v"), got, wanted, strict=True):
        error = float((a - b).abs().max() / b.abs().max())
        assert error < tolerance, f"{name} errs by {error}"


@gpu
@pytest.mark.parametrize("kv_heads", [3, 1])
@pytest.mark.parametrize("numbers", [[0, 5, -1, 150], [200, -1]])
def test_one_row_that_asks_of_some_sequences(numbers: list[int], kv_heads: int) -> None:
    """And none of the others, as a [CLS] of each text and none of what is left of a pack."""
    sequences = Sequences.from_lengths(LENGTHS, "cuda")
    queries = RowSelection.from_numbers(numbers).to("cuda")
    q, k, v, direction = drawn(sequences, queries, torch.bfloat16, "cuda", width=32)
    data = [q, k[:, :kv_heads], v[:, :kv_heads], direction]
    got = results(lambda *qkv: attention(*qkv, sequences, backend="varlen", queries=queries), *data)
    wide = [t.double() for t in data]
    wanted = results(lambda *qkv: attention(*qkv, sequences, backend="reference", queries=queries), *wide)
    for a, b in zip(got, wanted, strict=True):
        assert float((a - b).abs().max() / b.abs().max()) < 4e-2


@gpu
def test_streams_of_groups_keep_what_they_read() -> None:
    """Passes that follow one another, in memory that the allocator gives away as soon as it may: all alike."""
    sequences = Sequences.from_lengths(LENGTHS * 20, "cuda")
    data = drawn(sequences, None, torch.float32, "cuda", width=32)
    wanted = results(lambda *qkv: attention(*qkv, sequences, backend="grouped"), *data)
    for _ in range(20):
        got = results(lambda *qkv: attention(*qkv, sequences, backend="grouped") * 1, *data)
        noise = [torch.full_like(data[0], float("nan")) for _ in range(8)]  # takes what was freed
        assert len(noise) == 8
        for a, b in zip(got, wanted, strict=True):
            assert torch.allclose(a, b, atol=1e-5)


@gpu
@pytest.mark.parametrize(("backend", "dtype"), [("grouped", torch.float32), ("varlen", torch.bfloat16)])
def test_dropout_on_a_gpu_is_unbiased(backend: Backend, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sequences = Sequences.from_lengths(LENGTHS, "cuda")
    q, k, v, _ = drawn(sequences, None, dtype, "cuda", width=32)
    wanted = attention(*(each.float() for each in (q, k, v)), sequences, backend="reference")
    draws = torch.stack([attention(q, k, v, sequences, backend=backend, dropout=0.3) for _ in range(500)]).float()
    spread = draws.std(0)
    rounding = 1e-3 if dtype == torch.float32 else 2e-2
    assert bool(((draws.mean(0) - wanted).abs() <= 7 * spread / 500**0.5 + rounding).all())


def test_thirds_of_one_matrix_are_known() -> None:
    """On GPUs they are gathered in one operator (`bench operators` counts it); what lies otherwise, one by one."""
    module = importlib.import_module("tensor3d.attention.grouped")
    qkv = torch.randn(2, 14, 2, 3, 8)[1]
    q, k, v = qkv.unbind(2)
    assert torch.equal(module._fused(q, k, v), qkv)
    elsewhere = qkv.clone().unbind(2)[1]
    for others in ((k, q, v), (q, k, k), (q.contiguous(), k, v), (q[:, :1], k[:, :1], v[:, :1]), (q, elsewhere, v)):
        assert module._fused(*others) is None
