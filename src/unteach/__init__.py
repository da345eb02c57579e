"""Make a language model forget chosen documents and keep everything else."""

from unteach.divergences import DIVERGENCES, divergence
from unteach.losses import LOSSES, forget_loss
from unteach.mean_teacher import MeanTeacher

__all__ = ["DIVERGENCES", "LOSSES", "MeanTeacher", "divergence", "forget_loss"]
__version__ = "0.1.0"
