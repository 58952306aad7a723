"""Which pictures of samples are kept as they are, and which as small copies."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from hrl.columns import object_column
from hrl.pictures import MULTI_MODAL_DATA, Picture, digest_of
from hrl.protocol import DataProto
from hrl.report.thumbnails import names_of, thumbnails


def file_of(size: tuple[int, int], form: str, **saved: object) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, form, **saved)
    return file.getvalue()


def kept(data: bytes) -> bytes:
    """What of a picture lies in the folder of samples, under the name that a record has."""
    pictures = [Picture(data, digest_of(data), 0, 1)]
    batch = DataProto.from_dict(tensors={}, non_tensors={MULTI_MODAL_DATA: object_column([pictures])})
    ((path, file),) = thumbnails(batch, Path("rollouts")).items()
    assert path == Path("rollouts") / names_of(pictures)[0]
    return file


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_a_small_picture_is_kept_as_it_is(form: str) -> None:
    data = file_of((300, 200), form)
    assert kept(data) == data


def test_a_picture_of_many_pixels_is_kept_small_however_few_bytes_its_file_has() -> None:
    data = file_of((4096, 2048), "PNG", optimize=True)
    assert len(data) < 64 * 1024
    with Image.open(io.BytesIO(kept(data))) as image:
        assert image.size == (192, 96)


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_what_a_camera_writes_beside_a_picture_is_not_kept(form: str) -> None:
    written = Image.Exif()
    written[0x010E] = "the author's house"
    data = file_of((64, 64), form, exif=written)
    assert b"house" in data and b"house" not in kept(data)


def test_other_formats_are_kept_as_jpeg() -> None:
    assert kept(file_of((64, 64), "WEBP")).startswith(b"\xff\xd8\xff")
