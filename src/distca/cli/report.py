"""``distca report``: a page for the browser on a run, a plan, a simulation or a replay."""

import json
import webbrowser
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import typer

from distca.cli.command import OUTPUT, argument, check_output, console, json_switch, option
from distca.runtime.disk import writing

PAGE = b"<!doctype html>"  # how each begins
_output, _live = partial(option, panel=OUTPUT), partial(option, panel="Live")


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Writes a page for the browser on a run, a plan, a simulation or a replay.

    The page is one HTML file that works without a network.

    For example: distca report runs/latest --open
    """

    paths: list[Path] = argument(
        "PATH...",
        "The folder of a run, or of two that are compared; or the JSON of distca plan --out,"
        " distca simulate --json or distca bench replay --json.",
    )
    out: Path | None = _output(
        "FILE",
        "The page. Default: report.html in the folder of the run, or the name of the file with"
        " .html; for two runs, report.html in the current folder.",
    )
    open_page: bool = _output("", "Show the page in the browser.", False, "--open")
    as_json: bool = json_switch()
    live: bool = _live(
        "", "Serve the page of a run on this machine only, and update it.", False, "--live"
    )
    port: int = _live("N", "Port of --live. Default: any that is free.", 0)

    def run(self) -> None:
        if self.live:
            self._serve()
            return
        from distca.cli.report_inputs import read_page

        if self.port:
            raise ValueError(
                f"--port {self.port}: only a page with --live has one; give --live too"
            )
        kind, page = read_page(self.paths)
        path = self.out or self._default_out()
        check_output("--out", path)
        if path.is_file() and path.stat().st_size and not _is_page(path):
            raise ValueError(f"--out {path} exists and is no page: give another file")
        with writing(path):
            path.write_text(page.to_html(), encoding="utf-8")
        if self.as_json:
            typer.echo(json.dumps({"kind": kind, "page": str(path)}))
        else:
            console().print(f"written: {path}", soft_wrap=True)
        if self.open_page:
            webbrowser.open(path.resolve().as_uri())

    def _default_out(self) -> Path:
        first, *others = self.paths
        if others:
            return Path("report.html")
        return first / "report.html" if first.is_dir() else first.with_suffix(".html")

    def _serve(self) -> None:
        from distca.cli.live import LiveServer
        from distca.cli.report_inputs import find_runs, run_state, runs_page

        if self.out is not None:
            raise ValueError(
                f"--out {self.out} with --live: a live page is served; leave out --out"
            )
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"--port {self.port}: give a port from 1 to 65535, or none")
        folders = find_runs(self.paths)
        runs_page(folders)  # reports a wrong folder before anything is served
        server = LiveServer(
            make=partial(runs_page, folders), state=partial(run_state, folders), port=self.port
        )
        if self.as_json:
            typer.echo(json.dumps({"kind": "run", "page": server.url}))
        else:
            console().print(f"live: {server.url} (Ctrl-C ends it)", soft_wrap=True)
        if self.open_page:
            webbrowser.open(server.url)
        server.serve_until_interrupted()


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(PAGE)).lower() == PAGE
