"""A step follows the gradient of αL + D_general + w·D_keep + a·(the same to the start); and the model's own loops."""

import copy
import dataclasses
import itertools

import numpy as np
import pytest
import torch

import unteach
from steps import FORGET, GENERAL, logits_of, same, unlearned
from tiny_models import SENTENCES, small_tokenizer, tiny_model
from unteach.config import ForgetConfig, Method
from unteach.data import ForgetBatches, GeneralText
from unteach.errors import InputError, Interrupted
from unteach.evaluation.formulas import longest_loop
from unteach.method.optimizers import make_optimizer
from unteach.models import trainable_parameters
from unteach.training.step import accumulate, add_without_conflict, train_step
from unteach.training.texts import COPIES, SHORTEST_LOOP, OtherModels, OwnLoops, Texts, find_loops, texts_of_step

NUMBERS = {"mean_teacher": {"lr": 0.05, "teacher_rate": 4.0, "damping": 0.1}, "adamw": {"lr": 1e-2, "warmup": 0}}
ANCHOR, KEEP_WEIGHT, ALPHA = 0.7, 2.5, 0.5
KEEP = [f"In {1800 + n}, said the baker, {' '.join(reversed(s.split()[: 4 + n]))}" for n, s in enumerate(SENTENCES * 3)]


def make(optimizer="mean_teacher", dtype=torch.float32, *, anchor=ANCHOR, divergence="kl", **settings):
    """A model, its trained weights, all texts, a base model, and the settings of a run."""
    tokenizer, model = small_tokenizer(), tiny_model("llama").to(dtype)
    method = Method(
        optimizer=optimizer, loss="match", loss_options={"pull": "gate", "margin": -1.0}, divergence=divergence,
        alpha=ALPHA, anchor=anchor, token_share=1.0, loops_every=0, clip=None, **NUMBERS[optimizer],
    )  # fmt: skip
    sizes = {"batch": 4, "general_batch": 3, "keep_batch": 5, "keep_weight": KEEP_WEIGHT, "max_steps": 5}
    config = ForgetConfig(model="tiny", method=method, base="tiny", **(sizes | {"evaluate_every": 3} | settings))
    forget, keep = ([tokenizer(text)["input_ids"] for text in texts] for texts in (FORGET, KEEP))
    general = GeneralText(GENERAL, tokenizer, tokens=24, seed=0)
    texts = Texts(ForgetBatches(forget, 0), general, ForgetBatches(keep, 0, keep=True))
    return model, trainable_parameters(model, "blocks"), texts, tiny_model("llama", seed=5).to(dtype), config


def run(folder, made, **options):
    model, parameters, texts, base, config = made
    scores = {"nll_general": 1.0}
    return unlearned(folder, model, parameters, texts, config, lambda step: scores, base=base, **options)


def divergence_of(name, model, other, sequences):
    logits, _, mask = logits_of(model, sequences)
    return unteach.divergence(name, logits, logits_of(other, sequences)[0], mask)


def expected_gradient(models, texts, config, step, parameters):
    """Of the definition in full logits, in a form that knows nothing of heads, micro-batches or readings."""
    student, teacher, start, base = models
    method = config.method
    forget, keep = texts.forget.batch(step, config.batch), texts.keep.batch(step, config.keep_batch)
    general = texts.general.batch(step, config.general_batch)
    logits, labels, mask = logits_of(student, forget)
    base_logits = logits_of(base, forget)[0]
    pull = unteach.forget_loss("match", logits, labels, mask, base_logits=base_logits, **method.loss_options)
    held = 0.0
    for weight, other in ((1.0, teacher), (method.anchor, start)):
        on_general, on_keep = (divergence_of(method.divergence, student, other, text) for text in (general, keep))
        held = held + weight * (on_general + config.keep_weight * on_keep)
    gradient = torch.autograd.grad(ALPHA * pull + held, list(parameters.values()))
    return torch.cat([part.flatten() for part in gradient]), pull.item(), held.item()


