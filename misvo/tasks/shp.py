"""`shp`: posts of the Stanford Human Preferences test set as prompts (Ethayarajh et al., 2022).

SHP holds pairs of comments, so a post appears many times: each post counts once here, and a sample is uniform over
posts. The paper scores with Skywork-Reward-V2-Qwen3-0.6B, the reward of this task unless another is given.
"""

from pathlib import Path

from misvo.tasks.files import first_field, read_hub, read_jsonl
from misvo.tasks.row import Row

REWARD = "hf:Skywork/Skywork-Reward-V2-Qwen3-0.6B"
DATASET, SPLIT = "stanfordnlp/SHP", "test"


def read(data=None):
    if data is None:
        records = read_hub(DATASET, SPLIT, "give a JSONL file with a `history` or `prompt` field by --data")
        source = f"{DATASET} ({SPLIT})"
    else:
        records, source = read_jsonl(data), Path(data).name
    posts = {}
    for number, record in enumerate(records, 1):
        text = first_field(record, ("history", "prompt"), f"record {number} of {source}")
        name = str(record.get("post_id") or record.get("id") or f"{number - 1:04d}")
        posts.setdefault(name, Row(name, text))
    return source, list(posts.values())
