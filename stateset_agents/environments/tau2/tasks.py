"""tau2's tasks as scenarios: the official splits, tasks of a file, and made tasks; their families."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stateset_agents.environments.tau2.library import DomainName, library
from stateset_agents.environments.tau2.world import Domain
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario, Split, expect_split
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect_that

NO_WRITE, WITH_WRITES = "no_write", "with_writes"
"""The family of tasks in which nothing is to be changed, which doing nothing often gets right; and the part
that all others make together."""
SEVERAL = "several_writes"
_SCORED = ("DB", "ENV_ASSERTION", "ACTION", "COMMUNICATE")
"""Parts of tau2's `reward_basis` that can be scored; NL_ASSERTION needs a judge."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskEntry:
    """A task of tau2's, with the scenario that stands for it."""

    task: Any
    """tau2's `Task`."""
    scenario: Scenario

    @property
    def actions(self) -> Sequence[Any]:
        """The gold actions, in order."""
        criteria = self.task.evaluation_criteria
        return [] if criteria is None else criteria.actions or []


def entry(
    domain: Domain,
    task: Any,
    split: Split,
    *,
    family: str | None = None,
    num_writes: int | None = None,
    pair: str | None = None,
) -> TaskEntry:
    """The scenario of a task; `family` and `num_writes` are read off its gold actions when absent. `pair`
    names it and its twin.

    Raises ConfigurationError for a task that could not be scored in full, or not be played.
    """
    _refuse_unfit(domain, task)
    actions = [] if task.evaluation_criteria is None else task.evaluation_criteria.actions or []
    writes = [action.name for action in actions if action.name in domain.writes]
    num_writes = len(writes) if num_writes is None else num_writes
    instructions = task.user_scenario.instructions
    reason = {} if isinstance(instructions, str) else {"reason_for_call": instructions.reason_for_call}
    scenario = Scenario(
        id=f"{domain.name}:{task.id}",
        family=family or _family(domain, task, writes),
        context={
            "task": task.id,
            **reason,
            "num_writes": num_writes,
            **({"part": WITH_WRITES} if num_writes else {}),
            **({} if pair is None else {"pair": pair}),
        },
        split=split,
    )
    return TaskEntry(task=task, scenario=scenario)


def _family(domain: Domain, task: Any, writes: Sequence[str]) -> str:
    if not writes:
        return NO_WRITE
    # "[mms_issue]airplane_mode_on|...", as tau2's are
    if domain.name == "telecom" and task.id.startswith("["):
        return str(task.id[1:].partition("]")[0])
    return writes[0] if len(set(writes)) == 1 else SEVERAL


def _refuse_unfit(domain: Domain, task: Any) -> None:
    criteria, state = task.evaluation_criteria, task.initial_state
    parts = [] if criteria is None else [part.value for part in criteria.reward_basis]
    unscored = [part for part in parts if part not in _SCORED]
    has_history = state is not None and state.message_history
    has_data = state is not None and state.initialization_data is not None
    faults = {
        "has no evaluation_criteria: give it some, or leave it out": criteria is None,
        f"is paid by {', '.join(unscored) or 'nothing'}, which cannot be scored here: leave it out, or give "
        f"it a reward_basis of {', '.join(_SCORED)}": unscored or not parts,
        "begins with a message_history, which cannot be played: leave it out": has_history,
        "has initialization_data, which only telecom's can have here: leave it out": has_data
        and domain.name != "telecom",
        "has no ticket: it cannot be played solo": domain.solo and not task.ticket,
    }
    for fault, applies in faults.items():
        if applies:
            raise ConfigurationError(f"tau2 task {task.id!r} {fault}")


@functools.cache
def _official(domain: DomainName) -> Mapping[Split, Sequence[Any]]:
    module = library().domains[domain]
    folder = library().folder / "data" / "tau2" / "domains" / domain
    splits = module.get_tasks_split()
    # not `get_tasks`, which makes an object of each of telecom's 2,285
    by_id = {task["id"]: task for task in json.loads((folder / "tasks.json").read_text(encoding="utf-8"))}
    make = library().tasks.Task.model_validate
    return {
        "train": [make(by_id[id]) for id in splits["train"]],
        "test": [make(by_id[id]) for id in splits["test"]],
    }


