"""Preflight checks of models and tokenizers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hrl.config.arithmetic import Fact
from hrl.config.outline import NamedModel, Outline
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.section import TEACHER
from hrl.models.hf_config import head_width, load_config, vocabulary_of
from hrl.models.source import (
    ModelSourceError,
    check_links,
    check_unquantised,
    check_weights,
    find_model,
    model_facts,
    resolve_model,
)
from hrl.models.tokenizer import TokenIds, load_tokenizer, resolve_tokenizer, token_ids
from hrl.preflight.findings import PADDED_ROWS, Findings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hrl.models.loading import ModelSource


def look_at_models(
    findings: Findings, outline: Outline, *, download: bool
) -> tuple[dict[str, Path], PreTrainedTokenizerBase | None]:
    """Check the models of all roles and the tokenizer of the trained one.

    Args:
        findings: Collects problems.
        outline: Outline of the run.
        download: Download a hub id that is not on this machine; otherwise it is reported as unchecked.

    Returns:
        Role → local folder, for the models that were found; and the tokenizer.
    """
    trust = outline.model.trust_remote_code
    (first, learner), *others = outline.models.items()
    found: dict[str, Path] = {}
    folder = _look_at_model(findings, learner, download=download, trust_remote_code=trust)
    tokenizer = _look_at_tokenizer(findings, outline, folder, download=download)
    if folder is not None:
        found[first] = folder
        findings.facts.append(Fact("model", _in_words(learner.path, folder)))
        look_at_positions(findings, outline, learner, folder)
    for role, model in others:
        if model.path == learner.path and not model.override_config:
            # A model in the same folder as the trained one has the same vocabulary.
            found |= {} if folder is None else {role: folder}
            if role == "ref":
                findings.notes.append(f"{model.key} names the policy's own model: it teaches what the policy begins as")
            continue
        other = _look_at_model(findings, model, download=download, trust_remote_code=trust)
        if other is None:
            continue
        found[role] = other
        if role != "rm" and other != folder and tokenizer is not None:
            with findings.about(model.key):
                _look_at_vocabulary(findings, model.key, other, tokenizer, trust_remote_code=trust)
        if role == "ref":
            findings.facts.append(Fact("teacher", _in_words(model.path, other)))
            look_at_positions(findings, outline, model, other)
    look_at_heads(findings, outline, found)
    return found, tokenizer


def look_at_ids(
    findings: Findings, outline: Outline, folder: Path | None, tokenizer: PreTrainedTokenizerBase | None
) -> TokenIds | None:
    """Return the padding and stop tokens of the trained model; None if it or its tokenizer was not found."""
    ids = None
    if folder is not None and tokenizer is not None:
        with findings.about(f"{outline.section}.path"):
            ids = token_ids(tokenizer, folder)
    return ids


def look_at_families(
    findings: Findings, outline: Outline, folders: Mapping[str, Path], *, shows_pictures: bool = False
) -> bool:
    """Compare every model's forward pass on a batch's rows, as in training, with its own plain forward pass.

    Ranks don't repeat it: the comparison runs on a CPU and depends only on a model's config and code, which are the
    same on every node.

    Args:
        findings: Collects problems.
        outline: Outline of the run.
        folders: Role → folder of its model.
        shows_pictures: The rows have pictures, with which the comparison is made as well.

    Returns:
        Whether rows are packed. They are padded, for all roles alike, where the model of one can't run packed ones.
    """
    from hrl.models.loading import ModelSource
    from hrl.models.picture_probe import require_sight
    from hrl.models.probe import require_right

    sources = {
        role: ModelSource.to_look_at(
            folder,
            outline.models[role].override_config,
            trust_remote_code=outline.model.trust_remote_code,
            max_model_len=outline.lengths.model,
        )
        for role, folder in folders.items()
        # Else only the engine runs it.
        if role != "actor" or {outline.placement.actor, "ref"} & outline.placement.roles.keys()
    }
    reasons: dict[str, str] = {}
    for role, source in sources.items():
        model = outline.models[role]
        with findings.about(model.key):
            found = require_right(source, scalar=model.is_scalar)
            if not found.packs_rows:
                reasons[role] = f"{found.family} can't run packed rows ({found.why_not_packed})"
        if model.replays or model.balances:
            _look_at_experts(findings, model, source)
    if reasons:
        _pad_rows(findings, outline, sources, reasons)
    for role, source in sources.items() if shows_pictures else ():
        model = outline.models[role]
        if model.is_scalar or role != "rm":  # a language model that scores reads text alone
            with findings.about(model.key):
                require_sight(source, scalar=model.is_scalar, packs_rows=not reasons)
    return not reasons


def _pad_rows(
    findings: Findings,
    outline: Outline,
    sources: Mapping[str, ModelSource],
    reasons: Mapping[str, str],
) -> None:
    """Say that rows are padded and why, and refuse what does not go with it.

    Args:
        findings: Collects problems.
        outline: Outline of the run.
        sources: Role → its model.
        reasons: Role → why its model can't run packed rows.
    """
    from hrl.models.probe import require_right

    findings.facts.append(
        Fact(
            PADDED_ROWS,
            f"{'; '.join(dict.fromkeys(reasons.values()))}. So a micro-batch has rows of about one length, each by "
            "itself and padded on the right; token budgets count the padding, and samples do not share their prompt",
        )
    )
    for role, source in sources.items():
        model = outline.models[role]
        if role not in reasons:
            with findings.about(model.key):
                require_right(source, scalar=model.is_scalar, packs_rows=False)
        for key, degree in model.degrees.items():
            if key.rpartition(".")[2] == "ulysses_sequence_parallel_size" and degree > 1:
                what = f"is {degree}, and rows are padded, not packed: a row's state can't be cut into slices."
                findings.problem(key, what, "Set it to 1; fsdp_config.fsdp_size shards the model.")


def _look_at_experts(findings: Findings, model: NamedModel, source: ModelSource) -> None:
    """Check that a run can do with the model's experts what it is asked to."""
    from hrl.models.expert_probe import probe_experts

    with findings.about(model.key):
        config = load_config(source.path, source.override_config, trust_remote_code=source.trust_remote_code)
        found = probe_experts(config, source.max_model_len, trust_remote_code=source.trust_remote_code)
        why = {model.replays: found.why_no_replay, model.balances: found.why_no_balance}
        for setting, reason in why.items():
            if setting and reason:
                key, _, value = setting.rpartition("=")
                what = f"is {value}, but {config.model_type} does not allow that: {reason}."
                off = "disabled" if setting == model.replays else "0"
                findings.problem(key, what, f"Set it to {off}; docs/experts.md says what families allow.")


