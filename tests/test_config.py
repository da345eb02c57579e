from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from unteach.config import ForgetConfig, Method, Precision, Stop
from unteach.errors import InputError
from unteach.settings import from_yaml, parse, to_yaml


def problems(action: Any, *arguments: Any, **options: Any) -> list[str]:
    with pytest.raises(InputError) as raised:
        action(*arguments, **options)
    return raised.value.problems


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def wrong(tmp_path: Path, text: str) -> list[str]:
    """What is wrong with a file, without its name."""
    path = write(tmp_path, text)
    found = problems(from_yaml, ForgetConfig, path)
    assert all(line.startswith(f"{path}: ") for line in found)
    return [line.removeprefix(f"{path}: ") for line in found]


EVERY_FIELD_CHANGED = ForgetConfig(
    model="a model", documents="données/", out="run: 1", general="general.jsonl", keep="keep/", holdout="holdout/",
    reference="retrained", questions="questions.jsonl", keep_questions="kept.jsonl", base="small", text_field="body",
    question_template="{question} ->", skip_unreadable=True, document_mode="truncate", max_tokens=77, general_tokens=33,
    general_mib=7, batch=3, general_batch=5, keep_batch=6, keep_weight=0.5, micro_batch=2, trainable="all",
    method=Method(
        optimizer="adamw", loss="npo", goal="base", divergence="qkl", alpha=0.3, lr=1e-6, momentum=0.5,
        teacher_rate=2.0, damping=0.0, clip=None, loss_options={"beta": 0.7, "ratio": "mean"}, token_share=0.6,
        loops_every=3, loops_once_found=True, anchor=0.25, project_conflicts=True, alpha_growth=0.01, hold_budget=0.2,
        betas=(0.8, 0.9), weight_decay=1e-20, warmup=7,
    ),
    phases=(Method(steps=4, loss="it"), Method(steps=5, lr=1e-5, loss="dpo")), alternates="others.jsonl",
    precision=Precision(forget="bf16", divergence="fp16"), compile=True, checkpoint_activations=True,
    stop=Stop(
        metric="verbmem_f <= 21.8", parity=True, utility_floor=float("inf"), refine=False, unmet="last", probes="micro"
    ),
    expected_steps=9, max_steps=10, evaluate_every=11, probes=12, checkpoint_every=13, keep_checkpoints=14, seed=15,
    device="cpu", track="tensorboard", private=True, save_dtype="source", threads=3,
)  # fmt: skip


ADAPTED = ForgetConfig(model="m", adapter="lora", rank=8, base_bits=4, save="adapter", divergence_form="tangent")
LEAN = ForgetConfig(model="m", state_bits=16)
"""These fit none of the above."""


@pytest.mark.parametrize("config", [ForgetConfig(model="m"), EVERY_FIELD_CHANGED, ADAPTED, LEAN])
def test_round_trip(config: ForgetConfig, tmp_path: Path) -> None:
    assert from_yaml(ForgetConfig, write(tmp_path, to_yaml(config))) == config


def test_round_trip_covers_every_field() -> None:
    """The examples above differ from the defaults everywhere, so that a field that is dropped shows."""

    def same(config: Any, defaults: Any) -> list[str]:
        names = [field.name for field in dataclasses.fields(config)]
        return [name for name in names if getattr(config, name) == getattr(defaults, name)]

    others, defaults = (
        {"adapter", "rank", "state_bits", "base_bits", "divergence_form", "save"},
        ForgetConfig(model="m"),
    )
    assert {*same(EVERY_FIELD_CHANGED, defaults)} == others
    assert not others & {*same(ADAPTED, defaults)} & {*same(LEAN, defaults)}
    assert same(EVERY_FIELD_CHANGED.method, Method()) == ["optimizer_options", "steps"]  # no optimizer has any options


def test_settings_need_no_model_until_they_are_used(tmp_path: Path) -> None:
    assert ForgetConfig(max_steps=2) == ForgetConfig(model="", max_steps=2)
    assert wrong(tmp_path, "max_steps: 2\n") == ["model is missing"]


def test_missing_keys_take_their_defaults_and_overrides_win(tmp_path: Path) -> None:
    path = write(tmp_path, "model: m\nout: old\nmethod: {lr: 0.1, clip: null}\n")
    expected = ForgetConfig(model="m", out="new", method=Method(lr=0.1, clip=None))
    assert from_yaml(ForgetConfig, path, out="new") == expected
    assert Method().clip == 1.0, "null switches it off"


@pytest.mark.parametrize(
    ("text", "value"),
    [("5e-4", 5e-4), ("5.0e-4", 5e-4), ("1", 1.0), ("'0.5'", 0.5), ("1E-3", 1e-3), ("null", None), ("~", None)],
)
def test_numbers_as_people_write_them(text: str, value: float | None, tmp_path: Path) -> None:
    read = from_yaml(ForgetConfig, write(tmp_path, f"model: m\nmethod: {{lr: {text}}}\n"))
    assert read.method.lr == value
    assert read.method.lr is None or isinstance(read.method.lr, float)


