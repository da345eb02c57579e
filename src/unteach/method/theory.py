"""Natural-gradient trajectories, to check the paper's theorem and momentum lemma numerically.

The theorem says that the mean-teacher algorithm follows a damped natural-gradient descent. Here both run on models so
small that the exact Gauss–Newton Hessian fits in memory, in float64 and without sampling noise.

Shapes: N inputs, V classes, P parameters (a flat vector θ), F features, U hidden units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unteach.method.divergences import kl_rows
from unteach.method.mean_teacher import MeanTeacher


@dataclass(frozen=True, kw_only=True)
class Network:
    """Logits ``h = O tanh(W x)``, or ``h = O x`` without hidden units; θ holds W [U, F], then O, row by row."""

    num_features: int
    num_classes: int
    num_hidden: int = 0

    @property
    def num_parameters(self) -> int:
        """P."""
        hidden, features, classes = self.num_hidden, self.num_features, self.num_classes
        return hidden * (features + classes) if hidden else features * classes

    def _layers(self, theta: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """What the last layer reads, a [N, U] or x itself, and O."""
        split = self.num_hidden * self.num_features
        hidden = theta[:split].view(self.num_hidden, self.num_features)
        read = torch.tanh(inputs @ hidden.T) if self.num_hidden else inputs
        return read, theta[split:].view(self.num_classes, -1)

    def logits(self, theta: Tensor, inputs: Tensor) -> Tensor:
        """h(x; θ) of every row of the inputs: [N, V]."""
        read, output = self._layers(theta, inputs)
        return read @ output.T

    def jacobian(self, theta: Tensor, inputs: Tensor) -> Tensor:
        """``∂h_v/∂W_uf = O_vu (1 - a_u²) x_f`` and ``∂h_v/∂O_wu = [v = w] a_u``: [N, V, P]."""
        read, output = self._layers(theta, inputs)
        identity = torch.eye(self.num_classes, dtype=theta.dtype)
        in_output = torch.einsum("vw,nu->nvwu", identity, read).flatten(2)
        if not self.num_hidden:
            return in_output
        slopes = output * (1 - read**2)[:, None, :]
        return torch.cat([(slopes[..., None] * inputs[:, None, None, :]).flatten(2), in_output], dim=2)


@dataclass(frozen=True)
class UnlearningProblem:
    """A forget loss L(θ), the mean NLUL of one set, and a divergence D(θ, θ'), the mean KL of another."""

    model: Network
    forget_inputs: Tensor
    forget_labels: Tensor
    general_inputs: Tensor

    def loss_gradient(self, theta: Tensor) -> Tensor:
        """∇L(θ), [P]: in the logits ``p_y (e_y - softmax over j ≠ y)``."""
        logits = self.model.logits(theta, self.forget_inputs)
        labels = self.forget_labels[:, None]
        others = logits.scatter(-1, labels, -torch.inf).softmax(-1)
        in_logits = logits.softmax(-1).gather(-1, labels) * (-others).scatter(-1, labels, 1.0)
        return self._pull_back(theta, self.forget_inputs, in_logits)

    def divergence_gradient(self, theta: Tensor, teacher_logits: Tensor) -> Tensor:
        """∇_θ D(θ, θ'), [P], given the teacher's logits on the general set, [N_g, V]."""
        logits = self.model.logits(theta, self.general_inputs)
        return self._pull_back(theta, self.general_inputs, kl_rows(logits, teacher_logits)[1])

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


def effective_damping(damping: float, teacher_rate: float, lr: float, momentum: float) -> float:
    """Damping of the natural-gradient descent that Algorithm 1 follows: ``λ̄ = λ + (1-μ) κ / (1-ηκ)``."""
    return damping + (1 - momentum) * teacher_rate / (1 - lr * teacher_rate)


def natural_step_size(loss_weight: float, teacher_rate: float, lr: float) -> float:
    """Step size of the natural-gradient descent that Algorithm 1 follows: ``γ = κ α η / (1-κη)``."""
    return loss_weight * lr * teacher_rate / (1 - lr * teacher_rate)


def mean_teacher_path(
    problem: UnlearningProblem, start: Tensor, *, loss_weight: float, num_steps: int, **settings: float
) -> Tensor:
    """Algorithm 1 with full batches and no clipping, by the package's own optimizer: θ_0 … θ_T, [T + 1, P]."""
    theta = torch.nn.Parameter(start.clone())
    optimizer = MeanTeacher([theta], **settings, clip=None)
    path = start.repeat(num_steps + 1, 1)
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
    path = start.repeat(num_steps + 1, 1)
    for step in range(num_steps):
        path[step + 1] = path[step] - step_size * problem.natural_gradient(path[step], damping)
    return path


def gradient_path(problem: UnlearningProblem, start: Tensor, lengths: Tensor) -> Tensor:
    """Plain gradient descent on L with steps of prescribed lengths [T], the control of the experiment: [T + 1, P]."""
    path = start.repeat(len(lengths) + 1, 1)
    for step, length in enumerate(lengths):
        gradient = problem.loss_gradient(path[step])
        path[step + 1] = path[step] - length * gradient / gradient.norm()
    return path


def largest_gap(path: Tensor, other: Tensor) -> float:
    """``max_t ‖θ_t - θ̄_t‖`` of two paths of one length."""
    return float((path - other).norm(dim=1).max())


def momentum_iteration(
    hessian: Tensor, gradient: Tensor, errors: Tensor, *, start: Tensor, damping: float, lr: float, momentum: float
) -> Tensor:
    """Inexact gradient descent with momentum on a quadratic, as in the paper's momentum lemma: u_0 … u_T, [T + 1, P].

    ``u_{t+1} = u_t - η (g + (H + λ) u_t + ε_t) + μ (u_t - u_{t-1})``, ``u_{-1} = u_0``, with H [P, P] symmetric and
    positive semi-definite, g [P] and the errors ε_0 … ε_{T-1} [T, P].
    """
    path = start.repeat(len(errors) + 1, 1)
    previous = start
    for step, error in enumerate(errors):
        now = path[step]
        force = gradient + hessian @ now + damping * now + error
        path[step + 1] = now - lr * force + momentum * (now - previous)
        previous = now
    return path


def momentum_rate(damping: float, lr: float, momentum: float) -> float:
    """``R = max(√μ, 1 - ηλ/(1-μ))``: no smaller than the spectral radius of the lemma's iteration."""
    return max(math.sqrt(momentum), 1 - lr * damping / (1 - momentum))


def momentum_bounds(
    num_steps: int, *, start: float, error: float, damping: float, lr: float, momentum: float
) -> tuple[Tensor, Tensor]:
    """The momentum lemma in a form that holds, and as printed, which does **not**: for t = 0 … T, [T + 1] each.

    ``‖u_t - u*‖ ≤ 2 R^t ‖u_0 - u*‖ + C ‖ε‖/λ`` with ``u* = -(H + λ)⁻¹ g``, ``C = 1`` where ``ηλ ≤ (1-√μ)²``,
    ``C = 2/(1-√μ)`` otherwise (proved in ``docs/theory.md``), and
    ``R^t ‖u_0 - u*‖ + √2 max{η/(1-√μ), (1-μ)/λ} ‖ε‖``. ``start`` is ‖u_0 - u*‖, ``error`` ‖ε‖ = max_j ‖ε_j‖, λ > 0,
    η ≤ 1 / (λ_max(H) + λ) and 0 < μ < 1.
    """
    root = math.sqrt(momentum)
    decay = momentum_rate(damping, lr, momentum) ** torch.arange(num_steps + 1, dtype=torch.float64) * start
    factor = 1.0 if lr * damping <= (1 - root) ** 2 else 2 / (1 - root)
    printed = math.sqrt(2) * max(lr / (1 - root), (1 - momentum) / damping)
    return 2 * decay + factor * error / damping, decay + printed * error
