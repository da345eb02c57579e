"""Every YAML under configs/ against a table written from the authors' logs."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import unteach
from unteach.cli import main
from unteach.config import ForgetConfig, Method, Precision, Stop
from unteach.job.presets import PRESETS, preset
from unteach.job.run import HELDOUT_GENERAL
from unteach.method.optimizers import OPTIMIZERS, AnchoredAdamW
from unteach.settings import from_yaml, parse

FOLDER = Path(__file__).parent.parent / "configs"
NEWS = {"document_mode": "truncate", "batch": 40, "general_batch": 40, "evaluate_every": 100, "max_steps": 2000}
BOOKS = NEWS | {"document_mode": "chunk", "model": "muse-bench/MUSE-books_target"}
# lr, alpha, momentum, kappa eta, damping, clip
TEACHER = {"lr": 5e-4, "alpha": 0.05, "momentum": 0.95, "slide": 0.005, "damping": 5.0}
ADAMW = {"lr": 1e-5, "alpha": 0.05, "slide": 0.0, "damping": 0.0, "warmup": 100, "betas": (0.9, 0.95)}
NPO = {"loss": "npo", "loss_options": {"beta": 0.1, "ratio": "mean"}}
NPO_OF_LOSSES = {"loss": "npo", "loss_options": {"beta": 0.5, "ratio": "mean"}}
NLUL = {"loss": "nlul", "loss_options": {"tolerance": 0.02}}
KL, QKL = {"divergence": "kl_reverse"}, {"divergence": "qkl_frozen"}
TINY = {"base": "TinyLlama/TinyLlama-1.1B-Chat-v1.0"}
FOLD = {"documents": "muse-bench/MUSE-News:sust:forget_1"}
NONE, RECITED = "verbmem_f <= -1", "verbmem_f <= 21.8"

BYTES_OF_A_CHUNK = 64 * 2**20 / 30_000

TABLE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # name: what the run has, what its method has, stop rule
    "muse-news-mt-nlul-kl": (NEWS, TEACHER | NLUL | KL, RECITED),
    "muse-news-mt-nlul-qkl": (NEWS, TEACHER | NLUL | QKL, RECITED),
    "muse-news-mt-nlul-qkl-star": (NEWS, TEACHER | NLUL | QKL, "knowmem_f <= 35.0"),
    "muse-news-adamw-npo-kl": (NEWS | {"batch": 80}, ADAMW | NPO | KL, "verbmem_f <= 22.0"),
    "muse-news-adamw-ll-kl": (NEWS, ADAMW | KL | {"loss": "ll", "lr": 1e-6}, RECITED),
    "muse-news-adamw-nlul-kl": (NEWS, ADAMW | NLUL | KL | {"lr": 1e-6}, RECITED),
    "muse-news-adamw-it-kl": (NEWS | TINY, ADAMW | KL | {"loss": "it", "lr": 1e-6}, RECITED),
    "muse-books-mt-nlul-kl": (BOOKS, TEACHER | NLUL | KL | {"alpha": 0.1}, "verbmem_f <= 14.3"),
    "muse-books-mt-nlul-qkl": (BOOKS, TEACHER | NLUL | QKL | {"alpha": 0.1}, "verbmem_f <= 14.3"),
    "muse-books-adamw-npo-kl": (BOOKS | {"evaluate_every": 50}, ADAMW | NPO | KL | {"alpha": 0.1}, "verbmem_f <= 14.3"),
    "sequential-mt-nlul-qkl": (NEWS | FOLD | {"max_steps": 400}, TEACHER | NLUL | QKL | {"momentum": 0.9}, NONE),
    "sequential-adamw-npo-kl": (
        NEWS | FOLD | {"batch": 80, "general_batch": 80, "max_steps": 200},
        ADAMW | NPO | KL | {"warmup": 0},
        NONE,
    ),
    "loss-ablation-mt-ll-qkl": (NEWS, TEACHER | QKL | {"loss": "ll", "momentum": 0.9}, RECITED),
    "loss-ablation-mt-npo-qkl": (NEWS, TEACHER | NPO_OF_LOSSES | QKL | {"momentum": 0.9}, RECITED),
    "loss-ablation-mt-nlul-qkl": (
        NEWS | {"batch": 80, "evaluate_every": 250},
        TEACHER | NLUL | QKL | {"momentum": 0.9, "slide": 0.0025},
        "verbmem_f <= 14.3",
    ),
    "loss-ablation-mt-it-qkl": (
        NEWS | TINY | {"max_steps": 3000},
        TEACHER | QKL | {"loss": "it", "momentum": 0.9},
        RECITED,
    ),
    "loss-ablation-adamw-then-mt-ll-qkl": (NEWS | {"max_steps": 400}, TEACHER | QKL | {"loss": "ll"}, NONE),
    "loss-ablation-adamw-then-mt-npo-qkl": (NEWS | {"max_steps": 2400}, TEACHER | NPO_OF_LOSSES | QKL, RECITED),
}
ESCAPE = ADAMW | QKL | {"alpha": 1.0, "lr": 1e-6}
PHASES = {
    "loss-ablation-adamw-then-mt-ll-qkl": ESCAPE | {"loss": "ll", "steps": 300},
    "loss-ablation-adamw-then-mt-npo-qkl": ESCAPE | NPO_OF_LOSSES | {"steps": 400},
}


def check_method(method: Method, expected: dict[str, Any]) -> None:
    wanted = dict(expected)
    assert method.lr * method.teacher_rate == pytest.approx(wanted.pop("slide"), rel=1e-12)
    assert {name: getattr(method, name) for name in wanted} == wanted
    assert method.clip == 1.0
    assert method.optimizer == ("adamw" if "betas" in expected else "mean_teacher")
    assert method.loss_options == wanted.get("loss_options", {})


def test_every_file_is_in_the_table() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_numbers_are_those_of_the_logs(name: str) -> None:
    config: ForgetConfig = from_yaml(ForgetConfig, FOLDER / f"{name}.yaml")
    run, method, stop = TABLE[name]
    corpus = "Books" if run["document_mode"] == "chunk" else "News"
    expected = {
        "model": f"muse-bench/MUSE-{corpus.lower()}_target",
        "documents": f"muse-bench/MUSE-{corpus}:train:forget",
        "general": "Skylion007/openwebtext",
        "out": f"runs/{name}",
        "max_tokens": 1024,
        "general_tokens": 512,
        "trainable": "blocks",
        "precision": Precision(forget="tf32", divergence="tf32"),
        "base": None,
        "save_dtype": "float32",
    } | run
    assert {field: getattr(config, field) for field in expected} == expected
    own = f"muse-{corpus.lower()}"
    floor = float("inf")
    assert config.stop == Stop(metric=stop, utility_floor=floor, plateau=0, refine=False, unmet="last", probes=own)
    check_method(config.method, method)
    assert len(config.phases) == (name in PHASES)
    for phase in config.phases:
        check_method(phase, PHASES[name])
    assert config.questions is None, "the stop rule asks MUSE's own"
    assert config.general_mib * 2**20 >= config.max_steps * config.general_batch * BYTES_OF_A_CHUNK


def parts(name: str) -> list[tuple[type, dict[str, Any]]]:
    content = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    methods = [(Method, method) for method in (content["method"], *content["phases"])]
    return [(ForgetConfig, content), (Precision, content["precision"]), (Stop, content["stop"]), *methods]


@pytest.mark.parametrize("name", TABLE)
def test_is_complete(name: str) -> None:
    """Every setting that any of the paper's runs has stands there, in the order of the dataclasses; a later field,
    whose default is the paper's way, stands in none."""
    named: dict[type, set[str]] = {}
    for kind, given in (part for other in TABLE for part in parts(other)):
        named.setdefault(kind, set()).update(given)
    assert [len(fields) for fields in named.values()] == [33, 2, 6, 16]
    for kind, given in parts(name):
        assert list(given) == [field.name for field in dataclasses.fields(kind) if field.name in named[kind]]


