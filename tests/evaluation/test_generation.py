"""Batched reading and decoding give what one at a time gives, and Transformers' own `generate`; fast paths included."""

import copy
import itertools
import random
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from random_models import build_llama, scale

from tiny_models import tiny_model
from unteach.evaluation import decoding, generation, inference
from unteach.evaluation.decoding import RoomyLayer, faster_on_cpu
from unteach.evaluation.generation import _PromptReader, _shared_length, generate, next_tokens
from unteach.evaluation.inference import Batching, cut_left, in_batches, stop_ids, token_logprobs

VOCABULARY = 400
FAMILIES = {"llama": "llama", "qwen2_bias": "qwen2", "gpt2": "gpt2", "gpt_neox": "gpt_neox"}
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def random_prompts(count, *, shared=0, seed=0, longest=40, vocabulary=VOCABULARY):
    generator = random.Random(seed)
    beginning = [generator.randrange(2, vocabulary) for _ in range(shared)]
    return [
        beginning + [generator.randrange(2, vocabulary) for _ in range(generator.randrange(1, longest))]
        for _ in range(count)
    ]


def one_by_one(model, prompts, new, stops=()):
    """Transformers' own greedy decoding of one prompt after the other."""
    outputs = []
    for prompt in prompts:
        result = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=list(stops) or None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        outputs.append(result[:-1] if result and result[-1] in stops else result)
    return outputs


@pytest.mark.parametrize("shared", [pytest.param(0, marks=pytest.mark.slow), 50])
def test_batched_equals_one_by_one(model, shared, monkeypatch):
    prompts = random_prompts(13, shared=shared)
    expected = one_by_one(model, prompts, 16)
    assert len({tuple(ids) for ids in expected}) > 8  # the model wanders: equality means something
    for piece_tokens, batch_size in ((1, 128), (64, 1), (64, 4), (64, 128), (1024, 4), (1024, 128)):
        monkeypatch.setitem(generation._PIECE_TOKENS, "cpu", piece_tokens)
        assert generate(model, prompts, max_new_tokens=16, batching=Batching(batch_size)) == expected
    monkeypatch.setattr(generation, "cache_tokens", lambda model: 150)
    assert generate(model, prompts, max_new_tokens=16) == expected


@pytest.mark.gpu
@on_a_gpu
def test_batched_equals_one_by_one_on_a_gpu(model):
    prompts = random_prompts(17, shared=50)
    on_gpu = copy.deepcopy(model).cuda()
    expected = generate(model, prompts, max_new_tokens=24)
    assert generate(on_gpu, prompts, max_new_tokens=24) == expected
    assert [generate(on_gpu, [prompt], max_new_tokens=24)[0] for prompt in prompts] == expected


def test_rows_end_at_stop_ids_and_at_their_own_limits(model, monkeypatch):
    prompts = random_prompts(12, seed=3)
    free = generate(model, prompts, max_new_tokens=20)
    stops = {free[0][4], free[1][9], free[5][0]}
    expected = [list(itertools.takewhile(lambda token: token not in stops, ids)) for ids in free]
    assert generate(model, prompts, max_new_tokens=20, stop_ids=stops) == expected
    assert expected == one_by_one(model, prompts, 20, sorted(stops))
    assert [] in expected
    limits = [1 + index for index in range(12)]
    monkeypatch.setitem(generation._PIECE_TOKENS, "cpu", 30)
    assert generate(model, prompts, max_new_tokens=limits) == [ids[: k + 1] for k, ids in enumerate(free)]
    assert generate(model, [], max_new_tokens=3) == []


def test_real_end_tokens_inside_a_prompt_are_read(model):
    """Masks come from lengths: an end-of-text id in a prompt is a token like any other, also where it pads."""
    inside = [[5, 1, 6, 7], [5, 6, 7], [1, 1, 1, 1, 1, 1, 9]]
    assert generate(model, inside, max_new_tokens=8) == one_by_one(model, inside, 8)


def test_shared_beginning_is_read_once(model):
    prompts = random_prompts(6, shared=40)
    assert _PromptReader(model, prompts).shared == _shared_length(prompts) >= 40
    for prompts, length in (([[1, 2, 3]], 2), ([[1, 2, 3], [1, 2, 3]], 2), ([[1, 2, 3], [1, 2]], 1), ([], 0)):
        assert _shared_length(prompts) == length


def test_sliding_window_models_do_not_share_a_beginning():
    mistral = build_llama(VOCABULARY, kind="mistral", sliding_window=16)
    prompts = random_prompts(7, shared=40)
    with torch.no_grad():
        assert _PromptReader(mistral, prompts).shared == 0
    assert generate(mistral, prompts, max_new_tokens=12) == one_by_one(mistral, prompts, 12)


