import dataclasses
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from steps import held_to, one_step, pull_of
from tiny_models import CONFIGS, save_tiny, small_tokenizer, tiny_model
from unteach.config import ForgetConfig, Method, Precision
from unteach.data import ForgetBatches
from unteach.errors import InputError
from unteach.method.optimizers import make_optimizer
from unteach.method.vocab_head import Head
from unteach.models import load_model, trainable_parameters
from unteach.planning import plan as plan_module
from unteach.planning.machine import free_disk, free_host_memory
from unteach.planning.plan import plan
from unteach.planning.rehearsal import Calls, LiveBytes, Rehearsal, block_elements
from unteach.training.checkpoint import Checkpoints
from unteach.training.passes import HeldText, computing, forget_term, held_term, hidden_states, read_change
from unteach.training.texts import OtherModels

SHARED = {"token_share": 0.25, "loops_every": 4, "alpha": 0.1}
ADAMW = {"optimizer": "adamw", "lr": 1e-5, **SHARED}
METHODS = {
    "mean teacher": Method(optimizer="mean_teacher", loss="nlul", lr=1e-3, teacher_rate=1.0, damping=1.0, **SHARED),
    "adamw": Method(loss="ll", divergence="qkl_frozen", **ADAMW),
    "adamw it": Method(loss="it", divergence="kl_reverse", **ADAMW),
}


@pytest.fixture
def no_allowance(monkeypatch):
    """Plan the tensors alone, which is what can be counted exactly."""
    monkeypatch.setattr(plan_module, "ALLOWANCE", {"cpu": (0, 0.0)})


