"""No key is decoration: code that runs takes the value of each from the section it belongs to."""

from pathlib import Path

import pytest
from pydantic import create_model

from hrl.config.ppo import PPOTrainerConfig
from hrl.config.section import Section, leaves
from tests.config.config_reads import ConfigReads, section_types

PACKAGE = Path(__file__).parents[2] / "hrl"
DEFINING = PACKAGE / "config"
# Of the package that defines the keys, what a run asks: properties such as `needs_critic`, and the placement of roles.
ASKED_BY_A_RUN = {DEFINING / "ppo.py", DEFINING / "placement.py"}
WHAT_THE_CONFIGURATION_MAKES_OF_IT = {
    "trainer.nnodes": "the default of trainer.resource_pools",
    "trainer.n_gpus_per_node": "the default of trainer.resource_pools",
    "trainer.total_epochs": "the number of steps, by arithmetic.total_steps",
    "trainer.total_training_steps": "the number of steps, by arithmetic.total_steps",
}
CARRIERS = [PACKAGE / name for name in ("single_controller", "protocol.py", "columns.py")]
"""These carry whatever they are given, the configuration too, and know of no key."""
PHANTOMS = ("shape", "append", "join", "tolist")
"""Words that the code takes from many things, and that are no keys."""


def with_phantoms(section: type[Section]) -> type[Section]:
    """The section with keys that nobody can read, in itself and in all sections below."""
    below = {
        name: (with_phantoms(field.annotation), field)
        for name, field in section.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }
    return create_model(section.__name__, __base__=section, **below, **dict.fromkeys(PHANTOMS, (int, 0)))


@pytest.fixture(scope="module")
def read() -> set[str]:
    """The keys that the package reads."""
    found = ConfigReads(with_phantoms(PPOTrainerConfig), PACKAGE, leave_out=CARRIERS)
    return {key for key, places in found.places.items() if any(matters(file) for file, _ in places)}


def matters(file: Path) -> bool:
    """Whether a read in the file makes a difference to a run."""
    return file in ASKED_BY_A_RUN or not file.is_relative_to(DEFINING)


def test_every_key_is_read_by_code(read: set[str]) -> None:
    assert [
        key for key in leaves(PPOTrainerConfig) if key not in read and key not in WHAT_THE_CONFIGURATION_MAKES_OF_IT
    ] == []


def test_what_nobody_reads_is_found_out(read: set[str]) -> None:
    phantoms = {f"{path}.{name}".lstrip(".") for path, _ in section_types(PPOTrainerConfig) for name in PHANTOMS}
    assert phantoms & read == set()


class Inner(Section):
    width: int = 1
    depth: int = 1


class Outer(Section):
    left: Inner = Inner()
    right: Inner = Inner()
    size: int = 0
    name: str = ""
    never: int = 0


HOW_IT_CAN_BE_READ = {
    "an attribute": ("def f(config: Outer): return config.left.width", {"left.width"}),
    "an alias": ("def f(config: Outer):\n    a, b = config.left, config.right\n    return b.depth", {"right.depth"}),
    "an argument": (
        "def g(x, section): return section.width\ndef f(config: Outer): return g(1, config.right)",
        {"right.width"},
    ),
    "a field": (
        "class C:\n    def __init__(self, c, n): self.c = c\n    def go(self): return self.c.depth\n"
        "def f(config: Outer): return C(config.left, n=config.size).go()",
        {"left.depth", "size"},
    ),
    "a field of the class above": (
        "class B:\n    def __init__(self, c): self.c = c\nclass C(B):\n    def go(self): return self.c.size\n"
        "def f(config: Outer): C(config)",
        {"size"},
    ),
    "a loop": (
        "def f(config: Outer):\n    for owner, part in (('l', config.left), ('r', config.right)):\n        part.width",
        {"left.width", "right.width"},
    ),
    "its name": ("def f(config: Outer): return getattr(config.left, 'depth')", {"left.depth"}),
    "a registry": (
        "R = {}\ndef register(name):\n    def decorator(function):\n        R[name] = function\n"
        "        return function\n    return decorator\n@register('a')\ndef g(section): return section.width\n"
        "def f(config: Outer): return R['a'](config.left)",
        {"left.width"},
    ),
    "later": (
        "class W:\n    def __init__(self, section): self.section = section\n    def go(self): self.section.depth\n"
        "def f(config: Outer): return {'w': (W, config.right)}",
        {"right.depth"},
    ),
    "not at all": (
        "def f(config: Outer, x): x.never, x.width; width = depth = size = 'never'; return x.left.depth",
        set(),
    ),
    "only written": ("def f(config: Outer): return config.model_copy(update={'size': 1})", set()),
}


@pytest.mark.parametrize("how", HOW_IT_CAN_BE_READ)
def test_a_read_is_seen_however_it_is_written(tmp_path: Path, how: str) -> None:
    source, expected = HOW_IT_CAN_BE_READ[how]
    package = tmp_path / "package"
    package.mkdir()
    (package / "module.py").write_text(source)
    assert set(ConfigReads(Outer, package).places) == expected
