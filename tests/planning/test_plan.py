from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from steps import held_to, one_step, pull_of
from tiny_models import CONFIGS, save_tiny, small_tokenizer, tiny_model
from unteach.config import ForgetConfig, Method, Precision
from unteach.data import ForgetBatches
from unteach.errors import InputError
from unteach.method.optimizers import make_optimizer
from unteach.method.vocab_head import Head
from unteach.models import load_model, trainable_parameters
from unteach.planning import plan as plan_module
from unteach.planning.plan import Plan, free_disk, free_host_memory, plan
from unteach.planning.rehearsal import LiveBytes, Rehearsal, block_elements
from unteach.training.checkpoint import Checkpoints
from unteach.training.passes import computing, forget_term, held_term, hidden_states
from unteach.training.texts import OtherModels

SHARED = {"token_share": 0.25, "loops_every": 4, "alpha": 0.1}
ADAMW = {"optimizer": "adamw", "lr": 1e-5, **SHARED}
METHODS = {
    "mean teacher": Method(optimizer="mean_teacher", loss="nlul", lr=1e-3, teacher_rate=1.0, damping=1.0, **SHARED),
    "adamw": Method(loss="ll", divergence="qkl_frozen", **ADAMW),
    "adamw it": Method(loss="it", divergence="kl_reverse", **ADAMW),
}


@pytest.fixture
def no_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan the tensors alone, which is what can be counted exactly."""
    monkeypatch.setattr(plan_module, "ALLOWANCE", {"cpu": (0, 0.0)})


def shape_folder(folder: Path, **shape: Any) -> str:
    """A model of any size, with its configuration and tokenizer and a weights file that holds next to nothing."""
    settings = {"num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 304, "max_position_embeddings": 4096}
    LlamaConfig(**(settings | shape)).save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    save_file({"nothing": torch.zeros(1)}, folder / "model.safetensors")
    return str(folder)


def padded(sequences: int, tokens: int) -> list[list[int]]:
    """Full sequences, but for one that is a token shorter: then there is a padding mask."""
    return [[5] * (tokens - (row == 1)) for row in range(sequences)]


def counted(model: Any, known: list[torch.Tensor]) -> LiveBytes:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return LiveBytes([*model.parameters(), *model.buffers(), *gradients, *known])


# ---- rehearsing a pass -------------------------------------------------------------------------------


def test_live_bytes() -> None:
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
        assert live.now == 4000
        del second
        assert live.now == 4000, "the view keeps the memory"
        del third
        assert live.now == 0
        assert view.sum() == 50
    assert live.peak == 8000


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("trainable", ["blocks", "all"])
def test_counts_parameters_without_weights(name: str, trainable: Any, tmp_path: Path) -> None:
    rehearsal = Rehearsal(save_tiny(tmp_path, name), trainable)
    model = tiny_model(name)
    chosen = trainable_parameters(model, trainable)
    assert rehearsal.parameters == sum(p.numel() for p in model.parameters())
    assert rehearsal.trainable == sum(p.numel() for p in chosen.values())
    assert rehearsal.largest == max(p.numel() for p in chosen.values())
    assert rehearsal.head_is_trained == (trainable == "all")
    assert (rehearsal.vocabulary, rehearsal.width) == tuple(model.get_output_embeddings().weight.shape)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "mixtral"])
@pytest.mark.parametrize("trainable", ["blocks", "all"])
def test_rehearsed_passes_take_what_real_ones_take(name: str, trainable: Any, tmp_path: Path) -> None:
    """The model's code is carried out, so no architecture needs a formula of its own."""
    rehearsal = Rehearsal(save_tiny(tmp_path, name), trainable)
    model = tiny_model(name)
    for parameter in trainable_parameters(model, trainable).values():
        parameter.grad = torch.zeros_like(parameter)
    sequences = padded(5, 64)
    with torch.no_grad(), counted(model, []) as live:
        hidden = hidden_states(model, sequences)[0]
    assert rehearsal.reading(5, 64, "fp32") == pytest.approx(live.peak, rel=0.05)

    rehearsed = rehearsal.student_pass(5, 64, "fp32")
    with counted(model, []) as live:
        loss = forget_term(model, pull_of(sequences), 0)[0]
        assert rehearsed.activations == pytest.approx(live.now, rel=0.02)
        loss.backward()
    assert rehearsed.peak == pytest.approx(live.peak, rel=0.06)

    for divergence in ("kl", "qkl_frozen"):
        with counted(model, [hidden]) as live:
            held_term(model, held_to(sequences, divergence, hidden, Head.of(model)), 0)[0].backward()
        assert rehearsal.student_pass(5, 64, "fp32", divergence).peak == pytest.approx(live.peak, rel=0.06)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_checkpointed_passes_keep_the_inputs_of_blocks(name: str, tmp_path: Path) -> None:
    rehearsal = Rehearsal(save_tiny(tmp_path, name), "blocks")
    model = tiny_model(name)
    for parameter in trainable_parameters(model, "blocks").values():
        parameter.grad = torch.zeros_like(parameter)
    rehearsed = rehearsal.student_pass(5, 64, "fp32", checkpointed=True)
    with counted(model, []) as live, computing(model, "fp32", checkpointed=True):
        loss = forget_term(model, pull_of(padded(5, 64)), 0)[0]
        assert rehearsed.activations == pytest.approx(live.now, rel=0.05)
        loss.backward()
    assert 0.98 * live.peak <= rehearsed.peak <= 1.15 * live.peak
    assert rehearsed.activations < 0.5 * rehearsal.student_pass(5, 64, "fp32").activations


