"""`unteach evaluate` behind the command line."""

import importlib.util
import json
import re

import pytest
from random_models import MEMORISED, UNSEEN
from rich.console import Console

from unteach.errors import InputError
from unteach.evaluation.command import EvaluateOptions, _as_metrics, as_table, hash_weights, run
from unteach.evaluation.suite import evaluate


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
    write(root / "muse/privleak/forget.jsonl", [{"text": MEMORISED[k:]} for k in range(0, 30, 6)])
    write(root / "muse/privleak/holdout.jsonl", [{"text": UNSEEN[k:]} for k in range(0, 30, 6)])
    for name, text in (("documents", MEMORISED), ("holdout", UNSEEN)):
        (root / name).mkdir()
        (root / name / "a.txt").write_text(text, encoding="utf-8")
        (root / name / "b.txt").write_text(text[10:], encoding="utf-8")
    write(root / "general.jsonl", [{"text": "some text"}, {"text": "more of it"}])
    write(root / "questions.jsonl", [{"question": "Who?", "answer": "Adler"}])
    return root


def test_several_models_with_a_reference(folders, tmp_path):
    out = tmp_path / "new" / "scores.json"
    content = run(
        EvaluateOptions(
            models=(str(folders / "target"), str(folders / "retrained")),
            benchmark="muse-news",
            data=folders / "muse",
            reference=str(folders / "retrained"),
            general=str(folders / "general.jsonl"),
            device="cpu",
            out=out,
        )
    )
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
    assert target["benchmark"]["counts"]["nll_general"] == 2
    assert target["settings"]["precision"] == "fp32"
    assert target["model_sha256"] == hash_weights(folders / "target") != retrained["model_sha256"]
    console = Console(width=100)
    with console.capture() as shown:
        console.print(as_table(content))
    assert re.search(r"privleak .* 0\.0 \(0\.0 to 0\.0\)", shown.get())
    assert "knowmem_r" not in shown.get()


@pytest.mark.slow
def test_a_scores_file_is_a_reference(folders, tmp_path):
    common = {"benchmark": "muse-news", "data": folders / "muse", "device": "cpu"}
    file = tmp_path / "retrained.json"
    first = run(EvaluateOptions(models=(str(folders / "retrained"),), out=file, **common))
    assert "privleak" not in first["results"][0]["metrics"]
    content = run(EvaluateOptions(models=(str(folders / "retrained"),), reference=str(file), **common))
    assert content["results"][0]["metrics"]["privleak"]["value"] == 0.0
    number = run(EvaluateOptions(models=(str(folders / "target"),), reference_auc=0.5, **common))
    assert number["results"][0]["metrics"]["privleak"]["value"] < -50
    two = run(EvaluateOptions(models=(str(folders / "target"),) * 2, limit=2, out=file, **common))
    assert two["results"][0]["benchmark"]["counts"]["knowmem_f"] == 2
    with pytest.raises(InputError, match="it holds 2 results, must hold one"):
        run(EvaluateOptions(models=(str(folders / "target"),), reference=str(file), **common))
    file.write_text("[]", encoding="utf-8")
    with pytest.raises(InputError, match="not a scores file"):
        run(EvaluateOptions(models=(str(folders / "target"),), reference=str(file), **common))


def test_own_documents(folders):
    content = run(
        EvaluateOptions(
            models=(str(folders / "target"),),
            benchmark="own",
            documents=str(folders / "documents"),
            holdout=str(folders / "holdout"),
            questions=folders / "questions.jsonl",
            retain_questions=folders / "questions.jsonl",
            device="cpu",
        )
    )
    metrics = content["results"][0]["metrics"]
    assert metrics["verbmem_f"]["value"] > metrics["verbmem_holdout"]["value"]
    assert metrics["knowmem_f"]["count"] == metrics["knowmem_r"]["count"] == 1
    assert metrics["auc_forget_holdout_min_40"]["count"] == 4


