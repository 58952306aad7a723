"""Pictures in a packed row: log-probs and gradients of models that see are those of transformers' own forward."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from hrl.models.head import backbone_of
from hrl.models.loading import ModelSource, load_causal_lm
from hrl.models.packed_model import PackedCausalLM, TokenRows, pack_micro_batch
from hrl.models.pictures import PictureError, PictureProcessor, Sight, decoded, sighted_config
from hrl.pictures import Picture, digest_of
from tests.models.tiny_pictures import FAMILIES, SPECIAL, picture, png, save_vl

CPU = torch.device("cpu")
START, END, PAD = (SPECIAL.index(token) for token in ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>"))
FILES = [picture(1), picture(2, 100, 56), picture(3)]  # the first and the last are of one size
PACKINGS = ((True, False, (0, 1, 2, 3, 4)), (False, False, (4, 2, 0, 1, 3)), (True, True, (3, 1, 0, 2, 4)))


@pytest.fixture(scope="module", params=FAMILIES)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A model packed and plain, rows of five prompts, and what the plain forward gives for each row by itself."""
    folder = save_vl(tmp_path_factory.mktemp("model"), request.param)
    source = ModelSource(str(folder), {}, True, True, False, 256, shows_pictures=True)
    module = PackedCausalLM(load_causal_lm(source, torch.float32).model)
    sight = Sight(backbone_of(module.model), PictureProcessor(folder))
    rows = _rows(sight.processor)
    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    values = torch.stack([_alone(plain, sight.processor, rows, row) for row in range(len(rows.prompts))])
    weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(0)) * (values != 0)
    (values * weights).sum().backward()
    return SimpleNamespace(
        folder=folder, module=module, sight=sight, rows=rows, plain=plain, values=values, weights=weights
    )


def _rows(processor: PictureProcessor) -> TokenRows:
    """Two rows of one prompt, one of equal tokens and another picture, one of three pictures, one of none."""

    def prompt(shown: list[int], text: list[int]) -> tuple[np.ndarray, tuple[Picture, ...]]:
        ids, pictures = [20], []
        for number in shown:
            data = png(FILES[number])
            length = processor.num_tokens(*FILES[number].size)
            ids.append(START)
            pictures.append(Picture(data, digest_of(data), len(ids), length))
            ids += [PAD] * length + [END]
        return np.array(ids + text), tuple(pictures)

    prompts = [prompt(*each) for each in (([0], [30]), ([0], [30]), ([2], [30]), ([0, 1, 0], [40]), ([], [50, 51]))]
    lengths = np.array([6, 4, 6, 5, 3])
    trained = np.arange(6)[None] < lengths[:, None]
    responses = np.random.default_rng(0).integers(len(SPECIAL), 272, trained.shape)
    return TokenRows([ids for ids, _ in prompts], responses, lengths, trained, None, [shown for _, shown in prompts])


def _alone(model: Any, processor: PictureProcessor, rows: TokenRows, row: int) -> torch.Tensor:
    answer = rows.responses[row, : rows.response_lengths[row]]
    ids = torch.from_numpy(np.concatenate([rows.prompts[row], answer]))[None]
    pixels = [processor.pixels(each) for each in rows.pictures[row]]
    shown = {}
    if pixels:
        shown = {
            "pixel_values": torch.cat([each.patches for each in pixels]),
            "image_grid_thw": torch.tensor([each.grid for each in pixels]),
            "mm_token_type_ids": (ids == PAD).int(),
        }
    log_probs = model(input_ids=ids, **shown).logits[0].log_softmax(-1)
    found = log_probs[len(rows.prompts[row]) - 1 : -1].gather(1, torch.from_numpy(answer)[:, None])[:, 0]
    return torch.nn.functional.pad(found, (0, rows.responses.shape[1] - len(answer)))


@pytest.mark.parametrize(("share_prefix", "is_tree", "order"), PACKINGS)
def test_log_probs_and_gradients_are_those_of_the_model_s_own_forward(
    seen: SimpleNamespace, share_prefix: bool, is_tree: bool, order: tuple[int, ...]
) -> None:
    options = {"share_prefix": share_prefix, "is_tree": is_tree, "wanted": "next", "device": CPU, "sight": seen.sight}
    packed = pack_micro_batch(seen.rows, order, **options)
    assert len(packed.pictures.grids) == 3  # each once
    seen.module.zero_grad()
    found = packed.unpack(seen.module(packed, 1.0, False)[0])
    torch.testing.assert_close(found, seen.values[list(order)], atol=1e-5, rtol=0)
    (found * seen.weights[list(order)]).sum().backward()
    own = dict(seen.plain.named_parameters())
    for name, parameter in seen.module.named_parameters():
        wanted = own[name.removeprefix("model.")].grad
        assert float((parameter.grad - wanted).norm()) <= 1e-4 * float(wanted.norm()) + 1e-7, name


def test_prompts_of_equal_tokens_and_other_pictures_are_computed_apart(seen: SimpleNamespace) -> None:
    assert np.array_equal(seen.rows.prompts[0], seen.rows.prompts[2])
    options = {"share_prefix": True, "wanted": "next", "device": CPU, "sight": seen.sight}
    same = pack_micro_batch(seen.rows, (0, 1), **options).input_ids.shape[1]
    other = pack_micro_batch(seen.rows, (0, 2), **options).input_ids.shape[1]
    assert same == len(seen.rows.prompts[0]) + 5 + 3
    assert other == 2 * (len(seen.rows.prompts[0]) + 5)


def test_a_sampled_token_that_stands_for_pictures_shows_none(seen: SimpleNamespace) -> None:
    responses = seen.rows.responses.copy()
    responses[0, 1] = PAD
    rows = TokenRows(
        seen.rows.prompts, responses, seen.rows.response_lengths, seen.rows.trained, None, seen.rows.pictures
    )
    packed = pack_micro_batch(rows, (0, 4), share_prefix=True, wanted="next", device=CPU, sight=seen.sight)
    assert int(packed.pictures.is_place.sum()) == seen.rows.pictures[0][0].length
    found = packed.unpack(seen.module(packed, 1.0, False)[0])
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found[0, 0], seen.values[0, 0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("picked", [(), (4,)])
def test_the_tower_runs_and_gets_a_gradient_where_no_row_shows_a_picture(
    seen: SimpleNamespace, picked: tuple[int, ...]
) -> None:
    """Else the other ranks would wait for this one in the collectives of its blocks."""
    packed = pack_micro_batch(seen.rows, picked, share_prefix=True, wanted="next", device=CPU, sight=seen.sight)
    seen.module.zero_grad(set_to_none=True)
    seen.module(packed, 1.0, False)[0].sum().backward()
    towers = {name: p.grad for name, p in seen.module.named_parameters() if "visual" in name}
    assert towers and all(grad is not None and not grad.any() for grad in towers.values())


def test_a_picture_of_another_number_of_tokens_is_refused(seen: SimpleNamespace) -> None:
    data = png(picture(9, 200, 200))
    with pytest.raises(PictureError, match="5 tokens stand for it"):
        seen.sight.processor.pixels(Picture(data, digest_of(data), 0, 5))


def test_a_model_that_does_not_see_is_refused(llama: Path) -> None:
    with pytest.raises(PictureError, match="llama at .* is no model that hrl can show them to"):
        sighted_config(llama)


def test_what_is_transparent_is_white() -> None:
    clear = picture().convert("RGBA")
    clear.putalpha(0)
    with decoded(png(clear)) as image:
        assert image.mode == "RGB" and image.getextrema() == ((255, 255),) * 3
