"""The goal of ``match`` is the line that never-seen words lie on: against NumPy's fit, and as methods are given it."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from steps import learned, logits_of
from tiny_models import SENTENCES, small_tokenizer, tiny_model
from unteach.config import ForgetConfig, Method
from unteach.data import Documents, ForgetBatches, tokenise
from unteach.errors import InputError
from unteach.method.losses import token_log_odds
from unteach.training.goal import FEWEST_TOKENS, MOST_SEQUENCES, line_through, wants_line, with_line

CONFIG = ForgetConfig(
    model="m", keep="k", base="b", holdout="h", batch=4, device="cpu", method=Method(loss="match", goal="never_seen")
)
UNSEEN = [f"{' '.join(SENTENCES[n % 3].split()[n % 5 :])} Number {n}." for n in range(40)]
DOCUMENTS = [f"{' '.join(reversed(sentence.split()))} {n}." for n, sentence in enumerate(SENTENCES)]


def chunks(texts):
    return tokenise(Documents("texts", texts), small_tokenizer(), mode="chunk", max_tokens=48)


def log_odds(model, sequences=None):
    """Of every predicted token, sequence by sequence, in float64."""
    found = []
    for sequence in sequences or chunks(UNSEEN).sequences:
        with torch.no_grad():
            logits, labels, mask = logits_of(model, [sequence])
        found.append(token_log_odds(logits[mask].double(), labels[mask]))
    return torch.cat(found).numpy()


def of_tokens(*pairs):
    """Log-odds in the model and in the base model, as tensors."""
    return tuple(torch.tensor(values, dtype=torch.float64) for values in zip(*pairs, strict=True))


def test_the_line_is_that_of_least_squares_raised_by_a_third_of_the_scatter():
    model, base = (log_odds(tiny_model("llama", seed=seed)) for seed in (0, 5))
    (slope, margin), (error, *_) = np.polyfit(base, model, 1, full=True)[:2]
    found = line_through(torch.tensor(model), torch.tensor(base))
    assert found == pytest.approx({"margin": margin + math.sqrt(error / len(model)) / 3, "slope": slope}, rel=1e-4)


def test_by_hand():
    # three times (0, 0), (2, 0), (4, 2), (6, 2): z = 1 + 2 z_base, every word one nat off it
    line = line_through(*of_tokens(*[(0, 0), (2, 0), (4, 2), (6, 2)] * 200))
    assert line == {"margin": 1.33333, "slope": 2.0}
    assert line_through(*of_tokens(*[(z, z) for z in range(600)])) == {"margin": 0.0, "slope": 1.0}, "learned nothing"


def test_a_line_needs_words_that_differ():
    assert line_through(*of_tokens(*[(2.0, 1.0), (3.0, 2.0)] * (FEWEST_TOKENS // 2))) is not None
    assert line_through(*of_tokens(*[(2.0, 1.0), (3.0, 2.0)] * (FEWEST_TOKENS // 2 - 1))) is None
    assert line_through(*of_tokens(*[(2.0, 1.0), (3.0, 1.0)] * FEWEST_TOKENS)) is None, "as likely as every other"


def test_numbers_go_to_the_methods_that_want_them_and_given_ones_stay():
    base, said = tiny_model("llama", seed=5), []
    model = learned(tiny_model("llama", seed=5), DOCUMENTS)
    unseen, forget = chunks(UNSEEN), ForgetBatches(chunks(DOCUMENTS), 0)
    assert len(unseen.sequences) < MOST_SEQUENCES
    by_hand = Method(loss="match", goal="never_seen", loss_options={"margin": 0.5, "slope": 1.0}, steps=3)
    config = dataclasses.replace(CONFIG, phases=(by_hand,), method=Method(loss="match", goal="never_seen"))
    assert wants_line(config)
    found = with_line(model, base, unseen, forget, config, said.append)
    assert found.phases == (by_hand,)
    both = [torch.tensor(log_odds(each, unseen.sequences)) for each in (model, base)]
    assert found.method.loss_options == pytest.approx(line_through(*both), rel=1e-4), "in whatever order they are read"
    other = dataclasses.replace(config, seed=1)
    assert with_line(model, base, unseen, forget, other, print).method == found.method, "seeds have one goal"
    assert not wants_line(found)
    assert [line[:20] for line in said] == ["goal:    as never-se"]


def test_without_a_line_that_tells_them_from_the_documents_the_goal_is_the_base_models():
    base, said = tiny_model("llama", seed=5), []
    model, forget = learned(tiny_model("llama", seed=5), UNSEEN), ForgetBatches(chunks(DOCUMENTS), 0)
    found = with_line(model, base, chunks(UNSEEN), forget, CONFIG, said.append)
    assert found == dataclasses.replace(CONFIG, method=dataclasses.replace(CONFIG.method, goal="base"))
    assert said[-1].startswith("warning: the model finds the documents no likelier than the holdout ones")
    found = with_line(model, base, chunks(UNSEEN[:3]), forget, CONFIG, said.append)
    assert found.method.goal == "base"
    assert f"too few words in holdout, {FEWEST_TOKENS} tokens are needed" in said[-1]


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
    grows = goal == "never_seen" and config.method.warmup == 0
    assert config.method.alpha_growth == (0.02 if grows else 0.0), "where it was chosen, not where AdamW was named"
    assert wants_line(config) == (goal == "never_seen")
    assert config.chosen() == config, "a resumed run chooses again"


@pytest.mark.parametrize("given", [{"holdout": None}, {"base": None}, {"keep": None}, {"method": {"loss": "npo"}}])
def test_a_goal_that_cannot_be_measured_is_refused(given):
    method = Method(**given.get("method", {}), goal="never_seen")
    with pytest.raises(InputError, match="goal is 'never_seen': it needs loss match .*, base, and holdout, which"):
        dataclasses.replace(CONFIG, **given | {"method": method})


def test_what_cannot_be_is_refused_before_anything_is_read():
    with pytest.raises(InputError, match="it needs loss match .named, beside an optimizer"):
        dataclasses.replace(CONFIG, method=Method(optimizer="adamw", goal="never_seen"))
    for half in ({"margin": 1.0}, {"slope": 0.5}):
        with pytest.raises(InputError, match="give both, or neither"):
            dataclasses.replace(CONFIG, method=Method(loss="match", goal="never_seen", loss_options=half))
