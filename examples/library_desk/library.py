"""The library desk: tools, user, verdict, reward, environment."""

from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.reward import reward_function
from stateset_agents.core.tools import ToolError, tool
from stateset_agents.core.users.simulated_user import Rule, RuleBasedUser
from stateset_agents.types.scenario import Scenario


@tool
def look_up(title: str, scenario: Scenario) -> dict[str, str]:
    """Find a book that the member has on loan, and whether another reader is waiting for it.

    Args:
        title: One word of the title, e.g. atlas.
    """
    if title != scenario.context["title"]:
        raise ToolError(f"no loan of {title}")
    return {"title": title, "waiting": scenario.context["waiting"]}


@tool
def renew_book(title: str, scenario: Scenario) -> dict[str, str]:
    """Lend a book for two more weeks. Not allowed while another reader is waiting for it.

    Args:
        title: As in look_up.
    """
    if title != scenario.context["title"]:
        raise ToolError(f"no loan of {title}")
    return {"renewed": title}


YES, NO = "is renewed", "someone waits"


def member(scenario: Scenario, seed: int) -> RuleBasedUser:
    """Leaves when told yes or no, or after two replies that say neither."""
    title = scenario.context["title"]
    return RuleBasedUser(
        [Rule(pattern=r"\?", replies=(f"the {title}", f"it is the {title}"), once=True)],
        otherwise=("sorry, what does that mean",),
        goal=lambda messages: YES in messages[-1].content or NO in messages[-1].content,
        patience=1,
        seed=seed,
    )


def served(scenario: Scenario, messages) -> bool:
    """Looked up first; then renewed where that is allowed and not where it isn't, and told which."""
    results = [message.content for message in messages if message.role == "tool"]
    last = next(message.content for message in reversed(messages) if message.role == "assistant")
    renewed = any("renewed" in result for result in results)
    if not results or "waiting" not in results[0]:
        return False
    if scenario.context["waiting"] == "yes":
        return NO in last and not renewed
    return YES in last and renewed


@reward_function
def good_service(success, replies) -> float:
    """1 for a success, less .05 for every reply."""
    return float(success) - 0.05 * len(replies)


def library_desk(scenarios: str = "scenarios.jsonl", max_turns: int = 5) -> ConversationEnvironment:
    """The environment."""
    return ConversationEnvironment(
        scenarios,
        tools=[look_up, renew_book],
        user=member,
        success=served,
        system_prompt="library desk.",
        max_turns=max_turns,
    )
