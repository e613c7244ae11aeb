"""Servers of transformers: the example of the docs, which runs in vLLM's environment, where transformers is too."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.live.exchange import EXCHANGE
from tests.live.server import ROOT, Command, Ground, free_port

_PATH = os.pathsep.join([str(ROOT / "docs" / "examples" / "exchange"), str(ROOT)])
_GROUND = Ground("vllm", ("transformers", "kvmover.engines.transformers.transformers_engine"), {"PYTHONPATH": _PATH})


def transformers(name: str, model: Path, **options: Any) -> Command:
    """A server of `model` with kvmover's `options`; its card is found at the bootstrap port of the command."""
    port, cards = free_port(), free_port()
    said = json.dumps({"engine": name, "port": cards, "deadline_s": 20, **options})
    environment = EXCHANGE | {"KVMOVER_METRICS_PORT": str(free_port())}
    return Command(name, _GROUND, "transformers_server", [str(model), str(port), said], port, environment, cards)
