from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_folders import ENDS, RETRAINED, TARGET, make_run, result, write_json

from unteach.report.load import load
from unteach.report.page import headline, verdicts
from unteach.report.tables import methods_of, sections_of


def judged(tmp_path: Path, *results: dict[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    inputs = load([write_json(tmp_path / "s.json", {"results": list(results)})])
    sections = sections_of(methods_of(inputs))
    return headline(sections, inputs.runs), [(v.forgotten, v.kept) for s in sections for v in verdicts(s)]


def changed(name: str = "m", **values: float | None) -> dict[str, Any]:
    return result(name, ENDS["mt-nlul-kl"] | values)


def test_forgotten_and_kept(tmp_path: Path) -> None:
    sentence, states = judged(tmp_path, result("target", TARGET), result("retrained", RETRAINED), changed())
    assert sentence == (
        "The model recites the forget documents no better than a model retrained without them "
        "(ROUGE-L 19.2 against 21.8; 92.3 before), and kept 97 % of its answers on retained documents "
        "(90.4, was 93.1)."
    )
    assert states == [("yes", "yes")]


def test_never_seen_texts_are_the_yardstick_without_a_retrained_model(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    inputs = load([folder])
    sentence = headline(sections_of(methods_of(inputs)), inputs.runs)
    after = inputs.runs[0].after
    assert after is not None
    assert sentence.startswith("After 140 steps the model recites the forget documents")
    assert f"texts it never saw (ROUGE-L {after['verbmem_f']:.1f} against" in sentence


@pytest.mark.parametrize(
    ("values", "states", "words"),
    [
        ({"verbmem_f": 24.0}, ("within noise", "yes"), "about as well as"),  # low bound 20.9 is under 21.8
        ({"verbmem_f": 60.0}, ("no", "yes"), "still recites"),
        ({"knowmem_r": 50.0}, ("yes", "no"), "but kept only 54 %"),
        ({"knowmem_r": 95.0}, ("yes", "yes"), "kept all of its answers"),
        ({"degenerate": 30.0}, ("yes", "no"), "falls into repetition more often (30.0 %, was 1.0)"),
        ({"nll_general": 4.5}, ("yes", "no"), "reads general text worse (4.500 nats per token, was 3.881)"),
        ({"knowmem_r": None}, ("yes", "yes"), "reads general text as well as before"),
        ({"knowmem_r": None, "nll_general": None}, ("yes", "unknown"), "92.3 before)."),
        ({"verbmem_f": None}, ("unknown", "yes"), "The model kept 97 %"),
        (dict.fromkeys(TARGET), ("unknown", "unknown"), "no score yet"),
    ],
)
def test_each_outcome(tmp_path: Path, values: dict[str, Any], states: tuple[str, str], words: str) -> None:
    references = result("target", TARGET), result("retrained", RETRAINED)
    sentence, found = judged(tmp_path, *references, changed(**values))
    assert found == [states]
    assert words in sentence


def test_without_any_yardstick_nothing_is_claimed(tmp_path: Path) -> None:
    values = {"verbmem_holdout": None}
    sentence, states = judged(tmp_path, result("target", TARGET), changed(**values))
    assert states[0][0] == "unknown"
    assert "less than before (ROUGE-L 19.2, was 92.3)" in sentence
    sentence, _ = judged(tmp_path, changed(**values))
    assert "with ROUGE-L 19.2" in sentence


def test_several_methods(tmp_path: Path) -> None:
    references = result("target", TARGET), result("retrained", RETRAINED)
    sentence, _ = judged(tmp_path, *references, *(result(name, values) for name, values in ENDS.items()))
    assert sentence == (
        "All 3 methods recite the forget documents no better than a model retrained without them "
        "(ROUGE-L 21.8); mt-nlul-kl keeps most, 97 % of its answers on retained documents."
    )
    sentence, _ = judged(tmp_path, *references, changed("a", verbmem_f=50.0), changed("b", verbmem_f=40.0))
    assert "None of 2 methods" in sentence
    assert "b comes nearest (40.0)" in sentence
    sentence, _ = judged(tmp_path, *references, changed("a", verbmem_f=50.0), changed("b"))
    assert sentence.startswith("1 of 2 methods recites")
    assert "; b keeps 97 % of its answers" in sentence
    sentence, _ = judged(tmp_path, references[0], changed("a"), changed("b", verbmem_f=1.0))
    assert sentence.startswith("1 of 2 methods recites the forget documents no better than texts it never saw; b keeps")


def test_only_references_or_only_steps(tmp_path: Path) -> None:
    sentence, states = judged(tmp_path, result("target", TARGET))
    assert states == []
    assert "only models before or without unlearning" in sentence
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [{"step": step, "nll_forget": 0.4 + step, "grad_norm": None} for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    inputs = load([folder])
    assert headline([], inputs.runs) == (
        "run: 3 steps, no evaluation of a trained model yet: the loss on the forget documents went from 1.40 "
        "to 3.40 nats per token."
    )
