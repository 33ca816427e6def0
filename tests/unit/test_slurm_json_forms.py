"""JSON of every release, slurmrestd, and that nothing strange is taken for a fact."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flexslurm.config.site import SlurmSettings
from flexslurm.errors import EnvironmentFault, SlurmError, SlurmUnavailable
from flexslurm.slurm.client import SlurmClient
from flexslurm.slurm.json_forms import (
    INFINITE,
    exit_code_of,
    job_of,
    jobs_of,
    limit_s,
    node_state_of,
    nodes_of,
    number,
    read_answer,
)
from flexslurm.slurm.states import JobState

NOW = 1_800_000_000.0


def told(value: float) -> dict[str, object]:
    return {"set": True, "infinite": False, "number": value}


OLD = {
    "job_id": 7, "job_state": "RUNNING", "time_limit": 60, "start_time": int(NOW) - 600,
    "end_time": int(NOW) + 3000, "preempt_time": 0, "restart_cnt": 2, "exit_code": 0,
    "job_resources": {"nodes": "n[1-2]"}, "nodes": "n[1-2]", "batch_host": "n1",
    "name": "x", "partition": "low", "state_reason": "None",
}  # fmt: skip
NEW = {
    **OLD, "job_state": ["RUNNING"], "time_limit": told(60), "start_time": told(NOW - 600),
    "end_time": told(NOW + 3000), "preempt_time": told(0),
    "job_resources": {"nodes": {"count": 2, "list": "n[1-2]", "allocation": []}},
    "exit_code": {"status": ["SUCCESS"], "return_code": told(0),
                  "signal": {"id": {"set": False}, "name": ""}},
}  # fmt: skip


@pytest.mark.parametrize("record", [OLD, NEW])
def test_a_running_job_of_each_release(record: dict[str, Any]) -> None:
    job = job_of(record, NOW, {})
    assert (job.id, job.state, job.restarts, job.batch_host) == ("7", JobState.RUNNING, 2, "n1")
    assert (job.nodes, job.end_in_s, job.started_ago_s) == (("n1", "n2"), 3000, 600)
    assert job.preempt_in_s is None and job.exit_code is None and not job.orphaned


@pytest.mark.parametrize("record", [OLD, NEW])
def test_a_preemption_under_way(record: dict[str, Any]) -> None:
    taken = told(NOW - 5) if record is NEW else int(NOW) - 5
    job = job_of({**record, "preempt_time": taken}, NOW, {"low": 20.0})
    assert job.preempt_in_s == 15 and job.state is JobState.RUNNING
    unlimited = {**record, "preempt_time": taken, "time_limit": None, "end_time": int(NOW) + 9}
    job = job_of(unlimited, NOW, {"low": 20.0})
    assert job.preempt_in_s == 9 and job.end_in_s is None


@pytest.mark.parametrize(
    "limit", [None, 525600, {"set": True, "infinite": True, "number": 0}, {"set": False}, "x"]
)
def test_no_limit_has_several_faces(limit: object) -> None:
    assert limit_s({"time_limit": limit}) is None
    assert job_of({**OLD, "time_limit": limit}, NOW, {}).end_in_s is None


def test_a_year_from_the_start_is_no_end() -> None:
    year = {**OLD, "end_time": OLD["start_time"] + 31_536_000}  # type: ignore[operator]
    assert job_of(year, NOW, {}).end_in_s is None


@pytest.mark.parametrize("resources", [None, {}, {"nodes": None}, {"nodes": ""}, [], "x"])
def test_a_job_without_nodes(resources: object) -> None:
    record = {"job_id": 21, "job_state": ["PENDING"], "job_resources": resources, "nodes": ""}
    job = job_of(record, NOW, {})
    assert (job.nodes, job.state) == ((), JobState.PENDING)


def test_flags_beside_a_state() -> None:
    assert job_of({**NEW, "job_state": ["RUNNING", "COMPLETING"]}, NOW, {}).state is (
        JobState.COMPLETING
    )
    assert job_of({**NEW, "job_state": []}, NOW, {}).state is JobState.UNKNOWN
    assert job_of({**NEW, "job_state": ["SOMETHING_NEW"]}, NOW, {}).state is JobState.UNKNOWN


@pytest.mark.parametrize(
    "record",
    [{"state": "mixed", "state_flags": ["DRAIN"]}, {"state": ["MIXED", "DRAIN"]}],
)
def test_a_node_that_drains_takes_nothing(record: dict[str, Any]) -> None:
    state = node_state_of(record)
    assert not state.usable_now and state.slurm_drain == "draining"
    assert node_state_of({"state": ["IDLE"]}).usable_now
    assert not node_state_of({}).usable_now


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0, 0), (256, 1), (9, -9), (told(15), -15), (None, None),
        ({"status": ["ERROR"], "return_code": told(3), "signal": {}}, 3),
        ({"status": "SIGNALED", "return_code": 0, "signal": {"signal_id": 9}}, -9),
        ({"status": ["SIGNALED"], "signal": {"id": told(15), "name": "TERM"}}, -15),
    ],
)  # fmt: skip
def test_exit_codes(value: object, code: int | None) -> None:
    assert exit_code_of(value) == code


def test_numbers() -> None:
    assert number(told(4)) == 4 and number(4) == 4 and number({"set": False, "number": 4}) is None
    assert number({"set": True, "infinite": True, "number": 0}) == INFINITE
    assert number(True) is None and number("4") is None


@pytest.mark.parametrize(
    "text",
    [
        '{"jobs": [], "errors": [{"error_number": 2041, "description": "no such"}]}',
        '{"nodes": [], "errors": ["Unspecified"]}', "", "[]", "<html>", '{"errors": [{}]}',
        "[" * 100_000,
    ],
)  # fmt: skip
def test_an_error_is_not_an_empty_answer(text: str) -> None:
    with pytest.raises(SlurmError):
        read_answer(text)


def test_nobody_there_is_told_apart() -> None:
    words = "Unable to contact slurm controller (connect failure)"
    with pytest.raises(SlurmUnavailable):
        read_answer(json.dumps({"errors": [{"description": words}]}))


def test_what_was_not_asked_for_is_left_out() -> None:
    answer = {"jobs": [OLD, {**OLD, "job_id": 8}, {"job_id": None}, "x"]}
    found = jobs_of(answer, ["8", "9"], NOW, {})
    assert list(found) == ["8", "9"]
    assert found["8"].known and not found["9"].known and not found["9"].state.over


KEYS = ["set", "infinite", "number", "nodes", "list", "id", "signal", "return_code", "status"]
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
flat = st.dictionaries(st.sampled_from(KEYS), leaves | st.lists(leaves, max_size=3), max_size=4)
plain = leaves | flat | st.dictionaries(st.sampled_from(KEYS), flat, max_size=3)


@example({"restart_cnt": float("nan")})
@example({"restart_cnt": 10**400})
@example({"job_id": float("-inf")})
@example({"job_state": "FAILED", "exit_code": {"return_code": float("nan")}})
@given(st.dictionaries(st.sampled_from([*OLD, "state", "state_flags"]), plain))
def test_no_form_is_too_strange(record: dict[str, Any]) -> None:
    job = job_of(record, NOW, {})
    nodes_of(record)
    node_state_of(record)
    if not isinstance(record.get("job_state"), (str, list)):
        assert job.state is JobState.UNKNOWN and not job.state.over


# ---------------------------------------------------------------------------------- slurmrestd


@contextmanager
def restd(status: int, body: str) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A stand-in for slurmrestd, and the headers of what it was asked."""
    heard: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append({**dict(self.headers), "path": self.path})
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/slurm/v0.0.40", heard
        finally:
            server.shutdown()
            thread.join()


