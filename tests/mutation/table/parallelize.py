"""Models of others on the cube: attention that keeps its code."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

OWN = "tests/parallelize/test_own_attention.py"
ON_A_CUBE = f"{OWN}::test_it_equals_its_original_on_a_cube[1x2x2]"
OPEN = f"{OWN}::test_what_a_part_of_the_heads_would_make_otherwise_is_open"
WHEN_IT_RUNS = f"{OWN}::test_code_that_is_not_what_the_rule_is_for_is_refused_when_it_runs"

MUTATIONS = (
    Mutation(
        "own-attention-gathers-its-input-for-each-projection",
        "tensor3d/parallelize/own_attention.py",
        old="zip(self.readers, results_of(self.stands_for, self.readers), strict=True)",
        new="[(projection, results_of(self.stands_for, (projection,))[0])]",
        tests=(
            "tests/parallelize/test_own_attention.py"
            "::test_its_input_and_its_weights_travel_as_those_of_attention_in_one_projection",
        ),
    ),
    Mutation(
        "own-attention-shares-its-products-with-a-checkpoint-inside",
        "tensor3d/parallelize/own_attention.py",
        old="        if saved_tensors_hooks_now() != self.made_under:",
        new="        if False:",
        tests=("tests/parallelize/test_own_attention.py::test_a_projection_may_be_left_out_and_another_asked_twice",),
    ),
    Mutation(
        "keep-gathered-takes-projections-of-one-input-for-products-of-their-own",
        "tensor3d/layers/kept_operands.py",
        old="(holder, layer.face) if layer.is_with_others else (name, None)",
        new="(name, None)",
        tests=(
            "tests/parallelize/test_own_attention.py"
            "::test_its_input_and_its_weights_travel_as_those_of_attention_in_one_projection",
        ),
    ),
    Mutation(
        "own-attention-norm-of-heads-not-summed-over-y",
        "tensor3d/parallelize/own_attention.py",
        old='Replicated(sum_over=("data", "x", "y", "z"))',
        new='Replicated(sum_over=("data", "x", "z"))',
        tests=(ON_A_CUBE,),
    ),
    Mutation(
        "own-attention-fused-rows-as-they-were",
        "tensor3d/parallelize/own_attention.py",
        old='order = layer.original_rows.get("weight")',
        new="order = None",
        tests=(ON_A_CUBE,),
    ),
    Mutation(
        "own-attention-counts-all-heads",
        "tensor3d/parallelize/own_attention.py",
        old='getattr(module, each) // workshop.cube.axis("y").size',
        new="getattr(module, each)",
        tests=(ON_A_CUBE,),
    ),
    Mutation(
        "own-attention-scale-upside-down",
        "tensor3d/parallelize/own_attention.py",
        old="q = q * (scale / usual)",
        new="q = q * (usual / scale)",
        tests=(f"{OWN}::test_it_equals_its_original_on_one_device[Grouped]",),
    ),
    Mutation(
        "own-attention-of-any-head-dim",
        "tensor3d/parallelize/own_attention.py",
        old="q.shape[-2:] != (rows.rows, facts.head_dim)",
        new="q.shape[-2] != rows.rows",
        tests=(f"{WHEN_IT_RUNS}[head_dim]",),
    ),
    Mutation(
        "own-attention-input-may-be-computed-with",
        "tensor3d/parallelize/own_attention.py",
        old="if name_of(func) in _OF_THE_SHAPE:",
        new="if True:",
        tests=(f"{WHEN_IT_RUNS}[input]",),
    ),
    Mutation(
        "own-attention-masks-forgotten",
        "tensor3d/parallelize/own_attention.py",
        old='if hides == "other":',
        new="if False:",
        tests=(f"{WHEN_IT_RUNS}[mask]",),
    ),
    Mutation(
        "attention-trial-of-the-first-part-alone",
        "tensor3d/parallelize/auto/attention_trial.py",
        old="for part in _parts(heads):",
        new="for part in list(_parts(heads))[:1]:",
        tests=(f"{OPEN}[TellsHeadsApart]",),
    ),
    Mutation(
        "attention-trial-of-the-smallest-y-alone",
        "tensor3d/parallelize/auto/attention_trial.py",
        old="    if most > fewest:\n",
        new="    if False:\n",
        tests=(f"{OPEN}[MixesPairsOfHeads]",),
    ),
    Mutation(
        "attention-trial-blind-to-places",
        "tensor3d/parallelize/auto/attention_trial.py",
        old="v + q * places.to(q.dtype)",
        new="v + q",
        tests=(f"{OPEN}[TurnsRowsAround]",),
    ),
    Mutation(
        "attention-trial-blind-to-causal-calls",
        "tensor3d/parallelize/auto/attention_trial.py",
        old="+ (v if causal else 0)",
        new="+ 0",
        tests=(f"{OPEN}[IsCausalByRows]",),
    ),
    Mutation(
        "attention-trial-blind-to-scales",
        "tensor3d/parallelize/auto/attention_trial.py",
        old="* (1 if scale is None else scale)",
        new="* 1",
        tests=(f"{OPEN}[ScalesByRows]",),
    ),
    Mutation(
        "attention-trial-blind-to-heads",
        "tensor3d/parallelize/auto/attention_trial.py",
        old="(q * k).sum(-1, keepdim=True)",
        new="(q * k)",
        tests=(f"{OPEN}[Strided]",),
    ),
    Mutation(
        "attention-trial-blind-to-norms",
        "tensor3d/parallelize/auto/attention_trial.py",
        old="        seen.on_face_y.append(given)\n        return cut(name, call.gave[name])",
        new="        return cut(name, call.gave[name])",
        tests=(f"{OPEN}[ShiftsBeforeANormOfAll]",),
    ),
    Mutation(
        "causal-lm-window-forgotten",
        "models/transformers_causal_lm/attention.py",
        old="causal=causal, window=sliding_window,",
        new="causal=causal,",
        tests=("tests/models/test_transformers_causal_lm.py::test_it_equals_its_original_on_one_device[mistral]",),
    ),
)
