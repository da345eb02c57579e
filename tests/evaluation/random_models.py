"""Tiny random models for tests."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from unteach.corpora import Probe

MEMORISED = (
    "To Sherlock Holmes she is always the woman. I have seldom heard him mention her under any other name. In his "
    "eyes she eclipses and predominates the whole of her sex."
)
UNSEEN = (
    "Mr. Hosmer Angel came to see us twice in the week. He was a quiet man, and would never go out by daylight, so "
    "my father said he must be ill of some strange fever."
)


def scale(model, factor):
    """Larger weights spread the logits: greedy decoding wanders, and depends on all of the prompt."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
    return model.eval()


def build_llama(vocabulary, *, kind="llama", seed=0, **changes):
    """A random model whose text wanders."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": vocabulary, "num_key_value_heads": 2, "max_position_embeddings": 256}
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    config = AutoConfig.for_model(kind, **sizes | special | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return scale(AutoModelForCausalLM.from_config(config), 12)


def memorise(model, sequences, steps=150):
    """Train a model until it recites the sequences (token ids of equal length)."""
    ids = torch.tensor(sequences)
    scale(model, 1 / 12)
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
