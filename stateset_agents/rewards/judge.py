"""A language model as judge: it reads a conversation and a rubric, and ends with a score."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import re
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from stateset_agents.algorithms.intervals import share_interval
from stateset_agents.backends.openai.client import ChatClient
from stateset_agents.claims.english import Patterns
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.scoring.base import RewardFunction, RewardResult, score_trajectories
from stateset_agents.core.scoring.function_reward import Reward, as_reward
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.runtime.user_code import call_user_code
from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.types.errors import ConfigurationError, RewardFailure
from stateset_agents.types.messages import FinishReason, Message
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect_that, is_whole
from stateset_agents.types.trajectory import Trajectory

# A judge's answers in a file, keyed by the question: the same question is asked once, in all runs.

_VERSION = 1
"""Version of the table; a file of another one is refused."""
_BUSY_TIMEOUT = 30.0
"""Seconds to wait for another process that is writing."""


class AnswerCache:
    """Answers by content: the key is a digest of who was asked (model, sampling) and of the whole prompt, so
    a changed rubric, model or conversation is another question. Threads and processes may share a file.

    The file is SQLite, one table `answers(key, asked_of, answer)`. It is opened at first use.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._process = 0

    @staticmethod
    def key(asked_of: str, prompt: str) -> str:
        """The content's address."""
        content = json.dumps([_VERSION, asked_of, prompt])
        return hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()

    def get(self, key: str) -> str | None:
        """The answer, if it is known. Raises ConfigurationError for a file of another kind."""
        with self._lock:
            row = self._open().execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, asked_of: str, answer: str) -> None:
        """Keep an answer; one that is there stays. Half a character becomes a question mark."""
        text = answer.encode(errors="replace").decode()
        with self._lock:
            connection = self._open()
            with connection:
                connection.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?)", (key, asked_of, text))

    def close(self) -> None:
        """Let go of the file; the next use opens it again."""
        with self._lock:
            if self._connection is not None and self._process == os.getpid():
                self._connection.close()
            self._connection = None

    def __len__(self) -> int:
        with self._lock:
            return int(self._open().execute("SELECT count(*) FROM answers").fetchone()[0])

    def _open(self) -> sqlite3.Connection:
        """This process's connection; SQLite's must not be carried into a fork."""
        if self._connection is not None and self._process == os.getpid():
            return self._connection
        try:
            connection = sqlite3.connect(self.path, timeout=_BUSY_TIMEOUT, check_same_thread=False)
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                [version] = connection.execute("PRAGMA user_version").fetchone()
                tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
                if version != _VERSION and (version or tables):
                    raise ConfigurationError(
                        f"{self.path} has cache version {version}, not {_VERSION}: name another file"
                    )
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS answers "
                    "(key TEXT PRIMARY KEY, asked_of TEXT NOT NULL, answer TEXT NOT NULL) WITHOUT ROWID"
                )
                connection.execute(f"PRAGMA user_version = {_VERSION}")
        except sqlite3.Error as error:
            raise ConfigurationError(
                f"the judge's cache {str(self.path)!r} cannot be used ({error}): name a file in a folder "
                "that exists and that you may write to"
            ) from error
        self._connection, self._process = connection, os.getpid()
        return connection


Judge = ChatClient | MultiTurnAgent | Callable[[str], Awaitable[str]] | Callable[[str], str]
"""Answers a prompt with text."""

_NUMBER, _OF = r"(?P<value>\d+(?:\.\d+)?)", r"\s*(?:/|out\s+of)\s*"
_START = r"(?:^(?:[\s*_>#]|-(?!\d))*|(?<=[.!?:])[\"')\]*_]*\s+[*_]*)"
"""The start of a verdict: that of a line, or behind the end of a sentence in it: "Fine. Score: 1"."""
_LABEL = r"(?:(?:final|overall)\s+)?(?:score|rating)[\s*_`]*[:=][\s*_`\[]*"
_REMARK = r"(?:[\s*_]*\((?P<remark>[^()]*)\))?"
_VERDICT = re.compile(
    rf"{_START}(?:{_LABEL}{_NUMBER}(?:{_OF}(?P<top>\d+))?(?:\s+points?\b)?"
    rf"|{_NUMBER.replace('value', 'bare')}{_OF}(?P<bare_top>\d+)){_REMARK}(?=[\s*_`.\]]*$|[*_]*[.;!]\s)",
    re.IGNORECASE,
)
_END = re.compile(r"[\s*_`.\]]*$")
_FENCE = re.compile(r"\s*(?:```\w*|-{3,}|\*{3,})\s*")
_ENGLISH = Patterns("judge")
_TEXTS: Mapping[str, str] = read_yaml(Path(__file__).with_name("judge.yaml"))


