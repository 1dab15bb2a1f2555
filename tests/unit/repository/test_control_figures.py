"""The pictures of docs/control.md show what the code does."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from scripts.control_figures import FIGURES, FOLDER, calls
from stateset_agents.numeric.autoscaling.grpo.network import GRPOPolicyNetwork


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_of_the_docs_has_the_words_that_the_code_draws(name):
    def words(svg: str) -> list[str]:
        return [text.text or "" for text in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]

    assert words(FIGURES[name]()) == words((FOLDER / f"control-{name}.svg").read_text())


def test_the_architecture_shows_every_weight_once():
    network = GRPOPolicyNetwork(use_value_head=True, num_layers=1, history_length=3)
    shown = sum(weight.numel() for _, module, _ in calls(network, 2) for weight in module.parameters())
    assert shown == sum(weight.numel() for weight in network.parameters())
