"""Texts in, results out, in the same order, in batches of a given number of tokens."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

import numpy as np
from torch import nn
from torch.distributed.tensor import DTensor

from models.bert.config import BertConfig
from models.bert.huggingface.architectures import ARCHITECTURES
from models.bert.model import BertForPreTraining, BertModel
from models.bert.tasks import (
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    Pooling,
)
from tensor3d import Cube, CubeShape, Linear3D
from tensor3d.distributed.object_collectives import run_on_all_ranks
from tensor3d.ops.products import onednn_is_faster
from tools.corpus.tokenizers.base import InTexts
from tools.corpus.tokenizers.model_dir import tokenizer_of
from tools.predict.inputs import InputProblem, Query, query_of
from tools.predict.results import (
    Answered,
    Classified,
    Embedded,
    Filled,
    Found,
    Labelled,
    Ranked,
    Scored,
    Tagged,
    Valued,
)
from tools.predict.sentence_folder import SentenceSettings, sentence_settings
from tools.predict.stored_vectors import open_vectors
from tools.predict.tasks import (
    Classify,
    ClassProblem,
    Embed,
    FillMask,
    PredictTask,
    Ready,
    Search,
    TaskName,
    names_of,
)
from tools.predict.text_encoder import TextEncoder, TooLong, check_types

if TYPE_CHECKING:
    from models.bert.huggingface import WeightSource


_log = logging.getLogger(__name__)
OnError = Literal["stop", "skip"]
Item = str | Mapping[str, Any]
"""A text, or an object with texts, as a line of JSON has them."""
_BATCH_TOKENS = (2048, 4096)
"""Of a batch, for each rank, at least and at most."""
_BATCH_NUMBERS = 2**22
"""Of a batch between the products of a feed-forward block, about: on a CPU they still fit the caches."""
_BLOCK = 4  # batches that are read at a time
_BYTES = 4  # of a token, roughly
R = TypeVar("R")


class StopError(ValueError):
    """A text cannot be answered, and nothing is to be left out."""


class Predictor(Generic[R]):
    """A model with its tokenizer, ready to be asked; `load` makes one.

    On a cube every rank makes the same calls with the same texts, and all get the same results.

    Args:
        batch_tokens: tokens of a batch, about, special ones included; a text that is longer is a batch of its own.

    Raises:
        ValueError: batch_tokens below 1.
    """

    def __init__(self, task: PredictTask[Any, R], batch_tokens: int) -> None:
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens must be at least 1. Got {batch_tokens}.")
        self.task, self.batch_tokens = task, batch_tokens
        self.tokens = 0
        """Computed so far, special ones included."""

    @property
    def truncated(self) -> int:
        """Texts so far of which a part was left out."""
        return self.task.truncated

    @property
    def named(self) -> int:
        """Texts so far with the name of a special token in them."""
        return self.task.named

    @property
    def block_bytes(self) -> int:
        """Of texts to be read at a time: some batches, so that these can be made alike."""
        return _BLOCK * _BYTES * self.batch_tokens

    def predict(self, items: Iterable[Item]) -> list[R]:
        """The result of each text.

        Raises:
            ValueError: one text, where several are to be given; or a text that cannot be: its number, from 0, is named.
        """
        return list(self.stream(items))

    def stream(self, items: Iterable[Item]) -> Iterator[R]:
        """The results of any number of texts, of which only some batches are held at a time.

        Raises:
            ValueError: as `predict`, after the results of the texts before it.
        """
        if isinstance(items, str | Mapping):
            raise ValueError(f"a list of texts is needed, and this is one text: {items!r:.60}. Put it into a list.")
        return self._stream(items)

    def _stream(self, items: Iterable[Item]) -> Iterator[R]:
        for block in self._blocks(items):
            for batch in self.outcomes(block):
                for _, result in batch:
                    assert not isinstance(result, InputProblem), "a problem stops"
                    yield result

    def outcomes(
        self, queries: Sequence[Query | InputProblem], on_error: OnError = "stop"
    ) -> Iterator[list[tuple[Query | InputProblem, R | InputProblem]]]:
        """The results of queries, in their order, batch by batch.

        Args:
            on_error: "skip": a query that cannot be answered has its problem for a result.

        Raises:
            StopError: "stop", and a query that cannot be answered; after the results of those before it.
        """
        asked = [query for query in queries if isinstance(query, Query)]
        found = iter(self.task.ready(asked)) if asked else iter(())
        ready = [next(found) if isinstance(query, Query) else query for query in queries]
        stop = None
        if on_error == "stop":
            stop = next((number for number, one in enumerate(ready) if isinstance(one, InputProblem)), None)
        sizes = [one.tokens if isinstance(one, Ready) else 0 for one in ready[:stop]]
        for first, last in _even(sizes, self.batch_tokens):
            yield list(zip(queries[first:last], self._results(ready[first:last]), strict=True))
        if stop is not None:
            raise StopError(str(ready[stop]))

    def _results(self, batch: Sequence[Ready[Any] | InputProblem]) -> list[R | InputProblem]:
        computed = [one for one in batch if isinstance(one, Ready)]
        results = iter(self.task.results([one.content for one in computed])) if computed else iter(())
        self.tokens += sum(one.tokens for one in computed)
        return [next(results) if isinstance(one, Ready) else one for one in batch]

    def _blocks(self, items: Iterable[Item]) -> Iterator[list[Query | InputProblem]]:
        block: list[Query | InputProblem] = []
        size = 0
        for number, item in enumerate(items):
            query = query_of(item, self.task.fields, number)
            block.append(query)
            size += len(query.first) + len(query.second or "") if isinstance(query, Query) else 0
            if size >= self.block_bytes or isinstance(query, InputProblem):
                yield block
                block, size = [], 0
        if block:
            yield block


def _even(tokens: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Bounds of consecutive batches of about as many tokens each, and of about `most` at most."""
    if not tokens:
        return []
    sizes = np.array(tokens, dtype=np.int64)
    total = max(1, int(sizes.sum()))
    batches = -(-total // most)
    # A text belongs to the batch in which its middle lies. In whole numbers: all ranks must come to the same.
    batch_of = np.minimum((2 * np.cumsum(sizes) - sizes) * batches // (2 * total), batches - 1)
    edges = [0, *(np.flatnonzero(np.diff(batch_of)) + 1).tolist(), len(tokens)]
    return list(pairwise(edges))


# --- From a folder with a model to a predictor ------------------------------------------------------------------------

_HEADS: dict[str, tuple[str, ...]] = {
    "fill-mask": ("masked_lm",),
    "score": ("masked_lm",),
    "classify": ("pooler", "classifier"),
    "answer": ("answers",),
    "tag": ("tags",),
    "rank": ("pooler", "classifier"),
    "embed": (),
}
_READ = frozenset(kind.class_of(heads) for kind in ARCHITECTURES.values() for heads in kind.heads)
"""Classes of the transformers library whose heads are read."""
_LANGUAGE = "python -m tools.pretrain RECIPE.toml --output DIR; or take a Hugging Face folder of BertForMaskedLM"
_MAKERS = {
    "fill-mask": _LANGUAGE,
    "score": _LANGUAGE,
    "classify": "python -m tools.finetune classify RECIPE.toml (or regress)",
    "answer": "python -m tools.finetune answer RECIPE.toml",
    "tag": "python -m tools.finetune tag RECIPE.toml; or take a Hugging Face folder of BertForTokenClassification",
    "rank": "python -m tools.finetune rank RECIPE.toml; or take a folder of BertForSequenceClassification with 1 label",
}


@overload
def load(
    folder: Path | str,
    task: Literal["fill-mask"],
    *,
    cube: Cube | None = None,
    k: int = 5,
    max_length: int | None = None,
    too_long: TooLong = "truncate",
    special_tokens: InTexts | None = None,
    batch_tokens: int | None = None,
) -> Predictor[Filled]: ...
@overload
def load(
    folder: Path | str,
    task: Literal["score"],
    *,
    cube: Cube | None = None,
    masked_share: float | None = None,
    seed: int = 0,
    max_length: int | None = None,
    too_long: TooLong = "truncate",
    special_tokens: InTexts | None = None,
    batch_tokens: int | None = None,
) -> Predictor[Scored]: ...
@overload
def load(
    folder: Path | str,
    task: Literal["classify"],
    *,
    cube: Cube | None = None,
    max_length: int | None = None,
    too_long: TooLong = "truncate",
    special_tokens: InTexts | None = None,
    batch_tokens: int | None = None,
) -> Predictor[Classified | Labelled | Valued]: ...
@overload
def load(
    folder: Path | str,
    task: Literal["answer"],
    *,
    cube: Cube | None = None,
    k: int = 5,
    max_length: int | None = None,
    too_long: TooLong = "truncate",
    special_tokens: InTexts | None = None,
    batch_tokens: int | None = None,
) -> Predictor[Answered]: ...
@overload
def load(
    folder: Path | str,
    task: Literal["tag"],
    *,
    cube: Cube | None = None,
    max_length: int | None = None,
    too_long: TooLong = "truncate",
    special_tokens: InTexts | None = None,
    batch_tokens: int | None = None,
) -> Predictor[Tagged]: ...
@overload
def load(
    folder: Path | str,
    task: Literal["rank"],
    *,
    cube: Cube | None = None,
    top: int | None = None,
    collection: Path | str | Mapping[str, str] | None = None,
    max_length: int | None = None,
    too_long: TooLong = "truncate",
    special_tokens: InTexts | None = None,
    batch_tokens: int | None = None,
) -> Predictor[Ranked]: ...
@overload
def load(
    folder: Path | str,
    task: Literal["embed"],
    *,
    cube: Cube | None = None,
    pooling: Pooling | None = None,
    normalize: bool = False,
    dimensions: int | None = None,
    against: None = None,
    max_length: int | None = None,
    too_long: TooLong = "truncate",
    special_tokens: InTexts | None = None,
    batch_tokens: int | None = None,
) -> Predictor[Embedded]: ...
@overload
def load(
    folder: Path | str,
    task: Literal["embed"],
    *,
    cube: Cube | None = None,
    pooling: Pooling | None = None,
    normalize: bool = False,
    dimensions: int | None = None,
    against: Path | str,
    top: int | None = None,
    max_length: int | None = None,
    too_long: TooLong = "truncate",
    special_tokens: InTexts | None = None,
    batch_tokens: int | None = None,
) -> Predictor[Found]: ...
@overload
def load(
    folder: Path | str,
    task: TaskName,
    *,
    cube: Cube | None = None,
    k: int = 5,
    masked_share: float | None = None,
    seed: int = 0,
    pooling: Pooling | None = None,
    normalize: bool = False,
    dimensions: int | None = None,
    against: Path | str | None = None,
    top: int | None = None,
    collection: Path | str | Mapping[str, str] | None = None,
    max_length: int | None = None,
    too_long: TooLong = "truncate",
    special_tokens: InTexts | None = None,
    batch_tokens: int | None = None,
) -> Predictor[Any]: ...
def load(
    folder: Path | str,
    task: TaskName,
    *,
    cube: Cube | None = None,
    k: int = 5,
    masked_share: float | None = None,
    seed: int = 0,
    pooling: Pooling | None = None,
    normalize: bool = False,
    dimensions: int | None = None,
    against: Path | str | None = None,
    top: int | None = None,
    collection: Path | str | Mapping[str, str] | None = None,
    max_length: int | None = None,
    too_long: TooLong = "truncate",
    special_tokens: InTexts | None = None,
    batch_tokens: int | None = None,
) -> Predictor[Any]:
    """A model and its tokenizer, ready for texts. On a cube every rank calls it at the same time.

    Args:
        folder: a model folder, a run of `tools.pretrain` or one of its checkpoints, or a Hugging Face folder.
        task: "fill-mask", "score", "classify" (also for models that give several labels, or a number), "answer", "tag",
            "rank" or "embed".
        cube: where the model is to lie. Default: this process alone.
        k: of fill-mask, pieces for a mask; of answer, answers to a question.
        masked_share: of score, the share of a text's pieces that is hidden at once, drawn by `seed`. Default: each is
            hidden in turn.
        pooling: of embed, "mean" over tokens, "cls", "max" or "mean_sqrt_len". Default: as the folder's modules.json
            (sentence-transformers) has it, else "mean".
        normalize: of embed: whether vectors have length 1, also where the folder does not ask for it.
        dimensions: of embed: columns that are kept, from the first one; lengths of 1 become 1 again. Default: all.
        against: of embed: a file or folder of vectors that `tools.predict embed` has written. Results are then the
            `top` nearest of these.
        top: of rank, passages of each query that are given, best first (default: all); of embed with `against`, texts
            that are found (default: 5).
        collection: of rank, texts by their ids, or a corpus.jsonl as BEIR has it, for passages that are given by id.
        max_length: tokens of a sequence, special ones included; of answer and tag, of a window. Default: what the model
            was made with.
        too_long: whether the end of a longer text is left out, and counted, or the text refused. Of `answer` that is
            the question: contexts are read in windows, and may have any length. So are the texts of `tag`, unless
            those of several windows are to be refused.
        special_tokens: what the name of a special token in a text is: "text", or that token ("tokens"), as the
            transformers library has it. Default: as the model was fine-tuned, else text.
        batch_tokens: of a batch, over all ranks. Default: 2048 for each rank, up to 4096 for
            models with an inner size below 2048.

    Raises:
        ValueError: no model, one without the head that the task needs, a tokenizer of another model, or an option that
            cannot be; on every rank.
    """
    cube = cube or Cube.single()
    opened = run_on_all_ranks(cube, lambda: _opened(Path(folder), task, max_length))
    root, folder, sentences, weights = opened.root, opened.folder, opened.sentences, opened.weights
    if sentences is not None and cube.rank == 0:
        asked = [f"pooling {pooling}"] if pooling not in (None, sentences.pooling) else []
        asked += [f"at most {max_length} tokens"] if max_length not in (None, sentences.max_length) else []
        instead = f"; asked for instead: {', '.join(asked)}" if asked else ""
        _log.info("%s makes vectors by its modules.json: %s%s", root, sentences.in_words(), instead)
    tokenizer = run_on_all_ranks(cube, lambda: tokenizer_of(opened.folder))
    if (special_tokens or weights.facts.get("special_tokens")) == "tokens":
        run_on_all_ranks(cube, tokenizer.read_names)
    batch_tokens = _batch_tokens(weights.config, cube) if batch_tokens is None else batch_tokens
    length = opened.length
    made: PredictTask[Any, Any]
    # Nothing is drawn, neither for weights that are filled nor for dropout: the program's random numbers stay its own.
    # Heads that the task does not need may stay empty.
    config = dataclasses.replace(weights.config, dropout=0.0, attention_dropout=0.0, attention_out_dropout=None)
    if task == "answer":
        # Imported here: no other task needs it.
        from tools.predict.tasks import Answer, settings_for

        run_on_all_ranks(cube, lambda: check_types(config, tokenizer, str(folder)))
        settings = run_on_all_ranks(
            cube, lambda: _of(weights, lambda: settings_for(weights.facts, length, is_asked=max_length is not None))
        )
        with cube.skip_init():
            questions = BertForQuestionAnswering(config, cube)
        _fill(weights, questions, cube)
        made = Answer(questions, tokenizer, settings, k, batch_tokens, too_long)
        return Predictor(made, batch_tokens)
    if task == "tag":
        assert weights.outputs is not None, "there is a classifier of tokens"
        from tools.predict.tasks import Tag
        from tools.tagging.windows import TagSettings

        names = names_of(weights.labels, weights.outputs)
        of_tags = run_on_all_ranks(
            cube, lambda: _of(weights, lambda: TagSettings.from_facts(weights.facts, names, length))
        )
        with cube.skip_init():
            tags = BertForTokenClassification(config, weights.outputs, cube)
        _fill(weights, tags, cube)
        return Predictor(Tag(tags, tokenizer, names, of_tags, batch_tokens, too_long), batch_tokens)
    reader = TextEncoder(tokenizer, length, too_long)
    if task == "rank":
        # Imported here: no other task needs it.
        from tools.predict.rank import Rank, is_sigmoid, read_collection

        run_on_all_ranks(cube, lambda: check_types(config, tokenizer, str(folder)))
        sigmoid = run_on_all_ranks(cube, lambda: is_sigmoid(weights.settings))
        given = {} if collection is None else collection
        texts = given if isinstance(given, Mapping) else run_on_all_ranks(cube, lambda: read_collection(Path(given)))
        with cube.skip_init():
            scores = BertForSequenceClassification(config, weights.outputs or 1, cube)
        _fill(weights, scores, cube)
        made = Rank(scores, reader, batch_tokens, top=top, collection=texts, sigmoid=sigmoid)
        return Predictor(made, batch_tokens)
    if task in ("fill-mask", "score"):
        # Imported here: it builds on this package's other tasks.
        from tools.predict.score import Score

        with cube.skip_init():
            language = BertForPreTraining(config, cube)
        _fill(weights, language, cube)
        if task == "score":
            made = Score(language, reader, batch_tokens, masked_share, seed)
        else:
            made = FillMask(language, reader, k)
    elif task == "classify":
        problem = run_on_all_ranks(cube, lambda: _problem(weights))
        assert weights.outputs is not None, "there is a classifier"
        with cube.skip_init():
            classes = BertForSequenceClassification(config, weights.outputs, cube)
        _fill(weights, classes, cube)
        labels = None if problem == "regress" else names_of(weights.labels, weights.outputs)
        thresholds = run_on_all_ranks(cube, lambda: _thresholds(weights)) if problem == "labels" else None
        made = Classify(classes, reader, problem, labels, weights.facts.get("pairs"), thresholds)
    else:
        with cube.skip_init():
            encoder = BertModel(config, cube)
        _fill(weights, encoder, cube)
        how = pooling or (sentences.pooling if sentences else "mean")
        options: dict[str, Any] = {
            "normalize": normalize or (sentences is not None and sentences.normalize),
            "prepare": None if sentences is None else sentences.prepared,
            "dimensions": dimensions,
        }
        sizes = weights.facts.get("sizes") or ()
        if dimensions not in (None, config.hidden, *sizes) and cube.rank == 0:
            learnt = f"after {', '.join(map(str, sizes))}" if sizes else "nowhere"
            _log.warning("%s has learnt to be cut %s; vectors of %s numbers may be poor", root, learnt, dimensions)
        if against is None:
            made = Embed(encoder, reader, how, **options)
        else:
            stored = run_on_all_ranks(cube, lambda: open_vectors(Path(against)))
            made = Search(encoder, reader, how, stored=stored, top=5 if top is None else top, **options)
    return Predictor(made, batch_tokens)


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """What a folder says of itself, and the headers of its weights."""

    root: Path
    """With the model.json or the modules.json."""
    folder: Path
    """With the weights and the tokenizer."""
    sentences: SentenceSettings | None
    """Of embed, where the folder has a modules.json."""
    weights: WeightSource
    length: int
    """Tokens of a sequence, at most."""


def _opened(folder: Path, task: str, max_length: int | None) -> _Opened:
    # Imported here: who only reads this module's names needs no safetensors.
    from models.bert.huggingface import model_folder_of, open_weights

    root, where = model_folder_of(folder), ""
    sentences = sentence_settings(root) if task == "embed" else None
    if sentences is not None:
        folder = folder if sentences.encoder == root else sentences.encoder
        if max_length is None:
            max_length, where = sentences.max_length, f"{root}: "
    weights = _with_heads(open_weights(folder), task)
    length = _length(weights, max_length, where)
    return _Opened(root=root, folder=folder, sentences=sentences, weights=weights, length=length)


def check_folder(folder: Path, task: TaskName, shape: CubeShape, *, max_length: int | None = None) -> None:
    """Raises ValueError for what `load` would refuse of a folder on such a cube: all but its tokenizer, which takes
    longer to read, and the numbers of its weights. No process needs to be connected."""
    _opened(folder, task, max_length).weights.config.check(shape)


def _batch_tokens(config: BertConfig, cube: Cube) -> int:
    least, most = _BATCH_TOKENS
    return max(least, min(most, _BATCH_NUMBERS // config.inner_size)) * cube.shape.ranks


def _fill(weights: WeightSource, model: nn.Module, cube: Cube) -> None:
    """Puts weights into a model that is not to learn."""
    weights.fill(model, cube)
    if onednn_is_faster():
        for layer in model.modules():
            if isinstance(layer, Linear3D) and not isinstance(layer.weight, DTensor):
                # The same numbers, column after column in memory: oneDNN else puts them so at each product.
                layer.weight.data = layer.weight.data.t().contiguous().t()


def _problem(weights: WeightSource) -> ClassProblem:
    """What the classifier is for."""
    if weights.problem == "classify":
        return "classify"
    if weights.problem == "rank":
        raise ValueError(f"{weights.folder} gives passages of a query scores. Ask it so: python -m tools.predict rank.")
    if weights.problem == "regress":
        if weights.outputs != 1:
            raise ValueError(
                f"{weights.folder} is for regression with {weights.outputs} numbers of each text, and one is read here."
            )
        return "regress"
    told = (weights.settings or {}).get("problem_type")
    # Folders that were converted before model.json said it have it in the config.json alone.
    if weights.problem == "labels" or told == "multi_label_classification":
        return "labels"
    raise ValueError(
        f"{weights.folder} does not tell what its classifier is for: its problem is {weights.problem!r}, and the "
        f"problem_type of its config.json {told!r}. Known there are single_label_classification, "
        "multi_label_classification and regression."
    )


def _thresholds(weights: WeightSource) -> tuple[float, ...] | None:
    """Those that fine-tuning has found on dev."""
    told = weights.facts.get("thresholds")
    if told is None:
        return None
    if not isinstance(told, list) or len(told) != weights.outputs or not all(type(each) is float for each in told):
        must = f"facts.thresholds of its model.json must be {weights.outputs} numbers"
        raise ValueError(f"{weights.folder}: {must}. Got {told!r:.80}.")
    return tuple(told)


def _of(weights: WeightSource, action: Callable[[], R]) -> R:
    """The result of `action`, whose errors get the model's folder in front."""
    try:
        return action()
    except ValueError as problem:
        raise ValueError(f"{weights.folder}: {problem}") from None


def _with_heads(weights: WeightSource, task: str) -> WeightSource:
    if task not in _HEADS:
        raise ValueError(f"task must be one of {', '.join(_HEADS)}. Got {task!r}.")
    needed = _HEADS[task]
    if weights.config.has_prediction_head and needed and needed[-1] != "masked_lm":
        needed = ("prediction_head", needed[-1])
    missing = [head for head in needed if head not in weights.heads]
    if missing:
        has = ", ".join(weights.heads) or "none"
        kinds = (weights.settings or {}).get("architectures") or ()
        others = [str(kind) for kind in kinds if kind not in _READ] if isinstance(kinds, list) else []
        made = f", and is a {others[0]}, whose own head is not read here" if others else ""
        raise ValueError(
            f"{task} needs a model with the head {missing[-1]}. {weights.folder} has the heads: {has}{made}. Make one: "
            f"{_MAKERS[task]}"
        )
    return weights


def _length(weights: WeightSource, asked: int | None, where: str = "") -> int:
    """Tokens of a sequence, at most: as asked, or as the model was made. `where` stands before an error."""
    positions, made = weights.config.positions, weights.facts.get("max_length") or None
    if made is not None and (type(made) is not int or made < 5):
        must = "facts.max_length of its model.json must be a number of tokens, at least 5"
        raise ValueError(f"{weights.folder}: {must}. Got {made!r:.80}.")
    if weights.config.encoder != "classic":  # no table of positions ends
        return made or positions if asked is None else asked
    if asked is not None and asked > positions:
        raise ValueError(f"{where}max_length={asked} is more than the model's {positions} positions. Choose less.")
    return min(made or positions, positions) if asked is None else asked
