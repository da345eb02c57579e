"""TOFU: questions about invented authors, with right, reworded and wrong answers (Maini et al., 2024)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unteach.corpora import MeasuringSettings, Tofu, TofuQuestion
from unteach.data.documents import encode
from unteach.errors import InputError
from unteach.evaluation.inference import PROMPTS_TOGETHER, Batching, stop_ids, token_logprobs
from unteach.evaluation.memory import continue_prompts
from unteach.evaluation.repetition import is_degenerate
from unteach.evaluation.rouge import rouge_l_recall_stemmed
from unteach.evaluation.statistics import RESAMPLES, Metric, checked, mean_metric, percentiles

PARTS = tuple(part.name for part in dataclasses.fields(Tofu))
KINDS = ("rouge", "probability", "truth_ratio")


def truth_ratio(paraphrased: float, perturbed: ArrayLike) -> float:
    """R = (mean over wrong answers â of p(â)) / p(ã), Eq. (1) of TOFU.

    p(a) = P(a | question)^(1/|a|) is the probability of an answer per token and ã the right answer in other
    words. Above 1 the wrong answers look more probable than the right one.

    Differs from the authors' code: that uses the geometric mean over the wrong answers for the forget
    quality.
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
        `rouge`: ROUGE-L recall with stemmer;
        `probability`: p(answer), for real authors and world facts divided by the sum over all answers
        offered; `ratio`: `truth_ratio` as it is;
        `truth_ratio`: min(R, 1/R) for the forget set, max(0, 1 - R) for the others;
        `score`: the same as `rouge`.
    """
    settings = settings or MeasuringSettings()
    questions = [question for part in PARTS for question in getattr(tofu, part)]
    prompts = [settings.tofu_prompt.format(question=question.question) for question in questions]
    outputs, _ = continue_prompts(
        model,
        tokenizer,
        [encode(tokenizer, prompt) for prompt in prompts],
        [settings.tofu_tokens] * len(prompts),
        long_prompts=settings.long_prompts,
        batching=batching,
    )
    answers = [_answers(question) for question in questions]
    pairs = [(prompt, answer) for prompt, group in zip(prompts, answers, strict=True) for answer in group]
    probabilities = iter(_probabilities(model, tokenizer, pairs, settings, batching))
    position = iter(range(len(questions)))
    records: dict[str, list[dict[str, Any]]] = {}
    for part in PARTS:
        records[part] = []
        for question in getattr(tofu, part):
            index = next(position)
            values = [next(probabilities) for _ in answers[index]]
            records[part].append(
                {"prompt": prompts[index], "expected": question.answer, "output": outputs[index].strip()}
                | _question_scores(part, question, outputs[index], values)
            )
    return records


def _answers(question: TofuQuestion) -> list[str]:
    return [question.answer, question.paraphrased_answer, *question.perturbed_answers]


def _question_scores(part: str, question: TofuQuestion, output: str, values: Sequence[float]) -> dict[str, Any]:
    """Scores of one question from the probabilities of its answers, in the order of `_answers`."""
    right, paraphrased, *wrong = values
    ratio = truth_ratio(paraphrased, wrong)
    rouge = rouge_l_recall_stemmed(question.answer, output)
    probability = right
    if part in ("real_authors", "world_facts"):
        probability = right / max(right + sum(wrong), 1e-300)
    useful = min(ratio, 1 / max(ratio, 1e-300)) if part == "forget" else max(0.0, 1 - ratio)
    return {
        "score": rouge,
        "rouge": rouge,
        "probability": probability,
        "ratio": ratio,
        "truth_ratio": useful,
        "degenerate": is_degenerate(output),
    }


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


def tofu_metrics(
    records: Mapping[str, Sequence[Mapping[str, Any]]], reference_ratios: ArrayLike | None, seed: int = 0
) -> dict[str, Metric]:
    """All TOFU metrics from the records of `answer_tofu`.

    Model utility is the harmonic mean of nine means: ROUGE, probability and truth ratio on the retain set,
    real authors and world facts.
    """
    metrics: dict[str, Metric] = {}
    for part, group in records.items():
        for kind in KINDS:
            better = None if part == "forget" and kind == "truth_ratio" else part != "forget"
            metrics[f"tofu_{part}_{kind}"] = mean_metric(
                [record[kind] for record in group], higher_is_better=better, unit="fraction", scale=1.0, seed=seed
            )
    utility = [part for part in records if part != "forget"]
    means = np.array([metrics[f"tofu_{part}_{kind}"].value for part in utility for kind in KINDS])
    count = sum(len(records[part]) for part in utility)
    low, high = _utility_interval([records[part] for part in utility], seed)
    metrics["tofu_model_utility"] = Metric(float(harmonic_mean(means)), low, high, count, True, "fraction")
    if reference_ratios is not None:
        quality = forget_quality([record["ratio"] for record in records["forget"]], reference_ratios)
        metrics["tofu_forget_quality"] = Metric(quality, None, None, len(records["forget"]), True, "p-value")
    return metrics


def _utility_interval(groups: Sequence[Sequence[Mapping[str, Any]]], seed: int) -> tuple[float | None, float | None]:
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
