"""TRL: a Python file with `GRPOConfig(…)` or its like, which is read and never run, or a line of its command `trl`."""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hrl.config.arithmetic import count
from hrl.migrate.line import Migrated, MigrationError, Remark
from hrl.migrate.table import Given, Table, balance, by_table, read_table
from hrl.migrate.trl_rewards import rewards_of_command, rewards_of_file, set_rewards
from hrl.migrate.values import flags_of

PROGRAMS = {"grpo": "ppo", "rloo": "ppo", "dpo": "dpo", "kto": "dpo", "sft": "sft", "reward": "rm"}
"""Commands of `trl` that hrl has → the kind of run."""
_CONFIGS = {
    "GRPOConfig": "grpo",
    "RLOOConfig": "rloo",
    "DPOConfig": "dpo",
    "KTOConfig": "kto",
    "SFTConfig": "sft",
    "RewardConfig": "reward",
}
_TRAINERS = {name.replace("Config", "Trainer"): program for name, program in _CONFIGS.items()}
_OFFLINE_LOSSES = ("sigmoid", "ipo", "hinge", "kto", "apo_zero_unpaired")
"""Losses that hrl has under TRL's names."""
_REWARDS = "reward_funcs"
_CHANGES = ("append", "extend", "insert", "remove", "pop", "clear", "update", "setdefault")
"""Methods that change a list or a dict in its place; rows have none of these names."""
_FORMATS = ("json", "csv", "parquet")
"""What `load_dataset` takes for the name of files in a format."""
_OF_LOADING = (
    "dtype",
    "torch_dtype",
    "attn_implementation",
    "device_map",
    "low_cpu_mem_usage",
    "num_labels",
    "use_cache",
)
"""Arguments of `from_pretrained` that say how a model is loaded, and not which one it is."""
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


class Unknown:
    """An expression whose value only a run could tell."""

    def __init__(self, node: ast.expr) -> None:
        self.text = ast.unparse(node)

    def __repr__(self) -> str:
        return self.text


def table_of(program: str) -> Table:
    """Return the table of a program."""
    part = "rl" if PROGRAMS[program] == "ppo" else "offline"
    return read_table("trl.yaml", part, {"reward": "rm"}.get(program, program), with_part="common")


# ---------------------------------------------------------------------------------------------- what is read


def migrate_trl_line(program: str, arguments: Sequence[str], processes: int) -> Migrated:
    """Return hrl's line for `trl <program> --flag value …`.

    Raises:
        MigrationError: hrl has no such program.
    """
    if program not in PROGRAMS:
        raise MigrationError(f"hrl has no counterpart of `trl {program}`; there are those of {', '.join(PROGRAMS)}")
    flags, stray = flags_of(arguments)
    values = {name.replace("-", "_"): value for name, (value, _) in flags.items()}
    written = {name.replace("-", "_"): text for name, (_, text) in flags.items()}
    rows = table_of(program).rows
    for name in [name for name in values if name.startswith("no_") and name not in rows]:
        switch = name.removeprefix("no_")  # transformers has `--no_x` for each switch that is on by default
        if switch in rows:
            del values[name]
            values[switch], written[switch] = False, written.pop(name)
    if _REWARDS in values:
        values[_REWARDS] = rewards_of_command(values[_REWARDS])
    has_file = values.pop("config", None) is not None
    into = _migrate(f"trl {program}", program, values, written, processes, with_defaults=not has_file)
    if has_file:
        why = "holds settings, none of which are here: give them as flags, `--flag value`, and migrate the line again"
        into.lost.append(Remark(written["config"], why))
    into.lost += [Remark(word, "belongs to no flag") for word in stray]
    return into


