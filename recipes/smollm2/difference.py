"""A finetuned model as its difference from the base model, four and a half bits a weight: a seventh of its size.

Weights are taken in blocks of 64. A block's largest absolute change is divided into seven steps; stored are the step,
in float32, and for each weight the nearest number of steps, so that a weight is off by a fourteenth of that change at
most. The model with rounded weights is the model: what is measured, or learned on top of it, can be repeated wherever
the base model and this file are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["add_difference", "write_difference"]

BLOCK = 64
LEVELS = 7
_NUMBERS, _SCALES, _BASE = ".numbers", ".scales", "base"


def write_difference(base: Mapping[str, Tensor], model: Mapping[str, Tensor], file: Path) -> None:
    """Write how a model's weights differ from the base model's, rounded; equal tensors take no room.

    Args:
        base: Weights of the base model by name.
        model: Those of the finetuned model, of the same names and shapes.
        file: A safetensors file.
    """
    stored: dict[str, Tensor] = {}
    for name, before in base.items():
        change = (model[name].detach().cpu().float() - before.float()).flatten()
        if not change.any():
            continue
        blocks = torch.nn.functional.pad(change, (0, -len(change) % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(1) / LEVELS
        numbers = (blocks / scales.clamp_min(1e-30)[:, None]).round().clamp(-LEVELS, LEVELS) + LEVELS + 1
        numbers = numbers.to(torch.uint8).view(-1, 2)
        stored[name + _NUMBERS] = numbers[:, 0] | numbers[:, 1] << 4
        stored[name + _SCALES] = scales
    save_file(stored, file, metadata={_BASE: _hash(base)})


def add_difference(base: Mapping[str, Tensor], file: Path) -> dict[str, Tensor]:
    """The weights of the finetuned model, in float32.

    Args:
        base: Weights of the base model by name; they are not changed.
        file: What ``write_difference`` wrote for that base model.

    Raises:
        ValueError: It wrote it for another base model.
    """
    with safe_open(file, "pt") as content:
        if content.metadata()[_BASE] != _hash(base):
            raise ValueError(f"{file} is the difference from another base model: give the one it was made from")
    stored = load_file(file)
    weights = {name: tensor.detach().float().cpu().clone() for name, tensor in base.items()}
    for name in (key.removesuffix(_SCALES) for key in stored if key.endswith(_SCALES)):
        packed, scales = stored[name + _NUMBERS], stored[name + _SCALES]
        numbers = torch.stack([packed & 15, packed >> 4], 1).view(-1, BLOCK).float() - (LEVELS + 1)
        change = (numbers * scales[:, None]).flatten()
        weights[name] += change[: weights[name].numel()].view_as(weights[name])
    return weights


def _hash(weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
