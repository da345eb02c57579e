"""Losses of pairs of texts as functions of two log-ratios; what a step makes of them is tested with the training."""

import math

import pytest
import torch

import unteach
from definitions import assert_matches_exact, exact_dpo
from unteach.config import ForgetConfig, Method
from unteach.errors import InputError

DPO = unteach.LOSSES["dpo"]
HAND_CASES = {
    # one pair of π/π_before = 3/5 and of an alternate now twice as likely: σ(β log 10/3) = r/(1 + r), r = (10/3)^β
    "dpo": [
        ({"beta": 1.0}, (math.log(0.6), math.log(2.0)), 2 * math.log(1.3)),
        ({}, (math.log(0.6), math.log(2.0)), 20 * math.log(1 + 0.3**0.1)),
        ({"beta": 2.0}, (math.log(2.0), math.log(2.0)), math.log(2)),
    ],
}
RATIOS = [
    (0.0, 0.0), (-3.0, 1.5), (250.0, -0.125), (-250.0, 40.0), (1e4, -1e4), (-1e4, 1e4), (1e4, 1e4), (-4000.0, -3999.5),
    (1e-6, -1e-6),
]  # fmt: skip


def value_and_slopes(ratios, dtype=torch.float64, **hyper):
    leaf = torch.tensor(ratios, dtype=dtype).unsqueeze(-1).requires_grad_()
    value = DPO.function(*leaf, **hyper)
    return value.detach().squeeze(), torch.autograd.grad(value.sum(), leaf)[0].flatten()


def test_every_loss_of_pairs_has_a_case_computed_by_hand():
    assert set(HAND_CASES) == {name for name, loss in unteach.LOSSES.items() if loss.reads == "pairs"}
    for hyper, ratios, expected in HAND_CASES["dpo"]:
        assert value_and_slopes(ratios, **hyper)[0].item() == pytest.approx(expected, rel=1e-12), hyper


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("beta", [0.02, 0.1, 1.0])
@pytest.mark.parametrize("ratios", RATIOS)
def test_value_and_slopes_match_mpmath_at_any_size(ratios, beta, dtype):
    ratios = torch.tensor(ratios, dtype=dtype).tolist()
    assert_matches_exact(*value_and_slopes(ratios, dtype, beta=beta), *exact_dpo(*ratios, beta))


def test_both_texts_begin_with_a_weight_of_one_and_it_fades_as_the_alternate_gets_ahead():
    for beta in (0.02, 0.1, 5.0):
        value, slopes = value_and_slopes((0.0, 0.0), beta=beta)
        assert slopes.tolist() == [1.0, -1.0]
        assert value.item() == pytest.approx(2 / beta * math.log(2))
    weights = [value_and_slopes((-way, way))[1][0].item() for way in (-40.0, 0.0, 5.0, 50.0, 500.0)]
    assert weights == sorted(weights, reverse=True)
    assert weights[0] < 2
    assert weights[-1] < 1e-40


def test_without_an_alternate_it_is_npo():
    logits, base = torch.randn(2, 1, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels, mask = torch.tensor([[0, 1, 2, 3]]), torch.ones(1, 4, dtype=torch.bool)
    ratio = (logits.log_softmax(-1) - base.log_softmax(-1)).gather(-1, labels[..., None]).sum().view(1)
    npo = unteach.forget_loss("npo", logits, labels, mask, base_logits=base, beta=0.7)
    assert DPO.function(ratio, torch.zeros(1, dtype=torch.float64), beta=0.7).item() / 4 == pytest.approx(npo.item())


def test_what_it_cannot_do_is_refused_in_a_line():
    assert DPO.problems({"beta": 0.0}) == ["beta is 0.0: it must be positive"]
    assert DPO.problems({"ratio": "mean"}) == ["forget loss 'dpo' has no hyper-parameter 'ratio': allowed are beta"]
    logits, labels = torch.zeros(1, 1, 3), torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="'dpo' reads pairs of texts"):
        unteach.forget_loss("dpo", logits, labels, labels == 0)
    for settings, problem in (
        ({"method": Method(loss="dpo")}, "loss dpo needs alternates: for each document a text to be said in its place"),
        ({"alternates": "a.jsonl"}, "alternates is 'a.jsonl': only the loss dpo reads them, name it or leave them"),
        (
            {"alternates": "a", "method": Method(loss="dpo", token_share=0.5)},
            "token_share is 0.5: dpo reads whole texts, leave it out",
        ),
    ):
        with pytest.raises(InputError) as refused:
            ForgetConfig(model="m", **settings)
        assert refused.value.problems == [problem]
