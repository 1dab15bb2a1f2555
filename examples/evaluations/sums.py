"""A taskset of verifiers: sums in one turn, with two weighted rewards."""

import re

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsData(vf.TaskData):
    """One sum."""

    answer: int


class SumsTask(vf.Task[SumsData]):
    """Scores the last number of the reply, and that it says little else."""

    @vf.reward(weight=0.75)
    async def right(self, trace: vf.Trace) -> float:
        """The last number is the sum."""
        return float(re.findall(r"\d+", trace.last_reply)[-1:] == [str(self.data.answer)])

    @vf.reward(weight=0.25)
    async def brief(self, trace: vf.Trace) -> float:
        """At most four words."""
        return float(len(trace.last_reply.split()) <= 4)


class SumsConfig(vf.TasksetConfig):
    """How many sums there are."""

    num_tasks: int = 5


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    """1 + 2, 2 + 3 and so on."""

    def load(self) -> list[SumsTask]:
        """The sums, of which each knows its answer."""
        return [
            SumsTask(
                SumsData(
                    prompt=f"What is {n} + {n + 1}?", system_prompt="You add numbers.", answer=2 * n + 1
                ),
                self.config.task,
            )
            for n in range(1, self.config.num_tasks + 1)
        ]
