"""Pictures in a packed row: log-probs and gradients of models that see are those of transformers' own forward."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, Qwen2VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as of_frame
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as of_whole

from hrl.data.pictures import PictureTokens
from hrl.models.head import backbone_of
from hrl.models.loading import ModelSource, load_causal_lm, load_scalar_model
from hrl.models.packed_model import PackedCausalLM, PackedScalarModel, TokenRows, Wanted, pack_micro_batch
from hrl.models.picture_probe import own_arguments, require_sight
from hrl.models.pictures import PictureProcessor, Sight, decoded, sighted_config
from hrl.models.probe import probe_config
from hrl.models.tokenizer import load_tokenizer
from hrl.models.videos import VideoProcessor
from hrl.pictures import Picture, PictureError, PictureSource, VideoSource, digest_of
from tests.models.tiny_pictures import FAMILIES, SPECIAL, frames, picture, png, save_vl, video_settings

CPU = torch.device("cpu")
START, END, PAD, FILM = (
    SPECIAL.index(token) for token in ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
)
FILES = [picture(1), picture(2, 100, 56), picture(3)]  # the first and the last are of one size
PACKINGS = ((True, False, (0, 1, 2, 3, 4)), (False, False, (4, 2, 0, 1, 3)), (True, True, (3, 1, 0, 2, 4)))


@pytest.fixture(scope="module", params=FAMILIES)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return beside_itself(save_vl(tmp_path_factory.mktemp("model"), request.param))


def beside_itself(folder: Path, *, packs_rows: bool = True) -> SimpleNamespace:
    """A model as it is trained and plain, rows of five prompts, and what the plain gives for each row by itself."""
    source = ModelSource(str(folder), {}, True, True, False, 256, shows_pictures=True, packs_rows=packs_rows)
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
    _require_equal(seen, order, share_prefix=share_prefix, is_tree=is_tree)


def test_rows_of_a_model_with_states_are_padded_and_see_the_same(tmp_path: Path) -> None:
    seen = beside_itself(save_vl(tmp_path, "qwen3_5"), packs_rows=False)
    assert "Qwen3_5GatedDeltaNet" in map(_name, seen.module.modules())
    # What such a layer makes of chunks it makes in float32, also of the rows by themselves.
    _require_equal(seen, (4, 2, 0, 1, 3), atol=1e-4, share_prefix=True, packs_rows=False)


def _name(module: torch.nn.Module) -> str:
    return type(module).__name__


def _require_equal(seen: SimpleNamespace, order: tuple[int, ...], atol: float = 1e-5, **how: bool) -> None:
    """Log-probs and gradients of a micro-batch are those of the rows by themselves, and each picture is in it once."""
    packed = pack_micro_batch(seen.rows, order, wanted="next", device=CPU, sight=seen.sight, **how)
    assert len(packed.pictures.grids) == 3
    seen.module.zero_grad()
    found = packed.unpack(seen.module(packed, 1.0, False)[0])
    torch.testing.assert_close(found, seen.values[list(order)], atol=atol, rtol=0)
    (found * seen.weights[list(order)]).sum().backward()
    own = dict(seen.plain.named_parameters())
    for name, parameter in seen.module.named_parameters():
        wanted = own[name.removeprefix("model.")].grad
        assert float((parameter.grad - wanted).norm()) <= 10 * atol * float(wanted.norm()) + 1e-7, name


@pytest.mark.parametrize("wanted", ["next", "last"])
def test_values_are_those_of_each_row_by_itself(seen: SimpleNamespace, wanted: Wanted) -> None:
    source = ModelSource(str(seen.folder), {}, True, True, False, 256, shows_pictures=True)
    module = PackedScalarModel(load_scalar_model(source, torch.float32).model)
    assert not module.model.score.weight.any()  # the folder has none
    torch.nn.init.normal_(module.model.score.weight, generator=torch.Generator().manual_seed(2))
    order, sight = (3, 1, 0, 2, 4), Sight(backbone_of(module.model), seen.sight.processor)
    packed = pack_micro_batch(seen.rows, order, share_prefix=True, wanted=wanted, device=CPU, sight=sight)
    found = packed.unpack(module(packed))
    for at, row in enumerate(order):
        answer = seen.rows.responses[row, : seen.rows.response_lengths[row]]
        ids = torch.from_numpy(np.concatenate([seen.rows.prompts[row], answer]))[None]
        told = own_arguments(seen.sight.processor, seen.rows.pictures[row], ids.shape[1])
        told = told if seen.rows.pictures[row] else {}
        with torch.no_grad():
            alone = seen.plain.model(input_ids=ids, **told).last_hidden_state[0] @ module.model.score.weight[0]
        alone = alone[-1:] if wanted == "last" else alone[len(seen.rows.prompts[row]) - 1 : -1]
        torch.testing.assert_close(found[at, : len(alone)], alone, atol=1e-4, rtol=0)
    found.sum().backward()
    assert all(p.grad is not None for name, p in module.named_parameters() if "visual" in name)


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
    torch.testing.assert_close(found[0, 0], seen.values[0, 0], atol=1e-5, rtol=0)
    # transformers' own forward takes such a token for a place, so it reads another one of the same vector.
    stand_in, vectors = len(SPECIAL), seen.plain.get_input_embeddings().weight
    responses[0, 1] = stand_in
    before = vectors[stand_in].clone()
    with torch.no_grad():
        try:
            vectors[stand_in] = vectors[PAD]
            wanted = _alone(seen.plain, seen.sight.processor, replace(rows, responses=responses), 0)
        finally:
            vectors[stand_in] = before
    others = [0, 2, 3, 4, 5]
    torch.testing.assert_close(found[0, others], wanted[others], atol=1e-5, rtol=0)
    seen.module.zero_grad()
    found.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in seen.module.parameters() if p.grad is not None)


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


@pytest.fixture(scope="module")
def films(seen: SimpleNamespace) -> SimpleNamespace:
    """Prompts with videos as rows of data become them: one twice, one faster, one beside a picture."""
    tokenizer = load_tokenizer(seen.folder)
    tokens = PictureTokens(tokenizer)
    film, other = ([png(frame) for frame in frames(number, seed=number)] for number in (5, 4))
    still = PictureSource(60, 56, data=png(FILES[0]))

    def source(files: list[bytes], rate: float) -> VideoSource:
        return VideoSource(60, 56, len(files), rate, tuple(PictureSource(60, 56, data=file) for file in files))

    shows = [[source(film, 2.0)]] * 2 + [[source(film, 0.5)], [still, source(film, 2.0), source(other, 1.0)]]
    prompts, pictures = [], []
    for shown in shows:
        parts = [{"type": "image" if each is still else "video"} for each in shown]
        chat = [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]
        text = tokens.spread(tokenizer.apply_chat_template(chat, tokenize=False), shown)
        prompts.append(np.array(tokenizer(text)["input_ids"]))
        pictures.append(tokens.placed(prompts[-1], shown))
    lengths = np.array([4, 3, 4, 2])
    trained = np.arange(4)[None] < lengths[:, None]
    responses = np.random.default_rng(1).integers(len(SPECIAL), 272, trained.shape)
    rows = TokenRows(prompts, responses, lengths, trained, None, pictures)
    looks = [[tokens.videos.look(each) for each in shown if each is not still] for shown in shows]
    values = torch.stack([_film_alone(seen, rows, row, looks[row]) for row in range(len(shows))])
    return SimpleNamespace(rows=rows, values=values)


def _film_alone(seen: SimpleNamespace, rows: TokenRows, row: int, looks: list[Any]) -> torch.Tensor:
    """What transformers' own forward gives, which is told of whole videos."""
    answer = rows.responses[row, : rows.response_lengths[row]]
    ids = torch.from_numpy(np.concatenate([rows.prompts[row], answer]))[None]
    pixels = [(each.clip is None, seen.sight.processor.pixels(each)) for each in rows.pictures[row]]
    told = {
        "pixel_values_videos": torch.cat([each.patches for is_still, each in pixels if not is_still]),
        "video_grid_thw": torch.tensor([look.grid for look in looks]),
        "second_per_grid_ts": torch.tensor([look.seconds for look in looks]),
        "mm_token_type_ids": (ids == PAD).int() + 2 * (ids == FILM).int(),
    }
    if any(is_still for is_still, _ in pixels):
        told["pixel_values"] = torch.cat([each.patches for is_still, each in pixels if is_still])
        told["image_grid_thw"] = torch.tensor([each.grid for is_still, each in pixels if is_still])
    log_probs = seen.plain(input_ids=ids, **told).logits[0].log_softmax(-1)
    found = log_probs[len(rows.prompts[row]) - 1 : -1].gather(1, torch.from_numpy(answer)[:, None])[:, 0]
    return torch.nn.functional.pad(found, (0, rows.responses.shape[1] - len(answer)))


