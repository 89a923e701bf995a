"""`python -m tools.predict TASK MODEL [TEXT ...]`: options, and from input to output."""

from __future__ import annotations

import logging
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from models.bert.tasks import Pooling
from tensor3d import Cube, MixedPrecisionPolicy
from tensor3d.distributed.object_collectives import run_on_rank0
from tensor3d.distributed.process_group import is_launched
from tools.common.cli import CubeCommand, cube_of, run_command
from tools.common.files import check_output, draft, not_plain_text
from tools.common.garbage import loaded_objects_left_alone
from tools.common.idle_options import IdleRule
from tools.corpus.quick.text_sources import has_cr_alone
from tools.corpus.tokenizers.base import InTexts
from tools.predict.embed import Embed
from tools.predict.inputs import Fields, InputProblem, Query, query_of
from tools.predict.loading import check_folder, load
from tools.predict.outputs import (
    ArrayOutput,
    ColumnsOutput,
    JsonOutput,
    Outcome,
    OutputProgress,
    ParquetOutput,
    ReadableOutput,
    ResultWriter,
)
from tools.predict.predictor import OnError, Predictor, StopError
from tools.predict.results import Scored, Tagged
from tools.predict.stream import IDLE, Block, ListInput, Source, StreamInput, StreamStats, blocks_of
from tools.predict.tasks import TaskName
from tools.predict.text_encoder import TooLong
from tools.training.factory import TYPES

_log = logging.getLogger("tools.predict")
_STDIN = Path("-")
_IN_WORDS = {"jsonl": "lines of JSON", "npy": "an array", "parquet": "Parquet", "conll": "words with their tags"}
_SAME = {"jsonl": ("ndjson", "json"), "conll": ("tsv",)}
_FORMATS = ("jsonl", "ndjson", "json", "csv", "tsv", "npy", "npz", "parquet", "arrow", "xlsx", "conll")
"""Suffixes by which other programs know what is in a file."""


