"""Whether a model folder holds what training reads: a configuration, whole safetensors weights.

Nothing is loaded: of a file of weights only its header is read, which also tells whether the file was cut off.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hrl.models.source import ModelSourceError

_INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_HEAD = "score.weight"
_LFS_POINTER = b"version https://git-lfs"


def model_facts(folder: Path) -> dict[str, Any]:
    """Return what stands in a model folder's `config.json`.

    Raises:
        ModelSourceError: It is no JSON object.
    """
    file = folder / "config.json"
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"{file} is no JSON: {error}") from error
    if not isinstance(facts, dict):
        raise ModelSourceError(f"{file} holds a {type(facts).__name__}, expected an object")
    return facts


def check_weights(folder: Path) -> None:
    """Refuse a folder without whole safetensors weights.

    Raises:
        ModelSourceError: Naming what is missing or torn, and the way out.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelSourceError(_no_weights(folder))
    missing = sorted(_listed(folder) - {file.name for file in files})
    if missing:
        raise ModelSourceError(f"{folder} lacks {missing[0]}, one of {len(missing)} files that {_INDEX} lists")
    for file in files:
        _check_header(file)


def check_scores(folder: Path) -> None:
    """Refuse a folder of weights without a head that scores.

    Raises:
        ModelSourceError: No file of weights holds `score.weight`.
    """
    from safetensors import safe_open

    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as tensors:
            if _HEAD in tensors.keys():
                return
    raise ModelSourceError(
        f"{folder} has no scalar head ({_HEAD}): a reward model is a sequence classifier with one label that was "
        "trained to score, such as main_rm writes"
    )


def _no_weights(folder: Path) -> str:
    pickled = sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern))
    if pickled:
        return (
            f"{folder} has no safetensors weights, only {pickled[0]}, and hrl loads no pickled ones. Convert it: "
            f"transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained('converted')"
        )
    if any(folder.glob("*.gguf")):
        return f"{folder} has GGUF weights, which can't be trained; take the model they were made from"
    return f"{folder} has no weights: there is no *.safetensors file in it"


def _listed(folder: Path) -> set[str]:
    """Names of the files that the index distributes the weights over; none without an index."""
    index = folder / _INDEX
    if not index.is_file():
        return set()
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelSourceError(f"{index} is no index of weights: {error}") from error


def _check_header(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        with file.open("rb") as opened:
            pointer = opened.read(len(_LFS_POINTER)) == _LFS_POINTER
        why = "is a pointer of Git LFS; fetch it with `git lfs pull`" if pointer else f"is not whole: {error}"
        raise ModelSourceError(f"{file} {why}") from error
