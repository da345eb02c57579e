"""Four questions and their answers: never a ✓ that hides a ✗, never an answer without a measurement."""

import dataclasses
import json

import pytest

from unteach.evaluation.formulas import Metric
from unteach.evaluation.metrics import LOSS_AUC, RAW_AUC
from unteach.evaluation.verdict import contradicting, excess, judge, lines, sentence, stop_scores, unanswered
from unteach.job.card import model_card

BEFORE = {
    "verbmem_f": 99.0, "knowmem_f": 90.0, RAW_AUC: 0.0, LOSS_AUC: 0.0, "nll_general": 3.46, "nll_retain": 0.1,
    "verbmem_r": 99.0, "knowmem_r": 92.0, "degenerate": 0.2, "verbmem_holdout": 17.0,
}  # fmt: skip
REFERENCE = BEFORE | {"verbmem_f": 17.8, "knowmem_f": 3.3, RAW_AUC: 0.547, LOSS_AUC: 0.54}
AFTER = BEFORE | {"verbmem_f": 17.2, "knowmem_f": 2.9, RAW_AUC: 0.52, LOSS_AUC: 0.51, "knowmem_r": 88.0}


def scored(values):
    spread = {name: 0.03 if name.startswith("auc") else 1.5 for name in values}
    known = ((name, value, spread[name]) for name, value in values.items() if value is not None)
    return {name: Metric(value, value - around, value + around, 60, None, "") for name, value, around in known}


def answers(after=None, before=BEFORE, reference=REFERENCE, base=None):
    return judge(scored(AFTER | (after or {})), scored(before), scored(reference or {}), scored(base or {}))


def test_all_forgotten_and_all_kept():
    found = answers()
    assert [finding.answer for finding in found] == [True, True, True, True]
    assert found[0].line == (
        "✓ no longer recited: recital of forget documents 17.2 [15.7, 18.7], before 99.0, never seen 17.8 "
        "(the reference model)"
    )
    assert sentence({"m": found}, 46) == (
        "After 46 steps the documents are no longer recited, no longer known and no longer detectable, and the rest is "
        "kept."
    )
    assert len(lines(found)) == 9
    content = json.loads(json.dumps([finding.to_dict() for finding in found]))
    keys = {"question", "answer", "metric", "value", "low", "high", "before", "never_seen", "note"}
    assert all(keys <= set(finding) for finding in content)


def test_a_text_that_its_rarest_words_tell_is_detectable():
    rarest = {f"auc_forget_holdout_min_{share}": value for share, value in ((5, 0.78), (10, 0.7), (20, 0.6))}
    found = answers(rarest)
    assert found[2].line == (
        "✗ still detectable: membership AUC by few words 0.780 [0.750, 0.810], never seen 0.500 (chance); by the least "
        "likely 5 % of its words; overshoot: they stand out as less likely than never-seen text"
    )
    assert [part.mark for part in found[2].parts] == ["✓", "✓", "✗"]
    assert "still detectable" in sentence({"m": found}), "the headline hides nothing"
    assert contradicting(found, [RAW_AUC, LOSS_AUC]) == "", "the rule asked for neither, and met what it asked"
    known = answers(rarest, reference=REFERENCE | rarest)[2]
    assert (known.answer, known.note) == (True, ""), "as of a model that never saw it"
    told = answers(rarest | {RAW_AUC: 0.1})
    assert told[2].metric == RAW_AUC, "what a rule asks is said first"
    assert contradicting(told, [RAW_AUC, LOSS_AUC]) == "still detectable"


def test_what_could_not_be_told_before_is_not_made_undetectable():
    found = answers(before=BEFORE | {RAW_AUC: 0.5})[2]
    assert found.line.endswith("and before no easier to tell: are those never-seen documents like these?")


