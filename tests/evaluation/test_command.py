"""`unteach evaluate` behind the command line."""

import importlib.util
import json
import re

import pytest
from random_models import MEMORISED, UNSEEN
from rich.console import Console

from unteach.errors import InputError
from unteach.evaluation.command import EvaluateOptions, _as_metrics, as_table, hash_weights, run
from unteach.evaluation.formulas import Metric

WITH_HARNESS = importlib.util.find_spec("lm_eval") is not None


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def folders(tmp_path_factory, reciter, model, tokenizer):
    """Two model folders, a folder with MUSE's layout, documents."""
    root = tmp_path_factory.mktemp("evaluate")
    for name, each in (("target", reciter), ("retrained", model)):
        each.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    words = MEMORISED.split(" ")
    write(root / "muse/verbmem/forget.jsonl", [{"prompt": " ".join(words[:9]), "gt": " " + " ".join(words[9:])}])
    write(root / "muse/knowmem/forget_qa.jsonl", [{"question": "Who?", "answer": "Adler"}] * 3)
    for part, text in (("forget", MEMORISED), ("holdout", UNSEEN)):
        write(root / f"muse/privleak/{part}.jsonl", [{"text": text[k:]} for k in range(0, 30, 6)])
        write(root / f"{part}.jsonl", [{"text": text}, {"text": text[10:]}])
    write(root / "general.jsonl", [{"text": "some text"}, {"text": "more of it"}])
    write(root / "questions.jsonl", [{"question": "Who?", "answer": "Adler"}])
    return root


@pytest.fixture
def measured(folders):
    """Runs the command on models by their names, by default on the folder with MUSE's layout."""

    def measure(*models, **options):
        options = {"benchmark": "muse-news", "data": folders / "muse"} | options
        return run(EvaluateOptions(models=tuple(str(folders / name) for name in models), device="cpu", **options))

    return measure


@pytest.mark.slow
def test_several_models_with_a_reference(measured, folders, tmp_path):
    row = {"question": "2 + 2?", "choices": ["3", "4", "5", "6"], "answer": 1, "subject": "sums"}
    write(tmp_path / "mmlu/validation.jsonl", [row] * 2)
    (tmp_path / "mmlu/prompt.txt").write_text("Correct answer: A", encoding="utf-8")
    out = tmp_path / "new" / "scores.json"
    general, reference = str(folders / "general.jsonl"), str(folders / "retrained")
    content = measured("target", "retrained", reference=reference, general=general, mmlu=tmp_path / "mmlu", out=out)
    assert content == json.loads(out.read_text(encoding="utf-8"))
    assert content["schema"] == "unteach.scores/1"
    target, retrained = content["results"]
    assert (target["name"], retrained["name"]) == ("target", "retrained")
    assert target["model"] == str(folders / "target")
    assert target["metrics"]["verbmem_f"]["value"] > retrained["metrics"]["verbmem_f"]["value"] + 10
    [record] = target["items"]["verbmem_f"]
    assert record["output"].startswith(record["expected"])
    assert retrained["metrics"]["privleak"]["value"] == 0.0
    assert target["metrics"]["privleak"]["value"] < 0
    assert target["benchmark"]["counts"]["nll_general"] == target["benchmark"]["counts"]["mmlu_val"] == 2
    assert target["settings"]["precision"] == "fp32"
    assert target["model_sha256"] == hash_weights(folders / "target") != retrained["model_sha256"]
    console = Console(width=100)
    with console.capture() as shown:
        console.print(as_table(content))
    assert re.search(r"privleak .* 0\.0 \(0\.0 to 0\.0\)", shown.get())
    assert "knowmem_r" not in shown.get()
    kept = {"verbmem_r": Metric(15.0, 9.0, 21.0, 9, True, "percent").to_dict()}
    with console.capture() as shown:
        console.print(as_table({"results": [{"name": "m", "benchmark": {"name": "b"}, "metrics": kept}]}))
    assert re.search(r"verbmem_r .* 15\.0 \(9\.0 to 21\.0\)", shown.get()), "what kept documents lost is not hidden"


