"""Every answer over HTTP matches the description of the API."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.service.conftest import Serve
from tests.support.world import World

pytestmark = pytest.mark.service

EXAMPLES = int(os.environ.get("BLACKBOX_TEST_API_EXAMPLES", "40"))


@pytest.mark.proof
def test_every_answer_matches_the_openapi_description(world: World, serve: Serve) -> None:
    # Not at the top: every worker imports this file, and this takes long.
    import schemathesis
    from schemathesis.core.result import Ok

    schemathesis.serializer("application/x-ndjson")(lines)
    world.format_name = "countdown"
    service = serve()
    schema = schemathesis.openapi.from_url(f"{service.base_url}/openapi.json")
    operations = list(schema.get_all_operations())
    assert len(operations) == 16
    for operation in operations:
        assert isinstance(operation, Ok)
        _try(operation.ok())


def lines(_: Any, value: Any) -> bytes:
    return value.encode(errors="replace") if isinstance(value, str) else json.dumps(value).encode()


def _try(operation: Any) -> None:
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
        database=None,
    )
    @given(case=operation.as_strategy())
    def every_case(case: Any) -> None:
        # A schema cannot express all rules of a request, such as topics and the maximum countdown.
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    every_case()
