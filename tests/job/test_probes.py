"""What a run measures, what it stops at, and what it says before it begins."""

import json
from types import SimpleNamespace

import pytest

from personal_records import record
from unteach.config import ForgetConfig, Method, Stop
from unteach.corpora import MeasuringSettings, Question, micro
from unteach.data import Documents
from unteach.errors import InputError
from unteach.evaluation.metrics import RAW_AUC
from unteach.job.inputs import Inputs, choice
from unteach.job.probes import CHEAP, GENERAL_TEXTS, LOSS_AUC, run_probes, saw_the_documents, stop_rule
from unteach.job.run import ForgetJob
from unteach.models import load_tokenizer
from unteach.training.stopping import Condition, StopRule

RECITAL = {"verbmem_f": 99.0, "verbmem_holdout": 12.0, "degenerate": 1.0, "nll_general": 3.0}
BEFORE = RECITAL | {"knowmem_f": 90.0, RAW_AUC: 0.01, LOSS_AUC: 0.02}
NEVER_SAW = {"verbmem_f": 17.0, "knowmem_f": 3.0, "knowmem_f_high": 7.0, RAW_AUC: 0.55, LOSS_AUC: 0.54}


def texts(part, count):
    return Documents(part, micro.documents(part)[:count])


def probes(*, watched=None, holdout=None, count=6, **settings):
    config = ForgetConfig(model="micro:target", probes=8, **settings).chosen()
    tokenizer, general = load_tokenizer("micro:target"), texts("general", 4)
    inputs = Inputs(None, tokenizer, texts("forget", count), general, holdout=holdout)
    return run_probes(inputs, general, watched, config, 256, parity=watched is not None)


def test_the_embedded_benchmark_measures_kept_documents_beside_its_own():
    found = probes(documents="micro:forget")
    assert found.final.verbatim_retain == micro.probes("retain", "measure")[:8]
    assert found.start.verbatim_retain == found.stop.verbatim_retain == ()
    assert found.final.membership_holdout


def test_own_documents_are_measured_on_what_was_given():
    alone = probes(documents="x").final
    assert (alone.verbatim_retain, alone.membership_retain, alone.membership_holdout) == ((), (), ())
    assert alone.membership_forget
    kept = probes(documents="x", watched=texts("retain", 3), holdout=texts("holdout", 5)).final
    assert {probe.document for probe in kept.verbatim_retain} == {0, 1, 2}
    assert (len(kept.membership_retain), len(kept.membership_holdout)) == (3, 5)
    short = Documents("short", ["a word"])
    assert probes(documents="x", watched=short).final.verbatim_retain == (), "too short for a passage"


@pytest.mark.parametrize("documents", ["x", "micro:forget"])
def test_keep_text_is_watched_with_and_without_holdout_documents(documents):
    """At every look, by its loss alone where nothing is there to compare membership with."""
    kept = texts("retain", 12)
    for holdout, compared in ((None, False), (texts("holdout", 5), True)):
        found = probes(documents=documents, watched=kept, holdout=holdout)
        assert 0 < len(found.stop.membership_retain) <= GENERAL_TEXTS
        assert bool(found.stop.membership_forget) == bool(found.stop.membership_holdout) == compared
    assert probes(documents=documents).stop.membership_retain == ()
    assert "nll_retain" in CHEAP


def test_a_rule_can_be_measured_on_the_passages_and_questions_of_a_benchmark(tmp_path):
    """In the benchmark's own way, all of them; the report still has passages that the rule did not use."""
    tables = {
        "verbmem/forget": [{"prompt": f"It was said {n}", "gt": "that it was so."} for n in range(12)],
        "knowmem/forget_qa": [{"question": f"Who is {n}?", "answer": "Ann"} for n in range(3)],
        "knowmem/forget_qa_icl": [{"question": "Who?", "answer": "Bob"}],
    }
    for name, rows in tables.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    cut = probes(documents="x")
    stop = Stop(metric="knowmem_f <= 35.0 and verbmem_f <= 21.8", probes=f"muse-news:{tmp_path}")
    found = probes(documents="x", stop=stop)
    assert [probe.prompt for probe in found.stop.verbatim_forget] == [row["prompt"] for row in tables["verbmem/forget"]]
    assert len(found.stop.knowledge_forget) == 3
    assert found.stop.knowledge_forget_examples == (Question("Who?", "Bob"),)
    assert found.stop.settings == MeasuringSettings()
    assert found.final == cut.final
    assert found.start.general_texts == cut.start.general_texts
    assert found.start.verbatim_holdout == cut.start.verbatim_holdout
    assert {"verbmem_f", "knowmem_f"} <= set(found.names())
    for wrong, why in (("muse-nws", "benchmark is 'muse-nws': allowed are"), ("muse-news:nowhere", "no such folder")):
        with pytest.raises(InputError, match=f"stop.probes is '{wrong}': .*{why}"):
            probes(documents="x", stop=Stop(probes=wrong))
    (tmp_path / "verbmem/forget.jsonl").unlink()
    with pytest.raises(InputError, match="has no passages to be continued"):
        probes(documents="x", stop=stop)


