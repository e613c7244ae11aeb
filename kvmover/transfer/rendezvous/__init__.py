"""How ranks find each other's cards: in etcd, or at each other's ports. Cards may as well come by any other road."""

from kvmover.transfer.rendezvous.directory import Appeared, Change, Directory, Entry, Vanished, changes, newest
from kvmover.transfer.rendezvous.etcd import EtcdDirectory
from kvmover.transfer.rendezvous.listener import ListenerDirectory

__all__ = [
    "Appeared",
    "Change",
    "Directory",
    "Entry",
    "EtcdDirectory",
    "ListenerDirectory",
    "Vanished",
    "changes",
    "newest",
]
