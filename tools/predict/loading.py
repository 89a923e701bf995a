"""From a folder with a model to a predictor."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

from torch import nn
from torch.distributed.tensor import DTensor

from models.bert.config import BertConfig
from models.bert.embedding import BertForSentenceEmbedding
from models.bert.huggingface.architectures import ARCHITECTURES
from models.bert.model import BertForPreTraining
from models.bert.tasks import (
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    Pooling,
)
from tensor3d import Cube, CubeShape, Linear3D
from tensor3d.distributed.object_collectives import check_all_same_on_all_ranks, first_names, run_on_all_ranks
from tensor3d.ops.products import onednn_is_faster
from tools.corpus.tokenizers.base import InTexts, Tokenizer
from tools.corpus.tokenizers.model_dir import tokenizer_of
from tools.predict.embed import Embed, Search
from tools.predict.fill_mask import FillMask
from tools.predict.predictor import Predictor
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
from tools.predict.tasks import Classify, ClassProblem, PredictTask, TaskName, names_of
from tools.predict.text_encoder import TextEncoder, TooLong, check_types

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from models.bert.huggingface import WeightSource


_log = logging.getLogger(__name__)
_BATCH_TOKENS = (2048, 4096)
"""Of a batch, for each rank, at least and at most."""
_BATCH_NUMBERS = 2**22
"""Of a batch between the products of a feed-forward block, about: on a CPU they still fit the caches."""
R = TypeVar("R")
M = TypeVar("M", bound=nn.Module)

_HEADS: dict[str, tuple[str, ...]] = {
    "fill-mask": ("masked_lm",),
    "score": ("masked_lm",),
    "classify": ("classifier",),
    "answer": ("answers",),
    "tag": ("tags",),
    "rank": ("classifier",),
    "embed": (),
}
_OF_WHOLE_TEXTS = ("classify", "rank", "embed")
"""Tasks that need no [MASK], and [CLS] only where the tokenizer puts one."""
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


class _Common(TypedDict, total=False):
    """Options of every task."""

    cube: Cube | None
    max_length: int | None
    too_long: TooLong
    special_tokens: InTexts | None
    batch_tokens: int | None


class _OfVectors(_Common, total=False):
    """Options of embed, whether it searches or not."""

    pooling: Pooling | None
    normalize: bool
    dimensions: int | None
    prompt_name: str | None


# fmt: off
@overload
def load(
    folder: Path | str, task: Literal["fill-mask"], *, k: int = 5, **common: Unpack[_Common]
) -> Predictor[Filled]: ...
@overload
def load(
    folder: Path | str, task: Literal["score"], *, masked_share: float | None = None, seed: int = 0,
    **common: Unpack[_Common],
) -> Predictor[Scored]: ...
@overload
def load(
    folder: Path | str, task: Literal["classify"], **common: Unpack[_Common]
) -> Predictor[Classified | Labelled | Valued]: ...
@overload
def load(
    folder: Path | str, task: Literal["answer"], *, k: int = 5, **common: Unpack[_Common]
) -> Predictor[Answered]: ...
@overload
def load(folder: Path | str, task: Literal["tag"], **common: Unpack[_Common]) -> Predictor[Tagged]: ...
@overload
def load(
    folder: Path | str, task: Literal["rank"], *, top: int | None = None,
    collection: Path | str | Mapping[str, str] | None = None, **common: Unpack[_Common],
) -> Predictor[Ranked]: ...
@overload
def load(
    folder: Path | str, task: Literal["embed"], *, against: None = None, **common: Unpack[_OfVectors]
) -> Predictor[Embedded]: ...
@overload
def load(
    folder: Path | str, task: Literal["embed"], *, against: Path | str, top: int | None = None,
    **common: Unpack[_OfVectors],
) -> Predictor[Found]: ...
@overload
def load(
    folder: Path | str, task: TaskName, *, k: int = 5, masked_share: float | None = None, seed: int = 0,
    against: Path | str | None = None, top: int | None = None,
    collection: Path | str | Mapping[str, str] | None = None, **common: Unpack[_OfVectors],
) -> Predictor[Any]: ...
# fmt: on
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
    prompt_name: str | None = None,
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
        pooling: of embed, "mean" over tokens, "cls", "last", "max", "mean_sqrt_len" or "weightedmean". Default: as the
            folder's modules.json (sentence-transformers) has it, else "mean". Its dense layers are behind whichever.
        normalize: of embed: whether vectors have length 1, also where the folder does not ask for it.
        dimensions: of embed: columns that are kept, from the first one; lengths of 1 become 1 again. Default: all.
        prompt_name: of embed: the prompt that stands before each text, of those in the folder's
            config_sentence_transformers.json. Default: that which it names as the default, else none.
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
    opened = run_on_all_ranks(cube, lambda: _opened(Path(folder), task, max_length, prompt_name))
    weights = opened.weights
    if cube.rank == 0 and opened.sentences is not None:
        _tell_sentences(opened.root, opened.sentences, pooling, max_length)
    tokenizer = run_on_all_ranks(cube, lambda: tokenizer_of(opened.folder))
    if task not in _OF_WHOLE_TEXTS:
        run_on_all_ranks(cube, lambda: tokenizer.special)
    if task == "embed":
        run_on_all_ranks(cube, lambda: tokenizer.end)
    if (special_tokens or weights.facts.get("special_tokens")) == "tokens":
        run_on_all_ranks(cube, tokenizer.read_names)
    if cube.shape.ranks > 1:
        check_all_same_on_all_ranks(cube, _read_by_each(weights, tokenizer))
    source = _Source(
        opened=opened,
        cube=cube,
        tokenizer=tokenizer,
        too_long=too_long,
        batch_tokens=_batch_tokens(weights.config, cube) if batch_tokens is None else batch_tokens,
        # Nothing is drawn, neither for weights that are filled nor for dropout: the program's random numbers stay its
        # own.
        config=dataclasses.replace(weights.config, dropout=0.0, attention_dropout=0.0, attention_out_dropout=None),
    )
    made: PredictTask[Any, Any]
    if task == "fill-mask":
        made = FillMask(source.model(BertForPreTraining), source.reader, k)
    elif task == "score":
        made = _score(source, masked_share, seed)
    elif task == "classify":
        made = _classify(source)
    elif task == "answer":
        made = _answer(source, k, is_asked=max_length is not None)
    elif task == "tag":
        made = _tag(source)
    elif task == "rank":
        made = _rank(source, top, collection)
    else:
        made = _embed(source, pooling, normalize, dimensions, against, top)
    return Predictor(made, source.batch_tokens)


def check_folder(
    folder: Path, task: TaskName, shape: CubeShape, *, max_length: int | None = None, prompt_name: str | None = None
) -> None:
    """Raises ValueError for what `load` would refuse of a folder on such a cube: all but its tokenizer, which takes
    longer to read, and the numbers of its weights. No process needs to be connected."""
    _opened(folder, task, max_length, prompt_name).weights.config.check(shape)


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


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What a task is made of."""

    opened: _Opened
    cube: Cube
    tokenizer: Tokenizer
    too_long: TooLong
    batch_tokens: int
    config: BertConfig

    @property
    def weights(self) -> WeightSource:
        return self.opened.weights

    @property
    def reader(self) -> TextEncoder:
        return TextEncoder(self.tokenizer, self.opened.length, self.too_long)

    def check_types(self) -> None:
        """Raises ValueError, on every rank, where the model has no types for the parts of a pair."""
        run_on_all_ranks(self.cube, lambda: check_types(self.config, self.tokenizer, str(self.opened.folder)))

    def told(self, action: Callable[[], R]) -> R:
        """The result of `action`, on every rank; its errors get the model's folder in front."""

        def named() -> R:
            try:
                return action()
            except ValueError as problem:
                raise ValueError(f"{self.weights.folder}: {problem}") from None

        return run_on_all_ranks(self.cube, named)

    def model(self, make: Callable[[BertConfig, Cube], M]) -> M:
        """With the folder's weights. Heads that the task does not need may stay empty."""
        with self.cube.skip_init():
            model = make(self.config, self.cube)
        _fill(self.weights, model, self.cube)
        return model

    def classifier(self, make: Callable[[BertConfig, int, Cube], M]) -> M:
        return self.model(lambda config, cube: make(config, self.outputs, cube))

    @property
    def outputs(self) -> int:
        """Of the classifier."""
        assert self.weights.outputs is not None, "there is a classifier"
        return self.weights.outputs


