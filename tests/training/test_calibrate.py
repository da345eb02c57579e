"""What is measured before the first step: loss, gradient and curvature in every precision, and the rounding noise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from steps import held_to, pull_of
from tiny_models import tiny_model
from unteach.config import ForgetConfig, Method, Precision
from unteach.data import ForgetBatches
from unteach.errors import InputError
from unteach.method.vocab_head import Head
from unteach.models import trainable_parameters
from unteach.models.precision import resolved_precision
from unteach.training.calibrate import (
    SIGN_STEP_DIVERGENCE,
    TEACHER_WAY,
    Measured,
    calibrated,
    is_complete,
    measure,
    noise_warning,
    rounding_noise,
)
from unteach.training.passes import held_term, hidden_states
from unteach.training.step import accumulate

SEQUENCES = [list(range(1, 40)), list(range(5, 30)), list(range(3, 60)), list(range(100, 140))]
FORGET = ForgetBatches(SEQUENCES, 0)


class General:
    def batch(self, step: int, size: int) -> list[list[int]]:
        return [list(range(200, 160, -1)), list(range(60, 100)), list(range(150, 180)), list(range(9, 50))][:size]


def setting(precision: str, **numbers: Any) -> tuple[Any, list[torch.Tensor], ForgetConfig]:
    model = tiny_model("llama")
    config = ForgetConfig(
        model="",
        batch=4,
        general_batch=4,
        precision=Precision(forget=precision, divergence=precision),  # type: ignore[arg-type]
        method=Method(**numbers),
    )
    return model, list(trainable_parameters(model, "blocks").values()), config


def measured_in(precision: str) -> Measured:
    model, parameters, config = setting(precision)
    before = [p.detach().clone() for p in parameters]
    found = measure(model, parameters, FORGET, General(), config)  # type: ignore[arg-type]
    assert all(torch.equal(p, b) and p.grad is None for p, b in zip(parameters, before, strict=True))
    return found


@pytest.fixture(scope="module")
def in_fp32() -> Measured:
    return measured_in("fp32")


def test_float16_measures_nearly_the_same(in_fp32: Measured) -> None:
    found = measured_in("fp16")
    assert found.loss == pytest.approx(in_fp32.loss, rel=0.02)
    assert found.gradient_norm == pytest.approx(in_fp32.gradient_norm, rel=0.02)
    assert found.curvature == pytest.approx(in_fp32.curvature, rel=0.02)
    assert found != in_fp32


def test_a_gradient_beyond_float16_is_measured_with_a_smaller_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = measured_in("fp16")
    monkeypatch.setattr("unteach.training.step.loss_scale", lambda *args, **kwargs: 2.0**30)
    lowered = measured_in("fp16")
    assert lowered.gradient_norm == pytest.approx(usual.gradient_norm, rel=1e-3)


def noise_in(precision: str, **numbers: Any) -> tuple[float, float]:
    model, parameters, config = setting(precision, **numbers)
    before = [p.detach().clone() for p in parameters]
    found = rounding_noise(model, parameters, FORGET, General(), config)  # type: ignore[arg-type]
    assert all(torch.equal(p, b) and p.grad is None for p, b in zip(parameters, before, strict=True))
    return found


METHODS: dict[str, dict[str, Any]] = {
    "mean teacher": {"teacher_rate": 10.0, "damping": 1.0},
    "adamw": {"optimizer": "adamw"},
}


@pytest.mark.parametrize("name", METHODS)
def test_noise_is_none_in_fp32_and_some_in_fp16(name: str) -> None:
    numbers = {"alpha": 10.0, "lr": 1e-5, **METHODS[name]}
    exact, fp16 = (noise_in(precision, **numbers) for precision in ("fp32", "fp16"))
    assert exact[0] == 0
    assert 0 < fp16[0] < 0.1 * fp16[1]
    assert fp16[1] == pytest.approx(exact[1], rel=0.01)


def test_a_line_warns_where_rounding_exceeds_the_signal() -> None:
    def line(precision: str, alpha: float) -> str | None:  # the same way for any alpha
        model, parameters, config = setting(precision, alpha=alpha, lr=1 / alpha, teacher_rate=0.1 * alpha)
        return noise_warning(model, parameters, FORGET, General(), config)  # type: ignore[arg-type]

    small = line("fp16", 1e-3)
    assert small is not None
    assert small.startswith("warning: precision.divergence is fp16, whose rounding changes the gradient by ")
    assert small.endswith(": set it to fp32")
    assert "\n" not in small
    assert line("fp16", 100.0) is None
    assert line("fp32", 1e-3) is None
    assert line("auto", 1e-3) is None, "fp32 on a CPU"


@pytest.mark.parametrize(("noise", "warns"), [(2.0, True), (1.0, False), (float("nan"), True)])
def test_the_line_names_a_more_exact_precision(noise: float, warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unteach.training.calibrate.rounding_noise", lambda *arguments: (noise, 1.0))
    line = noise_warning(*setting("bf16")[:2], FORGET, General(), setting("bf16")[2])  # type: ignore[arg-type]
    assert (line is not None) == warns
    assert not warns or str(line).endswith(
        f"by {noise:.2g} where the signal of the first steps is 1: set it to fp16 or fp32"
    )


def test_auto_is_fp16_on_cuda_and_fp32_elsewhere() -> None:
    names = {kind: resolved_precision("auto", torch.device(kind)) for kind in ("cpu", "cuda", "mps")}
    assert names == {"cpu": "fp32", "cuda": "fp16", "mps": "fp32"}
    assert resolved_precision("bf16", torch.device("cuda")) == "bf16"


def test_numbers_that_are_given_stay() -> None:
    method = calibrated(
        Method(optimizer="mean_teacher", loss="nlul", token_share=0.25, loops_every=4, alpha=0.3, damping=2.0),
        Measured(loss=2.0, gradient_norm=4.0, curvature=1.0, distance=0.5),
        100,
    )
    assert (method.alpha, method.damping) == (0.3, 2.0)
    assert method.lr is not None
    assert method.teacher_rate is not None
    assert method.lr * method.teacher_rate == pytest.approx(0.05)


def test_what_is_missing_is_measured_and_what_cannot_be_is_named() -> None:
    assert not is_complete(
        Method(optimizer="mean_teacher", loss="nlul", token_share=0.25, loops_every=4, alpha=1.0, lr=0.1)
    )
    assert is_complete(
        Method(
            optimizer="mean_teacher",
            loss="nlul",
            token_share=0.25,
            loops_every=4,
            alpha=1.0,
            lr=0.1,
            teacher_rate=1.0,
            damping=0.0,
        )
    )
    assert is_complete(Method(loss="nlul", token_share=0.25, loops_every=4, optimizer="adamw", alpha=1.0, lr=0.1))
    measured = Measured(loss=2.0, gradient_norm=4.0, curvature=1.0, distance=0.5)
    with pytest.raises(InputError, match="give alpha too"):
        calibrated(
            Method(optimizer="mean_teacher", loss="nlul", token_share=0.25, loops_every=4, teacher_rate=0.0),
            measured,
            100,
        )
    frozen = calibrated(
        Method(optimizer="mean_teacher", loss="nlul", token_share=0.25, loops_every=4, teacher_rate=0.0, alpha=0.2),
        measured,
        100,
    )
    assert frozen.teacher_rate == 0.0
    assert is_complete(frozen)


@pytest.mark.parametrize(("wished", "damping_share"), [(40, 0.457), (100, 0.232)])
def test_the_rule(wished: int, damping_share: float) -> None:
    measured = Measured(loss=2.0, gradient_norm=4.0, curvature=3.0, distance=0.5)
    method = calibrated(
        Method(optimizer="mean_teacher", loss="nlul", token_share=0.25, loops_every=4), measured, wished
    )
    alpha, lr, rate, damping = (float(getattr(method, n)) for n in ("alpha", "lr", "teacher_rate", "damping"))
    effective = damping + (1 - method.momentum) * rate / (1 - lr * rate)
    assert lr * rate == pytest.approx(5 / wished)
    assert lr * measured.curvature == pytest.approx(0.4 * (1 - method.momentum))
    assert effective / measured.curvature == pytest.approx(damping_share, abs=1e-3)
    assert wished * lr * rate * alpha * measured.gradient_norm / effective == pytest.approx(
        TEACHER_WAY * measured.distance
    )


def test_the_numbers_follow_a_scaling_of_the_weights() -> None:
    measured = Measured(loss=2.0, gradient_norm=4.0, curvature=3.0, distance=0.5)
    scaled = Measured(
        loss=2.0, gradient_norm=4.0 / 7, curvature=3.0 / 7**2, distance=0.5 * 7
    )  # weights 7 times as large
    plain, larger = (
        calibrated(Method(optimizer="mean_teacher", loss="nlul", token_share=0.25, loops_every=4), m, 100)
        for m in (measured, scaled)
    )
    assert larger.alpha == pytest.approx(plain.alpha)
    assert larger.lr == pytest.approx(7**2 * (plain.lr or 0))
    assert larger.teacher_rate == pytest.approx((plain.teacher_rate or 0) / 7**2)
    assert larger.damping == pytest.approx((plain.damping or 0) / 7**2)


def test_the_norm_is_the_product_of_two_halves_and_adamw_steps_by_a_measured_divergence() -> None:
    """Independent halves: the noise of a mini-batch, which a square would count as signal, cancels in their product."""
    model, parameters, config = setting("fp32", optimizer="adamw", loss="ll")
    found = measure(model, parameters, FORGET, General(), config)  # type: ignore[arg-type]
    sequences = [FORGET.sequences[n] for n in FORGET.numbers(0, 8)]

    def gradient(part: list[list[int]]) -> torch.Tensor:
        pull = pull_of(part)
        accumulate(model, parameters, [pull], [], 1.0, config)
        flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        for p in parameters:
            p.grad = None
        return flat

    halves = gradient(sequences[::2]), gradient(sequences[1::2])
    product = float(halves[0].double() @ halves[1].double())
    assert product > 0
    assert found.gradient_norm == pytest.approx(math.sqrt(product), rel=1e-5)

    chunks = General().batch(0, 4)
    with torch.no_grad():
        before = hidden_states(model, chunks)[0]
        step = torch.split((halves[0] + halves[1]).sign(), [p.numel() for p in parameters])
        for p, part in zip(parameters, step, strict=True):
            p.sub_(part.view_as(p), alpha=found.sign_step)
        moved = float(held_term(model, held_to(chunks, "kl", before, Head.of(model)), 0)[0])
    assert moved == pytest.approx(SIGN_STEP_DIVERGENCE, rel=0.2), "the divergence is nearly quadratic"
