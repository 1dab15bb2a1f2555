"""`stateset-agents chat`, as a process of its own: through a pipe, and at a terminal."""

from __future__ import annotations

import json
import logging
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tiny_models import tiny_model, tiny_tokenizer
from transformers.utils import logging as transformers_logging
from warm_python import warm_python

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.cli.main import main
from stateset_agents.environments.retail_desk import RetailDesk

OPENING = RetailDesk().scenarios("test")[0].opening
TOOLS = """
from stateset_agents.types.scenario import Scenario
from stateset_agents.core.environment import ConversationEnvironment

class Shop(ConversationEnvironment):
    def __init__(self, max_turns):
        scenarios = [{"id": name, "opening": "not said", "split": "test"} for name in ("first", "second")]
        super().__init__(scenarios, tools=[look_up], system_prompt="Be kind.", max_turns=max_turns)

def look_up(order: str) -> str:
    '''Where an order is.'''
    return f"{order} is in Oslo"

def of_scenario(order: str, scenario: Scenario) -> str:
    return "Oslo"

not_a_tool = 5

def untyped(order):
    return order
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model like GPT-2, without a chat template, and a module with tools."""
    folder = tmp_path_factory.mktemp("chat")
    tiny_model("gpt2").save_pretrained(folder / "model")
    tiny_tokenizer(bos=False).hf.save_pretrained(folder / "model")
    (folder / "my_tools.py").write_text(TOOLS)
    return folder


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"}


class Said(NamedTuple):
    code: int
    out: str
    errors: str


