"""Engines to test with: vLLM's own scheduler, cache manager, factory and runner hooks around a toy model on the CPU.

The model's KV of a position is a hash of all tokens up to it, its layer and head. It says 1 while the cache holds the
truth, and another word as soon as one byte that attention would read is wrong.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tests.safetensors_files import tiny, write_checkpoint

os.environ["TRITON_INTERPRET"] = "1"  # before anything of vLLM asks: its kernels run without a GPU

configs: Any = import_module("vllm.config")
caching: Any = import_module("vllm.v1.kv_cache_interface")
hashing: Any = import_module("vllm.v1.core.kv_cache_utils")
outputs: Any = import_module("vllm.v1.outputs")
requests: Any = import_module("vllm.v1.request")
state: Any = import_module("vllm.distributed.kv_transfer.kv_transfer_state")
adapter: Any = import_module("kvmover.engines.vllm.vllm_api")
Factory: Any = import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
Aggregator: Any = import_module("vllm.distributed.kv_transfer.kv_connector.utils").KVOutputAggregator
Role: Any = import_module("vllm.distributed.kv_transfer.kv_connector.v1").KVConnectorRole
Scheduler: Any = import_module("vllm.v1.core.sched.scheduler").Scheduler
Hooks: Any = import_module("vllm.v1.worker.gpu.kv_connector").ActiveKVConnector
sha256: Any = import_module("vllm.utils.hashing").sha256_cbor
allocate: Any = import_module("vllm.v1.worker.utils").allocate_kv_cache
Sampling: Any = import_module("vllm.sampling_params").SamplingParams
Events: Any = import_module("vllm.config.kv_events").KVEventsConfig
Structured: Any = import_module("vllm.v1.structured_output").StructuredOutputManager
Recurrent: Any = import_module("vllm.v1.attention.backends.registry").MambaAttentionBackendEnum
RequestStatus: Any = requests.RequestStatus

KV_HEADS, HEAD_DIM, LATENT, LAYERS, BLOCKS = 4, 8, 24, 4, 40
POISON = 0x6B
RECURRENT = "model.layers.4.mixer"

hashing.init_none_hash(sha256)


@dataclass(frozen=True)
class Shape:
    """How an engine is run. `kernel_tokens`: of the attention kernel's blocks, where smaller. `window`: of every other
    layer. `mamba`: a recurrent layer beside attention. `drafts`: tokens that are guessed a step, the last one wrong.
    `packing`: of rows in blocks, where unusual. `options`: of the connector. `weights`: the seed of what lies in the
    model's folder."""

    tp: int = 1
    pp: int = 1
    block_tokens: int = 16
    layout: str = "LBNHC"
    kernel_tokens: int | None = None
    latent: bool = False
    window: int | None = None
    mamba: bool = False
    drafts: int = 0
    packing: tuple[tuple[str, Any], ...] = ()
    blocks: int = BLOCKS
    batch_tokens: int = 256
    policy: str = "recompute"
    role: str = "kv_both"
    events: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    weights: int = 1


