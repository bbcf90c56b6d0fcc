"""Coverage-guided fuzzing of what reads bytes from peers and files: ``nox -s fuzz_bytes -- --minutes 60``.

Each reader must return or raise what it promises. Atheris mutates the bytes, and keeps those that reach new
branches of the packages or of torch's reader of pickles. (``nox -s fuzz`` runs the property tests with random
examples.)
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import atheris
import torch
import torch.distributed as dist
from torch._weights_only_unpickler import Unpickler

with atheris.instrument_imports(include=["dist_utils", "dist_autograd_collectives", "ddp_quant_hooks"]):
    from ddp_quant_hooks import QuantizedAllreduceState, all_reduce
    from ddp_quant_hooks.feedback import checkpoint
    from dist_autograd_collectives import CollectiveError, descriptions
    from dist_autograd_collectives.calls import members
    from dist_utils.testing import same_bits

atheris.instrument_func(Unpickler.load)

RANKS = 2
MOST_BYTES = 4096
PICKLE = "data.pkl"
"""The part of a file of ``torch.save`` that says what is in it; the others are the tensors' bytes."""


class Reader(NamedTuple):
    """Something that reads bytes of unknown origin.

    Attributes:
        read: Called with the bytes; raises ``AssertionError``, or what is not promised, if it is wrong.
        seeds: Valid bytes.
    """

    read: Callable[[bytes], None]
    seeds: list[bytes]


def _read_description(data: bytes) -> None:
    header = torch.zeros(32, dtype=torch.int64)
    words = torch.frombuffer(bytearray(data[:256].ljust(256, b"\0")), dtype=torch.int64)
    header.copy_(words)
    with contextlib.suppress(CollectiveError):
        made = descriptions.stand_in(header, members(None))
        assert list(made.shape) == header[3 : 3 + made.ndim].tolist()


def _descriptions() -> list[bytes]:
    made = []
    for tensor in (torch.zeros(3), torch.zeros(2, 0, 5, dtype=torch.int8), torch.zeros((), dtype=torch.bool)):
        header = descriptions.described(tensor, members(None))
        made.append(header.numpy().tobytes())
    return made


class Residuals:
    """Loads residuals whose pickled part is made of the bytes.

    Args:
        state: Has residuals.
    """

    def __init__(self, state: QuantizedAllreduceState) -> None:
        self._state = state
        file = io.BytesIO()
        torch.save(self._state.state_dict(), file)
        with zipfile.ZipFile(file) as parts:
            self._others = {name: parts.read(name) for name in parts.namelist()}
        self._name = next(name for name in self._others if name.endswith(PICKLE))
        self.pickled = self._others.pop(self._name)

    def read(self, data: bytes) -> None:
        """Load everything, or nothing."""
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as parts:
            for name, part in {self._name: data, **self._others}.items():
                parts.writestr(name, part)
        before = self._state.state_dict()
        try:
            sent = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
            self._state.load_state_dict(checkpoint._read(sent, 1))
        except (ValueError, TypeError):
            assert data != self.pickled
            assert same_bits(self._state.state_dict(), before), "a refusal changes nothing"


def _trained() -> QuantizedAllreduceState:
    """Return a state with residuals, after a step that every rank makes."""
    state = QuantizedAllreduceState(error_feedback="both", min_bytes=0)
    all_reduce([torch.randn(300), torch.randn(70, 3)], dist.ReduceOp.AVG, state, key="change")
    return state


def _residuals(state: QuantizedAllreduceState) -> Reader:
    residuals = Residuals(state)
    return Reader(residuals.read, [residuals.pickled])


READERS: dict[str, Callable[[QuantizedAllreduceState], Reader]] = {
    "description": lambda _: Reader(_read_description, _descriptions()),
    "residuals": _residuals,
}
"""Made when the ranks have met; the state has residuals."""


def _be_peer(port: int, until_end: Connection) -> None:
    _join(dist.TCPStore("127.0.0.1", port, is_master=False), rank=1)
    state = _trained()
    with contextlib.suppress(EOFError):
        until_end.recv()
    state.close()


def _join(store: dist.Store, rank: int) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)


def _fuzz(reader: str, seconds: int, folder: Path) -> None:
    """Fuzz one reader in this process, which ends then: with an error at the first wrong outcome."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    kept, theirs = multiprocessing.Pipe()  # closed by the end of this process, which ends the peer
    spawn = multiprocessing.get_context("spawn")
    spawn.Process(target=_be_peer, args=(store.port, theirs), daemon=True).start()
    theirs.close()
    _join(store, rank=0)
    warnings.simplefilter("ignore")  # torch has one for each number that stands for a pickle's protocol
    read, seeds = READERS[reader](_trained())
    for number, seed in enumerate(seeds):
        read(seed)
        (folder / f"seed-{number}").write_bytes(seed)
    limits = [f"-max_total_time={seconds}", f"-max_len={MOST_BYTES}", "-rss_limit_mb=0"]
    options = [*limits, "-print_final_stats=1", f"-artifact_prefix=fuzz-{reader}-", str(folder)]
    atheris.Setup([sys.argv[0], *options], read)
    atheris.Fuzz()  # ends the process
    kept.close()


def main() -> int:
    """Fuzz the chosen readers, one after another; return 0 if nothing was wrong."""
    parser = argparse.ArgumentParser(prog="nox -s fuzz_bytes --", description=__doc__)
    parser.add_argument("readers", nargs="*", metavar="READER", help=f"of {', '.join(READERS)}")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all together")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = options.readers or [*READERS]
    if unknown := set(chosen) - set(READERS):
        parser.error(f"unknown readers: {', '.join(sorted(unknown))}")
    if options.folder is not None:
        _fuzz(chosen[0], max(1, round(60 * options.minutes)), options.folder)
    wrong = []
    for reader in chosen:
        print(f"== {reader}", flush=True)  # noqa: T201 - a command
        with tempfile.TemporaryDirectory() as folder:
            again = [sys.executable, __file__, reader, f"--folder={folder}"]
            share = f"--minutes={options.minutes / len(chosen)}"
            if subprocess.run([*again, share], check=False).returncode:
                wrong.append(reader)
    print(f"wrong: {', '.join(wrong)}" if wrong else f"{len(chosen)} readers right")  # noqa: T201
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
