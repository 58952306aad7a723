"""Pictures and videos of a row: which part of the prompt shows them, and which of its tokens stand for them.

A row has them in the columns `images` and `videos` (`data.image_key`, `data.video_key`), in the order of the prompt's
placeholders, or in the prompt's own parts; what they may be is said in `hrl.data.picture_files`. Files are looked at
with the row, and read again when the row is drawn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hrl.data.chat import ChatTemplateError
from hrl.data.picture_files import WrongPictureError, part_source, picture_source, video_source
from hrl.errors import DatasetError
from hrl.models.pictures import PictureProcessor
from hrl.models.videos import VideoProcessor
from hrl.pictures import (
    Clip,
    Picture,
    PictureError,
    PictureSource,
    Shown,
    VideoSource,
    digest_of,
    digest_of_frames,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IMAGE, VIDEO = "image", "video"
"""Kinds of what a prompt shows, as its parts call them."""
PLACEHOLDERS = {IMAGE: "<image>", VIDEO: "<video>"}
"""What stands for the row's next picture or video in the text of a prompt, as in verl's rows."""
_OTHER_NAMES = ("image", "images", "picture", "pictures", "img", "image_path")
"""Columns of pictures in other data sets."""
AUDIO_KEY = "audios"
"""verl's column of sounds (`data.audio_key`)."""
_NAMES = {IMAGE: "picture", VIDEO: "video"}
_SOURCES: Mapping[str, Any] = {IMAGE: picture_source, VIDEO: video_source}
_MARKS = re.compile("(" + "|".join(PLACEHOLDERS.values()) + ")")
_KINDS = {mark: kind for kind, mark in PLACEHOLDERS.items()}


def take_pictures(
    raw: Mapping[str, Any], messages: Sequence[dict[str, Any]], image_key: str, video_key: str
) -> tuple[list[dict[str, Any]], tuple[Shown, ...]] | str:
    """Return the messages with a part for each picture and video, and these in order; or what is wrong with them.

    Args:
        raw: The row.
        messages: Its prompt, from `as_messages`.
        image_key: Column of the pictures (`data.image_key`).
        video_key: Column of the videos (`data.video_key`).
    """
    if _listed(raw.get(AUDIO_KEY)):
        return f"{AUDIO_KEY!r} has sounds, and hrl shows a model none: leave the row out, or empty the column"
    keys = {IMAGE: image_key, VIDEO: video_key}
    try:
        given = {
            kind: [
                _SOURCES[kind](each, f"{_NAMES[kind]} {number} of {key!r}")
                for number, each in enumerate(_listed(raw.get(key)))
            ]
            for kind, key in keys.items()
        }
        placed, shown = _placed(messages, given, keys)
    except WrongPictureError as error:
        return str(error)
    return _elsewhere(raw, messages, image_key) or (placed, shown)


def _elsewhere(raw: Mapping[str, Any], messages: Sequence[dict[str, Any]], image_key: str) -> str | None:
    """Return what is wrong with a row whose prompt shows a picture, and whose pictures are in another column."""
    marks = PLACEHOLDERS[IMAGE]
    if _listed(raw.get(image_key)) or not any(
        isinstance(message["content"], str) and marks in message["content"] for message in messages
    ):
        return None
    other = next((name for name in _OTHER_NAMES if name != image_key and _listed(raw.get(name))), None)
    if other is None:
        return None
    return (
        f"the prompt has {marks}, and {image_key!r} has no picture, but the column {other!r} something: if these are "
        f"the pictures, set data.image_key={other}"
    )


def _listed(value: object) -> list[Any]:
    """Return what a column shows: one that is not in a list is the only one."""
    if value is None:
        return []
    if isinstance(value, np.ndarray) and value.dtype != object:  # frames
        return [value]
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes | bytearray):
        return [each for each in value if each is not None]
    return [value]


def _placed(
    messages: Sequence[dict[str, Any]], given: Mapping[str, list[Shown]], keys: Mapping[str, str]
) -> tuple[list[dict[str, Any]], tuple[Shown, ...]]:
    """Put a part in the place of each placeholder of which the row's column has something."""
    found: list[Shown] = []
    left = {kind: list(sources) for kind, sources in given.items()}

    def taken(kind: str, where: str) -> Shown:
        if not left[kind]:
            raise WrongPictureError(
                f"{where} shows one {_NAMES[kind]} more than {keys[kind]!r} has, which is {len(given[kind])}: it needs "
                f"one for each {PLACEHOLDERS[kind]} of the prompt"
            )
        return left[kind].pop(0)

    placed = []
    for position, message in enumerate(messages):
        where, content = f"message {position}", message["content"]
        if isinstance(content, str):
            pieces = _MARKS.split(content)
            shows = [kind for kind in map(_KINDS.get, pieces) if kind is not None and given[kind]]
            if shows:
                parts: list[dict[str, Any]] = []
                for piece in pieces:
                    kind = _KINDS.get(piece)
                    if kind is not None and given[kind]:
                        parts.append({"type": kind})
                        found.append(taken(kind, where))
                    elif piece:
                        parts.append({"type": "text", "text": piece})
                message = message | {"content": parts}
        elif isinstance(content, Sequence):
            parts = []
            for part in content:
                kind = part["type"]
                if kind == "text":
                    parts.append({"type": "text", "text": part["text"]})
                    continue
                parts.append({"type": kind})
                own = part_source(part, kind)
                if own is None:
                    found.append(taken(kind, where))
                else:
                    if kind == VIDEO and not isinstance(own, Mapping):
                        own = {**part, VIDEO: own}  # which may say how fast its frames follow each other
                    found.append(_SOURCES[kind](own, f"the {_NAMES[kind]} of {where}"))
            message = message | {"content": parts}
        placed.append(message)
    for kind, rest in left.items():
        if rest:
            number = len(given[kind])
            raise WrongPictureError(
                f"{keys[kind]!r} has {number} {_NAMES[kind]}{'s' * (number > 1)}, and the prompt shows "
                f"{number - len(rest)}: put {PLACEHOLDERS[kind]} where each belongs, or a part { ({'type': kind}) }"
            )
    return placed, tuple(found)


