"""Batched decoding gives the text of one-by-one decoding, and of Transformers' own `generate`."""

import copy
import random

import pytest
import torch
from random_models import build_llama
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from unteach.evaluation import generation
from unteach.evaluation.decoding import faster_on_cpu
from unteach.evaluation.generation import _PromptReader, _shared_length, generate, next_tokens
from unteach.evaluation.inference import Batching, cut_left, in_batches, stop_ids
from unteach.models import context_length

VOCABULARY = 400


def random_prompts(count, *, shared=0, seed=0, longest=40):
    generator = random.Random(seed)
    beginning = [generator.randrange(2, VOCABULARY) for _ in range(shared)]
    return [
        beginning + [generator.randrange(2, VOCABULARY) for _ in range(generator.randrange(1, longest))]
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
    prompts = random_prompts(17, shared=shared)
    expected = one_by_one(model, prompts, 24)
    assert len({tuple(ids) for ids in expected}) > 10  # the model wanders: equality means something
    for piece_tokens in (1, 64, 1024):
        monkeypatch.setitem(generation._PIECE_TOKENS, "cpu", piece_tokens)
        for batch_size in (1, 4, 128):
            assert generate(model, prompts, max_new_tokens=24, batching=Batching(batch_size)) == expected
    assert generate(model, prompts, max_new_tokens=24, batching=Batching(batch_tokens=150)) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
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
    expected = []
    for ids in free:
        end = next((place for place, token in enumerate(ids) if token in stops), len(ids))
        expected.append(ids[:end])
    assert generate(model, prompts, max_new_tokens=20, stop_ids=stops) == expected
    assert expected == one_by_one(model, prompts, 20, sorted(stops))
    assert [] in expected
    limits = [1 + index for index in range(12)]
    monkeypatch.setitem(generation._PIECE_TOKENS, "cpu", 30)
    assert generate(model, prompts, max_new_tokens=limits) == [ids[: k + 1] for k, ids in enumerate(free)]


def test_real_end_tokens_inside_a_prompt_are_read(model):
    """Masks come from lengths: an end-of-text id in a prompt is a token like any other, also where it pads."""
    inside = [[5, 1, 6, 7], [5, 6, 7], [1, 1, 1, 1, 1, 1, 9]]
    assert generate(model, inside, max_new_tokens=8) == one_by_one(model, inside, 8)


def test_shared_beginning_is_read_once(model):
    prompts = random_prompts(6, shared=40)
    assert _shared_length(prompts) >= 40
    reader = _PromptReader(model, prompts)
    assert reader.shared == _shared_length(prompts)
    assert _shared_length([[1, 2, 3]]) == 2
    assert _shared_length([[1, 2, 3], [1, 2, 3]]) == 2
    assert _shared_length([[1, 2, 3], [1, 2]]) == 1
    assert _shared_length([]) == 0


def test_sliding_window_models_do_not_share_a_beginning():
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    mistral = MistralForCausalLM(config).eval()
    prompts = random_prompts(7, shared=40)
    with torch.no_grad():
        assert _PromptReader(mistral, prompts).shared == 0
    assert generate(mistral, prompts, max_new_tokens=12) == one_by_one(mistral, prompts, 12)


def test_learned_positions():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3)
    gpt = GPT2LMHeadModel(config).eval()
    prompts = random_prompts(9, shared=35)
    assert context_length(gpt) == 128
    assert generate(gpt, prompts, max_new_tokens=12) == one_by_one(gpt, prompts, 12)


def test_model_and_random_state_are_left_as_found(model):
    training = copy.deepcopy(model).train()
    training.model.layers[0].eval()
    modes = [module.training for module in training.modules()]
    implementation = training.config._attn_implementation
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    weights = {name: value.clone() for name, value in training.state_dict().items()}
    generate(training, random_prompts(3), max_new_tokens=4)
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


def test_progress_counts_every_prompt(model):
    done = []
    generate(model, random_prompts(10), max_new_tokens=2, batching=Batching(4, advance=done.append))
    assert done == [4, 4, 2]


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([[3], []], 4, "prompt 1 has no tokens"),
        ([[3] * 250], 7, "prompt 0 has 250 tokens and 7 are to follow, but the model's context is 256"),
        ([[3]], 0, "max_new_tokens is 0"),
    ],
)
def test_refusals(model, prompts, new, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, max_new_tokens=new)
    with pytest.raises(ValueError, match="batch_size is 0"):
        generate(model, [[3]], max_new_tokens=1, batching=Batching(0))


def test_nan_weights_are_an_error(model):
    broken = copy.deepcopy(model)
    broken.lm_head.weight.data[3] = float("nan")
    with pytest.raises(ValueError, match="logits are NaN"):
        generate(broken, [[3, 4]], max_new_tokens=2)


def test_no_prompts(model):
    assert generate(model, [], max_new_tokens=3) == []


def test_long_prompts_lose_their_oldest_tokens():
    assert cut_left([0, 1, 2, 3, 4], 3) == [2, 3, 4]
    assert cut_left([0, 1, 2, 3, 4], 3, first_id=0) == [0, 3, 4]
    assert cut_left([9, 1, 2, 3, 4], 3, first_id=0) == [2, 3, 4]
    assert cut_left([0, 1], 3) == [0, 1]


def test_stop_ids_come_from_the_generation_settings_first(model, tokenizer):
    assert stop_ids(model, tokenizer) == {1}
    other = copy.deepcopy(model)
    other.generation_config.eos_token_id = [5, 6]
    assert stop_ids(other, tokenizer) == {5, 6}
    other.generation_config.eos_token_id = None
    assert stop_ids(other, tokenizer) == {1}


def test_batches_are_halved_when_memory_runs_out():
    seen = []

    def run(group):
        if len(group) > 2:
            raise torch.OutOfMemoryError("too much")
        seen.append(group)

    in_batches([5, 1, 4, 2, 3], run, Batching(5), 100)
    assert sorted(index for group in seen for index in group) == [0, 1, 2, 3, 4]
    assert seen[0] == [0, 2]  # longest first

    def never(group):
        raise torch.OutOfMemoryError("too much")

    with pytest.raises(torch.OutOfMemoryError):
        in_batches([5, 1], never, Batching(2), 100)
