"""The Triton kernels of log-probs: their numbers by the interpreter, and that they compile for cards not here."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
import warnings

import pytest
import torch

from hrl.models.ops import log_prob
from hrl.models.ops.layout import has_triton
from hrl.models.ops.log_prob import LogitForm, token_statistics

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, not a GPU")

FLOATS = "*fp32"
FOLD = {
    "logits": FLOATS,
    "stride": "i32",
    "columns": "i32",
    "labels": "*i64",
    "first": "i32",
    "temperature": "fp32",
    "tops": FLOATS,
    "masses": FLOATS,
    "first_moments": FLOATS,
    "squared_masses": FLOATS,
    "label_logits": FLOATS,
}
GRAD = {
    "logits": FLOATS,
    "stride": "i32",
    "out": "*bf16",
    "out_stride": "i32",
    "columns": "i32",
    "labels": "*i64",
    "first": "i32",
    "temperature": "fp32",
    "factor": "fp32",
    "softcap": "fp32",
    "normalisers": FLOATS,
    "entropies": FLOATS,
    "grads_log_prob": FLOATS,
    "grads_entropy": FLOATS,
}


@needs_triton
def test_log_probs_and_gradients_are_those_of_the_formulas():
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    program = [sys.executable, "-m", "tests.models.ops.interpreted_kernels"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([".", *sys.path])}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    folds, grads = map(int, done.stdout.split()[-2:])
    assert folds > 100 and grads > 100


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernels_compile(capability, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from hrl.models.ops import log_prob_kernels as kernels

        def compiled(kernel, arguments, **constants):
            constants["BLOCK"] = kernels._BLOCK
            source = ASTSource(kernel, arguments | dict.fromkeys(constants, "constexpr"), constants)
            target = GPUTarget("cuda", capability, 32)
            return triton.compile(source, target=target, options={"num_warps": kernels._WARPS}).asm["cubin"]

        assert compiled(kernels._fold, FOLD, WITH_MOMENT=True, WITH_SQUARES=True)
        for out in ("*bf16", "*fp16", FLOATS):
            assert compiled(kernels._grad, GRAD | {"out": out}, WITH_CAP=True, WITH_LOG_PROB=True, WITH_ENTROPY=True)


def test_operators_stay_where_no_kernel_fits():
    assert not log_prob._has_kernels(torch.zeros(1, 1))  # on a CPU
    assert not log_prob._has_kernels(torch.zeros(1, 1, device="meta"))


@pytest.mark.parametrize("lacking", ["", "Triton is not installed", "C compiler", "Python.h"])
def test_without_what_triton_needs_operators_run_and_it_is_said_why(lacking, monkeypatch, caplog, tmp_path):
    headers = tmp_path if lacking == "Python.h" else tmp_path / "include"
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None if "installed" in lacking else "there")
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}" if lacking != "C compiler" else None)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(headers)})
    monkeypatch.delenv("CC", raising=False)
    assert has_triton.__wrapped__() is (not lacking)
    assert lacking in caplog.text and bool(caplog.text) == bool(lacking)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("temperature", "form", "with_bias", "dtype"),
    itertools.chain(
        itertools.product((1.0, 0.6), (LogitForm(), LogitForm(0.5, 20.0)), (False, True), (torch.bfloat16,)),
        [(1.0, LogitForm(), False, torch.float32)],
    ),
)
def test_on_a_gpu_kernels_and_operators_agree(temperature, form, with_bias, dtype, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    tokens, width, vocabulary = 5000, 96, 33_001  # two tiles of tokens, nothing a multiple of a block

    def leaf(*shape: int) -> torch.Tensor:
        return (0.3 * torch.randn(shape, generator=generator)).to(dtype).cuda().requires_grad_()

    hidden, weight, bias = leaf(tokens, width), leaf(vocabulary, width), leaf(vocabulary) if with_bias else None
    labels = torch.randint(vocabulary, (tokens,), generator=generator).cuda()
    leaves = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    scale = torch.linspace(-1.0, 2.0, tokens, device="cuda")

    def run(chunk: int) -> tuple[list[torch.Tensor], int]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        statistics = token_statistics(
            hidden,
            weight,
            labels,
            temperature,
            chunk=chunk,
            with_entropy=True,
            with_sum_pi_squared=True,
            bias=bias,
            form=form,
        )
        grads = torch.autograd.grad((scale * statistics.log_prob + 0.5 * statistics.entropy).sum(), leaves)
        return [part.detach() for part in statistics] + list(grads), torch.cuda.max_memory_allocated() - held

    by_kernels, peak = run(1 << 25)
    monkeypatch.setattr(log_prob, "has_triton", lambda: False)
    by_operators, peak_of_operators = run(1 << 25)
    for mine, theirs in zip(by_kernels[:3], by_operators[:3], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    bound = 1e-2 if dtype == torch.bfloat16 else 1e-4
    for mine, theirs in zip(by_kernels[3:], by_operators[3:], strict=True):
        assert (mine.double() - theirs.double()).norm() <= bound * theirs.double().norm()
    assert peak <= peak_of_operators
