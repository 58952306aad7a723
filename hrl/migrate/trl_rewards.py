"""TRL's own reward functions, those of `trl.rewards`, as functions of hrl's library."""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hrl.migrate.line import Migrated, Remark

_MODULE = "trl.rewards"
FUNCTIONS = {
    "accuracy_reward": (),
    "reasoning_accuracy_reward": (),
    "think_format_reward": (),
    "get_cosine_scaled_reward": ("max_len",),
    "get_repetition_penalty_reward": ("ngram_size", "max_penalty"),
    "get_soft_overlong_punishment": ("max_completion_len", "soft_punish_cache"),
}
"""Functions of `trl.rewards` → arguments that are read here. Those that begin with `get_` are called to get one."""
_OF_THE_COMMAND: dict[str, Mapping[str, Any]] = {
    "accuracy_reward": {},
    "reasoning_accuracy_reward": {},
    "think_format_reward": {},
    "get_soft_overlong_punishment": {"max_completion_len": 1280, "soft_punish_cache": 256},
}
"""Names that `--reward_funcs` of the command takes → their arguments there."""

_COMPARES = (
    "is math_verify, which compares with the column `solution` too; it pays for a stated answer as for a boxed one, "
    "not for several different ones, and a solution that is no mathematics is an error, where TRL leaves the row out"
)
_BUT = {
    "accuracy_reward": _COMPARES,
    "reasoning_accuracy_reward": f"{_COMPARES}. Without `</think>` the whole response is read; TRL pays nothing for it",
    "think_format_reward": "is tags, which asks for `<think>…</think><answer>…</answer>` and nothing else; TRL takes "
    "any text behind `</think>`. Ask for these tags in the prompt",
    "get_cosine_scaled_reward": f"{_COMPARES}. It pays 1 or 0 at any length; an entry such as "
    "{name: length, most: 300, penalty: true, weight: 0.5} takes away from long responses",
    "get_repetition_penalty_reward": "is repetition, which counts sequences of words and signs; TRL's are of tokens",
}


@dataclass(frozen=True)
class Reward:
    """A reward as it is named for TRL.

    Attributes:
        written: How it is written, for a remark.
        name: Its name in `trl.rewards`; empty for any other.
        arguments: What it is made with.
        model: Folder or hub id of a reward model; empty for a function.
        is_unread: Whether it is a name that the file gives several values, or one that it changes later.
    """

    written: str
    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    is_unread: bool = False


# ---------------------------------------------------------------------------------------------- what is read


def rewards_of_command(named: Any) -> list[Reward]:
    """Return the rewards that `--reward_funcs` names."""
    names = [str(name) for name in (named if isinstance(named, list) else [named])]
    return [Reward(name, name, _OF_THE_COMMAND[name]) if name in _OF_THE_COMMAND else Reward(name) for name in names]


def rewards_of_file(
    node: ast.expr, tree: ast.Module, constants: Mapping[str, ast.expr], value: Callable[[ast.expr], Any]
) -> list[Reward]:
    """Return the rewards that an expression of a Python file names.

    Args:
        node: The expression: a reward or a list of them.
        tree: The file. Only what it imports from `trl.rewards` is TRL's; a function of its own may have such a name.
        constants: Names that are given one value in the file.
        value: Returns the value of an expression.
    """
    imported, assigned = _imported(tree), set(_assigned(tree))
    node = _behind(node, constants)
    parts = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    return [_reward(part, imported, assigned, constants, value) for part in parts]


def _behind(node: ast.expr, constants: Mapping[str, ast.expr]) -> ast.expr:
    for _ in range(8):
        if not (isinstance(node, ast.Name) and node.id in constants):
            break
        node = constants[node.id]
    return node


