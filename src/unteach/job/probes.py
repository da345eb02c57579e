"""What a forget run measures: cheaply for the rule by which it ends, in full on other passages before and after."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unteach.config import ForgetConfig
from unteach.corpora import Benchmark, Probe, micro
from unteach.corpora.catalog import load_benchmark
from unteach.corpora.own import (
    cut_probes,
    own_benchmark,
    passage_sizes,
    read_questions,
    short_passages,
    split_probes,
    token_lengths,
    with_names,
)
from unteach.data import Documents
from unteach.errors import InputError
from unteach.evaluation.formulas import FEW, chance_level
from unteach.evaluation.metrics import LOSS_AUC, RAW_AUC
from unteach.evaluation.verdict import AUC_BAND
from unteach.job.inputs import Inputs, has_own_questions
from unteach.training.stopping import MORE_DEGENERATE, Condition, Search, StopRule, parse_rule

__all__ = ["CHEAP", "STOP", "Probes", "in_a_line", "run_probes", "saw_the_documents", "search_for", "stop_rule"]

GENERAL_TEXTS = 16
"""General texts of a stop rule: the same before and after, they show a loss of half a nat well enough."""
CHEAP = ("verbmem_f", "nll_general", "membership", "nll_retain")
"""What is measured at every evaluation of a stop rule, as far as there is something to measure it on."""
STOP = (*CHEAP, "verbmem_holdout", "knowmem_f", "knowmem_r")
"""What is measured before the first step."""
LEAST_BAND = 0.05
"""An AUC may lie so far beyond that of never-seen text, or one standard error of it, if that is more."""
RECITES = 20.0
"""A base model that recites the documents by so many points better than never-seen text has likely seen them."""


@dataclass(slots=True)
class Probes:
    """What is measured: by the stop rule during the run, and afterwards on passages the rule never used."""

    start: Benchmark
    """Before the first step: what the stop rule measures, and what it compares with."""
    final: Benchmark
    """Before and after the run."""
    few: str = ""
    """What the passages can show, where they are few."""

    @property
    def few_passages(self) -> tuple[int, int] | None:
        """How many passages of the documents and of never-seen ones a stop rule compares, where they are few."""
        return (len(self.start.verbatim_forget), len(self.start.verbatim_holdout)) if self.few else None

    @property
    def stop(self) -> Benchmark:
        """At every evaluation of the stop rule."""
        return dataclasses.replace(self.start, verbatim_holdout=())

    def names(self) -> list[str]:
        """The metrics that a stop rule can use."""
        parts = {
            "verbmem_f": self.start.verbatim_forget,
            "knowmem_f": self.start.knowledge_forget,
            "knowmem_r": self.start.knowledge_retain,
            RAW_AUC: self.start.membership_holdout,
            LOSS_AUC: self.start.membership_holdout,
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

    ``heldout`` (general text) and ``watched`` (keep documents) are not trained on; documents were cut after
    ``max_tokens``; with ``parity`` the stop rule looks at membership and knowledge, too.
    """
    tokenizer, documents, detectable = inputs.tokenizer, inputs.documents, inputs.holdout is not None
    if has_own_questions(config):
        stop, whole = micro.load_benchmark("stop"), micro.load_benchmark("measure")  # it has its own
        kept = micro.probes("retain", "measure")[: config.probes]
        final = dataclasses.replace(whole, verbatim_retain=kept)
        return Probes(_cheap(stop, config, parity=parity, detectable=detectable, keeps=watched is not None), final)
    never_seen = inputs.holdout or heldout
    lengths = token_lengths(documents, tokenizer)
    sizes: dict[str, Any] = {"first_chunk": config.document_mode == "truncate", "seed": config.seed}
    sizes |= passage_sizes(lengths, max_tokens)
    few = len(cut_probes(documents, tokenizer, **sizes, count=FEW, later_passages=True)) < FEW
    if few:
        sizes |= short_passages(sum(lengths), FEW)
    whole = own_benchmark(
        tokenizer,
        documents,
        holdout_documents=never_seen,
        general_texts=heldout,
        forget_questions=read_questions(Path(config.questions)) if config.questions else (),
        retain_questions=read_questions(Path(config.keep_questions)) if config.keep_questions else (),
        question_template=config.question_template,
        count=2 * config.probes,
        name=documents.name,
        **sizes,
    )
    sizes |= {"count": config.probes, "later_passages": True}
    if watched:
        kept = ()
        with suppress(ValueError):  # all too short
            kept = cut_probes(watched, tokenizer, **sizes)
        whole = dataclasses.replace(whole, membership_retain=tuple(watched.texts), verbatim_retain=kept)
    if not detectable:  # other text is told apart by its kind, whether or not the model saw it
        whole = dataclasses.replace(whole, membership_holdout=())
    first, second = split_probes(whole.verbatim_forget, config.seed)
    unseen = cut_probes(never_seen, tokenizer, **sizes)
    stop = dataclasses.replace(whole, verbatim_forget=first, verbatim_holdout=unseen)
    final = dataclasses.replace(whole, verbatim_forget=second)
    said = ""
    if few:
        many = cut_probes(never_seen, tokenizer, **sizes | {"count": 8 * config.probes, "first_chunk": True})
        stop, final = (_with_names(half, many, tokenizer, config.probes) for half in (stop, final))
        said = final.notes[-1]
    if config.stop.probes:
        stop, said = benchmarks_own(config.stop.probes, stop), ""
    cheap = _cheap(stop, config, parity=parity, detectable=detectable, keeps=watched is not None)
    return Probes(cheap, final, said)