def model_of(folder: Path, seed: int = 1) -> Any:
    """A Llama of 4 layers that exists as a configuration, beside tensors of this `seed` that nobody computes with."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": LAYERS,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        "head_dim": HEAD_DIM,
        "torch_dtype": "float32",
        "rms_norm_eps": 1e-5,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_checkpoint(folder, tiny(seed))
    return configs.ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", seed=0)


def config_of(shape: Shape, folder: Path) -> Any:
    model = model_of(folder, shape.weights)
    scheduling = configs.SchedulerConfig(
        max_num_seqs=16,
        max_num_batched_tokens=shape.batch_tokens,
        max_model_len=model.max_model_len,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
    )
    cache = configs.CacheConfig(block_size=shape.block_tokens, cache_dtype="auto", enable_prefix_caching=True)
    cache.mamba_cache_mode = "align"
    transfer = configs.KVTransferConfig(
        kv_connector="KvmoverConnector",
        kv_connector_module_path="kvmover.engines.vllm",
        kv_role=shape.role,
        kv_buffer_device="cpu",
        kv_load_failure_policy=shape.policy,
        kv_connector_extra_config={
            "host": "127.0.0.1",
            "arena_bytes": 1 << 20,
            "deadline_s": 20.0,
            **dict(shape.options),
        },
    )
    config = configs.VllmConfig(
        model_config=model,
        scheduler_config=scheduling,
        cache_config=cache,
        kv_transfer_config=transfer,
        parallel_config=configs.ParallelConfig(
            tensor_parallel_size=shape.tp, pipeline_parallel_size=shape.pp, distributed_executor_backend="mp"
        ),
        device_config=configs.DeviceConfig("cpu"),
        kv_events_config=Events(enable_kv_cache_events=shape.events, publisher="null"),
    )
    cache.num_gpu_blocks = shape.blocks
    if shape.drafts:
        config.speculative_config = configs.SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=shape.drafts,
            prompt_lookup_max=3,
            target_model_config=model,
            target_parallel_config=config.parallel_config,
        )
    return config


def alike(own: Any, stages: int) -> list[Any]:
    """vLLM's stages are processes that tell each other what they hold: those of one process hold as much each."""
    return [own] * stages


adapter.of_all_stages = alike


def layer_name(number: int) -> str:
    return f"model.layers.{number}.self_attn.attn"


