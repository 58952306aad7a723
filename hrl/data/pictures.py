"""Pictures of a row: where they are, which part of the prompt shows them, and which of its tokens stand for them.

A row has them in the column `images` (`data.image_key`), in the order of the prompt's placeholders, or in the prompt's
own parts. A picture is a path, the bytes of a file, a mapping with one of the two (as datasets' `Image` is written to
Parquet, and as verl's rows have it), or, from Python, a `PIL.Image`. Only a file's header is read with the row; the
file itself is read when the row is drawn.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hrl.data.chat import ChatTemplateError
from hrl.errors import DatasetError
from hrl.files import expanded
from hrl.models.pictures import PictureError, PictureProcessor
from hrl.pictures import Picture, PictureSource, digest_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER = "<image>"
"""Stands for the row's next picture in the text of a prompt, as in verl's rows."""
AUDIO_KEY = "audios"
"""verl's column of sounds (`data.audio_key`)."""
_PART = {"type": "image"}
_URL = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_FILE = "file://"
_SHOWN = 60


class _WrongPictureError(Exception):
    """What is wrong with a picture of a row, in words."""


def take_pictures(
    raw: Mapping[str, Any], messages: Sequence[dict[str, Any]], image_key: str, video_key: str
) -> tuple[list[dict[str, Any]], tuple[PictureSource, ...]] | str:
    """Return the messages with a part for each picture, and the pictures in their order; or what is wrong with them.

    Args:
        raw: The row.
        messages: Its prompt, from `as_messages`.
        image_key: Column of the pictures (`data.image_key`).
        video_key: Column of the videos (`data.video_key`), of which none is taken.
    """
    for key, named in ((video_key, "videos"), (AUDIO_KEY, "sounds")):
        if _listed(raw.get(key)):
            return f"{key!r} has {named}, and hrl shows a model pictures alone: leave the row out, or empty the column"
    given = _listed(raw.get(image_key))
    try:
        pictures = [_source(picture, f"picture {number} of {image_key!r}") for number, picture in enumerate(given)]
        return _placed(messages, pictures, image_key)
    except _WrongPictureError as error:
        return str(error)


def _listed(value: object) -> list[Any]:
    """Return the pictures of a column: one that is not in a list is the only one."""
    if value is None:
        return []
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes | bytearray):
        return [each for each in value if each is not None]
    return [value]


def _placed(
    messages: Sequence[dict[str, Any]], pictures: list[PictureSource], image_key: str
) -> tuple[list[dict[str, Any]], tuple[PictureSource, ...]]:
    """Put a part in the place of each placeholder."""
    found: list[PictureSource] = []
    left = list(pictures)

    def taken(where: str) -> PictureSource:
        if not left:
            raise _WrongPictureError(
                f"{where} shows one picture more than {image_key!r} has, which is {len(pictures)}: it needs one for "
                f"each {PLACEHOLDER} of the prompt"
            )
        return left.pop(0)

    placed = []
    for position, message in enumerate(messages):
        where, content = f"message {position}", message["content"]
        if isinstance(content, str) and pictures and PLACEHOLDER in content:
            parts: list[dict[str, Any]] = []
            for number, text in enumerate(content.split(PLACEHOLDER)):
                if number:
                    parts.append(dict(_PART))
                    found.append(taken(where))
                if text:
                    parts.append({"type": "text", "text": text})
            message = message | {"content": parts}
        elif isinstance(content, Sequence) and not isinstance(content, str):
            parts = []
            for part in content:
                if part["type"] == "text":
                    parts.append({"type": "text", "text": part["text"]})
                    continue
                own = part.get("image")
                parts.append(dict(_PART))
                found.append(taken(where) if own is None else _source(own, f"the picture of {where}"))
            message = message | {"content": parts}
        placed.append(message)
    if left:
        raise _WrongPictureError(
            f"{image_key!r} has {len(pictures)} pictures, and the prompt shows {len(pictures) - len(left)}: put "
            f"{PLACEHOLDER} where each belongs, or a part {_PART}"
        )
    return placed, tuple(found)


