"""Two agents behind one server: the baseline, and a candidate that a deployment lets in.

`AgentServer` asks `Deployed` who answers a conversation, and tells it how conversations ended. The journal is
written in a thread, so a disk that is slow does not hold the event loop; calls that come together are one
transaction.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self, TypeVar

from stateset_agents.backends.dialects.request import Answer
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.chat.history import num_replies
from stateset_agents.deployment import guards
from stateset_agents.deployment.controller import DeploymentController, Report, start_deployment
from stateset_agents.deployment.guards import Clock, Guard
from stateset_agents.deployment.journal import DeploymentRecord, Journal
from stateset_agents.deployment.plan import PROGRAM, DeploymentPlan
from stateset_agents.deployment.state import Arm, Assignment
from stateset_agents.serving.routing import AnswerOne
from stateset_agents.serving.served_agent import OnDelta, PendingRequest, ServedAgent
from stateset_agents.types.errors import ConfigurationError, JournalError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import Message
from stateset_agents.types.settings import expect_that

_log = get_logger(__name__)
T = TypeVar("T")

_SETTLE_SECONDS = 1.0
"""Seconds between two looks for time-outs and for moves that only time brings."""
_SHARE = 1 / 30
"""Share of a core's time that writing may take: after a transaction the calls gather until it has been no
more."""
_LONGEST_GATHER = 0.05
"""Seconds that a call waits for others at most."""
_MAX_WHY = 300
"""Characters of an error that the journal keeps."""


def num_tokens(arm: Arm, answer: Answer) -> float:
    """The cost of an answer where nothing else is said: its tokens, read and sampled."""
    return answer.prompt_tokens + answer.completion_tokens


def resumed_or_started(
    journal: Journal,
    *,
    candidate: str,
    baseline: str,
    plan: DeploymentPlan | None,
    who: str,
    clock: Clock = time.time,
) -> DeploymentRecord:
    """The journal's last deployment if it is of these two, in whatever state it is; else a new one.

    So a restart goes on, and does not let a candidate in again that was rolled back: `start_deployment` does.
    Raises ConfigurationError for another plan than that deployment's.
    """
    records = journal.records()
    last = records[-1] if records else None
    if last is None or (last.candidate, last.baseline) != (candidate, baseline):
        return start_deployment(
            journal, candidate=candidate, baseline=baseline, plan=plan, who=who, clock=clock
        )
    if plan is not None and plan != last.plan:
        raise ConfigurationError(
            f"deployment {last.id} has another plan, and plans stay: give the same one or None, or begin "
            "another deployment by start_deployment"
        )
    return last


class Deployed:
    """A baseline and a candidate as one agent of `AgentServer`, by a deployment of a journal.

        async with (
            baseline, candidate,
            Deployed(baseline, candidate, plan, Journal("deployments.sqlite")) as deployed,
            AgentServer(deployed) as server,
        ):
            ...

    A conversation is answered by the arm that it was assigned, from its first turn to its last; after a
    rollback the baseline answers its next turn. In shadow the baseline answers, and the candidate is asked
    afterwards, beside everything else: what it says is checked and goes nowhere, and the tools that it calls
    are run by nobody. Where the candidate fails, the baseline answers in its place, and the failure counts.
    Only a stream whose first words the client already has ends with an error.

    While the journal cannot be written the baseline answers everybody, and nothing counts.
    """

    def __init__(
        self,
        baseline: MultiTurnAgent,
        candidate: MultiTurnAgent,
        plan: DeploymentPlan | None,
        journal: Journal,
        *,
        deployment: str | None = None,
        names: tuple[str, str] | None = None,
        checks: Sequence[Guard] = (),
        cost: Callable[[Arm, Answer], float] = num_tokens,
        patience: float = 60.0,
        max_shadows: int = 4,
        who: str = PROGRAM,
        clock: Clock = time.time,
    ) -> None:
        """
        Args:
            baseline, candidate: Initialised; neither is started or closed here.
            plan: None takes that of the deployment that goes on, or the default one.
            journal: Of nobody else in this process while this is open.
            deployment: Id of one in the journal; unset: see `resumed_or_started`.
            names: Of baseline and candidate in the journal; unset: those of their models. Two prompts of one
                model need names.
            checks: Guards of single answers, besides the plan's; they get a `guards.Answer` with its message.
            cost: Of an answer, in the unit of the plan's limit.
            patience: Seconds until the candidate's first words, or its answer where nothing is streamed;
                then it has failed, and the baseline answers.
            max_shadows: Answers of the candidate in shadow under way at once; further ones are left out.
            who: Who started it, for the journal.
        """
        expect_that(patience > 0, "patience", "be seconds above 0", patience)
        expect_that(max_shadows >= 1, "max_shadows", "be at least 1", max_shadows)
        if baseline is candidate:
            raise ConfigurationError("baseline and candidate are the same agent: give two")
        if deployment is None:
            old, new = names or (baseline.config.model_name, candidate.config.model_name)
            deployment = resumed_or_started(
                journal,
                candidate=new,
                baseline=old,
                plan=plan,
                who=who,
                clock=clock,
            ).id
        elif plan is not None or names is not None:
            raise ConfigurationError(
                f"deployment {deployment!r} has its plan and its names in the journal: leave both out"
            )
        self.controller = DeploymentController(journal, deployment, guards=checks, clock=clock)
        self.skipped_shadows = 0
        """Answers in shadow that were left out, because as many as allowed were under way."""
        self.agents: Sequence[MultiTurnAgent] = (baseline, candidate)
        self._cost = cost
        self._patience = patience
        self._max_shadows = max_shadows
        self._journal = _Batches(self.controller)
        self._shadows: set[asyncio.Task[None]] = set()
        self._notes: set[asyncio.Task[None]] = set()
        """Records of answers whose client left."""
        self._settling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._settling = asyncio.create_task(self._settle())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End what is under way in shadow, and write down what is known."""
        settling, self._settling = self._settling, None
        ending = [*self._shadows, *([] if settling is None else [settling])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, *self._notes, return_exceptions=True)
        await self._journal.close()

    @asynccontextmanager
    async def answering(
        self, pending: PendingRequest, served: Sequence[ServedAgent]
    ) -> AsyncIterator[AnswerOne]:
        """Around all answers to one request, of the conversation's arm; they are written down at the end."""
        baseline, candidate = served
        assignment = await self._assign(pending.conversation)
        arm: Arm = "baseline" if assignment is None else assignment.arm
        measured = _Measured()
        try:
            if arm == "candidate":
                yield partial(self._from_candidate, pending, measured, served)
            else:
                yield partial(_from_baseline, pending, measured, baseline)
        except (asyncio.CancelledError, ConnectionError):
            # A client that leaves has reasons of its own; but an answer that was late by then was late.
            limit = self.controller.plan.guards.latency
            is_late = measured.error is not None or (limit is not None and measured.seconds > limit)
            if assignment is not None and is_late:
                self._later(self._notes, self._record(pending, arm, measured))
            raise
        except Exception:
            if assignment is not None and measured.error is not None:
                await self._record(pending, arm, measured)
            raise
        if assignment is not None:
            await self._record(pending, arm, measured)
            if self.controller.state.mode != "shadow":
                return
            if len(self._shadows) >= self._max_shadows:
                self.skipped_shadows += 1
            else:
                self._later(self._shadows, self._answer_in_shadow(pending, candidate, measured.message))

    async def report_outcome(
        self, conversation: str, *, success: float, reward: float | None = None
    ) -> Report:
        """Takes the end of a conversation; see `DeploymentController.report_outcome`.

        Raises JournalError if it could not be written down: report it again.
        """
        return await self._journal.run(
            lambda: self.controller.report_outcome(conversation, success=success, reward=reward)
        )

    async def status(self) -> dict[str, Any]:
        """The deployment's status as plain values."""
        return await self._journal.run(self.controller.status)

    async def _assign(self, conversation: str) -> Assignment | None:
        """The conversation's assignment; None if the journal cannot be written."""
        try:
            return await self._journal.run(lambda: self.controller.assign(conversation))
        except JournalError as error:
            _log.error("the baseline answers, and nothing counts: the journal cannot be used", why=str(error))
            return None

    async def _from_candidate(
        self,
        pending: PendingRequest,
        measured: _Measured,
        served: Sequence[ServedAgent],
        number: int,
        on_delta: OnDelta | None = None,
    ) -> Answer:
        """The candidate's answer, or the baseline's if it fails before the client has a word of it."""
        baseline, candidate = served
        has_begun = is_over = False

        def tell(delta: Mapping[str, str]) -> None:
            nonlocal has_begun
            if is_over or limit.expired():  # a backend's thread may tell a piece after its end
                return
            has_begun = True
            limit.reschedule(None)
            if on_delta is not None:
                on_delta(delta)

        try:
            async with asyncio.timeout(self._patience) as limit:
                return await measured.of(
                    candidate.answer(pending, number, None if on_delta is None else tell)
                )
        except Exception as error:  # whatever it is, the client gets its answer
            is_over = True
            failure = self._described(error, limit)
            if has_begun:
                measured.error = failure
                raise
            _log.warning(
                "the baseline answers for the candidate", conversation=pending.conversation, why=failure
            )
            if not isinstance(error, ConfigurationError):
                measured.error = failure
        answer = await baseline.answer(pending, number, on_delta)
        measured.error = failure  # also of a request that the baseline can serve, and the candidate refuses
        return answer

    def _described(self, error: Exception, limit: asyncio.Timeout) -> str:
        if limit.expired():
            return f"no answer within {self._patience:g} s"
        return _one_line(error)

    async def _record(self, pending: PendingRequest, arm: Arm, measured: _Measured) -> None:
        """Check what an arm did for one request, and write it down."""
        answer = measured.checked(partial(self._known_cost, arm))
        turn = num_replies(pending.request.messages)
        try:
            violations = await self._journal.run(
                lambda: self.controller.record_answer(pending.conversation, turn, answer, arm=arm)
            )
        except JournalError as error:
            _log.error("an answer is not counted: the journal cannot be used", why=str(error))
            return
        for violation in violations:
            _log.warning("unsafe answer", arm=arm, guard=violation.guard, why=violation.why)

    def _known_cost(self, arm: Arm, answer: Answer) -> float | None:
        """The cost of an answer; None if the caller's function fails: the client gets its answer all the
        same."""
        try:
            return self._cost(arm, answer)
        except Exception as error:
            _log.error("the cost of an answer is not known: `cost` raised", arm=arm, why=_one_line(error))
            return None

    async def _answer_in_shadow(
        self, pending: PendingRequest, candidate: ServedAgent, reply: Message | None
    ) -> None:
        measured = _Measured(compared_with=reply)
        try:
            async with asyncio.timeout(self._patience) as limit:
                await measured.of(candidate.answer(pending, is_sent=False))
        except Exception as error:  # the baseline could serve the request
            measured.error = self._described(error, limit)
        await self._record(pending, "candidate", measured)

    def _later(self, tasks: set[asyncio.Task[None]], work: Any) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _settle(self) -> None:
        while True:
            await asyncio.sleep(_SETTLE_SECONDS)
            try:
                await self._journal.run(self.controller.settle)
            except JournalError as error:
                _log.error("the journal cannot be used", why=str(error))


