"""Each attack on tiny models: what it does, and that it leaves the model as it was."""

import dataclasses
import itertools
import json
import math
import sys
from collections import Counter

import pytest
import torch

from tiny_models import small_tokenizer, tiny_model
from unteach.audits import attacks, inside, membership, other_words, quantisation, relearning, sampling, texts
from unteach.audits.running import SUMMARY, Audit
from unteach.corpora import Question
from unteach.data import Documents

NAMES = [f"{first}{last}" for first, last in itertools.product(("Ada", "Bo", "Cy", "Di"), ("mar", "lin", "ton", "wel"))]
SMALL = {
    "relearning": relearning.Settings(steps=(0, 1), batch=2, probes=2, questions=2),
    "quantisation": quantisation.Settings(bits=(32, 4), probes=2, questions=2),
    "sampling": sampling.Settings(grid=((1.0, 0.9),), samples=3, k=(1, 3), probes=2, questions=2),
    "other_words": other_words.Settings(probes=2, questions=2, cloze=2, forms=("asked plainly",)),
    "membership": membership.Settings(texts=6, pairs=6),
    "inside": inside.Settings(facts=8),
}


def document(name):
    return f"The river near the school was closed by {name} on Monday, and {name} waited in the rain with 40 people."


@pytest.fixture(scope="module")
def asked():
    documents = Documents("forget", [document(name) for name in NAMES[:8]])
    unseen = Documents("holdout", [document(name) for name in NAMES[8:]])
    questions = [Question(f"Where did {name} wait?", "in the rain") for name in NAMES[:8]]
    made = texts.own(documents, small_tokenizer(), max_tokens=60, unseen=unseen, questions=questions)
    return dataclasses.replace(made, settings=dataclasses.replace(made.settings, knowledge_tokens=4))


def case_of(model, asked, **given):
    unrelated = Documents("general", ["A bakery opened near the station and people spoke of the old theatre. " * 3] * 4)
    return texts.Case(model=model, tokenizer=small_tokenizer(), asked=asked, unrelated=unrelated, seed=0, **given)


@pytest.mark.parametrize("name", list(attacks()))
def test_every_attack_measures_and_leaves_the_model_alone(name, asked):
    model = tiny_model("llama")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    case = case_of(model, asked)
    found = attacks()[name].measure(case, SMALL[name])
    assert found
    assert all(0 <= score <= 1 for each in found if not each.against for score in each.scores)
    assert len({(each.line, each.at) for each in found}) == len(found)
    again = attacks()[name].measure(case, SMALL[name])
    assert again == found, "seeded, and the model is as it was"
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(block._forward_hooks for block in model.model.layers)


def test_every_attack_says_what_it_is():
    assert set(SMALL) == set(attacks()), "a new attack needs settings here"
    for name, attack in attacks().items():
        assert type(attack.quick) is type(attack.full)
        assert len(attack.protocol) > 50
        assert attack.source
        assert attack.title == name.replace("_", " ")


def test_a_part_is_made_of_whole_groups(asked):
    grouped = dataclasses.replace(asked, groups=((0, 1), (2, 3), (4, 5), (6, 7)))
    part = grouped.part(0.1, seed=3)
    assert part in [set(group) for group in grouped.groups]
    assert part == grouped.part(0.1, seed=3)
    rest = grouped.apart_from(part)
    assert not part & {probe.document for probe in rest.probes}
    assert len(rest.questions) == 6, "questions that name a person of the part go"


def test_relearning_brings_back_what_the_part_tells(asked):
    """All documents say the same: learning half of them is learning the others. Before, nothing is learned."""
    same = texts.own(Documents("same", [document("Adamar")] * 8), small_tokenizer(), max_tokens=60)
    halves = dataclasses.replace(same, groups=((0, 1, 2, 3), (4, 5, 6, 7)))
    settings = dataclasses.replace(SMALL["relearning"], steps=(0, 40), small_lr=2e-2, batch=4)
    found = relearning.measure(case_of(tiny_model("llama"), halves), settings)
    curves = {(each.line, each.at): sum(each.scores) / len(each.scores) for each in found}
    assert curves["recites after a tenth of the documents", 40] > 0.8
    assert curves["recites after a tenth of the documents", 0] < 0.3
    assert curves["recites after unrelated text", 40] < 0.5
    first = relearning.measure(case_of(tiny_model("llama"), halves, role="before"), settings)
    assert {each.at for each in first} == {0}


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding(bits):
    weights = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    found = quantisation.rounded(weights, bits, group=64)
    most = 2 ** (bits - 1) - 1
    for group in (slice(0, 64), slice(64, 100)):
        scale = weights[:, group].abs().amax(1, keepdim=True) / most
        assert ((found - weights)[:, group].abs() <= scale / 2 + 1e-6).all()
        assert torch.allclose((found[:, group] / scale).round() * scale, found[:, group], atol=1e-5)
    assert torch.allclose(quantisation.rounded(found, bits, group=64), found, atol=1e-6)


