"""Settings of published rows under a name: ``unteach forget MODEL --preset NAME`` runs them on any model.

A preset has the method and how it is run, from the authors' logs as in ``configs/`` (a test holds the two together),
and nothing that belongs to a benchmark: models, texts and the number at which to stop are given by flags or chosen.
"""

from __future__ import annotations

import copy
from typing import Any

from unteach.errors import InputError
from unteach.settings import nearest_name

__all__ = ["PRESETS", "listing", "preset"]

_ALL_TOKENS: dict[str, Any] = {"token_share": 1.0, "loops_every": 0, "clip": 1.0}
_TEACHER: dict[str, Any] = _ALL_TOKENS | {
    "optimizer": "mean_teacher", "alpha": 0.05, "lr": 5e-4, "momentum": 0.95, "teacher_rate": 10.0, "damping": 5.0,
}  # fmt: skip
_ADAMW: dict[str, Any] = _ALL_TOKENS | {
    "optimizer": "adamw", "alpha": 0.05, "lr": 1e-6, "betas": [0.9, 0.95], "weight_decay": 0.01, "warmup": 100,
}  # fmt: skip
_NLUL: dict[str, Any] = {"loss": "nlul", "loss_options": {"tolerance": 0.02}}
_NPO: dict[str, Any] = {"loss": "npo", "loss_options": {"beta": 0.1, "ratio": "mean"}, "lr": 1e-5}
_KL, _QKL = {"divergence": "kl_reverse"}, {"divergence": "qkl_frozen"}
_LL = {"loss": "ll"}
_NPO_OF_LOSSES: dict[str, Any] = {"loss": "npo", "loss_options": {"beta": 0.5, "ratio": "mean"}}
_OF_LOSSES: dict[str, Any] = _TEACHER | _QKL | {"momentum": 0.9}
_ESCAPE: dict[str, Any] = _ADAMW | _QKL | {"alpha": 1.0}
"""Out of the starting point, before the mean teacher."""
_RUN: dict[str, Any] = {
    "document_mode": "truncate", "batch": 40, "general_batch": 40, "trainable": "blocks", "evaluate_every": 100,
    "max_steps": 2000,
    "stop": {"utility_floor": float("inf"), "plateau": 0, "refine": False, "unmet": "last"},
}  # fmt: skip
_BOOKS: dict[str, Any] = {"document_mode": "chunk"}
_STEPS = {"stop": _RUN["stop"] | {"metric": "verbmem_f <= -1"}}
"""No stop rule: no score is below 0."""
_STAR = {"stop": _RUN["stop"] | {"metric": "knowmem_f <= reference"}}


def _row(config: str, about: str, method: dict[str, Any], **run: Any) -> tuple[str, str, dict[str, Any]]:
    return config, about, _RUN | run | {"method": method}


