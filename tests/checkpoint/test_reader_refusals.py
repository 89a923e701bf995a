"""What a checkpoint does not fit stays as it was: weights, moments, gradients, random streams."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tensor3d import checkpoint
from tests.checkpoint.subject import ALONE, make, same, state, step


@pytest.fixture
def path(tmp_path: Path) -> Path:
    cube, model, optimizer = make(ALONE, seed=1)
    step(cube, model, optimizer)
    return checkpoint.save(tmp_path, 1, model, optimizer, cube, {})


def refused(path: Path, *args: object) -> str:
    with pytest.raises(ValueError, match="step-00000001") as problem:
        checkpoint.load(path, *args)  # type: ignore[arg-type]
    assert not isinstance(problem.value, checkpoint.DamagedError), "an earlier one would not fit either"
    return str(problem.value)


def test_another_model_with_gradients_and_without_moments(path: Path) -> None:
    cube, model, optimizer = make(ALONE, seed=2, hidden=32)
    model.linear.weight.grad = torch.ones_like(model.linear.weight)
    assert "of shape (67, 16), and the shape (67, 32) is needed" in refused(path, model, optimizer, cube)
    assert not optimizer.state
    assert model.linear.weight.grad.eq(1).all()


def test_a_parameter_more(path: Path) -> None:
    cube, model, optimizer = make(ALONE, seed=2)
    step(cube, model, optimizer)
    model.register_parameter("more", torch.nn.Parameter(torch.zeros(8)))
    optimizer.add_param_group({"params": [model.more]})
    before = [tensor.clone() for tensor in optimizer.state[model.linear.weight].values()]
    assert "has no model.more, which is asked for" in refused(path, model, optimizer, cube)
    assert same(list(optimizer.state[model.linear.weight].values()), before)
    assert model.more not in optimizer.state


def test_an_optimiser_that_remembers_more(path: Path) -> None:
    cube, model, _ = make(ALONE, seed=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, amsgrad=True)
    model.linear.weight.grad = torch.ones_like(model.linear.weight)
    before = [p.detach().clone() for p in model.parameters()]
    assert "max_exp_avg_sq" in refused(path, model, optimizer, cube)
    assert not optimizer.state, "what was made to be compared is gone"
    assert same([p.detach() for p in model.parameters()], before)
    assert model.linear.weight.grad.eq(1).all()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_moments_of_another_type(path: Path) -> None:
    cube, model, optimizer = make(ALONE, seed=2)
    step(cube, model, optimizer)
    memory = optimizer.state[model.linear.weight]
    memory["exp_avg"] = memory["exp_avg"].double()
    before = state(model, optimizer)
    message = refused(path, model, optimizer, cube)
    assert "optimizer.linear.weight.exp_avg of torch.float32, and torch.float64 is needed" in message
    assert same(state(model, optimizer), before)


def test_random_streams_of_another_size(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cube, model, optimizer = make(ALONE, seed=2)
    step(cube, model, optimizer)
    before = state(model, optimizer)
    stream = {"random.cpu.0": torch.zeros(3, dtype=torch.uint8)}
    monkeypatch.setattr("tensor3d.checkpoint.reader.stream_tensors", lambda cube: stream)
    assert "It was written with another PyTorch" in refused(path, model, optimizer, cube)
    assert same(state(model, optimizer), before)


def test_only_moments_that_are_missing_are_made(path: Path) -> None:
    cube, model, optimizer = make(ALONE, seed=2)
    step(cube, model, optimizer)
    del optimizer.state[model.linear.weight]
    kept = optimizer.state[model.tokens.weight]["exp_avg"]
    model.tokens.weight.grad = torch.ones_like(model.tokens.weight)
    checkpoint.load(path, model, optimizer, cube)
    assert optimizer.state[model.tokens.weight]["exp_avg"] is kept
    assert model.tokens.weight.grad.eq(1).all(), "gradients stay"
    assert optimizer.param_groups[0]["lr"] == 0.1
    again, other, wanted = make(ALONE, seed=1)
    step(again, other, wanted)
    assert same(state(model, optimizer), state(other, wanted))
