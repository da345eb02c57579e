"""The theorem and the momentum lemma, numerically, on models small enough for an exact Hessian."""

import itertools
import json
import math

import pytest
import torch
from torch.autograd.functional import hessian

import unteach
from unteach.experiments.paper import theorem
from unteach.method import theory
from unteach.method.mean_teacher import MeanTeacher

FLOAT = torch.float64
MODEL_NAMES = list(theorem.MODELS)


@pytest.fixture(scope="module", params=MODEL_NAMES)
def memorised(request):
    return theorem.memorised_problem(request.param, seed=0, ridge=0.01)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def assert_close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def loss(problem, theta):
    """L(θ) as the package defines it."""
    logits, labels = problem.model.logits(theta, problem.forget_inputs), problem.forget_labels[None]
    return unteach.forget_loss("nlul", logits[None], labels, torch.ones_like(labels, dtype=torch.bool))


def divergence(problem, theta, teacher):
    """D(θ, θ'), written out so that it can be differentiated twice."""
    p, q = (problem.model.logits(x, problem.general_inputs).log_softmax(-1) for x in (theta, teacher))
    return (p.exp() * (p - q)).sum(-1).mean()


def gradient_of(function, theta):
    free = theta.clone().requires_grad_()
    return torch.autograd.grad(function(free), free)[0]


def test_closed_forms_are_the_derivatives_of_the_definitions(memorised):
    problem, start = memorised
    moved = start + 0.3 * normal(len(start))
    expected = torch.func.jacrev(problem.model.logits)(start, problem.general_inputs)
    assert_close(problem.model.jacobian(start, problem.general_inputs), expected)
    assert_close(problem.loss_gradient(start), gradient_of(lambda x: loss(problem, x), start))
    teacher_logits = problem.model.logits(start, problem.general_inputs)
    expected = gradient_of(lambda x: divergence(problem, x, start), moved)
    assert_close(problem.divergence_gradient(moved, teacher_logits), expected)


def test_gauss_newton_is_the_hessian_of_the_divergence_at_the_teacher_and_natural_steps_solve_it(memorised):
    problem, start = memorised
    expected = hessian(lambda theta: divergence(problem, theta, start), start)
    assert expected.abs().max() > 0.1
    assert_close(problem.gauss_newton(start), expected)
    natural = problem.natural_gradient(start, 0.3)
    assert_close(expected @ natural + 0.3 * natural, problem.loss_gradient(start))


def test_the_start_has_memorised_the_labels_to_forget(memorised):
    problem, start = memorised
    assert theorem.forget_probability(problem, start) > 2 / problem.model.num_classes


def algorithm_one(problem, start, *, loss_weight, lr, momentum, teacher_rate, damping, num_steps):
    """The paper's pseudo-code, line by line, with the gradient from autograd."""
    path, teacher, previous, theta = [start], start, start, start
    for _ in range(num_steps):

        def objective(free, teacher=teacher):
            held = divergence(problem, free, teacher) + damping / 2 * (free - teacher).square().sum()
            return loss_weight * loss(problem, free) + held

        gradient = gradient_of(objective, theta)
        theta, previous = theta - lr * gradient + momentum * (theta - previous), theta
        teacher = (1 - lr * teacher_rate) * teacher + lr * teacher_rate * theta
        path.append(theta)
    return torch.stack(path)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_mean_teacher_path_is_algorithm_one(memorised, momentum):
    setting = {"loss_weight": 0.05, "lr": 0.4, "momentum": momentum, "teacher_rate": 0.5, "damping": 0.1}
    path = theory.mean_teacher_path(*memorised, num_steps=150, **setting)
    expected = algorithm_one(*memorised, num_steps=150, **setting)
    assert expected.diff(dim=0).norm(dim=1).sum() > 0.5
    assert_close(path, expected, 1e-11)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_on_a_quadratic_every_step_ends_up_as_the_damped_natural_step(momentum):
    """With H and ∇L constant, θ_{t+1} - θ_t → -γ (H + λ̄)⁻¹ ∇L exactly, which pins λ̄ and γ."""
    lr, teacher_rate, damping, loss_weight = 0.1, 2.0, 0.3, 0.05
    root, slope = normal(5, 5, seed=1), normal(5, seed=2)
    curvature = root @ root.T / 5
    theta = torch.nn.Parameter(torch.zeros(5, dtype=FLOAT))
    optimizer = MeanTeacher([theta], lr=lr, momentum=momentum, teacher_rate=teacher_rate, damping=damping, clip=None)
    for _ in range(2000):
        with optimizer.teacher_weights():
            teacher = theta.detach().clone()
        before = theta.detach().clone()
        theta.grad = loss_weight * slope + curvature @ (before - teacher)
        optimizer.step()
    effective = theory.effective_damping(damping, teacher_rate, lr, momentum)
    step_size = theory.natural_step_size(loss_weight, teacher_rate, lr)
    expected = -step_size * torch.linalg.solve(curvature + effective * torch.eye(5, dtype=FLOAT), slope)
    assert_close(theta.detach() - before, expected, 1e-11)