@dataclass(frozen=True, kw_only=True)
class PredictCommand(CubeCommand):
    """What all tasks have in common."""

    task: ClassVar[TaskName]

    model: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="MODEL")]]
    """A model folder, a run of tools.pretrain or one of its checkpoints, or a Hugging Face folder."""
    texts: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="[TEXT ...]")]] = ()
    """Texts. Without any, --file or standard input is read."""
    file: Path | None = None
    """Lines of JSON, each a string or an object; "-" is standard input. The object's "id" comes back."""
    plain: bool = False
    """Lines are texts, not JSON: each whole line is one, whatever its columns."""
    output: Path | None = None
    """File for the results, there when all are done. Default: standard output, batch by batch."""
    json: bool = False
    """Lines of JSON also for texts that are given as arguments."""
    data_parallel: int = 1
    """Copies of the cube, which share the texts of a batch."""
    max_length: int | None = None
    """Tokens of a sequence, or of a window of `answer` and `tag`, special ones included. Default: what the model was
    made with."""
    too_long: TooLong = "truncate"
    """Leave out the end of a longer text, or question, and count it; or refuse it."""
    special_tokens: InTexts | None = None
    """What the name of a special token in a text is, such as [SEP] or [E1]: text, or that token, as the transformers
    library has it. Texts with such a name are counted. Default: as the model was fine-tuned, else text."""
    on_error: OnError = "stop"
    """At a line that cannot be answered: stop, without an --output, or put {"line": ..., "error": ...} in its place and
    go on."""
    batch_tokens: int | None = None
    """Tokens of a batch, over all ranks. Default: 2048 for each rank, up to 4096 for models with an inner size
    below 2048."""
    compute: Literal["fp32", "bf16"] = "fp32"
    """Type of products and hidden states. bf16 halves what travels; whether it is faster depends on the processor."""
    wait: float = 0.1
    """Seconds that a line waits for others to come, at most, before what has come is computed."""
    progress: bool = False
    """Show the throughput also where standard error is no terminal."""

    @property
    def two_by_two(self) -> bool:
        """Whether arguments are pairs of texts."""
        return False

    @property
    @abstractmethod
    def options(self) -> Mapping[str, Any]:
        """What the task alone has, for `load`."""

    def check(self) -> None:
        if self.texts and self.file is not None:
            raise ValueError("texts are given, and --file too. Leave one of them out.")
        if not self.texts and self.file is None and (sys.stdin is None or sys.stdin.isatty()):
            raise ValueError("no text. Give texts, --file FILE, or write to standard input.")
        self._check_kind()
        if self.two_by_two:
            self._check_even()
        if self.batch_tokens is not None and self.batch_tokens < 1:
            raise ValueError(f"--batch-tokens must be at least 1. Got {self.batch_tokens}.")
        if not self.wait >= 0:
            raise ValueError(f"--wait must be at least 0 seconds. Got {self.wait}.")
        self._check_name()
        if not is_launched():  # else it is the first rank's alone
            self._check_output()
        name = self.options.get("prompt_name")
        check_folder(self.model, self.task, self.shape, max_length=self.max_length, prompt_name=name)

    @property
    def written(self) -> str:
        """The format of the results in a file: "jsonl", or another one by its suffix."""
        return "jsonl"

    def idle_rules(self) -> Sequence[IdleRule]:
        given = bool(self.texts)
        return (
            IdleRule(("json",), given and self.output is None, "texts that are given as arguments, without --output"),
            IdleRule(("plain", "wait"), not given, "lines that are read, and texts are given as arguments"),
        )

    def _check_name(self) -> None:
        """Raises ValueError where the name of the output says another format than that of what is written."""
        named = "" if self.output is None else self.output.suffix[1:].lower()
        if named in _FORMATS and named not in (self.written, *_SAME.get(self.written, ())):
            raise ValueError(
                f"--output {self.output} is a name of {named}, and what is written is {_IN_WORDS[self.written]}. "
                f"{self._format_of(named) or 'Name it *.' + self.written}."
            )

    def _format_of(self, named: str) -> str | None:
        """How to ask for another format, by its suffix. None: the task has it not."""
        return None

    def _check_output(self) -> None:
        """Raises ValueError where the results cannot be written, or would take the place of what is read."""
        others = [value for name, value in vars(self).items() if name != "output" and isinstance(value, Path)]
        check_output(self.output, others=others)

    def _check_kind(self) -> None:
        """Raises ValueError for a file whose lines are neither texts nor JSON, by its suffix, or end with CR alone."""
        kind = None if self.file is None else not_plain_text(self.file)
        if kind == "a table":
            raise ValueError(
                f"{self.file} is a table by its suffix, and --file reads a line of JSON for each text, or with --plain "
                "lines that are texts: header, labels and other columns would be texts too. Write the column alone "
                "into lines of JSON (docs/inference.md has a command)."
            )
        if kind == "JSON" and self.plain:
            raise ValueError(
                f"{self.file} is JSON by its suffix, and with --plain its marks and keys would be text. Leave out "
                "--plain; where each line is a text all the same, name the file *.txt."
            )
        # What is read as it comes, from a pipe, too, cannot be looked through for a line that ends otherwise.
        if self.file is not None and self.file.is_file() and has_cr_alone(self.file):
            raise ValueError(
                f"{self.file} has lines that end with CR alone, as of old Macs, and all of it would be one text. Write "
                f"it with LF: tr '\\r' '\\n' < {self.file} > NEW"
            )

    def _check_even(self, reason: str = "") -> None:
        if len(self.texts) % 2:
            raise ValueError(f"texts are read two by two. {reason + ' ' if reason else ''}Got {len(self.texts)}.")

    def run(self) -> int:
        """Computes on every rank; the first one reads and writes. The exit status."""
        with cube_of(self.shape) as cube, ExitStack() as files:
            run_on_rank0(cube, lambda: self._check_output())  # better now than after the work
            predictor = load(
                self.model,
                self.task,
                cube=cube.with_policy(MixedPrecisionPolicy(compute=TYPES[self.compute])),
                max_length=self.max_length,
                too_long=self.too_long,
                special_tokens=self.special_tokens,
                batch_tokens=self.batch_tokens,
                **self.options,
            )
            opened: list[tuple[Source, ResultWriter]] = []
            run_on_rank0(cube, lambda: opened.append(self._open(files, predictor, cube)))
            source, output = opened[0] if opened else (None, None)
            written = OutputProgress(output, "standard output" if self.output is None else str(self.output.absolute()))
            tally = StreamStats(predictor, is_shown=cube.rank == 0 and (self.progress or sys.stderr.isatty()))
            with tally.bar, loaded_objects_left_alone():
                for block in blocks_of(source, written, cube):
                    for batch in self._outcomes(predictor, block):
                        written.write(batch)
                        tally.add(batch)
                        if run_on_rank0(cube, written.is_over):
                            break

            def finish() -> None:
                written.close()
                written.is_over()
                files.close()

            run_on_rank0(cube, finish)
            if cube.rank == 0:
                _log.info("tools.predict: %s", tally.in_words())
        return 0

    def _outcomes(self, predictor: Predictor[Any], block: Block) -> Iterator[list[Outcome]]:
        try:
            yield from predictor.outcomes(block, self.on_error)
        except StopError as problem:
            if self.output is None:
                raise
            raise ValueError(
                f"{problem} Nothing is written to {self.output}; --on-error skip would put the error in its place and "
                "go on."
            ) from None

    def _open(self, files: ExitStack, predictor: Predictor[Any], cube: Cube) -> tuple[Source, ResultWriter]:
        """Input and output. Raises OSError, ValueError."""
        fields = predictor.task.fields
        if self.texts:
            return ListInput(self._given(fields)), self._output(files, predictor)
        if self.file is None or self.file == _STDIN:
            file = sys.stdin.buffer
        else:
            file = files.enter_context(self.file.open("rb"))
        source = StreamInput(
            file,
            fields,
            size=predictor.block_bytes,
            wait=self.wait,
            is_plain=self.plain,
            idle=IDLE if cube.mesh is not None else None,
        )
        return source, self._output(files, predictor)

    def _given(self, fields: Fields) -> list[Query | InputProblem]:
        items: list[str | dict[str, Any]] = list(self.texts)
        if fields.candidates is not None:
            if len(self.texts) < 2:
                raise ValueError(f"a query and at least one passage are needed. Got {len(self.texts)} text.")
            items = [{fields.first: self.texts[0], fields.candidates: self.texts[1:]}]
        if self.two_by_two and fields.second is None:
            raise ValueError(f"--pairs: only {fields.in_words} is read. {fields.reason} Leave out --pairs.")
        if (self.two_by_two or fields.needs_second) and fields.second is not None:
            self._check_even(fields.reason)
            firsts, seconds = self.texts[::2], self.texts[1::2]
            items = [{fields.first: a, fields.second: b} for a, b in zip(firsts, seconds, strict=True)]
        return [query_of(item, fields, number) for number, item in enumerate(items, start=1)]

    def _output(self, files: ExitStack, predictor: Predictor[Any]) -> ResultWriter:
        if self.output is not None:
            return JsonOutput(files.enter_context(draft(self.output)))
        if self.texts and not self.json:
            is_paired = self.two_by_two or predictor.task.fields.needs_second
            is_one = predictor.task.fields.candidates is not None
            return ReadableOutput(sys.stdout.buffer, with_text=len(self.texts) > 1 + is_paired and not is_one)
        return JsonOutput(sys.stdout.buffer)


