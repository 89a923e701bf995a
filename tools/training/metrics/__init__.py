"""What a run tells of itself: records of its steps, a journal and TensorBoard, a table at the end."""

from tools.training.metrics.console import ConsoleLogger, first_step, summary, table
from tools.training.metrics.jsonl import JOURNAL, read_journal
from tools.training.metrics.records import (
    EvaluationMetrics,
    MemoryMetrics,
    StepMetrics,
    by_axis,
    next_sentence_accuracy,
    peak_memory,
)
from tools.training.metrics.run_log import EarlyStopping, EvaluationRecord, RunLog, StepRecord

__all__ = [
    "JOURNAL",
    "ConsoleLogger",
    "EarlyStopping",
    "EvaluationMetrics",
    "EvaluationRecord",
    "MemoryMetrics",
    "RunLog",
    "StepMetrics",
    "StepRecord",
    "by_axis",
    "first_step",
    "next_sentence_accuracy",
    "peak_memory",
    "read_journal",
    "summary",
    "table",
]
