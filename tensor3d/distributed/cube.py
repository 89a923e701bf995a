"""`Cube`: the processes arranged along data, x, y and z, with the groups that talk along each."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, TypeVar
from weakref import finalize, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import optimizer as torch_optim

from tensor3d.distributed import group_teardown, process_group
from tensor3d.distributed.collectives import Axis, open_group
from tensor3d.distributed.comm_stats import CommCounter
from tensor3d.distributed.cube_policies import ExecutionPolicy, MixedPrecisionPolicy
from tensor3d.distributed.cube_shape import AXES, MESH_AXES, AxisName, CubeShape, check_axes
from tensor3d.distributed.fp8_scales import Fp8Scales
from tensor3d.distributed.grad_reducer import GradReducer
from tensor3d.distributed.seeds import ParamNumbers
from tensor3d.distributed.shadow_weights import ShadowWeights
from tensor3d.distributed.symmetric_memory import GpuPlace, check_symmetric_memory
from tensor3d.distributed.use_agreement import UseAgreement
from tensor3d.distributed.weight_prefetch import WeightPrefetcher
from tensor3d.ops.autograd_function import out_of_graphs
from tensor3d.ops.compiled_regions import CompiledRegions
from tensor3d.ops.seeds import mix
from tensor3d.torch_private import accept_mesh_order, enable_symmetric_memory, forget_shardings

T = TypeVar("T")

# Sums of gradients on either face, and the plane.
_TOGETHER: tuple[tuple[AxisName, ...], ...] = (("data", "x", "y"), ("data", "x", "z"), ("y", "z"))


class Cube:
    """Arranges the ranks of the default process group as `data` boxes of `x*y*z` (Bian et al. 2021, §3).

    Every rank constructs the same cube at the same time. `Cube(1, 1, 1)` needs no process group; without one,
    parameters are plain tensors and nothing is ever sent.

    Args:
        x, y, z: sizes of the box; they need not be equal. x splits the batch and gathers weights, y and z split the
            hidden dimension and the rows in turn.
        data: copies of the box; parameters are copies, gradients are summed.
        device: where parameters live. Default: the CPU under gloo, the current CUDA device under NCCL.
        wire: axes from the slowest to the fastest change of the rank (see `CubeShape.wire`).
        precision: in which types the layers on this cube compute and sum gradients. Default: that of the parameters.
        speed: how its layers do their work.

    Raises:
        ValueError: sizes below 1, or a world size that is not `x*y*z*data`. Raised before any communication. Or these
            ranks have no symmetric memory, and `speed` asks for it: on every rank, before anything else is sent.
    """

    def __init__(
        self,
        x: int = 1,
        y: int = 1,
        z: int = 1,
        data: int = 1,
        *,
        device: torch.device | str | None = None,
        wire: tuple[AxisName, ...] = AXES,
        precision: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # frozen
        speed: ExecutionPolicy = ExecutionPolicy(),  # noqa: B008
    ) -> None:
        shape = CubeShape(x=x, y=y, z=z, data=data, wire=wire)
        connected = dist.is_available() and dist.is_initialized()
        world = dist.get_world_size() if connected else 1
        if world != shape.ranks:
            remedy = "Start that many, or choose sizes whose product is the number of processes"
            if not connected:
                remedy = "Initialise a process group first, or use Cube.from_env under torchrun"
            raise ValueError(
                f"a cube of x*y*z*data = {x}*{y}*{z}*{data} needs {shape.ranks} processes. Got {world}. {remedy}."
            )
        if connected and shape.ranks > 1 and device is not None and torch.device(device).type == "cuda":
            _check_backend(dist.get_backend_config())
        rank = dist.get_rank() if connected else 0
        self._set_up(shape, rank=rank, device=device, precision=precision, speed=speed, connected=connected)

    def _set_up(
        self,
        shape: CubeShape,
        *,
        rank: int,
        device: torch.device | str | None,
        precision: MixedPrecisionPolicy,
        speed: ExecutionPolicy,
        connected: bool = False,
    ) -> None:
        self.shape = shape
        self.ranks_per_node: int | None = None
        """As the launcher says (`from_env`): ranks are numbered node by node. None where nobody says."""
        self.precision, self.speed = precision, speed
        self.rank = rank
        self.device = torch.device(device) if device is not None else _default_device(connected)
        self.regions = (
            CompiledRegions(speed.compile, self.device, _told_by_all)
            if connected
            else CompiledRegions(speed.compile, self.device)
        )
        self.coordinate = shape.coordinate(rank)
        self.traffic = CommCounter()
        self.ahead = WeightPrefetcher()
        self.open_groups: list[Any] = []
        """Of weights that travel together in the forward pass that runs now, the innermost last
        (sharding/weight_slabs.py)."""
        self.handed_on: list[Any] = []
        """What products of the forward pass that runs now hand on, the innermost last (sharding/matmul.py)."""
        self.shadows = ShadowWeights()
        """Copies of weights in the type of products, where `ExecutionPolicy.shadow_weights` says so."""
        self.fp8_uses = Counter[str]()
        """Where `MixedPrecisionPolicy.fp8` is set: how often this rank used a weight in FP8 ("fp8"), and how often not,
        because its local sides do not divide by 16 ("sides"), its layer stays out ("kept out"), or autocast asked for
        another type than bf16 ("type"). Gradients follow the forward passes that are counted."""
        self.numbers = ParamNumbers()
        self.seeded = False
        self._has_connected = False
        self._places: list[GpuPlace] | None = None
        self._blank = [False]  # in a list, so that cubes made by `with_policy` share it
        self._seed, self._parameters_made = 0, 0
        self._axes: dict[tuple[AxisName, ...], Axis] = {}
        self._asked: dict[tuple[AxisName, ...], Axis] = {}  # by what `over` was called with, as layers do at every use
        if connected:
            forget_shardings()  # those of an equal mesh whose cube is gone
        self.mesh = _mesh(shape, self.device) if connected else None
        self._groups = group_teardown.CubeGroups()
        self._every_axis: list[Axis] = []
        self._life = _Life()  # which cubes made by `with_policy` share
        if self.mesh is not None:
            self._groups.add(*(self.mesh.get_group(name) for name in MESH_AXES))
            # Tensors on the mesh use its groups, so they live as long as that: but caches must not keep it.
            for owner, at_end in (
                (self.mesh, self._groups.end_beside),
                (self._life, group_teardown.forget_meshes_at_end),
            ):
                finalize(owner, at_end).atexit = False
        self._axes[()] = self._made((), (rank,), None)
        for name in AXES:
            self._axes[name,] = self._axis(name)
        # Made here, where every rank is, and not at a first use that one rank alone may come to (a line in a log).
        for names in _TOGETHER:
            self.over(*names)
        self._use_symmetric_memory()
        self.hosts_along_x = self._hosts_along_x()
        """The members along x, whose hosts speak to one another and wait for no device."""
        self.fp8_scales = self._scales()
        """Of products in FP8, where `MixedPrecisionPolicy.fp8` is "delayed"; tells what was cut off."""
        self.ledger = GradReducer(
            precision,
            at_end=self.ahead.end,
            agreement=self._agreement(),
            keep_buckets=self._keep_buckets(),
            at_sum=self._end_of_sums(),
        )
        if self.mesh is not None:
            _tell_of_steps(self.mesh, self.ledger.agreement)

    @classmethod
    def single(
        cls,
        device: torch.device | str = "cpu",
        precision: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
        speed: ExecutionPolicy = ExecutionPolicy(),  # noqa: B008
    ) -> Cube:
        """One device on its own, whatever process group there is: the unsharded twin of a model."""
        cube = cls.__new__(cls)
        cube._set_up(CubeShape(), rank=0, device=device, precision=precision, speed=speed)
        return cube

    @classmethod
    def from_env(
        cls,
        x: int = 1,
        y: int = 1,
        z: int = 1,
        data: int = 1,
        *,
        wire: tuple[AxisName, ...] | None = None,
        timeout: timedelta = timedelta(minutes=10),
        precision: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
        speed: ExecutionPolicy = ExecutionPolicy(),  # noqa: B008
    ) -> Cube:
        """Connects the processes that torchrun (or anything that sets its variables) started, and arranges them.

        Chooses NCCL, one CUDA device a rank, where every rank of the node has one, else gloo on the CPU. Without those
        variables this is one process of its own.

        Args:
            wire: see `CubeShape.wire`. Default: that which keeps y and z inside the nodes (`CubeShape.placed`).

        Raises:
            ValueError: `WORLD_SIZE` is not `x*y*z*data`, or a variable is missing or malformed; before connecting.
                Nodes have different numbers of ranks, and no `wire` is given.
        """
        shape = CubeShape(x=x, y=y, z=z, data=data, wire=AXES if wire is None else wire)
        known = dist.is_available() and dist.is_initialized()
        device = process_group.connect(shape.ranks, timeout)
        per_node = process_group.ranks_per_node(device, needed=wire is None) if shape.ranks > 1 else None
        placed = shape.placed(per_node) if wire is None and per_node is not None else shape
        cube = cls(x, y, z, data, device=device, wire=placed.wire, precision=precision, speed=speed)
        cube.ranks_per_node = per_node
        cube._has_connected = not known
        return cube

    def with_policy(self, precision: MixedPrecisionPolicy | None = None, speed: ExecutionPolicy | None = None) -> Cube:
        """A cube of the same processes, groups and counters, whose layers compute in other types or another way.

        Args:
            precision, speed: None: as here.

        Raises:
            ValueError: the policies exclude each other, or these ranks have no symmetric memory; on every rank.
        """
        cube = copy.copy(self)
        cube.precision = self.precision if precision is None else precision
        cube.speed = self.speed if speed is None else speed
        cube.ahead = WeightPrefetcher()
        cube.open_groups, cube.handed_on = [], []
        cube.fp8_scales = cube._scales()
        cube.ledger = self.ledger.relative(
            cube.precision, cube.ahead.end, cube._keep_buckets(), at_sum=cube._end_of_sums()
        )
        cube.regions = self.regions.switched(cube.speed.compile)
        cube._use_symmetric_memory()
        if cube.speed.overlap != self.speed.overlap:
            cube._asked = {}
            cube._axes = {names: replace(axis, overlap=cube.speed.overlap) for names, axis in self._axes.items()}
            self._every_axis += cube._axes.values()
        return cube

    def close(self, timeout: timedelta = timedelta(minutes=1)) -> None:
        """Frees the connections and threads of this cube, and of those that `with_policy` made of it, when every rank
        has come here: whoever left earlier would cut off what the others still receive. After it they cannot send.

        Where `from_env` has connected the processes for this cube, the process group ends with it, and so do all other
        cubes: torchrun would take it for a failure if one rank left earlier. One that was there before stays.

        A cube that is no longer used anywhere frees the same by itself, once all ranks have let go of it; under NCCL
        only `close` does, and so it is before torch 2.13 once an optimiser of torch has stepped, whose operators' plans
        torch keeps. Nothing happens on a cube without a process group. Where a rank never comes, the others go on
        after `timeout`.
        """
        if self.mesh is None or not dist.is_initialized():
            return
        if self._has_connected:
            group_teardown.disconnect(timeout)
        else:
            self._groups.end(timeout)
        for axis in self._every_axis:
            if axis.group is not None:
                object.__setattr__(axis, "group", group_teardown.ClosedGroup())  # else what it holds stays open
        vars(self.mesh).get("_pg_registry", {}).clear()
        group_teardown.forget_meshes()
        self.ledger.free_buckets()

    # --- axes -----------------------------------------------------------------------------------------------------

    @out_of_graphs
    def axis(self, name: AxisName) -> Axis:
        """The members along one axis."""
        return self._axes[name,]

    @out_of_graphs
    def over(self, *names: AxisName) -> Axis:
        """The members along several axes taken together.

        The first call for a set of axes makes its process groups, so every rank must make it at the same point. Those
        that the library's own layers use exist from the start: data, x and y; data, x and z; y and z.

        Raises:
            ValueError: a name that is not an axis.
        """
        known = self._asked.get(names)
        if known is not None:
            return known
        check_axes(names)
        wanted = tuple(name for name in AXES if name in names and self.shape.size(name) > 1)
        if wanted not in self._axes and self.traffic.is_dry:  # this rank alone: nothing is sent, so it needs no group
            ranks = self.shape.members(wanted, self.rank)
            return self._made(wanted, ranks, None)
        if wanted not in self._axes:
            self._axes[wanted] = self._combined(wanted)
        self._asked[names] = self._axes[wanted]
        return self._axes[wanted]

    @property
    def plane(self) -> Axis:
        """The `y*z` ranks that work on the same tokens."""
        return self.over("y", "z")

    @cached_property
    def least_capability(self) -> tuple[int, int] | None:
        """The compute capability that each rank's GPU has at least; None where they are no GPUs.

        Ranks ask one another the first time, so every rank must ask at the same point.
        """
        if self.device.type != "cuda" or not torch.cuda.is_available():
            return None
        own = torch.cuda.get_device_capability(self.device)
        alone = self.mesh is None or self.traffic.is_dry or "fake" in dist.get_backend()
        return own if alone else min(_told_by_all(own))

    def _axis(self, name: AxisName) -> Axis:
        ranks = self.shape.members((name,), self.rank)
        group = self.mesh.get_group(name) if self.mesh is not None and len(ranks) > 1 else None
        return self._made((name,), ranks, group)

    def _combined(self, names: tuple[AxisName, ...]) -> Axis:
        ranks = self.shape.members(names, self.rank)
        if len(ranks) == self.shape.ranks:
            group = dist.group.WORLD
        else:
            group, _ = dist.new_subgroups_by_enumeration([list(members) for members in self.shape.groups(names)])
            self._groups.add(group)
        return self._made(names, ranks, group)

    def _agreement(self) -> UseAgreement | None:
        if self.shape.ranks == 1:
            return None
        everyone = self.over(*AXES)
        # Hosts speak to one another: no device is waited for. And on no group of buckets that travel in a pass.
        backend = dist.get_backend()
        # One rank alone, as in a dry step, has nobody to speak to: its "fake" group counts what would be sent.
        if backend != "fake" and ("nccl" in backend or self.shape.data == self.shape.ranks):
            hosts = dist.new_group(backend="gloo", group_desc="parameters in use")
            everyone = replace(everyone, group=hosts)
            self._groups.add(hosts)
            self._every_axis.append(everyone)
        return UseAgreement(self.shape, everyone, self.numbers, self._axes)

    def _scales(self) -> Fp8Scales:
        return Fp8Scales(self.over(*AXES), self.numbers, self.device, self.precision.fp8_history)

    def _end_of_sums(self) -> Callable[[UseAgreement | None], None] | None:
        return self.fp8_scales.end_of_pass if self.precision.fp8 == "delayed" else None

    def _keep_buckets(self) -> bool | None:
        """As the policy says. A GPU's allocator keeps memory by itself, and clears none."""
        return False if self.speed.keep_buckets is None and self.device.type != "cpu" else self.speed.keep_buckets

    def _hosts_along_x(self) -> Axis:
        x = self.axis("x")
        if x.group is None or "nccl" not in dist.get_backend():
            return x
        members = [list(ranks) for ranks in self.shape.groups(("x",))]
        group, _ = dist.new_subgroups_by_enumeration(members, backend="gloo", group_desc="rows along x")
        self._groups.add(group)
        hosts = replace(x, group=group)
        self._every_axis.append(hosts)
        return hosts

    def _gpu_places(self) -> list[GpuPlace]:
        if self._places is None:  # else relatives have asked
            self._places = _told_by_all(GpuPlace.own(self.device))
        return self._places

    def _use_symmetric_memory(self) -> None:
        if not self.speed.symmetric_memory or self.mesh is None:
            return
        check_symmetric_memory(self.shape, self.device, dist.get_backend(), self.precision, self._gpu_places)
        for axis in (self.axis("y"), self.axis("z")):
            group = open_group(axis)
            if group is not None:
                enable_symmetric_memory(group)

    def _made(self, names: tuple[AxisName, ...], ranks: tuple[int, ...], group: dist.ProcessGroup | None) -> Axis:
        axis = Axis(
            name="+".join(names) or "none",
            ranks=ranks,
            index=ranks.index(self.rank),
            group=group,
            traffic=self.traffic,
            overlap=self.speed.overlap,
            mesh=self.mesh,
        )
        self._every_axis.append(axis)
        return axis

    # --- seeds ----------------------------------------------------------------------------------------------------

    def manual_seed(self, seed: int) -> None:
        """Seeds initialisation, the same on every cube, and torch's generators, with a stream of this rank's own.

        No element of a hidden state is stored twice, so dropout draws from different streams on different ranks.
        Call it before the model is made.
        """
        self.seeded = True
        self._seed, self._parameters_made = seed, 0
        torch.manual_seed(mix(seed, self.rank + 1))

    def next_seed(self) -> int:
        """The seed of the next parameter: a function of `manual_seed` and of how many came before, of nothing else."""
        self._parameters_made += 1
        return mix(self._seed, 0, self._parameters_made)

    @contextmanager
    def skip_init(self) -> Iterator[None]:
        """Inside, new random matrices are left unfilled, and take no seed: for weights that are loaded right after."""
        before, self._blank[0] = self._blank[0], True
        try:
            yield
        finally:
            self._blank[0] = before

    @property
    def is_blank(self) -> bool:
        """Whether new matrices are left unfilled now."""
        return self._blank[0]

    # --- gradients ------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients that are sums over ranks wait on each rank; the next backward pass outside sends them.

        For gradient accumulation: wrap all micro-batches but the last. What a weight's reduce-scatter over x does for
        memory stays in each pass.
        """
        with self.ledger.holding():
            yield

    # --- Python ---------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Cube:
        return self  # a copied model lives on the same processes

    def __copy__(self) -> Cube:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        if self.shape.ranks > 1:
            raise ValueError(
                f"a cube of {self.shape.ranks} ranks cannot be stored, nor a model or an optimiser that is on it: "
                "process groups are of this job alone. Store its state_dict(), full_state_dict(model, cube), or a "
                "checkpoint by tensor3d.checkpoint.save."
            )
        return vars(self).copy()

    def __repr__(self) -> str:
        place = " ".join(f"{axis}={self.coordinate[axis]}" for axis in AXES)
        return f"Cube({self.shape}, rank {self.rank} of {self.shape.ranks} at {place}, {self.device})"


def _tell_of_steps(mesh: DeviceMesh, agreement: UseAgreement | None) -> None:
    """While the mesh lives, parameters on it count the steps of any optimiser of torch as changes: foreach and fused
    operators leave the counters of a DTensor as they are, and a graph from before the step would go back through the
    new weights without a word. So autograd refuses it, as it does of plain parameters. The agreement counts them, too,
    for ranks whose backward passes are of different steps."""
    known = None if agreement is None else ref(agreement)
    handle = torch_optim.register_optimizer_step_post_hook(partial(_count_step, ref(mesh), known))
    finalize(mesh, handle.remove).atexit = False


def _count_step(
    of: ref[DeviceMesh], known: ref[UseAgreement] | None, optimizer: torch.optim.Optimizer, *_: Any
) -> None:
    mesh, parameters = of(), (each for group in optimizer.param_groups for each in group["params"])
    stepped = [each for each in parameters if getattr(each, "device_mesh", None) is mesh]
    torch.autograd.graph.increment_version([each for each in stepped if each.grad is not None])
    agreement = None if known is None else known()
    if stepped and agreement is not None:
        agreement.steps += 1


class _Life:
    """Ends with the last of those that share it."""


def _check_backend(backends: str) -> None:
    """Raises ValueError where tensors of CUDA would travel by gloo, which has most collectives for the CPU alone: a
    process that calls another one dies of a segmentation fault (torch 2.11)."""
    if dict(each.split(":") for each in backends.split(",")).get("cuda") == "gloo":
        raise ValueError(
            f"a cube on CUDA devices needs NCCL, one GPU a rank. Got a process group of {backends}. Initialise it with "
            'backend="nccl", or leave device out for a cube on the CPU.'
        )


def _told_by_all(own: T) -> list[T]:
    """Every rank's words, by rank."""
    told = [own] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return told


def _mesh(shape: CubeShape, device: torch.device) -> DeviceMesh:
    places = torch.arange(shape.ranks).reshape([shape.size(axis) for axis in shape.wire])
    places = places.permute([shape.wire.index(axis) for axis in MESH_AXES])
    accept_mesh_order()
    return DeviceMesh(device.type, places, mesh_dim_names=MESH_AXES)


def _default_device(connected: bool) -> torch.device:
    if connected and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
