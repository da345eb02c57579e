"""Questions: does the model still answer those about the documents, is general knowledge still there, and does it
still answer in the asked form?"""

import itertools
from collections.abc import Sequence
from typing import Any

from unteach.corpora import ChoiceQuestion, MeasuringSettings, Question
from unteach.data.text import decode, encode
from unteach.evaluation.generation import next_tokens
from unteach.evaluation.inference import PROMPTS_TOGETHER, Batching, cut_left
from unteach.evaluation.verbmem import continue_prompts, score_record
from unteach.models import context_length

LETTERS = "ABCDEFGHIJ"


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

    Args:
        model: a Hugging Face causal language model.
        tokenizer: its tokenizer.
        questions: what to ask, with the true answers.
        examples: worked examples, the same before every question.
        settings: how prompts are written and answers cut; by default as in MUSE.
        batching: how many questions are answered together.

    Returns:
        For each question its `prompt` (without the examples), `expected`, `output`, `score` (0 to 1) and
        whether the output is `degenerate`.
    """
    settings = settings or MeasuringSettings()
    beginning = "".join(
        settings.question_example.format(question=example.question, answer=example.answer) for example in examples
    )
    own = [settings.question_prompt.format(question=question.question) for question in questions]
    outputs, cuts = continue_prompts(
        model,
        tokenizer,
        [encode(tokenizer, beginning + prompt) for prompt in own],
        [settings.knowledge_tokens] * len(own),
        long_prompts=settings.long_prompts,
        batching=batching,
    )
    records = []
    for question, prompt, output, cut in zip(questions, own, outputs, cuts, strict=True):
        answer = cut_answer(output, settings.answer_ends)
        record = score_record(prompt, question.answer, answer, settings.words)
        records.append(record | {"cut": cut} if cut else record)
    return records


def cut_answer(output: str, ends: Sequence[str]) -> str:
    """The part of `output` before the first of `ends`."""
    for end in ends:
        output = output.split(end)[0]
    return output


def answer_choices(
    model: Any,
    tokenizer: Any,
    questions: Sequence[ChoiceQuestion],
    *,
    batching: Batching = PROMPTS_TOGETHER,
) -> list[dict[str, Any]]:
    """Which letter does the model give the highest logit, and is the most probable token a letter at all?

    Differs from the authors' code: there the greedy letter counts, so a model that lost the form of the
    answer scores below chance. Here `score` compares the letters alone, `valid` says whether the greedy token
    is one of them, and `greedy_score` is the authors' form.

    Args:
        model: a Hugging Face causal language model.
        tokenizer: its tokenizer.
        questions: prompts that end where ` A` would follow. One that does not fit the context loses its
            oldest tokens (the record then has `cut`).
        batching: how many questions are read together.

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

    Args:
        tokenizer: the tokenizer.
        choices: how many letters.

    Returns:
        Ids that stand before every letter (a space of its own, in some tokenizers), and one id per letter.

    Raises:
        ValueError: where the tokenizer has no token of its own for each letter.
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
