"""Values and bytes that no honest file has."""

from __future__ import annotations

import datetime
import decimal
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

SURROGATE = "a\ud800b"
BAD_TEXT = (
    "", " ", "\x00", "a\x00b", SURROGATE, "\udfff", "\ufeff", "\u2028", "\x1b[31m", "<script>", "[bold]", "${x}",
    "???", "null", "NaN", "1e999", "9" * 400, "ß" * 300, '[{"role": "user", "content": "hi"}]', "[{'role': 'user'}]",
    '[{"role": ', "<|start|>", "<|end|>", "{{ 1 }}", "{% for %}", "\r\n", "\t", "=1+1", "../../x", "~nobody/x",
)  # fmt: skip
BAD_NUMBERS = (
    0, -0.0, True, -1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30, 10**400, 1e308, 1e39, 5e-324,
    float("nan"), float("inf"), -float("inf"),
)  # fmt: skip
NAMES = (
    "prompt", "answer", "data_source", "reward_model", "extra_info", "ground_truth", "messages", "tools", "functions",
    "function_call", "response", "solution_str", "completion", "chosen", "rejected", "text", "margin", "index", "uid",
    "columns", "role", "content", "from", "value", "tool_calls", "weight", "style", "__tuple__", "__int__", "path",
    "", "a.b", "self", "\x00", SURROGATE, "none", "ünï",
)  # fmt: skip


def nested(levels: int, kind: type = list) -> Any:
    """Return a value that is nested so deep."""
    value: Any = "x"
    for _ in range(levels):
        value = [value] if kind is list else {"a": value}
    return value


class Nested(NamedTuple):
    """A deep value by its depth, so that a case can be shown."""

    levels: int
    kind: type = list

    def value(self) -> Any:
        return nested(self.levels, self.kind)


class Power(NamedTuple):
    """An integer of more digits than Python shows."""

    exponent: int

    def value(self) -> int:
        return -(10**self.exponent)


scalars = st.one_of(
    st.builds(Power, st.sampled_from((4298, 4300, 5000))),
    st.sampled_from(BAD_TEXT),
    st.sampled_from(BAD_NUMBERS),
    st.none(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.text(alphabet=st.characters(), max_size=4),  # surrogates too
)
names = st.one_of(st.sampled_from(NAMES), st.text(max_size=3))
depths = st.builds(Nested, st.sampled_from([90, 97, 98, 99, 100, 101, 200, 900, 3000]), st.sampled_from([list, dict]))
messages = st.lists(
    st.dictionaries(
        st.sampled_from(("role", "content", "from", "value", "tool_calls", "weight", "x")),
        st.one_of(st.sampled_from(("user", "assistant", "system", "human", "gpt", "tool", "hi")), scalars),
        max_size=4,
    ),
    max_size=4,
)
json_values = st.recursive(
    st.one_of(scalars, depths, messages),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=6,
)
PYTHON_ONLY: tuple[Any, ...] = (
    b"bytes", (1, 2), {1, 2}, 1j, decimal.Decimal("1e400"), decimal.Decimal("NaN"), object, range(3),
    datetime.datetime(2020, 1, 1), datetime.timedelta.max, np.float64("nan"), np.float32(1.5), np.int64(7),
    np.array([1, 2]), np.array([["a"]], dtype=object), np.datetime64("NaT"), np.array(5), np.str_("s"),
    np.bytes_(b"s"), {1: 2}, {None: 1}, {(1, 2): 3}, float("nan"), np.longdouble("1e400"), np.bool_(True),
    np.void(b"x"), print, ...,
)  # fmt: skip
python_values = st.recursive(
    st.one_of(json_values, st.sampled_from(PYTHON_ONLY)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.tuples(inner), st.dictionaries(names, inner, max_size=2)),
    max_leaves=4,
)

ARROW_TYPES = (
    pa.date32(), pa.date64(), pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("ns"), pa.timestamp("us", "UTC"),
    pa.timestamp("ns", "Europe/Berlin"), pa.timestamp("ms", "+14:00"), pa.timestamp("us", "Not/AZone"),
    pa.timestamp("us", "\x1b[31m"), pa.duration("s"), pa.duration("us"), pa.duration("ns"), pa.time32("s"),
    pa.time64("us"), pa.time64("ns"), pa.decimal128(38, 5), pa.decimal256(76, 70), pa.float16(), pa.uint64(),
)  # fmt: skip
"""Types that JSON lacks."""
ARROW_FORMS = ("plain", "large_list", "dictionary", "map", "object")
"""How a column holds values of a type."""


def arrow_column(form: str, kind: pa.DataType, bits: list[int | None]) -> pa.Array:
    """Return a column with a value, null or not, for each of these integers, which its values are in memory."""
    width = kind.bit_width // 8
    content = b"".join(((bit or 0) % 2 ** (8 * width)).to_bytes(width, "little") for bit in bits)
    valid = pa.array([bit is not None for bit in bits]).buffers()[1]
    values = pa.Array.from_buffers(kind, len(bits), [valid, pa.py_buffer(content)])
    offsets = pa.array(range(len(bits) + 1))
    if form == "large_list":
        return pa.LargeListArray.from_arrays(offsets.cast(pa.int64()), values)
    if form == "dictionary":
        return pa.DictionaryArray.from_arrays(pa.array(range(len(bits))), values)
    if form == "map":
        return pa.MapArray.from_arrays(offsets.cast(pa.int32()), pa.array(list(map(str, range(len(bits))))), values)
    return pa.StructArray.from_arrays([values], ["value"]) if form == "object" else values


arrow_bits = st.one_of(
    st.none(), st.integers(-(2**31), 2**31), st.integers(-(2**63), 2**63 - 1), st.integers(-(2**127), 2**127),
    st.sampled_from((0, 1, 10_000_000, 2**62, 2**63 - 1, -(2**63), -(2**31), -719_163, 253402300799999999)),
)  # fmt: skip
arrow_columns = st.tuples(
    st.sampled_from(ARROW_FORMS), st.sampled_from(ARROW_TYPES), st.lists(arrow_bits, min_size=3, max_size=3)
)
"""Form, type and three values of a column."""


def rows_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[Any, Any]]:
    """Rows that are good but for some columns."""
    good = {"prompt": "1 + 1?", "answer": "2", "chosen": "2", "rejected": "3", "completion": "2"}
    changes = st.dictionaries(names, values, max_size=4)
    return st.builds(lambda changed, left: {**{k: v for k, v in good.items() if k not in left}, **changed}, changes,
                     st.sets(st.sampled_from(sorted(good)), max_size=2))  # fmt: skip


