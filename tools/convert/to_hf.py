"""`python -m tools.convert to-hf`: a model of ours as a folder that `transformers` loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from models.bert.pretrained import Weights, export_huggingface, open_weights
from tensor3d import Cube, CubeShape
from tensor3d.agree import on_every_rank, on_first_rank
from tools.convert.output import check_new, new_folder
from tools.convert.parts import parts_of
from tools.convert.tokenizer_files import write_tokenizer
from tools.metrics import table
from tools.model_folder import tokenizer_of
from tools.ranks import cube_of

DType = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class ToHuggingFace:
    """Write config.json, model.safetensors and the tokenizer, for `AutoModel` and `AutoTokenizer`."""

    source: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="MODEL")]]
    """A run of pre-training, a seed's folder of fine-tuning, the output of from-hf, one checkpoint in them, or a folder
    of Hugging Face."""
    output: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="OUT")]]
    """Folder to write; empty, or not there."""
    dtype: DType | None = None
    """Type of the weights in the file. Default: that of the imported file, else fp32."""
    heads: tuple[Literal["pooler", "masked_lm", "next_sentence", "classifier", "answers"], ...] | None = None
    """Those to write, where no class of the library has all. Default: all that there are."""
    cube: str = "1x1x1"
    """Sizes of the axes x, y and z, as XxYxZ; any, whichever the model was trained on."""
    data_parallel: int = 1
    """Copies of the cube."""

    @property
    def shape(self) -> CubeShape:
        return CubeShape.parse(self.cube, self.data_parallel)

    def check(self) -> None:
        """Raises ValueError for what can be seen before any process is connected."""
        check_new(self.output)
        open_weights(self.source).config.check(self.shape)
        tokenizer_of(self.source)

    def run(self) -> int:
        """Converts, on every rank, and says on the first one what was written. The exit status."""
        with cube_of(self.shape) as cube:
            self.convert(cube)
        return 0

    def convert(self, cube: Cube) -> None:
        """The same, on processes that are connected."""
        weights = on_every_rank(cube, lambda: open_weights(self.source))
        model, _ = parts_of(weights, cube)
        pad = on_every_rank(cube, lambda: tokenizer_of(self.source)).special.pad
        with new_folder(self.output, cube) as draft:
            written = export_huggingface(
                model,
                cube,
                draft,
                heads=self.heads,
                settings=weights.settings or {"pad_token_id": pad},
                labels=weights.labels,
                problem=weights.problem,
                dtype=self.dtype or _type_of(weights),
                types=weights.facts.get("types") if self.dtype is None else None,
            )
            tokenizer = on_first_rank(
                cube, lambda: write_tokenizer(self.source, draft, max_length=weights.config.positions)
            )
        if cube.rank == 0:
            rows = [("model", f"{written.architecture}, {weights.config.layers} layers"), ("tokenizer", tokenizer)]
            rows += [("note", written.note)] if written.note else []
            print("\n".join(table([*rows, ("written", str(self.output))])))


def _type_of(weights: Weights) -> DType:
    """That of the imported file; fp64 has become fp32 on the way in."""
    types: dict[str, DType] = {"bf16": "bf16", "fp16": "fp16"}
    return types.get(str(weights.facts.get("dtype")), "fp32")