def migrate_trl_file(text: str, name: str, processes: int) -> Migrated:
    """Return hrl's line for a Python file that configures and starts a trainer of TRL; nothing in it is run.

    Args:
        text: The file's text.
        name: Its name, for messages.
        processes: Processes that `accelerate launch` would start.

    Raises:
        MigrationError: It is no Python, or has no configuration or trainer of TRL.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise MigrationError(f"{name} is no Python: {error.msg} in line {error.lineno}") from error
    constants = dict(_constants(tree))
    program, values, written = None, {}, {}
    is_configured = False
    for call, found in _calls(tree):
        program = program or found
        is_configured = is_configured or _called(call) in _CONFIGS
        if found != program:
            continue
        by_place = ("model", _REWARDS) if PROGRAMS[program] == "ppo" else ("model",)
        arguments = dict(zip(by_place, call.args if _called(call) in _TRAINERS else (), strict=False))
        for argument, node in (arguments | {each.arg: each.value for each in call.keywords if each.arg}).items():
            written[argument] = f"{argument}={_shown(node)}"
            if argument == _REWARDS:
                values[argument] = rewards_of_file(node, tree, constants, lambda part: _value(part, constants))
            else:
                values[argument] = _value(node, constants)
    if program is None:
        raise MigrationError(f"{name} has none of {', '.join((*_CONFIGS, *_TRAINERS))}")
    # Without a configuration in the file, and none given, the trainer takes TRL's defaults.
    has_settings = is_configured or "args" not in values
    into = _migrate(f"{name} ({program})", program, values, written, processes, with_defaults=has_settings)
    if not has_settings:
        why = (
            "comes from a command line or from elsewhere, so none of its settings are here: give the line itself, as "
            f"`trl {program} --flag value …`"
        )
        into.lost.append(Remark(written["args"], why))
    return into


def _shown(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) < 60 else f"{text[:57]}…"


def _calls(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Yield the calls of configurations, then those of trainers, with the program that each belongs to."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for names in (_CONFIGS, _TRAINERS):
        yield from ((call, names[name]) for call in calls if (name := _called(call)) in names)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _constants(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that are given one value in the file, which nothing in it changes later."""
    values: dict[str, ast.expr] = {}
    given: Counter[str] = Counter()
    changed: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):  # in a loop or by `+=` too
            given[node.id] += 1
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.value, ast.Name) and _changes(node):
            changed.add(node.value.id)
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id] = node.value
    yield from ((name, value) for name, value in values.items() if given[name] == 1 and name not in changed)


def _changes(node: ast.Attribute | ast.Subscript) -> bool:
    """Return whether it changes what it is taken from: a method such as `append`, or a place that is set or deleted."""
    return not isinstance(node.ctx, ast.Load) or (isinstance(node, ast.Attribute) and node.attr in _CHANGES)


