"""The losses, divergences and the optimizer written a second time, straight from their definitions, to test against.

``naive_*`` are plain torch (meant for float64 and ordinary logits, differentiated by autograd). ``exact_*`` are mpmath
with as many digits as the logits need, value and closed-form gradient of one row, for the extremes.
"""

import functools
import math

import mpmath
import torch

import unteach


def evaluated(name, logits, labels, mask, other, **hyper):
    """A forget loss or a divergence by its name; ``other`` are the base model's or the teacher's logits."""
    if name in unteach.DIVERGENCES:
        return unteach.divergence(name, logits, other, mask)
    extra = {"base_logits": other} if unteach.LOSSES[name].needs_base else {}
    return unteach.forget_loss(name, logits, labels, mask, **extra, **hyper)


def value_and_gradient(name, logits, *others, **hyper):
    logits = logits.clone().requires_grad_()
    value = evaluated(name, logits, *others, **hyper)
    return value.detach(), torch.autograd.grad(value, logits)[0]


def token_log_probs(logits, labels):
    return logits.softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1).log()


def token_mean(values, mask):
    return sum(value for value, real in zip(values.flatten(), mask.flatten(), strict=True) if real) / mask.sum()


def naive_ll(logits, labels, mask):
    return token_mean(token_log_probs(logits, labels), mask)


def naive_nlul(logits, labels, mask):
    return token_mean(-torch.log(1 - token_log_probs(logits, labels).exp()), mask)


def naive_npo(logits, labels, mask, base_logits, beta=0.1, ratio="sum"):
    log_ratio = token_log_probs(logits, labels) - token_log_probs(base_logits, labels)
    total = 0.0
    for row, real in zip(log_ratio, mask, strict=True):
        if real.any():
            length = 1 if ratio == "sum" else int(real.sum())
            total = total - 2 / beta * length * torch.log(torch.sigmoid(-beta * row[real].sum() / length))
    return total / mask.sum()


def naive_kl(logits, teacher_logits, mask):
    p, q = logits.softmax(-1), teacher_logits.softmax(-1)
    return token_mean((p * (p.log() - q.log())).sum(-1), mask)


def naive_quadratic(difference, probabilities):
    """dᵀ (Diag(p) - p pᵀ) d, written with the matrix while that is small enough to hold."""
    if probabilities.shape[-1] > 2_000:
        return (probabilities * difference**2).sum(-1) - (probabilities * difference).sum(-1) ** 2
    matrix = torch.diag_embed(probabilities) - probabilities.unsqueeze(-1) * probabilities.unsqueeze(-2)
    return (difference.unsqueeze(-2) @ matrix @ difference.unsqueeze(-1)).squeeze(-1).squeeze(-1)


def naive_match(logits, labels, mask, base_logits, pull="softplus", margin=0.0, slope=1.0):
    odds, base_odds = (p / (1 - p) for p in (token_log_probs(h, labels).exp() for h in (logits, base_logits)))
    excess = torch.log(odds) - (slope * torch.log(base_odds) + margin)
    pulls = {"softplus": lambda x: torch.log(1 + x.exp()), "gate": lambda x: x * (x > 0)}
    pulled = pulls.get(pull, lambda x: (1 + x**2).sqrt() - 1)(excess)
    return token_mean(pulled, mask) + naive_kl(base_logits, logits, mask)


def naive_simnpo(logits, labels, mask, beta=4.5, delta=0.0):
    log_p, total = token_log_probs(logits, labels), 0.0
    for row, real in zip(log_p, mask, strict=True):
        if real.any():
            total = total + 2 / beta * int(real.sum()) * torch.log1p((beta * (row[real].mean() + delta)).exp())
    return total / mask.sum()


def naive_satimp(logits, labels, mask, beta1=5.0, beta2=1.0):
    log_p = token_log_probs(logits, labels)
    p = log_p.exp().detach()
    return token_mean(p**beta1 * (1 - p) ** beta2 * log_p, mask)