@pytest.mark.parametrize("name", TABLE)
def test_says_where_paper_and_logs_differ(name: str) -> None:
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comments = [line for line in lines if line.startswith("#")]
    assert comments == lines[: len(comments)]
    assert any(line.startswith("# - ") and "paper" in line and "logs" in line for line in comments)


def of_padding() -> bool:
    """A divergence divides by real tokens, not by all positions."""
    logits = torch.randn(2, 1, 4, 5, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True, True, False, False]])
    whole = unteach.divergence("kl", logits[0][:, :2], logits[1][:, :2], mask[:, :2])
    return torch.equal(unteach.divergence("kl", logits[0], logits[1], mask), whole)


def of_length() -> bool:
    """NPO's mean ratio does not see padding."""
    logits, base = torch.randn(2, 1, 4, 5, generator=torch.Generator().manual_seed(0))
    mask, labels = torch.tensor([[True, True, False, False]]), torch.zeros(1, 4, dtype=torch.int64)
    short = unteach.forget_loss("npo", logits[:, :2], labels[:, :2], mask[:, :2], base_logits=base[:, :2], ratio="mean")
    return torch.equal(unteach.forget_loss("npo", logits, labels, mask, base_logits=base, ratio="mean"), short)


def first_rate(**options: float) -> float:
    return AnchoredAdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0, warmup=100, **options).learning_rate(0)


