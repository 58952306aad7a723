"""`hrl export`: a checkpoint as a folder that transformers and vLLM load, with a card that says how it was made."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import hrl
from hrl.cluster.checkpoints import STATE_FILE
from hrl.errors import HrlError, RefusedError
from hrl.files import expanded
from hrl.models.adapter import CONFIG_FILE, IN_4_BITS, AdapterSource, beside_of
from hrl.models.source import check_links, check_weights, resolve_model
from hrl.models.whole_folder import is_free, whole_model
from hrl.report.run_folder import LIST, OBJECT, WHOLE, read_metrics, read_object, require_kinds
from hrl.trained.folders import Trained, find_trained

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hrl.models.loading import Loaded

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_CARD = "README.md"
_FILES = (".py", ".jsonl", ".json", ".parquet", ".csv", ".tsv", ".arrow")
"""How names of files end, which are local even where they can't be found from here."""


class ExportError(HrlError, RuntimeError):
    """A model can't be written or sent."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        folder: Where.
        dtype: Of the weights.
        weights_bytes: Bytes of the weights.
    """

    folder: Path
    dtype: str
    weights_bytes: int


def export(name: str, out: Path, dtype: str | None = None) -> Exported:
    """Write a model's weights, configuration, tokenizer, chat template, generation settings and card.

    Args:
        name: Run folder, checkpoint (with `hf/`, or shards alone), model folder, hub id or `bundled:...`.
        out: The folder; created, and empty if it is there.
        dtype: Of the weights, such as `bfloat16`; by default that of the model.

    Raises:
        HrlError: There is no such model, or the folder can't be used.
    """
    out = expanded(out).resolve()
    if out.is_dir() and not is_free(out):
        raise RefusedError(f"{out} is not empty; name a new folder")
    if out.exists() and not out.is_dir():
        raise RefusedError(f"{out} is a file; name a folder")
    trained = find_trained(name)
    try:
        with whole_model(out) as unfinished:
            with _reading(trained.name, unfinished):
                if trained.is_adapter:
                    written = _from_adapter(trained, unfinished, dtype)
                elif trained.is_sharded:
                    written = _from_shards(trained, unfinished, dtype)
                else:
                    written = _copy(resolve_model(trained.name), unfinished, dtype)
            (unfinished / _CARD).write_text(model_card(trained, written, out.name), encoding="utf-8")
    except OSError as error:
        raise ExportError(f"{out} can't be written: {error}") from error
    check_weights(out)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    return Exported(out, written, size)


@contextmanager
def _reading(name: str, out: Path) -> Iterator[None]:
    """Convert an `OSError` that is not about the folder which is written to an error of the model.

    Raises:
        ExportError: Something of the model can't be read.
    """
    try:
        yield
    except OSError as error:
        place = error.filename2 or error.filename
        if error.errno is not None and (place is None or Path(place).is_relative_to(out)):
            raise
        raise ExportError(f"{name} can't be read: {error}") from error  # transformers raises some without a number


# ---------------------------------------------------------------------------------------------- weights


def _copy(source: Path, out: Path, dtype: str | None) -> str:
    """Copy a model's folder, with its weights in another dtype if one is asked for; return the dtype."""
    check_links(source)
    check_weights(source)
    config = read_object(source / "config.json")
    own = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    weights = {file.name for pattern in _WEIGHTS for file in source.glob(pattern)}
    for file in sorted(source.iterdir()):
        is_model = file.suffix in (".json", ".jinja", ".txt", ".model", ".py") or file.name in weights
        if file.is_file() and is_model and (dtype in (None, own) or file.name not in weights):
            shutil.copyfile(file, out / file.name)
    if dtype in (None, own):
        return own
    assert dtype is not None
    _save(_cast(source, own, dtype), out)
    config.pop("torch_dtype", None)
    (out / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2, sort_keys=True) + "\n")
    return dtype


