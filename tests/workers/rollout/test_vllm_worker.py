"""What runs inside vLLM's processes, as far as no engine is needed: a head in float32, on every version of vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from hrl.workers.rollout import vllm_worker
from hrl.workers.rollout.drawing import seeded_number
from hrl.workers.rollout.vllm_worker import HEAD_ROWS, FloatHead, _get_logits, _has_head_dtype, _load_numel


@pytest.fixture(params=["the kernel, where there is one", "tiles of float32"])
def apply_head(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FloatHead:
    if request.param.startswith("tiles"):
        monkeypatch.setattr(vllm_worker, "can_multiply", lambda hidden, weight: False)
    return FloatHead()


def test_logits_are_the_exact_product_and_do_not_depend_on_the_other_rows(apply_head):
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(96, 700, bias=False, dtype=torch.bfloat16)
    hidden = torch.randn(3 * HEAD_ROWS + 5, 96, generator=generator).bfloat16()
    logits = apply_head(head, hidden, None)
    assert logits.shape == (len(hidden), 700)
    torch.testing.assert_close(logits.double(), hidden.double() @ head.weight.double().T, rtol=1e-5, atol=1e-5)
    for count in (1, 2, 7, HEAD_ROWS, HEAD_ROWS + 1):
        rows = torch.randperm(len(hidden), generator=generator)[:count]
        assert torch.equal(apply_head(head, hidden[rows], None), logits[rows])


def test_a_bias_is_added_in_float32(apply_head):
    head, bias = nn.Linear(8, 5, dtype=torch.bfloat16), torch.full((5,), 1 / 3).bfloat16()
    hidden = torch.zeros(2, 8).bfloat16()
    assert torch.equal(apply_head(head, hidden, bias), bias.float().expand(2, 5))


def test_new_weights_count_once_the_writer_has_said_so(apply_head):
    model = nn.Module()
    model.logits_processor = nn.Module()
    model.logits_processor.hrl_head = apply_head
    head, hidden = nn.Linear(8, 5, bias=False, dtype=torch.bfloat16), torch.ones(1, 8).bfloat16()
    apply_head(head, hidden, None)
    nn.init.ones_(head.weight)
    vllm_worker._forget_packed_heads(model)
    assert apply_head(head, hidden, None).tolist() == [[8.0] * 5]


def test_padding_counts_unless_the_version_knows_better(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = "vllm.model_executor.model_loader.reload.utils"
    monkeypatch.setitem(sys.modules, utils, ModuleType(utils))
    assert _load_numel(torch.zeros(3, 4)) == 12
    monkeypatch.setattr(sys.modules[utils], "get_tensor_load_numel", lambda tensor: tensor.numel() - 4, raising=False)
    assert _load_numel(torch.zeros(3, 4)) == 8


class OldHead(nn.Module):
    """A logits processor of 0.24: no `_apply_head`; two shards of the vocabulary, padded from 5 to 6."""

    org_vocab_size = 5
    hrl_head = FloatHead()

    def _get_logits(self, hidden, lm_head, bias):
        return torch.full((len(hidden), 5), -1.0)

    def _gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.cat([logits, logits], 1)


def test_a_version_without_head_dtype_computes_logits_in_float32() -> None:
    processor = OldHead()
    assert not _has_head_dtype(processor)
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


class OfGpu:
    """A generator that says that it is a GPU's."""

    device = torch.device("cuda")
    offset = 0

    def initial_seed(self) -> int:
        return 7

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        assert offset >= 0 and offset % 4 == 0
        self.offset = offset


def drawing_sampler() -> Any:
    class Sampler:
        logprobs_mode = "processed_logprobs"
        forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]

    sampler = Sampler()
    vllm_worker._draw_by_one_number(sampler)
    return sampler


EXPECTED = [int(seeded_number(7, position) * 1000) for position in range(5)]


@pytest.mark.parametrize("generator", [torch.Generator().manual_seed(7), OfGpu()], ids=["cpu", "gpu"])
def test_the_tokens_of_a_seed_are_the_same_whatever_device_its_generator_is_on(generator):
    sampler = drawing_sampler()
    steps = [sampler.forward(torch.zeros(3, 1000), {1: generator}, None, None)[0] for _ in range(5)]
    assert [step[1].item() for step in steps] == EXPECTED and len(set(EXPECTED)) > 1


@pytest.mark.parametrize("pieces", [1, 3])
def test_the_tokens_of_a_seed_do_not_depend_on_how_its_prompt_was_cut(pieces):
    sampler, generator, answer = drawing_sampler(), OfGpu(), []
    for step in range(pieces - 1 + 5):
        token = sampler.forward(torch.zeros(1, 1000), {0: generator}, None, None)[0].item()
        if step < pieces - 1:
            generator.set_offset(generator.get_offset() - 4)  # as vLLM's model runner where it drops a token
        else:
            answer.append(token)
    assert answer == EXPECTED
