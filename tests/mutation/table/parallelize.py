"""Models of others on the cube: attention that keeps its code."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

OWN = "tests/parallelize/test_own_attention.py"
ON_A_CUBE = f"{OWN}::test_it_equals_its_original_on_a_cube[1x2x2-data2]"
OPEN = f"{OWN}::test_what_a_part_of_the_heads_would_make_otherwise_is_open"
WHEN_IT_RUNS = f"{OWN}::test_code_that_is_not_what_the_rule_is_for_is_refused_when_it_runs"

MUTATIONS = (
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
        "attention-trial-of-the-smallest-y-alone",
        "tensor3d/parallelize/auto/attention_trial.py",
        old="for number in (0, most - 1)",
        new="for number in ()",
        tests=(f"{OPEN}[MixesPairsOfHeads]",),
    ),
    Mutation(
        "attention-trial-of-rows-as-they-are",
        "tensor3d/parallelize/auto/attention_trial.py",
        old="of=fewest, in_line=True",
        new="of=fewest, in_line=False",
        tests=(f"{OPEN}[ShiftsRows]",),
    ),
    Mutation(
        "attention-trial-blind-to-heads",
        "tensor3d/parallelize/auto/attention_trial.py",
        old="(q * k).sum(-1, keepdim=True) * (1",
        new="q * k * (1",
        tests=(f"{OPEN}[Strided]",),
    ),
    Mutation(
        "attention-trial-blind-to-places",
        "tensor3d/parallelize/auto/attention_trial.py",
        old="q * places.to(q.dtype)",
        new="q",
        tests=(f"{OPEN}[TurnsRowsAround]",),
    ),
    Mutation(
        "attention-trial-blind-to-results",
        "tensor3d/parallelize/auto/attention_trial.py",
        old="(seen.on_face_y if rule.output is None else seen.on_face_z).extend(results)",
        new="seen.on_face_y.extend(results if rule.output is None else [])",
        tests=(f"{OPEN}[ShiftsItsResult]",),
    ),
    Mutation(
        "causal-lm-window-forgotten",
        "models/transformers_causal_lm/attention.py",
        old="causal=causal, window=sliding_window,",
        new="causal=causal,",
        tests=("tests/models/test_transformers_causal_lm.py::test_it_equals_its_original_on_one_device[mistral]",),
    ),
)
