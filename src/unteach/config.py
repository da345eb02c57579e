"""Settings of a run as frozen dataclasses, every problem reported at once; ``settings.py`` reads and writes them.

A setting that is None is chosen by the program: ``calibrate.py`` measures the model and sets alpha, lr, teacher_rate
and damping, and the choice is written to the run's ``config.yaml``.
"""

from __future__ import annotations

import dataclasses
import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from unteach.errors import InputError, out_of_range, shown, template_problems
from unteach.settings import nearest_name

if TYPE_CHECKING:  # imported where settings are checked: help and completion need none of it
    import torch

__all__ = ["ForgetConfig", "Method", "Precision", "Stop"]

PassPrecision = Literal["auto", "fp32", "tf32", "fp16", "bf16"]
LOOPS_EVERY, GROWTH = 6, 0.02
"""What was tried by hand: SmolLM2-135M loops in 47 to 62 % of texts without the one (results/smollm2/deep.md); without
the other the embedded model ends short of parity where general text has news, too (docs/decisions.md)."""
LINE = {"margin", "slope"}  # options of ``match``: how far down it pulls
NO_LINE = """goal is 'never_seen': it needs loss match (named, beside an optimizer), base, and holdout, which margin \
and slope are measured on (give both, or neither), or leave it out"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """How the weights are moved: optimizer, loss, divergence and their numbers."""

    optimizer: str = "auto"
    """mean_teacher: the paper's algorithm. adamw: the baselines, held to the frozen initial model. auto: adamw where
    keep documents are given and no loss is named, else mean_teacher."""
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    """Settings of another registered optimizer that have no field here."""
    loss: str = "auto"
    """Forget loss: nlul, match, ll, npo, it, it_forward; of other papers ce_u, clamped_entropy, dpo, jensun, rmu,
    satimp, simnpo, undial, wga. auto: match where a base model and keep documents are given and no optimizer is named,
    else nlul."""
    loss_options: dict[str, Any] = field(default_factory=dict)
    """The loss's own settings, such as beta=0.1 ratio=mean of npo or tolerance=0.02 of nlul (docs/methods.md)."""
    goal: Literal["auto", "base", "never_seen"] = "auto"
    """How far down match pulls a word. base: to what the base model makes of it. never_seen: to what the model makes of
    words of the holdout documents that the base model finds as likely: a line, the loss's margin and slope, is fitted
    to them before the run. auto: never_seen where match is chosen and holdout documents are given, else base."""
    divergence: str = "kl"
    """Divergence to the teacher on general text: kl, kl_reverse, qkl, qkl_frozen or js. nll: the text's own likelihood
    instead, and no teacher; with the loss ll that is gradient difference."""
    project_conflicts: bool = False
    """Take from the forget gradient what goes against the gradient of the held texts (GRU)."""
    token_share: float | None = None
    """The forget loss looks at this share of a document's tokens: those the model was least sure of. 1: all (paper).
    None: 0.25 for the mean teacher with nlul where there are 2,000 words or more to forget, else 1."""
    loops_every: int | None = None
    """Every so many steps, unlearn too what the model repeats over and over by itself. 0: never (paper). None: 4 for
    nlul unless adamw is named; where match is chosen 6, once they are found; else never."""
    loops_once_found: bool = False
    """Begin with that only when two looks in a row have found more of it than there was before the run."""
    alpha: float | None = None
    """α, the weight of the forget loss. None: measured (mean teacher), 0.2 (AdamW)."""
    alpha_growth: float | None = None
    """By this share α grows at every step at which the held texts diverge by less than hold_budget, and shrinks at the
    others, and where the last look found forgetting beyond parity. 0: α is fixed. None: 0.02 where match is chosen with
    the goal never_seen, else 0."""
    hold_budget: float = 0.1
    """Nats per token that the held texts may diverge by, where α grows."""
    lr: float | None = None
    """η, the learning rate. None: measured (mean teacher), a share of the weights' size that falls (AdamW)."""
    anchor: float = 0.0
    """Weight of a second divergence, to the model before the run: in long runs a sliding teacher drifts. 0: paper."""
    momentum: float = 0.95
    """μ of the mean teacher."""
    teacher_rate: float | None = None
    """κ: the teacher moves by a share ηκ of its way to the student in a step. None: measured."""
    damping: float | None = None
    """λ of the mean teacher. None: measured."""
    clip: float | None = 1.0
    """Largest norm of the gradient; null for no clipping."""
    betas: tuple[float, float] = (0.9, 0.95)
    """β₁ and β₂ of AdamW."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
    warmup: int | None = None
    """AdamW: this many steps at a tenth of lr, then as many rising to it. None: 100 (paper), 0 where it is chosen."""
    steps: int | None = None
    """Length of this phase; null for the last one, which runs until a stop rule or max_steps."""

    def problems(self, where: str) -> list[str]:
        """What is wrong with these settings, one line each."""
        from unteach.method.divergences import HOLDS, NLL
        from unteach.method.losses import LOSSES
        from unteach.method.optimizers import OPTIMIZERS

        wrong = []
        for name, known in (("loss", LOSSES), ("divergence", HOLDS), ("optimizer", OPTIMIZERS)):
            value = getattr(self, name)
            if value not in known and (value != "auto" or name == "divergence"):
                allowed = f"{', '.join(known)}{nearest_name(value, known)}"
                wrong.append(f"{where}{name} is {shown(value)}: it must be one of {allowed}")
        if self.loss in LOSSES:
            wrong += [f"{where}loss_options: {problem}" for problem in LOSSES[self.loss].problems(self.loss_options)]
            if LOSSES[self.loss].reads == "pairs" and (self.token_share or 1.0) < 1:
                wrong.append(f"{where}token_share is {self.token_share:g}: {self.loss} reads whole texts, leave it out")
        elif self.loss == "auto" and self.loss_options:
            wrong.append(f"{where}loss_options are given without loss: name the loss that they belong to")
        if self.divergence == NLL and self.anchor:
            wrong.append(f"{where}anchor is {self.anchor:g}: with divergence nll nothing is compared, leave it at 0")
        if self.optimizer in OPTIMIZERS:
            found = OPTIMIZERS[self.optimizer].problems(self.optimizer, self.optimizer_options)
            wrong += [f"{where}optimizer_options: {problem}" for problem in found]
        elif self.optimizer == "auto" and self.optimizer_options:
            wrong.append(f"{where}optimizer_options are given without optimizer: name the one that they belong to")
        wrong += out_of_range(self, where, "positive and finite", "alpha", "lr", "clip")
        not_negative = ("anchor", "alpha_growth", "hold_budget", "teacher_rate", "damping", "weight_decay", "warmup")
        wrong += out_of_range(self, where, "zero or positive", *not_negative, "loops_every")
        wrong += out_of_range(self, where, "above 0 and at most 1", "token_share")
        wrong += out_of_range(self, where, "at least 0 and below 1", "momentum")
        wrong += out_of_range(self, where, "at least 1", "steps")
        if not all(0 <= beta < 1 for beta in self.betas):
            wrong.append(f"{where}betas are {list(self.betas)}: both must be at least 0 and below 1")
        if self.lr is not None and self.teacher_rate is not None and self.lr * self.teacher_rate > 1:
            wrong.append(f"{where}lr · teacher_rate is {self.lr * self.teacher_rate:g}: it must be at most 1")
        return wrong

    def chosen(self, *, keep: bool = False, base: bool = False, holdout: bool = False, little: bool = False) -> Method:
        """The same with optimizer, loss and what belongs to them filled in from what a run is given.

        A base model and keep documents: ``match`` with AdamW, which also ends knowledge and membership; its goal is
        measured on ``holdout`` documents. Keep documents alone: ``nlul`` with AdamW. Neither: the paper's method. Where
        optimizer or loss is named, the other is the paper's, and every method has its own defaults: what suits one does
        not leak into another. To name the loss that would be chosen here, so as to give it options, names nothing else.
        Of ``little`` text all tokens are pulled: what is left would be most of what it says.
        """
        free = self.optimizer == "auto" and self.loss in ("auto", "match" if keep and base else "auto")
        loss = self.loss if self.loss != "auto" else "match" if free and keep and base else "nlul"
        optimizer = self.optimizer if self.optimizer != "auto" else "adamw" if free and keep else "mean_teacher"
        if deep := free and loss == "match":  # chosen with all that belongs to it
            loss_options, loops = {"pull": "gate"}, LOOPS_EVERY
        else:
            loss_options, loops = {}, 4 if loss == "nlul" and (free or optimizer == "mean_teacher") else 0
        measured = deep and holdout and not LINE & self.loss_options.keys()
        goal = self.goal if self.goal != "auto" else "never_seen" if measured else "base"
        growth = GROWTH if deep and goal == "never_seen" else 0.0
        few = loss == "nlul" and optimizer == "mean_teacher" and not little
        return dataclasses.replace(
            self,
            optimizer=optimizer,
            loss=loss,
            loss_options=loss_options | self.loss_options,
            goal=goal,
            alpha_growth=growth if self.alpha_growth is None else self.alpha_growth,
            token_share=self.token_share or (0.25 if few else 1.0),
            loops_every=loops if self.loops_every is None else self.loops_every,
            loops_once_found=self.loops_once_found or (deep and self.loops_every is None),
            warmup=self.warmup if self.warmup is not None else 0 if free and optimizer == "adamw" else 100,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Compute precision of each pass. Weights are always float32, teacher and momentum as state_bits says."""

    forget: PassPrecision = "auto"
    """The student on forget text. auto: fp16 on a CUDA GPU, else fp32."""
    divergence: PassPrecision = "auto"
    """Student and teacher on general text: two nearly equal networks, whose difference bf16 hides. auto: as above."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """When a run ends. It also ends at max_steps."""

    metric: str | None = None
    """A rule such as "verbmem_f <= 21.8" or "knowmem_f <= reference". None: the forget documents are recited no better
    than the reference model does, or than documents the model never saw."""
    parity: bool | None = None
    """Stop only when the documents are neither detectable nor known any more: membership against holdout documents and
    answers to questions, where they can be measured, are as for never-seen text. None: if there are keep documents."""
    utility_floor: float = 0.5
    """The run ends with a warning when held-out general text costs this many nats per token more than before."""
    plateau: int = 3
    """Where the run has come no nearer to its rule over so many evaluations, and expected_steps have passed, alpha is
    doubled, once; after as many more it ends. 0: never (paper)."""
    refine: bool = True
    """Where an evaluation finds the rule met, go back and find the first step that meets it. Off: keep the model found,
    up to evaluate_every steps beyond the rule, as in the paper's runs."""
    unmet: Literal["nearest", "last"] = "nearest"
    """Which model is kept where the run ends with its rule not met: the evaluated one nearest to it, or the last, as in
    the paper's runs."""
    probes: str | None = None
    """Measure the rule on a benchmark's own passages and questions, not on passages cut from the documents: muse-news,
    muse-books or micro; with its folder of tables, muse-news:FOLDER. None: cut from the documents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgetConfig:
    """Everything ``unteach forget`` needs to know."""

    model: str = ""
    """Model folder, hub id, or micro:target."""
    documents: str = ""
    """What to forget: a folder or file (.txt .md .html .docx .pdf, .jsonl .json .csv .tsv .parquet), a hub dataset,
    - for standard input, or micro:forget."""
    out: str = ""
    """Run folder to create."""
    alternates: str | None = None
    """For the loss dpo: what to say instead of each document, a source of as many texts in the same order; in records
    the field alternate."""
    general: str | None = None
    """Text like what the model should keep. None: the embedded public-domain text."""
    keep: str | None = None
    """Documents of the same kind as the forgotten ones that the model should keep knowing: it is held on them too."""
    holdout: str | None = None
    """Documents like the forgotten ones that the model has never seen. None: a part of the general text."""
    reference: str | None = None
    """A model that never saw the documents: stop when they are recited no better than it recites them."""
    questions: str | None = None
    """A .jsonl file of question and answer about the documents, measured before and after."""
    keep_questions: str | None = None
    """The same about what is to be kept."""
    question_template: str | None = None
    r"""How a question is put to the model: text with {question} in it, such as "Question: {question}\nAnswer:". None: a
    user turn of the tokenizer's chat template, or that text where it has none."""
    base: str | None = None
    """A model with the same tokenizer that never saw the documents, which some losses compare with (``it``). Also
    accepted as incompetent, the paper's word."""
    text_field: str = "text"
    """Field that holds the text in .jsonl/.json/.csv/.tsv/.parquet files and datasets."""
    skip_unreadable: bool = False
    """Leave out files and records that cannot be read, and say how many, instead of refusing all."""
    document_mode: Literal["chunk", "truncate"] = "chunk"
    """Long documents: cut into chunks of max_tokens, or keep their beginning only."""
    max_tokens: int | None = None
    """Longest sequence. None: 1024, or the model's context if that is shorter."""
    general_tokens: int | None = None
    """Length of general-text chunks. None: 512, or less: the model's context, or the longest document's (128 up)."""
    general_mib: int = 64
    """General text is read up to so many MiB: 64 hold about 30,000 chunks of 512 tokens (2,000 steps of 40: 80,000)."""
    batch: int = 16
    """Forget sequences per step (the paper: 40)."""
    general_batch: int = 16
    """General chunks per step (the paper: 40)."""
    keep_batch: int = 16
    """Keep documents per step."""
    keep_weight: float = 1.0
    """Weight of the divergence on keep documents; that on general text has weight 1."""
    micro_batch: int | None = None
    """Sequences of max_tokens per forward pass, more where they are shorter; the result does not depend on it. None:
    the whole batch."""
    trainable: Literal["blocks", "all"] = "blocks"
    """blocks: all but embeddings, head and norms, as in the paper's runs."""
    adapter: Literal["lora"] | None = None
    """lora: train no weight of the model, but a low-rank adapter beside each linear layer of its blocks; of an
    adapter's folder, that adapter. None: the weights themselves."""
    rank: int | None = None
    """Rank of a new adapter. None: 16."""
    base_bits: int | None = None
    """Bits in which the weights under adapters are kept: 32, 16, or 8 or 4 (rounded to nearest in groups of 64). None:
    as in the model's files, 16 or 32."""
    state_bits: int = 32
    """Bits in which the mean teacher keeps teacher, momentum and gradients of each trained weight. 16: rounded at
    random so that small steps add up, 10 bytes a weight instead of 16 with the weight itself."""
    method: Method = field(default_factory=Method)
    """The method, of the last phase if there are several."""
    phases: tuple[Method, ...] = ()
    """Phases before ``method``, each with its own ``steps``."""
    precision: Precision = field(default_factory=Precision)
    """Compute precision of each pass."""
    divergence_form: Literal["difference", "tangent"] = "difference"
    """How student and teacher are compared. difference: both read held text, and one output is taken from the other.
    tangent: the student's derivative along the way from the teacher, which bf16 does not hide; for a third more time
    while they are near each other, else the difference."""
    compile: bool = False
    """Compile the decoder blocks (torch.compile): faster on a GPU, after half a minute at the first step."""
    checkpoint_activations: bool = False
    """Keep only the inputs of each decoder block for the backward pass and compute the rest again: the same result, a
    fraction of the activations' memory, a third more time."""
    stop: Stop = field(default_factory=Stop)
    """Stop rules."""
    expected_steps: int = 100
    """About how many steps the measured settings should need."""
    max_steps: int = 500
    """The run always ends here."""
    evaluate_every: int = 20
    """Steps between two evaluations of the stop rule; a crossing is then narrowed down to single steps."""
    probes: int = 64
    """Passages that the stop rule has the model continue."""
    checkpoint_every: int = 20
    """Steps between checkpoints."""
    keep_checkpoints: int = 2
    """Checkpoints kept."""
    seed: int = 0
    """Every random draw comes from it."""
    device: str = "auto"
    """cpu, cuda, ... auto: a GPU if there is one."""
    track: str = "none"
    """Also log every step there: tensorboard, wandb or trackio."""
    private: bool = False
    """Write no excerpt of a document: none in logs, evaluations, checkpoints, report and card."""
    save: Literal["merged", "adapter"] = "merged"
    """merged: a model like the one given. adapter: only the adapter, in a folder as PEFT writes and reads it."""
    save_dtype: Literal["auto", "source", "float32"] = "auto"
    """Dtype of the changed weights in the saved model: as in the source's files, or float32. auto: as in the source
    unless rounding would lose more than a hundredth of what was learnt."""
    threads: int | None = None
    """CPU threads. None: what OMP_NUM_THREADS or torch.set_num_threads says, else one for each physical core that this
    process may use; the run's config.yaml has the choice, and a resumed run keeps it."""
    ALIASES: ClassVar[dict[str, str]] = {"incompetent": "base"}
    ASKED_FOR: ClassVar[tuple[str, ...]] = ("model",)
    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "what people set": (
            "model", "documents", "out", "general", "keep", "holdout", "reference", "base", "questions",
            "keep_questions", "text_field", "skip_unreadable", "max_steps", "seed", "device", "track", "private",
            "--resume", "--accept-changes", "--dry-run", "--push-to-hub",
        ),
        "the method": (
            "method", "trainable", "adapter", "rank", "save", "stop", "batch", "general_batch", "keep_batch",
            "keep_weight", "expected_steps", "evaluate_every", "alternates",
        ),
        "memory": (
            "micro_batch", "max_tokens", "general_tokens", "checkpoint_activations", "state_bits", "base_bits",
            "precision", "divergence_form", "compile", "threads",
        ),
    }  # fmt: skip

    def __post_init__(self) -> None:
        from unteach.method.losses import LOSSES

        wrong = []
        for option in ("out", "questions", "keep_questions"):
            if (getattr(self, option) or "").startswith("~"):  # --out=~/run is not expanded by the shell
                with suppress(UnicodeEncodeError):  # half of a surrogate pair is in no user's name
                    object.__setattr__(self, option, os.path.expanduser(getattr(self, option)))
                if getattr(self, option).startswith("~"):
                    wrong.append(f"{option} is {getattr(self, option)!r}: there is no such home")
        wrong += self.method.problems("")
        for number, phase in enumerate(self.phases):
            wrong += phase.problems(f"phases[{number}].")
            if phase.steps is None:
                wrong.append(f"phases[{number}].steps is missing: every phase but the last needs a length")
        counts = ("max_steps", "evaluate_every", "expected_steps", "probes", "checkpoint_every", "keep_checkpoints")
        batches = ("batch", "general_batch", "keep_batch", "micro_batch", "general_mib")
        wrong += out_of_range(self, "", "at least 1", *batches, *counts, "rank")
        wrong += out_of_range(self, "", "from 1 to 4096", "threads")
        wrong += out_of_range(self, "", "at least 2", "max_tokens", "general_tokens")
        wrong += out_of_range(self, "", "zero or positive", "seed")
        wrong += out_of_range(self, "", "4, 8, 16 or 32", "base_bits")
        wrong += out_of_range(self, "", "16 or 32", "state_bits")
        for name, usual in (("rank", None), ("base_bits", None), ("save", "merged")):
            if self.adapter is None and getattr(self, name) != usual:
                wrong.append(f"{name} is {getattr(self, name)}: it is for adapters, give adapter lora, too")
        wrong += self._at_odds()
        wrong += out_of_range(self.stop, "stop.", "positive", "utility_floor")
        wrong += out_of_range(self.stop, "stop.", "zero or positive", "plateau")
        named = dict.fromkeys(method.loss for method in (*self.phases, self.method))
        losses = [LOSSES[name] for name in named if name in LOSSES]
        for loss in losses:
            wrong += loss.lacking(base=bool(self.base), alternates=bool(self.alternates))
        if self.alternates and not any(loss.reads == "pairs" for loss in losses):
            wrong.append(f"alternates is {shown(self.alternates)}: only the loss dpo reads them, name it or leave them")
        wrong += template_problems(self.question_template, self.questions or self.keep_questions)
        if self.method.steps is not None:
            wrong.append(f"steps is {self.method.steps}: the last phase runs until a stop rule, set max_steps")
        before = sum(phase.steps or 0 for phase in self.phases)
        if self.phases and before >= self.max_steps:
            wrong.append(f"max_steps is {self.max_steps}: it must be above the {before} steps of the phases")
        if wrong:
            raise InputError(wrong)

    def _at_odds(self) -> list[str]:
        """A line for each two settings that exclude each other."""
        lean, tangent = self.state_bits == 16, self.divergence_form == "tangent"
        bits, form = "state_bits is 16: ", "divergence_form is 'tangent': it must be 'difference' with "
        whole = f"trainable is {self.trainable!r}: with an adapter nothing else is trained, leave it out"
        pairs: list[tuple[object, str]] = [
            (self.adapter and self.trainable != "blocks", whole),
            (lean and self.adapter, f"{bits}the state of an adapter is small already, leave it out"),
            (lean and tangent, f"{bits}divergence_form tangent takes as much memory as it saves, leave one out"),
        ]
        for method in (*self.phases, self.method):
            name, anchor, both = method.optimizer, method.anchor or 0, "project_conflicts needs two whole gradients"
            keeps = lean and name not in ("auto", "mean_teacher")
            matches = method.loss == "match" or (self.keep and method.loss == method.optimizer == "auto")
            line = matches and self.base and self.holdout and LINE & method.loss_options.keys() in (set(), LINE)
            pairs += [
                (keeps, f"{bits}optimizer {name} keeps 32, name mean_teacher or leave it out"),
                (lean and method.project_conflicts, f"{bits}{both}, leave one of them out"),
                (method.goal == "never_seen" and not line, NO_LINE),
                (tangent and method.divergence == "nll", f"{form}divergence nll, which compares with no teacher"),
                (tangent and anchor, f"{form}anchor {anchor:g}, which compares with a model that is soon too far away"),
            ]
        return [line for excluded, line in pairs if excluded]

    def lengths(self, context: int) -> tuple[int, int]:
        """Tokens of a forget sequence and of a general chunk, at most, for a model that reads ``context`` tokens."""
        given = {"max_tokens": self.max_tokens, "general_tokens": self.general_tokens}
        wrong = [f"{name} is {n}: the model reads {context} at most" for name, n in given.items() if n and n > context]
        if context < 2:
            wrong = [f"model reads {context} token at most, by its config.json: at least 2 are needed"]
        if wrong:
            raise InputError(wrong)
        return self.max_tokens or min(1024, context), self.general_tokens or min(512, context)

    def chosen(self, *, little: bool = False) -> ForgetConfig:
        """The same with every method named, see ``Method.chosen``."""
        given = {"keep": bool(self.keep), "base": bool(self.base), "holdout": bool(self.holdout), "little": little}
        phases = tuple(phase.chosen() for phase in self.phases)
        return dataclasses.replace(self, method=self.method.chosen(**given), phases=phases)

    def resolved_device(self) -> torch.device:
        """The device to run on, see there."""
        from unteach.method.tensors import resolved_device

        return resolved_device(self.device)
