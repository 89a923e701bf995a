"""Measurements in turns: whatever else slows the machine down meets all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tqdm import tqdm

R = TypeVar("R")


def in_turns(names: Sequence[str], rounds: int, turn: Callable[[int, int], R], *, shown: bool = True) -> list[list[R]]:
    """What `turn(i, number)` returned, for each i by round.

    Every second round runs backwards, so that none always follows the same one.

    Args:
        names: of what is measured, for the progress bar; they may repeat.
        turn: measures number i once, in that round.
    """
    results: list[list[R]] = [[] for _ in names]
    with tqdm(total=rounds * len(names), unit="turn", disable=None if shown else True) as bar:
        for number in range(rounds):
            for i in range(len(names)) if number % 2 == 0 else reversed(range(len(names))):
                bar.set_postfix_str(names[i])
                results[i].append(turn(i, number))
                bar.update()
    return results