# --- The command of each task: its own options ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FillMaskCommand(PredictCommand):
    """The likeliest pieces for the places that [MASK], or the tokenizer's own name of it, marks in a text.

    {"text": ...} to {"text": filled, "masks": [[{"piece", "id", "probability", "text"}, ...], ...]}
    """

    task = "fill-mask"
    k: Annotated[int, tyro.conf.arg(aliases=["--top"])] = 5
    """Pieces for each mask."""

    @property
    def options(self) -> Mapping[str, Any]:
        return {"k": self.k}


@dataclass(frozen=True, kw_only=True)
class ScoreCommand(PredictCommand):
    """How likely a text is to a masked language model: each of its pieces is hidden in turn (pseudo-log-likelihood).

    {"text": ...} to {"score", "tokens", "perplexity", "accuracy"}; over all texts on standard error
    """

    task = "score"
    masked_share: float | None = None
    """Hide this share of a text's pieces at once instead, as in pre-training: one pass a text, the masked-LM loss."""
    seed: int = 0
    """Of the draw of places with --masked-share."""
    pieces: bool = False
    """Lines of JSON, also for texts that are given as arguments, with each hidden piece and its log-probability too."""

    @property
    def options(self) -> Mapping[str, Any]:
        return {"masked_share": self.masked_share, "seed": self.seed}

    def idle_rules(self) -> Sequence[IdleRule]:
        return (
            *super().idle_rules(),
            IdleRule(("seed",), self.masked_share is not None, "the draw of places with --masked-share"),
        )

    def _output(self, files: ExitStack, predictor: Predictor[Any]) -> ResultWriter:
        if not self.pieces:
            return super()._output(files, predictor)
        file = sys.stdout.buffer if self.output is None else files.enter_context(draft(self.output))
        return JsonOutput(file, Scored.with_pieces)