class JudgeReward(RewardFunction):
    """Scores a conversation by what a model thinks of it, from 0 to 1.

        JudgeReward(agent, "Was the refund handled by the policy, and was the user told when it comes?")

    The judge is a `ChatClient` (any OpenAI-compatible endpoint), another `MultiTurnAgent`, or any function
    from a prompt to the answer's text (async, or sync in a thread). It counts as remote, so a run with it is
    not repeatable bit by bit. An answer without a readable verdict leaves the conversation unscored; it is
    never taken for a middling score. At most `max_concurrent` prompts are out at once; waiting for a place
    counts towards the training's `reward_timeout`.

    With `cache`, the path of a file, an answer that could be read is kept and the same question never asked
    again: the key is the judge, the rubric and the conversation. A judge that is no `ChatClient` needs a
    `version` then, which you change when it changes.

    Judges have habits (https://arxiv.org/abs/2306.05685). Each conversation is judged alone, so none wins by
    its place. The prompt says that length is no merit, which helps only so far: put the judge behind a gate
    that checks facts (`GatedReward`), and read the breakdown's `words` against the score. The conversation
    stands in the prompt as JSON lines, without control tokens, so that nothing said in it can pass for the
    rubric or the verdict; a judge may still be talked round.
    """

    def __init__(
        self,
        judge: Judge,
        rubric: str,
        *,
        reference: Sequence[str] = (),
        top: int = 10,
        max_concurrent: int = 16,
        cache: str | Path | AnswerCache | None = None,
        version: str | None = None,
        name: str = "judge",
    ) -> None:
        """`reference`: keys of the scenario's context that the judge is shown; `top`: the best verdict."""
        can_judge = isinstance(judge, MultiTurnAgent) or callable(judge)
        expect_that(can_judge, "a judge", "be a MultiTurnAgent or a function of the prompt", judge, length=60)
        if not isinstance(rubric, str) or not rubric.strip():
            raise ConfigurationError("the rubric is empty: say what a good conversation is")
        for setting, value in (("top", top), ("max_concurrent", max_concurrent)):
            expect_that(is_whole(value, 1), setting, "be a whole number of at least 1", value)
        judge_id = judge.identity if isinstance(judge, ChatClient) else version
        if cache is not None and judge_id is None:
            raise ConfigurationError(
                "the cache of a judge that is no ChatClient needs its version, or another judge's answers "
                'would be taken for its own: give version="1"'
            )
        self.name = name
        self.num_asked = 0
        """Questions that the judge was asked."""
        self.num_known = 0
        """Questions that the cache answered."""
        self._judge = judge
        self._judge_id = f"{judge_id} {version}" if version else judge_id or ""
        self._cache = AnswerCache(cache) if isinstance(cache, str | Path) else cache
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._rubric = rubric
        self._reference = tuple(reference)
        self._top = top
        self._max_concurrent = max_concurrent
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def score(self, trajectory: Trajectory) -> RewardResult:
        prompt = judge_prompt(trajectory, self._rubric, reference=self._reference, top=self._top)
        if self._cache is None:
            verdict = parse_verdict(await self._answer(prompt), top=self._top)
        else:
            verdict = await self._cached_verdict(prompt, self._cache)
        num_words = sum(len(message.content.split()) for message in trajectory.replies)
        return RewardResult(score=verdict, breakdown={"words": float(num_words)})

    async def _cached_verdict(self, prompt: str, cache: AnswerCache) -> float:
        """The verdict on a prompt; only one that can be read is kept."""
        key = cache.key(self._judge_id, prompt)
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:  # of two equal questions at once the second waits for the first one's answer
            cached = await in_thread(cache.get, key)
            if cached is not None:
                self.num_known += 1
                return parse_verdict(cached, top=self._top)
            answer = await self._answer(prompt)
            verdict = parse_verdict(answer, top=self._top)
            await in_thread(cache.put, key, self._judge_id, answer)
            return verdict

    async def _answer(self, prompt: str) -> str:
        loop = asyncio.get_running_loop()  # a semaphore per loop: a reward may outlive its first one
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._max_concurrent))
        async with self._slots[1]:
            self.num_asked += 1
            return await self._ask(prompt)

    async def _ask(self, prompt: str) -> str:
        if isinstance(self._judge, ChatClient | MultiTurnAgent):
            return await _whole_answer(self._judge, prompt)
        answer = await call_user_code(self._judge, prompt)
        if not isinstance(answer, str):
            raise RewardFailure(
                f"the judge must answer with text, got {type(answer).__name__}: {answer!r:.60}"
            )
        return answer


