"""One registry of metrics: what is entered there is measured, shown and explained everywhere."""

import subprocess
import sys

import pytest

from unteach.corpora import Benchmark
from unteach.evaluation import evaluate
from unteach.evaluation.metrics import MEASUREMENTS, METRICS, MetricInfo, columns, describe, measurement
from unteach.job.card import model_card


def test_tables_show_the_papers_columns_first():
    assert columns("main") == ("verbmem_f", "knowmem_f", "knowmem_r", "privleak", "mmlu_val")
    assert columns() == (*columns("main"), "nll_general", "degenerate", "mmlu_invalid")
    assert describe("privleak").higher_is_better is None
    assert (describe("auc_x").decimals, describe("auc_x").records) == (3, "membership")
    assert describe("task:acc") == MetricInfo()


def test_a_metric_is_one_entry_and_one_function(model, tokenizer, monkeypatch):
    monkeypatch.setitem(METRICS, "shortness", MetricInfo("short texts", "share of short texts", "↑", column="beside"))

    def measure(evaluation, name):
        evaluation.add_mean(name, [float(len(text) < 5) for text in evaluation.benchmark.general_texts])

    monkeypatch.setitem(MEASUREMENTS, "shortness", None)  # put back afterwards
    measurement("shortness", "general_texts", absent="texts")(measure)
    benchmark = Benchmark(name="x", general_texts=("abc", "abcdef"))
    scores = evaluate(model, tokenizer, benchmark, measurements=["shortness"])
    assert scores["shortness"] == 50.0
    assert scores.metrics["shortness"].higher_is_better is True
    without = evaluate(model, tokenizer, Benchmark(name="x"), measurements=["shortness"])
    assert without.notes == ("shortness is not measured: the benchmark has no texts",)
    assert columns()[-1] == "shortness"
    card = model_card(base_model="m", settings={}, data={}, scores={"before": dict(scores)})
    assert "short texts ↑" in card


@pytest.mark.slow
def test_what_a_report_or_a_card_needs_is_light_and_the_job_does_not_import_the_report():
    code = (
        "import sys, unteach.evaluation.scores, unteach.evaluation.verdict\n"
        "assert not {'torch', 'transformers', 'matplotlib', 'jinja2'} & set(sys.modules)\n"
        "import unteach.job.card\n"
        "assert not any(name.startswith('unteach.report') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
