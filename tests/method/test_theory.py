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


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=MODEL_NAMES)
def memorised(request):
    return theorem.memorised_problem(request.param, seed=0, ridge=0.01)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def assert_close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# --- the problem: closed forms against autograd and against the package's definitions


def test_jacobian_is_the_derivative_of_the_logits(memorised):
    problem, start = memorised
    expected = torch.func.jacrev(problem.model.logits)(start, problem.general_inputs)
    assert_close(problem.model.jacobian(start, problem.general_inputs), expected)


def test_loss_is_nlul_of_the_package_and_its_gradient_is_autograd(memorised):
    problem, start = memorised
    labels = problem.forget_labels[None]
    mask = torch.ones_like(labels, dtype=torch.bool)

    def loss(theta):
        return unteach.forget_loss("nlul", problem.model.logits(theta, problem.forget_inputs)[None], labels, mask)

    theta = start.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(theta), theta)
    assert_close(problem.loss(start), loss(start))
    assert_close(problem.loss_gradient(start), expected)


def test_divergence_is_kl_of_the_package_and_its_gradient_is_autograd(memorised):
    problem, start = memorised
    teacher_logits = problem.model.logits(start, problem.general_inputs)
    theta = (start + 0.3 * normal(len(start))).requires_grad_()
    mask = torch.ones(1, len(teacher_logits), dtype=torch.bool)
    logits = problem.model.logits(theta, problem.general_inputs)
    expected = unteach.divergence("kl", logits[None], teacher_logits[None], mask)
    (gradient,) = torch.autograd.grad(expected, theta)
    assert_close(problem.divergence(theta, teacher_logits), expected)
    assert_close(problem.divergence_gradient(theta.detach(), teacher_logits), gradient)


def test_gauss_newton_is_the_hessian_of_the_divergence_at_the_teacher(memorised):
    problem, start = memorised
    teacher_logits = problem.model.logits(start, problem.general_inputs)
    expected = hessian(lambda theta: problem.divergence(theta, teacher_logits), start)
    assert expected.abs().max() > 0.1
    assert_close(problem.gauss_newton(start), expected)


def test_natural_gradient_solves_the_damped_system(memorised):
    problem, start = memorised
    natural = problem.natural_gradient(start, 0.3)
    assert_close(problem.gauss_newton(start) @ natural + 0.3 * natural, problem.loss_gradient(start))


def test_the_start_has_memorised_the_labels_to_forget(memorised):
    problem, start = memorised
    assert theorem.forget_probability(problem, start) > 2 / problem.model.num_classes


# --- Algorithm 1 and the effective damping


def algorithm_one(problem, start, *, loss_weight, lr, momentum, teacher_rate, damping, num_steps):
    """The paper's pseudo-code, line by line, with the gradient from autograd."""
    path, teacher, previous, theta = [start], start, start, start
    for _ in range(num_steps):
        teacher_logits = problem.model.logits(teacher, problem.general_inputs)
        free = theta.clone().requires_grad_()
        objective = loss_weight * problem.loss(free) + problem.divergence(free, teacher_logits)
        objective = objective + damping / 2 * (free - teacher).square().sum()
        (gradient,) = torch.autograd.grad(objective, free)
        theta, previous = theta - lr * gradient + momentum * (theta - previous), theta
        teacher = (1 - lr * teacher_rate) * teacher + lr * teacher_rate * theta
        path.append(theta)
    return torch.stack(path)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_mean_teacher_path_is_algorithm_one(memorised, momentum):
    setting = {"loss_weight": 0.05, "lr": 0.4, "momentum": momentum, "teacher_rate": 0.5, "damping": 0.1}
    path = theory.mean_teacher_path(*memorised, num_steps=150, **setting)
    expected = algorithm_one(*memorised, num_steps=150, **setting)
    assert theory.step_lengths(expected).sum() > 0.5
    assert_close(path, expected, 1e-11)


def test_effective_damping_and_step_size_by_hand():
    # κ/(1-ηκ) = 2/(1-0.5) = 4, so λ̄ = 0.1 + (1-0.75)·4 and γ = 0.01·0.25·4
    assert theory.effective_damping(0.1, 2.0, 0.25, 0.75) == pytest.approx(1.1, rel=1e-15)
    assert theory.natural_step_size(0.01, 2.0, 0.25) == pytest.approx(0.01, rel=1e-15)


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


@pytest.mark.parametrize("call", [lambda: theory.effective_damping(0.0, 4.0, 0.25, 0.0),
                                  lambda: theory.natural_step_size(0.1, 4.0, 0.25)])  # fmt: skip
def test_a_teacher_rate_of_one_a_step_is_refused(call):
    with pytest.raises(ValueError, match="change lr or teacher_rate"):
        call()


# --- the theorem


