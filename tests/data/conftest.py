"""A small byte-level tokenizer with a chat template, so that no test of the data needs a model."""

from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make_tokenizer(chat_template: str | None = CHATML, **special: str) -> PreTrainedTokenizerFast:
    """One token per byte, and `<|start|>`, `<|end|>`, `<pad>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<|start|>", "<|end|>", "<pad>")]
    )
    names = {"eos_token": "<|end|>", "pad_token": "<pad>"} | special
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=chat_template, **names)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def config() -> SimpleNamespace:
    """The part of the `data` section that a data set reads."""
    return SimpleNamespace(
        prompt_key="prompt",
        answer_key=None,
        image_key="images",
        video_key="videos",
        map={},
        max_prompt_length=40,
        filter_overlong_prompts=False,
        truncation="error",
        apply_chat_template_kwargs={},
        bad_rows="error",
        shuffle=True,
        seed=3,
    )


def row(prompt: object = "hi", **changes: object) -> dict[str, object]:
    """A good row, with changes."""
    made = {"data_source": "s", "prompt": prompt, "reward_model": {"ground_truth": "1"}, "extra_info": {"a": 1}}
    return made | changes


@pytest.fixture
def make_row():
    return row


@pytest.fixture
def tokenizer_with():
    return make_tokenizer