# --- Each task. What only one of them needs is imported there ---------------------------------------------------------


def _score(source: _Source, masked_share: float | None, seed: int) -> PredictTask[Any, Any]:
    from tools.predict.score import Score

    model = source.model(BertForPreTraining)
    return Score(model, source.reader, source.batch_tokens, masked_share, seed)


def _classify(source: _Source) -> PredictTask[Any, Any]:
    weights, cube = source.weights, source.cube
    problem = run_on_all_ranks(cube, lambda: _problem(weights))
    classes = source.classifier(BertForSequenceClassification)
    labels = None if problem == "regress" else names_of(weights.labels, source.outputs)
    thresholds = run_on_all_ranks(cube, lambda: _thresholds(weights)) if problem == "labels" else None
    return Classify(classes, source.reader, problem, labels, weights.facts.get("pairs"), thresholds)


def _answer(source: _Source, k: int, *, is_asked: bool) -> PredictTask[Any, Any]:
    from tools.predict.answer import Answer, settings_for

    source.check_types()
    settings = source.told(lambda: settings_for(source.weights.facts, source.opened.length, is_asked=is_asked))
    model = source.model(BertForQuestionAnswering)
    return Answer(model, source.tokenizer, settings, k, source.batch_tokens, source.too_long)


def _tag(source: _Source) -> PredictTask[Any, Any]:
    from tools.predict.tag import Tag
    from tools.tagging.windows import TagSettings

    weights = source.weights
    names = names_of(weights.labels, source.outputs)
    settings = source.told(lambda: TagSettings.from_facts(weights.facts, names, source.opened.length))
    model = source.classifier(BertForTokenClassification)
    return Tag(model, source.tokenizer, names, settings, source.batch_tokens, source.too_long)


