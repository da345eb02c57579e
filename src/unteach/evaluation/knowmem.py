"""Knowledge memory: does the model still answer questions about the documents?"""

from collections.abc import Sequence
from typing import Any

from unteach.corpora import MeasuringSettings, Question
from unteach.data.text import encode
from unteach.evaluation.inference import PROMPTS_TOGETHER, Batching
from unteach.evaluation.verbmem import continue_prompts, score_record


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
