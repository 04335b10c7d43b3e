"""lm-evaluation-harness: a task of log-likelihoods and one of generation score as its own `hf` backend scores them."""

import sys
import tempfile
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

URL, MODEL = sys.argv[1:]
TASKS = Path(__file__).resolve().parent / "tasks"


def scores(folder: str, backend: str, /, **model_args: object) -> dict[tuple[str, str], tuple[float, float]]:
    """(task, metric) -> value and standard error."""
    found = simple_evaluate(
        model=backend,
        model_args=model_args,
        tasks=["isthmus_choice", "isthmus_capitals"],
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        batch_size=8,
        bootstrap_iters=100,
    )
    told = {}
    for task, metrics in found["results"].items():
        for name, value in metrics.items():
            metric, _, filtered = name.partition(",")
            if isinstance(value, float) and not metric.endswith("_stderr"):
                told[task, metric] = value, float(metrics[f"{metric}_stderr,{filtered}"])
    return told


with tempfile.TemporaryDirectory() as folder:
    for file in TASKS.glob("*.yaml"):
        text = file.read_text().replace("FOLDER", str(TASKS))
        Path(folder, file.name).write_text(text)
    theirs = scores(folder, "hf", pretrained=MODEL, dtype="float32", device="cpu")
    ours = scores(
        folder,
        "local-completions",
        model="smollm2",
        base_url=f"{URL}/v1/completions",
        tokenizer=MODEL,
        tokenizer_backend="huggingface",
        num_concurrent=2,
        max_retries=1,
    )
assert len(ours) == 3 and ours.keys() == theirs.keys(), (ours, theirs)
for name, (value, _) in ours.items():
    reference, error = theirs[name]
    print(*name, f"{value:.3f}, hf {reference:.3f} +- {error:.3f}")
    assert abs(value - reference) <= error, name
assert ours["isthmus_choice", "acc"][0] > 0.5, "the model is good at this: something is wrong"
