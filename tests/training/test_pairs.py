"""A step follows the gradient of a loss of pairs as a whole, though documents and alternates are read apart."""

import copy
import dataclasses

import pytest
import torch

from definitions import naive_dpo
from steps import FORGET, GENERAL, logits_of, same, unlearned
from tiny_models import small_tokenizer, tiny_model
from unteach.config import ForgetConfig, Method
from unteach.data import ForgetBatches, GeneralText
from unteach.errors import Interrupted
from unteach.method.optimizers import make_optimizer
from unteach.models import trainable_parameters
from unteach.training.step import accumulate, train_step
from unteach.training.texts import OtherModels, Texts, texts_of_step

ALTERNATES = [text.replace("time in 1", "evening, or so they said, since 2") for text in FORGET]
METHODS = {
    "adamw": {"optimizer": "adamw", "lr": 1e-2, "warmup": 0},
    "mean_teacher": {"optimizer": "mean_teacher", "lr": 0.05, "teacher_rate": 4.0, "damping": 0.1},
}


def make(dtype=torch.float64, optimizer="adamw", beta=0.1, *, forget=FORGET, alternates=ALTERNATES, **settings):
    """A model, its trained weights, the texts and the settings of a run."""
    tokenizer, model = small_tokenizer(), tiny_model("llama").to(dtype)
    method = Method(loss="dpo", loss_options={"beta": beta}, alpha=0.5, clip=None, loops_every=0, **METHODS[optimizer])
    sizes = {"batch": 5, "general_batch": 2, "max_steps": 5, "evaluate_every": 3} | settings
    config = ForgetConfig(model="tiny", alternates="given", method=method, **sizes)
    documents, others = ([tokenizer(text)["input_ids"] for text in texts] for texts in (forget, alternates))
    general = GeneralText(GENERAL, tokenizer, tokens=24, seed=0)
    return (
        model,
        trainable_parameters(model, "blocks"),
        Texts(ForgetBatches(documents, 0), general, None, others),
        config,
    )


def others_of(model, parameters, texts, config, numbers=None):
    given = (model, parameters, None, texts.forget.sequences, config, [config.method])
    return OtherModels(*given, numbers, alternates=texts.alternates)


def moved(parameters, by):
    """The weights, moved at random by a share of their size."""
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in parameters.values():
            noise = torch.randn(p.shape, generator=draws, dtype=torch.float64)
            p.add_((by * p.std(correction=0) * noise).to(p))


def gradient_of_step(made, others, step):
    model, parameters, texts, config = made
    pulls, _ = texts_of_step(texts, config.method, config, step, others)
    terms = accumulate(model, list(parameters.values()), pulls, [], 1.0, config)
    return terms, torch.cat([p.grad.flatten() for p in parameters.values()])


@pytest.mark.parametrize("micro_batch", [None, 1, 2])
@pytest.mark.parametrize(("by", "beta"), [(0.0, 0.1), (0.3, 0.1), (1.0, 0.1), (1.0, 20.0)])
def test_value_and_gradient_are_those_of_pairs_in_full_logits(by, beta, micro_batch):
    made = make(beta=beta, micro_batch=micro_batch)
    model, parameters, texts, config = made
    before, others = copy.deepcopy(model), others_of(model, parameters, texts, config)
    moved(parameters, by)
    for step in (0, 3):  # the second time a batch of other lengths
        numbers = texts.forget.numbers(step, config.batch)
        batches = []
        for sequences in (texts.forget.sequences, texts.alternates):
            chosen = [sequences[n] for n in numbers]
            batches.append((*logits_of(model, chosen), logits_of(before, chosen)[0].detach()))
        expected = naive_dpo(*batches, beta=beta)
        gradients = torch.autograd.grad(expected, list(parameters.values()))
        expected_gradient = torch.cat([gradient.flatten() for gradient in gradients])
        terms, found = gradient_of_step(made, others, step)
        assert terms["forget_loss"] == pytest.approx(expected.item(), rel=1e-9)
        assert (found - expected_gradient).norm() <= 1e-7 * expected_gradient.norm()  # Llama norms in float32
        logits, labels, mask, _ = batches[0]
        nll = torch.nn.functional.cross_entropy(logits[mask], labels[mask])
        assert terms["nll_forget"] == pytest.approx(nll.item(), rel=1e-9)


