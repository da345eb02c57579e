"""A run whose state is kept in 16 bits: the same passes, the same run after a pause, and what it is refused for."""

import dataclasses

import pytest
import torch

from steps import FORGET, GENERAL, held_to, mean_teacher, one_step, pull_of, same, unlearned
from tiny_models import small_tokenizer, tiny_model
from unteach.config import ForgetConfig, Method, Precision
from unteach.data import ForgetBatches, GeneralText
from unteach.errors import InputError, Interrupted
from unteach.method.lean import ReleasedGradients
from unteach.method.optimizers import make_optimizer
from unteach.method.tensors import global_norm
from unteach.method.vocab_head import Head
from unteach.models import trainable_parameters
from unteach.models.distributed import check_ranks
from unteach.training.calibrate import measure, rounding_noise
from unteach.training.passes import hidden_states, read, read_as_teacher
from unteach.training.step import accumulate
from unteach.training.texts import Texts

HALVES = Precision(forget="bf16", divergence="bf16")


def make(trainable="blocks", **settings):
    model, tokenizer = tiny_model("llama"), small_tokenizer()
    settings = {"method": mean_teacher(), "batch": 4, "general_batch": 4, "max_steps": 5, "state_bits": 16} | settings
    config = ForgetConfig(model="tiny", evaluate_every=5, checkpoint_every=1, **settings)
    forget = ForgetBatches([tokenizer(text)["input_ids"] for text in FORGET], config.seed)
    general = GeneralText(GENERAL, tokenizer, tokens=24, seed=config.seed)
    return model, trainable_parameters(model, trainable), forget, general, config


def run(folder, made, **options):
    model, parameters, forget, general, config = made
    scores = {"verbmem_f": 50.0, "nll_general": 1.0}
    return unlearned(folder, model, parameters, Texts(forget, general), config, lambda step: scores, **options)


def texts_of(model):
    sequences = [small_tokenizer()(text)["input_ids"] for text in FORGET[:4]]
    with torch.no_grad():
        hidden = hidden_states(model, sequences)[0] + 0.1
    return pull_of(sequences), held_to(sequences, "kl", hidden, Head.of(model).detached())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_released_gradients_are_those_of_the_plain_pass(precision):
    """Rounding weights whenever they are met changes no bit of a loss; sums are right to bfloat16's rounding."""
    model, parameters, _, _, config = make(precision=Precision(forget=precision, divergence=precision))
    weights, (pull, held) = list(parameters.values()), texts_of(model)
    exact = accumulate(model, weights, [pull], [held], 0.5, config)
    gradients = [p.grad.double() for p in weights]
    released = ReleasedGradients(weights)
    found = accumulate(model, weights, [pull], [held], 0.5, config, released=released)
    assert found == exact
    assert all(p.grad is None for p in weights)
    off = sum((s.double() - g).square().sum() for s, g in zip(released.values(), gradients, strict=True)) ** 0.5
    assert 0 < off < 0.01 * global_norm(gradients)
    assert not any(hasattr(module, "rounded") for module in model.modules())


@pytest.mark.parametrize("trainable", ["blocks", "all"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_teacher_reads_as_if_it_were_written_into_the_weights(precision, trainable):
    """In half precision most of its weights are only ever made rounded."""
    given = make(trainable, precision=Precision(divergence=precision))
    model, parameters, forget, general, config = given
    optimizer = make_optimizer(parameters.values(), config.method, 16)
    for step in range(3):
        one_step(model, optimizer, forget, general, config.method, config, step)
    held = texts_of(model)[1]
    student = {name: p.detach().clone() for name, p in parameters.items()}
    with optimizer.teacher_weights():
        plain = read(model, held.sequences, held.parts, config, precision)
    (found,) = read_as_teacher(model, optimizer, [held], config)
    assert torch.equal(found.hidden[0], plain.hidden[0])
    assert torch.equal(found.head.weight, plain.head.weight)
    assert same(student, {name: p.detach() for name, p in parameters.items()})
    own = read(model, held.sequences, held.parts, config, precision)
    assert not torch.equal(own.hidden[0], plain.hidden[0])


def test_a_paused_run_goes_on_bit_for_bit_and_follows_the_one_in_32_bits(tmp_path):
    settings = {"micro_batch": 2, "precision": HALVES}
    start = {name: p.detach().clone() for name, p in make()[1].items()}
    _, expected = run(tmp_path / "whole", make(**settings))
    steps = []
    with pytest.raises(Interrupted):
        run(tmp_path / "paused", make(**settings), log=steps.append, paused=lambda: len(steps) >= 2)
    _, weights = run(tmp_path / "paused", make(**settings), resume=True)
    assert same(weights, expected)
    _, full = run(tmp_path / "full", make(state_bits=32, **settings))
    way = torch.cat([(full[name] - start[name]).flatten() for name in start])
    off = torch.cat([(full[name] - expected[name]).flatten() for name in start])
    assert 0 < off.norm() < 0.02 * way.norm()


def test_a_checkpoint_of_the_other_kind_is_refused_in_a_line(tmp_path):
    for first, then in ((16, 32), (32, 16)):
        folder, steps = tmp_path / str(first), []
        with pytest.raises(Interrupted):
            run(folder, make(state_bits=first), log=steps.append, paused=lambda s=steps: len(s) >= 1)
        with pytest.raises(InputError) as raised:
            run(folder, make(state_bits=then), resume=True)
        line = f"state_bits is {then}: the saved teacher and momentum have {first}, set it to {first}"
        assert raised.value.problems == [line]


def test_what_is_measured_before_the_first_step_is_nearly_the_same():
    found = []
    for bits in (32, 16):
        model, parameters, forget, general, config = make(state_bits=bits, precision=HALVES)
        before = {name: p.detach().clone() for name, p in parameters.items()}
        given = (model, list(parameters.values()), forget, general, config)
        found.append((*dataclasses.astuple(measure(*given)), *rounding_noise(*given)))
        assert same(before, {name: p.detach() for name, p in parameters.items()})
        assert all(p.grad is None for p in parameters.values())
    assert found[1] == pytest.approx(found[0], rel=0.05)


def test_what_does_not_go_with_16_bits():
    keeps = "optimizer adamw keeps 32, name mean_teacher or leave it out"
    for settings, line in (
        ({"state_bits": 8}, "state_bits is 8: it must be 16 or 32"),
        ({"state_bits": 16, "method": Method(optimizer="adamw")}, f"state_bits is 16: {keeps}"),
        (
            {"state_bits": 16, "divergence_form": "tangent"},
            "state_bits is 16: divergence_form tangent takes as much memory as it saves, leave one out",
        ),
        (
            {"state_bits": 16, "adapter": "lora"},
            "state_bits is 16: the state of an adapter is small already, leave it out",
        ),
        (
            {"state_bits": 16, "method": Method(project_conflicts=True)},
            "state_bits is 16: project_conflicts needs two whole gradients, leave one of them out",
        ),
    ):
        with pytest.raises(InputError) as raised:
            ForgetConfig(**settings)
        assert raised.value.problems == [line]
    with pytest.raises(InputError, match=keeps):  # keep documents would choose AdamW
        ForgetConfig(state_bits=16, keep="folder").chosen()
    with pytest.raises(InputError, match="state_bits is 16: 2 processes divide a state in 32 bits among them"):
        check_ranks(ForgetConfig(state_bits=16), 2)
