"""Agent programs of their own processes: what they say is the conversation, and nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engines import make_engine
from programs import program
from repository_paths import ROOT
from tiny_models import tiny_model
from tiny_training import make_trainer, plain_logprobs
from warm_python import warm_python

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.environments.programs.external_program import ExternalProgram
from stateset_agents.evaluation.recorded import trajectory_of
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.components import make_environment
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.trajectory import Status

TASKS = [{"id": "t", "opening": "hi", "context": {"order": "K27"}}]

WITH_OPENAI = """
import json, sys
import openai

task = json.loads(sys.stdin.readline())
client = openai.OpenAI()
tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": task["opening"]}]
first = client.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
call = first.tool_calls[0]
result = {"role": "tool", "tool_call_id": call.id, "content": task["context"][call.function.name]}
messages += [first, result]
said = ""
for chunk in client.chat.completions.create(model="m", messages=messages, tools=tools, stream=True):
    said += chunk.choices[0].delta.content or ""
print("working")
print(json.dumps({"reward": 0.5, "success": "shipped" in said, "metadata": {"said": said}}))
"""


async def play(environment, replies, *, seed=0, num_generations=1, agent=None, **settings):
    """The conversations of its first training scenario."""
    agent = agent or MultiTurnAgent(backend=ScriptedBackend(replies))
    settings = {"episode_retries": 0, "turn_timeout": 60.0, **settings}
    async with agent:
        engine = make_engine(
            agent, environment, EnvironmentReward(), num_generations=num_generations, **settings
        )
        scenarios = environment.scenarios("train")[:1]
        (group,) = await engine.rollout(scenarios, seed=seed, step=0)
    return group.trajectories


def alive(pid: int) -> bool:
    """Is there such a process, other than as a zombie that its parent has not noticed yet?"""
    try:
        return not re.search(r"^State:\s+Z", Path(f"/proc/{pid}/status").read_text(), re.M)
    except (FileNotFoundError, ProcessLookupError):  # before it is opened, or while it is read
        return False


def gone(*pids: int) -> bool:
    """Do they end within moments?"""
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


async def test_a_program_with_openai_s_client_is_a_conversation_with_its_sampled_tokens(tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(WITH_OPENAI)
    tasks = [{"id": "t", "opening": "where is it?", "context": {"look": "shipped today"}}]
    environment = ExternalProgram([sys.executable, str(path)], tasks, verdict="stdout")
    call = '<tool_call>{"name": "look", "arguments": {"order": "K27"}}</tool_call>'
    agent = MultiTurnAgent(backend=ScriptedBackend([call, "It is shipped."]))
    (one,) = await play(environment, None, agent=agent)
    assert one.error is None
    assert (one.status, one.success, one.reward) == (Status.TERMINATED, True, 0.5)
    assert one.metadata == {"said": "It is shipped."}
    assert [message.role for message in one.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert one.turns[0].feedback == (
        Message(role="tool", content="shipped today", tool_call_id="call_0_0", name="look"),
    )
    tokenizer, template = agent.backend.tokenizer, agent.template
    said = [[*tokenizer.encode(text), *tokenizer.eos_ids[:1]] for text in (call, "It is shipped.")]
    assert [list(turn.completion.token_ids) for turn in one.turns] == said
    first = template.prompt(
        one.opening, [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    )
    delta = template.delta(one.turns[0].feedback, end=said[0][-1])
    assert one.token_ids == [*first, *said[0], *delta, *said[1]]
    assert sum(one.action_mask) == len(said[0]) + len(said[1])


THINKING = """
import json, sys
import openai

task = json.loads(sys.stdin.readline())
client = openai.OpenAI()
messages = [{"role": "user", "content": task["opening"]}]
first = client.chat.completions.create(model="m", messages=messages).choices[0].message
messages += [first, {"role": "user", "content": "and K28?"}]
told = {"content": "", "reasoning": ""}
for chunk in client.chat.completions.create(model="m", messages=messages, stream=True):
    for name in told:
        told[name] += getattr(chunk.choices[0].delta, name, None) or ""