@pytest.mark.slow
def test_chunks_of_logits_are_larger_on_a_gpu(tmp_path: Path) -> None:
    shape_folder(tmp_path, hidden_size=64, intermediate_size=64, vocab_size=65536)
    cpu, gpu = (
        Rehearsal(tmp_path, "blocks", kind=kind).student_pass(8, 2048, "fp32", "kl") for kind in ("cpu", "cuda")
    )
    assert gpu.head == pytest.approx(4 * cpu.head, rel=0.1)
    assert gpu.activations == cpu.activations


def test_a_model_that_cannot_be_rehearsed_is_counted_as_llama(tmp_path: Path) -> None:
    rehearsal = Rehearsal(save_tiny(tmp_path, "mixtral"), "blocks")
    model = tiny_model("mixtral")
    trainable_parameters(model, "blocks")
    with counted(model, []) as live:
        loss = forget_term(model, pull_of(padded(5, 64)), 0)[0]
        real = live.now
    assert loss.requires_grad
    assert rehearsal.student_pass(5, 64, "fp32").activations == pytest.approx(real, rel=0.35)


def test_the_constant_of_a_llama_block(tmp_path: Path) -> None:
    """6 D + 2 K + 4 I + H numbers a token and block: what docs/scaling.md explains."""
    shape_folder(tmp_path, hidden_size=512, intermediate_size=1376, num_hidden_layers=6, num_key_value_heads=2)
    rehearsal = Rehearsal(tmp_path, "blocks")
    for sequences, tokens in ((1, 256), (3, 1024)):
        explained = 4 * sequences * tokens * 6 * block_elements(rehearsal.model.config)
        explained += 4 * sequences * (tokens - 1) * 512  # the log-odds' gradient in the last hidden states
        assert rehearsal.student_pass(sequences, tokens, "fp32").activations == pytest.approx(explained, rel=0.02)


@pytest.mark.slow
def test_half_precision_keeps_less_and_copies_weights(tmp_path: Path) -> None:
    shape_folder(tmp_path, hidden_size=512, intermediate_size=1376, num_hidden_layers=4)
    rehearsal = Rehearsal(tmp_path, "blocks")
    single, half = (
        {rows: rehearsal.student_pass(rows, 512, precision).activations for rows in (1, 11)}
        for precision in ("fp32", "bf16")
    )
    assert (half[11] - half[1]) < 0.75 * (single[11] - single[1])
    fixed = half[1] - (half[11] - half[1]) / 10
    assert fixed == pytest.approx(2 * rehearsal.trainable, rel=0.05), "a half-precision copy of the trained weights"