@pytest.mark.parametrize(("divergence", "micro_batch"), [("kl", None), ("kl", 1), ("kl_reverse", 2)])
@pytest.mark.parametrize("optimizer", list(NUMBERS))
def test_the_gradient_is_that_of_all_terms_in_full_logits(optimizer, divergence, micro_batch, monkeypatch):
    made = make(optimizer, torch.float64, divergence=divergence, micro_batch=micro_batch)
    model, parameters, texts, base, config = made
    start = copy.deepcopy(model)
    others = OtherModels(model, parameters, base, texts.forget.sequences, config, [config.method])
    moving = make_optimizer(parameters.values(), config.method)
    seen = []
    step = type(moving).step

    def spy(self):
        seen.append(torch.cat([p.grad.flatten() for p in parameters.values()]))
        return step(self)

    monkeypatch.setattr(type(moving), "step", spy)
    for number in range(3):  # at the third, student, teacher and start are three models (adamw: two)
        with moving.teacher_weights():
            teacher = copy.deepcopy(model)
        expected, pull, held = expected_gradient((model, teacher, start, base), texts, config, number, parameters)
        read = texts_of_step(texts, config.method, config, number, others)
        row = train_step(model, moving, *read, ALPHA, config)
        assert (seen[-1] - expected).norm() <= 1e-7 * expected.norm()  # Llama norms in float32
        assert row["forget_loss"] == pytest.approx(pull, rel=1e-7)
        assert row["divergence"] == pytest.approx(held, rel=1e-7, abs=1e-12)
    assert held > 1e-5
    assert same(teacher.state_dict(), start.state_dict()) == (optimizer == "adamw")


@pytest.mark.parametrize(("anchor", "keep"), [(0.0, True), (ANCHOR, False), (0.0, False)])
def test_without_an_anchor_or_keep_text_their_terms_are_not_there(anchor, keep):
    model, parameters, texts, base, config = make(anchor=anchor)
    texts = texts if keep else dataclasses.replace(texts, keep=None)
    others = OtherModels(model, parameters, base, texts.forget.sequences, config, [config.method])
    assert bool(others._start) == bool(anchor), "no copy of the weights is held for nothing"
    _, held = texts_of_step(texts, config.method, config, 0, others)
    assert [text.weight for text in held] == [1.0, KEEP_WEIGHT][: 1 + keep]
    assert [[weight for weight, _ in text.readings] for text in held] == [[anchor] if anchor else []] * len(held)


@pytest.mark.parametrize("optimizer", list(NUMBERS))
def test_a_paused_run_with_keep_text_and_an_anchor_goes_on_bit_for_bit(optimizer, tmp_path):
    _, expected = run(tmp_path / "whole", make(optimizer))
    for pause_after in (1, 4):
        steps, folder = [], tmp_path / f"paused_{pause_after}"
        with pytest.raises(Interrupted):
            run(folder, make(optimizer), log=steps.append, paused=lambda n=pause_after, s=steps: len(s) >= n)
        _, weights = run(folder, make(optimizer), resume=True)
        assert same(weights, expected), f"paused after {pause_after}"


