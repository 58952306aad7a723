"""What a run that resumes does otherwise than the run of its checkpoint: what may change is told, the rest refused.

A value such as the learning rate may change, and is told as `key: old → new`. The seed, the model and the tokenizer
may not: the steps that are left would belong to another run than those that were made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hrl.cluster.precision import with_dtypes
from hrl.config.changes import Change, changes
from hrl.config.offline import DPOTrainerConfig, OfflineConfig
from hrl.config.outline import Outline, RunConfiguration, outline_of
from hrl.config.rules import trained_parts
from hrl.preflight.findings import Findings
from hrl.preflight.folder_plan import FolderPlan
from hrl.preflight.machine_look import gpus_here, joins_a_cluster

_SEED = "trainer.seed"
_OF_ADAPTERS = ("lora_alpha", "use_rslora", "target_modules", "exclude_modules", "load_in_4bit")
"""What an adapter's weights mean, where they are and beside which, in the section of a model that learns."""
_OF_ITS_FACTOR = ("lora_alpha", "use_rslora")
"""Of these, what `B A` is multiplied by: with another one the checkpoint's weights are those of another policy."""
#: Roles whose models may change: nothing of theirs is learnt in a run that samples.
_FROZEN = ("rm", "ref")
#: What a run says of itself; a trainer that was built by hand, or an older version of hrl, says nothing.
_COMPARED = {"kind", "models", "tokenizer", "code"}
_ESTIMATOR = (
    "Set algorithm.adv_estimator to what it was, or begin another run with the model in its hf folder, in a "
    "trainer.default_local_dir of its own."
)


def look_at_changes(
    findings: Findings,
    config: RunConfiguration,
    outline: Outline,
    plan: FolderPlan,
    inputs: Mapping[str, Any],
) -> None:
    """Compare a run with the one whose checkpoint it begins with.

    Args:
        findings: Collects problems and changes.
        config: The validated configuration.
        outline: Outline of the run.
        plan: How the run begins.
        inputs: What the run depends on, see `run_inputs`.
    """
    if plan.checkpoint is None:
        return
    was: Mapping[str, Any] = plan.state.get("inputs", {})
    if not (plan.state.keys() >= {"config", "ranks"} and was.keys() >= _COMPARED):
        findings.notes.append(
            f"{plan.checkpoint} does not say with which configuration it was made, so what has changed since is not "
            "known: it is of an older version of hrl, or of a trainer that was built by hand"
        )
        return
    key = "trainer.default_local_dir" if plan.continues else "trainer.resume_from_path"
    if was["kind"] != inputs["kind"]:
        what = f"leads to {plan.checkpoint}, of a run of kind {was['kind']}; this is a run of kind {inputs['kind']}."
        hint = f"Continue it with hrl.trainer.main_{was['kind']}, or start from the model in its hf folder."
        findings.problem(key, what, hint)
        return
    _look_at_learners(findings, outline, plan, key)
    found = [
        *_of_keys(findings, config, plan),
        *_of_models(findings, outline, plan, inputs),
        *_of_adapters(findings, config, plan, inputs),
        *_of_vocabulary(findings, outline, plan, inputs),
        *_of_validation(was, inputs),
        *_of_code(was["code"], inputs["code"]),
        *_of_versions(was.get("versions", {}), inputs["versions"]),  # older checkpoints have none
    ]
    findings.changes += map(str, found)
    since = f"step {plan.state['step']}" if plan.continues else f"{plan.checkpoint}"
    findings.changed = f"changed since {since} was saved"


def _of_keys(findings: Findings, config: RunConfiguration, plan: FolderPlan) -> Iterator[Change]:
    """Yield the keys with another value; refuse another optimizer, and a run that continues another seed or adapter."""
    loaded = _optimizers_loaded(config)
    learners = {model.key.rpartition(".")[0]: model.learner for model in outline_of(config).models.values()}
    for each in changes(plan.state["config"], _resolved(config)):
        section, _, name = each.key.rpartition(".")
        learner = learners.get(section)
        is_of_adapter = name in _OF_ADAPTERS and learner is not None and learner.trains_adapter
        if plan.continues and (each.key == _SEED or is_of_adapter):
            _refuse(findings, plan, each.key, f"is {each.new}, and was {each.old}", f"Set {each.key}={each.old}")
        elif is_of_adapter and name in _OF_ITS_FACTOR:
            findings.problem(
                each.key,
                f"is {each.new}, and the adapter in {plan.checkpoint} was trained with {each.old}: with another factor "
                "it is another policy.",
                f"Set {each.key}={each.old}.",
            )
        elif each.key in loaded:
            findings.problem(
                each.key,
                f"is {each.new}, and {plan.checkpoint} holds the state of {each.old}.",
                f"Set {each.key}={each.old}, or begin another run with the model in its hf folder.",
            )
        elif each.new != "auto":
            yield each


