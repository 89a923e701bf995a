"""Files that somebody else may have written or damaged: each is read, or refused in a sentence that names its place."""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tensor3d import checkpoint
from tensor3d.checkpoint.format import checksum
from tensor3d.data import IndexedDataset, IndexedWriter
from tests.checkpoint.subject import make, step
from tests.tools.asked import write_models
from tests.tools.corpus.pipeline_steps import steps, write_input
from tests.tools.corpus.tokenized import write_vocabulary
from tests.tools.finetune.tables import save_dataset, write_parquet
from tools.corpus.__main__ import main as corpus
from tools.corpus.inspect.command import inspect
from tools.corpus.inspect.report import InspectOptions
from tools.corpus.tokenizers.export import write_tokenizer
from tools.corpus.tokenizers.folder import open_tokenizer
from tools.corpus.training_corpus import open_corpus
from tools.finetune.data import TextData, read_part
from tools.finetune.rows import read_rows
from tools.finetune.tag_data import TagData, Told, checked, read_sentences, scheme_of
from tools.packing.histogram import read_histogram
from tools.predict import load
from tools.squad.dataset import read_predictions, read_questions, read_references
from tools.training.config import TrainConfig, read_recipe

pytestmark = [
    pytest.mark.slow,
    # What is odd and harmless is told so.
    pytest.mark.filterwarnings("ignore:.*has a mode of one byte for each:UserWarning"),
]
MORE = 1 << 30
"""Bytes of memory that a damaged file may make a reader take."""
ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 1.5, 1e308, float("nan"), float("inf")),
    *("", "x", "../x", "\0", "\ud800", "1" * 50, [], {}, [[]], [None], {"a": 1}, [1, 2, 3]),
]
LINES = ("nan", "inf", "-1", "0", "true", "[]", "[1, 2]", "'x'", "{}", "1e400", "9" * 20, "1979-05-27", "[[1]]", "''")


@dataclass(frozen=True, kw_only=True, repr=False)
class Target:
    """A file, and what reads it."""

    path: Path
    read: Callable[[], object]
    forge: Callable[[], None] = lambda: None
    """Makes checksums fit the file as it is."""

    @property
    def sound(self) -> bytes:
        return self.path.read_bytes()


# --- damage -----------------------------------------------------------------------------------------------------------


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from _places(value[key], (*place, key))


def changed(random: Random, document: Any) -> Any:
    """A value or three replaced, left out, renamed or multiplied."""
    document = copy.deepcopy(document)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        places = list(_places(document))
        if not places:
            break
        *way, key = random.choice(places)
        parent = document
        for part in way:
            parent = parent[part]
        how = random.random()
        if how < 0.15:
            del parent[key]
        elif how < 0.25 and isinstance(parent, dict):
            parent[random.choice(["x", "../y", "", str(2**40)])] = parent.pop(key)
        elif how < 0.35 and type(parent[key]) in (int, float):
            parent[key] *= random.choice([-1, 0, 2, 1000, 2**40])
        else:
            parent[key] = copy.deepcopy(random.choice(ODD))
    return document


def damaged(random: Random, content: bytes) -> bytes:
    """Cut, with other bytes, with more or fewer; or something else altogether."""
    ends = sorted(random.randrange(len(content) + 1) for _ in range(2))
    how = random.random()
    if how < 0.3:
        return content[: ends[0]]
    if how < 0.7:
        made = bytearray(content)
        for _ in range(random.choice([1, 1, 3, 10])):
            made[random.randrange(len(made))] = random.randrange(256)
        return bytes(made)
    if how < 0.8:
        return content[: ends[0]] + random.randbytes(random.randrange(40)) + content[ends[0] :]
    if how < 0.9:
        return content[: ends[0]] + content[ends[1] :]
    return random.choice([b"", b"\xff\xfe", bytes(100), b"[" * 100_000, b"{}", b"[]", b"null", b"\xef\xbb\xbf{}"])


def of_json(random: Random, content: bytes) -> bytes:
    if random.random() < 0.3:
        return damaged(random, content)
    return json.dumps(changed(random, json.loads(content))).encode("utf-8", "surrogatepass")


def of_safetensors(random: Random, content: bytes) -> bytes:
    if random.random() < 0.4:
        return damaged(random, content)
    size = int.from_bytes(content[:8], "little")
    head = json.dumps(changed(random, json.loads(content[8 : 8 + size]))).encode("utf-8", "surrogatepass")
    return len(head).to_bytes(8, "little") + head + content[8 + size :]


