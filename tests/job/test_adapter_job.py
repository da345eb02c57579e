"""The whole job with adapters: resumed, saved, planned, checked, and with PEFT's models in memory."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import unteach
from faults.small_run import make_inputs, paused_run, result_of, run, settings
from steps import FORGET, GENERAL, mean_teacher
from tiny_models import save_tiny, small_tokenizer, tiny_model
from unteach.config import Method
from unteach.errors import InputError
from unteach.job.receipts.verify import VerifyOptions
from unteach.job.receipts.verify import run as verify
from unteach.models import decoder_layers, load_model
from unteach.models.adapters import adapted_layers, add_adapters, keep_base_in
from unteach.planning.plan import plan

IDS = torch.tensor([[0, 17, 200, 33, 150, 9, 270, 71]])
LORA = {"adapter": "lora", "rank": 4}
MEASURED = Method(optimizer="mean_teacher", loss="nlul", token_share=1.0, loops_every=0)


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def test_a_run_goes_on_bit_for_bit_and_saves_what_was_measured(inputs, tmp_path, monkeypatch):
    given = LORA | {"base_bits": 4}
    whole = run(inputs, tmp_path / "whole", **given)
    paused_run(inputs, tmp_path / "paused", monkeypatch, **given)
    kept = load_file(tmp_path / "paused/checkpoints/step_000002/rank_0.safetensors")
    assert {name.split(".")[-2] for name in kept if name.startswith("weights/")} == {"lora_A", "lora_B"}
    run(inputs, tmp_path / "paused", resume=True, **given)
    assert result_of(tmp_path / "paused") == result_of(tmp_path / "whole")

    start = load_file(inputs / "model/model.safetensors")
    saved, _ = load_model(str(tmp_path / "whole/model"))
    assert torch.allclose(logits(saved), logits(whole.model), atol=1e-5)
    moved = {name for name, value in saved.named_parameters() if not torch.equal(value, start[name])}
    assert len(moved) == 21
    assert all("_proj" in name for name in moved), "seven linear layers of three blocks"
    card = (tmp_path / "whole/model/README.md").read_text()
    assert "library_name: transformers" in card
    assert "base_bits: 4" in card


def test_a_users_adapter_is_unlearned_and_saved_as_one(inputs, tmp_path):
    """An adapter's folder in, one out: of the same base and rank, with numbers that were measured on it."""
    inputs = shutil.copytree(inputs, tmp_path / "inputs")
    first = run(inputs, tmp_path / "first", **LORA, save="adapter")
    folder, said = tmp_path / "first/model", []
    assert torch.allclose(logits(load_model(str(folder))[0]), logits(first.model), atol=1e-5)
    assert verify(VerifyOptions(receipt=str(tmp_path / "first"), model=str(folder)))["agrees"]
    with pytest.raises(InputError, match=r"^rank is 2: the adapter of the model has rank 4, leave it out$"):
        run(inputs, tmp_path / "wrong", model=str(folder), adapter="lora", rank=2)
    given = {"model": str(folder), "adapter": "lora", "method": MEASURED, "save": "adapter"}
    second = run(inputs, tmp_path / "second", said=said, **given)
    numbers = second.config.method
    assert all(value > 0 for value in (numbers.alpha, numbers.lr, numbers.teacher_rate, numbers.damping))
    assert any(line.startswith("measured: loss") for line in said)
    assert second.steps == 3
    configs = [json.loads((tmp_path / f"{each}/model/adapter_config.json").read_text()) for each in ("first", "second")]
    assert configs[0] == configs[1]
    before, after = (load_file(tmp_path / f"{each}/model/adapter_model.safetensors") for each in ("first", "second"))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before if ".lora_B." in name)
    assert "AutoPeftModelForCausalLM" in (tmp_path / "second/model/README.md").read_text()
    receipt = json.loads((tmp_path / "second/receipt.json").read_text())
    assert receipt["number"] == 2
    assert {"adapter_model.safetensors", "base/model.safetensors"} <= receipt["model"]["files"].keys()

    save_tiny(inputs / "model", seed=9)
    found = verify(VerifyOptions(receipt=str(tmp_path / "second"), model=str(tmp_path / "second/model")))
    assert any("base/model.safetensors differs" in check["says"] for check in found["checks"])