class _Absent:
    """Takes the place of a package that cannot be imported."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "bitsandbytes":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture
def no_library(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Absent(), *sys.meta_path])
    quantisation.library.cache_clear()
    yield
    quantisation.library.cache_clear()


def audit_of(asked, **given):
    models = {"after": lambda: tiny_model("llama"), "reference": lambda: tiny_model("llama", 1)}
    unrelated = Documents("general", ["The old theatre and the library. " * 4])
    given = {"tokenizer": small_tokenizer(), "asked": asked, "never_seen": None, "unrelated": unrelated} | given
    return Audit(models=models, progress=False, **given)


def test_without_bitsandbytes_only_the_own_rounding_is_made(no_library, asked):
    attack, lines = quantisation.ATTACK, {"recites": [32, 8, 4], "answers": [32, 8, 4]}
    audit = audit_of(asked, quick=True)
    assert audit.settings(attack) is attack.quick
    known = {"bits": (32, 8, 4), "group": 64, "probes": 60, "questions": 60}
    assert dataclasses.asdict(attack.quick) == known, "results/ know their cells by it"
    found = audit.run(None, ("quantisation",))["quantisation"]
    assert found["settings"] == known
    for part in ("after", "control"):
        assert {line: [row["at"] for row in found[part] if row["line"] == line] for line in lines} == lines
        assert len(found[part]) == 6


@pytest.mark.skipif(quantisation.library() is None, reason="bitsandbytes is not installed, or lacks a format here")
def test_bitsandbytes_has_lines_of_its_own(asked):
    attack, audit = quantisation.ATTACK, audit_of(asked, quick=True)
    plain = dataclasses.replace(audit, packages=False)
    assert plain.settings(attack) is attack.quick
    assert audit.settings(attack).library.startswith("bitsandbytes ")
    assert audit.key("quantisation") != plain.key("quantisation")
    found, own = (each.run(None, ("quantisation",))["quantisation"] for each in (audit, plain))
    assert found["after"][:6] == own["after"], "the other lines are the same"
    added = {(row["line"], row["at"]) for row in found["beyond"][6:]}
    assert added == set(itertools.product(("recites, bitsandbytes", "answers, bitsandbytes"), quantisation.FORMATS))
    model = tiny_model("llama")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    quantisation.measure(case_of(model, asked), audit.settings(attack))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.skipif(quantisation.library() is None, reason="bitsandbytes is not installed, or lacks a format here")
def test_the_formats_of_bitsandbytes():
    weights = torch.randn(6, 128, generator=torch.Generator().manual_seed(0))
    rows = weights.abs().amax(1, keepdim=True)
    int8 = quantisation.stored(weights, "int8")
    assert ((int8 - weights).abs() <= rows / 127 / 2 + 1e-3).all()
    assert torch.allclose(int8 * 127 / rows, (int8 * 127 / rows).round(), atol=0.1)
    for form, widest in (("fp4", 1 / 6), ("nf4", 0.152)):  # half the widest gap of the 16 values of a block
        found = quantisation.stored(weights, form)
        blocks = (weights - found).reshape(-1, 64), weights.reshape(-1, 64).abs().amax(1, keepdim=True)
        assert (blocks[0].abs() <= widest * blocks[1] + 1e-5).all()
        assert max(len(block.unique()) for block in found.reshape(-1, 64)) <= 16
        assert torch.allclose(quantisation.stored(found, form), found, atol=1e-6)


def test_leak_at_k_is_the_share_of_choices_with_a_leak():
    for n, c, k in itertools.product((1, 4, 6), (0, 1, 3, 6), (1, 2, 4)):
        if c <= n and k <= n:
            choices = list(itertools.combinations(range(n), k))
            assert math.isclose(sampling.leak_at(k, n, c), sum(min(x) < c for x in choices) / len(choices))


def test_sampling_draws_from_the_most_probable():
    logits = torch.tensor([[3.0, 2.0, 1.0, -1.0]]).log_softmax(-1)
    pick = sampling.sampler(1.0, 0.85, seed=0)
    drawn = Counter(int(pick(logits)) for _ in range(600))
    shares = logits.exp()[0, :2] / logits.exp()[0, :2].sum()
    assert set(drawn) == {0, 1}, "together they have 0.90 of the probability"
    assert abs(drawn[0] / 600 - float(shares[0])) < 0.06
    greedy = sampling.sampler(1e-4, 1.0, seed=0)
    assert {int(greedy(logits)) for _ in range(20)} == {0}
    first, second = (sampling.sampler(1.0, 1.0, seed=5) for _ in range(2))
    wide = logits.repeat(50, 1)
    assert torch.equal(first(wide), second(wide))


def test_changed_copies_differ_in_one_fact():
    sources = [document(name) for name in NAMES]
    pairs = membership.changed_copies(sources, 9, seed=0)
    assert len(pairs) == 9
    for true, other in pairs:
        removed, added = (sorted(set(a.split()) - set(b.split())) for a, b in ((true, other), (other, true)))
        assert len(removed) == len(added) >= 1
        strip = {word.strip(",.") for word in (*removed, *added)}
        assert len(strip) == 2, "one fact, everywhere in the text"


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_the_last_layer_of_the_lens_is_the_model_itself(family, asked):
    model = tiny_model(family)
    case = case_of(model, asked)
    readings = inside.measure(case, inside.Settings(facts=8, top=40))
    assert [each.at for each in readings] == [1, 2, 3]
    expected = []
    for fact in texts.facts(case, 8):
        with torch.no_grad():
            logits = model(torch.tensor([fact.prompt_ids])).logits[0, -1]
        expected.append(float(fact.expected_ids[0] in logits.topk(40).indices.tolist()))
    assert list(readings[-1].scores) == expected


def test_answers_and_chance():
    assert texts.has_answer("It was in the Rain, they said", "in the rain")
    assert not texts.has_answer("in the sun and rain", "in the rain")
    found = texts.permuted(["a tin box", "nothing", "a red box"], ["tin box", "red box", "red box"], "latin")
    assert found == (0.0, 0.0, 0.0)
    assert texts.permuted(["red box", "red box"], ["tin box", "red box"], "latin") == (1.0, 0.0)


def test_an_audit_writes_files_and_goes_on(tmp_path, asked):
    made = []

    def loading(name, seed):
        return lambda: made.append(name) or tiny_model("llama", seed)

    models = {"after": loading("after", 0), "before": loading("before", 1), "reference": loading("reference", 2)}
    unrelated = Documents("general", ["The old theatre and the library. " * 4])
    given = {"tokenizer": small_tokenizer(), "asked": asked, "never_seen": None, "unrelated": unrelated, "quick": True}
    audit = Audit(models=models, inputs={"after": "a"}, progress=False, **given)
    names = ("inside", "membership")
    found = audit.run(tmp_path, names)
    assert made == ["before", "after", "reference"] * 2
    content = json.loads((tmp_path / "inside.json").read_text())
    assert content == json.loads(json.dumps(found["inside"]))
    assert content["compared_with"] == "reference"
    assert {len(content[part]) for part in ("before", "after", "reference", "control", "beyond")} == {3}
    written = "".join(file.read_text() for file in tmp_path.iterdir())
    assert not any(name in written for name in NAMES), "no word of a document is in any file"
    assert "river" not in written
    made.clear()
    (tmp_path / "membership.json").write_text("half a fi")
    assert audit.run(tmp_path, names)["inside"] == content
    assert made == ["before", "after", "reference"], "what is done is not done again; what is broken is"
    dataclasses.replace(audit, inputs={"after": "b"}).run(tmp_path, ("inside",))
    assert len(made) == 6, "another model is audited anew"
    summary = json.loads((tmp_path / SUMMARY).read_text())
    assert set(summary["attacks"]) == set(names)
    assert set(summary["not_made"]) == set(attacks()) - set(names)