print(json.dumps({"reward": 1.0, "metadata": {"first": [first.content, first.reasoning], "second": told}}))
"""


@pytest.mark.parametrize("turn_timeout", [60.0, None])
async def test_a_program_gets_thoughts_apart_from_words_as_serve_s_clients_do(tmp_path, turn_timeout):
    path = tmp_path / "agent.py"
    path.write_text(THINKING)
    environment = ExternalProgram([sys.executable, str(path)], TASKS, verdict="stdout")
    replies = ["<think>Shelf?</think>It is here.", "<think>Door?</think>There."]
    (one,) = await play(environment, replies, turn_timeout=turn_timeout)
    assert one.error is None
    assert one.metadata == {
        "first": ["It is here.", "Shelf?"],
        "second": {"content": "There.", "reasoning": "Door?"},
    }
    assert [turn.completion.message.reasoning for turn in one.turns] == ["Shelf?", "Door?"]
    assert one.turns[1].follows == -1  # goes on in its row
    assert len(one.rows) == 1


async def test_members_run_side_by_side_and_share_their_seed(tmp_path):
    command = program(
        tmp_path, 'end(reward=1.0, metadata={"seed": task["seed"], "heard": say(task["opening"])})'
    )
    environment = ExternalProgram(command, TASKS, verdict="stdout")
    members = await play(environment, lambda request: f"member {request.session.member}", num_generations=4)
    assert [member.metadata["heard"] for member in members] == [f"member {n}" for n in range(4)]
    assert {member.metadata["seed"] for member in members} == {members[0].seed}


@pytest.mark.parametrize(
    ("verdict", "body", "reward", "success"),
    [
        ("stdout", "end(reward=-0.5)", -0.5, None),
        ("stdout", "end(success=False)", None, False),
        ({0: True, 3: False}, "end(0)", 1.0, True),
        ({0: True, 3: False}, "end(3)", 0.0, False),
        (None, "print('all done')", None, None),
    ],
)
async def test_the_program_s_end_is_the_verdict(tmp_path, verdict, body, reward, success):
    environment = ExternalProgram(program(tmp_path, f"say('hi')\n{body}"), TASKS, verdict=verdict)
    (one,) = await play(environment, ["ok"])
    assert (one.status, one.reward, one.success) == (Status.TERMINATED, reward, success)
    if verdict is None:
        assert one.metadata == {"stdout": "all done"}


@pytest.mark.parametrize(
    ("verdict", "body", "words"),
    [
        (
            "stdout",
            "say('hi'); raise RuntimeError('no database')",
            "exited with code 1: RuntimeError: no data",
        ),
        ({0: True, 3: False}, "say('hi'); sys.exit(1)", "exited with code 1: it wrote nothing to stderr"),
        ("stdout", "say('hi'); os.kill(os.getpid(), 9)", "ended by signal 9"),
        ("stdout", "say('hi'); print('fine')", "as its last line, got 'fine'"),
        ("stdout", "say('hi'); end(reward='much')", "as its last line, got"),
        ("stdout", "say('hi'); end(score=1)", "as its last line, got"),
        ("stdout", "say('hi'); end(reward=float('nan'))", "as its last line, got"),
        ("stdout", "raise SystemExit('no task')", "code 1 before it asked anything: no task"),
    ],
)
async def test_a_program_that_breaks_fails_its_conversation(tmp_path, verdict, body, words):
    environment = ExternalProgram(program(tmp_path, body), TASKS, verdict=verdict)
    (one,) = await play(environment, ["ok"])
    assert one.status is Status.FAILED
    assert one.reward is None
    assert words in one.error


async def test_a_program_that_breaks_is_run_again(tmp_path):
    body = f"""
    say("hi")
    if not os.path.exists({str(tmp_path / "been")!r}):
        open({str(tmp_path / "been")!r}, "w").close()
        sys.exit(1)
    end(reward=1.0)
    """
    environment = ExternalProgram(program(tmp_path, body), TASKS, verdict="stdout")
    (one,) = await play(environment, lambda request: "ok", episode_retries=1)
    assert (one.status, one.reward) == (Status.TERMINATED, 1.0)


@pytest.mark.long
async def test_one_that_hangs_is_ended_with_all_it_started(tmp_path):
    pids = tmp_path / "pids"
    body = f"""
    child = subprocess.Popen(["sleep", "1000"])
    open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
    say("hi")
    time.sleep(1000)
    """
    environment = ExternalProgram(program(tmp_path, body), TASKS)
    (one,) = await play(environment, ["ok"], turn_timeout=5.0)
    assert one.status is Status.FAILED
    assert "EnvironmentTimeout" in one.error
    assert gone(*map(int, pids.read_text().split()))


async def test_a_cancelled_rollout_leaves_no_process_and_no_port(tmp_path):
    started = tmp_path / "started"
    started.mkdir()
    body = f"""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    open({str(started)!r} + f"/{{os.getpid()}}", "w").close()
    say("hi")
    """
    environment = ExternalProgram(program(tmp_path, body), TASKS)
    never = asyncio.Event()

    async def silent(request):
        await never.wait()

    work = asyncio.create_task(play(environment, silent, num_generations=3))
    async with asyncio.timeout(60):
        while len(list(started.iterdir())) < 3:  # noqa: ASYNC110  # other processes tell
            await asyncio.sleep(0.02)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert gone(*(int(path.name) for path in started.iterdir()))
    async with asyncio.timeout(20):  # who was cancelled is waited for a second, then left to its cleaning
        while any(server.is_listening for server in environment._servers.values()):  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.02)


async def test_what_a_program_left_in_the_background_ends_with_it(tmp_path):
    pid = tmp_path / "pid"
    body = f"""
    say("hi")
    open({str(pid)!r}, "w").write(str(subprocess.Popen(["sleep", "1000"]).pid))
    end(reward=1.0)
    """
    (one,) = await play(ExternalProgram(program(tmp_path, body), TASKS, verdict="stdout"), ["ok"])
    assert one.reward == 1.0
    assert gone(int(pid.read_text()))


@pytest.mark.parametrize(
    ("body", "reward"),
    [
        ("end(reward=0.25, metadata={'told': heard[-1]})", 0.25),
        ("raise RuntimeError(heard[-1])", 0.0),
        ("sys.exit(0)", 0.0),
    ],
    ids=["gives a verdict", "breaks", "says nothing"],
)
async def test_a_conversation_that_is_cut_is_scored(tmp_path, body, reward):
    command = program(tmp_path, f"heard = [say(str(n)) for n in range(3)]\n{body}")
    environment = ExternalProgram(command, TASKS, verdict="stdout", max_turns=2)
    (one,) = await play(environment, lambda request: "ok")
    assert (one.status, one.reward, len(one.turns)) == (Status.TRUNCATED, reward, 2)
    if reward:
        assert one.metadata["told"] == "max_turns"


async def test_a_full_context_is_told_to_the_program(tmp_path):
    command = program(
        tmp_path, "said = [say('x' * 40) for _ in range(4)]\nend(reward=0.0, metadata={'said': said})"
    )
    environment = ExternalProgram(command, TASKS, verdict="stdout")
    agent = MultiTurnAgent(backend=ScriptedBackend(lambda request: "ok", context_length=150))
    (one,) = await play(environment, None, agent=agent)
    assert one.status is Status.TRUNCATED
    assert one.metadata["context_overflow"] is True
    assert one.metadata["said"] == ["ok", "ok", "context_length_exceeded", "context_length_exceeded"]


@pytest.mark.parametrize(
    ("end", "reward"),
    [
        ("print('{\"reward\": 0.25}', flush=True); os._exit(0)", 0.25),
        ("os._exit(0)", None),
        ("os._exit(7)", None),
    ],
    ids=["gives a verdict", "says nothing", "breaks"],
)
async def test_one_that_ends_while_it_still_asks_was_not_cut(tmp_path, end, reward):
    body = f"""
    import threading
    heard = []
    for number in range(3):
        threading.Thread(target=lambda: heard.append(say("hi")), daemon=True).start()
    while not heard:
        time.sleep(0.01)
    {end}
    """
    agent = MultiTurnAgent(backend=ScriptedBackend(lambda request: "ok", delay=lambda r: 0.5 * (r.turn > 0)))
    (one,) = await play(ExternalProgram(program(tmp_path, body), TASKS, verdict="stdout"), None, agent=agent)
    assert one.reward == reward
    assert one.status is (Status.FAILED if reward is None else Status.TERMINATED)


async def test_one_that_goes_on_after_the_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("stateset_agents.environments.programs.program_environment._LAST_SECONDS", 0.3)
    command = program(tmp_path, "say('hi'); say('more'); time.sleep(1000)")
    (one,) = await play(ExternalProgram(command, TASKS, verdict="stdout", max_turns=1), ["ok"])
    assert (one.status, one.success, one.reward) == (Status.TRUNCATED, False, 0.0)


async def test_a_request_that_is_refused_says_why_in_the_failure(tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(
        "import openai\n"
        'hi = [{"role": "user", "content": "hi"}]\n'
        'openai.OpenAI().chat.completions.create(model="m", logit_bias={"5": 1}, messages=hi)\n'
    )
    (one,) = await play(ExternalProgram([sys.executable, str(path)], TASKS), ["ok"])
    assert one.status is Status.FAILED
    assert "logit_bias is not served here: leave it out" in one.error


RESTLESS = """
import asyncio, json, sys
import openai

