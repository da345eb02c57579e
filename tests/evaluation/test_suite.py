"""The whole evaluation on a tiny model: values, records, notes, reference, edges."""

import copy
import dataclasses
import json

import pytest
import torch
from random_models import MEMORISED, UNSEEN

from unteach.corpora import Benchmark, ChoiceQuestion, MeasuringSettings, Probe, Question
from unteach.evaluation import Scores, evaluate, membership_auc, privleak
from unteach.evaluation.membership import SCORES
from unteach.evaluation.statistics import mean_metric


def probe(text, words):
    parts = text.split(" ")
    return Probe(" ".join(parts[:words]), " " + " ".join(parts[words:]))


TEXTS = [MEMORISED[start : start + 80] for start in range(0, 50, 5)]
UNSEEN_TEXTS = [UNSEEN[start : start + 80] for start in range(0, 40, 5)]
BENCHMARK = Benchmark(
    name="tiny",
    verbatim_forget=(probe(MEMORISED, 10), probe(MEMORISED, 14)),
    verbatim_holdout=(probe(UNSEEN, 10), probe(UNSEEN, 14)),
    knowledge_forget=(Question("Who is the woman?", "Irene Adler"), Question("Where?", "")),
    knowledge_retain=(Question("Where?", "Bohemia"),),
    knowledge_retain_examples=(Question("Who?", "Holmes"),),
    membership_forget=tuple(TEXTS),
    membership_retain=("It was not that he felt any emotion.",) * 3,
    membership_holdout=tuple(UNSEEN_TEXTS),
    multiple_choice=(ChoiceQuestion("A. one B. two Correct answer:", 0, choices=2),) * 2,
    general_texts=("a text of some length", "another one", "one"),
    settings=MeasuringSettings(verbatim_tokens=16, knowledge_tokens=6, general_tokens=4),
    notes=("a note of the data",),
)


@pytest.fixture(scope="module")
def scores(reciter, tokenizer):
    return evaluate(reciter, tokenizer, BENCHMARK, name="x", model_name="folder", step=7, seed=3)


def test_values_intervals_and_counts(scores):
    assert scores["verbmem_f"] > 80
    assert scores["verbmem_holdout"] < 50
    assert set(scores) == {
        "verbmem_f",
        "verbmem_holdout",
        "knowmem_f",
        "knowmem_r",
        *(f"auc_forget_holdout_{name}" for name in SCORES),
        "auc_retain_holdout_min_40",
        "nll_forget",
        "nll_retain",
        "nll_holdout",
        "mmlu_val",
        "mmlu_greedy",
        "mmlu_invalid",
        "nll_general",
        "degenerate",
    }
    assert len(scores) == 23
    for name, metric in scores.metrics.items():
        assert metric.value == scores[name]
        if metric.count > 1:
            assert metric.low <= metric.value <= metric.high, name
    assert scores.metrics["auc_forget_holdout_min_40"].count == 18
    assert scores.metrics["verbmem_holdout"].higher_is_better is None
    assert scores.metrics["knowmem_r"].low is None  # one question has no interval
    assert scores["auc_forget_holdout_min_40"] < 0.2  # memorised
    assert scores["nll_forget"] < scores["nll_holdout"]
    for part in ("forget", "retain", "holdout"):
        losses = [r["scores"]["ppl"] for r in scores.items_of("membership") if r["set"] == part]
        assert scores[f"nll_{part}"] == pytest.approx(sum(losses) / len(losses), rel=1e-12), part
    assert scores.metrics["degenerate"].count == 7
    with pytest.raises(KeyError, match="'privleak' was not measured; measured: verbmem_f"):
        scores["privleak"]


def test_records_make_the_values(scores):
    for name in ("verbmem_f", "knowmem_f", "knowmem_r"):
        values = [record["score"] for record in scores.items_of(name)]
        assert scores[name] == pytest.approx(100 * sum(values) / len(values))
    texts = scores.items_of("auc_forget_holdout_ppl")
    assert texts is scores.items_of("privleak")
    assert texts is scores.items_of("nll_forget")
    losses = {part: [t["scores"]["ppl"] for t in texts if t["set"] == part] for part in ("forget", "holdout")}
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


def test_without_reference_privleak_is_not_reported_and_the_note_says_why(scores):
    assert scores.notes == (
        "a note of the data",
        "privleak is not reported: no reference model was given; auc_forget_holdout_min_40 is its raw value",
    )


def test_kept_documents_are_measured_without_holdout_texts_and_change_the_hash_only_where_given(reciter, tokenizer):
    kept = dataclasses.replace(BENCHMARK, membership_holdout=(), verbatim_retain=BENCHMARK.verbatim_forget[:1])
    found = evaluate(reciter, tokenizer, kept, measurements=("verbmem_r", "privleak"))
    assert set(found) == {"verbmem_r", "nll_forget", "nll_retain", "degenerate"}
    assert "privleak is not measured: there are no holdout texts to compare with" in found.notes
    assert dataclasses.replace(kept, verbatim_retain=()).data_sha256 != kept.data_sha256


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
    assert dict(again) == dict(scores)
    assert again.replace(name="y").name == "y"
    with pytest.raises(ValueError, match="schema is 'other'"):
        Scores.from_dict({"schema": "other"})


