"""Precision of the passes, micro-batches by length, and the loss scale."""

import functools
from types import SimpleNamespace

import pytest
import torch

from steps import mean_teacher, one_step, pull_of
from tiny_models import tiny_model
from unteach.config import ForgetConfig, Precision
from unteach.data import ForgetBatches
from unteach.method.mean_teacher import MeanTeacher
from unteach.models import decoder_layers, trainable_parameters
from unteach.models.precision import _HalfProduct, rounded_layers
from unteach.training.passes import by_length, computing, forget_term, hidden_states
from unteach.training.step import loss_scale, unscale_gradients

SEQUENCES = [list(range(1, 30)), list(range(5, 20)), list(range(3, 40))]
CPU = torch.device("cpu")


def gradients(model, precision, scale=1.0, **calls):
    parameters = list(trainable_parameters(model, "blocks").values())
    model.zero_grad()
    with computing(model, precision, **calls):
        for part in (SEQUENCES[:1], SEQUENCES[1:]):  # twice: the second is added to the first
            (scale * 1e-4 * forget_term(model, pull_of(part, "ll"), 0)[0]).backward()
    unscale_gradients(parameters, scale)
    return [p.grad for p in parameters]


def error(found, exact):
    difference = torch.cat([(a - b).flatten() for a, b in zip(found, exact, strict=True)])
    return float(difference.norm() / torch.cat([b.flatten() for b in exact]).norm())


@pytest.mark.parametrize("name", ["llama", "qwen2_bias"])
def test_float16_gradients_need_the_loss_scale_and_are_float32(name):
    model = tiny_model(name)
    exact = gradients(model, "fp32")
    scaled = gradients(model, "fp16", loss_scale(100, "fp16", device=CPU))
    assert all(g.dtype == torch.float32 for g in scaled)
    assert error(scaled, exact) < 0.01
    tiny = 2.0**-14  # as if the mean ran over many more tokens
    assert error(gradients(model, "fp16", tiny), exact) > 0.05


