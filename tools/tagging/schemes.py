"""Tags of words, the entities that they spell, and how well these are found.

words   Ada  Byron  met  Mary  Shelley  London
iob1    I-P  I-P    O    I-P   I-P      I-L     B- only where an entity follows another one of its own label
iob2    B-P  I-P    O    B-P   I-P      B-L     B- begins every entity
iobes   B-P  E-P    O    B-P   E-P      S-L     the last word has E-, a single one S-
plain   P    P      O    P     P        L       labels alone: neighbours of one label are one entity
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, NamedTuple, get_args

Scheme = Literal["iob1", "iob2", "iobes", "plain"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
OUTSIDE = "O"
_PREFIXES = ("B-", "I-", "E-", "S-")


class Entity(NamedTuple):
    """Words of a sentence that are one thing."""

    label: str
    first: int
    stop: int
    """The word after the last."""


def has_prefix(tag: str) -> bool:
    return tag.startswith(_PREFIXES) and len(tag) > 2


def entities(tags: Sequence[str], scheme: Scheme) -> list[Entity]:
    """What tags spell, by the rule of CoNLL's scorer, which seqeval follows: tags that break their scheme count too.

    An entity begins at B- and S-, where the label changes, and behind O, E- and S-; it ends before the next one and
    before O. A tag without a prefix is O, but where the scheme is plain.
    """
    found: list[Entity] = []
    parts = {tag: _parts(tag, scheme) for tag in {*tags, OUTSIDE}}
    before, label, first = OUTSIDE, "", 0
    for place, tag in enumerate([*tags, OUTSIDE]):
        now, own = parts[tag]
        begins = now != OUTSIDE and (now in "BS" or before in "OES" or own != label)
        if before != OUTSIDE and (begins or now == OUTSIDE):
            found.append(Entity(label, first, place))
        if begins:
            first = place
        before, label = now, own
    return found


def _parts(tag: str, scheme: Scheme) -> tuple[str, str]:
    """Its prefix and its label."""
    if scheme == "plain":
        return ("I", tag) if tag != OUTSIDE else (OUTSIDE, "")
    return (tag[0], tag[2:]) if has_prefix(tag) else (OUTSIDE, "")


def tags_of(found: Iterable[Entity], words: int, scheme: Scheme) -> list[str]:
    """The tags of entities, which stand in order and do not overlap."""
    tags = [OUTSIDE] * words
    last = Entity("", 0, -1)
    for entity in found:
        label, first, stop = entity
        inside, alone = ("", "") if scheme == "plain" else ("I-", "I-")
        if scheme in ("iob2", "iobes") or (scheme == "iob1" and (last.label, last.stop) == (label, first)):
            alone = "B-"
        tags[first:stop] = [alone + label, *[inside + label] * (stop - first - 1)]
        if scheme == "iobes":
            tags[stop - 1] = ("E-" if stop - first > 1 else "S-") + label
        last = entity
    return tags


def repaired(tags: Sequence[str], scheme: Scheme) -> list[str]:
    """The same entities as the scheme spells them: the same tags where they keep to it."""
    return tags_of(entities(tags, scheme), len(tags), scheme)


def going_on(tag: str, scheme: Scheme, known: Collection[str]) -> str:
    """The tag of a word that goes on what the word before, with this tag, may have begun.

    Args:
        known: the tags that there are; O where none of them goes on.
    """
    prefix, label = _parts(tag, scheme)
    if scheme == "plain" or prefix not in ("B", "I"):
        return tag if scheme == "plain" else OUTSIDE
    return next((name for name in (f"I-{label}", f"E-{label}") if name in known), OUTSIDE)


def ending(tag: str, scheme: Scheme, known: Collection[str]) -> str:
    """The tag of the last word of several of an entity, in place of one that goes on it.

    Args:
        known: the tags that there are; of others none is made.
    """
    prefix, label = _parts(tag, scheme)
    last = f"E-{label}"
    return last if scheme == "iobes" and prefix == "I" and last in known else tag


def detect_scheme(sentences: Sequence[Sequence[str]]) -> Scheme:
    """The scheme that most sentences keep to. Of tags without prefixes "plain"; of O alone "iob2"."""
    seen = {tag for tags in sentences for tag in tags} - {OUTSIDE}
    begin = {tag[0] for tag in seen if has_prefix(tag)}
    if seen and not begin:
        return "plain"
    if begin & {"E", "S"}:
        return "iobes"
    schemes: tuple[Scheme, ...] = ("iob2", "iob1")  # the first of equals
    return min(schemes, key=lambda scheme: sum(repaired(tags, scheme) != list(tags) for tags in sentences))


_OTHERWISE = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (r"(?P<mark>[BIESLUM])[-_:./](?P<label>.+)", r"(?P<label>.+)[-_:./](?P<mark>[BIESLUM])")
)


_OWN_MARKS = {"U": "S", "L": "E", "M": "I"}


def spelled_otherwise(tags: Iterable[str]) -> tuple[str, str] | None:
    """Tags that look like those of entities in a spelling that is not read, as labels alone they would be counted
    wrongly: without a label (B and I), B_PER, PER-B, b-per, U-PER. The tag, and how it is written here; None where
    there is none."""
    seen = sorted(set(tags) - {OUTSIDE})
    if any(map(has_prefix, seen)):
        return None
    if len(seen) > 1 and "B" in seen and all(len(tag) == 1 and tag in "BIESLUM" for tag in seen):
        return "B", "B-NAME"
    for pattern in _OTHERWISE:
        found = [match for match in map(pattern.fullmatch, seen) if match is not None]
        marks: dict[str, set[str]] = {}
        for match in found:
            marks.setdefault(match["label"], set()).add(match["mark"].upper())
        of_all = len(found) == len(seen) and all(each & {"U", "L", "E"} for each in marks.values())
        for match in found:
            if of_all or marks[match["label"]] >= {"B", "I"}:
                mark = match["mark"].upper()
                return match[0], f"{_OWN_MARKS.get(mark, mark)}-{match['label']}"
    return None


class Counts(NamedTuple):
    """Of entities."""

    right: int
    found: int
    there: int

    def scores(self) -> tuple[float, float, float]:
        """Precision, recall and F1; 0 where one is not defined."""
        right, found, there = self
        return (right / found if found else 0.0, right / there if there else 0.0, 2 * right / max(1, found + there))


def count_entities(
    predicted: Sequence[Sequence[str]], tags: Sequence[Sequence[str]], scheme: Scheme
) -> dict[str, Counts]:
    """By label, in order: those labels that entities have there or in the predictions. An entity is right where label,
    first and last word are."""
    right, found, there = Counter[str](), Counter[str](), Counter[str]()
    for said, known in zip(predicted, tags, strict=True):
        mine, theirs = set(entities(said, scheme)), set(entities(known, scheme))
        for counter, some in ((right, mine & theirs), (found, mine), (there, theirs)):
            counter.update(entity.label for entity in some)
    return {label: Counts(right[label], found[label], there[label]) for label in sorted(found | there)}


TAG_METRICS = ("f1", "precision", "recall", "macro_f1", "macro_precision", "macro_recall", "accuracy")
"""By which a model can be chosen."""


def tag_metrics(
    predicted: Sequence[Sequence[str]], tags: Sequence[Sequence[str]], scheme: Scheme
) -> tuple[dict[str, float], dict[str, Counts]]:
    """As seqeval has them: of all entities together, the means over the labels, and the share of words with the right
    tag. And the counts of each label."""
    counts = count_entities(predicted, tags, scheme)
    together = Counts(*(sum(numbers) for numbers in zip(*counts.values(), strict=True))) if counts else Counts(0, 0, 0)
    by_label = [each.scores() for each in counts.values()] or [(0.0, 0.0, 0.0)]
    precision, recall, f1 = together.scores()
    macro = [sum(scores) / len(by_label) for scores in zip(*by_label, strict=True)]
    pairs = [pair for some in zip(predicted, tags, strict=True) for pair in zip(*some, strict=True)]
    accuracy = sum(one == other for one, other in pairs) / len(pairs)
    values = (f1, precision, recall, macro[2], macro[0], macro[1], accuracy)
    return dict(zip(TAG_METRICS, values, strict=True)), counts
