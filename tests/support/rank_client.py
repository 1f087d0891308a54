"""What a launcher starts in the place of a rank that `zygote` forks: ``python -I -S rank_client.py SOCKET args``.

It imports little, hands all that a rank inherits to the zygote, and ends as the rank does. The zygote takes its end for
an order to kill the rank.
"""

import json
import os
import resource
import signal
import socket
import sys

__all__ = ["main"]


def main() -> None:
    """Ask for a rank, and end as it ends."""
    _, path, *arguments = sys.argv
    numbers = [0, 1, 2]
    if "PMI_FD" in os.environ:
        numbers.append(int(os.environ["PMI_FD"]))
    request = {"environment": dict(os.environ), "folder": os.getcwd(), "arguments": arguments, "numbers": numbers}
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    data = json.dumps(request).encode() + b"\n"
    sent = socket.send_fds(connection, [data], numbers)
    if sent < len(data):  # a rank may have ended by now: no empty message
        connection.sendall(data[sent:])
    # The launcher is to see them closed when the rank is gone, or closes them.
    for number in numbers:
        os.close(number)
    answer = connection.recv(100)
    code = int(answer) if answer else 1
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