@dataclass(frozen=True, kw_only=True)
class ClassifyCommand(PredictCommand):
    """The class of a text or a pair, or its number, by a fine-tuned model.

    {"text": ..., "text_b": ...} to {"label", "probabilities": {label: ...}}, or to {"value"}; of a model by which
    several labels may hold at once to {"labels", "probabilities"}
    """

    task = "classify"
    pairs: bool = False
    """Arguments are pairs of texts. They always are where the model was fine-tuned on pairs."""

    @property
    def two_by_two(self) -> bool:
        return self.pairs

    @property
    def options(self) -> Mapping[str, Any]:
        return {}

    def idle_rules(self) -> Sequence[IdleRule]:
        needs = 'texts that are given as arguments; a line is a pair where it has "text_b"'
        return (*super().idle_rules(), IdleRule(("pairs",), bool(self.texts), needs))


@dataclass(frozen=True, kw_only=True)
class AnswerCommand(PredictCommand):
    """The part of a context that answers a question. Arguments are QUESTION CONTEXT, as often as wanted.

    {"question": ..., "context": ...} to {"text", "start", "end", "probability", "n_best": [...]}
    """

    task = "answer"
    k: Annotated[int, tyro.conf.arg(aliases=["--top"])] = 5
    """Answers to each question, at most."""

    @property
    def two_by_two(self) -> bool:
        return True

    @property
    def options(self) -> Mapping[str, Any]:
        return {"k": self.k}


@dataclass(frozen=True, kw_only=True)
class TagCommand(PredictCommand):
    """A tag for each word of a text, by a fine-tuned model, and what they spell, such as names.

    {"text": ...} or {"tokens": [...]} to {"text", "spans": [{"start", "end", "label", "text", "probability"}, ...]}
    """

    task = "tag"
    output_format: Literal["spans", "tokens", "conll"] = "spans"
    """"tokens": {"tokens": [...], "tags": [...]}; "conll": a line for each word, its tag behind a tab, and an empty
    line behind each text."""

    @property
    def options(self) -> Mapping[str, Any]:
        return {}

    @property
    def written(self) -> str:
        return "conll" if self.output_format == "conll" else "jsonl"

    def _format_of(self, named: str) -> str | None:
        return "Give --output-format conll, or another name" if named in ("conll", "tsv") else None

    def check(self) -> None:
        super().check()
        if self.output_format == "conll" and self.on_error == "skip":
            raise ValueError("--output-format conll has no place for an error. Take tokens, or leave out --on-error.")
        if self.output_format == "conll" and self.json:
            raise ValueError("--json and --output-format conll are two formats. Take one of them, or tokens.")

    def _output(self, files: ExitStack, predictor: Predictor[Any]) -> ResultWriter:
        if self.output_format == "spans":
            return super()._output(files, predictor)
        file = sys.stdout.buffer if self.output is None else files.enter_context(draft(self.output))
        return ColumnsOutput(file) if self.output_format == "conll" else JsonOutput(file, Tagged.as_tokens)


@dataclass(frozen=True, kw_only=True)
class RankCommand(PredictCommand):
    """The passages of a query in order, by a cross-encoder. Arguments are QUERY PASSAGE PASSAGE ...

    {"query": ..., "passages": [text or {"text", "id"}, ...]} to {"query", "passages": [{"rank", "index", "id", "score",
    "text"}, ...]}
    """

    task = "rank"
    top: int | None = None
    """Passages of each query that are given, best first. Default: all."""
    collection: Path | None = None
    """corpus.jsonl, as BEIR has it ({"_id", "title", "text"} a line), for passages that have an "id" alone."""

    @property
    def options(self) -> Mapping[str, Any]:
        return {"top": self.top, "collection": self.collection}

    def idle_rules(self) -> Sequence[IdleRule]:
        needs = "passages that have an id alone, as lines can have them"
        return (*super().idle_rules(), IdleRule(("collection",), not self.texts, needs))