def benchmarks_own(probes: str, cut: Benchmark) -> Benchmark:
    """What a benchmark itself asks and has recited, measured in its own way, with the other parts of ``cut``.

    ``probes`` is its name, or the name and the folder of its tables: ``muse-news:FOLDER``. Nothing of it is shortened.
    """
    name, _, folder = probes.partition(":")
    try:
        found = load_benchmark(name, Path(folder) if folder else None)
    except ValueError as error:
        raise InputError(f"stop.probes is {probes!r}: {error}") from None
    if not found.verbatim_forget:
        raise InputError(f"stop.probes is {probes!r}: the benchmark has no passages to be continued; name another")
    parts = ("verbatim_holdout", "general_texts", "membership_forget", "membership_retain", "membership_holdout")
    return dataclasses.replace(found, **{part: getattr(cut, part) for part in parts})


def _with_names(half: Benchmark, unseen: Sequence[Probe], tokenizer: Any, most: int) -> Benchmark:
    """A benchmark of few passages with the names in them, and never-seen passages with as large a share of names."""
    asked = with_names(half.verbatim_forget, tokenizer, most)
    names = sum(probe.exact for probe in asked)
    alike = with_names(unseen, tokenizer, most, names / len(asked))
    few = len({probe.document for probe in asked})
    note = (
        f"recital is measured on {len(asked) - names} short passages of {few} document{'s' * (few > 1)} and {names} "
        f"names and numbers in them: so few show whether the text is recited, not every trace of it"
    )
    return dataclasses.replace(half, verbatim_forget=asked, verbatim_holdout=alike, notes=(*half.notes, note))


def _cheap(benchmark: Benchmark, config: ForgetConfig, *, parity: bool, detectable: bool, keeps: bool) -> Benchmark:
    """What a stop rule needs: recital of forget and never-seen passages, general text, and what else it asks for; and
    keep text, where there is some."""
    rule, most = config.stop.metric or "", config.probes
    asks, compares = parity or "knowmem" in rule, (parity and detectable) or "auc_" in rule
    return dataclasses.replace(
        benchmark,
        name=f"{benchmark.name}, stop rule",
        verbatim_forget=benchmark.verbatim_forget[: None if config.stop.probes else most],
        verbatim_holdout=benchmark.verbatim_holdout[:most],
        general_texts=benchmark.general_texts[: min(most, GENERAL_TEXTS)],
        membership_forget=benchmark.membership_forget[:most] if compares else (),
        membership_retain=benchmark.membership_retain[: min(most, GENERAL_TEXTS)] if compares or keeps else (),
        membership_holdout=benchmark.membership_holdout[:most] if compares else (),
        verbatim_retain=(),
        multiple_choice=(),
        knowledge_forget=benchmark.knowledge_forget if asks else (),
        knowledge_retain=benchmark.knowledge_retain if "knowmem_r" in rule else (),
    )