def official_tasks(domain: Domain, num_validation: int) -> list[TaskEntry]:
    """tau2's official train and test tasks, `num_validation` of those to train on held back, evenly spaced.

    Raises ConfigurationError where so many cannot be held back.
    """
    tasks = _official(domain.name)
    num_train = len(tasks["train"])
    rule = f"be from 0 to {num_train - 1}, for {domain.name} has {num_train} tasks to train on"
    expect_that(0 <= num_validation < num_train, "num_validation", rule, num_validation)
    held_back = {index * num_train // num_validation for index in range(num_validation)}
    return [
        *(
            entry(domain, task, "validation" if index in held_back else "train")
            for index, task in enumerate(tasks["train"])
        ),
        *(entry(domain, task, "test") for task in tasks["test"]),
    ]


def tasks_of_file(domain: Domain, path: str | Path) -> list[TaskEntry]:
    """Tasks in tau2's format, a JSON list; each may have a `split` besides, `train` when absent.

    Raises ConfigurationError for a file that is none, and for tasks as `entry` does.
    """
    import pydantic

    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"tasks must be official, made, or a JSON file of tau2 tasks, got {str(path)!r}: {error}"
        ) from error
    if not isinstance(data, list) or not data or not all(isinstance(task, dict) for task in data):
        raise ConfigurationError(f"{path} must hold a list of tau2 tasks, got {type(data).__name__}")
    entries = []
    for index, item in enumerate(data):
        try:
            task = library().tasks.Task.model_validate(item)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ConfigurationError(
                f"{path}: task {index} is none of tau2's: {place}: {first['msg']}"
            ) from error
        entries.append(
            entry(domain, task, expect_split(item.get("split", "train"), f"{path}: split of {task.id}"))
        )
    ids = [each.scenario.id for each in entries]
    twice = next((id for id in ids if ids.count(id) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"{path}: task {twice!r} stands twice: ids must be unique")
    return entries


# Made tasks

HELD_OUT: Mapping[Split, int] = {"validation": 50, "test": 200}
"""Tasks, whatever the seed and the number to train on."""
_USERS: Mapping[Split, tuple[float, float]] = {
    "train": (0, 0.6),
    "validation": (0.6, 0.75),
    "test": (0.75, 1),
}
"""Share of the users in each split, as a range of a random order."""
_ATTEMPTS = 1000
"""Attempts to draw a request that was not made yet."""
_REASONS = ("no longer needed", "ordered by mistake")
_ADDRESS = ("address1", "address2", "city", "state", "country", "zip")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A user's request, and the arguments of the one call that it takes."""

    user_id: str
    wish: str
    """The request as tau2 words it to its users: "You want ..."."""
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Family:
    """A kind of request."""

    tool: str
    state: str
    """Without it the tool refuses; the user asks for it, and has to be told that it is not so."""
    subject: str
    make: Callable[[_Shop, random.Random, bool], _Request]


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
        arguments={"order_id": order.order_id, "reason": reason},
    )


def _order_address(shop: _Shop, rng: random.Random, permitted: bool) -> _Request:
    order = rng.choice(shop.pending if permitted else shop.not_pending)
    address = shop.new_address(rng, order.address)
    return _Request(
        user_id=order.user_id,
        wish=f"You want order {order.order_id} to be sent to {_written(address)}.",
        arguments={"order_id": order.order_id, **address},
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
        arguments={
            "order_id": order.order_id,
            "item_ids": [item.item_id],
            "new_item_ids": [new],
            "payment_method_id": payment,
        },
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
        arguments={"order_id": order.order_id, "item_ids": [item.item_id], "payment_method_id": payment},
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
        arguments={"user_id": user_id, **address},
    )


