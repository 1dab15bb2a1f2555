"""Write tasks.jsonl: customers who ask for an order's status or want it cancelled, in three splits."""

import json
import random
from pathlib import Path

ASKS = {
    "status": ("where is order {}?", "can you check the status of order {}?", "what is up with order {}?"),
    "cancel": ("please cancel order {}.", "can you cancel order {}?", "i want to cancel order {}."),
}
HOW_MANY = {"train": 200, "validation": 20, "test": 60}


def main(folder: Path) -> None:
    """Write the file into a folder."""
    draw = random.Random(7)
    with (folder / "tasks.jsonl").open("w", encoding="utf-8") as file:
        for split, number in HOW_MANY.items():
            for place in range(number):
                wish = ("status", "cancel")[place % 2]
                order = f"{draw.choice('BCDFGHKLMNOPSTUVX')}{draw.randrange(10, 100)}"
                status = draw.choice(("pending", "shipped") if wish == "cancel" else ("delivered", "pending"))
                task = {
                    "id": f"{split}-{place}",
                    "family": wish,
                    "opening": draw.choice(ASKS[wish]).format(order),
                    "context": {
                        "wish": wish,
                        "order_id": order,
                        "status": status,
                        "customer": f"u{draw.randrange(100):02d}",
                    },
                    "split": split,
                }
                file.write(json.dumps(task) + "\n")


if __name__ == "__main__":
    main(Path(__file__).parent)
