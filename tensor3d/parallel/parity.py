"""Which of a model's tensors lie on the same face and which on the other: a union-find with parities."""

from __future__ import annotations

from tensor3d.faces import Face


class Faces:
    """Unknown faces, numbered, and what is known of each pair: the same face, or the other one.

    Number 0 stands for face z itself. `join` takes in one fact after another and refuses the first that contradicts
    those before it.
    """

    def __init__(self, count: int) -> None:
        self._parent = list(range(count + 1))
        self._odd = [False] * (count + 1)  # against the parent

    def join(self, a: int, b: int, *, differ: bool = False) -> bool:
        """Takes in that a and b lie on one face, or that they differ. False, and nothing changes, if they cannot."""
        (root_a, odd_a), (root_b, odd_b) = self._find(a), self._find(b)
        if root_a == root_b:
            return (odd_a != odd_b) == differ
        low, high = sorted((root_a, root_b))  # so that the first number of a group is its root
        self._parent[high] = low
        self._odd[high] = (odd_a != odd_b) != differ
        return True

    def joined(self, a: int, b: int) -> bool:
        """Whether it is known how a and b lie to each other."""
        return self._find(a)[0] == self._find(b)[0]

    def face(self, number: int) -> Face:
        """The face of a number. What nothing ties to face z starts on it: the first number of each group does."""
        return "y" if self._find(number)[1] else "z"

    def _find(self, number: int) -> tuple[int, bool]:
        """The root, and whether the number lies on the other face than it."""
        trail, odd = [], False
        while self._parent[number] != number:
            trail.append(number)
            number = self._parent[number]
        for step in reversed(trail):
            odd ^= self._odd[step]
            self._parent[step], self._odd[step] = number, odd
        return number, odd
