"""Algorithms 1 and 2 of the paper, line by line, over a list of tensors: what MeanTeacher must equal."""

import math


class ReferenceMeanTeacher:
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
