"""What a test starts in place of Python: has the process of `warm_python` run a program, and stands for it.

It lends its standard streams, folder and environment, hands on the signals that it gets, and ends as the
program ends. Killed, it takes the program with it. It imports only what is quick.
"""

import _socket
import marshal
import os
import select
import signal
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def _receive(door: _socket.socket, signals: int) -> int:
    answer = b""
    while len(answer) < 4:
        ready, _, _ = select.select([door, signals], [], [])
        if door not in ready:
            door.send(os.read(signals, 64))
            continue
        part = door.recv(4 - len(answer))
        if not part:
            sys.exit("the process of warm_python is gone")
        answer += part
    return int.from_bytes(answer, "little", signed=True)


def main() -> None:
    address, *arguments = sys.argv[1:]
    door = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    door.connect(address)
    signals, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)  # a handler in Python may come too late: behind the wait for the answer
    for number in FORWARDED:
        signal.signal(number, lambda *_: None)
    job = marshal.dumps((arguments, os.getcwd(), dict(os.environ)))
    streams = b"".join(file.to_bytes(4, sys.byteorder) for file in (0, 1, 2))
    door.sendmsg([len(job).to_bytes(4, "little")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
    door.sendall(job)
    with open("/proc/self/comm", "w") as name:
        name.write(str(_receive(door, signals)))  # where a test finds the program's own number
    status = _receive(door, signals)
    if status < 0:
        if -status in FORWARDED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
