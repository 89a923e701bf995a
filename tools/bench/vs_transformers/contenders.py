"""The contenders of `bench library`: `transformers` as it is, with its head on masked rows alone, and ours.

All have the same weights, the same objective (means over the whole step's masked tokens and sequences), the same
clipping and AdamW, fused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from models.bert import BertConfig, BertForPreTraining, export_huggingface
from models.bert.cost_model.flops import step_flops
from models.bert.graphed import GraphedBert
from models.bert.huggingface import open_weights
from tensor3d import Cube, ExecutionPolicy, MixedPrecisionPolicy, clip_grad_norm_
from tensor3d.attention import attention
from tensor3d.attention.backends import Backend
from tensor3d.batches.sequences import Sequences
from tensor3d.data.loader import settle
from tensor3d.data.packed_batch import PackedBatch
from tensor3d.ops.fp8 import Scaling
from tensor3d.optim import AdamW, decay_groups
from tensor3d.torch_private import compiling_often, mark_dynamic
from tools.bench.vs_transformers.data import PaddedBatch, Work

PLAIN, MASKED, MASKED_COMPILED = "transformers", "transformers-masked", "transformers-masked-compiled"
UNPADDED, UNPADDED_COMPILED = "transformers-unpadded", "transformers-unpadded-compiled"
OURS, ROWS, COMPILED, ROWS_COMPILED = "ours", "ours-rows", "ours-compiled", "ours-rows-compiled"
GRAPHED = "ours-graph"
ROWS_FP8, COMPILED_FP8, COMPILED_TENSORWISE = "ours-rows-fp8", "ours-rows-compiled-fp8", "ours-rows-compiled-tensorwise"
COMPILED_DELAYED = "ours-rows-compiled-delayed"
ROWS_SHADOWS, COMPILED_SHADOWS = "ours-rows-shadows", "ours-rows-compiled-shadows"
LIBRARY = (PLAIN, MASKED, MASKED_COMPILED, UNPADDED, UNPADDED_COMPILED)
FP8: dict[str, Scaling] = {
    ROWS_FP8: "rowwise",
    COMPILED_FP8: "rowwise",
    COMPILED_TENSORWISE: "tensorwise",
    COMPILED_DELAYED: "delayed",
}
"""Whose linear layers multiply in FP8, and by which scales."""
CONTENDERS = (*LIBRARY, OURS, ROWS, COMPILED, ROWS_COMPILED, ROWS_SHADOWS, COMPILED_SHADOWS, GRAPHED, *FP8)
"""`transformers`' model as it is; the same with its masked-LM head on masked rows alone; its modules on
our packs, by attention that knows sequences from one another; these two with each layer compiled; ours; ours whose last
layer computes the rows alone that heads read; both of these with compiled regions; ours of such rows with shadow
weights, as it is and compiled; ours compiled, as CUDA graphs; ours of such rows in FP8, as it is and compiled."""
UNPADDING = {UNPADDED, UNPADDED_COMPILED}
COMPILING = {MASKED_COMPILED, UNPADDED_COMPILED, COMPILED, ROWS_COMPILED, COMPILED_SHADOWS, GRAPHED}
COMPILING |= {COMPILED_FP8, COMPILED_TENSORWISE, COMPILED_DELAYED}
_SHADOWING = {ROWS_SHADOWS, COMPILED_SHADOWS}
_READING_ROWS = {ROWS, ROWS_COMPILED, *_SHADOWING, *FP8}
_ENCODERS = {"bert": "bert", "roberta": "roberta", "modernbert": "model", "deberta-v2": "deberta"}
"""What the library's models call their encoder."""
_KINDS = 64
"""Of code of a layer of the library: in training and in the check, with a mask and without, of other lengths and
numbers of sequences. All contenders whose layers are compiled have the same layer, so that 8 are soon made."""
_CLIP, _DECAY = 1.0, 0.01
_OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-6}


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What one forward and backward pass without dropout gives, before any step."""

    loss: float
    """Masked-LM plus next-sentence loss, in nats."""
    gradient_norm: float


def check_fp8(contenders: Iterable[str], precisions: Iterable[str]) -> None:
    """Raises ValueError for contenders in FP8 beside another type than bf16."""
    inside, others = sorted(FP8.keys() & set(contenders)), [name for name in precisions if name != "bf16"]
    if inside and others:
        raise ValueError(f"{inside[0]} computes the rest in bf16. Got {others[0]}: leave one of them out.")


class Implementation(ABC):
    """A model with its optimiser."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    config: BertConfig
    read_rows_only: bool = False

    def prepared(self, work: Work) -> Work:
        """The same work as new to the model, before the clock starts."""
        return work

    @abstractmethod
    def gradients(self, work: Work) -> Tensor:
        """Forward and backward of all micro-batches. The loss of the step."""

    @abstractmethod
    def clip(self) -> Tensor:
        """The norm of the gradients before it was limited."""

    @abstractmethod
    def slots(self, work: Work) -> int:
        """What it computes in a step, empty ones included."""

    def flops(self, work: Work) -> int:
        """What the model's products need for these sequences."""
        return step_flops(self.config, work.step, read_rows_only=self.read_rows_only)

    def step(self, work: Work) -> float:
        """A whole training step; the loss, for which it waits."""
        loss = self.gradients(work)
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def check(self, work: Work) -> Checked:
        """Changes nothing."""
        self.model.eval()
        loss, norm = self.gradients(self.prepared(work)), self.clip()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.train()
        return Checked(loss=loss.item(), gradient_norm=norm.item())


