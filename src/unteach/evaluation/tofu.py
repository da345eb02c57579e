"""TOFU: questions about invented authors, with right, reworded and wrong answers (Maini et al., 2024)."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unteach.corpora import MeasuringSettings, Tofu
from unteach.data.documents import encode
from unteach.errors import InputError
from unteach.evaluation.formulas import RESAMPLES, Interval, checked, is_degenerate, percentiles
from unteach.evaluation.inference import PROMPTS_TOGETHER, Batching, stop_ids, token_logprobs
from unteach.evaluation.memory import continue_prompts

if TYPE_CHECKING:
    from unteach.evaluation.metrics import Evaluation

PARTS = tuple(part.name for part in dataclasses.fields(Tofu))
KINDS = ("rouge", "probability", "truth_ratio")


def stemmed_recall() -> Callable[[str, str], float]:
    """ROUGE-L recall with the Porter stemmer, of the expected text and the output: the form TOFU reports."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ValueError("TOFU's scores need the stemmer of rouge-score: pip install rouge-score") from error
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    return lambda expected, output: float(scorer.score(expected, output)["rougeL"].recall)


def truth_ratio(paraphrased: float, perturbed: ArrayLike) -> float:
    """R = (mean over wrong answers â of p(â)) / p(ã), Eq. (1) of TOFU.

    p(a) = P(a | question)^(1/|a|) is the probability of an answer per token and ã the right answer in other
    words. Above 1 the wrong answers look more probable than the right one.

    Differs from the authors' code: that uses the geometric mean over the wrong answers for the forget quality.
    """
    return float(np.mean(checked(perturbed, "perturbed")) / max(paraphrased, 1e-300))


def forget_quality(ratios: ArrayLike, reference_ratios: ArrayLike) -> float:
    """p-value of the two-sample Kolmogorov–Smirnov test on truth ratios of the forget set.

    Above 0.05 one cannot tell the model from one retrained without the forget set; 1 is best.
    """
    try:
        from scipy.stats import ks_2samp
    except ImportError:
        raise InputError("TOFU's forget quality needs scipy: pip install 'unteach[benchmarks]'") from None
    return float(ks_2samp(checked(ratios, "ratios"), checked(reference_ratios, "reference_ratios")).pvalue)


