"""From documents of ids to shards of sequences and a plan of their packs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensor3d.data import MaskingRules
from tools.corpus.pipeline import Manifest, Stage, Team, draft
from tools.corpus.samples.document_runs import TOKENIZER, Corpus, CorpusSurvey, DocRun, parse_corpora, survey
from tools.corpus.samples.draw import CONTINUATIONS, PARTS, DrawRules, DrawUnit, Piece, draw
from tools.corpus.samples.merge_shards import (
    GatherUnit,
    cuts_missing,
    deal,
    gather,
    hint_at_random_pairs,
    kept,
    targets,
    unigram_entropy,
)
from tools.corpus.samples.options import SamplesOptions, write_plan
from tools.corpus.samples.reader import HELD_OUT, sample_shard_names
from tools.corpus.tokenizers import Tokenizer, copy_tokenizer, load_tokenizer

# --- From documents of ids to shards of sequences and a plan of their packs -------------------------------------------

_log = logging.getLogger(__name__)
MOST_CUTS = 1000
"""Times that a corpus is drawn, at most; weights that ask for more are a mistake."""
_BYTES = 2
"""Of an id, about: for the progress bar, and for dealing units to workers."""


def samples(options: SamplesOptions, team: Team) -> Manifest:
    """Draws sequences from corpora and writes them as shards, with the held-out ones and a plan of packs.

    Raises:
        ValueError: an option out of range, a corpus that is missing, damaged or tokenized otherwise than the others,
            whole words of a tokenizer that does not tell them, or too few documents or sequences for what is asked.
    """
    options.check()
    corpora = parse_corpora(options.corpora)
    tokenizer, folder = _tokenizer(options, corpora)
    rules = DrawRules(
        max_length=options.max_length,
        short_probability=options.short_probability,
        single=options.single_texts,
        static=options.mask_rules if options.masking == "static" else None,
        whole_words=options.whole_words,
        special=tokenizer.special,
        seed=options.seed,
    )
    manifest = _made(options, rules, corpora, tokenizer, folder, team)
    random = manifest.counts.get("random_pairs", 0)  # which folders of before do not have
    if team.rank == 0 and (hint := hint_at_random_pairs(random, manifest.counts["sequences"])):
        _log.warning("hint: %s", hint)
    return manifest


def _made(
    options: SamplesOptions,
    rules: DrawRules,
    corpora: Sequence[Corpus],
    tokenizer: Tokenizer,
    folder: Path,
    team: Team,
) -> Manifest:
    # Asked before anything is written: some tokenizers do not tell where words are.
    continuations = tokenizer.continuations if options.whole_words else None
    with Stage.open(options, "samples", _settings(options, corpora, tokenizer), team) as step:
        if step.done:
            return step.manifest
        step.on_first(partial(_begin, step, continuations, folder))
        surveyed = step.on_first(
            partial(survey, corpora, seed=options.seed, held_out=options.held_out, run_tokens=options.run_tokens)
        )
        return _Samples(options, rules, corpora, surveyed, step).make()


_OF_PART = ("documents", "sequences", "tokens", "cut_documents", "cut_sentences")


@dataclass(frozen=True)
class _Drawn:
    """A part, and the sequences in it."""

    name: str
    documents: int
    """Those it was drawn from: with sentences, and not left out."""
    sequences: int
    tokens: int
    cut_documents: int
    """Of single texts: documents that lie in several of them."""
    cut_sentences: int
    """Of single texts: sentences that are longer than one, of which no token is lost either."""

    def bytes_of(self, sequences: int) -> int:
        """Of so many of them, about."""
        return _BYTES * self.tokens * sequences // max(1, self.sequences)


class _Samples:
    """The phases of the step, on every rank alike."""

    def __init__(
        self, options: SamplesOptions, rules: DrawRules, corpora: Sequence[Corpus], surveyed: CorpusSurvey, step: Stage
    ) -> None:
        self._options, self._rules, self._corpora, self._survey, self._step = options, rules, corpora, surveyed, step

    def make(self) -> Manifest:
        options = self._options
        drawn, held_out = self._first_cuts()
        totals = [sum(part.sequences for cut in cuts for part in cut) for cuts in drawn]
        for corpus, total in zip(self._corpora, totals, strict=True):
            if not total:
                raise ValueError(f"{corpus.prefix} has given no sequence; all of its documents were left out.")
        weights = None if self._corpora[0].weight is None else [c.weight or 0.0 for c in self._corpora]
        wanted = targets(totals, weights)
        self._draw_again(drawn, wanted)
        used = [
            kept([[part.sequences for part in cut] for cut in cuts], target)
            for cuts, target in zip(drawn, wanted, strict=True)
        ]
        documents = [sum(part.documents for part in cuts[0]) for cuts in drawn]
        total = sum(wanted)
        if total < options.shards:
            raise ValueError(f"{total} sequences cannot fill {options.shards} shards. Lower shards, or add documents.")
        shards, evaluation = self._gather(drawn, used, held_out)
        histogram = np.sum([shard["histogram"] for shard in shards], axis=0)
        names = sample_shard_names(options.shards)
        entropy = self._step.on_first(partial(unigram_entropy, self._step.scratch, names))
        packing = self._step.on_first(partial(write_plan, self._step.folder, histogram, options))
        return self._step.finish(
            {
                "documents": sum(documents),
                "held_out_documents": sum(part.documents for part in held_out),
                "sequences": total,
                "tokens": sum(shard["tokens"] for shard in shards),
                **(_cuts(drawn) if options.single_texts else _shares([shard["random"] for shard in shards], total)),
                "unigram_entropy": entropy,
                "shards": [shard["sequences"] for shard in shards],
                "held_out_sequences": evaluation["sequences"] if evaluation else 0,
                "held_out_tokens": evaluation["tokens"] if evaluation else 0,
                "corpora": [
                    {
                        "documents": documents_here,
                        "sequences": target,
                        "share": target / total,
                        "passes": _passes(cuts, used_here),
                    }
                    for documents_here, target, cuts, used_here in zip(documents, wanted, drawn, used, strict=True)
                ],
                "packing": packing,
            }
        )

    def _first_cuts(self) -> tuple[list[list[list[_Drawn]]], list[_Drawn]]:
        """The parts of each cut of each corpus, as often as every corpus is drawn; and those that are held out."""
        units = [
            unit
            for corpus in self._corpora
            for cut in range(self._options.duplicates)
            for unit in self._cut(corpus, cut)
        ]
        aside = [
            self._unit(corpus, 0, number, run, held_out=True)
            for corpus in self._corpora
            for number, run in enumerate(self._survey.cuts[corpus.number].held_out)
        ]
        parts = self._draw("draw", [*aside, *units])
        return self._by_corpus(units, parts[len(aside) :]), parts[: len(aside)]

    def _draw_again(self, drawn: list[list[list[_Drawn]]], wanted: Sequence[int]) -> None:
        """Draws corpora that are too small for their weights, until they are not. Cuts differ in their sequences, so
        that the first estimate may fall short."""
        for phase in range(MOST_CUTS):
            units = []
            for corpus, cuts, target in zip(self._corpora, drawn, wanted, strict=True):
                more = cuts_missing([sum(part.sequences for part in cut) for cut in cuts], target)
                if len(cuts) + more > MOST_CUTS:
                    raise ValueError(
                        f"{corpus.prefix} would be drawn {len(cuts) + more} times to have its weight of "
                        f"{corpus.weight}; {MOST_CUTS} is the most. Lower its weight, or add documents to it."
                    )
                units += [unit for cut in range(len(cuts), len(cuts) + more) for unit in self._cut(corpus, cut)]
            if not units:
                return
            parts = self._draw(f"draw-again-{phase:03d}", units)
            for cuts, more_cuts in zip(drawn, self._by_corpus(units, parts), strict=True):
                cuts += more_cuts

    def _gather(
        self, drawn: list[list[list[_Drawn]]], used: list[list[list[int]]], held_out: list[_Drawn]
    ) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """Writes the shards, and the held-out sequences if there are any."""
        parts = [part for cuts in drawn for cut in cuts for part in cut]
        counts = [count for cuts in used for cut in cuts for count in cut]
        pieces = [
            tuple(Piece(part.name, begin, end) for part, (begin, end) in zip(parts, places, strict=True) if end > begin)
            for places in deal(counts, self._options.shards)
        ]
        named = dict(zip(sample_shard_names(self._options.shards), pieces, strict=True))
        if held_out:
            named[HELD_OUT] = tuple(Piece(part.name, 0, part.sequences) for part in held_out)
        of = {part.name: part for part in (*parts, *held_out)}
        units = [
            GatherUnit(
                name=name, size=sum(of[piece.part].bytes_of(piece.end - piece.begin) for piece in own), pieces=own
            )
            for name, own in named.items()
        ]
        results = self._step.run("gather", units, partial(gather, self._rules))
        return results[: len(pieces)], results[-1] if held_out else None

    def _draw(self, phase: str, units: Sequence[DrawUnit]) -> list[_Drawn]:
        results = self._step.run(phase, units, partial(draw, self._rules))
        return [
            _Drawn(unit.name, **{name: result[name] for name in _OF_PART})
            for unit, result in zip(units, results, strict=True)
        ]

    def _by_corpus(self, units: Sequence[DrawUnit], parts: Sequence[_Drawn]) -> list[list[list[_Drawn]]]:
        found: list[dict[int, list[_Drawn]]] = [{} for _ in self._corpora]
        for unit, part in zip(units, parts, strict=True):
            found[unit.corpus].setdefault(unit.cut, []).append(part)
        return [list(cuts.values()) for cuts in found]

    def _cut(self, corpus: Corpus, cut: int) -> list[DrawUnit]:
        runs = self._survey.cuts[corpus.number].training
        return [self._unit(corpus, cut, number, run, held_out=False) for number, run in enumerate(runs)]

    def _unit(self, corpus: Corpus, cut: int, number: int, run: DocRun, *, held_out: bool) -> DrawUnit:
        kind = "heldout" if held_out else "train"
        return DrawUnit(
            name=f"{kind}-{corpus.number:03d}-{cut:04d}-{number:06d}",
            size=_BYTES * run.ids,
            corpus=corpus.number,
            cut=cut,
            run=number,
            prefix=corpus.prefix.absolute(),
            first=run.first,
            end=run.end,
            choice=corpus.choice(self._options.seed, self._survey.limit),
            held_out=held_out,
        )


def _shares(random: Sequence[int], pairs: int) -> dict[str, Any]:
    return {"random_pairs": sum(random), "share_of_random_pairs": round(sum(random) / pairs, 4)}


def _cuts(drawn: Sequence[Sequence[Sequence[_Drawn]]]) -> dict[str, Any]:
    """When each corpus was gone through for the first time."""
    first = [part for cuts in drawn for part in cuts[0]]
    return {name: sum(getattr(part, name) for part in first) for name in ("cut_documents", "cut_sentences")}


def _passes(cuts: Sequence[Sequence[_Drawn]], used: Sequence[Sequence[int]]) -> float:
    """How often a corpus was gone through; the last time perhaps in part."""
    return sum(sum(here) / sum(part.sequences for part in cut) for cut, here in zip(cuts, used, strict=True))


def _tokenizer(options: SamplesOptions, corpora: Sequence[Corpus]) -> tuple[Tokenizer, Path]:
    """The tokenizer of all corpora, and its folder."""
    folders = [corpus.tokenizer for corpus in corpora if corpus.tokenizer is not None]
    unknown = [str(corpus.prefix) for corpus in corpora if corpus.tokenizer is None]
    if unknown and options.tokenizer is None:
        raise ValueError(f"{unknown[0]} does not say which tokenizer made it: name its folder with --tokenizer.")
    if options.tokenizer is not None:
        folders.append(options.tokenizer)
    tokenizers = [load_tokenizer(folder) for folder in folders]
    for folder, tokenizer in zip(folders, tokenizers, strict=True):
        if tokenizer.fingerprint != tokenizers[0].fingerprint:
            raise ValueError(
                f"{folder} and {folders[0]} hold different tokenizers, so an id would mean two things. Tokenize all "
                "corpora with one tokenizer."
            )
    return tokenizers[0], folders[0]


def _settings(options: SamplesOptions, corpora: Sequence[Corpus], tokenizer: Tokenizer) -> dict[str, Any]:
    left_out = {"output", "skip_bad", "workers", "corpora", "tokenizer", "capacity", "max_sequences", "masked_per_pack"}
    rules, limits = options.mask_rules, options.limits()
    if rules == MaskingRules(share=rules.share):
        left_out |= {
            "mask_replace",
            "random_replace",
            "masked_spans",
        }  # as in folders of before, which say nothing of them
    return {
        **{name: value for name, value in asdict(options).items() if name not in left_out},
        "capacity": limits.capacity,
        "max_sequences": limits.max_sequences,
        "masked_per_pack": limits.budget,
        "corpora": [{"files": corpus.fingerprint(), "weight": corpus.weight} for corpus in corpora],
        "tokenizer": tokenizer.fingerprint,
        "special": {name: getattr(tokenizer.special, name) for name in ("vocab_size", "pad", "cls", "sep", "mask")},
    }


def _begin(step: Stage, continuations: NDArray[np.generic] | None, folder: Path) -> None:
    """What the phases find: the tokenizer, and folders to write to."""
    (step.scratch / PARTS).mkdir(parents=True, exist_ok=True)
    copy_tokenizer(folder, step.folder / TOKENIZER)
    if continuations is not None:
        with draft(step.folder / CONTINUATIONS) as file:
            np.save(file, continuations)
