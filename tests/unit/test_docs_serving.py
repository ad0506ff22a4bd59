"""docs/serving.md against the code that it lists."""

from pathlib import Path

import pytest

from orbit_sglang.http import openapi
from orbit_sglang.startup import options as config

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text()


@pytest.mark.parametrize("field", [field for field, _, _ in config._REQUIRED])
def test_every_option_that_is_refused_at_the_start_is_listed(field):
    assert f"`--{field.replace('_', '-')}" in TEXT


def test_every_code_of_a_refusal_is_listed():
    routes = [value for name, value in vars(openapi).items() if name.isupper() and isinstance(value, dict)]
    codes = {
        code.strip()
        for route in routes
        for status, response in route.get("responses", {}).items()
        if status not in (200, 401)
        for code in response["description"].partition(";")[0].split(",")
    }
    assert len(codes) >= 15
    assert {code for code in codes if f"`{code}`" not in TEXT} == set()
