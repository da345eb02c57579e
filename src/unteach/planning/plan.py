"""Before a run: how much memory and disk it needs, how many steps and tokens, and whether that fits this machine.

Nothing is loaded: the model's ``config.json`` and the headers of its weights files say enough. Passes are rehearsed on
tensors without data (``rehearsal.py``). ``docs/scaling.md`` compares the result with measured runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unteach.config import ForgetConfig, Method
from unteach.errors import InputError
from unteach.method.losses import LOSSES
from unteach.method.mean_teacher import BUCKET_ELEMENTS
from unteach.models import context_length
from unteach.models.load import check_folder, find_folder, stored_tensors
from unteach.models.precision import resolved_precision
from unteach.planning.rehearsal import FLOAT, Rehearsal

__all__ = ["EVALUATION", "Memory", "Plan", "free_disk", "free_host_memory", "plan"]

SHORTEST = 64
"""Advice does not go below this max_tokens."""
ALLOWANCE = {"cpu": (384 * 2**20, 0.65), "cuda": (512 * 2**20, 0.05)}
"""What the allocator keeps back and libraries take: so many bytes, and this share of what comes and goes in a run."""
EVALUATION = "in an evaluation"
"""The moment that is no part of a step and takes, on a GPU, what is free."""
SMALL_FILES = 64 * 2**20
"""Disk for metrics, evaluations, the report and the tokenizer."""
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a run on its device, in bytes."""

    parts: dict[str, int]
    """What each part takes; not all are there at the same time."""
    moments: dict[str, int]
    """What is there at the same time, at each moment of a run that may be the one that needs most."""
    checkpoint: int
    """Size of a checkpoint."""

    @property
    def needed(self) -> int:
        """The most at once."""
        return max(self.moments.values())

    @property
    def peak(self) -> str:
        """The moment that needs most."""
        return max(self.moments, key=lambda moment: self.moments[moment])


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run needs and what this machine has. Sizes in bytes; None: cannot be known here."""

    model: str
    device: str
    parameters: int
    trainable: int
    memory: Memory
    available: int | None
    """Free memory of the device."""
    host_needed: int
    """Main memory that a run on another device needs; 0 for a run in main memory itself."""
    host_available: int | None
    disk_needed: int
    disk_available: int | None
    out: str
    steps: int
    """At most."""
    forget_tokens: int
    """Per step, at most."""
    general_tokens: int
    """Per step, at most."""
    advice: str
    """What to change where the memory does not suffice."""
    ranks: int = 1
    """Processes that share the run; memory is that of each."""

    @property
    def fits(self) -> bool:
        """Whether nothing is known to be too little."""
        return not self.problems()

    def problems(self) -> list[str]:
        """What is too little, one line each, with what to change."""
        wrong = []
        if _over(self.memory.needed, self.available):
            wrong.append(
                f"the run needs {_size(self.memory.needed)} of memory on {self.device} {self.memory.peak}, "
                f"{_size(self.available)} are free: {self.advice}"
            )
        if _over(self.host_needed, self.host_available):
            wrong.append(
                f"the run needs {_size(self.host_needed)} of main memory (to load weights and checkpoints), "
                f"{_size(self.host_available)} are free: use a machine with more"
            )
        if _over(self.disk_needed, self.disk_available):
            wrong.append(
                f"out is {self.out!r}: the run needs {_size(self.disk_needed)} of disk, {_size(self.disk_available)} "
                f"are free there: lower keep_checkpoints (each takes {_size(self.memory.checkpoint)}) or name a folder "
                "on another disk"
            )
        return wrong

    def lines(self) -> list[str]:
        """The plan for people."""
        where, memory = self.device, "memory"
        if self.ranks > 1:
            where, memory = f"{self.device}, {self.ranks} ranks", "memory of each rank"
        shown = [f"{self.model} on {where}: {self.parameters:,} parameters, {self.trainable:,} of them trained"]
        width = max(map(len, self.memory.parts))
        shown += [f"  {part:<{width}}  {_size(size):>10}" for part, size in self.memory.parts.items() if size]
        shown.append(f"{memory}: {_size(self.memory.needed)} at most, {self.memory.peak}; {_free(self.available)}")
        if self.host_needed:
            shown.append(f"main memory: {_size(self.host_needed)} at most, {_free(self.host_available)}")
        shown.append(f"disk: {_size(self.disk_needed)} at most, {_free(self.disk_available)} at {self.out!r}")
        each = self.forget_tokens + self.general_tokens
        shown.append(
            f"steps: at most {self.steps:,}, each of at most {self.forget_tokens:,} forget tokens and "
            f"{self.general_tokens:,} general tokens; at most {self.steps * each:,} tokens"
        )
        return [*shown, *(self.problems() or ["it fits"])]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        memory = dataclasses.asdict(self.memory) | {"needed": self.memory.needed, "peak": self.memory.peak}
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return values | {"memory": memory, "fits": self.fits, "problems": self.problems()}


def plan(config: ForgetConfig, ranks: int | None = None) -> Plan:
    """What a run with these settings needs, without loading anything.

    Args:
        config: Settings.
        ranks: How many processes share the run, on this machine unless ``torchrun`` says otherwise; None: as many as
            ``torchrun`` has started, else one.

    Raises:
        InputError: A model that the settings name cannot be used.
    """
    config = config.chosen()
    device = config.resolved_device()
    ranks = ranks or int(os.environ.get("WORLD_SIZE", "1"))
    here = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    available = free_device_memory(device)
    if available is not None and device.type == "cpu":
        available //= here
    run = _Run(config, device, ranks, available)
    memory = run.memory(config)
    host_needed = 0 if device.type == "cpu" else max(FLOAT * run.most_parameters, memory.checkpoint)
    forget_length, general_length = run.lengths(config)
    return Plan(
        model=config.model,
        device=str(device),
        parameters=run.student(config).parameters,
        trainable=run.student(config).trainable,
        memory=memory,
        available=available,
        host_needed=host_needed,
        host_available=free_host_memory(),
        disk_needed=_disk(config, run, memory.checkpoint),
        disk_available=free_disk(config.out),
        out=config.out or ".",
        steps=config.max_steps,
        forget_tokens=config.batch * forget_length,
        general_tokens=config.general_batch * general_length,
        advice=_advice(config, run, available) if _over(memory.needed, available) else "",
        ranks=ranks,
    )


class _Run:
    """The models of a run, without weights, and the memory that settings need with them."""

    def __init__(self, config: ForgetConfig, device: torch.device, ranks: int, available: int | None) -> None:
        self.ranks, self.available = ranks, available
        names = {"model": config.model, "reference": config.reference, "base": config.base}
        self.folders: dict[str, Path] = {}
        problems: list[str] = []
        for option, name in names.items():
            if name:
                try:
                    self.folders[option] = find_folder(name, option)
                    problems += check_folder(self.folders[option], option)
                except InputError as error:
                    problems += error.problems
        if problems:
            raise InputError(problems)
        self.device = device
        others = [option for option in self.folders if option != "model"]
        self.others = {option: Rehearsal(self.folders[option], option=option, kind=device.type) for option in others}
        folder = self.folders["model"]
        self._student = functools.cache(lambda trainable: Rehearsal(folder, trainable, kind=device.type))
        every = [self.student(config), *self.others.values()]
        self.most_parameters = max(rehearsal.parameters for rehearsal in every)

    def student(self, config: ForgetConfig) -> Rehearsal:
        """The model that is trained."""
        return self._student(config.trainable)

    def lengths(self, config: ForgetConfig) -> tuple[int, int]:
        """Tokens of a forget sequence and of a general chunk, at most."""
        return config.lengths(context_length(self.student(config).model))

    def memory(self, config: ForgetConfig) -> Memory:
        """Of the phase that needs most."""
        each = [self._memory_of(config, method) for method in (*config.phases, config.method)]
        return max(each, key=lambda memory: memory.needed)

    def _memory_of(self, config: ForgetConfig, method: Method) -> Memory:
        student, adamw = self.student(config), method.optimizer == "adamw"
        forget_length, general_length = self.lengths(config)
        batch, general_batch = (-(-rows // self.ranks) for rows in (config.batch, config.general_batch))
        forget_rows = min(config.micro_batch or batch, batch)
        together = config.micro_batch and max(1, config.micro_batch * forget_length // general_length)
        general_rows = min(together or general_batch, general_batch)
        in_forget = resolved_precision(config.precision.forget, self.device)
        in_general = resolved_precision(config.precision.divergence, self.device)
        checkpointed = config.checkpoint_activations
        general = student.student_pass(
            general_rows, general_length, in_general, method.divergence, checkpointed=checkpointed
        )
        reading = student.reading(general_rows, general_length, in_general)
        base = self.others.get("base") if LOSSES[method.loss].rows is not None else None
        to_base, base_width = ("kl", base.width) if base else (None, None)
        forget = student.student_pass(
            forget_rows, forget_length, in_forget, to_base, base_width, checkpointed=checkpointed
        )
        base_reading = base.reading(forget_rows, forget_length, in_forget) if base else 0

        trained, largest = FLOAT * student.trainable // self.ranks, student.largest // self.ranks
        gathered = FLOAT * student.gathered if self.ranks > 1 else 0
        outputs = FLOAT * student.width * general_batch * (general_length - 1)
        if student.head_is_trained:
            outputs += FLOAT * student.width * student.vocabulary
        read_by_base = FLOAT * base.width * batch * (forget_length - 1) if base else 0
        outputs += read_by_base
        exchange = min(trained, FLOAT * (BUCKET_ELEMENTS + largest))
        stepping = exchange
        if adamw:  # on a GPU in one kernel, in place
            stepping = 0 if self.device.type == "cuda" else 2 * FLOAT * largest
        divided = {option: 1 if option == "base" else self.ranks for option in self.others}
        standing = {
            "weights": FLOAT * student.parameters // self.ranks,
            **{f"{name} model's weights": FLOAT * m.parameters // divided[name] for name, m in self.others.items()},
            "teacher": trained,
            "momentum": 2 * trained if adamw else trained,
        }
        stands = sum(standing.values())
        fixed, share = ALLOWANCE.get(self.device.type, ALLOWANCE["cpu"])
        evaluation = student.evaluation(config, self.device)
        if self.device.type == "cuda" and self.available is not None:  # batches are halved until they fit
            room = int((self.available - stands - fixed) / (1 + share)) - gathered
            if evaluation > room:
                evaluation = max(room, student.evaluation(config, self.device, one_by_one=True))
        passing = {
            "student's copy while the teacher reads": trained if adamw else 0,
            "gradients": trained,
            "gathered weights and gradients": gathered,
            "teacher's outputs": outputs,
            "activations": max(forget.activations, general.activations),
            "vocabulary head": max(forget.head, general.head),
            "optimizer step": stepping,
            "evaluation": evaluation,
        }
        checkpoint = (4 if adamw else 3) * FLOAT * student.trainable
        moments = {  # beside what stands
            "while the teacher reads": outputs + gathered + (trained + reading if adamw else max(reading, exchange)),
            "while the student reads forget text": trained + outputs + gathered + forget.peak,
            "while the student reads general text": trained + outputs + gathered + general.peak,
            "while the base model reads": read_by_base + base_reading,
            "in the optimizer step": trained + outputs + stepping,
            EVALUATION: gathered + evaluation,
        }
        if self.device.type == "cpu" or self.ranks > 1:
            moments["on going back to a checkpoint"] = trained if adamw else 2 * trained  # the saved state, twice
        if self.device.type == "cpu" and self.ranks > 1:
            moments["while the model is loaded"] = FLOAT * student.parameters
        allowed = {moment: fixed + round(share * size) for moment, size in moments.items()}
        totals = {moment: stands + size + allowed[moment] for moment, size in moments.items()}
        parts = standing | passing | {"allowance": allowed[max(totals, key=lambda moment: totals[moment])]}
        return Memory(parts, totals, checkpoint)


def _disk(config: ForgetConfig, run: _Run, checkpoint: int) -> int:
    """The saved model and the checkpoints: those kept, the protected one, and the one being written."""
    tensors = stored_tensors(run.folders["model"]).values()
    stored = [(math.prod(tensor.shape), _BYTES.get(tensor.dtype, FLOAT)) for tensor in tensors]
    size = sum(numbers * each for numbers, each in stored)
    if config.save_dtype != "source":
        share = run.student(config).trainable / max(1, sum(numbers for numbers, _ in stored))
        size += round(FLOAT * run.student(config).trainable - min(1.0, share) * size)
    needed = size + min(config.keep_checkpoints + 2, config.max_steps + 1) * checkpoint + SMALL_FILES
    files = Path(config.out, "checkpoints").rglob("*") if config.out else ()
    there = sum(file.stat().st_size for file in files if file.is_file())
    return max(0, needed - there)  # a resumed run has some already


def _advice(config: ForgetConfig, run: _Run, available: int | None) -> str:
    """The first of ever larger changes, each on top of those before it, that makes the run fit."""
    rows = max(config.batch, config.general_batch)
    steps: list[tuple[str, Any, str]] = [
        ("micro_batch", size, " and gives the same result") for size in _halves(min(config.micro_batch or rows, rows))
    ]
    if not config.checkpoint_activations:
        steps.append(("checkpoint_activations", True, " and gives the same result, slower"))
    same_result = len(steps)
    if config.trainable == "all":
        steps.append(("trainable", "blocks", ""))
    steps += [("max_tokens", length, "") for length in _halves(run.lengths(config)[0], SHORTEST)]
    steps += [("general_batch", size, "") for size in _halves(config.general_batch)]
    changes: dict[str, Any] = {}
    smallest = run.memory(config).needed
    for number, (name, value, ending) in enumerate(steps):
        changes[name] = value
        needed = run.memory(dataclasses.replace(config, **changes)).needed
        smallest = needed if number < same_result else smallest
        if not _over(needed, available):
            shown = " and ".join(f"{n} to {'true' if v is True else v}" for n, v in changes.items())
            return f"set {shown}, which needs {_size(needed)}{ending}"
    return f"use a device with {_size(smallest)} free (with micro_batch 1 and checkpoint_activations)"


def free_device_memory(device: torch.device) -> int | None:
    """Free memory of the device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()


def free_host_memory() -> int | None:
    """Main memory that can still be used: what the system has, within what this process may use of it."""
    limits = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        limits += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
            limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    group = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limits.append(
                int((group / limit).read_text()) - int((group / used).read_text()) + _reclaimable(group / limit)
            )
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return max(0, min(limits)) if limits else None


def _reclaimable(limit: Path) -> int:
    """File copies in a control group's memory, which the system gives up when memory is wanted."""
    lines = limit.with_name("memory.stat").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "total_inactive_file ")))


def free_disk(out: str) -> int | None:
    """Free disk where the run folder will be."""
    folder = Path(out or ".").expanduser().resolve()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _halves(number: int, least: int = 1) -> list[int]:
    """Half of it, half of that, and so on."""
    found = []
    while number // 2 >= least:
        number //= 2
        found.append(number)
    return found


def _over(needed: int, available: int | None) -> bool:
    return available is not None and needed > available


def _free(available: int | None) -> str:
    return "free memory unknown" if available is None else f"{_size(available)} free"


def _size(size: int | None) -> str:
    """Bytes for people."""
    if size is None:
        return "unknown"
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size / 2**10:.1f} KiB"