def test_nothing_is_drawn_and_nothing_is_left(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    before = torch.get_rng_state()
    planned = plan(ForgetConfig(model=str(folder)))
    assert torch.equal(torch.get_rng_state(), before)
    assert planned.fits
    assert torch.zeros(2).sum().item() == 0.0, "the mode without data is off again"


# ---- a whole step --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "trainable", "micro_batch", "checkpointed"),
    [(method, trainable, 2, False) for method in METHODS for trainable in ("blocks", "all")]
    + [("mean teacher", "blocks", None, False), ("mean teacher", "blocks", None, True)],
)
@pytest.mark.usefixtures("no_allowance")
def test_a_step_takes_what_was_planned(
    method: str, trainable: Any, micro_batch: int | None, checkpointed: bool, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "model", "llama_tied")
    small = save_tiny(tmp_path / "small") if "it" in method else None
    config = ForgetConfig(
        model=str(folder), base=str(small) if small else None, device="cpu", method=METHODS[method], batch=8,
        general_batch=6, micro_batch=micro_batch, max_tokens=64, general_tokens=48, trainable=trainable,
        checkpoint_activations=checkpointed,
    )  # fmt: skip
    planned = plan(config).memory
    model = load_model(config.model)[0]
    base = load_model(config.base)[0] if config.base else None
    optimizer = make_optimizer(trainable_parameters(model, trainable).values(), config.method)
    general = SimpleNamespace(batch=lambda step, size: padded(size, 48))
    forget = ForgetBatches(padded(8, 64), 0)

    sequences = forget.sequences if config.method.loss != "npo" else []
    others = OtherModels(model, {}, base, sequences, config, [config.method])

    def step() -> None:
        one_step(model, optimizer, forget, general, config.method, config, 0, others)

    step()
    optimizer.zero_grad()
    standing = list(model.parameters()) + ([] if base is None else [*base.parameters()])
    standing += [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    standing += getattr(optimizer, "_teacher", None) or []
    with LiveBytes([*standing, *model.buffers()]) as live:
        step()
    real = live.peak + 4 * sum(tensor.numel() for tensor in standing if tensor.dim())
    training = {moment: size for moment, size in planned.moments.items() if "read" in moment or "optimizer" in moment}
    assert max(training.values()) == pytest.approx(real, rel=0.15 if checkpointed else 0.1)
    parts = planned.parts
    assert parts["weights"] == 4 * sum(p.numel() for p in model.parameters())
    assert parts["teacher"] == parts["gradients"] == planned.checkpoint / (4 if "adamw" in method else 3)
    assert parts["momentum"] == (2 if "adamw" in method else 1) * parts["teacher"]


@pytest.mark.parametrize("method", ["mean teacher", "adamw"])
def test_size_of_a_checkpoint(method: str, tmp_path: Path) -> None:
    config = ForgetConfig(model="micro:target", device="cpu", method=METHODS[method])
    model = load_model(config.model)[0]
    parameters = trainable_parameters(model, "blocks")
    optimizer = make_optimizer(parameters.values(), config.method)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    with optimizer.teacher_weights():
        pass
    optimizer.step()
    content = {"weights": {name: p.detach() for name, p in parameters.items()}, "optimizer": optimizer.state_dict()}
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(1, content, protect=())
    assert plan(config).memory.checkpoint == pytest.approx(checkpoints.path(1).stat().st_size, rel=0.02)


# ---- the plan ------------------------------------------------------------------------------------------


def made(tmp_path: Path, **settings: Any) -> Plan:
    folder = tmp_path / "model"
    if not folder.exists():
        save_tiny(folder)
    return plan(ForgetConfig(model=str(folder), out=str(tmp_path / "run"), device="cpu", **settings))


def test_lines_and_json(tmp_path: Path) -> None:
    planned = made(tmp_path, batch=3, general_batch=2, max_steps=7, max_tokens=50)
    lines = planned.lines()
    assert lines[-1] == "it fits"
    text = "\n".join(lines)
    for part in ("weights", "teacher", "momentum", "gradients", "activations", "vocabulary head", "evaluation"):
        assert f"\n  {part} " in text
    assert "at most 7, each of at most 150 forget tokens and 128 general tokens; at most 1,946 tokens" in text
    content = json.loads(json.dumps(planned.to_dict()))
    assert content["fits"] is True
    assert content["problems"] == []
    assert content["memory"]["needed"] == max(content["memory"]["moments"].values())
    assert content["memory"]["moments"][content["memory"]["peak"]] == content["memory"]["needed"]
    assert content["forget_tokens"] == 150
    assert (tmp_path / "run").exists() is False


@pytest.mark.slow
def test_lengths_follow_the_context(tmp_path: Path) -> None:
    planned = made(tmp_path, batch=1, general_batch=1)
    assert (planned.forget_tokens, planned.general_tokens) == (64, 64), "the context of the tiny model"
    folder = tmp_path / "long"
    planned = plan(ForgetConfig(model=shape_folder(folder, hidden_size=32), batch=1, general_batch=1))
    assert (planned.forget_tokens, planned.general_tokens) == (1024, 512)


def test_the_phase_that_needs_most_counts(tmp_path: Path) -> None:
    adamw = dataclasses.replace(METHODS["adamw"], steps=3, divergence="kl", loss="nlul")
    teacher = METHODS["mean teacher"]
    alone, with_phase = made(tmp_path, method=teacher), made(tmp_path, method=teacher, phases=(adamw,))
    trained = alone.memory.parts["teacher"]
    assert with_phase.memory.parts["momentum"] == 2 * alone.memory.parts["momentum"]
    assert with_phase.memory.checkpoint == alone.memory.checkpoint + trained
    assert with_phase.memory.needed > alone.memory.needed


@pytest.mark.slow
def test_other_models_count(tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", "gpt2")
    alone, both = made(tmp_path), made(tmp_path, reference=str(other))
    weights = both.memory.parts["reference model's weights"]
    assert weights == 4 * sum(p.numel() for p in tiny_model("gpt2").parameters())
    assert both.memory.needed == alone.memory.needed + weights


@pytest.mark.slow
def test_disk_holds_the_model_and_the_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_tiny(folder, dtype=torch.bfloat16)
    one, three = (made(tmp_path, keep_checkpoints=count, save_dtype="source") for count in (1, 3))
    assert three.disk_needed - one.disk_needed == 2 * one.memory.checkpoint
    stored = (folder / "model.safetensors").stat().st_size
    saved = one.disk_needed - 3 * one.memory.checkpoint - plan_module.SMALL_FILES
    assert saved == pytest.approx(stored, rel=0.1)
    wide = made(tmp_path, keep_checkpoints=1, save_dtype="float32")
    assert wide.disk_needed - one.disk_needed == pytest.approx(2 * one.trainable, rel=0.01)
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "step_000001.pt").write_bytes(b"x" * 1000)
    assert made(tmp_path, keep_checkpoints=1, save_dtype="source").disk_needed == one.disk_needed - 1000


@pytest.mark.slow
def test_what_does_not_fit_anywhere(tmp_path: Path) -> None:
    """137 billion parameters: no machine has the memory, and no weight is ever made."""
    folder = shape_folder(tmp_path, hidden_size=65536, intermediate_size=262144, num_attention_heads=64)
    planned = plan(ForgetConfig(model=folder, device="cpu", batch=4, general_batch=4, out=str(tmp_path / "run")))
    block = 4 * 65536**2 + 3 * 65536 * 262144 + 2 * 65536
    assert planned.parameters == 2 * block + 2 * 304 * 65536 + 65536
    assert not planned.fits
    memory, disk = planned.problems()
    assert memory.startswith("the run needs ")
    assert memory.endswith(" free (with micro_batch 1 and checkpoint_activations)")
    assert "use a device with " in memory
    assert "lower keep_checkpoints" in disk
    assert planned.lines()[-2:] == [memory, disk]
    assert "\n" not in memory + disk


def needs(tmp_path: Path, **settings: Any) -> int:
    return made(tmp_path, **settings).memory.needed


@pytest.mark.slow
def test_advice_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is advised is planned again, and fits; the micro-batch that is advised is no smaller than need be."""
    whole = {"batch": 256, "general_batch": 256, "max_tokens": 64}
    enough = needs(tmp_path, micro_batch=32, **whole)
    monkeypatch.setattr(plan_module, "free_device_memory", lambda device: enough)
    (problem,) = made(tmp_path, **whole).problems()
    assert "set micro_batch to 32, which needs " in problem
    assert problem.endswith(" and gives the same result")
    assert made(tmp_path, micro_batch=32, **whole).fits
    assert not made(tmp_path, micro_batch=64, **whole).fits


@pytest.mark.slow
def test_advice_beyond_the_micro_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "ALLOWANCE", {"cpu": (0, 0.0)})
    again: dict[str, Any] = {"micro_batch": 1, "checkpoint_activations": True}
    trained_less = again | {"trainable": "blocks"}
    enough = needs(tmp_path, **trained_less)
    monkeypatch.setattr(plan_module, "free_device_memory", lambda device: enough)
    (problem,) = made(tmp_path, trainable="all").problems()
    assert "set micro_batch to 1 and checkpoint_activations to true and trainable to blocks, which needs " in problem
    assert made(tmp_path, **trained_less).fits

    shape_folder(tmp_path / "long", hidden_size=256, intermediate_size=512, num_hidden_layers=3)
    settings: dict[str, Any] = {"model": str(tmp_path / "long"), "device": "cpu", "out": str(tmp_path), "probes": 1}
    enough = plan(ForgetConfig(**settings, **again, max_tokens=4096, general_tokens=64)).memory.needed
    (problem,) = plan(ForgetConfig(**settings, max_tokens=4096, general_tokens=64)).problems()
    assert "set micro_batch to 1 and checkpoint_activations to true, which needs " in problem
    assert problem.endswith(" and gives the same result, slower")
    shorter = again | {"max_tokens": 1024, "general_tokens": 64}
    enough = plan(ForgetConfig(**settings, **shorter)).memory.needed
    planned = plan(ForgetConfig(**settings, max_tokens=4096, general_tokens=64))
    changes = "set micro_batch to 1 and checkpoint_activations to true and max_tokens to 1024, which needs "
    assert changes in planned.problems()[0]
    assert plan(ForgetConfig(**settings, **shorter)).fits
    assert not plan(ForgetConfig(**settings, **(shorter | {"max_tokens": 2048}))).fits


def test_wrong_models_are_named_together(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError) as raised:
        plan(ForgetConfig(model=str(tmp_path / "missing"), reference=str(empty)))
    found = raised.value.problems
    assert any(line.startswith("model is ") and "there is no such folder" in line for line in found)
    assert any(line.startswith("reference is ") and "it has no weights" in line for line in found)


def test_a_configuration_of_no_language_model(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    (folder / "config.json").write_text('{"model_type": "nonsense"}', encoding="utf-8")
    with pytest.raises(InputError, match="no model can be made from it"):
        plan(ForgetConfig(model=str(folder)))


def test_what_this_machine_has(tmp_path: Path) -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = free_host_memory()
    assert available is not None
    assert 0 < available <= physical
    planned = made(tmp_path)
    assert planned.available is not None
    assert planned.available <= physical
    free = shutil.disk_usage(tmp_path).free
    assert free_disk(str(tmp_path / "a" / "b")) == pytest.approx(free, rel=0.1)
    assert planned.host_needed == 0, "the run's device is main memory itself"


def test_on_a_gpu_an_evaluation_takes_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches are halved until they fit (see ``in_batches``), so only one that holds a single text must fit."""
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=64 * gib))
    folder = shape_folder(tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    config = ForgetConfig(model=folder, micro_batch=1, general_batch=1, probes=256)

    def memory(available: int | None) -> plan_module.Memory:
        return plan_module._Run(config.chosen(), torch.device("cuda"), 1, available).memory(config.chosen())

    wished, plenty = memory(None), memory(64 * gib)
    assert wished.peak == "in an evaluation"
    assert plenty == wished
    less = wished.needed - wished.parts["evaluation"] // 2
    assert less - 10 < memory(less).needed <= less
    least = memory(0)
    assert 0 < least.parts["evaluation"] < wished.parts["evaluation"] / 50
    assert least.needed == max(least.moments.values()) > 0


def test_unknown_sizes_are_no_problem(tmp_path: Path) -> None:
    planned = dataclasses.replace(made(tmp_path), available=None, disk_available=None)
    assert planned.fits
    assert "free memory unknown" in "\n".join(planned.lines())


@pytest.mark.slow
def test_precision_matters(tmp_path: Path) -> None:
    shape_folder(tmp_path, hidden_size=256, intermediate_size=1024, num_hidden_layers=3)
    halves = Precision(forget="fp16", divergence="fp16")
    single, half = (
        plan(ForgetConfig(model=str(tmp_path), device="cpu", batch=16, precision=precision)).memory.parts
        for precision in (Precision(), halves)
    )
    assert half["activations"] < 0.75 * single["activations"]
