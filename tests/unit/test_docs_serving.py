"""docs/serving.md against the code that it lists."""

import re
from pathlib import Path

import pytest

from orbit_kernels.contract.errors import ErrorCode
from orbit_kernels.contract.options import choices
from orbit_kernels.contract.routes import ROUTES
from orbit_sglang.startup import options as config

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text()


@pytest.mark.parametrize("field", [field for field, _, _ in config._REQUIRED])
def test_every_option_that_is_refused_at_the_start_is_listed(field):
    assert f"`--{field.replace('_', '-')}" in TEXT


def test_every_code_of_a_refusal_is_listed_once_with_its_status():
    rows = re.findall(r"^\| (\d{3}) ((?:`\w+`(?:, )?)+) \|", TEXT, re.MULTILINE)
    listed = [(code, int(status)) for status, codes in rows for code in re.findall(r"\w+", codes)]
    assert sorted(listed) == sorted((code.value, code.status) for code in ErrorCode)


def test_every_route_is_in_the_table_of_keys():
    (header,) = (line for line in TEXT.splitlines() if line.startswith("| server started with |"))
    _, _, with_key, without, _ = header.split("|")
    assert {route.name for route in ROUTES if route.needs_key} == set(re.findall(r"`(\w+)`", with_key))
    assert {route.name for route in ROUTES if not route.needs_key} < set(re.findall(r"`([\w.]+)`", without))


@pytest.mark.parametrize("field, rule", config.SlotsConfig.declared(), ids=lambda each: getattr(each, "flag", ""))
def test_every_flag_of_the_slots_is_listed_with_its_values(field, rule):
    (row,) = re.findall(rf"^\| `{re.escape(config.command_line(rule.flag))}` (.*)$", TEXT, re.MULTILINE)
    assert [value for value in choices(field) or () if f"`{value}`" not in row] == []
