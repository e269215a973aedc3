"""Several runs in one page, the page that follows a run, and the viewer of completions."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_reporting import charts_in, drawn_lines, parse_page, write_synthetic_run

from colocate import cli
from colocate.reporting import samples
from colocate.reporting.completions import CompletionTable, write_completions_parquet
from colocate.reporting.live import MAX_CONNECTIONS, LiveReport, ReportServer, serve
from colocate.reporting.report import write_report
from colocate.reporting.run import read_run


def write_run(directory: Path, name: str, rewards: list[float], **options: object) -> Path:
    directory.mkdir()
    info = {"run_name": name, "options": options, "versions": {"colocate": "0.1.0"}}
    (directory / "run.json").write_text(json.dumps(info))
    lines = [json.dumps({"step": i + 1, "reward": reward}) for i, reward in enumerate(rewards)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def compare(*directories: Path, to: Path, capsys) -> Path:
    assert cli.main(["report", *map(str, directories), "--output", str(to)]) == 0
    assert capsys.readouterr().out.strip() == str(to)
    return to


def test_runs_share_their_charts_and_show_in_what_they_differ(tmp_path, capsys):
    one = write_run(tmp_path / "a", "one", [0.0, 1.0, 2.0], learning_rate=1e-6, seed=1)
    two = write_run(tmp_path / "b", "two", [2.0, 1.0], learning_rate=2e-6, seed=1)
    path = compare(one, two, to=tmp_path / "c.html", capsys=capsys)
    page = parse_page(path)
    chart, _ = charts_in(path, "Reward")  # for a screen, and for a phone
    for color, rewards in (("blue", [0.0, 1.0, 2.0]), ("orange", [2.0, 1.0])):
        (line,) = drawn_lines(chart, f"curve s-{color}")
        assert [y for _, y in line] == pytest.approx(rewards, abs=0.02)
    assert "one rises from 0 to 2" in chart.get("aria-label") and "two falls from 2 to 1" in chart.get(
        "aria-label"
    )
    differing, shared = page.text.split("Options that they share (1)")
    assert re.search(r"learning_rate\s*1e-06\s*2e-06", differing) and "seed" in shared


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda a, b, tmp: [a, a], "named twice"),
        (lambda a, b, tmp: [a, tmp / "none"], "is not a directory"),
        (lambda a, b, tmp: [a, tmp], "No metrics.jsonl"),
        (lambda a, b, tmp: [write_run(tmp / f"r{i}", "r", [1.0]) for i in range(9)], "can tell 8 apart"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, capsys, make, message):
    a, b = (write_run(tmp_path / name, name, [1.0]) for name in "ab")
    assert cli.main(["report", *map(str, make(a, b, tmp_path))]) == 1
    assert message in capsys.readouterr().err
    assert cli.main(["report", str(a), "--output", "x.html"]) == 1


def test_runs_of_one_name_and_of_two_versions_are_told_apart(tmp_path, capsys):
    a, b = (write_run(tmp_path / name, "same", [1.0]) for name in "ab")
    info = json.loads((b / "run.json").read_text())
    (b / "run.json").write_text(json.dumps(info | {"versions": {"colocate": "0.2.0"}}))
    text = parse_page(compare(a, b, to=tmp_path / "c.html", capsys=capsys)).text
    assert f"{a}: same" in text and f"colocate: {a}: same has 0.1.0, {b}: same has 0.2.0" in text


# ── The page that follows a run ──────────────────────────────────────────────────────────────────────────


@pytest.fixture
def live(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with serve(LiveReport([run_dir], lambda: write_report(run_dir)), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield run_dir, server
        server.shutdown()


def ask(server: ReportServer, rest: str = "", host: str = "127.0.0.1", path: str = "") -> tuple[int, str]:
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=100)
    connection.request("GET", path or server.path + rest, headers={"Host": f"{host}:{port}"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_a_watched_page_follows_the_record(live):
    run_dir, server = live
    assert "Waiting for a step" in ask(server)[1]
    before = ask(server, "version")
    write_synthetic_run(run_dir, num_steps=20)
    assert ask(server, "version") != before
    status, page = ask(server)
    assert status == 200 and "How it learned" in page and "location.reload" in page
    # The file itself, which may be mailed, asks nobody.
    assert "fetch(" not in (run_dir / "report.html").read_text()


def test_a_watched_page_is_for_this_machine_and_whoever_has_its_address(live):
    """The page has completions, and other users of the machine reach the port, too."""
    run_dir, server = live
    write_synthetic_run(run_dir, num_steps=20)
    assert ask(server, host="evil.example")[0] == 403
    assert ask(server, "metrics.jsonl")[0] == ask(server, "../run.json")[0] == 404
    for path in ("/", "/version", "/metrics.jsonl", server.path[:-2] + "/", server.path.swapcase()):
        status, text = ask(server, path=path)
        assert status == 403 and "How it learned" not in text


def test_connections_on_which_nothing_comes_are_closed_and_are_few(live, monkeypatch):
    _, server = live
    monkeypatch.setattr("colocate.reporting.live.LIMIT_S", 0.5)
    before = threading.active_count()
    idle = [socket.create_connection(server.server_address) for _ in range(MAX_CONNECTIONS + 20)]
    for connection in idle:  # those beyond the number at once, the others after the time
        connection.settimeout(100)
        with suppress(ConnectionError):
            assert connection.recv(1) == b""
        connection.close()
    assert threading.active_count() <= before + 2 * MAX_CONNECTIONS
    assert ask(server)[0] == 200


def test_a_port_in_use_is_named(live, capsys):
    run_dir, server = live
    port = server.server_address[1]
    assert cli.main(["report", str(run_dir), "--watch", "--port", str(port)]) == 1
    assert f"Port {port} of 127.0.0.1 cannot be opened" in capsys.readouterr().err


# ── The viewer ───────────────────────────────────────────────────────────────────────────────────────────


def records_of(path: Path) -> list[dict]:
    (data,) = re.findall(r'id="completions">(.*?)</script>', path.read_text(), flags=re.DOTALL)
    return json.loads(data)


def test_the_viewer_has_every_completion_with_its_group(tmp_path):
    write_synthetic_run(tmp_path, num_steps=10)
    table = CompletionTable(
        prompts=["p", "p", "q", "q"],
        completions=["a</script><b>", "b", "答案", "d"],
        rewards={"right": [1.0, 0.0, float("nan"), 1.0]},
        advantages=[0.5, -0.5, 0.0, 1.0],
    )
    write_completions_parquet(tmp_path, 10, table)
    found = records_of(write_report(tmp_path))
    assert [(r["step"], r["group"], r["completion"]) for r in found] == [
        (10, 0, "a</script><b>"), (10, 0, "b"), (10, 1, "答案"), (10, 1, "d"),
    ]  # fmt: skip
    assert found[0]["scores"] == {"right": 1.0, "advantage": 0.5} and found[2]["scores"]["right"] is None


def test_the_viewer_has_the_turns_and_tools_of_an_episode(tmp_path):
    write_synthetic_run(tmp_path, num_steps=10)
    asked = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Taipei"}}}
    turns = [
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "Ask.", "tool_calls": [asked]},
        {"role": "tool", "name": "weather", "content": "rain"},
        {"role": "assistant", "content": "Take an umbrella."},
    ]
    table = CompletionTable([[{"role": "user", "content": "Out?"}]], [turns], {"right": [1.0]}, [0.5])
    write_completions_parquet(tmp_path, 10, table)
    path = write_report(tmp_path)
    (found,) = records_of(path)
    assert found["prompt"] == "USER\nOut?" and found["scores"] == {"right": 1.0, "advantage": 0.5}
    asking = 'ASSISTANT\nAsk.\nLet me see.\nweather({"city": "Taipei"})'
    expected = [asking, "TOOL\nrain", "ASSISTANT\nTake an umbrella."]
    assert found["completion"].split("\n\n") == expected
    # Without scripts, too, they can be read.
    assert "Take an umbrella." in parse_page(path).text


def test_without_tables_the_viewer_has_the_samples(tmp_path):
    write_synthetic_run(tmp_path, num_steps=40)
    assert len(records_of(write_report(tmp_path))) == sum(1 for _ in read_run(tmp_path).completions())


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 100))
def test_a_page_has_the_newest_completions_that_fit(sizes, most):
    records = [{"prompt": "x" * size, "completion": "é", "number": i} for i, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "MAX_BYTES", most)
        kept, is_whole = samples.newest(records)
    assert kept == records[len(records) - len(kept) :] and is_whole == (len(kept) == len(records))
    weights = [size + 2 for size in sizes]
    assert sum(weights[len(records) - len(kept) :]) <= most
    assert is_whole or sum(weights[len(records) - len(kept) - 1 :]) > most
