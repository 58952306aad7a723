"""KL divergences between two models' distributions over the whole vocabulary, token by token.

Neither model's logits, `(T, V)`, are ever whole: both are made tile by tile from hidden states and heads, as in
`hrl.models.ops.log_prob`, folded into running sums, and made again in the backward pass.

With `q` the distribution that the mean is over and `p` the other one, both softmaxes of logits `z`, the divergence is

    KL(q || p) = sum_v q(v) (z_q(v) - z_p(v)) - log Z_q + log Z_p

so one pass suffices. The teacher has no gradient. That of the student's logits is `s (log s - log t - KL(s || t))` of
the reverse divergence, whose mean is over the student `s`, and `s - t` of the forward one, over the teacher `t`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hrl.models.ops.layout import accumulation_dtype
from hrl.models.ops.log_prob import PLAIN, LogitForm, logits_of_tile, part_of, tiles_of


@dataclass(frozen=True)
class TeacherHead:
    """What makes a teacher's logits of its hidden states, without gradient.

    Attributes:
        weight: `(V', H')`; tokens are numbered as the student's, and heads may differ in rows that fill them up.
        bias: `(V',)` or None.
        form: What happens to the products.
    """

    weight: Tensor
    bias: Tensor | None = None
    form: LogitForm = PLAIN

    def to(self, device: torch.device) -> TeacherHead:
        """Return it on a device."""
        bias = None if self.bias is None else self.bias.to(device)
        return TeacherHead(self.weight.to(device), bias, self.form)


def divergence_from_teacher(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher: TeacherHead,
    temperature: float,
    *,
    chunk: int,
    is_reverse: bool,
    bias: Tensor | None = None,
    form: LogitForm = PLAIN,
) -> Tensor:
    """Return the divergence of each token, `(T,)`, over the tokens that both heads have.

    Args:
        hidden: `(T, H)` the student's last hidden states.
        weight: `(V, H)` of its head.
        teacher_hidden: `(T, H')` the teacher's at the same tokens.
        teacher: Its head.
        temperature: Of both distributions, positive.
        chunk: Logits held at once, of both models together.
        is_reverse: `KL(student || teacher)`, else `KL(teacher || student)`.
        bias: `(V,)` of the student's head, with gradient.
        form: What happens to the student's products.

    Returns:
        Float32 (float64 for float64 inputs), with gradient for `hidden`, `weight` and `bias`.

    Raises:
        ValueError: The two have states of another number of tokens.
    """
    if len(hidden) != len(teacher_hidden):
        raise ValueError(f"the student has {len(hidden)} tokens, and the teacher {len(teacher_hidden)}")
    shared = min(len(weight), len(teacher.weight))
    found: Tensor = _Divergence.apply(
        hidden,
        weight[:shared],
        None if bias is None else bias[:shared],
        teacher_hidden,
        teacher.weight[:shared],
        None if teacher.bias is None else teacher.bias[:shared],
        (form, teacher.form),
        float(temperature),
        max(int(chunk) // 2, 1),
        is_reverse,
    )
    return found


class _Sums:
    """Running sums of one model's exponentials, `(t,)` each."""

    def __init__(self, like: Tensor) -> None:
        self.top = torch.full_like(like, -torch.inf)
        self.mass = torch.zeros_like(like)  # sum of exp(z - top)
        self.moment = torch.zeros_like(like)  # sum of exp(z - top) * (z - the other's z)

    def fold(self, logits: Tensor, others: Tensor | None) -> None:
        """Add a tile `(t, v)`; with the other model's, also to the moment."""
        top = torch.maximum(self.top, logits.amax(1))
        shrink, exponentials = torch.exp(self.top - top), (logits - top[:, None]).exp_()
        self.mass.mul_(shrink).add_(exponentials.sum(1))
        if others is not None:
            self.moment.mul_(shrink).add_(torch.linalg.vecdot(exponentials, logits - others))
        self.top = top

    @property
    def normaliser(self) -> Tensor:
        return self.top + self.mass.log()


class _Divergence(torch.autograd.Function):
    """One pass over the tiles of both models, which the backward makes again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        forms: tuple[LogitForm, LogitForm],
        temperature: float,
        chunk: int,
        is_reverse: bool,
    ) -> Tensor:
        dtype = accumulation_dtype(hidden.dtype)
        found = hidden.new_empty(len(hidden), dtype=dtype)
        normalisers = found.new_empty(2, len(hidden))
        models = ((hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias))
        row_tiles, vocab_tiles = tiles_of(len(hidden), len(weight), chunk)
        for rows in row_tiles:
            sums = _Sums(found[rows]), _Sums(found[rows])
            for columns in vocab_tiles:
                student, teacher = _tile_of_both(models, forms, temperature, rows, columns, dtype)
                sums[0].fold(student, teacher if is_reverse else None)
                sums[1].fold(teacher, None if is_reverse else student)
                del student, teacher  # before the next tile's are made
            mine, other = sums if is_reverse else sums[::-1]
            found[rows] = mine.moment / mine.mass - mine.normaliser + other.normaliser
            for place, of_model in enumerate(sums):
                normalisers[place, rows] = of_model.normaliser
        ctx.save_for_backward(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, normalisers, found)
        ctx.settings = forms, temperature, chunk, is_reverse
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *parts, normalisers, found = ctx.saved_tensors
        hidden, weight, bias = parts[:3]
        models = (tuple(parts[:3]), tuple(parts[3:]))
        forms, temperature, chunk, is_reverse = ctx.settings
        (grad,) = grads
        form = forms[0]
        row_tiles, vocab_tiles = tiles_of(len(hidden), len(weight), chunk)
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros(hidden.shape, dtype=found.dtype, device=hidden.device) if want_hidden else None
        grad_weight = torch.empty_like(weight) if want_weight else None
        grad_bias = torch.zeros(len(weight), dtype=found.dtype, device=weight.device) if want_bias else None
        for columns in vocab_tiles:
            grad_columns = torch.zeros(weight[columns].shape, dtype=found.dtype, device=weight.device)
            for rows in row_tiles:
                student, teacher = _tile_of_both(models, forms, temperature, rows, columns, found.dtype)
                slope = None if form.softcap is None else 1.0 - (student * temperature / form.softcap).square_()
                student.sub_(normalisers[0, rows, None])
                teacher.sub_(normalisers[1, rows, None])
                if is_reverse:
                    of_logits = student.exp().mul_(student.sub_(teacher).sub_(found[rows, None]))
                else:
                    of_logits = student.exp_().sub_(teacher.exp_())
                of_logits.mul_(grad[rows, None] * (form.scale / temperature))
                if slope is not None:
                    of_logits.mul_(slope)
                if grad_bias is not None:
                    grad_bias[columns] += of_logits.sum(0)
                of_logits = of_logits.to(hidden.dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] += torch.mm(of_logits, weight[columns])
                if grad_weight is not None:
                    grad_columns += torch.mm(of_logits.t(), hidden[rows])
                del student, teacher, of_logits  # before the next tile's are made
            if grad_weight is not None:
                grad_weight[columns] = grad_columns.to(weight.dtype)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            grad_weight,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 7,
        )


def _tile_of_both(
    models: tuple[Any, Any],
    forms: tuple[LogitForm, LogitForm],
    temperature: float,
    rows: slice,
    columns: slice,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return logits of student and teacher by the temperature, `(t, v)` each, in the accumulation dtype."""
    student, teacher = (
        logits_of_tile(hidden[rows], weight[columns], part_of(bias, columns), form, dtype).div_(temperature)
        for (hidden, weight, bias), form in zip(models, forms, strict=True)
    )
    return student, teacher
