"""A causal language model of transformers on a cube, for packed texts.

M tokens of the cube, H hidden size, V vocabulary
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from models.gpt import CausalBatch
from models.transformers_bert.model import check_transformers
from models.transformers_causal_lm.attention import IMPLEMENTATION, asked_of, configs_of, register
from tensor3d import Cube, all_reduce_replicated, cross_entropy, local_rows
from tensor3d.parallelize import Proposal, parallelize, propose_plan

# Rotary positions whose angles depend on the longest text of a batch, which a rank does not know of the others.
_OF_THE_BATCH = ("dynamic", "longrope")


def check_supported(model: nn.Module) -> None:
    """Raises ValueError unless it is a language model of the library, whose plan is then to be proposed."""
    check_transformers("PackedCausalLM")
    from transformers import PreTrainedModel

    known = isinstance(model, PreTrainedModel) and not model.config.is_encoder_decoder
    if not known or not isinstance(model.get_output_embeddings(), nn.Linear):  # type: ignore[operator]
        raise ValueError(
            "PackedCausalLM takes a causal language model of transformers, such as a LlamaForCausalLM. Got a "
            f"{type(model).__name__}. Of another model, plan the parts by tensor3d.propose_plan."
        )
    types = _rotary_types(getattr(model.config, "rope_parameters", None))
    scaled = next((each for each in types if each in _OF_THE_BATCH), None)
    if scaled is not None:
        raise ValueError(
            f"rotary positions of type {scaled!r} depend on the longest text of a batch, and a rank sees its own "
            f"texts alone. Got them in the config of a {type(model).__name__}. Choose a model with others."
        )


def _rotary_types(parameters: Any) -> list[Any]:
    """The `rope_type` of all layers, or of each sort of them."""
    if not isinstance(parameters, dict):
        return []
    return [parameters.get("rope_type"), *(t for each in parameters.values() for t in _rotary_types(each))]


def propose(model: nn.Module) -> Proposal:
    """The plan for a language model of the library, by a run of two texts of eight tokens; it stays as it was.

    Raises:
        ValueError: the model cannot be run so.
    """
    register()
    ids = torch.arange(16).view(2, 8) % model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    ids = ids.to(next(model.parameters()).device)
    with asked_of(model), _without_the_librarys_hooks(model):
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return propose_plan(model, input_ids=ids, **_placed(model, places))


@contextmanager
def _without_the_librarys_hooks(model: nn.Module) -> Iterator[None]:
    """Inside, only the user's are there. With gradient checkpointing the library has one that asks for gradients."""
    own = [
        (module._forward_hooks, key, hook)
        for module in model.modules()
        for key, hook in module._forward_hooks.items()
        if getattr(hook, "__module__", "").startswith("transformers.")
    ]
    for hooks, key, _ in own:
        del hooks[key]
    try:
        yield
    finally:
        for hooks, key, hook in own:
            hooks[key] = hook


def _placed(model: nn.Module, places: Tensor) -> dict[str, Any]:
    """The arguments of a forward pass that say where its tokens stand; and that nothing is to be kept of it."""
    given: dict[str, Any] = {"position_ids": places, "use_cache": False}
    if "cache_position" in signature(model.forward).parameters:
        # Older versions of the library count these by themselves, by the rows of another face.
        given["cache_position"] = places[0]
    return given


class PackedCausalLM(nn.Module):
    """A `...ForCausalLM` of transformers on a cube, with the weights that it has, for packed texts.

    Every rank constructs it at the same time, after `cube.manual_seed` where the model has dropout. The given model
    stays as it was. `model` is its counterpart on the cube: the library's own code around 3-D layers, with the
    library's names, so that `tensor3d.full_state_dict(packed.model, cube)` loads back into the original. The plan is
    found by `tensor3d.propose_plan`, and a model of which it leaves something open is refused.

    Gradient checkpointing works as the library has it, if it is enabled in the given model.

    Args:
        hf_model: the same on all ranks.

    Raises:
        ValueError: no causal language model of the library, one whose code is not right on a rank's block, sizes that
            do not divide by the cube's, or transformers is not installed.
    """

    def __init__(self, hf_model: nn.Module, cube: Cube) -> None:
        super().__init__()
        check_supported(hf_model)
        proposal = propose(hf_model)
        proposal.check(cube)
        self.cube, self.rows = cube, proposal.rows
        self.model: Any = parallelize(hf_model, cube, proposal.settled())
        self.vocab = hf_model.get_output_embeddings().out_features  # type: ignore[operator]
        self._name_the_attention()
        self._recompute_with_its_texts()

    def forward(self, batch: CausalBatch, targets: int) -> Tensor:
        """The mean loss of the step's next tokens, in nats, the same on every rank; of one micro-batch its part of it.

        Args:
            batch: one plane's texts, as `models.gpt.lay` lays them.
            targets: next tokens of the whole step, all planes and micro-batches; so the sum of the micro-batches'
                losses is the step's mean, whatever the accumulation and the cube.

        Raises:
            ValueError: no target, as of texts of one token each, whose mean would be no number.
        """
        if targets < 1:
            raise ValueError(f"targets must be at least 1, the next tokens of a step. Got {targets}.")
        losses, _ = cross_entropy(self.logits(batch), local_rows(batch.labels, self.cube), self.vocab, self.cube)
        # Rows of face y lie over data, x and z, and are equal over y.
        return all_reduce_replicated(losses.sum() / targets, self.cube.over("data", "x", "z"))

    def logits(self, batch: CausalBatch) -> Tensor:
        """(M/xz, V/y) on face y: the scores of each token's next one, as the library's forward makes them."""
        logits: Tensor = self._run(self.model, batch).logits
        return logits.squeeze(0)

    def hidden(self, batch: CausalBatch) -> Tensor:
        """(M/xy, H/z) on face z: what the head reads. `tensor3d.gather` puts it together to be looked at."""
        hidden: Tensor = self._run(self.model.base_model, batch).last_hidden_state
        return hidden.squeeze(0)

    def _run(self, model: nn.Module, batch: CausalBatch) -> Any:
        # Positions reach the attention alone, whose rows are those of face y.
        places = batch.sequences.positions.unsqueeze(0)
        with self.rows.holding(batch.sequences):
            return model(input_ids=batch.ids.unsqueeze(0), return_dict=True, **_placed(model, places))

    def _name_the_attention(self) -> None:
        """In configs of its own: the original's name what that runs with."""
        copies = {id(config): copy.deepcopy(config) for config in configs_of(self.model)}
        for config in copies.values():
            config._attn_implementation = IMPLEMENTATION
        for module in self.model.modules():
            config = copies.get(id(getattr(module, "config", None)))
            if config is not None:
                module.config = config

    def _recompute_with_its_texts(self) -> None:
        """Where the given model had gradient checkpointing enabled: backward comes when no texts are held any more."""
        for module in self.model.modules():
            checkpoint = getattr(module, "_gradient_checkpointing_func", None)
            if checkpoint is not None:
                module._gradient_checkpointing_func = partial(
                    checkpoint, use_reentrant=False, context_fn=self._contexts
                )

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For `torch.utils.checkpoint`: a layer is computed again with the texts of its first time."""
        return nullcontext(), self.rows.holding(self.rows.sequences)
