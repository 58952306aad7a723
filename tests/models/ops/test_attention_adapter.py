"""The adapter to transformers: what a model hands to its attention is computed, or refused by name."""

from __future__ import annotations

import pytest
import torch
from transformers import masking_utils

from hrl.models.ops.attention import (
    ATTENTION_NAME,
    MaskMeaningError,
    PackedMask,
    packed_attention,
    packed_mask,
    transformers_attention,
)
from hrl.models.ops.layout import Reach
from tests.models.ops.dense import inputs, make_layout

MODULE = torch.nn.Identity()


def rows(*shapes):
    return [torch.randn(1, *shape) for shape in shapes]


@pytest.mark.parametrize(
    "given, name",
    [
        ({"dropout": 0.1}, "attention_dropout"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"indices": torch.zeros(1)}, "indices"),
        ({"something_new": 3}, "something_new"),
        ({"output_attentions": True}, "output_attentions"),
        ({"is_causal": False}, "not causal"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, r"attention mask of its own, of shape \(1, 1, 3, 3\)"),
        ({"attention_mask": torch.ones(1, 3, dtype=torch.bool)}, "attention mask of its own"),
    ],
)
def test_what_packed_attention_does_not_have_is_refused_by_name(given, name):
    (x,) = rows((2, 3, 4))
    given = {"attention_mask": None, "packing": make_layout([(3, [])])} | given
    with pytest.raises(ValueError, match=f"Identity wants .*{name}"):
        transformers_attention(MODULE, x, x, x, **given)


def test_a_module_that_says_it_is_not_causal_is_refused():
    module, (x,) = torch.nn.Identity(), rows((2, 3, 4))
    module.is_causal = False
    with pytest.raises(ValueError, match="not causal"):
        transformers_attention(module, x, x, x, None, packing=make_layout([(3, [])]))


def test_what_has_no_meaning_or_is_not_set_is_taken():
    (x,) = rows((2, 3, 4))
    segments = make_layout([(3, [])])
    plain, _ = transformers_attention(MODULE, x, x, x, None, packing=segments)
    got, weights = transformers_attention(
        MODULE,
        x,
        x,
        x,
        segments.full_mask(x.device),
        packing=segments,
        is_causal=True,
        position_bias=None,
        position_ids=torch.arange(3),
        output_attentions=False,
        use_cache=False,
    )
    assert torch.equal(got, plain) and weights is None


def test_a_forward_without_packing_is_refused():
    (x,) = rows((2, 3, 4))
    with pytest.raises(ValueError, match="without its packing"):
        transformers_attention(MODULE, x, x, x, None)


@pytest.mark.parametrize(
    "query, key, value, message",
    [
        ((2, 2, 4), (2, 2, 4), (2, 2, 4), r"\(1, heads, 3, D\)"),
        ((2, 3, 4), (2, 5, 4), (2, 5, 4), "one of each per token"),
        ((2, 3, 4), (2, 3, 4), (1, 3, 4), "one of each per token"),
        ((3, 3, 4), (2, 3, 4), (2, 3, 4), "3 query heads for 2 key heads"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(query, key, value, message):
    with pytest.raises(ValueError, match=message):
        transformers_attention(MODULE, *rows(query, key, value), None, packing=make_layout([(3, [])]))


def test_every_option_arrives():
    query, key, value = (t.detach() for t in inputs(9, value_width=5))
    sinks, segments = torch.randn(4, dtype=torch.float64), make_layout([(3, [2, 4])])
    mask = PackedMask(Reach(window=3, chunk=4), "a model")
    got, _ = transformers_attention(
        MODULE,
        *(t.transpose(0, 1)[None] for t in (query, key, value)),
        mask,
        scaling=0.3,
        packing=segments,
        softcap=1.5,
        s_aux=sinks,
    )
    options = {"window": 3, "chunk": 4, "softcap": 1.5, "sinks": sinks}
    assert torch.equal(got[0], packed_attention(query, key, value, segments, scale=0.3, **options))
    for name in options:
        without = packed_attention(query, key, value, segments, scale=0.3, **(options | {name: None}))
        assert not torch.allclose(got[0], without), name


def test_the_mask_decides_where_there_is_one_and_the_keyword_where_there_is_none():
    (x,) = rows((2, 5, 4))
    segments = make_layout([(5, [])])

    def run(mask, window):
        return transformers_attention(MODULE, x, x, x, mask, packing=segments, sliding_window=window)[0]

    full, near = PackedMask(Reach(), "a model"), PackedMask(Reach(window=2), "a model")
    assert torch.equal(run(None, 2), run(near, None))
    assert torch.equal(run(full, 2), run(None, None))
    assert not torch.allclose(run(near, None), run(None, None))


# ---------------------------------------------------------------------------------------------- masks


class Config:
    """As much of a configuration as transformers' mask functions read."""

    model_type = "tiny"
    _attn_implementation = ATTENTION_NAME
    sliding_window = 7
    attention_chunk_size = 5
    is_causal = True


def ask(create, **options):
    arguments = {
        "config": Config(),
        "inputs_embeds": torch.zeros(1, 4, 8),
        "attention_mask": torch.ones(1, 4, dtype=torch.bool),
        "past_key_values": None,
        "position_ids": torch.tensor([[0, 1, 0, 1]]),
    }
    return create(**(arguments | options))


def test_transformers_masks_arrive_as_what_they_mean():
    assert ask(masking_utils.create_causal_mask).reach == Reach()
    assert ask(masking_utils.create_sliding_window_causal_mask).reach == Reach(window=7)
    assert ask(masking_utils.create_chunked_causal_mask).reach == Reach(chunk=5)


@pytest.mark.parametrize(
    "create, options",
    [
        (masking_utils.create_causal_mask, {"or_mask_function": lambda *index: index[2] >= 0}),
        (masking_utils.create_causal_mask, {"and_mask_function": lambda *index: index[2] >= 0}),
        (masking_utils.create_causal_mask, {"block_sequence_ids": torch.zeros(1, 4, dtype=torch.long)}),
        (masking_utils.create_causal_mask, {"attention_mask": None}),  # cut at every position 0
    ],
)
def test_masks_that_mean_more_are_refused(create, options):
    with pytest.raises(MaskMeaningError, match="tiny asks for the attention mask"):
        ask(create, **options)


def test_a_mask_that_is_not_causal_is_refused():
    with pytest.raises(MaskMeaningError, match="bidirectional"):
        packed_mask(mask_function=masking_utils.bidirectional_mask_function, config=Config())
    sliding = masking_utils.sliding_window_overlay(3)
    with pytest.raises(MaskMeaningError, match="not causal"):
        packed_mask(mask_function=masking_utils.and_masks(sliding), config=Config())


def test_a_model_that_computes_with_its_mask_is_told_so():
    mask = PackedMask(Reach(window=3), "tiny")
    assert mask[:, :, :, :4] is mask
    computations = [
        lambda: mask.dtype,
        lambda: mask[:, :, 1:],
        lambda: torch.zeros(3) + mask,
        lambda: torch.where(mask, 1.0, 0.0),
        lambda: torch.zeros(3).masked_fill(mask, 0.0),
    ]
    for compute in computations:
        with pytest.raises(MaskMeaningError, match="tiny computes with its attention mask"):
            compute()
