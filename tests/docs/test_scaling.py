"""docs/scaling.md: collectives by box are those of the closed forms."""

from __future__ import annotations

import re
from pathlib import Path

from models.bert.cost_model.comm_volume import step_traffic
from tensor3d import CubeShape
from tensor3d.cost_model.comm_volume import CommModel, transformer_layer
from tools.bench.vs_pytorch.command import RivalsCommand

PAGE = Path(__file__).parents[2] / "docs/scaling.md"
_ROW = re.compile(r"\| (\dx\dx\d)(\+kept)? \| (\d) \| (\d+) \| (\d+) \| (\d+) \|")


def test_collectives_of_each_box_are_those_of_the_closed_forms() -> None:
    work = RivalsCommand().work
    rows = _ROW.findall(PAGE.read_text())
    assert len(rows) == 7
    for box, kept, copies, *told in rows:
        shape = CubeShape.parse(box, int(copies))
        wire, planes = CommModel(shape=shape, unit="calls"), shape.planes
        layer = transformer_layer(wire, work.tokens // planes, 256, 1024, kept=bool(kept)).total()
        slots = work.sequences * work.masked // planes, work.sequences // planes
        asked = {"reshard_after_forward": not kept, "reduce_loss": False}
        step = step_traffic(work.config, wire, work.tokens // planes, *slots, **asked).total()
        assert [int(each) for each in told] == [layer, step - 4 * layer, step], box
