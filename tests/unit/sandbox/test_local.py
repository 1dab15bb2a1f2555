"""What is read of a child that has ended."""

from __future__ import annotations

import socket
import threading

from stateset_agents.sandbox.local import _rest


def test_a_process_that_outlives_the_child_cannot_write_for_ever() -> None:
    reading, writing = socket.socketpair()
    reading.setblocking(False)

    def flood() -> None:
        try:
            for _ in range(200):  # 200 MB
                writing.sendall(bytes(10**6))
        except OSError:
            pass

    writing.send(b"x")
    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    found = _rest(reading.fileno(), 100_000)
    reading.close()
    thread.join()
    writing.close()
    assert 0 < len(found) <= 100_001 + 2**16
