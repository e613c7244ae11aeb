"""Serves an application of Ray Serve on a machine without a GPU, in vLLM's environment: `ray_application.py ARGS PORT`.

ARGS: a JSON file with the arguments of `ray.serve.llm:build_pd_openai_app`.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]
from ray.serve.llm import build_pd_openai_app  # pyright: ignore[reportMissingImports]


def main(arguments: Path, port: int) -> None:
    # More CPUs than there are: Ray gives each replica some, which wait for each other here.
    ray.init(num_cpus=16, num_gpus=0, include_dashboard=False, object_store_memory=100 << 20)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_pd_openai_app(json.loads(arguments.read_text())), name="pd")
    try:
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
