"""Bodies that no trainer sends, as Hypothesis strategies; ``ORBIT_FUZZ_EXAMPLES`` sets how many each test tries."""

import json
import os
from collections.abc import Mapping
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

PLACE = "@@"
ODD_JSON = (
    "NaN", "-Infinity", "1e999", "1.0", "-1", "1" * 30, "1" * 400, "1" * 5000, '"\\ud800"', "[]", "{}", "", "{", "{} {}", "\x00",
    '{"version": 0, "version": []}',
)  # fmt: skip
DTYPES = ("BOOL", "U8", "I16", "I32", "F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E8M0", "F4", "C64", "f32", "")
CONFIG_KEYS = ("peft_version", "r", "lora_alpha", "alpha_pattern", "oft_block_size", "num_cayley_neumann_terms")
LAST = 2**64 - 1


def fuzzed(default: int) -> settings:
    """The same examples in every run, as many as ``default`` or the environment says."""
    return settings(
        max_examples=int(os.environ.get("ORBIT_FUZZ_EXAMPLES", default)),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


TEXTS = st.text(st.characters(exclude_categories=()), max_size=8)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(0, 9) | st.floats() | TEXTS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXTS, values, max_size=3),
    max_leaves=5,
)
NESTED_JSON = st.builds(
    lambda brackets, depth: brackets[0] * depth + "0" + brackets[1] * depth,
    st.sampled_from([("[", "]"), ('{"a":', "}")]),
    st.sampled_from([50, 500, 5000, 50_000]),
)
JSON_TEXTS = st.one_of(JSON_VALUES.map(json.dumps), st.sampled_from(ODD_JSON), NESTED_JSON)


def with_text(valid: Mapping[str, Any], key: str, text: str) -> str:
    """The JSON text of an object, with any text at all in the place of one value."""
    return json.dumps({**valid, key: PLACE}).replace(json.dumps(PLACE), text)


def json_bodies(valid: Mapping[str, Any]) -> st.SearchStrategy[bytes]:
    """An object with one value replaced or added, other JSON, or no JSON."""
    keys = st.sampled_from(list(valid)) | TEXTS
    texts = st.builds(with_text, st.just(valid), keys, JSON_TEXTS) | JSON_TEXTS
    encoded = st.builds(str.encode, texts, st.sampled_from(["utf-8", "utf-16"]), st.just("surrogatepass"))
    return encoded | st.binary(max_size=64)


def payloads(good: bytes) -> st.SearchStrategy[bytes]:
    """A valid payload, broken in one way; a few are still valid."""
    header, tensors = parts(good)
    lengths = st.integers(0, LAST) | st.integers(0, len(good))
    texts = st.one_of(_with_other_tensor(header), _with_other_config(header), _with_other_metadata(header), JSON_TEXTS)
    return st.one_of(
        st.binary(max_size=64),
        st.integers(0, len(good) - 1).map(lambda length: good[:length]),
        st.binary(min_size=1, max_size=8).map(lambda more: good + more),
        _flipped(good, len(good) - len(tensors)),
        _flipped(good, len(good)),
        lengths.map(lambda length: length.to_bytes(8, "little") + good[8:]),
        texts.map(lambda text: assembled(text, tensors)),
    )


def parts(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """A payload's header, and the bytes of its tensors."""
    header_end = 8 + int.from_bytes(payload[:8], "little")
    return json.loads(payload[8:header_end]), payload[header_end:]


def assembled(header: str, tensors: bytes) -> bytes:
    """A payload with any text at all as its header."""
    encoded = header.encode(errors="surrogatepass")
    return len(encoded).to_bytes(8, "little") + encoded + tensors


def config_header(header: Mapping[str, Any], text: str) -> str:
    """The text of a header with another text of peft's configuration."""
    return json.dumps({**header, "__metadata__": {**header["__metadata__"], "adapter_config": text}})


@st.composite
def _flipped(draw, good: bytes, end: int) -> bytes:
    body = bytearray(good)
    for position in draw(st.lists(st.integers(0, end - 1), min_size=1, max_size=4)):
        body[position] ^= draw(st.integers(1, 255))
    return bytes(body)


@st.composite
def _with_other_tensor(draw, header: dict[str, Any]) -> str:
    """One tensor with another name, dtype, shape or place, left out, or joined by an empty one."""
    changed = dict(header)
    name = draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))
    entry = changed.pop(name)
    shapes = st.permutations(entry["shape"]) | st.lists(st.sampled_from([0, 1, 2, 2**32, LAST]), max_size=4)
    values = {
        "dtype": st.sampled_from(DTYPES),
        "shape": shapes,
        "data_offsets": st.lists(st.integers(0, LAST), max_size=3),
    }
    what = draw(st.sampled_from(["name", "left out", "empty", *values]))
    if what == "left out":
        return json.dumps(changed)
    if what == "empty":
        end = max(other["data_offsets"][1] for key, other in header.items() if key != "__metadata__")
        empty = {"dtype": draw(values["dtype"]), "shape": draw(shapes), "data_offsets": [end, end]}
        return json.dumps({**header, draw(st.just(f"{name}2") | TEXTS): empty})
    if what == "name":
        other = draw(st.sampled_from([name.replace(".0.", ".7."), name.replace("_proj", "_projx"), f"{name}2"]) | TEXTS)
        return json.dumps({**changed, other: entry})
    return json.dumps({**changed, name: {**entry, what: draw(values[what] | JSON_VALUES)}})


@st.composite
def _with_other_config(draw, header: dict[str, Any]) -> str:
    """One key of peft's configuration with another value, or another configuration."""
    config = json.loads(header["__metadata__"]["adapter_config"])
    keys = st.sampled_from([*config, *CONFIG_KEYS]) | TEXTS
    text = draw(st.builds(with_text, st.just(config), keys, JSON_TEXTS) | JSON_TEXTS)
    return config_header(header, text)


@st.composite
def _with_other_metadata(draw, header: dict[str, Any]) -> str:
    """Metadata that is missing, nested or no object, or that shares other parts."""
    parts = st.sampled_from(["q_proj", "k_proj", "o_proj", "gate_proj"])
    shared = st.dictionaries(parts, parts | JSON_VALUES, max_size=3).map(json.dumps) | JSON_TEXTS
    with_shared = shared.map(lambda text: {**header["__metadata__"], "shared_parts": text})
    nested = JSON_VALUES.map(lambda value: {**header["__metadata__"], "adapter_config": value})
    metadata = draw(with_shared | nested | JSON_VALUES | st.just(PLACE))
    if metadata == PLACE:
        return json.dumps({key: entry for key, entry in header.items() if key != "__metadata__"})
    return json.dumps({**header, "__metadata__": metadata})
