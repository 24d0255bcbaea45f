"""The smallest scorer that `--reward http://localhost:8000` can ask: a web server around one function.

    python examples/scorer.py --port 8000
    misvo steer "Give me one tip for sleeping better." --reward http://localhost:8000

It speaks the whole protocol: POST {"prompts": [...], "completions": [...], columns...} -> {"rewards": [...]}, a
reward per completion, null where it could not score. Put your model, judge or simulator into `score`; this is the
only part to change. It answers several requests at once, so guard what is not made for threads. Standard library
only, listens on this machine only, and knows nothing of misvo.
"""

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def score(prompt, completion, columns):
    """One reward, or None. This one likes questions, and short sentences."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    words = len(text.split())
    if not words:
        return None
    sentences = sum(text.count(mark) for mark in ".!?") or 1
    return float("?" in text) - 0.05 * words / sentences


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        try:
            rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompts, completions = rows.pop("prompts"), rows.pop("completions")
            columns = [{name: rows[name][index] for name in rows} for index in range(len(completions))]
            rewards = [score(*row) for row in zip(prompts, completions, columns, strict=True)]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            self.answer(400, {"error": f"{type(error).__name__}: {error}"})  # their mistake: do not try again
        except Exception as error:
            self.answer(500, {"error": f"{type(error).__name__}: {error}"})  # ours: they may try again
        else:
            self.answer(200, {"rewards": rewards})

    def answer(self, status, data):
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    server = ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Handler)
    print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
