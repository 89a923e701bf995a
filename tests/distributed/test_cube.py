"""The cube: refused sizes, who stands where, and the groups along its axes."""

from __future__ import annotations

import copy
import io
import pickle
from datetime import timedelta
from itertools import combinations
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tensor3d import Cube, Linear3D, Sequences, TransformerLayer3D, constant, local, local_param, normal
from tensor3d.distributed.collectives import largest
from tensor3d.distributed.cube_shape import AXES, MESH_AXES, AxisName
from tensor3d.sharding.param_layout import Layout, copies, matrix
from tensor3d.torch_private import default_group, set_timeout, timeout_of
from tests.ranks import run_ranks

# --- one process ---------------------------------------------------------------------------------------------------


def test_several_ranks_need_a_process_group() -> None:
    with pytest.raises(ValueError, match=r"2\*1\*3\*2 needs \b12\b.*\b1\..*Initialise a process group"):
        Cube(2, 1, 3, data=2)
    with pytest.raises(ValueError, match=r"axis y.*whole number"):
        Cube(1, 0, 1)


def test_one_device_has_plain_parameters_and_no_collectives() -> None:
    cube = Cube(1, 1, 1)
    layer = TransformerLayer3D(16, 4, cube, dropout=0.1)  # one rank needs no streams of its own
    assert cube.mesh is None
    assert not any(isinstance(parameter, DTensor) for parameter in layer.parameters())
    with cube.traffic.counting() as count:
        layer(torch.randn(8, 16, requires_grad=True), Sequences.from_lengths([3, 5])).sum().backward()
    assert count.total_calls == 0
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_the_repr_tells_shape_and_place() -> None:
    assert repr(Cube()) == "Cube(1x1x1, rank 0 of 1 at data=0 x=0 y=0 z=0, cpu)"


def test_unknown_axes_are_refused() -> None:
    """A typing error in the axes of a sum would leave gradients unsummed, silently."""
    cube, names = Cube.single(), ("dat", "x")
    with pytest.raises(ValueError, match="dat"):
        cube.over(*names)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dat"):
        Layout(sum_over=names)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dat"):
        Layout(cut=(("dat", 0),), sum_over=("x",))  # type: ignore[arg-type]


def test_a_layout_sums_over_no_axis_that_cuts() -> None:
    with pytest.raises(ValueError, match="each axis at most once"):
        Layout(cut=(("y", 0),), sum_over=("x", "y"))
    with pytest.raises(ValueError, match="each axis at most once"):
        Layout(cut=(("y", 0), ("y", 1)), sum_over=())


def test_seeds_depend_on_the_seed_and_the_place_in_line() -> None:
    cube = Cube.single()
    cube.manual_seed(1)
    first, second = cube.next_seed(), cube.next_seed()
    drawn = torch.rand(3)
    cube.manual_seed(1)
    assert (cube.next_seed(), cube.next_seed()) == (first, second)
    assert torch.equal(torch.rand(3), drawn)
    cube.manual_seed(2)
    assert len({cube.next_seed(), cube.next_seed(), first, second}) == 4


def test_a_model_on_one_device_can_be_pickled() -> None:
    model = nn.Sequential(Linear3D(4, 6, Cube.single()), nn.GELU())
    again = torch.load(io.BytesIO(_saved(model)), weights_only=False)
    x = torch.randn(2, 4)
    assert torch.equal(again(x), model(x))
    again(x).sum().backward()
    assert again[0].weight.grad is not None
    assert model[0].weight.grad is None


def _saved(model: nn.Module) -> bytes:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return buffer.getvalue()


# --- 8 ranks -------------------------------------------------------------------------------------------------------


def _refusals() -> list[str]:
    """No barrier before, none after: a rank that had begun to talk would hang or disturb the cube that follows."""
    messages = []
    for sizes in ((2, 2, 1, 1), (3, 3, 1, 1), (2, 2, 2, 2), (1, 1, 1, 1), (8, 0, 1, 1), (-8, 1, -1, 1)):
        try:
            Cube(*sizes)
        except ValueError as refusal:
            messages.append(str(refusal))
    Cube(2, 2, 2)
    return messages


