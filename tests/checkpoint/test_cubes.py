"""What one cube wrote, any other reads, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tensor3d import Cube, checkpoint, local
from tensor3d.distributed.data_shares import ShardOverData
from tensor3d.optim import AdamW
from tests.checkpoint.subject import ALONE, Model, Shape, make, same, state, step
from tests.ranks import run_ranks
from tests.single_device_reference import full


def written(shape: Shape, folder: Path) -> list[Tensor]:
    cube, model, optimizer = make(shape, seed=1)
    step(cube, model, optimizer)
    model.seen.add_(1)  # type: ignore[operator]
    path = checkpoint.save(folder, 1, model, optimizer, cube, {"note": "first"})
    assert path == folder / "step-00000001"
    return state(model, optimizer)


def passed_on(shape: Shape, folder: Path, to: Path) -> list[Tensor]:
    """Reads on one cube what another wrote, and writes it again."""
    cube, model, optimizer = make(shape, seed=2)
    progress = checkpoint.load(folder / "step-00000001", model, optimizer, cube)
    assert (progress["step"], progress["note"]) == (1, "first")
    checkpoint.save(to, 1, model, optimizer, cube, {"note": "first"})
    return state(model, optimizer)


@pytest.mark.slow
def test_a_chain_of_cubes_hands_everything_on(tmp_path: Path) -> None:
    wanted = run_ranks(8, written, (2, 2, 2, 1), tmp_path / "0")[0]
    got = [passed_on(ALONE, tmp_path / "0", tmp_path / "1")]
    got += run_ranks(8, passed_on, (1, 4, 2, 1), tmp_path / "1", tmp_path / "2")
    got += run_ranks(8, passed_on, (2, 2, 1, 2), tmp_path / "2", tmp_path / "3")
    assert all(same(each, wanted) for each in got)
    assert all(checkpoint.verify(tmp_path / str(link) / "step-00000001") == [] for link in range(4))
    boxed, copied = (checkpoint.read_contents(tmp_path / link / "step-00000001") for link in "23")
    sizes = [sum(t.bytes for t in contents.tensors.values()) for contents in (boxed, copied)]
    assert sizes[0] == sizes[1], "copies on the data axis are stored once"


# --- an optimiser's state in shares over data ------------------------------------------------------------------------


def in_shares(
    shape: Shape, shards: ShardOverData, read: Path | None, write: Path | None = None
) -> tuple[list[Tensor], int]:
    """Reads a checkpoint or makes a step, writes it, goes on, and comes back to it. State there; elements of
    moments."""
    cube = Cube(*shape)
    cube.manual_seed(1 if read is None else 2)
    model = Model(cube)
    optimizer = AdamW(model.parameters(), cube, lr=0.1, shard_over_data=shards)
    step(cube, model, optimizer)  # also before reading: a first pass sums in other buckets, in another order
    if read is not None:
        checkpoint.load(read / "step-00000001", model, optimizer, cube)
    there = state(model, optimizer)
    if write is not None:
        path, later = checkpoint.save(write, 1, model, optimizer, cube, {}), []
        for _ in range(2):
            step(cube, model, optimizer)
            step(cube, model, optimizer)
            later.append(state(model, optimizer))
            checkpoint.load(path, model, optimizer, cube)
        assert same(*later), "it goes on as if it had never stopped, to the bit"
        assert not same(later[0], there)
    return there, sum(local(optimizer.state[p]["exp_avg"]).numel() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("shards", ["gradients", True])
def test_an_optimiser_in_shares_is_stored_once_and_read_by_any(shards: ShardOverData, tmp_path: Path) -> None:
    wanted, held = run_ranks(4, in_shares, (1, 2, 1, 2), shards, None, tmp_path)[0]
    contents = checkpoint.read_contents(tmp_path / "step-00000001")
    assert checkpoint.verify(contents.folder) == []
    got, whole = in_shares(ALONE, False, tmp_path)
    assert same(got, wanted)
    assert sum(each.bytes for each in contents.tensors.values() if "exp_avg" in each.name) == 2 * 4 * whole
    assert whole / 4 <= held < whole / 3.6, "a half of the rows, rounded up, of a half"


@pytest.mark.slow
def test_a_chain_of_cubes_with_shares_and_without(tmp_path: Path) -> None:
    wanted, _ = run_ranks(2, in_shares, (1, 1, 1, 2), False, None, tmp_path / "0")[0]
    results = run_ranks(4, in_shares, (2, 1, 1, 2), True, tmp_path / "0", tmp_path / "1")
    # Some have no row of one.
    results += run_ranks(8, in_shares, (1, 1, 1, 8), "gradients", tmp_path / "1", tmp_path / "2")
    results += run_ranks(2, in_shares, (1, 1, 1, 2), True, tmp_path / "2", tmp_path / "3")
    results += run_ranks(4, in_shares, (1, 2, 1, 2), False, tmp_path / "3")
    assert all(same(got, wanted) for got, _ in results)


def streams(shape: Shape, folder: Path) -> tuple[Tensor, Tensor]:
    cube, model, optimizer = make(shape, seed=1)
    step(cube, model, optimizer)
    checkpoint.save(folder, 1, model, optimizer, cube, {})
    ahead = torch.rand(3)
    checkpoint.load(folder / "step-00000001", model, optimizer, cube)
    return ahead, torch.rand(3)


def test_each_rank_gets_its_random_stream_back(tmp_path: Path) -> None:
    drawn = run_ranks(2, streams, (1, 2, 1, 1), tmp_path)
    for ahead, again in drawn:
        assert torch.equal(ahead, again)
    assert not torch.equal(drawn[0][0], drawn[1][0])


# --- a table that grows --------------------------------------------------------------------------------------------

TABLE = "positions.weight"


def grown(shape: Shape, folder: Path) -> dict[str, Tensor]:
    cube, model, optimizer = make(shape, seed=2, positions=21)
    before = full(model.positions.weight).clone()
    checkpoint.load(folder / "step-00000001", model, optimizer, cube, grows=[TABLE])
    memory = optimizer.state[model.positions.weight]
    return {"before": before, "after": full(model.positions.weight), "moment": full(memory["exp_avg"])}


@pytest.mark.parametrize(("shape", "ranks"), [(ALONE, 0), ((2, 1, 2, 1), 4)])
def test_a_table_grows(tmp_path: Path, shape: Shape, ranks: int) -> None:
    old = written(ALONE, tmp_path)
    tables = [tensor for tensor in old if tensor.shape == (8, 16)]  # the parameter, then its moments
    results = run_ranks(ranks, grown, shape, tmp_path) if ranks else [grown(shape, tmp_path)]
    for result in results:
        assert torch.equal(result["after"][:8], tables[0])
        assert torch.equal(result["after"][8:], result["before"][8:]), "new rows keep their values"
        assert torch.equal(result["moment"][:8], tables[1])
        assert not result["moment"][8:].any()


# --- parts of it ---------------------------------------------------------------------------------------------------


def test_weights_alone_and_in_another_type(tmp_path: Path) -> None:
    wanted = written(ALONE, tmp_path)
    cube, model, optimizer = make(ALONE, seed=2)
    model.double()
    before = torch.get_rng_state()
    checkpoint.load(tmp_path / "step-00000001", model, None, cube)
    assert same([p.detach().float() for p in model.parameters()], wanted[: len(list(model.parameters()))])
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match=r"model\.\S+ of torch.float32, and torch.float64 is needed"):
        checkpoint.load(tmp_path / "step-00000001", model, optimizer, cube)


def test_extra_tensors_are_filled_in_place(tmp_path: Path) -> None:
    cube, model, optimizer = make(ALONE, seed=1)
    step(cube, model, optimizer)
    with checkpoint.Checkpoints(tmp_path, cube) as checkpoints:
        checkpoints.save(7, model, optimizer, {}, {"scale": torch.tensor(2.0**16), "growth": torch.tensor(3)})
    scale, growth = torch.tensor(1.0), torch.tensor(0)
    path = tmp_path / "step-00000007"
    checkpoint.load(path, model, optimizer, cube, extra={"scale": scale, "growth": growth})
    assert (scale.item(), growth.item()) == (2.0**16, 3)
    checkpoint.load(path, model, optimizer, cube)  # what is not asked for stays there
    with pytest.raises(ValueError, match=r"has no extra\.skipped"):
        checkpoint.load(path, model, optimizer, cube, extra={"skipped": scale})


def test_an_optimiser_that_never_stepped_stays_so(tmp_path: Path) -> None:
    cube, model, optimizer = make(ALONE, seed=1)
    checkpoint.save(tmp_path, 0, model, optimizer, cube, {})
    assert not optimizer.state
    cube, model, optimizer = make(ALONE, seed=2)
    step(cube, model, optimizer)
    checkpoint.load(tmp_path / "step-00000000", model, optimizer, cube)
    assert not optimizer.state
    step(cube, model, optimizer)
    assert optimizer.state[model.linear.weight]["step"].item() == 1


def test_a_parameter_without_gradient_has_no_moments_afterwards_either(tmp_path: Path) -> None:
    cube, model, optimizer = make(ALONE, seed=1)
    model.linear.weight.requires_grad_(False)
    step(cube, model, optimizer)
    model.linear.weight.requires_grad_(True)
    checkpoint.save(tmp_path, 1, model, optimizer, cube, {})
    cube, model, optimizer = make(ALONE, seed=2)
    checkpoint.load(tmp_path / "step-00000001", model, optimizer, cube)
    assert model.linear.weight not in optimizer.state
    assert model.tokens.weight in optimizer.state


def test_what_does_not_fit_is_told_and_changes_nothing(tmp_path: Path) -> None:
    written(ALONE, tmp_path)
    path = tmp_path / "step-00000001"
    cube, model, optimizer = make(ALONE, seed=2, hidden=32)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"model\.\S+ of shape \(67, 16\), and the shape \(67, 32\) is needed"):
        checkpoint.load(path, model, optimizer, cube)
    assert same([p.detach() for p in model.parameters()], before)

    cube, model, optimizer = make(ALONE, seed=2, positions=21)
    with pytest.raises(ValueError, match=r"of shape \(8, 16\), and the shape \(21, 16\)"):
        checkpoint.load(path, model, optimizer, cube)
    with pytest.raises(ValueError, match=r"grows names 'elsewhere'"):
        checkpoint.load(path, model, optimizer, cube, grows=["elsewhere"])
    cube, model, optimizer = make(ALONE, seed=2, positions=5)
    with pytest.raises(ValueError, match=r"of shape \(8, 16\), and the shape \(5, 16\)"):
        checkpoint.load(path, model, optimizer, cube, grows=[TABLE])

    cube, model, _ = make(ALONE, seed=2)
    with pytest.raises(ValueError, match=r"written.*AdamW.*SGD"):
        checkpoint.load(path, model, torch.optim.SGD(model.parameters(), 0.1), cube)
    amsgrad = torch.optim.AdamW(model.parameters(), amsgrad=True)
    with pytest.raises(ValueError, match=r"has no optimizer\.\S+\.max_exp_avg_sq \(and \b3\b more\)"):
        checkpoint.load(path, model, amsgrad, cube)
    with pytest.raises(ValueError, match=r"has model\.linear\.bias \(and \b2\b more\)"):
        checkpoint.load(path, torch.nn.ModuleDict({"tokens": model.tokens, "positions": model.positions}), None, cube)


def test_a_tensor_of_two_names_is_stored_once(tmp_path: Path) -> None:
    cube, model, optimizer = make(ALONE, seed=1)
    model.again = model.tokens
    step(cube, model, optimizer)
    checkpoint.save(tmp_path, 1, model, optimizer, cube, {})
    assert not [name for name in checkpoint.read_contents(tmp_path / "step-00000001").tensors if "again" in name]
    wanted = state(model, optimizer)
    step(cube, model, optimizer)
    checkpoint.load(tmp_path / "step-00000001", model, optimizer, cube)
    assert same(state(model, optimizer), wanted)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pytorchs_own_reader_takes_the_files(tmp_path: Path) -> None:
    """Whoever leaves tensor3d takes the weights along."""
    hf_storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
    wanted = run_ranks(4, written, (2, 2, 1, 1), tmp_path)[0]
    state_dict = {"model.tokens.weight": torch.zeros(VOCAB_SHAPE)}
    reader = hf_storage.HuggingFaceStorageReader(str(tmp_path / "step-00000001"))
    torch.distributed.checkpoint.load(state_dict, storage_reader=reader)
    assert torch.equal(state_dict["model.tokens.weight"], wanted[0])


VOCAB_SHAPE = (67, 16)


class Averaged(torch.optim.SGD):
    """One whose own step calls a step that has hooks too."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", ["AdamW", "ours", "Averaged"])
