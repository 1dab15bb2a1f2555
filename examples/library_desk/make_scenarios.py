"""Write scenarios.jsonl: for every title a copy that is free and one that another reader waits for."""

import json

TITLES = {
    "train": "atlas novel primer reader guide memoir thriller cookbook diary fable epic legend "
    "manual journal almanac ballad drama essay comic sonnet grammar western romance chronicle",
    "validation": "saga psalter lexicon satire",
    "test": "mystery poem tragedy handbook anthology biography treatise calendar",
}
OPENINGS = ["can i keep the {} longer", "please renew the {}", "i am not done with the {}"]

with open("scenarios.jsonl", "w", encoding="utf-8") as file:
    for split, titles in TITLES.items():
        for title in titles.split():
            for waiting in ("no", "yes"):
                for number, opening in enumerate(OPENINGS):
                    scenario = {
                        "id": f"{title}-{waiting}-{number}",
                        "topic": "free" if waiting == "no" else "waiting",
                        "split": split,
                        "opening": opening.format(title),
                        "context": {"title": title, "waiting": waiting},
                    }
                    print(json.dumps(scenario), file=file)
