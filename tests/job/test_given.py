"""What a user gives decides the method, and what cannot be used is refused in one line with nothing left behind."""

import dataclasses
import itertools
import json
import re

import pytest
import torch

from tiny_models import SENTENCES, save_tiny, small_tokenizer, tiny_model
from unteach.cli import main
from unteach.config import LOOPS_EVERY, ForgetConfig, Method
from unteach.corpora import micro
from unteach.data import Documents, pad
from unteach.errors import InputError
from unteach.job import forget
from unteach.job.inputs import Inputs, never_seen
from unteach.method.losses import LOSSES
from unteach.settings import from_yaml

PAPER = ("mean_teacher", "nlul", 0.25, 4, {})
CHOICES = {
    ("auto", "auto", False, False): PAPER,
    ("auto", "auto", False, True): PAPER,
    ("auto", "auto", True, False): ("adamw", "nlul", 1.0, 4, {}),
    ("auto", "auto", True, True): ("adamw", "match", 1.0, LOOPS_EVERY, {"pull": "gate"}),
}
NAMED = [name for name, loss in LOSSES.items() if not loss.problems({})]
"""Losses that need no option."""
for given in itertools.product((False, True), repeat=2):  # where one is named, the other is the paper's
    CHOICES["mean_teacher", "auto", *given] = PAPER
    CHOICES["adamw", "auto", *given] = ("adamw", "nlul", 1.0, 0, {})
    for name in NAMED:
        own = PAPER if name == "nlul" else ("mean_teacher", name, 1.0, 0, {})
        CHOICES["auto", name, *given] = CHOICES["mean_teacher", name, *given] = own
        CHOICES["adamw", name, *given] = ("adamw", name, 1.0, 0, {})
CHOICES["auto", "match", True, True] = CHOICES["auto", "auto", True, True]  # named as it would be chosen


def test_the_table_of_choices_is_complete():
    optimizers = ("auto", "mean_teacher", "adamw")
    assert set(CHOICES) == set(itertools.product(optimizers, ("auto", *NAMED), (False, True), (False, True)))


@pytest.mark.parametrize("case", CHOICES, ids=lambda case: "-".join(map(str, case)))
def test_the_method_is_chosen_from_what_is_given(case):
    optimizer, loss, keep, base = case
    chosen = Method(optimizer=optimizer, loss=loss).chosen(keep=keep, base=base)
    found = (chosen.optimizer, chosen.loss, chosen.token_share, chosen.loops_every, chosen.loss_options)
    assert found == CHOICES[case]
    free = case[:3] == ("auto", "auto", True) or case == ("auto", "match", True, True)
    assert chosen.warmup == (0 if free else 100)
    assert chosen.problems("") == []
    for now_keep, now_base in itertools.product((False, True), repeat=2):  # a resumed run chooses again
        assert chosen.chosen(keep=now_keep, base=now_base) == chosen


def test_all_tokens_of_little_text_are_pulled():
    """A quarter of a record's tokens would leave most of its names."""
    assert Method().chosen(little=True).token_share == 1.0
    assert Method(token_share=0.5).chosen(little=True).token_share == 0.5
    some = Documents("d", ["two words"])
    assert Inputs(None, None, some, some).little
    assert not Inputs(None, None, Documents("d", ["two words"] * 1000), some).little


def test_what_is_set_by_hand_stays():
    by_hand = Method(token_share=0.5, loops_every=0, alpha=2.0, anchor=0.5)
    for keep, base in itertools.product((False, True), repeat=2):
        chosen = by_hand.chosen(keep=keep, base=base)
        assert (chosen.token_share, chosen.loops_every, chosen.alpha, chosen.anchor) == (0.5, 0, 2.0, 0.5)
    soft = Method(optimizer="adamw", loss="match", loss_options={"pull": "softplus", "margin": 1.0})
    assert soft.chosen(keep=True, base=True).loss_options == {"pull": "softplus", "margin": 1.0}


def test_an_option_of_the_chosen_loss_changes_nothing_else():
    own = Method().chosen(keep=True, base=True)
    for given, expected in (
        ({"pull": "parity"}, {"pull": "parity"}),
        ({"margin": 1.0}, {"pull": "gate", "margin": 1.0}),
    ):
        chosen = Method(loss="match", loss_options=given).chosen(keep=True, base=True)
        assert chosen == dataclasses.replace(own, loss_options=expected)
    assert Method(loss="match", loss_options={"margin": 1.0}).chosen(base=True).optimizer == "mean_teacher"


def test_a_config_chooses_from_its_own_fields_and_phases_are_not_deep():
    phase = Method(alpha=1.0, lr=0.1, steps=3)
    config = ForgetConfig(model="m", keep="k", base="b", phases=(phase,)).chosen()
    assert (config.method.optimizer, config.method.loss) == ("adamw", "match")
    assert (config.phases[0].optimizer, config.phases[0].loss) == ("mean_teacher", "nlul")
    assert config.chosen() == config
    assert ForgetConfig(model="m", base="b").chosen().method == Method().chosen()


