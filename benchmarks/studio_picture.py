"""Pictures of the studio after a real run: `python benchmarks/studio_picture.py docs/studio.png`.

Starts `misvo serve` on the embedded model, presses Steer in a headless Chromium and waits until everything is shown.
`--dark` and `--width 400` show the other faces of the page. It needs the extra `page` and a chromium.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request

from playwright.sync_api import sync_playwright

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def serve(port: int, rewards: list[str]) -> subprocess.Popen:
    named = [part for reward in rewards for part in ("--reward", reward)]
    server = subprocess.Popen([sys.executable, "-m", "misvo.cli", "serve", "--port", str(port), *named])
    for _ in range(300):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
            return server
        except OSError:
            time.sleep(1)
    raise SystemExit("the server did not start.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="the PNG file to write")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1400)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--address", help="of a run or a server that is there already, in place of a new one")
    given = parser.parse_args()
    server = None if given.address else serve(given.port, ["sentiment", "reading-ease=reading-ease"])
    try:
        with sync_playwright() as play, tempfile.TemporaryDirectory() as profile:
            browser = play.chromium.launch_persistent_context(
                profile,
                executable_path=shutil.which("chromium"),
                args=FLAGS,
                viewport={"width": given.width, "height": 900},
                color_scheme="dark" if given.dark else "light",
            )
            page = browser.new_page()
            page.goto(given.address or f"http://127.0.0.1:{given.port}/")
            page.wait_for_selector("body[data-ready=yes]")
            if "#run=" not in page.url:
                print("steering…", flush=True)
                page.click("[data-testid=steer]")
            page.wait_for_selector("[data-testid=panel] table", timeout=600_000)
            print(page.url, flush=True)
            page.screenshot(path=given.out, full_page=True)
            browser.close()
    finally:
        if server is not None:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
