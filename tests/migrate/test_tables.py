"""Every name of OpenRLHF and TRL has a row, and every row leads to keys that hrl has.

`openrlhf_flags.txt` and `trl_fields.txt` list the names of OpenRLHF 0.11 and TRL 1.16; transformers' own come from the
installed package.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from hrl.config.compose import config_problems
from hrl.config.run_kind import KINDS
from hrl.config.section import leaves
from hrl.migrate import openrlhf, trl
from hrl.migrate.line import Migrated
from hrl.migrate.table import Given, Table, by_table


def listed(name: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in Path(__file__).with_name(name).read_text().splitlines():
        if line.startswith("# "):
            found[line[2:]] = []
        else:
            found[[*found][-1]].append(line)
    return found


PROGRAMS: list[tuple[str, str, Table, Any]] = [
    *((f"openrlhf {kind}", kind, openrlhf.table_of(kind), openrlhf.FUNCTIONS) for kind in ("ppo", "sft", "dpo", "rm")),
    *((f"trl {name}", kind, trl.table_of(name), trl.FUNCTIONS) for name, kind in trl.PROGRAMS.items()),
]


def test_no_flag_of_openrlhf_is_forgotten() -> None:
    for program, names in listed("openrlhf_flags.txt").items():
        rows = openrlhf.table_of(openrlhf.PROGRAMS[f"openrlhf.cli.{program}"]).rows
        assert [name for name in names if name not in rows] == [], program


def test_no_field_of_trl_is_forgotten() -> None:
    of_transformers = [field.name for field in fields(TrainingArguments) if field.init]
    for program, names in listed("trl_fields.txt").items():
        rows = trl.table_of(program).rows
        known = {*rows, *trl.table_of(program).older}
        assert [name for name in (*names, *of_transformers) if name not in known] == [], program


@pytest.mark.parametrize(("name", "kind", "table", "functions"), PROGRAMS, ids=[program[0] for program in PROGRAMS])
def test_every_row_has_one_form_and_leads_to_keys(name: str, kind: str, table: Table, functions: Any) -> None:
    # DPO, SFT and reward models share a part; a key that one of them lacks has no flag there either.
    kinds = ["ppo"] if kind == "ppo" else ["dpo", "sft", "rm"]
    known = {key for each in kinds for key in leaves(KINDS[each].schema)}
    for written, row in table.rows.items():
        if isinstance(row, str):
            assert row.partition(" (")[0] in known, written
            continue
        assert set(row) in ({"key", "values"}, {"sets"}, {"is"}, {"not"}, {"not", "unless"}, {"by"}), written
        if "key" in row:
            for value in row["values"].values():
                assert config_problems(KINDS[kind], [f"{row['key']}={value}"]) == (), written
        if "sets" in row:
            into = Migrated(name, kind)
            into.set({key: value for key, value in row["sets"].items() if key in leaves(KINDS[kind].schema)})
            assert into.composes and row["sets"].keys() <= known, written
        assert row.get("by", next(iter(functions))) in functions, written
    assert set(table.defaults) <= set(table.rows)
    assert set(table.older.values()) <= set(table.rows)
    assert not set(table.older) & set(table.rows)


@pytest.mark.parametrize(("name", "kind", "table", "functions"), PROGRAMS, ids=[program[0] for program in PROGRAMS])
def test_the_defaults_alone_compose(name: str, kind: str, table: Table, functions: Any) -> None:
    into, given = Migrated(name, kind), Given(table, {}, {})
    if name.startswith("trl"):
        into.set({"algorithm.adv_estimator": "grpo"} if kind == "ppo" else {})
        into.set({"trainer.n_gpus_per_node": 1})
    for function in by_table(given, into):
        functions[function](given, into)
    before = list(into.arguments)
    into.drop_what_does_not_compose()
    assert before == into.arguments