def layers_of(shape: Shape, stage: int) -> range:
    return range(stage * LAYERS // shape.pp, (stage + 1) * LAYERS // shape.pp)


def caches_of(shape: Shape, stage: int = 0) -> Any:
    """What vLLM's planner makes of such a model: one allocation, and groups that own its blocks by turns."""
    heads = 1 if shape.latent else max(1, KV_HEADS // shape.tp)
    common: dict[str, Any] = {"block_size": shape.block_tokens, "num_kv_heads": heads, "dtype": torch.float32}
    common |= dict(shape.packing)
    if shape.latent:
        full: Any = caching.MLAAttentionSpec(head_size=LATENT, **common)
    else:
        full = caching.FullAttentionSpec(head_size=HEAD_DIM, **common)
    groups = [caching.KVCacheGroupSpec([layer_name(n) for n in layers_of(shape, stage)], full)]
    if shape.window:
        sliding = caching.SlidingWindowSpec(head_size=HEAD_DIM, sliding_window=shape.window, **common)
        groups = [
            caching.KVCacheGroupSpec([layer_name(n) for n in range(0, LAYERS, 2)], full),
            caching.KVCacheGroupSpec([layer_name(n) for n in range(1, LAYERS, 2)], sliding),
        ]
    if shape.mamba:
        states: dict[str, Any] = {"shapes": ((KV_HEADS // shape.tp, 2, 4),), "dtypes": (torch.float32,)}
        states |= {"mamba_type": Recurrent.LINEAR, "mamba_cache_mode": "align", "num_speculative_blocks": shape.drafts}
        groups.append(caching.KVCacheGroupSpec([RECURRENT], caching.MambaSpec(shape.block_tokens, **states)))
    size, layers = full.page_size_bytes * shape.blocks, len(groups[0].layer_names)
    layer, block, *_ = caching.compute_layout_strides(full, shape.blocks, layers, caching.KVCacheLayout[shape.layout])
    tensors = [caching.KVCacheTensor(size * layers, group.layer_names, layer, block) for group in groups]
    return caching.KVCacheConfig(
        num_blocks=shape.blocks, kv_cache_tensors=tensors, kv_cache_groups=groups, kv_cache_layout=shape.layout
    )


class Rank:
    """A worker: its caches, made by vLLM, and its connector behind vLLM's runner hooks."""

    def __init__(self, shape: Shape, config: Any, rank: int) -> None:
        self.shape, self.rank = shape, rank
        caches = caches_of(shape, rank // shape.tp)
        own = copy.copy(config)
        own.parallel_config = copy.copy(config.parallel_config)
        own.parallel_config.rank = rank
        kernel = None if shape.kernel_tokens is None else [shape.kernel_tokens] * len(caches.kv_cache_groups)
        self.caches = allocate(caches, torch.device("cpu"), caching.KVCacheLayout[shape.layout], kernel)
        for cache in self.caches.values():
            cache.view(torch.uint8).fill_(POISON)
        self.groups = {name: n for n, group in enumerate(caches.kv_cache_groups) for name in group.layer_names}
        self.connector = Factory.create_connector(own, Role.WORKER, caches)
        with self.current():
            self.hooks = Hooks(own, self.caches)

    @contextmanager
    def current(self) -> Iterator[None]:
        """vLLM keeps one connector a process; here are several."""
        state._KV_CONNECTOR_AGENT = self.connector
        try:
            yield
        finally:
            state._KV_CONNECTOR_AGENT = None

    def rows(self, layer: str, tables: Sequence[Sequence[int]], positions: range) -> torch.Tensor:
        """A view of rows [position, head, bytes], by vLLM's own axes [block, head, token, content]."""
        cache = self.caches[layer].view(torch.uint8)
        tokens = cache.shape[2]
        ratio = self.shape.block_tokens // tokens
        at = torch.tensor(list(positions))
        block = torch.tensor(tables[self.groups[layer]])[at // self.shape.block_tokens]
        return cache[block * ratio + at % self.shape.block_tokens // tokens, :, at % tokens]

    def write(self, layer: str, tables: Sequence[Sequence[int]], positions: range, rows: torch.Tensor) -> None:
        cache = self.caches[layer].view(torch.uint8)
        tokens = cache.shape[2]
        ratio = self.shape.block_tokens // tokens
        at = torch.tensor(list(positions))
        block = torch.tensor(tables[self.groups[layer]])[at // self.shape.block_tokens]
        cache[block * ratio + at % self.shape.block_tokens // tokens, :, at % tokens] = rows

    @property
    def layers(self) -> range:
        return layers_of(self.shape, self.rank // self.shape.tp)

    @property
    def heads(self) -> range:
        if self.shape.latent:
            return range(1)
        first = self.rank % self.shape.tp * KV_HEADS // self.shape.tp
        return range(first, first + max(1, KV_HEADS // self.shape.tp))


def truth(
    tokens: Sequence[int], positions: range, number: int, heads: range, nbytes: int, version: bytes = b""
) -> torch.Tensor:
    """The KV of a layer, by weights of a version: rows [position, head, bytes]."""
    prefix = blake2b(version)
    rows: list[bytes] = []
    for position, token in enumerate(tokens[: positions.stop]):
        prefix.update(token.to_bytes(4, "little"))
        if position >= positions.start:
            for head in heads:
                seed = blake2b(prefix.digest() + bytes([number, head])).digest()
                rows.append((seed * (nbytes // len(seed) + 1))[:nbytes])
    flat = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
    return flat.reshape(len(positions), len(heads), nbytes)


@dataclass
class Engine:
    """A scheduler and its ranks. By request: `said` its output, `ended` how, `answers` what is for its other half.
    `computed`: (request, first position, one past the last) of each step. `before_layer`: called in a forward pass.
    `lost`: requests whose recurrent state was not that of the tokens before a step. `version`: of its weights."""

    shape: Shape
    folder: Path
    said: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    stats: dict[str, int] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)
    computed: list[tuple[str, int, int]] = field(default_factory=list)
    before_layer: Callable[[Rank, int], None] | None = None
    lost: set[str] = field(default_factory=set)
    guessed: dict[str, list[int]] = field(default_factory=dict)
    version: bytes = b""

    def __post_init__(self) -> None:
        self.config = config = config_of(self.shape, self.folder)
        caches = caches_of(self.shape)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=caches,
            log_stats=True,
            structured_output_manager=Structured(config),
            block_size=self.shape.block_tokens,
        )
        self.ranks = [Rank(self.shape, config, rank) for rank in range(self.shape.tp * self.shape.pp)]
        self.aggregator = Aggregator(len(self.ranks))
        said = [pickle.loads(pickle.dumps(rank.connector.get_handshake_metadata())) for rank in self.ranks]
        self.scheduler.get_kv_connector().set_xfer_handshake_metadata_pp_aware(
            {divmod(number, self.shape.tp): introduction for number, introduction in enumerate(said)}
        )
        self.hasher = hashing.get_request_block_hasher(self.shape.block_tokens, sha256)

    def ask(self, name: str, prompt: Sequence[int], tokens: int = 1, params: dict[str, Any] | None = None) -> None:
        sampling = Sampling(max_tokens=tokens, ignore_eos=True, extra_args={"kv_transfer_params": params})
        self.scheduler.add_request(requests.Request(name, list(prompt), sampling, None, block_hasher=self.hasher))

    def step(self) -> Any:
        """One of vLLM's: schedule, run, update."""
        output = self.scheduler.schedule()
        carried = pickle.loads(pickle.dumps(output))
        self.guessed = dict(carried.scheduled_spec_decode_tokens)
        # Both ways between processes: vLLM merges results in place, one of which it shares among all empty steps.
        results = [pickle.loads(pickle.dumps(self._run(rank, carried))) for rank in self.ranks]
        assert all(result.sampled_token_ids == results[0].sampled_token_ids for result in results)
        merged = self.aggregator.aggregate(results) if len(results) > 1 else results[0]
        made = self.scheduler.update_from_output(output, merged)
        if self.shape.drafts:
            names = [name for name in output.num_scheduled_tokens if name in self.scheduler.requests]
            guesses = [[1] * (self.shape.drafts - 1) + [7] for _ in names]
            self.scheduler.update_draft_token_ids(outputs.DraftTokenIds(names, guesses))
        for out in made.values():
            for one in out.outputs:
                self.said.setdefault(one.request_id, []).extend(one.new_token_ids)
                if one.finish_reason is not None:
                    self.ended[one.request_id] = one.finish_reason
                if one.kv_transfer_params:
                    self.answers[one.request_id] = one.kv_transfer_params
            stats = out.scheduler_stats.kv_connector_stats if out.scheduler_stats else None
            for name, count in (stats or {}).items():
                self.stats[name] = self.stats.get(name, 0) + count
        return output

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Step until a condition holds."""
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, f"waited 60 s for {what}"
            if not self.step().total_num_scheduled_tokens:
                time.sleep(0.002)

    def finish(self, *names: str) -> None:
        """Until requests have ended, and a step more: vLLM goes on while it has something to tell the workers."""
        self.until(lambda: all(name in self.ended for name in names), f"the end of {names}")
        self.step()

    def drain(self) -> None:
        """Step until there is nothing to step for any more, and every block is free again but the null block."""
        self.until(lambda: not self.scheduler.has_requests(), "the scheduler to forget all requests")
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.shape.blocks - 1

    def tables(self, name: str) -> list[list[int]]:
        return [list(table) for table in self.scheduler.kv_cache_manager.get_block_ids(name)]

    def close(self) -> None:
        for rank in self.ranks:
            rank.connector.shutdown()
        self.scheduler.shutdown()

    def _run(self, rank: Rank, output: Any) -> Any:
        """What a model runner does in a step."""
        with rank.current():
            if not output.total_num_scheduled_tokens:
                return rank.hooks.no_forward(output)
            rank.hooks.pre_forward(output)
            names = list(output.num_scheduled_tokens)
            for number in rank.layers:
                if self.before_layer:
                    self.before_layer(rank, number)
                for name in names:
                    self._compute(rank, name, output.num_scheduled_tokens[name], number)
                rank.connector.save_kv_layer(layer_name(number), rank.caches[layer_name(number)], None)
            for name in names if self.shape.mamba else ():
                self._recur(rank, name, output.num_scheduled_tokens[name])
            sampled = [self._sample(rank, name, output.num_scheduled_tokens[name]) for name in names]
            result = outputs.ModelRunnerOutput(
                req_ids=names, req_id_to_index={name: n for n, name in enumerate(names)}, sampled_token_ids=sampled
            )
            result.kv_connector_output = rank.hooks.post_forward(output.finished_req_ids)
            return result

    def _span(self, name: str, count: int) -> tuple[Any, range]:
        """The positions of a step: the scheduler has counted them already."""
        request = self.scheduler.requests[name]
        return request, range(request.num_computed_tokens - count, request.num_computed_tokens)

    def _compute(self, rank: Rank, name: str, count: int, number: int) -> None:
        request, positions = self._span(name, count)
        if rank.rank == 0 and number == 0:  # once a step
            self.computed.append((name, positions.start, positions.stop))
        layer = layer_name(number)
        nbytes = rank.caches[layer].view(torch.uint8).shape[3]
        rows = truth(self._tokens(request), positions, number, rank.heads, nbytes, self.version)
        rank.write(layer, self.tables(name), positions, rows)

    def _tokens(self, request: Any) -> list[int]:
        """Those that are known, and guesses behind them, of which vLLM pads a first step with -1."""
        return [*request.all_token_ids, *(max(0, guess) for guess in self.guessed.get(request.request_id, ()))]

    def _recur(self, rank: Rank, name: str, count: int) -> None:
        """A recurrent layer reads the state of all tokens before a step, and leaves that of all with it."""
        request, positions = self._span(name, count)
        table, of_block = self.tables(name)[rank.groups[RECURRENT]], self.shape.block_tokens
        cache = rank.caches[RECURRENT].view(torch.uint8)
        state = {stop: self._state(request, stop, rank, cache.shape[3]) for stop in (positions.start, positions.stop)}
        if positions.start and not torch.equal(
            cache[table[(positions.start - 1) // of_block], 0, 0], state[positions.start]
        ):
            self.lost.add(name)
        cache[table[(positions.stop - 1) // of_block], 0, 0] = state[positions.stop]

    def _state(self, request: Any, stop: int, rank: Rank, nbytes: int) -> torch.Tensor:
        """Of all tokens before `stop`, for the heads of a rank."""
        if not stop:
            return torch.empty(0, dtype=torch.uint8)
        rows = truth(self._tokens(request), range(stop - 1, stop), LAYERS, rank.heads, nbytes // len(rank.heads))
        return rows.flatten()

    def _sample(self, rank: Rank, name: str, count: int) -> list[int]:
        """The next token, where all tokens there are have been computed: of every byte that attention would read.

        Guesses that are right are tokens too.
        """
        request, positions = self._span(name, count)
        if positions.stop < request.num_tokens:
            return []
        right = sum(guess == 1 for guess in self.guessed.get(name, ()))
        return [self.word(rank, name, positions.stop)] * (1 + right)

    def word(self, rank: Rank, name: str, stop: int) -> int:
        """1 where the cache holds the truth on this rank, and a token that nobody else says where it does not."""
        request = self.scheduler.requests[name]
        if name in self.lost:
            return 600
        for number in rank.layers:
            layer = layer_name(number)
            start = max(0, stop - self.shape.window) if self.shape.window and number % 2 else 0
            held = rank.rows(layer, self.tables(name), range(start, stop))
            wanted = truth(self._tokens(request), range(start, stop), number, rank.heads, held.shape[2], self.version)
            if not torch.equal(held, wanted):
                return 500 + number
        return 1


def flip(path: Path, at: int) -> None:
    """Change a bit of byte `at`, in place: a file that is written anew is empty for a moment, and that may be when
    another engine looks at it.
    """
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
