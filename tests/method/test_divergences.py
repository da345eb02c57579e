"""What holds of divergences alone; ``test_losses.py`` holds them to their definitions, too."""

import math

import pytest
import torch

import unteach
from definitions import assert_matches_exact, exact, value_and_gradient

NAMES = list(unteach.DIVERGENCES)
ONE = torch.tensor([[True]])


def batch(vocabulary, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits, teacher = 2 * torch.randn(2, 2, 3, vocabulary, generator=generator, dtype=torch.float64).to(dtype)
    return logits, teacher, torch.tensor([[True, True, True], [True, False, False]])


# Student p = (3/4, 1/4), teacher q = (1/5, 4/5): d = (log 3, 0) - (0, log 4), so d₁ - d₂ = log 12, Var = p₁p₂ log²12.
HAND_CASES = {
    "kl": 3 / 4 * math.log(15 / 4) + 1 / 4 * math.log(5 / 16),
    "kl_reverse": 1 / 5 * math.log(4 / 15) + 4 / 5 * math.log(16 / 5),
    "qkl": 3 / 16 * math.log(12) ** 2,
    "qkl_frozen": 4 / 25 * math.log(12) ** 2 / 2,
    # the middle is (19/40, 21/40)
    "js": (3 / 4 * math.log(30 / 19) + 1 / 4 * math.log(10 / 21) + 1 / 5 * math.log(8 / 19) + 4 / 5 * math.log(32 / 21))
    / 2,
}


@pytest.mark.parametrize("name", NAMES)
def test_hand_computed(name):
    student = torch.tensor([[[math.log(3), 0.0], [5.0, 5.0]]], dtype=torch.float64)
    teacher = torch.tensor([[[0.0, math.log(4)], [float("nan"), 1.0]]], dtype=torch.float64)
    value = unteach.divergence(name, student, teacher, torch.tensor([[True, False]]))
    assert value.item() == pytest.approx(HAND_CASES[name], rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-5])
@pytest.mark.parametrize("name", NAMES)
def test_nearly_equal_networks_match_mpmath(name, size, dtype):
    generator = torch.Generator().manual_seed(1)
    teacher = 2 * torch.randn(1, 1, 1_000, generator=generator)
    logits = (teacher + size * torch.randn(1, 1, 1_000, generator=generator)).to(dtype)
    teacher = teacher.to(dtype)
    value, gradient = value_and_gradient(name, logits, None, ONE, teacher)
    assert_matches_exact(value, gradient, *exact(name, logits.flatten().tolist(), 0, teacher.flatten().tolist()))


@pytest.mark.parametrize("name", NAMES)
def test_zero_with_zero_gradient_exactly_at_the_teacher_which_has_none(name):
    logits, _, mask = batch(50, torch.float32)
    teacher = logits.clone().requires_grad_()
    value, gradient = value_and_gradient(name, logits, None, mask, teacher)
    assert value == 0
    assert (gradient == 0).all()
    unteach.divergence(name, 2 * teacher.detach().requires_grad_(), teacher, mask).backward()
    assert teacher.grad is None


@pytest.mark.parametrize("name", NAMES)
def test_adding_a_constant_to_a_row_changes_nothing(name):
    logits, teacher, mask = batch(7)
    shifted = unteach.divergence(name, logits + 3.0, teacher - 5.0, mask)
    torch.testing.assert_close(shifted, unteach.divergence(name, logits, teacher, mask), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("name", "factor"), [("kl", 0.5), ("kl_reverse", 0.5), ("qkl", 1.0), ("qkl_frozen", 0.5), ("js", 0.125)]
)
def test_local_quadratic(name, factor):
    """D → factor · dᵀ S d: one half, but twice that for the paper's QKL, and a quarter of it for Jensen–Shannon."""
    teacher = batch(7)[1][:1, :1]
    direction = batch(7, seed=5)[0][:1, :1]
    p = teacher.flatten().softmax(0)
    quadratic = direction.flatten() @ (torch.diag(p) - torch.outer(p, p)) @ direction.flatten()
    for step in (1e-3, 1e-5):
        value = unteach.divergence(name, teacher + step * direction, teacher, ONE)
        assert value / step**2 == pytest.approx(factor * quadratic.item(), rel=10 * step)


def test_paper_qkl_lets_a_certain_student_escape():
    """Uniform teacher over 4 tokens, logit gap 2, 10, 20: QKL goes back to zero while KL grows to log 4."""
    teacher = torch.zeros(1, 1, 4, dtype=torch.float64)

    def values(name):
        students = (torch.tensor([[[gap, 0.0, 0.0, 0.0]]], dtype=torch.float64) for gap in (2.0, 10.0, 20.0))
        return [unteach.divergence(name, student, teacher, ONE).item() for student in students]

    assert values("qkl") == pytest.approx([0.82, 0.0136, 2.5e-6], rel=0.02)
    assert values("kl") == sorted(values("kl"))
    assert values("kl")[-1] == pytest.approx(math.log(4), rel=1e-6)
    assert values("qkl_frozen") == sorted(values("qkl_frozen"))


def test_kl_reverse_is_the_bregman_divergence_of_log_sum_exp():
    logits, teacher, mask = batch(7)
    teacher.requires_grad_()
    potential = teacher[mask].logsumexp(-1).mean()
    (slope,) = torch.autograd.grad(potential, teacher)
    bregman = logits[mask].logsumexp(-1).mean() - potential - ((logits - teacher) * slope).sum()
    torch.testing.assert_close(unteach.divergence("kl_reverse", logits, teacher, mask), bregman, rtol=1e-12, atol=0)


def test_wrong_input_says_what_to_change():
    logits, teacher, mask = batch(7)
    with pytest.raises(ValueError, match=f"unknown divergence 'KL': choose one of {', '.join(NAMES)}"):
        unteach.divergence("KL", logits, teacher, mask)
    with pytest.raises(ValueError, match=r"teacher_logits has shape \[2, 3, 6\].*must be floating-point \[2, 3, 7\]"):
        unteach.divergence("kl", logits, teacher[..., :6], mask)
    for wrong, match in ((torch.zeros_like(mask), "mask has no True entry"), (mask.long(), "use mask.bool")):
        with pytest.raises(ValueError, match=match):
            unteach.divergence("kl", logits, teacher, wrong)