@pytest.mark.parametrize("momentum", theorem.TheoremSettings.momenta)
def test_mean_teacher_converges_to_natural_gradient_descent_and_the_controls_do_not(memorised, momentum):
    settings = theorem.TheoremSettings(loss_weight=0.05, num_steps=24)
    rows = [theorem.compare(*memorised, settings, momentum=momentum, halving=k)[0] for k in range(6)]
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
    assert [(group["model"], group["momentum"]) for group in found["groups"]] == list(
        itertools.product(MODEL_NAMES, settings.momenta)
    )
    assert [row["steps"] for row in found["groups"][0]["rows"]] == [5, 10, 20, 40]
    printed = theorem.table([found | {"seed": 1}])
    assert all(name in printed for name in MODEL_NAMES)
    assert f"{found['groups'][-1]['rows'][-1]['gap']:.5f}" in printed


# --- the momentum lemma

MOMENTA = [0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99]


def scalar_gaps(curvatures, errors, start, *, lr, momentum):
    """|u_t - u*| for each curvature h ≥ λ by itself, [T + 1, number of curvatures]; u* = 0."""
    path = theory.momentum_iteration(
        curvatures.diag(), torch.zeros_like(curvatures), errors, start=start, damping=0.0, lr=lr, momentum=momentum
    )
    return path.abs()


def curvature_grid(momentum):
    """ηh from 1e-4 to 1, dense around the double root (1-√μ)² and where √μ = 1 - ηh/(1-μ)."""
    double = (1 - math.sqrt(momentum)) ** 2
    near = double * torch.linspace(0.5, 2.5, 101, dtype=FLOAT)
    grid = torch.cat([torch.logspace(-4, 0, 60, dtype=FLOAT), near])
    return grid[grid <= 1]


def test_the_lemma_as_printed_is_violated_by_a_constant_error():
    setting = {"damping": 1.0, "lr": 1e-3, "momentum": 0.9}
    one = torch.ones(1, dtype=FLOAT)
    path = theory.momentum_iteration(
        torch.zeros(1, 1, dtype=FLOAT), 0 * one, one.expand(3000, 1), start=0 * one, **setting
    )
    printed = theory.printed_momentum_bound(3000, start=0.0, error=1.0, **setting)
    assert float(path[-1].abs()) == pytest.approx(1.0, rel=1e-9)  # ‖ε‖/λ
    assert float(printed[-1]) == pytest.approx(math.sqrt(2) * 0.1)  # the lemma allows 0.14 of it
    assert (path[:, 0].abs() <= theory.momentum_bound(3000, start=0.0, error=1.0, **setting) * (1 + 1e-12)).all()


def test_the_decay_as_printed_is_violated_at_the_first_step():
    setting = {"damping": 1.0, "lr": 1e-3, "momentum": 0.9}
    one = torch.ones(1, dtype=FLOAT)
    path = theory.momentum_iteration(
        torch.zeros(1, 1, dtype=FLOAT), 0 * one, torch.zeros(1, 1, dtype=FLOAT), start=one, **setting
    )
    printed = theory.printed_momentum_bound(1, start=1.0, error=0.0, **setting)
    assert float(path[1]) == pytest.approx(1 - 1e-3, rel=1e-15)
    assert float(printed[1]) == pytest.approx(1 - 1e-2, rel=1e-15)
    assert path[1] > printed[1]


def test_the_block_of_the_lemma_is_not_a_contraction_though_its_spectral_radius_is_below_one():
    block = torch.tensor([[1 - 1e-3, -0.9], [1e-3, 0.9]], dtype=FLOAT)
    assert torch.linalg.eigvals(block).abs().max() <= theory.momentum_rate(1.0, 1e-3, 0.9) < 1
    assert torch.linalg.matrix_norm(block, 2) > 1.3


@pytest.mark.parametrize("momentum", MOMENTA)
def test_spectral_radius_is_at_most_the_rate(momentum):
    for curvature in curvature_grid(momentum).tolist():
        block = torch.tensor([[1 - curvature, -momentum], [curvature, momentum]], dtype=FLOAT)
        radius = float(torch.linalg.eigvals(block).abs().max())
        assert radius <= theory.momentum_rate(curvature, 1.0, momentum) + 1e-7  # √ε at a double root


@pytest.mark.parametrize("momentum", MOMENTA)
def test_decay_is_at_most_twice_the_rate_to_the_power_t(momentum):
    """Twice is proved; the worst case found is 2/√(3-√μ) < √2, at ηh = (1-μ)(1-√μ)."""
    root = math.sqrt(momentum)
    grid = torch.cat([curvature_grid(momentum), torch.tensor([(1 - momentum) * (1 - root)], dtype=FLOAT)])
    num_steps = min(2000, int(40 / (1 - root)))
    gaps = scalar_gaps(grid, torch.zeros(num_steps, len(grid), dtype=FLOAT), torch.ones_like(grid), lr=1.0,
                       momentum=momentum)  # fmt: skip
    setting = {"start": 1.0, "error": 0.0, "lr": 1.0, "momentum": momentum}
    holds, printed = (
        torch.stack([bound(num_steps, damping=h, **setting) for h in grid.tolist()], dim=1)
        for bound in (theory.momentum_bound, theory.printed_momentum_bound)
    )
    exact = holds > 1e-12  # below, rounding is all that is left
    assert (gaps <= holds)[exact].all()
    assert (gaps / holds)[exact].max() <= (1 + 1e-3) / math.sqrt(3 - root)
    assert (gaps > 1.1 * printed)[exact].any()


