"""How many labels of prompts flipped between two samplings, and how many would by chance alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from data.pass_rate import Beta

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

DRAWS = 20_000


class Share(NamedTuple):
    share: float
    low: float
    high: float


def label_chances(
    prior: Beta, successes: ArrayLike, scored: ArrayLike, cap: int
) -> tuple[np.ndarray, np.ndarray]:
    """Chance that `cap` new completions of the same policy are all correct, and that none is; one a prompt.

    Averaged over what is believed of the prompt's rate after its counts, Beta(a + c, b + n - c). The sequential plan
    stops only at a mixed prompt, so it ends as solved or unsolved exactly when `cap` completions would.
    """
    import numpy as np
    from scipy.special import betaln

    c, n = np.asarray(successes, float), np.asarray(scored, float)
    a, b = prior.a + c, prior.b + n - c
    return np.exp(betaln(a + cap, b) - betaln(a, b)), np.exp(betaln(a, b + cap) - betaln(a, b))


def stratified_interval(
    hits: Sequence[int], sampled: Sequence[int], sizes: Sequence[int], confidence: float = 0.95
) -> Share:
    """Share of hits in a population of strata, from a sample of each; with an equal-tailed interval.

    Each stratum's own share gets Jeffreys' posterior, Beta(1/2 + hits, 1/2 + misses); the interval is that of
    their sum weighted by size, over seeded draws (a normal interval has no width where no label flipped).

    Raises:
        ValueError: a stratum without a sample, or more hits than samples.
    """
    import numpy as np

    x, n, weight = np.asarray(hits), np.asarray(sampled), np.asarray(sizes) / np.sum(sizes)
    if (n < 1).any() or (x > n).any() or (x < 0).any():
        raise ValueError(
            f"hits {list(hits)} of {list(sampled)}: expected 0 <= hits <= sampled, and at least 1"
        )
    share = float((weight * x / n).sum())
    draws = np.random.default_rng(0).beta(0.5 + x, 0.5 + n - x, size=(DRAWS, len(n))) @ weight
    tail = (1 - confidence) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return Share(share, min(share, float(low)), max(share, float(high)))
