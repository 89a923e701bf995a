"""From documents of ids to shards of sequences."""

from __future__ import annotations

import re
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tensor3d.data.masking import masked_count
from tests.tools.corpus.sampled import (
    FIRST,
    all_bytes,
    content,
    made,
    options,
    training,
    unique_ids,
    write_ids,
    write_tokenizer,
)
from tools.corpus.__main__ import main
from tools.corpus.inspect.command import inspect
from tools.corpus.inspect.report import InspectOptions
from tools.corpus.pipeline import local_team
from tools.corpus.samples import step
from tools.corpus.samples.merge_shards import hint_at_random_pairs
from tools.corpus.samples.reader import open_samples
from tools.corpus.samples.step import samples

DOCUMENTS = unique_ids(120)
DOCUMENT_OF = {token: n for n, document in enumerate(DOCUMENTS) for sentence in document for token in sentence}


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ids(tmp_path_factory.mktemp("corpus") / "ids", DOCUMENTS)


def documents_in(sequences: list[tuple[list[int], list[int], int]]) -> set[int]:
    return {DOCUMENT_OF[token] for a, b, _ in sequences for token in a + b}


def test_pairs_are_of_one_document_or_of_two(ids: Path, tmp_path: Path) -> None:
    pairs = training(made(tmp_path / "samples", ids))
    assert len(pairs) > 120
    for a, b, label in pairs:
        assert 5 <= len(a) + len(b) + 3 <= 16
        for run in (a, b):
            assert run == list(range(run[0], run[0] + len(run)))  # ids ascend by one in a document
            assert len(documents_in([(run, [], 0)])) == 1
        if label == 0:
            assert DOCUMENT_OF[a[0]] == DOCUMENT_OF[b[0]]
            assert b[0] > a[-1]
        else:
            assert DOCUMENT_OF[a[0]] != DOCUMENT_OF[b[0]]
    assert 0.3 < np.mean([label for _, _, label in pairs]) < 0.9


def test_single_texts_go_through_each_document_once(ids: Path, tmp_path: Path) -> None:
    opened = made(tmp_path / "samples", ids, single_texts=True, held_out=0.0)
    assert opened.held_out is None
    texts = sorted(training(opened))
    assert all(b == [] and label == -100 and len(a) <= 14 for a, b, label in texts)
    # No sentence is longer than a text, so nothing is cut off.
    assert [token for a, _, _ in texts for token in a] == [t for d in DOCUMENTS for s in d for t in s]
    begins = {sentence[0] for document in DOCUMENTS for sentence in document}
    assert {a[0] for a, _, _ in texts} <= begins


def test_what_is_cut_into_several_texts_is_counted_and_shown(tmp_path: Path) -> None:
    """Texts of 8 ids: a document of 5, one of a sentence of 20, one of 12 in two sentences, twice over."""
    sizes = [[3, 2], [20], [6, 6]] * 2
    firsts = iter(range(FIRST, FIRST + 200))
    documents = [[[next(firsts) for _ in range(size)] for size in document] for document in sizes]
    ids = write_ids(tmp_path / "ids", documents)
    opened = made(
        tmp_path / "samples", ids, single_texts=True, short_probability=0.0, max_length=10, held_out=0.0, duplicates=2
    )
    assert (opened.counts["documents"], opened.counts["cut_documents"], opened.counts["cut_sentences"]) == (6, 4, 2)
    assert opened.counts["tokens"] - 2 * opened.counts["sequences"] == 2 * sum(map(sum, sizes))
    shown = inspect(InspectOptions(folder=tmp_path / "samples")).splitlines()
    assert any(line.split() == ["cut", "documents", "4"] for line in shown)
    assert "cut_documents" not in made(tmp_path / "pairs", ids).counts


def test_held_out_documents_are_never_trained_on(ids: Path, tmp_path: Path) -> None:
    opened = made(tmp_path / "samples", ids, duplicates=3)
    trained, held = documents_in(training(opened)), documents_in(content(opened.held_out))
    assert not trained & held
    assert trained | held == set(range(120))
    assert len(held) == opened.counts["held_out_documents"]
    assert 3 <= len(held) <= 25  # 12 are expected
    other = made(tmp_path / "other", ids, seed=1)
    assert documents_in(content(other.held_out)) != held


def test_one_document_at_least_is_held_out(ids: Path, tmp_path: Path) -> None:
    opened = made(tmp_path / "samples", ids, held_out=1e-9)
    assert opened.counts["held_out_documents"] == 1
    assert len(documents_in(content(opened.held_out))) == 1