@dataclass(frozen=True, kw_only=True)
class EmbedCommand(PredictCommand):
    """A vector for each text: {"text": ...} to {"vector": [...]}; or, with --against, the texts whose vectors are
    nearest: {"hits": [{"index", "score", "id"}, ...]}."""

    task = "embed"
    pooling: Pooling | None = None
    """Of the last hidden states: the mean over all tokens, special ones included, that of [CLS] or of the last one, the
    most of each column, the sum over the root of their number, or the mean with weights that grow with the place.
    Default: as the folder's modules.json has it, else the mean. Its dense layers are behind whichever."""
    normalize: bool = False
    """Vectors of length 1, also where the folder does not ask for it."""
    dimensions: int | None = None
    """Numbers of a vector, from the first one: those after which it has learnt to be cut (data.sizes of fine-tuning).
    Lengths of 1 become 1 again. Default: all."""
    prompt_name: str | None = None
    """Of the prompts in the folder's config_sentence_transformers.json the one that stands before each text, such as
    "query" or "document". Default: that which it names as the default, else none."""
    output_format: Literal["jsonl", "npy", "parquet"] = "jsonl"
    """"npy": an array, float32 (texts, numbers of a vector), in --output; a skipped text is a row of nan. "parquet":
    columns id, vector and error, in --output."""
    against: Path | None = None
    """Vectors that this command has written, of the same model and the same --dimensions: a file .npy, .parquet or
    .jsonl, or a folder of them. The nearest are given instead of vectors."""
    top: int | None = None
    """Of --against, how many for each text, by cosine; of equal ones the first. Default: 5."""

    @property
    def options(self) -> Mapping[str, Any]:
        asked = {"pooling": self.pooling, "normalize": self.normalize, "dimensions": self.dimensions}
        more = {} if self.against is None else {"against": self.against, "top": self.top}
        return {**asked, "prompt_name": self.prompt_name, **more}

    @property
    def written(self) -> str:
        return self.output_format

    def _format_of(self, named: str) -> str | None:
        return f"Give --output-format {named}, or another name" if named in ("jsonl", "npy", "parquet") else None

    def idle_rules(self) -> Sequence[IdleRule]:
        needs = "vectors that are written; cosines, of --against, have no length"
        return (*super().idle_rules(), IdleRule(("normalize",), self.against is None, needs))

    def check(self) -> None:
        super().check()
        if self.output_format != "jsonl" and self.output is None:
            name = self.output_format
            raise ValueError(f"--output-format {name} needs a file. Give --output FILE.{name}.")
        if self.output_format != "jsonl" and self.against is not None:
            raise ValueError(
                f"--against gives hits, which {self.output_format} has no place for. Leave one of them out."
            )
        if self.top is not None and self.against is None:
            raise ValueError("--top needs vectors to search in. Give --against FILE, as this command has written it.")

    def _output(self, files: ExitStack, predictor: Predictor[Any]) -> ResultWriter:
        if self.output_format == "jsonl" or self.output is None:
            return super()._output(files, predictor)
        if self.output_format == "parquet":
            return ParquetOutput(files.enter_context(draft(self.output)))
        assert isinstance(predictor.task, Embed), "vectors are written, and nothing is searched in"
        return ArrayOutput(files.enter_context(draft(self.output)), predictor.task.columns)


# --- `python -m tools.predict TASK MODEL [TEXT ...] [OPTIONS]` --------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 2 for a bad call, model or text or a file that cannot be read or written, 1 where another rank
    died (one message on standard error each), 130 after Ctrl-C."""
    return run_command(
        "tools.predict",
        {
            "fill-mask": FillMaskCommand,
            "score": ScoreCommand,
            "classify": ClassifyCommand,
            "answer": AnswerCommand,
            "tag": TagCommand,
            "rank": RankCommand,
            "embed": EmbedCommand,
        },
        arguments,
        "Ask a trained model: pieces for masks, scores of texts, classes, answers, tags, ranks, vectors.",
    )


if __name__ == "__main__":
    sys.exit(main())