@pytest.mark.parametrize("words", [[20], [75], [100, 20], [20, 40, 60, 80, 100], [30] * 12])
def test_few_short_documents_are_cut_shorter_with_their_names(words):
    """Each half watches every document, on passages of its own, and never-seen text is asked for as many names."""
    tokenizer, general = load_tokenizer("micro:target"), texts("general", 40)
    records = [" ".join(f"{record(100)} {record(number)}".split()[:count]) for number, count in enumerate(words)]
    inputs = Inputs(None, tokenizer, Documents("records", records), general)
    config = ForgetConfig(model="x", documents="records").chosen()
    found = run_probes(inputs, general, None, config, 256, parity=False)
    halves = [benchmark.verbatim_forget for benchmark in (found.start, found.final)]
    for half, unseen in zip(halves, (found.start.verbatim_holdout, found.final.verbatim_holdout), strict=True):
        passages, asked = [probe for probe in half if not probe.exact], [probe for probe in half if probe.exact]
        assert {probe.document for probe in passages} == set(range(len(words)))
        assert len(passages) >= 2
        assert asked
        assert len(half) <= config.probes
        share, among = len(asked) / len(half), sum(probe.exact for probe in unseen) / len(unseen)
        assert among == pytest.approx(share, abs=0.02)
        assert len(unseen) >= len(half)
    ends = [{(probe.document, len(probe.prompt_ids)) for probe in half if not probe.exact} for half in halves]
    assert not ends[0] & ends[1]
    assert "so few show" in found.few
    assert found.few in found.final.notes


def test_enough_documents_are_cut_as_ever():
    found = probes(documents="x", count=70)
    assert (found.few, found.final.notes) == ("", found.start.notes)
    assert not any(probe.exact for probe in found.start.verbatim_forget)
    assert min(len(probe.expected_ids) for probe in found.start.verbatim_forget) > 20


def test_a_rule_on_few_passages_knows_its_interval():
    """The mean of 8 passages may lie as far above never-seen text's as 8 never-seen ones do by chance."""
    before = BEFORE | {"verbmem_holdout_high": 16.0}
    assert rule_of(before=before, few=None).conditions[0].value == 12.0
    few = rule_of(before=before, few=(4, 64))
    assert few.conditions[0].value == 12 + 4 * 4
    assert "12, and up to this for 4 of them by chance" in str(few)
    assert rule_of(before=before, few=(4, 64), parity=True).conditions[0].value == 28
    reference = {"reference": NEVER_SAW | {"verbmem_f_high": 25.0}}
    assert rule_of(reference, before=before, few=(4, 64)).conditions[0].value == 25, "it has its own interval"


def rule_of(others=None, *, parity=False, before=BEFORE, few=None, **settings):
    config = ForgetConfig(model="", **settings).chosen()
    return stop_rule(config, before, others or {}, parity=parity, texts=(64, 64), few=few)


def test_without_a_reference_a_run_stops_where_never_seen_text_is_recited():
    rule = rule_of()
    assert [(c.metric, c.comparison, c.value) for c in rule.conditions] == [("verbmem_f", "<=", 12.0)]
    assert "never-seen documents before the run" in str(rule)
    assert rule.most_degenerate == 6.0
    assert rule_of(method=Method(optimizer="adamw")).most_degenerate is None
    deep = {"keep": "k", "base": "b"}
    assert rule_of(**deep).most_degenerate == 6.0
    assert rule_of(**deep, method=Method(loops_every=0)).most_degenerate is None
    assert rule_of({"reference": NEVER_SAW}).conditions[0].value == 17.0


