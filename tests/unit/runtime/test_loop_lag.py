"""The event loop's longest delay during a step."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
import types
from pathlib import Path

import jinja2
import pytest

import stateset_agents
from stateset_agents.backends.pretrained.loading import load_tokenizer
from stateset_agents.core.chat.plain_template import PlainTemplate
from stateset_agents.runtime.event_loop import _user_place, measure_loop_lag
from stateset_agents.types.messages import Message


async def test_the_longest_wait_is_kept():
    async with measure_loop_lag(interval=0.001) as lag:
        await asyncio.sleep(0.005)
        time.sleep(0.05)  # noqa: ASYNC251  # holds the loop up on purpose
        await asyncio.sleep(0.005)
    assert lag.longest >= 0.045


@pytest.mark.parametrize("hops", range(5))
async def test_a_cancellation_while_it_closes_is_not_swallowed(hops):
    async def measured():
        async with measure_loop_lag():
            await asyncio.sleep(0.001)
            cancel_after(hops, asyncio.current_task())
        await asyncio.sleep(10)

    def cancel_after(ticks, task):
        later = asyncio.get_running_loop().call_soon
        later(cancel_after, ticks - 1, task) if ticks else later(task.cancel)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.create_task(measured()), 5)


async def test_a_wait_in_the_user_s_code_is_told_with_its_place():
    async def step_of_the_user():
        time.sleep(0.3)  # noqa: ASYNC251  # holds the loop up on purpose

    async with measure_loop_lag() as lag:
        await asyncio.sleep(0.05)
        await asyncio.create_task(step_of_the_user())
        await asyncio.sleep(0.05)
    assert lag.in_user_code >= 0.2
    assert lag.place is not None
    assert re.fullmatch(r"test_loop_lag\.py:\d+, step_of_the_user", lag.place)


async def test_a_wait_for_what_runs_without_the_user_s_code_is_not_told_as_theirs():
    heard = [Message(role="user", content="where is order K27? " * 40_000)]
    template = PlainTemplate(load_tokenizer("embedded:desk"))
    async with measure_loop_lag() as lag:
        await asyncio.sleep(0.05)
        asyncio.get_running_loop().call_soon(template.delta, heard)
        await asyncio.sleep(0.05)
    assert lag.longest >= 0.06
    assert (lag.in_user_code, lag.place) == (0.0, None)


def test_a_file_beside_the_package_whose_path_begins_like_the_package_s_is_the_user_s():
    file = Path(stateset_agents.__file__).parent.with_name("stateset_agents_shop.py")
    names: dict = {"sys": sys}
    exec(compile("def step():\n    return sys._getframe()", str(file), "exec"), names)
    assert _user_place(names["step"]()) == "stateset_agents_shop.py:2, step"


def test_generated_code_belongs_to_the_module_of_its_class():
    """A dataclass's `__init__` has no file of its own: the library's stood as the user's `<string>:3`."""
    places: list = []

    def look() -> None:
        places.append(_user_place(sys._getframe().f_back))

    source = (
        "from dataclasses import dataclass, field\n"
        "@dataclass\nclass Part:\n    value: object = field(default_factory=look)\n"
    )
    package = Path(stateset_agents.__file__).parent
    for name, file in (("stateset_agents.parts", package / "parts.py"), ("shop", Path("/home/ann/shop.py"))):
        module = types.ModuleType(name)
        module.__file__ = str(file)
        vars(module)["look"] = look
        sys.modules[name] = module
        exec(compile(source, str(file), "exec"), vars(module))
        vars(module)["Part"]()
        del sys.modules[name]
    assert str(places[0]).startswith("test_loop_lag.py:")  # who made it
    assert re.fullmatch(r"shop\.py:\d+, __init__", str(places[1]))


def test_a_chat_template_s_code_is_not_the_user_s():
    places: list = []
    environment = jinja2.Environment()
    environment.globals["look"] = lambda: places.append(_user_place(sys._getframe().f_back))
    environment.from_string("{{ look() }}").render()
    assert not places[0].startswith("<template>")


async def test_its_thread_has_ended_when_it_has() -> None:
    for _ in range(50):
        async with measure_loop_lag():
            assert "loop-lag" in [thread.name for thread in threading.enumerate()]
        assert "loop-lag" not in [thread.name for thread in threading.enumerate()]
