"""``divergence_form`` tangent: its gradient against float64 definitions, in bf16, over whole runs, and its limits."""

import copy
import dataclasses
import json

import pytest
import torch

from definitions import naive
from faults.small_run import make_inputs, paused_run, result_of, run
from steps import FORGET, GENERAL, mean_teacher
from tiny_models import small_tokenizer, tiny_model
from unteach import DIVERGENCES
from unteach.config import ForgetConfig, Method, Precision
from unteach.data import ForgetBatches, GeneralText
from unteach.errors import InputError
from unteach.method.optimizers import make_optimizer
from unteach.method.vocab_head import Head
from unteach.models import trainable_parameters
from unteach.training import calibrate, step
from unteach.training.passes import HeldText, read_change
from unteach.training.texts import Texts, texts_of_step

CHUNKS = [list(range(1, 12)), list(range(30, 41))]
BF16 = Precision(divergence="bf16")
ADAMW = Method(loss="ll", optimizer="adamw", alpha=1.0, lr=1e-5, warmup=2, token_share=1.0, loops_every=0)


def moved(name, trainable, length):
    """A student, its trained weights, the way to it from a teacher, and that teacher's full logits in float64."""
    model = tiny_model(name).double()
    parameters = list(trainable_parameters(model, trainable).values())
    draws = torch.Generator().manual_seed(1)
    way = [torch.randn(p.shape, generator=draws, dtype=torch.float64) for p in parameters]
    size = torch.cat([u.flatten() for u in way]).norm()
    way = [u * (length / size) for u in way]
    with torch.no_grad():
        torch._foreach_sub_(parameters, way)
        taught = model(torch.tensor(CHUNKS)).logits[:, :-1]
        torch._foreach_add_(parameters, way)
    return model, parameters, way, taught


def exact_gradient(model, parameters, taught, divergence):
    ids = torch.tensor(CHUNKS)
    everywhere = torch.ones(taught.shape[:2], dtype=torch.bool)
    value = naive(divergence, model(ids).logits[:, :-1], ids[:, 1:], everywhere, taught)
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters)])


def tangent_gradient(model, parameters, way, divergence, precision="fp32"):
    """As a step computes it."""
    config = ForgetConfig(model="tiny", precision=Precision(divergence=precision))
    held = HeldText(sequences=CHUNKS, parts=[([0, 1], 1.0)], divergence=divergence)
    before = [p.detach() - u for p, u in zip(parameters, way, strict=True)]
    student = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        torch._foreach_copy_(parameters, before)
        head = Head.of(model).detached()
        torch._foreach_copy_(parameters, student)
    (reading,) = read_change(model, parameters, way, head, [held], precision)
    held = dataclasses.replace(held, readings=[(1.0, reading)])
    step.accumulate(model, parameters, [], [held], 1.0, config)
    return torch.cat([p.grad.flatten() for p in parameters])


def relative(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("name", "trainable", "divergence"),
    [("llama", "blocks", "kl"), ("llama_tied", "all", "kl"), ("gemma2", "all", "kl")]
    + [("llama", "all", divergence) for divergence in DIVERGENCES],
)
def test_the_gradient_nears_that_of_the_definition_with_the_square_of_the_way(name, trainable, divergence):
    """Of full logits in float64; gemma2 has a cap, too."""
    errors = []
    for length in (0.4, 0.2):
        model, parameters, way, taught = moved(name, trainable, length)
        exact = exact_gradient(model, parameters, taught, divergence)
        errors.append(relative(tangent_gradient(model, parameters, way, divergence), exact))
    assert errors[1] < 3e-3
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.25)


@pytest.mark.parametrize(("name", "trainable"), [("llama", "blocks"), ("llama_tied", "all"), ("qwen2_bias", "blocks")])
def test_the_gradient_survives_bf16(name, trainable):
    """Where the difference's is noise; a head that is trained moves, too."""
    model, parameters, way, taught = moved(name, trainable, 1e-3)
    exact = exact_gradient(model, parameters, taught, "kl")
    model.float()
    way = [u.float() for u in way]
    assert relative(tangent_gradient(model, parameters, way, "kl", "bf16"), exact) < 0.05
    assert relative(tangent_gradient(model, parameters, way, "kl", "fp16"), exact) < 0.01


