"""Log-probabilities of given texts."""

import copy

import numpy as np
import pytest
import torch

from unteach.evaluation.inference import Batching, token_logprobs


def reference(model, sequence):
    with torch.no_grad():
        logits = model(torch.tensor([sequence])).logits[0].double().log_softmax(-1)
    return np.array([logits[place, token].item() for place, token in enumerate(sequence[1:])])


@pytest.fixture(scope="module")
def sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 400, (length,), generator=generator).tolist() for length in (2, 30, 7, 31, 100, 2)]


@pytest.mark.parametrize(
    "options", [{}, {"batching": Batching(2)}, {"positions": 32}, {"positions": 8}, {"positions": 1}]
)
def test_equals_one_at_a_time(model, sequences, options):
    results = token_logprobs(model, sequences, **options)
    for sequence, values in zip(sequences, results, strict=True):
        assert len(values) == len(sequence) - 1
        np.testing.assert_allclose(values, reference(model, sequence), rtol=1e-4, atol=1e-4)


def test_all_tokens_but_the_first_count(model):
    [values] = token_logprobs(model, [[3, 4, 5]])
    assert len(values) == 2
    assert (values < 0).all()


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([[3, 4], [3]], r"text 1 has 1 token\(s\): at least 2"),
        ([[]], r"text 0 has 0 token\(s\)"),
        ([[3] * 257], "text 0 has 257 tokens, but the model's context is 256"),
    ],
)
def test_refusals(model, sequences, message):
    with pytest.raises(ValueError, match=message):
        token_logprobs(model, sequences)


def test_nan_is_an_error(model):
    broken = copy.deepcopy(model)
    broken.lm_head.weight.data[:] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        token_logprobs(broken, [[3, 4]])


def test_progress_and_mode(model):
    done = []
    training = copy.deepcopy(model).train()
    token_logprobs(training, [[3, 4], [5, 6, 7]], batching=Batching(advance=done.append))
    assert sum(done) == 2
    assert training.training
