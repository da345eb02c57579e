"""Several requests on one model: a chain of receipts, in order, and what of it holds."""

import json
import re
import shutil

import pytest
from safetensors.torch import load_file, save_file

from short_runs import settings
from tiny_models import SENTENCES
from unteach.cli import main
from unteach.job import run_forget
from unteach.job.ending import write_page
from unteach.job.receipts import ledger
from unteach.job.receipts.ledger import LedgerOptions
from unteach.job.receipts.receipt import RECEIPT, hashed_model, parent_of, read_receipt, renew, write_receipt


@pytest.fixture(scope="module")
def second(given, first):
    """A run on the model that the first one made, of another document."""
    (given / "more.txt").write_text(f"{SENTENCES[1]} Nobody else was there, they said, until {SENTENCES[0]}")
    changes = {"model": str(first / "model"), "documents": str(given / "more.txt")}
    run_forget(settings(given, given / "second", **changes), say=lambda line: None)
    return given / "second"


@pytest.fixture
def both(first, second, tmp_path):
    """Copies of both runs, to be changed."""
    for run in (first, second):
        shutil.copytree(run, tmp_path / run.name)
    return tmp_path


def rows(folder, **options):
    result = ledger.run(LedgerOptions(folder=str(folder), **options))
    return result["status"], [(row["number"], row["link"], row["holds"]) for row in result["requests"]], result


def test_a_run_on_a_model_with_a_receipt_continues_the_chain(first, second, both, capsys):
    one, two = read_receipt(first), read_receipt(second)
    assert two.content["parent"] == {"sha256": one.sha256, "number": 1, "same_weights": True}
    assert two.content["model"]["sha256"] == one.content["result"]["sha256"]
    assert (second / "model/receipts/0001.json").read_bytes() == (first / RECEIPT).read_bytes()
    chain = [(1, "the first", None), (2, "after 1", None)]
    assert rows(both)[:2] == (0, chain)
    assert rows(second / "model")[:2] == (0, chain), "the saved model alone carries all receipts"
    assert main(["ledger", str(both)]) == 0
    table = capsys.readouterr().out
    assert "not measured after request 2: --measure" in table
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:4]] == ["1", "2"]


def test_audits_that_come_later_do_not_break_the_chain(both):
    (both / "first/audits").mkdir()
    (both / "first/audits/x.json").write_text(json.dumps({"attack": "x", "held": True, "figures": {}}))
    renew(both / "first")
    status, found, _ = rows(both)
    assert (status, [link for _, link, _ in found]) == (0, ["the first", "after 1"])


def test_broken_chains_are_named(both):
    shutil.rmtree(both / "first")
    shutil.rmtree(both / "second/model/receipts")
    assert rows(both)[:2] == (1, [(2, "after 1, which is not here", None)])
    content = read_receipt(both / "second").content
    del content["sha256"]
    file = both / "second" / RECEIPT
    file.write_text(file.read_text().replace('"max_steps": 2', '"max_steps": 3'))
    assert "was altered" in rows(both)[2]["problems"][0]
    write_receipt(file, content | {"schema": "unteach.receipt/2"})
    assert "unteach.receipt/2" in rows(both)[2]["problems"][0]


def test_weights_that_were_changed_between_two_requests_are_named(both):
    model = both / "first/model"
    tensors = load_file(model / "model.safetensors")
    next(iter(tensors.values()))[0] += 1
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    parent, said = parent_of(model, hashed_model(model, "model"))
    assert (parent["number"], parent["same_weights"]) == (1, False)
    assert "the weights are not those that" in said[0]
    content = {name: value for name, value in read_receipt(both / "second").content.items() if name != "sha256"}
    for folder in (both / "second", both / "second/model"):
        write_receipt(folder / RECEIPT, content | {"parent": parent})
    status, found, _ = rows(both)
    assert (status, found[1][1]) == (1, "after 1, but the weights were changed in between")
    (model / RECEIPT).write_text("{}")
    parent, said = parent_of(model, hashed_model(model, "model"))
    assert parent is None
    assert said[0].startswith("warning: the chain of receipts begins anew")


def test_earlier_requests_are_measured_on_the_last_model(both):
    status, found, result = rows(both, measure=True)
    assert (status, found[0][2]) == (0, True)
    assert re.fullmatch(r"✓[✓✗?]{3} after request 2", result["requests"][0]["says"])
    content = {name: value for name, value in read_receipt(both / "first").content.items() if name != "sha256"}
    level = content["scores"]["before"]["verbmem_f"] | {"value": -1.0, "low": -1.0, "high": -1.0}
    content["scores"]["reference"] = {"verbmem_f": level}  # as if a model without the documents recited still less
    for target in (both / "first" / RECEIPT, both / "first/model" / RECEIPT, both / "second/model/receipts/0001.json"):
        write_receipt(target, content)
    following = {name: value for name, value in read_receipt(both / "second").content.items() if name != "sha256"}
    following["parent"]["sha256"] = read_receipt(both / "first").sha256
    for folder in (both / "second", both / "second/model"):
        write_receipt(folder / RECEIPT, following)
    status, found, result = rows(both, measure=True)
    assert (status, found[0][2]) == (1, False)
    assert result["requests"][0]["says"].startswith("still recited after request 2")
    (both / "second/model/config.json").unlink()
    assert "its model is not here" in rows(both, measure=True)[2]["requests"][0]["says"]


def test_the_page_of_a_later_run_shows_the_requests_before_it(both, monkeypatch):
    for kind in ("tradeoff", "evaluation", "training"):
        monkeypatch.setattr(f"unteach.report.page.{kind}_figures", lambda *given: [])
    assert "Requests on this model" not in write_page(both / "first").read_text()
    assert not (both / "first/ledger.json").exists()
    run = both / "second"
    assert "not measured after request 2" in write_page(run).read_text()
    ledger.run(LedgerOptions(folder=str(run), measure=True))
    kept = json.loads((run / "ledger.json").read_text())["requests"]
    assert [(row["number"], row["holds"]) for row in kept] == [(1, True), (2, None)]
    page = (run / "report.html").read_text()
    assert f"{kept[0]['says']}</td>" in page
    write_page(run)
    assert (run / "report.html").read_text() == page, "what was measured stays"
    tensors = load_file(run / "model/model.safetensors")
    save_file({name: value + 1 for name, value in tensors.items()}, run / "model/model.safetensors", {"format": "pt"})
    content = {name: value for name, value in read_receipt(run).content.items() if name != "sha256"}
    for folder in (run, run / "model"):
        write_receipt(folder / RECEIPT, content | {"result": hashed_model(run / "model", "model")})
    assert "not measured after request 2" in write_page(run).read_text(), "of other weights nothing is known"


def test_a_folder_without_receipts_is_refused(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "nothing"):
        assert main(["ledger", str(folder)]) == 2
    assert "there is no receipt.json in it" in capsys.readouterr().err
