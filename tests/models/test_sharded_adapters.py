"""Two gloo ranks with adapters give the adapters, and the merged model, of one process."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from faults.small_run import make_inputs
from unteach.models.load import load_model


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def words(inputs):
    given = {"documents": inputs / "documents", "general": inputs / "general.jsonl", "max-steps": 3, "probes": 2}
    given |= {"evaluate-every": 3, "batch": 3, "general-batch": 3, "general-tokens": 24, "save-dtype": "float32"}
    given |= {"adapter": "lora", "rank": 4, "loss": "nlul", "optimizer": "mean_teacher", "alpha": 0.5, "lr": 0.02}
    given |= {"teacher-rate": 4, "damping": 0.1}
    flags = (str(word) for name, value in given.items() for word in (f"--{name}", value))
    return ["-m", "unteach", "forget", str(inputs / "model"), *flags]


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
    assert gone > 1e-5
    return float(apart / gone)


@pytest.mark.slow
def test_two_ranks_merge_the_model_of_one(tmp_path, inputs, words):
    one, two = (load_file(run(tmp_path / f"run{n}", words, n) / "model.safetensors") for n in (1, 2))
    assert gap(one, two, load_file(inputs / "model/model.safetensors")) < 1e-3


@pytest.mark.slow
def test_two_ranks_on_four_bits_save_the_adapter_of_one(tmp_path, words):
    words = [*words, "--base-bits", "4", "--save", "adapter"]
    folders = [run(tmp_path / f"run{n}", words, n) for n in (1, 2)]
    one, two = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    second = {name: value for name, value in one.items() if ".lora_B." in name}
    assert gap(second, two, {name: torch.zeros_like(value) for name, value in second.items()}) < 1e-3
    assert all(torch.allclose(two[name], value, atol=1e-5) for name, value in one.items())
    load_model(str(folders[1]))  # as any other