@pytest.mark.parametrize("momentum", MOMENTA)
def test_worst_errors_leave_at_most_c_of_mu(momentum):
    """Σ_j η max_{h ≥ λ} |k_j(h)|, the most that errors of norm one can leave, is at most C(μ)/λ."""
    root = math.sqrt(momentum)
    grid = curvature_grid(momentum).sort().values
    num_steps = int(min(4000, 60 / (1 - root)))
    impulse = torch.zeros(num_steps, len(grid), dtype=FLOAT)
    impulse[0] = -1
    response = scalar_gaps(grid, impulse, torch.zeros_like(grid), lr=1.0, momentum=momentum)
    worst_above = response.flip(1).cummax(1).values.flip(1)  # over all curvatures h ≥ λ, for each λ
    for smallest, total in zip(grid.tolist(), worst_above.sum(0).tolist(), strict=True):
        bound = theory.momentum_bound(0, start=0.0, error=1.0, damping=smallest, lr=1.0, momentum=momentum)
        assert total <= float(bound) * (1 + 1e-9)
        assert float(bound) <= 2 / (1 - root) / smallest * (1 + 1e-9)


@pytest.mark.parametrize(("lr", "momentum"), list(itertools.product([0.02, 0.2, 0.45], [0.3, 0.9, 0.97])))
def test_corrected_lemma_holds_for_matrices_and_random_errors(lr, momentum):
    root = normal(6, 6, seed=3)
    curvature = root @ root.T
    curvature = curvature / torch.linalg.matrix_norm(curvature, 2) * 2.0
    damping, gradient, start, num_steps = 0.05, normal(6, seed=4), normal(6, seed=5), 800
    solution = -torch.linalg.solve(curvature + damping * torch.eye(6, dtype=FLOAT), gradient)
    directions = normal(num_steps, 6, seed=6) + 0.5
    errors = 0.1 * directions / directions.norm(dim=1, keepdim=True)
    path = theory.momentum_iteration(
        curvature, gradient, errors, start=start, damping=damping, lr=lr, momentum=momentum
    )
    distance = float((start - solution).norm())
    bound = theory.momentum_bound(num_steps, start=distance, error=0.1, damping=damping, lr=lr, momentum=momentum)
    assert ((path - solution).norm(dim=1) <= bound).all()


# --- the Bregman divergence


def test_bregman_is_locally_quadratic_with_the_hessian_of_the_loss():
    features, labels = normal(20, 3, seed=7), torch.arange(20) % 4

    def loss(theta):
        return torch.nn.functional.cross_entropy(features @ theta.view(3, 4), labels)  # convex in θ

    reference, direction = normal(12, seed=8), normal(12, seed=9)
    quadratic = 0.5 * direction @ hessian(loss, reference) @ direction
    errors = []
    for scale in (1e-2, 5e-3, 2.5e-3):
        value = theory.bregman_divergence(loss, reference + scale * direction, reference)
        assert value > 0
        errors.append(float((value / scale**2 - quadratic).abs()))
    assert errors[0] < 0.02 * float(quadratic)
    assert errors[1] < 0.55 * errors[0]
    assert errors[2] < 0.55 * errors[1]


def test_bregman_of_log_sum_exp_in_the_logits_is_kl_reverse():
    logits, teacher_logits = normal(2, 3, 7, seed=10).requires_grad_(), normal(2, 3, 7, seed=11)
    mask = torch.tensor([[True, True, False], [True, False, True]])

    def loss(values):
        return values[mask].logsumexp(-1).mean()

    bregman = theory.bregman_divergence(loss, logits, teacher_logits)
    expected = unteach.divergence("kl_reverse", logits, teacher_logits, mask)
    assert expected > 0.1
    assert_close(bregman, expected)
    assert_close(*(torch.autograd.grad(value, logits)[0] for value in (bregman, expected)))


def test_bregman_is_zero_at_the_reference_and_works_without_gradients():
    with torch.no_grad():
        value = theory.bregman_divergence(lambda x: x.square().sum(), torch.ones(3), torch.ones(3))
    assert value == 0


def test_bregman_refuses_different_shapes():
    with pytest.raises(ValueError, match="give reference the shape of theta"):
        theory.bregman_divergence(torch.sum, torch.zeros(3), torch.zeros(2))