def test_mmlu_beside_a_benchmark(folders, tmp_path):
    row = {"question": "2 + 2?", "choices": ["3", "4", "5", "6"], "answer": 1, "subject": "sums"}
    write(tmp_path / "validation.jsonl", [row] * 2)
    (tmp_path / "prompt.txt").write_text("Correct answer: A", encoding="utf-8")
    content = run(
        EvaluateOptions(
            models=(str(folders / "target"),), benchmark="muse-news", data=folders / "muse", mmlu=tmp_path, device="cpu"
        )
    )
    assert content["results"][0]["metrics"]["mmlu_val"]["count"] == 2


def test_every_problem_is_reported_at_once(tmp_path):
    with pytest.raises(InputError) as caught:
        run(
            EvaluateOptions(
                models=(),
                benchmark="muse",
                data=tmp_path / "missing",
                documents="x",
                questions=tmp_path / "missing.jsonl",
                reference="a",
                reference_auc=1.5,
                limit=0,
                out=tmp_path,
            )
        )
    starts = [problem.split(" ")[0] for problem in caught.value.problems]
    assert starts == [
        "models",
        "benchmark",
        "documents",
        "questions",
        "data",
        "questions",
        "reference",
        "reference_auc",
        "limit",
        "out",
    ]


def test_wrong_models_and_data(folders, tmp_path):
    with pytest.raises(InputError, match="model is '.*missing': there is no such folder"):
        run(EvaluateOptions(models=(str(tmp_path / "missing"),), benchmark="muse-news", data=folders / "muse"))
    with pytest.raises(InputError, match="none of MUSE's tables"):
        run(EvaluateOptions(models=(str(folders / "target"),), benchmark="muse-news", data=tmp_path, device="cpu"))
    with pytest.raises(InputError, match="documents is not given"):
        run(EvaluateOptions(models=("x",), benchmark="own"))


def test_harness_table_becomes_metrics():
    content = {
        "results": {
            "task": {
                "alias": "task",
                "acc,none": 0.5,
                "acc_stderr,none": 0.1,
                "exact_match,strict": 0.25,
                "exact_match_stderr,strict": "N/A",
            }
        },
        "n-samples": {"task": {"original": 9, "effective": 4}},
        "higher_is_better": {"task": {"acc": True}},
    }
    metrics = _as_metrics(content)
    assert set(metrics) == {"task:acc", "task:exact_match:strict"}
    assert metrics["task:acc"].low == pytest.approx(0.304)
    assert metrics["task:acc"].higher_is_better is True
    assert metrics["task:exact_match:strict"].low is None
    assert metrics["task:acc"].count == 4


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_missing_harness_is_said():
    with pytest.raises(InputError, match="pip install lm-eval"):
        run(EvaluateOptions(models=("micro:target",), lm_eval=("hellaswag",)))


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
@pytest.mark.filterwarnings("ignore")
def test_harness_runs_a_local_task(folders, tmp_path):
    write(tmp_path / "data.jsonl", [{"q": "To Sherlock", "choices": [" Holmes", " Adler"], "a": 0}] * 3)
    (tmp_path / "local_choice.yaml").write_text(
        "task: local_choice\ndataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {tmp_path / 'data.jsonl'}\n"
        "output_type: multiple_choice\ntest_split: test\ndoc_to_text: '{{q}}'\ndoc_to_choice: choices\n"
        "doc_to_target: a\ntarget_delimiter: ''\nmetric_list:\n- metric: acc\n",
        encoding="utf-8",
    )
    content = run(
        EvaluateOptions(
            models=(str(folders / "target"),),
            benchmark="muse-news",
            data=folders / "muse",
            lm_eval=("local_choice",),
            lm_eval_tasks=tmp_path,
            device="cpu",
        )
    )
    assert content["results"][0]["metrics"]["local_choice:acc"]["value"] == 1.0
    with pytest.raises(InputError, match="lm_eval is no_such_task: not among the harness's"):
        run(
            EvaluateOptions(
                models=(str(folders / "target"),),
                benchmark="muse-news",
                data=folders / "muse",
                lm_eval=("no_such_task",),
                device="cpu",
            )
        )


def test_evaluate_is_public(reciter, tokenizer):
    import unteach.evaluation

    assert unteach.evaluation.evaluate is evaluate
