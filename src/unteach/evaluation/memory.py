"""What a model still says of a text: does it recite it, answer questions about it, and choose the right letter?"""

import itertools
from collections.abc import Sequence
from typing import Any

from unteach.corpora import ChoiceQuestion, MeasuringSettings, Probe, Question
from unteach.data.documents import decode, encode
from unteach.evaluation.formulas import is_degenerate, rouge_l
from unteach.evaluation.generation import generate, next_tokens
from unteach.evaluation.inference import PROMPTS_TOGETHER, Batching, cut_left, stop_ids
from unteach.models import context_length

LETTERS = "ABCDEFGHIJ"


def recite(
    model: Any,
    tokenizer: Any,
    probes: Sequence[Probe],
    *,
    settings: MeasuringSettings | None = None,
    batching: Batching = PROMPTS_TOGETHER,
) -> list[dict[str, Any]]:
    """Let the model continue each prompt greedily and compare with the true continuation by ROUGE-L.

    As in MUSE: a prompt is encoded with the special tokens its tokenizer adds, `verbatim_tokens` tokens are generated,
    and the true continuation is cut to as many ids *with* its begin-of-text id, so that a perfect reciter scores just
    under 1. Probes that carry token ids are used as they are, and generate as many tokens as they expect.

    Draws no random number and leaves the model as it was: safe to call between training steps.

    Returns:
        For each probe its `prompt`, `expected`, `output`, `score` (0 to 1) and whether it is `degenerate`; `cut`, how
        many of its oldest tokens were dropped, where a prompt did not fit the context.
    """
    settings = settings or MeasuringSettings()
    prompts: list[Sequence[int]] = []
    expected: list[Sequence[int]] = []
    for probe in probes:
        prompts.append(encode(tokenizer, probe.prompt) if probe.prompt_ids is None else probe.prompt_ids)
        true_ids = probe.expected_ids
        expected.append(encode(tokenizer, probe.expected)[: settings.verbatim_tokens] if true_ids is None else true_ids)
    limits = [settings.verbatim_tokens if probe.expected_ids is None else len(probe.expected_ids) for probe in probes]
    outputs, cuts = continue_prompts(model, tokenizer, prompts, limits, settings, batching)
    shown, true = [probe.prompt for probe in probes], [decode(tokenizer, ids) for ids in expected]
    return _records(shown, true, outputs, cuts, settings)


def answer_questions(
    model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    examples: Sequence[Question] = (),
    *,
    settings: MeasuringSettings | None = None,
    batching: Batching = PROMPTS_TOGETHER,
) -> list[dict[str, Any]]:
    """Ask each question after the worked examples and compare the answer with the true one by ROUGE-L.

    As in MUSE: the examples (ten there) and the question are one prompt that ends with `Answer: `; 32 tokens
    are generated greedily and cut at a blank line or at the next `Question`.

    Returns:
        For each question the same as `recite`; its `prompt` is without the examples.
    """
    settings = settings or MeasuringSettings()
    beginning = "".join(
        settings.question_example.format(question=example.question, answer=example.answer) for example in examples
    )
    shown = [settings.question_prompt.format(question=question.question) for question in questions]
    prompts = [encode(tokenizer, beginning + prompt) for prompt in shown]
    limits = [settings.knowledge_tokens] * len(prompts)
    outputs, cuts = continue_prompts(model, tokenizer, prompts, limits, settings, batching)
    answers = [cut_answer(output, settings.answer_ends) for output in outputs]
    return _records(shown, [question.answer for question in questions], answers, cuts, settings)


def continue_prompts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    settings: MeasuringSettings,
    batching: Batching,
) -> tuple[list[str], list[int]]:
    """Greedy continuations as text, and how many of its oldest tokens each prompt lost to fit the context."""
    context = context_length(model)
    fitted = [list(prompt) for prompt in prompts]
    if settings.long_prompts == "cut":
        longest = max(limits, default=0)
        if longest + 2 > context:
            raise ValueError(
                f"{longest} tokens are to be generated, but the model's context is {context}: generate fewer"
            )
        first_id = getattr(tokenizer, "bos_token_id", None)
        fitted = [cut_left(ids, context - limit, first_id) for ids, limit in zip(prompts, limits, strict=True)]
    cuts = [len(prompt) - len(rest) for prompt, rest in zip(prompts, fitted, strict=True)]
    ends = stop_ids(model, tokenizer)
    generated = generate(model, fitted, max_new_tokens=limits, stop_ids=ends, batching=batching)
    return [decode(tokenizer, ids) for ids in generated], cuts


