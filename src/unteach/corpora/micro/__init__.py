"""The embedded benchmark: fictional local news, public-domain prose, a tokenizer and four small models.

An honest small benchmark with the schema of MUSE; it is not MUSE, and its scores compare with nothing but
themselves. See docs/micro.md.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from unteach.corpora import Benchmark

from . import benchmark, generate, pretraining

FOLDER = Path(__file__).parent
MODELS = ("target", "retrained", "base", "small")
DOCUMENTS = (
    "forget",
    "retain",
    "holdout",
    "general",
    "general_heldout",
    "forget_1",
    "forget_2",
    "forget_3",
    "forget_4",
    "instruct",
)


def load_general(part: str) -> list[str]:
    """Return the public-domain passages of `general` or `general_heldout`."""
    with gzip.open(FOLDER / "data" / f"{part}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def documents(part: str) -> list[str]:
    """Return the texts of a part.

    Args:
        part: A name in `DOCUMENTS`.

    Raises:
        ValueError: If there is no such part.
    """
    if part not in DOCUMENTS:
        raise ValueError(f"documents micro:{part} do not exist, must be micro: with one of {', '.join(DOCUMENTS)}")
    if part.startswith("general"):
        return load_general(part)
    if part == "instruct":
        return pretraining.instruction_documents()
    if part.startswith("forget_"):
        return generate.fold_documents(int(part.removeprefix("forget_")))
    return generate.split_documents(part)


def model_folder(part: str) -> Path:
    """Return the folder of an embedded model, ready for `AutoModelForCausalLM.from_pretrained`.

    Args:
        part: A name in `MODELS`.

    Raises:
        ValueError: If there is no such model.
    """
    if part not in MODELS:
        raise ValueError(f"model is micro:{part}, must be micro: and one of {', '.join(MODELS)}")
    return FOLDER / "models" / part


def load_benchmark(half: benchmark.Half = "all") -> Benchmark:
    """Return the benchmark.

    Args:
        half: Verbatim probes of all forget documents, or of one half of the stories: `stop` for a stop rule,
            `measure` for measuring with probes that rule has not seen.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder("base"))
    return benchmark.build_benchmark(tokenizer, load_general("general_heldout"), half)
