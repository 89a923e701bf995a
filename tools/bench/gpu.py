"""`bench gpu`: everything that only a GPU can show, in stages that each leave their results, whatever fails.

A machine with a GPU is often lent for minutes. So the stages stand in the order of what is worth most, each ends within
its own limit, none stops the next one, and the page of results is written anew after each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tools.bench.harness.benchmark import Subcommand, listed
from tools.bench.harness.stages import Stage, run_stages
from tools.bench.vs_transformers.contenders import GRAPHED
from tools.common.files import lock_folder
from tools.common.workers import usable_cores

_TESTS = (
    "tests/gpu",
    "tests/attention/test_backends.py",
    "tests/distributed/test_no_host_sync.py",
    "tests/data/test_loader_delivery.py",
)
_PROCESSES = (8, 4)  # that test beside one another, where there are twice as many cores: more compile at once
_HANGS = 120  # seconds after which a test tells where it is
_PADDED = 16
"""Sequences of a padded micro-batch where memory is short: beside a graph, whose memory nobody else gets, and beside
six other models. Of BERT-large 64 keep 36 GB for backward, 16 of them 10."""


@dataclass(frozen=True, kw_only=True)
class GpuCommand(Subcommand):
    """Run all GPU tests and benchmarks, stage by stage; each leaves a log, and all of them one page."""

    output: Path = Path("results/gpu")
    """Folder for logs, figures and the page, report.md; made if it is missing."""
    stages: str | None = None
    """Some of them, with commas, in their order. Default: all. `--show` lists them."""
    show: bool = False
    """Show the stages and their commands, and do nothing."""
    seconds: int = 3600
    """For all stages together: what would begin later is left out, and what runs then is stopped."""
    preset: str = "large"
    """Size of BERT in the benchmarks."""
    layers: int | None = None
    """Transformer layers, instead of the preset's: for a rehearsal."""
    vocab: int = 30522
    """Entries of the vocabulary."""
    length: int = 512
    """Tokens of the longest sequence, and slots of a pack."""
    packs: str = "8,16,32,64"
    """Of a micro-batch, with commas: the benchmarks take the first, the stage `packs` all."""
    histogram: Path | None = None
    """JSON file of lengths for the benchmarks: an object with `counts`. Default: a formula."""
    precision: str = "bf16"
    """Type of the products in the benchmarks."""

    def run(self, arguments: Sequence[str]) -> int:
        stages = self.chosen()
        if self.show:
            for stage in stages:
                print(f"{stage.name} (at most {stage.seconds} s): {stage.why}\n    {stage}")
            return 0
        if not torch.cuda.is_available():
            if self.preset != "tiny" and any(self.preset in stage.command for stage in stages):
                raise ValueError(
                    f"PyTorch {torch.__version__} sees no GPU, and on a CPU BERT-{self.preset} takes hours. Look at "
                    "nvidia-smi and at torch.version.cuda; for a rehearsal on the CPU take --preset tiny."
                )
            print(
                f"no GPU is here: the tests that need one are skipped, and the rest, but {GRAPHED}, runs on the CPU",
                flush=True,
            )
        with lock_folder(self.output):
            return run_stages(stages, self.output, self.seconds, list(self._known()))

    def chosen(self) -> list[Stage]:
        """Raises ValueError for an unknown stage, or a bad option."""
        if self.seconds < 1:
            raise ValueError(f"--seconds must be at least 1. Got {self.seconds}.")
        known = self._known()
        names = list(known) if self.stages is None else listed("--stages", self.stages, known)
        return [stage for name, stage in known.items() if name in names]

    def _known(self) -> dict[str, Stage]:
        return {stage.name: stage for stage in self.all_stages(self._packs())}

    def _packs(self) -> list[int]:
        try:
            packs = [int(each) for each in self.packs.split(",")]
        except ValueError:
            packs = []
        if not packs or min(packs) < 1:
            raise ValueError(f"--packs must be whole numbers from 1 on, with commas. Got {self.packs!r}.")
        return packs

    def all_stages(self, packs: Sequence[int]) -> list[Stage]:
        """What is worth most comes first."""
        first, most = packs[0], max(packs)
        few = [self._many_packs(count) for count in packs[1:] if count != most]
        many = [self._many_packs(count) for count in packs[1:] if count == most]  # where a GPU is at its best
        if many and torch.cuda.is_available():
            many.append(
                self._beside_library(
                    f"graph-{most}",
                    "the same as a CUDA graph, alone: nobody else gets its memory",
                    contenders=f"transformers-masked,{GRAPHED}",
                    sequences=2 * most,
                    packs=most,
                    micro_batch=min(_PADDED, most),
                    seconds=180,
                )
            )
        stages = [*self._facts_and_tests(), self._profile(packs[-1]), *many]
        stages.append(
            self._beside_library(
                "library",
                "BERT beside transformers: padded, unpadded, eager and compiled",
                contenders=_CONTENDERS if torch.cuda.is_available() else _CONTENDERS.replace(f",{GRAPHED}", ""),
                sequences=16 * first,
                packs=first,
                seconds=560,
            )
        )
        stages += few
        if self.precision == "bf16":
            stages.append(self._fp8(packs[-1]))
        stages.append(self._attention())
        stages.append(
            self._beside_library(
                "sorted",
                "beside transformers on batches sorted by length, with dropout of attention weights",
                contenders="transformers,transformers-masked,ours-rows,ours-rows-compiled",
                inputs="sorted",
                sequences=16 * first,
                packs=first,
                attention_dropout=True,
                seconds=400,
            )
        )
        why = "the machine, as before a run"
        return [*stages, Stage(name="doctor", why=why, command=("-m", "tools.doctor"), seconds=240)]

    @property
    def _lengths(self) -> tuple[str, ...]:
        return () if self.histogram is None else ("--histogram", str(self.histogram))

    @property
    def _sizes(self) -> tuple[str, ...]:
        layers = () if self.layers is None else ("--layers", str(self.layers))
        return ("--length", str(self.length), "--vocab", str(self.vocab), *self._lengths, *layers)

    def _facts_and_tests(self) -> list[Stage]:
        workers = str(next((number for number in _PROCESSES if usable_cores() >= 2 * number), 0))
        pytest = (
            "-m",
            "pytest",
            "-q",
            "-ra",
            "-n",
            workers,
            "--dist",
            "worksteal",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:benchmark",
        )
        hangs = ("-o", f"faulthandler_timeout={_HANGS}", "-o", "faulthandler_exit_on_timeout=false")
        return [
            Stage(
                name="facts",
                why="versions of all packages, the GPU and its clocks, how fast it copies and multiplies",
                command=("-m", "tools.bench.gpu_facts"),
                seconds=120,
            ),
            Stage(
                name="tests",
                why="what needs a GPU, and the same numbers as a CPU's",
                command=(*pytest, *hangs, "--durations=15", "-m", "not slow and not long", *_TESTS),
                seconds=480,
            ),
        ]

    def _profile(self, packs: int) -> Stage:
        model = ("--preset", self.preset, "--precision", self.precision, *self._sizes, "--packs", str(packs))
        files = ("--trace", str(self.output / "trace.json.gz"), "--output", str(self.output / "profile.json"))
        return Stage(
            name="profile",
            why="the dearest kernels of a step, and the time without one",
            command=("-m", "tools.bench", "profile", *model, *files),
            seconds=180,
        )

    def _many_packs(self, packs: int) -> Stage:
        is_most = packs == max(self._packs())
        return self._beside_library(
            f"packs-{packs}",
            f"BERT beside transformers with {packs} packs a micro-batch",
            contenders=_MANY_PACKS if is_most else _FEW_PACKS,
            sequences=2 * packs,
            packs=packs,
            seconds=420 if is_most else 240,
            smaller=self._many_packs(packs // 2) if packs > 1 and is_most else None,
        )

    def _fp8(self, packs: int, name: str = "fp8") -> Stage:
        return self._beside_library(
            name,
            "linear layers in FP8, beside bf16 alone, eager and compiled",
            contenders=_IN_FP8,
            sequences=2 * packs,
            packs=packs,
            micro_batch=min(_PADDED, packs),
            seconds=420,
            smaller=self._fp8(packs // 2, f"fp8-{packs // 2}") if packs > 1 and name == "fp8" else None,
        )

    def _attention(self) -> Stage:
        kind, backends = ("bf16", "grouped,varlen,flex") if torch.cuda.is_available() else ("fp32", "grouped")
        sizes = (*self._lengths, "--heads", "16", "--longest", str(self.length))
        output = ("--output", str(self.output / "attention.json"))
        return Stage(
            name="attention",
            why="attention alone, by backend",
            command=("-m", "tools.bench", "attention", *sizes, "--type", kind, "--backends", backends, *output),
            seconds=240,
        )

    def _beside_library(
        self,
        name: str,
        why: str,
        *,
        contenders: str,
        sequences: int,
        packs: int,
        seconds: int,
        micro_batch: int | None = None,
        inputs: str = "padded",
        attention_dropout: bool = False,
        smaller: Stage | None = None,
    ) -> Stage:
        """`bench library`: our BERT and that of transformers, by turns.

        Args:
            micro_batch: sequences of a padded one; None: as many as packs.
            attention_dropout: whether attention weights have dropout, which `varlen` does not have.
            smaller: what runs after it where it ran out of memory.
        """
        model = ("--presets", self.preset, "--precisions", self.precision, *self._sizes, "--dropout", "0.1")
        if not attention_dropout:
            model = (*model, "--attention-dropout", "0")
        batch = ("--inputs", inputs, "--sequences", str(sequences), "--packs", str(packs))
        padded = ("--micro-batch", str(packs if micro_batch is None else micro_batch))
        turns = ("--rounds", "3", "--warmup", "3", "--contenders", contenders)
        output = ("--output", str(self.output / f"{name}.json"))
        command = ("-m", "tools.bench", "library", *model, *batch, *padded, *turns, *output)
        return Stage(name=name, why=why, command=command, seconds=seconds, smaller=smaller)


_CONTENDERS = (
    "transformers-masked,transformers-masked-compiled,transformers-unpadded,transformers-unpadded-compiled,ours,ours-rows,"
    "ours-rows-compiled,ours-graph"
)
_FEW_PACKS = "transformers-masked,ours-rows,ours-rows-compiled"
_MANY_PACKS = (
    "transformers-masked,transformers-unpadded,transformers-unpadded-compiled,ours-rows,ours-rows-compiled,"
    "ours-rows-shadows,ours-rows-compiled-shadows"
)
"""No graph, which holds what 64 packs keep for backward, 27 GB of BERT-large, beside all others: 80 GB are too few. It
has a stage of its own."""
_IN_FP8 = (
    "transformers-masked,ours-rows,ours-rows-compiled,ours-rows-fp8,ours-rows-compiled-fp8,"
    "ours-rows-compiled-tensorwise,ours-rows-compiled-delayed"
)
