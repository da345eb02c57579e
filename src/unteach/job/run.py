"""The main job as one call: documents and a model in, a run folder with the unlearned model and its scores out."""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from unteach.config import ForgetConfig
from unteach.corpora import Benchmark
from unteach.data import Documents, ForgetBatches, GeneralText, lengths_of, tokenise
from unteach.errors import InputError, printable
from unteach.evaluation import evaluate
from unteach.evaluation.scores import Scores
from unteach.evaluation.verdict import Finding, contradicting, excess, judge, stop_scores, unanswered
from unteach.job.card import model_card
from unteach.job.inputs import Inputs, choice, given_inputs, never_seen, paired, prepared, read_inputs, without_overlap
from unteach.job.probes import CHEAP, STOP, in_a_line, run_probes, saw_the_documents, search_for, stop_rule
from unteach.job.receipts.receipt import issue
from unteach.job.run_folder import (
    STOP_SCORES,
    ForgetResult,
    MeasuredOnce,
    RunFolder,
    SharedScores,
    check_start,
    how_to_get_more,
    rewind,
    step_log,
)
from unteach.job.same_run import accepted_changes, begun, checkpoints_of, going_on_with
from unteach.models import context_length
from unteach.models.adapters import merge
from unteach.models.distributed import from_first_rank, has_shards, is_first_rank, join, ranks
from unteach.models.save import save_result
from unteach.models.threads import with_threads
from unteach.training.calibrate import calibrated, is_complete, measure, noise_warning, numbers
from unteach.training.goal import wants_line, with_line
from unteach.training.loop import Outcome, catching_signals, unlearn
from unteach.training.stopping import HARDER, parse_rule
from unteach.training.texts import Texts

__all__ = ["ForgetResult", "forget", "run_forget"]

HELDOUT_GENERAL = 64
"""General documents set aside for measuring, never trained on."""
FEWEST_GENERAL = 4
"""General documents without which none can be set aside."""
SHORTEST_CHUNK = 128
"""General text is cut into chunks of 512 tokens, or of the longest document's length, but not into shorter ones."""
WATCHED_KEEP, FEWEST_KEEP = 16, 10
"""At most so many keep documents, one in ten, are set aside for measuring."""


def run_forget(
    config: ForgetConfig,
    *,
    resume: bool = False,
    max_steps: int | None = None,
    finish: bool = False,
    accept_changes: bool = False,
    say: Callable[[str], None] | None = None,
    shared: MeasuredOnce | None = None,
    measurements: Collection[str] | None = None,
) -> ForgetResult:
    """``unteach forget``: load everything that the config names, run, save.

    Under ``torchrun`` all ranks work on one run; only the first prints and writes.

    Args:
        resume: Go on with the run in ``config.out``, with the settings saved there.
        max_steps: The one setting that a resumed run may change; only to more.
        finish: ``unteach finish``: take no further step, and make a result of the best model so far.
        accept_changes: Go on though texts, models or settings are not those the run began with, and record that.
        say: Gets the lines for people; by default they go to stderr.
        shared: ``SharedScores().measured_once``, the same for several runs that start from one model with the same data
            and seed: the scores before the run, and the reference's, are then measured once.
        measurements: What is measured before and after the run, names out of ``evaluation.metrics.MEASUREMENTS``; None:
            everything that can be.

    Raises:
        InputError: Something given cannot be used; every problem found is named.
        Interrupted: SIGINT or SIGTERM came; the checkpoint is written.
    """
    join()
    goes_on = resume or finish
    with (
        going_on_with(Path(config.out), max_steps, finish, accept_changes) if goes_on else nullcontext(config) as config
    ):
        check_start(config, goes_on)
        going = (goes_on, finish, accept_changes)
        return ForgetJob(read_inputs(config), config, Path(config.out), *going, say, shared, measurements).run()


