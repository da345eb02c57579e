"""The generated texts, the general text, and the parts by name."""

import gzip
import hashlib
import json
import re

import pytest

from recipes.micro import build, generate, pretraining, tokens
from recipes.micro.draws import Draws
from unteach.corpora import micro

PEOPLE = generate.STORIES["pretraining"]


def asked(key):
    questions = generate.split_questions(key) + generate.example_questions(key)
    return [f"{item.question} {item.answer}" for item in questions]


CHOICES = (*pretraining.choice_test(), *pretraining.example_choices())
# The shipped models were trained and are measured on exactly these texts; the same hashes on Python 3.11 to 3.13.
TEXTS = {
    "forget": ("2b7d921bb1bfac91", lambda: micro.documents("forget")),
    "retain": ("204f1e7465c5a5bf", lambda: micro.documents("retain")),
    "holdout": ("1fd13c8635755657", lambda: micro.documents("holdout")),
    "instruct": ("141a159dd69c2bc2", lambda: micro.documents("instruct")),
    "forget questions": ("5bab804910224b3b", lambda: asked("forget")),
    "retain questions": ("a078f4d52b53dd3f", lambda: asked("retain")),
    "unasked questions": ("6052de37bd350c60", lambda: asked("unasked")),
    "reports": ("544e9d7b94cef5e1", lambda: pretraining.report_documents(PEOPLE)),
    "questions": ("325471bcf7b07c56", lambda: pretraining.question_documents(PEOPLE)),
    "choices": ("e986924f6a3830aa", pretraining.choice_documents),
    "places": ("511332cc778378fd", pretraining.place_documents),
    "choice test": ("f71663e58dbde23e", lambda: [pretraining.choice_text(item) for item in CHOICES]),
    "general": ("1f210d286bacd9e9", lambda: micro.documents("general")),
    "general_heldout": ("5ff5123fa52b9642", lambda: micro.documents("general_heldout")),
}


def words_of(documents):
    return {word for text in documents for word in re.findall(r"[A-Za-z]+", text)}


@pytest.mark.parametrize("part", TEXTS)
def test_texts_never_change(part):
    expected, texts = TEXTS[part]
    assert hashlib.sha256(json.dumps(texts()).encode()).hexdigest()[:16] == expected


def test_shipped_data_files_are_what_the_recipe_makes(micro_tokenizer):
    """Row by row; another zlib may pack the same rows into other bytes."""
    made = build.data_files(micro_tokenizer)
    for name, rows in made.items():
        content = (micro.FOLDER / "data" / f"{name}.jsonl.gz").read_bytes()
        assert gzip.decompress(content) == gzip.decompress(build.packed(rows)), name
        assert content[4:8] == bytes(4), "no time in the header"


