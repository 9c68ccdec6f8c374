"""Requests made from the OpenAPI document, right ones and wrong ones: none is answered with 500."""

from __future__ import annotations

import pytest

from tests.serving.server import serving, speaker


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of schemathesis and what it brings
def test_nothing_that_the_document_allows_or_forbids_is_an_error_of_the_server():
    import schemathesis
    from hypothesis import HealthCheck, given, settings

    with serving(speaker(), max_num_seqs=8, request_timeout=60) as served:
        schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
        operations = [one.ok() for one in schema.get_all_operations()]
        assert {one.path for one in operations} >= {"/v1/completions", "/v1/chat/completions", "/health"}
        answers = []
        for operation in operations:
            modes = schemathesis.GenerationMode
            count = 60 if operation.method == "post" else 5
            for mode in (modes.POSITIVE, modes.NEGATIVE) if operation.body else (modes.POSITIVE,):

                @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
                @given(case=operation.as_strategy(generation_mode=mode))
                def check(case):
                    answers.append(case.call(base_url=served.url, timeout=60).status_code)
                    assert answers[-1] < 500, case.as_curl_command()

                check()
        assert len(answers) > 200 and {200, 400} <= set(answers)
        assert served.metric("selfspec_request_errors_total", status="500") == 0
        assert served.http.get("/health").status_code == 200
