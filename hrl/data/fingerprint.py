"""Which data a saved position belongs to, so that a run which resumes with other rows or another order is found out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hrl.data.sampler import EpochOrder

_DIGEST_BYTES = 16


def fingerprint(order: EpochOrder, tokens: Iterable[np.ndarray]) -> dict[str, Any]:
    """Everything that the row at a position depends on, as plain data for a checkpoint.

    Args:
        order: Of the rows.
        tokens: Token ids of the rows, `(T,)` each, in the rows' own order.

    Returns:
        `rows`, their number; `shuffle`; `seed`, None where it shuffles nothing; `tokens`, a digest of the ids.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for ids in tokens:
        digest.update(len(ids).to_bytes(4, "little"))  # so that ids can't pass from one row to the next unnoticed
        digest.update(np.asarray(ids, dtype="<i4").tobytes())
    return {
        "rows": order.num_rows,
        "shuffle": order.shuffle,
        "seed": order.seed if order.shuffle else None,
        "tokens": digest.hexdigest(),
    }


def differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Return what is not as it was, one phrase each; empty for the same rows in the same order."""
    if present == saved:
        return []
    found = []
    if saved.get("rows") != present["rows"]:
        found.append(f"{present['rows']} rows, were {saved.get('rows')}")
    elif saved.get("tokens") != present["tokens"]:
        found.append("the rows hold other tokens (files and their order, filters, chat template, tokenizer, lengths)")
    changed = [name for name in ("shuffle", "seed") if saved.get(name) != present[name]]
    found += [f"data.{name}={present[name]}, was {saved.get(name)}" for name in changed[:1]]  # the one brings the other
    return found
