import math

import pytest
import torch

import unteach
from definitions import EXTREME_ROWS, NAIVE_DIVERGENCES, RELATIVE, assert_matches_exact, exact_divergence
from unteach.method.divergences import quadratic_damping

DTYPES = [torch.float64, torch.float32]
NAMES = list(unteach.DIVERGENCES)


def batch(vocabulary, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits, teacher = (
        (2 * torch.randn(2, 3, vocabulary, generator=generator, dtype=torch.float64)).to(dtype) for _ in range(2)
    )
    return logits, teacher, torch.tensor([[True, True, True], [True, False, False]])


def value_and_gradient(name, logits, teacher, mask):
    logits = logits.clone().requires_grad_()
    value = unteach.divergence(name, logits, teacher, mask)
    (gradient,) = torch.autograd.grad(value, logits)
    return value.detach(), gradient


# Student p = (3/4, 1/4), teacher q = (1/5, 4/5): d = (log 3, 0) - (0, log 4), so d₁ - d₂ = log 12, Var = p₁p₂ log²12.
HAND_CASES = {
    "kl": 3 / 4 * math.log(15 / 4) + 1 / 4 * math.log(5 / 16),
    "kl_reverse": 1 / 5 * math.log(4 / 15) + 4 / 5 * math.log(16 / 5),
    "qkl": 3 / 16 * math.log(12) ** 2,
    "qkl_frozen": 4 / 25 * math.log(12) ** 2 / 2,
}


def test_every_divergence_has_a_case_computed_by_hand():
    assert set(HAND_CASES) == set(unteach.DIVERGENCES) == set(NAIVE_DIVERGENCES)


@pytest.mark.parametrize("name", NAMES)
def test_hand_computed(name):
    student = torch.tensor([[[math.log(3), 0.0], [5.0, 5.0]]], dtype=torch.float64)
    teacher = torch.tensor([[[0.0, math.log(4)], [float("nan"), 1.0]]], dtype=torch.float64)
    value = unteach.divergence(name, student, teacher, torch.tensor([[True, False]]))
    assert value.item() == pytest.approx(HAND_CASES[name], rel=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [2, 7, 50_000])
@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_match_the_definition(name, vocabulary, dtype):
    logits, teacher, mask = batch(vocabulary, dtype)
    value, gradient = value_and_gradient(name, logits, teacher, mask)
    exact_logits = logits.double().requires_grad_()
    expected = NAIVE_DIVERGENCES[name](exact_logits, teacher.double(), mask)
    (expected_gradient,) = torch.autograd.grad(expected, exact_logits)
    assert value.dtype == gradient.dtype == dtype
    assert value.item() == pytest.approx(expected.item(), rel=RELATIVE[dtype])
    assert (gradient.double() - expected_gradient).norm() <= RELATIVE[dtype] * expected_gradient.norm()


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name):
    logits, teacher, mask = batch(5)
    assert torch.autograd.gradcheck(lambda x: unteach.divergence(name, x, teacher, mask), logits.requires_grad_())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", list(EXTREME_ROWS))
@pytest.mark.parametrize("name", NAMES)
def test_extremes_match_mpmath(name, rows, dtype):
    row, teacher_row = EXTREME_ROWS[rows]
    logits, teacher = (torch.tensor([[r]], dtype=dtype) for r in (row, teacher_row))
    value, gradient = value_and_gradient(name, logits, teacher, torch.tensor([[True]]))
    assert_matches_exact(value, gradient, *exact_divergence(name, row, teacher_row))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-5])