async def _whole_answer(judge: ChatClient | MultiTurnAgent, prompt: str) -> str:
    """Raises RewardFailure where the words were cut, for half of "Score: 10" is a verdict too, and where the
    conversation is too long for the judge: the agent's doing, which must not end the run."""
    messages = (Message(role="user", content=prompt),)
    finish_reason: FinishReason | str
    if isinstance(judge, ChatClient):
        answer = await judge.complete(messages)
        text, finish_reason = answer.text, answer.finish_reason
    else:
        try:
            completion = await judge.answer(judge.with_system_prompt(messages))
        except ConfigurationError as error:
            raise RewardFailure(f"the judge cannot read the conversation: {error}") from error
        text, finish_reason = completion.message.content, completion.finish_reason
    if finish_reason in ("length", "abort", "content_filter"):
        raise RewardFailure(
            f"the judge's answer was cut ({finish_reason}): raise its max_new_tokens: {text[-80:]!r}"
        )
    return text


def judge_prompt(trajectory: Trajectory, rubric: str, *, reference: Sequence[str] = (), top: int = 10) -> str:
    """Return what the judge reads: rubric, reference, the conversation as JSON lines, and how to answer.

    Raises RewardFailure where the scenario's context has no such `reference` key.
    """
    context = trajectory.scenario.context
    missing = [key for key in reference if key not in context]
    if missing:
        raise RewardFailure(f"the scenario's context has no {missing[0]!r}, which the judge is to be shown")
    references = "\n".join(f"{key}: {_as_line(context[key])}" for key in reference)
    return _TEXTS["prompt"].format(
        rubric=rubric.strip(),
        reference=_TEXTS["reference"].format(lines=references) if references else "",
        conversation="\n".join(_as_line(message.to_openai()) for message in trajectory.messages),
        top=top,
    )


_MARKUP = re.compile(r"[\x85\u2028\u2029]|<(?=[/|\uff5c\w])|\[(?=/?[A-Z_]+\])")
"""Line ends that JSON leaves as they are, and what may be a control token to the server that reads the prompt
(<|im_end|>, </s>, [INST])."""


