"""Two gloo ranks with adapters give the adapters, and the merged model, of one process."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from unteach.data import read_documents
from unteach.models.load import find_folder, load_model


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "documents.jsonl"
    texts = read_documents("micro:forget").texts[:5]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    given = {"documents": file, "max-steps": 3, "evaluate-every": 3, "probes": 3, "batch": 3, "general-batch": 3}
    given |= {"general-tokens": 64, "max-tokens": 64, "save-dtype": "float32", "adapter": "lora", "rank": 4}
    return ["-m", "unteach", "forget", "micro:target", *(str(w) for n, v in given.items() for w in (f"--{n}", v))]


def run(out, words, ranks):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if ranks > 1 else []
    ended = subprocess.run(
        [sys.executable, *launcher, *words, "--out", str(out)], capture_output=True, text=True, timeout=900
    )
    assert (out / "result.json").exists(), ended.stderr
    return out / "model"


def gap(one, two, start):
    """How far two results are apart, as a share of the way that the first has gone."""
    apart, gone = (torch.cat([(x[n] - one[n]).double().flatten() for n in one]).norm() for x in (two, start))
    assert gone > 1e-4
    return float(apart / gone)


@pytest.mark.slow
def test_two_ranks_merge_the_model_of_one(tmp_path, words):
    one, two = (load_file(run(tmp_path / f"run{n}", words, n) / "model.safetensors") for n in (1, 2))
    assert gap(one, two, load_file(find_folder("micro:target") / "model.safetensors")) < 1e-3


@pytest.mark.slow
def test_two_ranks_on_four_bits_save_the_adapter_of_one(tmp_path, words):
    words = [*words, "--base-bits", "4", "--save", "adapter"]
    folders = [run(tmp_path / f"run{n}", words, n) for n in (1, 2)]
    one, two = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    second = {name: value for name, value in one.items() if ".lora_B." in name}
    assert gap(second, two, {name: torch.zeros_like(value) for name, value in second.items()}) < 1e-3
    assert all(torch.allclose(two[name], value, atol=1e-5) for name, value in one.items())
    load_model(str(folders[1]))  # as any other