class Ours(Implementation):
    """A model of this project on one device, on packs."""

    def __init__(
        self,
        name: str,
        config: BertConfig,
        folder: Path,
        compute: torch.dtype | None,
        device: torch.device,
        backend: Backend = "auto",
    ) -> None:
        self.config, self.read_rows_only = config, name in _READING_ROWS
        speed = ExecutionPolicy(compile=name in COMPILING, shadow_weights=name in _SHADOWING)
        precision = MixedPrecisionPolicy(compute=compute, fp8=FP8.get(name))
        self._cube = Cube.single(device, precision=precision, speed=speed)
        options = {"read_rows_only": self.read_rows_only, "backend": backend}
        self.model = BertForPreTraining(config, self._cube, **options).train()  # type: ignore[arg-type]
        filled = open_weights(folder).fill(self.model, self._cube)
        assert filled.fresh == filled.unused == (), "all contenders have the same weights"
        self.optimizer = AdamW(decay_groups(self.model, _DECAY), self._cube, **_OPTIONS)  # type: ignore[arg-type]

    def prepared(self, work: Work) -> Work:
        # `to` copies nothing, for the batches lie there. But it forgets what an earlier step has found out about the
        # sequences: they are new ones to each.
        fresh: list[PackedBatch] = [batch.to(self._cube.device) for batch in work.step.batches]
        if self._cube.device.type == "cuda":  # for which a loader finds it out in the background
            for batch in fresh:
                settle(batch)
            torch.cuda.synchronize(self._cube.device)
        return replace(work, step=replace(work.step, batches=fresh))

    def gradients(self, work: Work) -> Tensor:
        total = torch.zeros((), device=self._cube.device)
        for batch in work.step.batches:
            loss = self.model(batch, work.step.targets, work.step.sequences).loss
            loss.backward()
            total += loss.detach()
        return total

    def clip(self) -> Tensor:
        return clip_grad_norm_(self.model.parameters(), _CLIP, self._cube)

    def slots(self, work: Work) -> int:
        return work.packed_slots


