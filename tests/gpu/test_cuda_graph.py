"""A pass as a CUDA graph: the same losses and gradients as without, whatever the sequences; what it refuses."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from models.bert import BertForPreTraining
from models.bert.graphed import EndsOnly, GraphedBert
from tensor3d import Cube, ExecutionPolicy, Linear3D, MixedPrecisionPolicy
from tensor3d.attention import attention
from tensor3d.data import PackedBatch
from tensor3d.ops.cuda_graph import CapturedPass
from tests.models.toy import CAPACITY, lay, totals, toy_config, toy_packs

VOCAB = 67
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def made(*, compiled: bool = False, **changes: Any) -> BertForPreTraining:
    speed = ExecutionPolicy(compile=compiled)
    cube = Cube.single("cuda", precision=MixedPrecisionPolicy(compute=torch.bfloat16), speed=speed)
    cube.manual_seed(0)
    return BertForPreTraining(toy_config(VOCAB, **changes), cube).train()


def batch_of(seed: int, model: BertForPreTraining) -> tuple[PackedBatch, int, int]:
    """Of other sequences for each seed, in the same slots."""
    packs = toy_packs(VOCAB, 9, seed=seed)
    packs = packs[seed % 9 :] + packs[: seed % 9]
    return lay(packs, model.cube).to("cuda"), *totals(packs)


@gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("changes", [{}, {"encoder": "modern", "layers": 3, "window": 4, "global_every": 3}], ids=str)
def test_replays_equal_passes_without_a_graph(changes: dict[str, Any], compiled: bool) -> None:
    """Two steps of two micro-batches each, whose gradients add up."""
    model, twin = made(compiled=compiled, **changes), made(compiled=compiled, **changes)
    graphed = GraphedBert(model, CAPACITY)
    for step in range(2):
        for number in range(2):
            batch, *counts = batch_of(2 * step + number, model)
            sums = graphed(batch, *counts)
            expected = twin(batch, *counts)
            expected.loss.backward()
            torch.testing.assert_close(sums, expected.sums, rtol=1e-2, atol=1e-2)
        for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert a.grad is not None, name
            assert b.grad is not None, name
            error = float((a.grad - b.grad).norm() / b.grad.norm().clamp(min=1e-12))
            assert error < 2e-2, f"step {step}: the gradient of {name} errs by {error}"
        for each in (model, twin):
            each.zero_grad(set_to_none=step == 0)


@gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_dropout_draws_anew_in_each_replay_and_capture_draws_nothing(compiled: bool) -> None:
    model = made(compiled=compiled, dropout=0.2, attention_dropout=0.2)
    graphed = GraphedBert(model, CAPACITY)
    batch, *counts = batch_of(0, model)
    torch.cuda.manual_seed(1)
    before = torch.cuda.get_rng_state()
    losses = {float(graphed(batch, *counts)[0]) for _ in range(4)}
    assert len(losses) == 4, losses
    torch.cuda.set_rng_state(before)  # and the same model: what is compiled anew may add up in another order
    assert float(GraphedBert(model, CAPACITY)(batch, *counts)[0]) in losses, "the capture has moved the random stream"


@gpu
def test_gradients_that_were_there_stay() -> None:
    model = made()
    batch, *counts = batch_of(0, model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    GraphedBert(model, CAPACITY)(batch, *counts)
    twin = made()
    twin(batch, *counts).loss.backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad - 1, b.grad, rtol=5e-2, atol=5e-2 * float(b.grad.abs().max()) + 1e-5)


@gpu
def test_other_shapes_are_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(3, device="cuda"))

    def run(x: torch.Tensor) -> torch.Tensor:
        loss = (weight * x).sum()
        loss.backward()
        return loss.detach()

    captured = CapturedPass(run, {"x": torch.ones(3, device="cuda")}, [weight])
    assert captured(x=torch.full((3,), 2.0, device="cuda")).item() == 6.0
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(ValueError, match=r"x of shape \(3,\).* Got \(4,\)"):
        captured(x=torch.ones(4, device="cuda"))
    with pytest.raises(ValueError, match=r"captured with \['x'\]\. Got \['y'\]"):
        captured(y=torch.ones(3, device="cuda"))


@gpu
def test_other_threads_go_on_while_a_pass_is_captured() -> None:
    """A loader pins memory, takes some of the device's, and copies: all of which a capture of all threads refuses."""
    over, failed = threading.Event(), []

    def load() -> None:
        held: list[torch.Tensor] = []  # so that each takes memory of its own
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not over.wait(0.005) and len(held) < 1000:
                    held.append(torch.ones(2**20).pin_memory())
                    held.append(held[-1].to("cuda", non_blocking=True))
        except RuntimeError as error:
            failed.append(error)

    weight = torch.nn.Parameter(torch.ones(3, device="cuda"))

    def run(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)
        loss = (weight * x).sum()
        loss.backward()
        return loss.detach()

    loading = threading.Thread(target=load)
    loading.start()
    try:
        captured = CapturedPass(run, {"x": torch.ones(3, device="cuda")}, [weight])
    finally:
        over.set()
        loading.join()
    assert failed == []
    assert captured(x=torch.full((3,), 2.0, device="cuda")).item() == 6.0


