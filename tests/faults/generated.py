"""What hypothesis makes up for the tests of settings and texts: things that are nearly right, and others."""

import typing
from dataclasses import fields, is_dataclass
from typing import Literal

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from unteach.config import Method
from unteach.errors import printable
from unteach.method.losses import LOSSES

LONGEST = 400
"""Characters of a line that says what is wrong."""


def tried(examples):
    """So many examples, always the same ones."""
    return settings(
        max_examples=examples, derandomize=True, deadline=None, database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip


def check_problems(problems):
    """Lines that a terminal shows, and people read."""
    assert problems
    for line in problems:
        assert line.strip()
        assert len(line.splitlines()) == 1
        assert len(line) < LONGEST, line
        assert line == printable(line)


WORDS = st.sampled_from(
    ["", "x", "m", "none", "null", "true", "no", "~", "~/run", "~nobody", "1e3", "0x1f", ".nan", "-", "--", "=", "a=b",
     "nlul", "npo", "adamw", "verbmem_f <= 20", "Q: {question}", "{question", "2024-01-01", "1_000", "0o7", "1:30",
     "\x1b[31m", "\x85", "\u2028", "\ud800", "~\ud800", "a\nb", "a\0b", "é", "k" * 500, "…" * 700]
)  # fmt: skip
NUMBERS = st.one_of(
    st.integers(-3, 40),
    st.integers(),
    st.sampled_from([2**53 + 1, 10**20, 10**400, 2**62]),
    st.sampled_from(["5,000 digits"]).map(lambda _: 10**5000),  # such a number cannot be shown
    st.floats(),
    st.floats(0, 1),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS, st.text(max_size=8), st.dates(), st.binary(max_size=4))
NAMES = st.one_of(WORDS, st.text(max_size=6), st.integers(-1, 2), st.none())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=6,
)


def right(hint):
    """A value of the annotated type, mostly one that can be used."""
    if type(None) in typing.get_args(hint):
        inner = next(kind for kind in typing.get_args(hint) if kind is not type(None))
        return st.one_of(st.none(), right(inner))
    if typing.get_origin(hint) is Literal:
        return st.sampled_from(typing.get_args(hint))
    if is_dataclass(hint):
        return content_of(hint)
    if typing.get_origin(hint) is dict:
        return st.dictionaries(st.sampled_from(OPTIONS), st.one_of(st.floats(0, 1), SCALARS), max_size=2)
    if typing.get_origin(hint) is tuple:
        kinds = typing.get_args(hint)
        return st.lists(right(kinds[0]), max_size=2) if kinds[-1] is Ellipsis else st.tuples(*map(right, kinds))
    plain = {
        bool: st.booleans(), int: st.integers(1, 600), float: st.floats(0, 1, exclude_min=True),
        str: st.one_of(WORDS, st.text(max_size=8)),
    }  # fmt: skip
    return plain[hint]


OPTIONS = sorted({"cooldown", *(name for loss in LOSSES.values() for name in loss.hyper)})
NAMED = {
    "loss": ["auto", *LOSSES],
    "optimizer": ["auto", "mean_teacher", "adamw"],
    "divergence": ["kl", "qkl", "nll", "js"],
    "metric": [None, "verbmem_f <= 20", "knowmem_f <= reference"],
}


@st.composite
def content_of(draw, kind):
    """Settings as they stand in a file: some of a dataclass's fields, most of them right; seldom another name."""
    hints = typing.get_type_hints(kind)
    names = draw(st.lists(st.sampled_from([field.name for field in fields(kind)]), max_size=6, unique=True))
    content = {}
    if kind is Method and draw(st.booleans()):  # options that belong to the loss
        content["loss"] = draw(st.sampled_from(list(LOSSES)))
        values = st.one_of(SCALARS, st.floats(0, 1))
        content["loss_options"] = {name: draw(values) for name in LOSSES[content["loss"]].hyper if draw(st.booleans())}
    for name in names:
        usual = st.sampled_from(NAMED[name]) if name in NAMED else right(hints[name])
        content[name] = draw(usual if draw(st.integers(0, 19)) else VALUES)
    if not draw(st.integers(0, 15)):
        content[draw(NAMES)] = draw(VALUES)
    return content
