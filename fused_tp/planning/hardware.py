"""Machine descriptions as data: compute, memory and bandwidth of one rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from fused_tp.core.errors import listed
from fused_tp.planning.config import read_mapping

PRECISIONS = ("bf16", "fp8", "fp32")
_NUMBERS = ("float", "int", "float | None")  # types of the numeric fields
_NOT_NEEDED = ("message_bandwidth", "message_latency", "constants.dtensor")


@dataclass(frozen=True, kw_only=True)
class HardwareConstants:
    """Attained shares of a machine's peak numbers, and overheads.

    Attributes:
        links: share of the link bandwidth that collectives reach.
        network: share of the bandwidth between nodes that collectives reach.
        kernel: overhead of a kernel in seconds: its launch, and tiles that leave multiprocessors idle.
        memory: share of the memory bandwidth that memory-bound kernels reach.
        pointwise: the same share for norms, rotations, activations and sums, counted as one kernel each; code that
            needs many kernels for one of them reaches less.
        optimizer: the same share for gradient clipping and the optimizer step.
        dtensor: seconds that clipping and optimizer step add per DTensor parameter, as tp and FSDP2 create them.
        fused_matmul: FLOP/s of matmuls inside fused ops, relative to torch's.
        fused_links: share of `links` that the collectives of fused ops reach, including their copies.
        ring_attention: FLOP/s of attention over context parallel ranks, relative to attention on one rank.
    """

    links: float
    network: float = 0.9  # adapters reach more of their bandwidth than links do (Calculon, SC23)
    kernel: float
    memory: float = 0.92  # measured by torchao on pointwise kernels (roofline_utils.py)
    pointwise: float = 0.92
    optimizer: float = 0.92
    dtensor: float = 0.0
    fused_matmul: float = 1.0
    fused_links: float = 1.0
    ring_attention: float = 1.0


# Least squares of relative errors of `published.fitted_rows`; tests/unit/test_planning.py checks the minimum.
FITTED = HardwareConstants(links=0.73, kernel=18e-6)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Nodes of equal GPUs with one rank each. Bandwidths are bytes/s of one rank in one direction, times are seconds.

    Attributes:
        name: for messages.
        peak_flops: dense FLOP/s by precision ("bf16", "fp8", "fp32"), from the data sheet; the denominator of MFU.
        matmul_flops: FLOP/s that large matmuls sustain, by precision.
        attention_flops: FLOP/s of the attention kernel over forward and backward; only the unmasked half of the causal
            scores counts.
        memory: bytes per GPU.
        memory_bandwidth: from the data sheet.
        link_bandwidth, link_latency: between ranks of a node; from the data sheet.
        message_bandwidth, message_latency: between ranks of a node for torch.distributed messages, that is, data
            parallelism and pipelines. None: equal to those of links. CPU ranks use shared memory for all else.
        network_bandwidth, network_latency: between nodes.
        ranks_per_node: number of ranks that the links connect.
        overlaps: links transfer data while ranks compute. CPU ranks transfer data with the cores that compute.
        constants: see `HardwareConstants`.
        source: origin of the numbers.

    Example:
        >>> find_machine("h100").ranks_per_node
        8
    """

    name: str
    peak_flops: dict[str, float]
    matmul_flops: dict[str, float]
    attention_flops: float
    memory: float
    memory_bandwidth: float
    link_bandwidth: float
    link_latency: float = 5e-6
    message_bandwidth: float | None = None
    message_latency: float | None = None
    network_bandwidth: float
    network_latency: float = 10e-6
    ranks_per_node: int = 8
    overlaps: bool = True
    constants: HardwareConstants = FITTED
    source: str = ""

    def __post_init__(self) -> None:
        numbers: dict[str, Any] = {}
        for name in ("peak_flops", "matmul_flops"):
            by_precision = getattr(self, name)
            if (
                not by_precision
                or not set(by_precision) <= set(PRECISIONS)
                or set(by_precision) != set(self.peak_flops)
            ):
                raise ValueError(
                    f"{name} of machine {self.name} has {list(by_precision)}; peak_flops and matmul_flops need numbers "
                    f"for the same precisions, of {listed(map(repr, PRECISIONS))}."
                )
            numbers |= {f"{name}[{key!r}]": value for key, value in by_precision.items()}
        numbers |= {one.name: getattr(self, one.name) for one in fields(self) if one.type in _NUMBERS}
        numbers |= {f"constants.{name}": value for name, value in vars(self.constants).items()}
        for name, value in numbers.items():
            if name in _NOT_NEEDED and not value:
                continue
            if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ValueError(f"{name} of machine {self.name} is {value!r}; it must be positive and finite.")

    def peak(self, precision: str) -> float:
        """Peak FLOP/s in `precision`.

        Raises:
            ValueError: the machine does not support `precision`.
        """
        if precision not in self.peak_flops:
            has = listed([repr(one) for one in self.peak_flops])
            raise ValueError(f"precision={precision!r} is none of machine {self.name}, which has {has}.")
        return self.peak_flops[precision]

    @classmethod
    def from_file(cls, path: str | Path) -> Machine:
        """Read a JSON or YAML file with these fields by name.

        Raises:
            ValueError: a field is unknown, missing, or no positive number.
        """
        given = read_mapping(Path(path))
        known = {one.name for one in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise ValueError(f"{path} has {unknown[0]!r}, which is no field of Machine; it has {', '.join(known)}.")
        try:
            if "constants" in given:
                given["constants"] = HardwareConstants(**given["constants"])
            return cls(**given)
        except TypeError as error:
            raise ValueError(f"{path} does not describe a machine: {error}.") from error

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, in the form that `from_file` reads."""
        return asdict(self)


GIB = 1024**3

# FLOP/s of matmuls: maximum sustainable matmul FLOPS (under load, at the power limit), Stas Bekman, Machine Learning
# Engineering, compute/accelerator. For fp8 the source lists short bursts only; these are scaled by the bf16 ratio.
_MATMUL = "matmuls: Bekman, Machine Learning Engineering"
_ATTENTION = "attention: estimated after arXiv"

_H100 = Machine(
    name="h100",
    peak_flops={"bf16": 989e12, "fp8": 1979e12},
    matmul_flops={"bf16": 755e12, "fp8": 1453e12 * 755 / 834},
    attention_flops=450e12,
    memory=80 * GIB,
    memory_bandwidth=3.35e12,
    link_bandwidth=450e9,
    network_bandwidth=50e9,
    source=f"NVIDIA H100 SXM data sheet, 400 Gb/s of network a GPU; {_MATMUL}; {_ATTENTION}:2407.08608",
)

MACHINES = {
    machine.name: machine
    for machine in (
        Machine(
            name="a100",
            peak_flops={"bf16": 312e12},
            matmul_flops={"bf16": 271e12},  # a burst: the A100 stays below its power limit
            attention_flops=190e12,
            memory=80 * GIB,
            memory_bandwidth=2.039e12,
            link_bandwidth=300e9,
            network_bandwidth=25e9,
            source=f"NVIDIA A100 SXM data sheet, 200 Gb/s of network a GPU; {_MATMUL}; {_ATTENTION}:2307.08691",
        ),
        _H100,
        replace(
            _H100,
            name="h200",
            memory=141e9,
            memory_bandwidth=4.8e12,
            source=_H100.source.replace("H100", "H200"),
        ),
        Machine(
            name="b200",
            peak_flops={"bf16": 2250e12, "fp8": 4500e12},
            matmul_flops={"bf16": 1429e12, "fp8": 3432e12 * 1429 / 1745},
            attention_flops=1000e12,
            memory=180e9,
            memory_bandwidth=8e12,
            link_bandwidth=900e9,
            network_bandwidth=50e9,
            source=f"NVIDIA DGX B200 data sheet, 400 Gb/s of network a GPU; {_MATMUL}; attention: estimated",
        ),
    )
}


def machine_of_gpu(name: str) -> Machine | None:
    """Machine of the GPU that torch calls `name`, such as "NVIDIA H100 80GB HBM3"; None if it is unknown."""
    return next((machine for key, machine in MACHINES.items() if key in name.lower()), None)


def find_machine(name: str | Path | Machine) -> Machine:
    """Find a Machine by its name, in any case, or read it from a JSON or YAML file.

    Raises:
        ValueError: there is no such name or file.
    """
    if isinstance(name, Machine):
        return name
    if str(name).lower() in MACHINES:
        return MACHINES[str(name).lower()]
    if Path(name).suffix in (".json", ".yaml", ".yml"):
        return Machine.from_file(name)
    raise ValueError(f"{str(name)!r} is no machine; there are {listed(MACHINES)}, or name a JSON file of a Machine.")