@pytest.mark.parametrize("momentum", theorem.TheoremSettings.momenta)
def test_mean_teacher_converges_to_natural_gradient_descent_and_the_controls_do_not(memorised, momentum):
    settings = theorem.TheoremSettings(loss_weight=0.05, num_steps=24)
    rows = [theorem.compare(*memorised, settings, momentum=momentum, halving=k)[0] for k in range(5)]
    gaps = [row["gap"] for row in rows]
    assert {round(row["steps"] * row["alpha"], 12) for row in rows} == {1.2}  # Tγ is constant
    assert all(0.8 < slope < 1.2 for slope in theorem.slopes(gaps)[-3:])
    assert all(row["path_length"] > 10 * row["gap"] for row in rows[-4:])
    bounded = [row["gap_over_alpha_log"] for row in rows[-4:]]
    assert bounded == sorted(bounded, reverse=True)  # so the gap is O(α log(1/α))
    for control in ("gap_with_plain_damping", "gap_of_plain_gradient"):
        assert rows[-1][control] > 0.9 * rows[-3][control]
        assert rows[-1][control] > 0.1 * rows[-1]["path_length"]


@pytest.mark.slow
def test_the_experiment_is_reproducible_and_its_table_shows_the_gaps():
    settings = theorem.TheoremSettings(num_steps=5, halvings=3, seed=1)
    found, again = theorem.run_experiment(settings), theorem.run_experiment(settings)
    assert found == again == json.loads(json.dumps(found))
    kinds = [(group["model"], group["momentum"]) for group in found["groups"]]
    assert kinds == list(itertools.product(MODEL_NAMES, settings.momenta))
    assert [row["steps"] for row in found["groups"][0]["rows"]] == [5, 10, 20, 40]
    printed = theorem.table([found | {"seed": 1}])
    assert all(name in printed for name in MODEL_NAMES)
    assert f"{found['groups'][-1]['rows'][-1]['gap']:.5f}" in printed


MOMENTA = [0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99]
SETTING = {"damping": 1.0, "lr": 1e-3, "momentum": 0.9}


def scalar_gaps(curvatures, errors, start, *, lr, momentum, damping=0.0):
    """|u_t - u*| for each curvature h ≥ λ by itself, [T + 1, number of curvatures]; u* = 0."""
    return theory.momentum_iteration(
        curvatures.diag(), torch.zeros_like(curvatures), errors, start=start, damping=damping, lr=lr, momentum=momentum
    ).abs()


def curvature_grid(momentum):
    """ηh from 1e-4 to 1, dense around the double root (1-√μ)² and where √μ = 1 - ηh/(1-μ)."""
    double = (1 - math.sqrt(momentum)) ** 2
    near = double * torch.linspace(0.5, 2.5, 101, dtype=FLOAT)
    grid = torch.cat([torch.logspace(-4, 0, 60, dtype=FLOAT), near])
    return grid[grid <= 1]


