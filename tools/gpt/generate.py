"""`python -m tools.gpt generate`: text from a trained GPT, on any cube."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from models.gpt import Gpt, Sampling, generate
from tensor3d import Cube, CubeShape, checkpoint
from tensor3d.distributed.object_collectives import run_on_all_ranks
from tools.common.bounds import AtLeast, check_bounds
from tools.common.cli import cube_of
from tools.common.idle_options import IdleRule
from tools.corpus.quick.sentencepiece_tokenizer import CLS, SEP, load_tokenizer
from tools.gpt import train as run_folder


@dataclass(frozen=True, kw_only=True)
class GenerateCommand:
    """Continue a text: on any cube, whichever the model was trained on, and the same on each but for rounding."""

    run_folder: tyro.conf.Positional[Path]
    """Folder that `train` has written."""
    prompt: str
    """The text to continue."""
    cube: str = "1x1x1"
    """Sizes of the axes x, y and z, as XxYxZ."""
    tokens: Annotated[int, AtLeast(1)] = 60
    """New tokens, at most: a text also ends where the model ends it, and where its positions do."""
    temperature: float = 0.8
    """Below 1 the likely tokens are likelier, above 1 less so; 0: always the likeliest."""
    top_k: int | None = 40
    """Only this many of the likeliest tokens are drawn from."""
    seed: int = 0
    """Of the draws."""

    @property
    def shape(self) -> CubeShape:
        return CubeShape.parse(self.cube)

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_k=self.top_k, seed=self.seed)

    def check(self) -> None:
        """Raises ValueError for what can be seen before any process is connected."""
        if not self.prompt.strip():
            raise ValueError("--prompt is empty. Give a text to continue.")
        check_bounds(self)
        _ = self.sampling
        run_folder.read_config(self.run_folder).check(self.shape)
        run_folder.newest_weights(self.run_folder)

    def idle_rules(self) -> Sequence[IdleRule]:
        return (
            IdleRule(("top_k", "seed"), self.temperature > 0, "draws, and at --temperature 0 there is none"),
            IdleRule(
                ("temperature", "seed"),
                self.top_k != 1 or self.temperature == 0,
                "draws among several tokens, and --top-k is 1",
            ),
        )

    def run(self) -> int:
        """Generates, on every rank, and prints on the first. The exit status."""
        with cube_of(self.shape) as cube:
            text = _continued(self, cube)
            if cube.rank == 0:
                print(text)
        return 0


def _continued(command: GenerateCommand, cube: Cube) -> str:
    """Prompt and continuation, the same on every rank."""
    folder = command.run_folder
    config = run_on_all_ranks(cube, lambda: run_folder.read_config(folder))
    tokenizer = run_on_all_ranks(cube, lambda: load_tokenizer(folder / run_folder.TOKENIZER))
    weights = run_on_all_ranks(cube, lambda: run_folder.newest_weights(folder))
    with cube.skip_init():
        model = Gpt(config, cube)
    checkpoint.load(weights, model, None, cube)
    prompt = [CLS, *tokenizer.encode(command.prompt)]
    new = list(generate(model, prompt, command.tokens, command.sampling, end=SEP))
    text: str = tokenizer.decode(prompt[1:] + new)
    return text
