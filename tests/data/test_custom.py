from types import SimpleNamespace

import pytest

from hrl.data.custom import dataset_class
from hrl.data.dataset import RLHFDataset
from hrl.data.files import DatasetError


def named(path, name):
    return SimpleNamespace(path=path, name=name)


def test_without_a_file_the_class_is_hrls_own():
    assert dataset_class(named(None, None)) is RLHFDataset


def test_a_class_is_loaded_from_its_file_with_its_neighbours_and_dataclasses(tmp_path):
    (tmp_path / "neighbour_of_dataset.py").write_text("SUFFIX = '!'\n")
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from hrl.data.dataset import RLHFDataset\n"
        "from neighbour_of_dataset import SUFFIX\n"
        "@dataclass\n"
        "class Row:\n"
        "    text: str = SUFFIX\n"
        "class Mine(RLHFDataset):\n"
        "    row = Row()\n"
    )
    found = dataset_class(named(str(file), "Mine"))
    assert issubclass(found, RLHFDataset) and found.row.text == "!"


def test_a_missing_file_or_class_is_told(tmp_path):
    with pytest.raises(DatasetError, match=r"data\.custom_cls\.path: .*no\.py does not exist"):
        dataset_class(named(str(tmp_path / "no.py"), "Mine"))
    file = tmp_path / "empty_dataset.py"
    file.write_text("Mine = dict\n")
    with pytest.raises(DatasetError, match="defines no subclass of .*RLHFDataset named 'Mine'"):
        dataset_class(named(str(file), "Mine"))
