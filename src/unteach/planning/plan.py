"""Before a run: how much memory and disk it needs, how many steps and tokens, and whether that fits this machine.

Nothing is loaded: the model's ``config.json`` and the headers of its weights files say enough. Passes are rehearsed on
tensors without data (``rehearsal.py``). ``docs/scaling.md`` compares the result with measured runs.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unteach.config import ForgetConfig, Method
from unteach.errors import InputError
from unteach.method.losses import LOSSES
from unteach.method.mean_teacher import BUCKET_ELEMENTS
from unteach.method.rounding import BLOCK, TILE
from unteach.models.distributed import check_ranks
from unteach.models.load import check_folder, find_folder, stored_tensors, whole_folder
from unteach.models.precision import HALF, resolved_precision
from unteach.planning.machine import free_disk, free_host_memory
from unteach.planning.rehearsal import FLOAT, Calls, PassMemory, Rehearsal

SHORTEST = 64
"""Advice does not go below this max_tokens."""
ALLOWANCE = {"cpu": (384 * 2**20, 0.65), "cuda": (512 * 2**20, 0.05)}
"""What the allocator keeps back and libraries take: so many bytes, and this share of what comes and goes in a run."""
TILES = {"adding": 5, "stepping": 12}
"""Tensors of a tile's size that are there at once where a lean gradient or step has no kernel."""
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
    """What a run needs and what this machine has: bytes (None: unknown here), the most steps, and tokens of a step."""

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
    forget_tokens: int
    general_tokens: int
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
        on_device = f"memory on {self.device} {self.memory.peak}"
        in_main = "main memory (to load weights and checkpoints)"
        fewer = f"lower keep_checkpoints (each takes {_size(self.memory.checkpoint)}) or name a folder on another disk"
        wrong = []
        for start, needed, what, available, free, change in (
            ("", self.memory.needed, on_device, self.available, "free", self.advice),
            ("", self.host_needed, in_main, self.host_available, "free", "use a machine with more"),
            (f"out is {self.out!r}: ", self.disk_needed, "disk", self.disk_available, "free there", fewer),
        ):
            if available is not None and needed > available:
                wrong.append(f"{start}the run needs {_size(needed)} of {what}, {_size(available)} are {free}: {change}")
        return wrong

    def lines(self) -> list[str]:
        """The plan for people."""
        where, of_each = (f", {self.ranks} ranks", " of each rank") if self.ranks > 1 else ("", "")
        width = max(map(len, self.memory.parts))
        main = f"main memory: {_size(self.host_needed)} at most, {_free(self.host_available)}"
        tokens = self.steps * (self.forget_tokens + self.general_tokens)
        return [
            f"{self.model} on {self.device}{where}: {self.parameters:,} parameters, {self.trainable:,} of them trained",
            *(f"  {part:<{width}}  {_size(size):>10}" for part, size in self.memory.parts.items() if size),
            f"memory{of_each}: {_size(self.memory.needed)} at most, {self.memory.peak}; {_free(self.available)}",
            *([main] if self.host_needed else []),
            f"disk: {_size(self.disk_needed)} at most, {_free(self.disk_available)} at {self.out!r}",
            f"steps: at most {self.steps:,}, each of at most {self.forget_tokens:,} forget tokens and "
            f"{self.general_tokens:,} general tokens; at most {tokens:,} tokens",
            *(self.problems() or ["it fits"]),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = dataclasses.asdict(self)
        values["memory"] |= {"needed": self.memory.needed, "peak": self.memory.peak}
        return values | {"fits": self.fits, "problems": self.problems()}


def plan(config: ForgetConfig, ranks: int | None = None) -> Plan:
    """What a run with these settings needs, without loading anything.

    ``ranks`` processes share it, on this machine unless ``torchrun`` says otherwise; None: as many as that has started.

    Raises:
        InputError: A model that the settings name cannot be used.
    """
    config, device = config.chosen(), config.resolved_device()
    ranks = ranks or int(os.environ.get("WORLD_SIZE", "1"))
    check_ranks(config, ranks)
    available = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()
    if available is not None and device.type == "cpu":
        available //= min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    run = _Run(config, device, ranks, available)
    student, memory = run.student(config), run.memory(config)
    forget_length, general_length = config.lengths(student.context)
    to_load = max(memory.checkpoint, *(FLOAT * model.parameters for model in (student, *run.others.values())))
    return Plan(
        model=config.model,
        device=str(device),
        parameters=student.parameters,
        trainable=student.trainable,
        memory=memory,
        available=available,
        host_needed=0 if device.type == "cpu" else to_load,
        host_available=free_host_memory(),
        disk_needed=_disk(config, run.folders["model"], student, memory.checkpoint),
        disk_available=free_disk(config.out),
        out=config.out or ".",
        steps=config.max_steps,
        forget_tokens=config.batch * forget_length,
        general_tokens=config.general_batch * general_length,
        advice=_advice(config, run, available) if available is not None and memory.needed > available else "",
        ranks=ranks,
    )


class _Passes(NamedTuple):
    """Bytes of a step's passes."""

    forget: PassMemory
    held: dict[str, PassMemory]
    """Of general text and keep documents."""
    reading: int
    """The teacher's, of these."""
    reading_change: int
    """The same as a tangent (``divergence_form``)."""
    base_reading: int
    outputs: int
    """What is kept of both."""
    half_forget: bool
    half_general: bool


class _Run:
    """The models of a run, without weights, and the memory that settings need with them."""

    def __init__(self, config: ForgetConfig, device: torch.device, ranks: int, available: int | None) -> None:
        self.device, self.ranks, self.available = device, ranks, available
        self.folders: dict[str, Path] = {}
        problems: list[str] = []
        for option in ("model", "reference", "base"):
            if name := getattr(config, option):
                try:
                    self.folders[option] = find_folder(name, option)
                    problems += check_folder(self.folders[option], option)
                except InputError as error:
                    problems += error.problems
        if problems:
            raise InputError(problems)
        others = [option for option in self.folders if option != "model"]
        self.others = {
            option: Rehearsal(self.folders[option], None, option, device.type, sharded=ranks > 1 and option != "base")
            for option in others
        }
        self._students = dict[Any, Rehearsal]()

    def student(self, config: ForgetConfig) -> Rehearsal:
        """The model that is trained, as a config wants it."""
        adapted = (config.rank, config.base_bits) if config.adapter else None
        if (config.trainable, adapted) not in self._students:
            self._students[config.trainable, adapted] = Rehearsal(
                self.folders["model"], config.trainable, "model", self.device.type, adapted, sharded=self.ranks > 1
            )
        return self._students[config.trainable, adapted]

    def can_be_lean(self, config: ForgetConfig) -> bool:
        """Whether a state in 16 bits would be another choice, and is one for these settings."""
        methods = (*config.phases, config.method)
        fit = all(method.optimizer == "mean_teacher" and not method.project_conflicts for method in methods)
        plain = config.adapter is None and config.divergence_form == "difference"
        return fit and plain and self.ranks == 1 and config.state_bits == 32

    def memory(self, config: ForgetConfig) -> Memory:
        """Of the phase that needs most."""
        each = [self._memory_of(config, method) for method in (*config.phases, config.method)]
        return max(each, key=lambda memory: memory.needed)

    def _passes(self, config: ForgetConfig, method: Method) -> _Passes:
        """What a step's passes take, without gradients."""
        student, ranks = self.student(config), self.ranks
        forget_length, general_length = config.lengths(student.context)
        batch, general_batch = (-(-rows // ranks) for rows in (config.batch, config.general_batch))
        together = config.micro_batch and max(1, config.micro_batch * forget_length // general_length)
        given = config.precision.forget, config.precision.divergence
        in_forget, in_general = (resolved_precision(name, self.device) for name in given)
        forget_texts = min(config.micro_batch or batch, batch), forget_length, in_forget
        held_texts = {"general text": (min(together or general_batch, general_batch), general_length, in_general)}
        held_tokens = general_batch * (general_length - 1)
        if config.keep:
            kept = -(-config.keep_batch // ranks)
            held_texts["keep documents"] = min(config.micro_batch or kept, kept), forget_length, in_general
            held_tokens += kept * (forget_length - 1)
        which = _reads(method)
        base = self.others["base"] if which == "given" else student
        width = base.width if which else 0
        calls = Calls(config.checkpoint_activations, config.compile, once=config.state_bits == 32)
        forget = student.student_pass(*forget_texts, method.loss, width, calls)
        held = {name: student.student_pass(*texts, method.divergence, 0, calls) for name, texts in held_texts.items()}
        read_by_base = FLOAT * width * batch * (forget_length - 1)
        outputs = read_by_base + (2 if method.anchor else 1) * FLOAT * student.width * held_tokens
        if student.head_is_trained:
            outputs += FLOAT * student.width * student.vocabulary
        base_reading = read_by_base + (base.reading(*forget_texts) if which else 0)
        halves = in_forget in HALF, in_general in HALF
        reading = max(student.reading(*texts) for texts in held_texts.values())
        change = 0
        if config.divergence_form == "tangent":
            change = max(student.reading_change(*texts) for texts in held_texts.values())
        return _Passes(forget, held, reading, change, base_reading, outputs, *halves)

    def _memory_of(self, config: ForgetConfig, method: Method) -> Memory:
        student, ranks, adamw = self.student(config), self.ranks, method.optimizer == "adamw"
        on_cpu, on_gpu, lean = self.device.type == "cpu", self.device.type == "cuda", config.state_bits == 16
        forget, held, reading, reading_change, base_reading, outputs, half_forget, half_general = self._passes(
            config, method
        )
        trained, largest = FLOAT * student.trainable // ranks, student.largest // ranks
        gradients = trained // 2 if lean else trained
        gathered = FLOAT * student.gathered if ranks > 1 else 0
        stepping = exchange = min(trained, FLOAT * (BUCKET_ELEMENTS + largest))
        if adamw:  # on a GPU in one kernel, in place
            stepping = 0 if on_gpu else 2 * FLOAT * largest
        standing = {"weights": FLOAT * (student.floats - student.trainable * bool(config.adapter)) // ranks}
        standing |= {"adapters": trained, "weights in few bits": student.kept} if config.adapter else {}
        for option, other in self.others.items():
            standing[f"{option} model's weights"] = FLOAT * other.parameters // (1 if option == "base" else ranks)
        standing |= {"teacher": trained, "momentum": 2 * trained if adamw else trained}
        if any(each.anchor or _reads(each) == "initial" for each in (*config.phases, config.method)):
            standing["model before the run"] = trained
        set_aside, arriving = trained if adamw else 0, 0
        if lean:  # what a step takes besides: a gradient before it is rounded, tiles of all that is rounded
            standing |= dict.fromkeys(("teacher", "momentum"), trained // 2 + FLOAT * student.trainable // BLOCK)
            set_aside = FLOAT * (student.trainable - student.rounded) if half_general else trained
            tile, exchange = 0 if on_gpu else FLOAT * min(TILE, largest), 0
            stepping, adding = (tile * TILES[what] for what in ("stepping", "adding"))
            arriving = FLOAT * largest + (2 * largest if half_forget or half_general else 0) + adding
        aside = trained if method.project_conflicts else 0
        stands = sum(standing.values())
        fixed, share = ALLOWANCE.get(self.device.type, ALLOWANCE["cpu"])
        evaluation = student.evaluation(config, self.device)
        if on_gpu and self.available is not None:  # batches are halved until they fit
            room = int((self.available - stands - fixed) / (1 + share)) - gathered
            if evaluation > room:
                evaluation = max(room, student.evaluation(config, self.device, one_by_one=True))
        passing = {
            "student's copy while the teacher reads": set_aside,
            "gradients": gradients + arriving,
            "forget gradient beside the other": aside,
            "gathered weights and gradients": gathered,
            "teacher's outputs": outputs,
            "activations": max(each.activations for each in (forget, *held.values())),
            "vocabulary head": max(each.head for each in (forget, *held.values())),
            "optimizer step": stepping,
            "evaluation": evaluation,
        }
        teaching = max(set_aside + reading, exchange)
        if config.divergence_form == "tangent":  # the way itself; weights and way as they are computed with
            passing["way from the teacher"] = (2 if half_general else 3) * trained
            teaching = max(teaching, passing["way from the teacher"] + reading_change)
        beside, first = outputs + gathered + arriving, gradients + forget.peak
        in_one = -(-config.batch // ranks) <= (config.micro_batch or config.batch) and not method.loops_every
        if in_one and not (config.compile and half_forget and not lean):  # gradients come as activations go
            first = max(forget.peak, gradients + forget.working)
        moments = {  # beside what stands
            "while the teacher reads": outputs + gathered + teaching,
            "while the student reads forget text": beside + first,
            **{f"while the student reads {t}": beside + gradients + aside + each.peak for t, each in held.items()},
            "while the base model reads": base_reading,
            "in the optimizer step": gradients + outputs + stepping,
            EVALUATION: gathered + evaluation,
        }
        if on_cpu or ranks > 1:
            moments["on going back to a checkpoint"] = trained if adamw or lean else 2 * trained  # the saved state
        if on_cpu and ranks > 1:
            moments["while the model is loaded"] = FLOAT * student.parameters
        if on_cpu and config.adapter:
            moments["while the model is loaded"] = FLOAT * student.parameters if student.kept or ranks > 1 else 0
            moments["while the model is saved"] = FLOAT * student.changed if config.save == "merged" else 0
        allowed = {moment: fixed + round(share * size) for moment, size in moments.items()}
        totals = {moment: stands + size + allowed[moment] for moment, size in moments.items()}
        parts = standing | passing | {"allowance": allowed[max(totals, key=lambda moment: totals[moment])]}
        each = FLOAT + 4 if lean else 4 * FLOAT if adamw else 3 * FLOAT
        return Memory(parts, totals, checkpoint=each * student.trainable)


def _reads(method: Method) -> str | None:
    """Which other model reads the forget text at every step, for a loss that needs more than log-odds."""
    loss = LOSSES[method.loss]
    return None if loss.reads == "log_odds" else loss.base


def _disk(config: ForgetConfig, folder: Path, student: Rehearsal, checkpoint: int) -> int:
    """The saved model and the checkpoints: those kept, the protected one, and the one being written."""
    stored = [(math.prod(t.shape), _BYTES.get(t.dtype, FLOAT)) for t in stored_tensors(whole_folder(folder)).values()]
    size = sum(numbers * each for numbers, each in stored)
    if config.save == "adapter":
        size = FLOAT * student.trainable
    elif config.save_dtype != "source":
        share = student.changed / max(1, sum(numbers for numbers, _ in stored))
        size += round(FLOAT * student.changed - min(1.0, share) * size)
    needed = size + min(config.keep_checkpoints + 2, config.max_steps + 1) * checkpoint + SMALL_FILES
    files = Path(config.out, "checkpoints").rglob("*") if config.out else ()
    there = sum(file.stat().st_size for file in files if file.is_file())
    return max(0, needed - there)  # a resumed run has some already


def _advice(config: ForgetConfig, run: _Run, available: int) -> str:
    """The first of ever larger changes, each on top of those before it, that makes the run fit."""
    rows = max(config.batch, config.general_batch, config.keep_batch if config.keep else 0)
    longest = config.lengths(run.student(config).context)[0]
    same, slower = " and gives the same result", " and gives the same result, slower"
    steps: list[tuple[str, Any, str]] = [
        *(("micro_batch", size, same) for size in _halves(min(config.micro_batch or rows, rows))),
        *([] if config.checkpoint_activations else [("checkpoint_activations", True, slower)]),
        *([("trainable", "blocks", "")] if config.trainable == "all" else []),
        *([("state_bits", 16, "")] if run.can_be_lean(config) else []),
        *([("adapter", "lora", "")] if config.adapter is None else []),
        *(("base_bits", bits, "") for bits in (8, 4) if bits < (config.base_bits or 32)),
        *(("max_tokens", length, "") for length in _halves(longest, SHORTEST)),
        *(("general_batch", size, "") for size in _halves(config.general_batch)),
    ]
    changes: dict[str, Any] = {}
    smallest = run.memory(config).needed
    for name, value, ending in steps:
        changes[name] = value
        if name == "adapter":  # one or the other
            changes |= {"state_bits": 32} if config.state_bits == 16 else {}
            changes = {n: v for n, v in changes.items() if (n, v) != ("state_bits", 16)}
        needed = run.memory(dataclasses.replace(config, **changes)).needed
        smallest = needed if ending else smallest
        if needed <= available:
            shown = " and ".join(f"{n} to {'true' if v is True else v}" for n, v in changes.items())
            return f"set {shown}, which needs {_size(needed)}{ending}"
    return f"use a device with {_size(smallest)} free (with micro_batch 1 and checkpoint_activations)"


def _halves(number: int, least: int = 1) -> list[int]:
    """Half of it, half of that, and so on."""
    return [half for times in range(1, number.bit_length()) if (half := number >> times) >= least]


def _free(available: int | None) -> str:
    return "free memory unknown" if available is None else f"{_size(available)} free"


def _size(size: int) -> str:
    """Bytes for people."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size / 2**10:.1f} KiB"