@pytest.mark.slow
def test_a_scores_file_is_a_reference(measured, tmp_path):
    file = tmp_path / "retrained.json"
    first = measured("retrained", out=file)
    assert "privleak" not in first["results"][0]["metrics"]
    content = measured("retrained", reference=str(file))
    assert content["results"][0]["metrics"]["privleak"]["value"] == 0.0
    number = measured("target", reference_auc=0.5)
    assert number["results"][0]["metrics"]["privleak"]["value"] < -50
    two = measured("target", "target", limit=2, out=file)
    assert two["results"][0]["benchmark"]["counts"]["knowmem_f"] == 2
    with pytest.raises(InputError, match="it holds 2 results, must hold one"):
        measured("target", reference=str(file))
    file.write_text("[]", encoding="utf-8")
    with pytest.raises(InputError, match="not a scores file"):
        measured("target", reference=str(file))


def test_own_documents(measured, folders):
    asked = dict.fromkeys(("questions", "retain_questions"), folders / "questions.jsonl")
    (folders / "holdout.csv").write_bytes(f'text\n"{UNSEEN} à"\n"{UNSEEN[10:]}"\n'.encode("latin-1"))
    own = {"documents": str(folders / "forget.jsonl"), "holdout": str(folders / "holdout.csv")}
    result = measured("target", benchmark="own", data=None, **own, **asked)["results"][0]
    assert any(note.startswith("holdout: holdout.csv: invalid UTF-8 at byte") for note in result["notes"])
    metrics = result["metrics"]
    assert metrics["verbmem_f"]["value"] > metrics["verbmem_holdout"]["value"]
    assert metrics["knowmem_f"]["count"] == metrics["knowmem_r"]["count"] == 1
    assert metrics["auc_forget_holdout_min_40"]["count"] == 4


def test_every_problem_is_reported_at_once(tmp_path):
    wrong = {
        "benchmark": "muse",
        "data": tmp_path / "missing",
        "documents": "x",
        "questions": tmp_path / "missing.jsonl",
    }
    wrong |= {"reference": "a", "reference_auc": 1.5, "limit": 0, "out": tmp_path}
    with pytest.raises(InputError) as caught:
        run(EvaluateOptions(models=(), **wrong))
    starts = [problem.split(" ")[0] for problem in caught.value.problems]
    expected = "models benchmark documents questions data questions reference reference_auc limit out"
    assert starts == expected.split()


def test_wrong_models_and_data(measured, tmp_path):
    for models, options, message in (
        (("missing",), {}, "model is '.*missing': there is no such folder"),
        (("target",), {"data": tmp_path}, "none of MUSE's tables"),
        (("target",), {"benchmark": "own"}, "documents is not given"),
    ):
        with pytest.raises(InputError, match=message):
            measured(*models, **options)


def test_harness_table_becomes_metrics():
    measures = {"alias": "task", "acc,none": 0.5, "acc_stderr,none": 0.1}
    measures |= {"exact_match,strict": 0.25, "exact_match_stderr,strict": "N/A"}
    content = {"results": {"task": measures}, "n-samples": {"task": {"original": 9, "effective": 4}}}
    metrics = _as_metrics(content | {"higher_is_better": {"task": {"acc": True}}})
    assert metrics == {
        "task:acc": Metric(0.5, pytest.approx(0.304), pytest.approx(0.696), 4, True, "lm-eval"),
        "task:exact_match:strict": Metric(0.25, None, None, 4, None, "lm-eval"),
    }


@pytest.mark.skipif(WITH_HARNESS, reason="lm-eval is installed")
def test_missing_harness_is_said():
    with pytest.raises(InputError, match="pip install lm-eval"):
        run(EvaluateOptions(models=("micro:target",), lm_eval=("hellaswag",)))


@pytest.mark.skipif(not WITH_HARNESS, reason="lm-eval is not installed")
@pytest.mark.filterwarnings("ignore")
def test_harness_runs_a_local_task(measured, tmp_path):
    write(tmp_path / "data.jsonl", [{"q": "To Sherlock", "choices": [" Holmes", " Adler"], "a": 0}] * 3)
    (tmp_path / "local_choice.yaml").write_text(
        "task: local_choice\ndataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {tmp_path / 'data.jsonl'}\n"
        "output_type: multiple_choice\ntest_split: test\ndoc_to_text: '{{q}}'\ndoc_to_choice: choices\n"
        "doc_to_target: a\ntarget_delimiter: ''\nmetric_list:\n- metric: acc\n",
        encoding="utf-8",
    )
    content = measured("target", lm_eval=("local_choice",), lm_eval_tasks=tmp_path)
    assert content["results"][0]["metrics"]["local_choice:acc"]["value"] == 1.0
    with pytest.raises(InputError, match="lm_eval is no_such_task: not among the harness's"):
        measured("target", lm_eval=("no_such_task",))
