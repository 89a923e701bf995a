"""MLPerf's lines: their form, their order, and the keys that its rules for BERT ask for."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tools.training.config import OptimizerConfig
from tools.training.mlperf_log import MLPerfLog, settings

TOKEN = ":::MLLOG "
# Required once by the ruleset training_4.1.0 for BERT, besides what only a submitter knows.
REQUIRED = {
    "seed",
    "global_batch_size",
    "gradient_accumulation_steps",
    "train_samples",
    "eval_samples",
    "opt_base_learning_rate",
    "opt_lamb_epsilon",
    "opt_learning_rate_training_steps",
    "opt_learning_rate_warmup_steps",
    "num_warmup_steps",
    "start_warmup_step",
    "opt_lamb_beta_1",
    "opt_lamb_beta_2",
    "opt_lamb_weight_decay_rate",
}


def of_recipe(**changes: Any) -> dict[str, Any]:
    return settings(
        OptimizerConfig(**changes),
        betas=(0.81, 0.99),
        seed=7,
        steps=200,
        global_batch=256,
        accumulation=2,
        train_samples=1000,
        eval_samples=50,
    )


def a_run(*, shown: bool = True, reached: bool = True) -> list[str]:
    lines: list[str] = []
    log = MLPerfLog(shown=shown, write=lines.append)
    log.starting()
    log.settings(of_recipe(kind="lamb"))
    log.ready(0)
    log.evaluating(512)
    log.evaluated(512, 0.5, goes_on=True)
    log.evaluating(1024)
    log.evaluated(1024, 0.73, goes_on=False)
    log.stopped(1024, reached=reached)
    return lines


def test_lines_have_the_published_form() -> None:
    before = time.time() * 1000
    for text in a_run():
        assert text.startswith(TOKEN)
        assert "\n" not in text
        facts = json.loads(text.removeprefix(TOKEN))
        assert list(facts) == ["namespace", "time_ms", "event_type", "key", "value", "metadata"]
        assert facts["event_type"] in {"INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"}
        assert type(facts["time_ms"]) is int
        assert before - 1 <= facts["time_ms"] <= time.time() * 1000


def test_a_run_in_its_order() -> None:
    facts = [json.loads(text.removeprefix(TOKEN)) for text in a_run()]
    known = [fact for fact in facts if fact["key"] not in of_recipe(kind="lamb")]
    assert [fact["key"] for fact in known] == [
        *("submission_benchmark", "init_start", "init_stop", "run_start", "block_start"),
        *("block_stop", "eval_start", "eval_accuracy", "eval_stop", "block_start"),
        *("block_stop", "eval_start", "eval_accuracy", "eval_stop", "run_stop"),
    ]
    for key in ("block", "eval", "run", "init"):
        begun = [fact["event_type"] for fact in known if fact["key"] in (f"{key}_start", f"{key}_stop")]
        assert begun == ["INTERVAL_START", "INTERVAL_END"] * (len(begun) // 2), key
    accuracies = [fact for fact in facts if fact["key"] == "eval_accuracy"]
    assert [(fact["value"], fact["metadata"]["epoch_num"]) for fact in accuracies] == [(0.5, 512), (0.73, 1024)]
    assert facts[-1]["metadata"] == {"status": "success", "samples_count": 1024}
    assert json.loads(a_run(reached=False)[-1].removeprefix(TOKEN))["metadata"]["status"] == "aborted"


def test_settings_under_mlperfs_keys() -> None:
    values = of_recipe(kind="lamb", lr=0.004, warmup=0.125, schedule="polynomial", power=0.5)
    assert set(values) >= REQUIRED
    assert (values["opt_lamb_beta_1"], values["opt_lamb_beta_2"]) == (0.81, 0.99)
    assert (values["opt_base_learning_rate"], values["opt_learning_rate_warmup_steps"]) == (0.004, 25)
    assert values["opt_lamb_learning_rate_decay_poly_power"] == 0.5
    adamw = of_recipe(kind="adamw")
    assert adamw["opt_adamw_weight_decay"] == 0.01
    assert not [key for key in adamw if "lamb" in key]


def test_other_ranks_write_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert a_run(shown=False) == []
    MLPerfLog(shown=True).stopped(3, reached=False)
    assert capsys.readouterr().out.startswith(TOKEN)
