"""A schema as a flat table of dotted keys, and the nearest right name for a wrong one.

`root` is the class of a whole configuration, by default that of a PPO run.
"""

from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from hrl.trainer.config.base import Section
from hrl.trainer.config.schema import PPOTrainerConfig


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
    """The nested dict of dotted keys; a value where a section belongs is kept, so that validation can name it."""
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


def nearest(name: str, choices: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """The most similar of `choices`, best first."""
    return get_close_matches(name, sorted(choices), n=count, cutoff=cutoff)


def nearest_keys(key: str, aliases: Mapping[str, str], root: type[Section] = PPOTrainerConfig) -> list[str]:
    """Right names that `key` may have meant: a sibling, the same name in another section, or a similar path.

    Args:
        key: the unknown dotted key.
        aliases: accepted older spellings and what they became; a misspelt alias suggests its present name.
        root: the schema.
    """
    known = {**{name: name for name in leaves(root)}, **aliases}
    parent, _, name = key.rpartition(".")
    siblings = {known_key.rpartition(".")[2]: known_key for known_key in known if known_key.startswith(f"{parent}.")}
    close = nearest(name, siblings, cutoff=0.75)
    if close:
        return [known[siblings[close[0]]]]
    same_name = [known_key for known_key in known if known_key.rpartition(".")[2] == name]
    if same_name:
        best = sorted(same_name, key=lambda other: SequenceMatcher(None, key, other).ratio(), reverse=True)
        return list(dict.fromkeys(known[other] for other in best))[:2]
    return list(dict.fromkeys(known[other] for other in nearest(key, known, count=2, cutoff=0.72)))
