"""Environments and rewards by the names that a YAML file gives them. The experiment makes them here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stateset_agents.core.environment import ConversationEnvironment, Environment
from stateset_agents.core.reward import EnvironmentReward, RewardFunction
from stateset_agents.core.scoring.function_reward import as_reward, asks_for_a_conversation
from stateset_agents.rewards.shaping import refuse_unfit_shaping
from stateset_agents.runtime.named_code import check_arguments, imported, registered
from stateset_agents.runtime.yaml_files import parse_yaml
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.estimators import ESTIMATORS, estimators_with
from stateset_agents.training.loop.curriculum.plan import check_parts
from stateset_agents.training.settings.composed_rewards import COMPOSED, compose
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario

ENVIRONMENTS: Mapping[str, str] = {
    "conversation": "stateset_agents.core.environment:ConversationEnvironment",
    "chats": "stateset_agents.environments.chat_logs:ChatLogs",
    "retail_desk": "stateset_agents.environments.retail_desk:RetailDesk",
    "served": "stateset_agents.environments.served:ServedConversations",
    "gymnasium": "stateset_agents.environments.gymnasium_text:GymnasiumText",
    "openenv": "stateset_agents.environments.openenv:OpenEnvText",
    "mcp": "stateset_agents.environments.mcp.tools:McpEnvironment",
    "tau2": "stateset_agents.environments.tau2:Tau2Environment",
    "external_program": "stateset_agents.environments.programs.external_program:ExternalProgram",
    "in_process_agent": "stateset_agents.environments.programs.in_process_agent:InProcessAgent",
    "arithmetic": "stateset_agents.environments.problems:ArithmeticProblems",
    "decomposed": "stateset_agents.environments.decomposed:DecomposedProblems",
    "equations": "stateset_agents.environments.problems:EquationProblems",
    "countdown": "stateset_agents.environments.problems:CountdownProblems",
    "coding": "stateset_agents.environments.problems:CodingProblems",
    "pictures": "stateset_agents.environments.problems:PictureProblems",
    "problems": "stateset_agents.environments.problems:ProblemFiles",
    "reasoning_gym": "stateset_agents.environments.problems:ReasoningGymProblems",
}
"""Name -> "package.module:Class"."""

REWARDS: Mapping[str, str] = {
    "environment": "stateset_agents.core.reward:EnvironmentReward",
    "customer_service": "stateset_agents.core.reward:create_customer_service_reward",
    "helpful": "stateset_agents.core.reward:create_helpful_reward",
    "task": "stateset_agents.core.reward:create_task_reward",
    "tutoring": "stateset_agents.core.reward:create_tutoring_reward",
    "engagement": "stateset_agents.core.reward:create_engagement_reward",
    "domain": "stateset_agents.core.reward:create_domain_reward",
    "correctness": "stateset_agents.rewards.verifiable:create_correctness_reward",
    "safety": "stateset_agents.rewards.verifiable:create_safety_reward",
    "conciseness": "stateset_agents.rewards.verifiable:create_conciseness_reward",
    "pattern": "stateset_agents.rewards.formats:create_pattern_reward",
    "schema": "stateset_agents.rewards.formats:create_schema_reward",
    "similarity": "stateset_agents.rewards.formats:create_similarity_reward",
    "code": "stateset_agents.rewards.code:create_code_reward",
    "judge": "stateset_agents.rewards.judge:create_judge_reward",
    "reasoning": "stateset_agents.rewards.reasoning:create_reasoning_reward",
    "reasoning_format": "stateset_agents.rewards.reasoning:create_reasoning_format_reward",
    "math_answer": "stateset_agents.rewards.reasoning:create_math_answer_reward",
}
"""Name -> "package.module:function or class"; those made of others are in `composed_rewards.COMPOSED`."""


def read_spec(what: str, text: str) -> Mapping[str, Any]:
    """A spec from the command line as YAML has it: `conciseness`, or `{name: conciseness, max_words: 40}`.

    Raises ConfigurationError for anything else.
    """
    spec = parse_yaml(text, of=f"{what} {text!r}") if text.lstrip().startswith("{") else text
    return {"name": spec} if isinstance(spec, str) else spec


def make_environment(spec: Mapping[str, Any]) -> Environment:
    """{"name": "conversation", "scenarios": "calls.jsonl"} -> the environment.

    Raises ConfigurationError for a name that leads nowhere and for arguments it does not take.
    """
    inner = spec.get("environment")
    if spec.get("name") == "decomposed" and isinstance(inner, str | Mapping):
        inner = {"name": inner} if isinstance(inner, str) else inner
        spec = {**spec, "environment": make_environment(inner)}
    environment: Environment = _make("environment", ENVIRONMENTS, spec)
    return environment


def make_reward(spec: Mapping[str, Any]) -> RewardFunction:
    """{"name": "customer_service"} -> the reward; a reward, or a function of what it asks for, may be named
    too.

    Raises ConfigurationError as `make_environment` does.
    """
    arguments = {key: value for key, value in spec.items() if key != "name"}
    if spec.get("name") in COMPOSED:
        return compose(spec["name"], arguments, make_reward, lambda name: imported("potential", name))
    named_reward = _make("reward", {**REWARDS, **dict.fromkeys(COMPOSED, "")}, spec)
    if not isinstance(named_reward, RewardFunction):
        raise ConfigurationError(
            f"reward {spec['name']!r} is a {type(named_reward).__name__}: name a RewardFunction or its maker"
        )
    return named_reward


def check_reward(reward: RewardFunction, config: TrainingConfig) -> None:
    """Raises ConfigurationError for a reward that this training would undo or bend, with the cure."""
    check_parts(reward, config)
    estimator = ESTIMATORS[config.advantage_estimator]
    refuse_unfit_shaping(
        reward,
        estimator=config.advantage_estimator,
        seen_by=estimators_with(lambda other: other.sees_shaping),
        gamma=config.gamma,
        bootstrapped=estimator.critic is not None and config.bootstrap_truncated,
    )


def check_scored(reward: RewardFunction, environment: Environment, scenarios: Sequence[Scenario]) -> None:
    """Raises ConfigurationError where no conversation can get a score: the reward is the environment's own,
    and that has no verdict of any scenario."""
    if type(reward) is not EnvironmentReward or not isinstance(environment, ConversationEnvironment):
        return
    if not any(environment.may_judge(scenario) for scenario in scenarios):
        raise ConfigurationError(
            f"nothing would score a conversation: none of the {len(scenarios)} scenarios says what a success "
            "is, and there is no reward but the environment's: name one, reward: customer_service, or give "
            "the environment a verdict, success: package.module:function"
        )


def _make(what: str, registry: Mapping[str, str], spec: Mapping[str, Any]) -> Any:
    arguments = dict(spec)
    name = arguments.pop("name", None)
    if not isinstance(name, str):
        raise ConfigurationError(
            f"{what} needs a name: one of {', '.join(registry)}, or package.module:Class, got {name!r}"
        )
    maker = registered(what, registry, name)
    if isinstance(maker, RewardFunction) and not arguments:  # what @reward_function made
        return maker
    if isinstance(maker, RewardFunction):
        raise ConfigurationError(f"{what} {name!r} is made already: take out {', '.join(arguments)}")
    if not callable(maker):
        raise ConfigurationError(f"{what} {name!r} is a {type(maker).__name__}: name a class or a function")
    if what == "reward" and not arguments and asks_for_a_conversation(maker):
        return as_reward(maker)
    check_arguments(f"{what} {name!r}", maker, arguments)
    return maker(**arguments)
