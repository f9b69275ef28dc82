"""Load-test the service on the loopback address: requests a second and the slowest percent, beside the bare network.

    python examples/serving/load.py [--requests 2000] [--clients 2]

The service runs in a process of its own. The two endpoints take turns, so that what disturbs one disturbs both.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROUNDS = 4
BODY = json.dumps({"inputs": [[i / 64 for i in range(64)]]})


@contextmanager
def service(link: str) -> Iterator[int]:
    """Start the service, and yield its port once it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = Path(__file__).with_name("app.py")
    command = [sys.executable, str(app), "--port", str(port), "--link", link]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603
    try:
        assert process.stdout is not None
        if "ready" not in process.stdout.readline():
            raise RuntimeError("the service did not start")
        yield port
    finally:
        process.terminate()
        process.wait()


def seconds_of(port: int, path: str, n: int) -> list[float]:
    """Send n requests one after the other over one connection; return how long each took."""
    connection, taken = http.client.HTTPConnection("127.0.0.1", port, timeout=30), []
    for _ in range(n):
        start = time.perf_counter()
        connection.request("POST", path, BODY, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        if response.status != 200:
            raise RuntimeError(f"{path} answered {response.status}")
        taken.append(time.perf_counter() - start)
    connection.close()
    return taken


def load(port: int, path: str, requests: int, clients: int) -> tuple[float, list[float]]:
    """Let several clients send requests at the same time; return the seconds of all and of each."""
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        parts = list(pool.map(lambda _: seconds_of(port, path, requests // clients), range(clients)))
    return time.perf_counter() - start, [one for part in parts for one in part]


def main(requests: int, clients: int, link: str) -> dict[str, dict[str, float]]:
    """Print and return requests a second and quantiles, in milliseconds."""
    found: dict[str, dict[str, float]] = {}
    with service(link) as port:
        paths = ("/network", "/predict")
        for path in paths:
            seconds_of(port, path, 50)  # warm
        total = dict.fromkeys(paths, 0.0)
        each: dict[str, list[float]] = {path: [] for path in paths}
        for _ in range(ROUNDS):
            for path in paths:
                taken, single = load(port, path, requests // ROUNDS, clients)
                total[path] += taken
                each[path] += single
    print(
        f"{'':10} {'requests/s':>10} {'median ms':>10} {'p99 ms':>8}   {requests} requests, {clients} clients, {link}"
    )
    for path in paths:
        ordered = sorted(each[path])
        found[path] = {
            "requests": len(ordered) / total[path],
            "median": 1e3 * ordered[len(ordered) // 2],
            "p99": 1e3 * ordered[int(0.99 * len(ordered))],
        }
        row = found[path]
        print(f"{path:10} {row['requests']:10.0f} {row['median']:10.2f} {row['p99']:8.2f}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--link", default="probit")
    options = parser.parse_args()
    main(options.requests, options.clients, options.link)
