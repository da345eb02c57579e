"""Adapters as layers, as PEFT's folders and models, and weights in few bits under them."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tiny_models import save_tiny, small_tokenizer, tiny_model
from unteach.config import ForgetConfig
from unteach.errors import InputError
from unteach.evaluation.command import hash_weights
from unteach.method.mean_teacher import MeanTeacher
from unteach.models import decoder_layers, load_model, read_context_length
from unteach.models.adapters import (
    AdaptedLinear,
    adapted_layers,
    adapter_parameters,
    add_adapters,
    keep_base_in,
    merge,
    merged_weights,
)
from unteach.models.load import half_of
from unteach.models.quantised import GROUP, FrozenLinear, rounded
from unteach.models.save import save_adapter, save_model
from unteach.training.passes import computing

IDS = torch.tensor([[0, 17, 200, 33, 150, 9, 270, 71]])


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def moved(model, size=0.2):
    """The same with its adapters' weights moved at random."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return model


def adapted(name="llama", rank=4, bits=32, seed=0):
    model = tiny_model(name)
    add_adapters(model, decoder_layers(model), rank, seed)
    keep_base_in(model, bits, None)
    return model


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("peft", reason="peft is not installed: its folders and models are not tried")


def made_by_peft(peft, folder, name="llama", **settings):
    """A base and an adapter that PEFT has written, and the model that PEFT makes of them."""
    base = save_tiny(folder / "base", name)
    plain = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 5}
    model = peft.get_peft_model(load_model(str(base))[0], peft.LoraConfig(**(plain | settings)))
    moved(model.get_base_model())
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder / "lora")
    return folder / "lora", model.eval()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [GROUP, 100])
def test_frozen_layers_compute_with_rounded_weights(bits, columns):
    weight, bias, x = torch.randn(24, columns), torch.randn(24), torch.randn(5, columns, requires_grad=True)
    layer, expected = FrozenLinear(weight, bias, bits), rounded(weight, bits)
    assert torch.equal(layer.whole(), expected)
    groups = -(-columns // GROUP)
    assert layer.codes.nbytes == 24 * groups * GROUP * bits // 8
    torch.testing.assert_close(layer(x), x @ expected.T + bias)
    upstream = torch.randn(5, 24)
    torch.testing.assert_close(torch.autograd.grad(layer(x), x, upstream)[0], upstream @ expected)
    assert not list(layer.parameters())


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_compiled_frozen_layers_give_the_same_bits(bits, backend):
    """In one graph, by an operator that is given the codes: no whole weight is kept for the backward pass."""
    layer, x = FrozenLinear(torch.randn(24, 100), None, bits), torch.randn(2, 5, 100, requires_grad=True)
    torch.compiler.reset()
    compiled, kept = torch.compile(layer, backend=backend, fullgraph=True), []
    for precision in (torch.float32, torch.bfloat16, torch.float16):
        found = []
        for call in (layer, compiled):
            with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32):
                with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
                    output = call(x)
                found.append((output, torch.autograd.grad(output, x, torch.full_like(output, 0.3))[0]))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert kept
    assert not any(t.is_floating_point() and t.shape[-1] == 100 and t is not layer.codes for t in kept)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_sixteen_bits_keep_half_precision_exactly(half):
    weight = torch.randn(8, 16).to(half)
    layer = FrozenLinear(weight.float(), None, 16, half)
    assert torch.equal(layer.whole(), weight.float())
    assert layer.codes.nbytes == 2 * weight.numel()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "qwen2_bias"])
@pytest.mark.parametrize("bits", [32, 8])
def test_new_adapters_change_nothing_and_merge_into_the_weights(name, bits):
    model, plain = adapted(name, bits=bits), tiny_model(name)
    if bits == 8:
        for part, value in merged_weights(model):
            given = plain.get_parameter(part)
            assert not torch.equal(value, given)
            assert (value - given).abs().max() < 0.01
            given.data.copy_(value)
    assert torch.allclose(logits(model), logits(plain), atol=1e-5)
    chosen = adapter_parameters(moved(model))
    assert {p for p in model.parameters() if p.requires_grad} == {*chosen.values()}
    assert all(".lora_" in part for part in chosen)
    expected, values = logits(model), dict(merged_weights(model))
    assert not torch.allclose(expected, logits(plain), atol=0.1)
    assert sorted(merge(model)) == sorted(values)
    assert {part: tuple(p.shape) for part, p in model.named_parameters()} == {
        part: tuple(p.shape) for part, p in plain.named_parameters()
    }
    assert torch.allclose(logits(model), expected, atol=1e-4)


