"""`python -m tools.convert from-hf DIR OUT` and `python -m tools.convert to-hf MODEL OUT`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from torch import nn

from models.bert.config import BertConfig
from models.bert.electra import ReplacedTokenHead
from models.bert.embedding import DenseConfig, VectorDense, dense_layers
from models.bert.huggingface import (
    LoadReport,
    WeightSource,
    export_huggingface,
    model_folder_of,
    open_weights,
    write_model_json,
)
from models.bert.huggingface.dense import write_dense
from models.bert.huggingface.param_names import BUFFERS, HEADS, LABELLED
from models.bert.huggingface.reader import WEIGHT_FILES, file_tensors
from models.bert.huggingface.weights import DENSE
from models.bert.model import BertModel, MaskedLMHead, Pooler, PredictionHead
from models.bert.tasks import text_classifier
from tensor3d import Cube, Dropout3D, SmallHead3D, checkpoint
from tensor3d.distributed.object_collectives import run_on_all_ranks, run_on_rank0
from tensor3d.files import broken_links, nearest
from tensor3d.sharding.activation_layout import Face
from tools.common.cli import CubeCommand, cube_of, run_command
from tools.corpus.quick.prepare import draft_of
from tools.corpus.tokenizers.export import write_tokenizer
from tools.corpus.tokenizers.huggingface import OF_TOKENIZERS, find_tokenizer
from tools.corpus.tokenizers.model_dir import (
    CHECKPOINTS,
    CONFIG,
    HUGGINGFACE,
    copy_file,
    keep_tokenizer,
    padding_of,
    tokenizer_of,
)
from tools.corpus.tokenizers.tokenizer_json import JsonTokenizer
from tools.predict.sentence_folder import MODULES, sentence_files, sentence_settings
from tools.squad.windows import FACTS, AnswerSettings
from tools.tagging.windows import FACTS as OF_TAGS
from tools.training.metrics import table

# --- The folder that a conversion writes: it appears whole or not at all ----------------------------------------------


def check_new(folder: Path) -> None:
    """Raises ValueError where there is something already, or where no folder can be put in the place of another."""
    nearest(folder)
    nearest(folder.resolve())
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file. Name another folder.")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty. Name another folder.")
    place = folder.resolve()
    kind = "the current folder" if place == Path.cwd() else "a mount point" if place.is_mount() else None
    if kind is not None:
        raise ValueError(
            f"{folder} is {kind}, in the place of which no other folder can be put. Name a folder inside of it."
        )


@contextmanager
def new_folder(folder: Path, cube: Cube) -> Iterator[Path]:
    """A folder beside `folder`, the same on every rank, which gets its name when the block ends well. One that `folder`
    links to is written itself.

    Raises:
        ValueError: `folder` cannot be written, or there is something already; on every rank.
    """
    place = folder.resolve()  # a link has another folder beside it

    def publish(draft: Path) -> None:
        check_new(folder)
        os.rename(draft, place)

    with ExitStack() as stack:  # of the first rank
        draft = run_on_rank0(cube, lambda: stack.enter_context(draft_of(place)))
        yield draft
        run_on_rank0(cube, lambda: publish(draft))


# --- An encoder with whichever heads a folder has: what is converted, and computes nothing ----------------------------


class EncoderWithHeads(nn.Module):
    """Modules under the names that they have in the models of `models.bert`; weights are unfilled.

    Args:
        heads: of `HEADS`.
        outputs: of the classifier, of texts or of tokens.
        dropout: of what the head of fine-tuning reads. Default: as of hidden states.
        dense: layers behind pooling.
    """

    def __init__(
        self,
        config: BertConfig,
        heads: Collection[str],
        outputs: int,
        cube: Cube,
        *,
        dropout: float | None = None,
        dense: Sequence[DenseConfig] = (),
    ) -> None:
        super().__init__()
        self.config, self.cube = config, cube
        with cube.skip_init():
            self.bert = BertModel(config, cube)
            if "pooler" in heads:
                self.pooler = Pooler(config, cube)
            if "masked_lm" in heads:
                self.masked_lm = MaskedLMHead(config, cube)
            if "next_sentence" in heads:
                self.next_sentence = SmallHead3D(config.hidden, 2, cube, "y", std=config.std)
            if not {*LABELLED, "answers"}.isdisjoint(heads):
                self.dropout = Dropout3D(config.dropout if dropout is None else dropout, cube)
            if "classifier" in heads:
                self.classifier = text_classifier(config, outputs, cube)
            face: Face = "z"
            if "prediction_head" in heads:
                self.prediction_head, face = PredictionHead(config, cube), "y"
            if "answers" in heads:
                self.answers = SmallHead3D(config.hidden, 2, cube, face, std=config.std)
            if "tags" in heads:
                self.tags = SmallHead3D(config.hidden, outputs, cube, face, std=config.std)
            if "replaced_tokens" in heads:
                self.replaced_tokens = ReplacedTokenHead(config, cube)
            if dense:
                self.dense = dense_layers(dense, config, cube)


def parts_of(
    weights: WeightSource, cube: Cube, heads: Collection[str] | None = None, dense: Sequence[DenseConfig] = ()
) -> tuple[EncoderWithHeads, LoadReport]:
    """What a folder has, in fp32, on a cube: all, or the encoder with these heads. Every rank calls it; errors are
    those of `WeightSource.fill`."""
    outputs, heads = weights.outputs or 0, weights.heads if heads is None else heads
    head = next((each for each in (*LABELLED, "answers") if each in heads), None)
    cube.manual_seed(0)  # which dropout asks for, though nothing is drawn
    dropout = None if head is None else weights.head_dropout(head)
    model = EncoderWithHeads(weights.config, heads, outputs, cube, dropout=dropout, dense=dense)
    return model, weights.fill(model, cube)


# --- What of a Hugging Face folder is not taken over: files of other libraries, and tensors that are no weights -------

_BUFFERS = tuple(name.removeprefix("bert.") for name in BUFFERS)


def buffers_in(folder: Path) -> list[str]:
    """Tensors that older versions of the library have stored: they count positions, and say nothing of the model."""
    return [name for name in file_tensors(folder) if name.endswith(_BUFFERS)]


def files_beside(folder: Path) -> list[str]:
    """Files and folders that are neither the model's nor its tokenizer's, nor say how a sentence's vector is made.
    Folders have a slash; hidden ones are not looked at."""
    weights = {tensor.path.name for tensor in file_tensors(folder).values()}
    sentences = {Path(name).parts[0] for name in sentence_files(folder)}
    used = {
        CONFIG,
        *OF_TOKENIZERS,
        *weights,
        *sentences,
        *(name for name in WEIGHT_FILES if name.endswith(".index.json")),
    }
    found = (path for path in folder.iterdir() if path.name not in used and not path.name.startswith("."))
    others = sorted(path for path in found if not path.is_dir() or any(path.iterdir()))
    return [f"{path.name}/" if path.is_dir() else path.name for path in others]


# --- `python -m tools.convert from-hf`: a Hugging Face folder as a folder of ours -------------------------------------

Head = Literal[
    "pooler", "masked_lm", "next_sentence", "prediction_head", "classifier", "answers", "tags", "replaced_tokens"
]
_SHOWN = 8
"""Names in a row of the report."""


@dataclass(frozen=True, kw_only=True)
class FromHuggingFace(CubeCommand):
    """Take over a BERT: config.json, weights as model.safetensors or pytorch_model.bin, and its tokenizer."""

    source: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="DIR")]]
    """The Hugging Face folder."""
    output: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="OUT")]]
    """Folder to write; empty, or not there."""
    heads: tuple[Head, ...] | None = None
    """Those to take over, such as all but a masked-LM head whose decoder is missing. Default: all that there are."""
    cube: str = "1x1x1"
    """Sizes of the axes x, y and z, as XxYxZ: what is written can be read on any other."""

    def check(self) -> None:
        check_new(self.output)
        check_is_library(self.source)
        weights, _ = opened(self.source)
        weights.config.check(self.shape)
        self.chosen(weights)
        tokenizer_of(self.source)

    def run(self) -> int:
        """Converts, on every rank, and says on the first one what was found. The exit status."""
        with cube_of(self.shape) as cube:
            self.convert(cube)
        return 0

    def convert(self, cube: Cube) -> None:
        """The same, on processes that are connected."""
        weights, dense = run_on_all_ranks(cube, lambda: opened(self.source))
        heads = run_on_all_ranks(cube, lambda: self.chosen(weights))
        model, filled = parts_of(weights, cube, heads, dense)
        with new_folder(self.output, cube) as draft:
            run_on_rank0(cube, lambda: self._begin(draft))
            _save(draft, model, cube)
            run_on_rank0(cube, lambda: _describe(draft, weights, tuple(head for head in heads if head in HEADS)))
        if cube.rank == 0:
            print(_report(self, weights, filled, model))

    def chosen(self, weights: WeightSource) -> tuple[str, ...]:
        """The heads to take over; dense layers always, of which the files say that are copied. Raises ValueError for
        one that is not there."""
        if self.heads is None:
            return weights.heads
        if unknown := [head for head in self.heads if head not in weights.heads]:
            known = ", ".join(head for head in weights.heads if head in HEADS) or "none"
            raise ValueError(f"{weights.folder} has no {unknown[0]}. Its heads are: {known}.")
        return tuple(head for head in weights.heads if head in (*self.heads, DENSE))

    def _begin(self, draft: Path) -> None:
        keep_tokenizer(self.source, draft)
        (draft / HUGGINGFACE).mkdir()
        copy_file(self.source / CONFIG, draft / HUGGINGFACE / CONFIG)
        _keep_sentences(self.source, draft)


def opened(folder: Path) -> tuple[WeightSource, Sequence[DenseConfig]]:
    """The weights in a folder, and the dense layers of which they have those, too: where it is known how a sentence's
    vector is made. Raises ValueError as `open_weights`, and where those of the dense layers are not there."""
    weights = open_weights(folder)
    try:
        settings = sentence_settings(model_folder_of(folder))
    except ValueError:  # which the report tells
        settings = None
    return (weights, ()) if settings is None else (settings.with_dense(weights), settings.dense)


def check_is_library(folder: Path) -> None:
    """Raises ValueError for a folder that is none of the Hugging Face library's."""
    if folder.is_dir() and not (folder / CONFIG).is_file():
        told = broken_links(folder, (CONFIG,)) or " Name one, with all of its files."
        raise ValueError(f"{folder} has no {CONFIG}: it is no Hugging Face folder.{told}")


