"""What the first prompt of an episode shows, through the template's renderings of a chat that grows.

The row's pictures stand in the first observation, and everything that comes later is text. The chat template writes one
token for each, in the place of which as many stand as the picture takes, whenever the chat is rendered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hrl.config.arithmetic import count
from hrl.data.chat import ChatTemplateError
from hrl.environments.interface import EnvironmentReplyError
from hrl.pictures import Picture

if TYPE_CHECKING:
    from hrl.data.pictures import PictureTokens

NO_VIDEOS = "the first prompt of an episode shows pictures alone"


@dataclass(frozen=True)
class EpisodePictures:
    """The pictures of an episode's row.

    Attributes:
        tokens: Which tokens of the policy stand for pictures.
        pictures: Those of the row, in order.
    """

    tokens: PictureTokens
    pictures: tuple[Picture, ...]

    def shown_in(self, messages: Sequence[Mapping[str, Any]]) -> EpisodePictures | None:
        """Return what a first observation shows; None where it shows nothing.

        Raises:
            EnvironmentReplyError: It has places for another number of pictures than the row has, brings one of its own,
                or would have the policy continue a message that shows one.
            ChatTemplateError: It spells a token by which prompts show a picture.
        """
        parts = [part for message in messages for part in _parts(message)]
        kinds = [part["type"] for part in parts]
        if "video" in kinds:
            raise EnvironmentReplyError(f"the first observation has a place for a video, and {NO_VIDEOS}")
        if (places := kinds.count("image")) == 0:
            return None
        if places != len(self.pictures):
            raise EnvironmentReplyError(
                f"the first observation has places for {count(places, 'picture')}, and the row has "
                f"{len(self.pictures)}: keep the parts {{'type': 'image'}} of the row's prompt, or leave out all"
            )
        own = next((part for part in parts if part["type"] == "image" and len(part) > 1), None)
        if own is not None:
            keys = ", ".join(key for key in own if key != "type")
            raise EnvironmentReplyError(
                f"the first observation brings a picture of its own ({keys}), and shows those of the row: have "
                "{'type': 'image'} where one belongs, in the row's order"
            )
        if messages[-1]["role"] == "assistant" and "image" in (part["type"] for part in _parts(messages[-1])):
            raise EnvironmentReplyError(
                "the first observation ends with a message of the assistant that shows a picture, which the policy "
                "can't continue: let it end with text"
            )
        self.tokens.require_unspelled(messages)
        return self

    def spread(self, text: str) -> str:
        """Return a rendered chat in which as many tokens stand for each picture as it takes.

        Raises:
            ChatTemplateError: The template shows another number of pictures.
        """
        token, lengths = self.tokens.picture_token, iter(self.pictures)
        found = text.count(token)
        if found != len(self.pictures):
            raise ChatTemplateError(
                f"the chat template shows {count(found, 'picture')} ({token}) of an episode with {len(self.pictures)}"
            )
        return re.sub(re.escape(token), lambda _: token * next(lengths).length, text)

    def placed(self, ids: Sequence[int]) -> tuple[Picture, ...]:
        """Return the pictures with their places among the tokens of a prompt.

        Raises:
            ChatTemplateError: Not all of them stand in it, each in one piece.
        """
        found, place, token_id = [], 0, self.tokens.processor.token_id
        for picture in self.pictures:
            while place < len(ids) and ids[place] != token_id:
                place += 1
            if list(ids[place : place + picture.length]) != [token_id] * picture.length:
                raise ChatTemplateError("the first prompt does not show all of a picture: is it cut off?")
            found.append(replace(picture, start=place))
            place += picture.length
        return tuple(found)


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message.get("content")
    return () if content is None or isinstance(content, str) else content
