"""The soak on a server of two ranks, whose schedulers must keep the same books; shorter, and its memory is not judged."""

import pytest
from test_server_a_soak import (  # noqa: F401
    references,
    requests_of_a_soak,
    soak,
    test_no_request_is_lost,
    test_nothing_is_in_use_when_all_have_gone,
    test_tokens_of_one_version_are_exactly_those_it_gives_alone,
    test_tokens_on_both_sides_of_a_switch_are_those_of_the_reported_versions,
)
from test_server_b_ranks import FLAGS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def num_requests():
    return requests_of_a_soak(500)


@pytest.fixture(scope="module")
def server(servers):
    return servers.get("qwen3", *FLAGS)
