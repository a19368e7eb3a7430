"""Kinds of machine as data: what a rank computes, keeps and sends in a second."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from fused_tp.planning.config import read_mapping
from fused_tp.runtime.errors import listed

PRECISIONS = ("bf16", "fp8", "fp32")
_NUMBERS = ("float", "int", "float | None")  # types of fields that hold one
_NOT_NEEDED = ("message_bandwidth", "message_latency", "constants.dtensor")


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What is reached of a machine's numbers.

    Attributes:
        links: share of the bandwidth of links, in collectives.
        network: share of the bandwidth between nodes.
        kernel: seconds that a kernel costs beside its work: its launch, and tiles that leave multiprocessors idle.
        memory: share of the bandwidth of memory, in kernels that are bound by it.
        pointwise: the same in norms, rotations, activations and sums, as if each were one kernel; code that takes many
            kernels for each reaches less.
        optimizer: the same in clipping and the step of the optimizer.
        dtensor: seconds that these cost for each parameter that is a DTensor, as those over tp and under FSDP2 are.
        fused_matmul: FLOP/s of matmuls inside of fused ops, in those of torch's.
        fused_links: share of `links` that the collectives of fused ops reach, with what they copy beside.
        ring_attention: FLOP/s of the attention of context parallel ranks, in those of the attention of one.
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


# Least squares of relative errors of `published.fitted_rows`; tests/unit/test_planning.py holds that this is so.
FITTED = Constants(links=0.73, kernel=18e-6)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Nodes of equal GPUs, one rank on each. Bandwidths are bytes/s of one rank in one direction, times are seconds.

    Attributes:
        name: for messages.
        peak_flops: dense FLOP/s by precision ("bf16", "fp8", "fp32"), from the data sheet; MFU is a share of it.
        matmul_flops: FLOP/s that large matmuls sustain, by precision.
        attention_flops: FLOP/s of the attention kernel, forward and backward together, of the half that a causal mask
            leaves.
        memory: bytes.
        memory_bandwidth: of the data sheet.
        link_bandwidth, link_latency: between ranks of a node; of the data sheet.
        message_bandwidth, message_latency: between ranks of a node, of what torch.distributed sends: data parallelism
            and pipelines. None: as over links; CPU ranks have memory that they share for the rest.
        network_bandwidth, network_latency: between nodes.
        ranks_per_node: ranks that the links join.
        overlaps: links carry data while ranks compute. CPU ranks move it by the cores that they compute with.
        constants: see there.
        source: where the numbers come from.

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
    constants: Constants = FITTED
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
        """Peak FLOP/s.

        Raises:
            ValueError: the machine has no such precision.
        """
        if precision not in self.peak_flops:
            has = listed([repr(one) for one in self.peak_flops])
            raise ValueError(f"precision={precision!r} is none of machine {self.name}, which has {has}.")
        return self.peak_flops[precision]

    @classmethod
    def from_file(cls, path: str | Path) -> Machine:
        """Of a JSON or YAML file with these fields by name.

        Raises:
            ValueError: a field is unknown, missing, or no positive number.
        """
        given = read_mapping(Path(path))
        known = {one.name for one in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise ValueError(f"{path} has {unknown[0]!r}, which is no field of Machine; it has {', '.join(known)}.")
        try:
            if "constants" in given:
                given["constants"] = Constants(**given["constants"])
            return cls(**given)
        except TypeError as error:
            raise ValueError(f"{path} does not describe a machine: {error}.") from error

    def to_dict(self) -> dict[str, Any]:
        """As `from_file` takes it back."""
        return asdict(self)


GIB = 1024**3

# FLOP/s of matmuls: maximum sustainable matmul FLOPS (under load, at the power limit), Stas Bekman, Machine Learning
# Engineering, compute/accelerator. For fp8 the source has short bursts only, which are scaled by the ratio in bf16.
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
            matmul_flops={"bf16": 271e12},  # a burst: the A100 keeps below its power limit
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
    """The Machine whose GPU torch calls `name`, such as "NVIDIA H100 80GB HBM3"; None where it is not known."""
    return next((machine for key, machine in MACHINES.items() if key in name.lower()), None)


def find_machine(name: str | Path | Machine) -> Machine:
    """A Machine by its name, whatever the case, or of a JSON or YAML file.

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
