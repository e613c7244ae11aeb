"""An S3 service of one's own: moto's server in a process, on a free port, until its standard input ends."""

from __future__ import annotations

import logging
import os
import sys


def main() -> None:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    sys.stdout.write(f"{server.get_host_and_port()[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)  # with its threads, which nobody waits for


if __name__ == "__main__":
    main()
