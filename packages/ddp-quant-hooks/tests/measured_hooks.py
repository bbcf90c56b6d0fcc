"""Made-up measurements for tests of the conclusions."""

from ddp_quant_hooks.measure import Beside, Exchange, HookTimes, Link

MIB = 1 << 20
SIZES = (MIB, 5 * MIB, 25 * MIB)
RATIOS = {"fp32": 1.0, "bf16": 0.5, "8 bits": 0.2578, "4 bits": 0.156}
ERRORS = {"fp32": 3e-8, "bf16": 2.5e-3, "8 bits": 6.5e-3, "4 bits": 0.1}


def link(gbit, *, place="between nodes", latency=1e-4, cpu_per_byte=0.5e-9):
    return Link(place, latency, gbit * 1e9 / 8, 2e-5, cpu_per_byte, 1 << 24)


def exchange(size, seconds, *, cpu, sent, error=1e-3, lost=0.0, beside=None):
    return Exchange(
        size=size,
        seconds=seconds,
        quartiles=(0.99 * seconds, 1.01 * seconds),
        cpu_seconds=cpu,
        repeats=9,
        bytes_sent=int(sent),
        relative_error=error,
        beside=Beside(beside or seconds, lost, 9),
    )


def hooks_on(gbit, *, work=None, world=2, fixed=2e-4, lost=0.1):
    """Return hooks between hosts; an exchange takes the time of the wire or of the processor if longer.

    ``work`` is processor seconds for a MiB of the bucket, by name; sending takes 0.5 ns a byte besides.
    """
    work = work or {"fp32": 0.0, "bf16": 3e-4, "8 bits": 4e-4, "4 bits": 9e-4}
    found = []
    for name, ratio in RATIOS.items():
        own = []
        for size in SIZES:
            sent = 2 * (world - 1) / world * size * ratio
            cpu = work[name] * size / MIB + 0.5e-9 * sent
            seconds = fixed + max(sent * 8e-9 / gbit, cpu)
            own.append(exchange(size, seconds, cpu=cpu, sent=sent, error=ERRORS[name], lost=lost * seconds))
        found.append(HookTimes(name, "direct" if "bits" in name else "ring", own))
    return found
