"""The kinds of question that a model is asked, each from queries to results."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from models.bert.config import BertConfig
from models.bert.model import BertForPreTraining, BertModel
from models.bert.tasks import (
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    Pooling,
    class_logits,
    likely_pieces,
    sentence_vectors,
)
from models.bert.text_batches import EncodedText
from tensor3d import Cube
from tools.corpus.tokenizers import Tokenizer
from tools.corpus.tokenizers.base import SPECIAL_NAMES
from tools.corpus.tokenizers.sentencepiece import SPACE
from tools.predict.inputs import Fields, InputProblem, Query
from tools.predict.results import (
    Answered,
    Classified,
    Embedded,
    Filled,
    Found,
    Hit,
    Labelled,
    Piece,
    Span,
    Tagged,
    TaggedSpan,
    Valued,
)
from tools.predict.stored_vectors import StoredVectors
from tools.predict.text_encoder import TextEncoder, TooLong
from tools.predict.vector_search import nearest
from tools.squad import AnswerSettings, answer_questions
from tools.squad.windows import parts_of
from tools.tagging.schemes import entities
from tools.tagging.windows import Pieces, TagSettings, WordTags, WordText, cut, tag_texts

TaskName = Literal["fill-mask", "score", "classify", "answer", "tag", "rank", "embed"]
ClassProblem = Literal["classify", "labels", "regress"]
P = TypeVar("P")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Ready(Generic[P]):
    """A query as its task computes with it."""

    content: P
    tokens: int
    """What it adds to a batch."""


class PredictTask(ABC, Generic[P, R_co]):
    """One kind of question, with the model that answers it."""

    fields: Fields
    config: BertConfig
    cube: Cube
    truncated: int = 0
    """Texts so far of which a part was left out."""
    named: int = 0
    """Texts so far with the name of a special token in them."""

    @property
    def findings(self) -> str:
        """What is to be told at the end of all texts, behind what else is."""
        return ""

    @abstractmethod
    def ready(self, queries: Sequence[Query]) -> list[Ready[P] | InputProblem]:
        """What is computed with, or why a query cannot be answered; the same on every rank."""

    @abstractmethod
    def results(self, batch: Sequence[P]) -> Sequence[R_co]:
        """Of a batch; every rank calls it at the same time with the same one."""


class TextTask(PredictTask[EncodedText, R_co]):
    """A task whose queries are one sequence each."""

    def __init__(
        self, model: BertForPreTraining | BertForSequenceClassification | BertModel, reader: TextEncoder
    ) -> None:
        self.config, self.cube = model.config, model.cube
        # A reader that refuses says so of one text of many; here each has its own problem.
        self.refuses = reader.too_long == "refuse"
        self.reader = TextEncoder(reader.tokenizer, reader.max_length)

    def ready(self, queries: Sequence[Query]) -> list[Ready[EncodedText] | InputProblem]:
        both = [query.second for query in queries if query.second is not None]
        encoded = self.reader.encode([*(query.first for query in queries), *both])
        self.named = self.reader.named
        seconds = iter(encoded[len(queries) :])
        return [
            self._ready(query, first, next(seconds) if query.second is not None else None)
            for query, first in zip(queries, encoded, strict=False)
        ]

    def _ready(
        self, query: Query, first: list[int], second: list[int] | None = None
    ) -> Ready[EncodedText] | InputProblem:
        for name, ids in ((self.fields.first, first), (self.fields.second, second)):
            if ids is not None and not ids:
                return problem_of(query, f'"{name}" has no token. Leave it out, or write something.')
        between = self.reader.tokenizer.layout.between
        tokens = len(first) + 2 + (len(second) + between if second is not None else 0)
        if second is not None and not self.config.has_type(self.reader.tokenizer.layout.second_type):
            return problem_of(query, f"the model has types below {self.config.types}, and cannot tell two texts apart.")
        if self.refuses and tokens > self.reader.max_length:
            return problem_of(
                query,
                f"{tokens} tokens with the special ones, and the model has places for {self.reader.max_length}. "
                "Shorten it, or let its end be left out: --too-long truncate.",
            )
        text = self.reader.sequence(first, second)
        self.truncated = self.reader.truncated
        return Ready(content=text, tokens=len(text.ids))


def problem_of(query: Query, error: str) -> InputProblem:
    return InputProblem(where=query.where, number=query.number, error=error, id=query.id)


class Classify(TextTask[Classified | Labelled | Valued]):
    """The class of a text or a pair, or its classes, or its number.

    Args:
        problem: what the head is for; "labels": several classes may hold at once, each with a probability of its own.
        labels: names of the classes; None for a model that gives a number.
        pairs: whether the model was fine-tuned on pairs; None: nobody knows, and both are read.
        thresholds: of "labels": a label holds from this probability on. None: above a half.

    Raises:
        ValueError: another number of labels than the model has classes.
    """

    fields = Fields(second="text_b")

    def __init__(
        self,
        model: BertForSequenceClassification,
        reader: TextEncoder,
        problem: ClassProblem,
        labels: Sequence[str] | None,
        pairs: bool | None = None,
        thresholds: Sequence[float] | None = None,
    ) -> None:
        super().__init__(model, reader)
        if len(labels or ("value",)) != model.outputs:
            raise ValueError(f"a label for each of the model's {model.outputs} outputs is needed. Got {labels}.")
        self.model, self.problem, self.labels = model, problem, tuple(labels or ())
        self.thresholds = None if thresholds is None else dict(zip(self.labels, thresholds, strict=True))
        if pairs is not None:
            kind = "pairs" if pairs else "single texts"
            self.fields = Fields(
                second="text_b" if pairs else None,
                needs_second=pairs,
                reason=f"The model was fine-tuned on {kind}.",
            )

    def results(self, batch: Sequence[EncodedText]) -> list[Classified | Labelled | Valued]:
        logits = finite(class_logits(self.model, batch))
        if self.problem == "regress":
            return [Valued(value=value) for value in logits[:, 0].tolist()]
        chances = logits.sigmoid() if self.problem == "labels" else logits.softmax(1)
        by_label = [dict(zip(self.labels, of_text, strict=True)) for of_text in chances.tolist()]
        if self.problem == "labels":
            return [Labelled(probabilities=probabilities, thresholds=self.thresholds) for probabilities in by_label]
        best = logits.argmax(1).tolist()
        return [
            Classified(label=self.labels[number], probabilities=probabilities)
            for number, probabilities in zip(best, by_label, strict=True)
        ]


_KEPT_BYTES = 2**26
"""Of vectors that are kept, for texts that come again: 21,845 of 768 numbers."""


class _VectorTask(TextTask[R_co]):
    """A task for which texts become vectors.

    Args:
        pooling: as of `sentence_vectors`.
        normalize: whether vectors have length 1.
        prepare: what becomes of a text before the tokenizer, such as a prompt before it.
        dimensions: columns that are kept, from the first one, before lengths become 1. None: all.

    Raises:
        ValueError: an unknown pooling, or dimensions that the model does not have.
    """

    fields = Fields()

    def __init__(
        self,
        model: BertModel,
        reader: TextEncoder,
        pooling: Pooling = "mean",
        *,
        normalize: bool = False,
        prepare: Callable[[str], str] | None = None,
        dimensions: int | None = None,
    ) -> None:
        super().__init__(model, reader)
        if pooling not in get_args(Pooling):
            raise ValueError(f"pooling must be one of {', '.join(get_args(Pooling))}. Got {pooling!r}.")
        if dimensions is not None and not 1 <= dimensions <= model.config.hidden:
            raise ValueError(f"dimensions must be between 1 and the model's {model.config.hidden}. Got {dimensions}.")
        self.model, self.pooling, self.normalize, self.prepare = model, pooling, normalize, prepare
        self.columns = dimensions or model.config.hidden
        self._kept: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()  # by texts, the latest last

    def ready(self, queries: Sequence[Query]) -> list[Ready[EncodedText] | InputProblem]:
        if self.prepare is not None:
            queries = [dataclasses.replace(query, first=self.prepare(query.first)) for query in queries]
        return super().ready(queries)

    def vectors(self, batch: Sequence[EncodedText]) -> Tensor:
        """(N, columns) in fp32. Equal texts have equal ones, to the bit, in whatever batches they come, unless so many
        others come between them that the first one is forgotten."""
        by_key = {text.key: text for text in batch}
        known = {key: self._kept[key] for key in by_key if key in self._kept}
        fresh = [key for key in by_key if key not in known]
        if fresh:
            computed = self._computed([by_key[key] for key in fresh]).numpy()
            known |= {key: vector.copy() for key, vector in zip(fresh, computed, strict=True)}
        for key in by_key:
            self._kept[key] = known[key]
            self._kept.move_to_end(key)
        while len(self._kept) * self.columns * 4 > _KEPT_BYTES:
            self._kept.popitem(last=False)
        return torch.from_numpy(np.stack([known[text.key] for text in batch]))

    def _computed(self, batch: Sequence[EncodedText]) -> Tensor:
        vectors = finite(sentence_vectors(self.model, batch, self.pooling)).float()[:, : self.columns]
        return F.normalize(vectors, dim=1) if self.normalize else vectors


class Embed(_VectorTask[Embedded]):
    """The vector of a text."""

    def results(self, batch: Sequence[EncodedText]) -> list[Embedded]:
        return [Embedded(vector=vector) for vector in self.vectors(batch).numpy()]


class Search(_VectorTask[Found]):
    """The nearest of stored vectors to that of a text, by cosine, exactly.

    Args:
        stored: to search in.
        top: hits of a text.

    Raises:
        ValueError: vectors of another size, `top` below 1.
    """

    def __init__(self, *arguments: Any, stored: StoredVectors, top: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if top < 1:
            raise ValueError(f"top must be at least 1. Got {top}.")
        if stored.shape[1] != self.columns:
            raise ValueError(
                f"{stored.files[0][0]} has vectors of {stored.shape[1]} numbers, and those of the texts have "
                f"{self.columns}. Take the model that has made them, and the same --dimensions."
            )
        self.stored, self.top = stored, top

    def results(self, batch: Sequence[EncodedText]) -> list[Found]:
        scores, places = nearest(self.vectors(batch), self.stored, self.top)
        return [
            Found(hits=tuple(self._hit(*pair) for pair in zip(*of_text, strict=True) if pair[1] >= 0))
            for of_text in zip(scores.tolist(), places.tolist(), strict=True)
        ]

    def _hit(self, score: float, place: int) -> Hit:
        return Hit(index=place, score=score, id=self.stored.id_of(place))


def finite(numbers: Tensor) -> Tensor:
    """The same. Raises FloatingPointError for numbers that are no answer, which would only look like one."""
    if not torch.isfinite(numbers).all():
        raise FloatingPointError("what the model says is not finite: its weights are spoilt. Take another checkpoint.")
    return numbers


def names_of(labels: Sequence[str] | None, outputs: int) -> tuple[str, ...]:
    """Labels, or, where a model has none, LABEL_0 and so on, as Hugging Face names them."""
    return tuple(labels) if labels else tuple(f"LABEL_{number}" for number in range(outputs))


# --- The task `fill-mask`: what may stand in the places of a text that are marked -------------------------------------

_BEGINNINGS = (SPACE, "Ġ")
"""Of the pieces that begin a word, in vocabularies of characters and of bytes."""
_BEFORE = ("a", "0", "e", "1", ".", "-", "(", "x", "q", "Z")
"""Words that may stand for a mask, so that what follows is encoded as behind a word: the first one with which it has
no piece in common."""


class _Part(NamedTuple):
    """What stands between two masks."""

    text: str
    goes_on: bool
    """There is no space between the mask and this."""


class FillMask(TextTask[Filled]):
    """The likeliest pieces for places of a text that its mask tokens mark.

    A mask takes the space before it, as pieces do in vocabularies whose pieces begin with one.

    Args:
        k: pieces of each place.

    Raises:
        ValueError: k below 1 or above the vocabulary.
    """

    fields = Fields()

    def __init__(self, model: BertForPreTraining, reader: TextEncoder, k: int = 5) -> None:
        super().__init__(model, reader)
        if not 1 <= k <= model.config.vocab:
            raise ValueError(f"k must lie between 1 and the vocabulary of {model.config.vocab}. Got {k}.")
        self.model, self.k = model, k
        self.mask = reader.tokenizer.special.mask
        self.name = reader.tokenizer.pieces([self.mask])[0]
        names = dict.fromkeys((self.name, SPECIAL_NAMES["mask"][0]))
        self._split = re.compile("|".join(map(re.escape, names))).split

    def ready(self, queries: Sequence[Query]) -> list[Ready[EncodedText] | InputProblem]:
        parts = [self._split(query.first) for query in queries]
        self.named += self.reader.tokenizer.count_named(map("\n".join, parts))  # masks are no texts' names here
        encoded = iter(self._encoded([part for of_text in parts for part in _between_masks(of_text)]))
        return [
            self._marked(query, [next(encoded) for _ in of_text]) for query, of_text in zip(queries, parts, strict=True)
        ]

    def _encoded(self, parts: Sequence[_Part]) -> list[list[int]]:
        """The ids of parts of texts. What goes on a word has no piece that begins one, as in a text without masks."""
        encode = self.reader.tokenizer.encode
        found = encode([part.text for part in parts])
        waiting = [place for place, part in enumerate(parts) if part.goes_on and self._begins_word(found[place])]
        for word in _BEFORE:
            if not waiting:
                break
            head, *whole = encode([word, *(word + parts[place].text for place in waiting)])
            for place, ids in zip(waiting, whole, strict=True):
                if ids[: len(head)] == head:
                    found[place] = ids[len(head) :]
            waiting = [place for place, ids in zip(waiting, whole, strict=True) if ids[: len(head)] != head]
        for place in waiting:
            if self.reader.tokenizer.pieces(found[place][:1]) == [SPACE]:
                del found[place][0]
        return found

    def _begins_word(self, ids: list[int]) -> bool:
        return bool(ids) and self.reader.tokenizer.pieces(ids[:1])[0].startswith(_BEGINNINGS)

    def _marked(self, query: Query, parts: list[list[int]]) -> Ready[EncodedText] | InputProblem:
        if len(parts) == 1:
            return problem_of(query, f"no mask. Write {self.name} where a piece is asked for.")
        ids = [number for part in parts for number in (self.mask, *part)][1:]
        found = self._ready(query, ids)
        if isinstance(found, InputProblem):
            return found
        text = found.content
        # No text becomes a special token by itself: these are the places that were marked.
        masked = np.flatnonzero(text.ids == self.mask)
        if len(masked) < len(parts) - 1:
            return problem_of(
                query, f"a mask stands behind the {self.reader.max_length} places of the model. Shorten the text."
            )
        return Ready(content=EncodedText(ids=text.ids, types=text.types, masked=masked), tokens=found.tokens)

    def results(self, batch: Sequence[EncodedText]) -> list[Filled]:
        ids, probabilities = likely_pieces(self.model, batch, self.k)
        finite(probabilities)
        # The embedding may have more rows than the vocabulary has pieces.
        known = self.reader.tokenizer.vocab_size
        pieces = [
            tuple(
                Piece(
                    piece=self.reader.tokenizer.pieces([number])[0] if number < known else "",
                    id=number,
                    probability=probability,
                    text=self.reader.tokenizer.decode([number]) if number < known else "",
                )
                for number, probability in zip(numbers, chances, strict=True)
            )
            for numbers, chances in zip(ids.tolist(), probabilities.tolist(), strict=True)
        ]
        places = iter(pieces)
        return [self._filled(text, [next(places) for _ in text.masked]) for text in batch]

    def _filled(self, text: EncodedText, masks: list[tuple[Piece, ...]]) -> Filled:
        ids = text.ids.copy()
        known = self.reader.tokenizer.vocab_size
        ids[text.masked] = [pieces[0].id if pieces[0].id < known else self.mask for pieces in masks]
        return Filled(text=self.reader.tokenizer.decode(ids[1:-1].tolist()), masks=tuple(masks))


def _between_masks(texts: Sequence[str]) -> Iterator[_Part]:
    for number, text in enumerate(texts):
        # The space before a mask is its own.
        kept = text.rstrip() if number < len(texts) - 1 else text
        yield _Part(kept, goes_on=number > 0 and not text[:1].isspace())


# --- The task `answer`: spans of a context that answer a question -----------------------------------------------------

Pair = tuple[str, str]


class Answer(PredictTask[Pair, Answered]):
    """The best answers to a question from a context, which may be longer than the model: it is read in windows.

    Args:
        k: answers of each question, at most.
        too_long: of questions with more tokens than `settings` has for them.
    """

    fields = Fields(first="question", second="context", needs_second=True)

    def __init__(
        self,
        model: BertForQuestionAnswering,
        tokenizer: Tokenizer,
        settings: AnswerSettings,
        k: int,
        batch_tokens: int,
        too_long: TooLong = "truncate",
    ) -> None:
        if k < 1:
            raise ValueError(f"k must be at least 1. Got {k}.")
        self.config, self.cube = model.config, model.cube
        self.model, self.tokenizer, self.k = model, tokenizer, k
        self.settings, self.batch_tokens = settings, batch_tokens
        self.refuses = too_long == "refuse"

    def ready(self, queries: Sequence[Query]) -> list[Ready[Pair] | InputProblem]:
        pairs = [(query.first, query.second or "") for query in queries]
        texts = [text for pair in pairs for text in pair]
        self.named += self.tokenizer.count_named(texts)
        encoded = iter(self.tokenizer.encode(texts))
        return [
            self._ready(query, pair, next(encoded), next(encoded)) for query, pair in zip(queries, pairs, strict=True)
        ]

    def _ready(self, query: Query, pair: Pair, question: list[int], context: list[int]) -> Ready[Pair] | InputProblem:
        for name, ids in ((self.fields.first, question), (self.fields.second, context)):
            if not ids:
                return problem_of(query, f'"{name}" has no token. Leave it out, or write something.')
        if len(question) > self.settings.question_length:
            if self.refuses:
                return problem_of(
                    query,
                    f"the question has {len(question)} tokens, and the model reads {self.settings.question_length}. "
                    "Shorten it, or let its end be left out: --too-long truncate.",
                )
            self.truncated += 1
        # Each window has the question, and windows overlap.
        head = min(len(question), self.settings.question_length) + 3
        room = max(1, self.settings.max_length - head)
        windows = 1 + -(-max(0, len(context) - room) // self.settings.stride)
        tokens = len(context) + windows * head + (windows - 1) * max(0, room - self.settings.stride)
        return Ready(content=pair, tokens=tokens)

    def results(self, batch: Sequence[Pair]) -> list[Answered]:
        found = answer_questions(
            self.model, self.tokenizer, batch, settings=self.settings, n_best=self.k, batch_tokens=self.batch_tokens
        )
        return [Answered(answers=tuple(Span(**dataclasses.asdict(answer)) for answer in answers)) for answers in found]


def settings_for(facts: Mapping[str, Any], length: int, *, is_asked: bool) -> AnswerSettings:
    """How a model reads questions: as its model.json has it, with shorter windows where it has fewer places.

    Args:
        length: tokens of a sequence, at most.
        is_asked: windows are to have just so many.

    Raises:
        ValueError: model.json has no such settings.
    """
    settings = AnswerSettings.from_facts(facts)
    if is_asked and length > settings.max_length:
        return dataclasses.replace(settings, max_length=length)
    return settings.fitted(length)


# --- The task `tag`: a tag for each word of a text, and the entities that they spell ----------------------------------


class TagText(NamedTuple):
    """A text as `Tag` computes with it."""

    text: WordText
    pieces: Pieces


class Tag(PredictTask[TagText, Tagged]):
    """The names, or whatever a model has learnt to find, in texts, which may be longer than the model: they are read in
    windows.

    Args:
        labels: tags in the order of the model's outputs.
        too_long: "refuse": a text of more than one window is refused.

    Raises:
        ValueError: another number of labels than the model has outputs.
    """

    fields = Fields(words="tokens")

    def __init__(
        self,
        model: BertForTokenClassification,
        tokenizer: Tokenizer,
        labels: Sequence[str],
        settings: TagSettings,
        batch_tokens: int,
        too_long: TooLong = "truncate",
    ) -> None:
        if len(labels) != model.outputs:
            raise ValueError(f"a label for each of the model's {model.outputs} outputs is needed. Got {labels}.")
        self.config, self.cube = model.config, model.cube
        self.model, self.tokenizer, self.labels = model, tokenizer, labels
        self.settings, self.batch_tokens = settings, batch_tokens
        self.refuses = too_long == "refuse"

    def ready(self, queries: Sequence[Query]) -> list[Ready[TagText] | InputProblem]:
        self.named += self.tokenizer.count_named(query.first for query in queries)
        texts = [
            WordText.of_text(query.first) if query.words is None else WordText.of_words(query.words)
            for query in queries
        ]
        return [self._ready(*each) for each in zip(queries, texts, cut(texts, self.tokenizer), strict=True)]

    def _ready(self, query: Query, text: WordText, pieces: Pieces) -> Ready[TagText] | InputProblem:
        room = self.settings.max_length - 2
        if not len(pieces.ids):
            return problem_of(query, f"{self.fields.in_words} has no token. Leave it out, or write something.")
        if self.refuses and len(pieces.ids) > room:
            return problem_of(
                query,
                f"{len(pieces.ids) + 2} tokens with the special ones, and a window has {room + 2}. Shorten it, or let "
                "it be read in several: --too-long truncate.",
            )
        parts = parts_of(len(pieces.ids), room, self.settings.stride)
        return Ready(content=TagText(text, pieces), tokens=sum(count + 2 for _, count in parts))

    def results(self, batch: Sequence[TagText]) -> list[Tagged]:
        pieces = [each.pieces for each in batch]
        found = tag_texts(self.model, pieces, self.tokenizer, self.settings, batch_tokens=self.batch_tokens)
        return [self._tagged(each.text, tags) for each, tags in zip(batch, found, strict=True)]

    def _tagged(self, text: WordText, found: WordTags) -> Tagged:
        tags = found.names(self.labels, self.settings.scheme)
        spans = []
        starts, ends = text.starts.tolist(), text.ends.tolist()
        sums = np.cumsum(np.concatenate(([0.0], found.probabilities)), dtype=np.float64).tolist()
        for label, first, stop in entities(tags, self.settings.scheme):
            start, end = starts[first], ends[stop - 1]
            chance = (sums[stop] - sums[first]) / (stop - first)
            spans.append(TaggedSpan(start=start, end=end, label=label, text=text.text[start:end], probability=chance))
        return Tagged(text=text.text, tokens=tuple(text.words), tags=tuple(tags), spans=tuple(spans))
