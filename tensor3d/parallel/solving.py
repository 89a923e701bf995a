"""From what was read to faces: which face each layer reads, and which linears need a `turn`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from tensor3d.faces import Face
from tensor3d.parallel.facts import Call, Reading
from tensor3d.parallel.parity import Faces

Key = int  # what fixes the face of a layer: its weight, which tied layers share


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The faces of a reading, and of its layers."""

    faces: Faces
    reads: Mapping[Key, int]
    turned: Set[Key]
    clashes: tuple[str, ...]

    def is_met(self, number: int, others: Iterable[int]) -> bool:
        """Whether any of `others` has to do with a number."""
        return any(self.faces.joined(number, each) for each in others)

    def face_read(self, key: Key) -> Face:
        return self.faces.face(self.reads[key])


def solve(reading: Reading, keys: Mapping[str, Key], projections: Set[str], heads: Set[str]) -> Solution:
    """The solution that turns the fewest elements that a greedy search finds.

    A linear that reads what lies on the other face is turned. The first attempt turns each linear that contradicts
    those before it; then a linear is turned beforehand where that saves more than it costs, as one early turn may spare
    several late ones.
    """
    chosen: tuple[Key, ...] = ()
    best, price = _attempt(reading, keys, projections, heads, frozenset())
    improved = bool(best.turned)
    while improved:
        improved = False
        for key in {keys[call.layer]: None for call in reading.calls if call.role == "linear"}:
            for beforehand in ((*chosen, key), (*chosen[:-1], key)):  # beside the last one, or in its place
                other, paid = _attempt(reading, keys, projections, heads, frozenset(beforehand))
                if paid < price:
                    best, price, chosen, improved = other, paid, beforehand, True
    return best


def _attempt(
    reading: Reading, keys: Mapping[str, Key], projections: Set[str], heads: Set[str], turned: Set[Key]
) -> tuple[Solution, tuple[int, int]]:
    """The solution that turns at least `turned`, and its price: what cannot be solved, then elements turned."""
    layers = dict.fromkeys(keys[call.layer] for call in reading.calls if call.layer in keys)
    reads = {key: reading.numbers + 1 + place for place, key in enumerate(layers)}
    faces = Faces(reading.numbers + len(reads))
    clashes = _firm(reading, keys, projections, heads, faces, reads)
    calls: dict[Key, list[Call]] = {}
    for call in reading.calls:
        if call.role == "linear" and call.layer not in heads:
            calls.setdefault(keys[call.layer], []).append(call)
    all_turned = set(turned) & calls.keys()
    for key, uses in calls.items():
        if key not in all_turned and not faces.join(uses[0].reads, reads[key]):
            all_turned.add(key)
        for call in uses:
            if not faces.join(call.reads, reads[key], differ=key in all_turned):
                clashes.append(_clash(call.layer, "the two places that use its weight"))
    solution = Solution(faces=faces, reads=reads, turned=frozenset(all_turned), clashes=tuple(dict.fromkeys(clashes)))
    return solution, (len(clashes), sum(call.numel for key in all_turned for call in calls[key]))


def _firm(
    reading: Reading,
    keys: Mapping[str, Key],
    projections: Set[str],
    heads: Set[str],
    faces: Faces,
    reads: Mapping[Key, int],
) -> list[str]:
    """Takes in what holds in any case; what contradicts is returned in words."""
    clashes = []
    for call in reading.calls:  # what a product, an embedding and attention are
        if call.layer in projections:
            faces.join(0, reads[keys[call.layer]])
        if call.role == "linear" and call.layer not in heads:
            faces.join(reads[keys[call.layer]], call.returns, differ=True)
        if call.role == "embedding":
            faces.join(0, call.returns)
    for number, face, where in reading.pinned:
        if not faces.join(0, number, differ=face == "y"):
            clashes.append(_clash(where, f"attention, which takes face {face}, and what it is given"))
    for a, b, where in reading.equal:
        if not faces.join(a, b):
            clashes.append(_clash(where, "the operands"))
    for call in reading.calls:
        if call.role == "attention" and not faces.join(0, call.reads):
            clashes.append(_clash(call.layer, "attention, which reads face z, and what it is given"))
        if (call.role == "norm" or call.layer in heads) and not faces.join(reads[keys[call.layer]], call.reads):
            clashes.append(_clash(call.layer, "two places that call it"))
        if call.layer in heads:
            faces.join(call.reads, call.returns)
    return clashes


def _clash(where: str, what: str) -> str:
    return (
        f"{where}: {what} lie on different faces, and no linear between them can be turned. Call `tensor3d.turn` "
        "there, in code of your own (kinds.replace), or give each face a layer of its own"
    )