def test_wrong_sizes_are_refused_on_every_rank() -> None:
    results = run_ranks(8, _refusals, timeout=30)
    assert all(messages == results[0] for messages in results)
    assert len(results[0]) == 6
    assert "2*2*1*1 needs 4 processes. Got 8. Start that many, or choose sizes" in results[0][0]
    assert "axis y must be a whole number of at least 1. Got 0" in results[0][4]


def _places(shape: tuple[int, int, int, int], wires: list[tuple[AxisName, ...]]) -> list[str]:
    """What is wrong with the cubes of these wires."""
    wrong = []
    for wire in wires:
        cube = Cube(*shape, wire=wire)
        assert cube.mesh is not None
        assert cube.mesh.mesh_dim_names == MESH_AXES
        for name in AXES:
            axis = cube.axis(name)
            what = f"{wire} {name} of rank {cube.rank}"
            if cube.mesh.get_local_rank(name) != cube.coordinate[name] or axis.index != cube.coordinate[name]:
                wrong.append(f"{what}: the mesh has it at another coordinate")
            if list(axis.ranks) != sorted(dist.get_process_group_ranks(cube.mesh.get_group(name))):
                wrong.append(f"{what}: the mesh has other members")
            if axis.group is not None and axis.ranks != tuple(dist.get_process_group_ranks(axis.group)):
                wrong.append(f"{what}: the group has them in another order")
        for one, two in combinations(AXES, 2):
            both = cube.over(one, two)
            if both is not cube.over(two, one) or both.ranks != cube.shape.members((one, two), cube.rank):
                wrong.append(f"{wire} {one} {two}: other members")
            if both.group is not None and list(both.ranks) != dist.get_process_group_ranks(both.group):
                wrong.append(f"{wire} {one} {two}: the group has them in another order")
    return wrong


@pytest.mark.parametrize("shape", [(2, 2, 2, 1), (1, 4, 1, 2)], ids=str)
def test_places_agree_with_the_device_mesh_for_any_wire(shape: tuple[int, int, int, int]) -> None:
    wires = [AXES, ("z", "y", "x", "data"), ("y", "data", "z", "x"), ("x", "z", "data", "y")]
    assert [fault for faults in run_ranks(8, _places, shape, wires) for fault in faults] == []


def _wires_give_one_model(wire: tuple[AxisName, ...]) -> torch.Tensor:
    cube = Cube(2, 2, 2, wire=wire)
    cube.manual_seed(5)
    parameter = normal((17, 8), matrix("z"), cube, 1.0)
    assert isinstance(parameter, DTensor)
    return parameter.full_tensor().detach()


def test_the_wire_moves_blocks_and_not_weights() -> None:
    default, crossed = (run_ranks(8, _wires_give_one_model, wire)[0] for wire in (AXES, ("z", "data", "x", "y")))
    assert torch.equal(default, crossed)


def _merging() -> dict[str, Any]:
    cube, flat = Cube(2, 2, 2), Cube(1, 8, 1)
    single = Cube.single()
    return {
        "order": cube.over("z", "x") is cube.over("x", "z") is cube.over("x", "z", "data"),
        "name": cube.over("z", "x").name,
        "world": cube.over("z", "y", "x").group is dist.group.WORLD,
        "one left": flat.over("x", "y", "z") is flat.axis("y"),
        "none left": (flat.over("x", "z").size, flat.over("x", "z").group, flat.over().ranks),
        "repeated": cube.over("x", "x", "y") is cube.over("x", "y"),
        "plane": cube.plane is cube.over("y", "z"),
        "flat plane": flat.plane is flat.axis("y"),
        "single": (single.mesh, single.shape.ranks, single.over(*AXES).size, str(single)),
        "repr": repr(cube),
    }


def test_axes_taken_together() -> None:
    for rank, result in enumerate(run_ranks(8, _merging)):
        for fact in ("order", "world", "one left", "repeated", "plane", "flat plane"):
            assert result[fact], fact
        assert result["name"] == "x+z"
        assert result["none left"] == (1, None, (rank,))
        assert result["single"] == (None, 1, 1, "Cube(1x1x1, rank 0 of 1 at data=0 x=0 y=0 z=0, cpu)")
        x, y, z = rank // 4, rank // 2 % 2, rank % 2
        assert result["repr"] == f"Cube(2x2x2, rank {rank} of 8 at data=0 x={x} y={y} z={z}, cpu)"


