"""Requests to SGLang go on while the halves are killed and come back: no wrong token, and who gets none is told why."""

from __future__ import annotations

from tests.live.answers import many
from tests.live.conftest import ModelMaker, Servers
from tests.live.server import Server
from tests.live.sglang_client import ask, split, usage, warm
from tests.live.sglang_servers import DECODE_WITH_PREFIXES, PREFILL, sglang
from tests.live.soak import Soak, judged
from tests.live.table import Results

#: A half whose other half does not come is given up after so long, and a peer that answers no ping for so long is lost.
_DEADLINE_S, _SILENCE_S = 10, 4

_ENVIRONMENT = {
    "KVMOVER_MOVER_ROUTE": "packed",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(_DEADLINE_S),
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(_DEADLINE_S),
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "1",
    "KVMOVER_MOVER_PING_S": "0.5",
    "KVMOVER_MOVER_SILENCE_S": str(_SILENCE_S),
}


def test_requests_go_on_while_halves_are_killed_and_come_back(
    plain: Server, servers: Servers, model: ModelMaker, results: Results
) -> None:
    weights = model("llama", "sglang")
    first, second = servers.start(
        sglang("sglang-soak-prefill", weights, mode=PREFILL, environment=_ENVIRONMENT),
        sglang("sglang-soak-decode", weights, mode=DECODE_WITH_PREFIXES, environment=_ENVIRONMENT),
    )
    warm(plain.ready())
    soak = Soak(servers, first, second, lambda one, other, prompt, s: split(one, other, prompt, 16, s), _SILENCE_S)
    done = soak.run(seed=130)
    judged(results, "sglang", soak, done, many(lambda each: ask(plain, each.prompt), done))
    assert usage(soak.prefill, _DEADLINE_S + 10) == usage(soak.decode, _DEADLINE_S + 10) == 0
