"""``distca report --live``: a server that follows a run, through its end and half a line."""

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from report_records import steps, write_run

from distca.cli.live import ADDRESS, LiveServer
from distca.cli.report_inputs import run_state, runs_page

pytest.importorskip("plotly")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    server = LiveServer(partial(runs_page, [folder]), partial(run_state, [folder]))
    thread = Thread(target=server.serve_until_interrupted)
    thread.start()
    try:
        yield server.url
    finally:
        server.stop()
        thread.join()


def ask(url: str, **headers: str) -> tuple[int, str, str]:
    """Status, text and tag of an answer."""
    try:
        with urlopen(Request(url, headers=headers), timeout=20) as answer:
            return answer.status, answer.read().decode(), answer.headers.get("ETag", "")
    except HTTPError as error:
        return error.code, error.read().decode(), error.headers.get("ETag", "")


def losses(text: str) -> list[float]:
    (curves,) = [one for one in json.loads(text)["sections"] if one["name"] == "curves"]
    return [y for one in curves["figure"]["data"] if one["name"] == "training" for y in one["y"]]


def append(folder: Path, text: str) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(text)


def test_news_arrive_and_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", 3)
    with served(folder) as url:
        assert url.startswith("http://127.0.0.1:")
        status, page, _ = ask(url)
        assert status == 200
        assert "<body data-live>" in page
        _, text, tag = ask(f"{url}page.json")
        assert len(losses(text)) == 3
        assert ask(f"{url}page.json", **{"If-None-Match": tag})[0] == 304
        line = json.dumps(steps(4)[3]) + "\n"
        append(folder, line[:30])
        status, text, _ = ask(f"{url}page.json", **{"If-None-Match": tag})
        assert (status, len(losses(text))) == (200, 3)
        append(folder, line[30:])
        assert len(losses(ask(f"{url}page.json")[1])) == 4
        append(folder, json.dumps(steps(5)[4] | {"stopped": True}) + "\n")
        assert "was stopped after 5 " in ask(f"{url}page.json")[1]


def test_a_run_that_has_not_begun_yet_can_be_followed(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    with served(folder) as url:
        assert "no finished step yet" in ask(f"{url}page.json")[1]
        append(folder, json.dumps(steps(1)[0]) + "\n")
        assert len(losses(ask(f"{url}page.json")[1])) == 1


def test_a_page_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", 3)
    with served(folder) as url:
        append(folder, '{"no step": 1}\n')
        status, text, _ = ask(f"{url}page.json")
        assert status == 503
        assert "holds lines that are no records of steps" in text
        assert "\n" not in text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", ""])
def test_pages_of_strangers_are_not_answered(tmp_path: Path, host: str) -> None:
    with served(write_run(tmp_path / "a", 3)) as url:
        assert ask(f"{url}page.json", Host=host)[0] == 403
        port: Any = url.rstrip("/").rpartition(":")[2]
        assert ask(f"{url}page.json", Host=f"localhost:{port}")[0] == 200
        assert ask(f"{url}etc/passwd")[0] == 404


def test_a_browser_that_leaves_before_its_answer_is_no_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with served(write_run(tmp_path / "a", 3)) as url:
        port = int(url.rstrip("/").rpartition(":")[2])
        for _ in range(3):
            with socket.create_connection((ADDRESS, port)) as browser:
                at_once = struct.pack("ii", 1, 0)  # closing drops what has not been read
                browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
                browser.sendall(f"GET / HTTP/1.1\r\nHost: {ADDRESS}:{port}\r\n\r\n".encode())
        assert ask(url)[0] == 200
    assert capfd.readouterr().err == ""


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with served(write_run(tmp_path / "a", 3)) as url:
        port = int(url.rstrip("/").rpartition(":")[2])
        with pytest.raises(ValueError, match=rf"^--port {port} cannot be opened \(Address already"):
            LiveServer(partial(runs_page, [tmp_path / "a"]), str, port)