def _look_at_model(findings: Findings, model: NamedModel, *, download: bool, trust_remote_code: bool) -> Path | None:
    """Find and check the local folder of a model, its config and its weights; None if it is missing or wrong."""
    key = model.key
    with findings.about(key):
        folder = resolve_model(model.path) if download else find_model(model.path)
        if folder is None:
            findings.unchecked.append(
                f"{key}: {model.path} is a hub id that is not on this machine; a run downloads it first. Its files, "
                "its memory and the lengths of rows in its tokens were not looked at"
            )
            return None
        check_links(folder)
        check_unquantised(folder)
        check_weights(folder)
        _check_type(folder, trust_remote_code)
        with findings.about(f"{key.rpartition('.')[0]}.override_config"):
            load_config(folder, model.override_config, trust_remote_code=trust_remote_code)
            return folder
    return None


def _check_type(folder: Path, trust_remote_code: bool) -> None:
    """Check that transformers knows the model's type.

    Raises:
        ModelSourceError: It does not, or the model's code would have to be trusted.
    """
    try:
        load_config(folder, {}, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        first = " ".join(str(error).split(". ")[0].split())
        raise ModelSourceError(f"{folder / 'config.json'} describes no model known here: {first}") from error


def _look_at_tokenizer(
    findings: Findings, outline: Outline, folder: Path | None, *, download: bool
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer, which may be in another folder or hub id than the model."""
    model, section = outline.model, outline.section
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


def look_at_positions(findings: Findings, outline: Outline, model: NamedModel, folder: Path) -> None:
    """Check that the longest sequence fits the positions of a model."""
    wanted, keys = outline.lengths.total, outline.lengths.keys
    used = load_config(folder, model.override_config, trust_remote_code=outline.model.trust_remote_code)
    limit = getattr(used.get_text_config(), "max_position_embeddings", None)
    if limit is not None and wanted > limit:
        hint = f"Lower {'one of the two' if len(keys) > 1 else 'it'}."
        verb = "are" if len(keys) > 1 else "is"
        what = f"{verb} {wanted} tokens, but {folder.name} has {limit} positions."
        findings.problem(" + ".join(keys), what, hint)


def head_size(outline: Outline, folders: Mapping[str, Path]) -> int | None:
    """Return the width of the policy's attention heads; None if the model is not here, or caches no such heads."""
    policy = next(iter(outline.models))
    if policy not in folders:
        return None
    trust, override = outline.model.trust_remote_code, outline.models[policy].override_config
    text = load_config(folders[policy], override, trust_remote_code=trust).get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int) or getattr(text, "kv_lora_rank", None):  # of a latent vector vLLM has another kernel
        return None
    return head_width(text)


def look_at_heads(findings: Findings, outline: Outline, folders: Mapping[str, Path]) -> None:
    """Check that the ranks of a group, or of an engine, can share the heads, weights or experts of every model.

    Args:
        findings: Collects problems.
        outline: Outline of the run.
        folders: Role → folder of its model.
    """
    from hrl.models.tensor_parallel import TensorParallelError, require_cuttable, require_experts

    cutting = ("tensor_parallel_size", "expert_parallel_size")
    for role, folder in folders.items():
        model = outline.models[role]
        whole = load_config(folder, model.override_config, trust_remote_code=outline.model.trust_remote_code)
        heads = getattr(whole.get_text_config(), "num_attention_heads", None)
        for key, degree in model.degrees.items():
            if (name := key.rpartition(".")[2]) in cutting:
                copy = model.copies.get(key, 0)
                try:
                    if name == "expert_parallel_size":
                        require_experts(whole, degree)
                    else:  # what does not divide is refused by the rules of the configuration
                        require_cuttable(whole, degree, copy if copy > 0 and copy % degree == 0 else None)
                except TensorParallelError as error:
                    findings.problem(key, f"is {degree}, and {folder.name} can't be cut so: {error}.", error.hint)
            elif isinstance(heads, int) and heads % degree:
                fitting = [size for size in range(1, heads + 1) if heads % size == 0]
                what = f"is {degree}, which does not divide the {heads} attention heads of {folder.name}."
                findings.problem(key, what, f"Set it to one of {', '.join(map(str, fitting))}.")


def look_at_tokens_of_teacher(
    findings: Findings,
    config: PPOTrainerConfig,
    folders: Mapping[str, Path],
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Check that a teacher knows every token of the tokenizer, and that a loss reads no more of them than there are.

    Heads may have more rows than the tokenizer has tokens, and each as many as it likes: what only the teacher has is
    left out of its distribution, and what only the policy has must not be sampled.
    """
    folder, pupil = folders.get("ref"), folders.get("actor")
    if folder is None or pupil is None or tokenizer is None:
        return
    trust = config.actor_rollout_ref.model.trust_remote_code
    of_teacher, of_policy = (vocabulary_of(path, {}, trust_remote_code=trust) for path in (folder, pupil))
    if of_teacher < len(tokenizer):
        what = f"names {folder.name}, which embeds {of_teacher} tokens, and its tokenizer has {len(tokenizer)}."
        findings.problem(TEACHER, what, "Save it with an embedding for every token (resize_token_embeddings).")
    elif of_teacher < of_policy:
        findings.notes.append(
            f"{TEACHER}: {folder.name} embeds {of_teacher} tokens and the policy {of_policy}. The rest stand for no "
            "text; a run in which one is sampled ends"
        )
    if config.num_teacher_tokens > (size := min(of_teacher, of_policy)):
        what = f"is {config.num_teacher_tokens}, and {folder.name} knows {size} tokens."
        findings.problem("distillation.distillation_loss.topk", what, "Lower it: 32 have nearly all of the mass.")


def _look_at_vocabulary(
    findings: Findings, key: str, folder: Path, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool
) -> None:
    """Check that a critic or teacher has the policy's vocabulary: it reads the policy's token ids."""
    if load_tokenizer(folder, trust_remote_code=trust_remote_code).get_vocab() != tokenizer.get_vocab():
        what = (
            f"names {folder.name}, which has another vocabulary than the policy: it reads the policy's ids as they are."
        )
        findings.problem(key, what, "Take one of the same family.")


def _in_words(path: str, folder: Path) -> str:
    """Describe a model in one line, from its config."""
    facts = model_facts(folder)
    positions = facts.get("max_position_embeddings")
    reach = f", {positions:,} positions" if isinstance(positions, int) else ""
    return f"{path}: {facts.get('model_type', 'a model')}{reach}"


def padding_of_classifier(tokenizer: PreTrainedTokenizerBase, ids: TokenIds) -> int:
    """Choose a padding token for a reward model's folder, and set it in the tokenizer.

    transformers reads the score at the last token that is not padding. A chat model's tokenizer often pads with the
    token that ends answers, and the score would then be read one token too early.

    Raises:
        ModelSourceError: No special token is free.
    """
    candidates = [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, *tokenizer.all_special_ids]
    free = [token for token in candidates if token is not None and token not in ids.stop]
    if not free:
        raise ModelSourceError(
            "a reward model needs a padding token that ends no answer, and every special token of the tokenizer does: "
            "save a tokenizer with one more special token and set model.tokenizer_path"
        )
    tokenizer.pad_token_id = free[0]
    return free[0]
