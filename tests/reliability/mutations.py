"""Hostile variants of valid files: their structure is kept in mind, so that readers get far."""

import copy
import json
from typing import Any

from hypothesis import strategies as st

# Written into text wherever it may hurt. Nothing in it may ever run.
TOKENS = [
    b"NaN", b"-Infinity", b"1e999", b"-1", b"0", b"true", b"null", b'""', b"[]", b"{}",
    b"9" * 400, b"9" * 5000, b"18446744073709551616", b"9223372036854775807", b"1e-320",
    b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"\x00", b"\xef\xbb\xbf", b"\r", b"\n", b"\t",
    b"\\u0000", b"\\ud800", b"[" * 3000, b'{"a":' * 3000, b"- " * 3000, b"&a [*a, *a]", b"*a",
    b"<<: *a", b"? ", b"!!python/object/apply:os.system ['touch pwned']",
    b"!!python/name:os.system", b"!!binary x", b"!!timestamp 2001-13-45", b"0x_",
    b"1:2:3:4", b"2001-01-01", b"2001-99-99", b"..", b"../../etc/passwd",
    b"/etc/passwd", b"/dev/zero", b"${HOME}", b"~", b"%00", b": ", b", ", b'"', b"'", b"{", b"}",
    b"[", b"]", b"|", b">", b"#", b"---\n", b"...\n", b"%YAML 9.9\n", "\u2028".encode(),
    b"A" * 70000,
]  # fmt: skip

# Instead of any value of a JSON tree.
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "x", "\x00", "\ud800", "a" * 5000, "../x", "/etc/passwd", ".",
    "..",
    "tiles/../../x", "a/b\\c", "\n", "F32", "BF16", [], {}, [[]], [None], [-1], [2**63], [0] * 40,
    {"a": 1}, {"": {}}, {"__class__": "x"}, [1.5], ["x"], "1", "None", "nan", "\u202e",
]  # fmt: skip


@st.composite
def spoilt(draw: st.DrawFn, valid: bytes) -> bytes:
    """Bytes of `valid` removed, repeated, moved, overwritten, and tokens put in."""
    data = valid
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        stop = min(len(data), start + draw(st.sampled_from([0, 1, 2, 8, 40, 400])))
        put = draw(
            st.one_of(
                st.sampled_from(TOKENS),
                st.just(b""),
                st.just(data[start:stop] * 2),
                st.binary(max_size=4),
            )
        )
        data = data[:start] + put + data[stop:]
    return data


@st.composite
def changed(draw: st.DrawFn, valid: Any) -> bytes:
    """The text of a JSON tree with some values replaced, removed, added, doubled or buried."""
    tree = json.loads(json.dumps(valid))
    for _ in range(draw(st.integers(1, 3))):
        tree = _change(draw, tree)
    text = json.dumps(tree)
    if draw(st.integers(0, 9)) == 0:  # a key twice: no tree can say that
        key = draw(st.sampled_from(sorted(tree))) if isinstance(tree, dict) and tree else "a"
        text = text[:-1] + f", {json.dumps(key)}: null" + "}"
    return text.encode("utf-8", "surrogatepass")


def _change(draw: st.DrawFn, tree: Any) -> Any:
    if not isinstance(tree, dict | list) or not tree or draw(st.integers(0, 7)) == 0:
        value = _value(draw)
        for _ in range(draw(st.sampled_from([0, 0, 0, 1, 100]))):
            value = [value]
        return value
    key = draw(st.sampled_from(sorted(tree) if isinstance(tree, dict) else range(len(tree))))
    deed = draw(st.sampled_from(["go in"] * 4 + ["remove", "add", "rename"]))
    if deed == "remove":
        del tree[key]
    elif isinstance(tree, list):
        tree[key] = _change(draw, tree[key])
        if deed == "add":
            tree.append(copy.deepcopy(tree[key]))
    elif deed == "go in":
        tree[key] = _change(draw, tree[key])
    else:
        name = draw(
            st.sampled_from(["", "x", "__metadata__", "../x", "\x00", "a" * 2000, "\ud800"])
        )
        tree[name] = tree.pop(key) if deed == "rename" else _value(draw)
    return tree


def _value(draw: st.DrawFn) -> Any:
    return copy.deepcopy(draw(st.sampled_from(VALUES)))
