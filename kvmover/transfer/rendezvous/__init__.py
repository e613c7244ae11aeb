"""How ranks find each other's cards: in etcd. Cards may as well come by any other road."""

from kvmover.transfer.rendezvous.directory import Appeared, Change, Directory, Entry, Vanished, changes, newest
from kvmover.transfer.rendezvous.etcd import EtcdDirectory

__all__ = [
    "Appeared",
    "Change",
    "Directory",
    "Entry",
    "EtcdDirectory",
    "Vanished",
    "changes",
    "newest",
]
