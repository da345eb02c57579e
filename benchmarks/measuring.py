"""What the benchmarks share: model shapes with random weights, timing, ceilings of the machine, tables and records."""

import argparse
import json
import platform
import statistics
import time
from types import SimpleNamespace

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from unteach.config import Method
from unteach.writing import markdown_table

SHAPES = {  # width, inner width, blocks, heads, key heads, vocabulary
    "tiny": (64, 176, 2, 4, 2, 512),
    "micro": (192, 352, 4, 6, 6, 2560),  # the embedded model
    "135M": (576, 1536, 30, 9, 3, 49152),
    "1.1B": (2048, 5632, 22, 32, 4, 32000),  # TinyLlama
    "3B": (3200, 8640, 26, 32, 32, 32000),  # OpenLLaMA
    "7B": (4096, 11008, 32, 32, 32, 32000),  # Llama 2
}

METHOD = Method(
    optimizer="mean_teacher",
    token_share=0.25,
    loops_every=4,
    loss="nlul",
    divergence="kl",
    alpha=0.05,
    lr=5e-4,
    teacher_rate=10.0,
    damping=5.0,
)
"""The paper's method, with the numbers of its 7B runs: what the timings of a step are made with."""


def parser(description):
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    result.add_argument("--tiny", action="store_true", help="small sizes, to try it on a CPU")
    result.add_argument("--json", help="append the results to this file, one object a line")
    return result


def machine(device):
    """Hardware and versions in a line."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
    threads = "" if device == "cuda" else f", {torch.get_num_threads()} threads"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    return f"{name}{threads}; {versions}"


def record(options, benchmark, rows, **more):
    """Append a result to the file given with --json."""
    if options.json:
        result = {"benchmark": benchmark, "machine": machine(options.device), **more, "rows": rows}
        with open(options.json, "a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


def table(rows, title=""):
    """Print rows (dicts of the same keys) as a Markdown table."""
    if title:
        print(f"\n{title}")
    print(markdown_table(list(rows[0]), [[shown(row[name]) for name in rows[0]] for row in rows]), flush=True)
    print(flush=True)


def shown(value):
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1e3 or abs(value) >= 1e6 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def one_step(model, optimizer, forget, general, method, config, step=0, others=None):
    """A step as `unteach forget` makes it."""
    from unteach.training.step import train_step
    from unteach.training.texts import Texts, texts_of_step

    return train_step(
        model, optimizer, *texts_of_step(Texts(forget, general), method, config, step, others), method.alpha, config
    )


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(function, device, repeats, warmup=2):
    """Median duration of a call."""
    durations = []
    for _ in range(warmup + repeats):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        durations.append(time.perf_counter() - start)
    return statistics.median(durations[warmup:])


def peak_bytes(function, device):
    """Most memory that a call takes beyond what is there before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    from unteach.planning.rehearsal import LiveBytes

    with LiveBytes() as live:
        function()
    return live.peak


def ceilings(device, size=8192, elements=2**30):
    """Matmul FLOP/s in float16 and copy bytes/s (read and written) of the device, on random data."""
    if device != "cuda":
        size, elements = 512, 2**22
    a, b = (torch.randn(size, size, device=device, dtype=torch.float16) for _ in range(2))
    matmul = 2 * size**3 / seconds(lambda: a @ b, device, 20, 5)
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    copy = 2 * 4 * elements / seconds(lambda: target.copy_(source), device, 10)
    return SimpleNamespace(matmul=matmul, copy=copy)


def make_model(shape, device, length=1024):
    """A Llama of a named shape with random weights in float32, made on the device."""
    width, inner, blocks, heads, key_heads, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocabulary,
        max_position_embeddings=max(2048, length),
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).eval()


def flops(config, sequences, tokens, passes):
    """Floating-point operations of a Llama on sequences: 2 per weight and token for a forward pass, attention counted.

    Args:
        config: The model's configuration.
        sequences: How many.
        tokens: Tokens of each.
        passes: In forward passes: 1 forward, 3 forward and backward, 4 with the teacher's forward.
    """
    width, heads = config.hidden_size, config.num_attention_heads
    head_width = width // heads
    attention = width * head_width * (2 * heads + 2 * config.num_key_value_heads)
    weights = config.num_hidden_layers * (attention + 3 * width * config.intermediate_size)
    scores = config.num_hidden_layers * 2 * tokens * width  # QKᵀ and PV of a causal model: half of 4 T D
    head = 2 * width * config.vocab_size
    return passes * sequences * tokens * (2 * weights + scores + head)


class RandomText:
    """General text of random tokens: the same batch at every step."""

    def __init__(self, sequences, tokens, vocabulary, seed=1):
        self.chunks = random_sequences(sequences, tokens, vocabulary, seed)

    def batch(self, step, size):
        return self.chunks[:size]


def random_sequences(sequences, tokens, vocabulary, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (sequences, tokens), generator=generator).tolist()
