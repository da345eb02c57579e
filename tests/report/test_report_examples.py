from __future__ import annotations

import random
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from run_folders import make_references, make_run

from unteach.report.examples import choose, common_subsequence, recited, shorten
from unteach.report.load import load
from unteach.report.tables import methods_of, sections_of


def longest_by_trying(one: str, other: str) -> int:
    """The length of the longest common subsequence, by trying all subsequences."""

    def inside(part: tuple[str, ...]) -> bool:
        letters = iter(other)
        return all(letter in letters for letter in part)

    return max(n for n in range(len(one) + 1) if any(inside(part) for part in combinations(one, n)))


def test_common_subsequence_is_longest_and_in_order() -> None:
    rng = random.Random(0)
    for _ in range(200):
        one, other = ("".join(rng.choices("abc", k=rng.randrange(8))) for _ in range(2))
        pairs = common_subsequence(one, other)
        assert len(pairs) == longest_by_trying(one, other)
        assert all(one[i] == other[j] for i, j in pairs)
        assert all(a < c and b < d for (a, b), (c, d) in pairwise(pairs))


def test_passages_and_single_words_are_marked() -> None:
    pieces = recited("The old bridge was closed on Monday.", "the OLD bridge, was it open on Tuesday?")
    assert [(piece.text, piece.level) for piece in pieces] == [
        ("the OLD bridge, was", "passage"),
        (" it open ", ""),
        ("on", "word"),
        (" Tuesday?", ""),
    ]


@pytest.mark.parametrize("output", ["", "   ", "no word matches", "<b>the</b> old\nbridge", "日本 old 🙂"])
def test_pieces_join_to_the_output(output: str) -> None:
    assert "".join(piece.text for piece in recited("the old bridge", output)) == output


def test_marks_agree_with_rouge_l() -> None:
    from rouge_score import rouge_scorer

    expected = "trams between northgate and the salt works will run every twelve minutes from monday"
    output = "trams from northgate will run to the works every ten minutes on monday"
    marked = sum(len(piece.text.split()) for piece in recited(expected, output) if piece.level)
    recall = rouge_scorer.RougeScorer(["rougeL"]).score(expected, output)["rougeL"].recall
    assert marked / len(expected.split()) == pytest.approx(recall)


def test_long_texts_are_cut_at_words() -> None:
    text = " ".join(f"w{i}" for i in range(10))
    assert shorten(text, 3) == "w0 w1 w2 …"
    assert shorten(text, 3, keep="end") == "… w7 w8 w9"
    assert shorten(text, 10) == text


def test_examples_compare_the_same_prompts(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, name, steps=20, every=20) for name in ("mt-nlul-kl", "adamw-npo-kl")]
    (section,) = sections_of(methods_of(load([*runs, make_references(tmp_path / "references.json")])))
    recital, forgotten, retained = choose(section)
    assert (recital.metric, forgotten.metric, retained.metric) == ("verbmem_f", "knowmem_f", "knowmem_r")
    assert recital.available == 6
    assert len(recital.examples) == 4
    before = [example.answers[0].score or 0 for example in recital.examples]
    assert before == sorted(before, reverse=True)
    for example in recital.examples:
        assert [a.label for a in example.answers] == ["before", "retrained", "mt-nlul-kl", "adamw-npo-kl"]
    assert forgotten.examples[0].prompt.startswith("Question: ")
    assert "shown first" not in forgotten.examples[0].prompt  # few-shot examples are left out