def test_the_seed_draws_the_adapters():
    first, again, other = (adapter_parameters(adapted(seed=seed)) for seed in (0, 0, 1))
    assert all(torch.equal(p, again[name]) for name, p in first.items())
    assert not torch.equal(*(next(iter(each.values())) for each in (first, other)))


def test_a_new_adapter_has_the_gradient_of_the_weights_it_stands_for():
    """In norm, on average over the draws: so step sizes that are measured on one suit the other."""
    layer, ratios = torch.nn.Linear(96, 40), []
    x, upstream = torch.randn(16, 96), torch.randn(16, 40)
    for seed in range(20):
        adapter = AdaptedLinear(layer, 16, 1.0, torch.Generator().manual_seed(seed))
        adapter(x).backward(upstream)
        ratios.append(float(adapter.lora_B.weight.grad.norm() / layer.weight.grad.norm()))
        layer.zero_grad()
    assert 0.9 < sum(ratios) / len(ratios) < 1.1


def test_the_teacher_is_a_second_adapter_on_the_same_base():
    model = moved(adapted(bits=4))
    chosen = adapter_parameters(model)
    optimizer = MeanTeacher(chosen.values(), lr=0.1, teacher_rate=1.0)
    before, untouched = logits(model), {n: p.clone() for n, p in model.state_dict().items() if n not in chosen}
    model(input_ids=IDS, labels=IDS).loss.backward()
    with optimizer.teacher_weights():
        assert torch.equal(logits(model), before)
    optimizer.step()
    with optimizer.teacher_weights():
        taught = logits(model)
    assert (logits(model) - before).abs().max() > (taught - before).abs().max() > 0
    assert all(torch.equal(model.state_dict()[name], value) for name, value in untouched.items())


@pytest.mark.parametrize("bits", [4, 16, 32])
def test_passes_in_half_precision_give_adapters_float32_gradients(bits):
    model = moved(adapted(bits=bits))
    chosen, grads = adapter_parameters(model), {}
    for precision in ("fp32", "bf16"):
        with computing(model, precision):
            model(input_ids=IDS, labels=IDS).loss.backward()
        grads[precision] = torch.cat([p.grad.flatten() for p in chosen.values()])
        model.zero_grad()
    assert grads["bf16"].dtype == torch.float32
    assert 0 < (grads["bf16"] - grads["fp32"]).norm() < 0.03 * grads["fp32"].norm()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings",
    [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}}, {"name": "gpt2", "target_modules": ["c_attn"]}],
)
def test_a_folder_of_peft_is_its_base_with_the_adapter(peft, tmp_path, settings):
    folder, made = made_by_peft(peft, tmp_path, **settings)
    expected = logits(made)
    model, tokenizer = load_model(str(folder))
    assert not adapted_layers(model)
    assert torch.allclose(logits(model), expected, atol=1e-5)
    apart, _ = load_model(str(folder), merged=False)
    assert torch.allclose(logits(apart), expected, atol=1e-5)
    assert tokenizer("the bridge").input_ids == small_tokenizer()("the bridge").input_ids
    assert read_context_length(str(folder)) == 64


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("given", ["ours", "of a folder", "PEFT's model"])
def test_peft_loads_what_is_saved(peft, tmp_path, given):
    folder, made = made_by_peft(peft, tmp_path)
    source = str(folder if given == "of a folder" else tmp_path / "base")
    model = made.get_base_model() if given == "PEFT's model" else load_model(source, merged=False)[0]
    if given == "ours":
        add_adapters(model, decoder_layers(model), 2)
    expected = logits(moved(model, 0.1))
    save_adapter(
        model, small_tokenizer(), source, tmp_path / "saved", weights=dict(adapter_parameters(model)), card="# Card"
    )
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.allclose(logits(again), expected, atol=1e-5)
    assert torch.allclose(logits(load_model(str(tmp_path / "saved"))[0]), expected, atol=1e-5)
    assert json.loads((tmp_path / "saved/adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tmp_path / "base"
    )
    assert (tmp_path / "saved/README.md").read_text() == "# Card"


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_used_is_one_line(peft, tmp_path):
    folder, _ = made_by_peft(peft, tmp_path)
    config = json.loads((folder / "adapter_config.json").read_text())

    def problem(**changes):
        (folder / "adapter_config.json").write_text(json.dumps(config | changes))
        with pytest.raises(InputError) as caught:
            load_model(str(folder))
        (line,) = caught.value.problems
        assert line.startswith("model")
        return line

    for changes, why in (
        ({"use_dora": True}, "its use_dora is not supported; merge it (pip install peft) with: python -c"),
        ({"modules_to_save": ["lm_head"]}, "its modules_to_save is not supported"),
        ({"peft_type": "IA3"}, "its kind is IA3, and only LORA is supported"),
        ({"bias": "all"}, "its biases are trained"),
        ({"init_lora_weights": "pissa"}, "its init_lora_weights is 'pissa', which changes the base, too"),
        ({"lora_alpha": None}, "its lora_alpha is None"),
        ({"base_model_name_or_path": None}, "it names no base model"),
        ({"base_model_name_or_path": str(folder)}, "its base is an adapter, too"),
        ({"base_model_name_or_path": str(tmp_path / "nowhere")}, "there is no such folder"),
    ):
        assert why in problem(**changes)
    weights = folder / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:200])
    assert "adapter_model.safetensors is not a whole safetensors file" in problem()
    weights.unlink()
    assert "it has no adapter_model.safetensors" in problem()
    weights.write_bytes(content)
    (tmp_path / "other").mkdir()
    save_tiny(tmp_path / "other", "gpt2")
    assert "which its base does not have" in problem(base_model_name_or_path=str(tmp_path / "other"))


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_changes_with_its_base(peft, tmp_path):
    folder, _ = made_by_peft(peft, tmp_path)
    before = hash_weights(folder)
    assert before == hash_weights(folder) != hash_weights(tmp_path / "base")
    save_tiny(tmp_path / "base", seed=3)
    assert hash_weights(folder) != before