def _optimizers_loaded(config: RunConfiguration) -> set[str]:
    """Return the keys that name the optimizers whose state is read from the checkpoint."""
    policy = config if isinstance(config, OfflineConfig) else config.actor_rollout_ref.actor
    reads = "optimizer" in policy.checkpoint.load_contents  # a critic is read completely
    return {f"{section}.name" for section in trained_parts(config) if reads or section.startswith("critic.")}


def _of_models(findings: Findings, outline: Outline, plan: FolderPlan, inputs: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the models with other weights, of roles that both runs have; a run that continues is refused most."""
    saved, present = plan.state["inputs"]["models"], inputs["models"]
    for role, model in outline.models.items():
        if role not in saved or role not in present or saved[role] == present[role]:
            continue
        if plan.continues and not (role in _FROZEN and outline.section != "model"):
            what = f"is another model than the one that {plan.checkpoint} began with"
            _refuse(findings, plan, model.key, what, "Name that one again")
        else:
            yield Change(f"weights of {model.key}", saved[role], present[role])


def _of_adapters(
    findings: Findings, config: RunConfiguration, plan: FolderPlan, inputs: Mapping[str, Any]
) -> Iterator[Change]:
    """Yield the adapters to go on from with other weights; refuse that of DPO's reference, which is asked again."""
    saved, present = plan.state["inputs"].get("adapters", {}), inputs.get("adapters", {})  # older checkpoints have none
    for key in saved.keys() & present.keys():
        if saved[key] == present[key]:
            continue
        if plan.continues and isinstance(config, DPOTrainerConfig) and config.needs_reference:
            what = f"holds another adapter than the one that {plan.checkpoint} began with, which is its reference"
            _refuse(findings, plan, key, what, "Name that one again")
        else:
            yield Change(f"weights of {key}", saved[key], present[key])


def _of_vocabulary(
    findings: Findings, outline: Outline, plan: FolderPlan, inputs: Mapping[str, Any]
) -> Iterator[Change]:
    """Yield another vocabulary of the tokenizer; a run that continues is refused it."""
    saved, present = plan.state["inputs"]["tokenizer"], inputs["tokenizer"]
    if saved == present:
        return
    if plan.continues:
        what = f"has another vocabulary than the tokenizer that {plan.checkpoint} was made with"
        _refuse(findings, plan, f"{outline.section}.tokenizer_path", what, "Name that tokenizer again")
    else:
        yield Change("vocabulary of the tokenizer", saved, present)


def _of_validation(saved: Mapping[str, Any], present: Mapping[str, Any]) -> Iterator[Change]:
    """Yield other rows to validate on: scores before and after do not compare, nor does `best` among them."""
    if "validation" in saved and saved["validation"] != present["validation"]:  # older checkpoints do not say
        yield Change("rows of data.val_files", saved["validation"], present["validation"])


def _of_code(saved: Mapping[str, str], present: Mapping[str, str]) -> Iterator[Change]:
    """Yield the Python files and objects with other code, of those that both runs have."""
    for name in present:
        if name in saved and saved[name] != present[name]:
            yield Change(f"code of {name}", saved[name], present[name])


def _of_versions(saved: Mapping[str, str], present: Mapping[str, str]) -> Iterator[Change]:
    """Yield the packages of other versions, those that only one of the runs has too; none if nothing was saved."""
    for name in [*present, *(name for name in saved if name not in present)] if saved else []:
        if saved.get(name) != present.get(name):
            yield Change(f"version of {name}", saved.get(name), present.get(name))


def _refuse(findings: Findings, plan: FolderPlan, key: str, what: str, hint: str) -> None:
    findings.problem(
        key,
        f"{what}: the steps after {plan.state['step']} would be those of another run.",
        f"{hint}; or begin another run with the model of this one, in a trainer.default_local_dir of its own: "
        f"trainer.resume_mode=resume_path with trainer.resume_from_path={plan.checkpoint}.",
    )


def _look_at_learners(findings: Findings, outline: Outline, plan: FolderPlan, key: str) -> None:
    """Refuse a checkpoint that lacks a model that learns here, and in its own run one that has a further one."""
    saved = set(plan.state["ranks"])
    needed = {role for role in outline.models if outline.section == "model" or role not in _FROZEN}
    for role in sorted(needed - saved):
        what = f"leads to {plan.checkpoint}, which has {_listed(saved)} and no {role}."
        findings.problem(key, what, _ESTIMATOR if role == "critic" else "Name a checkpoint of such a run.")
    for role in sorted(saved - needed) if plan.continues else ():
        what = f"leads to {plan.checkpoint}, which has a {role} that learns; this run has none."
        findings.problem(key, what, _ESTIMATOR)


def _listed(names: set[str]) -> str:
    return " and ".join(sorted(names))


def _resolved(config: RunConfiguration) -> RunConfiguration:
    """Return the configuration with its dtypes, as a checkpoint has them; with `auto` if a cluster will decide."""
    device = config.trainer.device
    if device == "auto":
        if joins_a_cluster(config.trainer):
            return config
        device = "cuda" if gpus_here() else "cpu"
    return with_dtypes(config, device)
