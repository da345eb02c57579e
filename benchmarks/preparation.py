"""CPU seconds and memory of a run before its first step: texts read, compared, tokenised and cut into passages.

A run of `micro:target` on made-up records, or on one long document, begins as `unteach forget` does and ends where the
first step would be taken. What the model then reads of the documents that its steps draw (of all, up to 16,384) is not
counted, but its memory is. Each size is prepared in a process of its own; growth is linear where the time for a record
(a megabyte of a document) stays the same.

    python benchmarks/preparation.py                          # 10,000 to 1,000,000 records, 1 to 50 MB in one document
    python benchmarks/preparation.py --records 20000 --mb 2   # these only
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from measuring import machine, record, table

CHARACTERS = 170
"""Of a record's text: with the JSON around it 183 bytes a line."""
WORDS = 5000
MEBI = 2**20


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--records", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    options.add_argument("--mb", type=int, nargs="*", default=[1, 10, 50], help="sizes of one document")
    options.add_argument("--json", help="append the results to this file, one object a line")
    options.add_argument("--prepare", help=argparse.SUPPRESS)
    options.add_argument("--device", default="cpu", help=argparse.SUPPRESS)
    options = options.parse_args()
    if options.prepare:
        print(json.dumps(prepare(options.prepare)))
        return
    print(machine("cpu"))
    for sizes, unit, write, title in (
        (options.records, "records", write_records, "records of 183 bytes"),
        (options.mb, "MB", write_document, "one document"),
    ):
        rows = []
        for size in sizes:
            with tempfile.TemporaryDirectory() as folder:
                file = write(Path(folder), size)
                rows.append({unit: size} | in_its_own_process(file))
        for row in rows:
            row[f"ms/{unit.rstrip('s').lower()}"] = 1000 * row["CPU s"] / row[unit]
            row["to the first"] = row["CPU s"] / row[unit] / (rows[0]["CPU s"] / rows[0][unit])
        if rows:
            table(rows, title)
            record(options, "preparation", rows, what=title)


def in_its_own_process(file):
    command = [sys.executable, __file__, "--prepare", str(file)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(said.splitlines()[-1])


def prepare(documents):
    """CPU seconds of each stage, and the most memory the process had."""
    from unteach.config import ForgetConfig, Method
    from unteach.job.inputs import read_inputs
    from unteach.job.run import ForgetJob
    from unteach.job.run_folder import RunFolder, SharedScores
    from unteach.job.same_run import StartRecord
    from unteach.training.texts import OtherModels

    method = Method(alpha=0.1, lr=1e-3, teacher_rate=10.0, damping=1.0)
    config = ForgetConfig(model="micro:target", documents=documents, method=method, max_steps=20, threads=1)
    result, at = {}, time.process_time()

    def done(stage):
        nonlocal at
        result[stage] = time.process_time() - at
        at += result[stage]

    empty = peak()
    inputs = read_inputs(config)
    done("read")
    job = ForgetJob(inputs, config, None, say=lambda line: print(line, file=sys.stderr))
    with RunFolder(None, False, SharedScores().measured_once) as job.folder:
        job.prepare()
        done("tokenise, compare, cut")
        StartRecord.of(job.config, job.inputs, job.folder.path)
        done("hash")
        given = (job.inputs.model, job.parameters, None, job.texts.forget.sequences, job.config, [job.config.method])
        OtherModels(*given, job.texts.forget.drawn(job.config.max_steps, job.config.batch))
        done("read by the model")
    total = sum(result.values()) - result["read by the model"]
    return result | {"CPU s": total, "RSS MiB": peak(), "libraries MiB": empty}


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 // MEBI


def write_records(folder, count):
    file = folder / "records.jsonl"
    with file.open("w", encoding="utf-8") as lines:
        for number, text in enumerate(texts(count, CHARACTERS)):
            lines.write(f'{{"text": "{number:07d} {text[: CHARACTERS - 8]}"}}\n')
    return file


def write_document(folder, megabytes):
    file = folder / "document.txt"
    file.write_text("\n".join(texts(1000 * megabytes, 1000)), encoding="utf-8")
    return file


def texts(count, characters, seed=0):
    """Made-up prose: words of the embedded general text, each as often as there, in any order."""
    from unteach.data import EMBEDDED_GENERAL, read_documents

    words = np.array(" ".join(read_documents(EMBEDDED_GENERAL).texts[:200]).replace('"', "").replace("\\", "").split())
    draws = np.random.default_rng(seed)
    for _ in range(count):
        yield " ".join(words[draws.integers(len(words), size=characters // 3)])[:characters]


if __name__ == "__main__":
    main()
