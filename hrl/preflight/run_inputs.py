"""What a run depends on beside its configuration and its rows: models, tokenizer, code of the user's own, versions.

A checkpoint carries them, so that a run that resumes can say what is another one now.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hrl.config.outline import RunConfiguration, outline_of
from hrl.config.run_kind import KINDS
from hrl.config.section import flatten
from hrl.files import expanded
from hrl.preflight.given import Given
from hrl.report.environment import versions
from hrl.reward.function import RewardFunctionError, unwrapped
from hrl.reward.weighted import entries_of
from hrl.user_file import imported_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hrl.data.tokenised_dataset import TokenisedDataset

#: Tensors of a model that are looked at, and bytes of each: enough to tell models apart, and milliseconds to read.
_TENSORS, _BYTES = 64, 4096
_DIGEST_BYTES = 16


def run_inputs(
    config: RunConfiguration,
    given: Given,
    folders: Mapping[str, Path],
    tokenizer: PreTrainedTokenizerBase,
    val_dataset: TokenisedDataset[Any, Any, Any] | None,
) -> dict[str, Any]:
    """Return what a run depends on, as plain data for a checkpoint.

    Args:
        config: The validated configuration.
        given: Objects that replace files of the configuration.
        folders: Role → local folder of its model.
        tokenizer: Of the trained model.
        val_dataset: Rows to validate on, if there are any.

    Returns:
        `kind` of the run; `models`, a digest for each role; `adapters`, a digest for each key that names one to go
        on from; `tokenizer`, a digest of its vocabulary; `validation`, a
        digest of the rows, None without; `code`, a digest for each Python file that a key names or such a file imports
        from beside it, and each reward or
        environment given as an object whose source is known; `versions` of hrl, Python and
        packages.
    """
    return {
        "kind": kind_of(config),
        "models": {role: _of_model(Path(folder)) for role, folder in folders.items()},
        "adapters": dict(_adapters(config)),
        "tokenizer": _digest(json.dumps(_vocabulary(tokenizer), sort_keys=True)),
        "validation": None if val_dataset is None else _of_rows(val_dataset.fingerprint),
        "code": dict([*_files(config), *_objects(given)]),
        "versions": versions(),
    }


def kind_of(config: RunConfiguration) -> str:
    """Return the name of a configuration's kind: `ppo`, `dpo`, `sft` or `rm`."""
    return next(name for name, kind in KINDS.items() if isinstance(config, kind.schema))


def _adapters(config: RunConfiguration) -> Iterator[tuple[str, str]]:
    """Yield the key of each adapter that a run goes on from, and a digest of it."""
    for model in outline_of(config).models.values():
        if model.learner is not None and model.learner.lora_adapter_path is not None:
            key = f"{model.key.rpartition('.')[0]}.lora_adapter_path"
            yield key, _of_model(expanded(model.learner.lora_adapter_path))


def _vocabulary(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return {"ids": tokenizer.get_vocab(), "special": special}


def _of_rows(fingerprint: Mapping[str, Any]) -> str:
    """Return a digest of the rows in a data set's fingerprint; their order is told by the keys that make it."""
    rows = {name: value for name, value in fingerprint.items() if name not in ("shuffle", "seed", "mix")}
    return _digest(json.dumps(rows, sort_keys=True))


def _of_model(folder: Path) -> str:
    """Return a digest of a model: of its configuration, of names, types and shapes, and of some bytes of its weights.

    The same weights in other files, or in files with other metadata, have the same digest.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    config = folder / "config.json"
    if config.is_file():
        described = json.loads(config.read_text(encoding="utf-8"))
        for name in ("transformers_version", "_name_or_path"):  # who wrote it, and from where
            described.pop(name, None)
        digest.update(json.dumps(described, sort_keys=True).encode())
    tensors = sorted(
        (name, shard, about)
        for shard in sorted(folder.glob("*.safetensors"))
        for name, about in _tensors(shard).items()
    )
    for name, _, about in tensors:
        digest.update(json.dumps([name, about["dtype"], about["shape"]]).encode())
    for _, shard, about in tensors[:: max(1, len(tensors) // _TENSORS)]:
        begin, end = about["bytes"]
        middle = begin + max(0, (end - begin - _BYTES) // 2)
        with shard.open("rb") as file:
            file.seek(middle)
            digest.update(file.read(min(_BYTES, end - middle)))
    return digest.hexdigest()


def _tensors(shard: Path) -> dict[str, dict[str, Any]]:
    """Return the tensors of a safetensors file: name → dtype, shape, and where its bytes lie in the file."""
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: {
            "dtype": about["dtype"],
            "shape": about["shape"],
            "bytes": [8 + length + offset for offset in about["data_offsets"]],
        }
        for name, about in header.items()
    }


def _files(config: RunConfiguration) -> Iterator[tuple[str, str]]:
    """Yield name and digest of every Python file that a key names, as `my.py` or `my.py:name`, and of its imports."""
    for key, value in flatten(config.model_dump(mode="json"), type(config)):
        for text in _texts(value):
            file = expanded(text.partition(".py:")[0] + ".py" if ".py:" in text else text)
            if file.suffix == ".py" and os.path.isfile(file):  # `Path.is_file` raises where a text is no path
                yield f"{key} ({file.name})", _digest_of_file(file)
                for other in imported_files(file):
                    yield f"{key} ({other.relative_to(file.resolve().parent)})", _digest_of_file(other)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts([*value.values()])
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _objects(given: Given) -> Iterator[tuple[str, str]]:
    """Yield name and digest of every reward and environment given as an object whose source is there."""
    objects: list[tuple[str, Any]] = []
    if given.environment is not None:
        tools = given.environment if isinstance(given.environment, Sequence) else [given.environment]
        objects += [("environment", one) for one in tools]
    if given.reward is not None:
        try:
            entries = entries_of(given.reward)
        except RewardFunctionError:
            entries = []  # told with everything else that is wrong
        objects += [(f"reward ({entry[0]})", unwrapped(entry[1])) for entry in entries if isinstance(entry, tuple)]
    for name, one in objects:
        named: Any = one if hasattr(one, "__qualname__") else type(one)
        try:
            source = inspect.getsource(named)
        except (OSError, TypeError):  # written in C, or in a notebook that is closed
            continue
        yield name if name != "environment" else f"environment ({named.__qualname__})", _digest(source)


def _digest_of_file(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=_DIGEST_BYTES).hexdigest()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).hexdigest()