def _as_line(value: object) -> str:
    """JSON on one line that holds no markup: "<|" stands there as "\\u003c|"."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return _MARKUP.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def parse_verdict(answer: str, *, top: int = 10) -> float:
    """The share of `top` that the answer ends with: "...\\nScore: 7", "Fine. Final score: 7 (good)",
    "7 out of 10" and {"score": 7} are 0.7.

    A labelled explanation or thanks may come behind a score on a line of its own, unless they could take it
    back. A number alone, without "Score:" or its scale, is none, and "Score: 0.7"
    is unclear, for a share may be meant. Raises RewardFailure where the answer does not end with a verdict,
    an earlier one (at the end of a line or of a sentence) says something else, or the number lies outside 0
    to `top`.
    """
    lines = [line for line in answer.splitlines() if line.strip() and not _FENCE.fullmatch(line)]
    lines = _score_line_of_json(lines) or lines
    verdicts = [(number, match) for number, line in enumerate(lines) for match in _VERDICT.finditer(line)]
    if not verdicts or not _ends_with(lines, *verdicts[-1]):
        raise RewardFailure(f"the judge's answer does not end with 'Score: N': {answer[-80:]!r}")
    matches = [match for _, match in verdicts]
    values = [float(match["value"] or match["bare"]) for match in matches]
    if len(set(values)) > 1:
        raise RewardFailure(f"the judge gave {len(values)} scores that differ: {answer[-80:]!r}")
    value, out_of, line = values[-1], matches[-1]["top"] or matches[-1]["bare_top"], matches[-1].string
    if not 0 <= value <= top or (out_of is not None and int(out_of) != top) or not math.isfinite(value):
        raise RewardFailure(f"the judge's score must lie between 0 and {top}, got {line.strip()!r:.60}")
    if out_of is None and 0 < value < 1 < top:
        raise RewardFailure(f"the judge's score may be of 1 or of {top}: {line.strip()!r:.60}")
    return value / top


def _ends_with(lines: Sequence[str], number: int, verdict: re.Match[str]) -> bool:
    """True where a verdict, of line `number`, is the last that the lines say of the score."""
    line, behind = lines[number], lines[number + 1 :]
    if not _END.match(line, verdict.end()) or _ENGLISH.unsure.search(verdict["remark"] or ""):
        return False
    if verdict.start() == 0 and number > 0 and lines[number - 1].rstrip().endswith(":"):
        return False  # it may be quoted
    if not behind:
        return True
    is_explained = _ENGLISH.explanation.match(behind[0]) is not None
    return verdict.start() == 0 and is_explained and not any(map(_ENGLISH.unsure.search, behind))


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError where a key stands twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key stands twice")
    return fields


def _score_line_of_json(lines: Sequence[str]) -> list[str]:
    """ "Score: 7" for the lines of {"score": 7, ...}; empty for anything else."""
    try:
        fields = json.loads("\n".join(lines), object_pairs_hook=_distinct)
    except (ValueError, RecursionError):
        return []
    score = fields.get("score") if isinstance(fields, dict) else None
    return [f"Score: {score}"] if isinstance(score, int | float) and not isinstance(score, bool) else []


def create_judge_reward(
    rubric: str,
    *,
    url: str,
    model: str,
    reference: Sequence[str] = (),
    top: int = 10,
    cache: str | Path | None = None,
    max_concurrent: int = 16,
    name: str = "judge",
    **settings: Any,
) -> JudgeReward:
    """A `JudgeReward` that asks an OpenAI-compatible endpoint; `settings` are further ones of `ChatSettings`.

    In a YAML file: `reward: {name: judge, rubric: ..., url: "http://localhost:8000/v1", model: ...}`.
    """
    client = ChatClient(url, model, max_concurrent=max_concurrent, **settings)
    return JudgeReward(
        client,
        rubric,
        reference=reference,
        top=top,
        max_concurrent=max_concurrent,
        cache=cache,
        name=name,
    )


# How far a judge agrees with a check: measure it before you train on the judge.

Counts = tuple[int, ...]
"""Four: conversations that both pass, only the judge, only the check, neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Two verdicts on the same conversations."""

    n: int
    """Conversations on which both have one."""
    accuracy: float
    """The share on which they agree."""
    accuracy_interval: tuple[float, float]
    """95 %, over scenarios with all their conversations (`algorithms.intervals.share_interval`)."""
    kappa: float | None
    """Agreement beyond chance, see `cohens_kappa`; None where both always say the same one thing."""
    kappa_interval: tuple[float, float] | None
    """95 %, see `kappa_interval`."""
    both: int
    only_judge: int
    """The judge passed what the check did not: what training would find."""
    only_check: int
    neither: int
    num_unscored: int
    """Conversations that the judge could not score, or the check has nothing to say about."""

    def summary(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return asdict(self)


def cohens_kappa(both: int, only_a: int, only_b: int, neither: int) -> float | None:
    """(p_o - p_e) / (1 - p_e): 1 is full agreement, 0 that of two who answer by their own rates at random.

    Cohen, Educational and Psychological Measurement 20, 1960. None where chance alone would agree always, and
    for no case.

    >>> cohens_kappa(20, 5, 10, 15)
    0.4
    """
    n = both + only_a + only_b + neither
    if n == 0:
        return None
    a, b = (both + only_a) / n, (both + only_b) / n
    expected = a * b + (1 - a) * (1 - b)
    if expected == 1:
        return None
    return round(((both + neither) / n - expected) / (1 - expected), 12)


async def measure_agreement(
    judge: Reward,
    check: Reward,
    trajectories: Sequence[Trajectory],
    *,
    judge_passes: float = 0.5,
    check_passes: float = 0.5,
    resamples: int = 2000,
) -> Agreement:
    """Let both score the conversations; one passes where its score is at least its threshold.

        agreement = await measure_agreement(judge, create_correctness_reward(), trajectories)

    Take conversations of which about half are right: on others a judge that always says yes agrees, too,
    and only kappa shows it. Raises ConfigurationError where no conversation has both verdicts.
    """
    verdicts, failures = [], []
    for reward, threshold in ((as_reward(judge), judge_passes), (as_reward(check), check_passes)):
        results = await score_trajectories(reward, trajectories)
        scores = [result.score if isinstance(result, RewardResult) else None for result in results]
        failures += [str(result) for result in results if isinstance(result, RewardFailure)]
        verdicts.append([None if score is None else score >= threshold for score in scores])
    by_scenario: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    for trajectory, judged, checked in zip(trajectories, *verdicts, strict=True):
        if judged is not None and checked is not None:
            by_scenario[trajectory.scenario.id].append((judged, checked))
    if not by_scenario:
        why = failures[0] if failures else "look at what they need in the scenarios"
        raise ConfigurationError(f"no conversation has a verdict of judge and check: {why}")
    kinds = ((True, True), (True, False), (False, True), (False, False))
    counts = [tuple(map(pairs.count, kinds)) for pairs in by_scenario.values()]
    total = _added(counts)
    n = sum(total)
    accuracy = (total[0] + total[3]) / n
    return Agreement(
        n=n,
        accuracy=accuracy,
        accuracy_interval=share_interval(_linear_shares(counts, accuracy)),
        kappa=cohens_kappa(*total),
        kappa_interval=await in_thread(kappa_interval, counts, resamples),
        both=total[0],
        only_judge=total[1],
        only_check=total[2],
        neither=total[3],
        num_unscored=len(trajectories) - n,
    )


def _added(counts: Sequence[Counts]) -> Counts:
    return tuple(sum(column) for column in zip(*counts, strict=True))


def _linear_shares(counts: Sequence[Counts], accuracy: float) -> list[float]:
    """A share for each scenario, whose mean and spread are those of the share of all conversations.

    With equally many conversations the scenario's own; else the ratio's linearisation (Cochran, Sampling
    Techniques, 1977, section 6.3).
    """
    mean_size = sum(map(sum, counts)) / len(counts)
    return [accuracy + (count[0] + count[3] - accuracy * sum(count)) / mean_size for count in counts]


def kappa_interval(counts: Sequence[Counts], resamples: int = 2000) -> tuple[float, float] | None:
    """95 % of kappa from each scenario's counts; None without a kappa.

    On each side the wider of two: the percentile bootstrap over scenarios, and the interval of the agreement
    with what chance alone would agree taken as known. The bootstrap knows nothing of disagreements that it
    has hardly met: near 1 it holds the truth in 31 % of the cases with 12 scenarios.
    """
    import numpy as np

    table = np.asarray(counts)  # [scenarios, 4]
    draw = np.random.default_rng(derive(0, "agreement", len(counts)))
    samples = table[draw.integers(len(table), size=(resamples, len(table)))].sum(1)  # [resamples, 4]
    estimates = [cohens_kappa(*map(int, row)) for row in samples]
    kappas = [kappa for kappa in estimates if kappa is not None]
    if not kappas:
        return None
    drawn_low, drawn_high = np.quantile(kappas, [0.025, 0.975])
    both, only_judge, only_check, neither = total = _added(counts)
    n = sum(total)
    judge, check = (both + only_judge) / n, (both + only_check) / n
    expected = judge * check + (1 - judge) * (1 - check)
    if expected == 1:
        return float(drawn_low), float(drawn_high)
    low, high = (
        (bound - expected) / (1 - expected)
        for bound in share_interval(_linear_shares(counts, (both + neither) / n))
    )
    return min(low, float(drawn_low)), max(high, float(drawn_high))
