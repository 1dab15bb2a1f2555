"""Tasks of one change each, made from tau2's own retail database and scored by tau2's own rules.

Official retail tasks want some five calls and show 15 tools. These want one call, and the request says all
that it takes: what a small model can learn. Every task has a twin, the same request where the right answer is
no: of an order that is not pending or not delivered, of a user who is not known. There the tool refuses, and
the user has to be told why. Users of train, validation and test are others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stateset_agents.environments.tau2.library import library
from stateset_agents.environments.tau2.tasks import TaskEntry, entry
from stateset_agents.environments.tau2.world import Domain
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Split
from stateset_agents.types.seeds import derive

HELD_OUT: Mapping[Split, int] = {"validation": 50, "test": 200}
"""Tasks, whatever the seed and the number to train on."""
_USERS: Mapping[Split, tuple[float, float]] = {
    "train": (0, 0.6),
    "validation": (0.6, 0.75),
    "test": (0.75, 1),
}
"""Which share of the users, in a random order of its own."""
_ATTEMPTS = 1000
"""To draw a request that was not made yet."""
_REASONS = ("no longer needed", "ordered by mistake")
_ADDRESS = ("address1", "address2", "city", "state", "country", "zip")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What a user asks for, and the one call that it takes."""

    user_id: str
    wish: str
    """As tau2 tells its users: "You want ..."."""
    else_ask: str
    """What the user wants to know where it cannot be done."""
    call: tuple[str, Mapping[str, Any]]
    told: str = ""
    """What has to be told, where the right answer is no."""


class _Shop:
    """tau2's retail database, as the maker reads it."""

    def __init__(self, database: Any, users: Sequence[str]) -> None:
        self.database = database
        self.users = users
        orders = [database.orders[id] for user in users for id in database.users[user].orders]
        self.pending = [order for order in orders if order.status == "pending"]
        self.not_pending = [order for order in orders if order.status in ("processed", "delivered")]
        self.delivered = [order for order in orders if order.status == "delivered"]
        self.not_delivered = [order for order in orders if order.status in ("pending", "processed")]

    def new_address(self, rng: random.Random, old: Any) -> dict[str, str]:
        """Somebody's, with another house number."""
        while True:
            address = self.database.users[rng.choice(self.users)].address
            number, _, street = address.address1.partition(" ")
            if address.zip != old.zip and number.isdigit():
                fields = {name: getattr(address, name) for name in _ADDRESS}
                return {**fields, "address1": f"{rng.randint(100, 999)} {street}"}

    def new_item(self, rng: random.Random, item: Any) -> str | None:
        """Another variant of the item's product that is in stock and not dearer; None where there is none."""
        variants = self.database.products[item.product_id].variants.values()
        fitting = [
            variant.item_id
            for variant in variants
            if variant.available and variant.item_id != item.item_id and variant.price <= item.price
        ]
        return rng.choice(sorted(fitting)) if fitting else None


def _cancel(shop: _Shop, rng: random.Random, permitted: bool) -> _Request:
    order = rng.choice(shop.pending if permitted else shop.not_pending)
    reason = rng.choice(_REASONS)
    return _Request(
        user_id=order.user_id,
        wish=f"You want to cancel order {order.order_id}, with the reason: {reason}.",
        else_ask="you want to know whether the order is pending",
        call=("cancel_pending_order", {"order_id": order.order_id, "reason": reason}),
        told="" if permitted else "not pending",
    )


def _order_address(shop: _Shop, rng: random.Random, permitted: bool) -> _Request:
    order = rng.choice(shop.pending if permitted else shop.not_pending)
    address = shop.new_address(rng, order.address)
    return _Request(
        user_id=order.user_id,
        wish=f"You want order {order.order_id} to be sent to {_written(address)}.",
        else_ask="you want to know whether the order is pending",
        call=("modify_pending_order_address", {"order_id": order.order_id, **address}),
        told="" if permitted else "not pending",
    )


def _exchange(shop: _Shop, rng: random.Random, permitted: bool) -> _Request:
    orders = shop.delivered if permitted else shop.not_delivered
    while True:
        order = rng.choice(orders)
        item = rng.choice(order.items)
        new = shop.new_item(rng, item)
        if new is not None and [other.item_id for other in order.items].count(item.item_id) == 1:
            break
    payment = order.payment_history[0].payment_method_id
    return _Request(
        user_id=order.user_id,
        wish=(
            f"You want to exchange item {item.item_id} of order {order.order_id} for item {new}; the "
            f"difference goes to {payment}."
        ),
        else_ask="you want to know whether the order is delivered",
        call=(
            "exchange_delivered_order_items",
            {
                "order_id": order.order_id,
                "item_ids": [item.item_id],
                "new_item_ids": [new],
                "payment_method_id": payment,
            },
        ),
        told="" if permitted else "not delivered",
    )