DEPARTURES: dict[str, tuple[Callable[[list[Method]], bool], Callable[[], bool]]] = {
    # how the line begins: which configs have it, and that the code does so
    "means run over real tokens": (lambda methods: True, of_padding),
    "NPO: the mean log-ratio": (lambda methods: "npo" in {m.loss for m in methods}, of_length),
    "IT: the paper's direction": (
        lambda methods: "it" in {m.loss for m in methods},
        lambda: {"it", "it_forward"} <= set(unteach.LOSSES),
    ),
    "warm-up: the paper's tenth": (
        lambda methods: any(m.optimizer == "adamw" and m.warmup for m in methods),
        lambda: (first_rate(), first_rate(warmup_share=0.01)) == (0.1, 0.01),
    ),
    "damping in AdamW's phase": (
        lambda methods: len(methods) > 1,
        lambda: "damping" not in OPTIMIZERS["adamw"].settings,
    ),
    "general text: passages shared": (lambda methods: True, lambda: HELDOUT_GENERAL == 64),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_header_lists_the_departures_of_the_code_and_no_others(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    listed = re.findall(r"^# - (.*)", text.partition("# Departs from the authors' runs")[2], re.MULTILINE)
    config: ForgetConfig = from_yaml(ForgetConfig, FOLDER / f"{name}.yaml")
    methods = [*config.phases, config.method]
    assert len(listed) == sum(applies(methods) for applies, _ in DEPARTURES.values())
    for start, (applies, holds) in DEPARTURES.items():
        assert any(line.startswith(start) for line in listed) == applies(methods), start
        assert holds(), f"{start}: the code does otherwise, the headers must say so"
    said = " ".join(
        text.partition("# As in the authors' runs: ")[2].partition("# Not from")[0].replace("#", "").split()
    )
    assert dict(re.findall(r"\((\w+): (\w+)\)", said)) == {"refine": "false", "unmet": "last"}, "which model is kept"
    assert (config.stop.refine, config.stop.unmet) == (False, "last")
    for flags in re.findall(r"--optimizer-options (\w+)=", text):
        assert OPTIMIZERS["adamw"].unknown("adamw", [flags]) == []


def test_every_row_has_a_preset() -> None:
    assert sorted(file for file, _, _ in PRESETS.values()) == sorted(TABLE)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_row_without_what_belongs_to_muse(name: str) -> None:
    file, about, _ = PRESETS[name]
    content = yaml.safe_load((FOLDER / f"{file}.yaml").read_text(encoding="utf-8"))
    given = preset(name)
    shared = {"steps", "betas", "weight_decay", "warmup"} | {"momentum", "teacher_rate", "damping"}
    phases, stop = given.pop("phases", []), given.pop("stop")
    if name.endswith("-star"):  # the one rule whose number is MUSE's
        assert (stop.pop("metric"), content["stop"]["metric"]) == ("knowmem_f <= reference", "knowmem_f <= 35.0")
    methods = zip([given.pop("method"), *phases], [content["method"], *content["phases"]], strict=True)
    for mine, values, others in (*((*pair, shared) for pair in methods), (stop, content["stop"], {"metric", "probes"})):
        assert mine == {key: values[key] for key in mine}
        left = {key for key in values if key not in mine and values[key] != {}}
        assert left <= others, "all that the method uses is there"
    assert given == {key: content[key] for key in given}
    muse = {"model", "documents", "out", "general", "holdout", "reference", "questions", "base", "text_field", "phases"}
    sizes = {"max_tokens", "general_tokens", "general_mib", "micro_batch", "precision", "compile", "probes"}
    rest = {"checkpoint_activations", "expected_steps", "checkpoint_every", "keep_checkpoints", "seed", "device"}
    assert set(content) - set(given) - {"method", "stop"} <= muse | sizes | rest | {"track", "save_dtype"}
    assert about.split()[0] in ("Table", "Figure")


def test_presets_are_listed_and_run_under_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forget", "--list-presets"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == set(PRESETS)
    assert main(["forget", "micro:target", "--preset", "paper-mt-nlul-kk"]) == 2
    assert "did you mean paper-mt-nlul-kl?" in capsys.readouterr().err
    assert main(["forget", "micro:target", "--preset", "paper-mt-nlul-kl", "--config", "x.yaml"]) == 2
    assert "--preset and --config are both given" in capsys.readouterr().err
    start = preset("paper-mt-nlul-kl")
    config = parse(ForgetConfig, ["micro:target", "--alpha", "0.3", "--batch", "8"], flatten=("method",), start=start)
    assert (config.method.alpha, config.method.damping, config.batch, config.general_batch) == (0.3, 5.0, 8, 40)
    assert (config.stop.refine, config.stop.unmet) == (False, "last")
    both = parse(ForgetConfig, ["m"], flatten=("method",), start=preset("paper-losses-adamw-then-mt-ll-qkl"))
    assert [(phase.optimizer, phase.steps) for phase in (*both.phases, both.method)] == [
        ("adamw", 300),
        ("mean_teacher", None),
    ]
    assert preset("paper-mt-nlul-kl")["method"]["alpha"] == 0.05, "a preset is not changed by its use"
