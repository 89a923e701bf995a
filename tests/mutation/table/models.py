"""Models: FLOPs, memory, traffic, generation, images, weights of other libraries."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

MUTATIONS = (
    Mutation(
        "flops-forward-alone",
        "models/bert/cost_model/flops.py",
        old="_PASSES = 3  #",
        new="_PASSES = 1  #",
        tests=("tests/models/bert/cost_model/test_flops.py::test_bert_large_by_hand",),
        quick=True,
    ),
    Mutation(
        "flops-head-without-vocabulary",
        "models/bert/cost_model/flops.py",
        old="head = 2 * _PASSES * config.embedding_size * (hidden + config.vocab)",
        new="head = 2 * _PASSES * config.embedding_size * hidden",
        tests=("tests/models/bert/cost_model/test_flops.py::test_a_step_costs_what_pytorch_counts",),
    ),
    Mutation(
        "flops-spared-rows-count",
        "models/bert/cost_model/flops.py",
        old="        - spared\n",
        new="        + spared\n",
        tests=("tests/models/bert/cost_model/test_flops.py::test_what_nobody_reads_is_no_work",),
    ),
    Mutation(
        "memory-one-moment",
        "models/bert/cost_model/memory.py",
        old="moments = _MOMENTS * here.stepped(shard_over_data)",
        new="moments = here.stepped(shard_over_data)",
        tests=(
            "tests/models/bert/cost_model/test_memory.py"
            "::test_an_optimiser_has_two_moments_of_each_element_and_a_count_of_each_parameter",
        ),
    ),
    Mutation(
        "memory-bound-without-earlier-gradients",
        "models/bert/cost_model/memory.py",
        old="(weights if choice.micro_batches > 1 else stay)",
        new="stay",
        tests=("tests/models/bert/cost_model/test_memory.py::test_what_is_bought_with_what",),
    ),
    Mutation(
        "memory-peak-without-the-batch",
        "tools/training/dry_step.py",
        old="                live.follow(each)\n",
        new="                pass\n",
        tests=("tests/tools/training/test_dry_step.py::test_the_batch_is_in_the_peak",),
    ),
    Mutation(
        "memory-of-one-layer-more",
        "tools/training/dry_step.py",
        old="turns = (config.layers - deeper) // turn",
        new="turns = 1",
        tests=("tests/tools/training/test_dry_step.py::test_deep_models_from_shallow_ones",),
    ),
    Mutation(
        "inventory-qkv-of-two",
        "models/bert/cost_model/param_shapes.py",
        old='_linear(f"{name}.attention.qkv", hidden, 3 * hidden, bias)',
        new='_linear(f"{name}.attention.qkv", hidden, 2 * hidden, bias)',
        tests=("tests/models/bert/cost_model/test_memory.py::test_parameters_and_moments_to_the_element",),
    ),
    Mutation(
        "traffic-of-a-step-without-the-norm",
        "models/bert/cost_model/comm_volume.py",
        old="return together([ledger, *norms,",
        new="return together([ledger,",
        tests=("tests/models/bert/cost_model/test_comm_volume.py", "tests/models/bert/cost_model/test_step_cost.py"),
    ),
    Mutation(
        "traffic-of-a-step-of-one-micro-batch",
        "models/bert/cost_model/comm_volume.py",
        old="return times(one, micro_batches) + end_of_step_traffic",
        new="return times(one, 1) + end_of_step_traffic",
        tests=("tests/models/bert/cost_model/test_comm_volume.py",),
    ),
    Mutation(
        "gpt-labels-are-the-tokens",
        "models/gpt/causal_batch.py",
        old="return [*text[1:], NO_TARGET]",
        new="return [*text]",
        tests=("tests/models/test_gpt.py::test_labels_are_the_next_tokens_of_the_same_text",),
    ),
    Mutation(
        "gpt-targets-one-too-many",
        "models/gpt/causal_batch.py",
        old="return sum(len(text) - 1 for pack in packs for text in pack)",
        new="return sum(len(text) for pack in packs for text in pack)",
        tests=("tests/models/test_gpt.py",),
    ),
    Mutation(
        "gpt-logits-of-the-token-before",
        "models/gpt/generate.py",
        old="rows[0] = len(text) - 1",
        new="rows[0] = max(0, len(text) - 2)",
        tests=("tests/models/test_gpt.py::test_next_logits_are_those_of_the_last_token",),
    ),
    Mutation(
        "gpt-temperature-multiplied",
        "models/gpt/generate.py",
        old="logits = logits / sampling.temperature",
        new="logits = logits * sampling.temperature",
        tests=("tests/models/test_gpt.py::test_draws_follow_the_distribution",),
    ),
    Mutation(
        "gpt-top-k-off-by-one",
        "models/gpt/generate.py",
        old="logits.topk(sampling.top_k).values[-1]",
        new="logits.topk(sampling.top_k + 1).values[-1]",
        tests=("tests/models/test_gpt.py::test_greedy_takes_the_likeliest_and_top_k_leaves_the_others_out",),
    ),
    Mutation(
        "vit-patches-column-by-column",
        "models/vit/patches.py",
        old="squares.permute(1, 2, 0, 3, 4)",
        new="squares.permute(2, 1, 0, 3, 4)",
        tests=("tests/models/test_vit.py::test_patches_go_row_by_row",),
    ),
    Mutation(
        "vit-class-token-last",
        "models/vit/patches.py",
        old="kinds[:, 0] = 1",
        new="kinds[:, -1] = 1",
        tests=("tests/models/test_vit.py::test_two_images_by_eye",),
    ),
    Mutation(
        "classifier-loss-of-the-micro-batch",
        "models/bert/tasks.py",
        old="return all_reduce_replicated(losses / texts,",
        new="return all_reduce_replicated(losses / (texts + 1),",
        tests=("tests/tools/finetune/test_main.py", "tests/models/bert/test_text_batches.py"),
    ),
    Mutation(
        "weights-fused-parts-in-another-order",
        "models/bert/huggingface/param_names.py",
        old="for part in range(parts))",
        new="for part in (*range(parts - 2), parts - 1, parts - 2))",
        tests=("tests/models/bert/huggingface/test_parity.py",),
    ),
    Mutation(
        "weights-positions-from-the-first-row",
        "models/bert/model.py",
        old="positions + self.first_position if self.first_position else positions",
        new="positions",
        tests=("tests/models/bert/huggingface/test_architectures.py",),
    ),
    Mutation(
        "weights-pooler-of-another-family",
        "models/bert/config.py",
        old='return "relu" if self.family == "distilbert" else',
        new="return",
        tests=("tests/models/bert/huggingface/test_architectures.py",),
    ),
)
