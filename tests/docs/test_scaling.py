"""The tables of docs/scaling.md are those that its script writes."""

from __future__ import annotations

import re
import runpy

import pytest

from tests.runs.runner import ROOT

FOLDER = ROOT / "docs" / "scaling"
TABLES = runpy.run_path(str(FOLDER / "tables.py"), run_name="tables")
PAGE = (ROOT / "docs" / "scaling.md").read_text()


def block(name: str) -> list[str]:
    (found,) = re.findall(rf"(?s)<!-- table {re.escape(name)} -->\n\n(.*?)\n\n<!-- end -->", PAGE)
    return found.splitlines()


@pytest.mark.parametrize("name", ["measured", "hardware", "constants"])
def test_a_table_of_the_model_is_up_to_date(name: str) -> None:
    assert block(name) == TABLES[name]()


def test_the_table_of_published_steps_is_up_to_date() -> None:
    assert block("published") == runpy.run_path(str(FOLDER / "published.py"))["rows"]()


@pytest.mark.parametrize(("model", "devices"), [("Qwen2.5-7B", 64), ("Llama-3.1-70B", 8), ("Qwen3-30B-A3B", 16)])
def test_a_predicted_row_is_up_to_date(model: str, devices: int) -> None:
    assert TABLES["row"](model, devices) in block(model)


def test_the_picture_is_shown() -> None:
    assert "pictures/scaling.svg" in PAGE
    assert (ROOT / "docs" / "pictures" / "scaling.svg").read_text().startswith("<svg ")
