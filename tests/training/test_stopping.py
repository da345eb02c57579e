"""The search for the first model that meets a rule, driven without a model."""

import json
import math
import random

import pytest

from steps import recital
from unteach.training.stopping import Condition, Search, StopRule, parse_rule

BEFORE = {"verbmem_f": 90.0, "nll_general": 1.0, "auc_forget_holdout_min_40": 0.01, "knowmem_f": 90.0}
AUC = "auc_forget_holdout_min_40"
PARITY = StopRule(
    (
        Condition("verbmem_f", "<=", 20.0, scale=10.0),
        Condition(AUC, ">=", 0.5, limit=0.55, scale=0.1),
        Condition("knowmem_f", "<=", 7.0, scale=10.0),
    )
)


def drive(scores_of, rule, every=10, last=30, loops_every=0, said=None, excess_of=lambda n: {}, **plateau):
    """Evaluated steps and how the search ends, for a run whose step n has the scores ``scores_of(n)``."""
    options = {"every": every, "last": last, "utility_floor": 0.5} | plateau
    search = Search(rule, BEFORE, **options)
    step, evaluated = 0, []
    while True:
        step += 1
        assert step <= last
        if not search.is_due(step):
            continue
        evaluated.append(step)
        state = json.loads(json.dumps(search.state()))  # as from a checkpoint; a new search goes on as the old would
        search = Search(rule, BEFORE, **options)
        search.restore(state)
        kept = search.steps_to_keep()
        scores = {"nll_general": 1.0} | scores_of(step)
        move = search.look(step, scores, loops_every)
        if move.rule == "stop" and move.step == step:
            move = search.confirmed(move, excess_of(step))
        if move.kind == "end":
            assert move.step == step or move.step in kept, "its checkpoint is there to go back to"
            return evaluated, move
        if said is not None and move.reason:
            said.append((step, search.pull, move.reason))
        if move.kind == "go back":
            assert move.step in search.steps_to_keep()
            search.restore(state)
            search.refine(step)
            step = move.step


@pytest.mark.parametrize("crossing", range(1, 31))
def test_the_first_step_is_found_with_few_evaluations(crossing):
    evaluated, move = drive(lambda n: {"verbmem_f": 80.0 if n < crossing else 10.0}, recital())
    assert (move.kind, move.step, move.rule) == ("end", crossing, "stop")
    assert len(evaluated) <= 3 + 5 + 2


