"""A small task of Inspect: sums, with a tool, scored by the number in the answer."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import Tool, tool


@tool
def add() -> Tool:
    """A tool of Inspect."""

    async def execute(one: int, other: int) -> int:
        """Add two numbers.

        Args:
            one: A number.
            other: Another number.
        """
        return one + other

    return execute


@task
def arithmetic() -> Task:
    """Five sums."""
    samples = [Sample(id=n, input=f"What is {n} + {n + 1}?", target=str(2 * n + 1)) for n in range(1, 6)]
    solver = [system_message("You add numbers."), use_tools(add()), generate()]
    return Task(dataset=samples, solver=solver, scorer=match(numeric=True))