def _reward(
    node: ast.expr,
    imported: Mapping[str, str],
    assigned: Container[str],
    constants: Mapping[str, ast.expr],
    value: Callable[[ast.expr], Any],
) -> Reward:
    written = ast.unparse(node)
    node = _behind(node, constants)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return Reward(written, model=node.value)
    if isinstance(node, ast.Name) and node.id in assigned:
        return Reward(written, is_unread=True)
    called = node.func if isinstance(node, ast.Call) else node
    name = _name_in_trl(called, imported)
    if name not in FUNCTIONS or isinstance(node, ast.Call) != name.startswith("get_"):
        return Reward(written)
    arguments: dict[str, Any] = {}
    if isinstance(node, ast.Call):
        arguments = dict(zip(FUNCTIONS[name], map(value, node.args), strict=False))
        arguments |= {each.arg: value(each.value) for each in node.keywords if each.arg is not None}
    return Reward(written, name, arguments)


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return the names that a file imports and gives no other meaning → what they are called in full."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                first = each.name.partition(".")[0]  # what `import a.b` without a name of one's own defines
                found[each.asname or first] = each.name if each.asname else first
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            if node.module == _MODULE and any(each.name == "*" for each in node.names):
                found |= {name: f"{_MODULE}.{name}" for name in FUNCTIONS}
    for name in _defined(tree):
        found.pop(name, None)
    return found


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
    yield from _assigned(tree)


def _assigned(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _name_in_trl(node: ast.expr, imported: Mapping[str, str]) -> str:
    """Return the name in `trl.rewards` of what an expression names; empty if it is no function of it."""
    first, _, rest = ast.unparse(node).partition(".")
    whole = ".".join(part for part in (imported.get(first, ""), rest) if part)
    return whole.rpartition(".")[2] if whole.startswith(f"{_MODULE}.") else ""


# ---------------------------------------------------------------------------------------------- what it becomes


def set_rewards(rewards: Sequence[Reward], weights: Sequence[float], longest: int, into: Migrated) -> list[Reward]:
    """Set the keys of the rewards that hrl has.

    Args:
        rewards: The rewards.
        weights: Weight of each.
        longest: `data.max_response_length`, in tokens.
        into: Gets the keys and what differs.

    Returns:
        The rewards that it has not.
    """
    entries: list[dict[str, Any]] = []
    others: list[Reward] = []
    has_model = False
    for reward, weight in zip(rewards, weights, strict=True):
        if reward.model and not has_model:
            has_model = True
            into.set({"reward.reward_model.enable": True, "reward.reward_model.model_path": reward.model})
            into.set({"reward.reward_model.weight": weight} if weight != 1 else {})
        elif reward.name == "get_soft_overlong_punishment" and _set_overlong(reward, weight, longest, into):
            pass
        elif (entry := _entry(reward, weight)) is not None:
            is_there = any(entry["name"] == other["name"] for other in entries)
            label = {"label": f"{reward.name.removeprefix('get_')}_{len(entries) + 1}"} if is_there else {}
            entries.append(entry | label)
            into.differs.append(Remark(reward.written, _BUT[reward.name]))
        else:
            others.append(reward)
    if entries:
        into.set({"reward.functions": [entry["name"] if len(entry) == 1 else entry for entry in entries]})
    if any(_BUT.get(reward.name, "").startswith(_COMPARES) for reward in rewards):
        into.set({"data.answer_key": "solution"})
    return others


def _entry(reward: Reward, weight: float) -> dict[str, Any] | None:
    """Return the entry of `reward.functions`; None if there is none for it."""
    if reward.name not in _BUT:
        return None
    entry: dict[str, Any] = {"name": "tags" if reward.name == "think_format_reward" else "math_verify"}
    if reward.name == "get_repetition_penalty_reward":
        size, most = reward.arguments.get("ngram_size", 3), reward.arguments.get("max_penalty", -1.0)
        if not isinstance(size, int) or not isinstance(most, int | float):
            return None
        entry, weight = {"name": "repetition", "size": size}, -float(most) * weight
    return entry if weight == 1 else {**entry, "weight": weight}


def _set_overlong(reward: Reward, weight: float, longest: int, into: Migrated) -> bool:
    """Set DAPO's penalty for long responses, and return whether its width is known."""
    zone, end = reward.arguments.get("soft_punish_cache"), reward.arguments.get("max_completion_len")
    if not isinstance(zone, int) or zone < 1:
        return False
    values = {"enable": True, "len": zone, "penalty_factor": weight}
    into.set({f"reward.overlong_buffer.{name}": value for name, value in values.items()})
    if end != longest:
        why = f"is reward.overlong_buffer, whose zone ends at data.max_response_length={longest} and not at {end}"
        into.differs.append(Remark(reward.written, why))
    return True
