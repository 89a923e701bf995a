"""What ranks do for the tests of `bench rivals`: in a file of its own, which imports little."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from models.bert import BertConfig, BertForPreTraining
from tensor3d import Cube
from tensor3d.distributed.collectives import all_to_all
from tests.single_device_reference import error, full
from tools.bench.vs_pytorch.plain_bert import PlainBert, copy_weights
from tools.bench.vs_pytorch.strategies import CollectiveCount
from tools.bench.vs_pytorch.trial import RIVALS, Implementation, make_ours, make_rival
from tools.bench.vs_pytorch.work import What, Work, plain_batch

CONFIG = BertConfig(
    layers=2, hidden=16, heads=4, inner=24, vocab=67, positions=8, dropout=0.0, attention_dropout=0.0, std=0.2
)


def work_of(what: What = "step", **changes: Any) -> Work:
    return Work(what=what, config=CONFIG, **{"sequences": 4, "length": 8, **changes})


def gradients_of(contender: Implementation) -> dict[str, Tensor]:
    contender.passes()
    found = {name.removeprefix("module."): full(p.grad) for name, p in contender.model.named_parameters()}
    contender.forget()
    return found


def split_errors(names: tuple[str, ...]) -> dict[str, float]:
    """The worst error of a gradient, by contender; all against the plain model with the whole batch."""
    torch.set_default_dtype(torch.float64)
    work, errors = work_of(), {}
    plain, cube = PlainBert(CONFIG), Cube.single()
    cube.manual_seed(work.seed)
    copy_weights(plain, BertForPreTraining(CONFIG, cube))
    plain(*plain_batch(work, 0, work.sequences, cube.device)).backward()
    wanted = {name: full(parameter.grad) for name, parameter in plain.named_parameters()}
    for name in names:
        ours = name not in RIVALS
        contender = make_ours(work, Cube(1, 2, 2)) if ours else make_rival(name, work, cube.device, 2)
        got = gradients_of(contender)
        assert got.keys() == wanted.keys()
        errors[name] = max(error(got[each], wanted[each]) for each in wanted)
    return errors


def of_ddp() -> tuple[dict[str, int], dict[str, int]]:
    """15 parameters, padded to 16, in one bucket: 2 * 1 * 8 * 4 bytes."""
    model = DistributedDataParallel(nn.Linear(4, 3), gradient_as_bucket_view=True)
    with CollectiveCount() as count:
        model(torch.ones(2, 4)).sum().backward()
    return dict(count.received), dict(count.calls)


def of_fsdp2() -> tuple[dict[str, int], dict[str, int]]:
    """3 rows over 2 ranks are 2 each, padded: 2 * 4 of the weight and 2 of the bias, 40 bytes a shard; gathered forward
    and again backward, and scattered once."""
    model = nn.Linear(4, 3)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
    with CollectiveCount() as count:
        model(torch.ones(2, 4)).sum().backward()
    return dict(count.received), dict(count.calls)


def of_dtensors() -> tuple[dict[str, int], dict[str, int]]:
    """6 rows of 4, half of them on each rank: a gather receives 3 * 4 * 4 bytes, and its backward nothing. The sum of 4
    partial results is an all-reduce of 2 * 1 * 2 * 4 bytes."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)], src_data_rank=None)
    x.requires_grad_()
    with CollectiveCount() as count:
        x.redistribute(placements=[Replicate()]).to_local().sum().backward()
        x.sum(0).full_tensor()  # type: ignore[attr-defined]
    return dict(count.received), dict(count.calls)


def of_exchanges() -> tuple[dict[str, int], dict[str, int], int]:
    """Rank 0 keeps 1 of 4 and gets 2; rank 1 keeps 2 of 3 and gets 1. A broadcast of 5; a barrier sends nothing."""
    cube, rank = Cube(1, 2, 1), dist.get_rank()
    send, receive = ([1, 1], [1, 2]) if rank == 0 else ([2, 2], [1, 2])
    with CollectiveCount() as count, cube.traffic.counting() as own:
        all_to_all(torch.ones(sum(send)), send, receive, cube.axis("y")).wait()
        dist.barrier()
        dist.broadcast(torch.ones(5), 0)
    return dict(count.received), dict(count.calls), own.total_bytes


def all_counts() -> Any:
    found = of_ddp(), of_fsdp2(), of_dtensors(), of_exchanges()
    with (
        pytest.raises(NotImplementedError, match=r"bytes of c10d\.reduce_\.default"),
        CollectiveCount(),
    ):
        dist.reduce(torch.ones(2), 0)
    return found
