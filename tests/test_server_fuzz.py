"""The API fuzzed by its own description: whatever it says may be sent, and what it says may not, gets an answer.

No 5xx but "full", no crash, no hang; after it the server answers as before, and nothing is under way any more.
"""

from collections import Counter

import pytest
import schemathesis
from conftest import letter_reward, make_policy
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from serving import served

from misvo.server import Config, Limits

SECONDS = 60  # that an answer may take


def fuzz(server, count: int) -> tuple[Counter, Counter]:
    """Send up to so many requests; gives how many of each status came back, of each operation and in all."""
    statuses, operations = Counter(), Counter()
    with server.http() as http:
        body = {"prompt": "a", "reward": "letters", "rollouts": 2, "steps": 2, "max_new_tokens": 4}
        run = http.post("/misvo/v1/runs", json=body).json()["id"]
        server.idle()
        response = http.post("/v1/responses", json={"model": "tiny", "input": "a", "max_output_tokens": 4}).json()["id"]
        assert http.post("/misvo/v1/steerings", json={"run": run, "name": "calm"}).status_code == 201
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    found = [result.ok() for result in schema.get_all_operations()]
    # What deletes goes last, so that the others meet what there is.
    for operation in sorted(found, key=lambda one: one.method.lower() == "delete"):

        def one(case, real):
            if real:  # past the first door: names that there are
                if "id" in (case.path_parameters or {}):
                    case.path_parameters["id"] = response if case.path.startswith("/v1/responses") else run
                if "name" in (case.path_parameters or {}):
                    case.path_parameters["name"] = "tiny" if case.path.startswith("/v1/models") else "calm"
                if isinstance(case.body, dict) and "model" in case.body:
                    case.body["model"] = "tiny"
            answer = case.call(timeout=SECONDS)
            statuses[answer.status_code] += 1
            operations[case.operation.label] += 1
            full = answer.status_code == 503 and answer.json()["error"]["code"] == "full"
            assert answer.status_code < 500 or full, (answer.status_code, answer.text, case.as_curl_command())
            if answer.status_code >= 400:
                assert answer.json()["error"]["message"], case.as_curl_command()

        each = max(1, count // len(found) // 2)
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            try:
                cases = operation.as_strategy(generation_mode=mode)
                test = given(case=cases, real=st.sampled_from([True, True, True, False]))(one)
                settings(
                    max_examples=each,
                    deadline=None,
                    database=None,
                    derandomize=True,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )(test)()
            except Unsatisfiable:
                assert mode is GenerationMode.NEGATIVE  # a route that takes anything, or nothing, cannot be misused
    return statuses, operations


@pytest.mark.parametrize(
    "count",
    [40, pytest.param(20_000, marks=pytest.mark.slow)],  # routes without parameters leave some over
)
def test_no_request_breaks_the_server(count):
    limits = Limits(request=600, load=20_000)
    policy = make_policy(chat=True)
    with served(policy, {"letters": letter_reward}, Config(name="tiny", limits=limits, default_tokens=8)) as server:
        asked = {"model": "tiny", "prompt": "a b c", "seed": 1, "max_tokens": 6}
        before = server.client().completions.create(**asked).choices[0].text
        statuses, operations = fuzz(server, count)
        print(f"{statuses.total()} requests to {len(operations)} operations: {dict(sorted(statuses.items()))}")
        server.wait_until(lambda: server.core.places.taken == 0, 120)
        server.idle()
        assert server.core.engine.alive and server.core.tally.restarts == 0
        assert server.client().completions.create(**asked).choices[0].text == before
    assert statuses.total() >= count / 2 and len(operations) >= 25
    assert statuses[200] + statuses[201] + statuses[202] > 0.1 * statuses.total()  # not only at the first door
