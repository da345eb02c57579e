import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import unteach
from steps import held_to, one_step, pull_of
from tiny_models import SENTENCES, small_tokenizer, tiny_model
from unteach.config import ForgetConfig, Method, Precision
from unteach.data import ForgetBatches, GeneralText
from unteach.errors import Interrupted
from unteach.method.losses import LOSSES
from unteach.method.optimizers import AnchoredAdamW, make_optimizer
from unteach.method.vocab_head import Head
from unteach.models import trainable_parameters
from unteach.training.checkpoint import Checkpoints
from unteach.training.loop import unlearn
from unteach.training.passes import LogOddsOfModel, Reading, forget_term, held_term, hidden_states
from unteach.training.stopping import Search, parse_rule, stop_at
from unteach.training.texts import Texts

FORGET = [f"{s} It was the {n}th time in {1900 + n}." for n, s in enumerate(SENTENCES * 3)]
GENERAL = [f"{a} {b}" for a in SENTENCES for b in SENTENCES] * 4
PAPER = {"token_share": 1.0, "loops_every": 0}
METHOD = Method(
    optimizer="mean_teacher", loss="nlul", alpha=0.5, lr=0.02, teacher_rate=4.0, damping=0.1, momentum=0.9, **PAPER
)
ADAMW = Method(loss="nlul", optimizer="adamw", alpha=0.5, lr=1e-3, warmup=2, **PAPER)


def make(dtype=torch.float32, trainable="blocks", **settings):
    model, tokenizer = tiny_model("llama").to(dtype), small_tokenizer()
    settings = {"method": METHOD, "batch": 8, "general_batch": 8, "max_steps": 12, "evaluate_every": 5} | settings
    config = ForgetConfig(model="tiny", **settings)
    forget = ForgetBatches([tokenizer(text)["input_ids"] for text in FORGET], config.seed)
    general = GeneralText(GENERAL, tokenizer, tokens=24, seed=config.seed)
    return model, trainable_parameters(model, trainable), forget, general, config


def run(tmp_path, evaluate=lambda step: {"verbmem_f": 50.0, "nll_general": 1.0}, rule=None, made=None, **options):
    model, parameters, forget, general, config = made or make()
    before = {"verbmem_f": 90.0, "nll_general": 1.0}
    search = Search(
        rule, before, every=config.evaluate_every, last=config.max_steps, utility_floor=config.stop.utility_floor
    )
    outcome = unlearn(
        model,
        parameters,
        Texts(forget, general),
        config,
        search=search,
        evaluate=evaluate,
        checkpoints=Checkpoints(tmp_path / "checkpoints", 2),
        **options,
    )
    return outcome, {name: p.detach().clone() for name, p in parameters.items()}


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


# ---- one step ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("divergence", list(unteach.DIVERGENCES))
def test_gradient_is_that_of_the_full_logit_definitions(loss, divergence):
    model, parameters, forget, general, _ = make(torch.float64)
    base = tiny_model("llama", seed=5).double()
    sequences = forget.batch(0, 4)
    with torch.no_grad():
        hidden, labels, _ = hidden_states(base, sequences)
    head = Head.of(base)
    log_odds = unteach.method.vocab_head.token_log_odds(hidden, labels, head).detach()
    log_odds = log_odds.split([len(sequence) - 1 for sequence in sequences])
    pull = pull_of(sequences, loss, base_log_odds=log_odds, base=Reading([hidden], head))
    value, nll, tokens = forget_term(model, pull, 0)
    chunks = general.batch(0, 4)
    with torch.no_grad():
        taught = hidden_states(base, chunks)[0]
    penalty, _ = held_term(model, held_to(chunks, divergence, taught, head), 0)
    mine = torch.autograd.grad(0.3 * value + penalty, list(parameters.values()))

    ids, lengths = unteach.data.pad(sequences)
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    logits, base_logits = (m(ids, attention_mask=mask.long()).logits[:, :-1] for m in (model, base))
    extra = {"base_logits": base_logits} if LOSSES[loss].needs_base else {}
    expected = unteach.forget_loss(loss, logits, ids[:, 1:], mask[:, 1:], **extra)
    chunk_ids = torch.tensor(chunks)
    everywhere = torch.ones(4, chunk_ids.shape[1] - 1, dtype=torch.bool)
    expected_penalty = unteach.divergence(
        divergence, model(chunk_ids).logits[:, :-1], base(chunk_ids).logits[:, :-1], everywhere
    )
    theirs = torch.autograd.grad(0.3 * expected + expected_penalty, list(parameters.values()))
    assert value.item() == pytest.approx(expected.item(), rel=1e-9)
    assert penalty.item() == pytest.approx(expected_penalty.item(), rel=1e-9)
    assert tokens == int(mask[:, 1:].sum())
    assert nll.item() == pytest.approx(
        model(ids, attention_mask=mask.long(), labels=ids.masked_fill(~mask, -100)).loss.item()
    )
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float64, 1e-9)])
@pytest.mark.parametrize(
    "method",
    [
        METHOD,
        ADAMW,
        Method(optimizer="mean_teacher", loss="npo", alpha=0.5, lr=0.02, teacher_rate=4.0, damping=0.1, **PAPER),
    ],
)
def test_result_does_not_depend_on_the_micro_batch(tmp_path, dtype, tolerance, method):
    displacements = []
    for micro_batch in (1, 8):
        made = make(dtype, method=method, micro_batch=micro_batch, max_steps=6)
        start = {name: p.detach().clone() for name, p in made[1].items()}
        _, end = run(tmp_path / str(micro_batch), made=made)
        displacements.append(torch.cat([(end[name] - start[name]).flatten() for name in end]))
    gap, size = (displacements[0] - displacements[1]).norm(), displacements[1].norm()
    assert gap <= tolerance * size
    assert size >= 100 * gap
    assert size > 0