def _records(
    prompts: Sequence[str],
    expected: Sequence[str],
    outputs: Sequence[str],
    cuts: Sequence[int],
    settings: MeasuringSettings,
) -> list[dict[str, Any]]:
    """One record for each generated text."""
    return [
        {
            "prompt": prompt,
            "expected": true,
            "output": output,
            "score": rouge_l(true, output, words=settings.words),
            "degenerate": is_degenerate(output),
        }
        | ({"cut": cut} if cut else {})
        for prompt, true, output, cut in zip(prompts, expected, outputs, cuts, strict=True)
    ]


def mean_score(records: Sequence[dict[str, Any]]) -> float:
    """Mean score of records in percent: the value of `verbmem_f` and `knowmem_f`."""
    if not records:
        raise ValueError("records is empty: there is nothing to average")
    return 100 * sum(record["score"] for record in records) / len(records)


def cut_answer(output: str, ends: Sequence[str]) -> str:
    """The part of `output` before the first of `ends`."""
    for end in ends:
        output = output.split(end)[0]
    return output


def answer_choices(
    model: Any, tokenizer: Any, questions: Sequence[ChoiceQuestion], *, batching: Batching = PROMPTS_TOGETHER
) -> list[dict[str, Any]]:
    """Which letter does the model give the highest logit, and is the most probable token a letter at all?

    Differs from the authors' code: there the greedy letter counts, so a model that lost the form of the
    answer scores below chance. Here `score` compares the letters alone, `valid` says whether the greedy token
    is one of them, and `greedy_score` is the authors' form.

    Returns:
        For each question its `prompt` (the question alone where given), `expected` and chosen `output`
        letter, `score`, `greedy_score` (each 0 or 1), `valid`, and `greedy`, the most probable token as text.
    """
    records: list[dict[str, Any]] = [{} for _ in questions]
    context = context_length(model)
    bridge, letter_ids = letter_tokens(tokenizer, max((question.choices for question in questions), default=4))
    by_subject = sorted(range(len(questions)), key=lambda index: questions[index].subject)
    for _, group in itertools.groupby(by_subject, key=lambda index: questions[index].subject):
        chosen = list(group)
        whole = [encode(tokenizer, questions[index].prompt) + bridge for index in chosen]
        prompts = [cut_left(ids, context - 1, getattr(tokenizer, "bos_token_id", None)) for ids in whole]
        best, scores = next_tokens(model, prompts, letter_ids, batching=batching)
        for row, index in enumerate(chosen):
            question, greedy = questions[index], int(best[row])
            allowed = letter_ids[: question.choices]
            picked = int(scores[row, : question.choices].argmax())
            right = letter_ids[question.answer]
            records[index] = {
                "prompt": question.question or question.prompt,
                "expected": LETTERS[question.answer],
                "output": LETTERS[picked],
                "greedy": decode(tokenizer, [greedy]),
                "valid": greedy in allowed,
                "score": float(picked == question.answer),
                "greedy_score": float(greedy == right),
            }
            if len(prompts[row]) < len(whole[row]):
                records[index]["cut"] = len(whole[row]) - len(prompts[row])
    return records


def letter_tokens(tokenizer: Any, choices: int) -> tuple[list[int], list[int]]:
    """The token ids of ` A`, ` B`, ... after a colon.

    Returns:
        Ids that stand before every letter (a space of its own, in some tokenizers), and one id per letter.
    """
    stem = encode(tokenizer, "answer:")
    written = [encode(tokenizer, f"answer: {letter}") for letter in LETTERS[:choices]]
    same = next((place for place, ids in enumerate(zip(*written, strict=False)) if len(set(ids)) > 1), 0)
    letter_ids = [ids[same] for ids in written]
    if same < len(stem) or written[0][: len(stem)] != stem or len(set(letter_ids)) < choices:
        raise ValueError(
            f"the tokenizer writes ' A' to ' {LETTERS[choices - 1]}' after a colon as {written}: one distinct "
            "token per letter is needed to score multiple choice; leave multiple_choice empty"
        )
    return written[0][len(stem) : same], letter_ids
