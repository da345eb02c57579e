"""Tiny random models for tests."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from unteach.corpora import Probe

MEMORISED = (
    "To Sherlock Holmes she is always the woman. I have seldom heard him mention her under any other name. In his "
    "eyes she eclipses and predominates the whole of her sex."
)
UNSEEN = (
    "Mr. Hosmer Angel came to see us twice in the week. He was a quiet man, and would never go out by daylight, so "
    "my father said he must be ill of some strange fever."
)


def build_llama(vocabulary, *, seed=0, **changes):
    """A random Llama whose logits are spread enough for greedy decoding to wander."""
    settings = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    } | changes
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12)
    torch.random.set_rng_state(generator_state)
    return model.eval()


def memorise(model, sequences, steps=150):
    """Train a model until it recites the sequences (token ids of equal length)."""
    ids = torch.tensor(sequences)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.div_(12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def probe_of(text, words):
    """A probe whose prompt is the first words of a text."""
    parts = text.split(" ")
    return Probe(" ".join(parts[:words]), " " + " ".join(parts[words:]))
