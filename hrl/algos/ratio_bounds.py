"""How bounds of probability ratios and rejection rules are written.

This file needs no torch, so that a configuration can be checked before torch is imported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args


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
            raise ValueError(
                f"{text!r} is not an interval of ratios; write an upper bound as '2.0', or both bounds as '0.5_5.0'"
            )
        return cls(upper=bounds[-1], lower=bounds[0] if len(bounds) == 2 else None)


Divergence = Literal["k1", "k2", "k3"]
Scope = Literal["token", "seq_sum", "seq_mean", "seq_max"]

REJECTION_RULES: dict[str, tuple[Scope, Divergence]] = {
    f"{scope}_{kind}": (scope, kind)
    for scope in get_args(Scope)
    for kind in get_args(Divergence)
    if (scope, kind) != ("seq_max", "k1")  # a maximum of signed numbers hides the negative ones
}
"""Where a rule measures the divergence of sampler and trainer (at each token; or as sum, mean or maximum over a row),
and by which estimate: `token_k1`, `seq_mean_k3`."""


def rejection_bounds(rule: str, threshold: str | float) -> Interval:
    """Return the bounds within which a rule keeps a token or sequence.

    Args:
        rule: A key of `REJECTION_RULES`.
        threshold: For k2 and k3 the largest divergence. For k1, which has a sign, bounds of the ratio
            `p_sampler / p_trainer` as `"0.5_2.0"`; one number means itself and its inverse.

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
    """Return the rules of `rollout_rs`, each with its threshold from `rollout_rs_threshold`.

    `"token_k1,seq_max_k3"` with `"0.5_2.0,0.1"` gives `(("token_k1", "0.5_2.0"), ("seq_max_k3", "0.1"))`. A single
    threshold is for all rules.

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
