"""A taskset of verifiers: a question that a tool answers, and a reward for having asked it."""

import verifiers.v1 as vf

__all__ = ["ShelvesTaskset"]


class ShelvesData(vf.TaskData):
    """What lies where, and what is asked for."""

    shelves: dict[str, int]
    thing: str


class ShelvesTools(vf.Toolset[vf.ToolsetConfig]):
    """A server of tools, which verifiers runs beside each conversation."""

    TOOL_PREFIX = "shelf"

    async def setup_task(self, task: ShelvesData) -> None:
        """Put the task's things on the shelves."""
        self.shelves = task.shelves

    @vf.tool
    def count(self, thing: str) -> str:
        """How many of a thing are on the shelves.

        Args:
            thing: Its name.
        """
        return str(self.shelves.get(thing, 0))


class ShelvesConfig(vf.TaskConfig):
    """Where the tools run: beside the harness unless told otherwise."""

    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ShelvesTask(vf.Task[ShelvesData, vf.State, ShelvesConfig]):
    """Scores the number in the reply."""

    @classmethod
    def toolsets(cls, config: ShelvesConfig) -> list[vf.Toolset]:
        """One server of tools."""
        return [ShelvesTools(config.tools)]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """The last reply says how many there are."""
        return float(str(self.data.shelves[self.data.thing]) in trace.last_reply)

    @vf.metric
    async def num_looks(self, trace: vf.Trace) -> float:
        """Answers of the tool."""
        return float(len(trace.tool_messages))


class ShelvesTasksetConfig(vf.TasksetConfig):
    """The tools' place is a setting of each task."""

    task: ShelvesConfig = ShelvesConfig()


class ShelvesTaskset(vf.Taskset[ShelvesTask, ShelvesTasksetConfig]):
    """Four things to ask for."""

    def load(self) -> list[ShelvesTask]:
        """A question for each thing."""
        shelves = {"jars": 12, "ropes": 31, "lamps": 47, "tins": 58}
        return [
            ShelvesTask(
                ShelvesData(prompt=f"How many {thing} are there?", shelves=shelves, thing=thing),
                self.config.task,
            )
            for thing in shelves
        ]


if __name__ == "__main__":
    ShelvesTools.run()
