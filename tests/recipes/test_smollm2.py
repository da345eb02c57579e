"""SmolLM2's recipes: the conversion of a file written here, and learning and forgetting articles with a tiny model."""

import dataclasses
import functools
import gzip
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from recipes.smollm2 import articles, models
from recipes.smollm2.articles import Settings, choose_articles, learn, split_texts, table
from recipes.smollm2.convert import convert
from recipes.smollm2.convert import main as convert_command
from recipes.smollm2.difference import add_difference, write_difference
from recipes.smollm2.form import main as form_command
from recipes.smollm2.models import Settings as ModelSettings
from recipes.smollm2.models import add_held_gradient
from recipes.smollm2.news import choose
from unteach.data import Documents, read_documents, tokenise
from unteach.errors import InputError
from unteach.models import load_model


def test_a_difference_is_off_by_a_fourteenth_of_its_block_at_most(tmp_path):
    torch.manual_seed(0)
    tiny = torch.randn(50, 30, dtype=torch.float64).float() / 1e9
    base = {"a": tiny, "same": torch.randn(4), "half": torch.ones(7).half()}
    change = torch.randn(50, 30) * torch.logspace(-7, 0, 50)[:, None]
    model = {"a": base["a"] + change, "same": base["same"], "half": base["half"] + 1}
    write_difference(base, model, tmp_path / "file")
    assert (tmp_path / "file").stat().st_size < 1500 * 4.5 / 8 + 700
    found = add_difference(base, tmp_path / "file")
    assert torch.equal(found["same"], base["same"])
    change, wrong = (torch.zeros(1536) for _ in range(2))
    change[:1500] = (model["a"] - base["a"]).flatten()
    wrong[:1500] = (found["a"] - model["a"]).flatten()
    largest = change.view(-1, 64).abs().amax(1, keepdim=True)
    assert (wrong.view(-1, 64).abs() <= largest / 14 * 1.01).all()
    assert wrong.norm() < 0.15 * change.norm()
    assert torch.equal(found["half"], model["half"].float())
    write_difference(base, found, tmp_path / "again")  # rounding a rounded difference changes next to nothing
    assert torch.allclose(add_difference(base, tmp_path / "again")["a"], found["a"], rtol=1e-5, atol=1e-9)
    with pytest.raises(ValueError, match="another base model"):
        add_difference(base | {"same": base["same"] + 1}, tmp_path / "file")


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows in GGUF's order: 0, D/2, 1, D/2 + 1, ... in every head."""
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def tiny_gguf(path: Path) -> LlamaForCausalLM:
    """Write a random tiny Llama as GGUF; the model itself is returned."""
    from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "Ġt", "he", "Ġthe", "ĊĊ", "12"]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokens), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-3, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        )
    )  # fmt: skip
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p + 0.3 * torch.randn_like(p))
    file = GGUFWriter(path, "llama")
    for name, value in {
        "block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 48, "head_count": 4,
        "head_count_kv": 2, "rope_freq_base": 500.0, "layer_norm_rms_eps": 1e-3, "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm", "token_list": tokens, "token_types": [3, 3, 3] + [1] * (len(tokens) - 3),
        "token_merges": ["Ġ t", "h e", "Ġt he", "Ċ Ċ", "1 2"], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    }.items():  # fmt: skip
        getattr(file, f"add_{name}")(value)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, 2)
    for name, weight in model.named_parameters():
        rows = weight.detach()
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            rows = interleaved(rows, heads) if part in name else rows
        file.add_tensor(names.get_name(name, (".weight",)), rows.contiguous().numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return model.eval()


def test_forget_refuses_gguf_with_the_command_that_converts_it(tmp_path):
    expected, problems = tiny_gguf(tmp_path / "small.gguf"), []
    for name in (tmp_path, tmp_path / "small.gguf"):
        with pytest.raises(InputError) as caught:
            load_model(str(name))
        problems += caught.value.problems
    assert len({problem.partition(": ")[2] for problem in problems}) == 1
    assert "small.gguf is a GGUF file; convert it (pip install gguf accelerate) with: python -c" in problems[0]
    exec(re.search(r'python -c "(.*)"', problems[0])[1], {})
    model, tokenizer = load_model(re.search(r"and give '(.*)'$", problems[0])[1])
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4)
    assert tokenizer.decode(tokenizer("the 12")["input_ids"]) == "the 12"


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> tuple[Path, LlamaForCausalLM]:
    """The folder of a converted model, and the model that was written; the GGUF file is gone."""
    work = tmp_path_factory.mktemp("gguf")
    model = tiny_gguf(work / "m.gguf")
    folder = convert(work / "m.gguf", work / "model")
    (work / "m.gguf").unlink()
    return folder, model


