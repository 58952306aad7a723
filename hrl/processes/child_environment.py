"""The environment that a child process gets: the variables that libraries need, and those that somebody names."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import hrl
from hrl.masking import is_secret_variable

_NEEDED = re.compile(
    # programs, folders, language and time
    r"HOME|USER|LOGNAME|SHELL|PATH|PWD|OLDPWD|TMPDIR|TMP|TEMP|TZ|TZDIR|LANG|LANGUAGE|LC_\w+|XDG_\w+|TERM|COLUMNS|LINES"
    r"|COLORTERM|NO_COLOR|FORCE_COLOR|LD_LIBRARY_PATH|LD_PRELOAD|LIBRARY_PATH|CPATH|CC|CXX|VIRTUAL_ENV|CONDA_\w+|JAVA_HOME"
    # the way out; a judge is reached through it
    r"|(HTTPS?|ALL|NO)_PROXY|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE"
    # Python and numerical libraries
    r"|PYTHON\w*|(OMP|KMP|GOMP|MKL|OPENBLAS|BLIS|VECLIB|NUMEXPR|NUMBA|TBB|RAYON|MALLOC|GLIBC)_\w+"
    r"|(CUDA|CUBLAS|NVIDIA|HIP|ROCR|ROCM|HSA|TORCH|PYTORCH|TRITON|XLA|JAX|TF_CPP)\w*"
    r"|(HF|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|DATASETS|SENTENCE_TRANSFORMERS|NLTK|SPACY|FASTTEXT|MPL)\w*",
    re.IGNORECASE,
)
"""The variables of which libraries need some, whatever the function does."""


def child_environment(
    environ: Mapping[str, str] | None = None, *, keep: Collection[str] = (), **changes: str
) -> dict[str, str]:
    """Return the environment of a child: what libraries need of the parent's, and the parent's `hrl`.

    Args:
        environ: The parent's environment; that of this process if None.
        keep: Further variables to pass on, even if they look like secrets.
        changes: Additional variables for the child.
    """
    source = os.environ if environ is None else environ
    withheld = withheld_names(source, keep=keep)
    kept = {name: value for name, value in source.items() if name not in withheld}
    root = str(Path(hrl.__file__).parent.parent)
    parts = [part for part in kept.get("PYTHONPATH", "").split(os.pathsep) if part and part != root]
    # Last, since `root` may be site-packages, which the others are to hide; but before another hrl: the child has to
    # import the one that runs here.
    another = next((place for place, part in enumerate(parts) if (Path(part) / "hrl").is_dir()), len(parts))
    kept["PYTHONPATH"] = os.pathsep.join([*parts[:another], root, *parts[another:]])
    return kept | changes


def withheld_names(environ: Mapping[str, str] | None = None, *, keep: Collection[str] = ()) -> frozenset[str]:
    """Return the variables that `child_environment` leaves out: what no library needs, and what looks like a secret.

    A variable looks like a secret by its name (token, key, password, …) or by its value (an address with a login, a key
    in one of the well-known forms).
    """
    source = os.environ if environ is None else environ
    return frozenset(
        name
        for name, value in source.items()
        if name not in keep and (not _NEEDED.fullmatch(name) or is_secret_variable(name, value))
    )


@contextmanager
def changed_environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables for the processes that are started in the block; `None` removes one."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
