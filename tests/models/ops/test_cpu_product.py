"""Products of bfloat16 matrices with float32 results, against float64; other rows change no bit."""

import os
import threading
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


def test_no_gradient_is_lost():
    hidden, weight = made(2, 4), made(3, 4).requires_grad_()
    assert not can_multiply(hidden, weight) and not can_multiply(made(2, 4).requires_grad_(), weight.detach())
    with torch.no_grad():
        assert can_multiply(hidden, weight) == (wide_product() is not None)


@needs_kernel
def test_a_gradient_that_is_asked_for_all_the_same_is_refused():
    product = PackedWeight.of(made(3, 4)).product(made(2, 4).requires_grad_())
    with pytest.raises(RuntimeError, match="wide_mm has no gradient"):
        product.sum().backward()


def test_as_many_threads_multiply_as_torch_has_now(monkeypatch):
    packed, before = PackedWeight.of(made(5 * BLOCK, 2)), torch.get_num_threads()
    try:
        for threads in (2, 5):
            together = threading.Barrier(threads, timeout=30)  # passes once all are in a product at the same time
            calls = iter(range(threads))

            def multiply(*_, calls=calls, together=together):
                if next(calls, None) is not None:
                    together.wait()

            monkeypatch.setattr(cpu_product, "wide_product", lambda multiply=multiply: multiply)
            torch.set_num_threads(threads)
            packed.product(made(1, 2))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("_is_avx512_bf16_supported", False, "no bfloat16 instructions of AVX-512"),
        ("_is_amx_tile_supported", True, "not tried on CPUs with AMX"),
    ],
)
def test_why_the_kernel_is_not_called_is_said(name, value, reason, monkeypatch):
    for each, there in {"_is_avx512_bf16_supported": True, "_is_amx_tile_supported": False, name: value}.items():
        monkeypatch.setattr(torch.cpu, each, lambda there=there: there)
    assert reason in cpu_product.obstacle()


def test_a_torch_without_the_kernel_is_named(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(cpu_product, "_SYMBOL", "no_such_symbol")
    assert f"torch {torch.__version__} does not export it" in cpu_product.obstacle()


def test_a_limited_onednn_is_left_alone(monkeypatch):
    monkeypatch.setitem(os.environ, "ONEDNN_MAX_CPU_ISA", "AVX2")
    wide_product.cache_clear()
    try:
        assert cpu_product.wide_product() is None
        assert cpu_product.obstacle() == "ONEDNN_MAX_CPU_ISA limits oneDNN"
    finally:
        monkeypatch.undo()
        wide_product.cache_clear()
