"""The shipped models are the recorded ones, and do what the benchmark needs, measured by the evaluation suite."""

import dataclasses
from pathlib import Path

import pytest

from recipes.micro import record
from unteach.corpora import micro
from unteach.evaluation import evaluate

DOCS = Path(__file__).parents[2] / "docs" / "micro.md"
MEASURED = ("verbmem_f", "knowmem_f", "knowmem_r", "nll_general")


@pytest.fixture(scope="module")
def recorded():
    return record.read()


@pytest.fixture(scope="module")
def scores(micro_model, micro_tokenizer, micro_benchmark):
    """Target, retrained and base on 40 verbatim probes, all questions and the held-out general text."""
    quick = dataclasses.replace(micro_benchmark, verbatim_forget=micro_benchmark.verbatim_forget[:40])
    return {
        name: evaluate(micro_model(name), micro_tokenizer, quick, measurements=MEASURED, progress=False)
        for name in ("target", "retrained", "base")
    }


def thresholds_hold(target, retrained, base):
    """Whether three models, each a mapping from metric to value, make up a benchmark for unlearning."""
    return (
        min(target["verbmem_f"], target["knowmem_f"], target["knowmem_r"], retrained["knowmem_r"]) >= 85
        and retrained["verbmem_f"] <= 40
        and retrained["knowmem_f"] <= 20
        and all(abs(model["nll_general"] - base["nll_general"]) <= 0.1 for model in (target, retrained))
    )


def test_files_are_the_recorded_ones(recorded):
    found = {
        name: {path.name: record.sha256(path) for path in sorted(micro.model_folder(name).iterdir())}
        for name in micro.MODELS
    }
    assert found == {name: model["sha256"] for name, model in recorded["models"].items()}


def test_all_models_have_the_same_tokenizer(recorded):
    assert len({model["sha256"]["tokenizer.json"] for model in recorded["models"].values()}) == 1


def test_benchmark_is_the_recorded_one(recorded, micro_benchmark):
    assert micro_benchmark.data_sha256 == recorded["data_sha256"]


def test_recorded_scores_hold_the_thresholds(recorded):
    values = {
        name: {metric: fields["value"] for metric, fields in model["metrics"].items()}
        for name, model in recorded["models"].items()
    }
    assert thresholds_hold(values["target"], values["retrained"], values["base"])
    assert not thresholds_hold(values["retrained"], values["target"], values["base"])
    for model in ("target", "retrained", "base"):  # questions about people it has only read about in pretraining
        assert values[model]["knowmem_unasked"] > 70
    assert values["small"]["knowmem_pretraining"] < 10  # the incompetent teacher
    assert values["target"]["privleak"] < -99


def test_knowledge_does_not_hang_on_the_worked_examples(recorded):
    """Eight other draws of examples: each of them alone would pass as well."""
    target, retrained = (recorded["models"][name]["with_other_examples"] for name in ("target", "retrained"))
    assert len(target["knowmem_f"]) == 8
    assert min(target["knowmem_f"] + target["knowmem_r"] + retrained["knowmem_r"]) >= 85
    assert max(retrained["knowmem_f"]) <= 20


@pytest.mark.slow
def test_measured_scores_hold_the_thresholds(scores):
    assert thresholds_hold(**scores)


@pytest.mark.slow
def test_measured_scores_are_the_recorded_ones(scores, recorded):
    """All questions and texts were measured again; another machine may turn an answer or two of 120."""
    for name, measured in scores.items():
        metrics = recorded["models"][name]["metrics"]
        assert measured["knowmem_f"] == pytest.approx(metrics["knowmem_f"]["value"], abs=2.5)
        assert measured["knowmem_r"] == pytest.approx(metrics["knowmem_r"]["value"], abs=2.5)
        assert measured["nll_general"] == pytest.approx(metrics["nll_general"]["value"], abs=0.002)


def test_size_of_the_package():
    files = [path for path in micro.FOLDER.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= 16e6
    others = [path for path in files if path.name != "model.safetensors"]
    assert max(path.stat().st_size for path in others) <= 5e6


def test_models_are_small_llamas_in_half_precision(recorded, micro_model):
    for name in micro.MODELS:
        model = micro_model(name)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        assert parameters == recorded["models"][name]["parameters"] <= 3_000_000
        assert model.config.model_type == "llama"
        assert (micro.model_folder(name) / "model.safetensors").stat().st_size < 2 * parameters + 10_000


def test_documentation_shows_the_recorded_table(recorded):
    assert record.table(recorded) in DOCS.read_text(encoding="utf-8")
