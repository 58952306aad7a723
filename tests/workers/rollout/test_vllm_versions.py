"""The adapter goes by what a version of vLLM has, and refuses versions that it was not held against."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from hrl.workers.rollout.base import RolloutError
from hrl.workers.rollout.vllm_precision import _get_logits
from hrl.workers.rollout.vllm_versions import END, FIRST, has_head_dtype, load_numel, request_errors, require_supported


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    made = ModuleType(name)
    made.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, made)


@pytest.mark.parametrize("version", ["0.24.0", "0.27.1", "0.32.0", "0.32.0+cu130", "0.32.1.dev3+g12ab", "0.24.0rc2"])
def test_versions_of_the_span_are_taken(version: str) -> None:
    require_supported(version)


@pytest.mark.parametrize("version", ["0.23.9", "0.33.0", "1.0.0", "0.8.5.post1", "dev", ""])
def test_other_versions_are_refused_with_the_span(version: str) -> None:
    with pytest.raises(RolloutError, match=r"from 0\.24 up to, not including, 0\.33.*pip install 'vllm>=0\.24,<0\.33'"):
        require_supported(version)


def test_the_span_is_that_of_pyproject() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    first, end = (".".join(map(str, bound)) for bound in (FIRST, END))
    assert project["optional-dependencies"]["gpu"] == [f"vllm>={first},<{end}"]


def test_errors_of_old_and_new_versions_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    ancestor, generate, dead = (type(name, (Exception,), {}) for name in ("VLLMError", "Generate", "Dead"))
    module(monkeypatch, "vllm.v1.engine.exceptions", EngineGenerateError=generate, EngineDeadError=dead)
    module(monkeypatch, "vllm.exceptions", VLLMError=ancestor)
    assert request_errors() == (ancestor, RuntimeError, ValueError)
    module(monkeypatch, "vllm.exceptions")
    assert request_errors() == (generate, dead, RuntimeError, ValueError)


def test_padding_counts_unless_the_version_knows_better(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = "vllm.model_executor.model_loader.reload.utils"
    module(monkeypatch, utils)
    assert load_numel(torch.zeros(3, 4)) == 12
    module(monkeypatch, utils, get_tensor_load_numel=lambda tensor: tensor.numel() - 4)
    assert load_numel(torch.zeros(3, 4)) == 8


class OldHead(nn.Module):
    """A logits processor of 0.24: no `_apply_head`; two shards of the vocabulary, padded from 5 to 6."""

    org_vocab_size = 5

    def _get_logits(self, hidden, lm_head, bias):
        return torch.full((len(hidden), 5), -1.0)

    def _gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.cat([logits, logits], 1)


def test_a_version_without_head_dtype_computes_logits_in_float32() -> None:
    processor = OldHead()
    assert not has_head_dtype(processor)
    lm_head = nn.Linear(2, 3, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        lm_head.weight.copy_(torch.tensor([[1.0, 2**-8], [2.0, 0.0], [0.0, 1.0]]))
    hidden = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    logits = _get_logits(processor, processor._get_logits, hidden, lm_head, None)
    # 1 + 2**-8 is not a bfloat16 number; the shards stand side by side and the padding is cut off.
    assert logits.dtype == torch.float32
    assert logits.tolist() == [[1.0 + 2**-8, 2.0, 1.0, 1.0 + 2**-8, 2.0]]
    # A float32 model, or a quantised head, is left to vLLM.
    for other in (nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False, dtype=torch.float16)):
        assert _get_logits(processor, processor._get_logits, hidden, other, None).tolist() == [[-1.0] * 5]
