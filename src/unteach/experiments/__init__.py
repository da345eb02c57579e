"""The demo and the paper's experiments, and here the methods that they compare, with the numbers they run with.

A name says optimizer, loss and divergence. ``METHODS`` suits the embedded model; ``methods_of_the_paper`` has AdamW's
numbers of the authors' runs on 7B models, where a settings file of ``unteach reproduce`` does not give others.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from unteach.config import Method

__all__ = ["DEEP", "DEEP_INPUTS", "METHODS", "MICRO_SETTINGS", "methods_of_the_paper"]

_PAPER: dict[str, Any] = {"token_share": 1.0, "loops_every": 0}
"""The loss looks at all tokens, and nothing is done about loops."""
_ADAMW = Method(optimizer="adamw", lr=3e-4, alpha=0.2, warmup=5, **_PAPER)
METHODS = {
    "mt-nlul-kl": Method(optimizer="mean_teacher", loss="nlul", token_share=0.25, loops_every=4),
    "adamw-npo-kl": dataclasses.replace(_ADAMW, loss="npo", loss_options={"ratio": "mean"}, alpha=1.0),
    "mt-nlul-kl-paper": Method(optimizer="mean_teacher", loss="nlul", **_PAPER),
    "mt-nlul-qkl": Method(optimizer="mean_teacher", loss="nlul", divergence="qkl_frozen", **_PAPER),
    "adamw-npo-sum-kl": dataclasses.replace(_ADAMW, loss="npo", alpha=1.0),
    "adamw-it-kl": dataclasses.replace(_ADAMW, loss="it", alpha=1.0),
    "adamw-ll-kl": dataclasses.replace(_ADAMW, loss="ll"),
    "adamw-nlul-kl": dataclasses.replace(_ADAMW, loss="nlul"),
}
"""All but the first are as in the paper. AdamW's numbers suit the embedded model."""
DEEP = Method()
"""Deep forgetting: what the program chooses where it is given a base model and keep documents."""
DEEP_INPUTS: dict[str, Any] = {"keep": "micro:retain", "base": "micro:base", "holdout": "micro:holdout"}
"""What it is given on the embedded benchmark."""
MICRO_SETTINGS: dict[str, Any] = {
    "model": "micro:target", "documents": "micro:forget", "reference": "micro:retrained",
    "general_tokens": 128, "expected_steps": 40, "max_steps": 200, "probes": 64,
}  # fmt: skip
"""What suits the embedded model: its context is short, and a demo should be."""


def methods_of_the_paper() -> dict[str, Method]:
    """The same methods with AdamW's numbers of the authors' runs: learning rate 1e-5 for NPO, 1e-6 for other losses."""
    return {
        name: dataclasses.replace(method, lr=1e-5 if method.loss == "npo" else 1e-6, alpha=0.05, warmup=100)
        if method.optimizer == "adamw"
        else method
        for name, method in METHODS.items()
    }
