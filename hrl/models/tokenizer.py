"""The tokenizer of a model, and its ids with a special meaning."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hrl.files import expanded
from hrl.models.source import ModelSourceError, check_links, find_on_this_node, read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenIds:
    """The ids with a special meaning.

    Attributes:
        pad: Fills prompts on the left and responses on the right. It may be any id, even the end token's: padding is
            known from lengths, never from ids.
        stop: A response ends at the first of these; empty if only its length ends it.
        vocab_size: All ids are below this.
    """

    pad: int
    stop: tuple[int, ...]
    vocab_size: int


def resolve_tokenizer(path: str) -> str:
    """Return `model.tokenizer_path` as a folder's absolute path, or as the hub id that it is."""
    # Workers may run in another working folder than the driver.
    folder = expanded(path)
    return str(folder.resolve()) if folder.is_dir() else path


def find_tokenizer_on_this_node(path: str) -> str:
    """Return this node's path for what `resolve_tokenizer` returned on the driver's node.

    Raises:
        ModelSourceError: The folder can't be found or made on this node; names node and folder.
    """
    if not os.path.isabs(path) or os.path.isdir(path):  # a hub id, or a folder on this node
        return path
    return str(find_on_this_node(path))


def load_tokenizer(path: str | os.PathLike[str], *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local model folder.

    Raises:
        ModelSourceError: The folder holds no tokenizer, or one that needs `trust_remote_code`; or a file in it leads
            elsewhere.
    """
    from transformers import AutoTokenizer

    if os.path.isdir(path):
        check_links(Path(path))
    try:
        return AutoTokenizer.from_pretrained(os.fspath(path), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"no usable tokenizer in {path}: {error}") from error


def token_ids(tokenizer: PreTrainedTokenizerBase, model_path: str | os.PathLike[str] | None = None) -> TokenIds:
    """Return the special ids of a tokenizer; stop ids also from the model's `generation_config.json`, if it has one.

    Args:
        tokenizer: The policy's.
        model_path: Local model folder. Chat models often stop at more ids than their tokenizer's end token.

    Raises:
        ModelSourceError: The `generation_config.json` is not a JSON object, or its stop ids are no ids.
    """
    stop = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    stop += [token for token in _generation_stop_ids(model_path) if token not in stop]
    if not stop:
        logger.warning("neither tokenizer nor generation config names an end token: only the length ends a response")
    pad = next((i for i in (tokenizer.pad_token_id, *stop) if i is not None), 0)
    return TokenIds(pad=pad, stop=tuple(stop), vocab_size=len(tokenizer))


def _generation_stop_ids(model_path: str | os.PathLike[str] | None) -> list[int]:
    file = None if model_path is None else Path(model_path) / "generation_config.json"
    if file is None or not file.is_file():
        return []
    found = read_object(file).get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 2**31 for one in ids):
        raise ModelSourceError(
            f"eos_token_id in {file} is {str(found)[:80]}, expected the id of a token or a list of ids; mend it there"
        )
    return ids