@pytest.mark.parametrize(("elsewhere", "end"), [(0.0, 35), (1.0, 40), (5.0, 40), (8.0, 45)])
def test_where_other_passages_deny_it_the_run_goes_on_until_they_agree(elsewhere, end):
    """Recital falls by two points a step; on other passages it is higher, and 20 is what never-seen ones have."""
    said: list = []
    _, move = drive(
        lambda n: {"verbmem_f": 90.0 - 2 * n},
        recital(),
        every=10,
        last=60,
        said=said,
        excess_of=lambda n: {"verbmem_f": over} if (over := 90.0 - 2 * n + 2 * elsewhere - 20.0) > 0 else {},
    )
    assert (move.kind, move.step, move.rule) == ("end", end, "stop")
    assert [step for step, _, _ in said] == [35, 40][: (end - 35) // 5]
    assert all("other passages" in line for _, _, line in said)


def test_a_run_does_not_go_on_for_ever_nor_beyond_its_last_step_nor_where_it_may_overshoot():
    excess = {"verbmem_f": 0.5}
    falling = lambda n: {"verbmem_f": 90.0 - 2 * n}  # noqa: E731
    said: list = []
    _, move = drive(falling, recital(), last=60, said=said, excess_of=lambda n: excess)
    assert (move.step, move.rule) == (50, "stop")
    assert [step for step, _, _ in said] == [35, 40, 45], "three looks at the same excess are enough"
    _, move = drive(falling, recital(), last=60, excess_of=lambda n: {"verbmem_f": 100.0 / n})
    assert (move.step, move.rule) == (60, "stop"), "it comes nearer"
    _, move = drive(falling, recital(), last=35, excess_of=lambda n: excess)
    assert (move.step, move.rule) == (35, "stop")
    _, move = drive(falling, recital(), last=60, excess_of=lambda n: excess, narrow=False)
    assert (move.step, move.rule) == (40, "stop")
    at_once = lambda n: {"verbmem_f": 10.0, AUC: 0.52, "knowmem_f": 3.0}  # noqa: E731
    _, move = drive(at_once, PARITY, excess_of=lambda n: excess)
    assert (move.step, move.rule) == (1, "stop")


@pytest.mark.parametrize("crossing", [1, 9, 10, 11, 29])
def test_without_refinement_the_model_of_the_evaluation_is_kept(crossing):
    """As in the paper's runs: looked at every ten steps, overshoot included."""
    evaluated, move = drive(lambda n: {"verbmem_f": 80.0 if n < crossing else 10.0}, recital(), narrow=False)
    assert (move.kind, move.rule) == ("end", "stop")
    assert move.step == evaluated[-1] == -(-crossing // 10) * 10
    assert evaluated == list(range(10, move.step + 1, 10))


def test_without_refinement_nothing_is_expected_and_going_too_far_is_said():
    auc = lambda n: {"verbmem_f": 10.0, AUC: 0.02 * n, "knowmem_f": 5.0}  # noqa: E731
    evaluated, move = drive(auc, PARITY, narrow=False)
    assert evaluated == [10, 20, 30]
    assert (move.rule, move.step) == ("nearest", 30)
    assert "went too far" in move.reason


def test_a_rule_that_is_never_met_ends_at_the_last_step():
    evaluated, move = drive(lambda n: {"verbmem_f": 80.0}, recital(), last=25)
    assert evaluated == [10, 20, 25]
    assert (move.step, move.rule) == (25, "max_steps")
    assert "verbmem_f <= 20 was not met" in move.reason
    assert drive(lambda n: {}, None)[1].reason == "max_steps 30 reached"


def test_a_breaking_model_ends_the_search():
    _, move = drive(lambda n: {"verbmem_f": 80.0, "nll_general": 1 + 0.1 * n}, recital())
    assert (move.step, move.rule) == (10, "utility_floor")
    _, move = drive(lambda n: {"verbmem_f": 50.0 + n, "nll_general": 1 + 0.02 * n}, recital())  # best at step 10
    assert (move.step, move.rule) == (10, "utility_floor")
    assert "costs 0.60 nats per token more than before" in move.reason
    assert "verbmem_f <= 20 was not met; step 10 was nearest to it" in move.reason
    _, move = drive(lambda n: {"verbmem_f": 10.0, "nll_general": 3.0}, recital())
    assert move.rule == "stop"
    assert "reached 10; but general text costs 2.00 nats per token more than before" in move.reason


def test_loops_are_found_where_two_looks_in_a_row_have_more_of_them_than_before():
    def finds(*looks, before=1.0):
        """What each look finds, of a search that goes on as one from a checkpoint would."""
        known = {"nll_general": 1.0} | ({} if before is None else {"degenerate": before})
        found, state = [], None
        for number, degenerate in enumerate(looks, 1):
            search = Search(None, known, every=1, last=99, utility_floor=0.5)
            if state is not None:
                search.restore(json.loads(json.dumps(state)))
            scores = {"nll_general": 1.0} | ({} if degenerate is None else {"degenerate": degenerate})
            found.append(search.finds_loops(scores))
            search.look(number, scores, 0)
            state = search.state()
        return found

    assert finds(6.1, 6.1, 6.0, 6.1, 6.1) == [False, True, False, False, True], "more than 5 points above 1"
    assert finds(7.0, 7.0, before=2.0) == [False, False]
    assert finds(50.0, None, 50.0, 50.0) == [False, False, False, True], "not measured at one look"
    assert finds(50.0, 50.0, before=None) == [False, False], "not measured before"


def test_a_rule_about_loops_does_not_ask_for_them_where_they_were_not_measured():
    assert not recital(5.0).looping({"verbmem_f": 10.0})
    assert recital(5.0).failing({"verbmem_f": 10.0}, {}) == ""
    assert recital(5.0).looping({"degenerate": 5.1})


def test_loops_are_waited_for_and_then_the_first_model_is_taken():
    rule = recital(5.0, "never seen")
    assert str(rule) == "verbmem_f <= 20 (never seen) with degenerate <= 5"

    def scores(n, ends=99, again=None):
        return {"verbmem_f": 80.0 if n < 3 or n == again else 10.0, "degenerate": 30.0 if n < ends else 5.0}

    evaluated, move = drive(lambda n: scores(n, 8), rule, loops_every=2)
    assert (evaluated, move.step) == ([10, 2, 4, 3, 5, 7, 9], 9)
    evaluated, move = drive(lambda n: scores(n, 8, again=9), rule, loops_every=2)  # recites again at step 9
    assert (evaluated, move.step, move.rule) == ([10, 2, 4, 3, 5, 7, 9, 11], 11, "stop")
    evaluated, move = drive(scores, rule, every=5, loops_every=2)
    assert (evaluated, move.step, move.rule) == ([5, 1, 2, 3, 5, 7, 9], 3, "stop")


def test_a_run_that_stands_still_is_pulled_harder_once_and_then_ends_with_its_best_model():
    def scores_of(n):
        return {"verbmem_f": max(40.0, 90.0 - n) + (n > 60)}  # nearest from step 50 to 60

    said = []
    evaluated, move = drive(scores_of, recital(), last=500, patience=3, said=said)
    ((step, pull, reason),) = said
    assert (step, pull, evaluated[-1]) == (80, 2.0, 110)
    assert reason.startswith(
        "step 80: no nearer to the stop rule since step 50, over 3 evaluations; from here on alpha"
    )
    assert (move.step, move.rule) == (60, "plateau")
    assert "pulling harder did not help; the stop rule verbmem_f <= 20 was not met; step 60 was" in move.reason
    evaluated, move = drive(scores_of, recital(), last=500)
    assert (move.step, move.rule, evaluated[-1]) == (60, "max_steps", 500), "without patience it goes on to the end"


@pytest.mark.parametrize(
    ("options", "step", "ended"),
    [
        ({}, 30, "max_steps"),
        ({"patience": 1, "last": 90}, 30, "plateau"),
        ({"utility_floor": -1.0}, 10, "utility_floor"),
    ],
)
def test_where_the_last_model_is_to_be_kept_it_is_however_the_run_ends(options, step, ended):
    """As in the paper's runs, though an earlier one was nearer to the rule."""
    _, move = drive(lambda n: {"verbmem_f": 50.0 + n}, recital(), keep_last=True, **options)
    assert (move.step, move.rule) == (step, ended)
    assert f"; the last model, of step {step}, is kept" in move.reason
    assert (", though step 10 was nearer to it" in move.reason) == (step > 10)
    assert move.reason.endswith(f"; not met: verbmem_f {50 + step} (wanted: <= 20)")


def test_where_the_last_model_is_to_be_kept_one_that_went_too_far_is():
    auc = lambda n: {"verbmem_f": 10.0, AUC: 0.7 if n > 8 else 0.45, "knowmem_f": 5.0}  # noqa: E731
    _, move = drive(auc, PARITY, keep_last=True)
    assert (move.step, move.rule) == (9, "last"), "step 8 was nearer"
    assert "one step goes too far; the last model, of step 9, is kept, though step 8 was nearer to it" in move.reason


def test_where_the_last_model_is_to_be_kept_a_rule_that_is_met_ends_as_ever():
    falls = lambda n: {"verbmem_f": 80.0 if n < 13 else 10.0}  # noqa: E731
    assert drive(falls, recital(), keep_last=True)[1] == drive(falls, recital())[1]
    by_hand = Search(recital(), BEFORE, every=10, last=100, utility_floor=0.5, keep_last=True)
    by_hand.look(10, {"verbmem_f": 50.0, "nll_general": 1.0}, 0)
    assert by_hand.finish(13, {"verbmem_f": 60.0, "nll_general": 1.0}).step == 10, "the best, as the command says"


def test_what_still_moves_is_no_plateau():
    def falling(pace, begins, **options):
        said = []
        scores = {n: {"verbmem_f": 90.0 - pace * max(0, n - begins)} for n in range(2001)}
        _, move = drive(scores.get, recital(), patience=3, said=said, **options)
        return move.rule, [step for step, _, _ in said]

    assert falling(0.06, 0, last=2000) == ("stop", []), "slow"
    assert falling(1.0, 60, last=200, expected=90) == ("stop", []), "late, as recital falls"
    assert falling(1.0, 40, last=200) == ("stop", [30]), "later than expected"
    search = Search(recital(), BEFORE, every=20, last=500, utility_floor=0.5, patience=3)
    for step in range(10, 60, 5):  # evaluated often, because it was expected to be there soon
        assert search.look(step, {"verbmem_f": 90.0, "nll_general": 1.0}, 0).reason == ""
    assert search.look(60, {"verbmem_f": 90.0, "nll_general": 1.0}, 0).reason != ""


def test_ended_by_hand_the_best_model_so_far_is_kept():
    def ended(at, *scores):
        search = Search(recital(5.0), BEFORE, every=10, last=100, utility_floor=0.5)
        for number, value in enumerate(scores, 1):
            search.look(10 * number, {"verbmem_f": value, "degenerate": 0.0, "nll_general": 1.0}, 0)
        return lambda value: search.finish(at, {"verbmem_f": value, "degenerate": 0.0, "nll_general": 1.0})

    assert (ended(23, 60.0, 50.0)(55.0).step, ended(23, 60.0, 50.0)(45.0).step, ended(3)(90.0).step) == (20, 23, 3)
    move = ended(23, 60.0, 50.0)(55.0)
    assert move.rule == "finished"
    assert "ended by hand after step 23; the stop rule verbmem_f <= 20" in move.reason
    assert (ended(23, 60.0)(15.0).step, ended(23, 60.0)(15.0).rule) == (23, "stop")


def curves(seed, *, hide=True):
    """Scores of a run whose every metric moves steadily, each at its own pace and with its own bends.

    As in a run, knowledge is only measured where the other conditions hold (``hide``).
    """
    draws = random.Random(seed)
    centres = {name: draws.uniform(5, 60) for name in PARITY.metrics}
    widths = {name: draws.uniform(1, 12) for name in PARITY.metrics}
    bends = {name: draws.choice([0.5, 1.0, 2.0]) for name in PARITY.metrics}

    def share(name, step):  # from near 0 to near 1, rising
        return (1 / (1 + math.exp(-(step - centres[name]) / widths[name]))) ** bends[name]

    def scores_of(step):
        scores = {"verbmem_f": 90 - 80 * share("verbmem_f", step), AUC: share(AUC, step)}
        scores["knowmem_f"] = 90 - 88 * share("knowmem_f", step)
        if hide and not all(c.crossed(scores) for c in PARITY.conditions[:2]):
            del scores["knowmem_f"]
        return scores

    return scores_of


@pytest.mark.parametrize("every", [5, 20])
@pytest.mark.parametrize("seed", range(40))
def test_the_first_crossing_of_steady_curves_is_never_skipped(seed, every):
    """Wherever the forecast jumps to, the search ends at the first step at which all conditions were crossed."""
    scores_of, last = curves(seed), 120
    first = next((n for n in range(1, last + 1) if PARITY.crossed(scores_of(n))), None)
    evaluated, move = drive(scores_of, PARITY, every=every, last=last)
    assert len(evaluated) <= last / every + 30
    if first is None:
        assert move.rule == "max_steps"
        return
    assert first in evaluated
    if PARITY.distance(scores_of(first)) == 0:
        assert (move.step, move.rule) == (first, "stop")
        assert "reached" in move.reason
    else:  # the AUC has gone too far before knowledge went, or within one step
        assert move.rule == "nearest"
        assert move.step <= first
        assert "goes too far" in move.reason


def test_the_forecast_saves_evaluations_and_looks_often_near_the_end():
    def scores_of(n):
        return {"verbmem_f": max(5.0, 90 - 4 * n), AUC: 1 / (1 + math.exp(-(n - 47) / 8)), "knowmem_f": 2.0}

    evaluated, move = drive(scores_of, PARITY, every=20, last=200)
    assert (move.step, move.rule) == (47, "stop")
    assert len(evaluated) <= 10


@pytest.mark.parametrize("pace", [0.02, 0.2])
def test_overshoot_is_not_reported_as_reached(pace):
    """An AUC that jumps over its band in one step: the nearer of the two steps is kept, and the rule is not met."""
    rule = StopRule((Condition(AUC, ">=", 0.5, limit=0.55, scale=0.1),))
    for start in (0.31, 0.35, 0.39, 0.45, 0.49):
        _, move = drive(lambda n, a=start: {AUC: min(1.0, a + pace * (n - 10)) if n >= 10 else 0.1}, rule, every=10)
        values = {n: start + pace * (n - 10) for n in range(10, 30)}
        first = next(n for n, value in values.items() if value >= 0.5)
        if values[first] <= 0.55:
            assert (move.step, move.rule) == (first, "stop")
        else:
            nearest = min((first - 1, first), key=lambda n: rule.distance({AUC: values[n]}))
            assert (move.step, move.rule) == (nearest, "nearest")


def test_the_best_evaluated_step_is_kept_where_the_rule_is_never_met():
    """Knowledge comes back while the AUC still rises: the step with the smallest distance, not the last."""

    def scores_of(n):
        return {"verbmem_f": 10.0, AUC: min(0.45, 0.02 * n), "knowmem_f": 10 + abs(n - 20)}

    evaluated, move = drive(scores_of, PARITY, every=5, last=60)
    assert move.rule == "max_steps"
    distances = {n: PARITY.distance(scores_of(n)) for n in evaluated}
    assert distances[move.step] == min(distances.values())
    assert f"step {move.step} was nearest to it" in move.reason
    assert evaluated[-1] == 60


AUC_WANTED = f"{AUC} 0.45 (wanted: >= 0.5 and not beyond 0.55)"


@pytest.mark.parametrize(
    ("scores_of", "options", "step", "ended", "fails"),
    [
        (lambda n: {"verbmem_f": 10.0, AUC: 0.45, "knowmem_f": 5.0}, {}, 30, "max_steps", AUC_WANTED),
        (lambda n: {"verbmem_f": 30.0 + n, AUC: 0.45, "knowmem_f": 5.0}, {}, 10, "max_steps",
         f"verbmem_f 40 (wanted: <= 20), {AUC_WANTED}"),
        (lambda n: {"verbmem_f": 10.0, AUC: 0.45, "knowmem_f": 8.0 + n}, {"patience": 1, "last": 90}, 10, "plateau",
         f"{AUC_WANTED}, knowmem_f 18 (wanted: <= 7)"),
        (lambda n: {"verbmem_f": 10.0, AUC: 0.45, "knowmem_f": 5.0, "nll_general": 2.0}, {}, 10, "utility_floor",
         AUC_WANTED),
        (lambda n: {"verbmem_f": 10.0, AUC: 0.45}, {}, 30, "max_steps",
         f"{AUC_WANTED}, knowmem_f 90 when last measured (wanted: <= 7)"),
        (lambda n: {"verbmem_f": 10.0, AUC: 0.7 if n > 8 else 0.1, "knowmem_f": 5.0}, {}, 9, "nearest",
         f"{AUC} 0.7 (wanted: >= 0.5 and not beyond 0.55)"),
        (lambda n: {"verbmem_f": 10.0, AUC: 0.7 if n > 8 else 0.45, "knowmem_f": 5.0}, {}, 8, "nearest", AUC_WANTED),
    ],
)  # fmt: skip
def test_the_reason_names_the_conditions_that_do_not_hold_of_the_model_that_is_kept(
    scores_of, options, step, ended, fails
):
    _, move = drive(scores_of, PARITY, **options)
    assert (move.step, move.rule) == (step, ended)
    assert move.reason.partition("; not met: ")[2] == fails


def test_ended_by_hand_it_says_what_does_not_hold_too():
    def finished(verbmem, degenerate, rule=None):
        search = Search(rule or recital(5.0), BEFORE, every=10, last=100, utility_floor=0.5)
        return search.finish(3, {"verbmem_f": verbmem, "degenerate": degenerate, "nll_general": 1.0}).reason

    assert finished(45.0, 0.0).endswith("; not met: verbmem_f 45 (wanted: <= 20)")
    assert finished(15.0, 9.0).endswith("; not met: degenerate 9 (wanted: <= 5)")
    assert finished(20.0, 0.0, parse_rule("verbmem_f < 20", ["verbmem_f"])).endswith("verbmem_f 20 (wanted: < 20)")


def test_what_was_not_measured_counts_as_it_was_not_as_forgotten():
    """Knowledge is asked for at step 20 only, and found: the steps at which nobody asked are no better for that."""
    search = Search(PARITY, BEFORE, every=5, last=100, utility_floor=0.5)
    unasked = {"verbmem_f": 10.0, AUC: 0.45, "nll_general": 1.0}
    for step, scores, best in (
        (15, unasked, (15, 0.5 + 8.3)),
        (20, unasked | {AUC: 0.52, "knowmem_f": 30.0}, (20, 2.3)),
        (25, unasked, (20, 2.3)),
        (30, unasked | {AUC: 0.49}, (20, 2.3)),
    ):
        search.look(step, scores, 0)
        assert search.best == (best[0], pytest.approx(best[1]))


def test_rules_are_read_and_wrong_ones_refused():
    assert parse_rule(" verbmem_f<=20 ", {"verbmem_f": 1.0}) == recital()
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


def test_a_written_rule_may_have_several_conditions():
    rule = parse_rule("verbmem_f <= 20 and knowmem_f < 7.5", ["verbmem_f", "knowmem_f"])
    assert rule.conditions == (Condition("verbmem_f", "<=", 20.0), Condition("knowmem_f", "<", 7.5))
    evaluated, move = drive(lambda n: {"verbmem_f": 90.0 - 5 * n, "knowmem_f": 40.0 - 2 * n}, rule, last=30)
    assert (move.step, move.rule) == (17, "stop")
    assert len(evaluated) <= 10
