from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertModel, BloomConfig

from tiny_models import CONFIGS, save_tiny, small_tokenizer, tiny_model
from unteach.errors import InputError
from unteach.job.card import model_card
from unteach.method.vocab_head import Head, token_log_odds
from unteach.models import context_length, decoder_layers, read_context_length, trainable_parameters
from unteach.models.load import backbone_and_head, load_model, load_tokenizer, stored_tensors
from unteach.models.save import rounding_loss, save_model

IDS = torch.tensor([[0, 17, 200, 33, 150, 9, 270, 71]])
UP = "model.layers.0.mlp.up_proj.weight"
KEPT = re.compile(r"norm|ln_|embed|wte|wpe|lm_head")
"""What is frozen where blocks are trained."""


def raw_tensors(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Type and bytes of every stored tensor, read from the files by their format's definition."""
    found = {}
    for file in folder.glob("model*.safetensors"):
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
        header.pop("__metadata__", None)
        found |= {name: (entry["dtype"], data[slice(*entry["data_offsets"])]) for name, entry in header.items()}
    return found


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def moved(folder, name="llama", dtype=torch.float32, shards=False, trainable="blocks", size=0.05):
    """A saved model, the same loaded with its tokenizer, and its trainable parameters, moved at random."""
    source = save_tiny(folder / "source", name, dtype, shards)
    model, tokenizer = load_model(str(source))
    chosen = trainable_parameters(model, trainable)
    move(chosen, size)
    return source, model, tokenizer, chosen


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
    assert {key for key, parameter in model.named_parameters() if parameter.requires_grad} == set(chosen)
    assert all(re.search(r"\.(layers|h)\.[012]\.", key) for key in chosen)
    assert all((KEPT.search(key) is None) == (key in chosen) for key, _ in model.named_parameters())
    assert any(key.endswith("bias") for key in chosen) == (name in ("qwen2_bias", "gpt2", "gpt_neox"))
    everything = trainable_parameters(model, "all")
    assert list(everything) == [key for key, _ in model.named_parameters()]
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert context_length(BloomConfig()) == 2**20  # names no limit
    with pytest.raises(ValueError, match="trainable is 'norms', must be one of blocks, all"):
        trainable_parameters(model, "norms")  # type: ignore[arg-type]


def test_models_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems_of(tmp_path / "none") == [f"model is '{tmp_path}/none': there is no such folder"]
    (tmp_path / "file").write_text("x")
    assert "a file, must be a folder" in problems_of(tmp_path / "file")[0]
    assert "micro:nonsense" in problems_of("micro:nonsense")[0]
    (tmp_path / "empty").mkdir()
    lacking = ("config.json is missing", "it has no tokenizer (tok", "it has no weights: must ")
    for problem, start in zip(problems_of(tmp_path / "empty"), lacking, strict=True):
        assert problem.startswith(f"model is '{tmp_path}/empty': {start}")
    monkeypatch.setattr("unteach.corpora.micro.FOLDER", tmp_path)
    assert "this installation has no embedded models" in problems_of("micro:target")[0]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (problem,) = problems_of("unteach-tests/not-there@main")
    assert "there is no such folder here, and it cannot be had from the Hugging Face hub" in problem


def test_pickled_weights_are_refused_with_a_command_that_converts_them(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tiny_model("llama").state_dict(), tmp_path / "pytorch_model.bin")
    (problem,) = problems_of(tmp_path)
    assert "its weights are pickled (pytorch_model.bin), which can run code and is not read" in problem
    exec(re.search(r'python -c "(.*)"', problem)[1])  # type: ignore[index]
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
    file = save_tiny(tmp_path) / "config.json"
    config = json.loads(file.read_text())
    for changes, problem in (
        ({"quantization_config": {"bits": 4}}, "its weights are quantised"),
        ({"model_type": "not_a_model"}, "it cannot be loaded"),
        ({"intermediate_size": 80}, "it cannot be loaded"),
        ({"num_hidden_layers": 4}, "its weights lack 9 tensors of a LlamaForCausalLM, among them model.layers.3."),
    ):
        file.write_text(json.dumps(config | changes))
        assert problem in problems_of(tmp_path)[0]
    file.write_text("{")
    assert "config.json is not readable JSON" in problems_of(tmp_path)[0]
    file.write_text(json.dumps(config))
    file.write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    assert problems_of(tmp_path)[0].endswith("quantised (gptq), and cannot be trained: give the model it was made from")
    file.write_text(json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    assert "(pip install bitsandbytes) with: python -c" in problems_of(tmp_path)[0]


@pytest.mark.filterwarnings("ignore")
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
    larger = CONFIGS["llama"].to_dict() | {"vocab_size": 1000, "eos_token_id": 900}
    AutoModelForCausalLM.from_config(type(CONFIGS["llama"])(**larger)).save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    (problem,) = problems_of(tmp_path)
    assert "it has 300 tokens for 1000 of the model, and ends texts with id 1 where the model knows [900]" in problem


@pytest.mark.parametrize(
    ("name", "dtype", "shards", "trainable"),
    [
        ("llama", torch.float32, False, "blocks"),
        ("llama", torch.bfloat16, True, "blocks"),
        ("llama_tied", torch.bfloat16, False, "blocks"),
        ("qwen2_bias", torch.float32, True, "blocks"),
        ("gpt2", torch.bfloat16, False, "blocks"),
        ("gpt_neox", torch.float16, True, "blocks"),
        ("mixtral", torch.bfloat16, True, "blocks"),
        *((name, torch.float32, False, "all") for name in CONFIGS if name not in ("qwen2_bias", "gpt_neox", "mixtral")),
    ],
)
def test_saved_model_differs_in_the_changed_tensors_alone(name, dtype, shards, trainable, tmp_path) -> None:
    source, model, tokenizer, chosen = moved(tmp_path, name, dtype, shards, trainable)
    out = tmp_path / "run" / "model"
    for file in ("LICENSE", "training_args.bin", "README.md"):
        (source / file).write_text("of the source")
    rounding = save_model(model, tokenizer, str(source), out, changed=chosen, card="the new card")

    before, after = raw_tensors(source), raw_tensors(out)
    assert before.keys() == after.keys() != set()
    same = {key for key in before if before[key] == after[key]}
    assert all(before[key][0] == after[key][0] for key in before)
    files = {stored.file for name, stored in stored_tensors(source).items() if name not in same}
    pairs = [(file, source / file.name) for file in out.glob("*.safetensors")]
    assert files == {new.name for new, old in pairs if new.read_bytes() != old.read_bytes()}
    assert same == {key for key in before if KEPT.search(key) and trainable == "blocks"}
    assert rounding.tensors == len(before) - len(same)
    if dtype == torch.float32:
        assert (rounding.error, rounding.relative, rounding.lost) == (0.0, 0.0, 0.0)
        assert rounding.summary() == f"{len(chosen)} changed tensors saved exactly"
    copied = {file.name: file.read_bytes() for file in source.iterdir() if file.suffix not in (".safetensors", ".bin")}
    found = {file.name: file.read_bytes() for file in out.iterdir() if file.suffix != ".safetensors"}
    assert found == copied | {"README.md": b"the new card"}
    assert [entry.name for entry in out.parent.iterdir()] == ["model"]
    assert AutoModelForCausalLM.from_pretrained(out).dtype == dtype
    reloaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert torch.equal(logits(reloaded), logits(round_parameters(model, dtype)))
    assert AutoTokenizer.from_pretrained(out)("The bridge") == tokenizer("The bridge")


def test_files_with_other_names_for_the_same_tensors(tmp_path: Path) -> None:
    """Old files without the backbone's prefix, and tied weights that are stored twice, come back as they were."""
    source = save_tiny(tmp_path / "source", "gpt2")
    weights = load_file(source / "model.safetensors")
    weights = {key.removeprefix("transformer."): value for key, value in weights.items()}
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


def test_float32_keeps_a_small_change_that_bfloat16_loses(tmp_path: Path) -> None:
    source, model, tokenizer, chosen = moved(tmp_path, "llama", torch.bfloat16, shards=True, size=1e-6)
    expected, old = logits(model), dict(load_model(str(source))[0].named_parameters())
    lossy = save_model(model, tokenizer, str(source), tmp_path / "lossy", changed=chosen, card="")
    assert lossy == rounding_loss(model, str(source), changed=chosen)
    squares = [(chosen[name].detach() - old[name].detach()).double().square().sum() for name in chosen]
    assert lossy.displacement == pytest.approx(float(sum(squares)) ** 0.5, rel=1e-4)
    assert min(lossy.lost / 0.95, lossy.relative / 0.9) > 1
    assert "of the moved weights keep their old value" in lossy.summary()
    options = {"changed": chosen, "card": "", "save_dtype": torch.float32}
    exact = save_model(model, tokenizer, str(source), tmp_path / "exact", **options)
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
    source, model, *_ = moved(tmp_path, "llama", torch.bfloat16)
    weight = model.get_parameter(UP)
    with torch.no_grad():
        weight.fill_(1.0)
        weight[0, 0] += 2.0**-9  # halfway to nothing: the next bfloat16 after 1 is 1 + 2^-7
    stored = load_file(source / "model.safetensors")[UP].float()
    rounding = rounding_loss(model, str(source), changed=[UP])
    assert rounding.error == 2.0**-9
    assert rounding.displacement == pytest.approx(float((weight.detach() - stored).norm()), rel=1e-6)
    assert rounding.relative == rounding.error / rounding.displacement


def test_values_can_be_given_and_an_older_model_is_replaced(tmp_path: Path) -> None:
    source, model, tokenizer, _ = moved(tmp_path)
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    save_model(model, tokenizer, str(source), out, changed=[], card="first")
    assert raw_tensors(out) == raw_tensors(source)
    (out / "leftover.txt").write_text("of the older model")
    partial.mkdir()
    (partial / "half.txt").write_text("of a save that was killed")
    given = torch.full_like(model.get_parameter(UP), 0.25)
    save_model(model, tokenizer, str(source), out, changed={f"_orig_mod.{UP}": given}, card="second")
    assert torch.equal(load_file(out / "model.safetensors")[UP], given)
    assert (out / "README.md").read_text() == "second"
    assert not {"leftover.txt", "half.txt"} & {entry.name for entry in out.iterdir()}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "source"]


def test_what_must_not_be_saved_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source, model, tokenizer, _ = moved(tmp_path, "llama", torch.float16)
    other, out, mine = save_tiny(tmp_path / "other", "qwen2_bias"), tmp_path / "out", tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("x")
    for changed, base, where, message in (
        (["model.layers.0.mlp.up"], source, out, "which is no parameter of the model"),
        ({UP: torch.ones(2, 2)}, source, out, r"up_proj.weight has shape \(2, 2\), the source's"),
        ({UP: torch.full((48, 32), float("nan"))}, source, out, "values that are not finite: this model is broken"),
        ({UP: torch.full((48, 32), 1e6)}, source, out, "values that are too large for torch.float16"),
        ([UP], source, source, "the folder of the source model"),
        ([UP], source, mine, "holds something else than a model"),
        (["lm_head.weight"], other, out, r"lm_head.weight was changed, but the source's weights files have no tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            save_model(model, tokenizer, str(base), where, changed=changed, card="")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mine", "other", "source"]


def test_a_source_without_tokenizer_files_gets_the_given_tokenizer(tmp_path: Path) -> None:
    source, model, tokenizer, _ = moved(tmp_path)
    for file in source.glob("tokenizer*"):
        file.unlink()
    save_model(model, tokenizer, str(source), tmp_path / "out", changed=[], card="")
    assert load_tokenizer(str(tmp_path / "out"))("The bridge") == tokenizer("The bridge")


def card(**changes: Any) -> str:
    values: dict[str, Any] = {
        "base_model": "owner/news-7b",
        "settings": {"method": {"optimizer": "adamw", "loss": "mine", "clip": None}, "phases": [{"steps": 3}]},
        "data": {"forget": {"documents": 20, "tokens": 12345}},
        "scores": {"before": {"verbmem_f": 56.14, "mine": 0.5}, "after": {"verbmem_f": 12.0, "nll_general": 2.5}},
    }
    return model_card(**values | changes)


def test_card_shows_scores_data_settings_and_limits() -> None:
    _, front, body = card(notes=["weights were rounded"]).split("---\n", 2)
    rows = re.sub(r" +\|", " |", re.sub(r"\| +", "| ", body))  # without the padding
    expected = {"library_name": "transformers", "pipeline_tag": "text-generation", "base_model": "owner/news-7b"}
    expected |= {"base_model_relation": "finetune", "tags": ["machine-unlearning", "unteach"]}
    assert yaml.safe_load(front) == expected
    for line in (
        "unteach (adamw, mine). The aim",
        "| `verbmem_f` | recital of forget documents ↓ | 56.1 | 12.0 |",
        "| `nll_general` | loss on general text ↓ | – | 2.500 |",
        "| `mine` | | 0.500 | – |",
        "| forget | 20 documents, 12,345 tokens |",
    ):
        assert line in rows
    settings = re.search(r"```yaml\n(.*?)```", body, re.DOTALL)
    method = {"optimizer": "adamw", "loss": "mine", "clip": None}
    assert yaml.safe_load(settings[1])["method"] == method  # type: ignore[index]
    limits = body.split("## Limits")[1].split("##")[0]
    missing = "No model trained without the documents was there"
    for words in ("Not measured here: `knowmem_f`", missing, "- weights were rounded", "not proven absent"):
        assert words in limits


def test_card_claims_no_more_than_there_is() -> None:
    full = dict.fromkeys(("verbmem_f", "knowmem_f", "knowmem_r", "nll_general"), 1.0)
    text = card(scores={"before": full, "after": full, "reference": full}, base_model="micro:target", data={})
    for words in ("Not measured here", "No model trained without", "base_model:"):
        assert words not in text
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
