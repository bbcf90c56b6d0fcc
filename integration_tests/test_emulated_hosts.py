"""The benchmarks' hosts: links have the given rate."""

import subprocess
import sys

import pytest
from soak.network import emulated_hosts as emulation

RECEIVE = """
import socket, time
with socket.create_server(("10.77.0.2", 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    began, received = time.monotonic(), 0
    while part := connection.recv(1 << 16):
        received += len(part)
print(received, time.monotonic() - began)
"""
SEND = """
import socket
with socket.create_connection(("10.77.0.2", 5000)) as connection:
    connection.sendall(bytes(1_000_000))
"""


def test_a_link_is_no_faster_than_its_rate():
    try:
        with emulation.emulated_hosts(2, rate="8mbit") as (sender, receiver):
            receiving = subprocess.Popen(
                [*receiver, sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE, text=True
            )
            try:
                assert receiving.stdout.readline() == "ready\n"
                subprocess.run([*sender, sys.executable, "-c", SEND], check=True, timeout=60)
                received, seconds = receiving.communicate(timeout=60)[0].split()
            finally:
                receiving.kill()
    except emulation.EmulationUnavailableError as error:
        pytest.skip(str(error))
    assert int(received) == 1_000_000
    # A byte takes a microsecond, except for the two links' bursts of 128 KiB.
    assert float(seconds) > 1 - 2 * 0.132
