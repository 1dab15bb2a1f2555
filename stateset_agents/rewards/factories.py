"""Ready rewards for kinds of conversation: customer service, helpfulness, tasks, tutoring and others.

They share one rule. Where something can be checked (`context["expected_facts"]`, or the environment's
`success`), the resolution dominates. Where nothing can, they see *form* only: such a score stays at or
below .5 and says so, for text that merely looks like help must not earn what help earns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stateset_agents.claims.text_checks import (
    content_words,
    echo,
    is_courteous,
    is_displeased,
    is_pleased,
    is_refusal,
    words,
)
from stateset_agents.claims.typed_values import stem
from stateset_agents.core.scoring.base import RewardFunction, RewardResult
from stateset_agents.core.scoring.transcript import (
    Transcript,
    claims_something_false,
    in_normal_form,
    read_transcript,
    resolution,
    share,
)
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.types.logs import get_logger
from stateset_agents.types.settings import expect_one_of
from stateset_agents.types.trajectory import Trajectory

_log = get_logger(__name__)

FORM_ONLY_CAP = 0.5
"""Highest score of a conversation when nothing about it can be checked."""
UNRESOLVED_CAP = 0.5
"""Highest score of a conversation that is not resolved, or names a fact without telling it."""


def _courtesy(transcript: Transcript) -> float:
    """1 for courtesy in any reply: a second apology earns nothing."""
    return float(any(map(is_courteous, transcript.sound)))


def _relevance(transcript: Transcript) -> float:
    """1/2 for one word of the topic, in any of its forms, 1 for two."""
    stems = {stem(word) for text in transcript.sound for word in content_words(text)}
    return min(len(stems & transcript.topic), 2) / 2


def _helpful(transcript: Transcript) -> float:
    """Share of replies that don't turn the user away."""
    return share([not is_refusal(text) for text in transcript.sound])


def _complete(transcript: Transcript) -> float:
    """Share of replies that are whole sentences of 3 to 120 words."""
    return share(
        [
            3 <= len(words(text)) <= 120 and text.rstrip(" \"')").endswith((".", "!", "?"))
            for text in transcript.sound
        ]
    )


def _brevity(transcript: Transcript) -> float:
    """Share of replies within 40 words."""
    return share([len(words(text)) <= 40 for text in transcript.sound])


def _asks(transcript: Transcript) -> float:
    """A question at least once."""
    return float(any("?" in text for text in transcript.sound))


def _goes_on(transcript: Transcript) -> float:
    """Share of the user's reactions that neither complain nor say once more what was said before."""
    earlier = list(transcript.user_texts[: len(transcript.user_texts) - len(transcript.reactions)])
    fine = []
    for reaction in transcript.reactions:
        again = echo(reaction, earlier) >= 0.6 or words(reaction) in map(words, earlier)
        fine.append(not again and not is_displeased(reaction))
        earlier.append(reaction)
    return share(fine)


def _pleased(transcript: Transcript) -> float:
    """1 where the user's last words are thanks or praise."""
    return float(bool(transcript.reactions) and is_pleased(transcript.reactions[-1]))