def client(url: str, **rest: str) -> SlurmClient:
    settings = {"rest": {"url": url, "user": "me", **rest}, "command_timeout": 5}
    return SlurmClient(SlurmSettings.model_validate(settings), environ={"PATH": "/nonexistent"})


def test_jobs_come_from_slurmrestd(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("SLURM_JWT=secret\n")
    with restd(200, json.dumps({"jobs": [NEW], "errors": []})) as (url, heard):
        found = client(url, token_file=str(token)).jobs(["7", "8"])
    assert found["7"].nodes == ("n1", "n2") and not found["8"].known
    (asked,) = heard
    assert (asked["X-SLURM-USER-NAME"], asked["X-SLURM-USER-TOKEN"]) == ("me", "secret")
    assert asked["path"] == "/slurm/v0.0.40/jobs/"


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (401, "no", SlurmError), (503, "later", SlurmUnavailable),
        (200, '{"jobs": [], "errors": [{"error": "denied"}]}', SlurmError),
    ],
)  # fmt: skip
def test_a_no_is_never_an_empty_list(status: int, body: str, kind: type[SlurmError]) -> None:
    with restd(status, body) as (url, _), pytest.raises(SlurmError) as caught:
        client(url).jobs(["7"])
    assert type(caught.value) is kind


def test_nobody_listens(tmp_path: Path) -> None:
    with restd(200, "{}") as (url, _):
        pass
    with pytest.raises(SlurmUnavailable):
        client(url).jobs(["7"])
    with pytest.raises(EnvironmentFault, match="token"):
        client(url, token_file=str(tmp_path / "none")).jobs(["7"])


@pytest.mark.parametrize("port", ["abc", "99999", "-1"])
def test_a_url_with_a_port_that_is_none(port: str) -> None:
    with pytest.raises(EnvironmentFault, match=r"slurm\.rest\.url") as caught:
        client(f"http://ctl:{port}/slurm/v0.0.40").jobs(["7"])
    assert "HOST:PORT" in (caught.value.hint or "")


@pytest.mark.parametrize("text", ["", "\n", "SLURM_JWT=", "one\ntwo\n"])
def test_a_token_file_without_a_token(text: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(text)
    with pytest.raises(EnvironmentFault, match="holds no token"):
        client("http://127.0.0.1:1/slurm/v0.0.40", token_file=str(token)).jobs(["7"])