def loop_by_definition(sequence, copies, minimum):
    """The length of the longest stretch that some period explains, by trying every start and end."""
    longest = 0
    for start, end in itertools.combinations(range(len(sequence) + 1), 2):
        part = sequence[start:end]
        for period in range(1, len(part) // copies + 1):
            if len(part) >= minimum and all(a == b for a, b in zip(part, part[period:], strict=False)):
                longest = max(longest, len(part))
    return longest


def test_longest_loop_is_the_longest_one_and_found_where_it_stands():
    for seed in range(30):
        sequence = np.random.default_rng(seed).integers(0, 2, 14)
        start, period, length = longest_loop(sequence, 2, 4)
        assert length == loop_by_definition(sequence.tolist(), 2, 4)
        stretch = sequence[start : start + length]
        assert (stretch[period:] == stretch[: len(stretch) - period]).all()
    assert longest_loop(np.array([9, 8, 1, 2, 3, 1, 2, 3, 1, 7]), 2, 4) == (2, 3, 7)
    assert longest_loop(np.arange(20), 2, 4) == (0, 0, 0)
    assert longest_loop(np.array([], dtype=int), 2, 4) == (0, 0, 0)


def test_own_loops_are_the_repeated_copies_of_what_the_model_writes():
    model, _, texts, _, _ = make()
    loops = find_loops(model, texts.forget, step=3)
    assert loops.sequences, "an untrained model loops"
    for ids, repeated in zip(loops.sequences, loops.repeated, strict=True):
        assert len(repeated) == len(ids) - 1
        places = (repeated.nonzero().squeeze(-1) + 1).tolist()
        assert places == list(range(places[0], places[-1] + 1)), "one stretch"
        periods = [p for p in range(1, places[0] + 1) if all(ids[place] == ids[place - p] for place in places)]
        assert any(len(places) >= max((COPIES - 1) * p, SHORTEST_LOOP - p) for p in periods)
    for again in (find_loops(model, texts.forget, step=3), OwnLoops.from_state(loops.state())):
        assert again.sequences == loops.sequences
        assert all(map(torch.equal, again.repeated, loops.repeated))


def flat_gradient(value, parameters):
    found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    pairs = zip(parameters.values(), found, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in pairs])


def test_gradient_difference_holds_by_likelihood_and_a_conflict_is_projected_away():
    """Of α L + NLL(general) + w NLL(keep), and the same without what of αL goes against the rest."""
    model, parameters, texts, _, config = make("adamw", torch.float64, anchor=0.0, divergence="nll")
    method = dataclasses.replace(config.method, loss="ll", loss_options={})
    read = texts_of_step(texts, method, config, 0)
    nll = []
    for sequences in (texts.general.batch(0, 3), texts.keep.batch(0, 5), texts.forget.batch(0, 4)):
        logits, labels, mask = logits_of(model, sequences)
        nll.append(torch.nn.functional.cross_entropy(logits[mask], labels[mask]))
    held, pulled = (flat_gradient(x, parameters) for x in (nll[0] + KEEP_WEIGHT * nll[1], -ALPHA * nll[2]))
    product = pulled @ held
    assert product < 0, "there is a conflict"
    orthogonal = pulled - product / held.norm() ** 2 * held
    for project, expected in ((False, held + pulled), (True, held + orthogonal)):
        terms = accumulate(model, list(parameters.values()), *read, ALPHA, config, project=project)
        mine = torch.cat([p.grad.flatten() for p in parameters.values()])
        assert (mine - expected).norm() <= 1e-9 * expected.norm()
        assert terms["divergence"] == pytest.approx((nll[0] + KEEP_WEIGHT * nll[1]).item(), rel=1e-9)
    agreeing = [None if p.grad is None else p.grad.clone() for p in parameters.values()]
    add_without_conflict(list(parameters.values()), agreeing)
    twice = torch.cat([p.grad.flatten() for p in parameters.values()])
    assert (twice - 2 * mine).norm() <= 1e-12 * mine.norm(), "what agrees is left whole"


def test_a_run_can_take_the_step_of_gru_and_an_anchor_without_a_divergence_is_refused(tmp_path):
    ways = []
    for project in (False, True):
        made = make("adamw", anchor=0.0, divergence="nll", max_steps=3)
        method = dataclasses.replace(made[-1].method, loss="ll", loss_options={}, project_conflicts=project)
        config = dataclasses.replace(made[-1], method=method)
        ways.append(run(tmp_path / str(project), (*made[:-1], config))[1])
    assert not same(*ways)
    with pytest.raises(InputError, match=r"anchor is 0\.7: with divergence nll nothing is compared"):
        make("adamw", divergence="nll")
