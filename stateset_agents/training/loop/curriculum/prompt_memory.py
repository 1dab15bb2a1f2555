"""Prompts that are worth playing again: a bounded memory of earlier domains, for replay.

What is kept is scenarios, never replies: a replayed scenario is sampled anew by the policy of the day, so
that its update is as on-policy as any other.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stateset_agents.training.loop.curriculum.state import SuccessTable
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedPrompt:
    """A scenario of an earlier domain."""

    domain: str
    scenario: Scenario
    success: float
    """The rate that was expected of it when it was last played, from 0 to 1."""

    @property
    def worth(self) -> float:
        """p(1 - p), the variance of its success: a group's signal comes from that."""
        return self.success * (1.0 - self.success)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMemory:
    """A memory of at most `capacity` prompts: of each domain an equal share, and in it those of intermediate
    success."""

    capacity: int = 10_000
    prompts: tuple[RememberedPrompt, ...] = ()
    """Prompts by domain, in the order in which domains were learned; the worthiest of a domain first."""

    def __post_init__(self) -> None:
        if isinstance(self.capacity, bool) or not isinstance(self.capacity, int) or self.capacity < 1:
            raise ConfigurationError(f"capacity must be a whole number from 1 on, got {self.capacity!r}")

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def by_domain(self) -> dict[str, tuple[RememberedPrompt, ...]]:
        """The prompts of each domain."""
        domains: dict[str, list[RememberedPrompt]] = {}
        for prompt in self.prompts:
            domains.setdefault(prompt.domain, []).append(prompt)
        return {domain: tuple(prompts) for domain, prompts in domains.items()}

    def with_domain(
        self, domain: str, scenarios: Sequence[Scenario], successes: SuccessTable
    ) -> PromptMemory:
        """The memory with a domain's scenarios, as far as they were played; an earlier memory of it is gone.

        `successes` are those of the training that played them, by family. Where all do not fit, a domain
        keeps those nearest to a success of one half; of equal ones a digest of the id decides.
        """
        played = [
            RememberedPrompt(
                domain=domain, scenario=scenario, success=successes.rate(scenario.id, scenario.family)
            )
            for scenario in scenarios
            if scenario.id in successes.scenarios
        ]
        others = {name: prompts for name, prompts in self.by_domain.items() if name != domain}
        return self._of({**others, domain: played})

    def with_successes(self, domain: str, successes: SuccessTable) -> PromptMemory:
        """The memory with what a replay showed of a domain's prompts; the ids are those of its scenarios."""
        prompts = tuple(
            dataclasses.replace(prompt, success=successes.rate(prompt.scenario.id, prompt.scenario.family))
            if prompt.domain == domain and prompt.scenario.id in successes.scenarios
            else prompt
            for prompt in self.prompts
        )
        return dataclasses.replace(self, prompts=prompts)

    def _of(self, domains: Mapping[str, Sequence[RememberedPrompt]]) -> PromptMemory:
        survivors: list[RememberedPrompt] = []
        sizes = shares(self.capacity, [len(prompts) for prompts in domains.values()])
        for prompts, size in zip(domains.values(), sizes, strict=True):
            survivors += sorted(prompts, key=_worthiest_first)[:size]
        return PromptMemory(capacity=self.capacity, prompts=tuple(survivors))

    def save(self, path: str | Path) -> None:
        """Write it as JSONL: the capacity, then a prompt a line. Blocking."""
        prompts = [
            {"domain": prompt.domain, "scenario": prompt.scenario.to_record(), "success": prompt.success}
            for prompt in self.prompts
        ]
        lines = [{"capacity": self.capacity}, *prompts]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> PromptMemory:
        """The memory that `save` wrote. Raises ConfigurationError for another file. Blocking."""
        try:
            first, *lines = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
            prompts = [
                RememberedPrompt(**{**line, "scenario": Scenario.from_record(line["scenario"])})
                for line in lines
            ]
            return cls(capacity=first["capacity"], prompts=tuple(prompts))
        except OSError as error:
            raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigurationError(
                f"{path} is no memory of prompts ({error}): give a file that PromptMemory.save wrote"
            ) from error


def _worthiest_first(prompt: RememberedPrompt) -> tuple[float, str]:
    digest = hashlib.blake2b(f"{prompt.domain}\n{prompt.scenario.id}".encode(), digest_size=8)
    return -prompt.worth, digest.hexdigest()


def shares(capacity: int, wanted: Sequence[int]) -> list[int]:
    """An equal share of the capacity for each, where it wants so many; what it does not want is the others'.

    >>> shares(10, [20, 20]), shares(10, [2, 20]), shares(10, [9, 9, 1])
    ([5, 5], [2, 8], [5, 4, 1])
    """
    portions = [0] * len(wanted)
    left = capacity
    hungry = [index for index, number in enumerate(wanted) if number]
    while hungry and left:
        equal, rest = divmod(left, len(hungry))
        for place, index in enumerate(hungry):
            more = min(wanted[index] - portions[index], equal + (place < rest))
            portions[index] += more
            left -= more
        hungry = [index for index in hungry if portions[index] < wanted[index]]
    return portions