@pytest.mark.filterwarnings("ignore")
def test_a_merged_model_is_saved_with_what_the_adapter_had_changed(peft, tmp_path):
    folder, made = made_by_peft(peft, tmp_path)
    model, tokenizer = load_model(str(folder), merged=False)
    save_model(model, tokenizer, str(folder), tmp_path / "out", changed=dict(merged_weights(model)), card="# Card")
    assert torch.allclose(logits(load_model(str(tmp_path / "out"))[0]), logits(made), atol=1e-5)
    base, out = (load_file(tmp_path / f"{each}/model.safetensors") for each in ("base", "out"))
    changed = {name for name in base if not torch.equal(base[name], out[name])}
    assert changed == {name for name in base if "q_proj" in name or "down_proj" in name}
    assert not (tmp_path / "out/adapter_config.json").exists()


def test_the_files_say_what_is_kept(tmp_path):
    assert half_of(save_tiny(tmp_path / "full")) is None
    for dtype in (torch.bfloat16, torch.float16):
        assert half_of(save_tiny(tmp_path / "half", dtype=dtype)) == dtype
    model = adapted()
    keep_base_in(model, None, None)
    assert not any(isinstance(module, FrozenLinear) for module in model.modules())
    keep_base_in(model, None, torch.float16)
    kept = {module.base.codes.dtype for module in model.modules() if isinstance(module, AdaptedLinear)}
    assert kept == {torch.float16}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"rank": 8}, "rank is 8: it is for adapters, give adapter lora, too"),
        ({"save": "adapter"}, "save is adapter: it is for adapters"),
        ({"adapter": "lora", "base_bits": 5}, "base_bits is 5: it must be 4, 8, 16 or 32"),
        ({"adapter": "lora", "rank": 0}, "rank is 0: it must be at least 1"),
        ({"adapter": "lora", "trainable": "all"}, "trainable is 'all': with an adapter nothing else is trained"),
    ],
)
def test_settings_that_do_not_fit_together(settings, why):
    with pytest.raises(InputError) as caught:
        ForgetConfig(**settings)
    assert any(why in problem for problem in caught.value.problems)
