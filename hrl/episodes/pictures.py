"""What the first prompt of an episode shows, through the template's renderings of a chat that grows.

The row's pictures stand in the first observation, and everything that comes later is text. The chat template writes one
token for each, in the place of which as many stand as the picture takes, whenever the chat is rendered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hrl.config.arithmetic import count
from hrl.data.chat import ChatTemplateError, texts_in
from hrl.environments.interface import EnvironmentReplyError
from hrl.pictures import Picture

NO_VIDEOS = "the first prompt of an episode shows pictures alone"


@dataclass(frozen=True)
class EpisodePictures:
    """The pictures of an episode's row.

    Attributes:
        pictures: Those of the row, in order.
        token: The text of the token that stands for a part of one.
        token_id: Its id.
    """

    pictures: tuple[Picture, ...]
    token: str
    token_id: int

    def of(self, messages: Sequence[Mapping[str, Any]]) -> EpisodePictures | None:
        """Return what a first observation shows; None where it shows nothing.

        Raises:
            EnvironmentReplyError: It has places for another number of pictures than the row has, or spells their token.
        """
        kinds = [part["type"] for message in messages for part in _parts(message)]
        if "video" in kinds:
            raise EnvironmentReplyError(f"the first observation has a place for a video, and {NO_VIDEOS}")
        if (places := kinds.count("image")) == 0:
            return None
        if places != len(self.pictures):
            raise EnvironmentReplyError(
                f"the first observation has places for {count(places, 'picture')}, and the row has "
                f"{len(self.pictures)}: keep the parts {{'type': 'image'}} of the row's prompt, or leave out all"
            )
        if any(self.token in text for message in messages for text in texts_in(message)):
            raise EnvironmentReplyError(
                f"the first observation spells {self.token}, which stands for a part of a picture: put a space in it"
            )
        return self

    def spread(self, text: str) -> str:
        """Return a rendered chat in which as many tokens stand for each picture as it takes.

        Raises:
            ChatTemplateError: The template shows another number of pictures.
        """
        lengths = iter(self.pictures)
        found = text.count(self.token)
        if found != len(self.pictures):
            raise ChatTemplateError(
                f"the chat template shows {found} pictures ({self.token}) of an episode with {len(self.pictures)}"
            )
        return re.sub(re.escape(self.token), lambda _: self.token * next(lengths).length, text)

    def placed(self, ids: Sequence[int]) -> tuple[Picture, ...]:
        """Return the pictures with their places among the tokens of a prompt.

        Raises:
            ChatTemplateError: Not all of them stand in it, each in one piece.
        """
        found, place = [], 0
        for picture in self.pictures:
            while place < len(ids) and ids[place] != self.token_id:
                place += 1
            if any(token != self.token_id for token in ids[place : place + picture.length]) or (
                place + picture.length > len(ids)
            ):
                raise ChatTemplateError("the first prompt does not show all of a picture: is it cut off?")
            found.append(replace(picture, start=place))
            place += picture.length
        return tuple(found)


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message.get("content")
    return () if content is None or isinstance(content, str) else content