def shape_folder(folder, **shape):
    """A model of any size, with its configuration and tokenizer and a weights file that holds next to nothing."""
    settings = {"num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 304, "max_position_embeddings": 4096}
    LlamaConfig(**(settings | shape)).save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    save_file({"nothing": torch.zeros(1)}, folder / "model.safetensors")
    return str(folder)


def padded(sequences, tokens):
    """Full sequences, but for one that is a token shorter: then there is a padding mask."""
    return [[5] * (tokens - (row == 1)) for row in range(sequences)]


def numbers(parameters):
    return sum(parameter.numel() for parameter in parameters)


def test_live_bytes():
    kept = torch.zeros(100)
    with LiveBytes([kept]) as live:
        kept.add_(1)
        view = kept[:50]
        first = torch.ones(1000)
        second = first * 2
        assert live.now == 8000
        del first
        assert (live.now, live.peak) == (4000, 8000)
        third = second.view(10, 100)
        del second
        assert live.now == 4000, "the view keeps the memory"
        del third
        assert live.now == 0
        assert view.sum() == 50
    assert live.peak == 8000


@pytest.mark.parametrize("trainable", ["blocks", "all"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_rehearsal_takes_what_the_real_model_takes(name, trainable, tmp_path):
    """The model's code is carried out, so no architecture needs a formula of its own."""
    rehearsal, model = Rehearsal(save_tiny(tmp_path, name), trainable), tiny_model(name)
    chosen = trainable_parameters(model, trainable).values()
    assert rehearsal.parameters == numbers(model.parameters())
    assert rehearsal.trainable == numbers(chosen)
    assert rehearsal.largest == max(p.numel() for p in chosen)
    assert rehearsal.head_is_trained == (trainable == "all")
    assert (rehearsal.vocabulary, rehearsal.width) == tuple(model.get_output_embeddings().weight.shape)

    for parameter in chosen:
        parameter.grad = torch.zeros_like(parameter)
    standing = [*model.parameters(), *model.buffers(), *(parameter.grad for parameter in chosen)]
    sequences = padded(5, 64)
    rehearsed = rehearsal.student_pass(5, 64, "fp32")
    with LiveBytes(standing) as live:
        loss = forget_term(model, pull_of(sequences), 0)[0]
        real = live.now
        loss.backward()
    if name == "mixtral":  # cannot be rehearsed: counted as a Llama
        assert rehearsed.activations == pytest.approx(real, rel=0.35)
        return
    assert rehearsed.activations == pytest.approx(real, rel=0.02)
    assert rehearsed.peak == pytest.approx(live.peak, rel=0.06)
    with torch.no_grad(), LiveBytes(standing) as live:
        hidden = hidden_states(model, sequences)[0]
    assert rehearsal.reading(5, 64, "fp32") == pytest.approx(live.peak, rel=0.05)
    for divergence in ("kl", "qkl_frozen"):
        with LiveBytes([*standing, hidden]) as live:
            held_term(model, held_to(sequences, divergence, hidden, Head.of(model)), 0)[0].backward()
        assert rehearsal.student_pass(5, 64, "fp32", divergence).peak == pytest.approx(live.peak, rel=0.06)
    if name in ("llama", "gpt2") and trainable == "blocks":
        with LiveBytes(standing) as live, computing(model, "bf16"):
            forget_term(model, pull_of(sequences), 0)[0].backward()
        assert rehearsal.student_pass(5, 64, "bf16").peak == pytest.approx(live.peak, rel=0.06)
        checkpointed = rehearsal.student_pass(5, 64, "fp32", calls=Calls(checkpointed=True))
        with LiveBytes(standing) as live, computing(model, "fp32", checkpointed=True):
            loss = forget_term(model, pull_of(sequences), 0)[0]
            assert checkpointed.activations == pytest.approx(live.now, rel=0.05)
            loss.backward()
        assert 0.98 * live.peak <= checkpointed.peak <= 1.15 * live.peak
        assert checkpointed.activations < 0.5 * rehearsed.activations


@pytest.mark.slow
def test_chunks_of_logits_are_larger_on_a_gpu(tmp_path):
    shape_folder(tmp_path, hidden_size=64, intermediate_size=64, vocab_size=65536)
    cpu, gpu = (Rehearsal(tmp_path, "blocks", kind=k).student_pass(8, 2048, "fp32", "kl") for k in ("cpu", "cuda"))
    assert gpu.head == pytest.approx(4 * cpu.head, rel=0.1)
    assert gpu.activations == cpu.activations


def test_the_constant_of_a_llama_block(tmp_path):
    """6 D + 2 K + 4 I + H numbers a token and block: what docs/scaling.md explains."""
    shape_folder(tmp_path, hidden_size=512, intermediate_size=1376, num_hidden_layers=6, num_key_value_heads=2)
    rehearsal = Rehearsal(tmp_path, "blocks")
    for sequences, tokens in ((1, 256), (3, 1024)):
        explained = 4 * sequences * tokens * 6 * block_elements(rehearsal.model.config)
        explained += 4 * sequences * (tokens - 1) * 512  # the log-odds' gradient in the last hidden states
        assert rehearsal.student_pass(sequences, tokens, "fp32").activations == pytest.approx(explained, rel=0.02)


@pytest.mark.slow
def test_half_precision_keeps_less_and_copies_weights(tmp_path):
    folder = shape_folder(tmp_path, hidden_size=512, intermediate_size=1376, num_hidden_layers=4)
    rehearsal = Rehearsal(tmp_path, "blocks")
    single, half = (
        {rows: rehearsal.student_pass(rows, 512, precision).activations for rows in (1, 11)}
        for precision in ("fp32", "bf16")
    )
    assert (half[11] - half[1]) < 0.75 * (single[11] - single[1])
    fixed = half[1] - (half[11] - half[1]) / 10
    assert fixed == pytest.approx(2 * rehearsal.trainable, rel=0.05), "a half-precision copy of the trained weights"
    single, half = (
        plan(ForgetConfig(model=folder, device="cpu", batch=16, precision=precision)).memory.parts["activations"]
        for precision in (Precision(), Precision(forget="fp16", divergence="fp16"))
    )
    assert half < 0.75 * single


@pytest.mark.parametrize(
    ("method", "trainable", "micro_batch", "checkpointed"),
    [(method, trainable, 2, False) for method in METHODS for trainable in ("blocks", "all")]
    + [("mean teacher", "blocks", None, False), ("mean teacher", "blocks", None, True)],
)
@pytest.mark.usefixtures("no_allowance")
def test_a_step_takes_what_was_planned(method, trainable, micro_batch, checkpointed, tmp_path):
    base = str(save_tiny(tmp_path / "small")) if "it" in method else None
    config = ForgetConfig(
        model=str(save_tiny(tmp_path / "model", "llama_tied")), base=base, device="cpu", method=METHODS[method],
        batch=8, general_batch=6, micro_batch=micro_batch, max_tokens=64, general_tokens=48, trainable=trainable,
        checkpoint_activations=checkpointed,
    )  # fmt: skip
    planned = plan(config).memory
    model, base_model = load_model(config.model)[0], load_model(base)[0] if base else None
    optimizer = make_optimizer(trainable_parameters(model, trainable).values(), config.method)
    general, forget = SimpleNamespace(batch=lambda step, size: padded(size, 48)), ForgetBatches(padded(8, 64), 0)
    others = OtherModels(model, {}, base_model, forget.sequences, config, [config.method])

    def step():
        one_step(model, optimizer, forget, general, config.method, config, 0, others)

    step()
    optimizer.zero_grad()
    standing = [*model.parameters(), *(base_model.parameters() if base else ())]
    standing += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    standing += getattr(optimizer, "_teacher", None) or []
    with LiveBytes([*standing, *model.buffers()]) as live:
        step()
    real = live.peak + 4 * numbers(tensor for tensor in standing if tensor.dim())
    training = [size for moment, size in planned.moments.items() if "read" in moment or "optimizer" in moment]
    assert max(training) == pytest.approx(real, rel=0.15 if checkpointed else 0.1)
    parts = planned.parts
    assert parts["weights"] == 4 * numbers(model.parameters())
    assert parts["teacher"] == parts["gradients"] == planned.checkpoint / (4 if "adamw" in method else 3)
    assert parts["momentum"] == (2 if "adamw" in method else 1) * parts["teacher"]


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.usefixtures("no_allowance")
def test_a_lean_step_takes_what_was_planned(precision, tmp_path):
    folder = shape_folder(tmp_path / "model", hidden_size=128, intermediate_size=384, num_hidden_layers=4)
    config = ForgetConfig(
        model=folder, device="cpu", method=METHODS["mean teacher"], batch=4, general_batch=4, micro_batch=1,
        max_tokens=32, general_tokens=32, precision=Precision(forget=precision, divergence=precision), state_bits=16,
    )  # fmt: skip
    planned = plan(config).memory
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    optimizer = make_optimizer(trainable_parameters(model, "blocks").values(), config.method, 16)
    general, forget = SimpleNamespace(batch=lambda step, size: padded(size, 32)), ForgetBatches(padded(4, 32), 0)
    others = OtherModels(model, {}, None, forget.sequences, config, [config.method])

    def step():
        one_step(model, optimizer, forget, general, config.method, config, 0, others)

    step()
    standing = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    with LiveBytes([*standing, *model.buffers()]) as live:
        step()
    real = live.peak + sum(tensor.nbytes for tensor in standing)
    training = {moment: size for moment, size in planned.moments.items() if "read" in moment or "optimizer" in moment}
    assert max(training.values()) == pytest.approx(real, rel=0.1)
    parts, trained = planned.parts, sum(p.numel() for p in trainable_parameters(model, "blocks").values())
    assert parts["teacher"] + parts["momentum"] == sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    assert parts["momentum"] == 2 * trained + 4 * trained // 1024
    full = plan(dataclasses.replace(config, state_bits=32)).memory
    assert planned.needed < full.needed
    assert planned.checkpoint == pytest.approx(full.checkpoint * 8 / 12, rel=0.01)
    with pytest.raises(InputError, match="state_bits is 16: 2 processes"):
        plan(config, ranks=2)


@pytest.mark.slow
@pytest.mark.usefixtures("no_allowance")
def test_a_lean_state_is_advised_before_adapters(made, tmp_path, monkeypatch):
    folder = shape_folder(tmp_path / "wide", hidden_size=256, intermediate_size=1024)
    few = {"model": folder, "batch": 1, "general_batch": 1, "max_tokens": 64, "general_tokens": 64, "probes": 1}
    few |= {"method": METHODS["mean teacher"], "checkpoint_activations": True}
    monkeypatch.setattr(plan_module, "free_host_memory", lambda: 2**60)
    enough = made(**few, state_bits=16).memory.needed
    monkeypatch.setattr(plan_module, "free_host_memory", lambda: enough)
    (problem,) = made(**few).problems()
    assert "set state_bits to 16, which needs " in problem
    monkeypatch.setattr(plan_module, "free_host_memory", lambda: enough - 1)
    (problem,) = made(**few).problems()
    assert "set adapter to lora and base_bits to 8, which needs " in problem
    (problem,) = made(**few, state_bits=16).problems()
    assert "set adapter to lora and state_bits to 32 and base_bits to 8, which needs " in problem
    for other in ({"method": METHODS["adamw"]}, {"divergence_form": "tangent"}):
        (problem,) = made(**(few | other)).problems()
        assert "state_bits" not in problem


@pytest.mark.parametrize(("precision", "copies"), [("fp32", 2), ("bf16", 1)])
@pytest.mark.slow
@pytest.mark.usefixtures("no_allowance")
def test_the_tangent_form_takes_what_was_planned(precision, copies):
    """Beside the way itself: weights and way as they are computed with, and a pass that holds all attention scores."""
    model = load_model("micro:target")[0]
    parameters = list(trainable_parameters(model, "blocks").values())
    way = [torch.full_like(p, 1e-5) for p in parameters]
    held = HeldText(sequences=padded(4, 256), parts=[(range(4), 1.0)], divergence="kl")
    with LiveBytes() as live:
        read_change(model, parameters, way, Head.of(model).detached(), [held], precision)
    config = ForgetConfig(
        model="micro:target", device="cpu", general_batch=4, general_tokens=256,
        precision=Precision(divergence=precision), divergence_form="tangent",
    )  # fmt: skip
    parts, plain = (plan(c).memory for c in (config, dataclasses.replace(config, divergence_form="difference")))
    trained = 4 * numbers(parameters)
    assert parts.parts["way from the teacher"] == (1 + copies) * trained
    reading = "while the teacher reads"
    outputs = parts.parts["teacher's outputs"]
    more = parts.moments[reading] - sum(parts.parts[name] for name in ("weights", "teacher", "momentum")) - trained
    assert more - outputs == pytest.approx(live.peak - outputs, rel=0.15)
    assert plain.moments[reading] < parts.moments[reading]


@pytest.mark.parametrize("method", ["mean teacher", "adamw"])
def test_size_of_a_checkpoint(method, tmp_path):
    config = ForgetConfig(model="micro:target", device="cpu", method=METHODS[method])
    parameters = trainable_parameters(load_model(config.model)[0], "blocks")
    optimizer = make_optimizer(parameters.values(), config.method)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    with optimizer.teacher_weights():
        pass
    optimizer.step()
    content = {"weights": {name: p.detach() for name, p in parameters.items()}, "optimizer": optimizer.state_dict()}
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(1, content, protect=())
    written = sum(file.stat().st_size for file in checkpoints.path(1).iterdir())
    assert plan(config).memory.checkpoint == pytest.approx(written, rel=0.02)


@pytest.fixture
def made(tmp_path):
    """Plans a run of the tiny model."""
    folder = save_tiny(tmp_path / "model")

    def planned(**settings):
        return plan(ForgetConfig(**({"model": str(folder), "out": str(tmp_path / "run"), "device": "cpu"} | settings)))

    return planned


def test_lines_and_json(made, tmp_path):
    before = torch.get_rng_state()
    planned = made(batch=3, general_batch=2, max_steps=7, max_tokens=50)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.zeros(2).sum().item() == 0.0, "the mode without data is off again"
    text = "\n".join(planned.lines())
    assert text.endswith("\nit fits")
    for part in ("weights", "teacher", "momentum", "gradients", "activations", "vocabulary head", "evaluation"):
        assert f"\n  {part} " in text
    assert "at most 7, each of at most 150 forget tokens and 128 general tokens; at most 1,946 tokens" in text
    content = json.loads(json.dumps(planned.to_dict()))
    assert (content["fits"], content["problems"], content["forget_tokens"]) == (True, [], 150)
    memory = content["memory"]
    assert memory["moments"][memory["peak"]] == memory["needed"] == max(memory["moments"].values())
    assert not (tmp_path / "run").exists()
    unknown = dataclasses.replace(planned, available=None, disk_available=None)
    assert unknown.fits
    assert "free memory unknown" in "\n".join(unknown.lines())


@pytest.mark.slow
def test_lengths_follow_the_context(made, tmp_path):
    planned = made(batch=1, general_batch=1)
    assert (planned.forget_tokens, planned.general_tokens) == (64, 64), "the context of the tiny model"
    planned = made(model=shape_folder(tmp_path / "long", hidden_size=32), batch=1, general_batch=1)
    assert (planned.forget_tokens, planned.general_tokens) == (1024, 512)


def test_other_models_and_the_phase_that_needs_most_count(made, tmp_path):
    adamw = dataclasses.replace(METHODS["adamw"], steps=3, divergence="kl", loss="nlul")
    teacher, other = METHODS["mean teacher"], str(save_tiny(tmp_path / "other", "gpt2"))
    alone, with_phase = made(method=teacher).memory, made(method=teacher, phases=(adamw,)).memory
    with_other = made(method=teacher, reference=other).memory
    weights = with_other.parts["reference model's weights"]
    assert weights == 4 * numbers(tiny_model("gpt2").parameters())
    assert with_other.needed == alone.needed + weights
    assert with_phase.parts["momentum"] == 2 * alone.parts["momentum"]
    assert with_phase.checkpoint == alone.checkpoint + alone.parts["teacher"]
    assert with_phase.needed > alone.needed


def test_what_a_method_keeps_besides(made, monkeypatch):
    """Keep documents are read as general text is; an anchor keeps the first weights, two gradients are not one."""
    monkeypatch.setattr(plan_module, "ALLOWANCE", {"cpu": (0, 0.0)})
    few = {"batch": 4, "general_batch": 4, "keep_batch": 8, "max_tokens": 64, "general_tokens": 32, "micro_batch": 4}
    teacher = METHODS["mean teacher"]
    plain, kept = (made(**few, method=teacher, keep=keep).memory for keep in (None, "documents"))
    width = CONFIGS["llama"].hidden_size
    assert kept.parts["teacher's outputs"] - plain.parts["teacher's outputs"] == 4 * width * 8 * 63
    reading, of_keep = (f"while the student reads {text}" for text in ("general text", "keep documents"))
    assert of_keep not in plain.moments
    assert kept.moments[of_keep] > kept.moments[reading] > plain.moments[reading]
    trained = plain.parts["teacher"]
    anchored = made(**few, method=dataclasses.replace(teacher, anchor=1.0)).memory
    assert anchored.parts["model before the run"] == trained
    assert anchored.parts["teacher's outputs"] == 2 * plain.parts["teacher's outputs"]
    projected = made(**few, method=dataclasses.replace(teacher, project_conflicts=True)).memory
    assert projected.moments[reading] == plain.moments[reading] + trained
    undial = made(**few, method=dataclasses.replace(teacher, loss="undial")).memory
    assert undial.parts["model before the run"] == trained
    assert undial.moments["while the base model reads"] > plain.moments["while the base model reads"]
    alone = made(**few, method=dataclasses.replace(teacher, loops_every=0)).memory
    first = "while the student reads forget text"
    assert alone.moments[first] < plain.moments[first], "one micro-batch: no gradients are there yet"
    perhaps = made(**few, method=dataclasses.replace(teacher, loops_every=6, loops_once_found=True)).memory
    assert perhaps.moments[first] == plain.moments[first], "loops may be found"


@pytest.mark.slow
def test_disk_holds_the_model_and_the_checkpoints(made, tmp_path):
    stored = save_tiny(tmp_path / "model", dtype=torch.bfloat16) / "model.safetensors"
    one, three = (made(keep_checkpoints=count, save_dtype="source") for count in (1, 3))
    assert three.disk_needed - one.disk_needed == 2 * one.memory.checkpoint
    saved = one.disk_needed - 3 * one.memory.checkpoint - plan_module.SMALL_FILES
    assert saved == pytest.approx(stored.stat().st_size, rel=0.1)
    wide = made(keep_checkpoints=1, save_dtype="float32")
    assert wide.disk_needed - one.disk_needed == pytest.approx(2 * one.trainable, rel=0.01)
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "rank_0.safetensors").write_bytes(b"x" * 1000)
    assert made(keep_checkpoints=1, save_dtype="source").disk_needed == one.disk_needed - 1000


@pytest.mark.slow
def test_what_does_not_fit_anywhere(made, tmp_path):
    """137 billion parameters: no machine has the memory, and no weight is ever made."""
    folder = shape_folder(tmp_path, hidden_size=65536, intermediate_size=262144, num_attention_heads=64)
    planned = made(model=folder, batch=4, general_batch=4)
    block = 4 * 65536**2 + 3 * 65536 * 262144 + 2 * 65536
    assert planned.parameters == 2 * block + 2 * 304 * 65536 + 65536
    assert not planned.fits
    memory, disk = planned.problems()
    assert memory.startswith("the run needs ")
    assert "use a device with " in memory
    assert memory.endswith(" free (with micro_batch 1 and checkpoint_activations)")
    assert "lower keep_checkpoints" in disk
    assert planned.lines()[-2:] == [memory, disk]
    assert "\n" not in memory + disk


@pytest.mark.slow
@pytest.mark.usefixtures("no_allowance")
def test_advice_fits(made, tmp_path, monkeypatch):
    """Whatever is advised is planned again, and fits; what is advised is no smaller than need be."""
    long = shape_folder(tmp_path / "long", hidden_size=256, intermediate_size=512, num_hidden_layers=3)
    whole = {"batch": 256, "general_batch": 256, "max_tokens": 64}
    texts = {"model": long, "probes": 1, "max_tokens": 4096, "general_tokens": 64}
    few = texts | {"adapter": "lora", "base_bits": 4}
    again = {"micro_batch": 1, "checkpoint_activations": True}
    slower = "micro_batch to 1 and checkpoint_activations to true"
    for settings, fitting, too_large, advice, ending in (
        (whole, {"micro_batch": 32}, {"micro_batch": 64}, "micro_batch to 32", " and gives the same result"),
        ({"trainable": "all"}, again | {"trainable": "blocks"}, {}, f"{slower} and trainable to blocks", ""),
        (texts, again, {}, slower, " and gives the same result, slower"),
        (texts, again | {"adapter": "lora"}, again, f"{slower} and adapter to lora", ""),
        (few, again | {"max_tokens": 1024}, again | {"max_tokens": 2048}, f"{slower} and max_tokens to 1024", ""),
    ):
        monkeypatch.setattr(plan_module, "free_host_memory", lambda: 2**60)
        enough = made(**(settings | fitting)).memory.needed
        monkeypatch.setattr(plan_module, "free_host_memory", lambda enough=enough: enough)
        (problem,) = made(**settings).problems()
        assert f"set {advice}, which needs " in problem
        assert problem.endswith(ending)
        assert made(**(settings | fitting)).fits
        assert not made(**(settings | too_large)).fits


def test_wrong_models_are_named_together(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError) as raised:
        plan(ForgetConfig(model=str(tmp_path / "missing"), reference=str(tmp_path / "empty")))
    found = raised.value.problems
    assert any(line.startswith("model is ") and "there is no such folder" in line for line in found)
    assert any(line.startswith("reference is ") and "it has no weights" in line for line in found)
    folder = save_tiny(tmp_path / "foreign")
    (folder / "config.json").write_text('{"model_type": "nonsense"}', encoding="utf-8")
    with pytest.raises(InputError, match="no model can be made from it"):
        plan(ForgetConfig(model=str(folder)))


def test_what_this_machine_has(made, tmp_path):
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    planned = made()
    assert 0 < free_host_memory() <= physical
    assert planned.available <= physical
    assert planned.host_needed == 0, "the run's device is main memory itself"
    assert free_disk(str(tmp_path / "a" / "b")) == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)


def test_on_a_gpu_an_evaluation_takes_what_is_free(tmp_path, monkeypatch):
    """Its batches are halved until they fit (see ``in_batches``), so only one that holds a single text must fit."""
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=64 * gib))
    folder = shape_folder(tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    config = ForgetConfig(model=folder, micro_batch=1, general_batch=1, probes=256).chosen()

    run = plan_module._Run(config, torch.device("cuda"), 1, None)

    def memory(available):
        run.available = available
        return run.memory(config)

    wished, plenty = memory(None), memory(64 * gib)
    assert wished.peak == "in an evaluation"
    assert plenty == wished
    less = wished.needed - wished.parts["evaluation"] // 2
    assert less - 10 < memory(less).needed <= less
    least = memory(0)
    assert 0 < least.parts["evaluation"] < wished.parts["evaluation"] / 50
    assert least.needed == max(least.moments.values()) > 0
