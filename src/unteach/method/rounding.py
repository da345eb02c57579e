"""Numbers in 16 bits, rounded up or down at random so that on average nothing is lost, and the kernels that do it.

A step of an optimizer changes a number by less than 16 bits can show; rounded to nearest it would never move. Rounded
up with the probability that it is above the lower neighbour, it moves by the right amount on average. The random bits
are a hash of a key and of the number's place, so the same step rounds the same way on every device and after a resume.

Two forms: bfloat16, for sums that grow from nothing (gradients), and float16 in blocks of ``BLOCK`` numbers with a
power of two as their scale, eight times as fine (the way from the teacher to the student, the momentum).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["BLOCK", "Key", "add_rounded", "blocks_of", "key_of", "lean_step", "packed", "random_bits", "unpacked"]

BLOCK = 1024
"""Numbers that share a scale, and that one program of a kernel handles."""
TILE = 2**22
"""Numbers handled at once without a kernel: bounds temporary memory to a few times this, in float32."""
TOP = 2.0**14
"""The largest number of a block is at least this and below twice as much, in float16."""
SMALLEST = 2.0**-14
"""float16 has the same spacing everywhere below twice this."""
Key = tuple[int, int]
"""What random bits depend on besides their place: two signed 32-bit numbers."""
Packed = tuple[Tensor, Tensor]
"""Numbers in float16, and the scale of each of their blocks."""
_FACTORS = (0x7FEB352D, 0x846CA68B - 2**32)


def key_of(*numbers: int) -> Key:
    """The key of a draw, such as of (seed, step, parameter, what is rounded)."""
    digest = hashlib.sha256(",".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:8], "little", signed=True)


def random_bits(start: int, stop: int, key: Key, device: torch.device | str = "cpu") -> Tensor:
    """32 random bits, as int32, for each of the places from ``start`` to ``stop``."""
    first = (start + key[0] + 2**31) % 2**32 - 2**31
    bits = torch.arange(stop - start, dtype=torch.int32, device=device).add_(first)  # wraps around
    _mix(bits)
    bits ^= key[1]
    return _mix(bits)


def _mix(bits: Tensor) -> Tensor:
    """Wellons's 32-bit mixing function, in place: every bit of the result depends on every bit."""
    for shift, factor in zip((16, 15), _FACTORS, strict=True):
        bits ^= (bits >> shift) & (2 ** (32 - shift) - 1)
        bits *= factor
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def _cut(values: Tensor, bits: Tensor, dropped: int) -> Tensor:
    """float32 numbers of which the lowest bits are ``dropped`` after random ones were added to them."""
    mask = 2**dropped - 1
    raised = (values.view(torch.int32) + (bits & mask)) & ~mask
    return torch.where(values.isnan(), values, raised.view(torch.float32))  # a NaN could be carried into the sign


def to_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """float32 numbers, rounded at random to bfloat16."""
    return _cut(values, bits, 16).to(torch.bfloat16)


def to_float16(values: Tensor, bits: Tensor) -> Tensor:
    """float32 numbers below 2¹⁵ in size, rounded at random to float16."""
    size = values.abs()
    raised = torch.where(size < SMALLEST, SMALLEST, 0.0)  # where the spacing ends to shrink, lift to where it is equal
    return (_cut(size + raised, bits, 13) - raised).copysign_(values).to(torch.float16)