def _token_ids(config: BertConfig, special: Mapping[str, int]) -> dict[str, int]:
    """What the config.json says of tokens; the library's EuroBERT, MPNet and RoBERTas have ids of their own tokenizers
    by default."""
    roles = ["pad"]
    if config.traits.behind_padding or config.traits.rms_norm:
        roles += ["cls", "sep"]
    if config.family == "eurobert":
        roles.append("mask")
    names = {"cls": "bos", "sep": "eos"}
    return {f"{names.get(role, role)}_token_id": special[role] for role in roles if role in special}


def _other_padding(config: BertConfig, padding: int) -> str | None:
    """What has to be said of a run of before, whose positions did not begin behind that of padding."""
    said = config.first_position - 1
    if said in (-1, padding):
        return None
    return (
        f"positions begin behind the id {said}, and padding has the id {padding} in the tokenizer: the library "
        f"numbers texts with the id {said} in them otherwise than they were here"
    )


def _passed_over(weights: WeightSource, padding: int) -> str | None:
    """What has to be said of a classifier that reads the last token which is no padding."""
    told = weights.config.pad_id
    if "classifier" not in weights.heads or told in (None, padding):
        return None
    return (
        f"the classifier passes over the id {told} at the end of a text, and the tokenizer pads with {padding}: the "
        "library reads padding in batches"
    )


