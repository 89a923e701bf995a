"""`bench infer`: texts a second through packed batches, beside `transformers` with padded ones on the same weights:
vectors of texts, or tags of their words."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from models.bert.embedding import Activation, DenseConfig
from models.bert.huggingface import read_model_config
from models.bert.huggingface.config import CONFIG
from models.bert.huggingface.reader import file_tensors, reading
from tools.bench.harness.benchmark import Benchmark, Count, Report
from tools.bench.harness.figures import spread
from tools.bench.harness.processes import using_threads
from tools.bench.harness.synthetic_data import exponential_histogram
from tools.common.garbage import loaded_objects_left_alone
from tools.common.machine import format_table
from tools.common.workers import usable_cores
from tools.corpus.tokenizers import Tokenizer
from tools.corpus.tokenizers.model_dir import tokenizer_of
from tools.packing.histogram import read_histogram
from tools.predict import Predictor, load
from tools.predict.sentence_folder import SentenceSettings, sentence_settings

# --- What `bench infer` compares with: `transformers`, with padded batches; and random texts and weights --------------

_WORDS = 2000
_LABELS = ("O", *(f"{place}-{kind}" for kind in ("PER", "ORG", "LOC", "MISC") for place in "BI"))
InferTask = Literal["embed", "tag"]
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


Results = list[NDArray[Any]]
"""Of each text: its vector, or the numbers of its words' tags."""


class Library(ABC):
    """A task by `transformers`: its own tokenizer, its own model, an attention mask.

    Raises:
        ValueError: `transformers` is not installed, or cannot read the folder.
    """

    compared: str
    """What `difference` is of, in words."""

    def __init__(self, folder: Path, kind: str) -> None:
        library = _transformers()
        try:
            self._tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = getattr(library, kind).from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        except (OSError, ValueError) as problem:
            raise ValueError(f"{folder} must be a folder that transformers reads: {problem}") from None
        self._model = model.eval()
        self._longest = read_model_config(folder).positions  # a RoBERTa's config.json counts rows of padding too

    def results(self, texts: Sequence[str], batch: int) -> Results:
        """Of batches as the texts come, each padded to its longest."""
        with torch.inference_mode():
            parts = [self._batch(texts[first : first + batch]) for first in range(0, len(texts), batch)]
        return [result for part in parts for result in part]

    def results_sorted(self, texts: Sequence[str], batch: int) -> Results:
        """The same of batches of texts of like lengths, in characters."""
        order = np.argsort([len(text) for text in texts], kind="stable").tolist()
        by_length = self.results([texts[place] for place in order], batch)
        found = dict(zip(order, by_length, strict=True))
        return [found[place] for place in range(len(texts))]

    def lengths(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """(N,): tokens of each text, special ones included."""
        encoded = self._tokenizer(list(texts), truncation=True, max_length=self._longest)
        return np.array([len(ids) for ids in encoded["input_ids"]], dtype=np.int64)

    @abstractmethod
    def difference(self, mine: Results, theirs: Results) -> float:
        """Between the results of the same texts; 0: none."""

    @abstractmethod
    def _batch(self, texts: Sequence[str]) -> Results: ...


class VectorLibrary(Library):
    """Mean vectors, or those of the last token; as long, with dense layers and of length 1, where the folder is one of
    sentence-transformers that says so.

    Raises:
        ValueError: as of `Library`; a folder with another pooling.
    """

    compared = "largest difference of packed vectors"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "AutoModel")
        found = sentence_settings(folder)
        settings = found or SentenceSettings(encoder=folder)
        if settings.pooling not in ("mean", "last") or settings.prompt or settings.lowercase:
            raise ValueError(
                f"{folder} asks for {settings.in_words()}, and what is compared are plain means, or the last tokens."
            )
        self._prepared = str if found is None else found.prepared  # without spaces around it
        self._of_last = settings.pooling == "last"
        self._normalize = settings.normalize
        self._dense = nn.Sequential(*starmap(_dense, zip(settings.dense, settings.dense_folders, strict=True)))
        self._longest = settings.max_length or self._longest

    def difference(self, mine: Results, theirs: Results) -> float:
        return max(float(np.abs(one - other).max()) for one, other in zip(mine, theirs, strict=True))

    def _batch(self, texts: Sequence[str]) -> Results:
        inputs = self._tokenizer(
            [self._prepared(text) for text in texts],
            **{"padding": True, "truncation": True, "max_length": self._longest, "return_tensors": "pt"},
        )
        h = self._model(**inputs).last_hidden_state
        mask = inputs["attention_mask"]
        last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(1)  # on whichever side it is padded
        pooled = h[torch.arange(len(h)), last] if self._of_last else (h * mask[..., None]).sum(1) / mask.sum(1)[:, None]
        vectors = self._dense(pooled)
        return list((F.normalize(vectors) if self._normalize else vectors).numpy())