@pytest.mark.parametrize("masking", ["static", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_the_same_bytes_whoever_makes_them(ids: Path, tmp_path: Path, masking: str) -> None:
    for workers in (1, 2):
        made(tmp_path / f"{workers}", ids, workers=workers, shards=3, masking=masking, duplicates=2)
    assert all_bytes(tmp_path / "1") == all_bytes(tmp_path / "2")


def test_what_failed_halfway_ends_in_the_same_bytes(ids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "whole", ids, shards=2)
    gather, calls = step.gather, []

    def fails(rules: object, unit: object, context: object) -> dict:
        calls.append(unit)
        if len(calls) == 2:
            raise OSError("No space left on device")
        return gather(rules, unit, context)  # type: ignore[arg-type]

    monkeypatch.setattr(step, "gather", fails)
    with pytest.raises(OSError, match="No space left"):
        made(tmp_path / "again", ids, shards=2)
    assert not (tmp_path / "again").exists()
    made(tmp_path / "again", ids, shards=2)
    assert len(calls) == 4  # the shard that was done is not done again
    assert all_bytes(tmp_path / "whole") == all_bytes(tmp_path / "again")


def test_the_same_bytes_wherever_the_corpus_lies(ids: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(ids, tmp_path / "another name")
    made(tmp_path / "here", ids)
    made(tmp_path / "there", moved)
    assert all_bytes(tmp_path / "here") == all_bytes(tmp_path / "there")


def test_shards_differ_by_one_sequence_at_most(ids: Path, tmp_path: Path) -> None:
    one = made(tmp_path / "one", ids)
    several = made(tmp_path / "several", ids, shards=7)
    sizes = [len(content(shard)) for shard in several.shards]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == several.counts["shards"]
    assert sorted(training(several)) == sorted(training(one))
    # Every shard has sequences from all over the corpus.
    assert all(np.ptp([DOCUMENT_OF[a[0]] for a, _, _ in content(shard)]) > 90 for shard in several.shards)


@pytest.mark.parametrize("single", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_duplicates_cut_elsewhere(ids: Path, tmp_path: Path, single: bool) -> None:
    once = training(made(tmp_path / "once", ids, single_texts=single, short_probability=0.0))
    thrice = made(tmp_path / "thrice", ids, single_texts=single, short_probability=0.0, duplicates=3)
    sequences = training(thrice)
    assert 2.5 < len(sequences) / len(once) < 3.7
    assert len({(*a, 0, *b) for a, b, _ in sequences}) > 1.5 * len(once)
    assert thrice.counts["corpora"][0]["passes"] == 3


def test_entropy_is_that_of_the_text_in_the_shards(ids: Path, tmp_path: Path) -> None:
    opened = made(tmp_path / "samples", ids, shards=2)
    tokens = [token for a, b, _ in training(opened) for token in a + b]
    shares = np.unique(tokens, return_counts=True)[1] / len(tokens)
    assert opened.counts["unigram_entropy"] == pytest.approx(-np.sum(shares * np.log(shares)))


def test_corpora_are_mixed_by_weight(tmp_path: Path) -> None:
    large = write_ids(tmp_path / "large", unique_ids(100))
    small = write_ids(tmp_path / "small", unique_ids(20, seed=1, first=2500))
    opened = made(tmp_path / "samples", f"{large}=0.7", f"{small}=0.3", shards=2)
    sequences = training(opened)
    of_small = sum(a[0] >= 2500 for a, _, _ in sequences)
    assert of_small == round(0.3 * len(sequences))
    about_large, about_small = opened.counts["corpora"]
    assert about_large["passes"] == 1
    assert about_small["passes"] == pytest.approx(2.1, abs=0.7)  # a fifth of the documents, times 3 / 7
    assert about_small["sequences"] == of_small
    assert about_small["share"] == pytest.approx(0.3, abs=0.002)
    # Without weights both are as large as they are.
    plain = made(tmp_path / "plain", large, small)
    assert sum(a[0] >= 2500 for a, _, _ in training(plain)) < 0.25 * len(training(plain))


def test_whole_words_are_not_split(tmp_path: Path) -> None:
    """Ids that divide by 3 go on a word, as in 7 | 8 9 | 10. Words of one id fill any gap."""
    ids = write_ids(tmp_path / "ids", DOCUMENTS, every_third_goes_on=True)
    opened = made(tmp_path / "samples", ids, masking="static", whole_words=True, max_length=32)
    assert opened.continuations is not None
    assert opened.continuations.nonzero()[0].tolist()[:3] == [6, 9, 12]
    for shard in opened.shards:
        assert shard is not None
        found = shard.segments(np.arange(len(shard)))
        tokens = found.tokens(opened.special)
        assert found.masks is not None
        masked = found.masks.apply(tokens.ids, found.lengths)
        for begin, length in zip(np.cumsum(found.lengths) - found.lengths, found.lengths, strict=True):
            rows = set(masked.rows[(masked.rows >= begin) & (masked.rows < begin + length)].tolist())
            assert len(rows) == masked_count(int(length))
            for one, two in pairwise(range(begin, begin + length)):
                if tokens.guessable[one] and tokens.guessable[two] and tokens.ids[two] % 3 == 0:
                    assert (one in rows) == (two in rows)


def of_sentences(*counts: int, size: int = 3) -> list[list[list[int]]]:
    """A document for each count of sentences, of so many ids each."""
    return [[[5 + (number + place) % 4000] * size for place in range(count)] for number, count in enumerate(counts)]


RANDOM = {
    "documents of one sentence": (of_sentences(*[1] * 40), {}, 1.0, True),
    "mostly of one sentence": (of_sentences(*[1, 1, 1, 6] * 25), {}, None, True),
    "two cuts of them": (of_sentences(*[1] * 40), {"duplicates": 2}, 1.0, True),
    "documents of two sentences": (of_sentences(*[2] * 80), {}, None, True),
    "long documents": (of_sentences(*[60] * 12), {"max_length": 64}, None, False),
    "too few to tell": (of_sentences(*[1] * 5), {"held_out": 0.0}, 1.0, False),
    "single texts": (of_sentences(*[1] * 40), {"single_texts": True}, None, False),
}


@pytest.mark.parametrize("name", RANDOM)
def test_kind_11_random_pairs_are_counted_and_more_than_chance_explains_gives_a_hint(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    documents, changes, share, hinted = RANDOM[name]
    ids = write_ids(tmp_path / "ids", documents)
    wanted = {"max_length": 16, "run_tokens": 400, "held_out": 0.1, **changes}
    words = [word for key, value in wanted.items() if not isinstance(value, bool) for word in (f"--{key}", f"{value}")]
    words += [f"--{key}" for key, value in wanted.items() if isinstance(value, bool)]
    words = [word.replace("_", "-") for word in words]
    command = ["samples", "--corpora", str(ids), "--output", str(tmp_path / "samples"), *words, "--workers", "1"]
    for _ in range(2):  # who asks again is told again
        assert main(command) == 0
        captured = capsys.readouterr()
        assert ("hint: " in captured.err) == hinted
        if hinted:
            assert "samples --single-texts" in captured.err
    opened = open_samples(tmp_path / "samples")
    labels = [label for _, _, label in training(opened)]
    assert main(["inspect", str(tmp_path / "samples")]) == 0
    inspected = capsys.readouterr().out
    assert ("hint: " in inspected) == hinted
    if name == "single texts":
        assert "random" not in {word for line in captured.out.splitlines() for word in line.split()}
        assert "random_pairs" not in opened.counts
        return
    found = sum(labels) / len(labels)
    assert share is None or found == share
    assert opened.counts["random_pairs"] == sum(labels)
    for text in (captured.out, inspected):
        assert re.search(rf"random pairs +{sum(labels):,}\b", text)
        assert re.search(rf"share of random pairs +{found:.4f}".rstrip("0").rstrip("."), text)
    assert inspected.count("share of random pairs") == 1


def test_kind_11_the_rule_of_the_hint() -> None:
    for random, pairs in ((0, 0), (5, 5), (60, 100), (6_000, 10_000), (61, 100)):
        assert hint_at_random_pairs(random, pairs) is None
    for random, pairs in ((7, 7), (63, 100), (6_100, 10_000), (700_000, 1_000_000)):
        hint = hint_at_random_pairs(random, pairs)
        assert hint is not None
        assert f"{random / pairs:.1%} of the pairs" in hint


def test_a_pair_of_files_needs_the_tokenizer_beside_it(ids: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"say.*--tokenizer"):
        made(tmp_path / "samples", ids / "documents")
    opened = made(tmp_path / "samples", ids / "documents", tokenizer=ids / "tokenizer")
    folder = made(tmp_path / "folder", ids)
    assert training(opened) == training(folder)


def test_weights_that_are_a_mistake_are_refused(ids: Path, tmp_path: Path) -> None:
    other = write_ids(tmp_path / "other", unique_ids(10, seed=2))
    with pytest.raises(ValueError, match=r"other/documents.*\d+.*2000.0"):
        made(tmp_path / "samples", f"{ids}=1", f"{other}=2000")


def test_corpora_of_two_tokenizers_are_refused(ids: Path, tmp_path: Path) -> None:
    other = write_ids(tmp_path / "other", DOCUMENTS, pieces=5000)
    with pytest.raises(ValueError, match=r"other/tokenizer and .*/ids/tokenizer hold different tokenizers"):
        made(tmp_path / "samples", ids, other)


def test_an_id_outside_the_vocabulary_is_named_or_left_out(ids: Path, tmp_path: Path) -> None:
    small = write_tokenizer(tmp_path / "small", 1000)
    outside = {n for n, document in enumerate(DOCUMENTS) if document[-1][-1] >= 1005}
    # Ids begin at 5 and take two bytes: id 1005 is number 1000.
    with pytest.raises(ValueError, match=r"documents.bin, byte \b2000\b: the id \b1005\b.*1005"):
        made(tmp_path / "samples", ids / "documents", tokenizer=small)
    opened = made(tmp_path / "left", ids / "documents", tokenizer=small, skip_bad=True, duplicates=2)
    assert documents_in(training(opened) + content(opened.held_out)) == set(range(120)) - outside
    assert len((tmp_path / "left" / "left-out.jsonl").read_text().splitlines()) == len(outside) == opened.left_out
    # Those left out are not counted.
    held = documents_in(content(opened.held_out))
    assert opened.counts["held_out_documents"] == len(held)
    assert opened.counts["documents"] == 120 - len(outside) - len(held)
    assert opened.counts["corpora"][0]["documents"] == opened.counts["documents"]


def test_an_index_of_other_data_is_refused(tmp_path: Path) -> None:
    ids = write_ids(tmp_path / "ids", DOCUMENTS)
    data = ids / "documents.bin"
    data.write_bytes(data.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"documents.bin has \d+ bytes where step.json speaks of"):
        made(tmp_path / "samples", ids)
    with pytest.raises(ValueError, match=r"documents.bin.*\d+ bytes.*index"):
        made(tmp_path / "samples", ids / "documents", tokenizer=ids / "tokenizer")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shards": 0}, "shards must be at least 1. Got 0"),
        ({"shards": 10_000}, r"\d+ sequences cannot fill 10000 shards"),
        ({"held_out": 1.0}, r"held_out.*\b0.*\b1.*\b1.0"),
        ({"max_length": 4}, r"max_length.*\b5.*\b4"),
        ({"capacity": 12}, r"max_length=16.*\b12"),
        ({"short_probability": 1.5}, r"short_probability.*\b0.*\b1.*\b1.5"),
        ({"held_out": 0.9999999}, "has no document left for training"),
        ({"masked_share": 0.9}, r"masked share.*at most 0.8. Got 0.9"),
        ({"masked_spans": True}, r"masked_spans=True are of static masks, and masking is dynamic"),
    ],
)
def test_options_out_of_range_are_named(ids: Path, tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(tmp_path / "samples", ids, **changes)


@pytest.mark.parametrize(
    ("corpora", "message"),
    [
        (["{}=0.5", "{}"], "give a weight to each corpus or to none. Got 1 weights for 2"),
        (["{}=heavy"], "weight.*=0.7.*'heavy'"),
        (["{}=-1"], "Got '-1'"),
        (["{}/nothing"], "nothing is neither a folder nor the prefix of a .bin/.idx pair"),
        (["{}/tokenizer"], "is no output of `python -m tools.corpus tokenize`"),
        ([], "samples need at least one corpus"),
        (["{}", "{}/../ids"], "is named twice; to draw it several times use --duplicates or a weight"),
    ],
)
def test_corpora_that_cannot_be_are_named(ids: Path, tmp_path: Path, corpora: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(tmp_path / "samples", *(text.format(ids) for text in corpora))


def test_done_once_is_done(ids: Path, tmp_path: Path) -> None:
    made(tmp_path / "samples", ids)
    before = (tmp_path / "samples" / "step.json").stat().st_mtime_ns
    again = samples(options(tmp_path / "samples", ids), local_team(1))
    assert (tmp_path / "samples" / "step.json").stat().st_mtime_ns == before
    assert again.counts == open_samples(tmp_path / "samples").counts
    with pytest.raises(ValueError, match="seed: 0 there, 3 now"):
        made(tmp_path / "samples", ids, seed=3)
