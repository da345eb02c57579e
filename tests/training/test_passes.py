"""Precision of the passes, micro-batches by length, and the loss scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steps import one_step, pull_of
from tiny_models import tiny_model
from unteach.config import ForgetConfig, Method, Precision
from unteach.data import ForgetBatches
from unteach.method.mean_teacher import MeanTeacher
from unteach.models import decoder_layers, trainable_parameters
from unteach.training.passes import by_length, computing, forget_term, hidden_states
from unteach.training.step import loss_scale, unscale_gradients

SEQUENCES = [list(range(1, 30)), list(range(5, 20)), list(range(3, 40))]
CPU = torch.device("cpu")


def gradients(model: Any, precision: str, scale: float = 1.0, checkpointed: bool = False) -> list[torch.Tensor]:
    parameters = list(trainable_parameters(model, "blocks").values())
    with computing(model, precision, checkpointed=checkpointed):
        for part in (SEQUENCES[:1], SEQUENCES[1:]):  # twice: the second is added to the first
            (scale * 1e-4 * forget_term(model, pull_of(part, "ll"), 0)[0]).backward()
    unscale_gradients(parameters, scale)
    found = [p.grad for p in parameters if p.grad is not None]
    for p in parameters:
        p.grad = None
    assert len(found) == len(parameters)
    return found


def error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    difference = torch.cat([(a - b).flatten() for a, b in zip(found, exact, strict=True)])
    return float(difference.norm() / torch.cat([b.flatten() for b in exact]).norm())


@pytest.mark.parametrize("name", ["llama", "qwen2_bias"])
def test_float16_gradients_need_the_loss_scale_and_are_float32(name: str) -> None:
    model = tiny_model(name)
    exact = gradients(model, "fp32")
    scaled = gradients(model, "fp16", loss_scale(100, "fp16", device=CPU))
    assert all(g.dtype == torch.float32 for g in scaled)
    assert error(scaled, exact) < 0.01
    tiny = 2.0**-14  # as if the mean ran over many more tokens
    assert error(gradients(model, "fp16", tiny), exact) > 0.05


def test_weights_are_rounded_on_entering_and_layers_are_plain_again() -> None:
    model = tiny_model("llama")
    linear = decoder_layers(model)[0].self_attn.q_proj
    before = linear.weight.detach().clone()
    with torch.no_grad(), computing(model, "fp16"):
        first = hidden_states(model, SEQUENCES)[0]
        assert linear.rounded.dtype == torch.float16
        torch.testing.assert_close(linear.rounded, before.half(), rtol=0, atol=0)
    assert type(linear) is torch.nn.Linear
    assert not hasattr(linear, "rounded")
    with torch.no_grad():
        linear.weight.add_(0.1)
        with computing(model, "fp16"):
            assert not torch.equal(hidden_states(model, SEQUENCES)[0], first), "stale weights"
        linear.weight.copy_(before)
        with computing(model, "fp16"):
            torch.testing.assert_close(hidden_states(model, SEQUENCES)[0], first, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_activations_computed_again_give_the_same_gradients(name: str, precision: str) -> None:
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


def test_layers_are_plain_again_after_an_error() -> None:
    model = tiny_model("llama")
    with pytest.raises(KeyError), computing(model, "fp16"):
        raise KeyError
    assert not any("Half" in type(module).__name__ for module in model.modules())


def test_padding_is_not_seen() -> None:
    """No mask is given: real tokens of a causal model do not look to the right."""
    model = tiny_model("llama").double()
    with torch.no_grad():
        together, labels, mask = hidden_states(model, SEQUENCES)
        alone = torch.cat([hidden_states(model, [sequence])[0] for sequence in SEQUENCES])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-12)
    assert labels.tolist() == [token for sequence in SEQUENCES for token in sequence[1:]]
    assert mask.sum(1).tolist() == [len(sequence) - 1 for sequence in SEQUENCES]


def test_micro_batches_of_like_length_within_a_budget_of_tokens() -> None:
    lengths = [10, 100, 50, 100, 20, 49, 10]
    parts = by_length(range(7), lengths, 2, 100)
    assert sorted(n for part in parts for n in part) == list(range(7))
    assert all(len(part) * max(lengths[n] for n in part) <= 200 for part in parts)
    assert parts == [[1, 3], [2, 5, 4, 0], [6]]
    assert by_length("abc", [1, 2, 3], None, 3) == [["a", "b", "c"]]


def test_the_scale_is_a_power_of_two_and_only_for_float16() -> None:
    scale = loss_scale(20440, "bf16", "fp16", device=CPU)
    assert scale == 2.0**22
    assert loss_scale(20440, "auto", "fp32", "bf16", device=CPU) == 1


class Chunks:
    def batch(self, step: int, size: int) -> list[list[int]]:
        return SEQUENCES[:size]


def test_a_gradient_beyond_float16_is_computed_again_with_a_smaller_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []

    def step(first_scale: float | None) -> list[torch.Tensor]:
        if first_scale is not None:

            def spy(parameters: Any, scale: float) -> None:
                tried.append(scale)
                unscale_gradients(parameters, scale)

            monkeypatch.setattr("unteach.training.step.loss_scale", lambda *args, **kwargs: first_scale)
            monkeypatch.setattr("unteach.training.step.unscale_gradients", spy)
        model = tiny_model("llama")
        parameters = list(trainable_parameters(model, "blocks").values())
        optimizer = MeanTeacher(parameters, clip=None)
        config = ForgetConfig(model="", precision=Precision(forget="fp16", divergence="fp16"), batch=3, general_batch=3)
        method = Method(optimizer="mean_teacher", token_share=0.25, loops_every=4, loss="ll", alpha=1.0)
        one_step(model, optimizer, ForgetBatches(SEQUENCES, 0), Chunks(), method, config)
        return [p.detach() for p in parameters]

    usual = step(None)
    lowered = step(2.0**30)
    assert len(tried) > 1
    assert tried == sorted(tried, reverse=True)
    assert error(lowered, usual) < 1e-5