def cross_entropy(target, logits, mask):
    return token_mean(-(target * logits.softmax(-1).log()).sum(-1), mask)


def naive_ce_u(logits, labels, mask):
    others = logits.detach().softmax(-1).scatter(-1, labels.unsqueeze(-1), 0.0)
    return cross_entropy(others / others.sum(-1, keepdim=True), logits, mask)


def naive_undial(logits, labels, mask, base_logits, beta=10.0):
    one = torch.nn.functional.one_hot(labels, logits.shape[-1])
    return cross_entropy((base_logits - beta * one).softmax(-1), logits, mask)


def naive_clamped_entropy(logits, labels, mask, threshold=0.5):
    p = logits.softmax(-1)
    entropy = -(p * p.log()).sum(-1)
    return token_mean((threshold * math.log(logits.shape[-1]) - entropy).relu(), mask)


def naive_js(logits, teacher_logits, mask):
    p, q = logits.softmax(-1), teacher_logits.softmax(-1)
    m = (p + q) / 2
    return token_mean((p * (p / m).log() + q * (q / m).log()).sum(-1) / 2, mask)


def naive_jensun(logits, labels, mask, token=0):
    p = logits.softmax(-1)
    e = torch.nn.functional.one_hot(torch.tensor(token), logits.shape[-1]).to(p.dtype)
    m = (p + e) / 2
    return token_mean(((p * (p / m).log()).sum(-1) - m[..., token].log()) / 2, mask)


def naive_dpo(document, alternate, beta=0.1):
    """Of two batches (logits, labels, mask, base_logits) whose sequences are pairs, differentiated as a whole."""
    ratios = []
    for logits, labels, mask, base_logits in (document, alternate):
        log_p, log_base = (h.log_softmax(-1).gather(-1, labels[..., None])[..., 0] for h in (logits, base_logits))
        ratios.append(torch.where(mask, log_p - log_base, 0.0).sum(1))
    against = beta * (ratios[0] - ratios[1])
    return (2 / beta * torch.logaddexp(against, torch.zeros_like(against))).sum() / document[2].sum()


NAIVE_LOSSES = {
    "ll": naive_ll,
    "npo": naive_npo,
    "it": lambda logits, labels, mask, base_logits: naive_kl(logits, base_logits, mask),
    "it_forward": lambda logits, labels, mask, base_logits: naive_kl(base_logits, logits, mask),
    "nlul": naive_nlul,
    "match": naive_match,
    "simnpo": naive_simnpo,
    "wga": lambda logits, labels, mask, beta=1.0: naive_satimp(logits, labels, mask, beta, 0.0),
    "satimp": naive_satimp,
    "ce_u": naive_ce_u,
    "undial": naive_undial,
    "clamped_entropy": naive_clamped_entropy,
    "jensun": naive_jensun,
}
NAIVE_DIVERGENCES = {
    "kl": naive_kl,
    "kl_reverse": lambda h, t, mask: naive_kl(t, h, mask),
    "qkl": lambda h, t, mask: token_mean(naive_quadratic(h - t, h.softmax(-1)), mask),
    "qkl_frozen": lambda h, t, mask: token_mean(0.5 * naive_quadratic(h - t, t.softmax(-1)), mask),
    "js": naive_js,
}


def naive(name, logits, labels, mask, other, **hyper):
    if name in NAIVE_DIVERGENCES:
        return NAIVE_DIVERGENCES[name](logits, other, mask)
    extra = {"base_logits": other} if unteach.LOSSES[name].needs_base else {}
    return NAIVE_LOSSES[name](logits, labels, mask, **extra, **hyper)


def enough_digits(*rows):
    """Digits to hold 1 - p when p differs from 1 by exp(-spread of the logits)."""
    spread = max(max(row) - min(row) for row in rows)
    return 40 + int(spread / 2.3)


def exact_probabilities(row):
    weights = [mpmath.exp(mpmath.mpf(h)) for h in row]
    total = mpmath.fsum(weights)
    return [w / total for w in weights]


