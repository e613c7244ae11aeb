"""Cards are fetched from whom requests may name, once, in time and in bounds, over real sockets."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from threading import Thread

import pytest

from kvmover.config import ConfigError, Settings, load
from kvmover.config.settings import ExchangeSettings
from kvmover.engines.common import Cards, CardServer, HostNotAllowed, address_of, caller, fetch_cards
from kvmover.engines.sglang.pd_exchange import Exchange
from kvmover.errors import PeerRefused, TransportError
from kvmover.transfer.protocol.auth import Key, Keys, MessageAuth

SECRET = b"the key of this fleet"


@contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[tuple[int, list[bytes]]]:
    """An HTTP server whose words are `answer`'s: its port, and what it was asked."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    near, _ = listener.accept()
                except OSError:
                    return
                with near:
                    asked.append(near.recv(4096))
                    try:
                        answer(near)
                    except OSError:
                        continue

        thread = Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1], asked
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def said(body: bytes, status: str = "200 OK", *more: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *more, "", ""]).encode() + body


def settings(*allow: str) -> Settings:
    return load(environ={"KVMOVER_EXCHANGE_ALLOW": ",".join(allow)}).settings


@pytest.mark.parametrize("allow", [(), ("127.0.0.0/8",), ("::1/128", "127.0.0.1"), ("LOCALHOST",), ("localhost",)])
def test_a_host_that_is_allowed_is_dialled(allow: tuple[str, ...]) -> None:
    with answering(lambda near: near.sendall(said(Cards("v", (b"one",)).encode()))) as (port, asked):
        assert caller(settings(*allow))("localhost", port) == Cards("v", (b"one",))
    assert asked[0].startswith(b"GET /kvmover/cards HTTP/1.1\r\nHost: localhost:")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "127.1"])
def test_no_other_host_is_whatever_it_is_called(host: str) -> None:
    with answering(lambda near: near.sendall(said(Cards("v", (b"one",)).encode()))) as (port, asked):
        for allow in (("10.0.0.0/8", "prefill-0"), ("128.0.0.0/1",), ("localhost.example",)):
            with pytest.raises(HostNotAllowed, match=rf"'{host}' \(.*\) is not dialled: exchange.allow has {allow[0]}"):
                caller(settings(*allow))(host, port)
    assert not asked


def test_an_address_of_one_kind_within_the_other_is_the_same_address() -> None:
    assert address_of("::ffff:127.0.0.1", 80, ["127.0.0.0/8"]) == "::ffff:127.0.0.1"
    with pytest.raises(HostNotAllowed):
        address_of("::ffff:127.0.0.1", 80, ["10.0.0.0/8"])


def test_a_name_is_looked_up_once_and_the_address_that_was_found_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    look = socket.getaddrinfo

    def rebinding(host: str, port: int, *more, **others):
        looked.append(host)
        at = {"prefill.example": "127.0.0.1" if looked.count("prefill.example") == 1 else "127.0.0.2"}
        return look(at.get(host, host), port, *more, **others)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    with answering(lambda near: near.sendall(said(Cards("v", ()).encode()))) as (port, _):
        assert fetch_cards("prefill.example", port, allow=("127.0.0.1/32",)).engine == "v"
    assert looked.count("prefill.example") == 1


def test_a_name_that_nobody_knows_is_an_error_of_the_wire() -> None:
    for host in ("no.such.host.invalid", "x" * 300, "a..b"):
        with pytest.raises(TransportError, match="no host"):
            fetch_cards(host, 1)


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect"])
def test_no_redirect_is_followed(status: str) -> None:
    with answering(lambda near: near.sendall(said(Cards("v", ()).encode()))) as (other, asked):
        moved = f"Location: http://127.0.0.1:{other}/kvmover/cards"
        with (
            answering(lambda near: near.sendall(said(b"", status, moved))) as (port, _),
            pytest.raises(TransportError, match=f"HTTP {status[:3]}"),
        ):
            fetch_cards("127.0.0.1", port)
    assert not asked


def test_an_answer_above_the_limit_is_none() -> None:
    def endless(near: socket.socket) -> None:
        near.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(80):
            near.sendall(bytes(1 << 16))

    with answering(endless) as (port, _), pytest.raises(TransportError, match="HTTP 200 and 4194305 bytes"):
        fetch_cards("127.0.0.1", port)


