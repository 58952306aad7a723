"""Rows with pictures: where they may be, what is refused, and which tokens stand for them."""

from __future__ import annotations

import base64
import io
import json
import struct
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from transformers import Qwen3VLProcessor

from hrl.data.dataset import RLHFDataset
from hrl.data.offline.demonstrations import DemonstrationDataset
from hrl.data.picture_files import WrongPictureError, picture_source, video_source
from hrl.data.tasks import bundled_rows
from hrl.errors import DatasetError
from hrl.models.pictures import decoded
from hrl.models.tokenizer import load_tokenizer
from hrl.pictures import MULTI_MODAL_DATA
from tests.data import test_films
from tests.models.tiny_pictures import SPECIAL, frames, picture, png, save_vl

PAD, FILM = SPECIAL.index("<|image_pad|>"), SPECIAL.index("<|video_pad|>")
FILE = png(picture())


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(save_vl(tmp_path_factory.mktemp("model")))


@pytest.fixture
def data(config: SimpleNamespace) -> SimpleNamespace:
    config.max_prompt_length, config.shuffle = 200, False
    return config


def jpeg(width: int, height: int, orientation: int = 1) -> bytes:
    """Return a file whose upper half is red and whose lower one is black, with EXIF's orientation."""
    image, exif, file = Image.new("RGB", (width, height)), Image.Exif(), io.BytesIO()
    image.paste((255, 0, 0), (0, 0, width, height // 2))
    exif[0x0112] = orientation
    image.save(file, "JPEG", exif=exif)
    return file.getvalue()


def film(count: int = 3) -> bytes:
    """Return an animated GIF."""
    first, *others = [picture(number) for number in range(count)]
    file = io.BytesIO()
    first.save(file, "GIF", save_all=True, append_images=others, duration=100)
    return file.getvalue()


def for_answers(data: SimpleNamespace) -> SimpleNamespace:
    """The section `data` of a run that learns from given answers."""
    columns = {"messages_key": "messages", "completion_key": None, "data_source_key": "data_source"}
    return SimpleNamespace(**vars(data), **columns, max_length=200, train_batch_size=1)


def shown(tokenizer: Any, config: SimpleNamespace, *rows: dict[str, Any]) -> RLHFDataset:
    return RLHFDataset([{"data_source": "s", "reward_model": {}} | row for row in rows], tokenizer, config)


def test_a_picture_may_lie_in_many_places(seeing: Any, data: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "a picture.png"
    path.write_bytes(FILE)
    places = [str(path), f"file://{path}", FILE, {"bytes": FILE, "path": "x.png"}, {"bytes": None, "path": str(path)}]
    places += [{"image": str(path)}, picture()]
    rows = [{"prompt": "<image>what?", "images": [place]} for place in places]
    rows.append({"prompt": "<image>what?", "images": str(path)})  # a single one needs no list
    rows.append({"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]})
    rows[-1]["images"] = [FILE]
    rows.append(
        {
            "prompt": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": FILE, "text": None},
                        {"type": "text", "text": "what?", "image": None},
                    ],
                }
            ]
        }
    )
    made = shown(seeing, data, *rows)
    batch = made.batch(range(len(rows)))
    first, *_ = batch.non_tensor_batch[MULTI_MODAL_DATA]
    assert len(first) == 1 and first[0].length == 4
    ids = made.tokens[0]
    for place, row in enumerate(batch.non_tensor_batch[MULTI_MODAL_DATA]):
        assert np.array_equal(made.tokens[place], ids)
        assert (row[0].start, row[0].length, row[0].digest) == (first[0].start, 4, first[0].digest)
    assert (np.flatnonzero(ids == PAD) == np.arange(first[0].start, first[0].start + 4)).all()
    assert made.shape(made.rows[0]) == "single questions with pictures"
    assert "images" not in made.rows[2].columns and not made.left_out


def test_pictures_come_in_the_order_of_their_places(seeing: Any, data: SimpleNamespace) -> None:
    other = png(picture(2, 112, 56))
    made = shown(seeing, data, {"prompt": "a <image> b <image> c", "images": [FILE, other]}, {"prompt": "none"})
    batch = made.batch([0, 1])
    (first, second), none = batch.non_tensor_batch[MULTI_MODAL_DATA]
    assert none == () and (first.data, second.data) == (FILE, other) and (first.length, second.length) == (4, 8)
    text = seeing.decode(made.tokens[0][first.start + 4 : second.start])
    assert text == "<|vision_end|> b <|vision_start|>"
    repeated = batch.repeat(3)
    assert repeated.non_tensor_batch[MULTI_MODAL_DATA][0] is repeated.non_tensor_batch[MULTI_MODAL_DATA][2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"images": ["https://example.org/a.png"]}, "a run fetches nothing from addresses"),
        ({"images": ["/no/such.png"]}, "picture 0 of 'images' is '/no/such.png', and there is no such file"),
        ({"images": [b"no picture"]}, "picture 0 of 'images' is no picture that can be read"),
        ({"images": [3]}, "picture 0 of 'images' is 3, expected a path, bytes"),
        ({"images": [{"bytes": None, "path": None}]}, "has neither 'bytes' nor 'path' nor 'image'"),
        ({"images": [{"bytes": FILE, "max_pixels": "x"}]}, "'max_pixels' of picture 0 of 'images' is 'x', expected a"),
        ({"images": [{"bytes": FILE, "max_pixels": 1, "min_pixels": 2}]}, "'min_pixels' 2, which is more than its"),
        ({"images": [{"bytes": FILE, "resized_width": 56}]}, "has 'resized_width', which hrl does not read"),
        ({"videos": [[FILE, {"bytes": FILE, "max_pixels": 9}]], "prompt": "<video>?"}, "has a limit of its own"),
        ({"images": [FILE], "prompt": "<image> is no <|image_pad|>"}, "message 0 spells <|image_pad|>, by which"),
        ({"images": [FILE], "prompt": "<image><|vision_start|>"}, "message 0 spells <|vision_start|>, by which"),
        ({"images": [FILE], "tools": [{"name": "<|video_pad|>"}]}, "'tools' spells <|video_pad|>"),
        ({"images": []}, None),  # the text is a text then
        ({"images": None, "image": FILE}, "set data.image_key=image"),
        ({"images": [FILE[:-30]]}, "picture 0 of 'images' is no picture that can be read"),
        ({"images": [jpeg(64, 64)[:-400]]}, "picture 0 of 'images' is no picture that can be read"),
        ({"images": [b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"]}, "is no picture that can be read"),
        ({"images": ["data:image/png;base64,?"]}, "picture 0 of 'images' is no base64"),
        ({"images": ["/9j/4AAQ"]}, "no such file (seen from {cwd}); base64 is written as 'data:image/png;base64,…'"),
        ({"images": ["A" * 400]}, "it is too long for a path; base64 is written as 'data:image/png;base64,…'"),
        ({"images": [Image.new("1", (1 << 13, 8193))]}, "has 8192 × 8193 pixels, and hrl decodes at most 67,108,864"),
        ({"images": [{"bytes": FILE, "min_pixels": 10**12}]}, "tokens long, and no prompt has more than 1,048,576"),
        ({"videos": [film()[:-40]], "prompt": "<video>?"}, "video 0 of 'videos' is no video that can be read"),
        ({"videos": [film()[:60]], "prompt": "<video>?"}, "video 0 of 'videos' is no video that can be read"),
        ({"videos": ["A" * 400], "prompt": "<video>?"}, "video 0 of 'videos' can't be read: it is too long for a path"),
        ({"images": [FILE, FILE]}, "'images' has 2 pictures, and the prompt shows 1"),
        ({"images": [FILE], "prompt": "<image> <image>"}, "one picture more than 'images' has, which is 1"),
        ({"videos": ["https://example.org/a.mp4"], "prompt": "<video>?"}, "a run fetches nothing from addresses"),
        ({"videos": ["/no/such.mp4"], "prompt": "<video>?"}, "there is no such file or folder"),
        ({"videos": [__file__], "prompt": "<video>?"}, "hrl reads MP4, MOV, MKV"),
        ({"videos": [b"film"], "prompt": "<video>?"}, "hrl reads MP4, MOV, MKV"),
        (
            {"videos": [b"\0\0\0\x18ftypisom" + b"\0" * 99], "prompt": "<video>?"},
            "video 0 of 'videos' is no video that can",
        ),
        ({"videos": [FILE], "prompt": "<video>?"}, "video 0 of 'videos' is one picture"),
        ({"videos": [[FILE]], "prompt": "<video>?"}, "video 0 of 'videos' has 1 frames"),
        ({"videos": [[FILE, png(picture(2, 112, 56))]], "prompt": "<video>?"}, "frames of several sizes"),
        (
            {"videos": [[FILE, "/no/such.png"]], "prompt": "<video>?"},
            "frame 1 of video 0 of 'videos' is '/no/such.png'",
        ),
        ({"videos": [np.zeros((2, 3, 8, 8))], "prompt": "<video>?"}, "expected uint8 of (frames, height, width, 3)"),
        (
            {"videos": [{"video": [FILE] * 2, "max_frames": 4}], "prompt": "<video>?"},
            "'max_frames', which hrl does not",
        ),
        ({"videos": [{"video": [FILE] * 2, "fps": 0}], "prompt": "<video>?"}, "'fps' of video 0 of 'videos' is 0"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video", "max_frames": 4}]}], "videos": [[FILE] * 2]},
            "has 'max_frames', which hrl does not read",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video", "fps": 4}]}], "videos": [[FILE] * 2]},
            "has 'fps', and comes from a column: say it there",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video", "video": {"video": [FILE] * 2}, "fps": 0}]}]},
            "'fps' of the video of message 0",
        ),
        ({"videos": [[FILE] * 2], "prompt": "?"}, "'videos' has 1 video, and the prompt shows 0"),
        (
            {"image": FILE, "prompt": "?"},
            "the column 'image' has a picture, which the prompt does not show: set data.image",
        ),
        (
            {"picture": {"bytes": FILE, "path": None}, "prompt": "?"},
            "set data.image_key=picture and put <image> where",
        ),
        ({"pictures": ["a.JPG"], "prompt": "?"}, "data.image_key=null reads the words alone"),
        ({"img": picture(1, 8, 8), "prompt": "?"}, "the column 'img' has a picture"),
        (
            {"video": {"path": "clip"}, "prompt": "<video>?"},
            "but the column 'video' something: if these are the videos",
        ),
        ({"video": "a.mp4", "prompt": "?"}, "the column 'video' has a video, which the prompt does not show"),
        ({"image": "a dog", "video": None, "audio": "a bark", "prompt": "?"}, None),
        ({"audios": [b"RIFF"]}, "'audios' has sounds"),
        ({"audio": {"path": "a.wav", "array": [0.0]}, "prompt": "<audio>?"}, "'audio' has sounds"),
        ({"sound": "bark.wav", "prompt": "?"}, None),
    ],
)
def test_what_is_no_picture_is_refused(
    seeing: Any, data: SimpleNamespace, row: dict[str, Any], message: str | None
) -> None:
    if message is None:
        assert not shown(seeing, data, {"prompt": "<image>?"} | row).has_pictures
        return
    with pytest.raises(DatasetError) as caught:
        shown(seeing, data, {"prompt": "<image>?"} | row)
    assert message.format(cwd=Path.cwd()) in str(caught.value) and "row 0" in str(caught.value)


def test_rows_with_pictures_may_be_read_for_their_words_alone(seeing: Any, data: SimpleNamespace) -> None:
    blind = SimpleNamespace(**vars(data) | {"image_key": None, "video_key": None})
    rows = [{"prompt": "?", "images": [FILE]}, {"prompt": "<image>?", "image": FILE}, {"prompt": "?", "video": "a.mp4"}]
    assert not shown(seeing, blind, *rows).has_pictures
    brings = [{"type": "image", "image": FILE}]
    assert shown(seeing, blind, {"prompt": [{"role": "user", "content": brings}]}).has_pictures
    part = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(DatasetError, match="shows a picture that it does not bring, and data.image_key is null"):
        shown(seeing, blind, {"prompt": part, "images": [FILE]})


def test_a_row_may_say_how_large_its_picture_is_shown(seeing: Any, data: SimpleNamespace) -> None:
    large = png(picture(3, 112, 112))
    parts = [{"type": "image", "image": large, "max_pixels": 56 * 56}]
    rows = [
        {"prompt": "<image>", "images": [large]},
        {"prompt": "<image>", "images": [{"bytes": large, "max_pixels": 56 * 56}]},
        {"prompt": [{"role": "user", "content": parts}]},
        {"prompt": [{"role": "user", "content": [{"type": "image", "max_pixels": 56 * 56}]}], "images": [large]},
        {"prompt": "<image>", "images": [{"bytes": large, "min_pixels": 168 * 168, "max_pixels": 168 * 168}]},
    ]
    made = shown(seeing, data, *rows)
    found = [one for (one,) in made.batch(range(5)).non_tensor_batch[MULTI_MODAL_DATA]]
    assert [one.length for one in found] == [16, 4, 4, 4, 36]
    assert len({one.digest for one in found}) == 3 and {one.data for one in found} == {large}
    processor = made._pictures.processor
    assert [processor.pixels(one).grid for one in found] == [(1, 8, 8), *[(1, 4, 4)] * 3, (1, 12, 12)]
    resized = processor._processor(images=[picture(3, 112, 112).resize((56, 56), Image.Resampling.BICUBIC)])
    assert np.abs(processor.pixels(found[1]).patches.numpy() - resized["pixel_values"]).max() < 0.05
    assert [(ids == PAD).sum() for ids in made.tokens] == [16, 4, 4, 4, 36]
    identities = [row.images[0].identity for row in made.rows]
    assert identities[1] == identities[2] == identities[3] != identities[0]


def test_an_answer_or_a_text_may_spell_the_token_of_a_picture(seeing: Any, data: SimpleNamespace) -> None:
    asked = {"role": "user", "content": "<image>?"}
    told = "the token is <|image_pad|>"
    made = shown(seeing, data, {"prompt": "<image>?", "images": [FILE]}, {"prompt": told})
    _, none = made.batch([0, 1]).non_tensor_batch[MULTI_MODAL_DATA]
    assert none == () and (made.tokens[1] == PAD).sum() == 1  # a token as any other
    chat = {"messages": [asked, {"role": "assistant", "content": told}], "images": [FILE]}
    answers = DemonstrationDataset([chat], seeing, for_answers(data), stop_ids=[2])
    ((one,),) = answers.batch([0]).non_tensor_batch[MULTI_MODAL_DATA]
    (answer,) = answers.tokens[0]
    assert (answer.prompt == PAD).sum() == one.length == 4 and (answer.answer == PAD).sum() == 1
    spelled = {"messages": [{"role": "user", "content": f"<image> {told}"}, chat["messages"][1]], "images": [FILE]}
    with pytest.raises(DatasetError, match=r"row 0.*message 0 spells <\|image_pad\|>"):
        DemonstrationDataset([spelled], seeing, for_answers(data), stop_ids=[2])


def test_a_whole_file_is_looked_at_without_decoding_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def decodes(*_: object) -> None:
        raise OSError("decoded")

    webp, broken = io.BytesIO(), bytearray(FILE)
    picture().save(webp, "WEBP")
    broken[len(FILE) // 2] ^= 1
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decodes)
    monkeypatch.setattr("PIL.WebPImagePlugin.WebPImageFile.load", decodes)
    for whole in (FILE, jpeg(60, 56), webp.getvalue()):
        assert (picture_source(whole, "it").width, picture_source(whole, "it").height) == (60, 56)
    for cut in (bytes(broken), FILE[:-30], jpeg(60, 56)[:-400], webp.getvalue()[:-30]):
        with pytest.raises(WrongPictureError):
            picture_source(cut, "it")


def test_a_photograph_is_shown_the_right_way_up(seeing: Any, data: SimpleNamespace) -> None:
    lying = jpeg(56, 112, orientation=6)
    made = shown(seeing, data, {"prompt": "<image>", "images": [lying]})
    ((one,),) = made.batch([0]).non_tensor_batch[MULTI_MODAL_DATA]
    assert (made.rows[0].images[0].width, made.rows[0].images[0].height, one.length) == (112, 56, 8)
    assert made._pictures.processor.pixels(one).grid == (1, 4, 8)
    with decoded(lying) as turned:
        assert turned.getpixel((100, 28))[0] > 200 > 50 > turned.getpixel((10, 28))[0]  # its upper half is red


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_turned_as_pillow_does(orientation: int) -> None:
    file = jpeg(40, 24, orientation)
    with decoded(file) as turned:
        assert np.array_equal(np.asarray(turned), np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(file)))))