async def _from_baseline(
    pending: PendingRequest,
    measured: _Measured,
    baseline: ServedAgent,
    number: int,
    on_delta: OnDelta | None = None,
) -> Answer:
    try:
        return await measured.of(baseline.answer(pending, number, on_delta))
    except ConfigurationError:  # the client's mistake
        raise
    except Exception as error:
        measured.error = _one_line(error)
        raise


class _Measured:
    """Measures one arm on one request: its slowest answer, the sum of the costs, the first one's words."""

    def __init__(self, *, compared_with: Message | None = None) -> None:
        """`compared_with`: what the baseline said to the same request."""
        self.seconds = 0.0
        self._compared_with = compared_with
        self.error: str | None = None
        self._answers: list[Answer] = []

    async def of(self, work: Awaitable[Answer]) -> Answer:
        """The answer, and its time, also where there is none in the end."""
        start = time.monotonic()
        try:
            answer = await work
        finally:
            self.seconds = max(self.seconds, time.monotonic() - start)
        self._answers.append(answer)
        return answer

    @property
    def message(self) -> Message | None:
        """The message of the first answer."""
        return self._answers[0].message if self._answers else None

    def checked(self, cost: Callable[[Answer], float | None]) -> guards.Answer:
        """The answer as guards see it. The cost of an answer that broke off is not known."""
        costs = (
            [] if self.error is not None else [each for each in map(cost, self._answers) if each is not None]
        )
        message, other = self.message, self._compared_with
        return guards.Answer(
            seconds=self.seconds,
            cost=sum(costs) if costs and len(costs) == len(self._answers) else None,
            error=self.error,
            message=message,
            agreement=None if message is None or other is None else guards.agreement_of(message, other),
        )


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_WHY]