def _rank(source: _Source, top: int | None, collection: Path | str | Mapping[str, str] | None) -> PredictTask[Any, Any]:
    from tools.predict.rank import Rank, is_sigmoid, read_collection

    cube, weights = source.cube, source.weights
    source.check_types()
    sigmoid = run_on_all_ranks(cube, lambda: is_sigmoid(weights.settings))
    given = {} if collection is None else collection
    texts = given if isinstance(given, Mapping) else run_on_all_ranks(cube, lambda: read_collection(Path(given)))
    model = source.classifier(BertForSequenceClassification)
    return Rank(model, source.reader, source.batch_tokens, top=top, collection=texts, sigmoid=sigmoid)


def _embed(
    source: _Source,
    pooling: Pooling | None,
    normalize: bool,
    dimensions: int | None,
    against: Path | str | None,
    top: int | None,
) -> PredictTask[Any, Any]:
    cube, weights, sentences = source.cube, source.weights, source.opened.sentences
    layers = () if sentences is None else sentences.dense
    model = source.model(lambda config, cube: BertForSentenceEmbedding(config, cube, dense=layers))
    sizes = weights.facts.get("sizes") or ()
    if dimensions not in (None, model.width, *sizes) and cube.rank == 0:
        learnt = f"after {', '.join(map(str, sizes))}" if sizes else "nowhere"
        root = source.opened.root
        _log.warning("%s has learnt to be cut %s; vectors of %s numbers may be poor", root, learnt, dimensions)
    how = pooling or (sentences.pooling if sentences else "mean")
    options: dict[str, Any] = {
        "normalize": normalize or (sentences is not None and sentences.normalize),
        "prepare": None if sentences is None else sentences.prepared,
        "dimensions": dimensions,
    }
    if against is None:
        return Embed(model, source.reader, how, **options)
    stored = run_on_all_ranks(cube, lambda: open_vectors(Path(against)))
    return Search(model, source.reader, how, stored=stored, top=5 if top is None else top, **options)