def pretend(monkeypatch: pytest.MonkeyPatch, **more: Any) -> dict[str, Any]:
    """CPU tensors are taken for a GPU's. What stands in for CUDA's own."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    names = ("Stream", "CUDAGraph", "current_stream", "get_rng_state", "set_rng_state")
    stand_ins: dict[str, Any] = {name: MagicMock() for name in names} | {"stream": lambda _: nullcontext()} | more
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return stand_ins


@pytest.mark.parametrize("failing", [1, 4], ids=["before the capture", "captured"])
def test_a_pass_that_cannot_be_captured_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    stand_ins = pretend(monkeypatch, graph=lambda *_, **__: nullcontext())
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    before = weights[0].grad = torch.full((3,), 7.0)
    passes = []

    def run(x: torch.Tensor) -> torch.Tensor:
        loss = (weights[0] * weights[1] * x).sum()
        loss.backward()
        passes.append(loss)
        if len(passes) == failing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return loss.detach()

    with pytest.raises(RuntimeError, match="not permitted"):
        CapturedPass(run, {"x": torch.ones(3)}, weights)
    assert weights[0].grad is before
    assert before.tolist() == [7.0] * 3
    assert weights[1].grad is None
    state = stand_ins["get_rng_state"].return_value
    assert stand_ins["set_rng_state"].call_args.args[0] is state
    assert stand_ins["current_stream"].return_value.wait_stream.called, "memory is used again when the pass is over"


def test_a_capture_is_of_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as far as it can be seen without a GPU: what CUDA is asked for."""
    asked: dict[str, Any] = {}

    def graph(_: object, **options: Any) -> nullcontext[None]:
        asked.update(options)
        return nullcontext()

    pretend(monkeypatch, graph=graph)
    CapturedPass(lambda x: x + 1, {"x": torch.ones(3)}, [], pool="a pool")
    assert asked == {"pool": "a pool", "capture_error_mode": "thread_local"}


@gpu
def test_a_graph_converts_weights_in_each_replay() -> None:
    """Copies that are made once after a change would be those of the capture."""
    speed = ExecutionPolicy(shadow_weights=True)
    cube = Cube.single("cuda", precision=MixedPrecisionPolicy(compute=torch.bfloat16), speed=speed)
    cube.manual_seed(0)
    layer, x = Linear3D(8, 8, cube), torch.ones(4, 8, device="cuda", dtype=torch.bfloat16)

    def run(x: torch.Tensor) -> torch.Tensor:
        loss = layer(x).float().sum()
        loss.backward()
        return loss.detach()

    captured = CapturedPass(run, {"x": x}, list(layer.parameters()))
    for _ in range(2):
        with torch.no_grad():
            layer.weight.add_(1)
        assert captured(x=x).item() == layer(x).float().sum().item()
    with pytest.raises(ValueError, match=r"copies .* would be held for nothing.*shadow_weights=False"):
        GraphedBert(BertForPreTraining(toy_config(VOCAB), cube), CAPACITY)


def test_delayed_scaling_is_refused() -> None:
    cube = Cube.single("cpu", precision=MixedPrecisionPolicy(compute=torch.bfloat16, fp8="delayed"))
    with pytest.raises(ValueError, match=r'would keep the scales of its capture.*"rowwise" or "tensorwise"'):
        GraphedBert(BertForPreTraining(toy_config(VOCAB), cube), CAPACITY)


def test_other_attention_is_refused() -> None:
    """It would take the lengths of packs for those of sequences."""
    sequences = EndsOnly(cu_seqlens=torch.tensor([0, 3, 8], dtype=torch.int32), lengths=(8,))
    q = torch.randn(8, 2, 8)
    with pytest.raises(ValueError, match=r'needs attention that is "varlen"'):
        attention(q, q, q, sequences, backend="grouped")
    cube = Cube.single("cpu")
    with pytest.raises(ValueError, match=r'"varlen".* Got reference'):
        GraphedBert(BertForPreTraining(toy_config(VOCAB), cube, backend="reference"), CAPACITY)


def test_a_cpu_is_refused() -> None:
    cube = Cube.single("cpu")
    with pytest.raises(ValueError, match=r"one rank with a GPU.*on cpu"):
        GraphedBert(BertForPreTraining(toy_config(VOCAB), cube), CAPACITY)
    with pytest.raises(ValueError, match=r"inputs on a CUDA device\. Got x on cpu"):
        CapturedPass(lambda x: x, {"x": torch.ones(3)}, [])