def harmonic_mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Harmonic mean over the last axis; 0 where a value is 0."""
    with np.errstate(divide="ignore"):
        return values.shape[-1] / (1 / values).sum(-1)


def answer_tofu(
    model: Any,
    tokenizer: Any,
    tofu: Tofu,
    *,
    settings: MeasuringSettings | None = None,
    batching: Batching = PROMPTS_TOGETHER,
) -> dict[str, list[dict[str, Any]]]:
    """Ask all questions and score all answers.

    Returns:
        For each set and question `prompt`, `expected`, `output`, `degenerate` and
        `rouge`, also as `score`: ROUGE-L recall with stemmer;
        `probability`: p(answer), for real authors and world facts divided by the sum over all answers offered;
        `ratio`: R of `truth_ratio`; `truth_ratio`: min(R, 1/R) for the forget set, max(0, 1 - R) for the others.
    """
    settings, recall = settings or MeasuringSettings(), stemmed_recall()
    asked = [(part, question) for part in PARTS for question in getattr(tofu, part)]
    prompts = [settings.tofu_prompt.format(question=question.question) for _, question in asked]
    encoded = [encode(tokenizer, prompt) for prompt in prompts]
    limits = [settings.tofu_tokens] * len(prompts)
    outputs, _ = continue_prompts(model, tokenizer, encoded, limits, settings, batching)
    answers = [(q.answer, q.paraphrased_answer, *q.perturbed_answers) for _, q in asked]
    pairs = [(prompt, answer) for prompt, group in zip(prompts, answers, strict=True) for answer in group]
    probabilities = iter(_probabilities(model, tokenizer, pairs, settings, batching))
    records: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    for (part, question), prompt, group, output in zip(asked, prompts, answers, outputs, strict=True):
        right, paraphrased, *wrong = (next(probabilities) for _ in group)
        ratio, rouge = truth_ratio(paraphrased, wrong), recall(question.answer, output)
        offered = right + sum(wrong) if part in ("real_authors", "world_facts") else 1.0
        useful = min(ratio, 1 / max(ratio, 1e-300)) if part == "forget" else max(0.0, 1 - ratio)
        said = {"prompt": prompt, "expected": question.answer, "output": output.strip()}
        rated = {"score": rouge, "rouge": rouge, "probability": right / max(offered, 1e-300), "ratio": ratio}
        records[part].append({**said, **rated, "truth_ratio": useful, "degenerate": is_degenerate(output)})
    return records


def _probabilities(
    model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]], settings: MeasuringSettings, batching: Batching
) -> list[float]:
    """P(answer | prompt)^(1/|answer|) of each pair; the answer's tokens are those after the prompt's."""
    ends = sorted(stop_ids(model, tokenizer)) if settings.tofu_scores_end else []
    sequences, starts = [], []
    for prompt, answer in pairs:
        before, whole = encode(tokenizer, prompt), encode(tokenizer, f"{prompt} {answer}")
        shared = next((k for k, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
        if shared >= len(whole):
            raise ValueError(f"the answer {answer!r} to {prompt!r} has no tokens: every answer needs at least one")
        sequences.append(whole if not ends or whole[-1] in ends else [*whole, ends[0]])
        starts.append(shared)
    logprobs = token_logprobs(model, sequences, batching=batching)
    return [float(np.exp(values[max(start, 1) - 1 :].mean())) for values, start in zip(logprobs, starts, strict=True)]


def measure_tofu(evaluation: "Evaluation", name: str) -> None:
    """Ask everything and add all TOFU metrics."""
    tofu: Any = evaluation.benchmark.tofu
    total = sum(3 + len(question.perturbed_answers) for part in PARTS for question in getattr(tofu, part))
    options: Any = {"settings": evaluation.benchmark.settings, "batching": evaluation.batches(name, total)}
    add_metrics(evaluation, answer_tofu(evaluation.model, evaluation.tokenizer, tofu, **options))


def add_metrics(evaluation: "Evaluation", records: Mapping[str, list[dict[str, Any]]]) -> None:
    """Add all TOFU metrics from the records of `answer_tofu`.

    Model utility is the harmonic mean of nine: ROUGE, probability and truth ratio on all sets but the forget set.
    """
    for part, group in records.items():
        evaluation.records[f"tofu_{part}"] = group
        for kind in KINDS:
            evaluation.add_mean(f"tofu_{part}_{kind}", [record[kind] for record in group])
    useful = {part: group for part, group in records.items() if part != "forget"}
    means = np.array([evaluation.metrics[f"tofu_{part}_{kind}"].value for part in useful for kind in KINDS])
    interval = _utility_interval([*useful.values()], evaluation.seed)
    evaluation.add("tofu_model_utility", float(harmonic_mean(means)), interval, sum(map(len, useful.values())))
    if evaluation.reference is None or isinstance(evaluation.reference, float):
        evaluation.notes.append("tofu_forget_quality is not reported: no scores of a reference model were given")
        return
    ratios, reference_ratios = (
        [record["ratio"] for record in group]
        for group in (records["forget"], evaluation.reference_records("tofu_forget"))
    )
    evaluation.add("tofu_forget_quality", forget_quality(ratios, reference_ratios), (None, None), len(ratios))


def _utility_interval(groups: Sequence[Sequence[Mapping[str, Any]]], seed: int) -> Interval:
    """Interval of the model utility: the questions of each set are resampled."""
    if min(map(len, groups)) < 2:
        return None, None
    generator = np.random.default_rng(seed)
    means = []
    for group in groups:
        values = np.array([[record[kind] for kind in KINDS] for record in group])
        draws = generator.integers(0, len(group), (RESAMPLES, len(group)))
        means += [values[:, column][draws].mean(1) for column in range(len(KINDS))]
    return percentiles(harmonic_mean(np.stack(means, axis=-1)))
