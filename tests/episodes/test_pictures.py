"""The pictures of a row stand in the first prompt of its episode, and stay where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hrl.columns import object_column
from hrl.data.chat import ChatTemplateError
from hrl.data.pictures import PictureTokens
from hrl.environments import EnvironmentReplyError, Observation
from hrl.episodes.episode import Episode
from hrl.episodes.pictures import EpisodePictures
from hrl.episodes.rows import episode_batch
from hrl.episodes.tokens import Transcript
from hrl.models.packed_model import TokenRows
from hrl.models.tokenizer import load_tokenizer
from hrl.pictures import MULTI_MODAL_DATA, Picture
from hrl.protocol import DataProto
from tests.models.tiny_pictures import SPECIAL, TEMPLATE, config_of, save_processors, tokenizer

PAD, END = SPECIAL.index("<|image_pad|>"), SPECIAL.index("<|im_end|>")
TOKENIZER = tokenizer()
LENGTHS = (4, 6)
IMAGE = {"type": "image"}
PROMPT = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "or"}, IMAGE, {"type": "text", "text": "?"}]}]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> EpisodePictures:
    folder = tmp_path_factory.mktemp("model")
    config_of().save_pretrained(folder)
    save_processors(folder, "qwen2_5_vl")
    pictures = tuple(Picture(b"", str(length), 0, length) for length in LENGTHS)
    return EpisodePictures(PictureTokens(load_tokenizer(folder)), pictures)


@pytest.fixture(scope="module")
def begun(shown: EpisodePictures) -> Any:
    def begin(messages: list[dict[str, Any]], tokens: Any = TOKENIZER, **given: Any) -> Transcript:
        return Transcript(tokens, (END,), {}, first=Observation(messages=messages), pictures=shown, **given)

    return begin


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
def test_a_chat_that_grows_keeps_the_pictures_of_its_prompt(begun: Any, is_given: bool) -> None:
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


def test_an_environment_may_say_something_before_them(begun: Any) -> None:
    messages = [{"role": "system", "content": "See."}, *PROMPT]
    script = begun(messages)
    assert script.context == as_run(messages)
    assert starts(script.pictures)[0] == script.context.index(PAD) > as_run(PROMPT).index(PAD)


def test_an_environment_with_words_alone_shows_none(begun: Any) -> None:
    script = begun([{"role": "user", "content": "What?"}])
    assert script.pictures == () and PAD not in script.context
    say(script, "nothing")
    assert script.rows()[0].pictures == ()


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([{"role": "user", "content": [IMAGE]}], "has places for 1 picture, and the row has 2"),
        ([*PROMPT, {"role": "user", "content": "<|image_pad|>"}], "spells <|image_pad|>"),
        ([*PROMPT, {"role": "user", "content": "<|vision_start|>"}], "spells <|vision_start|>"),
        ([{"role": "user", "content": [IMAGE, IMAGE | {"image": "board.png"}]}], "a picture of its own (image)"),
        ([{"role": "assistant", "content": [IMAGE, IMAGE]}], "ends with a message of the assistant"),
        ([{"role": "user", "content": [IMAGE, {"type": "video"}]}], "has a place for a video"),
    ],
)
def test_what_can_not_be_shown_is_refused(begun: Any, messages: list[dict[str, Any]], what: str) -> None:
    with pytest.raises((EnvironmentReplyError, ChatTemplateError)) as caught:
        begun(messages)
    assert what in str(caught.value)


def test_a_template_that_shows_one_picture_less_and_a_prompt_that_is_cut_are_refused(
    begun: Any, shown: EpisodePictures
) -> None:
    forgetful = tokenizer()
    forgetful.chat_template = TEMPLATE.replace("part['type'] == 'image'", "part['type'] == 'image' and not loop.first")
    with pytest.raises(ChatTemplateError, match="shows 1 picture .* of an episode with 2"):
        begun(PROMPT, forgetful)
    whole = as_run(PROMPT)
    with pytest.raises(ChatTemplateError, match="is it cut off"):
        shown.placed(whole[: whole.index(PAD) + 2])


def test_a_failed_episode_is_a_row_with_the_pictures_of_its_prompt(shown: EpisodePictures) -> None:
    ids = as_run(PROMPT)
    pictures = shown.placed(ids)
    asked = DataProto.from_dict(
        tensors={"prompts": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)},
        non_tensors={MULTI_MODAL_DATA: object_column([pictures])},
    )
    failed = Episode(("u", 0), [], [], [], "failed", error="it broke")
    batch = episode_batch(asked, [failed], prompt_width=len(ids), response_width=4, pad_id=0)
    assert list(batch.non_tensor_batch[MULTI_MODAL_DATA]) == [pictures]
    assert TokenRows.of(batch, pictures=True).pictures == [pictures]


def test_later_observations_are_words(begun: Any) -> None:
    script = begun(PROMPT)
    say(script, "the left")
    with pytest.raises(EnvironmentReplyError, match="an observation after the first shows no pictures"):
        script.add_observation(Observation(messages=[{"role": "user", "content": [IMAGE]}]))


def test_a_branch_keeps_them(begun: Any) -> None:
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


def test_a_template_that_moves_them_is_refused(begun: Any) -> None:
    moving = tokenizer()
    moving.chat_template = "{{ messages | length }}" + TEMPLATE
    script = begun(PROMPT, moving)
    say(script, "the left")
    with pytest.raises(ChatTemplateError, match="rewrites what stands before or between an episode's pictures"):
        script.add_observation(Observation(messages=[{"role": "user", "content": "sure?"}]))