async def main():
    task = json.loads(sys.stdin.readline())
    client = openai.AsyncOpenAI()
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

    async def ask(messages, **fields):
        answer = await client.chat.completions.create(model="m", messages=messages, **fields)
        return {"role": "assistant", "content": answer.choices[0].message.content or ""}

    system, user = {"role": "system", "content": "be brief"}, {"role": "user", "content": task["opening"]}
    messages = [system, user]
    for number in range(2):
        messages += [await ask(messages, temperature=0.3), {"role": "user", "content": f"go on {number}"}]
    again = await ask(messages[:2])  # another answer to the same
    edited = [system, {"role": "user", "content": "in short: " + again["content"]}]
    edited += [await ask(edited, max_tokens=2), user]  # what it has said, summed up
    both = await asyncio.gather(ask(edited), ask([{"role": "user", "content": "someone else"}]))
    await ask([*edited, both[0], user], tools=tools)  # with a tool, from here on
    print(json.dumps({"reward": len(both[0]["content"]) % 5 / 5}))

asyncio.run(main())
"""


async def test_a_program_that_edits_asks_twice_at_once_and_changes_tools_trains(tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(RESTLESS)
    environment = ExternalProgram([sys.executable, str(path)], TASKS, verdict="stdout")
    trainer = make_trainer(
        tmp_path,
        environment=environment,
        reward=EnvironmentReward(),
        max_steps=2,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        num_generations=2,
        use_reference_model=False,
    )
    async with trainer:
        await trainer.train()
    log = RunLog(trainer.run)
    rollouts = list(log.rollouts())
    assert len(rollouts) == 4
    for one in rollouts:
        assert (one.status, one.error) == ("terminated", None)
        talk = trajectory_of(one)
        assert [talk.follows(index) for index in (0, 1, 2, 3, 6)] == [None, 0, None, None, None]
        assert {talk.follows(4), talk.follows(5)} == {None, 3}  # at the same time, in either order
        assert len(talk.turns[3].completion.token_ids) <= 2
        if one.step == 1:
            model = tiny_model("llama")  # as the first step had it
            for row in talk.rows:
                stored = [p for p, bit in zip(row.logprobs, row.action_mask, strict=True) if bit]
                assert stored == pytest.approx(plain_logprobs(model, row).tolist(), abs=1e-5)
        assert sum(sum(row.action_mask) for row in talk.rows) == talk.num_agent_tokens


SUB_AGENTS = """
asked = {}
def ask(model, text):
    messages[:] = []
    asked[model] = say(text, model=model)
