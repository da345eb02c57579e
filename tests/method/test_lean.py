"""The mean teacher in 16 bits against Algorithm 2 in float64, and against itself after a pause."""

import copy
import io

import pytest
import torch

from definitions import ReferenceMeanTeacher
from unteach.errors import InputError
from unteach.method.lean import LeanMeanTeacher, ReleasedGradients
from unteach.method.mean_teacher import MeanTeacher
from unteach.method.rounding import BLOCK

SHAPES = [(70, 50), (1100,), ()]
SETTINGS = {"lr": 0.02, "momentum": 0.9, "teacher_rate": 2.0, "damping": 0.7}


def make_parameters(seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def made(steps=0, **settings):
    parameters = make_parameters()
    optimizer = LeanMeanTeacher(parameters, **(SETTINGS | settings))
    run(parameters, optimizer, steps)
    return parameters, optimizer


def set_gradients(parameters, generator, scale=1.0):
    for parameter in parameters:
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)


def run(parameters, optimizer, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        set_gradients(parameters, generator)
        optimizer.step()
        optimizer.zero_grad()


def copies(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def same(first, second):
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(first, second, strict=True))


def teacher_of(optimizer, parameters):
    with optimizer.teacher_weights():
        return copies(parameters)


def joined(tensors):
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


@pytest.mark.parametrize("clip", [None, 1.0])
def test_follows_the_pseudo_code_over_200_steps_within_a_hundredth(clip):
    """Gradients pull to a point, with noise: what is compared is the way that student and teacher have come."""
    parameters, optimizer = made(clip=clip)
    start, aim = joined(parameters), copies(make_parameters(7))
    reference = ReferenceMeanTeacher([p.detach().double() for p in parameters], **SETTINGS, clip=clip)
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        noise = [0.1 * torch.randn(p.shape, generator=generator) for p in parameters]
        for p, a, n in zip(parameters, aim, noise, strict=True):
            p.grad = 0.1 * (p.detach() - a) + n
        pairs = zip(reference.theta, aim, noise, strict=True)
        norm, factor = reference.step([0.1 * (t - a.double()) + n.double() for t, a, n in pairs])
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.last_grad_norm == pytest.approx(norm, rel=0.01)
        assert optimizer.last_clip_factor == pytest.approx(factor, rel=0.01)
    for mine, expected in ((parameters, reference.theta), (teacher_of(optimizer, parameters), reference.teacher)):
        moved = joined(expected) - start
        assert (joined(mine) - joined(expected)).norm() <= 0.01 * moved.norm()


def test_exact_numbers_by_hand():
    """As for ``MeanTeacher``: all of these are exact in 16 bits."""
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = LeanMeanTeacher([parameter], lr=0.5, momentum=0.0, teacher_rate=1.0, damping=2.0, clip=1.0)
    parameter.grad = torch.tensor([0.5])
    optimizer.step()  # l = 1: θ = 1 - ½·½ = ¾; θ' = 1 + ½(¾ - 1) = ⅞
    optimizer.zero_grad()
    assert (parameter.item(), teacher_of(optimizer, [parameter])[0].item()) == (0.75, 0.875)
    parameter.grad = torch.tensor([4.0])
    optimizer.step()  # l = ¼: v = ¼(4 + 2(¾ - ⅞)) = 15/16; θ = ¾ - 15/32; θ' moves by ⅛ of its way
    student = 0.75 - 15 / 32
    assert parameter.item() == student
    assert teacher_of(optimizer, [parameter])[0].item() == 0.875 + (student - 0.875) / 8
    assert (optimizer.last_grad_norm, optimizer.last_clip_factor) == (4.0, 0.25)


def test_steps_below_what_bfloat16_shows_still_add_up():
    """Momentum and teacher near rest change by a thousandth a step; rounded to nearest they stand still before."""
    settings = {"lr": 1e-3, "momentum": 0.998, "teacher_rate": 2.0, "damping": 0.0}
    parameter = torch.nn.Parameter(torch.zeros(4096))
    optimizer = LeanMeanTeacher([parameter], **settings, clip=None)
    reference = ReferenceMeanTeacher([torch.zeros((), dtype=torch.float64)], **settings, clip=None)
    velocity, way = (torch.zeros((), dtype=torch.bfloat16) for _ in range(2))
    for _ in range(800):
        parameter.grad = torch.full_like(parameter, 1e-5)
        optimizer.step()
        optimizer.zero_grad()
        reference.step([torch.tensor(1e-5, dtype=torch.float64)])
        velocity = (0.998 * velocity.float() + 1e-5).bfloat16()
        way = ((1 - 0.002) * (way.float() - 1e-3 * velocity.float())).bfloat16()
    state = optimizer.state[parameter]
    right = float(reference.theta[0] - reference.teacher[0])
    found = state["momentum"].view(-1, BLOCK).double() * state["momentum_scale"][:, None]
    assert float(found.mean()) == pytest.approx(float(reference.v[0]), rel=0.01)
    found = float((parameter.detach() - teacher_of(optimizer, [parameter])[0]).double().mean())
    assert found == pytest.approx(right, rel=0.01)
    assert float(velocity) < 0.8 * float(reference.v[0]), "plain bfloat16 stands still"
    assert abs(float(way)) < 0.8 * abs(right)


def test_a_step_too_small_for_the_student_moves_the_teacher_to_it_and_not_away():
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = LeanMeanTeacher([parameter], lr=1e-3, momentum=0.0, teacher_rate=1.0, damping=0.0, clip=None)
    for _ in range(50):
        parameter.grad = torch.tensor([1e-6])  # 1e-9 beside 1: float32 does not see it
        optimizer.step()
        optimizer.zero_grad()
    assert parameter.item() == 1.0
    assert teacher_of(optimizer, [parameter])[0].item() == 1.0


def test_the_student_comes_back_bit_for_bit():
    """Also where the teacher is far away, and student - u + u would be another number."""
    parameter = torch.nn.Parameter(torch.tensor([0.0, -0.0, 1e-40, 1e-12, 0.1, -3.3, 1e6]).repeat(300))
    optimizer = LeanMeanTeacher([parameter], lr=0.1, momentum=0.5, teacher_rate=1.0, damping=0.0, clip=None)
    parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 100
    optimizer.step()
    with torch.no_grad():
        parameter[:7] = torch.tensor([0.0, -0.0, 1e-40, 1e-12, 0.1, -3.3, 1e6])
    student, address = parameter.detach().clone(), parameter.data_ptr()
    state = optimizer.state[parameter]
    way = state["displacement"].float() * state["scale"].repeat_interleave(BLOCK)[: len(student)]
    assert not torch.equal((student - way) + way, student)

    def interrupted():
        with optimizer.teacher_weights():
            assert torch.equal(parameter, student - way)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert torch.equal(parameter.view(torch.int32), student.view(torch.int32))
    assert parameter.data_ptr() == address
    with optimizer.teacher_weights(besides=[parameter]):
        assert torch.equal(parameter.view(torch.int32), student.view(torch.int32))
    assert torch.equal(optimizer.teacher_value(parameter, torch.float16), (student - way).half())


def test_before_the_first_step_the_teacher_is_the_student():
    parameters, optimizer = made()
    assert same(teacher_of(optimizer, parameters), parameters)
    assert torch.equal(optimizer.teacher_value(parameters[0], torch.bfloat16), parameters[0].bfloat16())
    assert not any(optimizer.state[p] for p in parameters), "it takes no memory yet"


def test_inside_teacher_weights_what_would_corrupt_is_refused():
    _, optimizer = made(2)
    saved = copy.deepcopy(optimizer.state_dict())
    calls = {
        "step": optimizer.step,
        "teacher_weights": lambda: optimizer.teacher_weights().__enter__(),
        "state_dict": optimizer.state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict(saved),
    }
    for name, call in calls.items():
        with (
            pytest.raises(RuntimeError, match=rf"{name}\(\) was called inside teacher_weights"),
            optimizer.teacher_weights(),
        ):
            call()


def test_saved_and_reloaded_or_copied_it_goes_on_bit_for_bit():
    parameters, optimizer = made(10)
    kinds = dict.fromkeys(("displacement", "momentum"), torch.float16)
    kinds |= dict.fromkeys(("scale", "momentum_scale"), torch.float32)
    assert {name: value.dtype for name, value in optimizer.state[parameters[0]].items()} == kinds
    buffer = io.BytesIO()
    torch.save({"weights": copies(parameters), "optimizer": optimizer.state_dict()}, buffer)
    twin = copy.deepcopy(optimizer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    resumed = [torch.nn.Parameter(weight) for weight in saved["weights"]]
    again = LeanMeanTeacher(resumed)
    again.load_state_dict(saved["optimizer"])
    run(parameters, optimizer, 10, seed=2)
    run(resumed, again, 10, seed=2)
    run(twin.param_groups[0]["params"], twin, 10, seed=2)
    for other in (resumed, twin.param_groups[0]["params"]):
        assert same(copies(parameters), copies(other))
    for p, q in zip(parameters, resumed, strict=True):
        assert same(optimizer.state[p].values(), again.state[q].values())
    different = made(seed=1)
    run(*different, 20)
    first = made()
    run(*first, 20)
    assert not same(copies(first[0]), copies(different[0])), "another seed rounds otherwise"


def test_states_of_the_other_kind_are_refused_in_a_line():
    parameters, lean = made(1)
    full = MeanTeacher(make_parameters())
    run(full.param_groups[0]["params"], full, 1)
    for optimizer, state, bits in ((lean, full.state_dict(), (16, 32)), (full, lean.state_dict(), (32, 16))):
        before = copies(parameters)
        with pytest.raises(InputError) as raised:
            optimizer.load_state_dict(state)
        found, saved = bits
        expected = f"state_bits is {found}: the saved teacher and momentum have {saved}, set it to {saved}"
        assert str(raised.value) == expected
        assert same(before, copies(parameters))


@pytest.mark.parametrize(
    ("parameter", "line"),
    [
        (torch.zeros(3, dtype=torch.float64), "has dtype torch.float64: a state in 16 bits is for float32"),
        (torch.zeros(3, dtype=torch.bfloat16), "has dtype torch.bfloat16"),
        (torch.zeros(3, 4).t(), r"of shape \[4, 3\] is not contiguous: leave state_bits at 32"),
    ],
)
def test_parameters_it_cannot_keep_are_refused(parameter, line):
    with pytest.raises(ValueError, match=line):
        LeanMeanTeacher([torch.nn.Parameter(parameter)])
    _, optimizer = made()
    with pytest.raises(ValueError, match=line):
        optimizer.add_param_group({"params": [torch.nn.Parameter(parameter)]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradients_are_refused_and_change_nothing(bad):
    parameters, optimizer = made(3)
    weights, state = copy.deepcopy((parameters, optimizer.state_dict()["state"]))
    set_gradients(parameters, torch.Generator().manual_seed(9))
    parameters[1].grad[3] = bad
    with pytest.raises(FloatingPointError, match=r"step was refused.*First at parameter 1 of group 0, shape \[1100\]"):
        optimizer.step()
    assert same(copies(weights), copies(parameters))
    after = optimizer.state_dict()
    assert all(same(state[i].values(), after["state"][i].values()) for i in state)
    assert after["steps_taken"] == 3


def test_gradients_are_taken_as_they_come_and_what_is_clipped_is_what_is_used():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))
    parameters, inputs = list(model.parameters()), torch.randn(6, 4, 8)
    optimizer = LeanMeanTeacher(parameters, lr=0.5, momentum=0.0, teacher_rate=0.0, damping=0.0, clip=0.01)
    with optimizer.gradients.collecting():
        for part in inputs:
            model(part).square().mean().backward()
            assert all(p.grad is None for p in parameters), "none is left in float32"
    sums = optimizer.gradients.values()
    assert all(total.dtype == torch.bfloat16 for total in sums)
    found = joined(sums)
    for part in inputs:  # outside, gradients stay, in float32
        model(part).square().mean().backward()
    exact = joined([p.grad for p in parameters])
    model.zero_grad()
    assert (found - exact).norm() < 0.02 * exact.norm()
    start = joined(parameters)
    optimizer.step()
    assert optimizer.last_grad_norm == pytest.approx(float(found.norm()), rel=1e-6)
    assert optimizer.last_grad_norm > 0.01
    assert (joined(parameters) - start).norm() == pytest.approx(0.5 * 0.01, rel=1e-4)


def test_gradients_of_the_same_step_are_rounded_the_same_way_again():
    parameters = make_parameters(shapes=[(300,)])
    results = []
    for step in (0, 0, 1):
        gradients = ReleasedGradients(parameters, seed=5)
        gradients.step = step
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            set_gradients(parameters, generator)
            gradients.take(parameters[0])
            assert parameters[0].grad is None
        results.append(gradients.values()[0])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    gradients.clear()
    assert gradients.values() == []


def test_parameters_without_a_gradient_are_left_alone():
    parameters, optimizer = made(3)
    kept = copies([parameters[1], *optimizer.state[parameters[1]].values()])
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer.step()
    assert same(kept, copies([parameters[1], *optimizer.state[parameters[1]].values()]))
