"""What only a GPU can show: kernels against plain PyTorch, fp16 and compiled steps against fp32, the exchange."""

from types import SimpleNamespace

import pytest
import torch

from recipes.smollm2.difference import add_difference, write_difference
from steps import mean_teacher, one_step
from tiny_models import tiny_model
from unteach import MeanTeacher
from unteach.config import ForgetConfig, Precision
from unteach.data import ForgetBatches
from unteach.method import tensors
from unteach.method.divergences import DIVERGENCES, mean_over_rows
from unteach.method.optimizers import AnchoredAdamW
from unteach.method.vocab_head import Head, mean_of_rows
from unteach.models import trainable_parameters
from unteach.training.calibrate import rounding_noise
from unteach.training.passes import computing, hidden_states

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
SEQUENCES = [list(range(1 + n, 40 + n)) for n in range(4)]
GENERAL = SimpleNamespace(batch=lambda step, size: [list(range(100 + 7 * n, 140 + 7 * n)) for n in range(size)])
METHOD = mean_teacher(loss="ll", alpha=1.0, lr=0.05)


def cuda_parameters(seed=0):
    draws = torch.Generator("cuda").manual_seed(seed)
    shapes = [(1,), (1000, 33), (1024,), (), (0,), (3, 5, 7)]
    return [torch.nn.Parameter(torch.randn(shape, generator=draws, device="cuda")) for shape in shapes]


def test_the_kernels_step_as_plain_pytorch_does(monkeypatch):
    mine, plain = cuda_parameters(), cuda_parameters()
    assert tensors.is_fusible(mine)
    optimizers = [MeanTeacher(p, lr=0.05, momentum=0.9, teacher_rate=2.0, damping=0.7) for p in (mine, plain)]
    for seed in range(1, 21):
        for a, b, g in zip(mine, plain, cuda_parameters(seed), strict=True):
            a.grad, b.grad = g.detach().clone(), g.detach().clone()
        optimizers[0].step()
        with monkeypatch.context() as patch:
            patch.setattr(tensors, "is_fusible", lambda *lists: False)
            optimizers[1].step()
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        for name in ("teacher", "momentum"):
            torch.testing.assert_close(optimizers[0].state[a][name], optimizers[1].state[b][name], rtol=1e-5, atol=1e-6)


def test_adamw_steps_in_place_and_as_on_a_cpu():
    """A step needs no memory that grows with the weights, and a saved state is read back on the GPU."""
    start = torch.randn(1000, 4000, generator=torch.Generator().manual_seed(0))
    weights = {device: torch.nn.Parameter(start.to(device, copy=True)) for device in ("cpu", "cuda")}
    optimizers = {device: AnchoredAdamW([weight], lr=1e-3, warmup=0) for device, weight in weights.items()}
    for seed in range(1, 6):
        gradient = torch.randn(start.shape, generator=torch.Generator().manual_seed(seed))
        for device, weight in weights.items():
            weight.grad = gradient.to(device, copy=True)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            optimizers[device].step()
            if device == "cuda" and seed > 1:  # the first makes the moments
                assert torch.cuda.max_memory_allocated() - before < 4 * start.numel() / 2
        if seed == 3:
            saved = optimizers["cuda"].state_dict()
            optimizers["cuda"] = AnchoredAdamW([weights["cuda"]], lr=1e-3, warmup=0)
            optimizers["cuda"].load_state_dict(saved)
    torch.testing.assert_close(weights["cuda"].detach().cpu(), weights["cpu"].detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_teacher_reads_with_its_own_weights(precision):
    """No rounded copy of the student's weights is left over, and the student comes back bit for bit."""
    model = tiny_model("llama").cuda()
    parameters = list(trainable_parameters(model, "blocks").values())
    optimizer = MeanTeacher(parameters, lr=0.1, teacher_rate=1.0, clip=None)

    def read():
        with torch.no_grad(), computing(model, precision):
            return hidden_states(model, SEQUENCES)[0]

    before, start = read(), [p.detach().clone() for p in parameters]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    student, moved = read(), [p.detach().clone() for p in parameters]
    assert not torch.equal(student, before)
    for p, value in zip(parameters, start, strict=True):
        optimizer.state[p]["teacher"].copy_(value)
    with optimizer.teacher_weights():
        assert torch.equal(read(), before)
    assert torch.equal(read(), student)
    assert all(torch.equal(p, value) for p, value in zip(parameters, moved, strict=True))


def displacement(precision, **settings):
    model = tiny_model("llama").cuda()
    parameters = list(trainable_parameters(model, "blocks").values())
    start = [p.detach().clone() for p in parameters]
    optimizer = MeanTeacher(parameters, lr=0.05, teacher_rate=4.0, damping=0.1)
    both = Precision(forget=precision, divergence=precision)
    config = ForgetConfig(model="", batch=4, general_batch=4, precision=both, **settings)
    for step in range(2):
        row = one_step(model, optimizer, ForgetBatches(SEQUENCES, 0), GENERAL, METHOD, config, step)
        assert row["divergence"] >= 0
    return torch.cat([(p.detach() - s).flatten() for p, s in zip(parameters, start, strict=True)])


def error(found, exact):
    return float((found - exact).norm() / exact.norm())


def test_steps_in_half_precision_follow_those_in_fp32():
    exact = displacement("fp32")
    assert error(displacement("tf32"), exact) < 0.02
    assert error(displacement("fp16"), exact) < 0.02
    assert error(displacement("auto"), displacement("fp16")) < 1e-3
    assert error(displacement("fp16", checkpoint_activations=True), displacement("fp16")) < 1e-3
    assert error(displacement("fp16", micro_batch=1), exact) < 0.02


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_steps_follow_those_in_fp32():
    exact = displacement("fp32")
    assert error(displacement("fp16", compile=True), exact) < 0.02
    assert error(displacement("fp16", compile=True, checkpoint_activations=True), exact) < 0.02


def test_the_head_in_chunks_is_the_head():
    draws = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=draws, device="cuda") for n in (500, 5000))
    teacher = hidden + 0.05 * torch.randn(500, 64, generator=draws, device="cuda")
    rows, head = DIVERGENCES["kl"].rows, Head(weight=weight / 8)
    found, exact = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    value = mean_of_rows(rows, found, head, teacher, head)
    value.backward()
    expected = mean_over_rows(rows, exact @ head.weight.double().T, teacher.double() @ head.weight.double().T)
    expected.backward()
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=0)
    assert error(found.grad.double(), exact.grad) < 1e-5


def test_bf16_is_noisier_than_fp16():
    def noise(precision):
        model = tiny_model("llama").cuda()
        parameters = list(trainable_parameters(model, "blocks").values())
        both = Precision(forget=precision, divergence=precision)
        config = ForgetConfig(model="", batch=4, general_batch=4, precision=both, method=METHOD)
        return rounding_noise(model, parameters, ForgetBatches(SEQUENCES, 0), GENERAL, config)[0]

    assert noise("fp32") == pytest.approx(0, abs=1e-6)
    assert 0 < noise("fp16") < noise("bf16")


def test_a_difference_between_a_gpu_and_main_memory_is_that_of_main_memory(tmp_path):
    base = {"a": torch.randn(70, generator=torch.Generator().manual_seed(0))}
    model = {"a": base["a"] + 0.01 * torch.arange(70)}
    write_difference(base, model, tmp_path / "cpu")
    write_difference(base, {"a": model["a"].cuda()}, tmp_path / "cuda")
    assert torch.equal(add_difference(base, tmp_path / "cpu")["a"], add_difference(base, tmp_path / "cuda")["a"])
