"""The notation of bounds on probability ratios and of rejection rules.

Nothing here needs torch, so a configuration can be checked before torch is imported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Interval:
    """The accepted ratios. `lower` None means no lower bound.

    Raises:
        ValueError: The bounds are not `0 < lower <= upper`.
    """

    upper: float
    lower: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.upper < math.inf or (self.lower is not None and not 0 < self.lower <= self.upper):
            raise ValueError(
                f"bounds of a probability ratio must be 0 < lower <= upper, got {self.lower}, {self.upper}"
            )

    @classmethod
    def parse(cls, text: str | float) -> Interval:
        """Parse `2.0`, `"2.0"` (an upper bound) or `"0.5_5.0"` (lower and upper).

        Raises:
            ValueError: The text has none of these forms.
        """
        parts = str(text).split("_")
        try:
            bounds = [float(part) for part in parts]
        except ValueError:
            bounds = []
        if len(bounds) not in (1, 2):
            raise ValueError(f"{text!r} is no interval of ratios; write an upper bound '2.0' or both as '0.5_5.0'")
        return cls(upper=bounds[-1], lower=bounds[0] if len(bounds) == 2 else None)


Divergence = Literal["k1", "k2", "k3"]
Scope = Literal["token", "seq_sum", "seq_mean", "seq_max"]

REJECTION_RULES: dict[str, tuple[Scope, Divergence]] = {
    "token_k1": ("token", "k1"),
    "token_k2": ("token", "k2"),
    "token_k3": ("token", "k3"),
    "seq_sum_k1": ("seq_sum", "k1"),
    "seq_sum_k2": ("seq_sum", "k2"),
    "seq_sum_k3": ("seq_sum", "k3"),
    "seq_mean_k1": ("seq_mean", "k1"),
    "seq_mean_k2": ("seq_mean", "k2"),
    "seq_mean_k3": ("seq_mean", "k3"),
    "seq_max_k2": ("seq_max", "k2"),
    "seq_max_k3": ("seq_max", "k3"),
}
"""Where a rule takes the divergence of sampler and trainer (each token; sum, mean or maximum over a row), and which
estimate of it."""


def rejection_bounds(rule: str, threshold: str | float) -> Interval:
    """Return the bounds that a rule compares with.

    Args:
        rule: A key of :data:`REJECTION_RULES`.
        threshold: For k2 and k3 the largest divergence. For k1, whose sign matters, bounds of the ratio
            `p_sampler / p_trainer` as `"0.5_2.0"`; one number stands for itself and its inverse.

    Raises:
        ValueError: Unknown rule, or a threshold that does not fit it.
    """
    if rule not in REJECTION_RULES:
        raise ValueError(f"unknown rejection rule {rule!r}; choose one of {sorted(REJECTION_RULES)}")
    bounds = Interval.parse(threshold)
    if REJECTION_RULES[rule][1] != "k1":
        if bounds.lower is not None:
            raise ValueError(f"{rule} takes one upper bound, got {threshold!r}")
        return bounds
    return bounds if bounds.lower is not None else Interval(bounds.upper, 1.0 / bounds.upper)


def parse_rejections(rules: str | None, thresholds: str | float | None) -> tuple[tuple[str, str], ...]:
    """Return rules and their thresholds, as `rollout_rs` and `rollout_rs_threshold` are written.

    `"token_k1,seq_max_k3"` with `"0.5_2.0,0.1"` gives `(("token_k1", "0.5_2.0"), ("seq_max_k3", "0.1"))`; one
    threshold serves all rules. A token is kept if every rule keeps it.

    Raises:
        ValueError: The numbers of thresholds and rules differ, a rule is unknown, or a threshold does not fit its rule.
    """
    names = [name.strip() for name in (rules or "").split(",") if name.strip()]
    texts = [text.strip() for text in str("" if thresholds is None else thresholds).split(",") if text.strip()]
    if not names:
        return ()
    if len(texts) not in (1, len(names)):
        raise ValueError(f"{len(names)} rejection rules ({rules}) have {len(texts)} thresholds; give one, or one each")
    pairs = tuple(dict(zip(names, texts * len(names) if len(texts) == 1 else texts, strict=False)).items())
    for rule, threshold in pairs:
        rejection_bounds(rule, threshold)
    return pairs
