"""A receipt holds what was done and no text; one changed byte, weight or word is named, over random edits."""

import json
import random
import shutil
import stat
import struct
import subprocess

import pytest

from short_runs import CANARY
from unteach.audits import attacks
from unteach.cli import main
from unteach.errors import InputError
from unteach.job.receipts import command, proof, verify
from unteach.job.receipts.receipt import RECEIPT, SCHEMA_FILE, read_receipt, write_receipt
from unteach.job.receipts.schema import USED, problems, schema
from unteach.job.receipts.verify import VerifyOptions
from unteach.settings import from_values


def wrong(**given):
    """What ``verify`` finds different, and its status."""
    result = verify.run(from_values(VerifyOptions, {name: str(value) for name, value in given.items()}))
    return result["status"], {check["about"]: check["says"] for check in result["checks"] if check["agrees"] is False}


def test_a_run_ends_with_a_receipt_and_all_of_it_can_be_computed_again(given, first, capsys):
    content = json.loads((first / RECEIPT).read_text())
    result = json.loads((first / "result.json").read_text())
    assert {name: metric["value"] for name, metric in content["scores"]["after"].items()} == result["after"]
    assert (content["ended"]["rule"], content["number"], content["parent"]) == ("max_steps", 1, None)
    assert [entry["answer"] for entry in content["verdict"]] == [entry["answer"] for entry in result["verdict"]]
    assert "attack sampling: not made; unteach audit RUN" in content["not_measured"]
    assert CANARY not in (first / RECEIPT).read_text()
    assert stat.S_IMODE((first / "receipt.salt").stat().st_mode) == 0o600
    assert not (first / "model/receipt.salt").exists()
    assert (first / "model" / RECEIPT).read_bytes() == (first / RECEIPT).read_bytes()
    flags = f"--model {first}/model --before {given}/model --documents {given}/documents --measure"
    assert main(["verify", str(first), *flags.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "✓ documents: all 4 are those of the request" in lines
    assert any(line.startswith("✓ score verbmem_f: ") for line in lines)
    assert not any(line.startswith("✗") for line in lines)


def test_one_byte_of_a_receipt_changed_is_seen_wherever_it_is(run):
    draws, file = random.Random(0), run / RECEIPT
    data = file.read_bytes()
    places = [*draws.sample(range(len(data)), 100), *range(15, 45), *range(len(data) - 90, len(data))]
    for place in places:  # also in the schema's name and in the file's own hash
        changed = bytearray(data)
        changed[place] ^= 1 << draws.randrange(8)
        file.write_bytes(changed)
        status, found = wrong(receipt=file)
        assert (status, "receipt" in found) == (1, True), (place, data[place : place + 1], changed[place])
    for cut in draws.sample(range(10, len(data)), 20):
        file.write_bytes(data[:cut] + data[cut + 1 :])
        assert wrong(receipt=file)[0] == 1, cut


def test_one_weight_changed_is_seen_and_named(run):
    draws, file = random.Random(1), run / "model/model.safetensors"
    data = file.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    for _ in range(10):
        changed = bytearray(data)
        changed[draws.randrange(start, len(data))] ^= 1 << draws.randrange(8)
        file.write_bytes(changed)
        assert wrong(receipt=run, model=run / "model") == (1, {"model": "model.safetensors differs"})
    file.write_bytes(data)
    (run / "model/tokenizer_config.json").unlink()
    (run / "model/chat_template.jinja").write_text("")
    _, found = wrong(receipt=run, model=run / "model")
    assert found == {"model": "tokenizer_config.json is missing, chat_template.jinja was added"}


def test_the_model_before_the_run_is_not_taken_for_its_result(given, first):
    _, found = wrong(receipt=first, model=given / "model")
    assert found["model"].endswith("the weights are those of the model before the run")


def test_one_word_of_a_document_changed_is_seen_and_named(given, first, tmp_path):
    draws = random.Random(2)
    documents = shutil.copytree(given / "documents", tmp_path / "documents")
    for _ in range(20):
        file = draws.choice(sorted(documents.iterdir()))
        text = file.read_text()
        words = text.split()
        words[draws.randrange(len(words))] += draws.choice("abc")
        file.write_text(" ".join(words))
        result = verify.run(VerifyOptions(receipt=str(first), documents=str(documents)))
        assert result["status"] == 1
        said = [check["says"] for check in result["checks"] if check["agrees"] is False]
        assert said == [
            f"{file.name} is not in the request, or was changed",
            "1 of the request are not among those given",
        ]
        file.write_text("  " + text.replace(" ", "\n "))  # another layout is the same text
    assert wrong(receipt=first, documents=documents) == (0, {})
    salt = tmp_path / "salt"
    salt.write_text("00" * 32)
    assert wrong(receipt=first, documents=documents, salt=salt)[0] == 1
    with pytest.raises(InputError, match="salt is given, but no documents to compare"):
        wrong(receipt=first, salt=salt)


def test_what_is_no_receipt_or_of_another_schema_is_refused(run, capsys):
    content = json.loads((run / RECEIPT).read_text())
    del content["sha256"]
    write_receipt(run / RECEIPT, content | {"schema": "unteach.receipt/9"})
    assert main(["verify", str(run)]) == 2
    assert "its schema is 'unteach.receipt/9', this version reads 'unteach.receipt/1'" in capsys.readouterr().err
    write_receipt(run / RECEIPT, {name: value for name, value in content.items() if name != "ended"} | {"more": 1})
    with pytest.raises(InputError, match="ended is missing\n.*more is unknown"):
        read_receipt(run)
    for text in ("", "{}", "[]", '{"schema": 3}', "not JSON"):
        (run / RECEIPT).write_text(text)
        assert main(["verify", str(run)]) == 2, text
    assert main(["verify", str(run / "nothing")]) == 2
    assert main(["verify", str(run), "--measure"]) == 2


def test_the_schema_file_says_only_what_is_checked():
    def words(rule):
        inside = [*rule.get("properties", {}).values(), *rule.get("$defs", {}).values()]
        inside += [rule[name] for name in ("items", "additionalProperties") if isinstance(rule.get(name), dict)]
        return set(rule).union(*map(words, inside))

    whole = schema(SCHEMA_FILE)
    assert words(whole) <= USED
    assert set(whole["required"]) == set(whole["properties"])
    rule = {"type": "integer", "minimum": 1}
    assert [*problems(1, rule, whole)] == []
    assert all([*problems(value, rule, whole)] for value in (0, True, "1", None, 1.5))
    assert [*problems("g" * 64, {"$ref": "#/$defs/hash"}, whole)]


def test_one_document_is_proven_without_the_others(given, first, run, tmp_path):
    document = given / "documents/1.txt"
    made = proof.run(proof.ProveOptions(receipt=str(first), document=str(document), out=tmp_path / "proof.json"))
    text = (tmp_path / "proof.json").read_text()
    assert (first / "receipt.salt").read_text().strip() not in text
    (run / "receipt.salt").unlink()  # who checks needs neither the salt nor the other documents
    assert wrong(receipt=run, proof=made["proof"], document=document) == (0, {})
    other = tmp_path / "other.txt"
    for content in (document.read_text() + " more", (given / "documents/2.txt").read_text()):
        other.write_text(content)
        _, found = wrong(receipt=run, proof=made["proof"], document=other)
        assert found == {"proof": "the document is not the one that the proof is of, or was changed"}
    with pytest.raises(InputError, match="salt is missing"):
        proof.run(proof.ProveOptions(receipt=str(run), document=str(other)))
    other.write_text("A text of its own.")
    with pytest.raises(InputError, match="not among the 4 of the request"):
        proof.run(proof.ProveOptions(receipt=str(first), document=str(other)))
    content = json.loads(text)
    content["path"][0]["hash"] = "0" * 64
    (tmp_path / "proof.json").write_text(json.dumps(content))
    _, found = wrong(receipt=run, proof=made["proof"], document=document)
    assert found == {"proof": "the proof does not lead to the root of this receipt"}
    (tmp_path / "proof.json").write_text(json.dumps(content | {"schema": "unteach.proof/2"}))
    with pytest.raises(InputError, match="schema is 'unteach.proof/2'"):
        wrong(receipt=run, proof=made["proof"], document=document)


def test_audits_join_the_receipt_and_a_changed_one_is_named(run):
    (run / "audits").mkdir()
    beyond = [{"line": "leak@1", "value": 0.5, "high": None, "held": False}]
    audit = {"attack": "sampling", "protocol": "x", "seed": 3, "beyond": [beyond[0] | {"sample": "a text"}]}
    (run / "audits/sampling.json").write_text(json.dumps(audit | {"held": False, "note": "leaks"}))
    (run / "audits/summary.json").write_text("{}")
    before = read_receipt(run)
    assert command.run(command.ReceiptOptions(run=str(run)))["audits"] == ["sampling"]
    after = read_receipt(run)
    entry = after.content["audits"][0]
    assert (entry["held"], entry["seed"], entry["figures"]) == (False, 3, {"beyond": beyond})
    assert after.content["replaces"] == [before.sha256]
    missing = [line.split(":")[0] for line in after.content["not_measured"] if line.startswith("attack ")]
    assert {f"attack {name}" for name in attacks()} - set(missing) == {"attack sampling"}
    assert command.run(command.ReceiptOptions(run=str(run)))["sha256"] == after.sha256  # nothing new: the same file
    assert wrong(receipt=run) == (0, {})
    (run / "audits/sampling.json").write_text(json.dumps(audit | {"held": True}))
    assert [*wrong(receipt=run)[1]] == ["audit sampling"]


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs OpenSSH's ssh-keygen")
def test_a_signature_holds_for_its_key_and_its_bytes(run, tmp_path, capsys):
    for name in ("mine", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    assert main(["verify", str(run), "--signer", str(tmp_path / "mine.pub")]) == 1, "not signed yet"
    assert main(["receipt", str(run), "--sign", str(tmp_path / "mine")]) == 0
    assert wrong(receipt=run, signer=tmp_path / "mine.pub") == (0, {})
    assert wrong(receipt=run / "model") == (0, {})
    assert [*wrong(receipt=run, signer=tmp_path / "other.pub")[1]] == ["signature"]
    content = json.loads((run / RECEIPT).read_text())
    del content["sha256"]
    write_receipt(run / RECEIPT, content | {"written": "2020-01-01"})  # with a hash of its own that is right
    assert [*wrong(receipt=run, signer=tmp_path / "mine.pub")[1]] == ["signature"]
    (tmp_path / "broken").write_text("no key")
    capsys.readouterr()
    assert main(["receipt", str(run), "--sign", str(tmp_path / "broken")]) == 2
    assert "ssh-keygen does not sign with it" in capsys.readouterr().err
    assert main(["forget", "m", "--out", "o", "--sign", str(tmp_path / "nothing")]) == 2
    assert "there is no such file; give an SSH key" in capsys.readouterr().err