def test_parity_is_recital_membership_and_knowledge_as_far_as_they_are_measured():
    rule = rule_of({"base": NEVER_SAW}, parity=True)
    assert rule.metrics == ["verbmem_f", RAW_AUC, LOSS_AUC, "knowmem_f"]
    membership = rule.conditions[1]
    assert (membership.value, membership.limit) == (0.55, pytest.approx(0.6012, abs=1e-3)), "the base model's own"
    assert rule.conditions[0].value == 12.0, "never-seen documents were recited"
    likelier = rule_of({"base": NEVER_SAW | {RAW_AUC: 0.45, LOSS_AUC: 0.45}}, parity=True).conditions[1]
    assert (likelier.value, likelier.limit) == (0.5, pytest.approx(0.5512, abs=1e-3)), "rather too far than too near"
    unseen = rule_of(parity=True).conditions[1]
    assert (unseen.value, unseen.limit) == (0.5, pytest.approx(0.5512, abs=1e-3))
    assert rule.conditions[3].value == 7.0
    assert rule.most_degenerate is None
    assert rule_of(keep="k", base="b", parity=True).most_degenerate == 6.0, "loops may be found where it is met"
    assert rule_of(keep="k", base="b", parity=True, method=Method(loops_every=6)).most_degenerate is None
    parity = {"verbmem_f": 12.0, RAW_AUC: 0.56, LOSS_AUC: 0.56, "knowmem_f": 5.0}
    assert rule.crossed(parity)
    assert rule.distance(parity) == 0
    assert rule.distance(parity | {RAW_AUC: 0.8}) > 0, "overshoot is not parity"
    assert rule.conditions[2].limit == pytest.approx(NEVER_SAW[LOSS_AUC] + 0.1), "nor is that of the loss"
    assert rule.distance(parity | {LOSS_AUC: 0.9}) > 0
    assert rule_of({"reference": NEVER_SAW}, parity=True).conditions[2].limit is None, "without a base none comes back"
    assert not rule.crossed(parity | {"knowmem_f": 8.0})
    assert rule_of({"reference": NEVER_SAW}, parity=True).conditions[1].value == 0.55
    given = {"keep": "k", "base": "b", "holdout": "h"}
    measured = rule_of({"reference": NEVER_SAW}, parity=True, **given).conditions[1]
    assert measured.value == pytest.approx(0.55 - 0.0512, abs=1e-3), "a pull that ends at parity, as it was estimated"
    assert rule_of(parity=True, **given).conditions[1].value == 0.5
    assert (
        rule_of({"reference": NEVER_SAW}, parity=True, **given, method=Method(goal="base")).conditions[1].value == 0.55
    )
    assert rule_of(parity=True, before=RECITAL).metrics == ["verbmem_f"]
    assert rule_of(parity=True).metrics == ["verbmem_f", RAW_AUC, LOSS_AUC]


def test_without_holdout_documents_recital_is_compared_with_a_base_model_that_never_saw_them():
    """General text is of another kind: a model of TOFU's answers recites some of every answer."""
    never_saw = {"verbmem_f": 17.0, "verbmem_f_high": 19.0}
    rule = rule_of({"base": never_saw}, parity=True, before=RECITAL)
    assert (rule.conditions[0].value, "the base model's" in str(rule)) == (19.0, True)
    assert rule_of({"base": never_saw}, before=RECITAL).conditions[0].value == 12.0, "not for recital alone"
    saw = rule_of({"base": {"verbmem_f": 60.0, RAW_AUC: 0.0, LOSS_AUC: 0.0}}, parity=True)
    assert (saw.conditions[0].value, saw.conditions[1].value) == (12.0, 0.5), "one that saw them sets no goal"


def test_a_base_model_that_recites_the_documents_is_noticed():
    assert saw_the_documents(NEVER_SAW, BEFORE) is None
    assert "seems to have seen them" in str(saw_the_documents({"verbmem_f": 60.0}, BEFORE))


def test_a_run_says_its_method_and_what_more_could_be_given():
    some = Documents("d", ["a"])

    def line(**given):
        config = ForgetConfig(model="m", **dict.fromkeys(given, "x")).chosen()
        read = {name: what for name, what in given.items() if name != "questions"}
        return choice(config, Inputs(None, None, some, some, **read), parity="keep" in given)

    assert line().startswith("mean_teacher with nlul, held on general text; give --keep")
    assert line(keep=some).startswith("adamw with nlul, held on general text and keep documents; give --base")
    deep = "adamw with match, held on general text and keep documents"
    given = {"keep": some, "base": object(), "holdout": some}
    assert line(**given) == f"{deep}; give --questions, to see whether it still answers about them"
    assert line(**given, questions=some) == deep
    assert "--holdout" in line(keep=some, base=object())


def test_loops_are_those_of_passages_also_where_questions_are_asked():
    """Answers are short: they hardly loop, and would hide what passages do."""
    found = {"knowmem_f": {"knowmem_f": 1.0, "degenerate": 0.5}, "verbmem_f": {"verbmem_f": 9.0, "degenerate": 40.0}}
    rule = StopRule((Condition("knowmem_f", "<=", 3.0),))
    job = SimpleNamespace(
        config=ForgetConfig(model=""),
        inputs=SimpleNamespace(model=None),
        probes=SimpleNamespace(stop=None),
        search=SimpleNamespace(rule=rule, distance=rule.distance),
        folder=SimpleNamespace(add_line=lambda *line: None),
        say=lambda line: None,
        measured=lambda model, benchmark, asked: dict(found[asked[0]]),
    )
    assert ForgetJob.evaluate_stop(job, 1) == {"verbmem_f": 9.0, "knowmem_f": 1.0, "degenerate": 40.0, "distance": 0.0}