def forget(
    model: Any,
    tokenizer: Any,
    documents: Sequence[str] | Documents,
    general_text: Sequence[str] | Documents | None = None,
    config: ForgetConfig | None = None,
    *,
    alternates: Sequence[str] | Documents | None = None,
    keep: Sequence[str] | Documents | None = None,
    holdout: Sequence[str] | Documents | None = None,
    reference: Any = None,
    base: Any = None,
) -> ForgetResult:
    """Make a model forget documents, in place.

    In a process group (``unteach.models.distributed.join()`` under ``torchrun``) all ranks call this together with the
    same arguments, and ``model`` and ``reference`` are sharded.

    Args:
        model: A Hugging Face causal language model in float32; it is changed. Of one that PEFT adapted (LoRA), the
            adapter's weights are.
        general_text: Texts like what the model should keep; None: the embedded public-domain text.
        config: Settings; None: the defaults. Its ``model`` names where the weights came from. With ``out``, a run
            folder is written, whose saved model is a copy of that source with the changed weights.
        alternates: For the loss ``dpo``, what to say instead of each of the documents.
        keep: Texts like ``documents`` that the model should keep knowing.
        holdout: Texts like ``documents`` that the model never saw; None: a part of the general text.
        reference: A model that never saw the documents: the run stops when they are recited no better than by it.
        base: A model with the same tokenizer that never saw the documents, for losses that compare with it.
    """
    texts = {"documents": documents, "general": general_text, "keep": keep, "holdout": holdout}
    texts["alternates"] = alternates
    others = {"reference": reference, "base": base}
    inputs, config = given_inputs(model, tokenizer, config or ForgetConfig(), texts, **others)
    result = ForgetJob(inputs, config, Path(config.out) if config.out else None).run()
    if not has_shards(inputs.model):
        merge(model)  # what was added goes into the weights; PEFT's adapters stay
    return dataclasses.replace(result, model=model)


