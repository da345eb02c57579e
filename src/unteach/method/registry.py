"""The registry of forget losses, and what they are written with: ``register``, ``forget_loss``, ``token_log_odds``.

The paper's own are in ``losses.py``, those of other papers one file each in the folder ``field``.

Shapes: B sequences, T positions, V vocabulary entries, N real tokens (the True entries of the mask).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from unteach.errors import first_line, shown
from unteach.method.divergences import RowFunction, check_logits, compute_dtype, mean_over_rows

__all__ = ["LOSSES", "ForgetLoss", "forget_loss", "kind_problems", "log_odds_parts", "register", "token_log_odds"]

MOST_TOKENS, LARGEST = 2**20, 2**53
"""No model has more tokens, and no loss or optimizer a larger number among its options."""
Reads = Literal["log_odds", "logits", "hidden", "pairs"]
Base = Literal["initial", "given"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgetLoss:
    """One registered forget loss; ``register`` says what its parts are."""

    name: str
    equation: str
    function: Callable[..., Tensor]
    """To a scalar, from full logits or from hidden states; of ``reads="pairs"`` to the loss of each pair."""
    reads: Reads
    base: Base | None
    rows: RowFunction | None = None
    """``reads="logits"``: ``(logits [N,V], labels [N], [base_logits [N,V],] **hyper) -> (value, gradient)``."""

    @property
    def needs_base(self) -> bool:
        """Whether ``base_logits`` (or ``base_hidden``) must be given."""
        return self.base is not None

    @property
    def hyper(self) -> dict[str, Any]:
        """Hyper-parameters and their defaults, read from the signature."""
        parameters = inspect.signature(self.rows or self.function).parameters.values()
        given = ("base_logits", "base_hidden")
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in given}

    def lacking(self, *, base: bool, alternates: bool) -> list[str]:
        """A line for each thing that a run with this loss must be given and is not."""
        wrong = []
        if self.base == "given" and not base:
            wrong.append(f"loss {self.name} needs base: a model with the same tokenizer that never saw the documents")
        if self.reads == "pairs" and not alternates:
            wrong.append(f"loss {self.name} needs alternates: for each document a text to be said in its place")
        return wrong

    def unknown(self, hyper: Iterable[str]) -> list[str]:
        """A line for each name that is no hyper-parameter of this loss."""
        known = self.hyper
        line = f"forget loss {self.name!r} has no hyper-parameter {{}}: allowed are {', '.join(known) or 'none'}"
        return [line.format(shown(name)) for name in hyper if name not in known]

    def problems(self, hyper: Mapping[str, Any]) -> list[str]:
        """What is wrong with hyper-parameters, one line each; the loss itself is asked, with two tokens."""
        wrong = self.unknown(hyper)
        wrong += kind_problems(inspect.signature(self.rows or self.function), hyper)
        for name, default in self.hyper.items():
            if name not in hyper and default is inspect.Parameter.empty:
                wrong.append(f"{name} is missing: forget loss {self.name!r} needs it")
        if wrong:
            return wrong
        ids = [value for value in hyper.values() if type(value) is int]  # maybe of tokens, which then must be there
        seen = [
            torch.zeros(1, 2, max([3, *(min(value, MOST_TOKENS) + 1 for value in ids)])),
            torch.zeros(1, 2).long(),
            torch.ones(1, 2).bool(),
        ]
        if self.reads in ("hidden", "pairs"):
            seen = [seen[0][0]] if self.reads == "hidden" else [torch.zeros(2), torch.zeros(2)]
        base = {"base_hidden" if self.reads == "hidden" else "base_logits": seen[0]} if self.base else {}
        try:
            self.function(*seen, **base, **hyper)
        except (ValueError, RuntimeError, OverflowError, IndexError) as error:  # the last three are PyTorch's
            wrong.append(first_line(error))
        return wrong


def kind_problems(signature: inspect.Signature, given: Mapping[str, Any]) -> list[str]:
    """A line for each value that is not of the kind of its argument's default, or annotation where it has none."""
    wrong = []
    for name in given.keys() & signature.parameters.keys():
        value, default = given[name], signature.parameters[name].default
        if default is inspect.Parameter.empty:
            default = {"int": 0, "float": 0.0, "str": ""}.get(signature.parameters[name].annotation)
        kind = (int, float) if isinstance(default, float) else type(default)
        is_kind = isinstance(value, kind) and isinstance(value, bool) == isinstance(default, bool)
        if default is not None and not is_kind:
            wrong.append(f"{name} is {shown(value)}: it must be of the kind of {default!r}")
        elif isinstance(value, int | float) and not abs(value) <= LARGEST:
            wrong.append(f"{name} is {shown(value)}: it must be at most {LARGEST}")
    return wrong


LOSSES: dict[str, ForgetLoss] = {}


