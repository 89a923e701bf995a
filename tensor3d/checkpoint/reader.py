"""Reads a checkpoint onto any cube: PyTorch's planner finds the blocks that each rank needs of each file."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from tensor3d.checkpoint.directory import DamagedError
from tensor3d.checkpoint.format import data_of
from tensor3d.checkpoint.state import (
    EXTRA,
    FP8,
    MODEL,
    OPTIMIZER,
    RANDOM,
    extra_tensors,
    forget,
    forget_others,
    fp8_places,
    has_delayed_scaling,
    init_missing_state,
    live_tensors,
    model_tensors,
    optimizer_tensors,
    remembered,
    restore_fp8,
    restore_streams,
    stream_tensors,
)
from tensor3d.checkpoint.validation import (
    CheckpointIndex,
    checksum_problems,
    header_problems,
    read_contents,
    size_problems,
)
from tensor3d.distributed.cube import Cube
from tensor3d.distributed.object_collectives import run_on_all_ranks
from tensor3d.sharding.param_layout import local

# ----------------------------------------------------------------------------------------------------------------------
# Whether a checkpoint and a training belong together, told in the words of the model before anything is read.

_ANOTHER = "It belongs to another model: resume with the recipe of its run."


def check_optimizer(contents: CheckpointIndex, optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError unless the optimiser is of the kind that was saved: its memory is of no use to another."""
    before, now = contents.progress.get("optimizer"), type(optimizer).__name__
    if before != now:
        raise ValueError(
            f"{contents.folder} was written with the optimiser {before}, and this one is {now}. Resume with {before}, "
            "or load the weights alone."
        )


def check_fits(
    contents: CheckpointIndex,
    state: Mapping[str, Tensor],
    kinds: tuple[str, ...],
    grows: Collection[str] = (),
    *,
    any_type: bool = False,
    partial: bool = False,
) -> list[str]:
    """The names of tensors that have grown.

    Args:
        state: what is to be filled, of these kinds of tensors.
        kinds: the beginnings of their names.
        grows: names of parameters that may.
        any_type: types may differ.
        partial: there may be more tensors of the model than are to be filled.

    Raises:
        ValueError: names, shapes or types that differ.
    """
    stored = {name for name in contents.tensors if name.startswith(kinds)}
    if missing := sorted(state.keys() - stored):
        raise ValueError(f"{contents.folder} has no {_listed(missing)}, which is asked for. {_ANOTHER}")
    optional = (EXTRA, RANDOM, MODEL) if partial else (EXTRA, RANDOM)  # there may be more than are asked for
    if left := sorted(name for name in stored - state.keys() if not name.startswith(optional)):
        raise ValueError(f"{contents.folder} has {_listed(left)}, for which there is no place here. {_ANOTHER}")
    return [name for name, tensor in state.items() if _grown(contents, name, tensor, grows, any_type=any_type)]


def _grown(contents: CheckpointIndex, name: str, tensor: Tensor, grows: Collection[str], *, any_type: bool) -> bool:
    """Whether a tensor has more rows than are stored of it. Raises ValueError where it differs in another way."""
    before, now = contents.tensors[name], tuple(tensor.shape)
    may_grow = _parameter(name) in grows and len(now) > 0
    grown = may_grow and now[1:] == before.shape[1:] and now[0] > before.shape[0]
    if now != before.shape and not grown:
        remedy = "It was written with another PyTorch: use that one." if name.startswith(RANDOM) else _ANOTHER
        raise ValueError(
            f"{contents.folder} has {name} of shape {before.shape}, and the shape {now} is needed. {remedy}"
        )
    if tensor.dtype != before.dtype and not any_type:
        raise ValueError(
            f"{contents.folder} has {name} of {before.dtype}, and {tensor.dtype} is needed. Resume with the type "
            "that it was trained in."
        )
    return grown


def chosen(tensors: Mapping[str, Tensor], only: Collection[str] | None) -> dict[str, Tensor]:
    """Of a model's tensors, those that are to be filled. Raises ValueError for a name that is none of the model's."""
    if only is None:
        return dict(tensors)
    if unknown := sorted(name for name in only if MODEL + name not in tensors):
        raise ValueError(f"only names {unknown[0]!r}, which is nothing of the model. Name it as the model does.")
    return {MODEL + name: tensors[MODEL + name] for name in only}


