"""The seed's headline through this library's model: Bian et al. 2021 (arXiv 2105.14450) on 64 V100.

Reported: 3-D was 2.32 times as fast as 1-D and 1.57 times as fast as 2-D, by the average step time: seconds of forward
and backward divided by the batch size, each way at a batch size of its own.

What is known of the setup, and from where:

- 64 V100 of TACC; its V100 machine was Longhorn, four to a node (`presets.longhorn`, with what is assumed there).
- The same group's 2-D benchmark is public (github.com/xuqifan897/Optimus, bcmk_ParallelTransformer.sh and
  summa/arguments.py): 24 layers, sequences of 512 tokens, fp32, activations recomputed layer by layer, collectives that
  block, and 96 sequences at hidden size 2048 with 32 heads on 4 GPUs.

Assumed, because the paper's own table was not at hand:

- The same layers, length, type and recomputation in all three ways; 3-D keeps what it gathers within a layer.
- Hidden size 8192 with 128 heads on 64 GPUs: weak scaling of that benchmark, hidden size with the root of the ranks.
- Batch sizes 30, 384 and 384 for 1-D, 2-D and 3-D. The first is about what a 16 GB GPU can hold: 1-D keeps each layer's
  input whole, 24 * 512 * 8192 * 4 bytes = 0.4 GB a sequence. The others follow 96 sequences on 4 GPUs with the root of
  the ranks.

So the ratios below are a model's, for a setup that is likely, not a reproduction. `CASES` shows what each assumption is
worth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tensor3d.cost_model.hardware import Cluster, longhorn
from tensor3d.cost_model.literature import Broadcasts, MethodTime, TransformerSpec, known, timed

RANKS = 64
REPORTED: Mapping[str, float] = MappingProxyType({"1-D": 2.32, "2-D": 1.57})
"""How many times as long as 3-D a way was reported to take for a sample."""
_BATCHES: Mapping[str, int] = MappingProxyType({"1-D": 30, "2-D": 384, "3-D": 384})
_LAYERS, _LENGTH, _HIDDEN, _HEADS = 24, 512, 8192, 128
_REMARKS = (
    "The paper's own table was not at hand: hidden size, heads and batch sizes are assumed, and so is the network.",
    "1-D: slower in the model than reported. The wire between nodes bounds it. One port a node is assumed; with two,",
    "it is faster than reported.",
    "2-D: faster in the model than reported. Broadcasts are taken as chains, which keep the wire full; as trees",
    "of whole blocks they make it slower than reported.",
    "1-D's small batch is not what makes it slow: at 384 sequences, which 16 GB do not hold, a sample takes as long.",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A setup that may have been the paper's."""

    told: str
    """What differs from the first case."""
    batches: Mapping[str, int] = field(default_factory=lambda: _BATCHES)
    hidden: int = _HIDDEN
    heads: int = _HEADS
    compute: str = "fp32"
    broadcasts: Broadcasts = "chain"
    recomputed: bool = True
    cluster: Cluster = field(default_factory=longhorn)

    def encoder(self, way: str) -> TransformerSpec:
        return TransformerSpec(
            sequences=self.batches[way],
            length=_LENGTH,
            hidden=self.hidden,
            inner=4 * self.hidden,
            heads=self.heads,
            layers=_LAYERS,
        )

    def times(self, way: str) -> MethodTime:
        """A step of the way's own batch."""
        encoder, element = self.encoder(way), 4 if self.compute == "fp32" else 2
        row = known(way, encoder, RANKS, kept=True, recomputed=self.recomputed)
        return timed(
            row,
            encoder,
            self.cluster,
            compute=self.compute,
            element=element,
            gradient=element,
            recomputed=self.recomputed,
            broadcasts=self.broadcasts,
            overlapped=False,
        )

    def per_sample(self) -> dict[str, float]:
        """Seconds of a step over the batch size, by way."""
        return {way: self.times(way).seconds / batch for way, batch in self.batches.items()}

    def ratios(self) -> dict[str, float]:
        """Each way's seconds a sample over those of 3-D."""
        seconds = self.per_sample()
        return {way: seconds[way] / seconds["3-D"] for way in REPORTED}


def cases() -> tuple[Case, ...]:
    """The setup above first, then one assumption changed at a time."""
    plain = longhorn()
    wider = dataclasses.replace(plain.across, bandwidth=2 * plain.across.bandwidth)
    return (
        Case(told="as assumed"),
        Case(told="broadcasts as trees of sends, as the 2-D paper counts", broadcasts="tree"),
        Case(told="two InfiniBand ports a node", cluster=dataclasses.replace(plain, across=wider)),
        Case(told="fp16 instead of fp32", compute="fp16"),
        Case(told="no recomputation", recomputed=False),
        Case(told="1-D at the batch of the others", batches=MappingProxyType({"1-D": 384, "2-D": 384, "3-D": 384})),
        Case(
            told="hidden size 3072, 64 heads, batches 12, 24, 16 (strong scaling)",
            hidden=3072,
            heads=64,
            batches=MappingProxyType({"1-D": 12, "2-D": 24, "3-D": 16}),
        ),
    )


def report() -> str:
    """The model's times and ratios beside the reported ones, and what each assumption is worth."""
    found = cases()
    first = found[0]
    lines = [
        f"{RANKS} V100 ({first.cluster.name}), {_LAYERS} layers of {first.hidden}, {first.heads} heads, sequences of "
        f"{_LENGTH}, {first.compute},",
        "activations recomputed, collectives block; seconds of forward and backward for a sample:",
        "",
        f"{'way':<6}{'batch':>7}{'products':>11}{'collectives':>13}{'together':>10}{'/ 3-D':>8}{'reported':>10}",
    ]
    ratios = first.ratios()
    for way, batch in first.batches.items():
        row = first.times(way)
        lines.append(
            f"{way:<6}{batch:>7}{row.compute / batch:>11.4f}{row.exposed / batch:>13.4f}{row.seconds / batch:>10.4f}"
            f"{ratios.get(way, 1.0):>8.2f}{REPORTED.get(way, 1.0):>10.2f}"
        )
    width = max(len(case.told) for case in found) + 2
    lines += ["", f"{'times as long as 3-D':<{width}}" + "".join(f"{way:>6}" for way in REPORTED)]
    lines.append(f"{'reported':<{width}}" + "".join(f"{ratio:>6.2f}" for ratio in REPORTED.values()))
    lines += [f"{case.told:<{width}}" + "".join(f"{ratio:>6.2f}" for ratio in case.ratios().values()) for case in found]
    return "\n".join([*lines, "", *_REMARKS])