def _return(shop: _Shop, rng: random.Random, permitted: bool) -> _Request:
    order = rng.choice(shop.delivered if permitted else shop.not_delivered)
    item = rng.choice(order.items)
    payment = order.payment_history[0].payment_method_id
    return _Request(
        user_id=order.user_id,
        wish=(
            f"You want to return item {item.item_id} of order {order.order_id}, with the refund going to "
            f"{payment}."
        ),
        else_ask="you want to know whether the order is delivered",
        call=(
            "return_delivered_order_items",
            {"order_id": order.order_id, "item_ids": [item.item_id], "payment_method_id": payment},
        ),
        told="" if permitted else "not delivered",
    )


def _user_address(shop: _Shop, rng: random.Random, permitted: bool) -> _Request:
    user_id = rng.choice(shop.users)
    address = shop.new_address(rng, shop.database.users[user_id].address)
    while not permitted:  # the number at its end is off
        name, _, number = user_id.rpartition("_")
        user_id = f"{name}_{(int(number) + rng.randint(1, 999)) % 10_000:04d}"
        if user_id not in shop.database.users:
            break
    return _Request(
        user_id=user_id,
        wish=f"You have moved, and want the address of your account {user_id} to be {_written(address)}.",
        else_ask="you want to know whether your account was found",
        call=("modify_user_address", {"user_id": user_id, **address}),
        told="" if permitted else "not found",
    )


FAMILIES: Mapping[str, Callable[[_Shop, random.Random, bool], _Request]] = {
    "cancel_order": _cancel,
    "order_address": _order_address,
    "exchange_item": _exchange,
    "return_item": _return,
    "user_address": _user_address,
}
"""Each has a family of refusals beside it: `cancel_order` and `cancel_order_refused`."""
MADE_TOOLS = (
    "cancel_pending_order",
    "modify_pending_order_address",
    "exchange_delivered_order_items",
    "return_delivered_order_items",
    "modify_user_address",
)
"""Those that the made tasks take."""


def _written(address: Mapping[str, str]) -> str:
    return ", ".join(f"{address[name]}" for name in _ADDRESS)


def made_tasks(domain: Domain, num_train: int, seed: int) -> list[TaskEntry]:
    """`num_train` tasks to train on, drawn by `seed`, and those of `HELD_OUT`; twins stand side by side."""
    counts: Mapping[Split, int] = {"train": num_train, **HELD_OUT}
    database = domain.environment.tools.db
    users = sorted(database.users)
    random.Random(derive(0, "tau2 made", "users")).shuffle(users)
    made: list[TaskEntry] = []
    for split, count in counts.items():
        start, end = (round(share * len(users)) for share in _USERS[split])
        of_split = _of_split(
            domain, _Shop(database, users[start:end]), split, seed if split == "train" else 0
        )
        made += [next(of_split) for _ in range(count)]
    return made


def _of_split(domain: Domain, shop: _Shop, split: Split, seed: int) -> Iterator[TaskEntry]:
    """One family after the other, each task with its twin; never the same request twice."""
    seen: set[str] = set()
    number = 0
    while True:
        for family, make in FAMILIES.items():
            pair = f"{split}-{family}-{number:04d}"
            for permitted in (True, False):
                drawn = (
                    make(shop, random.Random(derive(seed, "tau2 made", pair, permitted, attempt)), permitted)
                    for attempt in range(_ATTEMPTS)
                )
                request = next((request for request in drawn if request.wish not in seen), None)
                if request is None:
                    raise ConfigurationError(
                        f"retail's database has no {number + 1} different {family} tasks to train on: lower "
                        f"num_train to {2 * len(FAMILIES) * number} or less"
                    )
                seen.add(request.wish)
                yield _entry(domain, request, split, family, pair)
        number += 1


def _entry(domain: Domain, request: _Request, split: Split, family: str, pair: str) -> TaskEntry:
    tool, arguments = request.call
    name = " ".join(part.title() for part in request.user_id.split("_")[:-1])
    id = f"made-{pair}{'-refused' * bool(request.told)}"
    task = library().tasks.Task.model_validate(
        {
            "id": id,
            "user_scenario": {
                "instructions": {
                    "domain": "retail",
                    "reason_for_call": request.wish,
                    "known_info": f"You are {name}. Your user id is {request.user_id}.",
                    "task_instructions": f"If that is not possible, {request.else_ask}.",
                }
            },
            "evaluation_criteria": {
                "actions": [{"action_id": f"{id}-0", "name": tool, "arguments": dict(arguments)}],
                "communicate_info": [request.told] if request.told else [],
            },
        }
    )
    family = f"{family}{'_refused' * bool(request.told)}"
    return entry(domain, task, split, family=family, num_writes=0 if request.told else 1, pair=pair)
