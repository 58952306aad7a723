"""No key is decoration: the name of each is read somewhere outside of the package that defines it."""

import re
from pathlib import Path

from hrl.trainer.config.keys import leaves

PACKAGE = Path(__file__).parents[3] / "hrl"
# The default of trainer.resource_pools is made of the first two, and `arithmetic.total_steps` makes steps of the third;
# code reads the pools and the steps.
READ_BY_THE_CONFIGURATION = {"trainer.nnodes", "trainer.n_gpus_per_node", "trainer.total_epochs"}


def test_every_key_is_read_by_code():
    defining = PACKAGE / "trainer" / "config"
    sources = [path.read_text() for path in PACKAGE.rglob("*.py") if not path.is_relative_to(defining)]
    words = set(re.findall(r"[.\"'](\w+)\b", "\n".join(sources)))
    unread = [key for key in leaves() if key.rpartition(".")[2] not in words]
    assert set(unread) <= READ_BY_THE_CONFIGURATION
