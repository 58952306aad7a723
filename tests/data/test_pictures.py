"""Rows with pictures: where they may be, what is refused, and which tokens stand for them."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hrl.data.dataset import RLHFDataset
from hrl.data.offline.demonstrations import DemonstrationDataset
from hrl.data.tasks import bundled_rows
from hrl.errors import DatasetError
from hrl.models.tokenizer import load_tokenizer
from hrl.pictures import MULTI_MODAL_DATA
from tests.models.tiny_pictures import SPECIAL, picture, png, save_vl

PAD = SPECIAL.index("<|image_pad|>")
FILE = png(picture())


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(save_vl(tmp_path_factory.mktemp("model")))


@pytest.fixture
def data(config: SimpleNamespace) -> SimpleNamespace:
    config.max_prompt_length, config.shuffle = 200, False
    return config


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
        ({"images": []}, None),  # the text is a text then
        ({"images": [FILE, FILE]}, "'images' has 2 pictures, and the prompt shows 1"),
        ({"images": [FILE], "prompt": "<image> <image>"}, "one picture more than 'images' has, which is 1"),
        ({"images": [FILE], "videos": ["a.mp4"]}, "'videos' has videos, and hrl shows a model pictures alone"),
        ({"audios": [b"RIFF"]}, "'audios' has sounds"),
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
    assert message in str(caught.value) and "row 0" in str(caught.value)


def test_a_prompt_too_long_is_never_cut_through_a_picture(seeing: Any, data: SimpleNamespace) -> None:
    data.max_prompt_length, data.truncation = 30, "left"
    with pytest.raises(DatasetError, match="longer than data.max_prompt_length"):
        shown(seeing, data, {"prompt": "<image>" + "long " * 9, "images": [FILE]})


def test_a_model_that_does_not_see_is_refused(tokenizer: Any, data: SimpleNamespace) -> None:
    with pytest.raises(DatasetError, match="how the model.s prompts show a picture"):
        shown(tokenizer, data, {"prompt": "<image>?", "images": [FILE]})


def test_an_answer_s_pictures_belong_to_its_prompt(seeing: Any, data: SimpleNamespace) -> None:
    settings = SimpleNamespace(
        **vars(data),
        messages_key="messages",
        completion_key=None,
        data_source_key="data_source",
        max_length=200,
        train_batch_size=1,
    )
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
