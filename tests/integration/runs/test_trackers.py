"""TensorBoard, W&B, Trackio and MLflow by their own libraries: what they wrote is what metrics.jsonl says."""

from __future__ import annotations

import json
import logging
import os
import struct
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import page_snippets
import pytest
from repository_paths import ROOT
from tiny_training import make_trainer

from stateset_agents.tracking.run_log import RunLog

pytestmark = pytest.mark.trackers
TRACKERS = ["tensorboard", "wandb", "trackio", "mlflow"]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))


@pytest.fixture(scope="session", autouse=True)
def _stored(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Trackio reads where its store is when it is imported."""
    os.environ["TRACKIO_DIR"] = str(tmp_path_factory.mktemp("trackio"))


def in_the_log(trainer: Any) -> dict[str, dict[int, float]]:
    """Of each metric its value per step."""
    values: dict[str, dict[int, float]] = defaultdict(dict)
    for line in RunLog(trainer.run).metrics():
        for name, value in line.values.items():
            values[name][line.step] = value
    return dict(values)


def in_tensorboard(folder: Path) -> tuple[dict[str, dict[int, float]], dict[str, list[str]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    scalars = {}
    for name in tags["scalars"]:
        found = events.Scalars(name)
        assert len({event.step for event in found}) == len(found), f"a step of {name} stands twice"
        scalars[name] = {event.step: event.value for event in found}
    texts = {
        name.removesuffix("/text_summary"): [
            event.tensor_proto.string_val[0].decode() for event in events.Tensors(name)
        ]
        for name in tags["tensors"]
    }
    return scalars, texts


def written(file: Path) -> list[bytes]:
    """The records of a .wandb file: LevelDB's log format after a head of seven bytes."""
    data, at, records, whole = file.read_bytes(), 7, [], b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a record in one piece, or the last piece of one
            records.append(whole)
            whole = b""
    return records


def in_wandb(folder: Path) -> list[Any]:
    """The records of each part of the run, oldest part first."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    parts: list[Any] = []
    for _ in range(300):  # W&B's own process may write the last records after its `finish` has returned
        parts = [[Record.FromString(data) for data in written(file)] for file in files]
        if all(any(r.WhichOneof("record_type") == "exit" for r in part) for part in parts):
            break
        time.sleep(0.1)
    return parts


def history(part: Any) -> dict[str, dict[int, float]]:
    values: dict[str, dict[int, float]] = defaultdict(dict)
    for record in part:
        if record.WhichOneof("record_type") != "history":
            continue
        row = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
        }
        for name, value in row.items():
            if name != "step" and not name.startswith("_"):
                values[name][row["step"]] = value
    return dict(values)


def in_trackio(folder: Path) -> tuple[dict[str, dict[int, float]], dict[str, Any], list[tuple[str, str]]]:
    """Values, config and alerts of the run folder's run, out of Trackio's store."""
    from trackio.sqlite_storage import SQLiteStorage

    project, name = "stateset-agents", f"{folder.name}-{(folder / 'trackio-id.txt').read_text().strip()}"
    values: dict[str, dict[int, float]] = defaultdict(dict)
    for row in SQLiteStorage.get_logs(project, name):
        for key, value in row.items():
            if key not in ("step", "timestamp"):
                assert row["step"] not in values[key], f"a step of {key} stands twice"
                values[key][row["step"]] = value
    alerts = sorted(SQLiteStorage.get_alerts(project, name), key=lambda one: str(one["timestamp"]))
    ends = [(one["title"], one["level"]) for one in alerts]
    return dict(values), SQLiteStorage.get_run_config(project, name) or {}, ends


def in_mlflow(folder: Path) -> tuple[dict[str, dict[int, float]], Any]:
    from mlflow import MlflowClient

    client, id = MlflowClient(), (folder / "mlflow-id.txt").read_text().strip()
    run = client.get_run(id)
    values: dict[str, dict[int, float]] = {}
    for name in run.data.metrics:
        history = client.get_metric_history(id, name)
        values[name] = {point.step: point.value for point in history}
        assert len(values[name]) == len(history), f"a step of {name} stands twice"
    return values, run


def close_to(expected: dict[str, dict[int, float]]) -> dict[str, Any]:
    return {name: pytest.approx(values, rel=1e-6, nan_ok=True) for name, values in expected.items()}


async def test_a_run_and_its_resumption_stand_in_all_as_in_the_log(tmp_path: Path) -> None:
    settings = {
        "report_to": ["tensorboard", "wandb", "trackio", "mlflow"],
        "eval_steps": 2,
        "eval_episodes": 2,
    }
    settings |= {"save_steps": 0}
    first = make_trainer(tmp_path, max_steps=4, **settings)
    first.callbacks.append(StopsAfter(2))
    await first.train()
    await first.close()
    again = make_trainer(tmp_path, run=first.run, max_steps=4, **settings)
    await again.load_checkpoint()
    await again.train()
    await again.close()

    logged = in_the_log(again)
    assert set(logged["reward/mean"]) == {1, 2, 3, 4}
    assert set(logged["eval/reward"]) == {2, 4}
    scalars, texts = in_tensorboard(again.run.path)
    assert scalars == close_to(logged)
    assert "num_generations: 4" in texts["run/config"][0]
    assert [text.split(":")[0] for text in texts["run/ended"]] == ["stopped", "finished"]

    parts = in_wandb(again.run.path)
    assert len(parts) == 2
    whole: dict[str, dict[int, float]] = defaultdict(dict)
    for part, steps in zip(parts, ({1, 2}, {3, 4}), strict=True):
        assert set(history(part)["reward/mean"]) == steps
        for name, values in history(part).items():
            whole[name] |= values
    assert whole == close_to(logged)
    runs = [next(r.run for r in part if r.WhichOneof("record_type") == "run") for part in parts]
    assert {run.run_id for run in runs} == {(again.run.path / "wandb-id.txt").read_text().strip()}
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["training"]["num_generations"] == 4
    exits = [next(r.exit for r in part if r.WhichOneof("record_type") == "exit") for part in parts]
    assert [exit.exit_code for exit in exits] == [0, 0]

    values, told, ends = in_trackio(again.run.path)
    assert values == close_to(logged)
    assert told["training"]["num_generations"] == 4
    assert ends == [("stopped", "info"), ("finished", "info")]

    values, run = in_mlflow(again.run.path)
    assert values == close_to(logged)
    assert run.info.run_name == again.run.path.name
    assert run.data.params["training.num_generations"] == "4"
    assert run.info.status == "FINISHED"
    assert run.data.tags["ended"].startswith("finished")


class StopsAfter:
    """Asks for a stop once this step is done."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_begin(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(self, step: int, metrics: Any) -> None:
        if step == self.step:
            self.trainer.request_stop()


class Breaks:
    def on_step_end(self, step: int, metrics: Any) -> None:
        raise TypeError("a slip in user code")


async def test_steps_after_the_checkpoint_of_a_run_that_broke_are_hidden(tmp_path: Path) -> None:
    run = make_trainer(tmp_path, max_steps=3, save_steps=1, save_total_limit=9, report_to="tensorboard")
    await run.train()
    await run.close()
    again = make_trainer(tmp_path, run=run.run, max_steps=3, report_to="tensorboard")
    await again.load_checkpoint(run.run.checkpoints / "step-000001")
    await again.train()
    await again.close()
    scalars, _ = in_tensorboard(again.run.path)
    assert scalars == close_to(in_the_log(again))


async def test_a_failed_training_is_a_failed_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, report_to=TRACKERS)
    trainer.callbacks.append(Breaks())
    with pytest.raises(TypeError):
        await trainer.train()
    await trainer.close()
    _, texts = in_tensorboard(trainer.run.path)
    assert texts["run/ended"] == ["failed: a slip in user code"]
    (part,) = in_wandb(trainer.run.path)
    assert next(r.exit for r in part if r.WhichOneof("record_type") == "exit").exit_code == 1
    assert in_trackio(trainer.run.path)[2] == [("failed", "error")]
    assert in_mlflow(trainer.run.path)[1].info.status == "FAILED"


async def test_a_tracker_that_cannot_write_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path, report_to="tensorboard")
    await trainer.initialize()
    (trainer.run.path / "tensorboard").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        await trainer.train()
    await trainer.close()
    assert trainer.progress.state == "finished"
    told = [record.getMessage() for record in caplog.records if "TensorBoardTracker" in record.getMessage()]
    assert len(told) == 1
    assert "which goes on" in told[0]


def test_the_snippets_of_the_page_run(tmp_path: Path) -> None:
    own = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # this process's
    done = subprocess.run(
        [sys.executable, page_snippets.__file__, str(ROOT / "docs" / "trackers.md")],
        cwd=tmp_path,
        env={**own, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "gets nothing more" not in done.stdout + done.stderr, done.stderr[-3000:]
    assert len(list(tmp_path.glob("runs/*/tensorboard/events*"))) >= 2
    assert len(list(tmp_path.glob("runs/0002-*/wandb/offline-run-*/*.wandb"))) == 1
