"""The special ids."""

from __future__ import annotations

import pytest

from tensor3d.data import SpecialTokens


def test_ordinary_ids_are_all_others() -> None:
    assert SpecialTokens(vocab_size=8, pad=0, cls=6, sep=3, mask=7).ordinary.tolist() == [1, 2, 4, 5]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"pad": 9}, r"pad.*vocabulary's.*\b9.*\b9"),
        ({"mask": -1}, r"mask.*vocabulary's.*\b9.*-1"),
        ({"cls": 3}, "need different ids"),
        ({"vocab_size": 4, "mask": 1}, "a vocabulary of 4 has no id left for text; it needs at least 5"),
    ],
)
def test_impossible_ids_are_named(ids: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpecialTokens(**{"vocab_size": 9, "pad": 0, "cls": 2, "sep": 3, "mask": 4, **ids})
