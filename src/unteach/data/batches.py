"""Documents and general text to token batches.

Every batch is a pure function of the seed and the step: a resumed run needs nothing but its step number, and no draw
touches a global random state.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unteach.data.documents import Documents, skipped_summary, special_ids
from unteach.data.encoding import IdLists, TokenIds, encode_texts
from unteach.data.overlap import Overlap, overlap
from unteach.errors import InputError

__all__ = [
    "EMBEDDED_GENERAL", "GENERAL_BYTES", "ForgetBatches", "GeneralText", "Pieces", "TokenSet", "pad", "tokenise",
]  # fmt: skip

Mode = Literal["truncate", "chunk"]
EMBEDDED_GENERAL = "micro:general"
"""The general text that is used where none is given: public-domain prose, 6 MB. More and nearer text is better."""
GENERAL_BYTES = 64 * 2**20
"""How much general text is read by default: as token ids about 64 MiB too, some 30,000 chunks of 512 tokens."""
FEW_SEQUENCES = 2**14
"""What must be known of each sequence before the first step is computed for all of so many, else for those drawn."""
_FORGET, _GENERAL, _KEEP = 1, 2, 4  # each has generators of its own; 3 draws prompts in training/texts.py


@dataclass
class TokenSet:
    """Documents as token sequences."""

    sequences: Sequence[list[int]]
    """Token ids with the special ids that the tokenizer adds; at least two each, so that one can be predicted."""
    counts: dict[str, int]
    """`documents` used, `skipped`, `sequences`, `tokens`, `cut` documents (longer than one sequence), `left_out` tokens
    (behind the first sequence of those, or an end too short to use)."""
    skipped: list[tuple[str, str]]
    """What was left out: label and reason."""

    def summary(self) -> str:
        """One line for people."""
        line = "{documents:,} documents, {tokens:,} tokens in {sequences:,} sequences"
        if self.counts["cut"]:
            line += "; {cut:,} documents cut, {left_out:,} tokens left out"
        skipped = skipped_summary(self.skipped)
        return line.format(**self.counts) + (f"; {skipped}" if skipped else "")


def tokenise(documents: Documents, tokenizer: Any, *, mode: Mode, max_tokens: int) -> TokenSet:
    """Turn documents into token sequences of at most `max_tokens`, special ids included.

    Every sequence begins with the ids that the tokenizer puts before a text; what it puts after one stands at the end
    of a document. `truncate` keeps the beginning of a long document (MUSE-News in the paper), `chunk` cuts it into
    sequences of equal length and a shorter last one (MUSE-Books).

    Raises:
        InputError: If no document has two tokens.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode is {mode!r}, must be one of {', '.join(get_args(Mode))}")
    before, after, room = _room(tokenizer, "max_tokens", max_tokens)
    encoded = documents.encode(tokenizer)
    rest = np.where(encoded.lengths > 0, encoded.lengths + len(after), 0)
    whole = -(-rest // room)  # pieces of each document; only the last of them can be shorter than the room
    kept = whole - (len(before) + rest - (whole - 1) * room < 2)
    kept = np.clip(kept, 0, 1 if mode == "truncate" else None)
    skipped = [(documents.labels[n], "shorter than two tokens") for n in np.flatnonzero(kept <= 0).tolist()]
    result = TokenSet(Pieces(encoded, before, after, room, kept), {}, [*documents.skipped, *skipped])
    if not len(result.sequences):
        why = skipped_summary(result.skipped) or "there is none"
        raise InputError(f"documents is {documents.name!r}: no document has two tokens or more: {why}")
    used, in_pieces = kept > 0, np.minimum(rest, kept * room)
    result.counts |= {
        "documents": int(used.sum()), "skipped": len(result.skipped), "sequences": len(result.sequences),
        "tokens": int(in_pieces.sum()) + len(before) * len(result.sequences), "cut": int((used & (whole > 1)).sum()),
        "left_out": int((rest - in_pieces)[used].sum()),
    }  # fmt: skip
    return result


class Pieces(IdLists):
    """Documents cut into sequences, each put together when it is asked for.

    Args:
        encoded: Token ids of the documents.
        before: What every sequence begins with.
        after: What comes after each document.
        room: Tokens of a sequence, `before` aside.
        kept: How many sequences of each document there are.
    """

    def __init__(
        self, encoded: TokenIds, before: list[int], after: list[int], room: int, kept: NDArray[np.int64]
    ) -> None:
        self._encoded, self._before, self._after, self._room = encoded, before, after, room
        self._firsts = np.cumsum(kept) - kept
        self._documents = np.repeat(np.arange(len(kept), dtype=np.int32), kept)
        places = np.arange(len(self._documents)) - self._firsts[self._documents]
        rest = encoded.lengths[self._documents] + len(after) - places * room
        self.lengths = len(before) + np.minimum(rest, room)

    def list_of(self, number: int) -> list[int]:
        """The sequence of that number."""
        document = int(self._documents[number])
        ids = self._encoded.array(document)
        start = self._room * int(number - self._firsts[document])
        end = start + self._room
        after = self._after[max(0, start - len(ids)) : max(0, end - len(ids))]
        return [*self._before, *ids[start:end].tolist(), *after]


class ForgetBatches:
    """The sequences of documents in shuffled epochs.

    The batches of steps 0, 1, 2, ... read one endless row of sequences, in which each epoch is a new permutation of
    all of them; a batch may end one epoch and begin the next. A batch never has more sequences than there are: with
    fewer documents than the batch size, every batch is all of them.

    Args:
        tokens: The sequences.
        seed: Decides the permutations, at least 0.
        keep: Whether these are documents to be kept, which are drawn independently of those to be forgotten.
    """

    def __init__(self, tokens: TokenSet | Sequence[list[int]], seed: int, *, keep: bool = False) -> None:
        self.sequences = tokens.sequences if isinstance(tokens, TokenSet) else tokens
        self.seed = seed
        purpose = _KEEP if keep else _FORGET
        if not len(self.sequences):
            raise ValueError("tokens has no sequence, must have at least 1")
        self._permutation = functools.lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng([purpose, seed, epoch]).permutation(len(self.sequences))
        )

    def numbers(self, step: int, size: int) -> list[int]:
        """Which sequences are in the batch of a step; see `batch`."""
        size = _check_batch(step, size, len(self.sequences))
        places = (divmod(place, len(self.sequences)) for place in range(step * size, (step + 1) * size))
        return [int(self._permutation(epoch)[place]) for epoch, place in places]

    def batch(self, step: int, size: int) -> list[list[int]]:
        """The sequences of a step, counted from 0; `size` is the same at every step."""
        return [self.sequences[number] for number in self.numbers(step, size)]

    def drawn(self, steps: int, size: int) -> list[int] | None:
        """Which sequences so many steps read, in the order in which they come; None where all are few.

        More steps only add to the list.
        """
        if len(self.sequences) <= FEW_SEQUENCES:
            return None
        return self._permutation(0)[: steps * size].tolist()

    def steps_per_epoch(self, size: int) -> int:
        """How many steps see every sequence at least once."""
        return -(-len(self.sequences) // _check_batch(0, size, len(self.sequences)))


class GeneralText:
    """General text as chunks of equal length without padding; every step draws an independent random batch.

    The documents are joined with an end-of-text id between them (and whatever the tokenizer puts before a text) and
    cut; every chunk begins with what the tokenizer puts before a text. An incomplete last chunk is left out. The
    chunks are held once, as 32-bit ids.

    Args:
        documents: The texts.
        tokenizer: The model's tokenizer.
        tokens: Length of a chunk.
        seed: Decides the draws, at least 0.
        exclude: The forget documents: passages that also stand there are cut out.

    Attributes:
        chunks: [C, T] token ids.
        counts: `documents` read, `chunks`, `tokens` in them, `left_out` tokens at the end.
        overlap: What was cut out; None without `exclude`.

    Raises:
        InputError: If there is not one chunk of text.
    """

    def __init__(
        self,
        documents: Documents | Sequence[str],
        tokenizer: Any,
        *,
        tokens: int = 512,
        seed: int = 0,
        exclude: Documents | Sequence[str] | None = None,
    ) -> None:
        if not isinstance(documents, Documents):
            documents = Documents("general text", list(documents))
        self.seed, read = seed, len(documents)
        self.overlap: Overlap | None = None
        if exclude is not None:
            self.overlap, documents = overlap(exclude, documents)
        before, after, room = _room(tokenizer, "tokens", tokens)
        if not after and tokenizer.eos_token_id is not None:
            after = [tokenizer.eos_token_id]
        joined = _joined(encode_texts(tokenizer, documents.texts), after + before)
        count, left_out = divmod(len(joined), room)
        if not count:
            shared = f" ({self.overlap.summary()})" if self.overlap is not None and self.overlap.documents else ""
            raise InputError(
                f"general is {documents.name!r}: {left_out:,} tokens of text{shared}, must be at least the {room:,} of"
                " one chunk: give more text or lower general_tokens"
            )
        self.chunks: NDArray[np.int32] = np.empty((count, tokens), dtype=np.int32)
        self.chunks[:, : len(before)] = before
        self.chunks[:, len(before) :] = joined[: count * room].reshape(count, room)
        self.counts = {"documents": read, "chunks": count, "tokens": count * tokens, "left_out": left_out}

    def __len__(self) -> int:
        return len(self.chunks)

    def batch(self, step: int, size: int) -> list[list[int]]:
        """Different chunks drawn at random for a step, independent of all other steps; never more than there are."""
        size = _check_batch(step, size, len(self.chunks))
        numbers = np.random.default_rng([_GENERAL, self.seed, step]).choice(len(self.chunks), size, replace=False)
        return self.chunks[numbers].tolist()

    def summary(self) -> str:
        """One line for people."""
        line = "{documents:,} documents, {tokens:,} tokens in {chunks:,} chunks".format(**self.counts)
        return f"{line}; {self.overlap.summary()}" if self.overlap is not None else line


def pad(sequences: Sequence[Sequence[int]], pad_id: int = 0) -> tuple[Tensor, Tensor]:
    """`input_ids` [B, T] of sequences, filled up on the right, and their `lengths` [B], both int64.

    Masks come from the lengths, never from the ids.
    """
    lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64)
    input_ids = torch.full((len(sequences), int(lengths.max())), pad_id, dtype=torch.int64)
    for row, sequence in zip(input_ids, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
    return input_ids, lengths


def _joined(encoded: TokenIds, between: list[int]) -> NDArray[np.int32]:
    """All texts in a row, with some ids between each and the next."""
    ends = np.cumsum(encoded.lengths + len(between))
    joined = np.empty(max(0, len(encoded.ids) + len(between) * (len(encoded) - 1)), dtype=np.int32)
    own = np.ones(len(joined), dtype=bool)
    for offset, each in enumerate(between):
        places = ends[:-1] - len(between) + offset
        joined[places], own[places] = each, False
    joined[own] = encoded.ids
    return joined


def _room(tokenizer: Any, name: str, tokens: int) -> tuple[list[int], list[int], int]:
    """What the tokenizer puts before and after a text, and how many tokens fit behind the former."""
    before, after = special_ids(tokenizer)
    if tokens < max(2, len(before) + 1):
        raise ValueError(f"{name} is {tokens}, must be at least {max(2, len(before) + 1)}")
    return before, after, tokens - len(before)


def _check_batch(step: int, size: int, available: int) -> int:
    """The size of a batch: as wished, but never more than there are sequences."""
    if step < 0:
        raise ValueError(f"step is {step}, must be at least 0")
    if size < 1:
        raise ValueError(f"size is {size}, must be at least 1")
    return min(size, available)
