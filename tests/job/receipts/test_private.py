"""A canary in a forget document: in no file after a private run, and in none after ``purge``.

Looked for are a few words of the sentence in a row, in plain text, and a few of its token ids, as numbers in text and
as the bytes of tensors, in all files: those of the run, of the home and of the temporary folder.
"""

import hashlib
import itertools
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from short_runs import CANARY, settings
from tiny_models import SENTENCES, mixed, small_tokenizer
from unteach.cli import main
from unteach.data import read_documents
from unteach.errors import Interrupted
from unteach.job import run_forget
from unteach.job.receipts import purge
from unteach.job.receipts.purge import PurgeOptions
from unteach.job.run_folder import TRACKERS
from unteach.report import write_report

WORDS, TOKENS = 3, 6
"""So many words, or ids, of the canary in a row count as a find."""


def traces():
    """What gives the canary away, as bytes."""
    words = CANARY.split()
    ids = small_tokenizer()(CANARY, add_special_tokens=False)["input_ids"]
    found = [" ".join(words[place : place + WORDS]).encode() for place in range(len(words) - WORDS + 1)]
    for place in range(len(ids) - TOKENS + 1):
        some = ids[place : place + TOKENS]
        found += [struct.pack(f"<{TOKENS}{kind}", *some) for kind in "qih"]
        found += [separator.join(map(str, some)).encode() for separator in (", ", ",", " ")]
    return found


def files_with_canary(*folders):
    wanted = traces()
    files = [file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()]
    return [file.name for file in files if any(trace in file.read_bytes() for trace in wanted)]


def files_with_plain_hashes(run, documents):
    """Those that hold a hash of the texts by which a guess at a short record could be confirmed."""
    read = read_documents(str(documents))
    hashes = [read.sha256, *(hashlib.sha256(text.encode()).hexdigest() for text in read.texts)]
    files = [file for file in sorted(run.rglob("*")) if file.is_file()]
    return [file.name for file in files if any(value.encode() in file.read_bytes() for value in hashes)]


@pytest.fixture
def no_figures(monkeypatch):
    """The page without its figures, which hold no text and take most of its time."""
    for kind in ("tradeoff", "evaluation", "training"):
        monkeypatch.setattr(f"unteach.report.page.{kind}_figures", lambda *given: [])


@pytest.mark.usefixtures("no_figures")
def test_a_plain_run_has_the_canary_and_purge_removes_it(given, first, run):
    write_report([run], run / "report.html")
    found = files_with_canary(run)
    assert {"step_000000.json", "report.html", "report.md"} <= set(found)
    assert files_with_canary(run / "checkpoints"), "loops in a checkpoint, as token ids"
    assert files_with_plain_hashes(run, given / "documents") == ["start.json"]
    (run / "documents.jsonl").write_text(json.dumps({"text": CANARY}))
    (run / "audits").mkdir()
    audit = {
        "schema": "unteach.audit/1",
        "attack": "x",
        "key": "ab12",
        "inputs": {"documents": "cd34", "after": "ef56"},
    }
    (run / "audits/x.json").write_text(json.dumps(audit | {"samples": [CANARY]}))
    (run / "notes.txt").write_text("mine")
    result = purge.run(PurgeOptions(run=str(run)))
    assert {"checkpoints", "documents.jsonl"} <= set(result["removed"])
    assert {"evaluations/step_000000.json", "audits/x.json", "report.html", "receipt.json"} <= set(result["cleaned"])
    assert (result["status"], result["found"], result["looked_for"]) == (0, [], 4)
    assert files_with_canary(run) == files_with_plain_hashes(run, given / "documents") == []
    audit = json.loads((run / "audits/x.json").read_text())
    assert (audit["key"][:5], audit["inputs"]["documents"][:5], audit["inputs"]["after"]) == ("hmac:", "hmac:", "ef56")
    assert {"model", "receipt.json", "receipt.salt", "result.json", "notes.txt"} <= set(result["left"])
    scores = json.loads((run / "evaluations/step_000002.json").read_text())
    plain = json.loads((first / "evaluations/step_000002.json").read_text())
    assert scores["metrics"] == plain["metrics"]
    assert scores["benchmark"]["data_sha256"].startswith("hmac:")
    again = purge.run(PurgeOptions(run=str(run)))
    assert (again["removed"], again["cleaned"]) == ([], ["report.html", "report.md"])
    assert main(["verify", str(run), "--model", str(run / "model")]) == 0


@pytest.mark.usefixtures("no_figures")
def test_purge_finds_what_it_does_not_know(given, run, capsys):
    (run / "mine.txt").write_text(f"I noted: {CANARY.lower()}")
    assert main(["purge", str(run)]) == 1
    assert "passages of the documents stand still in: mine.txt" in capsys.readouterr().out
    (run / "result.json").unlink()
    assert main(["purge", str(run)]) == 2
    assert "it has not ended" in capsys.readouterr().err
    assert main(["purge", str(given)]) == 2


@pytest.mark.usefixtures("no_figures")
def test_a_private_run_gives_the_same_model_and_writes_no_canary(given, first, tmp_path, monkeypatch):
    said = []
    monkeypatch.setitem(TRACKERS, "mine", lambda folder: lambda row: said.append(json.dumps(row)))
    run_forget(settings(given, tmp_path / "run", private=True, track="mine"), say=said.append)
    weights = "model/model.safetensors"
    assert (tmp_path / "run" / weights).read_bytes() == (first / weights).read_bytes()
    write_report([tmp_path / "run"], tmp_path / "run/report.html")
    assert list((tmp_path / "run/checkpoints").glob("step_*"))
    assert files_with_canary(tmp_path) == files_with_plain_hashes(tmp_path, given / "documents") == []
    assert not any(trace in "\n".join(said).encode() for trace in traces())
    assert json.loads((tmp_path / "run/receipt.json").read_text())["private"] is True


