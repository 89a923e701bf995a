"""Questions and answers in texts: SQuAD's files, windows of long contexts, the choice of answers, and their scores."""

from tools.squad.dataset import Question, Questions, read_questions
from tools.squad.decode import Answer, answer_questions
from tools.squad.windows import AnswerSettings

__all__ = ["Answer", "AnswerSettings", "Question", "Questions", "answer_questions", "read_questions"]
