import copy
import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch

import unteach
from steps import FORGET, GENERAL, held_to, mean_teacher, one_step, pull_of, recital, same, unlearned
from tiny_models import small_tokenizer, tiny_model
from unteach.config import ForgetConfig, Method, Precision
from unteach.data import ForgetBatches, GeneralText
from unteach.errors import Interrupted
from unteach.method.losses import LOSSES
from unteach.method.optimizers import AnchoredAdamW, make_optimizer
from unteach.method.vocab_head import Head, token_log_odds
from unteach.models import trainable_parameters
from unteach.training import loop
from unteach.training.checkpoint import Checkpoints
from unteach.training.passes import LogOddsOfModel, Reading, forget_term, held_term, hidden_states
from unteach.training.stopping import Condition, StopRule
from unteach.training.texts import Texts

METHOD = mean_teacher()
ADAMW = Method(loss="nlul", optimizer="adamw", alpha=0.5, lr=1e-3, warmup=2, token_share=1.0, loops_every=0)


def make(dtype=torch.float32, trainable="blocks", **settings):
    model, tokenizer = tiny_model("llama").to(dtype), small_tokenizer()
    settings = {"method": METHOD, "batch": 8, "general_batch": 8, "max_steps": 12, "evaluate_every": 5} | settings
    config = ForgetConfig(model="tiny", **settings)
    forget = ForgetBatches([tokenizer(text)["input_ids"] for text in FORGET], config.seed)
    general = GeneralText(GENERAL, tokenizer, tokens=24, seed=config.seed)
    return model, trainable_parameters(model, trainable), forget, general, config


def run(folder, evaluate=lambda step: {"verbmem_f": 50.0, "nll_general": 1.0}, rule=None, made=None, **options):
    model, parameters, forget, general, config = made or make()
    return unlearned(folder, model, parameters, Texts(forget, general), config, evaluate, rule, **options)


def displacement(folder, **settings):
    """The way of all weights in a run, and its log rows."""
    made, rows = make(**settings), []
    start = {name: p.detach().clone() for name, p in made[1].items()}
    _, end = run(folder, made=made, log=rows.append)
    return torch.cat([(end[name] - start[name]).flatten() for name in end]), rows


PAPER = ("ll", "npo", "it", "it_forward", "nlul", "match")


@pytest.mark.parametrize(
    ("loss", "divergence"),
    [
        *((name, "kl") for name in (*PAPER, "simnpo", "ce_u", "undial")),
        *(("nlul", n) for n in unteach.DIVERGENCES if n != "kl"),
    ],
)
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_gradient_is_that_of_the_full_logit_definitions(loss, divergence, share):
    """Of all tokens, or of some that are chosen."""
    model, parameters, forget, general, _ = make(torch.float64)
    base, head = (tiny := tiny_model("llama", seed=5).double()), Head.of(tiny)
    sequences, chunks = forget.batch(0, 4), general.batch(0, 4)
    lengths = [len(sequence) - 1 for sequence in sequences]
    with torch.no_grad():
        hidden, labels, _ = hidden_states(base, sequences)
        log_odds = token_log_odds(hidden, labels, head)
        taught = hidden_states(base, chunks)[0]
    chosen = torch.rand(sum(lengths), generator=torch.Generator().manual_seed(0)) < share
    known = {"base_log_odds": log_odds.split(lengths), "base": Reading([hidden], head)}
    known = {name: value for name, value in known.items() if LOSSES[loss].base}
    known |= {"chosen": chosen.split(lengths)} if share < 1 else {}
    value, nll, tokens = forget_term(model, pull_of(sequences, loss, **known), 0)
    penalty, _ = held_term(model, held_to(chunks, divergence, taught, head), 0)
    mine = torch.autograd.grad(0.3 * value + penalty, list(parameters.values()))

    ids, lengths = unteach.data.pad(sequences)
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    seen = mask[:, 1:].masked_scatter(mask[:, 1:], chosen)
    logits, base_logits = (m(ids, attention_mask=mask.long()).logits[:, :-1] for m in (model, base))
    extra = {"base_logits": base_logits} if LOSSES[loss].needs_base else {}
    expected = unteach.forget_loss(loss, logits, ids[:, 1:], seen, **extra)
    chunk_ids = torch.tensor(chunks)
    general_logits = [m(chunk_ids).logits[:, :-1] for m in (model, base)]
    everywhere = torch.ones(general_logits[0].shape[:2], dtype=torch.bool)
    expected_penalty = unteach.divergence(divergence, *general_logits, everywhere)
    theirs = torch.autograd.grad(0.3 * expected + expected_penalty, list(parameters.values()))
    assert value.item() == pytest.approx(expected.item(), rel=1e-9)
    assert penalty.item() == pytest.approx(expected_penalty.item(), rel=1e-9)
    assert tokens == int(seen.sum())
    whole = model(ids, attention_mask=mask.long(), labels=ids.masked_fill(~mask, -100)).loss
    assert nll.item() == pytest.approx(whole.item())
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "dtype", "tolerance"),
    [
        (METHOD, torch.float32, 1e-3),
        (METHOD, torch.float64, 1e-9),
        (ADAMW, torch.float64, 1e-9),
        (mean_teacher(loss="npo"), torch.float64, 1e-9),
        (mean_teacher(token_share=0.3, loops_every=2), torch.float64, 1e-9),
    ],
)
def test_result_does_not_depend_on_the_micro_batch(tmp_path, method, dtype, tolerance):
    settings = {"dtype": dtype, "method": method, "max_steps": 5}
    (ways, rows), (others, _) = (displacement(tmp_path / str(n), micro_batch=n, **settings) for n in (1, 8))
    assert (ways - others).norm() <= tolerance * others.norm()
    assert others.norm() > 0
    assert any(row["loops"] for row in rows) == bool(method.loops_every), "the loops must play a part"


