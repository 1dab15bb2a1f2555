"""`Sandbox`: run programs that nobody has read, many at once, and hear what they claim."""

from __future__ import annotations

import asyncio
import binascii
import json
import marshal
import os
from collections.abc import Mapping
from typing import Any

import aiohttp

from stateset_agents.runtime.tasks import in_thread
from stateset_agents.sandbox.claims import READY, Claims, Ending, read_claims, why_broken
from stateset_agents.sandbox.job import Job, Limits
from stateset_agents.sandbox.levels import choose_walls
from stateset_agents.sandbox.local import Watch, run_job
from stateset_agents.sandbox.walls import CHILD
from stateset_agents.types.errors import SandboxFailure
from stateset_agents.types.settings import expect_that, is_whole

# --- one program on an executor elsewhere, asked in SandboxFusion's words
#
#     POST URL/run_code {"code", "language", "run_timeout"} -> {"status", "message", "run_result": {...}}
#
# (https://bytedance.github.io/SandboxFusion/docs/api/run-code-run-code-post). The code is our child with its
# job inside, so that an executor gets no expected value either, and hands on claims by stdout. The walls are
# the executor's.

_MOST_ESCAPED = 6
"""Bytes of JSON for a byte of claims, at most."""
_GRACE = 10.0
"""Seconds that an answer may take beside the program."""


async def run_elsewhere(url: str, job: Job, *, limits: Limits) -> Claims:
    """The program's claims. Raises SandboxFailure where the executor, or the way to it, failed.

    The program may wait there, so one that takes longer than `limits.wall_seconds` has failed, whatever the
    reason.
    """
    body = {"code": _code(job, limits), "language": "python", "run_timeout": limits.wall_seconds}
    result = await _asked(f"{url.rstrip('/')}/run_code", body, limits)
    if result is None:
        return _nothing("output limit", url)
    if result.get("status") == "TimeLimitExceeded":
        return _nothing("wall limit", url)
    output = str(result.get("stdout") or "").encode("utf-8", errors="surrogatepass")
    if not output.startswith(READY):
        why = why_broken(output.partition(b"\n")[0]) or str(result.get("stderr") or "it printed nothing")
        raise SandboxFailure(f"the executor at {url} did not start the program: {why.strip()[-200:]}")
    if len(output) > limits.output_bytes:
        return _nothing("output limit", url)
    has_finished = result.get("return_code") == 0
    lines = output.removeprefix(READY)
    claims = read_claims(lines if has_finished else lines[: lines.rfind(b"\n") + 1], num_cases=job.num_cases)
    if claims is None:
        return _nothing("malformed", url)
    ending: Ending = "finished" if has_finished else "ended early"
    return Claims(claimed=claims[0], raised=claims[1], ending=ending, level=url)


def _nothing(ending: Ending, url: str) -> Claims:
    return Claims(claimed={}, raised={}, ending=ending, level=url)


def _code(job: Job, limits: Limits) -> str:
    """Our child with its job, as one program."""
    most = limits.of_process()
    request = {
        **job.request(),
        "parent": None,
        "is_first": False,
        "cpu_seconds": limits.cpu_seconds,
        "mounts": None,
        "capset": 0,
        "ruleset": -1,
        "filter": b"",
        "claims": 1,
        "limits": {name: most[name] for name in ("CPU", "AS", "CORE")},  # its stdout may be a file
    }
    packed = binascii.b2a_base64(marshal.dumps(request, 4), newline=False).decode("ascii")
    start = f"import binascii, marshal\nserve(marshal.loads(binascii.a2b_base64({packed!r})))\n"
    return f"{CHILD.read_text(encoding='utf-8')}\n\n{start}"


async def _asked(url: str, body: Mapping[str, Any], limits: Limits) -> Mapping[str, Any] | None:
    """`run_result`; None where the answer is longer than claims may be."""
    most = _MOST_ESCAPED * limits.output_bytes
    patience = aiohttp.ClientTimeout(total=limits.wall_seconds + _GRACE)
    try:
        async with (
            aiohttp.ClientSession(timeout=patience) as session,
            session.post(url, json=body, allow_redirects=False) as response,
        ):
            text = b""
            async for chunk in response.content.iter_chunked(1 << 16):
                text += chunk
                if len(text) > most:
                    return None
            if response.status != 200:
                raise SandboxFailure(f"the executor at {url} answered {response.status}: {text[:200]!r}")
            answer = json.loads(text)
    except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise SandboxFailure(f"the executor at {url} gave no answer: {why}") from error
    result = answer.get("run_result") if isinstance(answer, dict) else None
    if not isinstance(result, dict) or answer.get("status") == "SandboxError":
        raise SandboxFailure(f"the executor at {url} failed: {text[:200]!r}")
    return result


_NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""Cores that this process may use."""


class Sandbox:
    """Walls around programs.

        sandbox = Sandbox()
        claims = await sandbox.run(Job(program=text, entry_point="add", arguments=((1, 2),)))
        claims.agree(0, 3)

    `sandbox`: "auto", the strongest level of this machine; "landlock", "bubblewrap", "namespaces"; the
    address of an executor, "http://..."; or "unsafe", which keeps to the limits and nothing else. `python`:
    the interpreter that runs programs; None: this one, without its site-packages. Raises ConfigurationError
    where the level does not work here.
    """

    def __init__(
        self,
        sandbox: str = "auto",
        *,
        limits: Limits | None = None,
        max_concurrent: int | None = None,
        python: str | None = None,
    ) -> None:
        """`max_concurrent`: programs at once; None: one for each core that this process may use."""
        is_limit = max_concurrent is None or is_whole(max_concurrent, 1)
        expect_that(is_limit, "max_concurrent", "be a whole number of at least 1, or None", max_concurrent)
        self.limits = limits or Limits()
        self._url = sandbox if sandbox.startswith(("http://", "https://")) else None
        self._walls = None if self._url is not None else choose_walls(sandbox, python=python)
        self._max_concurrent = max_concurrent or _NUM_CORES
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    @property
    def level(self) -> str:
        """The place where programs run: a level's name, or the executor's address."""
        return self._url or (self._walls.level if self._walls is not None else "")

    @property
    def local(self) -> bool:
        """True if programs run on this machine."""
        return self._url is None

    async def run(self, job: Job) -> Claims:
        """The program's claims; the call waits for one of `max_concurrent` places.

        Raises SandboxFailure where the sandbox or the machine failed, and nothing is known of the program. A
        cancelled call ends the program.
        """
        async with self._slot():
            if self._walls is None:
                return await run_elsewhere(self.level, job, limits=self.limits)
            watch = Watch()
            try:
                return await in_thread(run_job, job, limits=self.limits, walls=self._walls, watch=watch)
            except asyncio.CancelledError:
                watch.end()
                raise

    def _slot(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()  # a semaphore per loop: a sandbox may outlive its first one
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._max_concurrent))
        return self._slots[1]
