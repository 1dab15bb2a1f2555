"""Which conversations a report shows, and how small they are packed."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from report_runs import conversation, finished_run, log_groups, log_stage, log_step, page_data
from row_talks import TOKENIZER, thinking_talk

from stateset_agents.reporting.conversations import Conversations, pack
from stateset_agents.reporting.report import write_report
from stateset_agents.tracking.jsonl import read_lines
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.tracker import JsonlTracker, rollout_record
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.trajectory import TrajectoryGroup


def read(folder: RunFolder, limit: int | None = None) -> Conversations:
    conversations = Conversations(folder, limit)
    conversations.read()
    return conversations


def records(folder: RunFolder) -> list[dict[str, object]]:
    return [record for _, record in read_lines(folder.rollouts)][1:]


def test_packing_keeps_every_number(tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=2)
    written, packed = records(folder), read(folder).select()
    assert len(packed) == len(written) == 2 * 8 + 2 * 10
    for line, small in zip(written, packed, strict=True):
        mask = [bit for bit, count in small["mask"] for _ in range(count)]
        sampled = iter(small["logprobs"])
        assert mask == line["mask"]
        assert [next(sampled) if bit else 0.0 for bit in mask] == line["logprobs"]
        assert [value for value, count in small["versions"] for _ in range(count)] == [
            version for version, bit in zip(line["versions"], mask, strict=True) if bit
        ]
        if line["advantages"] is None:
            assert small["advantages"] is None
        else:
            assert [value for value, count in small["advantages"] for _ in range(count)] == line["advantages"]
        for name in ("reward", "breakdown", "changes", "messages", "turns", "token_ids", "branch_of"):
            assert small[name] == line[name]


def test_equal_values_become_runs() -> None:
    record = {"step": 1, "stage": "train", "group": "g"}
    small = pack({**record, **rollout_record(conversation(1, success=True), [0.5, 0.5, 0.5])}, {})
    assert small["mask"] == [[0, 2], [1, 2], [0, 1], [1, 1]]
    assert small["advantages"] == [[0.5, 3]]
    assert small["logprobs"] == [-0.5, -0.1, -0.2]


def test_only_conversations_of_several_rows_tell_of_them(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with JsonlTracker(folder, TOKENIZER.piece) as tracker:
        members = (conversation(1, success=True), thinking_talk().trajectory(member=1))
        tracker.log_rollouts(1, [TrajectoryGroup(key="1/0", trajectories=members)])
    write_report(folder.path)
    plain, several = page_data(folder)["conversations"]
    assert "rows" not in plain
    assert several["rows"]["begins"] == {"2": {"messages": [], "thoughts": [0, 1]}}
    assert several["turns"][2]["follows"] is None
    assert several["messages"][4]["reasoning"] == "The order was sent.\nSo I tell where it is."


def write_groups(root: Path, wins: dict[int, list[int]], **options: str) -> RunFolder:
    """Steps of groups of four, of which so many succeed."""
    folder = RunFolder.create(root)
    with JsonlTracker(folder) as tracker:
        for step, successes in wins.items():
            log_groups(tracker, step, successes, **options)
    return folder


def test_groups_that_failed_come_first_and_whole(tmp_path: Path) -> None:
    folder = write_groups(tmp_path, {1: [4, 4], 2: [4, 4], 3: [4, 0, 2, 4], 4: [4, 4], 5: [4, 4]})
    chosen = [record["group"] for record in read(folder, limit=8).select()]
    assert chosen == ["3/1"] * 4 + ["3/2"] * 4
    chosen = [record["group"] for record in read(folder, limit=16).select()]
    assert list(dict.fromkeys(chosen)) == ["1/0", "3/1", "3/2", "5/1"]  # then the first and the last


def test_each_step_s_worst_group_comes_before_the_second_of_any(tmp_path: Path) -> None:
    folder = write_groups(tmp_path, {1: [3, 0, 2], 2: [4, 3], 3: [2, 1, 3]})
    chosen = [record["group"] for record in read(folder, limit=12).select()]
    assert list(dict.fromkeys(chosen)) == ["1/1", "2/1", "3/1"]
    chosen = [record["group"] for record in read(folder, limit=20).select()]
    assert list(dict.fromkeys(chosen)) == ["1/1", "1/2", "2/1", "3/0", "3/1"]


def test_a_group_that_is_too_large_does_not_keep_others_out(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with JsonlTracker(folder) as tracker:
        log_groups(tracker, 1, [0], members=9)
        log_groups(tracker, 2, [3])
    assert [record["group"] for record in read(folder, limit=8).select()] == ["2/0"] * 4


def test_counts_are_of_all_conversations_of_the_run(tmp_path: Path) -> None:
    conversations = read(write_groups(tmp_path, {1: [4, 1]}), limit=1)
    assert conversations.select() == []
    assert conversations.counts == [
        ("train", 1, "order_status", True, 4),  # scenario test-10
        ("train", 1, "refund", True, 1),
        ("train", 1, "refund", False, 3),
    ]


def test_a_page_takes_what_fits_its_compressed_bytes(tmp_path: Path) -> None:
    folder = write_groups(tmp_path, {step: [2, 4] for step in range(1, 31)})
    conversations = read(folder)
    assert len(conversations.select(page_bytes=1e6)) == 240
    few = conversations.select(page_bytes=3_000)
    assert {record["group"].partition("/")[2] for record in few} == {"0"}  # those with failures
    assert 8 <= len(few) < 120


def test_the_groups_of_some_steps_are_there_for_a_live_page(tmp_path: Path) -> None:
    folder = write_groups(tmp_path, {1: [4], 2: [4, 4], 3: [0]})
    conversations = read(folder, limit=8)
    assert [record["group"] for record in conversations.select()] == ["1/0"] * 4 + ["3/0"] * 4
    found = conversations.of_steps("train", (2, 2), {})
    assert [record["group"] for record in found] == ["2/0"] * 4 + ["2/1"] * 4
    found = conversations.of_steps("", (2, 3), {})  # 3/0 is in the page
    assert [record["group"] for record in found] == ["2/0"] * 4 + ["2/1"] * 4
    assert read(folder).of_steps("after", (2, 2), {}) == []


def test_groups_are_taken_whole_and_evenly(tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=50)  # 16 held-out conversations, 100 groups of 5
    chosen = read(folder, limit=66).select()
    training = [record for record in chosen if record["stage"] == "train"]
    groups = list(dict.fromkeys(record["group"] for record in training))
    assert len(chosen) - len(training) == 16  # less than half: the rest is the training's
    assert len(training) == 5 * len(groups) == 50
    assert (groups[0], groups[-1]) == ("1/0", "50/0")
    steps = [int(group.partition("/")[0]) for group in groups]
    assert max(later - earlier for earlier, later in pairwise(steps)) <= 8


def test_held_out_scenarios_are_taken_with_all_their_conversations(tmp_path: Path) -> None:
    conversations = read(finished_run(tmp_path, steps=30), limit=9)
    assert conversations.total == 16 + 300
    chosen = [(record["stage"], record["scenario"]) for record in conversations.select()]
    assert chosen == [
        *(("before", f"test-{number}") for number in (1, 7)),  # failed once; 0 never did
        *5 * [("train", "test-10")],
        *(("after", f"test-{number}") for number in (1, 7)),
    ]


def test_a_live_page_fetches_no_more_than_its_bytes_of_long_conversations(tmp_path: Path) -> None:
    folder = write_groups(tmp_path, {step: [2] for step in range(1, 21)}, reply="word " * 50_000)  # 250 kB
    chosen = read(folder).select()
    assert len(chosen) == 44  # of 80; twelve megabytes
    assert {chosen[0]["step"], chosen[-1]["step"]} == {1, 20}


def test_gained_and_lost_held_out_scenarios_are_counted(tmp_path: Path) -> None:
    moved = read(finished_run(tmp_path, steps=1), limit=1).transitions()
    assert (moved.n, moved.scenarios, moved.gained, moved.lost) == (8, 8, 6, 1)


def test_several_tries_are_no_more_scenarios(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with JsonlTracker(folder) as tracker:
        for member in range(2):
            log_stage(tracker, 0, "before", set(), member=member)
            log_stage(tracker, 1, "after", {1, 2}, member=member)
    moved = read(folder).transitions()
    assert (moved.n, moved.scenarios, moved.gained) == (16, 8, 4)


def test_new_lines_are_read_and_a_truncated_file_again(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    conversations = read(folder)
    assert (conversations.total, conversations.select()) == (0, [])
    with JsonlTracker(folder) as tracker:
        log_stage(tracker, 0, "before", wins={0})
        conversations.read()
        log_step(tracker, 1)
        log_step(tracker, 2)
    with folder.rollouts.open("ab") as stream:
        stream.write(b'{"step": 3, "stage": "tr')  # a line under way
    conversations.read()
    assert conversations.total == 8 + 20
    assert [record["step"] for record in conversations.select()[-10:]] == [2] * 10
    folder.truncate_after(1)
    conversations.read()
    assert conversations.total == 8 + 10
    assert conversations.select() == read(folder).select()


def test_a_line_with_another_order_of_fields_is_read_too(tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=2)
    before = read(folder).select()
    header, *lines = folder.rollouts.read_text().splitlines()
    turned = [json.dumps(dict(reversed(json.loads(line).items()))) for line in lines]
    folder.rollouts.write_text("\n".join([header, *turned]) + "\n")
    assert read(folder).select() == before


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=1)
    with folder.rollouts.open("a") as stream:
        stream.write("oops\n")
    with pytest.raises(ConfigurationError, match=r"rollouts\.jsonl, byte \d+: not JSON \(.*\): 'oops"):
        read(folder)


def test_a_group_key_with_quotes_is_one_group(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with JsonlTracker(folder) as tracker:
        group = TrajectoryGroup(key='1/say "hi\\"', trajectories=(conversation(1, success=True),))
        tracker.log_rollouts(1, [group, group])
    assert len(read(folder, limit=2).select()) == 2
    assert read(folder, limit=1).select() == []
