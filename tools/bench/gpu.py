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
_PROCESSES = 4  # that test beside one another, where there are as many cores
_HANGS = 120  # seconds after which a test tells where it is
_PADDED = 16  # sequences of a padded micro-batch beside a graph, whose memory nobody else gets


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
        try:
            packs = [int(each) for each in self.packs.split(",")]
        except ValueError:
            packs = []
        if not packs or min(packs) < 1:
            raise ValueError(f"--packs must be whole numbers from 1 on, with commas. Got {self.packs!r}.")
        return {stage.name: stage for stage in self.all_stages(packs)}

    def all_stages(self, packs: Sequence[int]) -> list[Stage]:
        """What is worth most comes first."""
        bench = ("-m", "tools.bench")
        beside = ("-n", str(_PROCESSES)) if usable_cores() >= 2 * _PROCESSES else ("-n", "0")
        histogram = () if self.histogram is None else ("--histogram", str(self.histogram))
        sizes = ("--length", str(self.length), "--vocab", str(self.vocab), *histogram)
        if self.layers is not None:
            sizes = (*sizes, "--layers", str(self.layers))
        library = (*bench, "library", "--presets", self.preset, "--precisions", self.precision, *sizes)
        varlen = ("--dropout", "0.1", "--attention-dropout", "0")
        turns = ("--rounds", "3", "--warmup", "3", "--micro-batch", str(packs[0]), "--packs", str(packs[0]))
        stages = [
            Stage(
                name="facts",
                why="versions of all packages, the GPU and its clocks, how fast it copies and multiplies",
                command=("-m", "tools.bench.gpu_facts"),
                seconds=120,
            ),
            Stage(
                name="tests",
                why="what needs a GPU, and the same numbers as a CPU's",
                command=(
                    "-m",
                    "pytest",
                    "-q",
                    "-ra",
                    *beside,
                    "-p",
                    "no:cacheprovider",
                    "-p",
                    "no:benchmark",
                    "-o",
                    f"faulthandler_timeout={_HANGS}",
                    "-o",
                    "faulthandler_exit_on_timeout=false",
                    "--durations=15",
                    "-m",
                    "not slow and not long",
                    *_TESTS,
                ),
                seconds=480,
            ),
            Stage(
                name="profile",
                why="the dearest kernels of a step, and the time without one",
                command=(
                    *bench,
                    "profile",
                    "--preset",
                    self.preset,
                    "--precision",
                    self.precision,
                    *sizes,
                    "--packs",
                    str(packs[-1]),
                    "--trace",
                    str(self.output / "trace.json.gz"),
                    "--output",
                    str(self.output / "profile.json"),
                ),
                seconds=180,
            ),
            Stage(
                name="library",
                why="BERT beside transformers: padded, unpadded, eager and compiled",
                command=(
                    *library,
                    "--inputs",
                    "padded",
                    "--sequences",
                    str(16 * packs[0]),
                    *turns,
                    *varlen,
                    "--contenders",
                    _here(_CONTENDERS),
                    "--output",
                    str(self.output / "library.json"),
                ),
                seconds=560,
            ),
        ]
        of_packs = {
            count: Stage(
                name=f"packs-{count}",
                why="the same with more packs a micro-batch",
                command=(
                    *library,
                    "--inputs",
                    "padded",
                    "--sequences",
                    str(2 * count),
                    "--rounds",
                    "3",
                    "--warmup",
                    "3",
                    "--packs",
                    str(count),
                    "--micro-batch",
                    str(count),
                    *varlen,
                    "--contenders",
                    _MANY_PACKS if count == max(packs) else _FEW_PACKS,
                    "--output",
                    str(self.output / f"packs-{count}.json"),
                ),
                seconds=420 if count == max(packs) else 240,
            )
            for count in packs[1:]
        }
        most = [of_packs.pop(count) for count in packs[1:] if count == max(packs)]  # where a GPU is at its best
        if most and torch.cuda.is_available():
            most.append(
                Stage(
                    name=f"graph-{max(packs)}",
                    why="the same as a CUDA graph, alone: nobody else gets its memory",
                    command=(
                        *library,
                        "--inputs",
                        "padded",
                        "--sequences",
                        str(2 * max(packs)),
                        "--rounds",
                        "3",
                        "--warmup",
                        "3",
                        "--packs",
                        str(max(packs)),
                        "--micro-batch",
                        str(min(_PADDED, max(packs))),
                        *varlen,
                        "--contenders",
                        f"transformers-masked,{GRAPHED}",
                        "--output",
                        str(self.output / f"graph-{max(packs)}.json"),
                    ),
                    seconds=180,
                )
            )
        stages[-1:] = [*most, stages[-1], *of_packs.values()]
        if self.precision == "bf16":
            stages.append(
                Stage(
                    name="fp8",
                    why="linear layers in FP8, beside bf16 alone, eager and compiled",
                    command=(
                        *library,
                        "--inputs",
                        "padded",
                        "--sequences",
                        str(2 * packs[-1]),
                        "--rounds",
                        "3",
                        "--warmup",
                        "3",
                        "--packs",
                        str(packs[-1]),
                        "--micro-batch",
                        str(packs[-1]),
                        *varlen,
                        "--contenders",
                        _IN_FP8,
                        "--output",
                        str(self.output / "fp8.json"),
                    ),
                    seconds=420,
                )
            )
        attention = (*bench, "attention", *histogram, "--heads", "16", "--longest", str(self.length))
        on_gpu = torch.cuda.is_available()
        stages += [
            Stage(
                name="attention",
                why="attention alone, by backend",
                command=(
                    *attention,
                    "--type",
                    "bf16" if on_gpu else "fp32",
                    "--backends",
                    "grouped,varlen,flex" if on_gpu else "grouped",
                    "--output",
                    str(self.output / "attention.json"),
                ),
                seconds=240,
            ),
            Stage(
                name="sorted",
                why="beside transformers on batches sorted by length, with dropout of attention weights",
                command=(
                    *library,
                    "--inputs",
                    "sorted",
                    "--sequences",
                    str(16 * packs[0]),
                    *turns,
                    "--dropout",
                    "0.1",
                    "--contenders",
                    "transformers,transformers-masked,ours-rows,ours-rows-compiled",
                    "--output",
                    str(self.output / "sorted.json"),
                ),
                seconds=400,
            ),
            Stage(
                name="doctor",
                why="the machine, as before a run",
                command=("-m", "tools.doctor"),
                seconds=240,
            ),
        ]
        return stages


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


def _here(contenders: str) -> str:
    """Without what a machine without a GPU refuses."""
    return contenders if torch.cuda.is_available() else contenders.replace(f",{GRAPHED}", "")