ask("guard", task["opening"])
ask("desk", task["opening"] + " please")
end(reward=float(len(asked["desk"]) % 3))
"""


@pytest.mark.parametrize("untrained", [(), ("guard",), ("guard", "desk")])
async def test_a_sub_agent_by_its_model_is_answered_and_not_trained(tmp_path, untrained):
    environment = ExternalProgram(
        program(tmp_path, SUB_AGENTS), TASKS, verdict="stdout", untrained=list(untrained)
    )
    trainer = make_trainer(
        tmp_path,
        environment=environment,
        reward=EnvironmentReward(),
        max_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        num_generations=4,
        use_reference_model=False,
    )
    async with trainer:
        model = (await trainer.train()).backend.model
    before = tiny_model("llama").state_dict()
    changed = any(bool((before[name] != weight).any()) for name, weight in model.state_dict().items())
    assert changed is (len(untrained) < 2)
    log = RunLog(trainer.run)
    talks = [trajectory_of(one) for one in log.rollouts()]
    said = {"guard": 0, "desk": 0}
    for talk in talks:
        for name, turn in zip(said, talk.turns, strict=True):
            said[name] += len(turn.completion.token_ids)
    (line,) = log.metrics()
    assert line.values.get("tokens/forced", 0) == sum(said[name] for name in untrained)


async def test_branches_are_refused(tmp_path):
    environment = ExternalProgram(program(tmp_path, "say('hi'); say('more')"), TASKS)
    with pytest.raises(ConfigurationError, match="cannot be forked"):
        await play(environment, lambda request: "ok", num_branches=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"command": "python agent.py"}, 'write ["python", "agent.py"]'),
        ({"command": []}, "command must be a list"),
        ({"command": ["no-such-program"]}, "no program that can be run"),
        ({"max_turns": 0}, "max_turns"),
        ({"verdict": "exit"}, "verdict must be"),
        ({"verdict": {0: 1}}, "verdict must be"),
        ({"ignore": "temperature"}, "write ['temperature']"),
        ({"untrained": "guard"}, "write ['guard']"),
        ({"cwd": "nowhere"}, "cwd 'nowhere' is no folder"),
        ({"scenarios": []}, "scenarios is empty"),
    ],
)
def test_what_cannot_work_is_refused_at_once(arguments, words):
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        ExternalProgram(**{"command": [sys.executable], "scenarios": TASKS, **arguments})


@pytest.mark.long
async def test_a_trainer_trains_on_it_as_on_any_other_and_alike_each_time(tmp_path):
    command = program(tmp_path, "say(task['opening']); say('go on'); end(reward=0.0)")
    tasks = [{"id": f"t{n}", "opening": word} for n, word in enumerate(("hi", "hello"))]
    spec = {"name": "external_program", "command": command, "scenarios": tasks, "local": True}

    async def run(folder):
        trainer = make_trainer(
            folder, environment=make_environment(spec), max_steps=2, num_generations=2, save_steps=0
        )
        await trainer.train()
        await trainer.close()
        log = RunLog(trainer.run)
        return trainer, [rollout.token_ids for rollout in log.rollouts()]

    trainer, rows = await run(tmp_path / "one")
    assert json.loads(trainer.run.summary.read_text())["deterministic"] is True
    assert len(rows) == 8
    assert all(len(row) > 20 for row in rows)
    assert rows == (await run(tmp_path / "other"))[1]


@pytest.mark.long
def test_a_program_gets_better_by_training(tmp_path):
    """examples/external_agent, two thirds of what docs/evidence/trained-programs.md tells."""
    folder = ROOT / "examples" / "external_agent"
    for name in ("agent.py", "make_tasks.py", "train.yaml"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    beside = str(Path(sys.executable).parent)
    command = json.dumps([*warm_python(), "agent.py"])  # else openai's import is most of the time
    shorter = "--max-steps 16 --set evaluation.episodes=40"
    train = (
        f"stateset-agents train train.yaml {shorter} --set {shlex.quote(f'environment.command={command}')}"
    )
    subprocess.run(
        ["bash", "-euc", f"python make_tasks.py && {train}"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        check=True,
    )
    summary = json.loads((tmp_path / "runs" / "latest" / "summary.json").read_text())
    assert summary["after"]["success"] > summary["before"]["success"] + 0.2
