"""`bench gpu`: everything that only a GPU can show, in stages that each leave their results, whatever fails.

A machine with a GPU is often lent for minutes. So the stages stand in the order of what is worth most, each ends within
its own limit, none stops the next one, and the page of results is written anew after each.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tools.bench.harness.benchmark import Subcommand
from tools.bench.vs_transformers.contenders import GRAPHED
from tools.common.files import make_folder, write_file
from tools.common.machine import Machine, write_json
from tools.common.workers import usable_cores

_TESTS = (
    "tests/gpu",
    "tests/attention/test_backends.py",
    "tests/distributed/test_no_host_sync.py",
    "tests/data/test_loader_delivery.py",
)
_PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "tyro", "scipy", "sentencepiece", "pytest")
_PROCESSES = 4  # that test beside one another, where there are as many cores
_TAIL = 40  # lines of a stage's output that stand on the page


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One command, and how long it may take."""

    name: str
    why: str
    command: tuple[str, ...]
    """Of Python: what follows the interpreter."""
    seconds: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a stage ended."""

    name: str
    status: int | None
    """Exit status, negative for a signal; None: it was not begun."""
    seconds: float
    timed_out: bool = False

    def __str__(self) -> str:
        if self.status is None:
            return "not begun: no time was left"
        if self.timed_out:
            return f"stopped at its limit after {self.seconds:.0f} s"
        return "passed" if self.status == 0 else f"failed (exit status {self.status})"


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
                print(f"{stage.name} (at most {stage.seconds} s): {stage.why}\n    {_shown(stage)}")
            return 0
        if not torch.cuda.is_available():
            print(
                f"no GPU is here: the tests that need one are skipped, and the rest, but {GRAPHED}, runs on the CPU",
                flush=True,
            )
        make_folder(self.output)
        begun, outcomes = time.monotonic(), []
        for stage in stages:
            left = self.seconds - (time.monotonic() - begun)
            outcome = run_stage(stage, self.output, left)
            outcomes.append(outcome)
            print(f"{stage.name}: {outcome}, {outcome.seconds:.0f} s", flush=True)
            write_page(self.output, stages, outcomes)
        print(f"written: {self.output / 'report.md'}")
        return 0 if all(outcome.status == 0 for outcome in outcomes) else 1

    def chosen(self) -> list[Stage]:
        """Raises ValueError for an unknown stage, or a bad option."""
        if self.seconds < 1:
            raise ValueError(f"--seconds must be at least 1. Got {self.seconds}.")
        try:
            packs = [int(each) for each in self.packs.split(",")]
        except ValueError:
            packs = []
        if not packs or min(packs) < 1:
            raise ValueError(f"--packs must be whole numbers from 1 on, with commas. Got {self.packs!r}.")
        known = {stage.name: stage for stage in self.all_stages(packs)}
        names = list(known) if self.stages is None else self.stages.split(",")
        if not set(names) <= set(known):
            raise ValueError(f"--stages must be some of {','.join(known)}. Got {self.stages!r}.")
        return [stage for name, stage in known.items() if name in names]

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
                why="versions of all packages, the GPU, and how fast it copies",
                command=("-m", "tools.bench.gpu"),
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
                    str(self.output / "trace.json"),
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
"""No graph, which holds what 64 packs keep for backward, 27 GB of BERT-large, beside all others: 80 GB are too few, and
a stage that runs out of memory has no result. The stage `library` has it, with few packs, where it gives most."""
_IN_FP8 = (
    "transformers-masked,ours-rows,ours-rows-compiled,ours-rows-fp8,ours-rows-compiled-fp8,"
    "ours-rows-compiled-tensorwise,ours-rows-compiled-delayed"
)


def _here(contenders: str) -> str:
    """Without what a machine without a GPU refuses."""
    return contenders if torch.cuda.is_available() else contenders.replace(f",{GRAPHED}", "")


def run_stage(stage: Stage, folder: Path, left: float) -> Outcome:
    """Runs a stage with its output in a file, and ends all its processes at the limit."""
    if left < 1:
        return Outcome(name=stage.name, status=None, seconds=0.0)
    begun = time.monotonic()
    with (folder / f"{stage.name}.log").open("w", encoding="utf-8") as log:
        log.write(f"$ {_shown(stage)}\n")
        log.flush()
        process = subprocess.Popen(
            [sys.executable, "-u", *stage.command],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        timed_out = False
        try:
            status = process.wait(min(stage.seconds, left))
        except subprocess.TimeoutExpired:
            timed_out = True
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
    return Outcome(name=stage.name, status=status, seconds=time.monotonic() - begun, timed_out=timed_out)


def write_page(folder: Path, stages: Sequence[Stage], outcomes: Sequence[Outcome]) -> None:
    """report.md: how each stage ended, and the end of what it printed."""
    lines = ["# What a GPU showed", "", "| stage | outcome | seconds |", "| --- | --- | ---: |"]
    lines += [f"| {outcome.name} | {outcome} | {outcome.seconds:.0f} |" for outcome in outcomes]
    for stage, outcome in zip(stages, outcomes, strict=False):
        log = folder / f"{stage.name}.log"
        if outcome.status is None or not log.exists():
            continue
        end = log.read_text(encoding="utf-8", errors="replace").splitlines()[1:][-_TAIL:]
        lines += ["", f"## {stage.name}: {stage.why}", "", f"    {_shown(stage)}", "", "```text", *end, "```"]
    write_file(folder / "report.md", "\n".join(lines) + "\n")
    write_json(
        folder / "outcomes.json", {each.name: {"status": each.status, "seconds": each.seconds} for each in outcomes}
    )


def facts() -> list[str]:
    """Versions, and rates of the device that everything else is measured by."""
    found = [str(Machine.here())]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package}: not installed")
    if torch.cuda.is_available():
        found.append(
            f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {torch.cuda.nccl.version()}"
        )
        properties = torch.cuda.get_device_properties(0)
        found.append(
            f"{properties.name}: {properties.multi_processor_count} multiprocessors, {properties.total_memory:,} B"
        )
        found.append(f"copies {copy_rate() / 1e12:.2f} TB/s, bytes read and written")
    return found


def copy_rate(size: int = 2**32, rounds: int = 20) -> float:
    """Bytes a second that a large copy on the GPU reads and writes."""
    source = torch.rand(size // 4, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(rounds):
        target.copy_(source)
    end.record()
    end.synchronize()
    return 2 * size * rounds / (start.elapsed_time(end) / 1e3)


def _shown(stage: Stage) -> str:
    return shlex.join(["python", *stage.command])


if __name__ == "__main__":
    print("\n".join(facts()))
