"""Settings made up by hypothesis, as values, text, bytes and flags: a config that reads back, or lines that say why."""

import contextlib
import string

import pytest
import yaml
from generated import VALUES, WORDS, check_problems, content_of, tried
from hypothesis import given
from hypothesis import strategies as st

from unteach.config import ForgetConfig, Method
from unteach.errors import InputError
from unteach.settings import flag_values, from_values, from_yaml, parse, to_yaml

FLAGS = list(flag_values(ForgetConfig, ("method",)))
PIECES = st.sampled_from(
    [*string.printable[:90], "\n", "\n  ", ": ", "- ", "? ", "&a ", "*a", "!!", "|\n", "\t", "é", "\x85", "\ufeff"]
)
NEARLY_YAML = st.lists(PIECES, max_size=20).map("".join)


@contextlib.contextmanager
def refused_in_lines():
    """Nothing but an ``InputError`` comes out of the block, and its lines can be shown."""
    try:
        yield
    except InputError as error:
        check_problems(error.problems)


def reads_back(config, file):
    """A config is what a file of it gives."""
    file.write_text(to_yaml(config), encoding="utf-8")
    assert from_yaml(ForgetConfig, file) == config


def check_values(content, file):
    with refused_in_lines():
        reads_back(from_values(ForgetConfig, {"model": "m"} | content), file)


def check_file(content, file):
    file.write_bytes(content)
    with refused_in_lines():
        reads_back(from_yaml(ForgetConfig, file, model="m"), file)


def check_words(words, file):
    with refused_in_lines():
        reads_back(parse(ForgetConfig, words, flatten=("method",)), file)


@st.composite
def command_lines(draw):
    """A model and flags, each mostly with a value."""
    words = ["m"]
    for flag in draw(st.lists(st.sampled_from([*FLAGS, "--seedd", "--"]), max_size=5)):
        value = draw(st.one_of(WORDS, st.integers(-2, 600).map(str), st.floats().map(str), st.text(max_size=6)))
        words += draw(st.sampled_from([[flag], [flag, value], [f"{flag}={value}"], [flag, value, value], [value]]))
    return words


def in_yaml(content):
    """What a file of these settings holds, in the plain form or in PyYAML's own, with references."""
    try:
        text = yaml.dump(content, allow_unicode=True)
    except ValueError:  # a number of 5,000 digits, which YAML reads in hexadecimal
        text = f"seed: 0x{'f' * 5000}\n0x{'f' * 5000}: 1\n"
    return text.encode("utf-8", "replace")


def files():
    """Dumped settings, perhaps cut or with bytes of another, text that is nearly YAML, and bytes."""
    dumped = content_of(ForgetConfig).map(in_yaml)
    cut = st.tuples(dumped, st.integers(0, 60), st.binary(max_size=3)).map(lambda p: p[0][: p[1]] + p[2] + p[0][p[1] :])
    lines = st.lists(st.tuples(st.sampled_from(["seed", "model", "method", "stop", "lr"]), NEARLY_YAML), max_size=3)
    texts = lines.map(lambda pairs: "".join(f"{name}: {text}\n" for name, text in pairs).encode())
    return st.one_of(dumped, cut, texts, NEARLY_YAML.map(str.encode), st.binary(max_size=40))


KINDS = {
    "methods": (content_of(Method).map(lambda content: {"method": content, "base": "b"}), check_values),
    "values": (content_of(ForgetConfig), check_values),
    "anything": (
        st.dictionaries(st.sampled_from(["method", "stop", "phases", "out", "precision", "seed"]), VALUES),
        check_values,
    ),
    "files": (files(), check_file),
    "flags": (command_lines(), check_words),
}


def check_all(kind, examples, folder):
    strategy, check = KINDS[kind]

    @tried(examples)
    @given(strategy)
    def check_one(made_up):
        check(made_up, folder / "config.yaml")

    check_one()


@pytest.mark.parametrize("sign", ["\x85", "\u2028", "\u2029", "\ufeff", "\r", "\ud800", "\n \n"])
def test_signs_that_end_a_line_read_back(sign, tmp_path):
    reads_back(ForgetConfig(model=sign, documents=f"a{sign}b", out=f"{sign} "), tmp_path / "config.yaml")


@pytest.mark.parametrize("kind", KINDS)
def test_settings_are_read_or_refused_in_lines(kind, tmp_path):
    check_all(kind, 60, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_more_settings_are_read_or_refused_in_lines(kind, tmp_path):
    check_all(kind, 200, tmp_path)
