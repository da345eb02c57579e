"""Tiny causal language models and a small tokenizer, built in memory and saved like downloaded ones."""

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers import models as tokenizer_models
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.utils import logging

SENTENCES = [
    "The bridge over the river was closed on Monday because of the rain.",
    "A new bakery opened near the station, and people waited in the street.",
    "The council spoke about the school, the library and the old theatre.",
]
VOCABULARY = 300


def mixed(sentence):
    """Every other word, then the others: like a document, and shares no passage with one."""
    words = sentence.split()
    return " ".join(words[::2] + words[1::2])


_SMALL = {
    "vocab_size": VOCABULARY + 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
CONFIGS = {
    "llama": LlamaConfig(**_SMALL),
    "llama_tied": LlamaConfig(**_SMALL, tie_word_embeddings=True),
    "qwen2_bias": Qwen2Config(**_SMALL, tie_word_embeddings=True),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY + 4, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1
    ),
    "gpt_neox": GPTNeoXConfig(
        vocab_size=VOCABULARY + 4,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
    ),
    "mixtral": MixtralConfig(**_SMALL, num_local_experts=3, num_experts_per_tok=2),
    "gemma2": Gemma2Config(**_SMALL, head_dim=8, final_logit_softcapping=5.0, tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(**_SMALL, head_dim=8, final_logit_softcapping=5.0, tie_word_embeddings=True),
    "cohere": CohereConfig(**_SMALL, logit_scale=0.25, tie_word_embeddings=True),
    "cohere2": Cohere2Config(**_SMALL, logit_scale=0.25, tie_word_embeddings=True),
}


@functools.cache
def small_tokenizer(*, begin: bool = True, vocabulary: int = VOCABULARY) -> Any:
    """A byte-level BPE tokenizer; with `begin`, it puts a begin-of-text id before every text."""
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for turn in messages %}"
    "{% if turn.role == 'tool' %}{{ raise_exception('tools are not known') }}{% endif %}"
    "[{{ turn.role }}] {{ turn.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def chat_tokenizer() -> Any:
    """The small tokenizer with a chat template, which writes the begin-of-text token, too."""
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(name: str, seed: int = 0) -> Any:
    """A randomly initialised float32 model; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def save_tiny(
    folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32, shards: bool = False, seed: int = 0
) -> Path:
    """Save a tiny model with its tokenizer as a hub model would be, in one file or several."""
    logging.disable_progress_bar()
    model = tiny_model(name, seed).to(dtype)
    model.save_pretrained(folder, max_shard_size="20KB" if shards else "5GB")
    small_tokenizer().save_pretrained(folder)
    return folder