class PictureTokens:
    """Which tokens of a prompt stand for its pictures and videos.

    Args:
        tokenizer: Of the trained model. The model's `config.json` and its processors' settings lie beside it.
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

    @property
    def videos(self) -> VideoProcessor:
        """The video processor beside the tokenizer.

        Raises:
            DatasetError: There is none, or it is not understood.
        """
        try:
            return self.processor.videos
        except PictureError as error:
            raise DatasetError(str(error)) from error

    def num_tokens(self, shown: Shown) -> int:
        """Return how many tokens stand for a picture or a video, without those between its moments.

        Raises:
            ValueError: The processor takes none of such a shape.
        """
        if isinstance(shown, PictureSource):
            return self.processor.num_tokens(shown.width, shown.height)
        return self.videos.num_tokens(self.videos.look(shown).grid)

    def spread(self, text: str, shown: Sequence[Shown]) -> str:
        """Return a rendered prompt in which as many tokens stand for each picture and video as it takes.

        Raises:
            ChatTemplateError: The chat template shows another number of pictures or videos.
            ValueError: The processor takes none of such a shape.
        """
        tokens = {IMAGE: self._token(self.processor.token_id)}
        if self.processor.video_token_id is not None:
            tokens[VIDEO] = self._token(self.processor.video_token_id)
        kinds = {token: kind for kind, token in tokens.items()}
        pieces = re.split("(" + "|".join(map(re.escape, tokens.values())) + ")", text)
        marks = [kinds[piece] for piece in pieces[1::2]]
        wanted = [VIDEO if isinstance(each, VideoSource) else IMAGE for each in shown]
        for kind in (IMAGE, VIDEO):
            if (number := marks.count(kind)) != wanted.count(kind):
                token = tokens.get(kind, "the model has no token for one")
                raise ChatTemplateError(
                    f"the chat template shows {number} {_NAMES[kind]}s ({token}) of a prompt with {wanted.count(kind)}"
                )
        if marks != wanted:
            raise ChatTemplateError("the chat template shows a prompt's pictures and videos in another order")
        for number, each in enumerate(shown):
            at = 2 * number + 1
            if isinstance(each, PictureSource):
                pieces[at] *= self.processor.num_tokens(each.width, each.height)
            else:
                before, pieces[at], behind = self.videos.spread(each, self._token)
                pieces[at - 1] = pieces[at - 1].removesuffix(before)
                pieces[at + 1] = pieces[at + 1].removeprefix(behind)
        return "".join(pieces)

    def _token(self, number: int) -> str:
        return str(self._tokenizer.convert_ids_to_tokens(number))

    def shows(self, ids: np.ndarray) -> bool:
        """Return whether a prompt's tokens have one that stands for a part of a picture or a video."""
        return bool(np.isin(ids, [self.processor.token_id, self.processor.video_token_id or -1]).any())

    def placed(self, ids: np.ndarray, shown: Sequence[Shown]) -> tuple[Picture, ...]:
        """Return the pictures and the videos' moments of a prompt with their places among its tokens.

        Args:
            ids: `(P,)`, of the text that `spread` returned.
            shown: In the order of the prompt.

        Raises:
            DatasetError: A file can't be read any more.
        """
        places = iter(np.flatnonzero(ids == self.processor.token_id).tolist())
        of_videos = iter(np.flatnonzero(ids == self.processor.video_token_id).tolist())
        found: list[Picture] = []
        for each in shown:
            if isinstance(each, PictureSource):
                length = self.processor.num_tokens(each.width, each.height)
                data = each.read()
                found.append(Picture(data, digest_of(data), _run(places, length), length))
                continue
            look = self.videos.look(each)
            files = each.read(look.chosen)
            for moment, (at, grid) in enumerate(self.videos.moments(look)):
                (data, *others), length = files[at], self.videos.num_tokens(grid)
                digest = digest_of_frames([data, *others], grid, look.seconds)
                clip = Clip(tuple(others), grid, look.seconds, moment)
                found.append(Picture(data, digest, _run(of_videos, length), length, clip))
        return tuple(found)


def _run(places: Any, length: int) -> int:
    """Return the first of the next places, as many as belong together."""
    first, *_ = (next(places) for _ in range(length))
    return int(first)