PRESETS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "paper-mt-nlul-kl": _row("muse-news-mt-nlul-kl", "Table 1, News: MT + NLUL + KL", _TEACHER | _NLUL | _KL),
    "paper-mt-nlul-qkl": _row("muse-news-mt-nlul-qkl", "Table 1, News: MT + NLUL + QKL", _TEACHER | _NLUL | _QKL),
    "paper-mt-nlul-qkl-star": _row(
        "muse-news-mt-nlul-qkl-star", "Table 1, News: MT + NLUL + QKL★; needs --reference and --questions",
        _TEACHER | _NLUL | _QKL, **_STAR,
    ),
    "paper-adamw-npo-kl": _row(
        "muse-news-adamw-npo-kl", "Table 1, News: AdamW + NPO + KL", _ADAMW | _NPO | _KL, batch=80
    ),
    "paper-adamw-ll-kl": _row("muse-news-adamw-ll-kl", "Table 1, News: AdamW + LL + KL", _ADAMW | _KL | _LL),
    "paper-adamw-nlul-kl": _row(
        "muse-news-adamw-nlul-kl", "Table 1, News: AdamW + NLUL + KL", _ADAMW | _NLUL | _KL
    ),
    "paper-adamw-it-kl": _row(
        "muse-news-adamw-it-kl", "Table 1, News: AdamW + IT + KL; needs --base", _ADAMW | _KL | {"loss": "it"}
    ),
    "paper-books-mt-nlul-kl": _row(
        "muse-books-mt-nlul-kl", "Table 1, Books: MT + NLUL + KL", _TEACHER | _NLUL | _KL | {"alpha": 0.1}, **_BOOKS
    ),
    "paper-books-mt-nlul-qkl": _row(
        "muse-books-mt-nlul-qkl", "Table 1, Books: MT + NLUL + QKL", _TEACHER | _NLUL | _QKL | {"alpha": 0.1}, **_BOOKS
    ),
    "paper-books-adamw-npo-kl": _row(
        "muse-books-adamw-npo-kl", "Table 1, Books: AdamW + NPO + KL", _ADAMW | _NPO | _KL | {"alpha": 0.1},
        evaluate_every=50, **_BOOKS,
    ),
    "paper-sequential-mt-nlul-qkl": _row(
        "sequential-mt-nlul-qkl", "Figure 4, one request: MT + NLUL + QKL", _TEACHER | _NLUL | _QKL | {"momentum": 0.9},
        max_steps=400, **_STEPS,
    ),
    "paper-sequential-adamw-npo-kl": _row(
        "sequential-adamw-npo-kl", "Figure 4, one request: AdamW + NPO + KL", _ADAMW | _NPO | _KL | {"warmup": 0},
        batch=80, general_batch=80, max_steps=200, **_STEPS,
    ),
    "paper-losses-mt-ll-qkl": _row("loss-ablation-mt-ll-qkl", "Figure 1: MT + LL + QKL", _OF_LOSSES | _LL),
    "paper-losses-mt-npo-qkl": _row(
        "loss-ablation-mt-npo-qkl", "Figure 1: MT + NPO + QKL", _OF_LOSSES | _NPO_OF_LOSSES
    ),
    "paper-losses-mt-nlul-qkl": _row(
        "loss-ablation-mt-nlul-qkl", "Figure 1: MT + NLUL + QKL", _OF_LOSSES | _NLUL | {"teacher_rate": 5.0},
        batch=80, evaluate_every=250,
    ),
    "paper-losses-mt-it-qkl": _row(
        "loss-ablation-mt-it-qkl", "Figure 1: MT + IT + QKL; needs --base", _OF_LOSSES | {"loss": "it"}, max_steps=3000
    ),
    "paper-losses-adamw-then-mt-ll-qkl": _row(
        "loss-ablation-adamw-then-mt-ll-qkl", "Figure 1: MT + LL + QKL after AdamW", _TEACHER | _QKL | _LL,
        phases=[_ESCAPE | _LL | {"steps": 300}], max_steps=400, **_STEPS,
    ),
    "paper-losses-adamw-then-mt-npo-qkl": _row(
        "loss-ablation-adamw-then-mt-npo-qkl", "Figure 1: MT + NPO + QKL after AdamW", _TEACHER | _QKL | _NPO_OF_LOSSES,
        phases=[_ESCAPE | _NPO_OF_LOSSES | {"steps": 400}], max_steps=2400,
    ),
}  # fmt: skip
"""By name: the file of ``configs/`` that has the whole row, what it is in the paper, and the settings."""


def preset(name: str) -> dict[str, Any]:
    """The settings of a preset, as a file of settings would give them; an ``InputError`` names the known ones."""
    if name not in PRESETS:
        raise InputError(f"preset is {name!r}: it must be one of {', '.join(PRESETS)}{nearest_name(name, PRESETS)}")
    return copy.deepcopy(PRESETS[name][2])


def listing() -> str:
    """A line for each preset."""
    return "\n".join(f"{name:34} {about}" for name, (_, about, _) in PRESETS.items())