def register(
    name: str, equation: str, *, reads: Reads = "log_odds", base: Base | None = None, closed_form: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the decorated function to ``LOSSES``: ``unteach forget --loss NAME --loss-options KEY=VALUE`` then runs it.

    Args:
        name: In the registry, the configuration and the command line.
        equation: The definition as printed in docs and ``--help``.
        reads: ``"log_odds"``: ``function(logits, labels, mask, *, [base_logits,] **hyper)`` that depends on logits
            through the labels' log-odds alone; it may look at whole sequences. ``"logits"``: a row function
            ``function(logits [N,V], labels [N], [base_logits [N,V],] *, **hyper)`` that returns the loss of each token
            [N]; the loss is its mean over tokens, computed in chunks. ``"hidden"``: ``function(hidden [N,D], *,
            [base_hidden [N,D],] layer, **hyper)`` of the hidden states behind the decoder block number ``layer``.
            ``"pairs"``: ``function(log_ratio [S], alternate_log_ratio [S], *, **hyper)`` gives the loss of each pair of
            a document and its alternate [S] by how much likelier each is as a whole, log π/π_before, than before
            unlearning; the loss is their sum over the documents' tokens (``training/pairs.py``).
        base: Which other model's log-odds, logits or hidden states it needs: those of the model before unlearning
            (``"initial"``), of one that is given with ``--base`` (``"given"``), or of none.
        closed_form: The row function returns a pair, the loss of each token and its gradient in the logits [N,V]:
            faster than autograd, and exact where that is not.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        rows = None if reads != "logits" else function if closed_form else _with_gradient(function)
        whole = function if rows is None else functools.partial(_mean_loss, rows)
        LOSSES[name] = ForgetLoss(name=name, equation=equation, function=whole, reads=reads, base=base, rows=rows)
        return function

    return add


def _with_gradient(values: Callable[..., Tensor]) -> RowFunction:
    """The row function that gives the gradient too, by autograd."""

    @functools.wraps(values)
    def rows(logits: Tensor, *others: Tensor, **hyper: Any) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            found = values(leaf, *others, **hyper)
            (gradient,) = torch.autograd.grad(found.sum(), leaf)
        return found.detach(), gradient

    return torch.compiler.disable(rows)


def _mean_loss(
    rows: RowFunction, logits: Tensor, labels: Tensor, mask: Tensor, base_logits: Tensor | None = None, **hyper: Any
) -> Tensor:
    others = [labels[mask]] if base_logits is None else [labels[mask], base_logits[mask]]
    return mean_over_rows(functools.partial(rows, **hyper), logits[mask], *others)


def forget_loss(
    name: str, logits: Tensor, labels: Tensor, mask: Tensor, *, base_logits: Tensor | None = None, **hyper: Any
) -> Tensor:
    """A forget loss of a batch, to be minimised: Eq. (2) of the paper, a mean over its real tokens.

    Args:
        name: ``ll``, ``npo``, ``it``, ``nlul``, ``match`` and so on, the keys of ``LOSSES``.
        logits: h [B,T,V], already aligned with ``labels``: row t predicts label t.
        labels: y, the tokens to forget [B,T].
        mask: True at real tokens [B,T]; all other positions are never read, whatever they hold.
        base_logits: Logits of the fixed model that the loss compares with, if it does [B,T,V], a constant.
        **hyper: Keyword arguments of the loss, e.g. ``beta`` and ``ratio`` of ``npo``.

    Returns:
        A scalar in float32 (float64 for float64 logits), differentiable in ``logits``.
    """
    if name not in LOSSES:
        raise ValueError(f"unknown forget loss {name!r}: choose one of {', '.join(LOSSES)}")
    loss = LOSSES[name]
    for unknown in loss.unknown(hyper):
        raise ValueError(unknown)
    if loss.reads == "hidden":
        raise ValueError(f"forget loss {name!r} reads hidden states: call LOSSES[{name!r}].function with them")
    if loss.reads == "pairs":
        raise ValueError(f"forget loss {name!r} reads pairs of texts: call LOSSES[{name!r}].function with log-ratios")
    if loss.needs_base and base_logits is None:
        raise ValueError(f"forget loss {name!r} needs base_logits: pass the fixed model's logits for the same tokens")
    base = {"base_logits": base_logits} if loss.needs_base and base_logits is not None else {}
    check_logits(logits, mask, **base)
    _check_labels(labels, mask, logits.shape[-1])
    return loss.function(logits, labels, mask, **base, **hyper)


def token_log_odds(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-odds of the label, z = h_y - logsumexp_{j≠y} h_j [N], of rows of logits [N,V] and labels [N].

    Gradient: e_y - softmax_{j≠y}. All is computed relative to the largest other logit, a constant that cancels, so that
    value and gradient are as exact at logits of 1e4 as at logits of 1.
    """
    own, others = log_odds_parts(logits.to(compute_dtype(logits)), labels)
    return own - others.exp().sum(-1).log()


def log_odds_parts(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The label's logit [N] and the others [N,V] (-∞ at the label), both relative to the largest of the others."""
    index = labels.unsqueeze(-1)
    others = logits.scatter(-1, index, -torch.inf)
    peak = others.detach().amax(-1, keepdim=True)
    return (logits.gather(-1, index) - peak).squeeze(-1), others - peak


def _check_labels(labels: Tensor, mask: Tensor, vocabulary: int) -> None:
    if labels.shape != mask.shape:
        raise ValueError(f"labels has shape {list(labels.shape)}: it must be {list(mask.shape)}, one label a position")
    if labels.dtype != torch.int64:
        raise ValueError(f"labels has dtype {labels.dtype}: it must be torch.int64 (use labels.long())")
    real = labels[mask]
    for wrong in real[(real < 0) | (real >= vocabulary)].tolist():
        allowed = f"it must be 0 to {vocabulary - 1}; mask such positions out"
        raise ValueError(f"labels holds {wrong} at a real token: {allowed}")
