"""Reading `key=value` with hydra's grammar and putting it on a composed tree, one problem per argument."""

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hrl.config.keys import leaves
from hrl.config.problems import Problem, Reason
from hrl.config.section import Section

_NEEDS_GRAMMAR = frozenset("[]{}'\"$,()")
_PARSER = OverridesParser.create()


def read_override(text: str) -> Override | Problem:
    """Read one argument of the command line.

    A value that hydra's grammar rejects but that is plainly one string (`?`, `&`, `=` or `~` in a path) is taken as
    that string, so that `data.train_files=reasoning_gym:gsm_symbolic?size=100&seed=1` needs no inner quotes.
    """
    key, equals, value = text.partition("=")
    if not equals and not key.startswith("~"):
        return Problem(text, "is no override.", "Write key=value.", reason=Reason.UNREADABLE)
    try:
        return _checked(_PARSER.parse_override(text), text)
    except HydraException as error:
        if value and _NEEDS_GRAMMAR.isdisjoint(value):
            return _checked(_PARSER.parse_override(f'{key}="{value}"'), text)
        what = f"can't read {value!r}: {str(error).splitlines()[0]}."
        return Problem(key.lstrip("+~"), what, _quoting(key, value), reason=Reason.UNREADABLE)


def _checked(override: Override, text: str) -> Override | Problem:
    if override.is_sweep_override():
        key, _, value = text.partition("=")
        hint = f"For a list write '{key}=[{value}]'." if "," in value else ""
        return Problem(override.key_or_group, "has several values; one run takes one.", hint)
    return override


def _quoting(key: str, value: str) -> str:
    if value.startswith("[") and not value.endswith("]"):  # a shell cuts a list at its spaces
        return f"Write a list without spaces, or quote it: '{key}=[…,…]'."
    return f"Quote the value: '{key}=\"{value}\"'." if '"' not in value and "'" not in value else "Check its quotes."


def apply_override(tree: DictConfig, override: Override, root: type[Section]) -> Problem | None:
    """Set or remove one key; `+` and `++` mean what no prefix means. A key that holds a dict is replaced whole."""
    key = override.key_or_group
    try:
        if override.type is OverrideType.DEL:
            _remove(tree, key)
        else:
            OmegaConf.update(tree, key, override.value(), merge=key not in leaves(root), force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError, AttributeError) as error:
        return Problem(key, f"can't be set: {str(error).splitlines()[0]}.")
    return None


def _remove(tree: DictConfig, key: str) -> None:
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(tree, parent) if parent else tree
    if isinstance(node, DictConfig):
        node.pop(name, None)
