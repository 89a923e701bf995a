"""`inspect`: what it says of folders whose contents a reader can count."""

from __future__ import annotations

import dataclasses
import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from matplotlib.patches import Rectangle

from tensor3d.data import IndexedDataset, IndexedWriter
from tests.tools.runs import write_text
from tools.corpus.__main__ import main
from tools.corpus.inspect.command import inspect
from tools.corpus.inspect.folders import Drawn
from tools.corpus.inspect.histogram import Bin, Histogram, figure_of
from tools.corpus.inspect.report import InspectOptions
from tools.corpus.pipeline import Options, Stage, local_team
from tools.corpus.quick.prepare import prepare
from tools.corpus.samples.options import SamplesOptions
from tools.corpus.samples.step import samples
from tools.corpus.tokenizers import install_tokenizer

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "dog", "sat", "ran", "##s", "."]
THE, CAT, DOG, SAT, RAN, S, DOT = range(5, 12)
UNKNOWN, MASK = 1, 4
DOCUMENTS = [
    {"id": "7", "title": "Cats", "text": "The cat sat.\n\nThe cats ran."},
    {"id": "", "title": "", "text": "dog"},
    {"id": "9", "title": "", "text": "The dog sat.\nThe dog ran.\n\nThe end."},
]


def make(output: Path, step: str, counts: dict[str, Any], files: dict[str, bytes]) -> Path:
    """A folder as a step leaves it."""
    with Stage.open(Options(output=output), step, {}, local_team(1)) as begun:
        for name, content in files.items():
            (begun.folder / name).write_bytes(content)
        begun.finish(counts)
    return output


def make_documents(output: Path) -> Path:
    lines = [json.dumps(document).encode() + b"\n" for document in DOCUMENTS]
    files = {"documents-00000.jsonl": b"".join(lines[:2]), "documents-00001.jsonl": lines[2]}
    return make(output, "extract", {"documents": 3, "redirects": 4}, files)