def test_frozen_parts_do_not_change_and_all_can_be_trained(tmp_path):
    for trainable in ("blocks", "all"):
        made = make(trainable=trainable, max_steps=3)
        start = copy.deepcopy(made[0].state_dict())
        run(tmp_path / trainable, made=made)
        changed = {name for name, value in made[0].state_dict().items() if not torch.equal(value, start[name])}
        assert changed == set(made[1])
        frozen = any("embed" in name or "norm" in name or "lm_head" in name for name in changed)
        assert (changed == set(start)) == frozen == (trainable == "all")


def test_unlearning_raises_the_nll_of_the_forget_text(tmp_path):
    numbers = {"alpha": 2.0, "lr": 0.05, "damping": 0.05, "clip": None}
    method = mean_teacher(loss="ll", token_share=0.25, loops_every=4, **numbers)
    _, rows = displacement(tmp_path, max_steps=20, evaluate_every=20, method=method)
    assert rows[-1]["nll_forget"] > rows[0]["nll_forget"] + 0.1
    assert rows[0]["divergence"] == 0.0, "student and teacher start equal"
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert all(row["grad_norm"] > 0 and 0 < row["clip_factor"] <= 1 for row in rows)


def test_log_odds_of_the_model_before_the_run_and_its_least_sure_tokens():
    model, _, forget, _, config = make()
    initial = LogOddsOfModel(model, forget.sequences, config)
    hidden, labels, _ = hidden_states(model, [forget.sequences[3], forget.sequences[1]])
    expected = token_log_odds(hidden, labels, Head.of(model)).detach()
    torch.testing.assert_close(torch.cat([initial.values[3], initial.values[1]]), expected, rtol=1e-5, atol=1e-5)
    for share in (0.1, 0.5, 1.0):
        for number, part in zip([2, 0], initial.least_sure([2, 0], share), strict=True):
            values = initial.values[number]
            assert len(part) == len(forget.sequences[number]) - 1
            assert int(part.sum()) == max(1, round(share * len(values)))
            assert share == 1 or values[part].max() <= values[~part].min()


