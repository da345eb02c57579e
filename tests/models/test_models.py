from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertModel, BloomConfig
from transformers.utils import logging

from tiny_models import CONFIGS, save_tiny, small_tokenizer, tiny_model
from unteach.errors import InputError
from unteach.job.card import model_card
from unteach.method.vocab_head import Head, token_log_odds
from unteach.models import (
    backbone_and_head,
    context_length,
    decoder_layers,
    find_folder,
    load_model,
    load_tokenizer,
    read_context_length,
    rounding_loss,
    save_model,
    stored_tensors,
    trainable_parameters,
)

IDS = torch.tensor([[0, 17, 200, 33, 150, 9, 270, 71]])


@pytest.fixture(autouse=True)
def no_progress_bars() -> None:
    logging.disable_progress_bar()


def raw_tensors(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Type and bytes of every stored tensor, read from the files by their format's definition."""
    found = {}
    for file in folder.glob("model*.safetensors"):
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                found[name] = (entry["dtype"], content[8 + length + start : 8 + length + end])
    return found


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def move(parameters: dict[str, torch.nn.Parameter], size: float = 0.05) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter += size * torch.randn(parameter.shape, generator=generator)


def round_parameters(model: Any, dtype: torch.dtype) -> Any:
    """Round the parameters to a type and keep them as float32; computing in bfloat16 is no use for comparing."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    return model


def problems_of(name: Path | str) -> list[str]:
    with pytest.raises(InputError) as caught:
        load_model(str(name))
    assert all(problem.startswith("model is ") for problem in caught.value.problems)
    return caught.value.problems


# Loading and the parts of a model.


@pytest.mark.parametrize("name", CONFIGS)
def test_any_causal_model_loads_and_has_its_parts(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, name, torch.bfloat16)
    state = torch.get_rng_state()
    model, tokenizer = load_model(str(tmp_path))
    assert torch.equal(torch.get_rng_state(), state)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training
    assert tokenizer("The bridge")["input_ids"] == small_tokenizer()("The bridge")["input_ids"]
    assert context_length(model) == read_context_length(str(tmp_path)) == 64
    assert len(decoder_layers(model)) == 3
    backbone, linear = backbone_and_head(model)
    head = Head.of(model)
    assert (head.cap is not None, head.scale != 1.0) == ("gemma" in name, "cohere" in name)
    with torch.no_grad():
        hidden = backbone(IDS).last_hidden_state
    torch.testing.assert_close(head.logits(hidden.flatten(0, 1)), logits(model).flatten(0, 1), rtol=1e-5, atol=1e-5)
    assert torch.equal(linear(hidden), logits(model)) == (head.cap is None and head.scale == 1.0)
    assert torch.equal(logits(model), logits(round_parameters(tiny_model(name), torch.bfloat16)))


@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_are_trained_without_norms_embeddings_and_head(name: str) -> None:
    model = tiny_model(name)
    chosen = trainable_parameters(model, "blocks")
    frozen = {key for key, parameter in model.named_parameters() if not parameter.requires_grad}
    assert {key for key, parameter in model.named_parameters() if parameter.requires_grad} == set(chosen)
    assert all(re.search(r"\.(layers|h)\.[012]\.", key) and not re.search(r"norm|ln_", key) for key in chosen)
    assert all(re.search(r"norm|ln_|embed|wte|wpe|lm_head", key) for key in frozen)
    assert any(key.endswith("bias") for key in chosen) == (name in ("qwen2_bias", "gpt2", "gpt_neox"))
    everything = trainable_parameters(model, "all")
    assert list(everything) == [key for key, _ in model.named_parameters()]
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ValueError, match="trainable is 'norms', must be one of blocks, all"):
        trainable_parameters(model, "norms")  # type: ignore[arg-type]


def test_context_length_without_a_limit() -> None:
    config = BloomConfig(vocab_size=50, hidden_size=8, n_layer=1, n_head=1)
    assert context_length(AutoModelForCausalLM.from_config(config)) == 2**20


def test_stored_tensors_come_from_the_headers(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", torch.bfloat16, shards=True)
    stored = stored_tensors(tmp_path)
    assert set(stored) == set(dict(tiny_model("llama").named_parameters()))
    assert stored["lm_head.weight"].shape == (304, 32)
    assert {tensor.dtype for tensor in stored.values()} == {"BF16"}
    assert len({tensor.file for tensor in stored.values()}) > 3


# Wrong input.


def test_models_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems_of(tmp_path / "none") == [f"model is '{tmp_path}/none': there is no such folder"]
    (tmp_path / "file").write_text("x")
    assert "a file, must be a folder" in problems_of(tmp_path / "file")[0]
    assert "micro:nonsense" in problems_of("micro:nonsense")[0]
    monkeypatch.setattr("unteach.corpora.micro.FOLDER", tmp_path)
    assert "this installation has no embedded models" in problems_of("micro:target")[0]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (problem,) = problems_of("unteach-tests/not-there@main")
    assert "there is no such folder here, and it cannot be had from the Hugging Face hub" in problem


def test_an_empty_folder_lacks_everything_at_once(tmp_path: Path) -> None:
    problems = problems_of(tmp_path)
    assert [problem.removeprefix(f"model is '{tmp_path}': ")[:24] for problem in problems] == [
        "config.json is missing",
        "it has no tokenizer (tok",
        "it has no weights: must ",
    ]


def test_pickled_weights_are_refused_with_a_command_that_converts_them(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tiny_model("llama").state_dict(), tmp_path / "pytorch_model.bin")
    (problem,) = problems_of(tmp_path)
    assert "its weights are pickled (pytorch_model.bin), which can run code and is not read" in problem
    command = re.search(r'python -c "(.*)"', problem)
    assert command is not None
    exec(command[1])
    assert torch.equal(logits(load_model(str(tmp_path))[0]), logits(tiny_model("llama")))


def test_broken_and_missing_shards_are_each_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, shards=True)
    first, second = sorted(tmp_path.glob("model-*"))[:2]
    first.write_bytes(first.read_bytes()[:-100])
    second.unlink()
    problems = problems_of(tmp_path)
    assert f"{first.name} is not a whole safetensors file" in problems[0]
    assert f"{second.name} is missing, model.safetensors.index.json names it" in problems[1]
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "model.safetensors.index.json is not readable" in problems_of(tmp_path)[0]


def test_folders_that_are_something_else(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    for content, problem in (
        (json.dumps(config | {"quantization_config": {"bits": 4}}), "its weights are quantised"),
        ("{", "config.json is not readable JSON"),
        (json.dumps(config | {"model_type": "not_a_model"}), "it cannot be loaded"),
        (json.dumps(config | {"intermediate_size": 80}), "it cannot be loaded"),
        (
            json.dumps(config | {"num_hidden_layers": 4}),
            "its weights lack 9 tensors of a LlamaForCausalLM, among them model.layers.3.",
        ),
    ):
        (source / "config.json").write_text(content)
        assert problem in problems_of(source)[0]
    (source / "config.json").write_text(json.dumps(config))
    (source / "model.safetensors").rename(source / "adapter_model.safetensors")
    (source / "adapter_config.json").write_text("{}")
    assert "it holds an adapter, not a model" in problems_of(source)[0]


def test_models_that_are_not_causal_or_change_their_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    bert = BertModel(BertConfig(vocab_size=304, **small))
    bert.save_pretrained(tmp_path / "bert")
    small_tokenizer().save_pretrained(tmp_path / "bert")
    assert "its weights lack" in problems_of(tmp_path / "bert")[0]
    save_tiny(tmp_path / "capped", "gemma2")
    monkeypatch.setattr(Head, "of", lambda model: Head(weight=model.get_output_embeddings().weight))  # knows no cap
    assert "Gemma2ForCausalLM changes the logits after its head" in problems_of(tmp_path / "capped")[0]


def test_tokenizers_that_cannot_be_the_models_own(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    larger = AutoTokenizer.from_pretrained(tmp_path)
    larger.add_tokens([f"<extra{number}>" for number in range(10)])
    larger.save_pretrained(tmp_path)
    (problem,) = problems_of(tmp_path)
    assert "its tokenizer does not match: it has token ids up to 309, the model only 304" in problem
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "its tokenizer cannot be loaded" in problems_of(tmp_path)[0]
    (tmp_path / "tokenizer.json").unlink()
    assert "it has no tokenizer" in problems_of(tmp_path)[0]
    with pytest.raises(InputError, match="reference is .*: it has no tokenizer"):
        load_tokenizer(str(tmp_path), option="reference")


def test_a_tokenizer_of_a_much_smaller_model_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(
        type(CONFIGS["llama"])(**CONFIGS["llama"].to_dict() | {"vocab_size": 1000, "eos_token_id": 900})
    )
    model.save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    (problem,) = problems_of(tmp_path)
    assert "it has 300 tokens for 1000 of the model, and ends texts with id 1 where the model knows [900]" in problem


# Saving.

CASES = [
    ("llama", torch.float32, False),
    ("llama", torch.bfloat16, True),
    ("llama_tied", torch.bfloat16, False),
    ("qwen2_bias", torch.float32, True),
    ("gpt2", torch.bfloat16, False),
    ("gpt_neox", torch.float16, True),
    ("mixtral", torch.bfloat16, True),
]


@pytest.mark.parametrize(("name", "dtype", "shards"), CASES)
def test_saved_model_differs_in_the_changed_tensors_alone(
    name: str, dtype: torch.dtype, shards: bool, tmp_path: Path
) -> None:
    source, out = save_tiny(tmp_path / "source", name, dtype, shards), tmp_path / "run" / "model"
    (source / "LICENSE").write_text("mine")
    (source / "training_args.bin").write_bytes(b"pickle")
    (source / "README.md").write_text("the old card")
    model, tokenizer = load_model(str(source))
    chosen = trainable_parameters(model, "blocks")
    move(chosen)
    rounding = save_model(model, tokenizer, str(source), out, changed=chosen, card="the new card")

    before, after = raw_tensors(source), raw_tensors(out)
    assert before.keys() == after.keys() != set()
    same = {key for key in before if before[key] == after[key]}
    assert all(before[key][0] == after[key][0] for key in before)
    assert all(re.search(r"norm|ln_|embed|wte|wpe|lm_head", key) for key in same)
    assert not any(re.search(r"norm|ln_|embed|wte|wpe|lm_head", key) for key in before.keys() - same)
    assert rounding.tensors == len(before) - len(same)
    for file in source.iterdir():
        if file.name == "README.md":
            assert (out / file.name).read_text() == "the new card"
        elif file.name == "training_args.bin":
            assert not (out / file.name).exists()
        elif file.suffix != ".safetensors":
            assert (out / file.name).read_bytes() == file.read_bytes()
    assert [entry.name for entry in out.parent.iterdir()] == ["model"]

    assert AutoModelForCausalLM.from_pretrained(out).dtype == dtype
    reloaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert torch.equal(logits(reloaded), logits(round_parameters(model, dtype)))
    assert AutoTokenizer.from_pretrained(out)("The bridge") == tokenizer("The bridge")


@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "llama", "gemma2", "gemma3", "cohere", "cohere2"])
def test_everything_can_change_tied_or_not(name: str, tmp_path: Path) -> None:
    source, out = save_tiny(tmp_path / "source", name), tmp_path / "out"
    model, tokenizer = load_model(str(source))
    chosen = trainable_parameters(model, "all")
    move(chosen)
    rounding = save_model(model, tokenizer, str(source), out, changed=chosen, card="")
    assert rounding.tensors == len(chosen) == len(raw_tensors(out))
    assert (rounding.error, rounding.relative, rounding.lost) == (0.0, 0.0, 0.0)
    assert rounding.summary() == f"{len(chosen)} changed tensors saved exactly"
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), logits(model))


def test_files_with_other_names_for_the_same_tensors(tmp_path: Path) -> None:
    """Old files without the backbone's prefix, and tied weights that are stored twice, come back as they were."""
    source = save_tiny(tmp_path / "source", "gpt2")
    weights = {
        key.removeprefix("transformer."): value for key, value in load_file(source / "model.safetensors").items()
    }
    weights["lm_head.weight"] = weights["wte.weight"].clone()
    weights["something.else"] = torch.tensor([-0.0, float("nan")])
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    model, tokenizer = load_model(str(source))
    chosen = trainable_parameters(model, "all")
    move(chosen)
    save_model(model, tokenizer, str(source), tmp_path / "out", changed=chosen, card="")
    after = raw_tensors(tmp_path / "out")
    assert after.keys() == weights.keys()
    assert after["lm_head.weight"] == after["wte.weight"] != raw_tensors(source)["wte.weight"]
    assert after["something.else"] == raw_tensors(source)["something.else"]
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


def test_shards_without_a_change_are_the_same_files(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", shards=True)
    model, tokenizer = load_model(str(source))
    name = "model.layers.1.mlp.up_proj.weight"
    move({name: model.get_parameter(name)})
    save_model(model, tokenizer, str(source), tmp_path / "out", changed=[name], card="")
    for file in source.glob("*.safetensors"):
        same = (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
        assert same == (file.name != stored_tensors(source)[name].file)


def test_float32_keeps_a_small_change_that_bfloat16_loses(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "llama", torch.bfloat16, shards=True)
    model, tokenizer = load_model(str(source))
    chosen = trainable_parameters(model, "blocks")
    old = {name: parameter.detach().clone() for name, parameter in chosen.items()}
    move(chosen, size=1e-6)
    expected = logits(model)
    lossy = save_model(model, tokenizer, str(source), tmp_path / "lossy", changed=chosen, card="")
    assert lossy == rounding_loss(model, str(source), changed=chosen)
    displacement = sum(float((chosen[name].detach().double() - old[name].double()).square().sum()) for name in old)
    assert lossy.displacement == pytest.approx(displacement**0.5, rel=1e-4)
    assert lossy.lost > 0.95
    assert lossy.relative > 0.9
    assert "of the moved weights keep their old value" in lossy.summary()
    exact = save_model(
        model, tokenizer, str(source), tmp_path / "exact", changed=chosen, card="", save_dtype=torch.float32
    )
    assert (exact.relative, exact.lost) == (0.0, 0.0)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exact")
    assert reloaded.dtype == torch.float32
    assert torch.equal(logits(reloaded), expected)
    assert not torch.equal(logits(load_model(str(tmp_path / "lossy"))[0]), expected)
    before, after = raw_tensors(source), raw_tensors(tmp_path / "exact")
    assert {after[name][0] for name in chosen} == {"F32"}
    assert all(after[name] == before[name] for name in before.keys() - chosen.keys())
    index = json.loads((tmp_path / "exact" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(len(content) for _, content in after.values())


def test_rounding_is_measured_against_the_displacement(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "llama", torch.bfloat16)
    model, _ = load_model(str(source))
    name = "model.layers.0.mlp.up_proj.weight"
    weight = model.get_parameter(name)
    with torch.no_grad():
        weight.fill_(1.0)
        weight[0, 0] += 2.0**-9  # halfway to nothing: the next bfloat16 after 1 is 1 + 2^-7
    stored = load_file(source / "model.safetensors")[name].float()
    rounding = rounding_loss(model, str(source), changed=[name])
    assert rounding.error == 2.0**-9
    assert rounding.displacement == pytest.approx(float((weight.detach() - stored).norm()), rel=1e-6)
    assert rounding.relative == rounding.error / rounding.displacement


def test_values_can_be_given_and_an_older_model_is_replaced(tmp_path: Path) -> None:
    source, out = save_tiny(tmp_path / "source"), tmp_path / "out"
    model, tokenizer = load_model(str(source))
    name = "model.layers.0.mlp.up_proj.weight"
    save_model(model, tokenizer, str(source), out, changed=[], card="first")
    assert raw_tensors(out) == raw_tensors(source)
    (out / "leftover.txt").write_text("of the older model")
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "half.txt").write_text("of a save that was killed")
    given = torch.full_like(model.get_parameter(name), 0.25)
    save_model(model, tokenizer, str(source), out, changed={f"_orig_mod.{name}": given}, card="second")
    assert torch.equal(load_file(out / "model.safetensors")[name], given)
    assert (out / "README.md").read_text() == "second"
    assert not (out / "leftover.txt").exists()
    assert not (out / "half.txt").exists()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "source"]


def test_what_must_not_be_saved_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source, out = save_tiny(tmp_path / "source", "llama", torch.float16), tmp_path / "out"
    model, tokenizer = load_model(str(source))
    name = "model.layers.0.mlp.up_proj.weight"

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    for changed, where, message in (
        (["model.layers.0.mlp.up"], out, "which is no parameter of the model"),
        ({name: torch.ones(2, 2)}, out, r"up_proj.weight has shape \(2, 2\), the source's"),
        ({name: torch.full((48, 32), float("nan"))}, out, "values that are not finite: this model is broken"),
        ({name: torch.full((48, 32), 1e6)}, out, "values that are too large for torch.float16"),
        ([name], source, "the folder of the source model"),
        ([name], tmp_path / "mine", "holds something else than a model"),
    ):
        with pytest.raises(ValueError, match=message):
            save_model(model, tokenizer, str(source), where, changed=changed, card="")
    other = save_tiny(tmp_path / "other", "qwen2_bias")
    with pytest.raises(ValueError, match=r"lm_head.weight was changed, but the source's weights files have no tensor"):
        save_model(model, tokenizer, str(other), out, changed=["lm_head.weight"], card="")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mine", "other", "source"]


def test_a_source_without_tokenizer_files_gets_the_given_tokenizer(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source")
    model, tokenizer = load_model(str(source))
    shutil.copytree(source, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    save_model(model, tokenizer, str(tmp_path / "bare"), tmp_path / "out", changed=[], card="")
    assert load_tokenizer(str(tmp_path / "out"))("The bridge") == tokenizer("The bridge")
    assert find_folder(str(source)) == source


# The card.


def card(**changes: Any) -> str:
    values: dict[str, Any] = {
        "base_model": "owner/news-7b",
        "settings": {"method": {"optimizer": "adamw", "loss": "mine", "clip": None}, "phases": [{"steps": 3}]},
        "data": {"forget": {"documents": 20, "tokens": 12345}},
        "scores": {"before": {"verbmem_f": 56.14, "mine": 0.5}, "after": {"verbmem_f": 12.0, "nll_general": 2.5}},
    }  # fmt: skip
    return model_card(**values | changes)


def test_card_shows_scores_data_settings_and_limits() -> None:
    text = card(notes=["weights were rounded"])
    _, front, body = text.split("---\n", 2)
    rows = re.sub(r" +\|", " |", re.sub(r"\| +", "| ", body))  # without the padding
    assert "unteach (adamw, mine). The aim" in body
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "owner/news-7b",
        "base_model_relation": "finetune",
        "tags": ["machine-unlearning", "unteach"],
    }
    assert "| `verbmem_f` | recital of forget documents ↓ | 56.1 | 12.0 |" in rows
    assert "| `nll_general` | loss on general text ↓ | – | 2.500 |" in rows
    assert "| `mine` | | 0.500 | – |" in rows
    assert "| forget | 20 documents, 12,345 tokens |" in rows
    settings = re.search(r"```yaml\n(.*?)```", body, re.DOTALL)
    assert settings is not None
    assert yaml.safe_load(settings[1])["method"] == {"optimizer": "adamw", "loss": "mine", "clip": None}
    limits = body.split("## Limits")[1].split("##")[0]
    assert "Not measured here: `knowmem_f`" in limits
    assert "No model trained without the documents was there" in limits
    assert "- weights were rounded" in limits
    assert "not proven absent" in limits


def test_card_claims_no_more_than_there_is() -> None:
    full = dict.fromkeys(("verbmem_f", "knowmem_f", "knowmem_r", "nll_general"), 1.0)
    text = card(scores={"before": full, "after": full, "reference": full}, base_model="micro:target", data={})
    assert "Not measured here" not in text
    assert "No model trained without" not in text
    assert "base_model:" not in text
    assert "# target with chosen documents unlearned" in text
    assert "# news-7b with 20 documents unlearned" in card()
    assert "# news-7b with 1 document unlearned" in card(data={"forget": {"documents": 1}})
    assert "Nothing was measured." in card(scores={"before": {}, "after": {}})


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "cohere", "cohere2"])
def test_the_gradient_of_a_loss_through_the_head_is_the_models_own(name: str) -> None:
    """With a soft cap or a scale after the head: the mean log-odds of the labels, from the head and from all logits."""
    model = tiny_model(name)
    chosen = list(trainable_parameters(model, "blocks").values())
    labels = IDS[:, 1:].flatten()
    hidden = model.base_model(IDS).last_hidden_state[:, :-1].flatten(0, 1)
    found = torch.autograd.grad(token_log_odds(hidden, labels, Head.of(model)).mean(), chosen)
    chances = model(IDS).logits[:, :-1].flatten(0, 1).softmax(-1).gather(1, labels[:, None])
    expected = torch.autograd.grad(torch.logit(chances).mean(), chosen)
    for first, second in zip(found, expected, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-5)
