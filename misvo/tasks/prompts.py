"""`prompts`: any prompts. A JSONL file has `prompt` (a string or chat messages) or `history`, perhaps `id`, and any
other fields, which reach the reward as columns. A text file has one prompt a line. Without a file: a few of our own.
"""

from pathlib import Path

from misvo.errors import MisvoError
from misvo.tasks.files import first_field, read_jsonl
from misvo.tasks.row import Row

REWARD = "sentiment"
OWN = (
    "My flatmate plays the drums at night and I have an exam next week. What should I do about it, and how?",
    "I was offered a better job two weeks after starting a new one. Is it wrong to leave so soon?",
    "Why do some metals feel colder than wood in the same room? Explain it to a curious child.",
    "How did sailors find their position at sea before there were clocks that kept time on a ship?",
    "I want to learn to cook for one person without wasting food. Where do I start?",
    "My bread never rises properly in winter. What could I change?",
    "Could a planet have two moons that share the same orbit? What would happen to them?",
    "A friend keeps cancelling plans at the last minute. How do I tell them that it hurts?",
    "What are the first three things that you would check when a bicycle makes a clicking sound?",
    "Is it worth repairing a ten-year-old washing machine? What should I think about?",
    "How can I stay calm when I have to speak in front of many people?",
    "Why does the moon look larger near the horizon?",
)


def read(data=None):
    if data is None:
        return f"{len(OWN)} prompts of misvo's own", [Row(f"own-{n:02d}", text) for n, text in enumerate(OWN)]
    path = Path(data)
    if path.suffix in (".jsonl", ".json", ".gz"):
        return path.name, [_row(n, record, path.name) for n, record in enumerate(read_jsonl(path))]
    if not path.is_file():
        raise MisvoError(f"there is no file {path} to read prompts from.")
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return path.name, [Row(f"{n:04d}", line) for n, line in enumerate(filter(None, lines))]


def _row(number, record, source):
    text = first_field(record, ("prompt", "history"), f"record {number + 1} of {source}")
    columns = {key: value for key, value in record.items() if key not in ("id", "prompt", "history")}
    return Row(str(record.get("id", f"{number:04d}")), text, columns)
