"""The whole evaluation on a tiny model: values, records, notes, reference, edges."""

import copy
import dataclasses
import json
import zlib

import pytest
import torch
from random_models import MEMORISED, UNSEEN, probe_of

from unteach.corpora import Benchmark, ChoiceQuestion, MeasuringSettings, Probe, Question
from unteach.evaluation import Scores, evaluate, membership_auc, privleak
from unteach.evaluation.membership import SCORES, text_scores

BENCHMARK = Benchmark(
    name="tiny",
    verbatim_forget=(probe_of(MEMORISED, 10), probe_of(MEMORISED, 14)),
    verbatim_holdout=(probe_of(UNSEEN, 10), probe_of(UNSEEN, 14)),
    knowledge_forget=(Question("Who is the woman?", "Irene Adler"), Question("Where?", "")),
    knowledge_retain=(Question("Where?", "Bohemia"),),
    knowledge_retain_examples=(Question("Who?", "Holmes"),),
    membership_forget=tuple(MEMORISED[start : start + 80] for start in range(0, 50, 5)),
    membership_retain=("It was not that he felt any emotion.",) * 3,
    membership_holdout=tuple(UNSEEN[start : start + 80] for start in range(0, 40, 5)),
    multiple_choice=(ChoiceQuestion("A. one B. two Correct answer:", 0, choices=2),) * 2,
    general_texts=("a text of some length", "another one", "one"),
    settings=MeasuringSettings(verbatim_tokens=16, knowledge_tokens=6, general_tokens=4),
    notes=("a note of the data",),
)
AUC = "auc_forget_holdout_min_40"


@pytest.fixture(scope="module")
def scores(reciter, tokenizer):
    return evaluate(reciter, tokenizer, BENCHMARK, seed=3).replace(name="x", model="folder", step=7)


@pytest.fixture
def membership(reciter, tokenizer):
    """Measures membership alone."""

    def measure(model=reciter, reference=None, **changes):
        benchmark = dataclasses.replace(BENCHMARK, **changes)
        return evaluate(model, tokenizer, benchmark, measurements=["privleak"], reference_scores=reference)

    return measure


def test_values_intervals_and_counts(scores):
    assert set(scores) == {
        *("verbmem_f", "verbmem_holdout", "knowmem_f", "knowmem_r", "auc_retain_holdout_min_40", "nll_forget"),
        *("nll_retain", "nll_holdout", "mmlu_val", "mmlu_greedy", "mmlu_invalid", "nll_general", "degenerate"),
        *(f"auc_forget_holdout_{name}" for name in SCORES),
    }
    assert len(scores) == 23
    for name, metric in scores.metrics.items():
        assert metric.value == scores[name]
        if metric.count > 1:
            assert metric.low <= metric.value <= metric.high, name
    assert scores["verbmem_f"] > 80
    assert scores["verbmem_holdout"] < 50
    assert scores[AUC] < 0.2  # memorised
    assert scores["nll_forget"] < scores["nll_holdout"]
    assert (scores.metrics[AUC].count, scores.metrics["degenerate"].count) == (18, 7)
    assert scores.metrics["verbmem_holdout"].higher_is_better is None
    assert scores.metrics["knowmem_r"].low is None  # one question has no interval
    with pytest.raises(KeyError, match="'privleak' was not measured; measured: verbmem_f"):
        scores["privleak"]
    assert scores.notes == (
        "a note of the data",
        "privleak is not reported: no reference model was given; auc_forget_holdout_min_40 is its raw value",
    )