def made(**settings):
    model, tokenizer = tiny_model("llama"), small_tokenizer()
    config = ForgetConfig(model="tiny", batch=4, general_batch=4, keep_batch=3, **settings)
    encoded = [tokenizer(text)["input_ids"] for text in FORGET]
    general = GeneralText(GENERAL, tokenizer, tokens=24, seed=0)
    texts = Texts(ForgetBatches(encoded[:6], 0), general, ForgetBatches(encoded[6:], 0))
    parameters = trainable_parameters(model, "blocks")
    optimizer = make_optimizer(parameters.values(), config.method)
    return model, list(parameters.values()), optimizer, texts, config


def steps(count, **settings):
    """Some steps with keep text, and the weights after them."""
    model, parameters, optimizer, texts, config = made(**settings)
    rows = []
    for number in range(count):
        read = texts_of_step(texts, config.method, config, number)
        rows.append(step.train_step(model, optimizer, *read, config.method.alpha, config))
    return rows, torch.cat([p.detach().flatten() for p in parameters])


NEAR = mean_teacher(loss="ll", alpha=1.0, lr=1e-4)


@pytest.mark.parametrize("method", [NEAR, ADAMW])
def test_steps_in_bf16_are_those_of_fp32(method):
    """Divergences of 1e-9, which bf16's difference drowns; student and teacher are the same at first."""
    start = steps(0, method=method)[1]
    exact, there = steps(3, method=method)
    for more in ({}, {"checkpoint_activations": True, "micro_batch": 1}):
        rows, found = steps(3, method=method, precision=BF16, divergence_form="tangent", **more)
        assert rows[0]["divergence"] == 0
        assert rows[2]["divergence"] == pytest.approx(exact[2]["divergence"], rel=0.02)
        assert relative(found - start, (there - start).double()) < 0.02
    lost, _ = steps(3, method=method, precision=BF16)
    assert lost[2]["divergence"] > 3 * exact[2]["divergence"]


def test_beyond_its_range_it_is_the_difference_bit_for_bit(monkeypatch):
    method = mean_teacher(loss="ll", alpha=1.0, lr=1.0, teacher_rate=0.0)
    _, difference = steps(3, method=method, precision=BF16)
    rows, mixed = steps(3, method=method, precision=BF16, divergence_form="tangent")
    assert rows[2]["divergence"] > step.FARTHEST["bf16"]
    assert not torch.equal(mixed, difference), "the first steps are near"
    monkeypatch.setattr(step, "FARTHEST", {"bf16": -1.0})
    _, always = steps(3, method=method, precision=BF16, divergence_form="tangent")
    assert torch.equal(always, difference)


def test_the_warning_of_rounding_measures_the_form():
    def noise(form):
        method = mean_teacher(alpha=10.0, lr=1e-5, teacher_rate=10.0)
        model, parameters, _, texts, config = made(method=method, precision=BF16, divergence_form=form)
        start = copy.deepcopy(model.state_dict())
        found, _ = calibrate.rounding_noise(model, parameters, texts.forget, texts.general, config)
        assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())
        return found

    assert noise("tangent") < 0.05 * noise("difference")


def test_a_run_in_bf16_goes_on_bit_for_bit(tmp_path, monkeypatch):
    inputs = make_inputs(tmp_path)
    given = {"divergence_form": "tangent", "precision": Precision(forget="bf16", divergence="bf16")}
    done = run(inputs, tmp_path / "whole", **given)
    paused_run(inputs, tmp_path / "paused", monkeypatch, **given)
    run(inputs, tmp_path / "paused", resume=True, **given)
    assert result_of(tmp_path / "paused") == result_of(tmp_path / "whole")
    assert done.steps == 3
    rows = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["divergence"] == 0 < rows[1]["divergence"]


def test_what_it_cannot_do_is_one_line(tmp_path, monkeypatch):
    for method, why in (
        (Method(divergence="nll"), "with divergence nll, which compares with no teacher"),
        (Method(anchor=0.5), "with anchor 0.5, which compares with a model that is soon too far away"),
    ):
        line = rf"^divergence_form is 'tangent': it must be 'difference' {why}$"
        with pytest.raises(InputError, match=line):
            ForgetConfig(model="m", divergence_form="tangent", method=method)
        with pytest.raises(InputError, match=line):
            ForgetConfig(model="m", divergence_form="tangent", phases=(dataclasses.replace(method, steps=1),))
    inputs = make_inputs(tmp_path)
    monkeypatch.setattr("unteach.job.inputs.ranks", lambda: 2)
    with pytest.raises(InputError, match=r"^divergence_form is 'tangent': 2 processes divide the weights, use "):
        run(inputs, tmp_path / "out", divergence_form="tangent")