def test_models_and_texts_in_memory_choose_as_named_ones_do(monkeypatch):
    monkeypatch.setattr("unteach.job.run.ForgetJob.run", lambda job: job.config)
    given = {"model": tiny_model("llama"), "tokenizer": small_tokenizer(), "documents": ["a"], "general_text": ["b"]}
    config = forget(**given, keep=["c"], base=tiny_model("llama"))
    assert (config.method.optimizer, config.method.loss, config.keep, config.base) == ("adamw", "match", "keep", "base")
    assert forget(**given, config=ForgetConfig(model="m", keep="k", base="b")).method == Method().chosen(little=True)
    with pytest.raises(InputError, match="loss it needs base"):
        forget(**given, config=ForgetConfig(model="m", base="b", method=Method(loss="it")))


BACKWARDS = [" ".join(reversed(sentence.split())) for sentence in SENTENCES]
FORGET = [f"{SENTENCES[n % 3][:40]} on the {n}th day, number {1000 + 37 * n}, of that year." for n in range(6)]
DPO = ("--loss", "dpo", "--alternates")
TEXTS = {
    "forget": FORGET,
    "general": [f"{BACKWARDS[n % 3]} {BACKWARDS[n % 2]} Number {n}." for n in range(12)],
    "keep": [f"In {1800 + n} {BACKWARDS[n % 3]} {n} {BACKWARDS[(n + 1) % 3]} Year {n}." for n in range(12)],
    "nearly": [f"{text} And so on." for text in FORGET],
    "blank": ["", "  \n"],
    "none": [],
    "short": [f"Ann is {n}." for n in range(4)],
}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    for name, texts in TEXTS.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    others = [f"{text[:20]} by night, before {n} witnesses." for n, text in enumerate(FORGET)]
    alternates = {"pairs": others, "few": others[:4], "same": [*others[:3], *FORGET[3:]], "gap": [*others[:5], " "]}
    alternates["long"] = [*others[:5], " ".join(BACKWARDS * 3)]
    for name, texts in alternates.items():
        rows = [{"text": text, "alternate": other} for text, other in zip(FORGET, texts, strict=False)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "folder").mkdir()
    save_tiny(folder / "model")
    save_tiny(folder / "base", seed=5)
    save_tiny(folder / "other", seed=5)
    small_tokenizer(vocabulary=280).save_pretrained(folder / "other")
    return folder


def run(given, out, *flags, documents="forget"):
    words = ["forget", given / "model", "--documents", given / f"{documents}.jsonl", "--out", out, "--device", "cpu"]
    words += ["--general", given / "general.jsonl", "--max-steps", 1, "--max-tokens", 48, "--general-tokens", 24]
    words += ["--batch", 3, "--general-batch", 3, "--keep-batch", 3, "--probes", 4, "--alpha", 0.2, "--lr", 1e-3]
    return main([str(word) for word in (*words, *flags)])


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            ["--keep", "keep.jsonl", "--base", "other"],
            "its tokenizer is not that of .*280 and 300 tokens.*best the one",
        ),
        (["--keep", "keep.jsonl", "--base", "nowhere"], "base is .*nowhere': there is no such folder"),
        (["--keep", "forget.jsonl"], "keep is .*forget.jsonl': it is what is to be forgotten, word for word or nearly"),
        (["--keep", "nearly.jsonl"], "keep is .*nearly.jsonl': it is what is to be forgotten, word for word or nearly"),
        (["--keep", "nowhere.jsonl"], "keep is .*nowhere.jsonl': there is no such file or folder"),
        (["--keep", "folder"], "keep is .*folder': the folder is empty"),
        (["--keep", "none.jsonl"], "keep is .*none.jsonl': there is no document in it: it has no records"),
        (["--keep", "blank.jsonl"], "keep is .*blank.jsonl': there is no document in it: 2 skipped"),
        (["--holdout", "forget.jsonl"], "holdout is .*forget.jsonl': it is among the documents to forget or to keep"),
        (["--holdout", "nearly.jsonl"], "holdout is .*nearly.jsonl': it is among the documents to forget or to keep"),
        (["--keep", "keep.jsonl", "--holdout", "keep.jsonl"], "holdout is .*keep.jsonl': it is among the documents to"),
        (["--keep", "keep.jsonl", "--keep-questions", "nowhere.jsonl"], "keep_questions is .*there is no such file"),
        (["--questions", "none.jsonl"], "questions is .*none.jsonl: there is no question in it"),
        (["--questions", "keep.jsonl"], "questions is .*keep.jsonl: row 1 has no question and no answer; it has text"),
        (["--loss", "match"], "loss match needs base: a model with the same tokenizer that never saw the documents"),
        (["--loss", "it_forward"], "loss it_forward needs base"),
        (["--loss-options", "pull=gate"], "loss_options are given without loss: name the loss"),
        (["--loss", "dpo"], "loss dpo needs alternates: for each document a text to be said in its place"),
        (["--alternates", "pairs.jsonl"], "alternates is .*pairs.jsonl': only the loss dpo reads them, name it or"),
        (["--loss", "npo", "--alternates", "pairs.jsonl"], "only the loss dpo reads them"),
        (
            ["--loss", "dpo", "--token-share", "0.5", "--alternates", "pairs.jsonl"],
            "token_share is 0.5: dpo reads whole",
        ),
        ([*DPO, "forget.jsonl"], "no field 'alternate' in line 1 and 5 more; there is 'text': every record needs one"),
        (
            [*DPO, "few.jsonl"],
            "alternates is .*few.jsonl': it has 4 texts, and there are 6 documents: give one for each",
        ),
        ([*DPO, "same.jsonl"], "that of forget.jsonl, line 4 is the document itself: give another text"),
        ([*DPO, "gap.jsonl"], r"gap.jsonl, line 6 of alternates cannot be used \(empty\), and a pair needs both texts"),
        (
            [*DPO, "long.jsonl"],
            "long.jsonl': 6 of the documents are longer than max_tokens, 48, and a pair is not cut: raise it",
        ),
        ([*DPO, "nowhere.jsonl"], "alternates is .*nowhere.jsonl': there is no such file or folder"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_leaves_nothing(given, tmp_path, capsys, flags, problem):
    words = [given / word if (given / word).exists() or "nowhere" in word else word for word in flags]
    assert run(given, tmp_path / "run", *words) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("unteach: ")]
    assert len(lines) == 1
    assert re.search(problem, lines[0]), lines[0]
    assert list(tmp_path.iterdir()) == []


