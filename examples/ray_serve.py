"""`misvo serve` on Ray Serve: replicas of one application, each with a model of its own, behind one address.

    pip install 'ray[serve]' 'misvo[server]'
    python examples/ray_serve.py --model smollm2-135m --replicas 2 --port 8000

Requests go to whichever replica has room. A replica that dies is replaced; what it was answering fails with 500 or
503, which the `openai` package tries again by itself. Runs and background responses live in one replica, so only the
routes that answer in one request (`/v1/chat/completions`, `/v1/completions`, `/misvo/v1/generate`) suit several.
"""

import argparse

from ray import serve

from misvo.server import Config


def application(model: str, rewards: dict[str, str], replicas: int, cpus: float = 1.0):
    """What `ray.serve.run` takes."""

    def build():
        """Called in each replica: models do not travel."""
        from misvo import Policy
        from misvo.server import create_app

        return create_app(Policy.from_pretrained(model), rewards, Config(name=model.rstrip("/").rpartition("/")[2]))

    deployment = serve.deployment(
        num_replicas=replicas,
        max_ongoing_requests=64,
        ray_actor_options={"num_cpus": cpus},
        health_check_period_s=1,
        graceful_shutdown_timeout_s=20,
    )
    return deployment(serve.ingress(build)()).bind()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--reward", action="append", default=["cheer=sentiment"], help="NAME=SPEC")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    rewards = dict(text.split("=", 1) for text in given.reward)
    serve.start(http_options={"host": "127.0.0.1", "port": given.port})
    serve.run(application(given.model, rewards, given.replicas), blocking=True)


if __name__ == "__main__":
    main()