@pytest.mark.parametrize("part", [b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b""])
def test_who_speaks_a_byte_at_a_time_is_hung_up_on(part: bytes) -> None:
    """Each byte comes in time: it is the whole call that has an end."""

    def dripping(near: socket.socket) -> None:
        near.sendall(part)
        while True:
            near.sendall(b"x")
            time.sleep(0.01)

    with answering(dripping) as (port, _), pytest.raises(TransportError, match=f"no cards from 127.0.0.1:{port}"):
        fetch_cards("127.0.0.1", port, 0.2)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(said(b"gone\r\n\x1b[2J 2026-01-01 ERROR" + b"x" * 5000, "500 no"), id="the body of an error"),
        pytest.param(b"SSH-2.0-\x1b[2J\x07" + b"y" * 5000 + b"\r\n\r\n", id="another protocol"),
        pytest.param(b"HTTP/1.1 200 \x1b[2J\r\nContent-Length: 3\r\n\r\nabc", id="a body that is no cards"),
    ],
)
def test_an_answer_reaches_no_error_but_in_short_and_on_one_line_that_prints(answer: bytes) -> None:
    with answering(lambda near: near.sendall(answer)) as (port, _), pytest.raises(TransportError) as raised:
        fetch_cards("127.0.0.1", port)
    words = str(raised.value)
    assert words.startswith(f"no cards from 127.0.0.1:{port}: ")
    assert words.isprintable()
    assert len(words) < 300


def test_a_source_that_a_client_names_is_logged_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    Exchange.of(settings("10.0.0.0/8")).meet("a\n2026-01-01 ERROR all is lost\x1b[2J:80", lambda _: None)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert line.isprintable()
    assert "all is lost" in line


def test_with_a_shared_key_one_unsealed_card_ends_the_call(tmp_path) -> None:
    (key := tmp_path / "key").write_bytes(SECRET)
    ours = load(environ={"KVMOVER_SECURITY_SHARED_KEY_FILE": str(key)}).settings
    sealed = MessageAuth(Keys(Key(SECRET)), "p").sign_card(b"card of rank 0")
    forged = MessageAuth(Keys(Key(b"a key of somebody else")), "p").sign_card(b"card of rank 1")
    for cards, words in (((sealed, b"card of rank 1"), "has no seal"), ((sealed, forged), "not of a key of ours")):
        with closing(CardServer("127.0.0.1", 0)) as desk:
            desk.lay_out("v", cards)
            with pytest.raises(PeerRefused, match=words):
                caller(ours)("127.0.0.1", desk.port)
            assert caller(Settings())("127.0.0.1", desk.port).cards == cards
    with closing(CardServer("127.0.0.1", 0)) as desk:
        desk.lay_out("v", [sealed])
        assert caller(ours)("127.0.0.1", desk.port).cards == (sealed,)


def test_a_bootstrap_address_that_is_not_allowed_is_refused_before_anybody_is_dialled() -> None:
    with answering(lambda near: near.sendall(said(Cards("v", (b"one",)).encode()))) as (port, asked):
        for model in (None, "weights"):
            exchange = Exchange.of(settings("10.0.0.0/8"))
            exchange.model = model
            met = exchange.meet(f"127.0.0.1:{port}", asked.append)
            assert met is not None
            assert "is not dialled: exchange.allow has 10.0.0.0/8" in met.refused
            assert f"127.0.0.1:{port}" in exchange.foreign, "nor does SGLang's own client"
    assert not asked


def test_a_line_at_start_says_whom_requests_may_have_dialled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvmover"):
        caller(Settings())
        caller(settings("10.0.0.0/8", "prefill-0"))
    assert [record.getMessage() for record in caplog.records] == [
        "requests may have cards fetched from any host, since exchange.allow is empty",
        "requests may have cards fetched from hosts of exchange.allow: 10.0.0.0/8, prefill-0",
    ]


@pytest.mark.parametrize("each", ["10.0.0.0/33", "10.0.0.1/8", "http://x", "not a host", "x:80", ""])
def test_what_is_neither_a_network_nor_a_host_is_no_setting(each: str) -> None:
    with pytest.raises(ConfigError, match="in allow; it is a network as 10.0.0.0/8, or a host"):
        ExchangeSettings(allow=(each,))
