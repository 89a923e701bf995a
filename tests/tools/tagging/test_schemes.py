"""Entities, schemes and metrics against the rule of CoNLL's scorer, written down once more, and against seqeval."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tools.tagging.schemes import (
    SCHEMES,
    TAG_METRICS,
    Entity,
    Scheme,
    detect_scheme,
    entities,
    repaired,
    spelled_otherwise,
    tag_metrics,
    tags_of,
)

SPELLED: dict[Scheme, str] = {
    "iob1": "I-P I-P B-P I-P I-L O",
    "iob2": "B-P I-P B-P I-P B-L O",
    "iobes": "B-P E-P B-P E-P S-L O",
    "plain": "P P P P L O",
}
PREFIXES = {"iob1": "BI", "iob2": "BI", "iobes": "BIES"}


# conlleval.pl's endOfChunk and startOfChunk, whose tables seqeval documents, condition by condition.


def ends(before: str, tag: str, before_type: str, own_type: str) -> bool:
    pairs = ("BB", "BS", "BO", "IB", "IS", "IO")
    return before in "ES" or before + tag in pairs or (before != "O" and before_type != own_type)


def starts(before: str, tag: str, before_type: str, own_type: str) -> bool:
    pairs = ("EE", "EI", "SE", "SI", "OE", "OI")
    return tag in "BS" or before + tag in pairs or (tag != "O" and before_type != own_type)


def by_the_table(tags: Sequence[str]) -> list[Entity]:
    found, begin, before, before_type = [], 0, "O", ""
    for place, whole in enumerate([*tags, "O"]):
        tag, _, own_type = whole.partition("-")
        if ends(before, tag, before_type, own_type) and before != "O":
            found.append(Entity(before_type, begin, place))
        if starts(before, tag, before_type, own_type):
            begin = place
        before, before_type = tag, own_type
    return found


def drawn(count: int, scheme: Scheme, seed: int) -> list[list[str]]:
    """Tags by chance, of which few sentences keep to the scheme."""
    draw = random.Random(f"{seed} {scheme}")
    names = [
        "O",
        "O",
        *(f"{prefix}-{label}" for prefix in PREFIXES.get(scheme, "I") for label in ("PER", "LOC", "X-Y")),
    ]
    return [draw.choices(names, k=draw.randint(1, 9)) for _ in range(count)]


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme != "plain"])
def test_any_tags_spell_what_the_table_says(scheme: Scheme) -> None:
    broken = 0
    for tags in drawn(1000, scheme, 1):
        found = entities(tags, scheme)
        assert found == by_the_table(tags), tags
        right = repaired(tags, scheme)
        assert entities(right, scheme) == found, "a repair changes no entity"
        assert repaired(right, scheme) == right
        broken += right != tags
    assert 300 < broken < 1000


def test_plain_tags_are_runs() -> None:
    for tags in drawn(1000, "plain", 2):
        bare = [tag.removeprefix("I-") for tag in tags]
        assert entities(bare, "plain") == by_the_table(tags)
        assert repaired(bare, "plain") == bare


def metrics_by_the_table(said: list[list[str]], tags: list[list[str]]) -> list[float]:
    """In the order of `TAG_METRICS`, with sets of all entities."""
    mine, theirs = ({(i, *e) for i, some in enumerate(each) for e in by_the_table(some)} for each in (said, tags))

    def scores(a: set[tuple[int, str, int, int]], b: set[tuple[int, str, int, int]]) -> tuple[float, float, float]:
        right = len(a & b)
        precision, recall = right / len(a) if a else 0.0, right / len(b) if b else 0.0
        return precision, recall, 2 * precision * recall / (precision + recall) if right else 0.0

    labels = {label for _, label, _, _ in mine | theirs}
    each = [scores({e for e in mine if e[1] == label}, {e for e in theirs if e[1] == label}) for label in labels]
    macro = [sum(column) / len(each) for column in zip(*each, strict=True)]
    precision, recall, f1 = scores(mine, theirs)
    words = [pair for some in zip(said, tags, strict=True) for pair in zip(*some, strict=True)]
    return [f1, precision, recall, macro[2], macro[0], macro[1], sum(a == b for a, b in words) / len(words)]


def pairs_of(scheme: Scheme) -> tuple[list[list[str]], list[list[str]]]:
    """Tags, and others that are like them."""
    draw, tags = random.Random(3), drawn(1000, scheme, 4)
    others = [tag for some in drawn(50, scheme, 5) for tag in some]
    return [[tag if draw.random() < 0.8 else draw.choice(others) for tag in some] for some in tags], tags


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme != "plain"])
def test_metrics(scheme: Scheme) -> None:
    said, tags = pairs_of(scheme)
    found, counts = tag_metrics(said, tags, scheme)
    assert list(found) == list(TAG_METRICS)
    assert list(found.values()) == pytest.approx(metrics_by_the_table(said, tags), abs=1e-12)
    assert list(counts) == ["LOC", "PER", "X-Y"]
    assert 0.3 < found["f1"] < 0.9


BY_SEQEVAL: dict[Scheme, tuple[float, ...]] = {
    "iob1": (
        *(0.8084914182475158, 0.8106884057971014, 0.8063063063063063),
        *(0.8084730711811731, 0.8107831648055086, 0.8062440437424203),
        0.8364410214835833,
    ),
    "iob2": (
        *(0.809468147282291, 0.806874453830469, 0.8120785693345061),
        *(0.8094951665192617, 0.8068870605311044, 0.8121503936373085),
        0.8352216259193004,
    ),
    "iobes": (
        *(0.8313103789943026, 0.827620221948212, 0.8350335904453844),
        *(0.8311627855071005, 0.82747250541175, 0.8348984227994442),
        0.8163960713569853,
    ),
}
"""What seqeval 1.2.2 says of `pairs_of`, in the order of `TAG_METRICS`: it is not installed with the other packages,
being an archive of sources only."""


@pytest.mark.parametrize("scheme", BY_SEQEVAL)
def test_seqeval_says_the_same(scheme: Scheme) -> None:
    found, _ = tag_metrics(*pairs_of(scheme), scheme)
    assert list(found.values()) == pytest.approx(BY_SEQEVAL[scheme], abs=1e-12)


def test_metrics_of_nothing_are_zero() -> None:
    found, counts = tag_metrics([["O", "O"]], [["O", "O"]], "iob2")
    assert counts == {}
    assert (found["f1"], found["macro_f1"], found["accuracy"]) == (0.0, 0.0, 1.0)
    assert tag_metrics([["B-X"]], [["O"]], "iob2")[0]["f1"] == 0.0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_scheme_spells_and_is_known_again(scheme: Scheme) -> None:
    tags = SPELLED[scheme].split()
    whole = [Entity("P", 0, 2), Entity("P", 2, 4), Entity("L", 4, 5)]
    found = [Entity("P", 0, 4), Entity("L", 4, 5)] if scheme == "plain" else whole
    assert entities(tags, scheme) == found
    assert tags_of(found, len(tags), scheme) == tags == repaired(tags, scheme)
    assert detect_scheme([tags, ["O"]]) == scheme


def test_few_broken_sentences_change_no_scheme() -> None:
    assert detect_scheme([["B-P", "I-P"], ["B-L"], ["O", "I-P"]]) == "iob2"
    assert detect_scheme([["I-P", "I-P"], ["I-L"], ["O", "B-P"]]) == "iob1"
    assert detect_scheme([["O"]]) == "iob2"


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        (["O", "B", "I"], ("B", "B-NAME")),
        (["B", "M", "E", "S"], ("B", "B-NAME")),  # words of Chinese
        (["B_PER", "I_PER", "O"], ("B_PER", "B-PER")),
        (["PER-B", "PER-I", "O"], ("PER-B", "B-PER")),
        (["LOC_B", "LOC_I", "-"], ("LOC_B", "B-LOC")),
        (["b-per", "i-per", "o"], ("b-per", "B-per")),
        (["U-PER", "O"], ("U-PER", "S-PER")),
        (["B:PER", "I:PER", "O"], ("B:PER", "B-PER")),
        (["B-PER", "I-PER", "O"], None),
        (["NOUN", "VERB", "O", "B", "NN-B"], None),
        (["B", "O"], None),
    ],
)
def test_entities_in_another_spelling_are_seen(tags: list[str], found: tuple[str, str] | None) -> None:
    assert spelled_otherwise(tags) == found