@pytest.mark.parametrize("share_prefix", [True, False])
def test_videos_in_a_packed_row_are_those_of_the_model_s_own_forward(
    seen: SimpleNamespace, films: SimpleNamespace, share_prefix: bool
) -> None:
    options = {"share_prefix": share_prefix, "wanted": "next", "device": CPU, "sight": seen.sight}
    packed = pack_micro_batch(films.rows, (3, 0, 1, 2), **options)
    weights = torch.randn(films.values.shape, generator=torch.Generator().manual_seed(1)) * (films.values != 0)
    seen.module.zero_grad()
    found = packed.unpack(seen.module(packed, 1.0, False)[0])
    torch.testing.assert_close(found, films.values[[3, 0, 1, 2]], atol=1e-5, rtol=0)
    (found * weights[[3, 0, 1, 2]]).sum().backward()
    named = dict(seen.plain.named_parameters())
    own = dict(
        zip(named, torch.autograd.grad((films.values * weights).sum(), named.values(), retain_graph=True), strict=True)
    )
    for name, parameter in seen.module.named_parameters():
        wanted = own[name.removeprefix("model.")]
        assert float((parameter.grad - wanted).norm()) <= 1e-4 * float(wanted.norm()) + 1e-7, name


def test_time_is_in_the_positions_or_in_the_text(seen: SimpleNamespace, films: SimpleNamespace) -> None:
    """The same frames at another rate are another video: patches lie further apart, or other seconds are told."""
    fast, slow = films.rows.pictures[0], films.rows.pictures[2]
    if seen.sight.processor.videos.says_times:
        assert len(fast) == 3 and not np.array_equal(films.rows.prompts[0], films.rows.prompts[2])
        return
    assert np.array_equal(films.rows.prompts[0], films.rows.prompts[2]) and fast[0].digest != slow[0].digest
    of_time = [
        seen.sight.positions(films.rows.prompts[row], films.rows.pictures[row])[:, 0][picture.start :][: picture.length]
        for row, picture in ((0, fast[0]), (2, slow[0]))
    ]
    # 4 tokens a patch in time, four positions a second (`tokens_per_second`), one or four seconds between two. Qwen2-VL
    # counts patches instead.
    counts = seen.plain.config.model_type == "qwen2_vl"
    for found, apart in zip(of_time, (1, 1) if counts else (4, 16), strict=True):
        assert (found - found[0]).tolist() == [0] * 4 + [apart] * 4 + [2 * apart] * 4


