"""Agreement with scores of the official MUSE code on real 7B models.

A small extract (short answers and numbers) is in tests/golden; the full files are used where they lie beside
the checkout, in ../shared/golden.
"""

import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from unteach.evaluation import membership_auc, rouge_l

ROOT = Path(__file__).resolve().parents[2]
FULL = ROOT.parent / "shared" / "golden"
EXTRACT = json.loads((ROOT / "tests" / "golden" / "muse_7b.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("corpus", ["books", "news"])
@pytest.mark.parametrize("metric", ["knowmem_f", "knowmem_r"])
def test_extract_rouge(corpus, metric):
    for item in EXTRACT[corpus]["knowmem"][metric]["items"]:
        assert rouge_l(item["expected"], item["output"]) == pytest.approx(item["rougeL"], abs=1e-6)


@pytest.mark.parametrize("corpus", ["books", "news"])
def test_extract_auc(corpus):
    scores = EXTRACT[corpus]["privleak"]["scores"]
    official = EXTRACT[corpus]["privleak"]["auc"]
    assert len(official) == 24
    for key, value in official.items():
        first, second, name = key.split("_")
        assert membership_auc(scores[first][name], scores[second][name]) == pytest.approx(value, abs=1e-9)


@pytest.mark.skipif(not FULL.is_dir(), reason=f"the full recorded scores are not at {FULL}")
@pytest.mark.parametrize("name", ["books_npo_klr_7b", "news_task_vector_7b"])
def test_full_files(name):
    recorded = json.loads(gzip.decompress((FULL / f"{name}.json.gz").read_bytes()))
    for metric in ("knowmem_f", "knowmem_r"):
        items = recorded["knowmem"][metric]["items"]
        scores = [rouge_l(item["expected"], item["output"]) for item in items]
        np.testing.assert_allclose(scores, [item["rougeL"] for item in items], rtol=0, atol=1e-6)
        assert np.mean(scores) == pytest.approx(recorded["knowmem"][metric]["mean_rougeL"], abs=1e-6)
    texts = recorded["privleak"]["scores"]
    pairs = itertools.product(texts, texts, texts["forget"][0])
    columns = {part: lambda name, group=group: [text[name] for text in group] for part, group in texts.items()}
    table = {f"{a}_{b}_{name}": membership_auc(columns[a](name), columns[b](name)) for a, b, name in pairs}
    assert table == pytest.approx(recorded["privleak"]["auc"], abs=1e-9)
