"""Look inside: do hidden states still hold the facts, layer by layer, where the output does not say them?

The logit lens reads every block's output with the model's own last norm and head (Łucki et al., arXiv 2409.18025, of
unlearned models; the depth score of gnueaj/unlearning-depth-score needs a retrained model, as the control here). The
figure is the share of names and numbers whose first token is among the ten most probable there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from unteach.audits import Attack, Reading
from unteach.audits.texts import Case, facts
from unteach.evaluation.inference import evaluating, in_batches
from unteach.method.vocab_head import Head
from unteach.models import context_length, decoder_layers
from unteach.models.load import backbone_and_head

POSITIONS = 2**13
"""Tokens that are read at once."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is read."""

    facts: int = 400
    top: int = 10
    """A token counts where it is among so many most probable ones."""


def measure(case: Case, settings: Settings) -> list[Reading]:
    """For each block, which facts' first tokens its output would name."""
    most = context_length(case.model)
    probes = [fact for fact in facts(case, settings.facts) if len(fact.prompt_ids or ()) <= most]
    if not probes:
        return []
    model, batching = case.model, case.batching("layers", len(probes))
    norm = _last_norm(model)
    head = Head.of(model)
    outputs: list[torch.Tensor] = []
    hooks = [
        block.register_forward_hook(lambda _, __, out: outputs.append(out[0] if isinstance(out, tuple) else out))
        for block in decoder_layers(model)
    ]

    def run(group: list[int]) -> list[list[float]]:
        rows = [torch.tensor(probes[number].prompt_ids) for number in group]
        wanted = torch.tensor([(probes[number].expected_ids or (0,))[0] for number in group], device=model.device)
        ids = pad_sequence(rows, batch_first=True).to(model.device)
        ends = torch.tensor([len(row) - 1 for row in rows], device=model.device)
        outputs.clear()
        backbone_and_head(model)[0](input_ids=ids, use_cache=False)
        found = []
        for hidden in outputs:
            logits = head.logits(norm(hidden[torch.arange(len(rows), device=model.device), ends])).float()
            better = (logits > logits.gather(-1, wanted[:, None])).sum(-1)
            found.append((better < settings.top).float().tolist())
        return [list(column) for column in zip(*found, strict=True)]

    try:
        with evaluating(model):
            table = in_batches([len(fact.prompt_ids or ()) for fact in probes], run, batching, POSITIONS)
    finally:
        for hook in hooks:
            hook.remove()
    layers = list(zip(*table, strict=True))
    line = f"fact among the top {settings.top}"
    return [Reading(line=line, at=layer, scores=tuple(scores)) for layer, scores in enumerate(layers, 1)]


def _last_norm(model: torch.nn.Module) -> torch.nn.Module:
    """The norm behind the last block; nothing where a family has none."""
    blocks = decoder_layers(model)
    inside = {id(module) for module in blocks.modules()}
    norms = [m for m in model.get_decoder().modules() if "norm" in type(m).__name__.lower() and id(m) not in inside]  # type: ignore[operator]
    return norms[-1] if norms else torch.nn.Identity()


ATTACK = Attack(
    title="inside",
    protocol="Logit lens: the output of every block through the last norm and the head, at the token before a name or a"
    " number of the documents; the share of those whose first token is among the ten most probable.",
    source="logit lens (Łucki et al., arXiv 2409.18025; gnueaj/unlearning-depth-score)",
    over="layer",
    measure=measure,
    quick=Settings(facts=200),
    full=Settings(),
)