def test_with_a_reference(reciter, model, tokenizer, scores):
    reference = evaluate(model, tokenizer, BENCHMARK, measurements=["privleak"])
    auc = reference["auc_forget_holdout_min_40"]
    for given in (reference, reference.to_dict(), json.loads(json.dumps(reference.to_dict()))):
        result = evaluate(reciter, tokenizer, BENCHMARK, measurements=["privleak"], reference_scores=given)
        metric = result.metrics["privleak"]
        assert metric.value == pytest.approx(privleak(result["auc_forget_holdout_min_40"], auc))
        assert metric.low <= metric.value <= metric.high
        assert metric.higher_is_better is None
    itself = evaluate(model, tokenizer, BENCHMARK, measurements=["privleak"], reference_scores=reference)
    assert (itself["privleak"], itself.metrics["privleak"].low, itself.metrics["privleak"].high) == (0.0, 0.0, 0.0)
    undefined = evaluate(reciter, tokenizer, BENCHMARK, measurements=["privleak"], reference_scores=0.0)
    assert "privleak" not in undefined
    assert any("the reference model's AUC is 0" in note for note in undefined.notes)
    number = evaluate(reciter, tokenizer, BENCHMARK, measurements=["privleak"], reference_scores=0.5)
    assert number["privleak"] == pytest.approx(200 * number["auc_forget_holdout_min_40"] - 100)
    assert "taken as exact" in number.notes[1]


def test_saturation_is_said(reciter, tokenizer):
    few = dataclasses.replace(
        BENCHMARK, membership_forget=(MEMORISED[:80], MEMORISED[:90]), membership_holdout=(UNSEEN[:80], UNSEEN[:90])
    )
    result = evaluate(reciter, tokenizer, few, measurements=["privleak"], reference_scores=0.4)
    assert result["privleak"] == -100.0
    assert "saturated: the AUC is 0.0000 and the value can go no further than -100.0" in result.notes[-1]
    turned = dataclasses.replace(
        few, membership_forget=few.membership_holdout, membership_holdout=few.membership_forget
    )
    result = evaluate(reciter, tokenizer, turned, measurements=["privleak"], reference_scores=0.4)
    assert result["privleak"] == pytest.approx(150.0)
    assert "+150.0" in result.notes[-1]


def test_a_reference_on_other_data_is_refused(reciter, tokenizer, scores):
    other = dataclasses.replace(BENCHMARK, general_texts=())
    with pytest.raises(ValueError, match="measure the reference on the same benchmark"):
        evaluate(reciter, tokenizer, other, measurements=["privleak"], reference_scores=scores)
    partial = evaluate(reciter, tokenizer, BENCHMARK, measurements=["nll_general"])
    with pytest.raises(ValueError, match="no membership records"):
        evaluate(reciter, tokenizer, BENCHMARK, measurements=["privleak"], reference_scores=partial)


def test_absent_parts_are_named(reciter, tokenizer):
    result = evaluate(reciter, tokenizer, Benchmark(name="empty"))
    assert dict(result) == {}
    assert [note.split(" ")[0] for note in result.notes] == [
        "verbmem_f",
        "knowmem_f",
        "knowmem_r",
        "privleak",
        "mmlu_val",
        "nll_general",
    ]
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
    assert first.metrics.keys() == second.metrics.keys()
    for name in first:
        assert first[name] == pytest.approx(second[name], rel=1e-4)
    assert first.records["verbmem_f"] == second.records["verbmem_f"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"membership_forget": ("",)}, r"membership text 0 of forget is '', 1 token\(s\): at least 2"),
        ({"general_texts": ("good text", "")}, r"text 1 has 1 token\(s\): at least 2"),
    ],
)
def test_texts_of_one_token_are_refused(model, tokenizer, change, message):
    with pytest.raises(ValueError, match=message):
        evaluate(model, tokenizer, dataclasses.replace(BENCHMARK, **change), measurements=["privleak", "nll_general"])


def test_one_letter_is_enough_where_a_begin_token_is_added(model, tokenizer):
    one = dataclasses.replace(BENCHMARK, membership_forget=("a",), membership_holdout=("b",))
    result = evaluate(model, tokenizer, one, measurements=["privleak"])
    assert result.metrics["auc_forget_holdout_min_40"].value in (0.0, 0.5, 1.0)
    assert result.metrics["auc_forget_holdout_min_40"].low is None


def test_long_texts_are_cut_and_said(model, tokenizer):
    long = dataclasses.replace(
        BENCHMARK, membership_forget=(MEMORISED * 10,), verbatim_forget=(Probe(MEMORISED * 10, "x"),)
    )
    result = evaluate(model, tokenizer, long, measurements=["privleak", "verbmem_f"])
    assert "verbmem_f: 1 of 1 prompts are longer than the model's context (256 tokens)" in result.notes[1]
    assert "only the beginning of 1 of 12 texts was scored" in result.notes[2]


def test_broken_weights_are_an_error(model, tokenizer):
    broken = copy.deepcopy(model)
    broken.model.norm.weight.data[:] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        evaluate(broken, tokenizer, BENCHMARK)
    with pytest.raises(ValueError, match="NaN"):
        mean_metric([float("nan")], higher_is_better=True)