def test_frozen_parts_do_not_change_and_all_can_be_trained(tmp_path):
    made = make()
    start = copy.deepcopy(made[0].state_dict())
    run(tmp_path / "a", made=made)
    changed = {name for name, value in made[0].state_dict().items() if not torch.equal(value, start[name])}
    assert changed == set(made[1])
    assert not any("embed" in name or "norm" in name or "lm_head" in name for name in changed)
    made = make(trainable="all")
    run(tmp_path / "b", made=made)
    assert {n for n, v in made[0].state_dict().items() if not torch.equal(v, start[n])} == set(start)


def test_unlearning_raises_the_nll_of_the_forget_text(tmp_path):
    rows = []
    method = Method(
        optimizer="mean_teacher",
        token_share=0.25,
        loops_every=4,
        loss="ll",
        alpha=2.0,
        lr=0.05,
        teacher_rate=4.0,
        damping=0.05,
        clip=None,
    )
    run(tmp_path, made=make(max_steps=20, evaluate_every=20, method=method), log=rows.append)
    assert rows[-1]["nll_forget"] > rows[0]["nll_forget"] + 0.1
    assert rows[0]["divergence"] == 0.0, "student and teacher start equal"
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert all(row["grad_norm"] > 0 and 0 < row["clip_factor"] <= 1 for row in rows)


def test_npo_base_is_the_model_before_the_run():
    model, _, forget, _, config = make()
    base = LogOddsOfModel(model, forget.sequences, config)
    hidden, labels, _ = hidden_states(model, [forget.sequences[3], forget.sequences[1]])
    expected = unteach.method.vocab_head.token_log_odds(hidden, labels, Head.of(model))
    torch.testing.assert_close(torch.cat([base.values[3], base.values[1]]), expected.detach(), rtol=1e-5, atol=1e-5)


# ---- stopping ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("crossing", [1, 4, 5, 6, 8, 11])
def test_the_first_model_that_crosses_is_kept(tmp_path, crossing):
    evaluated = []

    def evaluate(step):
        evaluated.append(step)
        return {"verbmem_f": 80.0 if step < crossing else 10.0, "nll_general": 1.0}

    outcome, weights = run(tmp_path / "run", evaluate, stop_at("verbmem_f", "<=", 20.0))
    assert (outcome.step, outcome.rule) == (crossing, "stop")
    assert outcome.scores["verbmem_f"] == 10.0
    _, expected = run(tmp_path / "plain", made=make(max_steps=crossing))
    assert same(weights, expected), "going back and evaluating more often makes the same steps again"


