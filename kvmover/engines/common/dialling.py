"""Whom a worker may be made to dial: hosts come with requests, and `exchange.allow` says which of them are good.

A name is looked up once, and what was found is what is dialled: who answers for a name cannot answer otherwise a moment
later.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from kvmover.errors import TransportError


class HostNotAllowed(TransportError):
    """A host that `exchange.allow` does not have: nobody was dialled. The message names the host and what it is."""


def address_of(host: str, port: int, allow: Sequence[str]) -> str:
    """The address to dial for `host`: of a name or an address of `allow`, or in one of its networks; of any if empty.

    Names are compared, without a difference of letters, before one is looked up. Raises HostNotAllowed, and
    TransportError for a name that is not known.

    >>> address_of("10.1.2.3", 80, ["10.0.0.0/8"]), address_of("127.0.0.1", 80, [])
    ('10.1.2.3', '127.0.0.1')
    """
    try:
        told = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise TransportError(f"no host {host!r} is known: {error}") from error
    found = [str(each[4][0]) for each in told]
    names = {each.lower() for each in allow}
    if not allow or host.lower() in names:
        return found[0]
    networks = [network for each in allow if (network := _network(each)) is not None]
    for text in found:
        address = ip_address(text.partition("%")[0])
        own = getattr(address, "ipv4_mapped", None) or address
        if any(own in network for network in networks):
            return text
    where = f"{host!r} ({', '.join(dict.fromkeys(found))})"
    raise HostNotAllowed(f"{where} is not dialled: exchange.allow has {', '.join(allow)}")


def _network(text: str) -> IPv4Network | IPv6Network | None:
    try:
        return ip_network(text, strict=False)
    except ValueError:
        return None