def test_the_lemma_as_printed_is_violated_by_a_constant_error_and_at_the_first_step():
    zero, one = torch.zeros(1, dtype=FLOAT), torch.ones(1, dtype=FLOAT)
    path = scalar_gaps(zero, one.expand(3000, 1), zero, **SETTING)
    holds, printed = theory.momentum_bounds(3000, start=0.0, error=1.0, **SETTING)
    assert float(path[-1]) == pytest.approx(1.0, rel=1e-9)  # ‖ε‖/λ
    assert float(printed[-1]) == pytest.approx(math.sqrt(2) * 0.1)  # the lemma allows 0.14 of it
    assert (path[:, 0] <= holds * (1 + 1e-12)).all()

    path = scalar_gaps(zero, zero[None], one, **SETTING)
    _, printed = theory.momentum_bounds(1, start=1.0, error=0.0, **SETTING)
    assert float(path[1]) == pytest.approx(1 - 1e-3, rel=1e-15)
    assert float(printed[1]) == pytest.approx(1 - 1e-2, rel=1e-15)


@pytest.mark.parametrize("momentum", MOMENTA)
def test_decay_is_at_most_twice_the_rate_to_the_power_t(momentum):
    """Twice is proved; the worst case found is 2/√(3-√μ) < √2, at ηh = (1-μ)(1-√μ)."""
    root = math.sqrt(momentum)
    grid = torch.cat([curvature_grid(momentum), torch.tensor([(1 - momentum) * (1 - root)], dtype=FLOAT)])
    steps = min(2000, int(40 / (1 - root)))
    none = torch.zeros(steps, len(grid), dtype=FLOAT)
    gaps = scalar_gaps(grid, none, torch.ones_like(grid), lr=1.0, momentum=momentum)
    setting = {"start": 1.0, "error": 0.0, "lr": 1.0, "momentum": momentum}
    bounds = zip(*(theory.momentum_bounds(steps, damping=h, **setting) for h in grid.tolist()), strict=True)
    holds, printed = (torch.stack(bound, dim=1) for bound in bounds)
    exact = holds > 1e-12  # below, rounding is all that is left
    assert (gaps <= holds)[exact].all()
    assert (gaps / holds)[exact].max() <= (1 + 1e-3) / math.sqrt(3 - root)
    assert (gaps > 1.1 * printed)[exact].any()


@pytest.mark.parametrize("momentum", MOMENTA)
def test_worst_errors_leave_at_most_c_of_mu(momentum):
    """Σ_j η max_{h ≥ λ} |k_j(h)|, the most that errors of norm one can leave, is at most C(μ)/λ."""
    root = math.sqrt(momentum)
    grid = curvature_grid(momentum).sort().values
    impulse = torch.zeros(int(min(4000, 60 / (1 - root))), len(grid), dtype=FLOAT)
    impulse[0] = -1
    response = scalar_gaps(grid, impulse, torch.zeros_like(grid), lr=1.0, momentum=momentum)
    worst_above = response.flip(1).cummax(1).values.flip(1)  # over all curvatures h ≥ λ, for each λ
    for smallest, total in zip(grid.tolist(), worst_above.sum(0).tolist(), strict=True):
        bound, _ = theory.momentum_bounds(0, start=0.0, error=1.0, damping=smallest, lr=1.0, momentum=momentum)
        assert total <= float(bound) * (1 + 1e-9)
        assert float(bound) <= 2 / (1 - root) / smallest * (1 + 1e-9)


@pytest.mark.parametrize(("lr", "momentum"), list(itertools.product([0.02, 0.2, 0.45], [0.3, 0.9, 0.97])))
def test_corrected_lemma_holds_for_matrices_and_random_errors(lr, momentum):
    root = normal(6, 6, seed=3)
    curvature = root @ root.T
    curvature = curvature / torch.linalg.matrix_norm(curvature, 2) * 2.0
    gradient, start, steps = normal(6, seed=4), normal(6, seed=5), 800
    setting = {"damping": 0.05, "lr": lr, "momentum": momentum}
    solution = -torch.linalg.solve(curvature + 0.05 * torch.eye(6, dtype=FLOAT), gradient)
    directions = normal(steps, 6, seed=6) + 0.5
    errors = 0.1 * directions / directions.norm(dim=1, keepdim=True)
    path = theory.momentum_iteration(curvature, gradient, errors, start=start, **setting)
    bound, _ = theory.momentum_bounds(steps, start=float((start - solution).norm()), error=0.1, **setting)
    assert ((path - solution).norm(dim=1) <= bound).all()
