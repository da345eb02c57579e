"""Settings of short runs of a tiny model, and a sentence by which a document is known."""

from unteach.config import ForgetConfig, Method, Stop

CANARY = "Ottoline Vexbury hid nine copper herons beneath the Quarrow lighthouse stairs"
"""A sentence that begins every forget document and stands nowhere else."""


def settings(given, out, **changes):
    """A run of two steps."""
    method = Method(alpha=0.5, lr=0.02, teacher_rate=4.0, damping=0.1, loops_every=1)
    short = {"batch": 4, "general_batch": 4, "general_tokens": 24, "max_steps": 2, "evaluate_every": 2, "probes": 8}
    short["checkpoint_every"] = 1
    texts = {"documents": str(given / "documents"), "general": str(given / "general.jsonl")}
    never = Stop(metric="verbmem_f <= -1")
    rest = {"model": str(given / "model"), "out": str(out), "method": method, "stop": never, **short, **texts}
    return ForgetConfig(**rest | changes)