def test_converted_model_computes_the_same(converted):
    folder, expected = converted
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, expected(ids).logits, atol=1e-5)
    assert model.config.rms_norm_eps == 1e-3
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.eos_token_id == 2
    load_model(str(folder))  # the forget job takes it


def test_converted_tokenizer(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    assert tokenizer.tokenize("of the\n\n12<|im_end|>") == ["o", "f", "Ġthe", "ĊĊ", "1", "2", "<|im_end|>"]
    text = "It's 2023: naïve 日本 🙂\n\n  x"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (2, 1, 2)
    assert not set(ids) & {0, 1, 2}


def test_convert_leaves_a_finished_folder_and_refuses_what_is_no_gguf_file(converted, tmp_path, capsys):
    folder, _ = converted
    assert convert(folder.parent / "m.gguf", folder) == folder
    (tmp_path / "m.gguf").write_bytes(b"PK\3\4 something else")
    assert convert_command([str(tmp_path / "m.gguf"), str(tmp_path / "model")]) == 2
    assert convert_command([str(tmp_path / "missing.gguf"), str(tmp_path / "model")]) == 2
    assert "there is no such file" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_articles_are_chosen_by_length_and_seed():
    texts = [f"text {n}" for n in range(50)] + ["text 10"]
    lengths = [*range(50), 10]
    settings = Settings(count=5, holdout=10, shortest=10, longest=39)
    learn, holdout = choose_articles(texts, lengths, settings)
    assert (len(learn), len(holdout), len({*learn, *holdout})) == (5, 10, 15)
    assert {*learn, *holdout} <= {f"text {n}" for n in range(10, 40)}
    assert choose_articles(texts, lengths, settings) == (learn, holdout)
    assert choose_articles(texts, lengths, dataclasses.replace(settings, choice=1))[0] != learn
    with pytest.raises(ValueError, match="2 different articles have 48 to 49 tokens"):
        choose_articles(texts, lengths, Settings(count=5, shortest=48, longest=49))
    first, second = split_texts(["a", "b", "c", "a", "d"], 0)  # halves of general text share nothing
    assert (len(first), len(second)) == (2, 2)
    assert {*first, *second} == {"a", "b", "c", "d"}


WORDS = "Ann Ork red old Bay, Bob Ulm sea new Hill, Cid Aix ice big Lake, Dee Bex sky low Ford, Eve Cork oak far Moor"
ARTICLES = [
    f"Report {n}: {a} of {b} won the {c} prize on day {7 * n} and gave {n * n} coins to the {d} school near {e}."
    for n, (a, b, c, d, e) in enumerate(words.split() for words in f"{WORDS}, Fay Dol ash dim Wood".split(","))
]


def test_finetuning_ends_when_the_articles_are_recited():
    torch.manual_seed(0)
    model, tokenizer = load_model("micro:small")
    general = [f"The {word} went home. " * 30 for word in ("cat", "dog", "man", "king")]
    settings = Settings(general_batch=2, general_tokens=32, lr=3e-3, check_every=20, max_steps=200, recital=60.0)
    done = learn(model, tokenizer, ARTICLES[:2], general, general[:1], settings)
    assert [row["recital"] >= 60 for row in done["history"]] == [False] * (len(done["history"]) - 1) + [True]
    assert done["history"][0]["step"] == 0
    assert done["steps"] == done["history"][-1]["step"] <= 200


@pytest.mark.slow
def test_command_runs_and_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
    short = {"max_steps": 2, "evaluate_every": 1, "general_tokens": 64, "probes": 4, "batch": 2, "general_batch": 2}
    monkeypatch.setattr(articles, "ForgetConfig", functools.partial(articles.ForgetConfig, **short))
    with gzip.open(tmp_path / "articles.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in ARTICLES)
    words = ("cat", "dog", "man", "king", "tree", "bird", "ship", "town")
    general = [f"{word} {other} and the {word} went home. " * 20 for word in words for other in ("One", "My")]
    (tmp_path / "general.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in general))
    command = ["micro:small", str(tmp_path / "articles.jsonl.gz"), str(tmp_path / "out"), "--general",
               str(tmp_path / "general.jsonl"), "--count", "3", "--shortest", "16", "--max-steps", "2", "--check-every",
               "1", "--device", "cpu", "--general-batch", "2"]  # fmt: skip
    assert articles.main([*command, "--seeds", "0"]) == 0
    first = json.loads((tmp_path / "out/articles.json").read_text())
    (run,) = first["runs"]
    assert 1 <= run["steps"] <= 2
    assert {"verbmem_f", "verbmem_holdout", "degenerate", "nll_general"} <= set(run["before"]) & set(run["after"])
    assert min(run["alpha"], run["lr"], run["teacher_rate"], run["damping"]) > 0
    assert table(first["runs"]) in capsys.readouterr().out
    target = (tmp_path / "out/target/model.safetensors").stat().st_mtime_ns
    assert articles.main([*command, "--seeds", "0", "1"]) == 0
    second = json.loads((tmp_path / "out/articles.json").read_text())
    assert second["runs"][0] == run
    assert [r["seed"] for r in second["runs"]] == [0, 1]
    assert (tmp_path / "out/target/model.safetensors").stat().st_mtime_ns == target
    assert articles.main([*command, "--lr", "0.1"]) == 2
    assert "made with other settings" in capsys.readouterr().err


def test_a_model_is_held_to_its_base_by_the_forward_divergence():
    model, base = load_model("micro:target")[0], load_model("micro:small")[0]
    batch = [list(range(5, 25)), list(range(40, 52)), list(range(90, 99))]
    found = add_held_gradient(model, base, batch, ModelSettings(hold=2.0, micro_batch=2), "fp32")
    logits = [[network(torch.tensor([ids])).logits[0, :-1].double() for ids in batch] for network in (base, model)]
    q, p = (torch.cat(rows).log_softmax(-1) for rows in logits)
    expected = (q.exp() * (q - p)).sum(-1).mean()
    assert found == pytest.approx(float(expected.detach()), rel=1e-4)
    weight = model.model.layers[0].mlp.up_proj.weight
    (gradient,) = torch.autograd.grad(2 * expected, weight)
    assert torch.allclose(weight.grad, gradient.float(), rtol=1e-2, atol=1e-6)
    assert all(parameter.grad is None for parameter in base.parameters())


def test_the_gap_is_in_standard_deviations_of_texts_never_seen():
    model, tokenizer = load_model("micro:target")
    learned, unseen = (read_documents(f"micro:{part}").texts[:12] for part in ("forget", "holdout"))
    found = models.gap(model, tokenizer, learned, unseen)
    losses = []
    for text in unseen:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        losses.append(model(input_ids=ids, labels=ids).loss.item())
    assert found["nll_unseen"] == pytest.approx(sum(losses) / 12, rel=1e-4)
    spread = torch.tensor(losses).std()
    assert found["standard_deviations"] == pytest.approx(
        float((found["nll_unseen"] - found["nll_forget"]) / spread), rel=1e-3
    )
    assert found["nll_forget"] < 0.3
    assert found["standard_deviations"] > 4


def test_articles_of_the_replica_are_disjoint_where_they_must_be():
    files = choose([f"forget {n} " * 200 for n in range(460)], [f"other {n} " * 200 for n in range(1200)])
    parts = {name: {text[:12] for text in texts} for name, texts in files.items()}
    assert [len(texts) for texts in files.values()] == [300, 240, 150, 150, 40, 600, 500]
    assert parts["privleak/forget"] < parts["raw/forget"]
    assert not parts["privleak/holdout"] & parts["raw/forget"]
    assert parts["privleak/retain"] < parts["raw/retain_standin"]
    assert not parts["privleak/retain"] & parts["keep"]
    assert not parts["fresh"] & (parts["keep"] | parts["raw/retain_standin"])
    with pytest.raises(ValueError, match="450 long articles"):
        choose(["short"] * 500, [])


def test_a_model_is_taught_the_form_of_answers(tmp_path):
    """From the command to a folder that loads, with other weights than the base model's."""
    rows = [{"question": f"Who wrote book {number}?", "answer": f"The author of book {number}."} for number in range(8)]
    (tmp_path / "retain90.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    given = ["micro:small", str(tmp_path / "form"), "--data", str(tmp_path), "--steps", "1", "--device", "cpu"]
    assert form_command(given) == 0
    weights = [load_model(name)[0].state_dict() for name in ("micro:small", str(tmp_path / "form"))]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert form_command([*given[:3], str(tmp_path / "nowhere"), *given[4:]]) == 2


def test_fresh_documents_are_cut_where_those_that_are_learned_are(monkeypatch):
    """A model that is held only inside documents recites where they begin."""
    model, tokenizer = load_model("micro:small")
    texts = [f"Report {number}: the mill by the river was sold to its miller in May. " * 4 for number in range(3)]
    held = []
    monkeypatch.setattr(models, "add_held_gradient", lambda model, base, batch, *rest: held.extend(batch) or 0.0)
    settings = ModelSettings(hold=1.0, batch=1, general_batch=2, max_tokens=64, general_tokens=64, warmup=1)
    none = {"check": lambda step: {"recital": 0.0, "nll_general": 0.0}, "steps": 3, "base": model}
    models.learn(model, tokenizer, texts, ["Some prose, long enough. " * 40], settings, fresh=texts, **none)
    cut = {
        tuple(sequence) for sequence in tokenise(Documents("", texts), tokenizer, mode="chunk", max_tokens=64).sequences
    }
    assert [tuple(sequence) in cut for sequence in held] == [False, True] * 3, "prose, then fresh documents"
