"""What a run tells of itself: records of its steps, a journal and TensorBoard, a table at the end."""

from tools.metrics.best import Best
from tools.metrics.closing import summary, table
from tools.metrics.display import Display
from tools.metrics.journal import JOURNAL, read_journal
from tools.metrics.memory import peak_memory
from tools.metrics.records import EvaluationMetrics, MemoryMetrics, StepMetrics, by_axis, next_sentence_accuracy

__all__ = [
    "JOURNAL",
    "Best",
    "Display",
    "EvaluationMetrics",
    "MemoryMetrics",
    "StepMetrics",
    "by_axis",
    "next_sentence_accuracy",
    "peak_memory",
    "read_journal",
    "summary",
    "table",
]
