"""What a compiled decoder block keeps for its backward pass.

An eager block keeps every tensor that a gradient needs. The compiler traces both passes of a block into one graph and
cuts it where the fewest bytes cross: what is cheap is computed again, in the kernels that need it. Here the same graph
is made from tensors without data and the compiler's partitioner asked for its cut; nothing is compiled.

For a Llama block in half precision it keeps 14 D + 4 K + 6 I + 4 H bytes of a token (width D, inner width I, keys and
values of width K, H heads), where an eager one keeps 16 D + 4 K + 8 I + 4 H: not the input of the second norm, but the
attention's projection that was added there, and not the activation of the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from unteach.models.precision import _HalfLinear

__all__ = ["BlockCall", "kept_compiled", "watching"]


@dataclass(slots=True)
class BlockCall:
    """A call of a decoder block."""

    given: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    kept: int = 0
    """Bytes that an eager call keeps, with its output and without its input."""


@contextmanager
def watching(block: Any, call: BlockCall, alive: Callable[[], int]) -> Iterator[None]:
    """Inside, a call of the block is noted in ``call``; ``alive`` says how many bytes are alive."""

    def before(_: Any, given: Any, named: Any) -> None:
        call.given, call.named, call.kept = given, named, -alive()

    def after(*_: Any) -> None:
        call.kept += alive()

    hooks = block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def kept_compiled(block: Any, call: BlockCall) -> int:
    """Bytes that a compiled block keeps when called so, with its input and without its output.

    The tensors have no data, and their mode, autocast and ``half_weights`` are on, as in a pass.
    """
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    sizes: dict[int, int] = {}
    linears = [module for module in block.modules() if isinstance(module, _HalfLinear)]
    own = dict(block.named_parameters()) | dict(block.named_buffers())

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **more: Any) -> Any:
        parts = min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **more)
        graph = parts[0].graph
        (outputs,) = graph.find_nodes(op="output")
        sizes.update(_storages(outputs.args[0][num_fwd_outputs:]))
        for storage in _storages(graph.find_nodes(op="placeholder")):  # weights, and views of them, stand anyway
            sizes.pop(storage, None)
        return parts

    def traced(own: Any, rounded: Any, given: Any, named: Any) -> Any:
        for linear, weight in zip(linears, rounded, strict=True):
            linear.rounded = weight
        return torch.func.functional_call(block, own, given, named)

    hidden, *others = call.given
    hidden = hidden.detach().requires_grad_()
    plain: Any = {"fw_compiler": lambda graph, _: graph, "bw_compiler": lambda graph, _: graph}
    trace = aot_function(traced, **plain, partition_fn=partition, decompositions=select_decomp_table())
    with patch.object(torch.compiler, "is_compiling", lambda: True):  # which tells layers to use operators
        trace(own, [linear.rounded for linear in linears], (hidden, *others), call.named)
    return sum(sizes.values()) + hidden.nbytes


def _storages(nodes: Iterable[Any]) -> dict[int, int]:
    """Bytes of the memory that is behind the tensors of a graph's nodes, each once."""
    values = [node.meta.get("val") for node in nodes]
    found = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
    return {storage._cdata: storage.nbytes() for storage in found}