def plain(value: Any) -> Any:
    """Return a value with its deep parts built."""
    if isinstance(value, Nested | Power):
        return value.value()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    return value


# ---- bytes -----------------------------------------------------------------------------------------------------

TOKENS = (
    b"\x00", b"\xff", b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf", b"\r\n", b"\r", b"\n", b"\n\n", b'"', b"'", b",",
    b";", b"\t", b"|", b"{", b"}", b"[", b"]", b":", b"\\", b"\\ud800", b"\\udc00", b"\\u0000", b"\\x", b"NaN",
    b"Infinity", b"-Infinity", b"1e999", b"9" * 5000, b"9" * 400, b"[" * 3000, b'{"a":' * 3000, b"null", b"true",
    b"PAR1", b"\x1f\x8b", b"\xed\xa0\x80", b"\xc0\x80", b"\xf5\x80", b'"prompt": 1,', b'"prompt": null,', b"-", b"0",
    b"\x80", b"\x7f", b"a" * 2000,
)  # fmt: skip


class Change(NamedTuple):
    """A change of a file's bytes, at a share of its length (0 to 1) so that it suits any file."""

    how: str
    at: float
    length: int
    what: bytes


changes = st.lists(
    st.builds(
        Change,
        st.sampled_from(("flip", "set", "insert", "delete", "repeat", "cut", "swap")),
        st.floats(0, 1),
        st.one_of(st.integers(1, 8), st.integers(1, 400)),
        st.one_of(st.sampled_from(TOKENS), st.binary(min_size=1, max_size=8)),
    ),
    min_size=1,
    max_size=4,
)


def changed(content: bytes, wanted: list[Change]) -> bytes:
    """Return a file's bytes with some changes."""
    data = bytearray(content)
    for change in wanted:
        at = min(int(change.at * len(data)), len(data))
        end = min(at + change.length, len(data))
        if change.how == "flip":
            for place in range(at, min(at + len(change.what), len(data))):
                data[place] ^= change.what[place - at] or 0x80
        elif change.how == "set":
            data[at : at + len(change.what)] = change.what
        elif change.how == "insert":
            data[at:at] = change.what
        elif change.how == "delete":
            del data[at:end]
        elif change.how == "repeat":
            data[at:at] = data[at:end] * 2
        elif change.how == "cut":
            del data[at:]
        else:
            data[at:end] = data[at:end][::-1]
    return bytes(data)