def test_a_private_run_that_was_interrupted_goes_on(given, tmp_path, monkeypatch):
    reference = str(given / "model")
    rows = [json.dumps({"text": f"{a} {b}"}) + "\n" for a, b in itertools.permutations(map(mixed, SENTENCES), 2)]
    holdout = tmp_path / "holdout.jsonl"
    holdout.write_text("".join(rows))
    config = settings(given, tmp_path / "run", private=True, reference=reference, holdout=str(holdout))

    def interrupt(*given):
        raise Interrupted("as by Ctrl-C")

    with monkeypatch.context() as patch:
        patch.setattr("unteach.training.loop.Search.look", interrupt)
        with pytest.raises(Interrupted):
            run_forget(config, say=lambda line: None)
    assert files_with_canary(tmp_path / "run") == []
    result = run_forget(config, resume=True, say=lambda line: None)
    assert "privleak" in result.after, "the reference's scores were read back without its texts"
    assert files_with_canary(tmp_path / "run") == []


@pytest.mark.slow
def test_with_every_option_nothing_is_left_anywhere(given, tmp_path):
    """As people run it, in processes of their own, with a home and a temporary folder that are looked through."""
    home, temporary, run = (tmp_path / name for name in ("home", "temporary", "run"))
    home.mkdir()
    temporary.mkdir()
    inputs = Path(shutil.copytree(given / "documents", tmp_path / "given/documents")).parent
    pairs = enumerate(itertools.product(SENTENCES, SENTENCES))
    texts = [f"{first} {second} Number {n}." for n, (first, second) in pairs]
    for name, of_that in (("keep", texts), ("holdout", [mixed(text) for text in texts])):
        rows = [json.dumps({"text": f"{name}: {text}"}) + "\n" for text in of_that * 2]
        (inputs / f"{name}.jsonl").write_text("".join(rows))
    asked = [{"question": f"Who hid nine copper herons, {n}?", "answer": CANARY} for n in range(3)]
    (inputs / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    shutil.copy(inputs / "documents/0.txt", inputs / "one.txt")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "MPL", "HF_"))}
    environment |= {"HOME": str(home), "TMPDIR": str(temporary), "HF_HUB_OFFLINE": "1"}

    def unteach(*commands, expected=0):
        """Run commands one after the other in a process of their own."""
        given = json.dumps([[str(word) for word in words] for words in commands])
        code = f"import json; from unteach.cli import main; exit(max(map(main, json.loads({given!r}))))"
        done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=temporary, capture_output=True)
        assert done.returncode == expected, done.stderr.decode()
        assert not any(trace in done.stdout + done.stderr for trace in traces())
        return done.stdout.decode()

    signing = ()
    if shutil.which("ssh-keygen"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", home / "key"], check=True)
        signing = ("--sign", home / "key")
    flags = "--batch 4 --general-batch 4 --general-tokens 24 --max-steps 3 --evaluate-every 2 --probes 8 --loss nlul "
    flags += "--alpha 0.5 --lr 0.02 --teacher-rate 4 --damping 0.1 --loops-every 1 --checkpoint-every 1 --track "
    models = ("--reference", given / "model", "--base", given / "model")
    more = [part for name in ("keep", "holdout", "questions") for part in (f"--{name}", inputs / f"{name}.jsonl")]
    more += ["--keep-questions", inputs / "questions.jsonl", "--general", given / "general.jsonl", "--verbose"]
    start = ("forget", given / "model", "--documents", inputs / "documents", "--out", run, "--private")
    never = ("--stop.metric", "verbmem_f <= -1")
    unteach([*start, *flags.split(), "tensorboard", *models, *more, *signing, *never], expected=3)
    assert any((run / "tensorboard").iterdir())
    everywhere = (run, home, temporary)
    assert files_with_canary(*everywhere) == []
    assert (run / "checkpoints").is_dir()
    said = unteach(
        ["audit", run, "--quick"],
        ["receipt", run],
        ["verify", run, "--model", run / "model", "--documents", inputs / "documents", "--measure"],
        ["prove", run, "--document", inputs / "one.txt", "--out", temporary / "proof.json"],
        ["report", run, "--out", temporary / "report.html", "--tensorboard", temporary / "events"],
        ["ledger", tmp_path],
        ["purge", run],
    )
    later = ("forget", run / "model", "--documents", inputs / "one.txt", "--out", temporary / "later", "--private")
    unteach([*later, *flags.split(), "none", *never, "--general", given / "general.jsonl"], expected=3)
    assert "after request 2" in unteach(["ledger", temporary / "later", "--measure"])
    assert (temporary / "later/ledger.json").is_file()
    adapter = ("--adapter", "lora", "--rank", "2", "--save", "adapter", "--out", temporary / "adapter", "--private")
    begun = ("forget", *start[1:4], *adapter, *flags.split(), "none", *never, "--general", given / "general.jsonl")
    unteach(begun, expected=3)
    (temporary / "adapter/result.json").unlink()  # as if it had been killed before its end
    unteach(["finish", temporary / "adapter"], expected=3)
    unteach(["purge", temporary / "adapter"])
    assert "✓ no passage of 8 words of the 4 documents" in said
    assert not (run / "checkpoints").exists()
    assert len([file for folder in everywhere for file in folder.rglob("*")]) > 20
    assert files_with_canary(*everywhere) == []
    assert files_with_canary(inputs), "what is looked for can be found"
