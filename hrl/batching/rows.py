"""What planning knows of a batch: lengths and groups, and what any set of rows costs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from hrl.protocol import DataProto

# Matrix products cost in proportion to L, attention to L²; they are equal at a length of 6 hidden sizes: 24,576 tokens
# for a model of 7B parameters (hidden size 4096). Smaller models meet earlier, at lengths where L² is small anyway.
EQUAL_COST_TOKENS = 24576


def lengths_of(batch: DataProto) -> tuple[Tensor, Tensor]:
    """Return the tokens of prompt and response, int64 (B,) each: from the mask, never from token ids.

    Args:
        batch: `attention_mask (B, P+R)` and `responses (B, R)`.
    """
    mask = batch.batch["attention_mask"]
    prompt_width = mask.shape[-1] - batch.batch["responses"].shape[-1]
    return mask[:, :prompt_width].sum(-1), mask[:, prompt_width:].sum(-1)


@dataclass(frozen=True)
class Rows:
    """Lengths of a batch's rows, sorted so that the rows of a group follow each other.

    All methods take positions in this order; `index` leads back to the batch.

    Attributes:
        index: (B,) row number in the batch.
        prompt: (B,) tokens of the prompt.
        response: (B,) tokens of the response.
        group: (B,) number of the group, by first appearance in the batch.
        share_prefix: The rows of a group that run together compute their prompt once.
    """

    index: np.ndarray
    prompt: np.ndarray
    response: np.ndarray
    group: np.ndarray
    share_prefix: bool

    @classmethod
    def of(
        cls,
        prompt_lens: Sequence[int] | np.ndarray,
        response_lens: Sequence[int] | np.ndarray,
        group_ids: Sequence[Hashable] | np.ndarray | None,
        share_prefix: bool,
    ) -> Rows:
        """Check the lengths and sort the rows by group.

        Raises:
            ValueError: The lengths are not (B,) counts, or rows of a group that shares its prompt have different ones.
        """
        prompt = counts(prompt_lens, "prompt_lens")
        response = counts(response_lens, "response_lens", num_rows=len(prompt))
        group = _group_numbers(group_ids, len(prompt))
        index = np.argsort(group, kind="stable")
        prompt, response, group = prompt[index], response[index], group[index]
        if share_prefix:
            first = np.searchsorted(group, group)
            odd = np.flatnonzero(prompt != prompt[first])
            if len(odd):
                row, other = odd[0], first[odd[0]]
                raise ValueError(
                    f"rows {index[row]} and {index[other]} are of one group and can't share a prompt: "
                    f"one has {prompt[row]} tokens, the other {prompt[other]}"
                )
        return cls(index, prompt, response, group, share_prefix)

    def __len__(self) -> int:
        return len(self.index)

    def tokens(self, units: Sequence[np.ndarray]) -> np.ndarray:
        """Return the tokens that each unit (rows of one group) runs."""
        return self._sum(units, self.prompt, self.response)

    def cost(self, units: Sequence[np.ndarray]) -> np.ndarray:
        """Return what each unit (rows of one group) costs, in tokens of a short row: L + L² / 24576.

        A shared prompt is paid once; each response attends to it, hence (P + R)² - P² for the response's part.
        """
        return self._sum(units, *self._costs)

    @cached_property
    def _costs(self) -> tuple[np.ndarray, np.ndarray]:
        prompt, total = self.prompt.astype(np.float64), (self.prompt + self.response).astype(np.float64)
        of_prompt = prompt + prompt**2 / EQUAL_COST_TOKENS
        return of_prompt, total + total**2 / EQUAL_COST_TOKENS - of_prompt

    def _sum(self, units: Sequence[np.ndarray], of_prompt: np.ndarray, of_response: np.ndarray) -> np.ndarray:
        if not units:
            return np.zeros(0, dtype=of_prompt.dtype)
        rows = np.concatenate(units)
        starts = np.cumsum([0, *(len(unit) for unit in units[:-1])])
        prompts = of_prompt[rows[starts]] if self.share_prefix else np.add.reduceat(of_prompt[rows], starts)
        return prompts + np.add.reduceat(of_response[rows], starts)

    def runs(self, positions: np.ndarray) -> list[np.ndarray]:
        """Cut ascending positions where the group changes."""
        return np.split(positions, np.flatnonzero(np.diff(self.group[positions])) + 1) if len(positions) else []

    def num_tokens(self, positions: np.ndarray) -> int:
        """Return the tokens that rows of any groups run in one micro-batch."""
        return int(self.tokens(self.runs(np.sort(positions))).sum())


def counts(values: Any, name: str, num_rows: int | None = None) -> np.ndarray:
    """Return `values` as (B,) int64.

    Raises:
        ValueError: They are not one whole, non-negative number for each row.
    """
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or (num_rows is not None and len(array) != num_rows):
        raise ValueError(f"{name} has shape {array.shape}, it needs one number for each of the {num_rows or ''} rows")
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} counts tokens and must be integers, got {array.dtype}")
    if (array < 0).any():
        raise ValueError(f"{name} of row {int(np.argmax(array < 0))} is negative: {array[array < 0][0]}")
    return array.astype(np.int64)


def _group_numbers(group_ids: Sequence[Hashable] | np.ndarray | None, num_rows: int) -> np.ndarray:
    """Number the groups by first appearance; without ids every row is a group of its own."""
    if group_ids is None:
        return np.arange(num_rows)
    if len(group_ids) != num_rows:
        raise ValueError(f"group_ids has {len(group_ids)} entries, it needs one for each of {num_rows} rows")
    numbers: dict[Hashable, int] = {}
    ids = group_ids.tolist() if isinstance(group_ids, np.ndarray) else group_ids
    return np.fromiter((numbers.setdefault(group, len(numbers)) for group in ids), dtype=np.int64, count=num_rows)
