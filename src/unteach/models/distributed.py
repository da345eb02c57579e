"""Several ranks under ``torchrun``: sums over all of them, each rank's part of a batch, sharded weights (FSDP2).

Every decoder layer is a unit of FSDP2, and everything else (embeddings, last norm, head) is the root's. A weight is
whole only while its unit computes, so all that reads weights runs *inside* the root's forward pass: ``inside(model,
function)``. Without a process group every function here does the plain thing, so the loop has one path.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from unteach.config import ForgetConfig
from unteach.errors import InputError
from unteach.method.tensors import is_sharded, reshard_gathered_modules

T = TypeVar("T")
R = TypeVar("R")
_ROOT = "_unteach_root"
FREE_SHARE = 0.3
"""An evaluation keeps all weights gathered, so that they are sent once and not in every pass, where this share of the
GPU's memory stays free beside them; more than 1: never."""


def ranks() -> int:
    """How many processes work together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def check_ranks(config: ForgetConfig, ranks: int) -> None:
    """Raise an ``InputError`` where so many processes cannot share a run."""
    if ranks > 1 and config.state_bits == 16:
        raise InputError(f"state_bits is 16: {ranks} processes divide a state in 32 bits among them, leave it out")
    if ranks > 1 and config.divergence_form == "tangent":
        raise InputError(f"divergence_form is 'tangent': {ranks} processes divide the weights, use 'difference'")


def rank() -> int:
    """The number of this process among them, from 0."""
    return dist.get_rank() if ranks() > 1 else 0


def is_first_rank() -> bool:
    """Whether this process prints and writes."""
    return rank() == 0


def join() -> None:
    """Form the process group that ``torchrun`` describes in the environment; nothing where it names one process."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def finish() -> None:
    """Leave the process group, if there is one, when all are done."""
    if ranks() > 1:
        wait_for_all()
        dist.destroy_process_group()


def wait_for_all() -> None:
    """Return when every rank is here."""
    sum_over_ranks([0.0])


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Add up numbers over all ranks, in float64."""
    if ranks() == 1:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank."""
    return sum_over_ranks([float(flag)])[0] > 0


def from_first_rank(value: T) -> T:
    """The first rank's value, everywhere: what decides how a run goes on must be the same to the last bit."""
    if ranks() == 1:
        return value
    shared = [value]
    dist.broadcast_object_list(shared, src=0, device=torch.device("cpu"))
    return shared[0]


def from_all_ranks(value: T) -> list[T]:
    """Every rank's value, everywhere."""
    values: list[Any] = [value] * ranks()
    if ranks() > 1:
        dist.all_gather_object(values, value)
    return values


def lost_rank(error: BaseException) -> bool:
    """Whether an error says that another rank is gone, or cannot be reached."""
    return (
        ranks() > 1 and isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error))
    )


def first_to_say() -> bool:
    """Whether this rank is the first to ask this: of those that are still there, only one then speaks."""
    if ranks() == 1:
        return True
    try:
        return dist.distributed_c10d._get_default_store().add("unteach: said", 1) == 1
    except RuntimeError:  # what all ranks asked lived in the one that is gone
        return True


def in_turns(work: Callable[[], R]) -> R:
    """Let the processes of each machine do something that needs much memory one after the other."""
    if ranks() == 1:
        return work()
    result: list[R] = []
    for turn in range(ranks()):
        if turn == int(os.environ.get("LOCAL_RANK", rank())):
            result.append(work())
        wait_for_all()
    return result[0]


def parts_of_rank(
    items: Sequence[T], split: Callable[[Sequence[T]], Iterable[Sequence[T]]]
) -> list[tuple[Sequence[T], float]]:
    """This rank's micro-batches of a batch that all ranks know, each with its weight, 1 or 0; all ranks have as many.

    Rank r takes items r, r + R, r + 2R, ... of R ranks. Where another rank has more micro-batches, or this one no item
    at all, it reads something again with weight 0: passes over sharded weights are made by all ranks together.
    """
    count = ranks()
    parts = [list(split(items[number::count])) if len(items) > number else [] for number in range(count)]
    mine, most = parts[rank()], max(map(len, parts))
    filler = mine[0][:1] if mine else items[:1]
    return [(part, 1.0) for part in mine] + [(filler, 0.0)] * (most - len(mine))