def test_plans_know_adapters(inputs, tmp_path):
    eight, four = (plan(settings(inputs, tmp_path / "run", **LORA, **given)) for given in (
        {"base_bits": 8}, {"base_bits": 4, "save": "adapter"}
    ))  # fmt: skip
    model = tiny_model("llama")
    add_adapters(model, decoder_layers(model), LORA["rank"])
    keep_base_in(model, 4, None)
    layers = adapted_layers(model).values()
    assert four.trainable == sum(layer.a.numel() + layer.b.numel() for layer in layers)
    own = sum(value.numel() for value in tiny_model("llama").parameters())
    assert four.parameters == own + four.trainable
    assert four.memory.checkpoint == 3 * 4 * four.trainable
    kept = sum(buffer.nbytes for layer in layers for buffer in layer.base.buffers())
    assert four.memory.parts["weights in few bits"] == kept < eight.memory.parts["weights in few bits"]
    under = sum(len(layer.b) * layer.a.shape[1] for layer in layers)
    assert four.memory.parts["weights"] == 4 * (own - under)
    assert four.memory.parts["momentum"] == four.memory.parts["adapters"] == 4 * four.trainable
    assert four.disk_needed < eight.disk_needed, "an adapter, and a whole model"


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_peft_is_unlearned_in_place(inputs, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed: its models are not tried")
    model = peft.get_peft_model(load_model(str(inputs / "model"))[0], peft.LoraConfig(target_modules="all-linear", r=2))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    config = settings(inputs, tmp_path / "run", method=mean_teacher())
    result = unteach.forget(model, small_tokenizer(), FORGET[:4], GENERAL, config)
    assert result.model is model
    assert result.config.adapter == "lora"
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, start[name])}
    second = {name for name in start if ".lora_B" in name}  # the first matrix moves when the second is not zero
    assert second <= changed <= second | {name for name in start if ".lora_A" in name}
    assert torch.allclose(logits(load_model(str(tmp_path / "run/model"))[0]), logits(model.eval()), atol=1e-5)

    dora = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(target_modules=["q_proj"], use_dora=True))
    with pytest.raises(InputError, match=r"^model is a PeftModel: its use_dora is not supported; merge and save it.*$"):
        unteach.forget(dora, small_tokenizer(), FORGET)
    with pytest.raises(InputError, match=r"^base_bits is 4: PEFT's models keep their weights as they are.*$"):
        unteach.forget(model, small_tokenizer(), FORGET, config=dataclasses.replace(result.config, base_bits=4))


@pytest.mark.slow
def test_all_weights_of_a_model_with_an_adapter_can_be_trained(inputs, tmp_path):
    run(inputs, tmp_path / "first", **LORA, save="adapter")
    folder = tmp_path / "first/model"
    third = run(inputs, tmp_path / "third", model=str(folder))  # the adapter is merged into them
    assert not adapted_layers(third.model)
    assert torch.allclose(logits(load_model(str(tmp_path / "third/model"))[0]), logits(third.model), atol=1e-5)


@pytest.mark.slow
def test_a_model_in_memory_is_an_ordinary_one_afterwards(inputs, tmp_path):
    model = load_model(str(inputs / "model"))[0]
    names = [name for name, _ in model.named_parameters()]
    config = settings(inputs, "", method=mean_teacher(), **LORA, base_bits=8)
    before = logits(model)
    result = unteach.forget(model, small_tokenizer(), FORGET[:4], GENERAL, config)
    assert result.model is model
    assert [name for name, _ in model.named_parameters()] == names
    assert (logits(model) - before).abs().max() > 1e-3
