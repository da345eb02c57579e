"""What CONTRIBUTING promises: a loss of any kind, and an optimizer, run from the command line once registered."""

import json

import pytest
import torch

from tiny_models import SENTENCES, save_tiny
from unteach.cli import main
from unteach.method.losses import LOSSES, register, token_log_odds
from unteach.method.optimizers import OPTIMIZERS, OptimizerKind
from unteach.method.tensors import other_weights

pytestmark = pytest.mark.usefixtures("run_alone")

CALLS = []


def root_likelihood(logits, labels, mask, *, power: float = 0.5):
    """A function of log-odds with a hyper-parameter."""
    CALLS.append(power)
    return torch.nn.functional.logsigmoid(token_log_odds(logits[mask], labels[mask])).mul(power).exp().mean()


def distance_to_initial(logits, labels, mask, *, base_logits):
    """A function of log-odds that compares with a model."""
    odds = [token_log_odds(x[mask], labels[mask]) for x in (logits, base_logits)]
    CALLS.append(float((odds[0] - odds[1]).detach().abs().max()))
    return -(odds[0] - odds[1]).square().mean() + odds[0].mean()


def entropy(logits, labels, *, scale: float = 1.0):
    """A row function on all logits, its gradient left to autograd."""
    CALLS.append(scale)
    log_p = logits.log_softmax(-1)
    return scale * (log_p.exp() * log_p).sum(-1)


def towards(logits, labels, base_logits, *, scale: float = 1.0):
    """A row function with a closed-form gradient."""
    CALLS.append(scale)
    difference = logits - base_logits / 2
    return scale * 0.5 * difference.square().sum(-1), scale * difference


def misdirect(hidden, *, base_hidden, layer: int, length: float = 2.0):
    """Hidden states of one layer, pulled to one direction and compared with those of a model."""
    CALLS.append(layer)
    goal = length * torch.ones_like(hidden[0]) / hidden.shape[-1] ** 0.5
    return (hidden - goal).square().mean() + 0.1 * (hidden - base_hidden).square().mean()


LOSS_KINDS = {
    "log-odds": (root_likelihood, {}, ["power=0.25"], 0.25),
    "log-odds, initial model": (distance_to_initial, {"base": "initial"}, [], 0.0),
    "log-odds, given model": (distance_to_initial, {"base": "given"}, [], None),
    "logits": (entropy, {"reads": "logits"}, ["scale=2"], 2),
    "logits, given model": (towards, {"reads": "logits", "base": "given", "closed_form": True}, ["scale=3.5"], 3.5),
    "logits, initial model": (towards, {"reads": "logits", "base": "initial", "closed_form": True}, [], 1.0),
    "hidden": (misdirect, {"reads": "hidden", "base": "given"}, ["layer=1", "length=3"], 1),
    "hidden, initial model": (misdirect, {"reads": "hidden", "base": "initial"}, ["layer=0"], 0),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("registering")
    save_tiny(folder / "model")
    save_tiny(folder / "base", seed=5)
    backwards = [" ".join(reversed(sentence.split())) for sentence in SENTENCES]
    for name, count, texts in (("forget", 4, SENTENCES), ("general", 12, backwards)):
        lines = [json.dumps({"text": f"{texts[n % 3]} {texts[n % 2]} Number {n}."}) for n in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def run(inputs, out, *flags):
    words = ["forget", inputs / "model", "--documents", inputs / "forget.jsonl", "--general", inputs / "general.jsonl"]
    words += ["--out", out, "--max-steps", 3, "--max-tokens", 24, "--general-tokens", 24, "--batch", 3, "--probes", 2]
    words += ["--alpha", 0.5, "--lr", 0.02, "--teacher-rate", 4, "--damping", 0.1, "--stop.metric", "verbmem_f <= -1"]
    words += ["--token-share", 1, "--loops-every", "none", "--device", "cpu", *flags]
    return main([str(word) for word in words])


@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_a_registered_loss_runs_from_the_command_line(kind, inputs, tmp_path, monkeypatch, capsys):
    function, settings, options, expected = LOSS_KINDS[kind]
    monkeypatch.setitem(LOSSES, "scratch", None)  # taken away again after the test
    register("scratch", "…", **settings)(function)
    CALLS.clear()
    flags = ["--loss", "scratch", *(["--loss-options", *options] if options else [])]
    flags += ["--base", inputs / "base"] if settings.get("base") == "given" else []
    assert run(inputs, tmp_path / "run", *flags) == 3, capsys.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert all(row["grad_norm"] > 0 for row in rows)
    assert CALLS, "the registered function itself was called"
    if expected is not None:
        assert any(call == pytest.approx(expected, abs=1e-5) for call in CALLS)


def test_a_wrong_option_of_a_registered_loss_is_one_line(inputs, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(LOSSES, "scratch", None)
    register("scratch", "…", reads="hidden", base="given")(misdirect)
    assert run(inputs, tmp_path / "run", "--loss", "scratch", "--base", inputs / "base") == 2
    assert "loss_options: layer is missing: forget loss 'scratch' needs it" in capsys.readouterr().err


class SignDescent(torch.optim.SGD):
    """A teacher that is the model before the run, and steps of one size."""

    last_grad_norm, last_clip_factor = 1.0, 1.0

    def __init__(self, params, lr, shrink=1.0):
        super().__init__(params, lr=lr)
        self.shrink, self.start = shrink, None

    def teacher_weights(self):
        parameters = self.param_groups[0]["params"]
        self.start = self.start or [p.detach().clone() for p in parameters]
        return other_weights(parameters, self.start)

    def step(self, closure=None):
        CALLS.append(self.shrink)
        for p in self.param_groups[0]["params"]:
            p.grad = self.shrink * p.grad.sign()
        super().step()


def test_a_registered_optimizer_runs_from_the_command_line(inputs, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(OPTIMIZERS, "scratch", OptimizerKind(SignDescent, "sign", ("lr",)))
    CALLS.clear()
    flags = ["--optimizer", "scratch", "--optimizer-options", "shrink=0.25"]
    assert run(inputs, tmp_path / "run", *flags) == 3, capsys.readouterr().err
    assert CALLS == [0.25] * 3
    assert json.loads((tmp_path / "run" / "result.json").read_text())["name"] == "sign-nlul-kl"
    assert run(inputs, tmp_path / "wrong", "--optimizer", "scratch", "--optimizer-options", "grow=2") == 2
    assert "optimizer 'scratch' has no setting 'grow': allowed are shrink" in capsys.readouterr().err