def _hosts_beside_nccl() -> tuple[bool, list[int]]:
    cube = Cube(2, 2, 1)
    with mock.patch.object(dist, "get_backend", return_value="nccl"):
        hosts = cube._hosts_along_x()
    own = cube.hosts_along_x.group is cube.axis("x").group and hosts.group is not cube.axis("x").group
    return own, [largest(cube.rank, axis) for axis in (hosts, cube.hosts_along_x)]


def test_hosts_along_x_have_a_group_of_their_own_where_devices_speak() -> None:
    assert run_ranks(4, _hosts_beside_nccl) == [(True, [2, 2]), (True, [3, 3])] * 2


def _timeouts() -> set[timedelta | None]:
    world = default_group()
    before = timeout_of(world)
    assert before is not None
    set_timeout(world, timedelta(seconds=77))
    try:
        cube = Cube(2, 2, 1)
        with mock.patch.object(dist, "get_backend", return_value="nccl"):
            groups = [cube._hosts_along_x().group, cube.over("data", "x", "z").group, cube.over("y", "z").group]
        groups += [cube.axis("x").group, cube.axis("y").group]
        return {timeout_of(group) for group in groups if isinstance(group, dist.ProcessGroup)}
    finally:
        set_timeout(world, before)


def test_groups_wait_as_long_as_the_default_one() -> None:
    """Of torch's own default NCCL's are ten minutes: less than the watch of a run takes to name who is to blame."""
    assert run_ranks(4, _timeouts) == [{timedelta(seconds=77)}] * 4


def _copied() -> dict[str, bool]:
    cube = Cube(2, 1, 1)
    layer = Linear3D(4, 4, cube)
    twin, shallow = copy.deepcopy(layer), copy.copy(cube)
    try:
        pickle.dumps(layer)
        refused = False
    except ValueError as error:
        refused = "a cube of 2 ranks cannot be stored" in str(error)
    return {
        "deepcopy keeps the cube": twin.cube is cube,
        "but not the weights": twin.weight is not layer.weight
        and isinstance(twin.weight, DTensor)
        and twin.weight.to_local().data_ptr() != layer.weight.to_local().data_ptr(),  # type: ignore[attr-defined]
        "copy shares processes, counters and ledger": shallow.axis("x") is cube.axis("x")
        and shallow.traffic is cube.traffic
        and shallow.ledger is cube.ledger,
        "pickle refuses processes": refused,
    }


def test_copies_live_on_the_same_processes() -> None:
    for result in run_ranks(2, _copied):
        assert all(result.values()), result


def _summed_over_nothing() -> bool:
    cube = Cube(1, 2, 2)
    layout = Layout(sum_over=())
    parameter = constant((3,), layout, cube, 2.0)
    with cube.traffic.counting() as count:
        local_param(parameter, layout, cube).square().sum().backward()
    assert parameter.grad is not None
    # What ranks have used is compared, and nothing else travels.
    return torch.equal(local(parameter.grad), torch.full((3,), 4.0)) and count.total_calls == 1


def test_a_gradient_that_is_equal_everywhere_is_summed_over_nothing() -> None:
    assert all(run_ranks(4, _summed_over_nothing))
    assert copies("y").sum_over == ("data", "x", "z"), "heads read rows that differ along these"


def _first_draws() -> list[list[float]]:
    cube, draws = Cube(2, 2, 1), []
    for seed in (7, 7, 8):
        cube.manual_seed(seed)
        draws.append(torch.rand(3).tolist())
    return draws


def test_every_rank_draws_from_a_stream_of_its_own() -> None:
    """Dropout on the parts of one hidden state must not be one pattern again and again."""
    found = run_ranks(4, _first_draws)
    for again in found:
        assert again[0] == again[1] != again[2]
    assert len({tuple(draws[0]) for draws in found}) == 4


def cuda_by_gloo() -> str:
    try:
        Cube(1, 1, 2, device="cuda")
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def test_gloo_is_refused_for_cuda_before_anything_travels() -> None:
    for message in run_ranks(2, cuda_by_gloo):
        assert "needs NCCL" in message
        assert "gloo" in message