def check_resizable(state: Mapping[str, Tensor], grows: Collection[str]) -> None:
    """Raises ValueError for a name that is no parameter of the model."""
    unknown = sorted(name for name in grows if MODEL + name not in state)
    if unknown:
        raise ValueError(f"grows names {unknown[0]!r}, which is no parameter of the model. Name it as the model does.")


def _parameter(name: str) -> str:
    """The parameter that a stored tensor belongs to."""
    if name.startswith(OPTIMIZER):
        return name.removeprefix(OPTIMIZER).rpartition(".")[0]
    return name.removeprefix(MODEL)


def _listed(names: Collection[str]) -> str:
    first, *more = names
    return f"{first} (and {len(more)} more)" if more else first


# --- Reads a checkpoint onto any cube ---------------------------------------------------------------------------------

T = TypeVar("T")


def load(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    cube: Cube,
    *,
    grows: Collection[str] = (),
    extra: Mapping[str, Tensor] | None = None,
    only: Collection[str] | None = None,
) -> dict[str, Any]:
    """Fills model and optimiser from a checkpoint, written on any cube, and returns its progress.

    Every byte of the checkpoint is compared with its checksum first, the files dealt out to the ranks: that reads each
    file once more, which is cheap beside the training that a wrong number would cost.

    Args:
        optimizer: None: the weights alone, which may then be of another type than the model's.
        grows: parameters that may have more rows here than in the checkpoint, by name. The further rows keep their
            values, and the optimiser remembers 0 of them.
        extra: tensors to be filled in place, under the names that they were saved with.
        only: names of the parameters and buffers to fill; the others keep their values, and what the checkpoint has
            of the model beyond them is left alone. Not together with an optimiser, which would remember all.

    Where scaling in FP8 is delayed, its histories are restored if the checkpoint has them; else, as after a run without
    it, they begin anew, and a warning says so. `only` leaves them as they are.

    Random streams are restored where an optimiser is, and the number of ranks is the same; else they stay as
    `Cube.manual_seed` left them. Gradients stay.

    Raises:
        DamagedError: a file is missing, cut or changed, or a list makes no sense; the message names the file. Another
            checkpoint may serve. On every rank, and before anything is changed, unless it is a file that could be
            read a moment before: then any other checkpoint that is loaded fills everything.
        ValueError: `folder` is no checkpoint, or does not fit the model or the optimiser; on every rank, and before
            anything is changed.
    """
    if only is not None and optimizer is not None:
        raise ValueError("only fills some parameters, and an optimiser needs all. Load with optimizer=None.")
    contents = _agreed(cube, lambda: _checked(folder, cube))
    continues = optimizer is not None and contents.progress["ranks"] == cube.shape.ranks
    streams = {}
    if continues:
        streams = {name: stream for name, stream in stream_tensors(cube).items() if name in contents.tensors}
    state = _agreed(cube, lambda: chosen(model_tensors(model), only)) | extra_tensors(extra) | streams

    def check_weights() -> None:
        check_resizable(state, grows)
        partial = only is not None
        check_fits(contents, state, (MODEL, EXTRA, RANDOM), grows, any_type=optimizer is None, partial=partial)

    _agreed(cube, check_weights)
    if optimizer is not None:
        moments = _optimizer_state(contents, model, optimizer, cube, grows)
        # Here changes begin.
        forget_others(model, optimizer, remembered(contents.tensors))
        for name in check_fits(contents, moments, (OPTIMIZER,), grows):
            local(moments[name]).zero_()
        state |= moments
    scales = {}
    delayed = only is None and has_delayed_scaling(model, cube)
    if delayed:
        shapes = {name: stored.shape for name, stored in contents.tensors.items() if name.startswith(FP8)}
        scales = _agreed(cube, lambda: fp8_places(model, shapes, cube))
    _read(contents, state | scales, cube, [live for name, live in live_tensors(model).items() if name in state])
    if delayed:
        restore_fp8(model, scales)
        if not scales:
            warnings.warn(f"{contents.folder} has no history of FP8's scales: they begin anew.", stacklevel=2)
    if continues:
        restore_streams(state, cube)
    return contents.progress


def _optimizer_state(
    contents: CheckpointIndex, model: nn.Module, optimizer: torch.optim.Optimizer, cube: Cube, grows: Collection[str]
) -> dict[str, Tensor]:
    """What the optimiser remembers and the checkpoint has, made where it is missing; if it does not fit, unmade."""
    _agreed(cube, lambda: check_optimizer(contents, optimizer))
    names = remembered(contents.tensors)

    def fitting() -> dict[str, Tensor]:
        state = optimizer_tensors(model, optimizer, names)
        check_fits(contents, state, (OPTIMIZER,), grows)
        return state

    made = init_missing_state(model, optimizer, names)
    try:
        return _agreed(cube, fitting)
    except ValueError:
        forget(optimizer, made)
        raise