def exact(name, row, label, other_row, **hyper):
    """Value and gradient of one row with its label, or beside a teacher's or a base model's row."""
    return _exact(name, tuple(row), label, tuple(other_row), tuple(hyper.items()))


@functools.cache  # thousands of digits for the widest rows, and each is asked for in two precisions
def _exact(name, row, label, base_row, hyper):
    if name in unteach.DIVERGENCES or name in ("it", "it_forward"):
        return exact_divergence({"it": "kl", "it_forward": "kl_reverse"}.get(name, name), row, base_row)
    hyper = dict(hyper)
    if name in EXACT_FIELD:
        with mpmath.workdps(enough_digits(row, base_row)):
            return EXACT_FIELD[name](exact_probabilities(row), label, base_row, **hyper)
    hyper = {"beta": 0.1, "pull": "softplus", "margin": 0.0, "slope": 1.0} | hyper
    with mpmath.workdps(enough_digits(row, base_row)):
        p = exact_probabilities(row)
        indicator = [mpmath.mpf(int(j == label)) for j in range(len(row))]
        log_prob_gradient = [e - pj for e, pj in zip(indicator, p, strict=True)]
        if name == "ll":
            return mpmath.log(p[label]), log_prob_gradient
        if name == "nlul":
            weight = p[label] / (1 - p[label])
            return -mpmath.log(1 - p[label]), [weight * g for g in log_prob_gradient]
        if name == "npo":
            beta = hyper["beta"]
            ratio = p[label] / exact_probabilities(base_row)[label]
            sigmoid = 1 / (1 + ratio**beta)
            return -2 / mpmath.mpf(beta) * mpmath.log(sigmoid), [2 * (1 - sigmoid) * g for g in log_prob_gradient]
        q = exact_probabilities(base_row)
        goal = hyper["slope"] * mpmath.log(q[label] / (1 - q[label])) + hyper["margin"]
        excess = mpmath.log(p[label] / (1 - p[label])) - goal
        odds = mpmath.exp(excess)
        pulled, strength = mpmath.log(1 + odds), odds / (1 + odds)
        if hyper["pull"] == "gate":
            pulled, strength = max(excess, mpmath.mpf(0)), mpmath.mpf(int(excess > 0))
        elif hyper["pull"] == "parity":
            root = mpmath.sqrt(1 + excess**2)
            pulled, strength = root - 1, excess / root
        value, gradient = exact_divergence("kl_reverse", row, base_row)
        away = [1 if j == label else -pj / (1 - p[label]) for j, pj in enumerate(p)]
        return value + pulled, [g + strength * a for g, a in zip(gradient, away, strict=True)]


def log_prob_gradient(p, label):
    return [int(j == label) - pj for j, pj in enumerate(p)]


def exact_simnpo(p, label, base_row, beta=4.5, delta=0.0):
    odds = (p[label] * mpmath.exp(delta)) ** beta
    weight = 2 * odds / (1 + odds)
    return 2 / mpmath.mpf(beta) * mpmath.log1p(odds), [weight * g for g in log_prob_gradient(p, label)]


def exact_satimp(p, label, base_row, beta1=5.0, beta2=1.0):
    weight = p[label] ** beta1 * (1 - p[label]) ** beta2
    return weight * mpmath.log(p[label]), [weight * g for g in log_prob_gradient(p, label)]


def exact_cross_entropy(target, p):
    value = -mpmath.fsum(t * mpmath.log(pj) for t, pj in zip(target, p, strict=True))
    return value, [pj - t for pj, t in zip(p, target, strict=True)]


def exact_ce_u(p, label, base_row):
    return exact_cross_entropy([0 if j == label else pj / (1 - p[label]) for j, pj in enumerate(p)], p)


def exact_undial(p, label, base_row, beta=10.0):
    lowered = [mpmath.mpf(h) - (beta if j == label else 0) for j, h in enumerate(base_row)]
    return exact_cross_entropy(exact_probabilities(lowered), p)