def blocks_of(numbers: int) -> int:
    """How many blocks so many numbers make."""
    return -(-numbers // BLOCK)


def packed(values: Tensor, bits: Tensor) -> Packed:
    """float32 numbers [N] in float16 [N], rounded at random, and what each block of them is to be multiplied by."""
    count = len(values)
    whole = torch.nn.functional.pad(values, (0, -count % BLOCK)).view(-1, BLOCK)
    _, exponent = torch.frexp(whole.abs().amax(1))
    scale = ((exponent.clamp(-100, 100) - 15 + 127) << 23).view(torch.float32)  # 2 to that power
    return to_float16((whole / scale[:, None]).view(-1)[:count], bits), scale


def unpacked(values: Tensor, scale: Tensor) -> Tensor:
    """The float32 numbers [N] that were ``packed``."""
    count = len(values)
    whole = torch.nn.functional.pad(values, (0, -count % BLOCK)).view(-1, BLOCK)
    return (whole.float() * scale[:, None]).view(-1)[:count]


def tiles(count: int) -> Iterator[tuple[slice, slice]]:
    """Parts of so many numbers that are handled one after the other, and their blocks."""
    for start in range(0, count, TILE):
        stop = min(start + TILE, count)
        yield slice(start, stop), slice(start // BLOCK, blocks_of(stop))


def add_rounded(total: Tensor, values: Tensor, key: Key) -> None:
    """Add float32 numbers [N] to a sum in bfloat16 [N], which is rounded at random, in place."""
    if is_fusible(total, values):
        _launch(0, len(total), total, values, *key)
        return
    for part, _ in tiles(len(total)):
        bits = random_bits(part.start, part.stop, key, total.device)
        total[part] = to_bfloat16(total[part].float() + values[part], bits)


def lean_step(
    student: Tensor, displacement: Packed, momentum: Packed, gradient: Tensor,
    lr: float, decay: float, clip_factor: float, damping: float, slide: float, keys: tuple[Key, Key],
) -> None:  # fmt: skip
    """One step of Algorithm 2 on flat tensors, in place, with u = θ - θ' instead of the teacher.

    v ← μv + l(g + λu), θ ← θ - ηv, u ← (1 - lηκ)(u + what θ has moved by). That is what θ' ← θ' + lηκ(θ - θ') gives,
    also where float32 rounds θ: a step too small for θ moves u no more than θ. θ uses v before it is rounded.

    Args: θ in float32, u and v as ``packed``, g in bfloat16; η, μ, l, λ and lηκ; a key for v and one for u.
    """
    tensors = (student, *displacement, *momentum, gradient)
    if is_fusible(*tensors):
        numbers = (lr, decay, clip_factor, clip_factor * damping, 1 - slide)
        _launch(1, len(student), *tensors, *numbers, *keys[0], *keys[1])
        return
    for part, blocks in tiles(len(student)):
        way = unpacked(displacement[0][part], displacement[1][blocks])
        velocity = unpacked(momentum[0][part], momentum[1][blocks]).mul_(decay).add_(gradient[part], alpha=clip_factor)
        velocity.add_(way, alpha=clip_factor * damping)
        moved = torch.add(student[part], velocity, alpha=-lr)
        way += moved - student[part]
        way *= 1 - slide
        student[part] = moved
        for kept, values, key in ((momentum, velocity, keys[0]), (displacement, way, keys[1])):
            bits = random_bits(part.start, part.stop, key, student.device)
            kept[0][part], kept[1][blocks] = packed(values, bits)


def is_fusible(*tensors: Tensor) -> bool:
    """Whether the kernels can run on these tensors: contiguous, on a CUDA device, and Triton is there."""
    return all(t.is_cuda and t.is_contiguous() for t in tensors) and _kernels() is not None


def _launch(kernel: int, count: int, *arguments: Any) -> None:
    """Run a kernel, one program for each block."""
    kernels: Any = _kernels()
    if count:
        with torch.cuda.device_of(arguments[0]):
            kernels[kernel][(blocks_of(count),)](*arguments, count, BLOCK=BLOCK)


@functools.cache
def _kernels() -> tuple[Any, Any] | None:
    """The kernels of ``add_rounded`` and ``lean_step``, or None where there is no Triton."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None
    globals()["tl"] = tl  # a kernel's source finds its names among the globals of the module

    @triton.jit
    def mixed(bits):  # type: ignore[no-untyped-def]
        bits ^= bits >> 16
        bits *= 0x7FEB352D
        bits ^= bits >> 15
        bits *= 0x846CA68B
        bits ^= bits >> 16
        return bits

    @triton.jit
    def drawn(place, first, second):  # type: ignore[no-untyped-def]
        bits = mixed(place.to(tl.uint32) + first.to(tl.uint32))
        return mixed(bits ^ second.to(tl.uint32))

    @triton.jit
    def cut(values, bits, mask: tl.constexpr):  # type: ignore[no-untyped-def]
        raised = (values.to(tl.uint32, bitcast=True) + (bits & mask)) & (0xFFFFFFFF - mask)
        return tl.where(values == values, raised.to(tl.float32, bitcast=True), values)

    @triton.jit
    def pack(numbers, scale, values, bits, block, place, inside):  # type: ignore[no-untyped-def]
        # The power of two below the largest, from its exponent's bits; see ``packed``.
        largest = tl.max(tl.where(inside, tl.abs(values), 0.0), 0)
        exponent = tl.minimum(tl.maximum((largest.to(tl.uint32, bitcast=True) >> 23).to(tl.int32) - 126, -100), 100)
        exponent = tl.where(largest == 0.0, 0, exponent)
        tl.store(scale + block, ((exponent - 15 + 127) << 23).to(tl.float32, bitcast=True))
        values = values * ((15 - exponent + 127) << 23).to(tl.float32, bitcast=True)
        size = tl.abs(values)
        raised = tl.where(size < 0.00006103515625, 0.00006103515625, 0.0)
        size = cut(size + raised, bits, 0x1FFF) - raised
        tl.store(numbers + place, tl.where(values < 0, -size, size).to(tl.float16), mask=inside)

    globals().update({"mixed": mixed, "drawn": drawn, "cut": cut, "pack": pack})

    @triton.jit(do_not_specialize=["first", "second"])
    def add_kernel(total, values, first, second, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        added = tl.load(total + place, mask=inside).to(tl.float32) + tl.load(values + place, mask=inside)
        rounded = cut(added, drawn(place, first, second), 0xFFFF)
        tl.store(total + place, rounded.to(tl.bfloat16), mask=inside)

    @triton.jit(do_not_specialize=["key1", "key2", "key3", "key4"])
    def step_kernel(  # type: ignore[no-untyped-def]
        student, displacement, scale, momentum, momentum_scale, gradient,
        lr, decay, clip_factor, damping, kept, key1, key2, key3, key4, count, BLOCK: tl.constexpr,
    ):  # fmt: skip
        block = tl.program_id(0).to(tl.int64)
        place = block * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        theta = tl.load(student + place, mask=inside, other=0.0)
        way = tl.load(displacement + place, mask=inside, other=0.0).to(tl.float32) * tl.load(scale + block)
        velocity = tl.load(momentum + place, mask=inside, other=0.0).to(tl.float32) * tl.load(momentum_scale + block)
        slope = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        velocity = decay * velocity + clip_factor * slope + damping * way
        moved = theta - lr * velocity
        way = (way + (moved - theta)) * kept
        tl.store(student + place, moved, mask=inside)
        pack(momentum, momentum_scale, velocity, drawn(place, key1, key2), block, place, inside)
        pack(displacement, scale, way, drawn(place, key3, key4), block, place, inside)

    return add_kernel, step_kernel
