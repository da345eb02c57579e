"""Planned against measured memory of a few steps: how far to trust ``unteach plan``.

python benchmarks/memory.py [--cases micro,135M] [--device cpu]

Each case is planned, then three steps of the real loop run in a process of their own, on random tokens in sequences of
full length (a few one token shorter, so that there is padding). Models but micro:target are made with random weights.

Measured on a CPU: how far the process's resident memory rose above what it was before the model was made; once as it
is, and once with MALLOC_MMAP_THRESHOLD_=65536, by which glibc gives memory back at once, so that the resident memory is
that of the tensors. Measured on a GPU: the most that PyTorch's allocator had given out, and the most that it had taken
from the device. The plan is shown without and with its allowance for allocators.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

CASES = {
    # model, sequences per step, sequences per pass, forget tokens, general tokens, optimizer, precision, trainable
    "micro": ("micro:target", 16, 4, 512, 512, "mean_teacher", "auto", "blocks"),
    "micro-whole-batch": ("micro:target", 16, None, 512, 512, "mean_teacher", "auto", "blocks"),
    "micro-adamw-all": ("micro:target", 16, 4, 512, 256, "adamw", "auto", "all"),
    "135M": ("135M", 4, 2, 512, 512, "mean_teacher", "auto", "blocks"),
    "135M-adamw-all": ("135M", 4, 2, 512, 256, "adamw", "auto", "all"),
    "1.1B": ("1.1B", 8, 4, 1024, 512, "mean_teacher", "tf32", "blocks"),
    "1.1B-fp16": ("1.1B", 8, 4, 1024, 512, "mean_teacher", "fp16", "blocks"),
    "1.1B-adamw-all": ("1.1B", 8, 4, 1024, 512, "adamw", "tf32", "all"),
    "7B": ("7B", 4, 2, 1024, 512, "mean_teacher", "tf32", "blocks"),
}
SHAPES = {  # width, inner width, layers, heads, key heads, vocabulary, tied
    "135M": (576, 1536, 30, 9, 3, 49152, True),
    "1.1B": (2048, 5632, 22, 32, 4, 32000, False),
    "7B": (4096, 11008, 32, 32, 32, 32000, False),
}


def model_folder(model, folder):
    """A folder that can be planned with: configuration, a tokenizer, and a weights file with nothing in it."""
    if model not in SHAPES:
        return model
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    from unteach.models.load import find_folder

    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    shape = dict(zip((*names, "vocab_size", "tie_word_embeddings"), SHAPES[model], strict=True))
    LlamaConfig(**shape, max_position_embeddings=2048).save_pretrained(folder)
    shutil.copy(find_folder("micro:target") / "tokenizer.json", folder)
    save_file({"nothing": torch.zeros(1)}, Path(folder) / "model.safetensors")
    return str(folder)


def settings(case, folder, device):
    from unteach.config import ForgetConfig, Method, Precision

    model, batch, micro_batch, tokens, general_tokens, optimizer, precision, trainable = CASES[case]
    return ForgetConfig(
        model=model_folder(model, folder), out=str(Path(folder) / "run"), device=device, batch=batch,
        general_batch=batch, micro_batch=micro_batch, max_tokens=tokens, general_tokens=general_tokens,
        trainable=trainable, precision=Precision(forget=precision, divergence=precision),
        method=Method(loss="nlul", optimizer=optimizer, alpha=0.1, lr=1e-5, teacher_rate=1.0, damping=1.0),
    )  # fmt: skip


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(config, random_weights):
    """Run three steps; bytes taken."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from measuring import one_step
    from unteach.data import ForgetBatches
    from unteach.method.optimizers import make_optimizer
    from unteach.models import load_model, trainable_parameters

    torch.set_num_threads(1)
    device = config.resolved_device()
    load_model("micro:target")[0](torch.zeros(1, 8, dtype=torch.int64))  # imports and first uses
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest resident size so far
    before = resident()
    if random_weights:
        with device:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model)).eval()
    else:
        model = load_model(config.model, device=device)[0]
    parameters = trainable_parameters(model, config.trainable)
    optimizer = make_optimizer(parameters.values(), config.method)
    generator = torch.Generator().manual_seed(0)

    def draw(rows, tokens):
        return torch.randint(5, model.config.vocab_size, (rows, tokens), generator=generator).tolist()

    sequences = [ids[: len(ids) - row % 2] for row, ids in enumerate(draw(2 * config.batch, config.max_tokens))]
    general = SimpleNamespace(batch=lambda step, size: draw(size, config.general_tokens))
    forget = ForgetBatches(sequences, 0)
    for step in range(3):
        one_step(model, optimizer, forget, general, config.method, config, step)
    if device.type == "cuda":
        return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    lines = Path("/proc/self/status").read_text().splitlines()
    highest = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return {"resident": highest - before}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="micro,micro-whole-batch,micro-adamw-all,135M,135M-adamw-all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        from unteach.config import ForgetConfig
        from unteach.settings import from_yaml

        config = from_yaml(ForgetConfig, arguments.measure)
        print(json.dumps(measure(config, random_weights=not config.model.startswith("micro:"))))
        return

    import torch
    import transformers

    from unteach.planning.plan import ALLOWANCE, plan
    from unteach.settings import to_yaml

    name = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine()
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}; MiB")
    for case in arguments.cases.split(","):
        with tempfile.TemporaryDirectory() as folder:
            config = settings(case, folder, arguments.device)
            planned = plan(config)
            training = {
                moment: size for moment, size in planned.memory.moments.items() if "read" in moment or "step" in moment
            }
            moment = max(training, key=training.get)
            fixed, share = ALLOWANCE[arguments.device]
            standing = sum(planned.memory.parts[part] for part in ("weights", "teacher", "momentum"))
            tensors = standing + (training[moment] - standing - fixed) / (1 + share)
            file = Path(folder) / "config.yaml"
            file.write_text(to_yaml(config))
            command = [sys.executable, __file__, "--measure", str(file)]
            taken = {}
            for given_back in (True, False) if arguments.device == "cpu" else (False,):
                environment = os.environ | ({"MALLOC_MMAP_THRESHOLD_": "65536"} if given_back else {})
                done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
                for kind, size in json.loads(done.stdout).items():
                    taken[f"{kind}, given back" if given_back else kind] = size
        print(f"{case} ({moment}): planned {tensors / 2**20:,.0f}, with allowance {training[moment] / 2**20:,.0f}")
        for kind, size in taken.items():
            ratios = f"planned {tensors / size:.2f} of it, with allowance {training[moment] / size:.2f}"
            print(f"  {kind}: {size / 2**20:,.0f}; {ratios}", flush=True)


if __name__ == "__main__":
    main()