def stop_rule(
    config: ForgetConfig,
    before: Mapping[str, float],
    others: Mapping[str, Mapping[str, float]],
    *,
    parity: bool,
    texts: tuple[int, int],
    few: tuple[int, int] | None = None,
) -> StopRule:
    """The rule that the config names, or that the documents are where never-seen ones are.

    Where they are is read off a model that never saw them: the reference, or for parity the base model, if it does not
    recite them. How never-seen *documents* are recited before the run says it as well, and is asked first; general text
    is of another kind.

    Membership is two-sided: text less likely than never-seen text stands out, too. The loss has a limit only where the
    base model is given: without one the wording itself becomes too unlikely (AUC 0.84 to 0.88), and nothing brings it
    back; the verdict then says so.

    A pull to never-seen words comes to parity from below, ever more slowly. Where parity is the value of a model, which
    is an estimate, the run ends within its standard error.

    Loops are waited for where the run does something about them; else they may not fall. At parity only where it begins
    with that once looks find them: the model that meets the rule may be the one that they are found in. A run that
    unlearns them from its first step has hardly any by then.

    Args:
        config: Its ``stop.metric`` is taken where there is one.
        before: Scores of the model before the run, ``verbmem_holdout`` among them.
        others: Scores of the ``reference`` and of the ``base`` model, where there are any.
        parity: Whether membership and knowledge count, too, as far as they were measured.
        texts: How many forget and holdout texts the membership AUC compares.
        few: Where there are few, how many passages of the forget documents and of never-seen ones are continued: their
            mean may lie as high as that of so few never-seen ones does by chance.
    """
    if config.stop.metric:
        return parse_rule(config.stop.metric, before, others)
    base = others.get("base")
    if base is not None and saw_the_documents(base, before):
        base = None
    never_saw, whose = others.get("reference"), "the reference model's"
    if never_saw is None and base is not None and parity:
        never_saw, whose = base, "the base model's"
    value, why = before["verbmem_holdout"], "never-seen documents before the run"
    high = before.get("verbmem_holdout_high", value)
    compared = never_saw is not base or RAW_AUC not in before  # prose tells little of documents
    if never_saw is not None and compared:
        value, why = never_saw["verbmem_f"], whose
        high, few = never_saw.get("verbmem_f_high", value), few and (few[0], few[0])
    if few:
        why = f"{why}: {value:.3g}, and up to this for {few[0]} of them by chance"
        value = high = chance_level(value, high, few[1], few[0])
    waits = config.method.loops_every and (config.method.loops_once_found or not parity)
    looping = before["degenerate"] + MORE_DEGENERATE if waits else None
    if not parity:
        return StopRule((Condition("verbmem_f", "<=", value, why),), looping)
    conditions = [Condition("verbmem_f", "<=", max(value, high), f"{why}, within the interval", scale=10.0)]
    if RAW_AUC in before:
        forget, holdout = texts
        own = {} if never_saw is None else {name: never_saw[name] for name in (RAW_AUC, LOSS_AUC)}
        if never_saw is base:  # where it finds the documents likelier than never-seen ones, one half: rather too far
            own = {name: value for name, value in own.items() if value > 0.5}
        band = max(LEAST_BAND, math.sqrt((forget + holdout + 1) / (12 * forget * holdout)))
        centre, loss = own.get(RAW_AUC, 0.5), own.get(LOSS_AUC, 0.5) - band
        said = {name: whose if name in own else "never-seen text" for name in (RAW_AUC, LOSS_AUC)}
        most = None if base is None else own.get(LOSS_AUC, 0.5) + AUC_BAND
        least = centre - band if config.method.goal == "never_seen" and RAW_AUC in own else centre
        conditions.append(Condition(RAW_AUC, ">=", least, said[RAW_AUC], limit=centre + band, scale=0.1))
        conditions.append(Condition(LOSS_AUC, ">=", loss, said[LOSS_AUC], limit=most, scale=0.1))
    knew = never_saw or {}
    if "knowmem_f" in before and "knowmem_f_high" in knew:
        has = f"a model that never saw the documents has {knew['knowmem_f']:.3g}, at most this within its interval"
        conditions.append(Condition("knowmem_f", "<=", knew["knowmem_f_high"], has, scale=10.0))
    return StopRule(tuple(conditions), looping)


def search_for(rule: StopRule, before: Mapping[str, float], config: ForgetConfig) -> Search:
    """The search for the model that meets a rule, as the config has it."""
    return Search(
        rule,
        before,
        every=config.evaluate_every,
        last=config.max_steps,
        utility_floor=config.stop.utility_floor,
        patience=config.stop.plateau,
        narrow=config.stop.refine,
        keep_last=config.stop.unmet == "last",
        expected=config.expected_steps + sum(phase.steps or 0 for phase in config.phases),
    )


def in_a_line(scores: Mapping[str, float]) -> str:
    """Scores of a stop rule as a run prints them."""
    return ", ".join(f"{name} {value:.4g}" for name, value in scores.items())


def saw_the_documents(base: Mapping[str, float], before: Mapping[str, float]) -> str | None:
    """A warning where the base model recites the documents, as one would that had seen them; else None."""
    if base["verbmem_f"] <= before["verbmem_holdout"] + RECITES:
        return None
    return (
        f"warning: the base model recites the documents (ROUGE-L {base['verbmem_f']:.3g}, never-seen text "
        f"{before['verbmem_holdout']:.3g}): it seems to have seen them, and what it knows of them will stay"
    )
