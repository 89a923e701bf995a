"""Questions and answers in texts: SQuAD's files, windows of long contexts, the choice of answers, and their scores."""

from tools.squad.answering import Answer, answer_questions
from tools.squad.questions import Question, Questions, read_questions
from tools.squad.settings import AnswerSettings

__all__ = ["Answer", "AnswerSettings", "Question", "Questions", "answer_questions", "read_questions"]