FAMILIES: Mapping[str, _Family] = {
    "cancel_order": _Family("cancel_pending_order", "pending", "the order is", _cancel),
    "order_address": _Family("modify_pending_order_address", "pending", "the order is", _order_address),
    "exchange_item": _Family("exchange_delivered_order_items", "delivered", "the order is", _exchange),
    "return_item": _Family("return_delivered_order_items", "delivered", "the order is", _return),
    "user_address": _Family("modify_user_address", "found", "your account was", _user_address),
}
"""Each has a family of refusals beside it: `cancel_order` and `cancel_order_refused`."""
MADE_TOOLS = tuple(family.tool for family in FAMILIES.values())
"""The tools that made tasks need."""


def _written(address: Mapping[str, str]) -> str:
    return ", ".join(f"{address[name]}" for name in _ADDRESS)


def made_tasks(domain: Domain, num_train: int, seed: int) -> list[TaskEntry]:
    """Tasks of one change each, made from tau2's own retail database and scored by tau2's own rules:
    `num_train` to train on, drawn by `seed`, and those of `HELD_OUT`.

    Official retail tasks want some five calls and show 15 tools. These want one call, and the request says
    all that it takes: what a small model can learn. Every task has a twin beside it, the same request where
    the right answer is no: of an order that is not pending or not delivered, of a user who is not known.
    There the tool refuses, and the user has to be told why. Users of train, validation and test are others.
    """
    counts: Mapping[Split, int] = {"train": num_train, **HELD_OUT}
    database = domain.environment.tools.db
    users = sorted(database.users)
    random.Random(derive(0, "tau2 made", "users")).shuffle(users)
    entries: list[TaskEntry] = []
    for split, count in counts.items():
        start, end = (round(share * len(users)) for share in _USERS[split])
        tasks = _of_split(domain, _Shop(database, users[start:end]), split, seed if split == "train" else 0)
        entries += [next(tasks) for _ in range(count)]
    return entries


def _of_split(domain: Domain, shop: _Shop, split: Split, seed: int) -> Iterator[TaskEntry]:
    """One family after the other, each task with its twin; never the same request twice."""
    wishes: set[str] = set()
    number = 0
    while True:
        for name, family in FAMILIES.items():
            pair = f"{split}-{name}-{number:04d}"
            for permitted in (True, False):
                requests = (
                    family.make(
                        shop, random.Random(derive(seed, "tau2 made", pair, permitted, attempt)), permitted
                    )
                    for attempt in range(_ATTEMPTS)
                )
                request = next((request for request in requests if request.wish not in wishes), None)
                if request is None:
                    raise ConfigurationError(
                        f"retail's database has no {number + 1} different {name} tasks to train on: lower "
                        f"num_train to {2 * len(FAMILIES) * number} or less"
                    )
                wishes.add(request.wish)
                yield _entry(domain, request, split, name, pair, permitted)
        number += 1


def _entry(
    domain: Domain, request: _Request, split: Split, name: str, pair: str, permitted: bool
) -> TaskEntry:
    family, user = FAMILIES[name], " ".join(part.title() for part in request.user_id.split("_")[:-1])
    ending = "" if permitted else "_refused"
    id = f"made-{pair}{ending.replace('_', '-')}"
    task = library().tasks.Task.model_validate(
        {
            "id": id,
            "user_scenario": {
                "instructions": {
                    "domain": "retail",
                    "reason_for_call": request.wish,
                    "known_info": f"You are {user}. Your user id is {request.user_id}.",
                    "task_instructions": "If that is not possible, you want to know whether "
                    f"{family.subject} {family.state}.",
                }
            },
            "evaluation_criteria": {
                "actions": [{"action_id": f"{id}-0", "name": family.tool, "arguments": request.arguments}],
                "communicate_info": [] if permitted else [f"not {family.state}"],
            },
        }
    )
    return entry(domain, task, split, family=name + ending, num_writes=int(permitted), pair=pair)
