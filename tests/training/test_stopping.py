"""The search for the first model that meets a rule, driven without a model."""

import pytest

from unteach.training.stopping import Search, stop_at

BEFORE = {"verbmem_f": 90.0, "nll_general": 1.0}


def drive(scores_of, rule, every=10, last=30, loops_every=0):
    """Evaluated steps and how the search ends, for a run whose step n has the scores ``scores_of(n)``."""
    search = Search(rule, BEFORE, every=every, last=last, utility_floor=0.5)
    step, evaluated = 0, []
    while True:
        step += 1
        assert step <= last
        if not search.is_due(step):
            continue
        evaluated.append(step)
        state = search.state()
        move = search.look(step, {"nll_general": 1.0} | scores_of(step), loops_every)
        if move.kind == "end":
            return evaluated, move
        if move.kind == "go back":
            assert move.step in search.steps_to_keep()
            search.restore(state)
            search.refine(step)
            step = move.step


@pytest.mark.parametrize("crossing", range(1, 31))
def test_the_first_step_is_found_with_few_evaluations(crossing):
    evaluated, move = drive(lambda n: {"verbmem_f": 80.0 if n < crossing else 10.0}, stop_at("verbmem_f", "<=", 20.0))
    assert (move.kind, move.step, move.rule) == ("end", crossing, "stop")
    assert len(evaluated) <= 3 + 5 + 2


def test_a_rule_that_is_never_met_ends_at_the_last_step():
    evaluated, move = drive(lambda n: {"verbmem_f": 80.0}, stop_at("verbmem_f", "<=", 20.0), last=25)
    assert evaluated == [10, 20, 25]
    assert (move.step, move.rule) == (25, "max_steps")
    assert "was not met" in move.reason
    assert drive(lambda n: {}, None)[1].reason == "max_steps 30 reached"


def test_a_breaking_model_ends_the_search():
    _, move = drive(lambda n: {"verbmem_f": 80.0, "nll_general": 1 + 0.1 * n}, stop_at("verbmem_f", "<=", 20.0))
    assert (move.step, move.rule) == (10, "utility_floor")


def test_loops_are_waited_for_and_then_the_first_model_is_taken():
    rule = stop_at("verbmem_f", "<=", 20.0, most_degenerate=5.0)

    def scores(n, ends=99):
        return {"verbmem_f": 80.0 if n < 3 else 10.0, "degenerate": 30.0 if n < ends else 0.0}

    evaluated, move = drive(lambda n: scores(n, 8), rule, loops_every=2)
    assert (evaluated, move.step) == ([10, 2, 4, 3, 5, 7, 9], 9)
    evaluated, move = drive(scores, rule, every=5, loops_every=2)
    assert (move.step, move.rule) == (3, "stop")
    assert evaluated == [5, 1, 2, 3, 5, 7, 9]
