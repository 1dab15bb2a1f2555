"""schemathesis asks a real `serve` what its schema allows and what it does not: `make test-schema`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository_paths import HELPERS

from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.tracker import JsonlTracker

KEY = "a-key-of-this-test"
CHECKS = HELPERS / "servers" / "schema_checks.py"


@pytest.mark.schema
@pytest.mark.parametrize("is_deployed", [False, True])
def test_schemathesis_finds_nothing(tmp_path: Path, is_deployed: bool) -> None:
    command_line = [sys.executable, "-m", "stateset_agents.cli.main"]
    what = ["embedded:desk"]
    if is_deployed:
        journal = str(tmp_path / "deployments.sqlite")
        deploy = [*command_line, "deploy", "embedded:desk", "--baseline", "embedded:reasoner"]
        subprocess.run([*deploy, "--deployments", journal], check=True)
        what = ["--deployment", journal]
    words = [*command_line, "serve", *what, "--port", "0", "--max-output-tokens", "16"]
    env = {**os.environ, "STATESET_API_KEY": KEY, "SCHEMATHESIS_HOOKS": str(CHECKS)}
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = server.stdout.readline().split()[-1].removesuffix("/v1")
            command = [str(Path(sys.executable).parent / "st"), "run", f"{url}/openapi.json"]
            command += ["--header", f"Authorization: Bearer {KEY}", "--seed", "0", "--max-examples", "100"]
            command += ["--exclude-checks", "positive_data_acceptance", "--request-timeout", "60"]
            done = subprocess.run(command, cwd=tmp_path, env=env, check=False, timeout=1200)
            assert done.returncode == 0
            assert server.poll() is None
        finally:
            server.terminate()
            assert server.wait(60) == 0


RUN = {"type": "string", "examples": ["0001-run"]}
PAGES = {
    "openapi": "3.1.0",
    "info": {"title": "The pages of `dashboard`; the endless /events left out", "version": "1"},
    "paths": {
        "/": {"get": {"responses": {"200": {"description": "", "content": {"text/html": {}}}}}},
        "/plotly.js": {
            "get": {"responses": {"200": {"description": "", "content": {"text/javascript": {}}}}}
        },
        "/metrics": {"get": {"responses": {"200": {"description": "", "content": {"text/plain": {}}}}}},
        "/{run}/report.html": {
            "get": {
                "parameters": [{"name": "run", "in": "path", "required": True, "schema": RUN}],
                "responses": {
                    "200": {"description": "", "content": {"text/html": {}}},
                    "404": {"description": "", "content": {"text/plain": {}}},
                },
            }
        },
    },
}


@pytest.mark.schema
def test_schemathesis_finds_nothing_in_the_dashboards_pages(tmp_path: Path) -> None:
    command_line = [sys.executable, "-m", "stateset_agents.cli.main"]
    journal = str(tmp_path / "deployments.sqlite")
    deploy = [*command_line, "deploy", "embedded:desk", "--baseline", "embedded:reasoner"]
    subprocess.run([*deploy, "--deployments", journal], check=True)
    run = RunFolder.create(tmp_path / "runs")
    run.write_config({"training": {}})
    with JsonlTracker(run) as tracker:
        tracker.log_metrics(1, {"reward/mean": 0.5})
    (tmp_path / "pages.json").write_text(json.dumps(PAGES), encoding="utf-8")
    words = [*command_line, "dashboard", str(tmp_path / "runs"), "--deployments", journal, "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = next(word for word in server.stdout.readline().split() if word.startswith("http"))
            command = [str(Path(sys.executable).parent / "st"), "run", "pages.json", "--url", url]
            command += ["--seed", "0", "--max-examples", "100", "--request-timeout", "60"]
            done = subprocess.run(command, cwd=tmp_path, check=False, timeout=600)
            assert done.returncode == 0
            assert server.poll() is None
        finally:
            server.terminate()
            server.wait(60)
