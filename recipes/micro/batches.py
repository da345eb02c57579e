"""Training batches from token streams that lie on the device as one tensor each."""

from __future__ import annotations

import torch

IGNORED = -100


class Stream:
    """Documents in a random order as one row of tokens, cut into windows.

    Args:
        documents: Token ids of each document, from beginning-of-text to end-of-text.
        window: Tokens in a row of a batch.
        anywhere: Let windows begin at any token, with a beginning-of-text token put in its place (for long
            documents); otherwise they begin with a document and run into those that follow.
        generator: Order of the documents.
        device: Where the tokens are kept.
    """

    def __init__(
        self,
        documents: list[list[int]],
        window: int,
        *,
        anywhere: bool,
        generator: torch.Generator,
        device: torch.device,
    ) -> None:
        ordered = [documents[i] for i in torch.randperm(len(documents), generator=generator).tolist()]
        flat = [token for ids in ordered for token in ids]
        while len(flat) <= window:
            flat += flat
        self.num_tokens = len(flat)
        self._tokens = torch.tensor(flat + flat[:window], dtype=torch.int32, device=device)
        lengths = torch.tensor([len(ids) for ids in ordered])
        self._starts = (lengths.cumsum(0) - lengths).to(device)
        self._first = documents[0][0]
        self._anywhere = anywhere
        self._offsets = torch.arange(window, device=device)

    def rows(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Return `count` random windows, [count, window]."""
        bound = self.num_tokens if self._anywhere else len(self._starts)
        drawn = torch.randint(bound, (count,), generator=generator).to(self._tokens.device)
        starts = drawn if self._anywhere else self._starts[drawn]
        rows = self._tokens[starts[:, None] + self._offsets].long()
        if self._anywhere:
            rows[:, 0] = self._first
        return rows


class Documents:
    """Documents as rows of their own, padded to `window` with ignored labels; every one once per epoch."""

    def __init__(self, documents: list[list[int]], window: int, device: torch.device) -> None:
        longest = max(map(len, documents))
        if longest > window:
            raise ValueError(f"window is {window}, must be at least {longest}, the length of the longest document")
        padded = [ids + [IGNORED] * (window - len(ids)) for ids in documents]
        self._rows = torch.tensor(padded, device=device)
        self._order: list[int] = []

    def rows(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Return the next `count` documents of a random order, [count, window]."""
        while len(self._order) < count:
            self._order += torch.randperm(len(self._rows), generator=generator).tolist()
        taken, self._order = self._order[:count], self._order[count:]
        return self._rows[torch.tensor(taken, device=self._rows.device)]


Source = Stream | Documents


def mixed_rows(parts: list[tuple[Source, int]], generator: torch.Generator) -> torch.Tensor:
    """Return one batch with the given number of rows of each source."""
    return torch.cat([source.rows(count, generator) for source, count in parts if count])
