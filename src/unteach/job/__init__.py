"""The main job as one call: documents and a model in, a run folder with the unlearned model and its scores out."""

from unteach.job.run import ForgetResult, forget, run_forget

__all__ = ["ForgetResult", "forget", "run_forget"]