class _Batches:
    """A controller's calls from the event loop; those that come while others are written go together."""

    def __init__(self, controller: DeploymentController) -> None:
        self._controller = controller
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._pending: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._not_before = 0.0
        """Time at which the next transaction may begin, by the loop's clock."""
        self._is_closed = False

    async def run(self, call: Callable[[], T]) -> T:
        """The call's result. It is made also if the caller is cancelled meanwhile.

        Raises what it raises, and JournalError for all calls that were to be written together, and after
        `close`.
        """
        if self._is_closed:
            raise JournalError("this deployment was closed: open it again to go on")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._pending.append((call, future))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        return await future

    async def close(self) -> None:
        """Write what is pending, and end the thread."""
        self._is_closed = True
        if self._writing is not None:
            await self._writing
        self._thread.shutdown()

    async def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pending:
            await asyncio.sleep(self._not_before - loop.time())
            batch, self._pending = self._pending, []
            results, seconds = await loop.run_in_executor(
                self._thread, self._write, [call for call, _ in batch]
            )
            for (_, future), (value, error) in zip(batch, results, strict=True):
                if future.done():  # its caller was cancelled
                    continue
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)
            self._not_before = loop.time() + min(seconds / _SHARE, _LONGEST_GATHER)
        self._writing = None

    def _write(self, calls: Sequence[Callable[[], Any]]) -> tuple[list[tuple[Any, Exception | None]], float]:
        """Each call's value or error, and the CPU seconds that all took."""
        start = time.thread_time()
        results: list[tuple[Any, Exception | None]] = []
        try:
            with self._controller.batch():
                for call in calls:
                    try:
                        results.append((call(), None))
                    except ConfigurationError as error:  # nothing of it was written
                        results.append((None, error))
        except Exception as error:  # nothing of anything
            results = [(None, error)] * len(calls)
        return results, time.thread_time() - start