def test_at_the_start_documents_are_pushed_as_by_ll_and_alternates_drawn_alike():
    made = make()
    model, parameters, texts, config = made
    _, found = gradient_of_step(made, others_of(model, parameters, texts, config), 0)
    numbers, expected = texts.forget.numbers(0, config.batch), 0.0
    for sign, sequences in ((1, texts.forget.sequences), (-1, texts.alternates)):
        logits, labels, mask = logits_of(model, [sequences[n] for n in numbers])
        expected = expected + sign * logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0][mask].sum()
    tokens = sum(len(texts.forget.sequences[n]) - 1 for n in numbers)
    gradients = torch.autograd.grad(expected / tokens, list(parameters.values()))
    expected = torch.cat([gradient.flatten() for gradient in gradients])
    assert (found - expected).norm() <= 1e-7 * expected.norm()


def test_what_both_texts_begin_with_cancels():
    """The tokens of a common beginning alone have no gradient, and no part in how likely the texts became."""
    tokenizer = small_tokenizer()
    begins = [tokenizer(text)["input_ids"][:12] for text in FORGET]
    model, parameters, texts, config = make()
    equal = dataclasses.replace(texts, forget=ForgetBatches(begins, 0), alternates=begins)
    others = others_of(model, parameters, equal, config)
    moved(parameters, 0.3)
    terms, found = gradient_of_step((model, parameters, equal, config), others, 0)
    tokens = sum(len(begins[n]) - 1 for n in equal.forget.numbers(0, config.batch))
    assert terms["forget_loss"] == pytest.approx(config.batch * 20 * torch.tensor(2.0).log().item() / tokens)
    alone = accumulate(model, list(parameters.values()), texts_of_step(equal, config.method, config, 0, others)[0][:1],
                       [], 1.0, config)  # fmt: skip
    one = torch.cat([p.grad.flatten() for p in parameters.values()])
    assert found.norm() <= 1e-12 * one.norm()
    assert alone["forget_loss"] == terms["forget_loss"]


def test_only_what_is_drawn_is_read_before_the_run():
    model, parameters, texts, config = make()
    whole = others_of(model, parameters, texts, config)
    some = others_of(model, parameters, texts, config, numbers=[4, 0])
    assert len(some.initial.values) == len(some.of_alternates.values) == 2
    for mine, theirs in zip(some.of_pairs([0, 4]), whole.of_pairs([0, 4]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)
    assert [len(x) for x in whole.of_pairs([4])] == [len(texts.forget.sequences[4]) - 1, len(texts.alternates[4]) - 1]


def run(folder, made, **options):
    model, parameters, texts, config = made
    return unlearned(folder, model, parameters, texts, config, lambda step: {"nll_general": 1.0}, **options)[1]


@pytest.mark.parametrize("optimizer", list(METHODS))
def test_a_run_does_not_depend_on_the_micro_batch_and_prefers_the_alternates(optimizer, tmp_path):
    expected = run(tmp_path / "whole", made := make(optimizer=optimizer))
    before = tiny_model("llama").double()
    gained = []
    for sequences in (made[2].forget.sequences, made[2].alternates):
        totals = []
        for model in (made[0], before):
            logits, labels, mask = logits_of(model, sequences)
            totals.append(logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0][mask].sum().item())
        gained.append(totals[0] - totals[1])
    assert gained[1] > gained[0]
    for micro_batch in (1, 3):
        found = run(tmp_path / f"micro {micro_batch}", make(optimizer=optimizer, micro_batch=micro_batch))
        start = {name: p for name, p in before.named_parameters() if name in expected}
        way = sum((expected[name] - start[name]).square().sum() for name in expected) ** 0.5
        assert sum((expected[name] - found[name]).square().sum() for name in expected) ** 0.5 <= 1e-7 * way


@pytest.mark.parametrize("optimizer", list(METHODS))
def test_a_paused_run_goes_on_bit_for_bit(optimizer, tmp_path):
    expected = run(tmp_path / "whole", make(torch.float32, optimizer))
    for pause_after in (1, 4):
        steps, folder = [], tmp_path / f"paused {pause_after}"
        with pytest.raises(Interrupted):
            run(folder, make(torch.float32, optimizer), log=steps.append,
                paused=lambda n=pause_after, s=steps: len(s) >= n)  # fmt: skip
        again = make(torch.float32, optimizer)
        if pause_after == 4:
            moved(again[1], 0.1)  # what the run began with is in the checkpoint
        assert same(run(folder, again, resume=True), expected), f"paused after {pause_after}"


def test_a_step_of_the_mean_teacher_and_a_half_precision_one_are_made():
    made = make(torch.float32, "mean_teacher", micro_batch=2)
    model, parameters, texts, config = made
    others, optimizer = others_of(model, parameters, texts, config), make_optimizer(parameters.values(), config.method)
    precision = dataclasses.replace(config.precision, forget="bf16")
    for changed in (config, dataclasses.replace(config, precision=precision)):
        row = train_step(model, optimizer, *texts_of_step(texts, config.method, changed, 0, others), 0.5, changed)
        assert row["grad_norm"] > 0
