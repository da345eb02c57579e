"""What is measured before the first step: loss, gradient and curvature in every precision, and the rounding noise."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

import unteach
from steps import mean_teacher, pull_of
from tiny_models import tiny_model
from unteach.config import ForgetConfig, Method, Precision
from unteach.corpora import micro
from unteach.data import ForgetBatches
from unteach.errors import InputError
from unteach.method.vocab_head import Head
from unteach.models import load_model, load_tokenizer, trainable_parameters
from unteach.models.precision import resolved_precision
from unteach.training import calibrate
from unteach.training.calibrate import Measured, calibrated, is_complete
from unteach.training.passes import hidden_states
from unteach.training.step import accumulate

FORGET = ForgetBatches([list(range(1, 40)), list(range(5, 30)), list(range(3, 60)), list(range(100, 140))], 0)
CHUNKS = [list(range(200, 160, -1)), list(range(60, 100)), list(range(150, 180)), list(range(9, 50))]
GENERAL = SimpleNamespace(batch=lambda step, size: CHUNKS[:size])
MEASURED = Measured(loss=2.0, gradient_norm=4.0, curvature=3.0, distance=0.5)
UNKNOWN = mean_teacher(alpha=None, lr=None, teacher_rate=None, damping=None)


def setting(precision, **numbers):
    model = tiny_model("llama")
    both = Precision(forget=precision, divergence=precision)
    config = ForgetConfig(model="", batch=4, general_batch=4, precision=both, method=Method(**numbers))
    return model, list(trainable_parameters(model, "blocks").values()), config


def found_by(function, precision, **numbers):
    """What a function of ``calibrate`` finds; it leaves the model as it was."""
    model, parameters, config = setting(precision, **numbers)
    before = [p.detach().clone() for p in parameters]
    found = function(model, parameters, FORGET, GENERAL, config)
    assert all(torch.equal(p, b) and p.grad is None for p, b in zip(parameters, before, strict=True))
    return found


def test_float16_measures_nearly_the_same_even_where_its_scale_must_be_lowered(monkeypatch):
    exact, usual = (found_by(calibrate.measure, precision) for precision in ("fp32", "fp16"))
    assert usual != exact
    for name in ("loss", "gradient_norm", "curvature"):
        assert getattr(usual, name) == pytest.approx(getattr(exact, name), rel=0.02)
    monkeypatch.setattr("unteach.training.step.loss_scale", lambda *args, **kwargs: 2.0**30)
    lowered = found_by(calibrate.measure, "fp16")
    assert lowered.gradient_norm == pytest.approx(usual.gradient_norm, rel=1e-3)


def test_bfloat16_measures_the_curvature_far_above_its_rounding(monkeypatch):
    """Of a model that has learned something; with the step that suits float32 rounding is measured, too."""
    model, tokenizer = load_model("micro:target", device=torch.device("cpu"))[0], load_tokenizer("micro:target")
    forget, general = (
        [tokenizer(t)["input_ids"][:64] for t in micro.documents(part)[:4]] for part in ("forget", "general")
    )
    parameters = list(trainable_parameters(model, "blocks").values())

    def curvature(divergence):
        config = ForgetConfig(
            model="", batch=2, precision=Precision(divergence=divergence), method=Method(token_share=1.0)
        )
        texts = SimpleNamespace(batch=lambda step, size: general)
        return calibrate.measure(model, parameters, ForgetBatches(forget, 0), texts, config).curvature

    exact = curvature("fp32")
    assert curvature("bf16") == pytest.approx(exact, rel=0.1)
    monkeypatch.setattr(calibrate, "IN_BF16", calibrate.SMALLEST_DIVERGENCE)
    monkeypatch.setattr(calibrate, "resolved_precision", lambda name, device: "fp32")  # as if it were exact
    assert curvature("bf16") > 1.4 * exact


def test_curvatures_are_those_of_the_hessian():
    """Of one weight of 32 numbers, whose whole Hessian can be had."""
    model, _, config = setting("fp32")
    weight = model.double().model.norm.weight
    for p in model.parameters():
        p.requires_grad_(p is weight)
    with torch.no_grad():
        before, head = hidden_states(model, CHUNKS)[0], Head.of(model)

    def divergence(values):
        logits = [torch.nn.functional.linear(h, head.weight) for h in (before * (values / weight.detach()), before)]
        return unteach.divergence("kl", logits[0][None], logits[1][None], torch.ones(1, len(before), dtype=torch.bool))

    slope = torch.autograd.functional.jacobian  # of the gradient: the divergence is differentiable once
    step, start = 1e-5, weight.detach().clone()
    rows = [
        (slope(divergence, start + step * e) - slope(divergence, start - step * e)) / (2 * step)
        for e in torch.eye(len(start), dtype=torch.float64)
    ]
    hessian = torch.stack(rows)
    along, largest = calibrate.curvatures(model, [weight], GENERAL, config)
    way = torch.randn(32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert along == pytest.approx(float(way @ hessian @ way / way.norm() ** 2), rel=0.05)
    assert largest == pytest.approx(float(torch.linalg.eigvalsh(hessian)[-1]), rel=0.02)
    assert torch.equal(weight.detach(), start)


@pytest.mark.parametrize("numbers", [{"teacher_rate": 10.0, "damping": 1.0}, {"optimizer": "adamw"}])
def test_noise_is_none_in_fp32_and_some_in_fp16(numbers):
    numbers = {"alpha": 10.0, "lr": 1e-5, **numbers}
    exact, fp16 = (found_by(calibrate.rounding_noise, precision, **numbers) for precision in ("fp32", "fp16"))
    assert exact[0] == 0
    assert 0 < fp16[0] < 0.1 * fp16[1]
    assert fp16[1] == pytest.approx(exact[1], rel=0.01)


def test_a_line_warns_where_rounding_exceeds_the_signal():
    def line(precision, alpha):  # the same way for any alpha
        numbers = {"alpha": alpha, "lr": 1 / alpha, "teacher_rate": 0.1 * alpha}
        return found_by(calibrate.noise_warning, precision, **numbers)

    small = line("fp16", 1e-3)
    assert small.startswith("warning: precision.divergence is fp16, whose rounding changes the gradient by ")
    assert small.endswith(": set it to fp32, or divergence_form to tangent")
    assert "\n" not in small
    assert line("fp16", 100.0) is None
    assert line("fp32", 1e-3) is None
    assert line("auto", 1e-3) is None, "fp32 on a CPU"


@pytest.mark.parametrize(("noise", "warns"), [(2.0, True), (1.0, False), (float("nan"), True)])
def test_the_line_names_a_more_exact_precision(noise, warns, monkeypatch):
    monkeypatch.setattr(calibrate, "rounding_noise", lambda *arguments: (noise, 1.0))
    line = found_by(calibrate.noise_warning, "bf16")
    assert (line is not None) == warns
    remedy = "set it to fp16 or fp32, or divergence_form to tangent"
    assert not warns or line.endswith(f"by {noise:.2g} where the signal of the first steps is 1: {remedy}")


def test_auto_is_fp16_on_cuda_and_fp32_elsewhere():
    names = {kind: resolved_precision("auto", torch.device(kind)) for kind in ("cpu", "cuda", "mps")}
    assert names == {"cpu": "fp32", "cuda": "fp16", "mps": "fp32"}
    assert resolved_precision("bf16", torch.device("cuda")) == "bf16"


def test_numbers_that_are_given_stay_what_is_missing_is_measured_and_what_cannot_be_is_named():
    assert is_complete(mean_teacher())
    assert is_complete(dataclasses.replace(UNKNOWN, optimizer="adamw", alpha=1.0, lr=0.1))
    given = dataclasses.replace(UNKNOWN, alpha=0.3, damping=2.0)
    assert not is_complete(given)
    method = calibrated(given, MEASURED, 100)
    assert (method.alpha, method.damping) == (0.3, 2.0)
    assert method.lr * method.teacher_rate == pytest.approx(0.05)
    frozen = dataclasses.replace(UNKNOWN, teacher_rate=0.0)
    with pytest.raises(InputError, match="give alpha too"):
        calibrated(frozen, MEASURED, 100)
    frozen = calibrated(dataclasses.replace(frozen, alpha=0.2), MEASURED, 100)
    assert frozen.teacher_rate == 0.0
    assert is_complete(frozen)


@pytest.mark.parametrize(("wished", "damping_share"), [(40, 0.457), (100, 0.232)])
def test_the_rule(wished, damping_share):
    method = calibrated(UNKNOWN, MEASURED, wished)
    lr, rate, slide = method.lr, method.teacher_rate, method.lr * method.teacher_rate
    effective = method.damping + (1 - method.momentum) * rate / (1 - slide)
    assert slide == pytest.approx(5 / wished)
    assert lr * MEASURED.curvature == pytest.approx(0.4 * (1 - method.momentum))
    assert effective / MEASURED.curvature == pytest.approx(damping_share, abs=1e-3)
    way = wished * slide * method.alpha * MEASURED.gradient_norm / effective
    assert way == pytest.approx(calibrate.TEACHER_WAY * MEASURED.distance)


def test_the_numbers_follow_a_scaling_of_the_weights():
    """Weights 7 times as large."""
    scaled = Measured(loss=2.0, gradient_norm=4.0 / 7, curvature=3.0 / 7**2, distance=0.5 * 7)
    plain, larger = (calibrated(UNKNOWN, measured, 100) for measured in (MEASURED, scaled))
    assert larger.alpha == pytest.approx(plain.alpha)
    assert larger.lr == pytest.approx(7**2 * plain.lr)
    assert larger.teacher_rate == pytest.approx(plain.teacher_rate / 7**2)
    assert larger.damping == pytest.approx(plain.damping / 7**2)


def test_the_norm_is_the_product_of_two_halves_and_the_size_of_weights_is_that_of_matrices():
    """Independent halves: the noise of a mini-batch, which a square would count as signal, cancels in their product."""
    model, parameters, config = setting("fp32", optimizer="adamw", loss="ll")
    found = calibrate.measure(model, parameters, FORGET, GENERAL, config)
    sequences = [FORGET.sequences[n] for n in FORGET.numbers(0, 8)]

    def gradient(part):
        accumulate(model, parameters, [pull_of(part)], [], 1.0, config)
        return torch.cat([p.grad.flatten() for p in parameters])

    halves = gradient(sequences[::2]), gradient(sequences[1::2])
    product = float(halves[0].double() @ halves[1].double())
    assert product > 0
    assert found.gradient_norm == pytest.approx(math.sqrt(product), rel=1e-5)
    matrices = torch.cat([p.detach().double().flatten() for p in parameters if p.dim() > 1])
    assert found.weight == pytest.approx(float(matrices.square().mean().sqrt()), rel=1e-5)


def test_adamw_moves_weights_by_a_share_of_their_size_and_less_and_less():
    found = calibrate.Measured(1.0, 1.0, 1.0, 1.0, weight=0.2)
    chosen = calibrate.calibrated(Method(optimizer="adamw", loss="match"), found, 100)
    assert (chosen.lr, chosen.optimizer_options) == (pytest.approx(1.1e-3), {"cooldown": 150})
    assert calibrate.calibrated(Method(optimizer="adamw"), found, 400).optimizer_options == {"cooldown": 400}
    line = calibrate.numbers(chosen, found)
    assert line.endswith("; alpha is 0.2"), "which nobody measured"
    assert f"weights of size {found.weight:.3g}; so lr {chosen.lr:.3g};" in line
    own = calibrate.calibrated(Method(optimizer="adamw", optimizer_options={"cooldown": 0}), found, 100)
    assert own.optimizer_options == {"cooldown": 0}
    given = calibrate.calibrated(Method(optimizer="adamw", lr=1e-5), found, 100)
    assert (given.lr, given.optimizer_options) == (1e-5, {}), "a rate that is given stays as it is"