def test_log_rows_are_rewound_when_the_run_goes_back(tmp_path):
    rows = []

    def rewind(step):
        rows[:] = [row for row in rows if row["step"] <= step]

    rule = stop_at("verbmem_f", "<=", 20.0)
    run(tmp_path, lambda s: {"verbmem_f": 80.0 - 9 * s, "nll_general": 1.0}, rule, log=rows.append, rewind=rewind)
    assert [row["step"] for row in rows] == list(range(1, 8))


def test_a_breaking_model_ends_the_run_with_a_reason(tmp_path):
    outcome, _ = run(tmp_path, lambda step: {"verbmem_f": 80.0, "nll_general": 1.0 + 0.2 * step})
    assert (outcome.rule, outcome.step) == ("utility_floor", 5)
    assert "costs 1.00 nats per token more than before" in outcome.reason


def test_a_rule_that_is_met_by_a_broken_model_says_so(tmp_path):
    scores = {"nll_general": 3.0}
    outcome, _ = run(tmp_path, lambda step: scores | {"verbmem_f": 10.0}, stop_at("verbmem_f", "<=", 20.0))
    assert outcome.rule == "stop"
    assert "reached 10; but general text costs 2.00 nats per token more than before" in outcome.reason


def test_max_steps_always_holds(tmp_path):
    outcome, _ = run(tmp_path, rule=stop_at("verbmem_f", "<=", 20.0))
    assert (outcome.step, outcome.rule) == (12, "max_steps")
    assert "verbmem_f <= 20 was not met" in outcome.reason


def test_rules_are_read_and_wrong_ones_refused():
    assert parse_rule(" knowmem_f<=31.1 ", {"knowmem_f": 1.0}) == stop_at("knowmem_f", "<=", 31.1)
    for text, match in [
        ("verbmem_f", "write a metric"),
        ("a <= 1", "a is not measured.*measured are knowmem_f"),
        ("knowmem_f <= 1e", "write a metric"),
        ("knowmem_f <= reference", "there is no reference model; give --reference"),
    ]:
        with pytest.raises(ValueError, match=match):
            parse_rule(text, {"knowmem_f": 1.0})
    rule = parse_rule("a <= reference and b >= -1", ["a", "b"], {"reference": {"a": 3.5}})
    assert [condition.value for condition in rule.conditions] == [3.5, -1.0]


# ---- saving and going on -------------------------------------------------------------------------------


def test_a_model_that_only_loops_has_not_forgotten(tmp_path):
    rule = stop_at("verbmem_f", "<=", 20.0, "never seen", most_degenerate=5.0)
    assert str(rule) == "verbmem_f <= 20 (never seen) with degenerate <= 5"
    evaluated = []

    def evaluate(step):  # recites until step 3, loops until step 8, recites again at step 9
        evaluated.append(step)
        recital = 80.0 if step < 3 or step == 9 else 10.0
        return {"verbmem_f": recital, "degenerate": 30.0 if step < 8 else 5.0, "nll_general": 1.0}

    method = dataclasses.replace(METHOD, loops_every=2)
    made = make(method=method, max_steps=30, evaluate_every=10)
    outcome, _ = run(tmp_path, evaluate, rule, made=made)
    assert (outcome.step, outcome.rule) == (11, "stop")
    assert evaluated == [10, 2, 4, 3, 5, 7, 9, 11]


def test_the_first_model_there_is_kept_if_all_later_ones_loop(tmp_path):
    rule = stop_at("verbmem_f", "<=", 20.0, most_degenerate=5.0)
    evaluated = []

    def evaluate(step):
        evaluated.append(step)
        return {"verbmem_f": 80.0 if step < 3 else 10.0, "degenerate": 30.0, "nll_general": 1.0}

    method = dataclasses.replace(METHOD, loops_every=2)
    outcome, weights = run(tmp_path / "a", evaluate, rule, made=make(method=method, max_steps=30, evaluate_every=5))
    assert (outcome.step, outcome.rule) == (3, "stop")
    assert evaluated == [5, 1, 2, 3, 5, 7, 9, 3]  # it waits for five steps
    assert "later ones loop too" in outcome.reason
    _, straight = run(tmp_path / "b", made=make(method=method, max_steps=3))
    assert same(weights, straight)


def test_loops_of_an_earlier_phase_are_left_behind(tmp_path):
    rows = []
    first = dataclasses.replace(METHOD, loops_every=1, steps=2)
    run(tmp_path, made=make(method=METHOD, phases=(first,), max_steps=4), log=rows.append)
    assert [row["loops"] > 0 for row in rows] == [True, True, False, False]