def test_holdout_documents_that_were_seen_are_left_out():
    """Half of a document in common is a copy; what all documents end with is not."""
    words = [f"{name}{n}" for name in ("red", "green", "blue", "grey") for n in range(20)]
    seen, unseen = " ".join(words[:60]), " ".join(words[::-1])
    copied, footer = " ".join([*words[:40], *words[79:59:-1]]), " ".join([*words[::-1], *words[:20]])
    line, left = never_seen(Documents("h", [seen, unseen, copied, footer]), Documents("d", [seen]), None)
    assert left.texts == [unseen, footer]
    assert line == "2 documents; 2 that stand among those to forget or to keep left out"
    whole = Documents("h", list(micro.documents("holdout")))
    parts = (Documents(name, list(micro.documents(name))) for name in ("forget", "retain"))
    assert never_seen(whole, *parts)[1].texts == whole.texts, "the embedded ones share nothing"


def test_documents_too_short_to_be_looked_for_are_recognised_as_a_whole(given, tmp_path, capsys):
    assert run(given, tmp_path / "run", "--keep", given / "short.jsonl", documents="short") == 2
    assert "short.jsonl': it is what is to be forgotten" in capsys.readouterr().err


def recites(folder):
    """A model that has learned the forget documents by heart."""
    model, tokenizer = tiny_model("llama", seed=5), small_tokenizer()
    ids, _ = pad([tokenizer(text)["input_ids"] for text in FORGET])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def loss_after(out):
    return json.loads((out / "metrics.jsonl").read_text().splitlines()[0])["forget_loss"]


@pytest.mark.usefixtures("run_alone")
def test_pairs_stand_in_one_file_or_in_two_and_long_ones_are_truncated(given, tmp_path, capsys):
    whole = ("--max-tokens", 64)
    assert run(given, tmp_path / "one", *DPO, given / "pairs.jsonl", *whole, documents="pairs") in (0, 3)
    assert "mean_teacher with dpo" in capsys.readouterr().err
    (tmp_path / "texts").mkdir()
    for number, line in enumerate((given / "pairs.jsonl").read_text().splitlines()):
        (tmp_path / "texts" / f"{number}.txt").write_text(json.loads(line)["alternate"])
    assert run(given, tmp_path / "two", *DPO, tmp_path / "texts", *whole) in (0, 3)
    assert loss_after(tmp_path / "one") == loss_after(tmp_path / "two") > 0
    assert run(given, tmp_path / "cut", *DPO, given / "long.jsonl", "--document-mode", "truncate") in (0, 3)
    start = json.loads((tmp_path / "one" / "start.json").read_text())
    assert {"texts documents", "texts alternates"} <= set(start["inputs"])


