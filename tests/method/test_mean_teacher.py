import copy
import io

import pytest
import torch

import unteach
from definitions import ReferenceMeanTeacher
from unteach.method import mean_teacher as mean_teacher_module

SHAPES = [(7, 5), (11,), (1,), (3, 2, 4), ()]
SETTINGS = {"lr": 0.05, "momentum": 0.9, "teacher_rate": 2.0, "damping": 0.7}


def make_parameters(dtype=torch.float32, seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in shapes]


def made(dtype=torch.float32, steps=0, **settings):
    """Parameters and their optimizer, after some steps."""
    parameters = make_parameters(dtype)
    optimizer = unteach.MeanTeacher(parameters, **(SETTINGS | settings))
    run(parameters, optimizer, steps)
    return parameters, optimizer


def set_gradients(parameters, generator, scale=1.0):
    for parameter in parameters:
        gradient = scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = gradient.to(parameter.dtype)


def run(parameters, optimizer, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        set_gradients(parameters, generator)
        optimizer.step()


def teacher_of(optimizer, parameters):
    return [optimizer.state[p]["teacher"] for p in parameters]


def copies(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("clip", [None, 1.0, 8.0])
@pytest.mark.parametrize("momentum", [0.0, 0.95])
def test_matches_the_pseudo_code_over_200_random_steps(dtype, tolerance, clip, momentum):
    settings = SETTINGS | {"momentum": momentum, "clip": clip, "lr": 0.02}
    parameters, optimizer = made(dtype, **settings)
    reference = ReferenceMeanTeacher([p.detach().double() for p in parameters], **settings)
    generator = torch.Generator().manual_seed(1)
    factors = set()
    for step in range(200):
        set_gradients(parameters, generator, scale=0.1 if step % 3 else 2.0)  # norms on both sides of the clip
        norm, factor = reference.step([p.grad.double() for p in parameters])
        optimizer.step()
        assert optimizer.last_grad_norm == pytest.approx(norm, rel=tolerance)
        assert optimizer.last_clip_factor == pytest.approx(factor, rel=tolerance)
        factors.add(factor)
    assert clip is None or (1.0 in factors and min(factors) < 1.0)
    for mine, expected in [(parameters, reference.theta), (teacher_of(optimizer, parameters), reference.teacher)]:
        mine, expected = (torch.cat([x.detach().double().flatten() for x in side]) for side in (mine, expected))
        assert (mine - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_teacher_damping_and_clip_it_is_sgd_bit_for_bit(dtype, momentum):
    mine, _ = made(dtype, 100, lr=0.1, momentum=momentum, teacher_rate=0, damping=0, clip=None)
    theirs = make_parameters(dtype)
    run(theirs, torch.optim.SGD(theirs, lr=0.1, momentum=momentum), 100)
    assert same(mine, theirs)


def test_clip_factor_scales_gradient_damping_and_teacher_rate_together():
    parameter = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = unteach.MeanTeacher([parameter], lr=0.5, momentum=0.0, teacher_rate=1.0, damping=2.0, clip=1.0)
    parameter.grad = torch.tensor([0.5], dtype=torch.float64)
    optimizer.step()  # l = 1: θ = 1 - ½·½ = ¾; θ' = 1 + ½(¾ - 1) = ⅞
    assert (parameter.item(), optimizer.state[parameter]["teacher"].item()) == (0.75, 0.875)
    parameter.grad = torch.tensor([4.0], dtype=torch.float64)
    optimizer.step()  # l = ¼: v = ¼(4 + 2(¾ - ⅞)) = 15/16; θ = ¾ - 15/32; θ' moves by ⅛ of its way
    student = 0.75 - 15 / 32
    assert parameter.item() == student
    assert optimizer.state[parameter]["teacher"].item() == 0.875 + (student - 0.875) / 8
    assert (optimizer.last_grad_norm, optimizer.last_clip_factor) == (4.0, 0.25)


def test_a_run_is_the_same_again_and_in_buckets_of_any_size(monkeypatch):
    results = []
    for elements in (2**26, 2**26, 8):
        monkeypatch.setattr(mean_teacher_module, "BUCKET_ELEMENTS", elements)
        parameters, optimizer = made(steps=20)
        with optimizer.teacher_weights():
            inside = copies(parameters)
        results.append(copies(parameters) + inside)
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_groups_have_their_own_settings_and_share_one_norm():
    parameters = make_parameters(torch.float64, shapes=[(4,), (3,)])
    groups = [{"params": [parameters[0]], "lr": 0.01, "damping": 3.0}, {"params": [parameters[1]], "momentum": 0.5}]
    optimizer = unteach.MeanTeacher(groups, **SETTINGS, clip=0.5)
    start = copies(parameters)
    set_gradients(parameters, torch.Generator().manual_seed(3))
    gradients = [p.grad.clone() for p in parameters]
    optimizer.step()
    factor = 0.5 / torch.cat(gradients).norm()
    assert optimizer.last_clip_factor == pytest.approx(factor.item(), rel=1e-12)
    torch.testing.assert_close(parameters[0].detach(), start[0] - 0.01 * factor * gradients[0])
    torch.testing.assert_close(parameters[1].detach(), start[1] - 0.05 * factor * gradients[1])
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert optimizer.param_groups[2]["lr"] == 0.05


def test_parameters_without_a_gradient_and_frozen_ones_are_left_alone():
    moving, idle, frozen = make_parameters(shapes=[(4,), (4,), (4,)])
    frozen.requires_grad_(False)
    optimizer = unteach.MeanTeacher([moving, idle, frozen], **SETTINGS)
    run([moving, idle], optimizer, 3)
    kept = copies([idle, frozen, *optimizer.state[idle].values()])
    idle.grad = None
    run([moving], optimizer, 3)
    assert same(kept, [idle, frozen, *optimizer.state[idle].values()])
    assert frozen not in optimizer.state
    with optimizer.teacher_weights():
        assert torch.equal(frozen, kept[1])
    parameters, optimizer = made()
    before = copies(parameters)
    optimizer.step()  # without any gradient
    assert optimizer.last_grad_norm == 0
    assert same(before, parameters)


def test_learning_rate_schedulers_work():
    parameters, optimizer = made(torch.float64)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    reference = ReferenceMeanTeacher([p.detach() for p in parameters], **SETTINGS, clip=1.0)
    generator = torch.Generator().manual_seed(1)
    for step in range(10):
        reference.eta = SETTINGS["lr"] / (1 + step)
        set_gradients(parameters, generator)
        reference.step([p.grad for p in parameters])
        optimizer.step()
        scheduler.step()
    for a, b in zip(parameters, reference.theta, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-12, atol=1e-14)


def test_closure_is_called_with_gradients_on():
    parameter = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = unteach.MeanTeacher([parameter], lr=0.1, momentum=0.0, clip=None)

    def closure():
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert parameter.item() == pytest.approx(2.0 - 0.1 * 4.0)


def test_teacher_weights_exchanges_values_in_place_and_back():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    twin = copy.deepcopy(model)
    optimizer = unteach.MeanTeacher(model.parameters(), **SETTINGS)
    x = torch.randn(5, 4)
    with optimizer.teacher_weights():  # before the first step the teacher is the student
        assert torch.equal(model(x), twin(x))
    for _ in range(5):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    addresses, student = [p.data_ptr() for p in model.parameters()], copies(model.parameters())
    teacher = copies(teacher_of(optimizer, model.parameters()))
    twin.load_state_dict(dict(zip(twin.state_dict(), teacher, strict=True)))
    with optimizer.teacher_weights():
        inside = model(x)
        assert not inside.requires_grad
    assert torch.equal(inside, twin(x))
    assert not torch.equal(model(x), inside)
    assert model(x).requires_grad
    assert addresses == [p.data_ptr() for p in model.parameters()]
    assert same(student, model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_teacher_weights_survives_exceptions_and_refuses_what_would_corrupt(dtype):
    parameters, optimizer = made(dtype, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    student, teacher = copies(parameters), copies(teacher_of(optimizer, parameters))

    def inside_teacher_weights(action):
        with optimizer.teacher_weights():
            assert all(torch.equal(p, t.to(dtype)) for p, t in zip(parameters, teacher, strict=True))
            action()

    for action, name in [
        (optimizer.step, "step"),
        (lambda: optimizer.teacher_weights().__enter__(), "teacher_weights"),
        (optimizer.state_dict, "state_dict"),
        (lambda: optimizer.load_state_dict(saved), "load_state_dict"),
        (lambda: optimizer.add_param_group({"params": []}), "add_param_group"),
    ]:
        with pytest.raises(RuntimeError, match=rf"{name}\(\) was called inside teacher_weights"):
            inside_teacher_weights(action)
    with pytest.raises(KeyboardInterrupt):
        inside_teacher_weights(lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
    assert same(student, parameters)
    assert same(teacher, teacher_of(optimizer, parameters))
    optimizer.step()  # and it works again


def test_backward_through_weights_that_were_exchanged_meanwhile_raises():
    layer = torch.nn.Linear(3, 3)
    optimizer = unteach.MeanTeacher(layer.parameters())
    output = layer(torch.randn(2, 3, requires_grad=True)).sum()
    with optimizer.teacher_weights():
        pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_saved_and_reloaded_it_continues_bit_for_bit(dtype):
    parameters, optimizer = made(dtype, 20)
    buffer = io.BytesIO()
    torch.save({"weights": [p.detach() for p in parameters], "optimizer": optimizer.state_dict()}, buffer)
    run(parameters, optimizer, 20, seed=2)

    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    kept = copy.deepcopy(saved["optimizer"]["state"])
    resumed = [torch.nn.Parameter(w) for w in saved["weights"]]
    again = unteach.MeanTeacher(resumed)  # other settings: they come from the file
    again.load_state_dict(saved["optimizer"])
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    assert all(value.dtype == wanted for q in resumed for value in again.state[q].values())
    run(resumed, again, 20, seed=2)
    assert same(parameters, resumed)
    for p, q in zip(parameters, resumed, strict=True):
        assert again.state[q].keys() == optimizer.state[p].keys()
        assert same(optimizer.state[p].values(), again.state[q].values())
    given = saved["optimizer"]["state"]
    assert all(same(kept[i].values(), given[i].values()) for i in kept), "loading copies"


def test_loading_the_state_of_another_model_says_so():
    _, optimizer = made(steps=1)
    other = unteach.MeanTeacher(make_parameters(shapes=[(2, 2)] * len(SHAPES)))
    with pytest.raises(ValueError, match=r"saved teacher of parameter 0 has shape \[7, 5\], the parameter \[2, 2\]"):
        other.load_state_dict(optimizer.state_dict())


def test_a_copied_optimizer_goes_on():
    optimizer = copy.deepcopy(made()[1])
    with optimizer.teacher_weights():
        pass
    run(optimizer.param_groups[0]["params"], optimizer, 2)
    assert optimizer.last_grad_norm is not None


def test_plain_bfloat16_weights_would_not_move_at_the_papers_settings_and_ours_do():
    """A 7B model: weights of 0.02, gradient of norm 1 over 7e9 weights, so 1.2e-5 a weight; lr 5e-4, momentum 0.95."""
    steps, gradient, settings = 200, 1.2e-5, {"lr": 5e-4, "momentum": 0.95}
    start = torch.full((64,), 0.02, dtype=torch.bfloat16)
    plain, half, full = (torch.nn.Parameter(start.to(t, copy=True)) for t in (start.dtype, start.dtype, torch.float32))
    ours = [unteach.MeanTeacher([p], **settings) for p in (half, full)]
    optimizers = [torch.optim.SGD([plain], **settings), *ours]
    for _ in range(steps):
        for parameter, optimizer in zip((plain, half, full), optimizers, strict=True):
            parameter.grad = torch.full_like(parameter, gradient)
            optimizer.step()
    assert torch.equal(plain, start), "every single update was rounded away"
    # The recurrence by hand, in float64: λ pulls back to a teacher that slides by κη = 0.005 a step.
    v = theta = teacher = 0.0
    for _ in range(steps):
        v = 0.95 * v + float(torch.tensor(gradient).bfloat16()) + 5.0 * (theta - teacher)
        theta -= 5e-4 * v
        teacher += 0.005 * (theta - teacher)
    for student in (ours[0].state[half]["student"], full):
        torch.testing.assert_close(student - start.float(), torch.full((64,), theta), rtol=0.01, atol=0)


def test_half_precision_parameters_follow_the_float32_run():
    half = make_parameters(torch.bfloat16)
    full = [torch.nn.Parameter(p.detach().float()) for p in half]
    for parameters in (half, full):
        optimizer = unteach.MeanTeacher(parameters, **SETTINGS)
        generator = torch.Generator().manual_seed(5)
        for _ in range(30):
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
            optimizer.step()
    assert same(half, [f.bfloat16() for f in full])


def test_the_norm_does_not_overflow():
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = unteach.MeanTeacher([parameter], lr=1.0, momentum=0.0, teacher_rate=0.0)
    parameter.grad = torch.full((4,), 1e30)  # squares overflow float32
    optimizer.step()
    assert optimizer.last_grad_norm == pytest.approx(2e30)
    torch.testing.assert_close(parameter.detach(), torch.full((4,), -0.5))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_gradients_are_refused_and_change_nothing(bad):
    parameters, optimizer = made(steps=3)
    weights, state, norm = copy.deepcopy((parameters, optimizer.state_dict()["state"], optimizer.last_grad_norm))
    set_gradients(parameters, torch.Generator().manual_seed(9))
    parameters[1].grad[3] = bad
    with pytest.raises(FloatingPointError, match=r"step was refused.*First at parameter 1 of group 0, shape \[11\]"):
        optimizer.step()
    assert same(weights, parameters)
    after = optimizer.state_dict()["state"]
    assert all(same(state[i].values(), after[i].values()) for i in state)
    assert optimizer.last_grad_norm == norm


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0: it must be zero or positive"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"teacher_rate": -2.0}, "teacher_rate is -2.0"),
        ({"damping": -0.1}, "damping is -0.1"),
        ({"momentum": 1.0}, "momentum is 1.0: it must be at least 0 and below 1"),
        ({"clip": 0.0}, "clip is 0.0: it must be positive, or None"),
        ({"lr": 0.5, "teacher_rate": 3.0}, "lr · teacher_rate is 1.5: it must be at most 1"),
    ],
)
def test_wrong_settings_say_what_to_change(settings, message):
    with pytest.raises(ValueError, match=message):
        unteach.MeanTeacher(make_parameters(), **settings)


def test_wrong_parameters_say_what_to_change():
    with pytest.raises(ValueError, match=r"dtype torch.complex64: only floating-point"):
        unteach.MeanTeacher([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    optimizer = unteach.MeanTeacher(make_parameters())
    with pytest.raises(ValueError, match="give one clip for all groups"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "clip": 2.0})
    assert len(optimizer.param_groups) == 1
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = unteach.MeanTeacher(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="use dense ones"):
        optimizer.step()
