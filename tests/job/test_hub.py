"""What is uploaded to the hub, seen by a server that speaks its protocol on this machine."""

import base64
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tiny_models import SENTENCES, save_tiny
from unteach import cli
from unteach.errors import InputError
from unteach.job.hub import check_hub, push


@pytest.fixture
def hub(monkeypatch):
    """The requests that came, by path, and the files of the last commit."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer({"name": "me", "type": "user"}, 200 if server.known else 401)

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.split("?")[0]
            if path.endswith("/preupload/main"):
                files = json.loads(body)["files"]
                answers = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
                self.answer({"files": answers})
            elif path.endswith("/commit/main"):
                lines = [json.loads(line) for line in body.splitlines()]
                files = [line["value"] for line in lines if line["key"] == "file"]
                server.files = {file["path"]: base64.b64decode(file["content"]) for file in files}
                self.answer({"commitUrl": f"{server.url}/me/forgot/commit/{'0' * 40}", "commitOid": "0" * 40})
            elif path == "/api/repos/create":
                server.created = json.loads(body)
                self.answer({"url": f"{server.url}/me/forgot", "name": "me/forgot"})

            else:  # whether the card's front matter is YAML
                self.answer({"errors": [], "warnings": []})

        def answer(self, content, status=200):
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *given):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url, server.known, server.files, server.created = f"http://127.0.0.1:{server.server_port}", True, None, None
    thread = Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def write_model(folder: Path) -> dict[str, bytes]:
    files = {"README.md": b"---\n---\n# The card\n", "config.json": b"{}", "model.safetensors": bytes(range(99))}
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return files


def test_the_folder_and_its_card_go_into_a_private_repository(hub, tmp_path):
    files = write_model(tmp_path / "model")
    check_hub("me/forgot")
    assert push(tmp_path / "model", "me/forgot") == f"{hub.url}/me/forgot/commit/{'0' * 40}"
    assert hub.created["name"] == "forgot"
    assert hub.created.get("private") or hub.created.get("visibility") == "private"
    assert hub.files == files


def test_what_the_hub_would_refuse_is_refused_before_the_run(hub):
    with pytest.raises(InputError, match="push_to_hub is 'no//name': it must be OWNER/NAME"):
        check_hub("no//name")
    hub.known = False
    with pytest.raises(InputError, match="run hf auth login or set HF_TOKEN"):
        check_hub("me/forgot")


@pytest.mark.parametrize(("rule", "forgotten"), [("verbmem_f <= 100", True), ("verbmem_f <= -1", False)])
@pytest.mark.usefixtures("run_alone")
def test_only_what_met_its_rule_is_pushed(hub, tmp_path, capsys, rule, forgotten):
    save_tiny(tmp_path / "model", "llama")
    texts = {
        "documents": [f"{text} It was the {n}th time in {1900 + n}." for n, text in enumerate(SENTENCES * 2)],
        "general": [f"{first} {second}" for first in SENTENCES * 3 for second in SENTENCES],
    }
    for name, rows in texts.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    quick = "--batch 4 --general-batch 4 --general-tokens 24 --max-steps 2 --evaluate-every 1 --probes 2 --alpha 0.5"
    given = f"--documents {tmp_path}/documents.jsonl --general {tmp_path}/general.jsonl --out {tmp_path}/run {quick}"
    words = f"forget {tmp_path}/model {given} --lr 0.02 --teacher-rate 4 --damping 0.1 --push-to-hub me/forgot --quiet"
    status = cli.main([*words.split(), "--stop.metric", rule])
    out, err = capsys.readouterr()
    assert status in (0, 3), err
    written = {file.name: file.read_bytes() for file in (tmp_path / "run/model").iterdir()}
    assert hub.files == (written if forgotten else None)
    assert ("not pushed, the rule was not met" in out) == (not forgotten)
    assert (f"{hub.url}/me/forgot" in out) == forgotten
