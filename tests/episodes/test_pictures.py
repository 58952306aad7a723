"""The pictures of a row stand in the first prompt of its episode, and stay where they are."""

from __future__ import annotations

from typing import Any

import pytest

from hrl.data.chat import ChatTemplateError
from hrl.environments import EnvironmentReplyError, Observation
from hrl.episodes.pictures import EpisodePictures
from hrl.episodes.tokens import Transcript
from hrl.pictures import Picture
from tests.models.tiny_pictures import SPECIAL, TEMPLATE, tokenizer

PAD, END = SPECIAL.index("<|image_pad|>"), SPECIAL.index("<|im_end|>")
TOKENIZER = tokenizer()
LENGTHS = (4, 6)
SHOWN = EpisodePictures(tuple(Picture(b"", str(length), 0, length) for length in LENGTHS), SPECIAL[PAD], PAD)
IMAGE = {"type": "image"}
PROMPT = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "or"}, IMAGE, {"type": "text", "text": "?"}]}]


def begun(messages: list[dict[str, Any]], tokens: Any = TOKENIZER, **given: Any) -> Transcript:
    return Transcript(tokens, (END,), {}, first=Observation(messages=messages), pictures=SHOWN, **given)


def say(script: Transcript, text: str) -> list[int]:
    ids = [*TOKENIZER(text)["input_ids"], END]
    script.add_turn(ids, [-1.0] * len(ids), 0, {"content": text})
    return ids


def starts(pictures: tuple[Picture, ...]) -> list[int]:
    return [picture.start for picture in pictures]


def as_run(chat: list[dict[str, Any]]) -> list[int]:
    """What a run without environment makes of a prompt: each picture's token as often as it is long."""
    pieces = TOKENIZER.apply_chat_template(chat, tokenize=False, add_generation_prompt=True).split(SPECIAL[PAD])
    text = pieces[0] + "".join(SPECIAL[PAD] * n + rest for n, rest in zip(LENGTHS, pieces[1:], strict=True))
    return list(TOKENIZER(text)["input_ids"])


@pytest.mark.parametrize("is_given", [True, False])
def test_a_chat_that_grows_keeps_the_pictures_of_its_prompt(is_given: bool) -> None:
    prompt = as_run(PROMPT)
    script = begun(PROMPT, prompt_ids=prompt if is_given else None)
    assert script.context == prompt and starts(script.pictures) == [prompt.index(PAD), prompt.index(PAD) + 4 + 4]
    said = say(script, "the left")
    # A token of pictures in an environment's words, or in the policy's, is ordinary text.
    heard = f"look again <|image_pad|> {SPECIAL[PAD]}"
    script.add_observation(Observation(messages=[{"role": "user", "content": heard}]))
    assert script.context[: len(prompt) + len(said)] == [*prompt, *said] and script.context.count(PAD) == sum(LENGTHS)
    say(script, "the <|image_pad|> right")
    script.add_observation(Observation(messages=[{"role": "user", "content": "sure?"}]))
    assert script.num_rows == 1
    say(script, "yes")
    (row,) = script.rows()
    assert row.pictures == script.pictures and list(row.prompt_ids) == prompt


def test_an_environment_may_say_something_before_them() -> None:
    messages = [{"role": "system", "content": "See."}, *PROMPT]
    script = begun(messages)
    assert script.context == as_run(messages)
    assert starts(script.pictures)[0] == script.context.index(PAD) > as_run(PROMPT).index(PAD)


def test_an_environment_with_words_alone_shows_none() -> None:
    script = begun([{"role": "user", "content": "What?"}])
    assert script.pictures == () and PAD not in script.context
    say(script, "nothing")
    assert script.rows()[0].pictures == ()


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([{"role": "user", "content": [IMAGE]}], "has places for 1 picture, and the row has 2"),
        ([*PROMPT, {"role": "user", "content": "<|image_pad|>"}], "spells <|image_pad|>"),
        ([{"role": "user", "content": [IMAGE, {"type": "video"}]}], "has a place for a video"),
    ],
)
def test_what_can_not_be_shown_is_refused(messages: list[dict[str, Any]], what: str) -> None:
    with pytest.raises(EnvironmentReplyError) as caught:
        begun(messages)
    assert what in str(caught.value)


def test_later_observations_are_words() -> None:
    script = begun(PROMPT)
    say(script, "the left")
    with pytest.raises(EnvironmentReplyError, match="an observation after the first shows no pictures"):
        script.add_observation(Observation(messages=[{"role": "user", "content": [IMAGE]}]))


def test_a_branch_keeps_them() -> None:
    """A template that forgets earlier turns of the policy begins a row anew, with the same pictures."""
    forgetful = tokenizer()
    forgetful.chat_template = TEMPLATE.replace(
        "{% for message in messages %}",
        "{% for message in messages | rejectattr('role', 'equalto', 'assistant') %}",
    )
    script = begun(PROMPT, forgetful)
    say(script, "the left")
    script.add_observation(Observation(messages=[{"role": "user", "content": "sure?"}]))
    assert script.num_rows == 2
    say(script, "yes")
    first, second = script.rows()
    assert first.pictures == second.pictures == script.pictures
    assert [place for place, token in enumerate(second.prompt_ids) if token == PAD] == [
        picture.start + number for picture in script.pictures for number in range(picture.length)
    ]


def test_a_template_that_moves_them_is_refused() -> None:
    moving = tokenizer()
    moving.chat_template = "{{ messages | length }}" + TEMPLATE
    script = begun(PROMPT, moving)
    say(script, "the left")
    with pytest.raises(ChatTemplateError, match="rewrites what stands before or between an episode's pictures"):
        script.add_observation(Observation(messages=[{"role": "user", "content": "sure?"}]))