def test_weights_are_rounded_on_entering_and_layers_are_plain_again():
    model = tiny_model("llama")
    linear = decoder_layers(model)[0].self_attn.q_proj
    before = linear.weight.detach().clone()
    with torch.no_grad(), computing(model, "fp16"):
        first = hidden_states(model, SEQUENCES)[0]
        assert torch.equal(linear.rounded, before.half())
    assert type(linear) is torch.nn.Linear
    assert not hasattr(linear, "rounded")
    for weight, equal in ((before + 0.1, False), (before, True)):
        with torch.no_grad():
            linear.weight.copy_(weight)
            with computing(model, "fp16"):
                assert torch.equal(hidden_states(model, SEQUENCES)[0], first) == equal, "stale weights"
    with pytest.raises(KeyError), computing(model, "fp16"):
        raise KeyError
    assert not any("Half" in type(module).__name__ for module in model.modules())


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_activations_computed_again_give_the_same_gradients(name, precision):
    model = tiny_model(name)
    calls = []
    hook = decoder_layers(model)[1].register_forward_pre_hook(lambda *arguments: calls.append(1))
    kept = gradients(model, precision, 1024.0)
    assert len(calls) == 2
    again = gradients(model, precision, 1024.0, checkpointed=True)
    assert len(calls) == 6, "each of two passes made a second time"
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    with torch.no_grad(), computing(model, precision, checkpointed=True):
        hidden_states(model, SEQUENCES)
    assert len(calls) == 7
    hook.remove()
    assert all(block._compiled_call_impl is None for block in decoder_layers(model))


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_blocks_add_gradients_of_weights_in_place(checkpointed, monkeypatch):
    """As ``torch.compile`` traces them, but with its plain backend: each product is one operator on ``.grad``."""
    traced = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", traced)
    model = tiny_model("llama")
    exact = gradients(model, "fp16", 1024.0)
    gradients(model, "fp16", 1024.0, compiled=True, checkpointed=checkpointed)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = gradients(model, "fp16", 1024.0, compiled=True, checkpointed=checkpointed)
    assert error(found, exact) < 1e-3
    adds = {event.key: event.count for event in profile.key_averages()}["unteach::add_product"]
    assert adds == 2 * len(rounded_layers(model)), "each layer, in both micro-batches"
    assert not any(hasattr(layer, "total") for layer in rounded_layers(model))
    model.zero_grad()
    with torch.no_grad(), computing(model, "fp16", compiled=True):
        hidden_states(model, SEQUENCES)
    assert all(p.grad is None for p in model.parameters()), "a pass without gradients makes none"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_blocks_round_weights_inside_their_products(monkeypatch):
    """Where each weight is rounded whenever it is met: the same gradients, by one operator for each product."""
    traced = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", traced)
    model = tiny_model("llama")
    exact = gradients(model, "fp16", 1024.0, once=False)
    gradients(model, "fp16", 1024.0, compiled=True, once=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = gradients(model, "fp16", 1024.0, compiled=True, once=False)
    assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))
    products = {event.key: event.count for event in profile.key_averages()}["unteach::rounded_product"]
    compiled = [m for block in decoder_layers(model)[1:] for m in block.modules() if isinstance(m, torch.nn.Linear)]
    assert products == 4 * len(compiled), "forward and backward, in both micro-batches"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_the_compiler_rounds_a_weight_as_eager_code_does():
    """Its own kernels for a CPU leave out a rounding that is followed by a conversion back."""
    weight, x = torch.nn.Parameter(torch.randn(48, 32)), torch.randn(5, 32, requires_grad=True)

    def product(x, weight):
        return _HalfProduct.apply(x, x.detach().to(torch.bfloat16), weight, None, None)

    found = []
    for call in (product, torch.compile(product)):
        output = call(x, weight)
        found.append((output, *torch.autograd.grad(output, (x, weight), torch.full_like(output, 0.3))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_padding_is_not_seen():
    """No mask is given: real tokens of a causal model do not look to the right."""
    model = tiny_model("llama").double()
    with torch.no_grad():
        together, labels, mask = hidden_states(model, SEQUENCES)
        alone = torch.cat([hidden_states(model, [sequence])[0] for sequence in SEQUENCES])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-12)
    assert labels.tolist() == [token for sequence in SEQUENCES for token in sequence[1:]]
    assert mask.sum(1).tolist() == [len(sequence) - 1 for sequence in SEQUENCES]


def test_micro_batches_of_like_length_within_a_budget_of_tokens():
    lengths = [10, 100, 50, 100, 20, 49, 10]
    parts = by_length(range(7), lengths, 2, 100)
    assert all(len(part) * max(lengths[n] for n in part) <= 200 for part in parts)
    assert parts == [[1, 3], [2, 5, 4, 0], [6]]
    assert by_length("abc", [1, 2, 3], None, 3) == [["a", "b", "c"]]


def test_the_scale_is_a_power_of_two_and_only_for_float16():
    assert loss_scale(20440, "bf16", "fp16", device=CPU) == 2.0**22
    assert loss_scale(20440, "auto", "fp32", "bf16", device=CPU) == 1


def test_a_gradient_beyond_float16_is_computed_again_with_a_smaller_scale(monkeypatch):
    tried = []

    def spy(parameters, scale):
        tried.append(scale)
        unscale_gradients(parameters, scale)

    def step():
        model = tiny_model("llama")
        parameters = list(trainable_parameters(model, "blocks").values())
        both = Precision(forget="fp16", divergence="fp16")
        config = ForgetConfig(model="", precision=both, batch=3, general_batch=3)
        general = SimpleNamespace(batch=lambda step, size: SEQUENCES[:size])
        method = mean_teacher(loss="ll", alpha=1.0)
        one_step(model, MeanTeacher(parameters, clip=None), ForgetBatches(SEQUENCES, 0), general, method, config)
        return [p.detach() for p in parameters]

    usual = step()
    monkeypatch.setattr("unteach.training.step.loss_scale", lambda *args, **kwargs: 2.0**30)
    monkeypatch.setattr("unteach.training.step.unscale_gradients", spy)
    lowered = step()
    assert len(tried) > 1
    assert tried == sorted(tried, reverse=True)
    assert error(lowered, usual) < 1e-5
