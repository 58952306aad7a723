"""Every call that only CUDA runs, or that moved between versions, fits every version of torch and vLLM in our range.

What the versions offer was read from their sources into `signatures.json`. A call that isn't in it fails here: record
it (`tests/contracts/record.py` says how).
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from inspect import Parameter, Signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hrl.config.engine_rules import _DRAFTS_FROM_THE_CONTEXT
from hrl.preflight.machine_look import _DRAFTS_ON_CPU
from tests.contracts.calls import PACKAGE, Call, all_of_hrl, collect, spelled_receivers
from tests.contracts.record import ABSENT, SIGNATURES, Sources

RECORD = json.loads(SIGNATURES.read_text())
CALLS, NAMES = all_of_hrl()

#: Written in C++ and missing in torch's stubs; there in the installed version, whose test is below.
NOT_IN_STUBS = {"torch.distributed.ProcessGroupGloo._Options"}

HOW = "unpack the sources and run `python -m tests.contracts.record SOURCES`"


def forms_of(name: str) -> dict[str, str]:
    """Form → versions, as recorded."""
    package = name.partition(".")[0]
    return RECORD.get(package, {}).get(name, {})


def signatures_of(form: str) -> list[Signature]:
    """The signatures of ``def(…)`` or ``class(…)``; several where there are overloads."""
    texts = form.partition(" -> ")[0].removeprefix("def").removeprefix("class").split(" | ")
    return [signature_of(text) for text in texts]


def signature_of(text: str) -> Signature:
    arguments = ast.parse(f"def f{text}: ...").body[0].args
    defaults = [None] * (len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults))
    defaults += arguments.defaults
    plain = [(a, Parameter.POSITIONAL_ONLY) for a in arguments.posonlyargs]
    plain += [(a, Parameter.POSITIONAL_OR_KEYWORD) for a in arguments.args]
    parameters = [
        Parameter(a.arg, kind, default=Parameter.empty if default is None else ...)
        for (a, kind), default in zip(plain, defaults, strict=True)
    ]
    if arguments.vararg:
        parameters.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(Parameter(a.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else ...))
    if arguments.kwarg:
        parameters.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(parameters)


def refusal(call: Call, form: str) -> str | None:
    """Why the call doesn't bind to what was recorded; None if it does."""
    reasons = []
    for signature in signatures_of(form):
        bind = signature.bind_partial if call.open_ended else signature.bind
        try:
            bind(*[None] * call.positional, **dict.fromkeys(call.keywords))
        except TypeError as error:
            reasons.append(str(error))
        else:
            return None
    return "; ".join(reasons)


@pytest.mark.parametrize("name", sorted({name.name for name in NAMES} | {call.name for call in CALLS}))
def test_every_name_is_there_in_every_version(name: str) -> None:
    forms = forms_of(name)
    where = [site.where for site in (*NAMES, *CALLS) if site.name == name]
    assert forms, f"{name} ({', '.join(where)}) has no contract: {HOW}"
    if name not in NOT_IN_STUBS:
        assert ABSENT not in forms, f"{name} ({', '.join(where)}) is absent from {forms[ABSENT]}"


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.where}-{call.name.rpartition('.')[2]}")
def test_every_call_binds_in_every_version(call: Call) -> None:
    wrong = {
        versions: reason
        for form, versions in forms_of(call.name).items()
        if form.startswith(("def", "class")) and (reason := refusal(call, form)) is not None
    }
    assert not wrong, f"{call.where}: {call.name}"


def test_the_range_of_pyproject_is_recorded() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    for package, major in (("torch", "2"), ("vllm", "0"), ("transformers", "5")):
        (requirement,) = [line for line in wanted if re.match(rf"{package}\b", line)]
        first, *_ = re.findall(rf"{major}\.(\d+)", requirement)
        versions = {
            int(version.split(".")[1])
            for forms in RECORD[package].values()
            for v in forms.values()
            for version in v.split()
        }
        assert min(versions) == int(first), f"{requirement}: recorded from {major}.{min(versions)}"
        if package != "transformers":  # a range without an end inside the major version: the lowest and some others
            last = int(re.findall(rf"<{major}\.(\d+)", requirement)[0])
            assert versions == set(range(int(first), last)), f"{requirement}: recorded {sorted(versions)}"


@pytest.mark.parametrize(("device", "ranks"), [("cpu", 1), ("cuda", 1), ("cuda", 2)])
def test_the_engine_arguments_are_fields_in_every_version(
    monkeypatch: pytest.MonkeyPatch, device: str, ranks: int
) -> None:
    from hrl.models.tokenizer import TokenIds
    from hrl.workers.rollout.vllm_engine import engine_args
    from tests.workers.rollout.settings import engine_setup

    executors = SimpleNamespace(SingleProcessExecutor=None, TensorParallelExecutor=None)
    monkeypatch.setitem(sys.modules, "hrl.workers.rollout.vllm_worker", executors)
    tokens, place = TokenIds(0, (2,), 128), torch.device(device)
    setup = engine_setup("vllm", "folder", tokens, 64, device=place, tensor_model_parallel_size=ranks)
    call = Call("engine_args", "vllm.engine.arg_utils.AsyncEngineArgs", 0, tuple(engine_args(setup)), False)
    assert {
        versions: refusal(call, form) for form, versions in forms_of(call.name).items() if refusal(call, form)
    } == {}


