"""A sample of an Inspect task: its solver and tools play with the agent, its scorer is the verdict.

python inspect_sample.py arithmetic.py --list > samples.jsonl   # what there is to play
python inspect_sample.py arithmetic.py                          # by ExternalProgram, a sample on its stdin
"""

import contextlib
import json
import sys
import tempfile

from inspect_ai import eval as evaluate
from inspect_ai.scorer import value_to_float

file, *options = sys.argv[1:]
sample = json.loads(sys.stdin.readline()) if not options else None
with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
    [log] = evaluate(
        file,
        model="openai/agent" if sample else "none",  # at OPENAI_BASE_URL
        model_args={"responses_api": False} if sample else {},  # else it asks first what the server can
        sample_id=sample["context"]["sample"] if sample else None,
        run_samples=sample is not None,
        display="none",
        log_dir=folder,
        max_retries=0,
    )
    results = [one.scores for one in log.samples] if sample else []  # read from the folder
if sample is None:
    for id in log.eval.dataset.sample_ids:
        print(json.dumps({"id": str(id), "opening": f"sample {id}", "context": {"sample": id}}))
elif log.status != "success":
    sys.exit(log.error.message if log.error else f"the evaluation ended as {log.status}")
else:
    scores = {name: value_to_float()(score.value) for name, score in results[0].items()}
    reward = sum(scores.values()) / len(scores)
    print(json.dumps({"reward": reward, "success": reward == 1, "metadata": scores}))