def exact_clamped_entropy(p, label, base_row, threshold=0.5):
    entropy = -mpmath.fsum(pj * mpmath.log(pj) for pj in p)
    missing = threshold * mpmath.log(len(p)) - entropy
    if missing <= 0:
        return mpmath.mpf(0), [mpmath.mpf(0) for _ in p]
    return missing, [pj * (mpmath.log(pj) + entropy) for pj in p]


def exact_jensun(p, label, base_row, token=0):
    middle = [(pj + (j == token)) / 2 for j, pj in enumerate(p)]
    value = (
        mpmath.fsum(pj * mpmath.log(pj / m) for pj, m in zip(p, middle, strict=True)) - mpmath.log(middle[token])
    ) / 2
    slope = p[token] * mpmath.log(p[token] / (1 + p[token])) / 2
    return value, [slope * g for g in log_prob_gradient(p, token)]


def exact_dpo(log_ratio, alternate, beta):
    """The loss of a pair and its slopes in both log-ratios."""
    with mpmath.workdps(40 + int(abs(beta * (alternate - log_ratio)) / 2)):
        odds = mpmath.exp(mpmath.mpf(beta) * (mpmath.mpf(log_ratio) - mpmath.mpf(alternate)))
        weight = 2 * odds / (1 + odds)
        return 2 / mpmath.mpf(beta) * mpmath.log1p(odds), [weight, -weight]


EXACT_FIELD = {
    "simnpo": exact_simnpo,
    "wga": lambda p, label, base_row, beta=1.0: exact_satimp(p, label, base_row, beta, 0.0),
    "satimp": exact_satimp,
    "ce_u": exact_ce_u,
    "undial": exact_undial,
    "clamped_entropy": exact_clamped_entropy,
    "jensun": exact_jensun,
}


def exact_divergence(name, row, teacher_row):
    with mpmath.workdps(enough_digits(row, teacher_row)):
        p, q = exact_probabilities(row), exact_probabilities(teacher_row)
        log_ratio = [mpmath.log(a / b) for a, b in zip(p, q, strict=True)]
        difference = [mpmath.mpf(a) - mpmath.mpf(b) for a, b in zip(row, teacher_row, strict=True)]

        def expectation(weights, values):
            return mpmath.fsum(w * v for w, v in zip(weights, values, strict=True))

        if name == "kl":
            value = expectation(p, log_ratio)
            return value, [pj * (r - value) for pj, r in zip(p, log_ratio, strict=True)]
        if name == "kl_reverse":
            return -expectation(q, log_ratio), [pj - qj for pj, qj in zip(p, q, strict=True)]
        if name == "js":
            middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
            above, below = ([mpmath.log(a / m) for a, m in zip(x, middle, strict=True)] for x in (p, q))
            towards = expectation(p, above)
            return (towards + expectation(q, below)) / 2, [a * (u - towards) / 2 for a, u in zip(p, above, strict=True)]
        weights = p if name == "qkl" else q
        mean = expectation(weights, difference)
        centred = [d - mean for d in difference]
        variance = expectation(weights, [c * c for c in centred])
        if name == "qkl":
            return variance, [pj * (2 * c + c * c - variance) for pj, c in zip(p, centred, strict=True)]
        return variance / 2, [qj * c for qj, c in zip(q, centred, strict=True)]


RELATIVE = {torch.float64: 1e-10, torch.float32: 1e-5}


def assert_matches_exact(value, gradient, exact_value, exact_gradient, absolute=0.0, in_gradient=0.0):
    """Compare with mpmath, relative to the value and to the gradient's norm; below the dtype's range is zero.

    ``absolute`` and ``in_gradient``: as many roundings of 1 are allowed in the value and the gradient besides.
    """
    tolerance, smallest = RELATIVE[value.dtype], torch.finfo(value.dtype).tiny
    allowed, in_norm = (4 * smallest + n * torch.finfo(value.dtype).eps for n in (absolute, in_gradient))
    with mpmath.workdps(40):
        assert abs(mpmath.mpf(value.item()) - exact_value) <= tolerance * abs(exact_value) + allowed
        gap = mpmath.norm([mpmath.mpf(g) - e for g, e in zip(gradient.flatten().tolist(), exact_gradient, strict=True)])
        assert gap <= tolerance * mpmath.norm(exact_gradient) + in_norm


