"""Five steps of every loss and divergence, with the mean teacher and with AdamW, pinned as numbers.

A change that is meant to move no number is held to these: bit for bit on one machine (``python
tests/test_golden_steps.py`` prints every number exactly), and to 1e-5 relative everywhere, divergence and gradient also
to what one rounding of what they compare makes of them. A change that is meant to move them writes them anew
(``--write``) and says why in docs/decisions.md.
"""

import json
import math
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tiny_models import SENTENCES, save_tiny
from unteach.config import ForgetConfig, Method, Stop
from unteach.job import run_forget

GOLDEN = Path(__file__).parent / "golden" / "steps.json"
STEPS = 5
ROUNDING = 2.0**-24
WATCHED = ("forget_loss", "nll_forget", "divergence", "grad_norm")
MEAN_TEACHER = {"optimizer": "mean_teacher", "alpha": 0.5, "lr": 0.02, "teacher_rate": 4.0, "damping": 0.1}
ADAMW = {"optimizer": "adamw", "alpha": 0.5, "lr": 1e-3, "warmup": 2}
PAPER = {"token_share": 1.0, "loops_every": 0}
CASES = {
    f"{optimizer}-{loss}-{divergence}": numbers | {"loss": loss, "divergence": divergence} | PAPER
    for optimizer, numbers in (("mt", MEAN_TEACHER), ("adamw", ADAMW))
    for loss, divergence in [
        *((loss, "kl") for loss in ("ll", "npo", "it", "nlul")),
        *(("nlul", divergence) for divergence in ("kl_reverse", "qkl", "qkl_frozen")),
    ]
}
CASES["mt-defaults"] = MEAN_TEACHER | {"token_share": 0.25, "loops_every": 2}
CASES["mt-micro-batches"] = MEAN_TEACHER | PAPER | {"micro_batch": 3}
CASES["mt-measured"] = PAPER  # every number chosen by calibration
CASES["adamw-npo-mean"] = ADAMW | PAPER | {"loss": "npo", "options": {"ratio": "mean", "beta": 0.2}}
CASES["mt-nlul-surrogate"] = MEAN_TEACHER | PAPER | {"options": {"tolerance": 0.02}}
MATCH, GATE = {"loss": "match"}, {"loss": "match", "options": {"pull": "gate", "margin": 0.5}}
for optimizer, numbers in (("mt", MEAN_TEACHER), ("adamw", ADAMW)):
    CASES[f"{optimizer}-it_forward-kl"] = numbers | PAPER | {"loss": "it_forward"}
    CASES[f"{optimizer}-match-kl"] = numbers | PAPER | MATCH
    CASES[f"{optimizer}-match-gate"] = numbers | PAPER | GATE
    CASES[f"{optimizer}-keep"] = numbers | PAPER | {"keep_weight": 0.5}
    CASES[f"{optimizer}-anchor"] = numbers | PAPER | {"anchor": 0.7}
    CASES[f"{optimizer}-deep"] = numbers | PAPER | GATE | {"keep_weight": 2.0, "anchor": 1.0, "micro_batch": 2}


def configured(case: dict, folder: Path, out: Path) -> ForgetConfig:
    """The settings of a case as the config spells them."""
    case = {"optimizer": "mean_teacher", "loss": "nlul"} | case
    options = case.pop("options", {})
    micro_batch, keep_weight = case.pop("micro_batch", None), case.pop("keep_weight", None)
    return ForgetConfig(
        model=str(folder / "model"),
        documents=str(folder / "forget.jsonl"),
        general=str(folder / "general.jsonl"),
        base=str(folder / "base") if case["loss"] in ("it", "it_forward", "match") else None,
        keep=str(folder / "keep.jsonl") if keep_weight else None,
        keep_weight=keep_weight or 1.0,
        keep_batch=4,
        out=str(out),
        method=Method(**case, loss_options=options),
        micro_batch=micro_batch,
        stop=Stop(metric="verbmem_f <= -1", utility_floor=1e9),
        max_tokens=24, general_tokens=24, batch=6, general_batch=4, probes=2, max_steps=STEPS,
    )  # fmt: skip


def make_inputs(folder: Path) -> Path:
    """The texts and models of every case."""
    forget = [f"{sentence} It was the {n}th time in {1900 + n}." for n, sentence in enumerate(SENTENCES * 3)]
    general = [f"{first} {second} Number {n}." for n, first in enumerate(SENTENCES * 3) for second in SENTENCES]
    keep = [f"In {1800 + n}, said the baker, {' '.join(reversed(s.split()))}" for n, s in enumerate(SENTENCES * 4)]
    for file, texts in (("forget", forget), ("general", general), ("keep", keep)):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{file}.jsonl").write_text(lines, encoding="utf-8")
    save_tiny(folder / "model")
    save_tiny(folder / "base", seed=5)
    return folder


def steps_of(name: str, folder: Path, out: Path) -> dict[str, list[float]]:
    """What five steps of a case log, and how far the weights have moved."""
    config = configured(CASES[name], folder, out)
    result = run_forget(config, say=lambda line: None, measurements=["nll_general"])
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    start = load_file(folder / "model" / "model.safetensors")
    moved = [(p.detach() - start[n]).double().square().sum() for n, p in result.model.named_parameters() if n in start]
    found = {key: [row[key] for row in rows] for key in WATCHED}
    return found | {"displacement": [math.sqrt(sum(float(square) for square in moved))]}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("name", list(CASES))
def test_five_steps_are_as_they_were(name, inputs, tmp_path):
    expected = json.loads(GOLDEN.read_text(encoding="utf-8"))[name]
    found = steps_of(name, inputs, tmp_path / "run")
    assert {key: len(values) for key, values in found.items()} == dict.fromkeys(WATCHED, STEPS) | {"displacement": 1}
    for key, values in found.items():
        for value, wanted in zip(values, expected[key], strict=True):
            # the square of a difference of outputs near 1, and a gradient in proportion to that difference: another
            # processor's sums move it by a rounding or so
            difference = 2 * math.sqrt(wanted) if key == "divergence" else float(key == "grad_norm")
            assert value == pytest.approx(wanted, rel=1e-5, abs=1e-12 + difference * ROUNDING), key


def test_the_tolerance_of_divergences_still_sees_a_changed_step(inputs, tmp_path, monkeypatch):
    """An α that is off by one in a thousand is found."""
    monkeypatch.setitem(CASES, "mt-nlul-kl", CASES["mt-nlul-kl"] | {"alpha": 0.5005})
    with pytest.raises(AssertionError, match="divergence|grad_norm|displacement"):
        test_five_steps_are_as_they_were("mt-nlul-kl", inputs, tmp_path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        folder = make_inputs(Path(work))
        made = {case: steps_of(case, folder, folder / case) for case in CASES}
    print(json.dumps({c: {k: [v.hex() for v in vs] for k, vs in found.items()} for c, found in made.items()}, indent=1))
    if "--write" in sys.argv:
        GOLDEN.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