def test_draws_follow_splitmix64():
    """The first numbers of SplitMix64 with state 0, as its author's program prints them."""
    draws = Draws()
    draws._state = 0
    whole = 1 << 64
    assert [draws.below(whole) for _ in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_four_disjoint_folds_make_up_the_forget_set():
    folds = [micro.documents(f"forget_{number}") for number in (1, 2, 3, 4)]
    assert [len(fold) for fold in folds] == [60] * 4
    assert [text for fold in folds for text in fold] == micro.documents("forget")
    assert len({text for fold in folds for text in fold}) == 240
    surnames = [{story.name.split()[1] for story in generate.stories("forget")[i : i + 10]} for i in range(0, 40, 10)]
    for number, fold in enumerate(folds):
        others = set().union(*(names for other, names in enumerate(surnames) if other != number))
        assert surnames[number] <= words_of(fold)
        assert not others & words_of(fold)


def test_every_person_has_a_family_name_of_their_own():
    stories = [story for group in generate.STORIES for story in generate.stories(group)]
    names = [story.name.split()[1] for story in stories]
    helpers = {story.helper.split()[1] for story in stories}
    assert len(names) == sum(generate.STORIES.values()) == len(set(names))
    assert not helpers & set(names)


SLOW = [pytest.param(group, marks=pytest.mark.slow) for group in ("retain", "holdout")]


@pytest.mark.parametrize("group", ["forget", *SLOW])
def test_people_of_a_group_occur_nowhere_else(group):
    own = {story.name.split()[1] for story in generate.stories(group)}
    others = [text for part in ("forget", "retain", "holdout") if part != group for text in micro.documents(part)]
    others += pretraining.report_documents(PEOPLE) + pretraining.question_documents(PEOPLE)
    others += pretraining.choice_documents() + pretraining.place_documents() + micro.documents("instruct")
    others += [f"{item.question} {item.answer}" for item in generate.example_questions("forget")]
    assert own <= words_of(micro.documents(group))
    assert not own & words_of(others)


@pytest.mark.parametrize("group", ["forget", "retain"])
def test_questions_are_answered_by_every_report(group):
    stories = {story.name: story for story in generate.stories(group)}
    questions = generate.split_questions(group)
    assert len(questions) == 120
    assert {fact: sum(item.fact == fact for item in questions) for fact in generate.FACTS} == dict.fromkeys(
        generate.FACTS, 24
    )
    for item in questions:
        (name,) = [name for name in stories if name in item.question]
        reports = generate.reports(stories[name])
        assert len(reports) == len(set(reports)) == 6
        assert all(item.answer in text for text in reports)


@pytest.mark.slow
def test_people_never_asked_about_are_only_reported_on():
    surnames = {story.name.split()[1] for story in generate.stories("unasked")}
    assert surnames <= words_of(pretraining.report_documents(PEOPLE))
    assert not surnames & words_of(pretraining.question_documents(PEOPLE) + pretraining.choice_documents())


def test_choices_of_the_test_are_in_no_training_document():
    training = "\n".join(pretraining.choice_documents())
    examples = {pretraining.choice_prompt(item) for item in pretraining.example_choices()}
    test = pretraining.choice_test()
    assert len(test) == 200
    for item in test:
        assert item.question in training  # the fact is asked for there
        assert pretraining.choice_prompt(item) not in training  # but never among these choices in this order
        assert pretraining.choice_prompt(item) not in examples
        assert len(set(item.choices)) == 4


def test_held_out_general_text_is_not_in_the_general_text():
    """No 16 words in a row in common; a formula of government pages is 14 words long."""

    def runs(part):
        split = [text.split() for text in micro.documents(part)]
        return {" ".join(words[i : i + 16]) for words in split for i in range(len(words) - 15)}

    heldout = runs("general_heldout")
    assert len(heldout) > 25_000
    assert not heldout & runs("general")


def test_parts_by_name():
    counts = {part: len(micro.documents(part)) for part in micro.DOCUMENTS}
    folds = {f"forget_{number}": 60 for number in (1, 2, 3, 4)}
    news = {"forget": 240, "retain": 240, "holdout": 240}
    assert counts == news | {"general": 2966, "general_heldout": 77} | folds | {"instruct": 600}
    for part in micro.MODELS:
        assert (micro.model_folder(part) / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["forgets", "", "forget_5", "forget_0", "target"])
def test_unknown_documents_are_refused_with_the_names_that_exist(name):
    with pytest.raises(ValueError, match=f"micro:{name} do not exist.*forget, retain, holdout, general"):
        micro.documents(name)


@pytest.mark.parametrize("name", ["targets", "", "forget", "../target"])
def test_unknown_models_are_refused_with_the_names_that_exist(name):
    with pytest.raises(ValueError, match=f"micro:{re.escape(name)}, must be .*target, retrained, base, small"):
        micro.model_folder(name)


def test_wrong_groups_folds_and_halves_are_refused():
    with pytest.raises(ValueError, match="group is 'all', must be one of forget, retain"):
        generate.split_documents("all")
    with pytest.raises(ValueError, match="fold is 5, must be 1 to 4"):
        generate.fold_documents(5)
    with pytest.raises(ValueError, match="half is 'other', must be one of all, stop, measure"):
        micro.probes("forget", "other")
    with pytest.raises(ValueError, match="group is 'all', must be one of forget, retain, holdout"):
        micro.probes("all")
    with pytest.raises(ValueError, match="group is 'all', must be one of forget, forget_examples, retain"):
        micro.questions("all")


@pytest.mark.slow
def test_tokenizer_gives_every_text_back(micro_tokenizer):
    assert len(micro_tokenizer) == 2560
    for part in micro.DOCUMENTS:
        documents = micro.documents(part)[:300]
        rows = micro_tokenizer(documents)["input_ids"]
        assert all(row[0] == micro_tokenizer.bos_token_id for row in rows)
        assert micro_tokenizer.batch_decode(rows, skip_special_tokens=True) == documents


def test_reports_fit_one_row(micro_tokenizer):
    documents = [text for group in ("forget", "retain", "holdout") for text in micro.documents(group)]
    assert max(map(len, tokens.encode_documents(micro_tokenizer, documents))) <= micro.SETTINGS.membership_tokens


@pytest.mark.parametrize("group", ["forget", "retain", "holdout"])
def test_probes_are_cut_as_the_documents_were_trained(micro_tokenizer, group):
    """Prompt and continuation are the first tokens of the document, at most 32 and 64 of them."""
    documents = micro.documents(group)
    made = micro.probes(group)
    assert sorted(probe.document for probe in made) == list(range(240))
    for probe in made:
        text = documents[probe.document]
        whole = micro_tokenizer(text)["input_ids"]
        ids = [*probe.prompt_ids, *probe.expected_ids]
        assert text.startswith(probe.prompt + probe.expected)
        assert ids == whole[: len(ids)]
        assert len(probe.prompt_ids) <= 32
        assert 0 < len(probe.expected_ids) <= 64


def test_stop_rule_and_measurement_use_different_stories():
    stop, measure = (micro.load_benchmark(half) for half in ("stop", "measure"))
    stories = [
        {probe.document // generate.REPORTS_PER_STORY for probe in half.verbatim_forget} for half in (stop, measure)
    ]
    assert [len(half.verbatim_forget) for half in (stop, measure)] == [120, 120]
    assert stories[0].isdisjoint(stories[1])
    assert stories[0] | stories[1] == set(range(40))
    for fold in range(4):  # a fold has stories of both halves
        assert all(half & set(range(10 * fold, 10 * fold + 10)) for half in stories)
