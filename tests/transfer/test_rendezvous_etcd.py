"""Ranks find each other in a real etcd, whose entries live as long as the processes that published them."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest
from rendezvous_peers import ETCD, EtcdServer, Publisher, etcd_directory, eventually, free_port

from kvmover.errors import DeadlineExceeded, LayoutError, PeerLost, TransportUnavailable
from kvmover.transfer.rendezvous import Entry, EtcdDirectory
from kvmover.transfer.rendezvous.directory import write_entries
from kvmover.transfer.rendezvous.etcd import EtcdRefused, Gateway

needs_etcd = pytest.mark.skipif(ETCD is None, reason="needs an etcd server (Debian: etcd-server)")
pytestmark = pytest.mark.timeout(60)


class _Raw(msgspec.Struct):
    leases: list[dict[str, str]] = []


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    yield server
    server.stop()


@pytest.fixture
def here(etcd: EtcdServer) -> Iterator[EtcdDirectory]:
    """A directory that a test may publish in; nothing of it stays."""
    directory = etcd.directory()
    yield directory
    directory.close()


def end_all_leases(etcd: EtcdServer) -> int:
    """As if every publisher had been away for too long."""
    gateway = Gateway([etcd.url], 5)
    leases = gateway.call("/v3/lease/leases", {}, _Raw).leases
    for lease in leases:
        gateway.call("/v3/lease/revoke", lease, _Raw)
    return len(leases)


def write(etcd: EtcdServer, key: str, value: bytes) -> None:
    Gateway([etcd.url], 5).call("/v3/kv/put", {"key": key.encode(), "value": value}, _Raw)


def erase(etcd: EtcdServer, start: str) -> None:
    Gateway([etcd.url], 5).call("/v3/kv/deleterange", {"key": start.encode(), "range_end": b"\0"}, _Raw)


@needs_etcd
class TestEntries:
    def test_what_one_publishes_others_find_by_engine_and_no_more(self, etcd: EtcdServer, here: EtcdDirectory) -> None:
        cards = [Entry("pre/fill", rank, 5, bytes([rank]) * 100) for rank in range(11)]
        for entry in [*cards, Entry("pre/fill-2", 0, 5, b"x"), Entry("pre", 0, 5, b"y")]:
            here.publish(entry)
        assert etcd.directory().ranks("pre/fill") == tuple(cards)
        assert etcd.directory().ranks("pre") == (Entry("pre", 0, 5, b"y"),)
        assert etcd.directory().ranks("nobody") == ()
        assert etcd.directory(prefix="/another").ranks("pre/fill") == ()

    def test_what_is_withdrawn_is_gone_and_may_be_withdrawn_again(self, here: EtcdDirectory) -> None:
        stays, goes = Entry("withdrawing", 0, 1, b"a"), Entry("withdrawing", 1, 1, b"b")
        here.publish(stays)
        here.publish(goes)
        here.withdraw(goes)
        here.withdraw(goes)
        assert here.ranks("withdrawing") == (stays,)

    def test_closing_takes_everything_back_at_once(self, etcd: EtcdServer, here: EtcdDirectory) -> None:
        other = etcd.directory()
        other.publish(Entry("closing", 0, 1, b"a"))
        assert len(here.ranks("closing")) == 1
        other.close()
        other.close()
        assert here.ranks("closing") == ()

    def test_a_newer_generation_of_a_rank_wins_and_an_older_one_is_told_so(
        self, etcd: EtcdServer, here: EtcdDirectory
    ) -> None:
        other = etcd.directory()
        other.publish(Entry("twice", 3, 9, b"old"))
        here.publish(Entry("twice", 3, 10, b"new"))
        assert other.ranks("twice") == (Entry("twice", 3, 10, b"new"),)
        with pytest.raises(PeerLost, match="rank 3 of twice, generation 9 has been replaced by generation 10"):
            other.publish(Entry("twice", 3, 9, b"old"))
        other.close()

    def test_publishing_again_replaces_the_card_of_the_same_generation(self, here: EtcdDirectory) -> None:
        here.publish(Entry("again", 0, 1, b"before"))
        here.publish(Entry("again", 0, 1, b"after"))
        assert here.ranks("again") == (Entry("again", 0, 1, b"after"),)

    def test_more_entries_than_fit_one_answer_are_all_found(self, here: EtcdDirectory) -> None:
        cards = tuple(Entry("many", rank, 1, bytes(10)) for rank in range(150))
        for entry in cards:
            here.publish(entry)
        assert here.ranks("many") == cards

    def test_what_somebody_else_wrote_there_hides_nobody(
        self, etcd: EtcdServer, here: EtcdDirectory, caplog: pytest.LogCaptureFixture
    ) -> None:
        here.publish(Entry("mixed", 1, 1, b"a"))
        write(etcd, "/kvmover/mixed/0/1", b"junk")
        write(etcd, "/kvmover/mixed/1/2", b"")
        write(etcd, "/kvmover/mixed/2/1", base64.b64decode("gqZmb3JtYXQ="))
        assert here.ranks("mixed") == (Entry("mixed", 1, 1, b"a"),)
        assert [word in caplog.text for word in ("mixed/0/1", "mixed/1/2", "mixed/2/1")] == [True] * 3
        erase(etcd, "/kvmover/mixed")

    def test_an_entry_under_the_key_of_another_rank_is_left_out(
        self, etcd: EtcdServer, here: EtcdDirectory, caplog: pytest.LogCaptureFixture
    ) -> None:
        write(etcd, "/kvmover/forged/0/1", write_entries([Entry("forged", 0, 99, b"a")]))
        assert here.ranks("forged") == ()
        assert "generation 99" in caplog.text
        erase(etcd, "/kvmover/forged")

    def test_a_card_that_etcd_does_not_take_is_refused_with_its_words(self, here: EtcdDirectory) -> None:
        with pytest.raises(EtcdRefused, match="request is too large"):
            here.publish(Entry("large", 0, 1, bytes(2_000_000)))
        assert here.ranks("large") == ()


@needs_etcd
class TestLeases:
    def test_the_entry_of_a_killed_process_vanishes_and_that_of_a_living_one_outlasts_its_lease(
        self, etcd: EtcdServer, here: EtcdDirectory
    ) -> None:
        lives, dies, follows = (Entry("mortal", 0, 1, b"a"), Entry("mortal", 1, 1, b"b"), Entry("mortal", 1, 2, b"c"))
        here.publish(lives)
        publisher = Publisher(etcd_directory, etcd.url, entries=[dies]).ready()
        assert here.ranks("mortal") == (lives, dies)
        publisher.kill()
        assert here.ranks("mortal") == (lives, dies), "the lease has not run out"
        # A successor need not wait for it.
        successor = etcd.directory()
        successor.publish(follows)
        assert here.ranks("mortal") == (lives, follows)
        successor.close()
        assert eventually(lambda: here.ranks("mortal"), lambda found: len(found) == 1) == (lives,)

    def test_a_process_that_ends_in_order_leaves_nothing(self, etcd: EtcdServer, here: EtcdDirectory) -> None:
        publisher = Publisher(etcd_directory, etcd.url, entries=[Entry("orderly", 0, 1, b"a")]).ready()
        assert len(here.ranks("orderly")) == 1
        assert publisher.leave() == 0
        assert here.ranks("orderly") == ()

    def test_a_lost_lease_is_replaced_and_its_entries_published_again(
        self, etcd: EtcdServer, here: EtcdDirectory
    ) -> None:
        cards = (Entry("kept", 0, 1, b"a"), Entry("kept", 1, 1, b"b"))
        for entry in cards:
            here.publish(entry)
        assert end_all_leases(etcd) >= 1
        assert eventually(lambda: here.ranks("kept"), lambda found: found == cards) == cards

    def test_publishing_does_not_wait_for_a_lost_lease_to_be_noticed(
        self, etcd: EtcdServer, here: EtcdDirectory
    ) -> None:
        here.publish(Entry("at once", 0, 1, b"a"))
        end_all_leases(etcd)
        here.publish(Entry("at once", 1, 1, b"b"))
        assert Entry("at once", 1, 1, b"b") in here.ranks("at once")
        assert eventually(lambda: len(here.ranks("at once")), lambda count: count == 2) == 2

    def test_a_process_that_was_replaced_while_it_was_away_does_not_come_back(
        self, etcd: EtcdServer, here: EtcdDirectory
    ) -> None:
        old, beside, new = (Entry("zombie", 0, 1, b"a"), Entry("zombie", 1, 1, b"b"), Entry("zombie", 0, 2, b"c"))
        publisher = Publisher(etcd_directory, etcd.url, entries=[old, beside]).ready()
        publisher.pause()
        assert eventually(lambda: here.ranks("zombie"), lambda found: not found) == ()
        here.publish(new)
        publisher.resume()
        assert eventually(lambda: here.ranks("zombie"), lambda found: len(found) == 2) == (new, beside)
        here.withdraw(new)
        assert here.ranks("zombie") == (beside,)
        publisher.kill()

    def test_an_etcd_that_restarts_with_nothing_hears_of_us_again(self, tmp_path: Path) -> None:
        server = EtcdServer(tmp_path)
        directory, entry = server.directory(), Entry("phoenix", 0, 1, b"a")
        directory.publish(entry)
        server.stop()
        with pytest.raises(TransportUnavailable, match="etcd cannot be reached"):
            directory.ranks("phoenix")
        server.forget()
        server.start()
        assert eventually(lambda: directory.ranks("phoenix"), bool) == (entry,)
        directory.close()
        server.stop()


class TestReaching:
    def test_a_dead_port_is_told_with_its_address(self) -> None:
        port = free_port()
        directory = EtcdDirectory([f"http://127.0.0.1:{port}"])
        with pytest.raises(TransportUnavailable, match=f"127.0.0.1:{port}: .*refused"):
            directory.publish(Entry("nowhere", 0, 1, b"a"))
        directory.close()

    @needs_etcd
    def test_an_etcd_that_hangs_is_a_deadline_and_works_again_afterwards(self, etcd: EtcdServer) -> None:
        directory = EtcdDirectory([etcd.url], deadline_s=0.3)
        etcd.pause()
        try:
            with pytest.raises(DeadlineExceeded, match=r"/v3/kv/range within 0.3 s \(127.0.0.1:\d+: timed out\)"):
                directory.ranks("anybody")
        finally:
            etcd.resume()
        assert eventually(lambda: directory.ranks("anybody") == (), bool)

    @needs_etcd
    def test_another_endpoint_is_asked_where_one_is_dead(self, etcd: EtcdServer) -> None:
        directory = EtcdDirectory([f"http://127.0.0.1:{free_port()}", etcd.url])
        directory.publish(Entry("failover", 0, 1, b"a"))
        assert len(directory.ranks("failover")) == 1
        directory.close()

    @pytest.mark.parametrize(
        ("status", "body", "words"),
        [
            (200, b"<html>", "does not answer like etcd"),
            (200, b"[]", "like etcd"),
            (503, b"{}", "503"),
            (404, b"x", "like"),
        ],
        ids=["a page", "other JSON", "no leader", "another server"],
    )
    def test_what_is_not_etcd_is_told_so(self, status: int, body: bytes, words: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        with HTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            try:
                with pytest.raises(TransportUnavailable, match=words):
                    EtcdDirectory([f"http://127.0.0.1:{server.server_port}"]).ranks("anybody")
            finally:
                server.shutdown()
                thread.join()

    @pytest.mark.parametrize(
        ("endpoints", "options", "words"),
        [
            ([], {}, r"etcd at \[\]"),
            (["127.0.0.1:2379"], {}, "127.0.0.1:2379"),
            (["ftp://host:1"], {}, "ftp://host:1"),
            (["http://host:1/path"], {}, "http://host:1/path"),
            (["http://host:1"], {"deadline_s": 0}, "within 0 s"),
            (["http://host:1"], {"ttl_s": 1}, "lease of 1 s"),
            (["http://host:1"], {"ttl_s": 4, "deadline_s": 3}, "lease of 4 s"),
        ],
        ids=str,
    )
    def test_settings_that_cannot_work_are_refused_with_their_values(
        self, endpoints: list[str], options: dict[str, float], words: str
    ) -> None:
        with pytest.raises(LayoutError, match=words):
            EtcdDirectory(endpoints, **options)
