"""The documented path of `TemperatureScheduler`, which stands beside the step."""

from stateset_agents.training.loop.step import TemperatureScheduler as TemperatureScheduler
