"""The documents say what is true: links lead somewhere, commands compose, code runs."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from hrl.config import ConfigError
from hrl.config.compose import compose_kind
from hrl.config.run_kind import KINDS
from hrl.plan.launch_line import LaunchLine
from tests.docs.command_lines import command_lines, options_of, run_of

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RECORDS = {
    ROOT / "CHANGELOG.md",
    ROOT / "docs" / "status.md",
}  # they name files as they were when something was measured
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: Mistakes that a page shows on purpose.
MISTAKES = {"algorithm.adv_estimatr=grpo"}


def blocks(document, language):
    return [code for found, code in FENCE.findall(document.read_text()) if found == language]


def lines_of_documents():
    for document in DOCUMENTS:
        for words in command_lines(document):
            yield pytest.param(words, id=f"{document.name}: {' '.join(words)[:70]}")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_relative_link_leads_to_a_file(document):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_row_of_a_table_has_as_many_cells_as_its_head(document):
    text = re.sub(r"^( *)```.*?^\1```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    uneven = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, *rows = (len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines())
        uneven += [line for line, cells in zip(table.splitlines()[1:], rows, strict=True) if cells != head]
    assert not uneven


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path not in RECORDS], ids=lambda path: path.name)
def test_every_file_that_is_named_exists(document):
    missing = [
        name
        for name in re.findall(r"`(?:pytest )?((?:[a-z_]+/)+\w+\.py)`", document.read_text())
        if not ((ROOT / name).exists() or (ROOT / "hrl" / name).exists())
    ]
    assert not missing


@pytest.fixture(scope="module")
def folder_of_a_reader(tmp_path_factory):
    """Where a reader types the lines: with the examples, and a file of his own where a page assumes one."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "my" / "configs").mkdir(parents=True)
    (folder / "my" / "configs" / "my_run.yaml").write_text(
        "defaults: [ppo_trainer]\ndata: {train_files: rows.jsonl, train_batch_size: 8}\n"
    )
    return folder


@pytest.mark.parametrize("words", [line for line in lines_of_documents() if run_of(line.values[0])])
def test_every_launch_line_composes(words, folder_of_a_reader, monkeypatch):
    monkeypatch.chdir(folder_of_a_reader)
    kind, arguments = run_of(words)
    with pytest.raises(ConfigError) if MISTAKES & set(arguments) else nullcontext():
        compose_kind(KINDS[kind], arguments)


@pytest.mark.parametrize("words", [line for line in lines_of_documents() if line.values[0][:2] == ["hrl", "plan"]])
def test_every_line_that_is_planned_composes(words):
    LaunchLine.of(options_of(words).overrides).config()


@pytest.mark.parametrize("words", [line for line in lines_of_documents() if line.values[0][0] == "hrl"])
def test_every_line_of_hrl_has_options_that_there_are(words):
    assert options_of(words)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_python_block_is_python(document):
    for code in blocks(document, "python"):
        compile(code, str(document), "exec")


@pytest.mark.usefixtures("own_registries")
def test_the_blocks_about_extending_run():
    """One after the other, as a reader would paste them into one file."""
    namespace = {"__name__": "extending"}
    for code in blocks(ROOT / "docs" / "extending.md", "python"):
        exec(compile(code, "extending.md", "exec"), namespace)  # noqa: S102 (our own page)


def test_the_reward_function_of_the_readme_works():
    code = next(code for code in blocks(ROOT / "README.md", "python") if "compute_score" in code)
    namespace = {}
    exec(code, namespace)  # noqa: S102 (our own README)
    assert len(code.splitlines()) <= 10
    assert namespace["compute_score"]("s", "It is 12", "12") == {"score": 1.1, "right": 1.0, "brief": 1.0}
    assert namespace["compute_score"]("s", "no idea, sorry, really not", "12")["score"] == 0.0


def test_make_targets_named_in_the_documents_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        name
        for document in DOCUMENTS
        for name in re.findall(r"^(?:\$ )?make ([a-z-]+)", document.read_text(), re.MULTILINE)
    }
    assert named
    assert named <= targets


def test_the_lock_files_are_plain_pins_and_the_cpu_one_brings_no_gpu_package():
    for name in ("cpu", "gpu"):
        lines = (ROOT / "requirements" / f"{name}.lock").read_text().splitlines()
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!-]+", line) for line in lines)
        assert len({line.split("==")[0].lower().replace("_", "-") for line in lines}) == len(lines)
        if name == "cpu":
            assert not [line for line in lines if line.startswith(("nvidia", "triton", "torchvision", "torchaudio"))]
