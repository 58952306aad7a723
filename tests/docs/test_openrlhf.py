"""docs/from-openrlhf.md names keys that exist, and its function is the other's."""

from __future__ import annotations

import re
from pathlib import Path

from hrl.config.run_kind import PPO
from hrl.config.section import leaves

PAGE = Path(__file__).parents[2] / "docs" / "from-openrlhf.md"


def test_every_key_of_the_table_of_flags_exists() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `--")]
    assert len(rows) > 40
    named = {
        name.partition("=")[0]
        for line in rows
        for name in re.findall(
            r"`((?:actor_rollout_ref|algorithm|critic|data|reward|trainer)\.[^`\s]+)`", line.split("|")[2]
        )
    }
    assert not {name for name in named if name not in leaves(PPO.schema)}


def test_the_two_reward_functions_agree() -> None:
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for block in code:
        exec(compile(block, str(PAGE), "exec"), {})  # noqa: S102 (our own page)
