"""Verbatim memory: does the model recite a text when given its beginning?"""

from collections.abc import Sequence
from typing import Any, Literal

from unteach.corpora import Probe
from unteach.data.text import Words, decode, encode
from unteach.evaluation.generation import generate
from unteach.evaluation.inference import PROMPTS_TOGETHER, Batching, cut_left, stop_ids
from unteach.evaluation.repetition import is_degenerate
from unteach.evaluation.rouge import rouge_l
from unteach.models import context_length

LongPrompts = Literal["cut", "error"]


def recite(
    model: Any,
    tokenizer: Any,
    probes: Sequence[Probe],
    *,
    tokens: int = 128,
    words: Words = "latin",
    long_prompts: LongPrompts = "cut",
    batching: Batching = PROMPTS_TOGETHER,
) -> list[dict[str, Any]]:
    """Let the model continue each prompt greedily and compare with the true continuation by ROUGE-L.

    As in MUSE: a prompt is encoded with the special tokens its tokenizer adds, `tokens` tokens are generated,
    and the true continuation is cut to `tokens` ids *with* its begin-of-text id, so that a perfect reciter
    scores just under 1. Probes that carry token ids are used as they are, and generate as many tokens as they
    expect.

    Draws no random number and leaves the model as it was: safe to call between training steps.

    Args:
        model: a Hugging Face causal language model.
        tokenizer: its tokenizer.
        probes: what to recite.
        tokens: how many tokens to generate for probes without ids.
        words: how ROUGE splits words, see `rouge.split_words`.
        long_prompts: `"cut"` drops the oldest tokens of a prompt that does not fit the context (the record
            then has `cut`, their number); `"error"` refuses.
        batching: how many probes are decoded together.

    Returns:
        For each probe its `prompt`, `expected`, `output`, `score` (0 to 1) and whether it is `degenerate`.
    """
    prompts: list[list[int]] = []
    expected: list[str] = []
    limits: list[int] = []
    for probe in probes:
        prompts.append(list(probe.prompt_ids) if probe.prompt_ids is not None else encode(tokenizer, probe.prompt))
        true_ids = probe.expected_ids
        limits.append(tokens if true_ids is None else len(true_ids))
        expected.append(decode(tokenizer, encode(tokenizer, probe.expected)[:tokens] if true_ids is None else true_ids))
    outputs, cuts = continue_prompts(model, tokenizer, prompts, limits, long_prompts=long_prompts, batching=batching)
    records = []
    for probe, true_text, output, cut in zip(probes, expected, outputs, cuts, strict=True):
        record = score_record(probe.prompt, true_text, output, words)
        records.append(record | {"cut": cut} if cut else record)
    return records


def continue_prompts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    *,
    long_prompts: LongPrompts,
    batching: Batching,
) -> tuple[list[str], list[int]]:
    """Greedy continuations as text, and how many of its oldest tokens each prompt lost to fit the context."""
    context = context_length(model)
    fitted = [list(prompt) for prompt in prompts]
    if long_prompts == "cut":
        first_id = getattr(tokenizer, "bos_token_id", None)
        fitted = []
        for prompt, limit in zip(prompts, limits, strict=True):
            if limit + 2 > context:
                raise ValueError(
                    f"{limit} tokens are to be generated, but the model's context is {context}: generate fewer"
                )
            fitted.append(cut_left(prompt, context - limit, first_id))
    cuts = [len(prompt) - len(rest) for prompt, rest in zip(prompts, fitted, strict=True)]
    ends = stop_ids(model, tokenizer)
    generated = generate(model, fitted, max_new_tokens=limits, stop_ids=ends, batching=batching)
    return [decode(tokenizer, ids) for ids in generated], cuts


def score_record(prompt: str, expected: str, output: str, words: Words) -> dict[str, Any]:
    """The record of one generated text."""
    return {
        "prompt": prompt,
        "expected": expected,
        "output": output,
        "score": rouge_l(expected, output, words=words),
        "degenerate": is_degenerate(output),
    }


def mean_score(records: Sequence[dict[str, Any]]) -> float:
    """Mean score of records in percent: the value of `verbmem_f` and `knowmem_f`.

    Args:
        records: what `recite` returned; at least one.
    """
    if not records:
        raise ValueError("records is empty: there is nothing to average")
    return 100 * sum(record["score"] for record in records) / len(records)
