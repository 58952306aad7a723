"""Products of bfloat16 matrices with float32 results, against float64; other rows change no bit."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hrl.models.ops import cpu_product
from hrl.models.ops.cpu_product import BLOCK, MAX_ROWS, PackedWeight, can_multiply, wide_product

needs_kernel = pytest.mark.skipif(wide_product() is None, reason="needs AVX512-BF16 and torch's kernel")


def made(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@needs_kernel
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("rows", "width", "entries"), [(1, 2, 1), (5, 64, BLOCK), (33, 62, 3 * BLOCK + 7), (MAX_ROWS + 40, 576, 1000)]
)
def test_products_are_exact_to_float32(rows, width, entries, threads):
    hidden, weight = made(rows, width), made(entries, width, seed=1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = PackedWeight.of(weight).product(hidden)
    finally:
        torch.set_num_threads(before)
    assert found.dtype == torch.float32 and found.shape == (rows, entries)
    torch.testing.assert_close(found.double(), hidden.double() @ weight.double().T, rtol=1e-5, atol=1e-4)


@needs_kernel
def test_a_row_does_not_depend_on_the_others():
    hidden, packed = made(MAX_ROWS + 65, 128), PackedWeight.of(made(5 * BLOCK, 128, seed=1))
    whole = packed.product(hidden)
    for count in (1, 31, 32, 100, MAX_ROWS):
        assert torch.equal(packed.product(hidden[:count]), whole[:count])
        assert torch.equal(packed.product(hidden[-count:].contiguous()), whole[-count:])


@needs_kernel
def test_slices_and_threads_of_the_caller_are_taken():
    hidden, weight = made(40, 96)[::2, :], made(300, 192, seed=1)[:, ::2]
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(PackedWeight.of(weight).product, hidden).result()
    torch.testing.assert_close(found, hidden.float() @ weight.float().T, rtol=1e-5, atol=1e-4)


def test_other_kinds_of_matrices_are_refused():
    hidden, weight = made(2, 4), made(3, 4)
    assert not can_multiply(hidden.float(), weight) and not can_multiply(hidden, weight.float())
    assert not can_multiply(hidden[:, :3], weight[:, :3])
    assert not can_multiply(hidden.to("meta"), weight.to("meta"))
    assert can_multiply(hidden, weight) == (wide_product() is not None)


def test_a_limited_onednn_is_left_alone(monkeypatch):
    monkeypatch.setitem(os.environ, "ONEDNN_MAX_CPU_ISA", "AVX2")
    wide_product.cache_clear()
    try:
        assert cpu_product.wide_product() is None
    finally:
        monkeypatch.undo()
        wide_product.cache_clear()
