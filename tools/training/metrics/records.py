"""The numbers of a step, of an evaluation and of memory: as fields, under TensorBoard's names, and as JSON."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tensor3d import Cube
from tensor3d.distributed.collectives import all_gather


def peak_memory(cube: Cube) -> list[int]:
    """Bytes by rank, since each process began: tensors on a GPU, else the resident set. One all-gather of one number.

    Every rank calls it at the same point.
    """
    own = torch.cuda.max_memory_allocated(cube.device) if cube.device.type == "cuda" else peak_resident()
    number = torch.tensor([own], dtype=torch.int64, device=cube.device)
    # The ranks of all axes together are all ranks, in their order.
    peaks: list[int] = all_gather(number, cube.over("data", "x", "y", "z")).wait().tolist()
    return peaks


def peak_resident() -> int:
    """Bytes of this process at its largest.

    From Linux' own count of this programme. `getrusage` may count what the process was before it began this programme:
    a child of a large parent would report its parent's size.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        lines = []
    found = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    if found:
        return found[0] * 1024
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024  # kibibytes, everywhere but on macOS


# TensorBoard's name: the field of StepMetrics, which is also the key in metrics.jsonl.
STEP_TAGS: Mapping[str, str] = MappingProxyType(
    {
        "loss/total": "loss",
        "loss/masked_lm": "masked_lm_loss",
        "loss/next_sentence": "next_sentence_loss",
        "loss/replaced_tokens": "replaced_token_loss",
        "accuracy/masked_lm": "masked_lm_accuracy",
        "accuracy/next_sentence": "next_sentence_accuracy",
        "accuracy/replaced_tokens": "replaced_token_accuracy",
        "optimizer/learning_rate": "learning_rate",
        "optimizer/gradient_norm": "gradient_norm",
        "optimizer/loss_scale": "loss_scale",
        "optimizer/skipped_steps": "skipped_steps",
        "speed/step_seconds": "seconds",
        "speed/tokens_per_second": "tokens_per_second",
        "speed/model_tflops": "model_tflops",
        "speed/mfu": "mfu",
        "time/forward_seconds": "forward_seconds",
        "time/backward_seconds": "backward_seconds",
        "time/gradient_sum_seconds": "gradient_sum_seconds",
        "time/optimizer_seconds": "optimizer_seconds",
        "time/checkpoint_seconds": "checkpoint_seconds",
        "data/fill": "fill",
        "data/masked_share": "masked_share",
        "data/replaced_share": "replaced_share",
        "data/imbalance": "imbalance",
        "data/wait_seconds": "data_wait_seconds",
        "traffic/bytes_received": "bytes_received",
        "traffic/collectives": "collectives",
    }
)
EVALUATION_TAGS: Mapping[str, str] = MappingProxyType(
    {
        "evaluation/loss": "loss",
        "evaluation/masked_lm_loss": "masked_lm_loss",
        "evaluation/masked_lm_accuracy": "masked_lm_accuracy",
        "evaluation/next_sentence_accuracy": "next_sentence_accuracy",
        "evaluation/replaced_token_loss": "replaced_token_loss",
        "evaluation/replaced_token_accuracy": "replaced_token_accuracy",
        "evaluation/samples": "samples",
    }
)
BY_AXIS = "traffic/bytes_received/"
"""Before an axis: TensorBoard's name of what came along that axis."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One step of the optimiser, over the whole cube."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Masked-LM plus next-sentence loss, if there is one, or plus the weighted loss of replaced tokens, nats."""
    masked_lm_loss: float
    """Nats; of an ELECTRA its generator's, as is the accuracy."""
    next_sentence_loss: float | None
    """Nats. None: masked words alone are learnt."""
    masked_lm_accuracy: float
    """0 to 1."""
    next_sentence_accuracy: float | None
    """0 to 1. None: single texts, which have no label."""
    learning_rate: float
    gradient_norm: float
    """Before clipping, without the loss scale."""
    loss_scale: float
    """By which this step's loss was multiplied; 1 without fp16."""
    skipped: bool
    """Whether this step changed nothing, because a gradient was not finite."""
    skipped_steps: int
    """Skipped so far, this one included."""
    seconds: float
    """From the end of the step before, without evaluation and checkpoints."""
    tokens_per_second: float
    """Real tokens: unused slots of packs do not count."""
    model_tflops: float
    """10^12 model FLOP/s a rank, averaged over all: products of matrices, nothing that is computed twice."""
    mfu: float | None
    """Model FLOP/s over the device's peak, 0 to 1 (Chowdhery et al. 2022, appendix B). None: no peak is known."""
    data_wait_seconds: float
    """How long this rank waited for the batch."""
    forward_seconds: float
    """Of this rank, all micro-batches; so are the next four."""
    backward_seconds: float
    """Without the sum of gradients over ranks that ends the pass."""
    gradient_sum_seconds: float
    """Sums over ranks of the gradients of copies, which wait for the slowest rank."""
    optimizer_seconds: float
    """Norm, clipping and update."""
    checkpoint_seconds: float
    """How long a checkpoint kept this rank before the step; not part of `seconds`."""
    fill: float
    """Share of the token slots that hold a token."""
    masked_share: float
    """Share of the tokens that are guessed."""
    imbalance: float
    """Most over mean work of a rank, in the micro-batch where that is worst."""
    bytes_received: int
    """By this rank, in the ring model, in which every rank sends about as many."""
    collectives: int
    """Issued by this rank."""
    traffic: dict[str, int]
    """`bytes_received` by axis: "y", or "data+x+z" for axes taken together."""
    replaced_token_loss: float | None = None
    """Binary cross-entropy of all tokens, nats, without its weight. None, as the next two: another objective."""
    replaced_token_accuracy: float | None = None
    """Share of the tokens of which the discriminator says rightly whether they are replaced."""
    replaced_share: float | None = None
    """Share of the tokens in whose place the generator has drawn another one: whoever says of none that it is replaced
    is right in all others."""

    def scalars(self) -> dict[str, float]:
        """Under the names that TensorBoard shows."""
        values = {tag: getattr(self, name) for tag, name in STEP_TAGS.items()}
        shown = {tag: float(value) for tag, value in values.items() if value is not None}
        return shown | {BY_AXIS + axis: float(count) for axis, count in self.traffic.items()}

    def record(self) -> dict[str, Any]:
        """The fields as they are, for JSON; `traffic` as "bytes_received/AXIS"."""
        fields = asdict(self)
        return fields | {f"bytes_received/{axis}": count for axis, count in fields.pop("traffic").items()}


