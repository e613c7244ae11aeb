"""NVIDIA's KVCR, by its own client, in its own environment: a source of blocks, or one that asks a source for them.

`kvcr_client.py serve PORT` holds four blocks of numbered bytes. `kvcr_client.py ask PORT ENDPOINT` asks ENDPOINT for
them, as Dynamo's router would have it, and writes what became of each, and how many bytes of its own were written.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
from kvcr import KVCR, KVCRBindings
from kvcr.config import KVCRBackendConfigs, KVCRConfig
from kvcr.control_channels import ZmqPeerControlChannel
from kvcr.types import MemoryRef, RegionDescriptor

BLOCK_BYTES, BLOCKS = 4096, 4
UNTOUCHED = 0xAB


class Keys:
    """Keys of blocks are their numbers."""

    def encode(self, number):
        return int(number).to_bytes(8, "big")

    def decode(self, key):
        return int.from_bytes(key, "big")


class Pins:
    """All blocks of this process may be read at any time."""

    def __init__(self, name):
        self.name, self.asked, self.told = name, [], 0

    def request(self, keys):
        self.asked.append(tuple(keys))
        return len(self.asked)

    def results(self):
        while self.told < len(self.asked):
            keys = self.asked[self.told]
            self.told += 1
            yield self.told, ("pin", {key: [reference(self.name, Keys().decode(key))] for key in keys})


def reference(name, number):
    return MemoryRef(end_point_name=name, label="kv", element_index=number)


def open_kvcr(name, port, memory):
    channel = ZmqPeerControlChannel("127.0.0.1", port, "127.0.0.1")
    channel.initialize()
    pins = Pins(name)
    region = RegionDescriptor(addr=memory.ctypes.data, count=BLOCKS, size=BLOCK_BYTES, label="kv")
    return KVCR(
        KVCRConfig(name, [("kv", BLOCK_BYTES)], nixl_listen_port=int(os.environ["NIXL_PORT"])),
        KVCRBindings(pins.request, pins.results, lambda pin: True, framework_control=channel, key_adapter=Keys()),
        KVCRBackendConfigs(framework_regions=[region]),
    )


def say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def serve(port):
    kvcr = open_kvcr("source", port, np.repeat(np.arange(1, BLOCKS + 1, dtype=np.uint8), BLOCK_BYTES))
    say("ready")
    while True:
        list(kvcr.poll_completed())
        time.sleep(0.005)


def ask(port, endpoint):
    memory = np.full(BLOCK_BYTES * BLOCKS, UNTOUCHED, np.uint8)
    kvcr = open_kvcr("client", port, memory)
    payload = {"source_control_endpoint": endpoint, "block_hashes": list(range(BLOCKS)), "mode": "copy"}
    action = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
    kvcr.submit_hint({"protocol_version": "0.1", "message_id": "m", "actions": [action]}, "request")
    kvcr.deliver({Keys().encode(n): [reference("client", n)] for n in range(BLOCKS)}, "request")
    found, end = {}, time.monotonic() + 60
    while not found and time.monotonic() < end:
        for _, entries in kvcr.poll_completed():
            found.update({Keys().decode(key): entry.status.value for key, entry in entries.items()})
        time.sleep(0.01)
    said = {"blocks": [found.get(n) for n in range(BLOCKS)], "written": int((memory != UNTOUCHED).sum())}
    say(json.dumps(said))
    os._exit(0)  # its close waits for ever for a source that says nothing


if __name__ == "__main__":
    serve(int(sys.argv[2])) if sys.argv[1] == "serve" else ask(int(sys.argv[2]), sys.argv[3])
