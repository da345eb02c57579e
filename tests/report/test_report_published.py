"""The shipped figures of others agree with each other, and never stand among our rows."""

from __future__ import annotations

import statistics

import pytest

from unteach.report.load import published, published_points, published_rows

LOGGED = {  # rows of Table 1 whose three runs are all among the published logs, by the name of the logs
    "MT + NLUL + KL": "news/mt/mt-kl",
    "MT + NLUL + QKL★": "news/mt/mt-qkl",  # the star row's figures are those of the logs with the plain name
    "AdamW + IT + KL": "news/baselines/adamw-it-kl",
    "AdamW + LL + KL": "news/baselines/adamw-ll-kl",
    "AdamW + NLUL + KL": "news/baselines/adamw-nlul-kl",
}


@pytest.mark.parametrize("name", LOGGED)
@pytest.mark.parametrize("metric", ["verbmem_f", "knowmem_f", "knowmem_r", "mmlu_val"])
def test_table_one_is_the_mean_and_standard_error_of_the_logs(name: str, metric: str) -> None:
    (row,) = (row for row in published_rows("muse-news") if row["name"] == name)
    values = [
        run["metrics"][metric]
        for run in published()["paper_runs"]["runs"]
        if run["log"].rsplit("/", 1)[0] == LOGGED[name]
    ]
    assert len(values) == 3
    assert row["metrics"][metric]["value"] == pytest.approx(statistics.fmean(values), abs=0.06)
    error = statistics.pstdev(values) / 3**0.5
    assert row["metrics"][metric]["spread"] == pytest.approx(error, abs=0.06)


def test_curves_are_whole() -> None:
    for run in published()["paper_runs"]["runs"]:
        lengths = {key: len(values) for key, values in run["curve"].items()}
        assert len(set(lengths.values())) == 1, (run["log"], lengths)
        assert run["curve"]["step"] == sorted(run["curve"]["step"])


def test_points_belong_to_exactly_named_benchmarks() -> None:
    assert [p.number for p in published_points("muse-news") if p.number] == list(range(1, 17))
    assert published_points("muse-books")
    assert published_points("micro") == []
    assert published_points("muse-news-text") == []
