"""The benchmark container."""

import dataclasses

import pytest

from unteach.corpora import Benchmark, MeasuringSettings, Probe, Question, Tofu, TofuQuestion

TOFU = TofuQuestion("q", "a", "b", ("c",))
BENCHMARK = Benchmark(
    name="x",
    verbatim_forget=(Probe("a", "b"), Probe("c", "d")),
    knowledge_forget=(Question("q", "a"), Question("r", "b")),
    knowledge_forget_examples=(Question("s", "t"), Question("u", "v")),
    tofu=Tofu((TOFU, TOFU), (TOFU,), (TOFU,), (TOFU,)),
    notes=("careful",),
)


def test_hash_depends_on_data_and_settings_alone():
    same = dataclasses.replace(BENCHMARK, notes=("other words",))
    assert same.data_sha256 == BENCHMARK.data_sha256
    assert len(BENCHMARK.data_sha256) == 64
    for changed in (
        dataclasses.replace(BENCHMARK, general_texts=("more",)),
        dataclasses.replace(BENCHMARK, settings=MeasuringSettings(knowledge_tokens=33)),
        dataclasses.replace(BENCHMARK, verbatim_forget=BENCHMARK.verbatim_forget[::-1]),
    ):
        assert changed.data_sha256 != BENCHMARK.data_sha256


def test_first_keeps_examples_and_says_so():
    small = BENCHMARK.first(1)
    assert (len(small.verbatim_forget), len(small.knowledge_forget), len(small.tofu.forget)) == (1, 1, 1)
    assert small.knowledge_forget_examples == BENCHMARK.knowledge_forget_examples
    assert small.notes == ("careful", "only the first 1 items of every kind were measured")
    with pytest.raises(ValueError, match="count is 0"):
        BENCHMARK.first(0)


def test_parts_may_be_absent():
    empty = Benchmark(name="nothing")
    assert empty.tofu is None
    assert empty.first(3).verbatim_forget == ()
