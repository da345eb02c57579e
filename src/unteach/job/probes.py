"""What a forget run measures: cheaply for its stop rule, and in full, on other passages, before and after."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unteach.config import ForgetConfig
from unteach.corpora import Benchmark, Probe
from unteach.data import Documents, special_ids
from unteach.job.inputs import Inputs

__all__ = ["CHEAP", "STOP", "Probes", "run_probes"]

GENERAL_TEXTS = 16
"""General texts of a stop rule: the same before and after, they show a loss of half a nat well enough."""
CHEAP = ("verbmem_f", "nll_general", "membership")
"""What is measured at every evaluation of a stop rule, as far as there is something to measure it on."""
STOP = (*CHEAP, "verbmem_holdout", "knowmem_f", "knowmem_r")
"""What is measured before the first step."""


@dataclass(slots=True)
class Probes:
    """What is measured: by the stop rule during the run, and afterwards on passages the rule never used."""

    start: Benchmark
    """Before the first step: what the stop rule measures, and what it compares with."""
    stop: Benchmark
    """At every evaluation."""
    final: Benchmark
    """Before and after the run."""

    def names(self) -> list[str]:
        """The metrics that a stop rule can use."""
        stop = self.stop
        parts = {
            "verbmem_f": stop.verbatim_forget,
            "knowmem_f": stop.knowledge_forget,
            "knowmem_r": stop.knowledge_retain,
            "auc_forget_holdout_min_40": stop.membership_holdout,
            "auc_forget_holdout_ppl": stop.membership_holdout,
        }
        return [*(name for name, items in parts.items() if items), "nll_general", "degenerate"]


def run_probes(
    inputs: Inputs,
    heldout: Documents,
    watched: Documents | None,
    config: ForgetConfig,
    max_tokens: int,
    *,
    parity: bool,
) -> Probes:
    """Benchmarks for the stop rule and for the final report, on different passages.

    Args:
        inputs: The documents, and holdout documents where there are any.
        heldout: General text that is not trained on.
        watched: Keep documents that are not trained on.
        config: How many passages, and the questions.
        max_tokens: How long documents were cut.
        parity: Whether the stop rule looks at membership and knowledge, too.
    """
    from unteach.corpora import micro
    from unteach.corpora.own import MINIMUM_TOKENS, cut_probes, own_benchmark, read_questions, split_probes

    tokenizer, documents = inputs.tokenizer, inputs.documents
    if config.model.startswith("micro:") and config.documents == "micro:forget" and not config.questions:
        halves = micro.load_benchmark("stop"), micro.load_benchmark("measure")  # the embedded benchmark has its own
        stop = _cheap(halves[0], config, parity=parity, detectable=inputs.holdout is not None)
        kept = micro.probes("retain", "measure")[: config.probes]
        return Probes(
            start=stop, stop=_without_holdout(stop), final=dataclasses.replace(halves[1], verbatim_retain=kept)
        )
    never_seen = inputs.holdout or heldout
    added = sum(map(len, special_ids(tokenizer)))
    lengths = sorted(added + len(ids) for ids in documents.encode(tokenizer)[:200])
    typical = min(max_tokens, lengths[len(lengths) // 2])
    expected = max(4, min(64, typical // 2))
    prompt = max(MINIMUM_TOKENS - expected, min(128, typical // 3))
    sizes: dict[str, Any] = {
        "prompt_tokens": prompt,
        "expected_tokens": expected,
        "chunk_tokens": max_tokens,
        "first_chunk": config.document_mode == "truncate",
        "seed": config.seed,
    }
    asked: dict[str, Any] = {
        name: read_questions(Path(file)) if file else ()
        for name, file in (("forget_questions", config.questions), ("retain_questions", config.keep_questions))
    }
    whole = own_benchmark(
        tokenizer,
        documents,
        holdout_documents=never_seen,
        general_texts=heldout,
        count=2 * config.probes,
        name=documents.name,
        **asked,
        **sizes,
    )
    if watched:
        kept = _probes_or_none(watched, tokenizer, count=config.probes, later_passages=True, **sizes)
        whole = dataclasses.replace(whole, membership_retain=tuple(watched.texts), verbatim_retain=kept)
    if inputs.holdout is None:  # other text is told apart by its kind, whether or not the model saw it
        whole = dataclasses.replace(whole, membership_holdout=())
    stop_probes, final_probes = split_probes(whole.verbatim_forget, config.seed)
    unseen: tuple[Probe, ...] = cut_probes(never_seen, tokenizer, count=config.probes, later_passages=True, **sizes)
    stop = dataclasses.replace(whole, verbatim_forget=stop_probes, verbatim_holdout=unseen)
    stop = _cheap(stop, config, parity=parity, detectable=inputs.holdout is not None)
    return Probes(
        start=stop, stop=_without_holdout(stop), final=dataclasses.replace(whole, verbatim_forget=final_probes)
    )


def _cheap(benchmark: Benchmark, config: ForgetConfig, *, parity: bool, detectable: bool) -> Benchmark:
    """What a stop rule needs: recital of forget and never-seen passages, general text, and what else it asks for."""
    rule, most = config.stop.metric or "", config.probes
    asks, compares = parity or "knowmem" in rule, (parity and detectable) or "auc_" in rule
    return dataclasses.replace(
        benchmark,
        name=f"{benchmark.name}, stop rule",
        verbatim_forget=benchmark.verbatim_forget[:most],
        verbatim_holdout=benchmark.verbatim_holdout[:most],
        general_texts=benchmark.general_texts[: min(most, GENERAL_TEXTS)],
        membership_forget=benchmark.membership_forget[:most] if compares else (),
        membership_retain=benchmark.membership_retain[: min(most, GENERAL_TEXTS)] if compares else (),
        membership_holdout=benchmark.membership_holdout[:most] if compares else (),
        verbatim_retain=(),
        multiple_choice=(),
        knowledge_forget=benchmark.knowledge_forget if asks else (),
        knowledge_retain=benchmark.knowledge_retain if "knowmem_r" in rule else (),
    )


def _probes_or_none(documents: Documents, tokenizer: Any, **sizes: Any) -> tuple[Probe, ...]:
    from unteach.corpora.own import cut_probes

    try:
        return cut_probes(documents, tokenizer, **sizes)
    except ValueError:  # all too short
        return ()


def _without_holdout(benchmark: Benchmark) -> Benchmark:
    return dataclasses.replace(benchmark, verbatim_holdout=())
