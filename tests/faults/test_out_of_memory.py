"""Memory that runs out: a step is made again in smaller parts, exactly; what cannot fit is refused unread."""

import resource
from pathlib import Path

import pytest
import torch
from small_run import make_inputs, settings

from steps import FORGET, GENERAL, mean_teacher, same, unlearned
from tiny_models import small_tokenizer, tiny_model
from unteach.cli import main
from unteach.config import ForgetConfig
from unteach.data import Documents, ForgetBatches, GeneralText, tokenise
from unteach.errors import InputError
from unteach.models import trainable_parameters
from unteach.training.calibrate import measure
from unteach.training.fitting import halving
from unteach.training.texts import Texts

TOKENIZER = small_tokenizer()
TEXTS = Texts(
    ForgetBatches(tokenise(Documents("d", FORGET[:12]), TOKENIZER, mode="chunk", max_tokens=64), 0),
    GeneralText(GENERAL, TOKENIZER, tokens=48, seed=0),
)


def limited(model, tokens, *, student=False):
    """Let passes of more than so many tokens find no memory; ``student``: only those that keep what they compute."""
    failed = []

    def refuse(module, positional, named):
        ids = named["input_ids"]
        if ids.numel() > tokens and (torch.is_grad_enabled() or not student):
            failed.append(tuple(ids.shape))
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 9 GiB")

    model.base_model.register_forward_pre_hook(refuse, with_kwargs=True)
    return failed


def three_steps(folder, tokens=None, student=False, general=8, **config):
    """Weights after three steps of a model that can read so many tokens at once, passes that failed, lines said."""
    model, said = tiny_model("llama"), []
    failed = limited(model, tokens, student=student) if tokens else []
    method = config.pop("method", mean_teacher(token_share=0.5))
    config = ForgetConfig(batch=4, general_batch=general, max_steps=3, evaluate_every=9, method=method, **config)
    parameters = trainable_parameters(model, "blocks")
    options = {"say": said.append, "base": tiny_model("llama", seed=1)}
    scores = {"verbmem_f": 90.0, "nll_general": 1.0}
    folder.mkdir()
    _, weights = unlearned(folder, model, parameters, TEXTS, config, lambda step: scores, **options)
    return weights, failed, said


@pytest.mark.parametrize("method", ["mean_teacher", "anchored", "projected"])
@pytest.mark.parametrize("student", [False, True], ids=["in any pass", "between two backward passes"])
def test_a_step_that_found_no_memory_is_made_again(tmp_path, student, method):
    """Bit for bit the run that had the smaller micro-batch from its start; and the plain one but for rounding."""
    how = {
        "method": mean_teacher(
            **{"anchored": {"anchor": 0.5}, "projected": {"project_conflicts": True}}.get(method, {})
        )
    }
    longest = TEXTS.longest
    weights, failed, said = three_steps(tmp_path / "a", 4 * longest, student, **how)
    assert failed
    assert len(said) == 1, said
    assert "the device's memory ran out: micro_batch is 4 from here on" in said[0]
    smaller, none_failed, nothing = three_steps(tmp_path / "b", 4 * longest, student, micro_batch=4, **how)
    assert (none_failed, nothing) == ([], [])
    assert same(weights, smaller)
    plain, _, _ = three_steps(tmp_path / "c", **how)
    for name in plain:
        torch.testing.assert_close(weights[name], plain[name], rtol=1e-4, atol=1e-6)


def test_it_goes_on_with_what_fitted_after_a_pause(tmp_path):
    """A resumed run does not try the larger micro-batch again."""
    from unteach.training.checkpoint import Checkpoints

    three_steps(tmp_path / "a", 4 * TEXTS.longest, checkpoint_every=1)
    assert Checkpoints(tmp_path / "a/checkpoints", 2).load()["position"]["micro_batch"] == 4
    three_steps(tmp_path / "b", checkpoint_every=1)
    assert Checkpoints(tmp_path / "b/checkpoints", 2).load()["position"]["micro_batch"] is None


def test_one_sequence_that_does_not_fit_is_said(tmp_path):
    with pytest.raises(InputError, match=r"with micro_batch 1 \(out of memory\): set checkpoint_activations, or lower"):
        three_steps(tmp_path / "a", 8)


def test_measuring_step_sizes_leaves_the_model_as_it_was():
    model = tiny_model("llama")
    parameters = trainable_parameters(model, "blocks")
    start = {name: p.detach().clone() for name, p in parameters.items()}
    config = ForgetConfig(batch=4, general_batch=8, method=mean_teacher(token_share=0.5))
    given = (model, list(parameters.values()), TEXTS.forget, TEXTS.general)
    whole = measure(*given, config)
    failed = limited(model, 4 * 48)
    found = measure(*given, config)
    assert failed
    assert found.loss == pytest.approx(whole.loss, rel=1e-5)
    assert found.curvature == pytest.approx(whole.curvature, rel=1e-3)
    assert same(start, {name: p.detach() for name, p in parameters.items()})


def test_the_optimizers_step_is_not_made_twice(tmp_path, monkeypatch):
    """Some of its weights may have moved."""
    from unteach.method.mean_teacher import MeanTeacher

    tried = []

    def fail(optimizer, closure=None):
        tried.append(1)
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(MeanTeacher, "step", fail)
    with pytest.raises(InputError, match="ran out in the optimizer's step: go on from the last checkpoint"):
        three_steps(tmp_path / "a")
    assert tried == [1]


def test_other_errors_pass():
    with pytest.raises(ZeroDivisionError):
        halving(ForgetConfig(), lambda config: 1 / 0)


@pytest.mark.parametrize("command", ["plan", pytest.param("forget", marks=pytest.mark.slow)])
def test_what_cannot_fit_is_refused_before_it_is_loaded(tmp_path, command, capsys, monkeypatch):
    """Under `ulimit -v`, set here for this process: what is needed and what there is, in one line, status 2."""
    folder = make_inputs(tmp_path)
    given = settings(folder, tmp_path / "run")
    words = [command, given.model, "--documents", given.documents, "--general", given.general, "--out", given.out]
    monkeypatch.setattr("unteach.job.inputs.load_model", lambda *a, **k: pytest.fail("the model was loaded"))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20, limits[1]))
    try:
        status = main(words)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    said = capsys.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if "the run needs" in line]
    assert (status, len(lines)) == (2, 1), said
    assert "MiB of memory on cpu" in lines[0]
    assert " MiB are free: " in lines[0]
    assert not (tmp_path / "run").exists()
