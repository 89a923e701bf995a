"""What `tests/dtensors.py` makes is what torch's own operators make."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.default_type import default_type
from tests.dtensors import LocalSGD, begin_adam, clone_of, filled_like


@pytest.mark.parametrize(("fused", "amsgrad"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adam_begins_as_torchs_does(fused: bool, amsgrad: bool, dtype: torch.dtype) -> None:
    with default_type(dtype):
        ours, theirs = ([nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2))] for _ in range(2))
        ours[0].grad, theirs[0].grad = torch.zeros(2, 3), torch.zeros(2, 3)
        first, second = (torch.optim.AdamW(each, lr=0.0, fused=fused, amsgrad=amsgrad) for each in (ours, theirs))
        begin_adam(first)
        second.step()
        second.state[theirs[0]]["step"].zero_()
        assert [*first.state] == [ours[0]]
        got, wanted = first.state[ours[0]], second.state[theirs[0]]
    assert [*got] == [*wanted]
    for key, value in wanted.items():
        assert (got[key].dtype, got[key].shape) == (value.dtype, value.shape)
        assert torch.equal(got[key], value)


def test_likes_are_those_of_torch() -> None:
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3))
    assert torch.equal(filled_like(parameter, 2.0), torch.full_like(parameter, 2.0))
    assert torch.equal(clone_of(parameter), parameter)
    assert not filled_like(parameter, 2.0).requires_grad
    assert not clone_of(parameter).requires_grad


def test_a_step_down_is_that_of_torch() -> None:
    ours, theirs = ([nn.Parameter(torch.linspace(-1, 1, 6).view(2, 3)), nn.Parameter(torch.ones(2))] for _ in range(2))
    for optimizer in (LocalSGD(ours, lr=0.3), torch.optim.SGD(theirs, lr=0.3)):
        (first, _) = optimizer.param_groups[0]["params"]
        for _ in range(2):
            first.square().sum().backward()
            optimizer.step()
    assert all(map(torch.equal, ours, theirs))
