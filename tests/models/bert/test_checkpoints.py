"""A checkpoint of each family, with its optimiser, on another cube than the one that wrote it: to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.bert import BertForPreTraining, ElectraForPreTraining, ReplacedTokens
from tensor3d import Cube, checkpoint
from tensor3d.optim import AdamW
from tests.models.bert.electra_pairs import packs_of
from tests.models.toy import FAMILIES, Shape, lay, totals, toy_config
from tests.ranks import run_ranks
from tests.single_device_reference import full, ranks_of

WRITTEN: Shape = (1, 2, 2, 1)
# A BERT's goes through a chain of cubes in tests/slow.
KINDS = ("roberta", "mpnet", "modernbert", "deberta-v2", "replaced tokens")


def model_of(kind: str, cube: Cube) -> Any:
    if kind != "replaced tokens":
        return BertForPreTraining(toy_config(67, **{**FAMILIES[kind], "layers": 2}), cube)
    config = toy_config(67, **FAMILIES["electra"], layers=1)
    return ElectraForPreTraining(config, ReplacedTokens(generator_size=0.5), cube)


def state(shape: Shape, folder: Path, writes: bool) -> dict[str, list[Tensor]]:
    """Logical weights and moments of each, after a step and a save, or as they are read."""
    cube, found = Cube(*shape) if ranks_of(shape) > 1 else Cube.single(), {}
    packs = packs_of(67)
    for kind in KINDS:
        cube.manual_seed(1 if writes else 2)
        model = model_of(kind, cube)
        optimizer = AdamW(model.parameters(), cube, lr=0.1)
        if writes:
            model(lay(packs, cube), *totals(packs)).loss.backward()
            optimizer.step()
            checkpoint.save(folder / kind, 1, model, optimizer, cube, {})
        else:
            checkpoint.load(folder / kind / "step-00000001", model, optimizer, cube)
        moments = [optimizer.state[each]["exp_avg"] for each in model.parameters()]
        found[kind] = [full(each).clone() for each in (*model.parameters(), *moments)]
    return found


@pytest.mark.slow
def test_each_family_is_read_on_another_cube(tmp_path: Path) -> None:
    wanted = run_ranks(ranks_of(WRITTEN), state, WRITTEN, tmp_path, True)[0]
    got = state((1, 1, 1, 1), tmp_path, False)
    for kind in KINDS:
        assert len(got[kind]) == len(wanted[kind]) > 30
        for ours, theirs in zip(got[kind], wanted[kind], strict=True):
            assert torch.equal(ours, theirs), kind
