"""Small copies of the pictures that samples show, in the run folder, so that a page and a person can see them.

A prompt's picture is written once for a run, under its digest; a record of `rollouts/` names the file. Of a video some
frames are written.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrl.files import write_whole
from hrl.pictures import MULTI_MODAL_DATA, Picture, digest_of

if TYPE_CHECKING:
    from hrl.protocol import DataProto

FOLDER = "pictures"
"""In the folder `rollouts`."""
_SIDE = 192
"""Longest side in pixels."""
_MOST_BYTES, _MOST_PIXELS = 64 * 1024, 1 << 20
"""A file that is no larger is kept as it is, if it has nothing of what cameras write beside a picture."""
_OF_CAMERAS = (b"Exif\0\0", b"eXIf", b"http://ns.adobe.com/xap/", b"XML:com.adobe.xmp")
"""What such data begin with in a JPEG and a PNG: among them may be where a photograph was taken."""
_MOST_FRAMES = 4
"""Of a video, the first and the last among them."""
_ENDINGS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg"}
_KINDS = {"png": "image/png", "jpg": "image/jpeg"}


def names_of(pictures: Sequence[Picture]) -> list[str]:
    """Return the files of a prompt's pictures and of its videos' frames, relative to the folder `rollouts`."""
    return [f"{FOLDER}/{digest}.{_ending(data)}" for digest, data in _shown(pictures)]


def _shown(pictures: Sequence[Picture]) -> Iterator[tuple[str, bytes]]:
    """Yield name and file of what is kept of a prompt's pictures, in their order."""
    video = 0

    def which(picture: Picture) -> tuple[bool, int]:
        nonlocal video
        video += picture.clip is None or picture.clip.moment == 0  # a video's other moments belong to the one before
        return picture.clip is not None, video

    for (is_video, _), group in groupby(pictures, which):
        if not is_video:
            yield from ((picture.digest, picture.data) for picture in group)
            continue
        frames = [file for picture in group for file in picture.files]
        last, wanted = len(frames) - 1, min(_MOST_FRAMES, len(frames))
        chosen = [frames[round(last * number / max(1, wanted - 1))] for number in range(wanted)]
        yield from ((digest_of(file), file) for file in chosen)


def thumbnails(batch: DataProto, rollouts: Path) -> dict[Path, bytes]:
    """Return the files that a batch's pictures lack.

    Args:
        batch: Its `multi_modal_data` has the pictures; without that column there are none.
        rollouts: The run's folder of samples.
    """
    found: dict[Path, bytes] = {}
    for pictures in batch.non_tensor_batch.get(MULTI_MODAL_DATA, ()):
        for name, (_, data) in zip(names_of(pictures), _shown(pictures), strict=True):
            path = rollouts / name
            if path not in found and not path.exists():
                found[path] = data if _is_small(data) else _thumbnail(data)
    return found


def write(files: Mapping[Path, bytes]) -> None:
    """Write them."""
    for path, data in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)


def data_uris(names: Iterable[Any], rollouts: Path) -> list[str]:
    """Return pictures for a page, those whose files are there.

    Args:
        names: From a record.
        rollouts: The folder of samples, beyond which nothing is read.
    """
    found = []
    for name in names:
        path = rollouts / FOLDER / Path(str(name)).name
        kind = _KINDS.get(path.suffix.removeprefix("."))
        if kind is not None and path.is_file():
            found.append(f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}")
    return found


def _is_small(data: bytes) -> bool:
    if len(data) > _MOST_BYTES or not data.startswith(tuple(_ENDINGS)) or any(mark in data for mark in _OF_CAMERAS):
        return False
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:  # reads the head alone
        return image.width * image.height <= _MOST_PIXELS


def _ending(data: bytes) -> str:
    if _is_small(data):
        return next(ending for start, ending in _ENDINGS.items() if data.startswith(start))
    return "jpg"


def _thumbnail(data: bytes) -> bytes:
    from hrl.models.pictures import decoded

    with decoded(data) as image:
        image.thumbnail((_SIDE, _SIDE))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=85)
    return file.getvalue()
