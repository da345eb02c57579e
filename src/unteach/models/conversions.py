"""Models that cannot be used as they are: what is wrong with them, and the command that makes one that can."""

from __future__ import annotations

from pathlib import Path

__all__ = ["adapter", "gguf", "quantised"]


def _made_by(kind: str, model: str, tokenizer: str, out: str, how: str = "") -> str:
    """The command that makes a folder ``out`` which can be loaded; kind, model, tokenizer and how are Python."""
    return (
        f'python -c "from {kind} as M; from transformers import AutoTokenizer as T; M.from_pretrained({model}'
        f".save_pretrained('{out}'{how}); T.from_pretrained({tokenizer}).save_pretrained('{out}')\""
    )


def gguf(file: Path) -> str:
    """What to do with a GGUF file."""
    out, given = f"{file.with_suffix('')}-model", f"'{file.parent}', gguf_file='{file.name}'"
    kind = "transformers import GgufConfig as C, AutoModelForCausalLM"
    command = _made_by(kind, f"{given}, quantization_config=C(dequantize=True), dtype='float32')", given, out)
    return f"{file.name} is a GGUF file; convert it (pip install gguf accelerate) with: {command} and give '{out}'"


def adapter(folder: Path, wrong: str, tokenizer: str) -> str:
    """What to do with the folder of an adapter that cannot be used."""
    out, merged = f"{folder}-merged", f"'{folder}').merge_and_unload()"
    command = _made_by("peft import AutoPeftModelForCausalLM", merged, f"'{tokenizer}'", out)
    return f"it holds an adapter, and {wrong}; merge it (pip install peft) with: {command} and give '{out}'"


def quantised(folder: Path, method: str) -> str:
    """What to do with a quantised model."""
    wrong = f"its weights are quantised ({method}), and cannot be trained: give the model it was made from"
    if method != "bitsandbytes":  # the one whose rounding Transformers takes back for every model
        return wrong
    out = f"{folder}-dequantised"
    plain = "transformers import AutoModelForCausalLM", f"'{folder}').dequantize()", f"'{folder}'", out
    command = _made_by(*plain, ", save_original_format=False")  # which would be the quantised one
    return f"{wrong}, or make '{out}' (pip install bitsandbytes) with: {command}"
