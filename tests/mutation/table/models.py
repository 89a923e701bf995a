"""Models: FLOPs, memory, traffic, generation, images, weights of other libraries."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

BESIDE_THE_LIBRARY = (
    "tests/models/bert/huggingface/test_architectures.py"
    "::test_models_by_chance_compute_what_the_librarys_do[(1, 1, 1, 1)-torch.float64-8]"
)
"""With DistilBERT's classifier of texts."""
MUTATIONS = (
    Mutation(
        "flops-distances-are-free",
        "models/bert/cost_model/flops.py",
        old="return 4 if config.distance_buckets is None else 8",
        new="return 4",
        tests=("tests/models/bert/cost_model/test_flops.py::test_distances_cost_two_products_more_of_each_pair",),
    ),
    Mutation(
        "deberta-head-under-one-name",
        "models/bert/huggingface/architectures.py",
        old="} | dict(self.again)",
        new="}",
        tests=("tests/models/bert/huggingface/test_deberta.py::test_the_head_under_its_other_names",),
    ),
    Mutation(
        "deberta-unsaid-settings-are-taken",
        "models/bert/huggingface/family_settings.py",
        old="        value = settings.get(name, default)\n        if value != needed:\n            said",
        new="        value = settings.get(name, needed)\n        if value != needed:\n            said",
        tests=("tests/models/bert/huggingface/test_deberta.py::test_what_is_not_said_is_as_the_library_has_it",),
    ),
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
        old="(hidden * (not config.traits.decoder_alone) + config.vocab)",
        new="(hidden * (not config.traits.decoder_alone))",
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
        "inventory-qkv-of-as-many-heads",
        "models/bert/cost_model/param_shapes.py",
        old='_linear(f"{name}.attention.qkv", hidden, config.qkv_size, of_qkv)',
        new='_linear(f"{name}.attention.qkv", hidden, 3 * hidden, of_qkv)',
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
        old="logits = (logits - logits.max()) / sampling.temperature",
        new="logits = (logits - logits.max()) * sampling.temperature",
        tests=("tests/models/test_gpt.py::test_draws_follow_the_distribution",),
    ),
    Mutation(
        "gpt-cold-logits-infinite",
        "models/gpt/generate.py",
        old="logits = (logits - logits.max()) / sampling.temperature",
        new="logits = logits / sampling.temperature",
        tests=("tests/models/test_gpt.py::test_greedy_takes_the_likeliest_and_top_k_leaves_the_others_out",),
    ),
    Mutation(
        "distilbert-drops-attention-output",
        "models/bert/config.py",
        old="if not self.traits.drops_attention:\n            return 0.0",
        new="if not self.traits.drops_attention:\n            return self.dropout",
        tests=("tests/models/bert/huggingface/test_export.py::test_dropout_of_answers",),
    ),
    Mutation(
        "xlm-roberta-xl-drops-mlp-output",
        "models/bert/model.py",
        old="dropout=config.mlp_dropout,",
        new="dropout=config.dropout,",
        tests=(
            "tests/models/bert/huggingface/test_export.py"
            "::test_the_largest_xlm_roberta_drops_none_of_its_mlps_and_norms_no_embeddings",
        ),
    ),
    Mutation(
        "ernie-takes-another-task",
        "models/bert/huggingface/reader.py",
        old="(slice(0, 1), *part[1:])).to(",
        new="(slice(1, 2), *part[1:])).to(",
        tests=("tests/models/bert/huggingface/test_ernie.py",),
    ),
    Mutation(
        "eurobert-late-without-activation",
        "models/bert/tasks.py",
        old='return mean_of_texts(self.pooler.of_rows(h), batch, self.cube, "y")',
        new="return self.pooler.of_rows(mean_of_texts(h, batch, self.cube))",
        tests=(
            "tests/models/bert/huggingface/test_architectures.py::test_models_by_chance_compute_what_the_librarys_do"
            "[(1, 1, 1, 1)-torch.float64-4_1]",
        ),
    ),
    Mutation(
        "gemmas-first-layer-sees-all",
        "models/bert/config.py",
        old="place = layer + self.traits.last_is_global",
        new="place = layer",
        tests=("tests/models/bert/huggingface/test_gemma.py::test_the_published_settings_are_read_and_kept",),
    ),
    Mutation(
        "a-causal-encoder-sees-all",
        "models/bert/model.py",
        old="        config.causal,\n",
        new="",
        tests=("tests/models/bert/huggingface/test_qwen3.py",),
    ),
    Mutation(
        "a-next-token-head-is-a-masked-lm-head",
        "models/bert/huggingface/param_names.py",
        old='head != "masked_lm" or not config.causal',
        new="head",
        tests=("tests/models/bert/huggingface/test_qwen3.py",),
    ),
    Mutation(
        "the-last-token-is-the-next-texts-first",
        "models/bert/embedding.py",
        old="return batch.first + (_tokens(batch, owners(batch)) - 1).clamp(min=0)",
        new="return batch.first + _tokens(batch, owners(batch)).clamp(min=0)",
        tests=("tests/models/bert/huggingface/test_qwen3.py",),
    ),
    Mutation(
        "rotary-factor-forgotten-by-a-layer",
        "models/bert/model.py",
        old="        rotary_factor=config.rotary_factor,\n",
        new="",
        tests=("tests/models/bert/huggingface/test_rotary.py::test_the_waves_that_gtes_authors_have",),
    ),
    Mutation(
        "ntk-with-its-base-alone",
        "models/bert/huggingface/family_settings.py",
        old="base, factor = base * factor, factor ** (2 * heads / max(1, columns))",
        new="base, factor = base * factor, 1.0",
        tests=(
            "tests/models/bert/huggingface/test_rotary.py"
            "::test_the_published_settings_are_read_and_written_as_the_library_has_them",
        ),
    ),
    Mutation(
        "gate-and-up-of-their-authors-turned-round",
        "models/bert/huggingface/architectures.py",
        old='"mlp.up_gate_proj": ("intermediate.up", "intermediate.gate")',
        new='"mlp.up_gate_proj": ("intermediate.gate", "intermediate.up")',
        tests=("tests/models/bert/huggingface/test_rotary.py::test_files_of_their_authors_are_the_same_model",),
    ),
    Mutation(
        "no-dropout-behind-the-gate",
        "tensor3d/layers/mlp.py",
        old="self.down(self.dropout(self._opened(self.gate_up(x))))",
        new="self.down(self._opened(self.gate_up(x)))",
        tests=("tests/layers/test_mlp.py::test_dropout_behind_the_gate_and_a_bias_of_the_last_product_alone",),
    ),
    Mutation(
        "relative-bias-left-out-of-the-last-layer",
        "models/bert/model.py",
        old="h = self.layers[-1](h, batch.sequences, chosen, relative=relative)",
        new="h = self.layers[-1](h, batch.sequences, chosen)",
        tests=("tests/models/bert/huggingface/test_mpnet.py::test_far_tokens",),
    ),
    Mutation(
        "relative-bias-trained-as-a-head",
        "tools/finetune/trainer.py",
        old='if name.startswith(("bert.embeddings.", "bert.relative.", "bert.relative_bias.")):',
        new='if name.startswith("bert.embeddings."):',
        tests=("tests/models/bert/huggingface/test_mpnet.py::test_one_bias_of_all_layers",),
    ),
    Mutation(
        "special-tokens-of-pieces-before-those-of-the-file",
        "tools/corpus/tokenizers/base.py",
        old="(*(name for name in names if name in added), *names, *more)",
        new="(*names, *more)",
        tests=(
            "tests/tools/corpus/tokenizers/test_huggingface.py"
            "::test_an_mpnet_has_special_tokens_of_its_own_beside_those_of_bert",
        ),
    ),
    Mutation(
        "positions-behind-no-padding",
        "tools/pretrain.py",
        old="if config.first_position not in (0, pad + 1):",
        new="if config.first_position not in (0, 2, pad + 1):",
        tests=("tests/tools/training/test_start_from_families.py::test_positions_begin_behind_padding",),
    ),
    Mutation(
        "rows-of-fewer-heads-of-keys",
        "models/bert/huggingface/param_names.py",
        old="return config.heads // config.key_heads * d, d, d",
        new="return d, d, d",
        tests=("tests/models/bert/huggingface/test_eurobert.py::test_bits_on_cubes",),
    ),
    Mutation(
        "padding-that-is-another-role",
        "tools/corpus/tokenizers/base.py",
        old='more = [name for name in added if name not in others] if role == "pad" else []',
        new='more = [*added] if role == "pad" else []',
        tests=("tests/tools/corpus/tokenizers/test_huggingface.py::test_a_eurobert_may_have_its_sep_for_padding_too",),
    ),
    Mutation(
        "class-of-another-architecture-that-begins-alike",
        "models/bert/huggingface/architectures.py",
        old="return max(begun, key=lambda each: len(each.classes), default=None)",
        new="return min(begun, key=lambda each: len(each.classes), default=None)",
        tests=("tests/models/bert/huggingface/test_architectures.py::test_there_and_back_to_the_bit",),
    ),
    Mutation(
        "gpt-top-k-off-by-one",
        "models/gpt/generate.py",
        old="stable=True)[sampling.top_k :]]",
        new="stable=True)[sampling.top_k + 1 :]]",
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
        old=".split(of_turn, 1))",
        new=".flip(1).split(of_turn, 1))",
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
        "models/bert/families.py",
        old='drops_attention=False, pooler="relu",',
        new="drops_attention=False,",
        tests=(BESIDE_THE_LIBRARY,),
    ),
    Mutation(
        "graph-with-delayed-scaling",
        "models/bert/graphed.py",
        old='if cube.precision.fp8 == "delayed":',
        new="if False:",
        tests=("tests/gpu/test_cuda_graph.py::test_delayed_scaling_is_refused",),
    ),
)