@pytest.mark.parametrize("optimizer", ["mean_teacher", "adamw"])
def test_gradients_do_not_outlive_their_step_nor_its_precision(optimizer):
    before = torch.get_float32_matmul_precision()
    model, parameters, forget, general, config = make(precision=Precision(forget="tf32", divergence="fp32"))
    method = dataclasses.replace(METHOD, optimizer=optimizer)
    row = one_step(model, make_optimizer(parameters.values(), method), forget, general, method, config)
    assert row["grad_norm"] > 0
    assert all(p.grad is None for p in parameters.values())
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("crossing", [1, 5, 8, 11])
def test_the_first_model_that_crosses_is_kept(tmp_path, crossing):
    rows = []

    def rewind(step):
        rows[:] = [row for row in rows if row["step"] <= step]

    def evaluate(step):
        return {"verbmem_f": 80.0 if step < crossing else 10.0, "nll_general": 1.0}

    outcome, weights = run(tmp_path / "run", evaluate, recital(), log=rows.append, rewind=rewind)
    assert (outcome.step, outcome.rule) == (crossing, "stop")
    assert outcome.scores["verbmem_f"] == 10.0
    assert [row["step"] for row in rows] == list(range(1, crossing + 1))
    _, expected = run(tmp_path / "plain", made=make(max_steps=crossing))
    assert same(weights, expected), "going back and evaluating more often makes the same steps again"


def test_where_other_passages_deny_it_a_run_goes_on_also_after_a_pause(tmp_path):
    """Recital falls by eight points a step and is 21 higher elsewhere: 20 is reached there at step 12, seen at 13."""

    def went(folder, **options):
        at = []

        def evaluate(step):
            at[:] = [step]
            return {"verbmem_f": 90.0 - 8 * step, "nll_general": 1.0}

        def confirm():
            return {"verbmem_f": over} if (over := 90.0 - 8 * at[0] + 21 - 20.0) > 0 else {}

        return run(tmp_path / folder, evaluate, recital(), make(max_steps=20), confirm=confirm, **options)

    outcome, weights = went("whole")
    assert (outcome.step, outcome.rule) == (13, "stop")
    assert outcome.reason.endswith("on other passages, too")
    _, expected = run(tmp_path / "plain", made=make(max_steps=13))
    assert same(weights, expected), "the steps are those of a run that never looked"
    steps = []
    with pytest.raises(Interrupted):
        went("paused", log=steps.append, paused=lambda: steps[-1]["step"] == 10)
    again, resumed = went("paused", resume=True)
    assert (again.step, again.reason) == (outcome.step, outcome.reason)
    assert same(weights, resumed)


def test_ended_by_hand_a_run_keeps_its_best_model_and_takes_no_step(tmp_path):
    rows = []
    scores = {3: 40.0, 6: 60.0, 7: 70.0}
    made = make(evaluate_every=3)
    options = {"evaluate": lambda step: {"verbmem_f": scores[step], "nll_general": 1.0}, "rule": recital()}
    with pytest.raises(Interrupted):
        run(tmp_path, made=made, log=rows.append, paused=lambda: len(rows) >= 7, **options)
    outcome, weights = run(tmp_path, made=make(evaluate_every=3), log=rows.append, finish=True, **options)
    assert (outcome.step, outcome.rule, len(rows)) == (3, "finished", 7)
    assert same(weights, run(tmp_path / "plain", made=make(max_steps=3))[1])


def test_a_breaking_model_ends_the_run_with_a_reason(tmp_path):
    outcome, _ = run(tmp_path, lambda step: {"verbmem_f": 80.0, "nll_general": 1.0 + 0.2 * step})
    assert (outcome.rule, outcome.step) == ("utility_floor", 5)
    assert "costs 1.00 nats per token more than before" in outcome.reason


def test_a_run_that_stands_still_is_pulled_harder_also_after_a_pause_and_ends_with_its_best_model(tmp_path):
    def evaluate(step):
        return {"verbmem_f": 50.0 + abs(step - 1), "nll_general": 1.0}

    def went(folder, **options):
        rows, said = [], []
        made = make(max_steps=40, evaluate_every=1)
        options = {"log": rows.append, "say": said.append, "patience": 3} | options
        return (*run(tmp_path / folder, evaluate, recital(), made, **options), rows, said)

    outcome, weights, rows, said = went("whole")
    assert (outcome.step, outcome.rule, outcome.raised) == (1, "plateau", 4)
    assert [row["step"] for row in rows] == list(range(1, 8)), "the log tells the whole way"
    assert [row["verbmem_f"] for row in rows] == [evaluate(n)["verbmem_f"] for n in range(1, 8)]
    assert [row.get("alpha", METHOD.alpha) for row in rows] == [METHOD.alpha] * 4 + [2 * METHOD.alpha] * 3
    assert len(said) == 1
    steps = []
    with pytest.raises(Interrupted):
        went("paused", log=steps.append, paused=lambda: len(steps) >= 5)
    again, resumed, rest, _ = went("paused", resume=True)
    assert (again.step, again.rule, again.raised) == (1, "plateau", 4)
    assert same(weights, resumed)
    timing = ("seconds", "tokens_per_second")
    assert [{k: v for k, v in row.items() if k not in timing} for row in steps + rest] == [
        {k: v for k, v in row.items() if k not in timing} for row in rows
    ]


