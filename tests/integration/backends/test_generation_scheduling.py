"""Who waits for whom: deterministic scheduling, slow users, cancelled callers, broken workers."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer

from stateset_agents.backends.base import Session
from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.backends.local.scheduler import Scheduling
from stateset_agents.types.errors import BackendError
from stateset_agents.types.messages import Completion, SamplingParams

TOKENIZER = tiny_tokenizer()


async def started(scheduling: Scheduling, **options: int) -> HuggingFaceBackend:
    backend = HuggingFaceBackend(tiny_model("llama"), TOKENIZER, scheduling=scheduling, **options)  # type: ignore[arg-type]  # bounds by name
    await backend.start()
    return backend


async def converse(
    backend: HuggingFaceBackend, member: int, *, turns: int = 3, wait: float | None = None
) -> list[Completion]:
    """Some turns with a user who takes `wait` seconds, or a random time up to 50 ms."""
    ids = TOKENIZER.encode_markup("<|bos|><|user|>" + "hello" * (member % 4))
    replies = []
    for turn in range(turns):
        params = SamplingParams(max_new_tokens=6 + 3 * (member % 3), stream=10 * member + turn)
        completion = await backend.generate(ids, params, session=Session(0, member))
        replies.append(completion)
        ids = [*completion.prompt_ids, *completion.token_ids, *TOKENIZER.encode("and" * (turn + 1))]
        await asyncio.sleep(random.uniform(0, 0.05) if wait is None else wait)
    await backend.release(Session(0, member))
    return replies


async def play(backend: HuggingFaceBackend, members: int, participants: int) -> list[list[Completion]]:
    """All members by so many participants, as the engine does it."""
    queue, replies = list(range(members)), {}
    everyone = asyncio.Barrier(participants)

    async def participant() -> None:
        with backend.participate():
            await everyone.wait()
            while queue:
                member = queue.pop(0)
                replies[member] = await converse(backend, member)

    await asyncio.gather(*(participant() for _ in range(participants)))
    return [replies[member] for member in range(members)]


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("bound", [pytest.param(100_000, marks=pytest.mark.long), 3 * 64])
async def test_delays_change_no_token_and_no_bit_of_a_log_prob(threads: int, bound: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runs = []
        for _ in range(3):
            backend = await started("deterministic", max_cached_tokens=bound)
            replies = await play(backend, members=11, participants=6)
            runs.append((replies, backend.stats))
            await backend.close()
    finally:
        torch.set_num_threads(before)
    assert runs[0] == runs[1] == runs[2]  # floats compared exactly; the batches were the same too
    assert (runs[0][1].evictions > 0) == (bound < 100_000)


async def test_a_step_waits_for_every_participant() -> None:
    backend = await started("deterministic")
    with backend.participate():
        quick = asyncio.create_task(converse(backend, 0, turns=1, wait=0))
        with backend.participate():
            slow = asyncio.create_task(asyncio.sleep(0.2))
            await asyncio.wait([quick, slow], return_when=asyncio.FIRST_COMPLETED)
            assert slow.done()
            assert not quick.done()
    await quick
    await backend.close()


async def test_a_turn_outside_any_participant_just_runs() -> None:
    backend = await started("deterministic")

    async def idle_participant(leave: asyncio.Event) -> None:
        with backend.participate():
            await leave.wait()

    leave = asyncio.Event()
    holding = asyncio.create_task(idle_participant(leave))
    await asyncio.sleep(0)
    completion = await asyncio.wait_for(backend.generate([1, 2], SamplingParams(max_new_tokens=3)), 10)
    assert len(completion.token_ids) >= 1
    leave.set()
    await holding
    await backend.close()


async def test_a_slow_user_holds_nobody_up_in_throughput_scheduling() -> None:
    backend = await started("throughput")
    finished: list[int] = []

    async def take_part(member: int) -> None:
        with backend.participate():
            await converse(backend, member, wait=2.0 if member == 0 else 0.0, turns=1 if member == 0 else 4)
        finished.append(member)

    rest_of_group = asyncio.gather(*(take_part(member) for member in range(1, 8)))
    slow = asyncio.create_task(take_part(0))
    await rest_of_group
    assert not slow.done()
    assert sorted(finished) == list(range(1, 8))
    await slow
    await backend.close()


async def test_a_cancelled_turn_leaves_its_batch_and_frees_its_participant() -> None:
    backend = await started("deterministic")
    long = SamplingParams(max_new_tokens=200)

    async def as_participant(member: int, params: SamplingParams) -> Completion:
        with backend.participate():
            return await backend.generate([1, 2, 3], params, session=Session(0, member))

    doomed = asyncio.create_task(as_participant(0, long))
    await asyncio.sleep(0.05)
    doomed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doomed
    completion = await asyncio.wait_for(as_participant(1, SamplingParams(max_new_tokens=5)), 10)
    assert 1 <= len(completion.token_ids) <= 5
    again = await asyncio.wait_for(as_participant(0, SamplingParams(max_new_tokens=5)), 10)
    fresh = await backend.score([*again.prompt_ids, *again.token_ids])
    assert again.logprobs == pytest.approx(fresh[len(again.prompt_ids) - 1 :], abs=1e-4)
    await backend.close()


async def test_one_session_has_one_turn_at_a_time() -> None:
    backend = await started("throughput")
    first = asyncio.create_task(
        backend.generate([1], SamplingParams(max_new_tokens=100), session=Session(0, 0))
    )
    await asyncio.sleep(0)
    with pytest.raises(BackendError, match="already has a turn in flight"):
        await backend.generate([1], SamplingParams(), session=Session(0, 0))
    await first
    await backend.close()


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), TypeError("a bug")])
async def test_a_broken_worker_reaches_every_caller_and_hangs_nobody(error: Exception) -> None:
    backend = await started("deterministic")

    def broken(*_: object) -> None:
        raise error

    backend._batcher.step = broken  # type: ignore[method-assign]  # the one way to break a healthy worker
    turns = [backend.generate([1, 2], SamplingParams(), session=Session(0, m)) for m in range(3)]
    outcomes = await asyncio.wait_for(asyncio.gather(*turns, return_exceptions=True), 10)
    for outcome in outcomes:
        assert isinstance(outcome, BackendError)
        assert str(error) in str(outcome)
        assert outcome.__cause__ is error
    with pytest.raises(BackendError, match="worker broke"):
        await backend.generate([1], SamplingParams())
    await backend.close()


async def test_closing_answers_whoever_waits_and_ends_the_thread() -> None:
    before = set(threading.enumerate())
    backend = await started("deterministic")

    async def idle_participant() -> None:
        with backend.participate():
            await asyncio.sleep(0.1)
            await backend.close()

    async def waiting() -> None:
        with backend.participate():
            await backend.generate([1], SamplingParams(), session=Session(0, 0))

    outcome, _ = await asyncio.gather(waiting(), idle_participant(), return_exceptions=True)
    assert isinstance(outcome, BackendError)
    assert "closed" in str(outcome)
    left = set(threading.enumerate()) - before
    assert all(thread.name != "generation" for thread in left)
    assert len(left) <= 1  # asyncio keeps one pool thread
    await backend.close()
    with pytest.raises(BackendError, match="closed"):
        await backend.generate([1], SamplingParams())


async def test_generating_before_the_start_says_what_to_do() -> None:
    backend = HuggingFaceBackend(tiny_model("llama"), TOKENIZER)
    with pytest.raises(BackendError, match=r"await backend\.start"):
        await backend.generate([1], SamplingParams())


async def test_the_event_loop_stays_free_while_the_worker_generates() -> None:
    backend = await started("throughput")
    turns = [
        backend.generate([1], SamplingParams(max_new_tokens=150), session=Session(0, m)) for m in range(8)
    ]
    work = asyncio.gather(*turns)
    ticks, longest, start = 0, 0.0, time.monotonic()
    last = start
    while not work.done():
        await asyncio.sleep(0.001)
        now = time.monotonic()
        ticks, longest, last = ticks + 1, max(longest, now - last), now
    await work
    assert ticks > 10
    assert longest < (last - start) / 2
    await backend.close()
