"""Measuring: what a model still recites, knows and leaks, and whether it is still whole."""

from unteach.evaluation.membership import membership_auc, min_k, privleak
from unteach.evaluation.repetition import is_degenerate
from unteach.evaluation.rouge import rouge_l
from unteach.evaluation.scores import Scores
from unteach.evaluation.suite import evaluate

__all__ = ["Scores", "evaluate", "is_degenerate", "membership_auc", "min_k", "privleak", "rouge_l"]