def test_time_is_counted_by_what_it_was_spent_on_in_all_parts_of_a_run(tmp_path, monkeypatch):
    """By a clock on which a step takes one second, a look ten and all before them three; steps made again count."""
    now, rows = 0.0, []

    def passes(seconds, result=None):
        nonlocal now
        now += seconds
        return result

    def went(folder, **options):
        started = now
        passes(3)
        evaluate = lambda step: passes(10, {"verbmem_f": 80.0 if step < 8 else 10.0, "nll_general": 1.0})  # noqa: E731
        options = {"log": rows.append, "started": started} | options
        return run(tmp_path / folder, evaluate, recital(), **options)[0].spent

    train_step = loop.train_step
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(loop, "train_step", lambda *given, **more: passes(1, train_step(*given, **more)))
    steps, looks = 5 + 5 + 3, 10 * len([5, 10, 6, 7, 8])
    assert went("whole") == {"steps": steps, "looks": looks, "earlier": 0}
    for pause_after, earlier in ((3, 3 + 3), (5, 3 + 5 + 10), (7, 3 + 7 + 10), (12, 3 + 12 + 40)):
        rows.clear()
        with pytest.raises(Interrupted):
            went(f"paused_{pause_after}", paused=lambda n=pause_after: len(rows) >= n)
        passes(1000)  # nobody works on it
        assert went(f"paused_{pause_after}", resume=True) == {"steps": steps, "looks": looks, "earlier": earlier}


AUC = "auc_forget_holdout_min_40"


def grown(folder, budget, aucs=None, **options):
    """The rows of a run whose α grows by a tenth a step, looked at every second step, and its weights."""
    rule = StopRule((Condition("verbmem_f", "<=", 20.0), Condition(AUC, ">=", 0.5, limit=0.55)))
    method, rows = mean_teacher(alpha_growth=0.1, hold_budget=budget), []

    def evaluate(step):
        return {"verbmem_f": 90.0, "nll_general": 1.0, AUC: (aucs or {}).get(step, 0.1)}

    made = make(method=method, max_steps=10, evaluate_every=2)
    _, weights = run(folder, evaluate, rule, made, **{"log": rows.append} | options)
    return rows, weights


def factors(rows):
    """What α was multiplied by from each step to the next."""
    return [round(second["alpha"] / first["alpha"], 6) for first, second in itertools.pairwise(rows)]


UP, DOWN = 1.1, round(1 / 1.1, 6)


def test_alpha_grows_within_the_budget_and_shrinks_over_it(tmp_path):
    rows, _ = grown(tmp_path / "within", 1e9)
    assert rows[0]["alpha"] == METHOD.alpha
    assert factors(rows) == [UP] * 9
    assert factors(grown(tmp_path / "over", 0.0)[0]) == [DOWN] * 9
    most = sorted(row["divergence"] for row in rows)[5]
    between, _ = grown(tmp_path / "between", most)
    assert factors(between) == [UP if row["divergence"] < most else DOWN for row in between[:-1]]
    assert {*factors(between)} == {UP, DOWN}


