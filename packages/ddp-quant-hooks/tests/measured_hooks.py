"""Made-up measurements for tests of the conclusions."""

from ddp_quant_hooks.measure import Exchange, Link

MIB = 1 << 20
SIZES = (MIB, 5 * MIB, 25 * MIB)
RATIOS = {"fp32": 1.0, "bf16": 0.5, "8 bits": 0.2578, "4 bits": 0.156}
ERRORS = {"fp32": 3e-8, "bf16": 2.5e-3, "8 bits": 6.5e-3, "4 bits": 0.1}


def link(gbit, *, place="between hosts"):
    return Link(place, 1e-4, gbit * 1e9 / 8)


def exchange(size, seconds, *, cpu=0.0, sent=0, error=1e-3, lost=0.0, beside=None, on_host_link=0):
    return Exchange(
        size=size,
        seconds=seconds,
        quartiles=(0.99 * seconds, 1.01 * seconds),
        cpu_seconds=cpu,
        seconds_beside=seconds if beside is None else beside,
        seconds_lost=lost,
        repeats=9,
        bytes_sent=int(sent),
        bytes_on_host_link=int(on_host_link),
        relative_error=error,
    )


def hooks_on(gbit, *, work=None, fixed=2e-4, lost=0.1):
    """Return hooks between two hosts; an exchange takes the time of the wire or of the processor if longer.

    ``work`` is processor seconds for a MiB of the bucket, by name; sending takes 0.5 ns a byte besides.
    """
    work = work or {"fp32": 0.0, "bf16": 3e-4, "8 bits": 4e-4, "4 bits": 9e-4}
    found = {}
    for name, ratio in RATIOS.items():
        found[name] = []
        for size in SIZES:
            sent = size * ratio
            cpu = work[name] * size / MIB + 0.5e-9 * sent
            seconds = fixed + max(sent * 8e-9 / gbit, cpu)
            found[name].append(
                exchange(size, seconds, cpu=cpu, sent=sent, error=ERRORS[name], lost=lost * seconds)
            )
    return found