def _source(value: object, where: str) -> PictureSource:
    """Return where a picture is.

    Raises:
        _WrongPictureError: It is nowhere, or no picture.
    """
    from PIL import Image

    if isinstance(value, Image.Image):
        buffer = io.BytesIO()
        value.save(buffer, "PNG")
        return PictureSource(*value.size, data=buffer.getvalue())
    if isinstance(value, Mapping):
        inner = next((value[key] for key in ("bytes", "image", "path") if value.get(key) is not None), None)
        if inner is None or isinstance(inner, Mapping):
            raise _WrongPictureError(f"{where} has neither 'bytes' nor 'path' nor 'image': {_brief(value)}")
        return _source(inner, where)
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        return PictureSource(*_size(io.BytesIO(data), where), data=data)
    if not isinstance(value, str) or not value:
        raise _WrongPictureError(
            f"{where} is {_brief(value)}, expected a path, bytes, or a mapping with one of the two"
        )
    if _URL.match(value):
        raise _WrongPictureError(
            f"{where} is at {_brief(value)}: a run fetches nothing from addresses. Save the picture, and name its path"
        )
    path = expanded(value.removeprefix(_FILE))
    if not path.is_file():
        raise _WrongPictureError(f"{where} is {str(path)!r}, and there is no such file (seen from {Path.cwd()})")
    return PictureSource(*_size(path, where), path=str(path.resolve()))


def _size(file: Any, where: str) -> tuple[int, int]:
    """Return width and height of a picture, from its header."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as image:
            return image.size
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError) as error:
        raise _WrongPictureError(f"{where} is no picture that can be read: {str(error)[:_SHOWN]}") from error


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


class PictureTokens:
    """Which tokens of a prompt stand for its pictures.

    Args:
        tokenizer: Of the trained model. The model's `config.json` and its image processor lie beside it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def processor(self) -> PictureProcessor:
        """The image processor beside the tokenizer.

        Raises:
            DatasetError: There is none, or the model does not see.
        """
        try:
            return PictureProcessor(self._tokenizer.name_or_path)
        except PictureError as error:
            raise DatasetError(str(error)) from error

    def spread(self, text: str, pictures: Sequence[PictureSource]) -> str:
        """Return a rendered prompt in which as many tokens stand for each picture as it takes.

        Raises:
            ChatTemplateError: The chat template shows another number of pictures.
            ValueError: The processor takes no picture of such a shape.
        """
        token = str(self._tokenizer.convert_ids_to_tokens(self.processor.token_id))
        pieces = text.split(token)
        if len(pieces) != len(pictures) + 1:
            raise ChatTemplateError(
                f"the chat template shows {len(pieces) - 1} pictures ({token}) of a prompt with {len(pictures)}"
            )
        spread = [pieces[0]]
        for picture, piece in zip(pictures, pieces[1:], strict=True):
            spread += [token * self.processor.num_tokens(picture.width, picture.height), piece]
        return "".join(spread)

    def shows(self, ids: np.ndarray) -> bool:
        """Return whether a prompt's tokens have one that stands for a part of a picture."""
        return bool((ids == self.processor.token_id).any())

    def placed(self, ids: np.ndarray, pictures: Sequence[PictureSource]) -> tuple[Picture, ...]:
        """Return the pictures of a prompt with their places among its tokens.

        Args:
            ids: `(P,)`, of the text that `spread` returned.
            pictures: In the order of the prompt.
        """
        (places,) = np.nonzero(ids == self.processor.token_id)
        found, start = [], 0
        for picture in pictures:
            length = self.processor.num_tokens(picture.width, picture.height)
            data = picture.read()
            found.append(Picture(data, digest_of(data), int(places[start]), length))
            start += length
        return tuple(found)
