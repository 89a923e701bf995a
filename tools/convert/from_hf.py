"""`python -m tools.convert from-hf`: a Hugging Face folder as a folder of ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from models.bert.pretrained import Filled, Weights, open_weights, write_model_json
from tensor3d import Cube, CubeShape, checkpoint
from tensor3d.agree import on_every_rank, on_first_rank
from tools.convert.left_out import buffers_in, files_beside
from tools.convert.output import check_new, new_folder
from tools.convert.parts import Parts, parts_of
from tools.corpus.tokenizers.huggingface import find_tokenizer
from tools.corpus.tokenizers.jsonfile import JsonTokenizer
from tools.metrics import table
from tools.model_folder import CHECKPOINTS, CONFIG, HUGGINGFACE, copy_file, keep_tokenizer, tokenizer_of
from tools.ranks import cube_of

_HEADS = ("pooler", "masked_lm", "next_sentence")  # that pre-training or fine-tuning may want
_SHOWN = 8
"""Names in a row of the report."""


@dataclass(frozen=True, kw_only=True)
class FromHuggingFace:
    """Take over a BERT: config.json, weights as model.safetensors or pytorch_model.bin, and its tokenizer."""

    source: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="DIR")]]
    """The Hugging Face folder."""
    output: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="OUT")]]
    """Folder to write; empty, or not there."""
    heads: tuple[Literal["pooler", "masked_lm", "next_sentence", "classifier", "answers"], ...] | None = None
    """Those to take over, such as all but a masked-LM head whose decoder is not the embedding. Default: all that there
    are."""
    cube: str = "1x1x1"
    """Sizes of the axes x, y and z, as XxYxZ: what is written can be read on any other."""
    data_parallel: int = 1
    """Copies of the cube."""

    @property
    def shape(self) -> CubeShape:
        return CubeShape.parse(self.cube, self.data_parallel)

    def check(self) -> None:
        """Raises ValueError for what can be seen before any process is connected."""
        check_new(self.output)
        check_is_library(self.source)
        weights = open_weights(self.source)
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
        weights = on_every_rank(cube, lambda: open_weights(self.source))
        heads = on_every_rank(cube, lambda: self.chosen(weights))
        model, filled = parts_of(weights, cube, heads)
        with new_folder(self.output, cube) as draft:
            on_first_rank(cube, lambda: self._begin(draft))
            _save(draft, model, cube)
            on_first_rank(cube, lambda: _describe(draft, weights, heads))
        if cube.rank == 0:
            print(_report(self, weights, filled, model))

    def chosen(self, weights: Weights) -> tuple[str, ...]:
        """The heads to take over. Raises ValueError for one that is not there."""
        if self.heads is None:
            return weights.heads
        if unknown := [head for head in self.heads if head not in weights.heads]:
            known = ", ".join(weights.heads) or "none"
            raise ValueError(f"{weights.folder} has no {unknown[0]}. Its heads are: {known}.")
        return tuple(head for head in weights.heads if head in self.heads)

    def _begin(self, draft: Path) -> None:
        keep_tokenizer(self.source, draft)
        (draft / HUGGINGFACE).mkdir()
        copy_file(self.source / CONFIG, draft / HUGGINGFACE / CONFIG)


def check_is_library(folder: Path) -> None:
    """Raises ValueError for a folder that is none of the Hugging Face library's."""
    if folder.is_dir() and not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} has no {CONFIG}: it is no Hugging Face folder. Name one, with all of its files.")


def _save(draft: Path, model: Parts, cube: Cube) -> None:
    # A checkpoint names an optimiser; this one remembers nothing.
    nothing = torch.optim.SGD(model.parameters(), lr=1.0)
    checkpoint.save(draft / CHECKPOINTS, 0, model, nothing, cube, {"source": "from-hf"})


def _describe(draft: Path, weights: Weights, heads: tuple[str, ...]) -> None:
    facts = {**weights.facts, "source": str(weights.folder), "max_length": weights.config.positions}
    classifies, answers = "classifier" in heads, "answers" in heads
    write_model_json(
        draft,
        config=weights.config,
        heads=heads,
        labels=weights.labels if classifies else None,
        problem=weights.problem if classifies or answers else None,
        facts=facts,
    )


def _report(command: FromHuggingFace, weights: Weights, filled: Filled, model: Parts) -> str:
    config, tokenizer = weights.config, tokenizer_of(command.output)
    read = find_tokenizer(command.source).in_words()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    lacking = [head for head in _HEADS if head not in filled.found]
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
        *([("rounded", f"{_some(filled.rounded)}: fp64 in the folder, fp32 here")] if filled.rounded else []),
        *([("no weights", f"{_some(buffers)}: left out, and made anew by the library")] if buffers else []),
        *([("left behind", _some(files))] if files else []),
        ("written", str(command.output)),
        ("next", f"python -m tools.finetune classify RECIPE.toml --model.start-from {command.output}"),
    ]
    return "\n".join(table(rows))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