def test_model_and_random_state_are_left_as_found(model):
    training = copy.deepcopy(model).train()
    training.model.layers[0].eval()
    modes = [module.training for module in training.modules()]
    implementation = training.config._attn_implementation
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    weights = {name: value.clone() for name, value in training.state_dict().items()}
    done = []
    generate(training, random_prompts(10), max_new_tokens=2, batching=Batching(4, done.append))
    token_logprobs(training, [[3, 4], [5, 6, 7]], batching=Batching(advance=done.append))
    assert done == [4, 4, 2, 2]  # progress counts every item
    assert [module.training for module in training.modules()] == modes
    assert training.config._attn_implementation == implementation
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(weights[name], value) for name, value in training.state_dict().items())
    assert all(parameter.grad is None for parameter in training.parameters())


def test_grouped_attention_equals_the_usual_one(model):
    ids = torch.randint(2, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    with torch.no_grad():
        usual = model(ids, attention_mask=mask).logits
        with faster_on_cpu(model):
            assert model.config._attn_implementation == "unteach_grouped"
            grouped = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(grouped[mask.bool()], usual[mask.bool()], rtol=1e-4, atol=1e-4)
    all_heads = build_llama(VOCABULARY, num_key_value_heads=4)
    with faster_on_cpu(all_heads):
        assert all_heads.config._attn_implementation == "sdpa"


def test_next_tokens(model):
    prompts = random_prompts(9, shared=33, seed=8)
    best, scores = next_tokens(model, prompts, [7, 5, 300], batching=Batching(4))
    assert best.tolist() == [ids[0] for ids in generate(model, prompts, max_new_tokens=1)]
    with torch.no_grad():
        expected = torch.stack([model(torch.tensor([prompt])).logits[0, -1, [7, 5, 300]] for prompt in prompts])
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
    assert [found.shape for found in next_tokens(model, [], [7, 5])] == [(0,), (0, 2)]


@pytest.mark.parametrize(("batch_size", "positions"), [(64, 2048), (2, 2048), (64, 32), (64, 8), (64, 1)])
def test_log_probabilities_equal_those_of_one_text_at_a_time(model, batch_size, positions, monkeypatch):
    monkeypatch.setitem(inference._POSITIONS, "cpu", positions)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 400, (length,), generator=generator).tolist() for length in (2, 30, 7, 31, 50, 2)]
    for text, values in zip(texts, token_logprobs(model, texts, batching=Batching(batch_size)), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0].double().log_softmax(-1)
        expected = np.array([logits[place, token].item() for place, token in enumerate(text[1:])])
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[3], []], {"max_new_tokens": 4}, "prompt 1 has no tokens"),
        ([[3] * 250], {"max_new_tokens": 7}, "prompt 0 has 250 tokens and 7 are to follow, but the model's context is"),
        ([[3]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[3]], {"max_new_tokens": 1, "batching": Batching(0)}, "batch_size is 0"),
        ([[3, 4], [3]], {}, r"text 1 has 1 token\(s\): at least 2"),
        ([[]], {}, r"text 0 has 0 token\(s\)"),
        ([[3] * 257], {}, "text 0 has 257 tokens, but the model's context is 256"),
    ],
)
def test_refusals(model, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        (generate if options else token_logprobs)(model, prompts, **options)


def test_nan_weights_are_an_error(model):
    broken = copy.deepcopy(model)
    broken.lm_head.weight.data[3] = float("nan")
    with pytest.raises(ValueError, match="logits are NaN"):
        generate(broken, [[3, 4]], max_new_tokens=2)
    with pytest.raises(ValueError, match="log-probabilities of text 0 are NaN"):
        token_logprobs(broken, [[3, 4]])


def test_long_prompts_lose_their_oldest_tokens():
    assert cut_left([0, 1, 2, 3, 4], 3) == [2, 3, 4]
    assert cut_left([0, 1, 2, 3, 4], 3, first_id=0) == [0, 3, 4]
    assert cut_left([9, 1, 2, 3, 4], 3, first_id=0) == [2, 3, 4]
    assert cut_left([0, 1], 3) == [0, 1]


def test_stop_ids_come_from_the_generation_settings_first(model, tokenizer):
    other = copy.deepcopy(model)
    for ends, expected in ((1, {1}), ([5, 6], {5, 6}), (None, {1})):
        other.generation_config.eos_token_id = ends
        assert stop_ids(other, tokenizer) == expected


def test_batches_are_halved_when_memory_runs_out():
    seen = []

    def run(group, most=2):
        if len(group) > most:
            raise torch.OutOfMemoryError("too much")
        seen.append(group)
        return [f"item {index}" for index in group]

    assert in_batches([5, 1, 4, 2, 3], run, Batching(5), 100) == [f"item {index}" for index in range(5)]
    assert seen[0] == [0, 2]  # longest first
    with pytest.raises(torch.OutOfMemoryError):
        in_batches([5, 1], lambda group: run(group, most=0), Batching(2), 100)


PROMPTS = random_prompts(9, longest=20, vocabulary=300)


@pytest.fixture
def fixed(monkeypatch):
    """Fixed steps are taken on a CPU too; the list counts them."""
    used = []

    def allowed(model, cache, steps):
        used.append(steps)
        return all(type(layer) is RoomyLayer for layer in cache.layers)

    return lambda: monkeypatch.setattr(generation, "can_fix", allowed) or used


@pytest.mark.parametrize("name", FAMILIES)
def test_fixed_steps_write_the_same(name, fixed):
    model = scale(tiny_model(name), 20)
    assert model.config.model_type == FAMILIES[name]
    assert set(FAMILIES.values()) == decoding.FAMILIES, "every family is tried"
    usual = generate(model, PROMPTS, max_new_tokens=40)
    assert len({tuple(ids) for ids in usual}) > 5
    assert [ids[:9] for ids in usual[:4]] == one_by_one(model, PROMPTS[:4], 9)
    used = fixed()
    assert generate(model, PROMPTS, max_new_tokens=40) == usual
    assert used == [39]


def test_fixed_rows_end_at_their_limits_at_stop_ids_and_at_the_context(fixed):
    model = scale(tiny_model("gpt2"), 20)  # with learned positions: none may be asked for beyond the context of 64
    limits = [64 - len(prompt) if number % 2 else 3 for number, prompt in enumerate(PROMPTS)]
    stops = {generate(model, PROMPTS[1:2], max_new_tokens=40)[0][20]}
    usual = generate(model, PROMPTS, max_new_tokens=limits, stop_ids=stops)
    first = [ids[:1] for ids in generate(model, PROMPTS, max_new_tokens=9)]
    fixed()
    assert generate(model, PROMPTS, max_new_tokens=limits, stop_ids=stops) == usual
    assert generate(model, PROMPTS, max_new_tokens=1) == first
    calls = []
    model.register_forward_hook(lambda *arguments: calls.append(1))
    assert generate(model, PROMPTS[:1], max_new_tokens=40, stop_ids=first[0]) == [[]]
    assert len(calls) == 1, "it stops when all rows have ended"


def test_a_row_that_has_ended_is_asked_for_no_position_beyond_the_context():
    """One with a long prompt fills the context first, and stays in the batch until more have ended."""
    model = scale(tiny_model("gpt2"), 20)
    prompts = [list(range(2, 2 + length)) for length in (60, 20, 19, 18, 17, 16)]
    limits = [64 - len(prompt) for prompt in prompts]
    together = generate(model, prompts, max_new_tokens=limits)
    assert list(map(len, together)) == limits
    assert together == [generate(model, [p], max_new_tokens=n)[0] for p, n in zip(prompts, limits, strict=True)]


def test_steps_are_fixed_only_where_every_step_does_the_same():
    config = tiny_model("llama").config
    keys = SimpleNamespace(keys=torch.zeros(1, 1, 4, 1), values=torch.zeros(1, 1, 4, 1))
    cache = SimpleNamespace(layers=[RoomyLayer(keys, rows=1, length=4, room=4)])
    assert not decoding.can_fix(tiny_model("llama"), cache, 100), "not on a CPU"
    assert all(decoding.has_steady_steps(tiny_model(name).config) for name in FAMILIES)
    for changes in (
        {"rope_parameters": {**config.rope_parameters, "rope_type": "dynamic"}},
        {"rope_parameters": {**config.rope_parameters, "rope_type": "longrope"}},
        {"_attn_implementation": "flash_attention_2"},  # would read the mask in another way
    ):
        other = SimpleNamespace(**{"model_type": "llama", "_attn_implementation": "sdpa"} | changes)
        assert not decoding.has_steady_steps(other)


@pytest.mark.gpu
@on_a_gpu
def test_a_model_that_waits_for_the_gpu_is_decoded_without_a_graph(recwarn):
    model = scale(tiny_model("llama"), 20)
    usual = generate(model, PROMPTS, max_new_tokens=40)
    on_gpu = copy.deepcopy(model).cuda()
    on_gpu.register_forward_pre_hook(lambda *arguments: torch.ones(1, device="cuda").item() and None)
    for _ in range(2):
        assert generate(on_gpu, PROMPTS, max_new_tokens=40) == usual
    assert [str(warning.message).startswith("decoding without a CUDA graph") for warning in recwarn] == [True]
    assert generate(copy.deepcopy(model).cuda(), PROMPTS, max_new_tokens=40) == usual  # graphs still work


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_a_replayed_graph_writes_the_same(name, monkeypatch):
    model = scale(tiny_model(name), 20)
    usual = generate(model, PROMPTS, max_new_tokens=40)
    on_gpu = copy.deepcopy(model).cuda()
    counted = Mock(side_effect=decoding.fixed_steps)
    monkeypatch.setattr(generation, "fixed_steps", counted)
    assert generate(on_gpu, PROMPTS, max_new_tokens=40) == usual
    assert counted.call_count == 1
    with torch.no_grad():
        for parameter in on_gpu.parameters():
            parameter.mul_(1.01)  # a graph belongs to one call: other weights give other text
    assert generate(on_gpu, PROMPTS, max_new_tokens=40) == generate(on_gpu.cpu(), PROMPTS, max_new_tokens=40)
