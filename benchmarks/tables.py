"""Print recorded results as the Markdown page that is kept under benchmarks/results/.

python benchmarks/tables.py RESULTS.jsonl > benchmarks/results/HARDWARE_DATE.md
"""

import json
import sys

from measuring import table

TITLES = {
    "step": "A step, {shape} shape: forget 40 × 1024 + general 40 × 512 tokens (`benchmarks/step.py`)",
    "optimizer": "Optimizer, {parameters:,} weights in {tensors} tensors (`benchmarks/optimizer.py`)",
    "vocab_head": "Vocabulary head, forward and backward, width {width}, frozen head (`benchmarks/vocab_head.py`)",
    "precision": "Rounding, {model}: relative errors of the gradients (`benchmarks/precision.py`)",
    "scaling": "Achieved FLOP/s {over} (`benchmarks/scaling.py`)",
    "generation": "Decoding (`benchmarks/generation.py`)",
}


def by_precision(rows):
    """One row a pass and distance, one column a precision."""
    result = {}
    for row in rows:
        found = result.setdefault(
            (row["pass"], row["distance"]),
            {"pass": row["pass"], "distance": row["distance"], "gradient norm": row["gradient norm"]},
        )
        found[row["precision"]] = "exact" if row["precision"] == row["exact"] else row["gradient error"]
    for found in result.values():
        if "tf32" in found and "fp16" in found:
            found["fp16 ÷ tf32"] = found["fp16"] / found["tf32"]
    return list(result.values())


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        records = list(map(json.loads, file))
    machine = None
    print("# Benchmarks\n\nMade by `python benchmarks/tables.py` from the records beside it.")
    for record in records:
        if record["machine"] != machine:
            machine = record["machine"]
            print(f"\n{machine}")
        rows = by_precision(record["rows"]) if record["benchmark"] == "precision" else record["rows"]
        rows = [{name: "–" if value is None else value for name, value in row.items()} for row in rows]
        print(f"\n## {TITLES[record['benchmark']].format(**record)}\n")
        table(rows)


if __name__ == "__main__":
    main()