# --- The folder -------------------------------------------------------------------------------------------------------


def _tell_sentences(root: Path, sentences: SentenceSettings, pooling: Pooling | None, max_length: int | None) -> None:
    """Whose settings make vectors."""
    asked = [f"pooling {pooling}"] if pooling not in (None, sentences.pooling) else []
    asked += [f"at most {max_length} tokens"] if max_length not in (None, sentences.max_length) else []
    instead = f"; asked for instead: {', '.join(asked)}" if asked else ""
    _log.info("%s makes vectors by its modules.json: %s%s", root, sentences.in_words(), instead)


def _opened(folder: Path, task: str, max_length: int | None, prompt_name: str | None = None) -> _Opened:
    # Imported here: who only reads this module's names needs no safetensors.
    from models.bert.huggingface import model_folder_of, open_weights

    root, where = model_folder_of(folder), ""
    sentences = sentence_settings(root) if task == "embed" else None
    if prompt_name is not None:
        if sentences is None:
            raise ValueError(
                f"{root} has no prompt of the name {prompt_name!r:.80}: folders of sentence-transformers have some. "
                "Write it into the texts."
            )
        sentences = sentences.with_prompt(prompt_name, root)
    if sentences is not None:
        folder = folder if sentences.encoder == root else sentences.encoder
        if max_length is None:
            max_length, where = sentences.max_length, f"{root}: "
    weights = _with_heads(open_weights(folder), task)
    if sentences is not None:
        weights = sentences.with_dense(weights)
    length = _length(weights, max_length, where)
    return _Opened(root=root, folder=folder, sentences=sentences, weights=weights, length=length)


def _batch_tokens(config: BertConfig, cube: Cube) -> int:
    least, most = _BATCH_TOKENS
    return max(least, min(most, _BATCH_NUMBERS // config.inner_size)) * cube.shape.ranks


def _read_by_each(weights: WeightSource, tokenizer: Tokenizer) -> dict[str, str]:
    """Of what a rank reads for itself, and lays out texts by: what it is, and a hash."""
    said = (weights.config, weights.heads, weights.outputs, weights.labels, weights.problem)
    pieces = tokenizer.pieces(list(range(tokenizer.vocab_size)))
    return {
        f"{what} in {weights.folder}": hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()
        for what, value in (("the model", said), ("the tokenizer", pieces))
    }


def _fill(weights: WeightSource, model: nn.Module, cube: Cube) -> None:
    """Puts weights into a model that is not to learn.

    Raises:
        FloatingPointError: some are not finite, on every rank. What a model says need not show it: on CPUs PyTorch's
            attention gives zeros for queries that are no numbers.
    """
    if spoilt := weights.fill(model, cube).spoilt:
        raise FloatingPointError(
            f"{weights.folder}: its weights are spoilt, {first_names(spoilt, 4)} not finite. Take another checkpoint."
        )
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


def _with_heads(weights: WeightSource, task: str) -> WeightSource:
    if task not in _HEADS:
        raise ValueError(f"task must be one of {', '.join(_HEADS)}. Got {task!r}.")
    needed = _HEADS[task]
    if "classifier" in needed:
        needed = (*filter(None, (weights.config.before_classifier,)), *needed)
    elif weights.config.traits.prediction_head and needed and needed[-1] != "masked_lm":
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
    if weights.config.has_rotary:  # no table of positions ends
        return made or positions if asked is None else asked
    if asked is not None and asked > positions:
        raise ValueError(f"{where}max_length={asked} is more than the model's {positions} positions. Choose less.")
    return min(made or positions, positions) if asked is None else asked
