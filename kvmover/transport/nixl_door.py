"""Bytes by host and port over NIXL's listener: a door that answers with them, and a caller that asks for them.

The listener gives out an agent's metadata and nothing else, of use only to who knows the agent's name. So a door is an
agent of its own, named after its port, and hands over its bytes in a notification. It registers no memory: whoever
reaches a listener can load agents into it and unload them, so the transport's own agent has none.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
import uuid

from kvmover.errors import DeadlineExceeded, PeerLost, PeerUnknown, ProtocolError, TransportError
from kvmover.transport.checks import MAX_NOTE_BYTES
from kvmover.transport.nixl_agent import Agent, listen, spare_forks

log = logging.getLogger(__name__)

_ASK = b"kvmover/ask/1 "
_NONCE_BYTES = 16
_PAUSE_S = 0.005

#: The listener looks at its sockets every 100 ms: two looks are 0.2 s. After this a caller looks for the port itself.
_PATIENCE_S = 0.3

#: A caller that was answered is unloaded after this long, when its answer has left.
_LINGER_S = 5.0


class Door:
    """Answers whoever asks at `port`, while it is polled, with what it was last shown. For one thread at a time.

    NIXL keeps a socket for every caller until the door closes. Raises TransportUnavailable for a port in use.
    """

    def __init__(self, port: int) -> None:
        self._agent: Agent | None = listen(_name(port), port)
        self._payload = b""
        self._leaving: dict[str, float] = {}
        spare_forks(self)

    def show(self, payload: bytes) -> None:
        """Answer with `payload` from now on. Raises ProtocolError if it is too long for a notification."""
        if len(payload) > MAX_NOTE_BYTES - _NONCE_BYTES:
            raise ProtocolError(f"{len(payload)} bytes to hand out; a notification takes {MAX_NOTE_BYTES}")
        self._payload = payload

    def poll(self) -> None:
        agent, now = self._agent, time.monotonic()
        if agent is None:
            return
        try:
            heard: dict[str, list[bytes]] = agent.nixl.get_new_notifs()
        except agent.errors as error:
            raise TransportError(f"{agent.name} hears nothing: {error}") from error
        for caller, notes in heard.items():
            for note in notes:
                self._answer(agent, caller, note, now)
        for caller in [caller for caller, due in self._leaving.items() if due <= now]:
            del self._leaving[caller]
            agent.nixl.remove_remote_agent(caller)

    def _answer(self, agent: Agent, caller: str, note: bytes, now: float) -> None:
        if not note.startswith(_ASK) or len(note) != len(_ASK) + _NONCE_BYTES:
            log.warning("dropped %d bytes from %s, who asked for nothing", len(note), caller)
            return
        self._leaving[caller] = now + _LINGER_S
        try:
            agent.nixl.send_notif(caller, note[len(_ASK) :] + self._payload)
        except agent.errors as error:
            log.warning("cannot answer %s: %s", caller, error)

    def close(self) -> None:
        """Leave the port. Takes up to 0.1 s, the listener's pause."""
        self._agent = None


class Caller:
    """Asks doors, one after the other and each once: a door knows an agent by an endpoint that ends with its answer.

    Takes 0.4 s to make. For one thread at a time.
    """

    def __init__(self) -> None:
        self._agent: Agent | None = None
        spare_forks(self)

    def ask(self, host: str, port: int, deadline_s: float) -> bytes:
        """The payload of the door at `host`:`port`, 0.2 s later where one answers.

        A host name takes as long as the system's resolver; NIXL speaks IPv4 only. Raises PeerUnknown where nobody
        listens, PeerLost where the door went away, and DeadlineExceeded.
        """
        deadline = time.monotonic() + deadline_s
        address = _resolve(host, port)
        if self._agent is None:
            self._agent = listen(f"caller.{uuid.uuid4().hex}", 0)
        try:
            return _ask(self._agent, address, port, deadline)
        except PeerUnknown as error:
            raise PeerUnknown(f"nobody listens at {host}:{port}: {error}") from error
        except TimeoutError:
            # What arrives late would be taken for the next door of the same port: the agent that asked is given up.
            self._agent = None
            raise DeadlineExceeded(f"no answer from {host}:{port} within {deadline_s} s") from None
        except self._agent.errors as error:
            raise PeerLost(f"the door at {host}:{port} went away: {error}") from error

    def close(self) -> None:
        self._agent = None


def _ask(agent: Agent, address: str, port: int, deadline: float) -> bytes:
    door, nonce = _name(port), os.urandom(_NONCE_BYTES)
    # In this order, on one socket: the door knows the caller before it lets itself be known.
    agent.nixl.send_local_metadata(address, port)
    agent.nixl.fetch_remote_metadata(door, address, port)
    look = time.monotonic() + _PATIENCE_S
    try:
        while not agent.nixl.check_remote_metadata(door):
            if time.monotonic() > look:
                look = math.inf
                _knock(address, port, deadline)
            _pause(deadline)
        agent.nixl.send_notif(door, _ASK + nonce)
        while True:
            for note in agent.nixl.get_new_notifs().get(door, []):
                if note.startswith(nonce):
                    return note[_NONCE_BYTES:]
            _pause(deadline)
    finally:
        agent.nixl.remove_remote_agent(door)


def _name(port: int) -> str:
    return f"kvmover door {port}"


def _pause(deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise TimeoutError
    time.sleep(_PAUSE_S)


def _resolve(host: str, port: int) -> str:
    try:
        found = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, OverflowError) as error:
        raise PeerUnknown(f"{host}:{port} has no IPv4 address: {error}") from error
    return str(found[0][4][0])


def _knock(address: str, port: int, deadline: float) -> None:
    """NIXL logs a dead port and tells nobody. Raises PeerUnknown for one, TimeoutError where nothing answers."""
    try:
        socket.create_connection((address, port), max(0.001, deadline - time.monotonic())).close()
    except TimeoutError:
        raise
    except OSError as error:
        raise PeerUnknown(error.strerror) from error