@pytest.fixture
def chat(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """chat(lines, "--model", ...): the command in this process, with a file for its input."""
    logger = logging.getLogger("stateset_agents")
    before = logger.handlers[:], logger.propagate, logger.level
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    transformers_logging.disable_progress_bar()

    def run(lines: str | bytes, *arguments: str) -> Said:
        (folder / "lines").write_bytes(lines if isinstance(lines, bytes) else lines.encode())
        with (folder / "lines").open(encoding="utf-8") as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            code = main(["chat", *arguments])
        return Said(code, *capsys.readouterr())

    yield run
    transformers_logging.enable_progress_bar()
    logger.handlers[:], logger.propagate = before[0], before[1]
    logger.setLevel(before[2])


def test_a_pipe_gets_the_words_alone_and_the_conversation_is_saved(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *warm_python(),
            "-m",
            "stateset_agents.cli.main",
            "chat",
            "--temperature",
            "0",
            "--save",
            "all.jsonl",
        ],
        input=f"{OPENING}\n\nthanks\n/save one.jsonl\n/reset\n{OPENING}\n",
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0
    first = RetailDesk().scenarios("test")[0]
    assert done.stderr == f"you play {first.id}: {first.opening} (--scenario ID for another)\n"
    output = done.stdout.splitlines()
    assert len(output) >= 3
    assert "you>" not in done.stdout
    [conversation] = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    conversations = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [message["role"] for message in conversation["messages"][:3]] == ["system", "user", "assistant"]
    assert conversation["messages"][1]["content"] == OPENING
    assert conversations[0] == conversation  # the first conversation, then the one after /reset
    assert len(conversations) == 2
    assert (
        conversations[1]["messages"] == conversation["messages"][: len(conversations[1]["messages"])]
    )  # greedy: the same again
    assert output[0].strip() in conversation["messages"][2]["content"] or conversation["messages"][2].get(
        "tool_calls"
    )


def test_a_saved_conversation_is_loaded_and_gone_on_with(chat: Any, folder: Path) -> None:
    settings = ["--model=./model", "--set=agent.max_new_tokens=9"]
    assert chat("hi\n", *settings, "--system=Be brief.", "--save=talk.jsonl").code == 0
    assert chat("and you?\n", *settings, "--load=talk.jsonl", "--save=talk.jsonl").code == 0
    first, second = [
        json.loads(line)["messages"] for line in (folder / "talk.jsonl").read_text().splitlines()
    ]
    assert [message["role"] for message in first] == ["system", "user", "assistant"]
    assert second[:3] == first
    assert second[3] == {"role": "user", "content": "and you?"}


def test_tools_are_offered_called_and_shown(chat: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = ['<tool_call>{"name": "look_up", "arguments": {"order": "K27"}}</tool_call>', "In Oslo\x1b[2J."]
    backend = ScriptedBackend(replies)

    async def load_backend(*_: Any, **__: Any) -> ScriptedBackend:
        return backend

    monkeypatch.setattr("stateset_agents.backends.loading.load_backend", load_backend)
    (folder / "facts.json").write_text('{"signed in": "Ann"}')
    output = chat(
        "where is K27?\n", "--tools", "my_tools:look_up", "--context", "facts.json", "--save=t.jsonl"
    )
    assert output.out == '  look_up(order="K27")\n  -> K27 is in Oslo\nIn Oslo\\x1b[2J.\n'
    assert backend.requests[0].text.startswith("tools: ")
    assert "system: signed in: Ann\n" in backend.requests[0].text
    spoken = json.loads((folder / "t.jsonl").read_text().splitlines()[-1])["messages"]
    assert [message["role"] for message in spoken] == ["system", "user", "assistant", "tool", "assistant"]


def test_a_person_plays_the_user_of_a_file_s_environment(
    chat: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = '<tool_call>{"name": "look_up", "arguments": {"order": "K1"}}</tool_call>'
    backend = ScriptedBackend([call, "In Oslo."])

    async def load_backend(*_: Any, **__: Any) -> ScriptedBackend:
        return backend

    monkeypatch.setattr("stateset_agents.backends.loading.load_backend", load_backend)
    (folder / "run.yaml").write_text(
        "agent: {model_name: mine, persona: Mia}\nenvironment:\n  name: my_tools:Shop\n  max_turns: 50\n"
    )
    output = chat("hello?\n", "--environment", "run.yaml", "--scenario", "second")
    shown = '  look_up(order="K1")\n  -> K1 is in Oslo\nIn Oslo.\n'
    assert output == (0, shown, "you play second: not said (--scenario ID for another)\n")
    assert "system: You are Mia.\n  Be kind.\nuser: hello?" in backend.requests[0].text
    assert "not said" not in backend.requests[0].text  # the scenario's own words


def test_a_run_comes_with_its_agent_settings_and_its_environment(
    chat: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder / "runs" / "0001-shop"
    (run / "checkpoints" / "step-000001" / "model").mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("")
    (run / "config.yaml").write_text(
        "schema_version: 1\nagent: {model_name: base, persona: Mia, max_new_tokens: 7}\n"
        "environment: {name: 'my_tools:Shop', max_turns: 50}\n"
    )
    backend = ScriptedBackend(lambda request: "ok")

    async def load_backend(*_: Any, **__: Any) -> ScriptedBackend:
        return backend

    monkeypatch.setattr("stateset_agents.backends.loading.load_backend", load_backend)
    plays = "you play first: not said (--scenario ID for another)\n"
    for model in ("runs/0001-shop", "runs/0001-shop/checkpoints/step-000001"):
        assert chat("hello?\n", "--model", model) == (0, "ok\n", plays)
    assert chat("hello?\n", "--model=runs/0001-shop", "--set=agent.persona=Ann").code == 0
    assert chat("hello?\n", "--model=runs/0001-shop", "--tools", "my_tools:look_up") == (0, "ok\n", "")
    assert chat("hello?\n", "--model=hf:runs/0001-shop") == (0, "ok\n", "")
    initial, checkpoint, changed, tools, weights = backend.requests
    for request in (initial, checkpoint):
        assert "system: You are Mia.\n  Be kind.\nuser: hello?" in request.text
        assert request.params.max_new_tokens == 7
    assert "You are Ann." in changed.text
    assert tools.params.max_new_tokens == 7
    assert "You are Mia." in tools.text
    assert "Be kind." not in tools.text
    assert "Mia" not in weights.text


def test_a_base_model_chats_in_plain_lines(chat: Any) -> None:
    arguments = ["--model=./model", "--seed=3", "--set=agent.max_new_tokens=30"]
    first, again = chat("hi\n", *arguments), chat("hi\n", *arguments)
    assert first.code == 0
    assert "using plain" in first.errors
    assert first.out.strip()
    assert first.out == again.out
    stop = next(letter for letter in first.out if letter.isascii() and letter.isprintable())
    stopped = chat("hi\n", *arguments, "--set", f"agent.stop={json.dumps([stop])}")
    assert stopped.code == 0
    assert stopped.out.rstrip("\n") == first.out.partition(stop)[0].strip() or "(no answer" in stopped.out


def test_bytes_that_are_no_text_do_not_end_the_chat(chat: Any, folder: Path) -> None:
    line = b"\xff\xfe \xf0\x9f\x91\x8d \xed\xa0\x80 <|end|>\x00\n"
    assert chat(line, "--model=./model", "--set=agent.max_new_tokens=5", "--save=bytes.jsonl").code == 0
    output = json.loads((folder / "bytes.jsonl").read_text(encoding="utf-8"))["messages"][0]["content"]
    assert "\U0001f44d" in output
    assert "\ufffd" in output
    assert "<|end|>" in output


@pytest.mark.parametrize(
    ("lines", "arguments", "message"),
    [
        ("", ["--model", "./missing"], "model folder './missing' does not exist"),
        ("", ["--temperature", "-1", "--model", "x"], "temperature: input should be greater than or equal"),
        ("", ["--environment", "retail_dsk"], "got 'retail_dsk' (did you mean 'retail_desk'?)"),
        ("", ["--environment", "no.yaml"], "cannot read no.yaml: No such file or directory"),
        (
            "",
            ["--scenario", "x", "--model", "y"],
            "--scenario is one of an environment's: give",
        ),
        ("", ["--environment", "retail_desk", "--scenario", "desk-test-0-cancel-O"], "did you mean 'desk-"),
        (
            "",
            ["--environment", "retail_desk", "--scenario", "?"],
            "no scenario '?'; there is, for example, desk-",
        ),
        ("", ["--tools", "my_tools"], "--tools takes module:function with typed parameters, got 'my_tools'"),
        ("", ["--tools", "my_tools:lok_up"], "has no 'lok_up' (did you mean 'look_up'?)"),
        ("", ["--tools", "my_tols:look_up"], "cannot be imported: No module named 'my_tols'"),
        ("", ["--tools", "my_tools:not_a_tool"], "--tools takes module:function with typed parameters"),
        ("", ["--tools", "my_tools:of_scenario"], "reads the scenario, and --tools has none: give --env"),
        ("", ["--tools", "my_tools:untyped"], "tool untyped: parameter 'order' needs a type"),
        (
            "",
            ["--tools", "my_tools:look_up", "--environment", "retail_desk"],
            "has its own tools",
        ),
        ("", ["--context", "no.txt"], "cannot read --context no.txt (No such file or directory)"),
        ("", ["--context", "list.json"], "--context list.json must hold a JSON object, got list"),
        ("", ["--context", "bad.json"], "--context bad.json is not JSON"),
        ("", ["--load", "no.jsonl"], "cannot read conversations from 'no.jsonl' (No such file or directory)"),
        ("", ["--load", "no.jsonl", "--system", "x"], "as it was saved, so leave --system out"),
        ("", ["--save", "no/chat.jsonl"], "cannot write 'no/chat.jsonl': give a file in"),
        ("", ["--save", "."], "cannot write '.': give a file in a folder that you may"),
        ("", ["--set", "training.seed=1"], "--set takes agent.NAME=VALUE or environment.NAME=VALUE here"),
        ("", ["--set", "max_new_tokens=8"], "got 'max_new_tokens' (did you mean 'agent.max_new_tokens'?)"),
        ("", ["--set", "agent.sed=1"], "AgentConfig has no field 'sed' (did you mean 'seed'?)"),
        ("", ["--set", "environment.seed=1", "--model", "x"], "there is no environment, give --environment"),
        ("/sav x\n", [], "no command '/sav'; there are /save FILE, /reset, /help, /quit"),
        ("/save\n", [], "/save needs a file, for example /save chat.jsonl"),
        ("/save x.jsonl\n", ["--model", "./model"], "there is nothing to save yet"),
        (
            "x" * 100_000 + "\n",
            [],
            "tokens and the model's context 1024: shorten the messages or",
        ),
    ],
)
def test_what_cannot_work_is_one_line(
    lines: str, arguments: list[str], message: str, chat: Any, folder: Path
) -> None:
    (folder / "list.json").write_text("[]")
    (folder / "bad.json").write_text("{")
    output = chat(lines, *arguments)
    assert output.code == 1
    lines_said = [line for line in output.errors.splitlines() if " WARNING " not in line]
    [line] = [line for line in lines_said if not line.startswith("you play ")]
    assert line.startswith("stateset-agents: ")
    assert message in line


SLOW = """
import asyncio, sys
from stateset_agents.backends import loading
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.cli.main import main

async def reply(request):
    if "story" in request.text:
        print("[thinking]", flush=True)
        await asyncio.sleep(600)
    if request.text.endswith("Oslo\\nassistant:"):
        return "In Oslo."
    call = '<tool_call>{"name": "look_up", "arguments": {"order": "K27"}}</tool_call>'
    return call if "K27" in request.text else "Hello."

async def load_backend(*_, **__):
    return ScriptedBackend(reply)

loading.load_backend = load_backend
sys.exit(main(["chat", *sys.argv[1:]]))
"""
"""The command with a scripted model that takes ten minutes to tell a story."""


class AtTerminal:
    """A person at a pseudo-terminal."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.process, self.screen = pty.fork()
        if self.process == 0:  # the child
            os.chdir(folder)
            os.execve(sys.executable, [*warm_python(), "-c", SLOW, *arguments], environment())
        self.seen = ""

    def until(self, is_there: Callable[[str], bool], press: str = "") -> str:
        """What the screen shows by the time that something is there; `press` this key while it rests."""
        end = time.monotonic() + 120
        while not is_there(self.seen):
            assert time.monotonic() < end, self.seen
            if select.select([self.screen], [], [], 1.0)[0]:
                self.seen += os.read(self.screen, 65536).decode("utf-8", "replace")
            elif press:
                os.write(self.screen, press.encode())
        return self.seen

    def type(self, text: str) -> None:
        self.seen = ""
        os.write(self.screen, text.encode())

    def exit_code(self) -> int:
        """Reads on until the process has ended."""
        while True:
            try:
                if not os.read(self.screen, 65536):
                    break
            except OSError:  # the terminal's other side is closed
                break
        _, status = os.waitpid(self.process, 0)
        os.close(self.screen)
        return os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        try:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


@pytest.fixture
def terminal(folder: Path) -> Any:
    opened: list[AtTerminal] = []

    def sit_down(*arguments: str) -> AtTerminal:
        opened.append(AtTerminal(folder, *arguments))
        return opened[-1]

    yield sit_down
    for session in opened:
        session.kill()


def test_a_person_sees_prompts_stops_an_answer_and_leaves(terminal: Any, folder: Path) -> None:
    chat = terminal("--model=any", "--tools", "my_tools:look_up", "--save=person.jsonl")
    assert "/save FILE, /reset, /help, /quit" in chat.until(lambda seen: seen.endswith("you> "))
    chat.type("hi\n")
    chat.until(lambda seen: "agent> Hello." in seen and seen.endswith("you> "))
    chat.type("a story\n")
    chat.until(lambda seen: "[thinking]" in seen)
    chat.type("\x03")
    chat.until(lambda seen: "(stopped)" in seen and seen.endswith("you> "))
    chat.type("where is K27?\n")
    shown = chat.until(lambda seen: "In Oslo." in seen and seen.endswith("you> "))
    call, result = '\x1b[2m  look_up(order="K27")\x1b[0m', "\x1b[2m  -> K27 is in Oslo\x1b[0m"
    assert f"{call}\r\n{result}\r\nagent> In Oslo.\r\n" in shown
    chat.type("/nonsense\n")
    chat.until(lambda seen: "no command '/nonsense'" in seen and seen.endswith("you> "))
    # Python notices a Ctrl-C in the moment after the prompt only with the next key.
    chat.until(lambda seen: "(Ctrl-D leaves)" in seen and seen.endswith("you> "), press="\x03")
    chat.type("\x04")
    assert chat.exit_code() == 0
    [line] = (folder / "person.jsonl").read_text().splitlines()
    output = [message["content"] for message in json.loads(line)["messages"]]
    assert output == ["hi", "Hello.", "where is K27?", "", "K27 is in Oslo", "In Oslo."]