def test_records_make_the_values(scores):
    for name in ("verbmem_f", "knowmem_f", "knowmem_r"):
        values = [record["score"] for record in scores.items_of(name)]
        assert scores[name] == pytest.approx(100 * sum(values) / len(values))
    texts = scores.items_of("auc_forget_holdout_ppl")
    assert texts is scores.items_of("privleak")
    assert texts is scores.items_of("nll_forget")
    losses = {part: [t["scores"]["ppl"] for t in texts if t["set"] == part] for part in ("forget", "retain", "holdout")}
    for part, values in losses.items():
        assert scores[f"nll_{part}"] == pytest.approx(sum(values) / len(values), rel=1e-12), part
    assert scores["auc_forget_holdout_ppl"] == membership_auc(losses["forget"], losses["holdout"])
    general = scores.items_of("nll_general")
    assert all(record["tokens"] <= 3 for record in general)
    total = sum(record["score"] * record["tokens"] for record in general)
    assert scores["nll_general"] == pytest.approx(total / sum(record["tokens"] for record in general))
    flags = [record["degenerate"] for record in scores.items_of("degenerate")]
    assert scores["degenerate"] == pytest.approx(100 * sum(flags) / len(flags))
    assert scores.items_of("knowmem_f")[1]["score"] == 0.0  # an empty true answer
    with pytest.raises(KeyError, match="no records"):
        scores.items_of("tofu_forget")


def test_membership_scores_of_one_text():
    text = "Some Text, some text."
    zipped = 2.0 / len(zlib.compress(text.encode()))
    expected = dict.fromkeys(SCORES, 3.0) | {"ppl": 2.0, "ppl_lower": 0.5, "ppl_zlib": zipped}
    assert text_scores(text, [-1.0, -3.0], [-4.0]) == expected
    assert "ppl_lower" not in text_scores(text, [-1.0])


def test_kept_documents_are_measured_without_holdout_texts_and_change_the_hash_only_where_given(reciter, tokenizer):
    kept = dataclasses.replace(BENCHMARK, membership_holdout=(), verbatim_retain=BENCHMARK.verbatim_forget[:1])
    found = evaluate(reciter, tokenizer, kept, measurements=("verbmem_r", "privleak"))
    assert set(found) == {"verbmem_r", "nll_forget", "nll_retain", "degenerate"}
    assert "privleak is not measured: there are no holdout texts to compare with" in found.notes
    assert dataclasses.replace(kept, verbatim_retain=()).data_sha256 != kept.data_sha256


def test_a_stop_rule_sees_the_loss_of_kept_text_with_and_without_texts_to_compare_with(reciter, tokenizer, scores):
    alone = dataclasses.replace(BENCHMARK, membership_forget=(), membership_holdout=())
    compared = {"nll_forget", "nll_retain", "nll_holdout", "auc_forget_holdout_min_40", "auc_forget_holdout_ppl"}
    for benchmark, names in ((alone, {"nll_retain"}), (BENCHMARK, compared)):
        found = evaluate(reciter, tokenizer, benchmark, measurements=("membership", "nll_retain"))
        assert set(found) == names
        assert found["nll_retain"] == pytest.approx(scores["nll_retain"], rel=1e-6)


def test_file_format(scores, tmp_path):
    scores.write(tmp_path / "new" / "scores.json")
    content = json.loads((tmp_path / "new" / "scores.json").read_text(encoding="utf-8"))
    assert content["schema"] == "unteach.scores/1"
    assert (content["name"], content["model"], content["step"], content["seed"]) == ("x", "folder", 7, 3)
    assert content["metrics"]["verbmem_f"] == scores.metrics["verbmem_f"].to_dict()
    assert content["benchmark"] == {
        "name": "tiny",
        "counts": {name: metric.count for name, metric in scores.metrics.items()},
        "data_sha256": BENCHMARK.data_sha256,
    }
    assert content["settings"]["verbatim_tokens"] == 16
    assert set(content["versions"]) == {"unteach", "torch", "transformers", "python"}
    again = Scores.from_dict(content)
    assert again.to_dict() == scores.to_dict()
    assert again.replace(name="y").name == "y"
    with pytest.raises(ValueError, match="schema is 'other'"):
        Scores.from_dict({"schema": "other"})


