"""Which tokens the forget loss looks at, and the model's own loops that are forgotten with the documents."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from test_loop import METHOD, make, run, same

import unteach
from steps import pull_of
from unteach.errors import Interrupted
from unteach.evaluation.formulas import longest_loop
from unteach.method.losses import LOSSES
from unteach.method.vocab_head import Head
from unteach.training.passes import LogOddsOfModel, Reading, forget_term, hidden_states
from unteach.training.texts import COPIES, SHORTEST_LOOP, OwnLoops, find_loops


def loop_by_definition(sequence, copies, minimum):
    """The length of the longest stretch that some period explains, by trying every start and end."""
    longest = 0
    for start, end in itertools.combinations(range(len(sequence) + 1), 2):
        part = sequence[start:end]
        for period in range(1, len(part) // copies + 1):
            if len(part) >= minimum and all(a == b for a, b in zip(part, part[period:], strict=False)):
                longest = max(longest, len(part))
    return longest


@pytest.mark.parametrize("seed", range(30))
def test_longest_loop_is_the_longest_one(seed):
    sequence = np.random.default_rng(seed).integers(0, 2, 14)
    start, period, length = longest_loop(sequence, 2, 4)
    assert length == loop_by_definition(sequence.tolist(), 2, 4)
    stretch = sequence[start : start + length]
    assert (stretch[period:] == stretch[: len(stretch) - period]).all()


def test_a_loop_is_found_where_it_stands():
    assert longest_loop(np.array([9, 8, 1, 2, 3, 1, 2, 3, 1, 7]), 2, 4) == (2, 3, 7)
    assert longest_loop(np.arange(20), 2, 4) == (0, 0, 0)
    assert longest_loop(np.array([], dtype=int), 2, 4) == (0, 0, 0)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_least_sure_tokens_are_chosen(share):
    model, _, forget, _, config = make()
    initial = LogOddsOfModel(model, forget.sequences, config)
    for number, part in zip([2, 0], initial.least_sure([2, 0], share), strict=True):
        assert len(part) == len(forget.sequences[number]) - 1
        values = initial.values[number]
        assert int(part.sum()) == max(1, round(share * len(values)))
        if share < 1:
            assert values[part].max() <= values[~part].min()


@pytest.mark.parametrize("loss", list(LOSSES))
def test_only_the_chosen_tokens_make_the_loss(loss):
    model, parameters, forget, _, _ = make(torch.float64)
    base = make(torch.float64)[0]
    sequences = forget.batch(0, 3)
    tokens = [len(sequence) - 1 for sequence in sequences]
    chosen = torch.rand(sum(tokens), generator=torch.Generator().manual_seed(0)) < 0.4
    ids, lengths = unteach.data.pad(sequences)
    mask = torch.arange(1, ids.shape[1]) < lengths[:, None]
    seen = mask.masked_scatter(mask, chosen)
    logits, base_logits = (m(ids).logits[:, :-1] for m in (model, base))
    extra = {"base_logits": base_logits.detach() / 2} if LOSSES[loss].needs_base else {}
    if LOSSES[loss].rows:
        base.get_output_embeddings().weight.data /= 2
    log_odds = unteach.method.losses.token_log_odds(base_logits / 2, ids[:, 1:])[mask].detach()
    with torch.no_grad():
        reading = Reading([hidden_states(base, sequences)[0]], Head.of(base))
    expected = unteach.forget_loss(loss, logits, ids[:, 1:], seen, **extra)
    split = {"chosen": chosen.split(tokens), "base_log_odds": log_odds.split(tokens)}
    pull = pull_of(sequences, loss, **split, base=reading)
    value, nll, count = forget_term(model, pull, 0)
    assert count == int(chosen.sum())
    assert value.item() == pytest.approx(expected.item(), rel=1e-9)
    assert nll.item() == pytest.approx(forget_term(model, pull_of(sequences, "ll"), 0)[1].item())
    weights = list(parameters.values())
    for a, b in zip(torch.autograd.grad(value, weights), torch.autograd.grad(expected, weights), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-12)


def test_own_loops_are_the_repeated_copies_of_what_the_model_writes():
    model, _, forget, _, _ = make()
    loops = find_loops(model, forget, step=3)
    assert loops.sequences, "an untrained model loops"
    again = find_loops(model, forget, step=3)
    assert again.sequences == loops.sequences
    for ids, repeated in zip(loops.sequences, loops.repeated, strict=True):
        assert len(repeated) == len(ids) - 1
        places = (repeated.nonzero().squeeze(-1) + 1).tolist()
        assert places == list(range(places[0], places[-1] + 1)), "one stretch"
        periods = [p for p in range(1, places[0] + 1) if all(ids[place] == ids[place - p] for place in places)]
        assert any(len(places) >= max((COPIES - 1) * p, SHORTEST_LOOP - p) for p in periods)
    state = OwnLoops.from_state(loops.state())
    assert state.sequences == loops.sequences
    assert all(map(torch.equal, state.repeated, loops.repeated))


def test_the_result_does_not_depend_on_the_micro_batch(tmp_path):
    method = dataclasses.replace(METHOD, token_share=0.3, loops_every=2)
    ends = []
    for micro_batch in (1, 8):
        made = make(torch.float64, method=method, micro_batch=micro_batch, max_steps=5)
        start = {name: p.detach().clone() for name, p in made[1].items()}
        rows = []
        _, end = run(tmp_path / str(micro_batch), made=made, log=rows.append)
        assert any(row["loops"] for row in rows), "the loops must play a part"
        ends.append(torch.cat([(end[name] - start[name]).flatten() for name in end]))
    assert (ends[0] - ends[1]).norm() <= 1e-9 * ends[0].norm()


def test_a_resumed_run_is_the_same(tmp_path):
    method = dataclasses.replace(METHOD, token_share=0.3, loops_every=3)
    _, whole = run(tmp_path / "whole", made=make(method=method, max_steps=8))
    steps = iter(range(100))
    with pytest.raises(Interrupted):
        run(tmp_path / "cut", made=make(method=method, max_steps=8), paused=lambda: next(steps) == 3)
    _, resumed = run(tmp_path / "cut", made=make(method=method, max_steps=8), resume=True)
    assert same(whole, resumed)
