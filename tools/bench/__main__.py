"""`python -m tools.bench step RECIPE.toml --cubes 1x1x1,2x2x2 [--steps 20] [--output FILE.json]`

A new measurement is a file with a `Subcommand` and a line in `SUBCOMMANDS`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Union

import tyro

from tools.bench.attention import AttentionCommand
from tools.bench.checkpoint import CheckpointCommand
from tools.bench.collectives import CollectivesCommand
from tools.bench.compile import CompileCommand
from tools.bench.convergence import LossCommand
from tools.bench.corpus import CorpusCommand
from tools.bench.encoders import EncodersCommand
from tools.bench.extract import ExtractCommand
from tools.bench.gpu import GpuCommand
from tools.bench.harness.benchmark import Subcommand
from tools.bench.harness.processes import RankFailedError
from tools.bench.harness.scaling_plots import PlotCommand
from tools.bench.harness.step_trial import RecipeBenchmark
from tools.bench.kernels import KernelsCommand
from tools.bench.layer import LayerCommand, MatmulCommand
from tools.bench.operators import OperatorsCommand
from tools.bench.overlap import OverlapCommand
from tools.bench.packing import PackingCommand
from tools.bench.padding import PaddingCommand
from tools.bench.precision import PrecisionCommand
from tools.bench.profile import ProfileCommand
from tools.bench.scaling import StrongCommand, WeakCommand
from tools.bench.shard_exchange import ExchangeCommand
from tools.bench.step import StepCommand
from tools.bench.tokenize import TokenizeCommand
from tools.bench.vs_pytorch.command import RivalsCommand
from tools.bench.vs_transformers.causal import CausalCommand
from tools.bench.vs_transformers.finetune import FinetuneBenchCommand
from tools.bench.vs_transformers.infer import InferCommand
from tools.bench.vs_transformers.pretrain import LibraryCommand
from tools.common import log
from tools.common.cli import run_main
from tools.common.parse import parse_options
from tools.training.arguments import fitted
from tools.training.config import with_new_names

_log = logging.getLogger("tools.bench")
_PROG = "python -m tools.bench"

# --- The command ------------------------------------------------------------------------------------------------------

SUBCOMMANDS: Mapping[str, type[Subcommand]] = {
    "step": StepCommand,
    "strong": StrongCommand,
    "weak": WeakCommand,
    "plot": PlotCommand,
    "padding": PaddingCommand,
    "exchange": ExchangeCommand,
    "loss": LossCommand,
    "packing": PackingCommand,
    "encoders": EncodersCommand,
    "precision": PrecisionCommand,
    "checkpoint": CheckpointCommand,
    "corpus": CorpusCommand,
    "tokenize": TokenizeCommand,
    "extract": ExtractCommand,
    "finetune": FinetuneBenchCommand,
    "infer": InferCommand,
    "collectives": CollectivesCommand,
    "matmul": MatmulCommand,
    "layer": LayerCommand,
    "compile": CompileCommand,
    "rivals": RivalsCommand,
    "overlap": OverlapCommand,
    "library": LibraryCommand,
    "causal": CausalCommand,
    "attention": AttentionCommand,
    "operators": OperatorsCommand,
    "kernels": KernelsCommand,
    "profile": ProfileCommand,
    "gpu": GpuCommand,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 2 for a bad call, recipe or corpus; 1 where a rank failed or what was measured is wrong."""
    words, verbose = log.take_verbose(arguments)

    def run() -> int:
        try:
            return parse(words).run(words)
        except RankFailedError as problem:
            _log.error("tools.bench: %s", problem)
            return 1

    return run_main("tools.bench", run, verbose=verbose)


def parse(arguments: Sequence[str]) -> Subcommand:
    """The subcommand that the command line asks for, with its options."""
    name, *rest = arguments or [""]
    chosen: Any
    if name in SUBCOMMANDS:
        # Alone, so that messages are about its own options, and since its defaults may be read from files.
        kind = SUBCOMMANDS[name]
        chosen = parse_options(kind, with_new_names(rest), f"{_PROG} {name}", default=kind.defaults(rest))
    else:
        # None is not shown: a union of one would be no choice, and the subcommand's name no part of the call.
        kinds: list[Any] = [Annotated[kind, tyro.conf.subcommand(name)] for name, kind in SUBCOMMANDS.items()]
        kinds.append(Annotated[None, tyro.conf.Suppress])
        union: Any = Union[tuple(kinds)]  # noqa: UP007 (its arms are known when it runs)
        chosen = parse_options(union, with_new_names(arguments), _PROG, description="Measurements, side by side.")
    if isinstance(chosen, RecipeBenchmark) and hasattr(chosen, "corpus"):
        # Samples have decided some of the recipe, as for training.
        return replace(chosen, settings=fitted(chosen.settings, chosen.corpus))
    command: Subcommand = chosen
    return command


if __name__ == "__main__":
    sys.exit(main())
