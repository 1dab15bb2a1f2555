"""The application around the agents of this folder: a customer's question, two functions, and how it went.

The task comes as a line of JSON on standard input, and the last line that is printed is the verdict. No agent
library is imported here, and nothing is known of training.
"""

import json
import sys

task = json.loads(sys.stdin.readline())
question = task["opening"]
_facts = task["context"]
instructions = f"shop desk. customer {_facts['customer']} is signed in."
_shop = {"status": _facts["status"], "looked": False, "cancelled": False}


def get_order(order_id: str) -> str:
    """Look up an order's status.

    Args:
        order_id: The order's id.
    """
    if order_id != _facts["order_id"]:
        return json.dumps({"error": f"no order {order_id}"})
    _shop["looked"] = True
    return json.dumps({"order_id": order_id, "status": _shop["status"]})


def cancel_order(order_id: str) -> str:
    """Cancel an order that is pending.

    Args:
        order_id: The order's id.
    """
    if order_id != _facts["order_id"]:
        return json.dumps({"error": f"no order {order_id}"})
    if _shop["status"] != "pending":
        return json.dumps({"error": f"cannot cancel: the order is {_shop['status']}"})
    _shop["status"], _shop["cancelled"] = "cancelled", True
    return json.dumps({"result": "cancelled", "order_id": order_id})


def finish(said: str | None) -> None:
    """Print the verdict: 1 for the right thing done and said, a tenth for having looked the order up."""
    status, said = _facts["status"], said or ""
    if _facts["wish"] == "cancel" and status == "pending":
        right = bool(_shop["cancelled"]) and "cancelled" in said
    else:
        right = bool(_shop["looked"]) and status in said and not _shop["cancelled"]
    reward = 1.0 if right else 0.1 * bool(_shop["looked"])
    print(json.dumps({"reward": reward, "success": right, "metadata": {"said": said}}))


def finish_sorted(wish: str, order_id: str | None = None) -> None:
    """Print the verdict on what was understood: half of it for the wish, half for the order."""
    right = [wish == _facts["wish"]]
    if order_id is not None:
        right.append(order_id == _facts["order_id"])
    verdict = {"reward": sum(right) / len(right), "success": all(right), "metadata": {"wish": wish}}
    print(json.dumps(verdict))
