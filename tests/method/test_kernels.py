"""The Triton kernels of the mean teacher, carried out by Triton's interpreter on the CPU, against Algorithm 2."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_in_the_interpreter_follow_algorithm_2():
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    paths = [str(Path(__file__).parents[1]), *sys.path]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["kernels", "checked"]


def check():
    """Ten steps of ``MeanTeacher`` through the kernels, and exchanges, against the pseudo-code in float64."""
    import torch

    from definitions import ReferenceMeanTeacher
    from unteach.method import tensors
    from unteach.method.mean_teacher import MeanTeacher

    calls = []
    launch = tensors._launch
    tensors.is_fusible = lambda *lists: True  # the interpreter takes tensors on a CPU
    tensors._launch = lambda kernel, *arguments: (calls.append(kernel), launch(kernel, *arguments))

    draws = torch.Generator().manual_seed(0)
    shapes = [(1,), (5,), (1024,), (7, 300), (0,), ()]
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=draws)) for shape in shapes]
    settings = {"lr": 0.05, "momentum": 0.9, "teacher_rate": 2.0, "damping": 0.7, "clip": 30.0}
    optimizer = MeanTeacher(parameters, **settings)
    reference = ReferenceMeanTeacher([p.detach().double() for p in parameters], **settings)
    for number in range(10):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=draws) * (2 if number % 2 else 0.1)  # on both sides of the clip
        reference.step([p.grad.double() for p in parameters])
        optimizer.step()
    teacher = [optimizer.state[p]["teacher"].clone() for p in parameters]
    student = [p.detach().clone() for p in parameters]
    for found, expected in ((student, reference.theta), (teacher, reference.teacher)):
        for mine, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-6)
    with optimizer.teacher_weights():
        assert all(torch.equal(p, t) for p, t in zip(parameters, teacher, strict=True))
    assert all(torch.equal(p, s) for p, s in zip(parameters, student, strict=True))
    assert not any(torch.equal(s, t) for s, t in zip(student, teacher, strict=True) if s.numel())
    assert calls == [0] * 10 + [1] * 2, "steps and exchanges"


def check_lean():
    """Sums and steps in 16 bits through the kernels, against the same in plain PyTorch."""
    import torch

    from unteach.method import rounding

    rounding._launch = lambda kernel, count, *arguments: rounding._kernels()[kernel][(rounding.blocks_of(count),)](
        *arguments, count, BLOCK=rounding.BLOCK
    )
    draws = torch.Generator().manual_seed(0)
    for count in (1, 1000, 3000):
        shared = 0.02 * torch.randn(count, generator=draws), torch.randn(count, generator=draws).bfloat16()
        results = []
        for fused in (False, True):
            rounding.is_fusible = lambda *tensors, fused=fused: fused
            student, total = (tensor.clone() for tensor in shared)
            kept = [(torch.zeros(count).half(), torch.zeros(rounding.blocks_of(count))) for _ in range(2)]
            gradients = torch.Generator().manual_seed(1)
            for number in range(6):
                values = torch.randn(count, generator=gradients) * 10.0 ** -(number % 3)
                rounding.add_rounded(total, values, rounding.key_of(number, 0))
                keys = rounding.key_of(number, 1), rounding.key_of(number, 2)
                rounding.lean_step(student, *kept, total, 0.01, 0.9, 0.7, 0.3, 0.05, keys)
            results.append((total, student, *(tensor.float() for pair in kept for tensor in pair)))
        plain, fused = results
        assert torch.equal(plain[0], fused[0]), "sums are equal bit for bit"
        torch.testing.assert_close(fused[1], plain[1], rtol=1e-4, atol=1e-6)
        for number in (2, 4):  # a sum's last bit may round otherwise
            torch.testing.assert_close(fused[number], plain[number], rtol=2e-3, atol=1e-2)
            assert torch.equal(plain[number + 1], fused[number + 1])
        same = [float((a == b).float().mean()) for a, b in zip(plain[2:], fused[2:], strict=True)]
        assert min(same) > 0.9, f"they draw the same bits: {same}"


if __name__ == "__main__":
    check()
    check_lean()
    print("kernels checked")
