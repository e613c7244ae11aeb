"""Which weights an engine serves: the operator's word, else a digest that one rank takes for all, else no start."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from kvmover.config import ConfigError
from kvmover.config.settings import ExchangeSettings
from kvmover.engines.common import (
    ServedWeights,
    UnknownWeights,
    WeightSource,
    combined,
    computed_once,
    digest_of_checkpoint,
    digest_of_sources,
    identified,
)
from kvmover.layout import Component
from tests.safetensors_files import tiny, write_checkpoint

OURS = ExchangeSettings(weights="ours")
KV = Component.attention(4, 4, 32, "float32")


def _unknown() -> str:
    raise UnknownWeights("/models/q4.gguf is no folder of safetensors")


def test_the_operators_word_goes_before_what_is_computed_which_is_told_beside_it() -> None:
    known = identified("/models/llama", OURS, lambda: "7" * 64)
    unknown = identified("/models/q4.gguf", OURS, _unknown)
    assert (known.identity, unknown.identity) == ("ours", "ours")
    assert known.told() == f"the weights of /models/llama are ours by exchange.weights; computed: {'7' * 64}"
    assert unknown.told().endswith("computed: /models/q4.gguf is no folder of safetensors")


def test_what_is_computed_is_compared_where_the_operator_says_nothing() -> None:
    found = identified("/models/llama", ExchangeSettings(), lambda: "7" * 64)
    assert found == ServedWeights("/models/llama", "7" * 64)
    assert found.told() == f"the weights of /models/llama are {'7' * 64}"


def test_weights_that_nobody_names_and_nobody_can_tell_from_others_stop_the_start() -> None:
    with pytest.raises(ConfigError, match="no folder of safetensors.*exchange.weights") as raised:
        identified("/models/q4.gguf", ExchangeSettings(), _unknown)
    assert "KVMOVER_EXCHANGE_WEIGHTS" in str(raised.value)


def test_card_and_namespace_go_by_the_weights_and_not_by_what_they_are_called() -> None:
    here, there = (ServedWeights(name, "7" * 64) for name in ("/models/here", "/models/there"))
    assert here.model((KV,)).fields() == there.model((KV,)).fields()
    assert here.namespace(16, "blue").digest == there.namespace(16, "blue").digest
    other = ServedWeights("/models/here", "8" * 64)
    assert here.model((KV,)).fields() != other.model((KV,)).fields()
    assert here.namespace(16, "").digest != other.namespace(16, "").digest
    assert here.namespace(16, "blue").digest != here.namespace(16, "").digest
    assert here.of_tenant("blue").model((KV,)).fields() != here.of_tenant("").model((KV,)).fields()
    assert here.of_tenant("") == here


def test_updated_weights_are_those_of_the_start_in_the_callers_version_and_nobodys_without_one(caplog: Any) -> None:
    started = ServedWeights("/models/llama", "7" * 64)
    assert started.updated("2").identity == f"{'7' * 64}, version 2"
    assert started.updated("1").updated(None).updated("2") == started.updated("2")
    assert started.of_tenant("blue").updated("2") == started.updated("2").of_tenant("blue")
    assert started.updated("2").namespace(16, "").digest != started.namespace(16, "").digest
    for version in (None, ""):
        nobodys = [started.updated(version) for _ in range(2)]
        assert not any(weights.is_known for weights in nobodys)
        assert nobodys[0].model((KV,)).fields() != nobodys[1].model((KV,)).fields()
    caplog.set_level("INFO", "kvmover")
    started.updated("2").log()
    started.updated(None).log()
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert caplog.messages[0] == f"the weights of /models/llama are {'7' * 64}, version 2"
    assert "with no engine and no store until the caller gives one" in caplog.messages[1]


@pytest.mark.parametrize("form", ["dummy", "gguf", "tensorizer", "sharded_state", "bitsandbytes", "remote", "pt"])
def test_weights_that_are_not_loaded_as_they_lie_are_unknown(form: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny())
    with pytest.raises(UnknownWeights, match=f"is loaded as {form}"):
        WeightSource(str(tmp_path), form=form).digest()


@pytest.mark.parametrize("path", ["s3://bucket/model", "{folder}/model.gguf"])
def test_what_is_no_folder_is_unknown(path: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"x")
    with pytest.raises(UnknownWeights, match="no folder of safetensors"):
        WeightSource(path.format(folder=tmp_path)).digest()


def test_a_draft_and_a_quantization_while_loading_make_other_weights(tmp_path: Path) -> None:
    model = str(write_checkpoint(tmp_path / "model", tiny()))
    first, second = (str(write_checkpoint(tmp_path / name, tiny(seed))) for name, seed in (("d", 3), ("e", 4)))
    plain = WeightSource(model)
    assert digest_of_sources([plain]) == digest_of_checkpoint(tmp_path / "model").digest
    made = [
        digest_of_sources([plain]),
        digest_of_sources([WeightSource(model, quantized="fp8")]),
        digest_of_sources([plain, WeightSource(first)]),
        digest_of_sources([plain, WeightSource(second)]),
        combined([digest_of_sources([plain])] * 2),
    ]
    assert len({*made}) == len(made)
    with pytest.raises(UnknownWeights):
        digest_of_sources([plain, WeightSource(first, form="dummy")])


class Group:
    """An engine's group as one of its ranks sees it: what the first gives, all get."""

    def __init__(self, rank: int, barrier: Barrier, box: list[Any]) -> None:
        self.rank_in_group, self._barrier, self._box = rank, barrier, box

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        if self.rank_in_group == src:
            self._box[:] = [obj]
        self._barrier.wait(10)
        return self._box[0]


def _engine(tp: int, pp: int) -> list[list[Group]]:
    """Of every rank, its groups: the stages beside it, and those beside it in its stage."""
    across = [(Barrier(pp), list[Any]()) for _ in range(tp)]
    within = [(Barrier(tp), list[Any]()) for _ in range(pp)]
    return [[Group(p, *across[t]), Group(t, *within[p])] for p in range(pp) for t in range(tp)]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("compute", [lambda: "7" * 64, _unknown], ids=["known", "unknown"])
def test_one_rank_of_an_engine_computes_and_all_have_it(tp: int, pp: int, compute: Callable[[], str]) -> None:
    computed: list[int] = []

    def rank(groups: list[Group]) -> str:
        def counted() -> str:
            computed.append(1)
            return compute()

        try:
            return computed_once(counted, groups)
        except UnknownWeights as error:
            return str(error)

    ranks = _engine(tp, pp)
    with ThreadPoolExecutor(len(ranks)) as pool:
        found = list(pool.map(rank, ranks))
    wanted = "7" * 64 if compute is not _unknown else "/models/q4.gguf is no folder of safetensors"
    assert found == [wanted] * tp * pp
    assert len(computed) == 1


def test_a_rank_that_is_alone_computes_by_itself() -> None:
    assert computed_once(lambda: "7", []) == "7"
