"""How hidden states move with the weights: against differences in float64, in every family, and in half precision."""

import pytest
import torch
from torch import nn

from tiny_models import CONFIGS, tiny_model
from unteach.models import decoder_layers
from unteach.models.adapters import adapter_parameters, add_adapters, keep_base_in
from unteach.models.precision import HALF, precision_of_pass
from unteach.models.tangents import moving_weights, value_and_change
from unteach.training.passes import computing, hidden_states

SEQUENCES = [list(range(1, 30)), list(range(5, 20))]
CPU = torch.device("cpu")


def way_of(parameters, length):
    """A random way of that length."""
    draws = torch.Generator().manual_seed(0)
    way = [torch.randn(p.shape, generator=draws, dtype=torch.float64).to(p) for p in parameters]
    norm = torch.cat([u.flatten() for u in way]).norm()
    return [u * (length / norm) for u in way]


def changed(model, parameters, way, precision="fp32", **where):
    with precision_of_pass(precision, CPU), moving_weights(model, parameters, way, HALF.get(precision), **where) as by:
        return value_and_change(hidden_states(model, SEQUENCES)[0], by)[1]


def difference(model, parameters, way, precision="fp32"):
    """Hidden states with the weights as they are minus those before the way."""
    found = []
    with torch.no_grad():
        for back in (0, 1):
            torch._foreach_sub_(parameters, way, alpha=back)
            with computing(model, precision):
                found.append(hidden_states(model, SEQUENCES)[0])
        torch._foreach_add_(parameters, way)
    return found[0] - found[1]


def relative(found, exact):
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "mixtral"])
def test_the_change_is_the_difference_of_two_models(name):
    """All weights of the backbone move; half the way has a quarter of the error, or half where the end is taken."""
    model = tiny_model(name).double().requires_grad_(False)
    parameters = list(model.base_model.parameters())
    errors = {}
    for length in (0.4, 0.2):
        way = way_of(parameters, length)
        exact = difference(model, parameters, way)
        for back in (0.5, 0.0):
            errors[length, back] = relative(changed(model, parameters, way, back=back), exact)
    assert errors[0.2, 0.5] < 1e-3
    assert errors[0.4, 0.0] / errors[0.2, 0.0] == pytest.approx(2, rel=0.15)
    assert errors[0.4, 0.5] / errors[0.2, 0.5] == pytest.approx(4, rel=0.15)


def test_of_a_mixture_as_long_as_no_token_changes_its_experts():
    model = tiny_model("mixtral").requires_grad_(False)
    parameters = list(model.base_model.parameters())
    way = way_of(parameters, 0.02)
    assert relative(changed(model, parameters, way), difference(model, parameters, way)) < 5e-3


@pytest.mark.parametrize(("name", "precision"), [("llama", "fp16"), *((name, "bf16") for name in CONFIGS)])
def test_half_precision_hides_the_difference_and_not_the_change(name, precision):
    exact_model, model = tiny_model(name).double(), tiny_model(name)
    parameters = [p.requires_grad_(False) for p in decoder_layers(model).parameters()]
    way = way_of(parameters, 1e-4)
    doubles = [p.requires_grad_(False) for p in decoder_layers(exact_model).parameters()]
    exact = changed(exact_model, doubles, [u.double() for u in way])
    assert relative(changed(model, parameters, way, precision), exact) < {"bf16": 0.05, "fp16": 0.02}[precision]
    assert relative(difference(model, parameters, way, precision), exact) > 1


@pytest.mark.parametrize(("bits", "precision"), [(32, "fp32"), (16, "fp32"), (4, "fp32"), (4, "bf16")])
def test_adapters_move_on_a_base_of_few_bits(bits, precision):
    model = tiny_model("llama")
    add_adapters(model, decoder_layers(model), 4)
    keep_base_in(model, bits, torch.bfloat16)
    parameters = list(adapter_parameters(model).values())
    with torch.no_grad():
        for p, u in zip(parameters, way_of(parameters, 3.0), strict=True):
            p += u
    way = way_of(parameters, 0.05)
    exact = difference(model, parameters, way)
    assert relative(changed(model, parameters, way, precision), exact) < {"fp32": 2e-3, "bf16": 0.05}[precision]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_model_is_as_before_also_after_an_error(precision):
    model = tiny_model("mixtral")
    parameters = list(model.base_model.parameters())
    before, experts = {name: id(p) for name, p in model.named_parameters()}, model.config._experts_implementation
    with pytest.raises(KeyError), moving_weights(model, parameters, way_of(parameters, 1.0), HALF.get(precision)):
        raise KeyError
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert model.config._experts_implementation == experts
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert linears
    assert all(type(linear) is nn.Linear and not {"rounded", "moved"} & {*linear.__dict__} for linear in linears)


def test_nothing_moves_without_a_way():
    model = tiny_model("llama")
    parameters = list(decoder_layers(model).parameters())
    assert not changed(model, parameters, [torch.zeros_like(p) for p in parameters], "bf16").any()
