"""OpenRLHF's launch lines: flags with a table (`openrlhf.yaml`), and here what needs more than one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hrl.config.arithmetic import count
from hrl.migrate.line import Migrated, MigrationError, Remark
from hrl.migrate.table import Given, Table, balance, by_table, read_table
from hrl.migrate.values import flags_of

PROGRAMS = {
    "openrlhf.cli.train_ppo_ray": "ppo",
    "openrlhf.cli.train_ppo": "ppo",
    "openrlhf.cli.train_sft": "sft",
    "openrlhf.cli.train_dpo": "dpo",
    "openrlhf.cli.train_rm": "rm",
}
"""OpenRLHF's programs that hrl has → the kind of run."""

_ESTIMATORS: dict[str, dict[str, Any]] = {
    "gae": {"algorithm.adv_estimator": "gae"},
    "reinforce": {"algorithm.adv_estimator": "reinforce_plus_plus"},
    "rloo": {"algorithm.adv_estimator": "rloo"},
    "reinforce_baseline": {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"},
    "group_norm": {"algorithm.adv_estimator": "grpo"},
    "dr_grpo": {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False},
}


def table_of(kind: str) -> Table:
    """Return the table of a kind of run."""
    return read_table("openrlhf.yaml", "ppo" if kind == "ppo" else "offline", kind)


def migrate_openrlhf(program: str, arguments: Sequence[str]) -> Migrated:
    """Return hrl's line for a line of OpenRLHF.

    Raises:
        MigrationError: hrl has no such program.
    """
    if program not in PROGRAMS:
        raise MigrationError(f"hrl has no counterpart of {program}; there are those of {', '.join(PROGRAMS)}")
    kind = PROGRAMS[program]
    into, table = Migrated(program, kind), table_of(kind)
    flags, stray = flags_of(arguments)
    into.lost += [Remark(word, "belongs to no flag") for word in stray]
    values = {table.present(name): value for name, (value, _) in flags.items()}
    written = {table.present(name): text for name, (_, text) in flags.items()}
    given = Given(table, values, written)
    if "actor.num_gpus_per_node" in table.defaults and "actor.num_gpus_per_node" not in given:
        assumed = table.defaults["actor.num_gpus_per_node"]
        why = "is OpenRLHF's default and was not in the line; trainer.n_gpus_per_node is how many you have"
        into.differs.append(Remark(f"--actor.num_gpus_per_node {assumed}", why))
    for name in by_table(given, into):
        FUNCTIONS[name](given, into)
    into.drop_what_does_not_compose()
    return into


def _placement(given: Given, into: Migrated) -> None:
    if given.is_on("train.colocate_all"):
        into.needless.append(
            Remark("--train.colocate_all", "all roles share the processes, which is the default placement")
        )
        return
    roles = [
        name for name in ("ref.num_gpus_per_node", "reward.num_gpus_per_node", "vllm.num_engines") if name in given
    ]
    if roles:
        into.set({"placement": "separate"})
        why = "each role has a pool of its own with placement=separate; sizes are trainer.resource_pools"
        into.differs.append(Remark(" ".join(given.word(name) for name in roles), why))


def _reward(given: Given, into: Migrated) -> None:
    model, remote = given.get("reward.model_name_or_path"), given.get("reward.remote_url")
    if model and remote:
        why = "is not taken beside a remote reward; reward.reward_model.model_path adds a model's score to a function's"
        into.lost.append(Remark(given.word("reward.model_name_or_path"), why))
    if model and not remote:
        into.set(
            {"reward.reward_model.enable": True, "reward.reward_model.model_path": model, "reward.function_weight": 0}
        )
    elif remote and str(remote).endswith(".py"):
        label = f", and the column {given.get('data.label_key')} by its name" if "data.label_key" in given else ""
        why = (
            "a function here scores one response: `def compute_score(response, …)` takes the text"
            + label
            + ". Write it "
            "so, and set reward.custom_reward_function.path to its file"
        )
        into.lost.append(Remark(given.word("reward.remote_url"), why))
    elif remote:
        urls = str(remote).split(",")
        entry: dict[str, Any] = {"name": "remote", "url": urls[0] if len(urls) == 1 else urls}
        if (policy := given.get("actor.model_name_or_path")) is not None:
            entry["tokenizer"] = policy
        into.set({"reward.functions": [entry]})
        why = "gets `query` and `prompts` as the chat template renders them, and `labels` from the row's answer"
        into.differs.append(Remark(given.word("reward.remote_url"), why))
    elif "data.label_key" in given:
        into.needless.append(Remark(given.word("data.label_key"), "every column of a row reaches the reward function"))


def _lengths(given: Given, into: Migrated) -> None:
    prompt, response = _longest(given)
    if _PROMPT not in given and not any(name in given for name in _RESPONSE):
        why = (
            "half of it goes to the prompt and half to the response; set data.max_prompt_length and max_response_length"
        )
        into.differs.append(Remark(f"--data.max_len {prompt + response}", why))
    into.set({"data.max_prompt_length": prompt, "data.max_response_length": response})


_PROMPT, _RESPONSE = "prompt_max_len", ("generate_max_len", "rollout.max_new_tokens")


def _longest(given: Given) -> tuple[int, int]:
    """Return the longest prompt and the longest response."""
    whole = int(given.number("data.max_len", 2048))
    response = next((int(given.number(name, 0)) for name in _RESPONSE if name in given), None)
    if _PROMPT in given:
        prompt = int(given.number(_PROMPT, 0))
        return prompt, whole - prompt if response is None else response
    response = whole // 2 if response is None else response
    return whole - response, response


def _batch(given: Given, into: Migrated) -> None:
    samples = int(given.number("rollout.n_samples_per_prompt", 1))
    prompts, sequences = int(given.number("rollout.batch_size", 1024)), int(given.number("train.batch_size", 128))
    mini = min(max(1, sequences // samples), prompts)
    actor = "actor_rollout_ref.actor"
    into.set({"data.train_batch_size": prompts, f"{actor}.ppo_mini_batch_size": mini})
    if samples > 1:
        why = f"{sequences} sequences of an optimizer step are {count(mini, 'prompt')} × {samples} samples"
        into.differs.append(Remark(f"--train.batch_size {sequences}", why))
    if given.is_on("train.dynamic_batch_enable"):
        least = -(-sum(_longest(given)) // int(given.number("ds.ring_attn_size", 1)))
        for name, key in (
            ("train.max_tokens_per_gpu", f"{actor}.ppo_max_token_len_per_gpu"),
            ("rollout.max_tokens_per_gpu", "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"),
        ):
            tokens = int(given.number(name, 16192))
            if name not in given and name.startswith("rollout."):
                continue
            into.set({key: max(tokens, least)})
            if tokens < least:
                why = f"is {least} here, a process's part of the longest row, which a budget has to hold"
                into.differs.append(Remark(f"--{name} {tokens}", why))
        return
    for name, key in (
        ("train.micro_batch_size", f"{actor}.ppo_micro_batch_size_per_gpu"),
        ("rollout.micro_batch_size", "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"),
    ):
        if name in given:
            into.set({key: given.get(name)})
    for name in ("train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu"):
        if name in given:
            into.needless.append(Remark(given.word(name), "has an effect with dynamic batches only"))


def _estimator(given: Given, into: Migrated) -> None:
    name = given.get("algo.advantage.estimator")
    values = dict(_ESTIMATORS.get(name, {}))
    if not values:
        why = f"there are {', '.join(_ESTIMATORS)}; another estimator is a registered function"
        into.lost.append(Remark(given.word("algo.advantage.estimator"), why))
    if given.is_on("algo.advantage.no_std_norm"):
        values |= {"algorithm.norm_adv_by_std_in_grpo": False}
    into.set(values)


def _kl(given: Given, into: Migrated) -> None:
    weight, estimator = given.number("algo.kl.init_coef", 0.01), given.get("algo.kl.estimator", "k1")
    if given.is_on("algo.kl.unbiased_gradient"):
        estimator = f"{estimator}+"
    actor = "actor_rollout_ref.actor"
    if weight == 0:
        into.set({"algorithm.use_kl_in_reward": False})
    elif given.is_on("algo.kl.use_loss"):
        into.set({f"{actor}.use_kl_loss": True, f"{actor}.kl_loss_coef": weight, f"{actor}.kl_loss_type": estimator})
    else:
        into.set(
            {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": weight, "algorithm.kl_penalty": estimator}
        )
        if "algo.kl.target" in given:
            target, horizon = given.get("algo.kl.target"), given.get("algo.kl.horizon", 10000)
            control = {"type": "adaptive", "target_kl": target, "horizon": horizon}
            into.set({f"algorithm.kl_ctrl.{name}": value for name, value in control.items()})


def _clip(given: Given, into: Migrated) -> None:
    low, high = given.get("actor.eps_clip_low_high")
    into.set({"actor_rollout_ref.actor.clip_ratio_low": low, "actor_rollout_ref.actor.clip_ratio_high": high})


def _correction(given: Given, into: Migrated) -> None:
    if "algo.advantage.is_correction_enable" in given:
        _typed_correction(given, into)
        return
    level = given.get("algo.advantage.is_correction_level", "off")
    if level == "off":
        return
    if given.get("algo.advantage.is_correction_gating", "ratio") != "ratio":
        why = "weights are gated by the ratio; algorithm.rollout_correction.rollout_rs has rules on the divergence"
        into.lost.append(Remark(given.word("algo.advantage.is_correction_gating"), why))
        return
    bounds = given.get("algo.advantage.is_correction_threshold", [0.5, 5.0])
    low, high = bounds if isinstance(bounds, list) and len(bounds) == 2 else (0.0, bounds)
    clips = given.get("algo.advantage.is_correction_mode", "mask") == "clip"
    correction = "algorithm.rollout_correction"
    level = {"token": "token", "seq": "sequence"}.get(level, level)
    into.set(
        {f"{correction}.rollout_is": level, f"{correction}.rollout_is_threshold": high if clips else f"{low}_{high}"}
    )


def _typed_correction(given: Given, into: Migrated) -> None:
    """Take a correction by its type, of which each bounds the trainer's probability over the sampler's."""
    if not given.is_on("algo.advantage.is_correction_enable"):
        return
    kind, key = given.get("algo.advantage.is_correction_type", "tis"), "algorithm.rollout_correction"
    limits = given.get("algo.advantage.is_correction_threshold", [0.5, 5.0])
    if not isinstance(limits, list) or len(limits) != 2 or not float(limits[1]) > 0:
        word = given.word("algo.advantage.is_correction_threshold")
        into.lost.append(Remark(word, "are no two bounds, a lower and an upper one"))
        return
    low, high = map(float, limits)
    bounds = f"{low:g}_{high:g}" if kind == "icepop" else high
    into.set({f"{key}.rollout_is": "token", f"{key}.rollout_is_threshold": bounds})
    name = f"--algo.advantage.is_correction_type {kind}"
    if kind == "tis":
        into.differs.append(Remark(name, f"weights are cut to {high:g}, and none is raised to {low:g}"))
    elif kind == "seq-mask-tis":
        into.set(
            {
                f"{key}.rollout_rs": "seq_mean_k1",
                f"{key}.rollout_rs_threshold": f"{1 / high:g}_{1 / low if low else 1e9:g}",
            }
        )
        why = f"rollout_rs has the bounds, of the sampler's probability over the trainer's; weights are cut to {high:g}"
        into.differs.append(Remark(name, why))


def _shaping(given: Given, into: Migrated) -> None:
    has_model = "reward.model_name_or_path" in given and "reward.remote_url" not in given
    shaping: dict[str, Any] = {"standardise": None} if given.is_on("reward.normalize_enable") else {}
    low, high = given.get("reward.clip_range", [-10, 10])
    if -float(low) != float(high):
        why = f"one limit holds on both sides; {max(abs(float(low)), abs(float(high))):g} is taken"
        into.differs.append(Remark(given.word("reward.clip_range"), why))
    if has_model or "reward.clip_range" in given:
        shaping["clip"] = max(abs(float(low)), abs(float(high)))
    if shaping:
        into.set({"reward.shaping": shaping})


def _overlong(given: Given, into: Migrated) -> None:
    if "reward.overlong_buffer_len" in given:
        zone, factor = (
            int(given.number("reward.overlong_buffer_len", 0)),
            given.get("reward.overlong_penalty_factor", 1),
        )
        values = {"enable": True, "len": zone, "penalty_factor": factor}
        into.set({f"reward.overlong_buffer.{name}": value for name, value in values.items()})


def _data(given: Given, into: Migrated) -> None:
    for name, split, key in (
        ("data.prompt_dataset", "data.prompt_split", "data.train_files"),
        ("data.dataset", "data.dataset_split", "data.train_files"),
        ("eval.dataset", "eval.split", "data.val_files"),
    ):
        if name in given:
            sources = [_source(each, given.get(split)) for each in str(given.get(name)).split(",")]
            into.set({key: sources[0] if len(sources) == 1 else sources})
    for name in ("data.prompt_probs", "data.dataset_probs"):
        if name in given:
            why = "each source takes a weight behind its name: data.train_files=[a?weight=2,b]"
            into.lost.append(Remark(given.word(name), why))


def _source(name: str, split: str | None) -> str:
    is_file = name.startswith((".", "/", "~", "$")) or Path(name).suffix in (".json", ".jsonl", ".parquet", ".csv")
    return name if is_file or not split or split == "train" else f"{name}::{split}"


def _columns(given: Given, into: Migrated) -> None:
    if into.kind == "sft":
        answer = given.get("data.output_key")
        if answer is None:
            into.set({"data.messages_key": given.get("data.input_key")})
        else:
            into.set({"data.prompt_key": given.get("data.input_key"), "data.completion_key": answer})
        return
    for name in ("prompt_key", "chosen_key", "rejected_key"):
        if f"data.{name}" in given:
            into.set({f"data.{name}": given.get(f"data.{name}")})


def _folders(given: Given, into: Migrated) -> None:
    folder = given.get("ckpt.output_dir", given.get("ckpt.path"))
    into.set({"trainer.default_local_dir": folder})
    if {"ckpt.output_dir", "ckpt.path"} <= given.values.keys():
        why = "one folder holds the run and its checkpoints"
        into.differs.append(Remark(given.word("ckpt.path"), why))


def _trackers(given: Given, into: Migrated) -> None:
    loggers = ["console"]
    if given.is_on("logger.wandb.key"):
        loggers.append("wandb")
        into.differs.append(Remark("--logger.wandb.key", "is not taken; set WANDB_API_KEY, or run `wandb login`"))
    if given.is_on("logger.tensorboard_dir"):
        loggers.append("tensorboard")
    into.set({"trainer.logger": loggers})


FUNCTIONS: dict[str, Callable[[Given, Migrated], None]] = {
    "placement": _placement,
    "reward": _reward,
    "lengths": _lengths,
    "batch": _batch,
    "estimator": _estimator,
    "kl": _kl,
    "clip": _clip,
    "balance": partial(balance, name="model.aux_loss_coef"),
    "correction": _correction,
    "shaping": _shaping,
    "overlong": _overlong,
    "data": _data,
    "columns": _columns,
    "folders": _folders,
    "trackers": _trackers,
}
"""What `by: …` of a row names."""