@dataclass(frozen=True, kw_only=True)
class EvaluationMetrics:
    """All held-out packs, over the whole cube."""

    step: int
    samples: int
    """Sequences trained on so far."""
    loss: float
    masked_lm_loss: float
    masked_lm_accuracy: float
    next_sentence_accuracy: float | None = None
    """None: single texts, which have no label."""
    replaced_token_loss: float | None = None
    """As of a step."""
    replaced_token_accuracy: float | None = None

    @property
    def cost(self) -> float:
        """By which evaluations are compared."""
        return self.loss

    def scalars(self) -> dict[str, float]:
        """Under the names that TensorBoard shows."""
        values = {tag: getattr(self, name) for tag, name in EVALUATION_TAGS.items()}
        return {tag: float(value) for tag, value in values.items() if value is not None}

    def record(self) -> dict[str, Any]:
        """The fields as they are, for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class MemoryMetrics:
    """The most memory that each rank has had at once, since it began."""

    step: int
    peak_bytes: list[int]
    """By rank: tensors on a GPU, else the resident set of the process."""

    def scalars(self) -> dict[str, float]:
        """Under the names that TensorBoard shows: a curve for each of thousands of ranks would show nothing."""
        return {
            "memory/peak_bytes_most": float(max(self.peak_bytes)),
            "memory/peak_bytes_mean": sum(self.peak_bytes) / len(self.peak_bytes),
        }

    def record(self) -> dict[str, Any]:
        """The fields as they are, for JSON."""
        return asdict(self)


def next_sentence_accuracy(correct: float, loss: float, sequences: int) -> float | None:
    """Share of the sequences whose label was predicted. None where there is no label at all: one that is predicted adds
    1 to `correct`, any other at least log 2 to the sum of losses, of which `loss` is a multiple."""
    return correct / sequences if correct or loss else None


def by_axis(received: Mapping[tuple[str, Any], int]) -> dict[str, int]:
    """Bytes by axis, of bytes by (axis, kind of collective) as `CommStats.received` has them."""
    sums: dict[str, int] = {}
    for (axis, _), count in sorted(received.items()):
        sums[axis] = sums.get(axis, 0) + count
    return sums
