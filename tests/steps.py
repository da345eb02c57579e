"""Short ways to what a step reads, for tests of its parts."""

from unteach.training.passes import HeldText, Pull, Reading
from unteach.training.step import train_step
from unteach.training.texts import Texts, texts_of_step


def pull_of(sequences, loss="nlul", **settings):
    """All sequences in one micro-batch, pulled by a loss."""
    return Pull(sequences=sequences, parts=[(range(len(sequences)), 1.0)], loss=loss, **settings)


def held_to(sequences, divergence, hidden, head):
    """All sequences in one micro-batch, held to hidden states under a head."""
    parts, readings = [(range(len(sequences)), 1.0)], [(1.0, Reading([hidden], head))]
    return HeldText(sequences=sequences, parts=parts, divergence=divergence, readings=readings)


def one_step(model, optimizer, forget, general, method, config, step=0, others=None):
    """A step of a run."""
    read = texts_of_step(Texts(forget, general), method, config, step, others)
    return train_step(model, optimizer, *read, 1.0 if method.alpha is None else method.alpha, config)