def test_a_load_tells_no_hook_of_a_step(kind: str, tmp_path: Path) -> None:
    """Whoever is called after each step (an average of the weights) would see weights that are not loaded yet."""

    def made(seed: int) -> tuple[Cube, Model, torch.optim.Optimizer]:
        cube, model, optimizer = make(ALONE, seed)
        if kind == "ours":
            optimizer = AdamW(model.parameters(), cube, lr=0.1)
        elif kind == "Averaged":
            torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], momentum=0.9).step()
            optimizer = Averaged(model.parameters(), lr=0.1, momentum=0.9)
        return cube, model, optimizer

    cube, model, optimizer = made(1)
    step(cube, model, optimizer)
    folder = checkpoint.save(tmp_path, 1, model, optimizer, cube, {})
    cube, fresh, later = made(2)
    calls: list[str] = []
    average = torch.optim.swa_utils.AveragedModel(fresh)
    later.register_step_pre_hook(lambda *step: calls.append("before"))
    later.register_step_post_hook(lambda *step: average.update_parameters(fresh))
    handles = [
        register_optimizer_step_pre_hook(lambda *step: calls.append("before any")),
        register_optimizer_step_post_hook(lambda *step: calls.append("after any")),
    ]
    own, taken = later.step, []
    later.step = lambda *step: (taken.append(1), own(*step))  # type: ignore[method-assign, assignment]
    checkpoint.load(folder, fresh, later, cube)
    assert (calls, taken, int(average.n_averaged)) == ([], [], 0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
    step(cube, fresh, later)  # afterwards all are called again
    assert set(calls) == {"before", "before any", "after any"}
    assert taken == [1]
    assert int(average.n_averaged) == len(calls) // 3, "of a step within a step too"
    for handle in handles:
        handle.remove()