_FORM_CHECKS: Mapping[str, Callable[[Transcript], float]] = {
    "courtesy": _courtesy,
    "relevance": _relevance,
    "helpful": _helpful,
    "complete": _complete,
    "brevity": _brevity,
    "asks": _asks,
    "goes_on": _goes_on,
    "pleased": _pleased,
}
"""Name -> a check of form, from 0 to 1."""
_ENGLISH_CHECKS = frozenset({"courtesy", "helpful", "pleased"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """One kind of conversation: how much its resolution counts, and what good form is."""

    resolution: float
    """Share of the score when something can be checked; form has the rest."""
    form: Mapping[str, float] = field(default_factory=dict)
    """Weights of the form checks; they sum to 1."""


DOMAINS: Mapping[str, Domain] = {
    name: Domain(**fields) for name, fields in read_yaml(Path(__file__).with_name("domains.yaml")).items()
}


class ResolutionReward(RewardFunction):
    """Scores whether the user's matter was resolved, and how it was said, from 0 to 1.

        score = integrity · manner · (w · resolution + (1 - w) · form)      something can be checked
        score = integrity · manner · form · 0.5                             nothing can

    `resolution` is the share of `context["expected_facts"]` told, the environment's `success`, or the
    mean of the two where there are both. `integrity` is the share of replies that are prose, new, and no
    echo of the user; facts told in other replies don't count. `manner` takes off half for rudeness. Where
    the environment's verdict is False, or a fact is named without being told (as one of several values of
    its type, denied, doubted, taken back), the score is .5 at most. A phrase of `context["forbidden"]` that
    is claimed makes the whole score 0. `context["choices"]` lists types of values of your own.
    """

    local = True

    def __init__(self, domain: Domain, *, name: str, english: bool = True) -> None:
        """`english=False` leaves out what reads English: courtesy, refusals, rudeness, function words."""
        self.name = name
        self._resolution_weight = domain.resolution
        self._form = {
            key: weight for key, weight in domain.form.items() if english or key not in _ENGLISH_CHECKS
        }
        self._english = english

    async def score(self, trajectory: Trajectory) -> RewardResult:
        result = await in_thread(lambda: self._score(in_normal_form(trajectory)))
        if result.breakdown["form_only"]:
            self.warn_once(
                _log,
                "reward scores form only: nothing in the scenario can be checked",
                most=FORM_ONLY_CAP,
                mend='give context["expected_facts"], or an environment that tells success',
            )
        return result

    def _score(self, trajectory: Trajectory) -> RewardResult:
        transcript = read_transcript(trajectory, english=self._english)
        checks = {key: _FORM_CHECKS[key](transcript) for key in self._form}
        form = sum(self._form[key] * value for key, value in checks.items()) / sum(self._form.values())
        breakdown = {"integrity": transcript.integrity, "manner": transcript.manner, "form": form}
        breakdown.update({f"form/{key}": value for key, value in checks.items()})

        resolved = resolution(trajectory, transcript, breakdown)
        if resolved is None:
            value = FORM_ONLY_CAP * form
        else:
            breakdown["resolution"] = resolved
            value = self._resolution_weight * resolved + (1 - self._resolution_weight) * form
            if breakdown.get("success") == 0.0 or "gambled" in breakdown:
                value = min(value, UNRESOLVED_CAP)
        breakdown["form_only"] = float(resolved is None)
        if claims_something_false(trajectory, transcript):
            breakdown["false_claim"] = 1.0
            value = 0.0
        return RewardResult(score=transcript.integrity * transcript.manner * value, breakdown=breakdown)


def create_domain_reward(domain: str, *, english: bool = True) -> ResolutionReward:
    """The reward of one domain of `DOMAINS`; ConfigurationError names the nearest for an unknown one."""
    expect_one_of("domain", domain, DOMAINS)
    return ResolutionReward(DOMAINS[domain], name=domain, english=english)


def create_customer_service_reward(*, english: bool = True) -> ResolutionReward:
    """Resolved, and said with courtesy and to the point.

    It reads `expected_facts`, `forbidden` and `choices` of the scenario's context: see `ResolutionReward`.
    """
    return create_domain_reward("customer_service", english=english)


def create_helpful_reward(*, english: bool = True) -> ResolutionReward:
    """Resolved, and said to the point without turning the user away."""
    return create_domain_reward("helpful", english=english)


def create_task_reward(*, english: bool = True) -> ResolutionReward:
    """The task is done, and said briefly."""
    return create_domain_reward("task", english=english)


create_task_completion_reward = create_task_reward
"""Another name of `create_task_reward`."""


def create_engagement_reward(*, english: bool = True) -> ResolutionReward:
    """Resolved, and the user took to it: went on without complaint, and had thanks or praise at the end.

    The length of the conversation does not count. It reads what the user said, so it is only as good as the
    user: one that thanks whoever asks for thanks teaches the agent to ask for them.
    """
    return create_domain_reward("engagement", english=english)


def create_tutoring_reward(*, english: bool = True) -> ResolutionReward:
    """The facts were explained, with questions; put the bare answer under `context["forbidden"]`."""
    return create_domain_reward("tutoring", english=english)
