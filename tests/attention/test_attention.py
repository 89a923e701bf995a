"""Attention inside sequences: backends against one sequence at a time, and the grouping by length."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tensor3d import Attention3D, Cube, Sequences, attention
from tensor3d.attention import Backend
from tensor3d.attention.grouped import suitable_kernels
from tensor3d.batches.length_groups import LengthGroups
from tensor3d.batches.length_groups import _classes as classes
from tensor3d.batches.row_selection import RowSelection

BACKENDS: tuple[Backend, ...] = ("reference", "grouped")
HEADS, WIDTH = 3, 4
MIXTURES: dict[str, tuple[int, ...]] = {
    "one sequence": (37,),
    "one row": (1,),
    "all equal": (16,) * 9,
    "all of one row": (1,) * 20,
    "sorted": tuple(range(1, 40)),
    "mixed": (5, 128, 1, 64, 1, 2, 127, 128, 33, 90),
    "two lengths far apart": (200, 1, 200, 1, 1, 200, 1),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors: threads would only wait for each other where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows(lengths: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """q, k, v and the direction in which the result is differentiated."""
    generator = torch.Generator().manual_seed(seed)
    size = (sum(lengths), HEADS, WIDTH)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(4)]


def one_at_a_time(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], causal: bool) -> Tensor:
    parts = zip(*(t.transpose(0, 1).split(lengths, 1) for t in (q, k, v)), strict=True)
    done = [F.scaled_dot_product_attention(a, b, c, is_causal=causal) for a, b, c in parts]
    return torch.cat(done, 1).transpose(0, 1)


def results(lengths: tuple[int, ...], causal: bool, backend: Backend | None, data: list[Tensor]) -> list[Tensor]:
    """The output and the three gradients."""
    q, k, v = (t.clone().requires_grad_() for t in data[:3])
    if backend is None:
        out = one_at_a_time(q, k, v, lengths, causal)
    else:
        out = attention(q, k, v, Sequences.from_lengths(lengths), backend=backend, causal=causal)
    out.backward(data[3])
    return [out.detach(), q.grad, k.grad, v.grad]  # type: ignore[list-item]


def check(lengths: tuple[int, ...], causal: bool, backend: Backend, seed: int = 0) -> None:
    data = rows(lengths, seed)
    got, wanted = (results(lengths, causal, which, data) for which in (backend, None))
    for name, a, b in zip(("output", "q", "k", "v"), got, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-11), f"{name} differs by {float((a - b).abs().max())}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", MIXTURES.values(), ids=MIXTURES.keys())
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_one_sequence_at_a_time(backend: Backend, lengths: tuple[int, ...], causal: bool) -> None:
    check(lengths, causal, backend)


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=24).map(tuple), causal=st.booleans())
def test_grouped_attention_of_any_mixture(lengths: tuple[int, ...], causal: bool) -> None:
    check(lengths, causal, "grouped", seed=len(lengths))


def test_40_distinct_lengths() -> None:
    """More than there are groups by far; in an order that no length class follows."""
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(3)) + 1
    lengths = tuple(int(length) for length in shuffled)
    sequences = Sequences.from_lengths(lengths)
    q, k, v = (t.float()[:, :1] for t in rows(lengths)[:3])
    got = attention(q, k, v, sequences)
    wanted = one_at_a_time(q, k, v, lengths, causal=False)
    assert torch.allclose(got, wanted, atol=1e-5)
    assert len(sequences.grouping.groups) == 8


# --- boundaries ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_sequence_sees_another(backend: Backend, causal: bool) -> None:
    """What changes in one leaves output and gradients of the others as they are, to the bit; so does the direction."""
    lengths = (7, 20, 1, 19, 20, 3)
    starts = Sequences.from_lengths(lengths).starts
    before = results(lengths, causal, backend, rows(lengths))
    for changed in (1, 2, 5):
        data, inside = rows(lengths), slice(starts[changed], starts[changed] + lengths[changed])
        for tensor in data:
            tensor[inside] = 1e3 * tensor[inside].flip(0) - 5
        after = results(lengths, causal, backend, data)
        for old, new in zip(before, after, strict=True):
            difference = (old != new).flatten(1).any(1)
            assert not difference[: inside.start].any()
            assert not difference[inside.stop :].any()
        assert (before[0][inside] != after[0][inside]).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_causal_rows_see_nothing_after_them(backend: Backend) -> None:
    lengths = (6, 9, 4)
    data, changed = rows(lengths), rows(lengths)
    changed[1][10:], changed[2][10:] = -9.0, 7.0  # keys and values from the middle of the second sequence on
    before, after = (results(lengths, True, backend, each)[0] for each in (data, changed))
    assert torch.equal(before[:10], after[:10])
    assert not torch.equal(before[10:], after[10:])


# --- windows -------------------------------------------------------------------------------------------------------


def seen(rows: int, window: int, causal: bool) -> Tensor:
    """Which rows (dim 0) of one sequence see which (dim 1), one pair at a time."""
    return torch.tensor([[abs(i - j) < window and (j <= i or not causal) for j in range(rows)] for i in range(rows)])


def windowed_one_at_a_time(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], window: int, c: bool) -> Tensor:
    parts = zip(*(t.transpose(0, 1).split(lengths, 1) for t in (q, k, v)), strict=True)
    done = [F.scaled_dot_product_attention(*part, attn_mask=seen(part[0].shape[1], window, c)) for part in parts]
    return torch.cat(done, 1).transpose(0, 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 2, 7, 40])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_hides_what_is_far_away(backend: Backend, window: int, causal: bool) -> None:
    """The mixture has groups without and with padding, longer than the window and not."""
    lengths = (5, 30, 1, 22, 1, 2, 29, 30, 7, 23, 40, 8, 6)
    q, k, v, direction = rows(lengths)
    ours, theirs = ([t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2))
    sequences = Sequences.from_lengths(lengths)
    got = attention(*ours, sequences, backend=backend, causal=causal, window=window)
    wanted = windowed_one_at_a_time(*theirs, lengths, window, causal)
    for out in (got, wanted):
        out.backward(direction)
    assert torch.allclose(got, wanted, rtol=1e-11, atol=1e-11)
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.allclose(a.grad, b.grad, rtol=1e-11, atol=1e-11)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12).map(tuple),
    window=st.integers(1, 32),
    causal=st.booleans(),
)
def test_backends_agree_on_any_window(lengths: tuple[int, ...], window: int, causal: bool) -> None:
    q, k, v = rows(lengths)[:3]
    sequences = Sequences.from_lengths(lengths)
    a, b = (attention(q, k, v, sequences, backend=each, causal=causal, window=window) for each in BACKENDS)
    assert torch.allclose(a, b, rtol=1e-11, atol=1e-11)


def test_a_band_is_made_once_and_only_where_the_window_cuts() -> None:
    sequences = Sequences.from_lengths([4, 4, 4, 90, 90])
    short, long = sequences.grouping.groups
    assert (short.length, long.length) == (4, 90)
    q = torch.randn(192, 1, 2)
    for _ in range(2):
        attention(q, q, q, sequences, window=4)
    assert long.band(4, False) is long.band(4, False), "made once for all layers"
    assert list(long._made) == [("band", 4, False)]
    assert not short._made, "a sequence no longer than the window needs no mask"


@pytest.mark.parametrize("causal", [False, True])
def test_no_row_of_a_band_is_without_a_key(causal: bool) -> None:
    """Not every kernel survives one: padding far behind the end of a short sequence still sees itself."""
    (group,) = Sequences.from_lengths([8, 4, 8]).grouping.groups
    assert group.mask is not None
    assert bool(group.band(2, causal).any(-1).all())


# --- dropout -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_drops_and_is_unbiased(backend: Backend, causal: bool) -> None:
    torch.manual_seed(1)
    lengths = (5, 9, 5, 1)
    q, k, v = (t.float() for t in rows(lengths)[:3])
    sequences = Sequences.from_lengths(lengths)
    wanted = attention(q, k, v, sequences, backend=backend, causal=causal)
    draws = torch.stack(
        [attention(q, k, v, sequences, backend=backend, causal=causal, dropout=0.4) for _ in range(1000)]
    )
    assert not torch.equal(draws[0], draws[1]), "every call drew the same mask"
    spread = draws.std(0)
    assert float(spread[wanted.abs() > 0.1].min()) > 0.01, "nothing was dropped somewhere"
    # 6 standard errors of the mean for about 240 numbers
    assert bool(((draws.mean(0) - wanted).abs() <= 6 * spread / 1000**0.5 + 1e-4).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_that_attends_to_itself_alone_is_kept_or_dropped(backend: Backend) -> None:
    """Probability 1 becomes 0 or 1/(1-p): what dropout of the probabilities means, and at the rate it says."""
    torch.manual_seed(2)
    lengths = (1,) * 2000
    q, k, v = torch.zeros(3, 2000, 1, 2).unbind(0)
    out = attention(q, k, v + 1, Sequences.from_lengths(lengths), backend=backend, dropout=0.25)[:, 0, 0]
    kept = out > 0
    assert torch.allclose(out[kept], torch.tensor(1 / 0.75))
    assert float(kept.float().mean()) == pytest.approx(0.75, abs=0.04)


def test_the_layer_drops_in_training_alone() -> None:
    torch.manual_seed(3)
    layer, sequences = Attention3D(8, 2, Cube.single(), dropout=0.5, std=0.5), Sequences.from_lengths([4, 6])
    x = torch.randn(10, 8)
    assert not torch.equal(layer(x, sequences), layer(x, sequences))
    layer.eval()
    assert torch.equal(layer(x, sequences), layer(x, sequences))


# --- errors --------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    q = torch.zeros(4, 2, 3)
    four: Any = Sequences.from_lengths([4])
    with pytest.raises(ValueError, match=r"backend.*auto, reference, grouped, varlen, flex"):
        attention(q, q, q, four, backend="flash")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one shape"):
        attention(q, q, q[:, :1], four)
    with pytest.raises(ValueError, match=r"cover.*3 rows for \b4\b"):
        attention(q, q, q, Sequences.from_lengths([1, 2]))
    with pytest.raises(ValueError, match=r"at least 1\. Got 0"):
        Sequences.from_lengths([4, 0])
    with pytest.raises(ValueError, match=r"window.*1.*0"):
        attention(q, q, q, four, window=0)
    for p in (-0.5, 1.0):
        with pytest.raises(ValueError, match=rf"probability must be at least 0 and below 1\. Got {p}"):
            attention(q, q, q, four, dropout=p)
    with pytest.raises(ValueError, match=r"of one type\. Got float32, float64 and float32\. Convert them"):
        attention(q, q.double(), q, four)


def test_no_rows_have_a_result_and_a_backward_pass() -> None:
    for backend in (*BACKENDS, "auto"):
        q, k, v = torch.zeros(3, 0, 2, 4, requires_grad=True).unbind()
        out = attention(q, k, v, Sequences.from_lengths([]), backend=backend)  # type: ignore[arg-type]
        assert out.shape == (0, 2, 4)
        out.sum().backward()


def test_the_layer_refuses_windows_and_rotary_positions_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"window.*1.*-3"):
        Attention3D(8, 2, Cube.single(), window=-3)
    with pytest.raises(ValueError, match=r"head.*3"):
        Attention3D(6, 2, Cube.single(), rotary_base=10_000.0)
    layer = Attention3D(8, 2, Cube.single(), rotary_base=10_000.0, window=5)
    assert "rotary_base=10000, window=5" in repr(layer)
    with pytest.raises(ValueError, match=r"cover.*3 rows for \b4\b"):
        layer(torch.zeros(4, 8), Sequences.from_lengths([3]))
    with pytest.raises(ValueError, match=r"Attention3D.*packed rows"):
        layer(torch.zeros(2, 4, 8), Sequences.from_lengths([8]))


# --- fewer heads of keys and values --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 3}], ids=str)
@pytest.mark.parametrize("numbers", [None, [8, -1, 0, 2, 8], []], ids=["all", "some", "none"])
@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_each_head_of_keys_serves_its_group_of_queries(
    backend: Backend, numbers: list[int] | None, options: dict[str, Any]
) -> None:
    """As if each were there once for every head of queries; its gradient is the sum of theirs."""
    sequences, random = Sequences.from_lengths([3, 2, 4]), torch.Generator().manual_seed(0)
    queries = None if numbers is None else RowSelection.from_numbers(numbers)
    asking = 9 if numbers is None else len(numbers)
    sizes = [(asking, 6, 8), (9, 2, 8), (9, 2, 8)]
    q, k, v = (torch.randn(size, generator=random, dtype=torch.float64).requires_grad_() for size in sizes)
    got = attention(q, k, v, sequences, backend=backend, queries=queries, **options)
    wide = [torch.stack([t[:, 0]] * 3 + [t[:, 1]] * 3, 1) for t in (k, v)]
    wanted = attention(q, *wide, sequences, backend="reference", queries=queries, **options)
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)
    direction = torch.randn(got.shape, generator=random, dtype=torch.float64)
    pairs = (torch.autograd.grad(each, (q, k, v), direction) for each in (got, wanted))
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_heads_of_keys_that_do_not_fit_are_refused() -> None:
    four, q = Sequences.from_lengths([4]), torch.zeros(4, 6, 8)
    for k in (q[:, :4], q[:, :0], torch.zeros(4, 12, 8), q[:3, :2]):
        with pytest.raises(ValueError, match=r"heads of k and v may be fewer, and divide those of q\. Got \(4, 6, 8\)"):
            attention(q, k, k, four)
    for kv_heads in (0, 4, 12, -2):
        with pytest.raises(ValueError, match=rf"kv_heads must be at least 1 and divide heads=6\. Got {kv_heads}"):
            Attention3D(48, 6, Cube.single(), kv_heads=kv_heads)
    layer = Attention3D(48, 6, Cube.single(), kv_heads=2)
    assert "kv_heads=2" in repr(layer)
    assert layer.qkv.weight.shape == (80, 48)


# --- grouping ------------------------------------------------------------------------------------------------------


def area(grouping: LengthGroups) -> int:
    """Score entries that are computed."""
    return sum(len(group.members) * group.length**2 for group in grouping.groups)


def cost(lengths: list[int], cuts: tuple[int, ...], start: int) -> int:
    """Of classes that end before each of `cuts` of the ascending lengths; a group more is worth `start` entries."""
    bounds = [0, *cuts, len(lengths)]
    classes = [lengths[a:b] for a, b in pairwise(bounds)]
    return sum(len(members) * members[-1] ** 2 + start for members in classes)


@pytest.mark.parametrize(("device", "unit", "start"), [("cpu", 1, 256), ("meta", 45, 2**19)])
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=11))
def test_the_classes_are_the_best_there_are(device: str, unit: int, start: int, lengths: list[int]) -> None:
    """No way to cut the ascending lengths into at most 8 classes costs less, and no other order can."""
    ascending, ends = sorted(unit * length for length in lengths), range(1, len(lengths))
    best = min(cost(ascending, cuts, start) for n in range(min(8, len(lengths))) for cuts in combinations(ends, n))
    sizes = np.asarray(ascending)
    bounds = [part.stop for part in classes(sizes, sizes, torch.device(device))]
    assert bounds[-1] == len(sizes)
    assert cost(ascending, tuple(bounds[:-1]), start) == best


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40))
def test_every_row_has_one_slot(lengths: list[int]) -> None:
    sequences = Sequences.from_lengths(lengths)
    grouping = sequences.grouping
    assert len(grouping.groups) <= 8 or grouping.gather is None
    assert sorted(member for group in grouping.groups for member in group.members) == list(range(len(lengths)))
    slots = sum(group.slots for group in grouping.groups)
    gather = torch.arange(sequences.rows) if grouping.gather is None else grouping.gather
    restore = torch.arange(sequences.rows) if grouping.restore is None else grouping.restore
    assert len(gather) == slots
    assert torch.equal(gather[restore], torch.arange(sequences.rows))
    first, owner = 0, torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    for group in grouping.groups:
        held = owner[gather[first : first + group.slots]].view(len(group.members), group.length)
        assert torch.equal(held, torch.tensor(group.members)[:, None].expand_as(held)), "a slot of another sequence"
        real = torch.arange(group.length) < torch.tensor([lengths[i] for i in group.members])[:, None]
        mask = torch.ones_like(real) if group.mask is None else group.mask[:, 0, 0]
        assert torch.equal(mask, real)
        assert (group.mask is None) == bool(real.all())
        first += group.slots


@pytest.mark.parametrize("lengths", [(8,) * 5, (1,), (3, 3, 60, 60), (), (60, 7, 70, 60), (300, 200, 250, 250)])
def test_rows_that_lie_right_already_are_not_copied(lengths: tuple[int, ...]) -> None:
    grouping = Sequences.from_lengths(lengths).grouping
    assert grouping.gather is grouping.restore is None
    assert all(group.mask is None for group in grouping.groups)
    assert area(grouping) == sum(length**2 for length in lengths)


def test_many_short_sequences_go_into_classes_and_long_ones_stay() -> None:
    """A call of SDPA for each of many short ones costs more than the way to a slot and back; on a GPU always."""
    short, long = (5, 9, 3, 8) * 10, (400, 260, 512, 300)
    assert Sequences.from_lengths(short).grouping.gather is not None
    assert Sequences.from_lengths(long).grouping.gather is None
    assert [group.members for group in Sequences.from_lengths(long).grouping.groups] == [(0,), (1,), (2,), (3,)]
    assert Sequences.from_lengths(long, "meta").grouping.gather is not None


def test_a_gpu_starts_few_groups() -> None:
    """One more must spare it more padding than a CPU, which starts them sooner than it computes."""
    few, many = (5, 9, 3, 8) * 10, (64,) * 40 + (512,) * 40
    assert len(Sequences.from_lengths(few, "meta").grouping.groups) == 1
    assert len(Sequences.from_lengths(few).grouping.groups) == 2
    groups = Sequences.from_lengths(many, "meta").grouping.groups
    assert [(len(group.members), group.length, group.mask) for group in groups] == [(40, 64, None), (40, 512, None)]


def test_grouped_leaves_cudnn_out_and_then_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed, seen = torch.backends.cuda.cudnn_sdp_enabled(), []
    real = F.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return real(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    sequences = Sequences.from_lengths((5, 9, 3, 8) * 10)
    q = torch.randn(sequences.rows, 2, 4)
    attention(q, q, q, sequences, backend="grouped")
    assert seen
    assert not any(seen)
    with pytest.raises(RuntimeError, match="on purpose"), suitable_kernels(0.0):
        raise RuntimeError("on purpose")
    assert torch.backends.cuda.cudnn_sdp_enabled() == allowed


@pytest.mark.parametrize("turned", [False, True])
def test_values_alone_do_not_keep_a_fused_tensor(turned: bool) -> None:
    """Sequences that stay where they lie are kept as views of QKV: all three, or, if q and k have left it, none."""
    qkv = torch.randn(600, 2, 3, 4, requires_grad=True)
    kept: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    fused = qkv * 1
    q, k, v = fused.unbind(2)
    if turned:
        q, k = q * 2, k * 2
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention(q, k, v, Sequences.from_lengths([250, 350]), backend="grouped")
    assert (fused.untyped_storage().data_ptr() in kept) == (not turned)


def test_sequences_on_the_host_and_on_the_device_agree() -> None:
    sequences = Sequences.from_lengths([3, 1, 4])
    assert sequences.cu_seqlens.tolist() == [0, 3, 4, 8]
    assert sequences.cu_seqlens.dtype == torch.int32
    assert (sequences.rows, sequences.max_seqlen, sequences.starts) == (8, 4, (0, 3, 4))
    assert sequences.grouping is sequences.grouping, "made once for all layers"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_sequence_harms_another(backend: Backend, which: str, bad: float) -> None:
    """What is not finite stays in its sequence, forward and backward: groups that pad and groups that do not."""
    lengths = [5, 3, 7, 4, 1, 6]
    sequences = Sequences.from_lengths(lengths)
    generator = torch.Generator().manual_seed(0)
    base = {name: torch.randn(sum(lengths), 2, 8, generator=generator) for name in "qkv"}
    runs = []
    for broken in (False, True):
        given = {name: tensor.clone() for name, tensor in base.items()}
        if broken:
            given[which][9, 1, 3] = bad  # in the third sequence, rows 8 to 14
        leaves = [given[name].requires_grad_() for name in "qkv"]
        out = attention(*leaves, sequences, backend=backend)
        rows = torch.cat([torch.arange(8), torch.arange(15, sum(lengths))])
        gradients = torch.autograd.grad(out.square().sum(), leaves)
        runs.append([out.detach()[rows], *(gradient[rows] for gradient in gradients)])
    for whole, harmed in zip(*runs, strict=True):
        assert torch.equal(whole, harmed)


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": 2}, {"dropout": 0.3}, {"causal": True, "window": 3}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_kind_14_no_sequence_harms_another_whatever_is_masked(
    backend: Backend, options: dict[str, Any], asked: bool
) -> None:
    """Nor does what comes back: in q, k, v or the gradient of the result, at either end of a sequence."""
    sequences = Sequences.from_lengths([5, 3, 7, 4, 1, 6])
    numbers = np.array([14, 3, -1, 8, 25, 19, 11, 0, 9, -1, 15]) if asked else np.arange(26)
    queries = RowSelection.from_numbers(numbers) if asked else None
    generator = torch.Generator().manual_seed(0)
    counts = (len(numbers), 26, 26, len(numbers))
    base = [torch.randn(count, 2, 8, generator=generator) for count in counts]

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(1)  # of dropout
        leaves = [each.clone().requires_grad_() for each in inputs[:3]]
        out = attention(*leaves, sequences, backend=backend, queries=queries, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]

    whole = run(base)
    for which, count in enumerate(counts):
        own = numbers if which in (0, 3) else np.arange(count)
        for row, bad in ((8, math.nan), (14, math.inf), (8, -math.inf)):  # of the third sequence, rows 8 to 14
            broken = [each.clone() for each in base]
            broken[which][int(np.flatnonzero(own == row)[0]), 1, 3] = bad
            for one, other, of in zip(
                whole, run(broken), (numbers, numbers, np.arange(26), np.arange(26)), strict=True
            ):
                others = torch.from_numpy((of < 8) | (of > 14))
                assert torch.equal(one[others], other[others])
