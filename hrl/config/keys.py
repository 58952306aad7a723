"""A schema as a flat table of dotted keys, and the nearest right name for a wrong one.

`root` is the class of a whole configuration, by default that of a PPO run.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from hrl.config.ppo import PPOTrainerConfig
from hrl.config.section import Section


class Leaf(NamedTuple):
    """A key that holds a value (not a section)."""

    key: str
    field: FieldInfo
    default: Any

    @property
    def help(self) -> str:
        """The sentence under the field, on one line."""
        return " ".join((self.field.description or "").split())


def _walk(section: Section, prefix: str) -> Iterator[Leaf]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _walk(value, f"{prefix}{name}.")
        else:
            yield Leaf(f"{prefix}{name}", field, value)


@cache
def leaves(root: type[Section] = PPOTrainerConfig) -> dict[str, Leaf]:
    """Every key of the schema with its field and plain default, in the order of the schema."""
    return {leaf.key: leaf for leaf in _walk(root(), "")}


@cache
def sections(root: type[Section] = PPOTrainerConfig) -> frozenset[str]:
    """Every dotted prefix of a key, such as `actor_rollout_ref` and `actor_rollout_ref.actor`."""
    parts = (key.split(".") for key in leaves(root))
    return frozenset(".".join(names[:depth]) for names in parts for depth in range(1, len(names)))


def flatten(
    tree: dict[str, Any], root: type[Section] = PPOTrainerConfig, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for the values of a nested dict; a schema key that holds a dict stays whole."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in leaves(root) and (value or key not in sections(root)):
            if value:
                yield from flatten(value, root, f"{key}.")
        elif not (value is None and key in sections(root)):
            yield key, value


def unflatten(values: dict[str, Any]) -> dict[str, Any]:
    """Return the nested dict of dotted keys.

    A value where a section belongs is kept, so that validation can name it.
    """
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *path, name = key.split(".")
        node = tree
        for part in path:
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                break
            node = child
        else:
            node[name] = value
    return tree


def edit_distance(one: str, other: str) -> int:
    """Return how many letters were left out, put in or swapped with their neighbour; an exchanged letter counts as two.

    Optimal string alignment (a restricted Damerau-Levenshtein distance), in which `grpo` is nearer to `gpro` than to
    `gspo`.
    """
    rows = [list(range(len(other) + 1))]
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, counterpart in enumerate(other, 1):
            cost = min(rows[-1][j] + 1, row[j - 1] + 1, rows[-1][j - 1] + 2 * (letter != counterpart))
            if i > 1 and j > 1 and one[i - 2 : i] == other[j - 2 : j][::-1]:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]


def nearest(name: str, choices: Iterable[str]) -> list[str]:
    """Those of `choices` that `name` is a misspelling of: all that are equally near, none if none is near enough.

    A misspelling is one slip in five letters or less, two in eleven, else three; or the end left out; or one of four
    words.
    """
    wanted = _plain(name)
    budget = 1 + (len(wanted) > 5) + (len(wanted) > 11)
    found: dict[str, int] = {}
    for choice in choices:
        if abs(len(choice) - len(wanted)) <= budget:
            distance = edit_distance(wanted, _plain(choice))
            if distance <= budget:
                found[choice] = distance
    if found:
        return sorted(choice for choice, distance in found.items() if distance == min(found.values()))
    return sorted(choice for choice in choices if _lacks_something(wanted, _plain(choice)))


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _lacks_something(one: str, other: str) -> bool:
    """Whether the second name begins with the first, or has the words of the first, three or more, and one more."""
    if len(one) > 3 and other.startswith(one):
        return True
    words, others = set(one.split("_")), set(other.split("_"))
    return len(words) >= 3 and words < others and len(others - words) == 1


def nearest_keys(key: str, aliases: Mapping[str, str], root: type[Section] = PPOTrainerConfig) -> list[str]:
    """Right names that `key` is a misspelling of, or whose end it is, or the other way round; none of another section.

    Args:
        key: The unknown dotted key.
        aliases: Accepted older spellings and what they became; a misspelt alias suggests its present name.
        root: The schema.

    Returns:
        At most two, the likeliest first.
    """
    known = {**{name: name for name in leaves(root)}, **aliases}
    parent, _, name = key.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == parent}
    close = [siblings[other] for other in nearest(name, siblings)]
    close = close or [other for other in known if _is_slip(key, other)]
    close = close or [other for other in known if other.endswith(f".{key}")]
    close = close or [other for other in known if "." in other and key.endswith(f".{other}")]
    found = list(dict.fromkeys(known[other] for other in close))
    return found if len(found) <= 2 else []


def _is_slip(key: str, other: str) -> bool:
    """Return whether two paths of the same depth differ by one slip."""
    return key.count(".") == other.count(".") and abs(len(key) - len(other)) <= 1 and edit_distance(key, other) == 1