def of_toml(random: Random, content: bytes) -> bytes:
    if random.random() < 0.3:
        return damaged(random, content)
    lines = content.decode().splitlines()
    chosen = random.choice([number for number, line in enumerate(lines) if "=" in line])
    lines[chosen] = f"{lines[chosen].split('=')[0]}= {random.choice(LINES)}"
    return "\n".join(lines).encode()


# --- what is read -----------------------------------------------------------------------------------------------------


def of_checkpoint(folder: Path) -> dict[str, Target]:
    cube, model, optimizer = make((1, 1, 1, 1), seed=1)
    step(cube, model, optimizer)
    checkpoint.save(folder, 1, model, optimizer, cube, {"note": "x"})
    saved = folder / "step-00000001"

    def read() -> None:
        checkpoint.verify(saved)
        checkpoint.load(saved, model, optimizer, cube)

    def forge(name: str) -> None:
        sums, found = json.loads((saved / "checksums.json").read_text()), checksum(saved / name)
        sums["files"][name] = {"bytes": found.bytes, "crc32": f"{found.crc32:08x}"}
        (saved / "checksums.json").write_text(json.dumps(sums))

    names = ("tensors.json", "progress.json", "rank-00000.safetensors")
    targets = {name: Target(path=saved / name, read=read, forge=lambda name=name: forge(name)) for name in names}
    return targets | {"checksums.json": Target(path=saved / "checksums.json", read=read)}