def test_every_version_drafts_by_the_methods_that_hrl_and_its_page_name() -> None:
    named = {*_DRAFTS_FROM_THE_CONTEXT, *_DRAFTS_ON_CPU, "eagle", "eagle3", "mtp", "medusa"}
    assert all(f"`{method}`" in (PACKAGE.parent / "docs" / "engines.md").read_text() for method in named)
    methods = forms_of("vllm.config.speculative.SpeculativeMethod")
    lacks = {versions: named - set(form.removeprefix("one of ").split(", ")) for form, versions in methods.items()}
    assert not any(lacks.values()), lacks


def test_handles_have_the_fields_that_storages_give_and_take() -> None:
    from hrl.workers.weight_sync.cuda_ipc import _FIELDS

    (given,), (taken,) = (forms_of(f"torch.UntypedStorage.{name}") for name in ("_share_cuda_", "_new_shared_cuda"))
    assert given == f"def() -> {len(_FIELDS)}"
    assert len(signatures_of(taken)[0].parameters) == len(_FIELDS)


def test_what_the_stubs_lack_is_in_the_installed_torch() -> None:
    from torch import distributed

    assert all(hasattr(distributed.ProcessGroupGloo, name.rpartition(".")[2]) for name in NOT_IN_STUBS)


@pytest.mark.parametrize(("relative", "expression"), list(spelled_receivers()))
def test_receivers_are_still_spelled_like_that(relative: str, expression: str) -> None:
    nodes = ast.walk(ast.parse((PACKAGE / relative).read_text()))
    assert expression in {ast.unparse(node) for node in nodes if isinstance(node, ast.expr)}


# ---------------------------------------------------------------------------------------------- the instruments


VARLEN = """
from torch.nn.attention.varlen import varlen_attn as attend
def f(q, k, v, extra):
    attend(q, k, v, None, None, 1, 1, scale=1.0, window_size=(-1, 0), enable_gqa=True)
    attend(q, k, v, None, None, 1, 1, scale=1.0, **extra)
    attend(q, k, v, None, None, 1, scale=1.0)
"""


def test_a_keyword_that_an_older_version_lacks_is_found(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(VARLEN)
    (too_new, open_ended, too_short), _ = collect(tmp_path / "module.py", "module.py")
    (oldest,) = [form for form, versions in forms_of(too_new.name).items() if "2.11.0" in versions.split()]
    (newest,) = [form for form, versions in forms_of(too_new.name).items() if "2.13.0" in versions.split()]
    assert "enable_gqa" in str(refusal(too_new, oldest))
    assert refusal(too_new, newest) is None
    assert refusal(open_ended, oldest) is None
    assert "max_k" in str(refusal(too_short, newest))


def test_a_call_without_a_contract_is_found(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("import torch\ntorch.cuda.nothing_of_that_name()\n")
    (call,), _ = collect(tmp_path / "module.py", "module.py")
    assert (call.name, call.where) == ("torch.cuda.nothing_of_that_name", "module.py:2")
    assert not forms_of(call.name)


PACKAGE_FILES = {
    "pack/__init__.py": """
from .inner import public, Chosen
from logging import INFO
from pack.star import *
LAZY = {'Late': '.inner:Chosen'}
""",
    "pack/star.py": "def starred(a, *, b=1): ...\n",
    "pack/inner.py": """
from dataclasses import dataclass
try:
    import nothing
except ImportError:
    nothing = None
def public(a, b=2, /, c=3, *rest, d, **more): ...
class Base:
    def __init__(self, size): self.size = size
    @property
    def area(self): return 1
    @staticmethod
    def make(x): ...
class Chosen(Base):
    def act(self, x, y=0): ...
@dataclass
class Fields:
    a: int
    b: int = 0
made = Chosen(1)
""",
}


def test_sources_are_read_without_running_them(tmp_path: Path) -> None:
    for name, text in PACKAGE_FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    sources = Sources(tmp_path)
    expected = {
        "pack": "module",
        "pack.public": "def(a, b=..., /, c=..., *rest, d, **more)",
        "pack.INFO": "value",
        "pack.starred": "def(a, *, b=...)",
        "pack.Chosen": "class(size)",
        "pack.Late.act": "def(x, y=...)",
        "pack.Chosen.size": "value",
        "pack.Chosen.area": "value",
        "pack.Chosen.make": "def(x)",
        "pack.inner.Fields": "class(a, b=...)",
        "pack.inner.made.act": "def(x, y=...)",
        "pack.inner.gone": ABSENT,
        "pack.Chosen.gone": ABSENT,
    }
    assert {name: sources.form(name) for name in expected} == expected
