"""Values with 95 % bootstrap intervals.

Every interval is the percentile bootstrap over items: items are drawn with replacement `RESAMPLES` times with
a fixed seed and the 2.5th and 97.5th percentile of the recomputed value are the bounds. The draws come from a
generator of their own, never from the global random state of numpy or torch.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 2000
_BLOCK = 4_000_000
Interval = tuple[float | None, float | None]


@dataclass(frozen=True)
class Metric:
    """One measured value."""

    value: float
    low: float | None
    """Lower bound of the 95 % bootstrap interval; None where fewer than two items were measured."""
    high: float | None
    """Upper bound, likewise."""
    count: int
    """How many items the value is made of."""
    higher_is_better: bool | None
    """None where neither is: PrivLeak is best at zero."""
    unit: str
    """`percent`, `nats per token`, `fraction`, `auc` or `p-value`."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as a plain dictionary."""
        return asdict(self)


def mean_metric(
    scores: Sequence[float],
    *,
    higher_is_better: bool | None,
    unit: str = "percent",
    scale: float = 100.0,
    seed: int = 0,
) -> Metric:
    """The mean of per-item scores times `scale`, with its interval."""
    values = checked(scores, "scores")
    low, high = bootstrap_ratio(values * scale, np.ones_like(values), seed=seed)
    return Metric(float(values.mean() * scale), low, high, len(values), higher_is_better, unit)


def bootstrap_ratio(numerators: ArrayLike, denominators: ArrayLike, *, seed: int = 0) -> Interval:
    """95 % interval of Σ numerators / Σ denominators, items resampled together.

    With denominators of 1 this is the mean; with token counts it is a mean per token.

    Returns:
        The two bounds, or (None, None) for fewer than two items.
    """
    top, bottom = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    count = len(top)
    if count < 2:
        return None, None
    generator = np.random.default_rng(seed)
    block = max(1, _BLOCK // count)
    ratios: list[NDArray[np.float64]] = []
    for start in range(0, RESAMPLES, block):
        draws = generator.integers(0, count, (min(block, RESAMPLES - start), count))
        ratios.append(top[draws].sum(1) / bottom[draws].sum(1))
    return percentiles(np.concatenate(ratios))


def percentiles(values: NDArray[np.float64]) -> Interval:
    """The 2.5th and 97.5th percentile of resampled values."""
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def checked(values: ArrayLike, name: str) -> NDArray[np.float64]:
    """A one-dimensional float array without NaN.

    Raises:
        ValueError: if there is none, if one is NaN, or if they are not a plain list.
    """
    array = np.asarray(values, dtype=float)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}: a plain list of numbers is needed")
    if not len(array):
        raise ValueError(f"{name} is empty: at least one number is needed")
    missing = np.flatnonzero(np.isnan(array))
    if len(missing):
        raise ValueError(
            f"{name} has NaN at {len(missing)} of {len(array)} positions, first at {missing[0]}: "
            "a model with broken weights cannot be scored"
        )
    return array