@pytest.mark.parametrize("name", NAMES)
def test_nearly_equal_networks_match_mpmath(name, size, dtype):
    generator = torch.Generator().manual_seed(1)
    teacher = 2 * torch.randn(1, 1, 1_000, generator=generator)
    logits = teacher + size * torch.randn(1, 1, 1_000, generator=generator)
    value, gradient = value_and_gradient(name, logits.to(dtype), teacher.to(dtype), torch.tensor([[True]]))
    assert_matches_exact(
        value, gradient, *exact_divergence(name, logits.flatten().tolist(), teacher.flatten().tolist())
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_input_stays_finite(name, dtype):
    rows = torch.tensor([[[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0], [60.0, 0.0, 0.0], [1.0, 2.0, 3.0]]], dtype=dtype)
    value, gradient = value_and_gradient(name, rows, rows.flip(1), torch.ones(1, 4, dtype=torch.bool))
    assert value.dtype == torch.float32
    assert value.isfinite()
    assert gradient.dtype == dtype
    assert gradient.isfinite().all()


@pytest.mark.parametrize("wild", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("name", NAMES)
def test_masked_positions_change_nothing_at_all(name, wild):
    logits, teacher, mask = batch(7)
    value, gradient = value_and_gradient(name, logits, teacher, mask)
    wild_logits, wild_teacher = (x.masked_fill(~mask.unsqueeze(-1), wild) for x in (logits, teacher))
    wild_value, wild_gradient = value_and_gradient(name, wild_logits, wild_teacher, mask)
    assert torch.equal(value, wild_value)
    assert torch.equal(gradient, wild_gradient)
    assert (wild_gradient[~mask] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_zero_with_zero_gradient_exactly_at_the_teacher(name):
    logits, _, mask = batch(50, torch.float32)
    value, gradient = value_and_gradient(name, logits, logits.clone(), mask)
    assert value == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_adding_a_constant_to_a_row_changes_nothing(name):
    logits, teacher, mask = batch(7)
    shifted = unteach.divergence(name, logits + 3.0, teacher - 5.0, mask)
    torch.testing.assert_close(shifted, unteach.divergence(name, logits, teacher, mask), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("name", "factor"), [("kl", 0.5), ("kl_reverse", 0.5), ("qkl", 1.0), ("qkl_frozen", 0.5)])
def test_local_quadratic(name, factor):
    """D → factor · dᵀ S d: one half for every divergence but the paper's QKL, which is twice that."""
    teacher = batch(7)[1][:1, :1]
    direction = batch(7, seed=5)[0][:1, :1]
    p = teacher.flatten().softmax(0)
    quadratic = direction.flatten() @ (torch.diag(p) - torch.outer(p, p)) @ direction.flatten()
    for step in (1e-3, 1e-5):
        value = unteach.divergence(name, teacher + step * direction, teacher, torch.tensor([[True]]))
        assert value / step**2 == pytest.approx(factor * quadratic.item(), rel=10 * step)


def test_paper_qkl_lets_a_certain_student_escape():
    """Uniform teacher over 4 tokens, logit gap 2, 10, 20: QKL goes back to zero while KL grows to log 4."""
    mask = torch.tensor([[True]])
    teacher = torch.zeros(1, 1, 4, dtype=torch.float64)

    def values(name):
        students = (torch.tensor([[[gap, 0.0, 0.0, 0.0]]], dtype=torch.float64) for gap in (2.0, 10.0, 20.0))
        return [unteach.divergence(name, student, teacher, mask).item() for student in students]

    assert values("qkl") == pytest.approx([0.82, 0.0136, 2.5e-6], rel=0.02)
    assert values("kl") == sorted(values("kl"))
    assert values("kl")[-1] == pytest.approx(math.log(4), rel=1e-6)
    assert values("qkl_frozen") == sorted(values("qkl_frozen"))


def test_teacher_gets_no_gradient():
    logits, teacher, mask = batch(7)
    logits.requires_grad_()
    teacher.requires_grad_()
    unteach.divergence("kl", logits, teacher, mask).backward()
    assert logits.grad is not None
    assert teacher.grad is None


def test_quadratic_damping_by_hand():
    student = [torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([[3.0]])]
    teacher = [torch.tensor([0.0, 4.0]), torch.tensor([[0.0]])]
    value = quadratic_damping(student, teacher, damping=0.5)
    assert value.item() == 0.25 * (1 + 4 + 9)
    value.backward()
    assert student[0].grad.tolist() == [0.5, -1.0]
    with pytest.raises(ValueError, match="damping is -1"):
        quadratic_damping(student, teacher, damping=-1)
    with pytest.raises(ValueError, match="parameters is empty"):
        quadratic_damping([], [], damping=1)


def test_wrong_input_says_what_to_change():
    logits, teacher, mask = batch(7)
    with pytest.raises(ValueError, match=f"unknown divergence 'KL': choose one of {', '.join(NAMES)}"):
        unteach.divergence("KL", logits, teacher, mask)
    with pytest.raises(ValueError, match=r"teacher_logits has shape \[2, 3, 6\].*must be floating-point \[2, 3, 7\]"):
        unteach.divergence("kl", logits, teacher[..., :6], mask)
    with pytest.raises(ValueError, match="mask has no True entry"):
        unteach.divergence("kl", logits, teacher, torch.zeros_like(mask))
    with pytest.raises(ValueError, match="use mask.bool"):
        unteach.divergence("kl", logits, teacher, mask.long())


def test_registry_entries_are_complete():
    for name, entry in unteach.DIVERGENCES.items():
        assert entry.name == name
        assert entry.equation
        assert entry.function.__doc__
        assert not entry.needs_base
