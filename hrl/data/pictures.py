"""Pictures and videos of a row: which part of the prompt shows them, and which of its tokens stand for them.

A row has them in the columns `images` and `videos` (`data.image_key`, `data.video_key`), in the order of the prompt's
placeholders, or in the prompt's own parts; what they may be is said in `hrl.data.picture_files`. Files are looked at
with the row, and read again when the row is drawn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hrl.data.chat import ChatTemplateError, texts_in
from hrl.data.picture_files import WrongPictureError, limited, part_source, picture_source, video_of_part, video_source
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
    digest_of_frames,
    digest_of_picture,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IMAGE, VIDEO = "image", "video"
"""Kinds of what a prompt shows, as its parts call them."""
PLACEHOLDERS = {IMAGE: "<image>", VIDEO: "<video>"}
"""What stands for the row's next picture or video in the text of a prompt, as in verl's rows."""
_KEYS = {IMAGE: "data.image_key", VIDEO: "data.video_key"}
_OTHER_NAMES = {
    IMAGE: ("images", "image", "picture", "pictures", "img", "image_path"),
    VIDEO: ("videos", "video", "clip", "clips", "video_path"),
}
"""Columns of pictures and videos in other data sets."""
AUDIO_KEY = "audios"
"""verl's column of sounds (`data.audio_key`)."""
_SOUNDS = ("audio", "sound", "sounds")
"""Those of other data sets."""
_FILES = (
    *(".png", ".apng", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v"),
)
"""How names of pictures and videos end."""
_NAMES = {IMAGE: "picture", VIDEO: "video"}
_SOURCES: Mapping[str, Any] = {IMAGE: picture_source, VIDEO: video_source}
_MARKS = re.compile("(" + "|".join(PLACEHOLDERS.values()) + ")")
_KINDS = {mark: kind for kind, mark in PLACEHOLDERS.items()}


def take_pictures(
    raw: Mapping[str, Any], messages: Sequence[dict[str, Any]], image_key: str | None, video_key: str | None
) -> tuple[list[dict[str, Any]], tuple[Shown, ...]] | str:
    """Return the messages with a part for each picture and video, and these in order; or what is wrong with them.

    Args:
        raw: The row.
        messages: Its prompt, from `as_messages`.
        image_key: Column of the pictures (`data.image_key`); None shows those alone that parts of the prompt bring.
        video_key: Column of the videos (`data.video_key`); likewise.
    """
    sounds = (AUDIO_KEY, *_SOUNDS) if _shows(messages, "<audio>") else (AUDIO_KEY,)
    if (name := next((name for name in sounds if _listed(raw.get(name))), None)) is not None:
        return f"{name!r} has sounds, and hrl shows a model none: leave the row out, or empty the column"
    keys = {IMAGE: image_key, VIDEO: video_key}
    try:
        given = {
            kind: [
                _SOURCES[kind](each, f"{_NAMES[kind]} {number} of {key!r}")
                for number, each in enumerate([] if key is None else _listed(raw.get(key)))
            ]
            for kind, key in keys.items()
        }
        placed, shown = _placed(messages, given, keys)
    except WrongPictureError as error:
        return str(error)
    return next(filter(None, (_elsewhere(raw, messages, kind, key) for kind, key in keys.items())), (placed, shown))


def _elsewhere(raw: Mapping[str, Any], messages: Sequence[dict[str, Any]], kind: str, key: str | None) -> str | None:
    """Return what is wrong with a row whose prompt shows a picture or a video, and that has these in another column."""
    if key is None or _listed(raw.get(key)) or not _shows(messages, PLACEHOLDERS[kind]):
        return None
    other = next((name for name in _OTHER_NAMES[kind] if name != key and _listed(raw.get(name))), None)
    if other is None:
        return None
    return (
        f"the prompt has {PLACEHOLDERS[kind]}, and {key!r} has no {_NAMES[kind]}, but the column {other!r} something: "
        f"if these are the {_NAMES[kind]}s, set {_KEYS[kind]}={other}"
    )


def _shows(messages: Sequence[Mapping[str, Any]], mark: str) -> bool:
    return any(isinstance(message["content"], str) and mark in message["content"] for message in messages)


def passed_over(raw: Mapping[str, Any], image_key: str | None, video_key: str | None) -> str | None:
    """Return what is wrong with a row that shows nothing, and has pictures or videos in a column called otherwise.

    Args:
        raw: The row.
        image_key: Column of the pictures (`data.image_key`); None shows none, and nothing is wrong.
        video_key: Column of the videos (`data.video_key`); likewise.
    """
    for kind, key in ((IMAGE, image_key), (VIDEO, video_key)):
        others = (name for name in _OTHER_NAMES[kind] if name != key and _holds_files(raw.get(name)))
        if key is not None and (other := next(others, None)) is not None:
            return (
                f"the column {other!r} has a {_NAMES[kind]}, which the prompt does not show: set {_KEYS[kind]}={other} "
                f"and put {PLACEHOLDERS[kind]} where each belongs; {_KEYS[kind]}=null reads the words alone"
            )
    return None


def _holds_files(value: object) -> bool:
    """Return whether a column has what a picture or a video may be, and not words."""
    return any(
        isinstance(each, bytes | bytearray | np.ndarray)
        or type(each).__module__.startswith("PIL.")
        or (isinstance(each, Mapping) and not {"bytes", "path"}.isdisjoint(each))
        or (isinstance(each, str) and (each.startswith("data:") or each.lower().endswith(_FILES)))
        for each in _listed(value)
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
    messages: Sequence[dict[str, Any]], given: Mapping[str, list[Shown]], keys: Mapping[str, str | None]
) -> tuple[list[dict[str, Any]], tuple[Shown, ...]]:
    """Put a part in the place of each placeholder of which the row's column has something."""
    found: list[Shown] = []
    left = {kind: list(sources) for kind, sources in given.items()}

    def taken(kind: str, where: str) -> Shown:
        if not left[kind]:
            if keys[kind] is None:
                raise WrongPictureError(
                    f"{where} shows a {_NAMES[kind]} that it does not bring, and {_KEYS[kind]} is null"
                )
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
                own, name = part_source(part, kind), f"the {_NAMES[kind]} of {where}"
                if kind == VIDEO:
                    own = video_of_part(part, own, name)
                source = taken(kind, where) if own is None else _SOURCES[kind](own, name)
                found.append(limited(source, part, name) if isinstance(source, PictureSource) else source)
            message = message | {"content": parts}
        placed.append(message)
    for kind, rest in left.items():
        if rest:
            number = len(given[kind])
            raise WrongPictureError(
                f"{keys[kind]!r} has {number} {_NAMES[kind]}{'s' * (number > 1)}, and the prompt shows "
                f"{number - len(rest)}: put {PLACEHOLDERS[kind]} where each belongs, or a part { ({'type': kind}) }; "
                f"{_KEYS[kind]}=null reads the words alone"
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

    @cached_property
    def sees(self) -> bool:
        """Whether the model sees, with an image processor in its folder."""
        try:
            return bool(self.processor)
        except DatasetError:
            return False

    def num_tokens(self, shown: Shown) -> int:
        """Return how many tokens stand for a picture or a video, without those between its moments.

        Raises:
            ValueError: The processor takes none of such a shape.
        """
        if isinstance(shown, PictureSource):
            return self.processor.num_tokens(shown.width, shown.height, shown.limits)
        return self.videos.num_tokens(self.videos.look(shown).grid)

    def require_unspelled(self, messages: Sequence[Mapping[str, Any]], tools: object = None) -> None:
        """Refuse a prompt whose texts spell a token that its template writes where a picture is shown.

        The two could not be told apart. An answer may have them: only a prompt has places for pictures.

        Args:
            messages: The prompt.
            tools: Functions that it offers.

        Raises:
            ChatTemplateError: One does; names it.
        """
        for where, said in [*((f"message {number}", each) for number, each in enumerate(messages)), ("'tools'", tools)]:
            for text in texts_in(said):
                token = next((token for token in self._own_tokens if token in text), None)
                if token is not None:
                    raise ChatTemplateError(
                        f"{where} spells {token}, by which this model's prompts show a picture, beside pictures that "
                        f"the row has: where one belongs write {PLACEHOLDERS[IMAGE]}, and elsewhere put a space in it"
                    )

    @cached_property
    def _own_tokens(self) -> list[str]:
        """The texts of the tokens that show a picture or a video, or stand around it."""
        return [self._token(number) for number in self.processor.own_tokens]

    @property
    def picture_token(self) -> str:
        """The text of the token that stands for a part of a picture."""
        return self._token(self.processor.token_id)

    def spread(self, text: str, shown: Sequence[Shown]) -> str:
        """Return a rendered prompt in which as many tokens stand for each picture and video as it takes.

        Args:
            text: The prompt, whose messages spell no such token (`require_unspelled`).
            shown: In the order of the prompt.

        Raises:
            ChatTemplateError: The chat template shows another number of pictures or videos.
            ValueError: The processor takes none of such a shape.
        """
        tokens = {IMAGE: self.picture_token}
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
                pieces[at] *= self.num_tokens(each)
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
                length, data = self.num_tokens(each), each.read()
                digest = digest_of_picture(data, each.limits)
                found.append(Picture(data, digest, _run(places, length), length, limits=each.limits))
                continue
            look = self.videos.look(each)
            files = each.read(look.chosen, partial(self.videos.scaled, grid=look.grid))
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
