"""Replies that think before they answer: thinking and answer told apart, and answers compared by value.

from stateset_agents.reasoning import math_agreement, split_reasoning
"""

from stateset_agents.reasoning.maths.agreement import math_agreement
from stateset_agents.reasoning.replies import Reasoned, answer_of, num_steps, read_reasoned, split_reasoning

__all__ = ["Reasoned", "answer_of", "math_agreement", "num_steps", "read_reasoned", "split_reasoning"]