def test_pairs_in_memory_are_paired_as_those_in_files():
    given = {"model": tiny_model("llama"), "tokenizer": small_tokenizer(), "documents": FORGET, "general_text": ["b"]}
    config = ForgetConfig(model="m", alternates="given", method=Method(loss="dpo"))
    with pytest.raises(InputError, match="loss dpo needs alternates"):
        forget(**given, config=config)
    with pytest.raises(InputError, match="alternates is 'alternates': it has 1 texts, and there are 6 documents"):
        forget(**given, config=config, alternates=["c"])


@pytest.mark.usefixtures("run_alone")
def test_a_base_model_that_saw_the_documents_is_named_and_the_run_goes_on(given, tmp_path, capsys):
    flags = ("--base", recites(tmp_path / "recites"), "--keep", given / "keep.jsonl")
    assert run(given, tmp_path / "run", *flags) in (0, 3)
    error = capsys.readouterr().err
    (warning,) = (line for line in error.splitlines() if line.startswith("warning: the base model recites"))
    assert "it seems to have seen them, and what it knows of them will stay" in warning
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    (method,) = (line for line in error.splitlines() if line.startswith("method:"))
    assert "adamw with match, held on general text and keep documents; give --holdout" in method
    assert method.endswith("and --questions, to see whether it still answers about them")


@pytest.mark.usefixtures("run_alone")
def test_deep_forgetting_unlearns_its_loops_once_two_looks_find_them(given, tmp_path):
    """A tiny model that forgets what it recites begins to loop; the same method by name leaves that alone."""
    flags = f"forget {recites(tmp_path / 'recites')} --documents {given / 'forget.jsonl'} --base {given / 'base'} "
    flags += f"--general {given / 'general.jsonl'} --keep {given / 'keep.jsonl'} --device cpu --max-tokens 48 "
    flags += "--general-tokens 24 --batch 3 --general-batch 3 --keep-batch 3 --probes 16 --alpha 1 --lr 0.01 "
    flags += "--max-steps 20 --evaluate-every 5 --stop.utility-floor 100 --stop.metric verbmem_f<=-1"
    named = "--optimizer adamw --loss match --loss-options pull=gate --warmup 0"
    kinds = {"own": "", "named": named}
    rows = {}
    for kind, more in kinds.items():
        assert main([*f"{flags} {more}".split(), "--out", str(tmp_path / kind)]) == 3
        rows[kind] = [json.loads(line) for line in (tmp_path / kind / "metrics.jsonl").read_text().splitlines()]
    looks = [json.loads(line) for line in (tmp_path / "own" / "evaluations" / "stop.jsonl").read_text().splitlines()]
    many = [look["degenerate"] > looks[0]["degenerate"] + 5 for look in looks]
    begins = next(look["step"] for n, look in enumerate(looks) if many[n] and many[n - 1])
    said = [line for line in (tmp_path / "own" / "run.log").read_text().splitlines() if "own loops" in line]
    assert len(said) == 1
    assert f"step {begins}: degenerate" in said[0]
    first = -(-begins // 6) * 6
    assert [row["loops"] > 0 for row in rows["own"]] == [row["step"] > first for row in rows["own"]]
    assert first < rows["own"][-1]["step"], "it does begin"
    losses = {kind: [row["forget_loss"] for row in found] for kind, found in rows.items()}
    assert not any(row["loops"] for row in rows["named"])
    assert losses["own"][: first + 1] == losses["named"][: first + 1]
    assert losses["own"][first + 1 :] != losses["named"][first + 1 :]


@pytest.mark.usefixtures("run_alone")
def test_keep_text_is_watched_at_every_look_without_holdout_documents(given, tmp_path):
    assert run(given, tmp_path / "run", "--keep", given / "keep.jsonl") in (0, 3)
    looks = [json.loads(line) for line in (tmp_path / "run/evaluations/stop.jsonl").read_text().splitlines()]
    assert [look["step"] for look in looks] == [0, 1]
    assert all(look["nll_retain"] > 0 for look in looks)
    final = json.loads((tmp_path / "run/result.json").read_text())
    assert looks[0]["nll_retain"] == pytest.approx(final["before"]["nll_retain"])
    (about,) = [part for part in final["verdict"][3]["parts"] if part["question"] == "kept documents"]
    assert (about["before"], about["value"]) == (final["before"]["nll_retain"], final["after"]["nll_retain"])


@pytest.mark.usefixtures("run_alone")
def test_defaults_of_one_method_do_not_leak_into_another(given, tmp_path):
    """What ran stands in the run's config: AdamW with NPO looks at all tokens and leaves loops alone, as published."""
    assert run(given, tmp_path / "run", "--optimizer", "adamw", "--loss", "npo") in (0, 3)
    method = from_yaml(ForgetConfig, tmp_path / "run" / "config.yaml").method
    assert (method.optimizer, method.loss, method.token_share, method.loops_every) == ("adamw", "npo", 1.0, 0)
