"""tools.bench: the bytes of a batch in the memory of a rank."""

from __future__ import annotations

from tensor3d import Cube
from tensor3d.data.loader import tensors_of
from tests.models.toy import lay, toy_packs
from tools.bench.harness.memory import _size


def test_all_tensors_of_a_batch_are_counted() -> None:
    for with_read_rows in (False, True):
        batch = lay(toy_packs(67, 4), Cube.single(), with_read_rows=with_read_rows)
        fresh = _size(batch)
        assert fresh == sum(tensor.nbytes for tensor in tensors_of(batch)), "with nothing worked out yet"
        _ = batch.sequences.grouping, batch.sequences.positions
        assert _size(batch) == fresh < sum(tensor.nbytes for tensor in tensors_of(batch))