_ACTIVATIONS: Mapping[Activation, type[nn.Module]] = {
    "identity": nn.Identity,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
}


def _dense(layer: DenseConfig, folder: Path) -> nn.Module:
    """A dense layer of sentence-transformers, whose weights are those that its settings ask for."""
    files = file_tensors(folder)
    with reading(files) as read:
        parts = {name: tuple(slice(0, size) for size in each.shape) for name, each in files.items()}
        whole = {name: read(name, part).float() for name, part in parts.items()}
    linear = nn.Linear(whole["linear.weight"].shape[1], layer.outputs, layer.bias)
    linear.load_state_dict({name.removeprefix("linear."): values for name, values in whole.items()})
    return nn.Sequential(linear, _ACTIVATIONS[layer.activation]())


class TagLibrary(Library):
    """The likeliest tag of each word, at its first piece. Words are what stands between spaces."""

    compared = "share of words that have another tag from packs"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "AutoModelForTokenClassification")
        self.numbers = {label: number for number, label in self._model.config.id2label.items()}

    def difference(self, mine: Results, theirs: Results) -> float:
        return float(np.mean(np.concatenate(mine) != np.concatenate(theirs)))

    def _batch(self, texts: Sequence[str]) -> Results:
        words = [text.split() for text in texts]
        inputs = self._tokenizer(words, is_split_into_words=True, padding=True, return_tensors="pt")
        if inputs["input_ids"].shape[1] > self._longest:
            raise ValueError(
                f"a text has {inputs['input_ids'].shape[1]} tokens, and transformers reads {self._longest}, where we "
                "take windows. Leave it out of --texts."
            )
        tags = self._model(**inputs).logits.argmax(2).numpy()
        found = []
        for number, of_text in enumerate(words):
            _, first = np.unique([-1 if word is None else word for word in inputs.word_ids(number)], return_index=True)
            if len(first) != len(of_text) + 1:
                raise ValueError(f"a word without a token in {texts[number]!r:.80}. Leave it out of --texts.")
            found.append(tags[number, first[1:]])
        return found