def share_out(model: Any, items: Sequence[T], work: Callable[[Sequence[T]], Sequence[R]]) -> list[R]:
    """Let every rank do its part of some work that only reads the model, and give all results to all ranks.

    The work may make as many passes as it likes, another number on each rank: a rank that is through goes on making
    passes over a single token while others still need its part of the weights. Where memory allows, the weights stay
    gathered for the length of the work. It gives one result for each of the items that it gets, which may be none;
    the results come in the order of the items.
    """
    if ranks() == 1:
        return list(inside(model, lambda _: work(items), keep=True))
    mine = inside(model, lambda _: _in_lock_step(model, lambda: work(items[rank() :: ranks()])), keep=True)
    gathered = from_all_ranks(list(mine))
    return [gathered[number % ranks()][number // ranks()] for number in range(len(items))]


def _in_lock_step(model: Any, work: Callable[[], R]) -> R:
    """Do the work; every pass of the model waits for all ranks to make one, if only for company."""
    if not has_shards(model):
        return work()
    with model.base_model.register_forward_pre_hook(lambda *_: any_rank(True) and None):
        result = work()
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    while any_rank(False):
        with torch.no_grad():
            model.base_model(input_ids=token, use_cache=False)
    return result


class _Root(nn.Module):
    """What FSDP2 hooks: inside its forward pass the root's weights are whole."""

    def __init__(self, model: nn.Module, kind: str, half: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.kind, self.gathered_as = model, kind, half

    def forward(self, function: Callable[[], R]) -> R:
        """Run a function; where weights are gathered in half precision, products must be in it too."""
        adds = self.gathered_as is not None and not torch.is_autocast_enabled(self.kind)
        with torch.autocast(self.kind, self.gathered_as, cache_enabled=False) if adds else nullcontext():
            return function()


@functools.cache
def mesh_of(kind: str) -> DeviceMesh:
    """All ranks' devices of a kind, ``cuda`` or ``cpu``; the first time, all ranks must ask for it."""
    return init_device_mesh(kind, (ranks(),))


def shard(model: Any, kind: str = "cpu", half: torch.dtype | None = None) -> None:
    """Divide a model's weights between the ranks of the process group, in place.

    Choose the trainable weights (``requires_grad``) before, and take ``named_parameters`` after. Gradients are added up
    over the ranks, not averaged: let each rank's loss be its share of the whole. Weights in main memory are moved to
    the devices (``cuda`` or ``cpu``) a layer at a time. ``half``: gather the decoder layers' weights in this type: half
    the traffic, for runs whose passes all compute in it; evaluations then do too. The weights themselves, the root's
    and all gradients stay as they are.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    from unteach.models.load import decoder_layers

    mesh = mesh_of(kind)
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=model.dtype, cast_forward_inputs=False)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    root = _Root(model, kind, half)
    fully_shard(root, mesh=mesh, reshard_after_forward=True)  # True: no gathered copy outlives a change of the weights
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.__dict__[_ROOT] = root  # not as a submodule: the root contains the model


def has_shards(model: Any) -> bool:
    """Whether the model was given to ``shard``."""
    return getattr(model, _ROOT, None) is not None


def inside(model: Any, function: Callable[..., R], *arguments: Any, keep: bool = False) -> R:
    """``function(model, *arguments)``, which may read every weight of the model, sharded or not.

    ``keep``: all weights stay gathered until it returns, where memory allows; for many passes without gradients.
    """
    root = getattr(model, _ROOT, None)
    if root is None:
        return function(model, *arguments)
    with _kept_gathered(root) if keep else nullcontext():
        return root(lambda: function(model, *arguments))


@contextmanager
def _kept_gathered(root: Any) -> Iterator[None]:
    """Let the layers' weights stay gathered inside the block, if every rank has the memory."""
    tight = FREE_SHARE > 1
    device = next(root.parameters()).device
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        weights = sum(parameter.numel() * parameter.element_size() for parameter in root.parameters())
        tight |= free - weights < FREE_SHARE * total
    root.set_reshard_after_forward(any_rank(tight))
    try:
        yield
    finally:
        root.set_reshard_after_forward(True)
        reshard_gathered_modules(root.parameters())


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor; all ranks must ask for it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
