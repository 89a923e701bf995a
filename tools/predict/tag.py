"""The task `tag`: a tag for each word of a text, and the entities that they spell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from models.bert.tasks import BertForTokenClassification
from tools.corpus.tokenizers import Tokenizer
from tools.predict.inputs import Fields, InputProblem, Query
from tools.predict.results import Tagged, TaggedSpan
from tools.predict.tasks import PredictTask, Ready, problem_of
from tools.predict.text_encoder import TooLong
from tools.squad.windows import parts_of
from tools.tagging.schemes import entities
from tools.tagging.windows import Pieces, TagSettings, WordTags, WordText, cut, tag_texts, unknown_in


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
        pieces = cut(texts, self.tokenizer)
        self.unknown += unknown_in(texts, pieces, self.tokenizer)
        return [self._ready(*each) for each in zip(queries, texts, pieces, strict=True)]

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