def _keep_sentences(source: Path, draft: Path) -> None:
    """Copies what says how a sentence's vector is made, where it is known."""
    for name in sentence_files(source):
        (draft / name).parent.mkdir(parents=True, exist_ok=True)
        copy_file(source / name, draft / name)


def _sentences(source: Path) -> list[tuple[str, str]]:
    """A row of the report, of a folder of sentence-transformers."""
    try:
        settings = sentence_settings(source)
    except ValueError as problem:
        return [("vectors", f"not as in {MODULES}: {problem}")]
    return [] if settings is None else [("vectors", settings.in_words())]


def _save(draft: Path, model: EncoderWithHeads, cube: Cube) -> None:
    # A checkpoint names an optimiser; this one remembers nothing.
    nothing = torch.optim.SGD(model.parameters(), lr=1.0)
    checkpoint.save(draft / CHECKPOINTS, 0, model, nothing, cube, {"source": "from-hf"})


def _describe(draft: Path, weights: WeightSource, heads: tuple[str, ...]) -> None:
    facts = {**weights.facts, "source": str(weights.folder), "max_length": weights.config.positions}
    is_labelled = not set(LABELLED).isdisjoint(heads)
    write_model_json(
        draft,
        config=weights.config,
        heads=heads,
        labels=weights.labels if is_labelled else None,
        problem=weights.problem if is_labelled or "answers" in heads else None,
        facts=facts,
    )