def of_models(folder: Path) -> dict[str, Target]:
    """A model of ours, and the same as a Hugging Face folder, also of sentence vectors."""
    models = write_models(folder)
    ours = models / "classes"
    targets = {
        "model.json": Target(path=ours / "model.json", read=lambda: load(ours, "classify").predict(["the fox"])),
        "tokenizer-settings.json": Target(
            path=ours / "tokenizer" / "tokenizer-settings.json",
            read=lambda: load(ours, "classify").predict(["the fox"]),
        ),
    }
    transformers = pytest.importorskip("transformers")
    there = folder / "library"
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    rows = len((ours / "vocab.txt").read_text().splitlines())
    config = transformers.BertConfig(vocab_size=rows, num_labels=3, **sizes)
    transformers.BertForSequenceClassification(config).save_pretrained(there)
    write_tokenizer(ours, there, max_length=24)
    modules = ({"idx": n, "path": path, "type": f"sentence_transformers.models.{kind}"} for n, path, kind in MODULES)
    (there / "1_Pooling").mkdir()
    (there / "2_Dense").mkdir()
    save_file({"linear.weight": torch.ones(4, 8), "linear.bias": torch.ones(4)}, there / "2_Dense/model.safetensors")
    written = {
        "modules.json": list(modules),
        "1_Pooling/config.json": {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True},
        "2_Dense/config.json": {"in_features": 8, "out_features": 4, "bias": True, "activation_function": TANH},
        "sentence_bert_config.json": {"max_seq_length": 64, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": {"query": "the "}, "default_prompt_name": "query"},
    }
    for name, content in written.items():
        (there / name).write_text(json.dumps(content))
    pair = {"text": "the fox", "text_b": "a hill"}
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json"):
        targets[f"library {name}"] = Target(path=there / name, read=lambda: load(there, "classify").predict([pair]))
    weights = there / "model.safetensors"
    targets["library weights"] = Target(path=weights, read=lambda: load(there, "classify").predict([pair]))
    for name in written:
        targets[name] = Target(path=there / name, read=lambda: load(there, "embed").predict(["the fox"]))
    dense = there / "2_Dense/model.safetensors"
    targets["dense weights"] = Target(path=dense, read=targets["modules.json"].read)
    targets["sentence config.json"] = Target(path=there / "config.json", read=targets["modules.json"].read)
    pickled = folder / "pickled"
    shutil.copytree(there, pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    targets["pickled weights"] = Target(
        path=pickled / "pytorch_model.bin", read=lambda: load(pickled, "classify").predict([pair])
    )
    targets["tags model.json"] = Target(
        path=models / "tags" / "model.json", read=lambda: load(models / "tags", "tag").predict(["the fox"])
    )
    content = json.loads((ours / "model.json").read_text())
    shutil.copytree(ours, folder / "labels")
    facts = {"thresholds": [0.3, 0.5, 0.9], "max_length": 8}
    (folder / "labels" / "model.json").write_text(json.dumps({**content, "problem": "labels", "facts": facts}))
    targets["labels model.json"] = Target(
        path=folder / "labels" / "model.json", read=lambda: load(folder / "labels", "classify").predict(["the fox"])
    )
    return targets


MODULES = tuple(
    (n, f"{n}_{kind}" if n else "", kind) for n, kind in enumerate(("Transformer", "Pooling", "Dense", "Normalize"))
)
TANH = "torch.nn.modules.activation.Tanh"


def of_corpus(folder: Path) -> dict[str, Target]:
    """Each step's folder, by whoever reads it."""
    write_input(folder / "raw", pages=10)
    for arguments in steps(folder / "raw", folder):
        assert corpus([*arguments, "--workers", "1"]) == 0
    samples = folder / "samples"
    labels = Target(path=next(samples.glob("*.labels.npy")), read=lambda: open_corpus(samples))
    targets = {
        f"{name} step.json": Target(
            path=folder / name / "step.json", read=lambda name=name: inspect(InspectOptions(folder=folder / name))
        )
        for name in ("documents", "tokenizer", "ids", "samples")
    }
    for name in ("step.json", "plan.json", "histogram.json"):
        read = (lambda: open_corpus(samples)) if name == "step.json" else lambda: open_corpus(samples).plan("lp")
        targets[f"training {name}"] = Target(path=samples / name, read=read)
    return {**targets, "labels of pairs": labels}


def of_single_files(folder: Path) -> dict[str, Target]:
    histogram, squad, answers = folder / "histogram.json", folder / "squad.json", folder / "answers.json"
    histogram.write_text(json.dumps({"name": "x", "counts": [0, 3, 4, 0, 7]}))
    questions = [
        {"id": "1", "question": "who?", "answers": [{"text": "fox", "answer_start": 4}], "is_impossible": False},
        {"id": "2", "question": "why?", "answers": [], "is_impossible": True},
    ]
    paragraph = {"context": "The fox went home.", "qas": questions}
    squad.write_text(json.dumps({"version": "v2.0", "data": [{"title": "t", "paragraphs": [paragraph]}]}))
    answers.write_text(json.dumps({"1": "fox", "2": ""}))
    with IndexedWriter(folder / "ids", vocab_size=50) as writer:
        writer.add_documents(np.arange(1, 31), np.array([10, 10, 10]), np.array([1, 2]))
    recipe = folder / "recipe.toml"
    shutil.copy(Path(__file__).parents[2] / "launch" / "recipes" / "quickstart.toml", recipe)

    files = {"tags": folder / "tags.jsonl", "spans": folder / "spans.jsonl", "tag columns": folder / "tags.conll"}
    files["tag rows"] = folder / "tags.csv"
    files["tags"].write_text(json.dumps({"tokens": ["Ada", "Byron", "wrote"], "tags": ["B-PER", "I-PER", "O"]}))
    spans = [{"start": 0, "end": 9, "label": "PER"}, {"start": 16, "end": 19, "label": "ODD"}]
    files["spans"].write_text(json.dumps({"text": "Ada Byron wrote it.", "spans": spans}))
    files["tag columns"].write_text("-DOCSTART- O\n\nAda B-PER\nByron I-PER\n\nwrote O\n")
    files["tag rows"].write_text('sentence,word,tag\n1,"Ada",B-PER\n1,Byron,I-PER\n2,wrote,O\n')

    def tags(path: Path) -> None:
        data = TagData(train=str(path), dev=str(path))
        found = read_sentences(data, "train", Told())
        checked(found, scheme_of(data, found), data, Told())

    several = {"several labels.csv": 'sentence,label\nthe fox,"a,b"\na hill,\n"stories, of",b\n'}
    several["several labels.jsonl"] = '{"sentence": "the fox", "label": ["a", "b"]}'
    tokenizer = open_tokenizer("wordpiece", write_vocabulary(folder / "vocab.txt"), lowercase=True)

    def texts(path: Path) -> None:
        read_part(TextData(train=str(path), dev=str(path), multi_label=True), "train", tokenizer)

    for name, content in several.items():
        (folder / name).write_text(content)

    def items() -> list[list[int]]:
        dataset = IndexedDataset(folder / "ids")
        return [dataset[number].tolist() for number in range(len(dataset.lengths))]

    return {
        "histogram": Target(path=histogram, read=lambda: read_histogram(histogram)),
        "questions": Target(path=squad, read=lambda: read_questions(squad)),
        "references": Target(path=squad, read=lambda: read_references(squad)),
        "predictions": Target(path=answers, read=lambda: read_predictions(answers)),
        "index": Target(path=folder / "ids.idx", read=items),
        "recipe": Target(path=recipe, read=lambda: read_recipe(TrainConfig, recipe)),
        **{name: Target(path=path, read=lambda path=path: tags(path)) for name, path in files.items()},
        **{name: Target(path=folder / name, read=lambda path=folder / name: texts(path)) for name in several},
    }


def of_tables(folder: Path) -> dict[str, Target]:
    path, saved = write_parquet(folder / "rows.parquet"), save_dataset(folder / "dataset")
    columns = ("text", "label", "tags")

    def rows(of: Path) -> list[object]:
        return list(read_rows(of, columns, separator=","))

    files = {"data": "data-00000-of-00002.arrow", "state": "state.json", "info": "dataset_info.json"}
    return {
        "parquet": Target(path=path, read=lambda: rows(path)),
        **{f"dataset {name}": Target(path=saved / file, read=lambda: rows(saved)) for name, file in files.items()},
    }


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    found: dict[str, Target] = {}
    for make_targets in (of_checkpoint, of_models, of_corpus, of_single_files, of_tables):
        found |= make_targets(tmp_path_factory.mktemp(make_targets.__name__))
    return found


DAMAGE: dict[str, Callable[[Random, bytes], bytes]] = {
    **dict.fromkeys(
        ("tensors.json", "progress.json", "checksums.json", "model.json", "tokenizer-settings.json"), of_json
    ),
    **dict.fromkeys((f"library {name}.json" for name in ("config", "tokenizer_config", "tokenizer")), of_json),
    **dict.fromkeys(("library special_tokens_map.json", "modules.json", "1_Pooling/config.json"), of_json),
    "2_Dense/config.json": of_json,
    **dict.fromkeys(("sentence_bert_config.json", "config_sentence_transformers.json"), of_json),
    **dict.fromkeys(("sentence config.json", "tags model.json", "labels model.json", "several labels.jsonl"), of_json),
    **dict.fromkeys(("histogram", "questions", "references", "predictions"), of_json),
    **dict.fromkeys((f"{name} step.json" for name in ("documents", "tokenizer", "ids", "samples")), of_json),
    **dict.fromkeys((f"training {name}.json" for name in ("step", "plan", "histogram")), of_json),
    **dict.fromkeys(("rank-00000.safetensors", "library weights", "dense weights"), of_safetensors),
    **dict.fromkeys(("tags", "spans", "dataset state", "dataset info"), of_json),
    **dict.fromkeys(("index", "tag columns", "tag rows", "parquet", "dataset data"), damaged),
    **dict.fromkeys(("pickled weights", "labels of pairs", "several labels.csv"), damaged),
    "recipe": of_toml,
}


@contextmanager
def no_more_memory_than(more: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else None
    if pages is not None:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def refusals(target: Target, contents: Sequence[bytes]) -> list[str]:
    """What reading said of each content, but of those that could be read."""
    sound, said = target.sound, []
    try:
        for content in contents:
            target.path.write_bytes(content)
            target.forge()
            try:
                with no_more_memory_than(MORE):
                    target.read()
            except ValueError as problem:
                said.append(str(problem))
            except FloatingPointError:  # numbers that can be, of which the model makes none
                pass
    finally:
        target.path.write_bytes(sound)
        target.forge()
    folder = str(target.path.parents[target.path.parent.name in ("1_Pooling", "2_Dense")])
    assert [text for text in said if folder not in text] == [], "each names the file, or its folder"
    return said


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@pytest.mark.parametrize("name", DAMAGE)
@given(random=st.randoms(use_true_random=True))
def test_a_damaged_file_is_read_or_refused_by_name(name: str, targets: dict[str, Target], random: Random) -> None:
    target = targets[name]
    refusals(target, [DAMAGE[name](random, target.sound)])


@pytest.mark.parametrize("name", DAMAGE)
def test_a_fifo_is_not_waited_for_and_a_device_not_read(name: str, targets: dict[str, Target]) -> None:
    """Where a file need not be there, it is not."""
    target, ways = targets[name], (os.mkfifo, lambda path: os.symlink("/dev/zero", path))
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it is waited for"))
    sound = target.path.with_name("sound")
    said = []
    for make_other in ways:
        target.path.rename(sound)
        make_other(target.path)
        signal.alarm(60)
        try:
            with no_more_memory_than(MORE):
                target.read()
        except (ValueError, OSError) as refused:
            said.append(str(refused))
        finally:
            signal.alarm(0)
            target.path.unlink()
            sound.rename(target.path)
    assert all(str(target.path.parents[1]) in text for text in said)


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_no_such_file_at_all_is_refused(name: str, targets: dict[str, Target]) -> None:
    contents = [b"[" * 100_000, b"\xff\xfe\0", b"", b"null"]
    assert len(refusals(targets[name], contents)) >= (3 if name == "recipe" else 2), "this can fail"
    targets[name].read()  # and the sound one is read
