"""Short ways to a run and to what a step reads, for tests of their parts."""

import torch

from tiny_models import SENTENCES, small_tokenizer
from unteach.config import Method
from unteach.data import Documents, ForgetBatches, pad, tokenise
from unteach.training.checkpoint import Checkpoints
from unteach.training.finetune import add_nll_gradient, finetune, text_optimizer
from unteach.training.loop import unlearn
from unteach.training.passes import HeldText, Pull, Reading
from unteach.training.step import train_step
from unteach.training.stopping import Condition, Search, StopRule
from unteach.training.texts import Texts, texts_of_step

FORGET = [f"{s} It was the {n}th time in {1900 + n}." for n, s in enumerate(SENTENCES * 3)]
GENERAL = [f"{a} {b}" for a in SENTENCES for b in SENTENCES] * 4
NUMBERS = {"alpha": 0.5, "lr": 0.02, "teacher_rate": 4.0, "damping": 0.1}


def mean_teacher(**settings):
    """The paper's algorithm and loss, with numbers that suit tiny models."""
    paper = {"optimizer": "mean_teacher", "loss": "nlul", "token_share": 1.0, "loops_every": 0}
    return Method(**(paper | NUMBERS | settings))


def learned(model, texts):
    """The model after it was finetuned on texts."""
    tokens = tokenise(Documents("learned", texts), small_tokenizer(), mode="chunk", max_tokens=48)
    batches = ForgetBatches(tokens, 0)
    optimizer = text_optimizer(model.parameters(), 1e-2)
    model.requires_grad_(True)

    def add_gradient(step):
        return add_nll_gradient(model, batches.batch(step, 4), 4, "fp32")

    finetune(model.parameters(), optimizer, add_gradient, steps=10, learning_rate=lambda step: 1e-2)
    return model.requires_grad_(False)


def recital(most_degenerate=None, why=""):
    """The rule that the documents are recited no better than 20."""
    return StopRule((Condition("verbmem_f", "<=", 20.0, why),), most_degenerate)


def pull_of(sequences, loss="nlul", **settings):
    """All sequences in one micro-batch, pulled by a loss."""
    return Pull(sequences=sequences, parts=[(range(len(sequences)), 1.0)], loss=loss, **settings)


def held_to(sequences, divergence, hidden, head):
    """All sequences in one micro-batch, held to hidden states under a head."""
    parts, readings = [(range(len(sequences)), 1.0)], [(1.0, Reading([hidden], head))]
    return HeldText(sequences=sequences, parts=parts, divergence=divergence, readings=readings)


def logits_of(model, sequences):
    """Full logits, labels and mask of a batch."""
    ids, lengths = pad(sequences)
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return model(ids, attention_mask=mask.long()).logits[:, :-1], ids[:, 1:], mask[:, 1:]


def one_step(model, optimizer, forget, general, method, config, step=0, others=None):
    """A step of a run."""
    read = texts_of_step(Texts(forget, general), method, config, step, others)
    return train_step(model, optimizer, *read, 1.0 if method.alpha is None else method.alpha, config)


def unlearned(folder, model, parameters, texts, config, evaluate, rule=None, patience=0, **options):
    """How a run ended, and the weights after it."""
    before = {"verbmem_f": 90.0, "degenerate": 1.0, "nll_general": 1.0}
    last, floor = config.max_steps, config.stop.utility_floor
    search = Search(
        rule, before, every=config.evaluate_every, last=last, utility_floor=floor, patience=patience, expected=0
    )
    checkpoints = Checkpoints(folder / "checkpoints", 2)
    outcome = unlearn(
        model, parameters, texts, config, search=search, evaluate=evaluate, checkpoints=checkpoints, **options
    )
    return outcome, {name: p.detach().clone() for name, p in parameters.items()}


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)