# Rows (logits, other logits) of the extremes; the label is entry 0.
EXTREME_ROWS = {
    "1 - p is zero in float32": ([30.0, 0.0, -1.0, 2.0], [29.0, 0.5, -1.0, 1.0]),
    "1 - p is zero in float64": ([60.0, 0.0, -1.0, 2.0], [59.0, 0.5, -1.0, 1.0]),
    "p goes to zero": ([-70.0, 0.0, 1.0, 0.5], [-60.0, 0.0, 1.0, 0.25]),
    "p is certain of another token": ([-50.0, 40.0, 1.0, 0.5], [-40.0, 41.0, 1.0, 0.25]),
    "logits of 1e4, certain": ([1e4, -1e4, 0.0, 1.0], [0.5, 1.0, 0.0, 1.0]),
    "logits of -1e4": ([-1e4, 1e4, 0.0, 1.0], [0.5, 1.0, 0.0, 1.0]),
    "all logits large, nearly equal": ([10000.0, 9999.5, 9990.0, 9985.25], [10000.25, 9999.5, 9990.5, 9985.25]),
    "both certain, of different tokens": ([1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]),
    "vocabulary of 2": ([0.25, -0.5], [-1.0, 0.125]),
    "vocabulary of 2, memorised": ([45.0, -45.0], [20.0, -20.0]),
    "vocabulary of 2, forgotten": ([-45.0, 35.0], [20.0, -20.0]),
    "student next to the teacher": ([1.0, 2.0, 0.5, -1.0], [1.0, 2.0 + 2.0**-12, 0.5 - 2.0**-13, -1.0]),
    "student is the teacher": ([1.0, 2.0, 0.5, -1.0], [1.0, 2.0, 0.5, -1.0]),
}
# Two models with almost the same log-odds of a token, all of them large: of the difference nothing may be rounded away.
PARITY_ROWS = {
    "both certain of it at 1e4": ([1e4, 0.0, -1.0, 2.0], [9999.5, 0.5, -1.0, 1.0]),
    "both certain of another at 1e4": ([-1e4, 0.0, -1.0, 2.0], [-9999.0, 0.5, -1.0, 1.0]),
    "one 1e4 above the other": ([10003.0, 10000.0, 9999.5, 9998.0], [2.5, 0.0, -0.5, -1.0]),
}


class ReferenceMeanTeacher:
    """Algorithms 1 and 2 of the paper, line by line, over a list of tensors: what MeanTeacher must equal."""

    def __init__(self, theta, lr, momentum, teacher_rate, damping, clip):
        self.theta = [t.clone() for t in theta]
        self.teacher = [t.clone() for t in theta]  # Initialize reference θ'_0 := θ_0
        self.v = [0 * t for t in theta]  # Initialize momentum v = 0
        self.eta, self.mu, self.kappa, self.lam, self.c = lr, momentum, teacher_rate, damping, clip

    def step(self, g):
        # g_t = ∇{αL + D}; scaling factor after clipping, "κ ← κ / max(‖g‖ / c, 1)": l = min(1, c / ‖g‖)
        norm = math.sqrt(sum(float((x.double() ** 2).sum()) for x in g))
        factor = 1.0 if self.c is None else min(1.0, self.c / norm)
        for i in range(len(self.theta)):
            # v ← μ v + l (g + λ (θ - θ'))
            self.v[i] = self.mu * self.v[i] + factor * (g[i] + self.lam * (self.theta[i] - self.teacher[i]))
            # θ_t ← θ_{t-1} - η v
            self.theta[i] = self.theta[i] - self.eta * self.v[i]
            # θ'_t ← (1 - l η κ) θ'_{t-1} + l η κ θ_t
            share = factor * self.eta * self.kappa
            self.teacher[i] = (1 - share) * self.teacher[i] + share * self.theta[i]
        return norm, factor