def test_all_problems_at_once(tmp_path: Path) -> None:
    text = """
documents: 5
batch: -1
max_stepz: 3
trainable: block
method: {loss: nlull, alpha: 0, momentum: 1.5, betas: [0.9], lr: fast}
phases: [{lr: 0.1, warmup: -3}]
precision: {forget: fp8}
seed: -2
"""
    found = wrong(tmp_path, text)
    assert len(found) == 14
    expected = [
        "model is missing", "documents is 5", "batch is -1", "max_stepz (did you mean max_steps?)",
        "trainable is 'block'", "loss is 'nlull'", "(did you mean nlul?)", "alpha is 0", "momentum is 1.5",
        "method.betas is [0.9]", "method.lr is 'fast'", "phases[0].warmup is -3", "phases[0].steps is missing",
        "precision.forget is 'fp8'", "seed is -2",
    ]  # fmt: skip
    for part in expected:
        assert any(part in line for line in found), part


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("max_step: 5", "unknown key max_step (did you mean max_steps?)"),
        ("method: {dampning: 5}", "unknown key method.dampning (did you mean damping?)"),
        ("xyzzy: 5", "unknown key xyzzy"),
        ("7: 5", "unknown key 7"),
        ("model: 5", "model is 5: it must be text"),
        ("batch: 1.5", "batch is 1.5: it must be a whole number"),
        ("batch: many", "batch is 'many': it must be a whole number"),
        ("batch: true", "batch is True: it must be a whole number"),
        ("batch: null", "batch is None: it must be a whole number"),
        ("documents: [a, b]", "documents is ['a', 'b']: it must be text"),
        ("method: nlul", "method is 'nlul': it must hold settings of its own"),
        ("phases: {steps: 3}", "phases is {'steps': 3}: it must be a list"),
        ("phases: [3]", "phases[0] is 3: it must hold settings of its own"),
        ("method: {lr: true}", "method.lr is True: it must be a number"),
        ("method: {betas: 0.9}", "method.betas is 0.9: it must be a list"),
        ("method: {betas: [0.9, x]}", "method.betas[1] is 'x': it must be a number"),
        ("method: {betas: [0.9, 0.9, 0.9]}", "method.betas is [0.9, 0.9, 0.9]: it must have 2 entries"),
        ("track: yes", "track is True: it must be text"),
    ],
)
def test_unknown_keys_and_wrong_types(line: str, problem: str, tmp_path: Path) -> None:
    assert wrong(tmp_path, f"{'' if line.startswith('model:') else 'model: m'}\n{line}\n") == [problem]


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 0}, {"general_batch": 0}, {"micro_batch": 0}, {"max_steps": 0}, {"evaluate_every": 0},
        {"expected_steps": 0}, {"probes": 0}, {"checkpoint_every": 0}, {"keep_checkpoints": 0}, {"max_tokens": 1},
        {"general_tokens": 1}, {"seed": -1}, {"stop": Stop(utility_floor=0.0)},
        {"stop": Stop(utility_floor=float("nan"))}, {"stop": Stop(plateau=-1)},
    ],
)  # fmt: skip
def test_values_out_of_range(options: dict[str, Any]) -> None:
    (problem,) = problems(ForgetConfig, model="m", **options)
    assert re.match(
        r"stop\.(utility_floor|plateau) is " if "stop" in options else f"{next(iter(options))} is ", problem
    )
    assert "it must be " in problem


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "nll"}, {"divergence": "kll"}, {"optimizer": "sgd"},
        {"alpha": 0.0}, {"alpha": float("nan")}, {"lr": -1.0}, {"lr": float("inf")}, {"clip": 0.0},
        {"teacher_rate": -1.0}, {"damping": -1.0}, {"weight_decay": -1.0}, {"warmup": -1},
        {"momentum": 1.0}, {"momentum": -0.1}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}, {"steps": 5},
    ],
)  # fmt: skip
def test_method_out_of_range(options: dict[str, Any]) -> None:
    (problem,) = problems(ForgetConfig, model="m", method=Method(**options))
    assert problem.startswith(tuple(f"{name} {verb} " for name in options for verb in ("is", "are")))
    phase = Method(**({"steps": 3} | options))
    in_phase = problems(ForgetConfig, model="m", phases=(phase,)) if "steps" not in options else ["phases[0]."]
    assert in_phase[0].startswith("phases[0].")


def test_teacher_may_not_overshoot() -> None:
    assert ForgetConfig(model="m", method=Method(lr=0.1, teacher_rate=10.0)).method.teacher_rate == 10.0
    (problem,) = problems(ForgetConfig, model="m", method=Method(lr=0.1, teacher_rate=11.0))
    assert problem == "lr · teacher_rate is 1.1: it must be at most 1"


def test_it_needs_a_small_model_in_any_phase() -> None:
    it = Method(loss="it")
    for options in ({"method": it}, {"phases": (dataclasses.replace(it, steps=3),)}):
        (problem,) = problems(ForgetConfig, model="m", **options)
        assert problem.startswith("loss it needs base")
        assert ForgetConfig(model="m", base="small", **options).base == "small"


