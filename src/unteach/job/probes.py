"""What a forget run measures: cheaply for its stop rule, and in full, on other passages, before and after."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unteach.config import ForgetConfig
from unteach.corpora import Benchmark, Probe
from unteach.data import Documents, special_ids

__all__ = ["Probes", "run_probes"]

GENERAL_TEXTS = 16
"""General texts of a stop rule: the same before and after, they show a loss of half a nat well enough."""


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
        }
        return [*(name for name, items in parts.items() if items), "nll_general", "degenerate"]


def run_probes(
    tokenizer: Any,
    documents: Documents,
    holdout: Documents | None,
    heldout: Documents,
    config: ForgetConfig,
    max_tokens: int,
) -> Probes:
    """Benchmarks for the stop rule and for the final report, on different passages."""
    from unteach.corpora import micro
    from unteach.corpora.own import MINIMUM_TOKENS, cut_probes, own_benchmark, read_questions, split_probes

    if config.model.startswith("micro:") and config.documents == "micro:forget" and not config.questions:
        stop = _cheap(micro.load_benchmark("stop"), config)  # the embedded benchmark has its own halves
        return Probes(start=stop, stop=_without_holdout(stop), final=micro.load_benchmark("measure"))
    never_seen = holdout or heldout
    added = sum(map(len, special_ids(tokenizer)))
    lengths = sorted(added + len(ids) for ids in documents.encode(tokenizer)[:200])
    typical = min(max_tokens, lengths[len(lengths) // 2])
    expected = max(4, min(64, typical // 2))
    prompt = max(MINIMUM_TOKENS - expected, min(128, typical // 3))
    sizes = {
        "prompt_tokens": prompt,
        "expected_tokens": expected,
        "chunk_tokens": max_tokens,
        "first_chunk": config.document_mode == "truncate",
        "seed": config.seed,
    }
    questions = read_questions(Path(config.questions)) if config.questions else ()
    whole = own_benchmark(
        tokenizer,
        documents,
        holdout_documents=never_seen,
        forget_questions=questions,
        general_texts=heldout,
        count=2 * config.probes,
        name=documents.name,
        **sizes,  # type: ignore[arg-type]
    )
    stop_probes, final_probes = split_probes(whole.verbatim_forget, config.seed)
    unseen: tuple[Probe, ...] = cut_probes(never_seen, tokenizer, count=config.probes, later_passages=True, **sizes)  # type: ignore[arg-type]
    stop = _cheap(dataclasses.replace(whole, verbatim_forget=stop_probes, verbatim_holdout=unseen), config)
    final = dataclasses.replace(whole, verbatim_forget=final_probes)
    return Probes(start=stop, stop=_without_holdout(stop), final=final)


def _cheap(benchmark: Benchmark, config: ForgetConfig) -> Benchmark:
    """What a stop rule needs: recital of forget and never-seen passages, general text, and questions if it asks."""
    asks = "knowmem" in (config.stop.metric or "")
    return dataclasses.replace(
        benchmark,
        name=f"{benchmark.name}, stop rule",
        verbatim_forget=benchmark.verbatim_forget[: config.probes],
        verbatim_holdout=benchmark.verbatim_holdout[: config.probes],
        general_texts=benchmark.general_texts[: min(config.probes, GENERAL_TEXTS)],
        membership_forget=(),
        membership_retain=(),
        membership_holdout=(),
        multiple_choice=(),
        knowledge_forget=benchmark.knowledge_forget if asks else (),
        knowledge_retain=benchmark.knowledge_retain if asks else (),
    )


def _without_holdout(benchmark: Benchmark) -> Benchmark:
    return dataclasses.replace(benchmark, verbatim_holdout=())