def test_fields_of_another_type_beside_the_orientation_hinder_nothing() -> None:
    orientation = b"\x01\x12\0\x03\0\0\0\x01\0\x06\0\0"
    unit_of_resolution = b"\x01\x28\0\x02\0\0\0\x02a\0\0\0"  # as text
    file = io.BytesIO()
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x02" + orientation + unit_of_resolution + b"\0\0\0\0"
    picture().save(file, "JPEG", exif=exif)
    with pytest.raises(struct.error):
        ImageOps.exif_transpose(Image.open(io.BytesIO(file.getvalue())))
    source = picture_source(file.getvalue(), "it")
    with decoded(file.getvalue()) as turned:
        assert turned.size == (source.width, source.height) == (56, 60)


def test_a_film_that_breaks_later_is_named(tmp_path: Path) -> None:
    path = tmp_path / "film.gif"
    path.write_bytes(film())
    source = video_source(str(path), "it")
    path.write_bytes(film()[:-40])
    with pytest.raises(DatasetError, match=r"frame 2 of the film .*film\.gif can't be read"):
        source.read([0, 2])


@pytest.mark.parametrize("mode", ["CMYK", "HSV", "F", "YCbCr", "LAB"])
def test_pictures_of_every_mode_can_be_given(seeing: Any, data: SimpleNamespace, mode: str) -> None:
    given = (
        Image.new(mode, (56, 56)) if mode == "LAB" else picture().convert("L" if mode == "F" else "RGB").convert(mode)
    )
    assert shown(seeing, data, {"prompt": "<image>", "images": [given]}).rows[0].images[0].width == given.width