def test_alpha_falls_beyond_parity_and_rises_again_before_it_also_after_a_pause(tmp_path):
    """Looks at steps 4 and 6 find the AUC too high; the steps after them make α smaller."""
    aucs = {4: 0.7, 6: 0.56, 8: 0.52}
    rows, expected = grown(tmp_path / "whole", 1e9, aucs)
    assert factors(rows) == [UP] * 4 + [DOWN] * 4 + [UP]
    for pause_after in (3, 5, 6, 7):
        steps, folder = [], tmp_path / f"paused_{pause_after}"
        with pytest.raises(Interrupted):
            grown(folder, 1e9, aucs, log=steps.append, paused=lambda n=pause_after, s=steps: len(s) >= n)
        rest, weights = grown(folder, 1e9, aucs, resume=True)
        assert [row["alpha"] for row in steps + rest] == [row["alpha"] for row in rows]
        assert same(weights, expected), f"paused after step {pause_after}"


def test_the_first_model_there_is_kept_if_all_later_ones_loop(tmp_path):
    evaluated = []

    def evaluate(step):
        evaluated.append(step)
        return {"verbmem_f": 80.0 if step < 3 else 10.0, "degenerate": 30.0, "nll_general": 1.0}

    method = dataclasses.replace(METHOD, loops_every=2)
    made = make(method=method, max_steps=30, evaluate_every=5)
    outcome, weights = run(tmp_path / "a", evaluate, recital(5.0), made=made)
    assert (outcome.step, outcome.rule) == (3, "stop")
    assert evaluated == [5, 1, 2, 3, 5, 7, 9, 3]  # it waits for five steps
    assert "later ones loop too" in outcome.reason
    _, straight = run(tmp_path / "b", made=make(method=method, max_steps=3))
    assert same(weights, straight)


def test_loops_of_an_earlier_phase_are_left_behind(tmp_path):
    first = dataclasses.replace(METHOD, loops_every=1, steps=2)
    _, rows = displacement(tmp_path, phases=(first,), max_steps=4)
    assert [row["loops"] > 0 for row in rows] == [True, True, False, False]


FOUND = dataclasses.replace(METHOD, loops_every=2, loops_once_found=True)
"""Loops are unlearned every two steps, once looks have found them."""


def looked_at(folder, method=FOUND, loops_from=3, **options):
    """Log rows and weights of a run of 12 steps, looked at every two: of what it writes 30 % loop from a step on."""
    rows, private = [], options.pop("private", False)

    def evaluate(step):
        loops = {} if loops_from is None else {"degenerate": 30.0 if step >= loops_from else 0.0}
        return {"verbmem_f": 50.0, "nll_general": 1.0} | loops

    made = make(method=method, max_steps=12, evaluate_every=2, private=private)
    _, weights = run(folder, evaluate, made=made, **({"log": rows.append} | options))
    return rows, weights


def losses(rows):
    return [row["forget_loss"] for row in rows]


def test_loops_are_unlearned_from_the_look_on_that_finds_them(tmp_path):
    """Looks at steps 4 and 6 are the first two in a row; before them the run is that which never does it."""
    said = []
    rows, weights = looked_at(tmp_path / "found", say=said.append)
    assert [row["loops"] > 0 for row in rows] == [False] * 6 + [True] * 6
    begins = "step 6: degenerate 30, before 1; from here on the model's own loops are unlearned every 2 steps"
    assert said == [begins]
    never, others = looked_at(tmp_path / "never", METHOD, say=said.append)
    assert said == [begins], "0 by hand stays 0"
    assert not any(row["loops"] for row in never)
    assert losses(rows)[:7] == losses(never)[:7]
    assert losses(rows)[7:] != losses(never)[7:]
    assert not same(weights, others)


@pytest.mark.parametrize("loops_from", [12, None], ids=["at the last look", "not measured"])
def test_where_no_looks_find_loops_a_run_has_the_same_bits(tmp_path, loops_from):
    found, never = (looked_at(tmp_path / str(m.loops_every), m, loops_from) for m in (FOUND, METHOD))
    assert losses(found[0]) == losses(never[0])
    assert same(found[1], never[1])


@pytest.mark.parametrize("pause_after", [4, 5, 6, 7, 9])
def test_a_run_that_found_loops_goes_on_bit_for_bit(tmp_path, pause_after):
    rows, expected = looked_at(tmp_path / "whole")
    steps, folder, said = [], tmp_path / "paused", []
    with pytest.raises(Interrupted):
        looked_at(folder, log=steps.append, paused=lambda: len(steps) >= pause_after)
    rest, weights = looked_at(folder, resume=True, say=said.append)
    assert [row["loops"] for row in steps + rest] == [row["loops"] for row in rows]
    assert same(weights, expected)
    assert sum("own loops" in line for line in said) == (pause_after < 6), "said once"