def write_random_model(folder: Path, task: InferTask = "embed") -> Path:
    """BERT-mini (Turc et al. 2019) with random weights and a vocabulary of random words, as `transformers` writes it;
    for "tag" with nine labels, as those of CoNLL-2003 are.

    Raises:
        ValueError: `transformers` is not installed.
    """
    library = _transformers()
    (folder / "vocab.txt").write_text("\n".join((*_SPECIAL, *_random_words())) + "\n", encoding="utf-8")
    sizes = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if task == "tag":
            labels = dict(enumerate(_LABELS))
            config = library.BertConfig(**sizes, id2label=labels, label2id={name: n for n, name in labels.items()})
            library.BertForTokenClassification(config).save_pretrained(folder)
        else:
            library.BertModel(library.BertConfig(**sizes)).save_pretrained(folder)
    tokenizer = library.BertTokenizerFast(vocab=str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    return folder


def _random_words() -> list[str]:
    draw = np.random.default_rng(0)
    words: dict[str, None] = {}
    while len(words) < _WORDS:
        words["".join(map(chr, draw.integers(ord("a"), ord("z") + 1, size=draw.integers(2, 9))))] = None
    return list(words)


def written_texts(tokenizer: Tokenizer, histogram: NDArray[np.integer], number: int) -> list[str]:
    """Texts of random words, each one piece, with lengths in tokens, special ones included, drawn from a histogram.

    Raises:
        ValueError: the vocabulary has no whole words.
    """
    draw = np.random.default_rng(0)
    # Without the mark of sentencepiece or of byte-level BPE for the space before a word.
    named = dict.fromkeys(piece.lstrip("\u2581\u0120") for piece in tokenizer.pieces(range(tokenizer.vocab_size)))
    pieces = [piece for piece in named if piece.isascii() and piece.isalpha()]
    words = [piece for piece, ids in zip(pieces, tokenizer.encode(pieces), strict=True) if len(ids) == 1]
    if not words:
        raise ValueError("no piece of the vocabulary is a word by itself. Give --texts.")
    weights, around = histogram.astype(np.float64), tokenizer.special_tokens(pair=False)
    lengths = np.maximum(draw.choice(len(weights), size=number, p=weights / weights.sum()) - around, 1)
    return [" ".join(words[place] for place in draw.integers(len(words), size=length)) for length in lengths.tolist()]


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as problem:
        raise ValueError(f"transformers is what is compared with ({problem}): pip install transformers") from None
    return transformers


# --- `bench infer` ----------------------------------------------------------------------------------------------------

_TURN = 1000
"""Texts after which the other one has its turn: what disturbs a machine then disturbs both."""
_GENERATED = 64  # tokens of the longest generated text
OURS, PADDED, SORTED = "packed", "padded", "padded, sorted"


@dataclass(frozen=True, kw_only=True)
class InferCommand(Benchmark[None]):
    """Time vectors of texts, or tags of their words, from the strings on: packed, and by `transformers` in padded
    batches as the texts come, and sorted by length, by turns on the same weights and threads; compare all results, and
    some with those of the texts alone."""

    task: InferTask = "embed"
    """embed: a vector a text. tag: a tag for each word, which are what stands between spaces."""
    texts: Path | None = None
    """File with a text a line. Default: random words, with lengths of --histogram."""
    histogram: Path | None = None
    """Lengths, special tokens included, as tools.packing reads them. Default: exponential, at most 64."""
    model: Path | None = None
    """Hugging Face folder. Default: BERT-mini with random weights."""
    sentences: Count = 2000
    """Texts, at most those of the file, from its beginning."""
    rounds: Count = 3
    """Turns of each with all texts."""
    batch: Count = 32
    """Texts of a padded batch."""
    batch_tokens: int | None = None
    """Tokens of a packed one. Default: as tools.predict has it."""
    threads: Count | None = None
    """Of each. Default: one a core."""
    singles: Count = 100
    """Texts that are also given alone: for latencies, and to compare results with."""

    at_once: ClassVar[bool] = True

    def plan(self) -> None:
        if self.texts is not None and self.histogram is not None:
            raise ValueError("--texts have lengths of their own. Leave out --histogram.")
        if self.model is not None and not (self.model / CONFIG).is_file():
            raise ValueError(
                f"--model must be a Hugging Face folder, for transformers reads it, too. {self.model} has no {CONFIG}. "
                f"Write one of a model or a run: python -m tools.convert to-hf {self.model} DIR"
            )

    def measure(self, plan: None) -> Report:
        with tempfile.TemporaryDirectory() as folder, using_threads(self.threads or usable_cores()):
            model = self.model or write_random_model(Path(folder), self.task)
            predictor: Predictor[Any] = load(model, self.task, batch_tokens=self.batch_tokens)
            ours, theirs = open_task(self.task, predictor, model)
            texts = self._texts(tokenizer_of(model))
            print(f"{len(texts):,} texts, {torch.get_num_threads()} threads", flush=True)
            with loaded_objects_left_alone():
                figures = measure(self, ours, theirs, texts)
        lines = [
            *format_table(HEADER, rows(figures)),
            f"padding ratio {figures.padding_ratio:.2f} of padded batches, {figures.sorted_padding_ratio:.2f} sorted",
            f"{theirs.compared}: {figures.difference_alone:.1e} from the same texts alone, "
            f"{figures.difference_library:.1e} from transformers' of them alone, "
            f"{figures.difference_padded:.1e} from transformers' of all texts",
        ]
        return Report(lines=lines, content={"figures": dataclasses.asdict(figures)})

    def _texts(self, tokenizer: Tokenizer) -> list[str]:
        if self.texts is not None:
            lines = self.texts.read_text(encoding="utf-8").splitlines()
            return [line for line in lines if line.strip()][: self.sentences]
        histogram = exponential_histogram(_GENERATED) if self.histogram is None else read_histogram(self.histogram)
        return written_texts(tokenizer, histogram, self.sentences)


Ours = Callable[[Sequence[str]], Results]


def open_task(task: InferTask, predictor: Predictor[Any], model: Path) -> tuple[Ours, Library]:
    """Both sides of a task."""
    if task == "embed":
        return lambda texts: [found.vector for found in predictor.predict(texts)], VectorLibrary(model)
    library = TagLibrary(model)

    def tags(texts: Sequence[str]) -> Results:
        found = predictor.predict([{"tokens": text.split()} for text in texts])
        return [np.array([library.numbers[tag] for tag in each.tags]) for each in found]

    return tags, library


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to the vectors."""

    name: str
    seconds: tuple[float, ...]
    """For all texts, by round."""
    texts_per_second: float
    """Median of the rounds."""
    speed_up: float
    """Over padded batches: median of the rounds, each by itself."""
    latency_p50: float | None
    """Seconds for a text that is given alone."""
    latency_p99: float | None


@dataclass(frozen=True, kw_only=True)
class InferFigures:
    """What was measured."""

    texts: int
    tokens: int
    threads: int
    arms: tuple[Variant, ...]
    padding_ratio: float
    """Slots of the padded batches over real tokens, special ones included."""
    sorted_padding_ratio: float
    difference_alone: float
    """Of what `Library.compared` says: between results from packed batches and those of the same texts in batches of
    their own."""
    difference_library: float
    """The same to those of `transformers` for the text alone, without padding."""
    difference_padded: float
    """The same to those of `transformers` from its padded batches, over all texts."""


HEADER = ("", "texts/s", "speed-up", "by round", "p50 ms", "p99 ms")


def rows(figures: InferFigures) -> list[tuple[str, ...]]:
    """The table under `HEADER`."""
    base = next(arm for arm in figures.arms if arm.name == PADDED)
    shown = []
    for arm in figures.arms:
        ratios = [theirs / mine for mine, theirs in zip(arm.seconds, base.seconds, strict=True)]
        latencies = (arm.latency_p50, arm.latency_p99)
        shown.append(
            (
                arm.name,
                f"{arm.texts_per_second:,.0f}",
                f"{arm.speed_up:.2f}",
                "{:.2f}-{:.2f}".format(*spread(ratios)),
                *("-" if seconds is None else f"{seconds * 1e3:.1f}" for seconds in latencies),
            )
        )
    return shown


def measure(command: InferCommand, ours: Ours, theirs: Library, texts: Sequence[str]) -> InferFigures:
    """All rounds, by turns, then texts alone."""
    arms: dict[str, Ours] = {
        OURS: ours,
        PADDED: lambda part: theirs.results(part, command.batch),
        SORTED: lambda part: theirs.results_sorted(part, command.batch),
    }
    turns = [texts[first : first + _TURN] for first in range(0, len(texts), _TURN)]
    seconds: dict[str, list[float]] = {name: [0.0] * command.rounds for name in arms}
    found: dict[str, Results] = {name: [] for name in arms}
    for arm in arms.values():
        arm(texts[:64])  # what only the first call does
    for number in range(command.rounds):
        for place, part in enumerate(turns):
            # Who comes first finds the caches as another one left them, so the order changes from turn to turn.
            order = list(arms.items())[:: 1 if (number * len(turns) + place) % 2 == 0 else -1]
            for name, arm in order:
                start = time.perf_counter()
                results = arm(part)
                seconds[name][number] += time.perf_counter() - start
                if number == 0:
                    found[name] += results
    # Spread over all texts.
    chosen = np.linspace(0, len(texts) - 1, min(command.singles, len(texts))).round().astype(int).tolist()
    latencies: dict[str, list[float]] = {OURS: [], PADDED: []}
    alone: dict[str, Results] = {OURS: [], PADDED: []}
    for place in chosen:
        for name, of_one in latencies.items():
            start = time.perf_counter()
            alone[name] += arms[name]([texts[place]])
            of_one.append(time.perf_counter() - start)
    from_packs = [found[OURS][place] for place in chosen]
    lengths = theirs.lengths(texts)
    return InferFigures(
        texts=len(texts),
        tokens=int(lengths.sum()),
        threads=torch.get_num_threads(),
        arms=tuple(_arm(name, seconds, len(texts), latencies.get(name)) for name in arms),
        padding_ratio=_padding_ratio(lengths, command.batch),
        # As they are computed: sorted among those of a turn.
        sorted_padding_ratio=_padding_ratio(
            np.concatenate([np.sort(lengths[first : first + _TURN]) for first in range(0, len(texts), _TURN)]),
            command.batch,
        ),
        difference_alone=theirs.difference(from_packs, alone[OURS]),
        difference_library=theirs.difference(from_packs, alone[PADDED]),
        difference_padded=max(theirs.difference(found[OURS], found[name]) for name in (PADDED, SORTED)),
    )


def _arm(name: str, seconds: dict[str, list[float]], texts: int, latencies: list[float] | None) -> Variant:
    ratios = [theirs / mine for mine, theirs in zip(seconds[name], seconds[PADDED], strict=True)]
    return Variant(
        name=name,
        seconds=tuple(seconds[name]),
        texts_per_second=texts / statistics.median(seconds[name]),
        speed_up=statistics.median(ratios),
        latency_p50=None if latencies is None else float(np.quantile(latencies, 0.5)),
        latency_p99=None if latencies is None else float(np.quantile(latencies, 0.99)),
    )


def _padding_ratio(lengths: NDArray[np.int64], batch: int) -> float:
    """Of batches that are padded to their longest, turn by turn."""
    slots = 0
    for first in range(0, len(lengths), _TURN):
        turn = lengths[first : first + _TURN]
        slots += sum(
            len(part) * int(part.max()) for part in (turn[at : at + batch] for at in range(0, len(turn), batch))
        )
    return slots / int(lengths.sum())
