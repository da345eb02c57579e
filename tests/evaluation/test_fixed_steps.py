"""Decoding in fixed shapes gives the usual text: the same steps on a CPU, and as a CUDA graph on a GPU."""

import copy
import random

import pytest
import torch

from tiny_models import tiny_model
from unteach.evaluation import decoding, generation
from unteach.evaluation.decoding import RoomyLayer
from unteach.evaluation.generation import generate

MODELS = {"llama": "llama", "qwen2_bias": "qwen2", "gpt2": "gpt2", "gpt_neox": "gpt_neox"}


def prompts(count=9, longest=20):
    generator = random.Random(0)
    return [[generator.randrange(2, 300) for _ in range(generator.randrange(1, longest))] for _ in range(count)]


def wandering_model(name):
    """A tiny model with weights so large that its text depends on all of the prompt."""
    model = tiny_model(name)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(20)
    return model


def fix_everywhere(monkeypatch):
    """Take the fixed steps on a CPU too; returns the list that counts them."""
    used = []

    def allowed(model, cache, steps):
        used.append(steps)
        return all(type(layer) is RoomyLayer for layer in cache.layers)

    monkeypatch.setattr(generation, "can_fix", allowed)
    return used


def test_every_family_is_tried():
    assert set(MODELS.values()) == decoding.FAMILIES
    assert {tiny_model(name).config.model_type for name in MODELS} == decoding.FAMILIES


@pytest.mark.parametrize("name", MODELS)
def test_fixed_steps_write_the_same(name, monkeypatch):
    model = wandering_model(name)
    usual = generate(model, prompts(), max_new_tokens=40)
    assert len({tuple(ids) for ids in usual}) > 5
    used = fix_everywhere(monkeypatch)
    assert generate(model, prompts(), max_new_tokens=40) == usual
    assert used == [39]


def test_rows_end_at_their_limits_at_stop_ids_and_at_the_context(monkeypatch):
    model = wandering_model("gpt2")  # with learned positions: none may be asked for beyond the context of 64
    limits = [64 - len(prompt) if number % 2 else 3 for number, prompt in enumerate(prompts())]
    stops = {generate(model, prompts()[1:2], max_new_tokens=40)[0][20]}
    usual = generate(model, prompts(), max_new_tokens=limits, stop_ids=stops)
    fix_everywhere(monkeypatch)
    assert generate(model, prompts(), max_new_tokens=limits, stop_ids=stops) == usual
    assert generate(model, prompts(), max_new_tokens=1) == [
        ids[:1] for ids in generate(model, prompts(), max_new_tokens=9)
    ]


def test_it_stops_when_all_rows_have_ended(monkeypatch):
    model = tiny_model("llama")
    first = generate(model, prompts(1), max_new_tokens=1)[0][0]
    fix_everywhere(monkeypatch)
    calls = []
    model.register_forward_hook(lambda *arguments: calls.append(1))
    assert generate(model, prompts(1), max_new_tokens=60 - len(prompts(1)[0]), stop_ids=[first]) == [[]]
    assert len(calls) == 1


def test_not_on_a_cpu():
    layer = RoomyLayer(torch.zeros(1, 1, 8, 1), torch.zeros(1, 1, 8, 1), 4)
    cache = type("Cache", (), {"layers": [layer]})
    assert not decoding.can_fix(tiny_model("llama"), cache, 100)


def test_only_where_every_step_does_the_same():
    for name in MODELS:
        assert decoding.has_steady_steps(tiny_model(name).config)
    config = tiny_model("llama").config
    for kind in ("dynamic", "longrope"):
        other = copy.deepcopy(config)
        other.rope_parameters = {**config.rope_parameters, "rope_type": kind}
        assert not decoding.has_steady_steps(other)
    other = copy.deepcopy(config)
    other._attn_implementation = "flash_attention_2"  # would read the mask in another way
    assert not decoding.has_steady_steps(other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_model_that_waits_for_the_gpu_is_decoded_without_a_graph(recwarn):
    model = wandering_model("llama")
    usual = generate(model, prompts(), max_new_tokens=40)
    on_gpu = copy.deepcopy(model).cuda()
    on_gpu.register_forward_pre_hook(lambda *arguments: torch.ones(1, device="cuda").item() and None)
    for _ in range(2):
        assert generate(on_gpu, prompts(), max_new_tokens=40) == usual
    assert [str(warning.message).startswith("decoding without a CUDA graph") for warning in recwarn] == [True]
    assert generate(copy.deepcopy(model).cuda(), prompts(), max_new_tokens=40) == usual  # graphs still work


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_a_replayed_graph_writes_the_same(name, monkeypatch):
    model = wandering_model(name)
    usual = generate(model, prompts(), max_new_tokens=40)
    on_gpu = copy.deepcopy(model).cuda()
    counted = []
    monkeypatch.setattr(
        generation, "fixed_steps", lambda *arguments: counted.append(1) or decoding.fixed_steps(*arguments)
    )
    assert generate(on_gpu, prompts(), max_new_tokens=40) == usual
    assert counted == [1]
    with torch.no_grad():
        for parameter in on_gpu.parameters():
            parameter.mul_(1.01)  # a graph belongs to one call: other weights give other text
    assert generate(on_gpu, prompts(), max_new_tokens=40) == generate(on_gpu.cpu(), prompts(), max_new_tokens=40)
