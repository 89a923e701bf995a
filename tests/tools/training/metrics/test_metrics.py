"""Records of steps, the table at the end, the best evaluation, peak memory, and the page that explains them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tensor3d import Cube
from tests.ranks import run_fresh_ranks
from tests.tools.bench.measured import STEP, evaluation, step
from tools.training.metrics import (
    EarlyStopping,
    EvaluationMetrics,
    MemoryMetrics,
    StepMetrics,
    by_axis,
    next_sentence_accuracy,
    peak_memory,
    summary,
)
from tools.training.metrics.records import EVALUATION_TAGS, STEP_TAGS, peak_resident

# Records


def test_every_number_of_a_step_is_in_tensorboard_and_in_the_journal() -> None:
    fields = {field.name for field in dataclasses.fields(StepMetrics)}
    assert set(STEP_TAGS.values()) == fields - {"step", "skipped", "traffic"}
    scalars = STEP.scalars()
    assert "speed/mfu" not in scalars, "no peak is known"
    assert dataclasses.replace(STEP, mfu=0.4).scalars()["speed/mfu"] == 0.4
    assert scalars["traffic/bytes_received/data+x+z"] == 2**21
    record = STEP.record()
    assert record["loss"] == 0.1 + 0.2
    assert record["bytes_received/y"] == 2**20
    assert set(record) == fields - {"traffic"} | {"bytes_received/y", "bytes_received/data+x+z"}


def test_accuracy_without_labels_is_none_and_no_point() -> None:
    assert next_sentence_accuracy(0.0, 0.0, 8) is None
    assert next_sentence_accuracy(0.0, 0.7, 8) == 0.0, "all are wrong"
    assert next_sentence_accuracy(8.0, 0.0, 8) == 1.0, "all are right, beyond doubt"
    assert next_sentence_accuracy(0.0, math.nan, 8) == 0.0
    for numbers in (STEP, evaluation(1, 2.0)):
        bare = dataclasses.replace(numbers, next_sentence_accuracy=None)
        assert bare.record()["next_sentence_accuracy"] is None
        assert len(bare.scalars()) == len(numbers.scalars()) - 1


def test_traffic_is_added_up_by_axis() -> None:
    received = Counter({("y", "all-gather"): 3, ("x", "all-gather"): 5, ("y", "reduce-scatter"): 4})
    assert by_axis(received) == {"x": 5, "y": 7}


# The table


def test_the_table_says_where_the_time_went() -> None:
    history = [step(1), step(2, checkpoint_seconds=1.0)]
    told = "\n".join(summary(history, [], 5.0, [MemoryMetrics(step=2, peak_bytes=[2**20, 3 * 2**20])]))
    assert "forward 25.0%, backward 40.0%, gradient sum 20.0%, optimiser 10.0%" in told
    assert "1.00 s, 20.00% of the time" in told
    assert "6.00 s, 60.00% of the time" in "\n".join(summary(history, [], 5.0, stalled=5.0)), "with the last one"
    assert "3.15 MB on rank 1; mean of 2: 2.1 MB" in told
    assert "utilisation" not in told
    assert "skipped" not in told


def test_the_table_shows_the_numbers_of_the_run() -> None:
    """Speed is the median of the steps, fill their mean, the loss at the end that of the last twenty."""
    history = [step(1, masked_lm_loss=9.0, fill=0.5, tokens_per_second=9000.0)]
    history += [step(n, masked_lm_loss=4.0, fill=0.75, tokens_per_second=1000.0 + n) for n in range(2, 22)]
    told = [" ".join(line.split()) for line in summary(history, [], 5.0)]
    assert "masked-LM loss, step 1 9.000 nats" in told
    assert "masked-LM loss, mean of last 20 4.000 nats" in told
    assert "unigram entropy of the corpus 5.000 nats; the loss is 1.000 below it" in told
    assert "fill of the packs 73.81%" in told  # (0.5 + 20 * 0.75) / 21
    assert "real tokens/s, median 1,012" in told
    assert "received a step by rank 0 3.15 MB" in told
    above = [" ".join(line.split()) for line in summary(history, [], 3.0)]
    assert "unigram entropy of the corpus 3.000 nats; the loss is 1.000 above it" in above


def test_the_table_of_a_run_with_skipped_steps() -> None:
    skipped = step(2, masked_lm_loss=math.nan, skipped=True, skipped_steps=1, loss_scale=32768.0, mfu=0.25)
    told = "\n".join(summary([step(1), skipped], [], 5.0))
    assert "1, gradients not finite; loss scale 32768" in told
    assert "mean of last 1" in told
    assert "6.000 nats" in told
    assert "25.0% of the peak" in told
    nothing = [" ".join(line.split()) for line in summary([skipped], [], 5.0)]
    assert "masked-LM loss not finite in any of the last steps" in nothing
    assert "unigram entropy of the corpus 5.000 nats" in nothing


def test_the_table_of_a_run_that_had_an_evaluation_left_alone() -> None:
    """A signal had come while it was at its last one."""
    told = summary([], [evaluation(6, 4.0)], 5.0, [MemoryMetrics(step=6, peak_bytes=[2**20])])
    assert [line.split()[0] for line in told] == ["held-out", "held-out", "peak"]


# The best evaluation


def test_best_follows_a_curve() -> None:
    best = EarlyStopping(patience=2)
    seen = [best.update(evaluation(number, loss)) for number, loss in enumerate([3.0, 2.0, 2.5, 2.0, math.nan, 1.0])]
    assert [improved for improved, _ in seen] == [True, True, False, False, False, True]
    assert [stop for _, stop in seen] == [False, False, False, True, True, False]
    assert (best.loss, best.step) == (1.0, 5)
    assert EarlyStopping(patience=0).update(evaluation(1, math.nan)) == (False, False)


def test_best_goes_on_where_it_was_resumed() -> None:
    losses = [3.0, 2.0, 2.5, 2.5, 2.5]
    whole = EarlyStopping(patience=3)
    expected = [whole.update(evaluation(number, loss)) for number, loss in enumerate(losses)]
    best, seen = EarlyStopping(patience=3), []
    for number, loss in enumerate(losses):
        best = EarlyStopping(patience=3, state=json.loads(json.dumps(best.to_dict())))
        seen.append(best.update(evaluation(number, loss)))
    assert seen == expected
    assert seen[-1] == (False, True)


@pytest.mark.parametrize("state", [{}, {"loss": "low", "step": 1, "waited": 0}, {"loss": 1.0, "step": 1}])
def test_best_refuses_a_foreign_state(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="best evaluation must be like"):
        EarlyStopping(patience=1, state=state)


def test_best_refuses_negative_patience() -> None:
    with pytest.raises(ValueError, match=r"at least 0 evaluations .* Got -1"):
        EarlyStopping(patience=-1)


# Memory


def _grown() -> tuple[list[int], int, dict[Any, int]]:
    cube = Cube(1, 2, 1)
    block = torch.ones(2**20 * (1 + 24 * cube.rank))  # 4 MiB on rank 0, 100 MiB on rank 1
    with cube.traffic.counting() as count:
        peaks = peak_memory(cube)
    assert block.numel()
    return peaks, peak_resident(), dict(count.calls)


def test_peak_memory_of_every_rank() -> None:
    results = run_fresh_ranks(2, _grown)
    assert results[0][0] == results[1][0]
    peaks = results[0][0]
    assert peaks[1] - peaks[0] > 80 * 2**20
    for rank, (_, own, calls) in enumerate(results):
        assert abs(own - peaks[rank]) < 8 * 2**20
        assert list(calls.values()) == [1]


def test_peak_memory_stays_when_it_is_given_back() -> None:
    before = peak_memory(Cube.single())
    block = torch.ones(2**26)
    del block
    after = peak_memory(Cube.single())
    assert after[0] >= before[0]
    assert after[0] > 2**28


# The page


def test_the_page_explains_every_name() -> None:
    page = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| `")}
    for tag, name in STEP_TAGS.items():
        assert f"| {tag} |" in rows[f"`{name}`"], name
    for kind in (StepMetrics, EvaluationMetrics, MemoryMetrics):
        for field in dataclasses.fields(kind):
            assert f"`{field.name}`" in page, field.name
    for tag in (*EVALUATION_TAGS, *MemoryMetrics(step=1, peak_bytes=[1]).scalars()):
        assert tag in page, tag
