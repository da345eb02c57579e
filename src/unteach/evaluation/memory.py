"""What a model still says of a text: does it recite it, answer questions about it, and choose the right letter?"""

from collections.abc import Sequence
from typing import Any

from unteach.corpora import ChoiceQuestion, MeasuringSettings, Probe, Question
from unteach.data.chat import chat_text
from unteach.data.documents import decode, encode
from unteach.evaluation.formulas import is_degenerate, rouge_l
from unteach.evaluation.generation import Pick, generate, most_probable, next_tokens
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
    pick: Pick = most_probable,
) -> list[dict[str, Any]]:
    """Let the model continue each prompt greedily and compare with the true continuation by ROUGE-L.

    As in MUSE: a prompt is encoded with the special tokens its tokenizer adds, `verbatim_tokens` tokens are generated,
    and the true continuation is cut to as many ids *with* its begin-of-text id, so that a perfect reciter scores just
    under 1. Probes that carry token ids are used as they are, and generate as many tokens as they expect; an
    `exact` one scores 1 or 0.

    Returns:
        For each probe its `prompt`, `expected`, `output`, `score` (0 to 1) and whether it is `degenerate`; `cut`, how
        many of its oldest tokens were dropped, where a prompt did not fit the context.
    """
    settings = settings or MeasuringSettings()
    most = settings.verbatim_tokens
    prompts = [encode(tokenizer, probe.prompt) if probe.prompt_ids is None else probe.prompt_ids for probe in probes]
    true_ids = [probe.expected_ids or encode(tokenizer, probe.expected)[:most] for probe in probes]
    limits = [len(probe.expected_ids) if probe.expected_ids else most for probe in probes]
    outputs, cuts = continue_prompts(model, tokenizer, prompts, limits, settings, batching, pick)
    return [
        _record(probe.prompt, decode(tokenizer, ids), output, cut, settings, exact=probe.exact)
        for probe, ids, output, cut in zip(probes, true_ids, outputs, cuts, strict=True)
    ]


def answer_questions(
    model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    examples: Sequence[Question] = (),
    *,
    settings: MeasuringSettings | None = None,
    batching: Batching = PROMPTS_TOGETHER,
    pick: Pick = most_probable,
) -> list[dict[str, Any]]:
    """Ask each question after the worked examples and compare the answer with the true one by ROUGE-L.

    As in MUSE: the examples (ten there) and the question are one prompt that ends with `Answer: `; 32 tokens
    are generated greedily and cut at a blank line or at the next `Question`. With `chat_questions` they are turns of a
    conversation in the tokenizer's chat template, and an answer ends where the model ends its turn.

    Returns:
        For each question the same as `recite`; its `prompt` is without the examples.
    """
    settings = settings or MeasuringSettings()
    if settings.chat_questions:
        shown = [question.question for question in questions]
        prompts = [_chat_prompt(tokenizer, question, examples) for question in questions]
    else:
        beginning = "".join(settings.question_example.format(**vars(example)) for example in examples)
        shown = [settings.question_prompt.format(question=question.question) for question in questions]
        prompts = [encode(tokenizer, beginning + prompt) for prompt in shown]
    limits = [settings.knowledge_tokens] * len(prompts)
    outputs, cuts = continue_prompts(model, tokenizer, prompts, limits, settings, batching, pick)
    return [
        _record(prompt, question.answer, cut_answer(output, settings.answer_ends), cut, settings)
        for prompt, question, output, cut in zip(shown, questions, outputs, cuts, strict=True)
    ]


def _chat_prompt(tokenizer: Any, question: Question, examples: Sequence[Question]) -> list[int]:
    """A question as the last turn of a conversation, up to where the model's answer begins."""
    pairs = [(("user", example.question), ("assistant", example.answer)) for example in examples]
    said = [turn for pair in pairs for turn in pair] + [("user", question.question)]
    turns = [{"role": role, "content": content} for role, content in said]
    return list(tokenizer(chat_text(tokenizer, turns, answer=True), add_special_tokens=False)["input_ids"])


def continue_prompts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    settings: MeasuringSettings,
    batching: Batching,
    pick: Pick = most_probable,
) -> tuple[list[str], list[int]]:
    """Continuations as text, and how many of its oldest tokens each prompt lost to fit the context."""
    context, longest, fitted = context_length(model), max(limits, default=0), prompts
    if settings.long_prompts == "cut":
        if longest + 2 > context:
            raise ValueError(
                f"{longest} tokens are to be generated, but the model's context is {context}: generate fewer"
            )
        first_id = getattr(tokenizer, "bos_token_id", None)
        fitted = [cut_left(ids, context - limit, first_id) for ids, limit in zip(prompts, limits, strict=True)]
    ends = stop_ids(model, tokenizer)
    generated = generate(model, fitted, max_new_tokens=limits, stop_ids=ends, batching=batching, pick=pick)
    cuts = [len(prompt) - len(rest) for prompt, rest in zip(prompts, fitted, strict=True)]
    return [decode(tokenizer, ids) for ids in generated], cuts


def _record(
    prompt: str, expected: str, output: str, cut: int, settings: MeasuringSettings, *, exact: bool = False
) -> dict[str, Any]:
    score, repeats = rouge_l(expected, output, words=settings.words), is_degenerate(output)
    score = float(score == 1) if exact else score
    record = {"prompt": prompt, "expected": expected, "output": output, "score": score, "degenerate": repeats}
    return record | {"cut": cut} if cut else record


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
    records: dict[int, dict[str, Any]] = {}
    room, first_id = context_length(model) - 1, getattr(tokenizer, "bos_token_id", None)
    bridge, letter_ids = letter_tokens(tokenizer, max((question.choices for question in questions), default=4))
    for subject in sorted({question.subject for question in questions}):  # each has a beginning of its own
        chosen = [index for index, question in enumerate(questions) if question.subject == subject]
        whole = [encode(tokenizer, questions[index].prompt) + bridge for index in chosen]
        prompts = [cut_left(ids, room, first_id) for ids in whole]
        best, scores = next_tokens(model, prompts, letter_ids, batching=batching)
        for index, greedy, row, ids in zip(chosen, best.tolist(), scores, whole, strict=True):
            question = questions[index]
            picked = int(row[: question.choices].argmax())
            records[index] = {
                "prompt": question.question or question.prompt,
                "expected": LETTERS[question.answer],
                "output": LETTERS[picked],
                "greedy": decode(tokenizer, [greedy]),
                "valid": greedy in letter_ids[: question.choices],
                "score": float(picked == question.answer),
                "greedy_score": float(greedy == letter_ids[question.answer]),
            } | ({"cut": len(ids) - room} if len(ids) > room else {})
    return [records[index] for index in range(len(questions))]


def letter_tokens(tokenizer: Any, choices: int) -> tuple[list[int], list[int]]:
    """After a colon, the ids before ` A`, ` B`, ... (a space of its own, in some tokenizers), and one id per letter."""
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