class ForgetJob:
    """One run from its inputs to its result; ``run`` reads top to bottom. For the arguments see ``run_forget``."""

    def __init__(
        self,
        inputs: Inputs,
        config: ForgetConfig,
        out: Path | None,
        resume: bool = False,
        finish: bool = False,
        accept_changes: bool = False,
        say: Callable[[str], None] | None = None,
        shared: MeasuredOnce | None = None,
        measurements: Collection[str] | None = None,
    ) -> None:
        self.inputs, self.config, self.out = inputs.in_form_of_model(), config.chosen(little=inputs.little), out
        self.asked = inputs.documents
        self.resume, self.finish, self.accept, self.measurements = resume, finish, accept_changes, measurements
        self.changes: list[str] = []
        self.show = say or functools.partial(print, file=sys.stderr)
        self.shared = shared or SharedScores().measured_once
        self.started = time.perf_counter()
        self.parity = config.stop.parity if config.stop.parity is not None else inputs.keep is not None

    def say(self, line: str) -> None:
        """Show a line to the user, and add it to the run's log."""
        if is_first_rank():
            self.show(line := printable(line))
            self.folder.log(line)

    def run(self) -> ForgetResult:
        """Read, calibrate, measure, unlearn, measure again, save."""
        with RunFolder(self.out, self.resume, self.shared, self.config.private) as self.folder:
            self.folder.say = self.say
            return self.result()

    def result(self) -> ForgetResult:
        """See ``run``."""
        if self.resume:
            given = (self.config, self.inputs)
            self.changes = accepted_changes(self.folder.path, *given, accept=self.accept, say=self.say)
        self.prepare()
        self.config = begun(self.folder, self.config, self.inputs, self.asked, self.unmeasured)
        self.measure_start()
        self.first = first = self.final_scores("step_000000", self.inputs.model, 0)
        for warning in unanswered(first):
            self.say(warning)
        outcome = self.unlearn()
        last = self.final_scores(f"step_{outcome.step:06d}", self.inputs.model, outcome.step)
        stop: dict[str, Any] = {"rule": outcome.rule, "reason": outcome.reason, "step": outcome.step}
        if outcome.raised:
            stop["alpha_raised"] = {"step": outcome.raised, "factor": HARDER}
        verdict = self.verdict_on(last)
        denied = contradicting(verdict, self.rule.metrics) if self.config.stop.metric is None else ""
        if outcome.rule == "stop" and denied:
            stop |= {"rule": "unconfirmed", "reason": f"{outcome.reason}; but where the rule did not look: {denied}"}
        seconds = outcome.spent["earlier"] + time.perf_counter() - self.started
        spent = {kind: outcome.spent[kind] for kind in ("steps", "looks")}
        result = ForgetResult(
            model=self.inputs.model,
            out=self.out,
            steps=outcome.step,
            stop=stop,
            before=dict(first),
            after=dict(last),
            counts=self.counts,
            seconds=seconds,
            seconds_of=spent | {"rest": seconds - sum(spent.values())},
            config=self.config,
            forgotten=stop["rule"] == "stop",
            verdict=verdict,
            base=self.others.get("base", {}),
        )
        if self.out is not None:
            self.save(self.out, result, first, last)
        return result

    def prepare(self) -> None:
        """What comes before anything is written: all that is given is looked at, or refused."""
        self.read_texts()
        self.config = with_threads(self.config, self.say)
        self.parameters = prepared(self.inputs.model, self.config)
        if self.inputs.reference is not None and ranks() > 1:
            prepared(self.inputs.reference, self.config)
        self.unmeasured = self.config
        self.choose_numbers()

    def read_texts(self) -> None:
        """Tokenise the documents and the general text, and cut the passages that will be measured."""
        inputs, config = self.inputs, self.config
        max_tokens, general_tokens = config.lengths(context_length(inputs.model))
        if len(inputs.general) < FEWEST_GENERAL:
            raise InputError(
                f"general is {inputs.general.name!r}: it has {len(inputs.general)} documents, and at least "
                f"{FEWEST_GENERAL} are needed, because some are set aside for measuring; cut a long text into several"
            )
        tokens = tokenise(inputs.documents, inputs.tokenizer, mode=config.document_mode, max_tokens=max_tokens)
        aside = min(HELDOUT_GENERAL, len(inputs.general) // FEWEST_GENERAL)
        rest, heldout = inputs.general.set_aside(aside, config.seed)
        if config.general_tokens is None:  # chunks much longer than the documents would take most of the time
            general_tokens = min(general_tokens, max(SHORTEST_CHUNK, int(lengths_of(tokens.sequences).max())))
        general = GeneralText(rest, inputs.tokenizer, tokens=general_tokens, seed=config.seed, exclude=inputs.documents)
        self.counts = {"forget": tokens.counts, "general": general.counts} | inputs.unreadable()
        for note in inputs.notes(private=config.private):
            self.say(note)
        self.say(f"forget:  {tokens.summary()}")
        self.say(f"general: {general.summary()}")
        keep = watched = self.unseen = None
        if inputs.keep is not None:
            line, left = without_overlap(inputs.keep, inputs.documents)
            left, watched = left.set_aside(min(WATCHED_KEEP, len(left) // FEWEST_KEEP), config.seed)
            kept_tokens = tokenise(left, inputs.tokenizer, mode=config.document_mode, max_tokens=max_tokens)
            keep = ForgetBatches(kept_tokens, config.seed, keep=True)
            self.counts["keep"] = kept_tokens.counts
            self.say(f"keep:    {line}")
        if inputs.holdout is not None:
            line, left = never_seen(inputs.holdout, inputs.documents, inputs.keep)
            inputs = dataclasses.replace(inputs, holdout=left)
            self.say(f"holdout: {line}")
            if wants_line(config) and not self.resume:
                self.unseen = tokenise(left, inputs.tokenizer, mode=config.document_mode, max_tokens=max_tokens)
        others = paired(inputs, tokens, config.document_mode, max_tokens)
        self.texts = Texts(ForgetBatches(tokens, config.seed), general, keep, others)
        self.say(f"method:  {choice(config, inputs, parity=self.parity)}")
        try:
            self.probes = run_probes(inputs, heldout, watched, config, max_tokens, parity=self.parity)
        except ValueError as error:  # no passage can be cut from what was given
            raise InputError(f"documents is {inputs.documents.name!r}: {error}") from None
        if self.probes.few:
            self.say(f"few:     {self.probes.few}")
        if config.stop.metric:
            known = {} if inputs.reference is None else {"reference": dict.fromkeys(self.probes.names(), 0.0)}
            parse_rule(config.stop.metric, self.probes.names(), known)  # a wrong rule is refused before any work

    def choose_numbers(self) -> None:
        """Measure the numbers of the method that are not given, and whether rounding would hide the first steps."""
        config, texts = self.config, self.texts
        given: tuple[Any, list[Any], ForgetBatches, GeneralText]
        given = (self.inputs.model, list(self.parameters.values()), texts.forget, texts.general)
        every = (*config.phases, config.method)
        if not all(map(is_complete, every)):  # only at the start of a run
            measured = measure(*given, config)
            *phases, method = (calibrated(each, measured, config.expected_steps) for each in every)
            self.config = config = dataclasses.replace(config, method=method, phases=tuple(phases))
            self.say(numbers(method, measured))
        if self.unseen is not None:
            self.config = config = with_line(given[0], self.inputs.base, self.unseen, texts.forget, config, self.say)
        if not self.resume and (warning := noise_warning(*given, config)):
            self.say(warning)

    def measure_start(self) -> None:
        """Measure what the stop rule compares with, and begin the search for the model that meets it."""
        inputs, config, probes = self.inputs, self.config, self.probes
        before = self.compared("before", inputs.model, probes.start)
        self.say("before: " + in_a_line(before))
        self.others = others = dict[str, dict[str, float]]()
        self.reference_scores: Scores | None = None
        if inputs.base is not None:
            asked = dataclasses.replace(probes.stop, knowledge_forget=probes.final.knowledge_forget)
            others["base"] = self.compared("base", inputs.base, asked)
            if warning := saw_the_documents(others["base"], before):
                self.say(warning)
        if inputs.reference is not None:
            others["reference"] = self.compared("reference", inputs.reference, probes.stop)
            self.reference_scores = self.final_scores("reference", inputs.reference, None)
        compared = len(probes.stop.membership_forget), len(probes.stop.membership_holdout)
        self.rule = stop_rule(config, before, others, parity=self.parity, texts=compared, few=probes.few_passages)
        self.say(f"stops at {self.rule}")
        if not (self.folder.path / STOP_SCORES).exists():
            self.folder.add_line(STOP_SCORES, {"step": 0} | before)
        self.search = search_for(self.rule, before, config)

    def evaluate(self, model: Any, benchmark: Benchmark, **options: Any) -> Scores:
        """Measure a model as every evaluation of this run does."""
        progress = None if is_first_rank() else False
        return evaluate(model, self.inputs.tokenizer, benchmark, seed=self.config.seed, progress=progress, **options)

    def measured(self, model: Any, benchmark: Benchmark, measurements: Collection[str] = STOP) -> dict[str, float]:
        """Scores of a model that the stop rule needs, with the upper bounds of recital and answers."""
        scores = self.evaluate(model, benchmark, measurements=measurements)
        bounded = {name: metric for name, metric in scores.metrics.items() if name.startswith(("knowmem", "verbmem"))}
        return dict(scores) | {f"{name}_high": m.high for name, m in bounded.items() if m.high is not None}

    def final_scores(self, name: str, model: Any, step: int | None) -> Scores:
        """Everything that the report shows, on passages that the stop rule did not use; ``step`` None: a reference."""
        options = {"reference_scores": self.reference_scores, "measurements": self.measurements}
        source = self.config.reference if step is None else self.config.model

        def compute() -> Scores:
            scores = self.evaluate(model, self.probes.final, **options)
            return scores.replace(name=name if step is None else "", model=source or "", step=step)

        found = self.folder.remember(f"evaluations/{name}.json", compute, shared="" if step else f"final {name}")
        return found.replace(data_sha256=self.probes.final.data_sha256) if self.config.private else found

    def compared(self, name: str, model: Any, benchmark: Benchmark) -> dict[str, float]:
        """Scores of a model that the stop rule compares with."""
        return self.folder.remember(f"checkpoints/{name}.json", lambda: self.measured(model, benchmark), f"stop {name}")

    def unlearn(self) -> Outcome:
        """Run the loop, with a log, checkpoints and a way to pause."""
        config = self.config
        metrics = self.folder.path / "metrics.jsonl"
        checkpoints = checkpoints_of(self.folder.path, config.keep_checkpoints)
        made_steps = metrics.exists() or any(checkpoints.steps())  # else it ended before step 1
        resume = from_first_rank(self.resume and made_steps)
        first = is_first_rank()
        with catching_signals(self.say) as paused, step_log(metrics, config) if first else nullcontext(_ignore) as log:
            outcome = unlearn(
                self.inputs.model,
                self.parameters,
                self.texts,
                config,
                search=self.search,
                evaluate=self.evaluate_stop,
                confirm=self.excess_elsewhere,
                checkpoints=checkpoints,
                base=self.inputs.base,
                log=log,
                rewind=functools.partial(rewind, metrics) if first else _ignore,
                say=self.say,
                paused=paused,
                resume=resume,
                finish=self.finish,
                started=self.started,
            )
        self.say(f"stopped after {outcome.step} steps: {outcome.reason}")
        for hint in how_to_get_more(outcome.rule, config, self.out):
            self.say(hint)
        return outcome

    def evaluate_stop(self, step: int) -> Mapping[str, float]:
        """What the stop rule looks at; questions, the dearest, only where all else is as it should be, or where the
        config's own rule names them."""
        model, rule = self.inputs.model, self.search.rule or self.rule
        scores = from_first_rank(self.measured(model, self.probes.stop, CHEAP))
        asked = [name for name in ("knowmem_f", "knowmem_r") if name in rule.metrics]
        due = self.config.stop.metric or all(c.crossed(scores) for c in rule.conditions if c.metric not in asked)
        if asked and due:
            scores = from_first_rank(self.measured(model, self.probes.stop, asked)) | scores  # degenerate: of passages
        scores["distance"] = self.search.distance(scores)
        self.folder.add_line(STOP_SCORES, {"step": step} | scores)
        self.say(f"step {step}: {in_a_line(scores)}")
        return scores

    def excess_elsewhere(self) -> dict[str, float]:
        """How far the model is from a rule of the run's own making, on passages that the rule did not use."""
        if self.config.stop.metric:
            return {}
        asked = {"verbmem_f", "knowmem_f"} & {*self.rule.metrics}
        return excess(self.verdict_on(self.evaluate(self.inputs.model, self.probes.final, measurements=asked)), asked)

    def verdict_on(self, scores: Scores) -> tuple[Finding, ...]:
        """The four questions, answered from scores of the model after some steps."""
        reference = self.reference_scores.metrics if self.reference_scores else {}
        return judge(scores.metrics, self.first.metrics, reference, stop_scores(self.others.get("base", {})))

    def save(self, out: Path, result: ForgetResult, first: Scores, last: Scores) -> None:
        """Write the model with its card, the receipt, and ``result.json``."""
        config = self.config
        scores = {"before": first, "after": last}
        if self.reference_scores is not None:
            scores["reference"] = self.reference_scores
        card = model_card(
            base_model=config.model,
            settings=dataclasses.asdict(config),
            data=self.counts,
            scores=scores,
            verdict=result.verdict,
            forgotten=result.forgotten,
            notes=[result.stop["reason"], *self.changes, *last.notes],
        )
        self.say(save_result(self.inputs.model, self.parameters, self.inputs.tokenizer, config, out / "model", card))
        self.folder.settle()
        for line in issue(out, result, self.asked, scores, self.changes) if is_first_rank() else ():
            self.say(line)
        self.folder.write("result.json", result.to_dict())  # the last: with it a run has ended


def _ignore(line: Any) -> None:
    """For the ranks that neither print nor write."""
