"""The goal of ``match`` is the line that never-seen words lie on: against NumPy's fit, and as methods are given it."""

import dataclasses

import numpy as np
import pytest
import torch

from steps import logits_of
from tiny_models import SENTENCES, small_tokenizer, tiny_model
from unteach.config import ForgetConfig, Method
from unteach.data import Documents, tokenise
from unteach.errors import InputError
from unteach.method.losses import token_log_odds
from unteach.training.goal import FEWEST_TOKENS, MOST_SEQUENCES, line_of_never_seen, wants_line, with_line

CONFIG = ForgetConfig(
    model="m", keep="k", base="b", holdout="h", batch=4, device="cpu", method=Method(loss="match", goal="never_seen")
)
UNSEEN = [f"{' '.join(SENTENCES[n % 3].split()[n % 5 :])} Number {n}." for n in range(40)]


def sequences():
    tokenizer = small_tokenizer()
    return [tokenizer(text)["input_ids"][: 8 + n % 30] for n, text in enumerate(UNSEEN)]


def log_odds(model):
    """Of every predicted token, sequence by sequence, in float64."""
    found = []
    for sequence in sequences():
        with torch.no_grad():
            logits, labels, mask = logits_of(model, [sequence])
        found.append(token_log_odds(logits[mask].double(), labels[mask]))
    return torch.cat(found).numpy()


def test_the_line_is_that_of_least_squares():
    model, base = tiny_model("llama"), tiny_model("llama", seed=5)
    slope, margin = np.polyfit(log_odds(base), log_odds(model), 1)
    found = line_of_never_seen(model, base, sequences(), CONFIG)
    assert found == pytest.approx({"margin": margin, "slope": slope}, rel=1e-4)


def test_a_model_that_learned_nothing_keeps_the_base_models_odds():
    model = tiny_model("llama")
    found = line_of_never_seen(model, model, sequences(), CONFIG)
    assert found == pytest.approx({"margin": 0.0, "slope": 1.0}, abs=1e-9)


def test_a_line_needs_words_that_differ():
    model = tiny_model("llama")
    few = sequences()[: FEWEST_TOKENS // 40]
    assert sum(len(sequence) - 1 for sequence in few) < FEWEST_TOKENS
    assert line_of_never_seen(model, tiny_model("llama", seed=5), few, CONFIG) is None
    alike = tiny_model("llama")
    with torch.no_grad():
        alike.lm_head.weight.zero_()  # every token is as likely as every other
    assert line_of_never_seen(model, alike, sequences(), CONFIG) is None


def test_numbers_go_to_the_methods_that_want_them_and_given_ones_stay():
    model, base, said = tiny_model("llama"), tiny_model("llama", seed=5), []
    unseen = tokenise(Documents("unseen", UNSEEN), small_tokenizer(), mode="chunk", max_tokens=48)
    assert len(unseen.sequences) < MOST_SEQUENCES
    by_hand = Method(loss="match", goal="never_seen", loss_options={"margin": 0.5}, steps=3)
    config = dataclasses.replace(CONFIG, phases=(by_hand,), method=Method(loss="match", goal="never_seen"))
    assert wants_line(config)
    found = with_line(model, base, unseen, config, said.append)
    assert found.phases == (by_hand,)
    line = line_of_never_seen(model, base, list(unseen.sequences), CONFIG)
    assert found.method.loss_options == pytest.approx(line, rel=1e-4), "in whatever order they are read"
    assert not wants_line(found)
    assert [line[:20] for line in said] == ["goal:    as never-se"]
    short = tokenise(Documents("unseen", UNSEEN[:3]), small_tokenizer(), mode="chunk", max_tokens=48)
    assert with_line(model, base, short, config, said.append) == config
    assert f"too few words in holdout documents, {FEWEST_TOKENS} tokens are needed" in said[-1]


@pytest.mark.parametrize(
    ("method", "given", "goal"),
    [
        ({}, {}, "never_seen"),
        ({}, {"holdout": None}, "base"),
        ({}, {"base": None}, "base"),
        ({}, {"keep": None}, "base"),
        ({"goal": "base"}, {}, "base"),
        ({"loss": "match", "loss_options": {"pull": "parity"}}, {}, "never_seen"),
        ({"loss": "match", "loss_options": {"margin": 1.0}}, {}, "base"),
        ({"loss": "match", "loss_options": {"slope": 0.5}}, {}, "base"),
        ({"loss": "match", "optimizer": "adamw"}, {}, "base"),
        ({"loss": "match", "optimizer": "adamw", "goal": "never_seen"}, {}, "never_seen"),
    ],
)
def test_the_goal_is_chosen_from_what_is_given(method, given, goal):
    config = dataclasses.replace(CONFIG, method=Method(), **given)
    config = dataclasses.replace(config, method=Method(**method)).chosen()
    assert config.method.goal == goal
    assert wants_line(config) == (goal == "never_seen")
    assert config.chosen() == config, "a resumed run chooses again"


@pytest.mark.parametrize("given", [{"holdout": None}, {"base": None}, {"keep": None}, {"method": {"loss": "npo"}}])
def test_a_goal_that_cannot_be_measured_is_refused(given):
    method = Method(**given.get("method", {}), goal="never_seen")
    with pytest.raises(InputError, match="goal is 'never_seen': it needs loss match, base, and holdout to measure"):
        dataclasses.replace(CONFIG, **given | {"method": method})
