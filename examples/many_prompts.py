"""Many prompts from a file, decoded together, one line of JSON for each as soon as it is done.

    python examples/many_prompts.py prompts.jsonl results.jsonl
    misvo steer --file prompts.jsonl --out results.jsonl --reward words:10-20    # the shell's way, which also resumes

Each line of the file has a `prompt`; its other fields reach the reward as columns.
"""

import json
import sys
from pathlib import Path

import misvo


def steer_file(source: Path, out: Path) -> None:
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    columns = [{name: value for name, value in row.items() if name != "prompt"} for row in rows]
    with misvo.Session(misvo.Policy.from_pretrained("smollm2-135m")) as session, out.open("w") as lines:
        settings = misvo.Settings.from_preset(rollouts=4, steps=2, max_new_tokens=16)
        reward = misvo.rewards.load("words:5-12")
        prompts = zip(rows, columns, strict=True)
        handles = [session.add(row["prompt"], reward, settings, columns) for row, columns in prompts]
        while session.busy:
            for event in session.step():
                if event.handle.state == "done":  # prompts end one by one, in any order
                    result, place = event.handle.result, handles.index(event.handle)
                    line = {"line": place, **rows[place], "text": result.text, "reward": result.reward}
                    lines.write(json.dumps(line) + "\n")
                    lines.flush()


if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:3])
    steer_file(source, out)
    print(out.read_text(encoding="utf-8"))