class OursGraphed(Ours):
    """The same, whose passes are replayed as a CUDA graph.

    Args:
        capacity: slots of a pack.
    """

    def __init__(self, *arguments: Any, capacity: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._pass = GraphedBert(self.model, capacity)  # type: ignore[arg-type]

    def gradients(self, work: Work) -> Tensor:
        total = torch.zeros((), device=self._cube.device)
        for batch in work.step.batches:
            total += self._pass(batch, work.step.targets, work.step.sequences)[0]
        return total


class Library(Implementation):
    """`transformers`' BertForPreTraining, RobertaForMaskedLM or ModernBertForMaskedLM with PyTorch's attention, or
    DebertaV2ForMaskedLM, which has its own, on padded batches.

    Args:
        config: of the same model in this project.
        model, optimizer: of `library_model`; several sides may share them, for a step's time does not depend on what
            was learnt.
        masked_rows: whether the masked-LM head computes the masked rows alone.
        compiled: whether its layers are compiled; the model is this contender's alone.
    """

    def __init__(
        self,
        config: BertConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        compute: torch.dtype | None,
        *,
        masked_rows: bool,
        compiled: bool = False,
    ) -> None:
        self.config, self.model, self.optimizer = config, model, optimizer
        self._compute, self._masked_rows, self._compiled = compute, masked_rows, compiled
        self._encoder: Any = getattr(model, _ENCODERS[config.family])
        if compiled:
            compile_layers(self._encoder)

    def gradients(self, work: Work) -> Tensor:
        total = torch.zeros((), device=work.padded[0].ids.device)
        for batch in work.padded:
            with _precision(total.device, self._compute), _compiler(self._compiled):
                logits, labels, pairs = self._masked(batch) if self._masked_rows else self._whole(batch)
                # The library's own losses, but as parts of the step's means: batches differ in what is masked.
                loss = F.cross_entropy(logits, labels, reduction="sum") / work.step.targets
                if pairs is not None:
                    loss = loss + F.cross_entropy(pairs, batch.next_labels, reduction="sum") / work.step.sequences
            loss.backward()
            total += loss.detach()
        return total

    def clip(self) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)

    def slots(self, work: Work) -> int:
        return work.padded_slots

    def _inputs(self, batch: PaddedBatch) -> dict[str, Tensor | None]:
        types = {"token_type_ids": batch.types} if self.config.types > 1 else {}
        return {"input_ids": batch.ids, "attention_mask": batch.mask, **types}

    def _whole(self, batch: PaddedBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        output = self.model(**self._inputs(batch))
        pairs = self.config.next_sentence
        logits = output.prediction_logits if pairs else output.logits
        return logits.flatten(0, 1), batch.labels.flatten(), output.seq_relationship_logits if pairs else None

    def _masked(self, batch: PaddedBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        model: Any = self.model
        found = self._encoder(**self._inputs(batch))
        rows = found.last_hidden_state.flatten(0, 1).index_select(0, batch.rows)
        if self.config.family == "roberta":
            return model.lm_head(rows), batch.row_labels, None
        if self.config.family == "modernbert":
            return model.decoder(model.head(rows)), batch.row_labels, None
        if self.config.family == "deberta-v2":
            return model.cls(rows), batch.row_labels, None
        return model.cls.predictions(rows), batch.row_labels, model.cls.seq_relationship(found.pooler_output)


class Unpadded(Implementation):
    """`transformers`' modules on our packs as one row of tokens: no padding, and FlashAttention that knows where each
    sequence ends, as users of the library train without padding. On CPUs the attention is ours.

    Args:
        model, optimizer: as for `Library`.
        compiled: whether its layers are compiled; the model is this contender's alone.
    """

    def __init__(
        self,
        config: BertConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        compute: torch.dtype | None,
        *,
        compiled: bool,
    ) -> None:
        from transformers import AttentionInterface

        self.config, self.model, self.optimizer = config, model, optimizer
        self._compute, self._compiled = compute, compiled
        AttentionInterface.register(_VARLEN, _varlen_attention)
        bert: Any = model.bert
        if compiled:
            compile_layers(bert)
        self._encoder, self._embeddings, self._pooler = bert.encoder, bert.embeddings, bert.pooler

    def gradients(self, work: Work) -> Tensor:
        heads: Any = self.model.cls
        settings: Any = self.model.config
        before = settings._attn_implementation
        total = torch.zeros((), device=work.step.batches[0].ids.device)
        settings._attn_implementation = _VARLEN  # the padded contenders have the same model
        try:
            for batch in work.step.batches:
                with _precision(total.device, self._compute), _compiler(self._compiled):
                    hidden = self._hidden(batch)
                    logits = heads.predictions(hidden.index_select(0, batch.masked.clamp(min=0)))
                    pairs = heads.seq_relationship(
                        self._pooler(hidden.index_select(0, batch.first.clamp(min=0))[:, None])
                    )
                    loss = F.cross_entropy(logits, batch.masked_labels, reduction="sum") / work.step.targets
                    loss = loss + F.cross_entropy(pairs, batch.next_labels, reduction="sum") / work.step.sequences
                loss.backward()
                total += loss.detach()
        finally:
            settings._attn_implementation = before
        return total

    def clip(self) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)

    def slots(self, work: Work) -> int:
        return work.packed_slots

    def _hidden(self, batch: PackedBatch) -> Tensor:
        """(M, H)"""
        ids, types, positions = (each[None] for each in (batch.ids, batch.types, batch.positions))
        embedded = self._embeddings(input_ids=ids, token_type_ids=types, position_ids=positions)
        ends, longest = batch.sequences.cu_seqlens, batch.sequences.max_seqlen
        mark_dynamic(ends, 0)
        sequences = None if ids.is_cuda else batch.sequences
        found = self._encoder(embedded, use_cache=False, ends=ends, longest=longest, packed=sequences)
        hidden: Tensor = found.last_hidden_state
        return hidden.squeeze(0)


def _precision(device: torch.device, compute: torch.dtype | None) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, compute, enabled=compute is not None)


