import functools

import pytest
import torch

import unteach
from unteach.method import losses, vocab_head
from unteach.method.vocab_head import Head, mean_of_rows, token_log_odds

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.25},
    "cap": {"cap": 5.0},
    "all": {"bias": True, "scale": 2.0, "cap": 8.0},
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(vocab_head, "CHUNK_LOGITS", {"cpu": 4 * 23})  # four rows a chunk: 10 tokens need three


def make_head(dtype, seed, bias=False, **options):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(23, 6, generator=generator, dtype=torch.float64).to(dtype))
    bias = torch.nn.Parameter(torch.randn(23, generator=generator, dtype=torch.float64).to(dtype)) if bias else None
    return Head(weight=weight, bias=bias, **options)


def full_logits(hidden, head):
    """The same logits in plain differentiable operations."""
    logits = hidden @ head.weight.T
    logits = logits if head.bias is None else logits + head.bias
    logits = head.scale * logits
    return logits if head.cap is None else head.cap * torch.tanh(logits / head.cap)


def inputs(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(10, 6, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    teacher = torch.randn(10, 6, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, teacher, torch.randint(23, (10,), generator=generator)


def assert_same(mine, theirs, hidden, head):
    """Whether two values and their gradients, weighted if they are lists, agree."""
    wanted = [hidden, head.weight] + ([] if head.bias is None else [head.bias])
    weights = torch.linspace(-1, 2, mine.numel() + 1, dtype=hidden.dtype)[1:].view_as(mine)
    sides = ([x, *torch.autograd.grad((weights * x).sum(), wanted)] for x in (mine, theirs))
    for a, b in zip(*sides, strict=True):
        assert a.dtype == b.dtype == hidden.dtype
        assert (a - b).norm() <= TOLERANCE[hidden.dtype] * b.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_log_odds_equal_the_full_logit_form(options, dtype):
    hidden, _, labels = inputs(dtype)
    head = make_head(dtype, 1, **options)
    mine = token_log_odds(hidden, labels, head)
    assert_same(mine, losses.token_log_odds(full_logits(hidden, head), labels), hidden, head)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("name", list(unteach.DIVERGENCES))
def test_divergences_equal_the_full_logit_form(name, options, dtype):
    hidden, teacher_hidden, _ = inputs(dtype)
    head, teacher_head = make_head(dtype, 1, **options), make_head(dtype, 2, **options)
    mine = mean_of_rows(unteach.DIVERGENCES[name].rows, hidden, head, teacher_hidden, teacher_head)
    logits, teacher_logits = full_logits(hidden, head), full_logits(teacher_hidden, teacher_head)
    theirs = unteach.divergence(name, logits[None], teacher_logits[None], torch.ones(1, 10, dtype=torch.bool))
    assert_same(mine, theirs, hidden, head)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(
    ("name", "hyper"), [("it", {}), ("it_forward", {}), ("match", {}), ("match", {"pull": "gate", "margin": 0.5})]
)
def test_losses_of_all_logits_equal_the_full_logit_form(name, hyper, options, dtype):
    hidden, base_hidden, labels = inputs(dtype)
    head = make_head(dtype, 1, **options)
    rows, mask = functools.partial(unteach.LOSSES[name].rows, **hyper), torch.ones(1, 10, dtype=torch.bool)
    for base_head in (make_head(dtype, 2, **options), head):  # another model's, or the same where it is not trained
        mine = mean_of_rows(rows, hidden, head, base_hidden, base_head, labels)
        logits, base_logits = full_logits(hidden, head), full_logits(base_hidden, base_head)
        theirs = unteach.forget_loss(name, logits[None], labels[None], mask, base_logits=base_logits[None], **hyper)
        assert_same(mine, theirs, hidden, head)


def test_nothing_is_computed_for_a_frozen_head():
    hidden, teacher_hidden, labels = inputs(torch.float32)
    head = make_head(torch.float32, 1)
    head.weight.requires_grad_(False)
    value = token_log_odds(hidden, labels, head).sum() + mean_of_rows(
        unteach.DIVERGENCES["kl"].rows, hidden, head, teacher_hidden, head
    )
    value.backward()
    assert hidden.grad is not None
    assert head.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_hidden_states_give_float32_values(dtype):
    hidden, _, labels = inputs(torch.float32)
    head = make_head(torch.float32, 1)
    exact = token_log_odds(hidden, labels, head)
    half = hidden.detach().to(dtype).requires_grad_()
    rounded = token_log_odds(half, labels, head)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.1)
    rounded.sum().backward()
    assert half.grad.dtype == dtype
    assert head.weight.grad.dtype == torch.float32


def test_chunks_bound_the_logits_held_at_once(monkeypatch):
    sizes = []
    original = vocab_head.product_in_float32

    def spy(a, b):
        product = original(a, b)
        if product.shape[1] == 23:  # rows of logits, or of their difference; gradients have other shapes
            sizes.append(product.shape[0])
        return product

    monkeypatch.setattr(vocab_head, "product_in_float32", spy)
    hidden, teacher_hidden, labels = inputs(torch.float32)
    head = make_head(torch.float32, 1)
    token_log_odds(hidden, labels, head).sum().backward()  # twice: the head is trained
    mean_of_rows(unteach.DIVERGENCES["kl"].rows, hidden, head, teacher_hidden, head).backward()
    assert sizes == [4, 4, 2] * 2 + [4, 4, 4, 4, 2, 2]