def test_a_grey_picture_of_16_bits_keeps_its_greys() -> None:
    grey = np.array([[0, 20000], [40000, 65535]], np.uint16)
    file = io.BytesIO()
    Image.fromarray(grey).save(file, "PNG")
    with decoded(file.getvalue()) as image:
        assert np.asarray(image)[..., 0].tolist() == [[0, 78], [156, 255]]


def test_a_part_of_a_message_may_say_where_its_picture_is_in_any_form(
    seeing: Any, data: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(FILE)
    text = base64.b64encode(FILE).decode()
    forms = [{"path": str(tmp_path / "a.png")}, {"url": f"data:image/png;base64,{text}"}, {"base64": text}]
    prompts = [[{"role": "user", "content": [{"type": "image", **form}]}] for form in forms]
    made = shown(seeing, data, *({"prompt": prompt} for prompt in prompts))
    assert {one.data for (one,) in made.batch(range(3)).non_tensor_batch[MULTI_MODAL_DATA]} == {FILE}


def test_pictures_of_a_run_that_was_begun_without_are_refused(seeing: Any, data: SimpleNamespace) -> None:
    settings = for_answers(data)
    asked, answered = {"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "two"}
    late = {"messages": [asked, answered], "images": [FILE]}
    of_prompts = shown(seeing, data, {"prompt": "<image>?", "images": [FILE]})
    of_answers = DemonstrationDataset([late], seeing, settings, stop_ids=[2])
    for made in (of_prompts, of_answers):
        made.has_pictures = False  # as of a streamed one, of whose first rows none has any
        with pytest.raises(DatasetError, match="row 0 of the list shows a picture, and none of the rows"):
            made.batch([0])


def test_a_prompt_too_long_is_never_cut_through_a_picture(seeing: Any, data: SimpleNamespace) -> None:
    data.max_prompt_length, data.truncation = 30, "left"
    with pytest.raises(DatasetError, match="longer than data.max_prompt_length"):
        shown(seeing, data, {"prompt": "<image>" + "long " * 9, "images": [FILE]})


def test_a_model_that_does_not_see_is_refused(tokenizer: Any, data: SimpleNamespace) -> None:
    with pytest.raises(DatasetError, match="how the model.s prompts show a picture"):
        shown(tokenizer, data, {"prompt": "<image>?", "images": [FILE]})


def video(seed: int = 0) -> list[bytes]:
    return [png(frame) for frame in frames(5, seed=seed)]


def test_a_video_may_lie_in_many_places(seeing: Any, data: SimpleNamespace, tmp_path: Path) -> None:
    folder = tmp_path / "film"
    folder.mkdir()
    for number, frame in enumerate(video()):
        (folder / f"{number + 8}.png").write_bytes(frame)  # 10 comes behind 9
    given = frames(5)
    paths = [str(folder / f"{number}.png") for number in range(8, 13)]
    places: list[Any] = [video(), str(folder), f"file://{folder}", paths, given, [{"path": path} for path in paths]]
    places += [{"video": paths}, {"video": str(folder), "fps": 2.0}, np.stack([np.array(frame) for frame in given])]
    rows: list[dict[str, Any]] = [{"prompt": "<video>what?", "videos": [place]} for place in places]
    rows.append({"prompt": "<video>what?", "videos": str(folder)})
    parts = [{"type": "video", "video": paths, "fps": 2}, {"type": "text", "text": "what?"}]
    rows.append({"prompt": [{"role": "user", "content": parts}]})
    made = shown(seeing, data, *rows)
    batch = made.batch(range(len(rows)))
    for row, (found,) in enumerate(batch.non_tensor_batch[MULTI_MODAL_DATA]):
        assert np.array_equal(made.tokens[row], made.tokens[0])
        assert found.clip.grid == (3, 4, 4) and found.clip.seconds == 1.0 and found.length == 12
        assert len(found.files) == 5 and (made.tokens[row][found.start :][:12] == FILM).all()
        same = batch.non_tensor_batch[MULTI_MODAL_DATA][0][0].digest
        assert found.digest == same
    assert not any("videos" in made.rows[row].columns for row in (0, 4, 8))
    assert made.rows[3].columns["videos"] == [paths]


def test_a_film_is_sampled_as_fast_as_the_row_or_the_processor_says(seeing: Any, data: SimpleNamespace) -> None:
    buffer = io.BytesIO()
    first, *others = [Image.new("RGB", (56, 56), (number, 0, 0)) for number in range(40)]
    first.save(buffer, "PNG", save_all=True, append_images=others, duration=100)
    rows = [{"prompt": "<video>", "videos": [buffer.getvalue()]}]  # 4 s, of which 2 frames a second are taken
    rows.append({"prompt": "<video>", "videos": [{"bytes": buffer.getvalue(), "fps": 1}]})
    batch = shown(seeing, data, *rows).batch([0, 1])
    (found,), (slower,) = batch.non_tensor_batch[MULTI_MODAL_DATA]
    chosen = np.linspace(0, 39, 8).round().astype(int).tolist()
    assert [Image.open(io.BytesIO(file)).getpixel((3, 3))[0] for file in found.files] == chosen
    assert found.clip.grid[0] == 4 and found.clip.seconds == pytest.approx(1.0)
    assert len(slower.files) == 4 and slower.clip.seconds == pytest.approx(2.0)


def test_a_film_of_a_camera_is_sampled_like_any_other(seeing: Any, data: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(test_films.film())  # 40 frames, 10 a second
    made = shown(seeing, data, *({"prompt": "<video>", "videos": each} for each in (str(path), path.read_bytes())))
    for ((found,),) in (made.batch([row]).non_tensor_batch[MULTI_MODAL_DATA] for row in range(2)):
        assert test_films.numbers_of(found.files) == np.linspace(0, 39, 8).round().astype(int).tolist()
        assert found.clip.grid[0] == 4 and found.clip.seconds == pytest.approx(1.0)
    path.unlink()
    with pytest.raises(DatasetError, match=r"the film \S+clip.mp4 can't be read any more: "):
        made.batch([0])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("kind", ["mp4", "webp"])
def test_frames_of_a_large_film_travel_as_small_as_they_are_read(
    family: str, kind: str, data: SimpleNamespace, tmp_path: Path
) -> None:
    noise, path = frames(8, width=320, height=200), tmp_path / f"clip.{kind}"
    if kind == "mp4":
        path.write_bytes(test_films.encoded([np.asarray(frame) for frame in noise]))
    else:
        noise[0].save(path, "WEBP", save_all=True, append_images=noise[1:], duration=100, lossless=True)
    made = shown(load_tokenizer(save_vl(tmp_path, family)), data, {"prompt": "<video>", "videos": [str(path)]})
    processor, (source,) = made._pictures.videos, made.rows[0].images
    look = processor.look(source)
    travels = [file for moment in made.batch([0]).non_tensor_batch[MULTI_MODAL_DATA][0] for file in moment.files]
    whole, small = (
        processor.patches([decoded(file) for file in files], look.grid) for files in (source.read(look.chosen), travels)
    )
    assert torch.equal(whole, small), "to the last bit"
    with Image.open(io.BytesIO(travels[0])) as image:
        assert image.height * image.width < 200 * 320 / 4 and image.size == (look.grid[2] * 14, look.grid[1] * 14)


def test_pictures_and_videos_stand_where_the_prompt_shows_them(tmp_path: Path, data: SimpleNamespace) -> None:
    tokenizer = load_tokenizer(save_vl(tmp_path, "qwen3_vl"))
    row = {"prompt": "a <video> b <image> c <video>", "images": [FILE], "videos": [video(), video(7)]}
    made = shown(tokenizer, data, row)
    found = made.batch([0]).non_tensor_batch[MULTI_MODAL_DATA][0]
    assert [picture.clip and picture.clip.moment for picture in found] == [0, 1, 2, None, 0, 1, 2]
    assert [len(picture.files) for picture in found] == [2, 2, 1, 1, 2, 2, 1]
    texts = np.array([tokenizer.decode([token]) for token in made.tokens[0]], object)
    for picture_ in found:
        assert set(texts[picture_.start :][: picture_.length]) == {
            "<|image_pad|>" if picture_.clip is None else "<|video_pad|>"
        }
    # Two frames a second, two in a moment, whose middle is told; the last one counts twice.
    outer = "<|vision_start|><0.2 seconds><|vision_start|>%s<|vision_end|><1.2 seconds><|vision_start|>"
    assert (outer % ("<|video_pad|>" * found[0].length)) in "".join(texts)
    assert "<2.0 seconds>" in "".join(texts)
    # As transformers' own processor writes it.
    own = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    processor = SimpleNamespace(video_processor=own, video_token="V", vision_start_token="<", vision_end_token=">")
    processor._calculate_timestamps = partial(Qwen3VLProcessor._calculate_timestamps, processor)
    grid = np.array([(3, *found[0].clip.grid[1:])])
    metadata = SimpleNamespace(fps=2.0, frames_indices=[0, 1, 2, 3, 4])
    given = {"video_grid_thw": grid, "video_metadata": [metadata]}
    written = Qwen3VLProcessor.replace_video_token(processor, given, 0)
    ours = "".join(texts[: found[3].start])
    for token, sign in (("<|video_pad|>", "V"), ("<|vision_start|>", "<"), ("<|vision_end|>", ">")):
        ours = ours.replace(token, sign)
    assert f"<{written}>" in ours


def test_a_folder_that_does_not_say_how_videos_are_read_is_refused(tmp_path: Path, data: SimpleNamespace) -> None:
    folder = save_vl(tmp_path)
    row = {"prompt": "<video>?", "videos": [video()]}
    settings = json.loads((folder / "video_preprocessor_config.json").read_text())
    for change, message in (
        ({"video_processor_type": "GlmVideoProcessor"}, "names GlmVideoProcessor; hrl knows"),
        ({"size": {}}, "has no size.shortest_edge, size.longest_edge"),
        ({"do_resize": False}, "has do_resize=False"),
    ):
        (folder / "video_preprocessor_config.json").write_text(json.dumps(settings | change))
        with pytest.raises(DatasetError, match=message):
            shown(load_tokenizer(folder), data, row)
    for file in ("video_preprocessor_config.json", "preprocessor_config.json"):
        (folder / file).unlink()
    with pytest.raises(DatasetError, match="no image processor that loads"):
        shown(load_tokenizer(folder), data, row)


def test_an_answer_s_pictures_belong_to_its_prompt(seeing: Any, data: SimpleNamespace) -> None:
    settings = for_answers(data)
    question = {"role": "user", "content": "<image>how many?"}
    chat = [question, {"role": "assistant", "content": "two"}]
    made = DemonstrationDataset([{"messages": chat, "images": [FILE]}], seeing, settings, stop_ids=[2])
    ((shown_,),) = made.batch([0]).non_tensor_batch[MULTI_MODAL_DATA]
    assert (made.tokens[0][0].prompt[shown_.start :][:4] == PAD).all()
    with pytest.raises(DatasetError, match="behind the first answer"):
        DemonstrationDataset([{"messages": [*chat, *chat], "images": [FILE] * 2}], seeing, settings, stop_ids=[2])


def test_shapes_are_drawn_and_those_of_validation_are_others() -> None:
    from PIL import Image

    train, again, val = (list(bundled_rows(f"shapes/{name}?size=20&side=64")) for name in ("train", "train", "val"))
    assert train == again and [row["images"] for row in train] != [row["images"] for row in val]
    assert {row["reward_model"]["ground_truth"] for row in train} == set("12345")
    for row in train:
        with Image.open(io.BytesIO(row["images"][0]["bytes"])) as image:
            assert image.size == (64, 64)
    with pytest.raises(DatasetError, match="side of bundled:shapes/train is 3"):
        bundled_rows("shapes/train?side=3")