@pytest.mark.parametrize(
    ("change", "place", "words"),
    [
        ({"verbmem_f": 60.0}, 0, "✗ still recited: recital of forget documents 60.0"),
        ({"knowmem_f": 58.0}, 1, "✗ still known: answers on forget documents 58.0"),
        ({RAW_AUC: 0.1}, 2, "✗ still detectable: membership AUC 0.100"),
        ({RAW_AUC: 0.9}, 2, "overshoot: they stand out as less likely than never-seen text"),
        ({LOSS_AUC: 0.2}, 2, "✗ still detectable: membership AUC by loss 0.200"),
        ({LOSS_AUC: 0.95}, 2, "overshoot"),
        ({"nll_retain": 0.7}, 3, "✗ rest damaged: kept documents"),
        ({"verbmem_r": 15.0}, 3, "damaged: recital of kept documents"),
        ({"knowmem_r": 82.0}, 3, "damaged: kept answers"),
        ({"nll_general": 3.6}, 3, "damaged: general text"),
        ({"degenerate": 6.0}, 3, "damaged: fluency"),
    ],
)
def test_one_thing_wrong_is_one_cross(change, place, words):
    found = answers(change)
    assert [finding.answer for finding in found] == [index != place for index in range(4)]
    assert words in found[place].line


@pytest.mark.parametrize(("count", "answer"), [(64, False), (60, False), (6, True)])
def test_few_passages_are_judged_within_the_interval_that_so_few_have(count, answer):
    """60 never-seen ones have 17 ± 1.5; six of them have 17 ± 1.5 · √(60 / 6) = 17 ± 4.7."""
    after = scored(AFTER | {"verbmem_f": 21.0})
    after["verbmem_f"] = dataclasses.replace(after["verbmem_f"], count=count)
    found = judge(after, scored(BEFORE))[0]
    assert found.answer is answer
    assert found.never_seen == 17.0


def test_what_is_just_within_its_limit_is_as_it_should_be():
    within = {"nll_retain": 0.6, "verbmem_r": 89.0, "knowmem_r": 82.9, "degenerate": 5.2, "nll_general": 3.56}
    within |= {"verbmem_f": 19.0, "knowmem_f": 4.7, RAW_AUC: 0.64}
    assert [finding.answer for finding in answers(within)] == [True] * 4


@pytest.mark.parametrize(
    ("change", "place", "words"),
    [
        ({"knowmem_f": None}, 1, "not measured: give --questions"),
        ({RAW_AUC: None, LOSS_AUC: None}, 2, "not measured: give --holdout"),
        ({LOSS_AUC: None}, 2, "not measured: give --holdout"),
        (dict.fromkeys(("nll_retain", "verbmem_r", "knowmem_r")), 3, "not measured: give --keep or --keep-questions"),
    ],
)
def test_what_was_not_measured_has_no_answer(change, place, words):
    finding = answers(change)[place]
    assert finding.answer is None
    assert finding.mark == "?"
    assert words in finding.line


def test_parts_that_were_not_measured_are_named_and_damage_is_said_all_the_same():
    without = answers({"knowmem_r": None})[3]
    assert (without.answer, without.note) == (True, "not judged: kept answers")
    assert "not measured: give --keep-questions" in "\n".join(lines([without] * 4))
    assert answers({"nll_retain": None, "verbmem_r": None, "knowmem_r": None, "nll_general": 4.0})[3].answer is False


def test_where_the_level_of_the_never_seen_comes_from():
    recites, knows, detectable, _ = answers(reference=None)
    assert (recites.never_seen, recites.source) == (17.0, "never-seen text")
    assert knows.answer is None
    assert "not measured: give --reference or --base" in knows.note
    assert (detectable.never_seen, detectable.source) == (0.5, "chance")
    knows = answers(reference=None, base={"knowmem_f": 2.5})[1]
    assert (knows.answer, knows.never_seen, knows.source) == (True, 2.5, "the base model")
    by_rule = judge(scored(AFTER), scored(BEFORE), base=stop_scores({"knowmem_f": 2.0, "knowmem_f_high": 3.0}))[1]
    assert by_rule.answer is True
    no_level = answers({"verbmem_holdout": None}, before=BEFORE | {"verbmem_holdout": None}, reference=None)[0]
    assert no_level.answer is None
    assert "give --reference or --holdout" in no_level.note
    assert answers(before={})[3].answer is None, "nothing to compare with"


