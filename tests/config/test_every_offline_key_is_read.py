"""No key is decoration: each is taken, under its name, by a file that an offline run goes through."""

import re
from pathlib import Path

import pytest

from hrl.config.run_kind import OFFLINE_KINDS
from hrl.config.section import leaves

PACKAGE = Path(__file__).parents[2] / "hrl"
TRAINER = PACKAGE / "trainer"
SCHEMA = PACKAGE / "config" / "offline.py"
RUN = [*(TRAINER / "offline").glob("*.py"), PACKAGE / "preflight" / "offline.py", SCHEMA]
FILES = {
    "data": [*(PACKAGE / "data" / "offline").glob("*.py"), *RUN],
    "model": [*(PACKAGE / "workers").rglob("*.py"), *RUN],
    "optim": [PACKAGE / "workers" / "engine" / "optim.py", *RUN],
    "checkpoint": [*(PACKAGE / "workers").glob("*.py"), *RUN],
    "algorithm": RUN,
    "trainer": [
        path for room in ("trainer", "cluster", "preflight", "report") for path in (PACKAGE / room).glob("*.py")
    ]
    + RUN,
}
BY_ARITHMETIC = {"trainer.total_epochs", "trainer.total_training_steps"}  # the number of steps


def words_taken_in(files: list[Path]) -> set[str]:
    """Names behind a dot, or quoted as for `getattr`, in code without its docstrings' prose."""
    source = "\n".join(path.read_text() for path in files)
    return set(re.findall(r"(?<=[.\"])(\w+)\b", re.sub(r'"""(?s:.)*?"""', "", source)))


@pytest.mark.parametrize("kind", OFFLINE_KINDS.values(), ids=OFFLINE_KINDS)
def test_every_key_is_read_by_code(kind):
    taken = {section: words_taken_in(files) for section, files in FILES.items()}
    unread = [key for key in leaves(kind.schema) if key.rpartition(".")[2] not in taken[key.partition(".")[0]]]
    assert set(unread) <= BY_ARITHMETIC