def make_ids(output: Path, documents: list[list[list[int]]]) -> Path:
    """What `tokenize` writes; the vocabulary is a WordPiece one."""
    vocabulary = output.with_name("vocab.txt")
    vocabulary.write_text("".join(f"{piece}\n" for piece in VOCABULARY))
    with Stage.open(Options(output=output), "tokenize", {}, local_team(1)) as step:
        with IndexedWriter(step.folder / "documents", vocab_size=len(VOCABULARY)) as writer:
            for document in documents:
                writer.add_document(document)
        (step.folder / "tokenizer").mkdir()
        install_tokenizer("wordpiece", vocabulary, step.folder / "tokenizer", lowercase=True)
        step.finish({"documents": len(documents)})
    return output


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 documents of 4 sentences each, as pairs of at most 16 tokens in 2 shards, with stored masks."""
    folder = tmp_path_factory.mktemp("pairs")
    sentences = [[THE, CAT, SAT, DOT], [THE, DOG, RAN], [CAT, S, SAT], [DOG, S, RAN, DOT]]
    ids = make_ids(folder / "ids", [sentences] * 40)
    options = SamplesOptions(
        output=folder / "samples", corpora=(str(ids),), max_length=16, shards=2, masking="static", packing="lpfhp",
        capacity=32,
    )  # fmt: skip
    samples(options, local_team(1))
    return folder / "samples"


def test_kind_11_a_prepared_corpus_of_single_sentences_gives_a_hint(tmp_path: Path) -> None:
    lines = [f"The cat number {number} sat and the dog ran." for number in range(60)]
    for name, between, hinted in (("single", "\n\n", True), ("together", "\n", False)):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(2 * [between.join(lines)]))
        prepare(str(tmp_path / f"{name}.txt"), tmp_path / name, vocab_size=36)
        found = told(tmp_path / name, max_length=256)
        figures = found["figures"]
        assert figures["share_of_random_pairs"] == round(figures["random_pairs"] / figures["sequences"], 4)
        assert (figures["share_of_random_pairs"] > 0.9) == hinted
        assert bool(found["hints"]) == hinted


def told(folder: Path, **options: Any) -> dict[str, Any]:
    """What the JSON says."""
    found: dict[str, Any] = json.loads(inspect(InspectOptions(folder=folder, json=True, **options)))
    return found


# --- documents, tokenizers, ids, files -----------------------------------------------------------------------------


def test_documents_are_counted(tmp_path: Path) -> None:
    found = told(make_documents(tmp_path / "docs"))
    figures = found["figures"]
    texts = [document["text"] for document in DOCUMENTS]
    assert figures["documents"] == 3
    assert figures["files"] == 2
    assert figures["with_a_title"] == 1
    assert figures["paragraphs"] == 2 + 1 + 2
    assert figures["words"] == 6 + 1 + 8
    assert figures["characters"] == sum(map(len, texts))
    assert found["noted"]["redirects"] == 4
    words = found["histograms"][0]
    assert words["title"] == "words of a document"
    assert words["bins"] == [[1, 1, 1], [2, 3, 0], [4, 7, 1], [8, 15, 1]]
    assert (words["mean"], words["median"], words["largest"]) == (5.0, 6, 8)
    assert found["excerpts"]["first paragraphs"] == [
        {"title": "Cats, id 7", "text": ["The cat sat."]},
        {"title": "without title", "text": ["dog"]},
        {"title": "id 9", "text": ["The dog sat.\nThe dog ran."]},
    ]


def test_documents_as_text(tmp_path: Path) -> None:
    text = inspect(InspectOptions(folder=make_documents(tmp_path / "docs"), samples=1))
    assert "documents of plain text" in text.splitlines()[0]
    assert text.count("  documents  ") == 1, "what the step counted is not repeated where it is the same"
    assert "redirects" in text
    assert "words of a document: mean 5.0, median 6, 95 % up to 8, at most 8" in text
    assert "█" * 40 in text


@pytest.mark.parametrize(
    "line", [b"{", b"[1]", b'{"id": "1", "title": ""}', b'{"id": 1, "title": "", "text": ""}', b"\xff"]
)
def test_a_damaged_document_is_named(tmp_path: Path, line: bytes) -> None:
    good = json.dumps(DOCUMENTS[0]).encode()
    folder = make(tmp_path / "docs", "extract", {}, {"documents-00000.jsonl": good + b"\n" + line + b"\n"})
    with pytest.raises(ValueError, match=r"documents-00000\.jsonl, line 2 is no document"):
        inspect(InspectOptions(folder=folder))


def test_a_few_of_a_stream_are_drawn_evenly() -> None:
    times = np.zeros(10)
    for seed in range(2000):
        drawn: Drawn[int] = Drawn(3, seed)
        for item in range(10):
            drawn.offer(item)
        assert len(set(drawn.items)) == 3
        times[drawn.items] += 1
    # 600 each are expected, with a standard deviation of 20.
    assert np.abs(times - 600).max() < 100


def test_a_tokenizer_shows_its_special_pieces(tmp_path: Path) -> None:
    ids = make_ids(tmp_path / "ids", [[[THE]]])
    names = ("vocab.txt", "tokenizer-settings.json")
    folder = make(tmp_path / "tok", "tokenizer", {}, {name: (ids / "tokenizer" / name).read_bytes() for name in names})
    found = told(folder, samples=1)
    assert found["figures"]["kind"] == "wordpiece"
    assert found["figures"]["pieces_of_the_vocabulary"] == 12
    assert [found["figures"][f"id_of_{name}"] for name in VOCABULARY[:5]] == [0, 1, 2, 3, 4]
    (row,) = found["excerpts"]["pieces, drawn at random"]
    assert row["text"] == ["  ".join(VOCABULARY)]


def test_ids_are_counted_and_decoded(tmp_path: Path) -> None:
    documents = [[[THE, CAT, S, SAT, DOT], [DOG]], [[UNKNOWN, RAN, UNKNOWN]] * 6]
    found = told(make_ids(tmp_path / "ids", documents))
    figures = found["figures"]
    assert (figures["documents"], figures["sentences"], figures["tokens"]) == (2, 8, 6 + 18)
    assert figures["unknown_tokens"] == 12
    assert figures["share_of_unknown_tokens"] == 50.0
    assert figures["bytes_of_an_id"] == 2
    assert [histogram["bins"] for histogram in found["histograms"]] == [
        [[1, 1, 1], [2, 3, 6], [4, 7, 1]],
        [[2, 3, 1], [4, 7, 1]],
    ]
    first, second = found["excerpts"]["documents, decoded, a sentence a line"]
    assert first["text"] == ["the cats sat.", "dog"]
    assert second["title"] == "document 1, 6 sentences"
    assert second["text"] == [*["[UNK] ran [UNK]"] * 4, " and 2 more"]


def test_fetched_files_are_listed(tmp_path: Path) -> None:
    folder = make(tmp_path / "files", "download", {"files": 1}, {"dump.bz2": b"12345"})
    assert told(folder)["figures"]["dump.bz2"] == 5
    with pytest.raises(ValueError, match="no histogram"):
        inspect(InspectOptions(folder=folder, plot=tmp_path / "a.png"))


def put(file: Path, place: int, value: int) -> None:
    """Writes an id of two bytes."""
    with file.open("r+b") as stream:
        stream.seek(2 * place)
        stream.write(value.to_bytes(2, "little"))


def test_an_id_beyond_the_vocabulary_is_found_where_nothing_is_shown(tmp_path: Path, pairs: Path) -> None:
    ids = make_ids(tmp_path / "ids", [[[THE, CAT], [DOG]], [[SAT]], [[RAN, DOT]]])
    put(ids / "documents.bin", 4, 12)
    told_of = r"has the id 12 in document 2, and the vocabulary 12 pieces: 1 of its 6 ids .* run tokenize again"
    with pytest.raises(ValueError, match=rf"ids/documents\.bin {told_of}"):
        inspect(InspectOptions(folder=ids, samples=0))
    write_text(tmp_path / "text.txt")
    prepare(str(tmp_path / "text.txt"), tmp_path / "corpus", vocab_size=67)
    inspect(InspectOptions(folder=tmp_path / "corpus", samples=0, packs=0))
    for name in ("heldout.bin", "train.bin"):
        put(tmp_path / "corpus" / name, 0, 67)
        with pytest.raises(ValueError, match=rf"corpus/{name} has the id 67 in document 0.* run prepare again"):
            inspect(InspectOptions(folder=tmp_path / "corpus", samples=0, packs=0))
    shutil.copytree(pairs, tmp_path / "samples")
    masks, texts = (next((tmp_path / "samples").glob(f"*00001-of*{end}.bin")) for end in (".masks", "2"))
    put(masks, IndexedDataset(str(masks)[:-4]).ids.size - 1, 12)  # what is seen in the last place
    with pytest.raises(ValueError, match=r"masks\.bin, sequences 0 to \d+: the data holds the id 12"):
        inspect(InspectOptions(folder=tmp_path / "samples", samples=0, packs=0))
    put(texts, 3, 400)
    with pytest.raises(ValueError, match=r"00001-of-00002\.bin has the id 400 in document 0.* run samples again"):
        inspect(InspectOptions(folder=tmp_path / "samples", samples=0, packs=0))


# --- sequences -----------------------------------------------------------------------------------------------------


def test_padding_is_compared_with_the_plan(pairs: Path) -> None:
    found = told(pairs)
    figures = found["figures"]
    counts = np.array(json.loads((pairs / "histogram.json").read_bytes())["counts"])
    sequences, tokens = int(counts.sum()), int(counts @ np.arange(len(counts)))
    plan = json.loads((pairs / "plan.json").read_bytes())["totals"]
    assert figures["sequences"] == sequences == plan["sequences"]
    assert figures["tokens_of_sequences"] == tokens == plan["tokens"]
    assert figures["slots_if_padded"] == 16 * sequences
    assert figures["real_tokens_if_padded"] == pytest.approx(100 * tokens / (16 * sequences))
    assert figures["factor_that_packing_can_gain"] == pytest.approx(16 * sequences / tokens)
    assert figures["packs"] == plan["packs"]
    assert figures["real_tokens_in_packs"] == pytest.approx(100 * tokens / (32 * plan["packs"]))
    assert figures["factor_that_the_plan_gains"] == pytest.approx(16 * sequences / (32 * plan["packs"]))
    assert figures["sequences_of_a_pack"] == pytest.approx(sequences / plan["packs"])
    shards = [figures[f"sequences_of_samples-0000{shard}-of-00002"] for shard in range(2)]
    assert sum(shards) == sequences
    assert abs(shards[0] - shards[1]) <= 1
    assert sum(held for _, _, held in found["histograms"][0]["bins"]) == sequences


def test_a_sequence_shows_its_segments_and_what_is_guessed(pairs: Path) -> None:
    shown = told(pairs, samples=8)["excerpts"]["sequences, drawn at random"]
    assert len(shown) == 8
    labels = {excerpt["title"].rpartition("tokens, ")[2] for excerpt in shown}
    assert labels <= {"B follows A", "B was drawn at random"}
    for excerpt in shown:
        text, guessed = excerpt["text"]
        assert text.startswith("[CLS] ")
        assert text.endswith(" [SEP]")
        assert text.count("[SEP]") == 2
        length = int(excerpt["title"].split(": ")[1].split()[0])
        places = [int(part.split()[0]) for part in guessed.removeprefix("guessed: ").split(", ")]
        assert len(places) == max(1, round(0.15 * length))
        assert all(0 < place < length - 1 for place in places)
        for part in guessed.removeprefix("guessed: ").split(", "):
            _, was, arrow, now = part.split()
            assert (was in VOCABULARY, arrow, now in VOCABULARY or now == "itself") == (True, "→", True)


def test_packs_have_the_boundaries_of_the_plan(pairs: Path) -> None:
    plan = json.loads((pairs / "plan.json").read_bytes())
    planned = {tuple(row[1:]): row[0] for row in plan["strategies"]}
    (packs,) = [shown for heading, shown in told(pairs, packs=5)["excerpts"].items() if "packs of 32" in heading]
    assert len(packs) == 5
    for pack in packs:
        rows = [line.split()[:3] for line in pack["text"] if not line.endswith("(empty)")]
        begins, ends = [int(begin) for begin, _, _ in rows], [int(end) + 1 for _, _, end in rows]
        assert begins == [0, *ends[:-1]]
        lengths = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        assert len(lengths) > 1
        assert pack["title"].endswith(f"the plan has {planned[lengths]:,} of these lengths")
        assert pack["title"].startswith(f"{len(lengths)} sequences, {sum(lengths)} tokens")
        if sum(lengths) < 32:
            assert pack["text"][-1].split() == [str(sum(lengths)), "to", "31", "(empty)"]


def test_a_pack_shows_sequences_of_its_lengths(pairs: Path) -> None:
    shown = inspect(InspectOptions(folder=pairs, samples=0, packs=20)).splitlines()
    rows = [line.split(maxsplit=3) for line in shown if "[CLS]" in line]
    whole = [(int(end) - int(begin) + 1, text) for begin, _, end, text in rows if "…" not in text]
    assert whole, "some are short enough to be shown whole"
    for length, text in whole:
        # Every word, full stop and special token is a piece; "cats" and "dogs" are two.
        spaced = text.replace(".", " .").replace("cats", "cat s").replace("dogs", "dog s")
        assert len(spaced.split()) == length


def test_a_shard_that_is_elsewhere_is_no_hindrance(pairs: Path, tmp_path: Path) -> None:
    for path in pairs.rglob("*"):
        if path.is_file() and "00001-of" not in path.name:
            copy = tmp_path / "copy" / path.relative_to(pairs)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    figures = told(tmp_path / "copy", packs=3)["figures"]
    assert figures["sequences"] == told(pairs)["figures"]["sequences"]
    assert (figures["shards"], figures["shards_on_this_machine"]) == (2, 1)
    assert figures["sequences_of_samples-00001-of-00002"] == "not here"


def test_single_texts(tmp_path: Path) -> None:
    ids = make_ids(tmp_path / "ids", [[[THE, CAT, SAT, DOT]] * 3] * 20)
    options = SamplesOptions(
        output=tmp_path / "out", corpora=(str(ids),), max_length=16, single_texts=True, held_out=0.0, packing="padded"
    )
    samples(options, local_team(1))
    found = told(tmp_path / "out", samples=2, packs=1)
    assert found["kind"] == "single texts in shards, with a plan of their packs"
    assert found["figures"]["what_is_guessed"] == "drawn in training"
    assert found["figures"]["held-out_sequences"] == 0
    for excerpt in found["excerpts"]["sequences, drawn at random"]:
        assert excerpt["title"].endswith("a single text")
        assert len(excerpt["text"]) == 1
        assert excerpt["text"][0].count("[SEP]") == 1
    assert any("none of which has several sequences" in heading for heading in found["excerpts"])


def test_every_corpus_has_its_line(tmp_path: Path) -> None:
    """Though all folders are called alike; and what was left out is counted."""
    sentences = [[[THE, CAT, SAT, DOT]] * 3] * 20
    for name in "ab":
        (tmp_path / name).mkdir()
        make_ids(tmp_path / name / "ids", sentences if name == "a" else [*sentences[:9], [[CAT, MASK]]])
    options = SamplesOptions(
        output=tmp_path / "out", corpora=tuple(str(tmp_path / name / "ids") for name in "ab"), max_length=16,
        held_out=0.0, skip_bad=True,
    )  # fmt: skip
    counts = samples(options, local_team(1)).counts
    assert [corpus["documents"] for corpus in counts["corpora"]] == [20, 9]
    figures = told(tmp_path / "out")["figures"]
    of_corpora = [figures[f"sequences_from_corpus_{number}"] for number in (1, 2)]
    assert of_corpora == [corpus["sequences"] for corpus in counts["corpora"]]
    assert sum(of_corpora) == figures["sequences"]
    assert figures["left_out_as_bad"] == 1


def test_the_same_seed_shows_the_same(pairs: Path) -> None:
    options = InspectOptions(folder=pairs, seed=3)
    assert inspect(options) == inspect(options)
    assert inspect(options) != inspect(dataclasses.replace(options, seed=4))


@pytest.mark.parametrize("shards", [1, 2])
def test_a_prepared_corpus(tmp_path: Path, shards: int) -> None:
    write_text(tmp_path / "text.txt")
    info = prepare(str(tmp_path / "text.txt"), tmp_path / "corpus", vocab_size=67, shards=shards)
    found = told(tmp_path / "corpus", max_length=64, samples=2, packs=1)
    figures = found["figures"]
    assert figures["training_tokens"] == info.train_pieces
    assert figures["training_documents"] == info.train_documents
    assert figures["slots_if_padded"] == 64 * figures["sequences"]
    assert figures["slots_of_a_pack"] == 64
    assert 0 < figures["real_tokens_in_packs"] <= 100
    assert [histogram["title"] for histogram in found["histograms"]] == [
        "tokens of a sentence", "sentences of a document", "tokens of a pair of at most 64",
    ]  # fmt: skip
    for excerpt in found["excerpts"]["sequences, drawn at random"]:
        assert excerpt["text"][0].count("[SEP]") == 2


# --- histograms, pictures, bad calls -------------------------------------------------------------------------------


def test_bins_that_double() -> None:
    histogram = Histogram.of_counts("x", {0: 2, 1: 1, 3: 4, 9: 1})
    assert histogram.bins() == [Bin(0, 0, 2), Bin(1, 1, 1), Bin(2, 3, 4), Bin(4, 7, 0), Bin(8, 15, 1)]
    assert (histogram.total, histogram.sum, histogram.quantile(0.5), histogram.quantile(1.0)) == (8, 22, 3, 9)


@pytest.mark.parametrize("longest", [1, 15, 16, 17, 100, 127, 128, 512, 513])
def test_bins_of_one_width_hold_everything(longest: int) -> None:
    lengths = np.arange(1, longest + 1)
    bins = Histogram.of_lengths("x", [lengths, lengths], doubling=False).bins()
    assert len(bins) <= 16
    assert bins[0].low == 1
    assert bins[-1].low <= longest <= bins[-1].high
    assert sum(found.held for found in bins) == 2 * longest
    assert all(found.held == 2 * (min(found.high, longest) - found.low + 1) for found in bins)
    assert all(before.high + 1 == after.low for before, after in pairwise(bins))


def test_nothing_at_all_is_said_to_be_nothing() -> None:
    histogram = Histogram.of_counts("words of a document", {})
    assert list(histogram.text()) == ["words of a document: there are none"]
    assert histogram.values()["bins"] == []


def test_the_picture_has_a_bar_for_each_bin(tmp_path: Path) -> None:
    histogram = Histogram.of_counts("tokens of a sentence", {1: 1, 2: 3, 300: 4})
    (axes,) = figure_of([histogram], "folder").axes
    heights = [bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle)]
    assert heights == [12.5, 37.5, 0, 0, 0, 0, 0, 0, 50.0]
    assert axes.get_xticklabels()[-1].get_text() == "256\N{EN DASH}511"
    inspect(InspectOptions(folder=make_documents(tmp_path / "docs"), plot=tmp_path / "docs.png"))
    assert imread(tmp_path / "docs.png").ndim == 3


def test_folders_and_calls_that_cannot_be_used(tmp_path: Path, pairs: Path) -> None:
    with pytest.raises(ValueError, match=r"output.*tools\.corpus"):
        inspect(InspectOptions(folder=tmp_path / "none"))
    (tmp_path / "step.json").write_text("{")
    with pytest.raises(ValueError, match=r"step\.json is damaged"):
        inspect(InspectOptions(folder=tmp_path))
    with pytest.raises(ValueError, match=r"step.*'later'"):
        inspect(InspectOptions(folder=make(tmp_path / "later", "later", {}, {})))
    with pytest.raises(ValueError, match=r"--packs.*0.*-1"):
        inspect(InspectOptions(folder=pairs, packs=-1))
    with pytest.raises(ValueError, match=r"--plot.*folder that exists"):
        inspect(InspectOptions(folder=pairs, plot=tmp_path / "none" / "a.png"))
    ids = make_ids(tmp_path / "ids", [[[THE, CAT]]])
    (ids / "documents.bin").write_bytes(b"\0" * 3)
    with pytest.raises(ValueError, match=r"documents\.bin has 3 bytes where step\.json speaks of 4"):
        inspect(InspectOptions(folder=ids))


def test_the_command_line(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(pairs), "--samples", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"].startswith("sentence pairs")
    assert main(["inspect", str(pairs / "none")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