def _cast(source: Path, own: str, dtype: str) -> dict[str, Tensor]:
    """Return all tensors; those of the model's dtype in the other one, since buffers may have one of their own."""
    from safetensors.torch import load_file

    from hrl.models.dtypes import dtype_of

    before, after = dtype_of(own), dtype_of(dtype)
    return {
        name: tensor.to(after) if tensor.dtype == before else tensor
        for file in sorted(source.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def _save(tensors: dict[str, Tensor], out: Path) -> None:
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(tensors, out)


def _from_shards(trained: Trained, out: Path, dtype: str | None) -> str:
    """Put the shards of the trained model together, in the form of the model that the run began with."""
    from hrl.workers.engine.weights import PREFIX

    assert trained.checkpoint is not None
    found = {name: trained.checkpoint / name for name in ("actor", "rm") if (trained.checkpoint / name).is_dir()}
    if not found:
        raise ExportError(
            f"{trained.checkpoint} has neither hf, nor actor, nor rm: there is no policy and no reward model in it"
        )
    role, shards = next(iter(found.items()))
    model_keys = _section(trained.config, "actor_rollout_ref.model") or _section(trained.config, "model")
    if not model_keys:
        raise ExportError(
            f"{trained.checkpoint} lies in no run's folder: config.yaml names the model that it began with"
        )
    base = _Base.of(model_keys, model_keys["path"], is_scalar=role == "rm")
    saved = read_object(shards / STATE_FILE)
    require_kinds(str(shards / STATE_FILE), saved, {"base_checksum": WHOLE, "base_dtypes": LIST})
    loaded, dtypes = base.load(_adapter_of(model_keys)), saved.get("base_dtypes") or []
    if IN_4_BITS not in dtypes:  # whose checksum another kind of device may not find again
        _require_base(loaded, base, saved.get("base_checksum"), dtypes)
    held = {f"model.{PREFIX}{name}": each for name, each in loaded.model.named_parameters() if each.requires_grad}
    _read_shards(shards, {name: each.detach() for name, each in held.items()})
    return _write(loaded, base, out, dtype)


def _from_adapter(trained: Trained, out: Path, dtype: str | None) -> str:
    """Add an adapter to the model that its own configuration, or that of its run, names."""
    folder = Path(trained.name)
    said = read_object(folder / CONFIG_FILE)
    model_keys = _section(trained.config, "actor_rollout_ref.model") or _section(trained.config, "model")
    path = model_keys.get("path") or said.get("base_model_name_or_path")
    if not path:
        raise ExportError(f"{folder / CONFIG_FILE} does not name its model: set base_model_name_or_path there")
    base = _Base.of(model_keys, path, is_scalar=said.get("task_type") == "SEQ_CLS")
    checksum, dtypes = beside_of(folder)
    source = AdapterSource(
        rank=0,
        alpha=1,
        target_modules=(),
        exclude_modules=None,
        use_rslora=False,
        path=str(folder),
        seed=0,
        merge=True,
        load_in_4bit=IN_4_BITS in dtypes or bool(model_keys.get("load_in_4bit")),
    )
    loaded = base.load(source)
    _require_base(loaded, base, checksum, dtypes)
    return _write(loaded, base, out, dtype)


def _require_base(loaded: Loaded, base: _Base, checksum: int | None, dtypes: Sequence[str]) -> None:
    """Refuse weights that are not those that an adapter was trained beside; older adapters don't say.

    Raises:
        ExportError: They are others.
    """
    from hrl.models.dtypes import dtype_of
    from hrl.workers.engine.checksum import checksum_of_tensors
    from hrl.workers.engine.weights import PREFIX

    in_full = [name.removeprefix("torch.") for name in dtypes if name != IN_4_BITS]
    if checksum is None or len(in_full) != 1:
        return
    trained_in = dtype_of(in_full[0])
    frozen = (
        (PREFIX + name, each.detach().to(trained_in))
        for name, each in loaded.model.named_parameters()
        if not each.requires_grad and each.is_floating_point()
    )
    found = checksum_of_tensors(frozen)
    if found != checksum:
        raise ExportError(
            f"the adapter was trained beside other weights than those of {base.path} ({base.folder}): their checksum "
            f"was {checksum} and is {found}. Put that model there again, or name it as base_model_name_or_path in a "
            f"copy of the adapter's folder, in its {CONFIG_FILE}"
        )


def _adapter_of(model_keys: Mapping[str, Any]) -> AdapterSource | None:
    """Return the adapter that a run's configuration asks for; older ones ask for none."""
    if not model_keys.get("lora_rank") and not model_keys.get("lora_adapter_path"):
        return None
    from hrl.config.model import LearnerConfig
    from hrl.models.adapter import adapter_of

    fields = {name: model_keys[name] for name in LearnerConfig.model_fields if name in model_keys}
    return adapter_of(LearnerConfig.model_validate(fields), seed=0)


@dataclass(frozen=True)
class _Base:
    """The model that a run began with.

    Attributes:
        path: As a configuration names it.
        is_scalar: Whether it scores.
        overrides: Fields of its config.json to replace.
        trusts_code: Whether its folder may run code.
        tokenizer: Another one than its own.
    """

    path: str
    is_scalar: bool
    overrides: Mapping[str, Any]
    trusts_code: bool
    tokenizer: str | None

    @classmethod
    def of(cls, model_keys: Mapping[str, Any], path: str, *, is_scalar: bool) -> Self:
        """Return the model at a path, read as the keys of a run's model say."""
        return cls(
            path,
            is_scalar,
            overrides=model_keys.get("override_config") or {},
            trusts_code=bool(model_keys.get("trust_remote_code")),
            tokenizer=model_keys.get("tokenizer_path"),
        )

    @cached_property
    def folder(self) -> Path:
        """Where it is."""
        return resolve_model(self.path)

    def load(self, adapter: AdapterSource | None) -> Loaded:
        """Return it in float32, with its adapter if it has one."""
        import torch

        from hrl.models.adapter import add_adapter
        from hrl.models.four_bit import hold_in_4bit
        from hrl.models.loading import ModelSource, load_causal_lm, load_scalar_model

        check_links(self.folder)
        source = ModelSource.to_look_at(
            self.folder, self.overrides, trust_remote_code=self.trusts_code, max_model_len=1
        )
        loaded = (load_scalar_model if self.is_scalar else load_causal_lm)(source, torch.float32)
        if adapter is not None:
            add_adapter(loaded.model, adapter, torch.float32)
            if adapter.load_in_4bit:
                hold_in_4bit(loaded.model, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return loaded


def _write(loaded: Loaded, base: _Base, out: Path, dtype: str | None) -> str:
    """Write a whole model with tokenizer in the form of its folder, an adapter added to it; return the dtype."""
    import torch

    from hrl.models.adapter import is_part
    from hrl.models.checkpoint_form import CheckpointForm, saved_tensors
    from hrl.models.dtypes import dtype_of
    from hrl.models.tokenizer import load_tokenizer, token_ids
    from hrl.preflight.model_look import padding_of_classifier
    from hrl.workers.engine.weights import (
        PREFIX,
        copy_companions,
        describe_classifier,
        iter_full_params,
        merges_of,
        write_config,
    )

    own = str(loaded.source_config.dtype or "bfloat16").removeprefix("torch.")
    target = dtype_of(dtype or own)
    form, whole = CheckpointForm.of(loaded.model), torch.nn.ModuleDict({PREFIX.removesuffix("."): loaded.model})
    parts = {name for name, _ in saved_tensors(whole) if is_part(name)}
    named = iter_full_params(whole, form, target, torch.device("cpu"), skip=parts, merges=merges_of(whole))
    tensors = {name: each.clone() for name, each in named}  # safetensors writes no views of a larger tensor
    tokenizer = load_tokenizer(base.tokenizer or base.folder, trust_remote_code=base.trusts_code)
    if base.is_scalar:
        pad = padding_of_classifier(tokenizer, token_ids(tokenizer, base.folder))
        describe_classifier(loaded.source_config, loaded.model, pad)
    write_config(loaded.source_config, target, out)
    copy_companions(base.folder, out, has_code=bool(getattr(loaded.source_config, "auto_map", None)))
    tokenizer.save_pretrained(out)
    _save(tensors, out)
    return dtype or own


def _read_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Read a sharded checkpoint into these whole tensors."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    saved = _state(folder, {"tensors": OBJECT})
    missing = sorted(name for name, each in tensors.items() if saved["tensors"].get(name) != list(each.shape))
    if missing:
        what = "it was saved without `model`, or the run began with another model"
        raise ExportError(f"{folder} lacks {missing[0]}: {what}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as it is meant to be
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def _section(tree: Any, key: str) -> dict[str, Any]:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}


# ---------------------------------------------------------------------------------------------- the card


def model_card(trained: Trained, dtype: str, title: str) -> str:
    """Return the text of the model card: what the model began with, how it was trained, and what it scored."""
    facts = dict(_facts(trained))
    base = facts.get("starts from")
    front = ["---", "library_name: transformers", "tags: [hrl]"]
    if base is not None and base.count("/") == 1:  # a folder's is its last name alone
        front.append(f"base_model: {base}")
    front.append("---")
    lines = [f"| {name} | {text} |" for name, text in (facts | {"weights": dtype}).items()]
    body = ["", f"# {title}", "", f"Trained with hrl {hrl.__version__}.", "", "| | |", "| --- | --- |", *lines, ""]
    usage = [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model, tokenizer = (auto.from_pretrained("{title}") for auto in (AutoModelForCausalLM, AutoTokenizer))',
        "```",
        "",
    ]
    return "\n".join([*front, *body, *([] if facts.get("kind") == "rm" else usage)])


def _public(name: object) -> str:
    """Return a model, rows or a file as the card may name them: without the folders of this machine."""
    place, mark, options = str(name).partition("?")
    path = expanded(place)
    is_local = path.is_absolute() or place.startswith((".", "~")) or path.exists() or path.suffix in _FILES
    return (path.name if is_local else place) + mark + options


def _facts(trained: Trained) -> Iterator[tuple[str, str]]:
    config = trained.config
    if not config:
        yield "starts from", _public(trained.name)
        return
    model = _section(config, "actor_rollout_ref.model") or _section(config, "model")
    algorithm, data = _section(config, "algorithm"), _section(config, "data")
    if "adv_estimator" in algorithm:
        yield "algorithm", str(algorithm["adv_estimator"])
    elif "beta" in algorithm:
        yield "algorithm", f"dpo ({algorithm.get('loss_type')}, beta {algorithm['beta']})"
    else:
        yield "algorithm", "sft" if "loss_agg_mode" in algorithm else "reward model"
    yield "starts from", _public(model.get("path"))
    yield "trained on", ", ".join(map(_public, data.get("train_files") or []))
    function = _section(config, "reward.custom_reward_function").get("path")
    if function:
        yield "reward", _public(function)
    optim = _section(config, "actor_rollout_ref.actor.optim") or _section(config, "optim")
    yield "batch, learning rate", f"{data.get('train_batch_size')}, {optim.get('lr')}"
    step = _step(trained)
    if step is not None:
        yield "steps", str(step)
        yield from _measured(trained, step)


def _step(trained: Trained) -> int | None:
    if trained.checkpoint is None:
        return None
    return int(_state(trained.checkpoint, {"step": WHOLE})["step"])


def _state(folder: Path, kinds: Mapping[str, str]) -> dict[str, Any]:
    file = folder / STATE_FILE
    state = read_object(file)
    require_kinds(str(file), state, kinds, needed=kinds)
    return state


def _measured(trained: Trained, step: int) -> Iterator[tuple[str, str]]:
    """Yield what the run's validations measured at the step, or last before it."""
    records = [] if trained.run is None else read_metrics(trained.run)
    validated = [record for record in records if record["step"] <= step and any(map(_is_score, record))]
    if validated:
        last = validated[-1]
        yield from ((f"{name} after step {last['step']}", f"{last[name]:.4g}") for name in filter(_is_score, last))


def _is_score(name: str) -> bool:
    return name.startswith("val/") and ("/mean@" in name or name.endswith(("/loss", "/rewards_accuracies")))


# ---------------------------------------------------------------------------------------------- the hub


def push(exported: Exported, repository: str, *, private: bool = True) -> str:
    """Send an exported folder to the hub and return its address.

    Args:
        exported: What `export` wrote.
        repository: `user/name`; created if it does not exist.
        private: Whether a new repository is private.

    Raises:
        ExportError: The hub can't be reached, or refuses; the folder stays.
    """
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    stays = f"The model is in {exported.folder}."
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=exported.folder, commit_message=f"hrl {hrl.__version__}")
    except HFValidationError as error:
        raise ExportError(f"{repository!r} is no name of a repository: {error}. {stays}") from error
    except OfflineModeIsEnabled as error:
        raise ExportError(f"nothing was sent to the hub: HF_HUB_OFFLINE is set. {stays}") from error
    except LocalTokenNotFoundError as error:
        raise ExportError(f"the hub wants a token: run `hf auth login`, or set HF_TOKEN. {stays}") from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        advice = " Run `hf auth login` with a token that may write, or set HF_TOKEN." if status in (401, 403) else ""
        raise ExportError(f"the hub refused {repository!r}: {str(error).splitlines()[0]}.{advice} {stays}") from error
    except (HTTPError, OSError) as error:
        raise ExportError(f"the hub can't be reached ({error}). Try again where there is a network. {stays}") from error
    return f"{api.endpoint}/{repository}"