def test_patches_of_a_video_are_two_frames_each(seen: SimpleNamespace) -> None:
    shades = [Image.new("RGB", (56, 84), (51 * number, 255, 0)) for number in range(3)]
    found = seen.sight.processor.videos.patches([nullcontext(shade) for shade in shades], (2, 6, 4))
    cut = found.view(2, 24, 3, 2, 14 * 14)  # patches in time, patches, colours, frames, pixels
    wanted = [[0.0, 0.2], [0.4, 0.4]]  # red of each frame, of which the last one comes twice
    for time, frame in ((0, 0), (0, 1), (1, 0), (1, 1)):
        torch.testing.assert_close(cut[time, :, 0, frame], torch.full((24, 196), (wanted[time][frame] - 0.5) / 0.25))
    torch.testing.assert_close(cut[:, :, 1], torch.full((2, 24, 2, 196), 2.0))
    torch.testing.assert_close(cut[:, :, 2], torch.full((2, 24, 2, 196), -2.0))


def test_a_still_video_is_the_picture(seen: SimpleNamespace) -> None:
    """Where nothing is resized, in the order in which the tower takes patches."""
    image = picture(4, 112, 84)
    own = seen.sight.processor._processor(
        images=[image], return_tensors="pt", do_resize=False, image_mean=[0.5] * 3, image_std=[0.25] * 3
    )
    found = seen.sight.processor.videos.patches([nullcontext(image), nullcontext(image)], (1, 6, 8))
    torch.testing.assert_close(found, own["pixel_values"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("cap", [None, True])
def test_frames_get_the_sizes_of_transformers_processors(
    seen: SimpleNamespace, tmp_path: Path, cap: bool | None
) -> None:
    config = sighted_config(seen.folder)
    is_whole = seen.sight.processor.videos.says_times
    settings = video_settings("qwen3_vl" if is_whole else "qwen2_5_vl")
    settings |= {"cap_pixels_per_frame": cap, "max_video_tokens": 3 if is_whole else 60}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    videos = VideoProcessor(tmp_path, config, 2)
    low, high = settings["size"]["shortest_edge"], settings["size"]["longest_edge"]
    rng = np.random.default_rng(0)
    for _ in range(300):
        number, height, width = (int(each) for each in rng.integers((2, 20, 20), (40, 400, 400)))
        if is_whole:
            most = high if cap is None else max(min(3 * 28**2, high // number), int(low * 1.05)) * number
            wanted = of_whole(number, height, width, 2, 28, low, most)
        else:
            most = high if cap is None else max(min(high, int(60 * 28**2 * 0.9) * 2 // number), int(low * 1.05))
            wanted = of_frame(height, width, 28, low, most)
        assert videos.size(number, height, width) == wanted
    with pytest.raises(ValueError, match="longer than 200 times"):
        videos.size(2, 28, 28 * 300)


@pytest.mark.parametrize("scalar", [False, True])
def test_a_family_is_compared_with_itself_before_a_run(seen: SimpleNamespace, scalar: bool) -> None:
    source = ModelSource.to_look_at(seen.folder, {}, trust_remote_code=False, max_model_len=256)
    assert require_sight(source, scalar=scalar) < 1e-4


def test_qwen2_vl_in_its_own_size_is_compared_too() -> None:
    """Its tower alone has 0.7 billion weights, unless a cut knows what it calls its width."""
    assert probe_config(Qwen2VLConfig(), 256).is_right


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
