"""Forget losses and, where one test serves both, divergences: by hand, against the definitions, and at extremes."""

import math

import pytest
import torch

import definitions
import unteach
from definitions import EXTREME_ROWS, PARITY_ROWS, RELATIVE, assert_matches_exact, evaluated, exact, value_and_gradient
from unteach.method.losses import token_log_odds

DTYPES = [torch.float64, torch.float32]
GATE = {"pull": "gate"}
OF_TOKENS = [name for name, loss in unteach.LOSSES.items() if loss.reads not in ("hidden", "pairs")]
NAMES = [*OF_TOKENS, *unteach.DIVERGENCES]
SURROGATES = {"wga", "satimp", "ce_u"}
"""Something in them is held constant: the gradient is not that of the value."""
PARITY = {"pull": "parity"}
LINE = GATE | {"margin": 1.25, "slope": 0.75}
EVERY_FORM = [*((name, {}) for name in NAMES), *(("match", hyper) for hyper in (GATE, PARITY, {"margin": 0.5}, LINE))]
ONE = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool)
"""The label and the mask of a single token."""


def batch(vocabulary, dtype=torch.float64, seed=0, sequences=3, time=4):
    """Random logits, labels, mask and base logits; the mask has a full, a partial and an empty sequence."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(sequences, time, vocabulary, generator=generator, dtype=torch.float64)
    base = 2 * torch.randn(sequences, time, vocabulary, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocabulary, (sequences, time), generator=generator)
    mask = torch.tensor([[True] * time, [True, True] + [False] * (time - 2), [False] * time])
    return logits.to(dtype), labels, mask, base.to(dtype)


# One sequence of two real tokens over two words. Token 1: p_y = 3/4 (odds 3:1); token 2: p_y = 1/5 (odds 1:4).
# The base model has p_y = 1/2 for both. The padded third position holds nonsense.
HAND_LOGITS = [[[math.log(3), 0.0], [0.0, math.log(4)], [99.0, -99.0]]]
HAND_BASE = [[[1.0, 1.0], [-2.0, -2.0], [float("nan"), 0.0]]]
# π(s) = 3/4 · 1/5 = 3/20, π_base(s) = 1/4, so the ratio is 3/5; σ(-β log r) = 1/(1 + r^β).
# KL(half ‖ (3/4, 1/4)) = ½ log 2/3 + ½ log 2; KL(half ‖ (1/5, 4/5)) = ½ log 5/2 + ½ log 5/8
FORWARD = (math.log(2 / 3) + math.log(2) + math.log(5 / 2) + math.log(5 / 8)) / 4
HAND_CASES = {
    # (log 3/4 + log 1/5) / 2
    "ll": [({}, (math.log(3 / 4) + math.log(1 / 5)) / 2)],
    # β = 1: 2 log(1 + 3/5) / 2 tokens; mean form: 2 · 2 log(1 + √(3/5)) / 2 tokens
    "npo": [
        ({"beta": 1.0}, math.log(1.6)),
        ({"beta": 1.0, "ratio": "mean"}, 2 * math.log(1 + math.sqrt(0.6))),
        ({}, 20 * math.log(1 + 0.6**0.1) / 2),
    ],
    # KL((3/4, 1/4) ‖ (1/2, 1/2)) = 3/4 log 3/2 + 1/4 log 1/2; KL((1/5, 4/5) ‖ half) = 1/5 log 2/5 + 4/5 log 8/5
    "it": [({}, (0.75 * math.log(1.5) + 0.25 * math.log(0.5) + 0.2 * math.log(0.4) + 0.8 * math.log(1.6)) / 2)],
    "it_forward": [({}, FORWARD)],
    # -(log 1/4 + log 4/5) / 2; with tolerance 1/4: weights (3/4)/(1/2) and (1/5)/(21/20), each times log p
    "nlul": [
        ({}, -(math.log(1 / 4) + math.log(4 / 5)) / 2),
        ({"tolerance": 0.25}, (1.5 * math.log(3 / 4) + 4 / 21 * math.log(1 / 5)) / 2),
    ],
    # it_forward, plus: the base's odds are 1, so that softplus(z) = -log(1 - p), as for nlul; the gate lets token 1
    # alone through, log 3; a margin of log 2 leaves odds of 3/2 and 1/8, log 5/2 and log 9/8, or log 3/2 alone
    "match": [
        ({}, FORWARD - (math.log(1 / 4) + math.log(4 / 5)) / 2),
        ({"pull": "gate"}, FORWARD + math.log(3) / 2),
        ({"margin": math.log(2)}, FORWARD + (math.log(5 / 2) + math.log(9 / 8)) / 2),
        ({"pull": "gate", "margin": math.log(2)}, FORWARD + math.log(3 / 2) / 2),
        # a base with odds of 1 leaves a slope nothing to turn; see test_a_slope_turns_the_goal_about_even_odds
        ({"pull": "gate", "margin": math.log(2), "slope": 0.5}, FORWARD + math.log(3 / 2) / 2),
        ({"pull": "parity"}, FORWARD + (math.hypot(1, math.log(3)) + math.hypot(1, math.log(4)) - 2) / 2),
    ],
    # (3/20)^½ is the mean likelihood: with β = 2 and δ = log 2, (2 · √(3/20))² = 3/5, and -(2/2) log σ = log(1 + 3/5)
    "simnpo": [
        ({"beta": 2.0, "delta": math.log(2)}, math.log(1.6)),
        ({}, 2 / 4.5 * math.log(1 + 0.15**2.25)),
    ],
    "wga": [
        ({}, (3 / 4 * math.log(3 / 4) + 1 / 5 * math.log(1 / 5)) / 2),
        ({"beta": 2.0}, (9 / 16 * math.log(3 / 4) + 1 / 25 * math.log(1 / 5)) / 2),
    ],
    "satimp": [
        ({"beta1": 1.0}, (3 / 16 * math.log(3 / 4) + 4 / 25 * math.log(1 / 5)) / 2),
        ({"beta1": 0.0, "beta2": 2.0}, (1 / 16 * math.log(3 / 4) + 16 / 25 * math.log(1 / 5)) / 2),
    ],
    # of two words the other one is certain: -log 1/4 and -log 4/5, as nlul
    "ce_u": [({}, -(math.log(1 / 4) + math.log(4 / 5)) / 2)],
    # the base's odds 1 become e^-β: with β = log 3 the goal is (1/4, 3/4), at β = 0 it is the base model
    "undial": [
        (
            {"beta": math.log(3)},
            -(math.log(3 / 4) / 4 + 3 * math.log(1 / 4) / 4 + math.log(1 / 5) / 4 + 3 * math.log(4 / 5) / 4) / 2,
        ),
        ({"beta": 0.0}, -(math.log(3 / 16) + math.log(4 / 25)) / 4),
    ],
    # H(3/4, 1/4) = log 4 - ¾ log 3, H(1/5, 4/5) = log 5 - ⅘ log 4: of log 2 each lacks some, of half of it neither
    "clamped_entropy": [
        ({}, 0.0),
        ({"threshold": 1.0}, math.log(2) - (math.log(4) - 0.75 * math.log(3) + math.log(5) - 0.8 * math.log(4)) / 2),
    ],
    # JS((1, 0) ‖ (3/4, 1/4)): the middle is (7/8, 1/8); JS((1, 0) ‖ (1/5, 4/5)): (3/5, 2/5)
    "jensun": [
        (
            {},
            (math.log(8 / 7) + 3 / 4 * math.log(6 / 7) + 1 / 4 * math.log(2)) / 4
            + (math.log(5 / 3) + 1 / 5 * math.log(1 / 3) + 4 / 5 * math.log(2)) / 4,
        ),
        (
            {"token": 1},
            (math.log(8 / 5) + 3 / 4 * math.log(2) + 1 / 4 * math.log(2 / 5)) / 4
            + (math.log(10 / 9) + 1 / 5 * math.log(2) + 4 / 5 * math.log(8 / 9)) / 4,
        ),
    ],
}


def test_every_loss_has_a_case_computed_by_hand():
    assert set(HAND_CASES) == set(OF_TOKENS), "add a hand-computed case for the new loss to HAND_CASES"
    assert set(definitions.NAIVE_LOSSES) == set(OF_TOKENS), "add its definition to tests/definitions.py"
    assert set(definitions.NAIVE_DIVERGENCES) == set(unteach.DIVERGENCES)


@pytest.mark.parametrize("name", HAND_CASES)
def test_hand_computed(name):
    logits, base = (torch.tensor(x, dtype=torch.float64) for x in (HAND_LOGITS, HAND_BASE))
    for hyper, expected in HAND_CASES[name]:
        found = evaluated(name, logits, torch.tensor([[0, 0, 7]]), torch.tensor([[True, True, False]]), base, **hyper)
        assert found.item() == pytest.approx(expected, rel=1e-12), hyper


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [2, 7, 50_000])
@pytest.mark.parametrize(
    ("name", "hyper"), [*EVERY_FORM, ("npo", {"beta": 0.7, "ratio": "mean"}), ("match", GATE | {"margin": 0.5})]
)
def test_value_and_gradient_match_the_definition(name, hyper, vocabulary, dtype):
    logits, labels, mask, base = batch(vocabulary, dtype)
    value, gradient = value_and_gradient(name, logits, labels, mask, base, **hyper)
    exact_logits = logits.double().requires_grad_()
    expected = definitions.naive(name, exact_logits, labels, mask, base.double(), **hyper)
    (expected_gradient,) = torch.autograd.grad(expected, exact_logits)
    assert value.dtype == gradient.dtype == dtype
    assert value.item() == pytest.approx(expected.item(), rel=RELATIVE[dtype])
    assert (gradient.double() - expected_gradient).norm() <= RELATIVE[dtype] * expected_gradient.norm()


@pytest.mark.parametrize(("name", "hyper"), [form for form in EVERY_FORM if form[0] not in SURROGATES])
def test_gradcheck(name, hyper):
    logits, *others = batch(5)
    assert torch.autograd.gradcheck(lambda x: evaluated(name, x, *others, **hyper), logits.requires_grad_())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", list(EXTREME_ROWS))
@pytest.mark.parametrize(("name", "hyper"), EVERY_FORM)
def test_extremes_match_mpmath(name, hyper, rows, dtype):
    row, base_row = EXTREME_ROWS[rows]
    logits, base = (torch.tensor([[r]], dtype=dtype) for r in (row, base_row))
    value, gradient = value_and_gradient(name, logits, *ONE, base, **hyper)
    # at parity it is zero by cancellation: by the gate with a kink that nothing rests on, else with its pull
    roundings, in_pull = 4 if "pull" in hyper else 0, 4 if hyper == PARITY else 0
    assert_matches_exact(value, gradient, *exact(name, row, 0, base_row, **hyper), roundings, in_pull)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", list(PARITY_ROWS))
@pytest.mark.parametrize("hyper", [{}, GATE, PARITY, {"margin": 0.5}])
def test_match_rounds_nothing_away_where_two_large_log_odds_nearly_agree(hyper, rows, dtype):
    row, base_row = PARITY_ROWS[rows]
    logits, base = (torch.tensor([r], dtype=dtype) for r in (row, base_row))
    value, gradient = unteach.LOSSES["match"].rows(logits, torch.tensor([0]), base, **hyper)
    assert_matches_exact(value, gradient, *exact("match", row, 0, base_row, **hyper))


@pytest.mark.parametrize(("name", "vocabulary"), [("nlul", 20_000), ("match", 4_000)])
def test_large_vocabulary_matches_mpmath(name, vocabulary):
    logits, labels, _, base = (x[1:2, 2:3] for x in batch(vocabulary, torch.float32))
    value, gradient = value_and_gradient(name, logits, labels, ONE[1], base)
    assert_matches_exact(value, gradient, *exact(name, logits.flatten().tolist(), int(labels), base.flatten().tolist()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "hyper"), EVERY_FORM)
def test_half_precision_input_stays_finite(name, hyper, dtype):
    rows = torch.tensor([[[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0], [60.0, 0.0, 0.0], [1.0, 2.0, 3.0]]], dtype=dtype)
    labels, mask = torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.bool)
    value, gradient = value_and_gradient(name, rows, labels, mask, rows.flip(1), **hyper)
    assert (value.dtype, gradient.dtype) == (torch.float32, dtype)
    assert value.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize(("name", "hyper"), EVERY_FORM)
def test_masked_positions_change_nothing_at_all(name, hyper):
    logits, labels, mask, base = batch(7)
    value, gradient = value_and_gradient(name, logits, labels, mask, base, **hyper)
    for wild in (float("nan"), float("inf"), -float("inf"), 1e30):
        wild_labels = labels.masked_fill(~mask, -100)
        wild_logits, wild_base = (x.masked_fill(~mask.unsqueeze(-1), wild) for x in (logits, base))
        wild_value, wild_gradient = value_and_gradient(name, wild_logits, wild_labels, mask, wild_base, **hyper)
        assert torch.equal(value, wild_value)
        assert torch.equal(gradient, wild_gradient)
        assert (wild_gradient[~mask] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_more_padding_changes_nothing(name):
    logits, labels, mask, base = batch(7)
    short = evaluated(name, *(x[:2] for x in (logits, labels, mask, base)))
    logits, base = (torch.nn.functional.pad(x, (0, 0, 0, 3, 0, 2)) for x in (logits, base))
    labels, mask = (torch.nn.functional.pad(x, (0, 3, 0, 2)) for x in (labels, mask))
    assert torch.equal(short, evaluated(name, logits, labels, mask, base))


def gradient_norm(name, probability, **hyper):
    """Norm in the logits of one token with p_y = ``probability`` among 100 otherwise equal words."""
    logits = torch.zeros(1, 1, 100, dtype=torch.float64)
    logits[..., 0] = math.log(99 * probability / (1 - probability))
    return value_and_gradient(name, logits, *ONE, logits, **hyper)[1].norm().item()


def test_nlul_pulls_hardest_where_ll_and_npo_vanish():
    memorised, forgotten = 1 - 1e-6, 1e-6
    assert gradient_norm("nlul", memorised) > 0.999 * math.sqrt(1 + 1 / 99)  # its largest value
    assert gradient_norm("ll", memorised) < 2e-6
    assert gradient_norm("npo", memorised) < 2e-6
    assert gradient_norm("nlul", forgotten) < 2e-6  # no explosion: it fades out ...
    assert gradient_norm("ll", forgotten) > 0.999  # ... where log-likelihood pulls for ever
    for probability in (1e-12, 1e-3, 0.1, 0.5, 0.9, 1 - 1e-12):
        assert gradient_norm("nlul", probability) <= math.sqrt(2) * probability * (1 + 1e-12)


def test_nlul_surrogate_has_the_gradient_of_log_of_one_plus_tolerance_minus_p():
    logits, labels, mask, base = batch(7)
    surrogate = value_and_gradient("nlul", logits, labels, mask, base, tolerance=0.02)[1]
    logits.requires_grad_()
    p = logits[mask].softmax(-1).gather(-1, labels[mask].unsqueeze(-1))
    (expected,) = torch.autograd.grad(-torch.log(1 + 0.02 - p).mean(), logits)
    torch.testing.assert_close(surrogate, expected, rtol=1e-10, atol=1e-15)
    assert gradient_norm("nlul", 1 - 1e-6, tolerance=0.02) < 1e-4  # the tolerance brings the vanishing gradient back


@pytest.mark.parametrize("ratio", ["sum", "mean"])
def test_npo_weighs_one_at_the_start_whatever_the_ratio(ratio):
    logits, labels, mask, _ = batch(7)
    npo = value_and_gradient("npo", logits, labels, mask, logits, ratio=ratio)[1]
    ll = value_and_gradient("ll", logits, labels, mask, logits)[1]
    torch.testing.assert_close(npo, ll, rtol=1e-10, atol=1e-15)


def test_ce_u_has_the_gradient_of_nlul_and_wga_that_of_a_power():
    logits, labels, mask, base = batch(7)
    gradient = {name: value_and_gradient(name, logits, labels, mask, base)[1] for name in ("nlul", "ce_u", "wga")}
    torch.testing.assert_close(gradient["ce_u"], gradient["nlul"], rtol=1e-12, atol=1e-16)
    logits.requires_grad_()
    p = logits[mask].softmax(-1).gather(-1, labels[mask].unsqueeze(-1))
    (of_power,) = torch.autograd.grad(p.mean(), logits)
    torch.testing.assert_close(gradient["wga"], of_power, rtol=1e-12, atol=1e-16)


def test_losses_with_a_goal_have_no_gradient_there():
    logits, labels, mask, base = batch(7)
    lowered = base - 10.0 * torch.nn.functional.one_hot(labels, 7)
    assert value_and_gradient("undial", lowered, labels, mask, base)[1].abs().max() < 1e-15
    flat = 0.1 * logits  # nearly uniform: more entropy than half of the largest
    assert value_and_gradient("clamped_entropy", flat, labels, mask, base)[1].abs().max() == 0
    certain = torch.zeros_like(logits).index_fill(-1, torch.tensor([3]), 40.0)
    value, gradient = value_and_gradient("jensun", certain, labels, mask, base, token=3)
    assert value < 1e-15
    assert gradient.abs().max() < 1e-15
    assert value_and_gradient("jensun", certain, labels, mask, base, token=2)[0] == pytest.approx(math.log(2))


def test_rmu_is_the_distance_to_one_direction_and_nothing_else():
    hidden, loss = torch.tensor([[3.0, 4.0], [1.0, 0.0]], dtype=torch.float64), unteach.LOSSES["rmu"].function
    draws = torch.rand(2, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    goal = 5 * draws / math.hypot(*draws.tolist())
    expected = sum((h - g) ** 2 for row in hidden.tolist() for h, g in zip(row, goal.tolist(), strict=True)) / 4
    assert loss(hidden, layer=1, coefficient=5.0, seed=7).item() == pytest.approx(expected, rel=1e-12)
    assert loss(goal.expand(3, 2), layer=1, coefficient=5.0, seed=7).item() == pytest.approx(0.0, abs=1e-20)
    assert loss(hidden.half(), layer=0).dtype == torch.float32
    assert unteach.LOSSES["rmu"].problems({}) == ["layer is missing: forget loss 'rmu' needs it"]
    with pytest.raises(ValueError, match="reads hidden states"):
        unteach.forget_loss("rmu", *batch(7)[:3], layer=1)


def test_match_with_a_base_of_even_odds_is_nlul_and_the_forward_divergence():
    logits, labels, mask, _ = batch(7)
    even = torch.zeros_like(logits).scatter(-1, labels.unsqueeze(-1), math.log(6))  # p_base(y) = ½, z_base = 0
    match, forward, nlul = (value_and_gradient(n, logits, labels, mask, even) for n in ("match", "it_forward", "nlul"))
    for i in (0, 1):
        torch.testing.assert_close(match[i], nlul[i] + forward[i], rtol=1e-12, atol=1e-15)


def test_match_pulls_at_both_ends_where_others_have_nothing_left():
    def norms(name, **hyper):
        rows = torch.zeros(1, 2, 100, dtype=torch.float64)
        rows[..., 0] = torch.tensor([math.log(99) + 15.0, math.log(99) - 10.0])  # z = 15 and z = -10
        base = torch.zeros_like(rows)
        base[..., 0] = rows[..., 0] - 20.0  # the base model gives the token e^-20 of these odds
        labels, mask = torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.bool)
        return (2 * value_and_gradient(name, rows, labels, mask, base, **hyper)[1][0]).norm(dim=-1).tolist()

    assert all(norm > 0.999 for norm in [*norms("match"), *norms("match", pull="gate"), *norms("match", pull="parity")])
    assert norms("nlul")[1] < 1e-4, "vanished where the token is unlikely"
    assert norms("it_forward")[1] < 1e-4
    assert norms("it")[0] < 1e-4, "vanished where it is memorised"


def test_a_slope_turns_the_goal_about_even_odds():
    # over two words the student's odds are 4 : 1, the base model's 1 : 16, so that the goal is √(1/16) = 1/4, times 2
    logits, base = (torch.tensor([[[math.log(odds), 0.0]]], dtype=torch.float64) for odds in (4, 1 / 16))
    hyper = {"pull": "gate", "margin": math.log(2), "slope": 0.5}
    value, gradient = value_and_gradient("match", logits, *ONE, base, **hyper)
    forward, towards = value_and_gradient("it_forward", logits, *ONE, base)
    assert value.item() - forward.item() == pytest.approx(math.log(4 / (2 / 4)), rel=1e-12)
    torch.testing.assert_close(gradient - towards, torch.tensor([[[1.0, -1.0]]], dtype=torch.float64))


@pytest.mark.parametrize(
    ("hyper", "low", "high"),
    [(GATE, -0.15, 0.02), (PARITY, -0.02, 0.02), ({}, -20.0, -1.0), (GATE | {"margin": 1.0}, 0, 1)],
)
def test_descent_on_match_ends_at_parity_by_the_gate_and_below_it_without(hyper, low, high):
    logits, base = (torch.tensor([r], dtype=torch.float64) for r in ([8.0, 0.0, 1.0, -1.0], [-2.0, 0.5, 1.0, -0.5]))
    label, rows = torch.tensor([0]), unteach.LOSSES["match"].rows
    for step in range(600):
        logits = logits - (0.1 if step < 300 else 0.005) * rows(logits, label, base, **hyper)[1]
    excess = token_log_odds(logits, label) - token_log_odds(base, label)
    assert low <= excess.item() <= high
    at_base = rows(base, label, base, **hyper)[1]
    assert at_base[0, 0].item() == (0.0 if "pull" in hyper else 0.5), "the base model itself is left alone, or not"


@pytest.mark.parametrize("name", [name for name, loss in unteach.LOSSES.items() if loss.reads == "log_odds"])
def test_log_odds_are_all_that_a_log_odds_loss_sees(name):
    logits, labels, mask, base = batch(7)

    def of_two_words(x):
        return torch.stack([token_log_odds(x.flatten(0, 1), labels.flatten()).view(3, 4), torch.zeros(3, 4)], -1)

    reduced = evaluated(name, of_two_words(logits), torch.zeros_like(labels), mask, of_two_words(base))
    torch.testing.assert_close(evaluated(name, logits, labels, mask, base), reduced, rtol=1e-12, atol=0)


def test_wrong_input_says_what_to_change():
    logits, labels, mask, base = batch(7)

    def problem(match, name="nlul", logits=logits, labels=labels, mask=mask, **extra):
        with pytest.raises(ValueError, match=match):
            unteach.forget_loss(name, logits, labels, mask, **extra)

    problem(f"unknown forget loss 'nlu': choose one of {', '.join(unteach.LOSSES)}", name="nlu")
    problem("mask has no True entry", mask=torch.zeros_like(mask))
    for name in ("npo", "it", "match"):
        problem("needs base_logits", name=name)
    short = base[..., :6]
    problem(r"base_logits has shape \[3, 4, 6\].*must be floating-point \[3, 4, 7\]", name="it", base_logits=short)
    problem(r"logits has shape \[4, 7\]", logits=logits[0])
    problem("vocabulary of 1", logits=logits[..., :1])
    problem("floating-point", logits=labels.unsqueeze(-1).expand(3, 4, 7))
    problem(r"mask has shape \[3, 3\]: it must be \[3, 4\]", mask=mask[:, :3])
    problem("use mask.bool", mask=mask.long())
    problem(r"labels has shape \[3, 3\]", labels=labels[:, :3])
    problem("use labels.long", labels=labels.int())
    problem("labels holds 7 at a real token: it must be 0 to 6", labels=torch.full_like(labels, 7))
    problem("labels holds -100 at a real token", labels=torch.full_like(labels, -100))
    problem("has no hyper-parameter 'beta': allowed are tolerance", beta=0.1)
    problem("has no hyper-parameter 'beta': allowed are none", name="ll", beta=0.1)
    problem("tolerance is -1: it must be zero or positive", tolerance=-1)
    problem("beta is 0: it must be positive", name="npo", base_logits=base, beta=0)
    problem("ratio is 'median': it must be 'sum' or 'mean'", name="npo", base_logits=base, ratio="median")
    problem("beta is 0: it must be positive", name="simnpo", beta=0)
    problem("beta is -1: it must be zero or positive", name="wga", beta=-1)
    problem("beta2 is -1: it must be zero or positive", name="satimp", beta2=-1)
    problem("threshold is 2: it must be above 0 and at most 1", name="clamped_entropy", threshold=2)
    problem("token is 7: it must be 0 to 6", name="jensun", token=7)
    problem("pull is 'hinge': it must be 'softplus', 'gate' or 'parity'", name="match", base_logits=base, pull="hinge")


def test_registry_entries_are_complete():
    for name, entry in (unteach.LOSSES | unteach.DIVERGENCES).items():
        assert entry.name == name
        assert entry.equation
        assert entry.function.__doc__
    assert unteach.LOSSES["npo"].hyper == {"beta": 0.1, "ratio": "sum"}
    assert {name for name in ("ll", "npo", "it", "nlul") if unteach.LOSSES[name].needs_base} == {"npo", "it"}
    assert not any(entry.needs_base for entry in unteach.DIVERGENCES.values())