def _compiler(compiled: bool) -> AbstractContextManager[Any]:
    """Inside, layers that are compiled stay so, or it raises: nothing is measured under the name of something else."""
    return compiling_often(_KINDS) if compiled else nullcontext()


_VARLEN = "packed-varlen"


def _varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    ends: Tensor,
    longest: int,
    packed: Sequences | None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """What `transformers` calls: (1, h, M, d) each, to (1, M, h, d)."""
    if dropout:
        raise ValueError(
            f"PyTorch's varlen attention has no dropout. Got {dropout}: take --attention-dropout 0 for {UNPADDED}."
        )
    q, k, v = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
    if packed is not None:
        return _ours(q, k, v, packed)[None], None
    result = varlen_attn(q, k, v, ends, ends, longest, longest)
    assert isinstance(result, Tensor)
    return result[None], None


@torch.compiler.disable
def _ours(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
    """On a CPU, where it is not to be compiled with the layers around it: the compiler of torch 2.11 fails on it."""
    return attention(q, k, v, sequences)


def write_model(config: BertConfig, folder: Path, seed: int) -> None:
    """Fresh weights as a Hugging Face folder, from which all contenders begin."""
    cube = Cube.single()
    cube.manual_seed(seed)
    export_huggingface(BertForPreTraining(config, cube), cube, folder)


class SideMaker:
    """Makes the contenders, one after another.

    Args:
        config: with which the folder was written.
        folder: of `write_model`.
        compute: the type of products; the weights are fp32. None: that too.
        backend: of our attention.
        capacity: slots of a pack.
    """

    def __init__(
        self,
        config: BertConfig,
        folder: Path,
        compute: torch.dtype | None,
        device: torch.device,
        backend: Backend = "auto",
        *,
        capacity: int = 512,
    ) -> None:
        self._config, self._folder, self._compute, self._device = config, folder, compute, device
        self._backend: Backend = backend
        self._capacity = capacity
        self._library: tuple[nn.Module, torch.optim.Optimizer] | None = None

    def __call__(self, name: str) -> Implementation:
        """The contender of this name. Those of the library share a model, but for compiled ones, which change it."""
        config, compute, compiled = self._config, self._compute, name in COMPILING
        if name not in LIBRARY:
            arguments = (name, config, self._folder, compute, self._device, self._backend)
            return OursGraphed(*arguments, capacity=self._capacity) if name == GRAPHED else Ours(*arguments)
        shared = library_model(config, self._folder, self._device) if compiled else self._shared()
        if name in UNPADDING:
            return Unpadded(config, *shared, compute, compiled=compiled)
        return Library(config, *shared, compute, masked_rows=name != PLAIN, compiled=compiled)

    def _shared(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        if self._library is None:
            self._library = library_model(self._config, self._folder, self._device)
        return self._library


def compile_layers(encoder: Any) -> None:
    """`torch.compile` of each layer, as PyTorch advises for equal ones: all are compiled once, in a fraction of the
    minutes that the whole takes."""
    for layer in encoder.layers if hasattr(encoder, "layers") else encoder.encoder.layer:
        layer.compile()


def library_model(config: BertConfig, folder: Path, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`transformers`' model with the weights of a folder, and its optimiser; with PyTorch's attention where the library
    has that for it."""
    from transformers import AutoModelForMaskedLM, AutoModelForPreTraining
    from transformers.utils import logging

    kind: Any = AutoModelForPreTraining if config.next_sentence else AutoModelForMaskedLM
    attention = "eager" if config.has_relative_positions else "sdpa"

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # a bar of its own, which would stand between the figures
    try:
        model = kind.from_pretrained(folder, local_files_only=True, attn_implementation=attention, dtype=torch.float32)
    finally:
        if shown:
            logging.enable_progress_bar()
    model = model.to(device).train()
    return model, torch.optim.AdamW(decay_groups(model, _DECAY), fused=True, **_OPTIONS)  # type: ignore[arg-type]


def with_sizes(
    config: BertConfig, *, layers: int | None, dropout: float, attention_dropout: float | None = None
) -> BertConfig:
    """The config with so many layers and that dropout, everywhere unless told otherwise of attention. A ModernBERT of
    the library has one of attention's weights and output, and none elsewhere that is here."""
    inner = dropout if attention_dropout is None else attention_dropout
    if config.family == "modernbert":
        dropout = 0.0
    out = inner if config.family == "modernbert" else None
    changed = {"dropout": dropout, "attention_dropout": inner, "attention_out_dropout": out}
    return replace(config, layers=layers or config.layers, **changed)  # type: ignore[arg-type]
