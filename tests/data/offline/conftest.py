"""The tokenizer that the tests of the data don't need a model for, and a real one."""

import pytest
from transformers import PreTrainedTokenizerFast

from hrl.models.source import resolve_model
from hrl.models.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def bundled() -> PreTrainedTokenizerFast:
    """The bundled model's: it merges bytes, and cuts spaces by what follows them."""
    return load_tokenizer(resolve_model("bundled:smollm2-135m-instruct"))
