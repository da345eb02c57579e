"""Random rounding: bits against plain integers, results against their neighbours, the mean against the value."""

import math

import pytest
import torch

from unteach.method import rounding
from unteach.method.rounding import (
    BLOCK,
    add_rounded,
    key_of,
    packed,
    random_bits,
    to_bfloat16,
    to_float16,
    unpacked,
)

VALUES = torch.tensor([1.0, -1.001, 3.14159, -2e-3, 7.7e-12, 1.2345e20, -5e-39, 0.0, 255.4])


def mixed_by_hand(place, key):
    """The hash in Python's integers."""

    def mix(x):
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    return mix(mix((place + key[0]) % 2**32) ^ key[1] % 2**32)


@pytest.mark.parametrize("start", [0, 5, 2**31 - 3, 2**32 - 2, 7 * 2**33])
def test_bits_are_those_of_the_hash_in_whole_numbers(start):
    for key in ((0, 0), key_of(3, 1, 4), (-(2**31), 2**31 - 1)):
        found = random_bits(start, start + 6, key)
        assert found.dtype == torch.int32
        assert [int(bits) % 2**32 for bits in found] == [mixed_by_hand(start + n, key) for n in range(6)]


def test_keys_differ_and_bits_look_random():
    keys = {key_of(seed, step, number) for seed in range(3) for step in range(5) for number in range(5)}
    assert len(keys) == 75
    assert all(-(2**31) <= half < 2**31 for key in keys for half in key)
    first, second = (random_bits(0, 2**16, key_of(0, step, 0)) for step in (0, 1))
    for low in (0, 13, 16, 31):  # each of a bit's values half of the time, independent of the step before
        one, other = (((bits >> low) & 1).double() for bits in (first, second))
        assert abs(one.mean() - 0.5) < 4 * 0.5 / 2**8
        assert abs((one * other).mean() - 0.25) < 4 * math.sqrt(3) / 4 / 2**8


def neighbours(values, dtype):
    """The numbers of a dtype around each value, in float64: rounded to nearest, and the next one on the other side."""
    nearest = values.to(dtype)
    side = torch.where(nearest.double() < values.double(), math.inf, -math.inf).to(dtype)
    other = torch.where(nearest.double() == values.double(), nearest, torch.nextafter(nearest, side))
    return torch.minimum(nearest.double(), other.double()), torch.maximum(nearest.double(), other.double())


@pytest.mark.parametrize(("dtype", "rounded"), [(torch.bfloat16, to_bfloat16), (torch.float16, to_float16)])
def test_rounded_to_a_neighbour_and_right_on_average(dtype, rounded):
    values = VALUES if dtype == torch.bfloat16 else torch.tensor([1.0, -1.0007, 20000.7, 3e-5, -1.23e-6, 4e-9, 0.0])
    draws = 8192
    bits = torch.stack([random_bits(0, draws, key_of(9, n)) for n in range(len(values))], 1)
    found = rounded(values.expand(draws, -1).contiguous(), bits).double()
    low, high = neighbours(values, dtype)
    assert ((found == low) | (found == high)).all()
    share = torch.where(high > low, (values.double() - low) / (high - low), 0)
    error = (high - low) * (share * (1 - share) / draws).sqrt()
    assert ((found.mean(0) - values.double()).abs() <= 4 * error).all()
    assert torch.equal(rounded(values.to(dtype).float(), bits[0]), values.to(dtype)), "what is exact stays"


def test_what_is_not_finite_stays_so():
    patterns = [0x7FFFFFFF, 0x7FC00000, -1, 0x7F800001, 0x7F800000, 0x7F800000 - 2**31]  # the first is a GPU's NaN
    values = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    found = to_bfloat16(values, torch.full_like(values, -1, dtype=torch.int32))
    assert found.isnan().tolist() == [True] * 4 + [False] * 2
    assert found[4:].tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 3e8])
def test_blocks_are_packed_to_a_thousandth_and_right_on_average(size):
    draws = torch.Generator().manual_seed(0)
    values = size * torch.randn(3 * BLOCK + 7, generator=draws)
    values[:BLOCK] *= 1e-8  # blocks of their own sizes
    values[BLOCK] = 0.0
    values[2 * BLOCK : 3 * BLOCK] = 0.0
    total, repeats = torch.zeros(len(values), dtype=torch.float64), 200
    for number in range(repeats):
        numbers, scale = packed(values, random_bits(0, len(values), key_of(number)))
        assert (numbers.dtype, scale.shape) == (torch.float16, (4,))
        back = unpacked(numbers, scale).double()
        assert ((back - values.double()).abs() <= 2**-10 * values.double().abs() + 2**-38 * size).all()
        total += back
    expected = values.double()
    spread = 2**-11 * expected.norm() / math.sqrt(repeats)  # at most: half the spacing
    assert (total / repeats - expected).norm() <= spread
    assert unpacked(*packed(torch.zeros(0), torch.zeros(0, dtype=torch.int32))).shape == (0,)


def test_tiles_change_nothing(monkeypatch):
    draws = torch.Generator().manual_seed(0)
    start, added = torch.randn(5000, generator=draws).bfloat16(), torch.randn(5000, generator=draws)
    results = []
    for tile in (2**22, BLOCK):
        monkeypatch.setattr(rounding, "TILE", tile)
        results.append(start.clone())
        add_rounded(results[-1], added, key_of(1, 2, 3))
    assert torch.equal(*results)


def test_small_additions_add_up_where_plain_bfloat16_loses_them():
    ours, plain = (torch.ones(4096, dtype=torch.bfloat16) for _ in range(2))
    small = torch.full((4096,), 2.0**-11)  # an eighth of the spacing above 1
    for number in range(512):
        add_rounded(ours, small, key_of(number))
        plain += small
    assert torch.equal(plain, torch.ones(4096, dtype=torch.bfloat16)), "every addition was rounded away"
    assert ours.double().mean() == pytest.approx(1.25, abs=0.005)
