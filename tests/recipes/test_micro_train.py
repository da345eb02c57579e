"""The script that rebuilds the models: its parts, and all of it for a few steps."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.micro import batches, train
from unteach.corpora import micro


def stream(documents, **options):
    generator = torch.Generator().manual_seed(0)
    return batches.Stream(documents, 4, generator=generator, device=torch.device("cpu"), **options)


def test_windows_begin_with_a_document():
    documents = [[9, 1, 2, 8], [9, 3, 8], [9, 4, 5, 6, 7, 8]]
    rows = stream(documents, anywhere=False).rows(50, torch.Generator().manual_seed(1))
    assert rows.shape == (50, 4)
    assert {tuple(row[:3]) for row in rows.tolist()} == {(9, 1, 2), (9, 3, 8), (9, 4, 5)}


def test_windows_anywhere_begin_with_a_beginning_of_text():
    rows = stream([[9, *range(10, 60), 8]], anywhere=True).rows(200, torch.Generator().manual_seed(1))
    assert set(rows[:, 0].tolist()) == {9}
    assert len({tuple(row) for row in rows.tolist()}) > 40


def test_every_document_comes_once_per_epoch():
    documents = [[9, number, 8] for number in range(10, 17)]
    source = batches.Documents(documents, 5, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    rows = torch.cat([source.rows(3, generator) for _ in range(7)])  # three epochs of seven documents
    assert rows[0].tolist()[3:] == [batches.IGNORED] * 2
    for epoch in rows[:, 1].split(7):
        assert sorted(epoch.tolist()) == list(range(10, 17))


def test_a_document_longer_than_the_window_is_refused():
    with pytest.raises(ValueError, match="window is 3, must be at least 5"):
        batches.Documents([[1, 2], [1, 2, 3, 4, 5]], 3, torch.device("cpu"))


def test_average_of_models():
    base = {"w": torch.tensor([1.0, 2.0]).half()}
    models = [{"w": torch.tensor([2.0, 2.0]).half()}, {"w": torch.tensor([4.0, 3.0]).half()}]
    assert train.averaged(base, models, 1.0)["w"].tolist() == [3.0, 2.5]
    assert train.averaged(base, models, 1.5)["w"].tolist() == [4.0, 2.75]


def test_defaults_are_the_recipe_of_the_shipped_models():
    options = train.arguments(["--out", "models"])
    assert (options.people, options.steps, options.questions, options.choices) == (1200, 4000, 28, 14)
    assert (options.finetune_steps, options.mixed) == ([100, 120], [64, 96])
    assert (options.finetune_lr, options.news, options.stretch) == (4e-3, 64, 1.3)
    config = json.loads((micro.model_folder("target") / "config.json").read_text())
    shape = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    chosen = (options.vocabulary, options.width, options.hidden, options.layers, options.heads)
    assert tuple(config[key] for key in shape) == chosen


def test_too_many_people_are_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        train.arguments(["--out", "models", "--people", "5000"])
    assert stopped.value.code == 2
    assert "--people is 5000, must be 40 to 1200" in capsys.readouterr().err


@pytest.mark.slow
def test_training_runs_from_end_to_end(tmp_path, capsys):
    """Every part for a few steps with a tiny model."""
    tiny = ["--width", "32", "--hidden", "32", "--layers", "1", "--heads", "2", "--device", "cpu", "--quick"]
    train.main(["--out", str(tmp_path), *tiny])
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["base", "small", "target", "retrained"]
    models = json.loads((tmp_path / "scores.json").read_text())["models"]
    assert set(models) == set(micro.MODELS)
    assert len({model["sha256"] for model in models.values()}) == 4
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert model.dtype == torch.float32
    assert len(list((tmp_path / "members").iterdir())) == 4