def test_a_repeated_run_is_identical_and_another_seed_is_not(tmp_path):
    first, second, other = (run(tmp_path / str(n), made=make(seed=seed))[1] for n, seed in enumerate((0, 0, 1)))
    assert same(first, second)
    assert not same(first, other)


@pytest.mark.parametrize("method", [METHOD, pytest.param(ADAMW, marks=pytest.mark.slow)])
def test_a_paused_run_goes_on_bit_for_bit(tmp_path, method):
    phases = (
        Method(loss="nlul", token_share=0.25, loops_every=4, optimizer="adamw", alpha=0.5, lr=1e-3, warmup=0, steps=4),
    )
    _, expected = run(tmp_path / "whole", made=make(method=method, phases=phases))
    for pause_after in (1, 3, 6, 11):
        steps = []
        folder = tmp_path / f"paused_{pause_after}"
        with pytest.raises(Interrupted):
            run(
                folder,
                made=make(method=method, phases=phases),
                log=steps.append,
                paused=lambda n=pause_after, s=steps: len(s) >= n,
            )
        _, weights = run(folder, made=make(method=method, phases=phases), resume=True)
        assert same(weights, expected), f"paused after step {pause_after}"


def test_checkpoints_are_pruned_but_the_one_to_go_back_to_stays(tmp_path):
    run(tmp_path, made=make(max_steps=11, evaluate_every=10, checkpoint_every=2))
    kept = Checkpoints(tmp_path / "checkpoints", 2).steps()
    assert 10 in kept
    assert len(kept) <= 3


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_it_ends_with_the_same_bytes(tmp_path):
    """kill -9 of a whole `forget` job; see kill_worker.py, which can also be run with more kills."""
    worker = Path(__file__).with_name("kill_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker), str(tmp_path), "--kills", "2", "--seed", "0"],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["kills"] == 2
    assert report["identical"]


# ---- the baselines' optimizer -------------------------------------------------------------------------


def test_anchored_adamw_is_adamw_with_clipping_and_warm_up():
    torch.manual_seed(0)
    mine, theirs = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    anchored = AnchoredAdamW([mine], lr=0.1, warmup=3, clip=1.0)
    plain = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    rates = []
    for step in range(10):
        gradient = 3 * torch.randn(5)
        mine.grad, theirs.grad = gradient.clone(), gradient.clone()
        torch.nn.utils.clip_grad_norm_([theirs], 1.0)
        plain.param_groups[0]["lr"] = anchored.learning_rate(step)
        anchored.step()
        plain.step()
        rates.append(anchored.param_groups[0]["lr"])
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    assert rates == pytest.approx([0.01, 0.01, 0.01, 0.01, 0.04, 0.07, 0.1, 0.1, 0.1, 0.1])
    with anchored.teacher_weights():
        assert torch.equal(mine, torch.ones(5))
        with pytest.raises(RuntimeError, match="inside teacher_weights"):
            anchored.step()
    assert not torch.equal(mine, torch.ones(5))
    mine.grad = torch.full((5,), float("nan"))
    with pytest.raises(FloatingPointError, match="refused"):
        anchored.step()


def test_a_method_without_numbers_is_refused():
    with pytest.raises(ValueError, match="lr is None: measure it first"):
        make_optimizer(
            [torch.nn.Parameter(torch.ones(1))],
            Method(optimizer="mean_teacher", loss="nlul", token_share=0.25, loops_every=4),
        )


@pytest.mark.parametrize("optimizer", ["mean_teacher", "adamw"])
def test_gradients_do_not_outlive_their_step(optimizer):
    model, parameters, forget, general, config = make()
    method = dataclasses.replace(METHOD, optimizer=optimizer)
    row = one_step(model, make_optimizer(parameters.values(), method), forget, general, method, config)
    assert row["grad_norm"] > 0
    assert all(p.grad is None for p in parameters.values())


def test_precision_is_set_for_a_pass_and_put_back():
    before = torch.get_float32_matmul_precision()
    made = make(precision=Precision(forget="tf32", divergence="fp32"))
    model, parameters, forget, general, config = made
    one_step(model, make_optimizer(parameters.values(), METHOD), forget, general, METHOD, config)
    assert torch.get_float32_matmul_precision() == before
