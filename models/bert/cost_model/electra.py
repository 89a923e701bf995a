"""What ELECTRA's pre-training costs in closed form: a discriminator with a head over all tokens, and a generator.

T tokens, S sum of the squared lengths of all sequences, R masked tokens; H hidden size of the discriminator

FLOPs are those of flops.py for either encoder, the masked-LM head being the generator's, and `2 (H² + H) T` forward for
the head that tells replaced tokens. Drawing does O(V) operations a masked token, as softmax does, and does not count.
"""

from __future__ import annotations

from dataclasses import replace

from models.bert.config import BertConfig
from models.bert.cost_model.flops import model_flops, work
from models.bert.cost_model.param_shapes import (
    ParamSpec,
    after_encoder,
    distances,
    embeddings,
    layers,
    linear,
    norm,
    parameters,
)
from tensor3d.data import TrainBatch
from tensor3d.packing.balance import Work
from tensor3d.sharding.param_layout import copies, narrow

_PASSES = 3  # forward, and twice that backward


def step_work(config: BertConfig, generator: BertConfig | None) -> Work:
    """`work` of a model, and of the generator beside it, if there is one."""
    found = work(config)
    if generator is None:
        return found
    beside = work(generator)
    return replace(found, per_token=found.per_token + beside.per_token, per_square=found.per_square + beside.per_square)


def electra_flops(config: BertConfig, generator: BertConfig, tokens: int, squares: int, masked: int) -> int:
    """FLOPs of a step, forward and backward, over all ranks and micro-batches.

    Args:
        config: the discriminator's.
        tokens, squares, masked: T, S and R.
    """
    head = 2 * _PASSES * (config.hidden**2 + config.hidden) * tokens
    alone = replace(config, next_sentence=False)
    return head + sum(
        model_flops(each, tokens, squares, guessed, 0) for each, guessed in ((alone, 0), (generator, masked))
    )


def electra_step_flops(config: BertConfig, generator: BertConfig, step: TrainBatch) -> int:
    """`electra_flops` of a step that a loader has made."""
    return electra_flops(config, generator, step.tokens, step.squares, step.targets)


def electra_parameters(config: BertConfig, generator: BertConfig) -> list[ParamSpec]:
    """All of them, in the order of `ElectraForPreTraining`. What is shared comes once."""
    found = [*embeddings(config), *distances(config), *layers("bert.layers", config)]
    if config.family == "deberta-v2":
        found += norm("replaced_tokens.norm", config.hidden)
    found += linear("replaced_tokens.dense", config.hidden)
    output = "replaced_tokens.output"
    found += [
        ParamSpec(name=f"{output}.weight", shape=(1, config.hidden), layout=narrow("y")),
        ParamSpec(name=f"{output}.bias", shape=(1,), layout=copies("y")),
    ]
    if config.traits.disentangles_embeddings:  # the discriminator's table is multiplied by nothing
        found[0] = replace(found[0], multiplies=False)
        return [*found, *(replace(each, name=f"generator.{each.name}") for each in parameters(generator))]
    if generator.has_projection:
        found += linear("generator.projection", generator.embedding_size, generator.hidden)
    found += layers("generator.layers", generator)
    return [*found, *(replace(each, name=f"generator.{each.name}") for each in after_encoder(generator))]
