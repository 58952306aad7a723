"""Columns are packed once, and anew when their tensor was written to in whatever way."""

import gc

import numpy as np
import pytest
import torch

from hrl.single_controller import packed_columns
from hrl.single_controller.packed_columns import PackedColumns, fingerprint


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tensors that were packed."""
    seen: list[torch.Tensor] = []
    pack = packed_columns.pack_column
    monkeypatch.setattr(packed_columns, "pack_column", lambda tensor: (seen.append(tensor), pack(tensor))[1])
    return seen


def columns_of(rows: int, width: int) -> torch.Tensor:
    return torch.randint(0, 50_000, (rows, width))


def test_a_column_is_packed_once_while_its_tensor_stays_as_it_is(packed: list[torch.Tensor]) -> None:
    columns, tensor, other = PackedColumns(), columns_of(64, 100), columns_of(64, 100)
    first = columns.pack(tensor)
    assert columns.pack(tensor) is first
    assert columns.pack(other) is not first
    assert len(packed) == 2


@pytest.mark.parametrize("shape", [(300, 700), (3, 5), (4,), (2, 3, 5)])
@pytest.mark.parametrize(
    "write",
    [
        lambda tensor: tensor.reshape(-1)[-1].add_(1),
        lambda tensor: tensor.numpy().reshape(-1).__setitem__(0, -1),
        lambda tensor: tensor.detach().fill_(7),
        lambda tensor: tensor.numpy().__setitem__(slice(None), tensor.numpy()[::-1].copy()),
    ],
    ids=["torch", "numpy", "through a detached view", "rows in another order"],
)
def test_what_was_written_to_is_packed_anew(shape: tuple[int, ...], write, packed: list[torch.Tensor]) -> None:
    columns, tensor = PackedColumns(), torch.arange(int(np.prod(shape))).reshape(shape)
    columns.pack(tensor)
    write(tensor)
    assert torch.equal(columns.pack(tensor).take(np.arange(shape[0])), tensor)
    assert len(packed) == 2


def masks(rows: int, width: int) -> torch.Tensor:
    """Rows of 0 and 1 with the same sum."""
    return torch.rand(rows, width, generator=torch.Generator().manual_seed(0)).argsort(1) // (width // 2)


@pytest.mark.parametrize(
    ("tensor", "write"),
    [
        (torch.randn(8, 1024, dtype=torch.float64), torch.Tensor.neg_),
        (torch.randn(8, 1024), torch.Tensor.neg_),
        (torch.randn(8, 1024).bfloat16(), torch.Tensor.neg_),
        (masks(6, 1024), lambda mask: mask.copy_(mask.flip(0))),
        (masks(6, 1024).double(), lambda mask: mask.mul_(-1)),
        (torch.zeros(6, 1024, dtype=torch.bool), lambda mask: mask[2:4, 7:9].logical_not_()),
        (torch.eye(1024, dtype=torch.int64), lambda square: square[:2, :2].copy_(square[:2, :2].flip(0))),
    ],
)
def test_writes_that_leave_sums_as_they_are_are_noticed(tensor: torch.Tensor, write) -> None:
    columns = PackedColumns()
    columns.pack(tensor)
    write(tensor)
    assert torch.equal(columns.pack(tensor).take(np.arange(len(tensor))), tensor)


def test_elements_that_change_places_are_noticed() -> None:
    tensor = torch.arange(64 * 2048).reshape(64, 2048)
    before = fingerprint(tensor)
    draw = np.random.default_rng(0)
    anywhere = [draw.choice(tensor.numel(), 2, replace=False) for _ in range(100)]
    for one, other in [(5, 6), (5, 5 + 1024), (5, 5 + 2048), *anywhere]:  # in one block, or at the same place of two
        values = tensor.numpy().reshape(-1)
        values[[one, other]] = values[[other, one]]
        assert fingerprint(tensor) != before
        values[[one, other]] = values[[other, one]]
        assert fingerprint(tensor) == before


def test_a_column_goes_with_its_tensor() -> None:
    columns, tensor = PackedColumns(), columns_of(8, 8)
    columns.pack(tensor)
    columns.pack(columns_of(8, 8))
    gc.collect()
    assert len(columns) == 1
    del tensor
    gc.collect()
    assert len(columns) == 0


@pytest.mark.parametrize(
    "view",
    [columns_of(8, 8)[:, ::2], torch.nn.Parameter(torch.randn(8, 3)), torch.randn(8, 3, dtype=torch.complex64).conj()],
    ids=["with gaps", "parameter", "conjugated"],
)
def test_what_has_no_plain_memory_of_its_own_is_packed_and_not_kept(view: torch.Tensor) -> None:
    columns = PackedColumns()
    assert torch.equal(columns.pack(view).take(np.arange(8)), view)
    assert len(columns) == 0


def test_an_empty_column_is_one_too() -> None:
    assert PackedColumns().pack(torch.zeros(0, 6)).take(np.arange(0)).shape == (0, 6)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.int8])
def test_any_dtype_has_a_fingerprint(dtype: torch.dtype) -> None:
    tensor = torch.zeros(7, 9, dtype=dtype)
    before = fingerprint(tensor)
    tensor[3, 4] = 1
    assert fingerprint(tensor) != before
