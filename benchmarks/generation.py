"""Greedy decoding: one prompt at a time against batches, side by side in one run.

python benchmarks/generation.py MODEL_FOLDER [--data MUSE_FOLDER] [--device cuda] [--dtype bf16] [--count 100]
                                [--random-weights] [--longest N] [--new N] [--one-by-one 10]
                                [--workloads verbatim questions mixed] [--suite]

Three workloads with the shapes of MUSE-News: `verbatim` (prompts of about 900 tokens, 128 new), `questions` (ten worked
examples of 320 tokens shared by all, a question of 10 to 40, 32 new), and `mixed` (the verbatim prompts shortened from
the left to lengths from 32 up, 128 new). With --data the prompts are MUSE's own, else random tokens of those lengths.

Baselines: Transformers' `generate`, one prompt at a time, as MUSE's code does it; and this package with batch size 1.
On a machine that is busy with other things, trust the ratio of CPU times. The last column counts prompts whose batched
output equals that of Transformers' `generate`, token for token.
--one-by-one N times only N prompts one by one and scales up. --random-weights needs only config.json and the tokenizer.
--suite also times a whole `evaluate` on MUSE's data: 100 probes, 200 questions, 300 membership texts.
"""

import argparse
import platform
import random
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from unteach.corpora.catalog import load_muse
from unteach.data.documents import encode
from unteach.evaluation import evaluate
from unteach.evaluation.generation import generate
from unteach.evaluation.inference import stop_ids

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load(arguments):
    """The model and its tokenizer."""
    dtype = DTYPES[arguments.dtype]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    if arguments.random_weights:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(arguments.model)
        with torch.device(arguments.device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
    return model.to(arguments.device).eval(), tokenizer


def make_workloads(arguments, model, tokenizer):
    """Name -> (prompts, new tokens)."""
    generator = random.Random(0)
    count = arguments.count
    if arguments.data is not None:
        muse = load_muse("muse-news", arguments.data)
        shots = "".join(
            f"Question: {example.question}\nAnswer: {example.answer}\n\n" for example in muse.knowledge_forget_examples
        )
        verbatim = [encode(tokenizer, probe.prompt) for probe in muse.verbatim_forget[:count]]
        questions = [
            encode(tokenizer, f"{shots}Question: {question.question}\nAnswer: ")
            for question in muse.knowledge_forget[:count]
        ]
    else:
        size = model.config.vocab_size

        def ids(length):
            return [generator.randrange(size) for _ in range(length)]

        shots = ids(320)
        verbatim = [ids(generator.randint(870, 970)) for _ in range(count)]
        questions = [shots + ids(generator.randint(10, 40)) for _ in range(count)]
    longest = [min(len(prompt), arguments.longest or len(prompt)) for prompt in verbatim]
    lengths = [32 + (most - 32) * place // max(1, count - 1) for place, most in enumerate(longest)]
    mixed = [prompt[-length:] for prompt, length in zip(verbatim, lengths, strict=True)]
    generator.shuffle(mixed)
    workloads = {"verbatim": (verbatim, 128), "questions": (questions, 32), "mixed": (mixed, 128)}
    return {name: (prompts, min(new, arguments.new or new)) for name, (prompts, new) in workloads.items()}


def transformers_generate(model, prompt, new, stops):
    """Transformers' own greedy decoding of one prompt."""
    ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=sorted(stops) or None,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    return output[:-1] if output and output[-1] in stops else output


def timed(function, device):
    """Result, seconds, and seconds of CPU time."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start, cpu_start = time.perf_counter(), time.process_time()
    result = function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - start, time.process_time() - cpu_start


def compare(model, name, prompts, new, stops, step):
    """Time all ways of decoding one workload and print its line of the table; one by one only every step-th prompt."""
    few = prompts[::step]
    scale = len(prompts) / len(few)
    batched, batched_seconds, batched_cpu = timed(
        lambda: generate(model, prompts, max_new_tokens=new, stop_ids=stops), model.device
    )
    usual, usual_seconds, usual_cpu = timed(
        lambda: [transformers_generate(model, prompt, new, stops) for prompt in few], model.device
    )
    single, single_seconds, _ = timed(
        lambda: [generate(model, [prompt], max_new_tokens=new, stop_ids=stops)[0] for prompt in few], model.device
    )
    same = sum(a == b == c for a, b, c in zip(usual, single, batched[::step], strict=True))
    print(
        f"| {name} | {len(prompts)} | {usual_seconds * scale:.1f} s | {single_seconds * scale:.1f} s | "
        f"{batched_seconds:.1f} s | {usual_seconds * scale / batched_seconds:.1f}x | "
        f"{usual_cpu * scale / batched_cpu:.1f}x | {same} of {len(few)} |",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--longest", type=int, default=None, metavar="N", help="mixed: prompts of at most N tokens")
    parser.add_argument("--new", type=int, default=None, metavar="N", help="at most N new tokens")
    parser.add_argument("--one-by-one", type=int, default=None, metavar="N")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--workloads", nargs="+", default=["verbatim", "questions", "mixed"])
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--suite", action="store_true")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model, tokenizer = load(arguments)
    stops = frozenset() if arguments.random_weights else stop_ids(model, tokenizer)
    device = model.device
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    weights = "random weights" if arguments.random_weights else "trained weights"
    print(
        f"{hardware}, {size:.0f}M parameters ({weights}, {arguments.dtype}), torch {torch.__version__}, transformers "
        f"{transformers.__version__}, Python {platform.python_version()}\n",
        flush=True,
    )
    generate(model, [[1, 2, 3]] * 2, max_new_tokens=4)  # warm up
    print("| workload | prompts | generate, one by one | batch size 1 | batched | speed-up | in CPU time | equal |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    step = 1 if arguments.one_by_one is None else max(1, arguments.count // arguments.one_by_one)
    for name, (prompts, new) in make_workloads(arguments, model, tokenizer).items():
        if name in arguments.workloads:
            compare(model, name, prompts, new, stops, step)
    if arguments.suite:
        benchmark = load_muse("muse-news", arguments.data)
        print("\n| measurement | seconds |\n|---|---|")
        total = 0.0
        for measurement in ("verbmem_f", "knowmem_f", "knowmem_r", "privleak"):
            scores = evaluate(model, tokenizer, benchmark, measurements=[measurement])
            total += scores.seconds
            print(f"| {measurement} | {scores.seconds:.1f} |", flush=True)
        print(f"| all | {total:.1f} |")


if __name__ == "__main__":
    main()
