"""Natural-gradient trajectories, to check the paper's theorem and momentum lemma numerically.

The theorem says that the mean-teacher algorithm follows a damped natural-gradient descent. Here both run on
models so small that the exact Gauss–Newton Hessian fits in memory, in float64 and without sampling noise.

A model is two functions of a flat parameter vector θ of length P: its logits h(x; θ) [N, V] for every row of the
inputs, and their Jacobian ∂h_j(x; θ)/∂θ_i [N, V, P]. Losses, gradients and the Hessian follow from those two. Shapes: N
inputs, V classes, P parameters, F features, U hidden units.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unteach.method.mean_teacher import MeanTeacher


@dataclass(frozen=True)
class SoftmaxRegression:
    """Linear logits ``h = W x``; θ holds W [V, F] row by row. L is not convex in θ, D is."""

    num_features: int
    num_classes: int

    @property
    def num_parameters(self) -> int:
        """V · F."""
        return self.num_classes * self.num_features

    def logits(self, theta: Tensor, inputs: Tensor) -> Tensor:
        """``x Wᵀ``: [N, V]."""
        return inputs @ theta.view(self.num_classes, self.num_features).T

    def jacobian(self, theta: Tensor, inputs: Tensor) -> Tensor:
        """The same block ``x`` for every class: [N, V, V · F]."""
        identity = torch.eye(self.num_classes, dtype=theta.dtype)
        return torch.einsum("vw,nf->nvwf", identity, inputs).flatten(2)


@dataclass(frozen=True)
class TanhNetwork:
    """One hidden layer, ``h = O tanh(W x)``; θ holds W [U, F], then O [V, U], row by row."""

    num_features: int
    num_hidden: int
    num_classes: int

    @property
    def num_parameters(self) -> int:
        """U · F + V · U."""
        return self.num_hidden * (self.num_features + self.num_classes)

    def _matrices(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        split = self.num_hidden * self.num_features
        hidden = theta[:split].view(self.num_hidden, self.num_features)
        return hidden, theta[split:].view(self.num_classes, self.num_hidden)

    def logits(self, theta: Tensor, inputs: Tensor) -> Tensor:
        """``tanh(x Wᵀ) Oᵀ``: [N, V]."""
        hidden, output = self._matrices(theta)
        return torch.tanh(inputs @ hidden.T) @ output.T

    def jacobian(self, theta: Tensor, inputs: Tensor) -> Tensor:
        """By the chain rule: ``∂h_v/∂W_uf = O_vu (1 - a_u²) x_f`` and ``∂h_v/∂O_wu = [v = w] a_u``."""
        hidden, output = self._matrices(theta)
        activations = torch.tanh(inputs @ hidden.T)
        slopes = output * (1 - activations**2)[:, None, :]
        in_hidden = (slopes[..., None] * inputs[:, None, None, :]).flatten(2)
        identity = torch.eye(self.num_classes, dtype=theta.dtype)
        in_output = (identity[None, :, :, None] * activations[:, None, None, :]).flatten(2)
        return torch.cat([in_hidden, in_output], dim=2)


@dataclass(frozen=True)
class UnlearningProblem:
    """A forget loss L on one set and a divergence D on another, as the paper sets them up.

    L(θ) = mean over the forget set (inputs [N_f, F], labels [N_f]) of NLUL, ``-log(1 - p_y)``;
    D(θ, θ') = mean over the general set (inputs [N_g, F], no labels) of KL(student ‖ teacher).
    """

    model: SoftmaxRegression | TanhNetwork
    forget_inputs: Tensor
    forget_labels: Tensor
    general_inputs: Tensor

    def loss(self, theta: Tensor) -> Tensor:
        """L(θ), a scalar."""
        log_probs = self.model.logits(theta, self.forget_inputs).log_softmax(-1)
        others = log_probs.scatter(-1, self.forget_labels[:, None], -torch.inf)
        return -others.logsumexp(-1).mean()

    def loss_gradient(self, theta: Tensor) -> Tensor:
        """∇L(θ), [P]: in the logits ``p_y (e_y - softmax over j ≠ y)``."""
        logits = self.model.logits(theta, self.forget_inputs)
        labels = self.forget_labels[:, None]
        others = logits.scatter(-1, labels, -torch.inf).softmax(-1)
        in_logits = logits.softmax(-1).gather(-1, labels) * (-others).scatter(-1, labels, 1.0)
        return self._pull_back(theta, self.forget_inputs, in_logits)

    def divergence(self, theta: Tensor, teacher_logits: Tensor) -> Tensor:
        """D(θ, θ'), a scalar, given the teacher's logits on the general set, [N_g, V]."""
        log_probs = self.model.logits(theta, self.general_inputs).log_softmax(-1)
        return (log_probs.exp() * (log_probs - teacher_logits.log_softmax(-1))).sum(-1).mean()

    def divergence_gradient(self, theta: Tensor, teacher_logits: Tensor) -> Tensor:
        """∇_θ D(θ, θ'), [P]: in the logits ``S(h) d = p ⊙ (d - E_p d)`` with ``d = h - h'``."""
        logits = self.model.logits(theta, self.general_inputs)
        probs, difference = logits.softmax(-1), logits - teacher_logits
        deviation = difference - (probs * difference).sum(-1, keepdim=True)
        return self._pull_back(theta, self.general_inputs, probs * deviation)

    def gauss_newton(self, theta: Tensor) -> Tensor:
        """The Gauss–Newton Hessian of D, ``H(θ) = mean_x J S Jᵀ`` with ``S = Diag(p) - p pᵀ``: [P, P]."""
        jacobian = self.model.jacobian(theta, self.general_inputs)
        probs = self.model.logits(theta, self.general_inputs).softmax(-1)
        curvature = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None, :]
        return jacobian.flatten(0, 1).T @ (curvature @ jacobian).flatten(0, 1) / len(probs)

    def natural_gradient(self, theta: Tensor, damping: float) -> Tensor:
        """``(H(θ) + λ I)⁻¹ ∇L(θ)``, [P]."""
        hessian = self.gauss_newton(theta)
        hessian.diagonal().add_(damping)
        factor = torch.linalg.cholesky(hessian)
        return torch.cholesky_solve(self.loss_gradient(theta)[:, None], factor)[:, 0]

    def _pull_back(self, theta: Tensor, inputs: Tensor, in_logits: Tensor) -> Tensor:
        jacobian = self.model.jacobian(theta, inputs)
        return in_logits.flatten() @ jacobian.flatten(0, 1) / len(inputs)


def _teacher_drift(teacher_rate: float, lr: float) -> float:
    """``κ̄ = κ / (1-ηκ)``."""
    if not 0 <= lr * teacher_rate < 1:
        raise ValueError(
            f"lr * teacher_rate is {lr * teacher_rate:g}; it must lie in [0, 1), change lr or teacher_rate"
        )
    return teacher_rate / (1 - lr * teacher_rate)


def effective_damping(damping: float, teacher_rate: float, lr: float, momentum: float) -> float:
    """Damping of the natural-gradient descent that Algorithm 1 follows: ``λ̄ = λ + (1-μ) κ / (1-ηκ)``."""
    return damping + (1 - momentum) * _teacher_drift(teacher_rate, lr)


def natural_step_size(loss_weight: float, teacher_rate: float, lr: float) -> float:
    """Step size of the natural-gradient descent that Algorithm 1 follows: ``γ = κ α η / (1-κη)``."""
    return loss_weight * lr * _teacher_drift(teacher_rate, lr)


def mean_teacher_path(
    problem: UnlearningProblem,
    start: Tensor,
    *,
    loss_weight: float,
    lr: float,
    momentum: float,
    teacher_rate: float,
    damping: float,
    num_steps: int,
) -> Tensor:
    """Algorithm 1 with full batches and no clipping, by the package's own optimizer: θ_0 … θ_T, [T + 1, P].

    From θ_0 = θ'_0 = ``start`` with α ``loss_weight``, η ``lr``, μ, κ ``teacher_rate`` and λ ``damping``.
    """
    theta = torch.nn.Parameter(start.clone())
    optimizer = MeanTeacher([theta], lr=lr, momentum=momentum, teacher_rate=teacher_rate, damping=damping, clip=None)
    path = torch.empty(num_steps + 1, len(start), dtype=start.dtype)
    path[0] = start
    with torch.no_grad():
        for step in range(num_steps):
            with optimizer.teacher_weights():
                teacher_logits = problem.model.logits(theta, problem.general_inputs)
            theta.grad = loss_weight * problem.loss_gradient(theta)
            theta.grad += problem.divergence_gradient(theta, teacher_logits)
            optimizer.step()
            path[step + 1] = theta
    return path


def natural_gradient_path(
    problem: UnlearningProblem, start: Tensor, *, step_size: float, damping: float, num_steps: int
) -> Tensor:
    """Natural-gradient descent, ``θ̄_{t+1} = θ̄_t - γ (H(θ̄_t) + λ̄ I)⁻¹ ∇L(θ̄_t)``: θ̄_0 … θ̄_T, [T + 1, P].

    γ is ``natural_step_size``, λ̄ ``effective_damping``. The theorem prints ∇L(θ̄_{t-1}); its proof uses ∇L(θ̄_t), and
    so does this.
    """
    path = torch.empty(num_steps + 1, len(start), dtype=start.dtype)
    path[0] = start
    for step in range(num_steps):
        path[step + 1] = path[step] - step_size * problem.natural_gradient(path[step], damping)
    return path


def gradient_path(problem: UnlearningProblem, start: Tensor, step_lengths: Tensor) -> Tensor:
    """Plain gradient descent on L with prescribed step lengths ℓ [T], the control of the experiment: [T + 1, P].

    ``θ_{t+1} = θ_t - ℓ_t ∇L(θ_t) / ‖∇L(θ_t)‖``: the same number of steps and the same path length as the path whose
    step lengths are given.
    """
    path = torch.empty(len(step_lengths) + 1, len(start), dtype=start.dtype)
    path[0] = start
    for step, length in enumerate(step_lengths):
        gradient = problem.loss_gradient(path[step])
        path[step + 1] = path[step] - length * gradient / gradient.norm()
    return path


def step_lengths(path: Tensor) -> Tensor:
    """‖θ_{t+1} - θ_t‖ for t = 0 … T-1, [T]; their sum is the path length."""
    return (path[1:] - path[:-1]).norm(dim=1)


def largest_gap(path: Tensor, other: Tensor) -> float:
    """``max_t ‖θ_t - θ̄_t‖`` of two paths of one length."""
    return float((path - other).norm(dim=1).max())


def bregman_divergence(loss: Callable[[Tensor], Tensor], theta: Tensor, reference: Tensor) -> Tensor:
    """The Bregman divergence of a convex loss, ``D(θ, θ') = L(θ) - L(θ') - (θ - θ')ᵀ ∇L(θ')``; θ' is a constant.

    Locally ``½ (θ-θ')ᵀ ∇²L(θ') (θ-θ')``. Of log-sum-exp in the logits it is KL(teacher ‖ student).
    """
    if theta.shape != reference.shape:
        raise ValueError(
            f"theta has shape {tuple(theta.shape)} and reference {tuple(reference.shape)}; "
            "give reference the shape of theta"
        )
    with torch.enable_grad():
        anchor = reference.detach().requires_grad_()
        value = loss(anchor)
        (gradient,) = torch.autograd.grad(value, anchor)
    return loss(theta) - value.detach() - ((theta - reference.detach()) * gradient).sum()


def momentum_iteration(
    hessian: Tensor, gradient: Tensor, errors: Tensor, *, start: Tensor, damping: float, lr: float, momentum: float
) -> Tensor:
    """Inexact gradient descent with momentum on a quadratic, as in the paper's momentum lemma: u_0 … u_T, [T + 1, P].

    ``u_{t+1} = u_t - η (g + (H + λ) u_t + ε_t) + μ (u_t - u_{t-1})``, ``u_{-1} = u_0``, with H [P, P] symmetric and
    positive semi-definite, g [P] and the errors ε_0 … ε_{T-1} [T, P].
    """
    path = torch.empty(len(errors) + 1, len(start), dtype=start.dtype)
    path[0] = previous = start
    for step, error in enumerate(errors):
        now = path[step]
        force = gradient + hessian @ now + damping * now + error
        path[step + 1] = now - lr * force + momentum * (now - previous)
        previous = now
    return path


def momentum_rate(damping: float, lr: float, momentum: float) -> float:
    """``R = max(√μ, 1 - ηλ/(1-μ))``: no smaller than the spectral radius of the lemma's iteration.

    λ is the smallest eigenvalue of H + λ that is allowed, η at most one over the largest.
    """
    return max(math.sqrt(momentum), 1 - lr * damping / (1 - momentum))


def printed_momentum_bound(
    num_steps: int, *, start: float, error: float, damping: float, lr: float, momentum: float
) -> Tensor:
    """The paper's momentum lemma as printed, which does **not** hold (see :func:`momentum_bound`).

    ``R^t ‖u_0 - u*‖ + √2 max{η/(1-√μ), (1-μ)/λ} max_j ‖ε_j‖`` for t = 0 … T, [T + 1].
    """
    steps = torch.arange(num_steps + 1, dtype=torch.float64)
    floor = math.sqrt(2) * max(lr / (1 - math.sqrt(momentum)), (1 - momentum) / damping)
    return momentum_rate(damping, lr, momentum) ** steps * start + floor * error


def momentum_bound(num_steps: int, *, start: float, error: float, damping: float, lr: float, momentum: float) -> Tensor:
    """The momentum lemma in a form that holds, for t = 0 … T, [T + 1].

    ``‖u_t - u*‖ ≤ 2 R^t ‖u_0 - u*‖ + C ‖ε‖/λ`` with ``‖ε‖ = max_j ‖ε_j‖``, ``u* = -(H + λ)⁻¹ g`` and
    ``C = 1`` where ``ηλ ≤ (1-√μ)²``, ``C = 2/(1-√μ)`` otherwise. The proof is in ``docs/theory.md``.

    Args:
        num_steps: T.
        start: ‖u_0 - u*‖.
        error: max_j ‖ε_j‖.
        damping: λ > 0; H itself is positive semi-definite.
        lr: η ≤ 1 / (λ_max(H) + λ).
        momentum: μ in (0, 1).
    """
    steps = torch.arange(num_steps + 1, dtype=torch.float64)
    root = math.sqrt(momentum)
    factor = 1.0 if lr * damping <= (1 - root) ** 2 else 2 / (1 - root)
    return 2 * momentum_rate(damping, lr, momentum) ** steps * start + factor * error / damping