def _wanted_heads(config: BertConfig) -> list[str]:
    """Those that pre-training or classes of texts would want of the family."""
    wanted = [] if config.before_classifier is None else [config.before_classifier]
    wanted += [] if config.causal else ["masked_lm"]
    return wanted + ["next_sentence"] * config.traits.next_sentence


def _report(command: FromHuggingFace, weights: WeightSource, filled: LoadReport, model: EncoderWithHeads) -> str:
    config, tokenizer = weights.config, tokenizer_of(command.output)
    read = find_tokenizer(command.source).in_words()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    task = "classify" if tokenizer.before or "classifier" in filled.found else "embed"
    lacking = [head for head in _wanted_heads(config) if head not in filled.found]
    unread = tokenizer.unread if isinstance(tokenizer, JsonTokenizer) else []
    buffers, files = buffers_in(command.source), files_beside(command.source)
    rows = [
        (
            "model",
            f"{config.layers} layers, hidden {config.hidden}, {config.heads} heads, inner {config.inner_size}, "
            f"{config.positions} positions, {config.activation}, {numbers:,} weights",
        ),
        ("tokenizer", f"{read}: {tokenizer.vocab_size:,} pieces for {config.vocab:,} rows of the embedding"),
        *([("not read", f"{_some(unread)}: special tokens, which in a text are text")] if unread else []),
        ("found", ", ".join(("encoder", *filled.found))),
        ("not there", f"{', '.join(lacking)}: fresh in a model that has them" if lacking else "nothing is missing"),
        ("not used", ", ".join(filled.unused) if filled.unused else "nothing"),
        *(
            [("used in part", f"{_some(filled.in_part)}: the first row alone, of tokens without a task")]
            * bool(filled.in_part)
        ),
        *([("NOT FINITE", f"{_some(filled.spoilt)}: such a model is useless; get another")] if filled.spoilt else []),
        *([("rounded", f"{_some(filled.rounded)}: fp64 in the folder, fp32 here")] if filled.rounded else []),
        *([("no weights", f"{_some(buffers)}: left out, and made anew by the library")] if buffers else []),
        *_sentences(command.source),
        *([("left behind", _some(files))] if files else []),
        ("written", str(command.output)),
        ("next", f"python -m tools.finetune {task} RECIPE.toml --model.start-from {command.output}"),
    ]
    return "\n".join(table(rows))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


# --- `python -m tools.convert to-hf`: a model of ours as a folder that `transformers` loads ---------------------------

