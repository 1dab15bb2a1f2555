"""How callers put things, by family and split. No wording stands in two splits."""

from __future__ import annotations

from collections.abc import Mapping

from stateset_agents.types.scenario import Split

GREETINGS = ("", "hi, ", "hello, ", "hey, ")

OPENINGS: Mapping[str, Mapping[Split, tuple[str, ...]]] = {
    # `{order}` becomes "order K27", or "my order" where the caller leaves the id out.
    "order_status": {
        "train": (
            "where is {order}?",
            "what is the status of {order}?",
            "when does {order} arrive?",
            "is there news on {order}?",
            "can you check {order}?",
            "how is {order} doing?",
        ),
        "validation": ("can you check the status of {order}?",),
        "test": ("where is {order}? when does it arrive?", "what is the news on {order}?"),
    },
    "cancel": {
        "train": (
            "cancel {order}.",
            "i want to cancel {order}.",
            "can you cancel {order}?",
            "please stop {order}.",
            "i do not need {order} now, cancel it.",
            "i bought {order} by mistake, please cancel it.",
        ),
        "validation": ("please cancel {order}.",),
        "test": ("i need to cancel {order}.", "stop {order}, i do not want it now."),
    },
    "return": {
        "train": (
            "i want to return {order}.",
            "can i send back {order}?",
            "i want my money back for {order}.",
            "i do not like the {item}, can i return {order}?",
            "return {order} please.",
            "please take back {order}.",
        ),
        "validation": ("can i return {order}?",),
        "test": ("i need to return {order}.", "can you take back {order}? i want my money back."),
    },
    "exchange": {
        "train": (
            "i want to swap {order} for a {new_item}.",
            "can you exchange {order} for a {new_item}?",
            "please swap {order} for a {new_item}.",
            "exchange {order}, i want a {new_item}.",
            "can i get a {new_item} for {order}?",
            "i want a {new_item} in place of {order}.",
        ),
        "validation": ("can i swap {order} for a {new_item}?",),
        "test": ("i need to exchange {order} for a {new_item}.", "swap {order}, i want a {new_item}."),
    },
    "address": {
        "train": (
            "please send {order} to {new_city}.",
            "change the address of {order} to {new_city}.",
            "i moved to {new_city}, can you send {order} there?",
            "can you ship {order} to {new_city}?",
            "{order} must go to {new_city}.",
            "i moved, {order} must go to {new_city}.",
        ),
        "validation": ("can you send {order} to {new_city}?",),
        "test": (
            "i moved, please ship {order} to {new_city}.",
            "can you change {order}? it must go to {new_city}.",
        ),
    },
    "lost_parcel": {
        "train": (
            "{order} never came.",
            "{order} is missing.",
            "i did not get {order}.",
            "i never got {order}.",
            "i still miss {order}, please help.",
            "{order} did not come, can you help?",
        ),
        "validation": ("{order} is still missing.",),
        "test": ("i still did not get {order}.", "{order} is missing, it never came."),
    },
}

ANSWERS: Mapping[Split, tuple[str, ...]] = {
    "train": ("it is {order_id}.", "order {order_id}.", "it is order {order_id}."),
    "validation": ("i mean {order_id}.",),
    "test": ("the order is {order_id}.", "sorry, it is {order_id}."),
}
"""What the caller answers to "which order is it?". The id never comes first: without a blank before it, it
would be other tokens than in a tool call, and no model that learnt to copy it there could."""