def _checked(folder: Path, cube: Cube) -> CheckpointIndex:
    """What a checkpoint holds, after this rank's share of its files was found to be as written."""
    contents = read_contents(folder)
    share = sorted(contents.files)[cube.rank :: cube.shape.ranks]
    problems = size_problems(contents) or checksum_problems(contents, share) or header_problems(contents, share)
    if problems:
        raise DamagedError(f"{'; '.join(problems)}. Resume from an earlier checkpoint.")
    return contents


def _read(contents: CheckpointIndex, state: dict[str, Tensor], cube: Cube, live: Sequence[Tensor]) -> None:
    """Fills `state`; `live` are the model's own tensors among it."""
    try:
        with _alone_without_warning():
            dcp.load(state, storage_reader=_Reader(contents), planner=_Planner(), no_dist=cube.mesh is None)
    except CheckpointException as problem:  # DCP raises it on every rank
        causes = "; ".join(sorted({str(cause[0]) for cause in problem.failures.values()}))
        raise DamagedError(f"{contents.folder} cannot be read: {causes}. Resume from an earlier checkpoint.") from None
    finally:
        # Writing to the blocks of detached DTensors is not seen on the parameters, by which keepers of copies go.
        torch.autograd.graph.increment_version([*state.values(), *live])


class _Planner(DefaultLoadPlanner):
    """Asks for the part of each local block that the checkpoint has: all of it, unless the tensor has grown."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "DCP sets it up"
        items: list[ReadItem] = []
        for wanted in create_default_local_save_plan(self.state_dict, is_coordinator=False).items:
            stored = self.metadata.state_dict_metadata[wanted.index.fqn]
            assert isinstance(stored, TensorStorageMetadata), "only tensors are stored"
            items += create_read_items_for_chunk_list(wanted.index.fqn, stored, [data_of(wanted).chunk])
        return LoadPlan([item for item in items if item.lengths.numel()])


class _Reader(StorageReader):
    """Blocks out of safetensors files."""

    def __init__(self, contents: CheckpointIndex) -> None:
        self._contents = contents

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """There is nothing that would have to be forgotten."""

    def read_metadata(self) -> Metadata:
        tensors, places = {}, {}
        for name, tensor in self._contents.tensors.items():
            chunks = []
            for chunk in tensor.chunks:
                offsets = torch.Size(chunk.offsets)
                chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(chunk.sizes)))
                places[MetadataIndex(name, offsets)] = chunk.file
            tensors[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=tensor.dtype), size=torch.Size(tensor.shape), chunks=chunks
            )
        return Metadata(state_dict_metadata=dict(tensors), storage_data=places)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        self._places: dict[MetadataIndex, str] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._places[item.storage_index], []).append(item)
        for name, items in by_file.items():
            path = self._contents.folder / name
            try:
                with safe_open(path, framework="pt") as file:
                    for item in items:
                        planner.resolve_tensor(item).copy_(_part(file, item))
            except (SafetensorError, OSError, RuntimeError) as problem:  # the last: sizes that do not fit
                raise ValueError(f"{path.name}: {problem}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _part(file: Any, item: ReadItem) -> Tensor:
    """The wanted part of a block, in host memory."""
    name = item.storage_index.fqn
    if not item.lengths:  # of a tensor without dims there are no parts
        whole: Tensor = file.get_tensor(name)
        return whole
    ends = zip(item.storage_offsets, item.lengths, strict=True)
    part: Tensor = file.get_slice(name)[tuple(slice(first, first + length) for first, length in ends)]
    return part


def _agreed(cube: Cube, action: Callable[[], T]) -> T:
    """The result of `action` on this rank; the error of any rank is raised on all of them."""

    def readable() -> T:
        try:
            return action()
        except OSError as error:
            raise DamagedError(
                f"{error.filename} cannot be read: {error.strerror}. Resume from an earlier checkpoint."
            ) from error

    return run_on_all_ranks(cube, readable, kept=DamagedError)


@contextmanager
def _alone_without_warning() -> Iterator[None]:
    """DCP warns when there is no process group, even where it is told so by `no_dist`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