DType = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class ToHuggingFace(CubeCommand):
    """Write config.json, model.safetensors and the tokenizer, for `AutoModel` and `AutoTokenizer`."""

    source: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="MODEL")]]
    """A run of pre-training, a seed's folder of fine-tuning, the output of from-hf, one checkpoint in them, or a folder
    of Hugging Face."""
    output: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="OUT")]]
    """Folder to write; empty, or not there."""
    dtype: DType | None = None
    """Type of the weights in the file. Default: that of the imported file, else fp32."""
    heads: tuple[Head, ...] | None = None
    """Those to write, where no class of the library has all. Default: all that there are."""
    generator: bool = False
    """Of a run that has learnt replaced tokens, write its generator instead, a masked language model."""
    cube: str = "1x1x1"
    """Sizes of the axes x, y and z, as XxYxZ; any, whichever the model was trained on."""

    def check(self) -> None:
        check_new(self.output)
        self.weights()[0].config.check(self.shape)
        tokenizer_of(self.source)

    def weights(self) -> tuple[WeightSource, Sequence[DenseConfig]]:
        """What is to be written. Raises ValueError where it is a generator and there is none."""
        return (open_weights(self.source).generator, ()) if self.generator else opened(self.source)

    def run(self) -> int:
        """Converts, on every rank, and says on the first one what was written. The exit status."""
        with cube_of(self.shape) as cube:
            self.convert(cube)
        return 0

    def convert(self, cube: Cube) -> None:
        """The same, on processes that are connected."""
        weights, layers = run_on_all_ranks(cube, self.weights)
        model, _ = parts_of(weights, cube, dense=layers)
        dense = getattr(model, DENSE, ())
        if layers:
            del model.dense  # the library has these beside the encoder
        found = run_on_all_ranks(cube, lambda: tokenizer_of(self.source))
        special = found.special_ids
        with new_folder(self.output, cube) as draft:
            written = export_huggingface(
                model,
                cube,
                draft,
                heads=self.heads,
                settings=weights.settings or _token_ids(weights.config, special),
                labels=weights.labels,
                problem=weights.problem,
                dtype=self.dtype or _type_of(weights),
                types=weights.facts.get("types") if self.dtype is None else None,
            )
            longest, types = weights.config.positions, weights.config.types
            tokenizer = run_on_rank0(cube, lambda: write_tokenizer(self.source, draft, max_length=longest, types=types))
            run_on_rank0(cube, lambda: _keep_sentences(model_folder_of(self.source), draft))
            run_on_rank0(cube, lambda: self._write_dense(draft, dense, weights))
        if cube.rank == 0:
            rows = [("model", f"{written.architecture}, {weights.config.layers} layers"), ("tokenizer", tokenizer)]
            notes = (written.note, _other_padding(weights.config, special["pad"]))
            rows += [("note", told) for told in (*notes, _passed_over(weights, padding_of(self.source, found))) if told]
            if told := weights.facts.get("thresholds"):
                rows.append(
                    ("note", f"thresholds of the labels stay here, as the library has no place for them: {told}")
                )
            heads = weights.heads if self.heads is None else self.heads
            if "answers" in heads and FACTS in weights.facts:
                rows.append(("note", _of_answers(AnswerSettings.from_facts(weights.facts))))
            elif not {"classifier", "tags"}.isdisjoint(heads) and (told := _of_lengths(weights, self.output)):
                rows.append(("note", told))
            if sizes := weights.facts.get("sizes"):
                rows.append(("note", f"vectors have learnt to be cut after {sizes} numbers, which stays here, too"))
            print("\n".join(table([*rows, ("written", str(self.output))])))

    def _write_dense(self, draft: Path, dense: Iterable[nn.Module], weights: WeightSource) -> None:
        """Into the folders that the settings, which are there, name."""
        usual, known = self.dtype or _type_of(weights), {} if self.dtype else weights.facts.get("types") or {}
        for number, layer in enumerate(dense):
            settings = sentence_settings(draft)
            assert settings is not None, "of which the layers are known"
            assert isinstance(layer, VectorDense)
            types = {part: known.get(f"{DENSE}.{number}.{part}", usual) for part in ("weight", "bias")}
            types = {part: "fp32" if kind == "fp64" else kind for part, kind in types.items()}
            write_dense(settings.dense_folders[number], layer, types)


def _of_answers(settings: AnswerSettings) -> str:
    """What a config.json cannot say of how answers are found."""
    told = (
        f"answers of at most {settings.answer_length} tokens, in windows of {settings.max_length} that begin every "
        f"{settings.stride}, questions of at most {settings.question_length}"
    )
    if settings.no_answer:
        told += f", and no answer above a threshold of {settings.null_threshold:g}"
    return f"{told}: these stay here, as the library has no place for them; give its pipeline the same"


def _of_lengths(weights: WeightSource, written: Path) -> str | None:
    """What a config.json cannot say of how many tokens of a text a classifier reads. None: the model's positions, or
    the tokenizer that was written says it."""
    most, tag = weights.facts.get("max_length"), weights.facts.get(OF_TAGS)
    settings = written / "tokenizer_config.json"
    limit = json.loads(settings.read_bytes()).get("model_max_length") if settings.is_file() else None
    if most is None or most >= weights.config.positions or (limit is not None and limit <= most):
        return None
    told = f"at most {most} tokens of a text or pair"
    if tag is not None:
        told = f"windows of {most} tokens that begin every {tag['stride']}"
    return f"{told}: these stay here, as the library has no place for them; give its tokenizer or pipeline the same"


def _type_of(weights: WeightSource) -> DType:
    """That of the imported file; fp64 has become fp32 on the way in."""
    types: dict[str, DType] = {"bf16": "bf16", "fp16": "fp16"}
    return types.get(str(weights.facts.get("dtype")), "fp32")


# --- The command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 2 for a bad call, a folder that cannot be converted or a file that cannot be read or written, 1
    where another rank died (one message on standard error each), 130 after Ctrl-C."""
    commands = {"from-hf": FromHuggingFace, "to-hf": ToHuggingFace}
    description = "BERTs of the Hugging Face library in and out, on any cube."
    return run_command("tools.convert", commands, arguments, description)


if __name__ == "__main__":
    sys.exit(main())