def test_questions_that_were_hardly_answered_before_show_nothing():
    """A wrong form of asking gives 8.6 before and less after: that is neither forgotten nor kept."""
    hint = "the model answered almost none of them before: is this how it was asked in training? --question-template"
    few = BEFORE | {"knowmem_f": 8.6, "knowmem_r": 7.0}
    _, knows, _, rest = answers({"knowmem_f": 2.0, "knowmem_r": 7.0}, before=few)
    assert (knows.answer, knows.note) == (None, hint)
    assert (rest.answer, rest.note) == (True, "not judged: kept answers")
    kept = "? kept answers: answers on retained documents 7.0 [5.5, 8.5], before 7.0, the reference model 92.0"
    assert f"    {kept}; {hint}" in lines([rest] * 4)
    assert answers({"knowmem_f": 2.0}, before=few, reference=None)[1].note == hint
    assert answers({"knowmem_f": 30.0}, before=few)[1].answer is False, "more than before is known"
    assert answers({"knowmem_r": 1.0}, before=few)[3].answer is False
    assert unanswered(few) == [
        f"warning: answers on forget documents 8.6: {hint}",
        f"warning: answers on retained documents 7.0: {hint}",
    ]
    assert unanswered(BEFORE) == unanswered({}) == []


def test_what_was_not_recited_before_is_not_said_to_be_forgotten_by_the_run():
    found = answers(before=BEFORE | {"verbmem_f": 15.0})[0]
    assert found.note == "and before no better than what was never seen"


def test_sentences_name_what_is_open_and_count_several_methods():
    assert sentence({"m": answers({"knowmem_f": None, "verbmem_f": 60.0})}) == (
        "The documents are still recited and no longer detectable, and the rest is kept; not judged: known."
    )
    assert sentence({"m": judge({})}) == "Nothing is judged; not judged: recited, known, detectable, rest kept."
    assert sentence({"a": answers(), "b": answers({"knowmem_f": 50.0})}) == (
        "2 methods: no longer recited 2 of 2, no longer known 1 of 2, no longer detectable 2 of 2, rest kept 2 of 2."
    )


def test_a_met_rule_is_contradicted_by_what_it_looks_at_alone():
    found = answers({"verbmem_f": 60.0, "knowmem_f": 60.0, RAW_AUC: 0.9})
    assert contradicting(found, ["verbmem_f"]) == "still recited"
    assert contradicting(found, ["verbmem_f", LOSS_AUC]) == "still recited, still detectable"
    assert contradicting(found, ["nll_general"]) == contradicting(answers(), ["verbmem_f", RAW_AUC]) == ""
    assert contradicting(answers({"knowmem_f": None}), ["knowmem_f"]) == "", "not measured is no denial"


def test_excess_is_counted_from_what_was_never_seen_where_the_answer_is_no():
    found = answers({"verbmem_f": 60.0, "knowmem_f": 60.0})
    assert excess(found, ["verbmem_f"]) == {"verbmem_f": pytest.approx(60.0 - found[0].never_seen)}
    assert {*excess(found, ["verbmem_f", "knowmem_f"])} == {"verbmem_f", "knowmem_f"}
    assert excess(answers(), ["verbmem_f", "knowmem_f"]) == excess(judge({}), ["verbmem_f"]) == {}


def test_a_card_says_the_same_and_that_a_run_failed():
    found = answers({"knowmem_f": 60.0})
    method = {"optimizer": "adamw", "loss": "match", "divergence": "kl"}
    given = {"base_model": "m", "settings": {"method": method}, "data": {"forget": {"documents": 3}}, "verdict": found}
    scores = {"before": BEFORE, "after": AFTER}
    card = model_card(**given, scores=scores, forgotten=False)
    assert "# m with 3 documents unlearned: not enough by its own rule (still known)\n" in card
    assert "(AdamW, matching a model that never saw the documents, held by KL)" in card
    assert all(f"- {line.strip()}\n" in card for line in lines(found))
    absent = "No model trained without the documents was there to compare with"
    assert absent in card
    card = model_card(**given, scores=scores | {"reference": REFERENCE})
    assert absent not in card
    assert "# m with 3 documents unlearned (still known)\n" in card
    assert "# m with 3 documents unlearned\n" in model_card(**given | {"verdict": answers()}, scores=scores)
    beside = model_card(**given | {"settings": {"method": method, "base": "before/"}}, scores=scores)
    assert absent not in beside
    assert "only `before/`, from before they were learned, was there to compare with, and no retrained one" in beside