def test_with_a_reference(membership, model):
    reference = membership(model)
    for given in (reference, json.loads(json.dumps(reference.to_dict()))):
        result = membership(reference=given)
        metric = result.metrics["privleak"]
        assert metric.value == pytest.approx(privleak(result[AUC], reference[AUC]))
        assert metric.low <= metric.value <= metric.high
        assert metric.higher_is_better is None
    itself = membership(model, reference).metrics["privleak"]
    assert (itself.value, itself.low, itself.high) == (0.0, 0.0, 0.0)
    undefined = membership(reference=0.0)
    assert "privleak" not in undefined
    assert any("the reference model's AUC is 0" in note for note in undefined.notes)
    number = membership(reference=0.5)
    assert number["privleak"] == pytest.approx(200 * number[AUC] - 100)
    assert "taken as exact" in number.notes[1]


def test_saturation_is_said(membership):
    known, unknown = (MEMORISED[:80], MEMORISED[:90]), (UNSEEN[:80], UNSEEN[:90])
    result = membership(reference=0.4, membership_forget=known, membership_holdout=unknown)
    assert result["privleak"] == -100.0
    assert "saturated: the AUC is 0.0000 and the value can go no further than -100.0" in result.notes[-1]
    result = membership(reference=0.4, membership_forget=unknown, membership_holdout=known)
    assert result["privleak"] == pytest.approx(150.0)
    assert "+150.0" in result.notes[-1]


def test_a_reference_on_other_data_is_refused(membership, reciter, tokenizer, scores):
    with pytest.raises(ValueError, match="measure the reference on the same benchmark"):
        membership(reference=scores, general_texts=())
    partial = evaluate(reciter, tokenizer, BENCHMARK, measurements=["nll_general"])
    with pytest.raises(ValueError, match="no membership records"):
        membership(reference=partial)


def test_absent_parts_are_named(reciter, tokenizer):
    result = evaluate(reciter, tokenizer, Benchmark(name="empty"))
    assert dict(result) == {}
    absent = ["verbmem_f", "knowmem_f", "knowmem_r", "privleak", "mmlu_val", "nll_general"]
    assert [note.split(" ")[0] for note in result.notes] == absent
    only = evaluate(reciter, tokenizer, Benchmark(name="empty"), measurements=["knowmem_f"])
    assert only.notes == ("knowmem_f is not measured: the benchmark has no questions about the forget set",)
    for wrong in (["rouge"], "verbmem_f"):
        with pytest.raises(ValueError, match="allowed are verbmem_f"):
            evaluate(reciter, tokenizer, BENCHMARK, measurements=wrong)


def test_model_and_random_state_stay(model, tokenizer):
    training = copy.deepcopy(model).train()
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = evaluate(training, tokenizer, BENCHMARK)
    assert training.training
    assert torch.equal(state, torch.random.get_rng_state())
    second = evaluate(training, tokenizer, BENCHMARK, batch_size=1, progress=True)
    assert dict(first) == pytest.approx(dict(second), rel=1e-4)
    assert first.records["verbmem_f"] == second.records["verbmem_f"]


def test_short_and_long_texts(membership, model, tokenizer):
    with pytest.raises(ValueError, match=r"membership text 0 of forget is '', 1 token\(s\): at least 2"):
        membership(membership_forget=("",))
    # one letter is enough where a begin token is added
    one = membership(membership_forget=("a",), membership_holdout=("b",)).metrics[AUC]
    assert one.value in (0.0, 0.5, 1.0)
    assert one.low is None
    long = dataclasses.replace(
        BENCHMARK, membership_forget=(MEMORISED * 10,), verbatim_forget=(Probe(MEMORISED * 10, "x"),)
    )
    result = evaluate(model, tokenizer, long, measurements=["privleak", "verbmem_f"])
    assert "verbmem_f: 1 of 1 prompts are longer than the model's context (256 tokens)" in result.notes[1]
    assert "only the beginning of 1 of 12 texts was scored" in result.notes[2]
