"""Every place in hrl where data could become code, each with the reason why it does not; a new one fails here."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hrl"

#: Modules whose readers run what they read.
PICKLING = frozenset(
    {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
)
#: Names of calls that turn text or bytes into code, whatever they are called on.
ANYWHERE = frozenset(
    """
    eval exec compile __import__ system popen read_pickle to_pickle run_path run_module spec_from_file_location
    exec_module import_module unsafe_load full_load load_source get_class_from_dynamic_module load_state_dict_from_url
    all_gather_object broadcast_object_list gather_object scatter_object_list send_object_list recv_object_list
    Pipe Manager instantiate parse_expr sympify literal_eval
    """.split()  # noqa: SIM905  (shorter to read)
)
#: Of these, methods that have the same name and do something else.
HARMLESS = {"compile": {"re", "regex", "torch"}, "system": {"platform"}}
READERS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("yaml", "load"), ("torch", "hub"), ("wire", "loads")}
FLAGS = {("shell", True), ("allow_pickle", True), ("weights_only", False), ("trust_remote_code", True)}

#: (file, what) → how often, and why it runs nothing that comes from a file, a model or another user.
ALLOWED: dict[tuple[str, str], tuple[int, str]] = {
    ("hrl/__init__.py", "import_module()"): (1, "modules of a table in this file"),
    ("hrl/config/__init__.py", "import_module()"): (1, "modules of a table in this file"),
    ("hrl/environments/loading.py", "import_module()"): (1, "the user's own class, by its module, in its own process"),
    ("hrl/environments/registry.py", "import_module()"): (1, "modules of a table in this file"),
    ("hrl/processes/sandbox_child.py", "compile()"): (3, "the policy's program, in the process that is its sandbox"),
    ("hrl/processes/sandbox_child.py", "exec()"): (1, "the policy's program, in the process that is its sandbox"),
    ("hrl/processes/sandbox_child.py", "eval()"): (1, "the policy's program, in the process that is its sandbox"),
    ("hrl/commands/table.py", "import_module()"): (1, "the commands of the table in this file"),
    ("hrl/algos/advantages.py", "importlib.import_module()"): (1, "one module of hrl"),
    ("hrl/models/companions.py", "import_module()"): (1, "installed packages that transformers imports anyway"),
    ("hrl/workers/actor_rollout_ref.py", "importlib.import_module()"): (1, "one module of hrl"),
    ("hrl/workers/rollout/host.py", "importlib.import_module()"): (1, "the engines of hrl's own table"),
    ("hrl/preflight/server_look.py", "importlib.import_module()"): (1, "the engines of hrl's own table"),
    ("hrl/workers/rollout/early_process.py", "importlib.import_module()"): (1, "modules of a table in this file"),
    ("hrl/workers/rollout/vllm_engine.py", "importlib.import_module()"): (3, "modules of vLLM, named in this file"),
    ("hrl/workers/rollout/vllm_worker.py", "importlib.import_module()"): (1, "a module of vLLM, named in this file"),
    ("hrl/workers/rollout/vllm_engine.py", "runpy.run_path()"): (1, "_version.py of the vLLM that is installed"),
    ("hrl/user_file.py", "util.spec_from_file_location()"): (1, "Python files that the user's configuration names"),
    ("hrl/user_file.py", "loader.exec_module()"): (1, "Python files that the user's configuration names"),
    ("hrl/config/spellings.py", "yaml.load()"): (1, "hrl's own tables, with the safe loader"),
    ("hrl/migrate/trl.py", "ast.literal_eval()"): (1, "reads literals and calls nothing"),
    ("hrl/reward/scorers/calls.py", "__import__()"): (2, "modules of a table in this file, in a sandbox"),
    ("hrl/reward/scorers/calls.py", "compile()"): (3, "the policy's program and the row's tests, in a sandbox each"),
    ("hrl/reward/scorers/calls.py", "exec()"): (2, "the policy's program and the row's tests, in a sandbox each"),
    ("hrl/reward/scorers/reasoning_gym.py", "ast.literal_eval()"): (1, "reads literals and calls nothing"),
    ("hrl/processes/pickled.py", "import cloudpickle"): (
        1,
        "a function or class that the user's own session gives as an object, on its way to the processes that call it",
    ),
    ("hrl/single_controller/transport.py", "from ray import cloudpickle"): (
        1,
        "a call of the driver on its way to its ranks through Ray, which pickles all that it sends",
    ),
    ("hrl/workers/layout_ranks.py", "Pipe()"): (
        1,
        "plain data between a process and its own children, over an unnamed pipe",
    ),
    ("hrl/workers/rollout/early_process.py", "….Pipe()"): (
        1,
        "from a rank to the engine's process, its own child, over an unnamed pipe",
    ),
    ("hrl/workers/rollout/sglang_engine.py", "runpy.run_path()"): (1, "version.py of the SGLang that is installed"),
    ("hrl/workers/reward_server_process.py", "runpy.run_module()"): (1, "the server of the vLLM that is installed"),
    ("hrl/workers/reward_server.py", "dist.all_gather_object()"): (
        1,
        "which devices each rank sees, over torch's group",
    ),
    ("hrl/workers/actor_rollout_ref.py", "dist.all_gather_object()"): (
        1,
        "host names between the ranks of a run, which are one trust domain; listens on loopback on one machine",
    ),
    ("hrl/workers/engine/sharding.py", "dist.broadcast_object_list()"): (
        1,
        "from rank 0 to the ranks of a run, which are one trust domain; listens on loopback on one machine",
    ),
}


def findings() -> Iterator[tuple[str, str]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        name = str(file.relative_to(PACKAGE.parent))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for what in _in(node):
                yield name, what


def _in(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (f"import {alias.name}" for alias in node.names if alias.name.partition(".")[0] in PICKLING)
    elif isinstance(node, ast.ImportFrom):
        names = [alias.name for alias in node.names]
        found = [name for name in names if name in PICKLING or (node.module or "").partition(".")[0] in PICKLING]
        yield from (f"from {node.module} import {name}" for name in found)
    elif isinstance(node, ast.Call):
        owner, called = _called(node.func)
        if called in ANYWHERE and not _is_harmless(node, owner, called):
            yield f"{owner}.{called}()" if owner else f"{called}()"
        elif (owner, called) in READERS:
            yield f"{owner}.{called}()"
        for keyword in node.keywords:
            if isinstance(keyword.value, ast.Constant) and (keyword.arg, keyword.value.value) in FLAGS:
                yield f"{keyword.arg}={keyword.value.value}"


def _called(function: ast.expr) -> tuple[str, str]:
    if isinstance(function, ast.Name):
        return "", function.id
    if isinstance(function, ast.Attribute):
        owner = function.value
        return (owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else "…"), (
            function.attr
        )
    return "", ""


def _is_harmless(node: ast.Call, owner: str, called: str) -> bool:
    if called == "eval" and owner and not node.args:  # `module.eval()`
        return True
    return owner in HARMLESS.get(called, ())


def test_nothing_in_the_package_turns_data_into_code_but_what_is_listed_with_its_reason() -> None:
    found = Counter(findings())
    assert found == {key: count for key, (count, _) in ALLOWED.items()}


def test_every_exception_has_its_reason() -> None:
    assert all(count > 0 and len(reason) > 10 for count, reason in ALLOWED.values())


def test_the_search_finds_what_it_is_for() -> None:
    """Without this it could find nothing at all and pass."""
    code = """
import pickle, os, subprocess, torch
from joblib import load
eval(text); module.eval(); re.compile("x"); builtins.compile(a, b, "exec"); torch.load(f, weights_only=False)
yaml.unsafe_load(f); np.load(f, allow_pickle=True); os.system("x"); subprocess.run("x", shell=True)
AutoModel.from_pretrained(x, trust_remote_code=True); pandas.read_pickle(f); yaml.load(f, Loader)
"""
    found = sorted(what for node in ast.walk(ast.parse(code)) for what in _in(node))
    expected = """
        import pickle; from joblib import load; eval(); builtins.compile(); torch.load(); weights_only=False;
        yaml.unsafe_load(); np.load(); allow_pickle=True; os.system(); shell=True; trust_remote_code=True;
        pandas.read_pickle(); yaml.load()
    """
    assert found == sorted(what.strip() for what in expected.split(";"))