def _value(node: ast.expr, constants: Mapping[str, ast.expr], depth: int = 0) -> Any:
    """Return the value of a literal, of arithmetic on numbers, of a name for one, or of `load_dataset(…)`."""
    if isinstance(node, ast.Name) and node.id in constants and depth < 8:
        return _value(constants[node.id], constants, depth + 1)
    if isinstance(node, ast.Call) and _called(node) == "load_dataset":
        return _loaded(node, None, constants, depth) or Unknown(node)
    if isinstance(node, ast.Call) and _called(node) == "from_pretrained" and len(node.args) == 1 and depth < 8:
        name = _value(node.args[0], constants, depth + 1)  # the model is the one of this name
        is_plain = isinstance(name, str) and all(each.arg in _OF_LOADING for each in node.keywords)
        return name if is_plain else Unknown(node)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        whole = node.value
        while isinstance(whole, ast.Name) and whole.id in constants and depth < 8:
            whole, depth = constants[whole.id], depth + 1
        if isinstance(whole, ast.Call) and _called(whole) == "load_dataset":
            return _loaded(whole, node.slice.value, constants, depth) or Unknown(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and depth < 8:
        found = _value(node.func.value, constants, depth + 1)  # rows after `.map(…)` are still those of the set
        if not isinstance(found, Rows):
            return Unknown(node)
        call = ast.unparse(ast.Call(ast.Name(node.func.attr), node.args, node.keywords))
        return Rows(found, (*found.calls, f".{call}"), found.files)
    if isinstance(node, ast.BinOp):
        left, right = (_value(each, constants, depth + 1) for each in (node.left, node.right))
        if isinstance(left, int | float) and isinstance(right, int | float):
            return _arithmetic(node.op, left, right, node)
    if isinstance(node, ast.List | ast.Tuple | ast.Dict) and depth < 8:
        return _collected(node, constants, depth + 1)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return Unknown(node)


def _collected(node: ast.List | ast.Tuple | ast.Dict, constants: Mapping[str, ast.expr], depth: int) -> Any:
    """Return the value of a list, tuple or dict whose parts all have one."""
    if isinstance(node, ast.Dict):
        keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
        values = [_value(part, constants, depth) for part in node.values]
        is_known = len(keys) == len(node.keys) and not any(isinstance(value, Unknown) for value in values)
        return dict(zip(keys, values, strict=True)) if is_known else Unknown(node)
    parts = [_value(part, constants, depth) for part in node.elts]
    if any(isinstance(part, Unknown) for part in parts):
        return Unknown(node)
    return tuple(parts) if isinstance(node, ast.Tuple) else parts


def _arithmetic(operator: ast.operator, left: float, right: float, node: ast.expr) -> Any:
    if isinstance(operator, ast.Mult):
        return left * right
    if isinstance(operator, ast.Add):
        return left + right
    if isinstance(operator, ast.Sub):
        return left - right
    if isinstance(operator, ast.FloorDiv | ast.Div) and right != 0:
        return left // right if isinstance(operator, ast.FloorDiv) else left / right
    return Unknown(node)


class Rows(str):
    """The name of a data set, or of its first file, with the calls that the file makes other rows of it by.

    Attributes:
        calls: These calls.
        files: All files, where it is made of several.
    """

    calls: tuple[str, ...]
    files: tuple[str, ...]

    def __new__(cls, name: str, calls: tuple[str, ...] = (), files: tuple[str, ...] = ()) -> Rows:
        rows = super().__new__(cls, name)
        rows.calls, rows.files = calls, files
        return rows


def _loaded(call: ast.Call, chosen: object, constants: Mapping[str, ast.expr], depth: int) -> Rows | None:
    """Return the rows of `load_dataset(…)`; None where only a run could tell them.

    Args:
        call: The call.
        chosen: What stands in brackets behind it, the split of a data set that was loaded whole.
        constants: Names of the file and their values.
        depth: How many names have been followed.
    """
    words = [_value(argument, constants, depth + 1) for argument in call.args]
    options = {each.arg: _value(each.value, constants, depth + 1) for each in call.keywords}
    name = options.get("path", words[0] if words else None)
    part = options.get("name", words[1] if len(words) > 1 else None)
    split = options.get("split", chosen)
    if not name or not all(isinstance(word, str | None) for word in (name, part, split)):
        return None
    if name in _FORMATS:
        return _of_files(options.get("data_files", options.get("data_dir")), split, options.get("field"))
    return _source(name, part, split)


def _of_files(named: Any, split: Any, field: Any) -> Rows | None:
    """Return the rows of files of a format, which datasets takes by split."""
    part, *cut = (split or "train").split("[", 1)
    by_split = named if isinstance(named, Mapping) else {"train": named}
    files = by_split.get(part)
    files = [files] if isinstance(files, str) else files
    if not isinstance(files, list | tuple) or not files or not all(isinstance(file, str) for file in files):
        return None
    calls = [f"split={split!r}"] if cut else []
    calls += [] if field is None else [f"field={field!r}"]
    return Rows(files[0], tuple(calls), tuple(files))


def _source(name: str, part: str | None, split: str | None) -> Rows:
    if part or split not in (None, "train"):
        return Rows(f"{name}:{part or ''}:{split or ''}".rstrip(":"))
    return Rows(name)


# ---------------------------------------------------------------------------------------------- what it becomes


def _migrate(
    source: str,
    program: str,
    values: Mapping[str, Any],
    written: Mapping[str, str],
    processes: int,
    *,
    with_defaults: bool = True,
) -> Migrated:
    into, table = Migrated(source, PROGRAMS[program]), table_of(program)
    if not with_defaults:
        table = replace(table, defaults={})
    known: dict[str, Any] = {}
    texts: dict[str, str] = {}
    for name, value in values.items():
        present = table.present(name)
        row = table.rows.get(present)
        if present == "args":  # the configuration, which is read itself
            continue
        if isinstance(value, Unknown) and not (isinstance(row, dict) and ("is" in row or "not" in row or "by" in row)):
            into.lost.append(Remark(written[name], "is not a constant in the file; set the key yourself"))
            continue
        known[present], texts[present] = value, written[name]
    given = Given(table, known, texts)
    if PROGRAMS[program] == "ppo":
        into.set({"algorithm.adv_estimator": program})
    if program == "kto":  # whatever its loss, not that of pairs
        into.set({"algorithm.loss_type": "kto"})
    into.set({"trainer.n_gpus_per_node": processes})
    for name in by_table(given, into):
        FUNCTIONS[name](given, into)
    into.drop_what_does_not_compose()
    return into


def _batch(given: Given, into: Migrated) -> None:
    processes = int(
        next(word.partition("=")[2] for word in into.arguments if word.startswith("trainer.n_gpus_per_node="))
    )
    rows = int(given.number("per_device_train_batch_size", 8))
    accumulated = int(given.number("gradient_accumulation_steps", 1))
    step = rows * accumulated * processes  # completions, or rows, of an optimizer step
    updates = 1
    if into.kind == "ppo":
        samples = int(given.number("num_generations", 8))
        per_generation = int(given.number("steps_per_generation", accumulated))
        sampled = int(given.number("generation_batch_size", rows * processes * per_generation))
        prompts, mini = max(1, sampled // samples), max(1, min(step, sampled) // samples)
        updates = max(1, prompts // mini) * int(given.number("num_iterations", 1))
        into.set({"data.train_batch_size": prompts, f"{_ACTOR}.ppo_mini_batch_size": mini, f"{_ROLLOUT}.n": samples})
        into.set({f"{_ACTOR}.ppo_micro_batch_size_per_gpu": rows})
        why = (
            f"prompts are counted here, not completions: {sampled} completions of a step are "
            f"{count(prompts, 'prompt')} × {samples} samples, on {count(processes, 'process', 'processes')} "
            "(--processes says how many)"
        )
        into.differs.append(Remark("per_device_train_batch_size", why))
    else:
        into.set({"data.train_batch_size": step, "data.micro_batch_size_per_gpu": rows})
    if "max_steps" in given and given.number("max_steps", -1) > 0:
        into.set({"trainer.total_training_steps": _steps(given.number("max_steps", 0), updates)})
    if given.get("save_strategy") == "steps":
        _every(given, "save_steps", 500, "trainer.save_freq", updates, into)
    elif given.get("save_strategy") == "epoch":
        into.lost.append(Remark(given.word("save_strategy"), "trainer.save_freq counts steps; set it"))
    if given.get("eval_strategy") == "steps":
        _every(given, "eval_steps", given.number("logging_steps", 10), "trainer.test_freq", updates, into)
    elif given.get("eval_strategy") == "epoch":
        into.lost.append(Remark(given.word("eval_strategy"), "trainer.test_freq counts steps; set it"))


def _every(given: Given, name: str, default: float, key: str, updates: int, into: Migrated) -> None:
    """Set how often something happens. transformers takes a number below 1 for a share of all optimizer steps."""
    every, whole = given.number(name, default), given.number("max_steps", -1)
    if not 0 < every < 1:
        into.set({key: _steps(every, updates)})
    elif whole > 0:
        into.set({key: _steps(math.ceil(every * whole), updates)})
    else:
        into.lost.append(Remark(given.word(name), f"is a share of all steps, and without max_steps unknown; set {key}"))


def _steps(optimizer_steps: float, updates: int) -> int:
    return max(1, int(optimizer_steps) // updates)


def _schedule(given: Given, into: Migrated) -> None:
    section = "optim" if into.kind != "ppo" else f"{_ACTOR}.optim"
    name = str(given.get("lr_scheduler_type", "linear"))
    shapes = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
    shape = shapes.get(name, name)
    if shape in ("constant", "cosine", "linear"):
        into.set({f"{section}.lr_scheduler_type": shape})
    else:
        into.lost.append(Remark(given.word("lr_scheduler_type"), "schedules are constant, cosine and linear"))
    settings = given.get("lr_scheduler_kwargs")
    if isinstance(settings, dict) and "min_lr_rate" in settings:
        into.set({f"{section}.min_lr_ratio": settings["min_lr_rate"]})
    elif "lr_scheduler_kwargs" in given:
        into.lost.append(Remark(given.word("lr_scheduler_kwargs"), f"the schedule has {section}.min_lr_ratio alone"))
    warmup = given.number("warmup_steps", 0)
    if 0 < warmup < 1:  # transformers takes such a number for a share
        into.set({f"{section}.lr_warmup_steps_ratio": warmup})
    elif warmup:
        into.set({f"{section}.lr_warmup_steps": int(warmup)})
    if "warmup_ratio" in given:
        into.set({f"{section}.lr_warmup_steps_ratio": given.get("warmup_ratio")})
    if "adam_beta1" in given or "adam_beta2" in given:
        into.set({f"{section}.betas": [given.number("adam_beta1", 0.9), given.number("adam_beta2", 0.999)]})


def _kl(given: Given, into: Migrated) -> None:
    weight = given.number("beta", 0.0)
    in_loss = into.arguments[0].endswith("=grpo")
    if weight == 0:
        into.set({f"{_ACTOR}.use_kl_loss": False})
    elif in_loss:
        corrected = given.get("use_bias_correction_kl", True)
        kind = "low_var_kl+" if corrected else "low_var_kl"
        into.set({f"{_ACTOR}.use_kl_loss": True, f"{_ACTOR}.kl_loss_coef": weight, f"{_ACTOR}.kl_loss_type": kind})
        if corrected:
            why = "kl_loss_type=low_var_kl+ has the gradient of k2, which on policy is the unbiased one too"
            into.differs.append(Remark("use_bias_correction_kl", why))
    else:
        into.set({"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": weight})


def _loss(given: Given, into: Migrated) -> None:
    if into.kind != "ppo":
        names = given.get("loss_type")
        names = names if isinstance(names, list) else [names]
        if into.kind == "dpo" and len(names) == 1 and names[0] in _OFFLINE_LOSSES:
            into.set({"algorithm.loss_type": names[0]})
        elif names not in (["sigmoid"], ["nll"], ["chunked_nll"]):
            into.lost.append(
                Remark(given.word("loss_type"), "the losses are sigmoid, ipo, hinge, simpo, orpo and KTO's")
            )
        return
    name = given.get("loss_type", "grpo")
    modes = {
        "grpo": "seq-mean-token-mean",
        "dapo": "token-mean",
        "bnpo": "token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
    }
    if name in modes:
        into.set({f"{_ACTOR}.loss_agg_mode": modes[name]})
    elif name in ("cispo", "sapo"):
        mode = "token-mean" if name == "cispo" else "seq-mean-token-mean"
        into.set({f"{_ACTOR}.policy_loss.loss_mode": name, f"{_ACTOR}.loss_agg_mode": mode})
    else:
        known = ", ".join((*modes, "cispo", "sapo"))
        into.lost.append(Remark(given.word("loss_type"), f"of TRL's losses there are {known}"))
    if given.get("importance_sampling_level") in ("sequence", "sequence_token"):
        into.set({f"{_ACTOR}.policy_loss.loss_mode": "gspo"})
    if name == "sapo":
        into.set({f"{_ACTOR}.tau_pos": given.number("sapo_temperature_pos", 1.0)})
        into.set({f"{_ACTOR}.tau_neg": given.number("sapo_temperature_neg", 1.05)})


def _scale(given: Given, into: Migrated) -> None:
    scale = given.get("scale_rewards")
    if scale == "batch":
        why = "a group's advantages are divided by its own deviation; reinforce_plus_plus_baseline by the batch's"
        into.lost.append(Remark(given.word("scale_rewards"), why))
    else:
        into.set({"algorithm.norm_adv_by_std_in_grpo": scale in (True, "group")})


def _sampling(given: Given, into: Migrated) -> None:
    if "top_k" in given:
        into.set({f"{_ROLLOUT}.top_k": given.get("top_k") or -1})
    nothing = {"min_p": (None, 0.0), "repetition_penalty": (1.0,), "generation_kwargs": (None,)}
    for name, values in nothing.items():
        if name in given and given.get(name) not in values:
            why = "log-probs would not be those of the sampled distribution; only temperature is applied to both"
            into.lost.append(Remark(given.word(name), why))


def _correction(given: Given, into: Migrated) -> None:
    if not given.is_on("use_vllm") or given.get("vllm_importance_sampling_correction", True) is False:
        return
    level, _, how = str(given.get("vllm_importance_sampling_mode", "sequence_mask")).partition("_")
    high, low = given.get("vllm_importance_sampling_clip_max", 3.0), given.get("vllm_importance_sampling_clip_min")
    bound = high if how == "truncate" and low is None else f"{low or 0.001}_{high if high is not None else 1e6}"
    correction = "algorithm.rollout_correction"
    into.set({f"{correction}.rollout_is": level, f"{correction}.rollout_is_threshold": bound})


def _reward(given: Given, into: Migrated) -> None:
    rewards = given.get(_REWARDS, ())
    weights = given.get("reward_weights")
    listed = weights if isinstance(weights, list | tuple) else [weights]
    are_known = len(listed) == len(rewards) and all(isinstance(weight, int | float) for weight in listed)
    longest = int(given.number("max_completion_length", 512))
    others = set_rewards(rewards, listed if are_known else [1.0] * len(rewards), longest, into)
    if _REWARDS in given and (others or not rewards):
        why = (
            "TRL's functions take all completions of a batch, hrl's one response: `def name(response, answer)`. Write "
            "them so, and name them: reward.functions takes several, reward.custom_reward_function.path one"
        )
        unread = (
            "stands for more than one value in the file, so what it is was not read: name all functions in one list "
            "and migrate the file again, or set reward.functions yourself"
        )
        if others and len(others) < len(rewards):
            into.lost += [Remark(each.written, unread if each.is_unread else why) for each in others]
        else:
            is_unread = bool(others) and all(each.is_unread for each in others)
            into.lost.append(Remark(given.word(_REWARDS), unread if is_unread else why))
    if "reward_model_name_or_path" in given:
        model = given.get("reward_model_name_or_path")
        into.set({"reward.reward_model.enable": True, "reward.reward_model.model_path": model})
    for name in ("reward_weights", "reward_processing_classes"):
        is_taken = name == "reward_weights" and are_known and not others
        if name in given and given.get(name) is not None and not is_taken:
            why = "weights stand beside the functions, in reward.functions"
            if name == "reward_weights" and len(listed) > len(rewards):
                why = f"are {len(listed)}, and no more than {len(rewards)} of the rewards could be read; {why}"
            into.lost.append(Remark(given.word(name), why))


def _shaping(given: Given, into: Migrated) -> None:
    bounds = given.get("reward_clip_range")
    if isinstance(bounds, list | tuple) and len(bounds) == 2:
        into.set({"reward.shaping": {"clip": max(abs(float(bound)) for bound in bounds)}})


def _model(given: Given, into: Migrated) -> None:
    section = "model" if into.kind != "ppo" else "actor_rollout_ref.model"
    name = given.get("model_name_or_path", given.get("model"))
    if isinstance(name, str):
        into.set({f"{section}.path": name})
    elif name is not None:
        into.lost.append(Remark(given.word("model"), f"is not a name; set {section}.path"))
    if given.get("model_revision", "main") != "main":
        into.lost.append(
            Remark(given.word("model_revision"), f"download the revision and set {section}.path to its folder")
        )
    for option in ("dtype", "model_init_kwargs"):
        if option in given and given.get(option) is not None:
            why = "masters are float32 and products bfloat16; ….fsdp_config.model_dtype and dtype change that"
            into.needless.append(Remark(given.word(option), why))


def _adapter(given: Given, into: Migrated) -> None:
    section = "model" if into.kind != "ppo" else "actor_rollout_ref.model"
    if given.get("peft_config") is not None:
        why = f"set {section}.lora_rank, lora_alpha and target_modules to what it has (r, lora_alpha, target_modules)"
        into.lost.append(Remark(given.word("peft_config"), why))
    if not given.is_on("use_peft"):
        if given.is_on("load_in_4bit"):
            why = f"weights of 4 bits are frozen: set {section}.lora_rank and {section}.load_in_4bit=true"
            into.lost.append(Remark(given.word("load_in_4bit"), why))
        return
    if given.is_on("load_in_4bit"):
        into.set({f"{section}.load_in_4bit": True})
    rank, alpha = int(given.number("lora_r", 16)), int(given.number("lora_alpha", 32))
    into.set({f"{section}.lora_rank": rank, f"{section}.lora_alpha": alpha})
    if given.is_on("use_rslora"):
        into.set({f"{section}.use_rslora": True})
    targets = given.get("lora_target_modules")
    if targets is not None:
        into.set({f"{section}.target_modules": targets})
    else:
        why = f"{section}.target_modules=all-linear: peft's own choice is a few of a family's layers"
        into.differs.append(Remark(given.word("use_peft"), why))


def _data(given: Given, into: Migrated) -> None:
    part = given.get("dataset_config")
    for name, split, key in (
        ("train_dataset", None, "data.train_files"),
        ("eval_dataset", None, "data.val_files"),
        ("dataset_name", "dataset_train_split", "data.train_files"),
        ("dataset_name", "dataset_test_split", "data.val_files"),
    ):
        if name not in given or (split == "dataset_test_split" and given.get("eval_strategy", "no") == "no"):
            continue
        rows = given.get(name)
        if isinstance(rows, str):
            is_test = split == "dataset_test_split"
            chosen = None if split is None else given.get(split, "test" if is_test else "train")
            files = list(getattr(rows, "files", ()))
            into.set({key: files if len(files) > 1 else str(rows if split is None else _source(rows, part, chosen))})
            if isinstance(rows, Rows) and rows.calls:
                why = f"leaves out `{''.join(rows.calls)}`: write the rows so made to a file and set {key} to it"
                into.lost.append(Remark(given.word(name), why))
        else:
            into.lost.append(
                Remark(given.word(name), f"are rows that the file makes; {key} takes a file or a data set")
            )


def _precision(given: Given, into: Migrated) -> None:
    section = "model.fsdp_config" if into.kind != "ppo" else f"{_ACTOR}.fsdp_config"
    if given.is_on("fp16"):
        into.set({f"{section}.dtype": "float16"})
    elif given.is_on("bf16"):
        into.needless.append(Remark(given.word("bf16"), "products are in bfloat16"))


def _folders(given: Given, into: Migrated) -> None:
    if isinstance(given.get("output_dir"), str):
        into.set({"trainer.default_local_dir": given.get("output_dir")})
    for name, key in (("run_name", "trainer.experiment_name"), ("project", "trainer.project_name")):
        if isinstance(given.get(name), str):
            into.set({key: given.get(name)})
    if given.is_on("save_only_model"):
        section = "checkpoint" if into.kind != "ppo" else f"{_ACTOR}.checkpoint"
        into.set({f"{section}.save_contents": ["hf_model"]})
    resumed = given.get("resume_from_checkpoint")
    if isinstance(resumed, str):
        why = "a run continues by itself from its newest checkpoint; checkpoints of TRL can't be continued"
        into.lost.append(Remark(given.word("resume_from_checkpoint"), why))


def _trackers(given: Given, into: Migrated) -> None:
    named = given.get("report_to")
    names = [named] if isinstance(named, str) else list(named) if isinstance(named, list | tuple) else []
    known = [name for name in names if name in ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")]
    into.set({"trainer.logger": ["console", *known]})
    for name in names:
        if name not in (*known, "none", "all"):
            into.lost.append(Remark(given.word("report_to"), f"there is no tracker {name}"))


_ENVIRONMENTS = {
    "rollout_func": "the loop of turns is hrl's own, and what answers the policy in it is an environment",
    "environment_factory": (
        "is a class whose public methods are tools: make it an hrl.ToolEnvironment with the mark @hrl.tool on each of "
        "them, whose `reset` begins the episode"
    ),
}
"""Arguments that stand for an environment → what it becomes."""


def _tools(given: Given, into: Migrated) -> None:
    rounds = given.get("max_tool_calling_iterations")
    if isinstance(rounds, int):
        into.set({"environment.max_turns": rounds + 1})
        why = f"environment.max_turns={rounds + 1}: turns are the policy's, and the last one answers the last results"
        into.differs.append(Remark(given.word("max_tool_calling_iterations"), why))
    for name, advice in _ENVIRONMENTS.items():
        if given.get(name) is not None:
            into.set({"environment.path": "YOUR_ENVIRONMENT.py:Class"})
            into.lost.append(Remark(given.word(name), f"{advice}; put it in place of YOUR_ENVIRONMENT.py:Class"))
            return
    functions = given.get("tools")
    if functions not in (None, []):
        names = [name.strip() for name in getattr(functions, "text", "").strip("[]").split(",")]
        named = [f"YOUR_TOOLS.py:{name if name.isidentifier() else 'YOUR_FUNCTION'}" for name in names]
        into.set({"environment.path": "tools", "environment.tools": list(dict.fromkeys(named))})
        why = "the functions can stay as they are, in a file of their own: put its name in place of YOUR_TOOLS.py"
        into.lost.append(Remark(given.word("tools"), why))


FUNCTIONS: dict[str, Callable[[Given, Migrated], None]] = {
    "batch": _batch,
    "schedule": _schedule,
    "kl": _kl,
    "loss": _loss,
    "scale": _scale,
    "sampling": _sampling,
    "correction": _correction,
    "reward": _reward,
    "shaping": _shaping,
    "model": _model,
    "balance": partial(balance, name="router_aux_loss_coef"),
    "adapter": _adapter,
    "data": _data,
    "precision": _precision,
    "folders": _folders,
    "trackers": _trackers,
    "tools": _tools,
}
"""What `by: …` of a row names."""