def test_a_private_run_that_found_loops_looks_for_them_anew(tmp_path):
    steps = []
    with pytest.raises(Interrupted):
        looked_at(tmp_path, private=True, log=steps.append, paused=lambda: len(steps) >= 7)
    rest, _ = looked_at(tmp_path, private=True, resume=True)
    assert all(row["loops"] for row in rest)


def test_a_checkpoint_of_an_older_version_has_found_no_loops(tmp_path, monkeypatch):
    steps, load = [], Checkpoints.load
    _, expected = looked_at(tmp_path / "whole")
    with pytest.raises(Interrupted):
        looked_at(tmp_path / "paused", log=steps.append, paused=lambda: len(steps) >= 4)

    def older(*arguments, **options):
        content = load(*arguments, **options)
        assert content["position"].pop("loops_found") is False
        return content

    monkeypatch.setattr(Checkpoints, "load", older)
    assert same(looked_at(tmp_path / "paused", resume=True)[1], expected)


def test_on_going_back_loops_are_yet_to_be_found_and_then_waited_for(tmp_path):
    """The look at step 8 finds them and the rule met: back at 4 there were none; from 5 they are unlearned."""
    evaluated, said = [], []

    def evaluate(step):
        evaluated.append(step)
        return {"verbmem_f": 80.0 if step < 5 else 10.0, "degenerate": 30.0, "nll_general": 1.0}

    made = make(method=FOUND, max_steps=30, evaluate_every=4)
    outcome, weights = run(tmp_path / "a", evaluate, recital(6.0), made=made, say=said.append)
    assert evaluated == [4, 8, 5, 7, 9, 5], "every two steps, as loops are looked for"
    assert (outcome.step, outcome.rule) == (5, "stop")
    assert [line.partition(":")[0] for line in said] == ["step 5"], "said once"
    _, straight = run(tmp_path / "b", made=make(max_steps=5))
    assert same(weights, straight)


def test_another_seed_is_another_run(tmp_path):
    first, other = (run(tmp_path / str(seed), made=make(seed=seed, max_steps=3))[1] for seed in (0, 1))
    assert not same(first, other)


LOOPING = mean_teacher(token_share=0.3, loops_every=3)


@pytest.mark.parametrize(
    "method", [METHOD, *(pytest.param(other, marks=pytest.mark.slow) for other in (LOOPING, ADAMW))]
)
def test_a_paused_run_goes_on_bit_for_bit(tmp_path, method):
    numbers = {"alpha": 0.5, "lr": 1e-3, "warmup": 0, "steps": 3}
    first = Method(loss="nlul", token_share=0.25, loops_every=4, optimizer="adamw", **numbers)
    settings = {"method": method, "phases": (first,), "max_steps": 8}
    _, expected = run(tmp_path / "whole", made=make(**settings))
    for pause_after in (1, 4, 6):
        steps, folder = [], tmp_path / f"paused_{pause_after}"
        with pytest.raises(Interrupted):
            run(folder, made=make(**settings), log=steps.append, paused=lambda n=pause_after, s=steps: len(s) >= n)
        _, weights = run(folder, made=make(**settings), resume=True)
        assert same(weights, expected), f"paused after step {pause_after}"


def test_checkpoints_are_pruned_but_the_one_to_go_back_to_stays(tmp_path):
    run(tmp_path, made=make(max_steps=11, evaluate_every=10, checkpoint_every=2))
    kept = Checkpoints(tmp_path / "checkpoints", 2).steps()
    assert 10 in kept
    assert len(kept) <= 3


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
    cooling = AnchoredAdamW([mine], lr=0.1, warmup=1, cooldown=4)
    assert [cooling.learning_rate(n) for n in range(8)] == pytest.approx(
        [0.01, 0.01, 0.1, 0.0775, 0.055, 0.0325, 0.01, 0.01]
    )
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
        make_optimizer([torch.nn.Parameter(torch.ones(1))], mean_teacher(lr=None))