def test_phases(tmp_path: Path) -> None:
    text = """
model: m
max_steps: 6
phases:
- {optimizer: adamw, lr: 1e-6, steps: 2}
- {loss: ll, steps: 3}
"""
    read = from_yaml(ForgetConfig, write(tmp_path, text))
    assert read.phases == (Method(optimizer="adamw", lr=1e-6, steps=2), Method(loss="ll", steps=3))
    assert wrong(tmp_path, text.replace("max_steps: 6", "max_steps: 5")) == [
        "max_steps is 5: it must be above the 5 steps of the phases"
    ]
    assert wrong(tmp_path, text.replace(", steps: 2", "")) == [
        "phases[0].steps is missing: every phase but the last needs a length"
    ]
    assert wrong(tmp_path, text.replace("loss: ll", "los: ll")) == ["unknown key phases[1].los (did you mean loss?)"]


@pytest.mark.parametrize(
    ("loss", "options", "problem"),
    [
        ("npo", {"ratio": "max"}, "ratio is 'max': it must be 'sum' or 'mean'"),
        ("npo", {"beta": 0.0}, "beta is 0.0: it must be positive"),
        ("npo", {"beta": "much"}, "beta is 'much': it must be of the kind of 0.1"),
        ("nlul", {"tolerance": -0.1}, "tolerance is -0.1: it must be zero or positive"),
        ("ll", {"beta": 0.1}, "forget loss 'll' has no hyper-parameter 'beta': allowed are none"),
    ],
)
def test_options_that_the_loss_refuses(loss: str, options: dict[str, Any], problem: str) -> None:
    method = Method(loss=loss, loss_options=options)
    assert problems(ForgetConfig, model="m", method=method) == [f"loss_options: {problem}"]
    phase = dataclasses.replace(method, steps=2)
    assert problems(ForgetConfig, model="m", phases=(phase,)) == [f"phases[0].loss_options: {problem}"]


def test_options_are_flags_and_base_has_the_papers_name_too(tmp_path: Path) -> None:
    words = ["m", "--loss", "npo", "--loss-options", "beta=0.3", "ratio=mean", "--incompetent", "small"]
    config = parse(ForgetConfig, words, flatten=("method",))
    assert config.method == Method(loss="npo", loss_options={"beta": 0.3, "ratio": "mean"})
    assert config.base == from_yaml(ForgetConfig, write(tmp_path, "model: m\nincompetent: small\n")).base == "small"
    with pytest.raises(InputError, match="--loss-options beta: write NAME=VALUE"):
        parse(ForgetConfig, ["m", "--loss-options", "beta"], flatten=("method",))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "missing.yaml"
    assert problems(from_yaml, ForgetConfig, missing) == [f"config '{missing}' does not exist: give a YAML file"]
    contents = [b"model: [a, b\n", b"model: 'x\n", b"model: \xff\xfe\n", b"a: b: c\n", b"a: !!python/object:x {}\n"]
    for content in contents:
        path = tmp_path / "broken.yaml"
        path.write_bytes(content)
        (problem,) = problems(from_yaml, ForgetConfig, path)
        assert problem.startswith(f"config '{path}' cannot be read: ")
        assert "\n" not in problem
    (problem,) = problems(from_yaml, ForgetConfig, tmp_path)
    assert problem.startswith(f"config '{tmp_path}' cannot be read: ")


@pytest.mark.parametrize("text", ["", "# nothing\n", "- model\n", "model\n", "5\n"])
def test_files_without_settings(text: str, tmp_path: Path) -> None:
    (problem,) = problems(from_yaml, ForgetConfig, write(tmp_path, text))
    assert "holds no settings" in problem


def test_written_yaml_is_plain() -> None:
    """No tags, so that any program can read it; keys in the order of the documentation."""
    text = to_yaml(EVERY_FIELD_CHANGED)
    assert list(yaml.safe_load(text)) == [f.name for f in dataclasses.fields(ForgetConfig)]
    assert "!!" not in text
    assert "données" in text


def test_device() -> None:
    assert ForgetConfig(model="m", device="cpu").resolved_device() == torch.device("cpu")
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert ForgetConfig(model="m").resolved_device().type == expected
    for name in ("gpu", "cuda:x", "") + (() if torch.cuda.is_available() else ("cuda",)):
        (problem,) = problems(ForgetConfig(model="m", device=name).resolved_device)
        assert problem == f"device is {name!r}: it must be auto, cpu, or a device that is here, such as cuda"


def test_a_question_template_needs_a_place_for_the_question_and_questions() -> None:
    template = r"Question: {question}\nAnswer:"
    assert parse(ForgetConfig, ["m", "--questions", "q", "--question-template", template]).question_template == template
    (place,) = problems(ForgetConfig, model="m", questions="q", question_template="Q: {} A:")
    assert place == "question_template is 'Q: {} A:': it must have {question} where the question stands"
    (asked,) = problems(ForgetConfig, model="m", question_template="{question}")
    assert asked == "question_template is given, but no questions to ask: give questions, too"
