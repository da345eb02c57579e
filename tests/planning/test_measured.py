"""Plans beside what was measured: steps on one H200 (torch 2.11), the most that the allocator had given out."""

import dataclasses
import functools

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from tiny_models import save_tiny, small_tokenizer, tiny_model
from unteach.config import ForgetConfig, Method, Precision
from unteach.models import decoder_layers, trainable_parameters
from unteach.planning import plan as plan_module
from unteach.planning.rehearsal import Calls, Rehearsal
from unteach.training.passes import computing, hidden_states

GIB = 2**30
SHAPES = {  # width, inner width, layers, heads, key heads, vocabulary, tied
    "135M": (576, 1536, 30, 9, 3, 49152, False),
    "135M tied": (576, 1536, 30, 9, 3, 49152, True),
    "1.1B": (2048, 5632, 22, 32, 4, 32000, False),
    "7B": (4096, 11008, 32, 32, 32, 32000, False),
}
NLUL = Method(loss="nlul", optimizer="mean_teacher", alpha=0.05, lr=5e-4, teacher_rate=10.0, damping=5.0)
PAPER = {"token_share": 1.0, "loops_every": 0}
TEACHER = dataclasses.replace(NLUL, **PAPER)
LL, IT = (Method(loss=loss, optimizer="adamw", alpha=0.1, lr=1e-5, **PAPER) for loss in ("ll", "it"))
MATCH = Method(loss="match", optimizer="adamw", loss_options={"pull": "gate"})
TF32 = {"precision": Precision(forget="tf32", divergence="tf32"), "micro_batch": 1, "checkpoint_activations": True}
FEW = {"batch": 4, "general_batch": 4}
LORA = {"adapter": "lora", "rank": 16, "save": "adapter", "micro_batch": 2}
ONE = {"batch": 32, "general_batch": 16, "max_tokens": 512, "compile": True}
MEASURED = [  # benchmarks: step.py, then adapters.py, then paper_rows.py; whole batches in one pass
    ("7B", {"micro_batch": 4}, 131.58),
    ("7B", {"micro_batch": 4, "compile": True}, 127.78),
    ("1.1B", {"micro_batch": 20}, 52.60),
    ("1.1B", {"micro_batch": 20, "compile": True}, 45.31),
    ("7B", {"micro_batch": 2}, 120.87),
    ("7B", {"micro_batch": 2, "state_bits": 16}, 72.67),
    pytest.param("7B", {"micro_batch": 3, "state_bits": 16, "compile": True}, 75.16, marks=pytest.mark.slow),
    pytest.param("7B", {"micro_batch": 2, "state_bits": 16, "compile": True}, 70.95, marks=pytest.mark.slow),
    pytest.param("7B", LORA | {"base_bits": 16}, 25.05, marks=pytest.mark.slow),
    pytest.param("7B", LORA | {"base_bits": 4, "checkpoint_activations": True}, 7.23, marks=pytest.mark.slow),
    ("7B", FEW | {"micro_batch": 4, "method": TEACHER}, 121.0),
    pytest.param("7B", FEW | TF32 | {"method": LL}, 122.73, marks=pytest.mark.slow),
    pytest.param("7B", FEW | TF32 | {"method": IT, "base": "1.1B"}, 126.83, marks=pytest.mark.slow),
    ("135M", ONE | {"method": MATCH, "base": "135M", "keep": "documents", "keep_batch": 24}, 12.8),
    pytest.param("135M", ONE | {"reference": "135M tied"}, 11.9, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The plan's bytes of a step on a GPU; what was rehearsed once is not rehearsed again."""
    top = tmp_path_factory.mktemp("shapes")
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    for name, shape in SHAPES.items():
        settings = dict(zip((*names, "vocab_size", "tie_word_embeddings"), shape, strict=True))
        LlamaConfig(**settings, max_position_embeddings=2048).save_pretrained(top / name)
        small_tokenizer().save_pretrained(top / name)
        save_file({"nothing": torch.zeros(1)}, top / name / "model.safetensors")
    runs = {}

    def step(shape, settings):
        usual = {"method": NLUL, "batch": 40, "general_batch": 40, "max_tokens": 1024, "general_tokens": 512}
        usual["precision"] = Precision(forget="fp16", divergence="fp16")
        others = {name: str(top / settings[name]) for name in ("base", "reference") if name in settings}
        config = ForgetConfig(**(usual | settings | others), model=str(top / shape)).chosen()
        models = (shape, *others.values())
        if models not in runs:
            runs[models] = plan_module._Run(config, torch.device("cuda"), 1, None)
        return runs[models].memory(config).needed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rehearsal, "evaluation", lambda *_, **__: 0)  # it takes what is free
        yield step


@pytest.mark.parametrize(("shape", "settings", "measured"), MEASURED)
def test_plans_are_at_most_a_tenth_above_what_was_measured_and_never_below(shape, settings, measured, planned):
    assert 1.0 <= planned(shape, settings) / (measured * GIB) <= 1.1


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(("precision", "once"), [("fp32", True), ("bf16", True), ("bf16", False)])
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_compiled_block_keeps_what_was_rehearsed(name, precision, once, tmp_path, monkeypatch):
    """As ``torch.compile`` traces and divides it, run by its plain backend, with products as on a GPU."""
    traced = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch.nn.Module, "compile", traced)
    monkeypatch.setattr("unteach.models.precision.product_in_float32", lambda a, b: torch.mm(a, b).float())
    monkeypatch.setattr("unteach.models.precision._product", torch.mm)
    torch.compiler.reset()
    rehearsal = Rehearsal(save_tiny(tmp_path, name), "blocks", kind="cuda")
    model = tiny_model(name)
    trainable_parameters(model, "blocks")
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with computing(model, precision, compiled=True, once=once):
        copies = [m.rounded for m in model.modules() if getattr(m, "rounded", None) is not None]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = hidden_states(model, [[5] * 64] * 5)[0]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for tensor in (*model.parameters(), *model.buffers(), *gradients, *copies):
            kept.pop(tensor.untyped_storage()._cdata, None)
        real = sum(storage.nbytes() for storage in kept.values()) + sum(tensor.nbytes for tensor in copies)
    real += hidden.nbytes
    rehearsed, eager = (
        rehearsal._blocks(5, 64, precision, Calls(compiled=compiled, once=once))[0] for compiled in (True, False)
    )
    assert rehearsed == pytest.approx(real, rel=0.002)
    assert rehearsed < 0.95 * eager


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"micro_batch": 2, "state_bits": 16}, 78),
        pytest.param(LORA | {"base_bits": 4}, 18, marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_keep_no_copy_of_weights_that_are_rounded_when_met(settings, most, planned):
    eager, compiled = planned("7B", settings), planned("7B", settings | {"compile": True})
    assert compiled < eager
    assert compiled <= most * GIB


def test_the_constants_of_a_llama_block(tmp_path):
    """Bytes of a token in half precision, eager and compiled: what docs/scaling.md and planning/compiled.py say."""
    width, inner, heads, keys = 512, 1376, 8, 128
    shape = {"hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": 2}
    LlamaConfig(**shape, num_hidden_layers=4, vocab_size=304).save_pretrained(tmp_path)
    rehearsal = Rehearsal(tmp_path, "blocks", kind="cuda")
    blocks = len(decoder_layers(rehearsal.model))
    eager, compiled = (
        rehearsal._blocks(2, 256, "fp16", calls)[0] - rehearsal._blocks(1, 256, "fp16", calls)[0]
        for calls in (Calls(), Calls(compiled=True))
    )
    both = 4 * keys + 4 * heads + 8  # keys and values, normalisers of attention and norms
    each, each_compiled = 16 * width + 8 * inner + both, 14 * width + 6 * inner + both
    assert eager / 256 == pytest.approx(blocks * each + 4 * width, rel=0.001), "and the last hidden states"
    first = each  # is not compiled
    assert compiled / 256 == pytest.approx(first + (blocks - 1) * each_compiled + 4 * width, rel=0.001)
