"""A whole forget job in a second: a tiny model, three steps, a checkpoint at each."""

import json

from steps import FORGET, GENERAL, mean_teacher
from tiny_models import save_tiny
from unteach.config import ForgetConfig, Stop
from unteach.errors import Interrupted
from unteach.job import run_forget


def make_inputs(folder):
    """A model, documents and general text."""
    save_tiny(folder / "model", "llama")
    (folder / "documents").mkdir()
    for number, text in enumerate(FORGET[:4]):
        (folder / f"documents/{number}.txt").write_text(text)
    (folder / "general.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in GENERAL))
    (folder / "questions.jsonl").write_text('{"question": "What was closed?", "answer": "the bridge"}\n' * 2)
    return folder


def settings(folder, out, **more):
    """Of a run that never meets its rule."""
    given = {
        "model": str(folder / "model"), "documents": str(folder / "documents"), "out": str(out),
        "general": str(folder / "general.jsonl"), "method": mean_teacher(token_share=0.25, loops_every=2),
        "batch": 4, "general_batch": 4, "general_tokens": 24, "max_steps": 3, "evaluate_every": 2, "probes": 2,
        "checkpoint_every": 1, "save_dtype": "float32", "stop": Stop(metric="verbmem_f <= -1"), "threads": 1,
    }  # fmt: skip
    return ForgetConfig(**(given | more))


def run(folder, out, *, resume=False, said=None, **more):
    """The whole job; ``said`` gets its lines."""
    say = (lambda line: None) if said is None else said.append
    options = {name: more.pop(name) for name in ("max_steps", "accept_changes", "finish") if name in more and resume}
    cheap = ("nll_general",)
    return run_forget(settings(folder, out, **more), resume=resume, say=say, measurements=cheap, **options)


def paused_run(folder, out, monkeypatch, after=2, **more):
    """A run that was asked to pause after some steps."""
    from contextlib import nullcontext

    steps = iter(range(1, 100))
    with monkeypatch.context() as patched:
        patched.setattr("unteach.job.run.catching_signals", lambda say: nullcontext(lambda: next(steps) >= after))
        try:
            run(folder, out, **more)
        except Interrupted:
            return out
    raise AssertionError("it was not paused")


def result_of(out):
    """What a run must end with, byte for byte: the weights, and its log without times."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "tokens_per_second")
    rows = [{name: value for name, value in row.items() if name not in timed} for row in rows]
    return (out / "model/model.safetensors").read_bytes(), rows


def names_in(out):
    """All files of a run folder."""
    return sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
