"""Machine descriptions as data: compute, memory and bandwidth of one rank."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from fused_tp.core.errors import join_words
from fused_tp.planning.config import read_mapping

PRECISIONS = ("bf16", "fp8", "fp32")
_NUMERIC_TYPES = ("float", "int", "float | None")  # type annotations of the numeric fields
_OPTIONAL_FIELDS = ("message_bandwidth", "message_latency", "constants.dtensor")  # may be None or 0


@dataclass(frozen=True, kw_only=True)
class HardwareConstants:
    """Attained shares of a machine's peak numbers, and overheads.

    Attributes:
        links: share of the link bandwidth that collectives reach.
        network: share of the bandwidth between nodes that collectives reach.
        kernel: overhead of a kernel in seconds: its launch, and tiles that leave multiprocessors idle.
        memory: share of the memory bandwidth that memory-bound kernels reach.
        pointwise: share of the memory bandwidth for norms, rotary embeddings, activations and sums, each counted as
            one kernel; lower if the model's code launches several kernels for one of them.
        optimizer: share of the memory bandwidth for gradient clipping and the optimizer step.
        dtensor: extra seconds of clipping and optimizer step per parameter that is a DTensor (under tp or FSDP2).
        fused_matmul: FLOP/s of matmuls inside fused ops, relative to torch's.
        fused_links: share of `links` that the collectives of fused ops reach, including their copies.
        ring_attention: FLOP/s of attention over context parallel ranks, relative to attention on one rank.
    """

    links: float
    network: float = 0.9  # network adapters reach a larger share of their bandwidth than links (Calculon, SC23)
    kernel: float
    memory: float = 0.92  # measured by torchao on pointwise kernels (roofline_utils.py)
    pointwise: float = 0.92
    optimizer: float = 0.92
    dtensor: float = 0.0
    fused_matmul: float = 1.0
    fused_links: float = 1.0
    ring_attention: float = 1.0


# These values minimize the squared relative errors of `published.fitted_rows`; tests/unit/test_planning.py checks it.
FITTED_CONSTANTS = HardwareConstants(links=0.73, kernel=18e-6)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Cluster of equal nodes with one rank per GPU.

    Bandwidths are bytes/s of one rank in one direction; times are seconds.

    Attributes:
        name: name for messages.
        peak_flops: dense FLOP/s by precision ("bf16", "fp8", "fp32"), from the data sheet; the denominator of MFU.
        matmul_flops: FLOP/s that large matmuls sustain, by precision.
        attention_flops: FLOP/s of the attention kernel over forward and backward; only the unmasked half of the causal
            scores counts.
        memory: bytes per GPU.
        memory_bandwidth: from the data sheet.
        link_bandwidth, link_latency: between ranks of a node; from the data sheet.
        message_bandwidth, message_latency: between ranks of a node for torch.distributed, which data parallelism and
            pipelines use. None: equal to those of links. On CPUs it is slower than fused_tp's shared memory.
        network_bandwidth, network_latency: between nodes.
        ranks_per_node: number of ranks that the links connect.
        overlaps: True if links transfer data while ranks compute; False on CPUs, whose cores copy the data.
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
    constants: HardwareConstants = FITTED_CONSTANTS
    source: str = ""

    def __post_init__(self) -> None:
        numbers: dict[str, Any] = {}
        for name in ("peak_flops", "matmul_flops"):
            flops_by_precision = getattr(self, name)
            if (
                not flops_by_precision
                or not set(flops_by_precision) <= set(PRECISIONS)
                or set(flops_by_precision) != set(self.peak_flops)
            ):
                raise ValueError(
                    f"{name} of machine {self.name} has the precisions {list(flops_by_precision)}; peak_flops and "
                    f"matmul_flops must have the same precisions, out of {join_words(map(repr, PRECISIONS))}."
                )
            numbers |= {f"{name}[{key!r}]": value for key, value in flops_by_precision.items()}
        numbers |= {field.name: getattr(self, field.name) for field in fields(self) if field.type in _NUMERIC_TYPES}
        numbers |= {f"constants.{name}": value for name, value in vars(self.constants).items()}
        for name, value in numbers.items():
            if name in _OPTIONAL_FIELDS and not value:
                continue
            if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ValueError(f"{name} of machine {self.name} must be positive and finite, got {value!r}.")

    def peak(self, precision: str) -> float:
        """Return the peak FLOP/s in `precision`.

        Raises:
            ValueError: the machine does not support `precision`.
        """
        if precision not in self.peak_flops:
            supported_names = join_words([repr(name) for name in self.peak_flops])
            raise ValueError(f"machine {self.name} does not support precision={precision!r}; use {supported_names}.")
        return self.peak_flops[precision]

    @classmethod
    def from_file(cls, path: str | Path) -> Machine:
        """Read a Machine from a JSON or YAML file with its fields by name.

        Raises:
            ValueError: a field is unknown, missing, or not a positive number.
        """
        values = read_mapping(Path(path))
        field_names = {field.name for field in fields(cls)}
        if unknown_fields := sorted(set(values) - field_names):
            raise ValueError(
                f"{path} has {unknown_fields[0]!r}, which is not a field of Machine; use {', '.join(field_names)}."
            )
        if missing_fields := [
            field.name for field in fields(cls) if field.default is MISSING and field.name not in values
        ]:
            raise ValueError(f"{path} lacks the Machine fields {join_words(missing_fields)}; add them.")
        try:
            if "constants" in values:
                values["constants"] = HardwareConstants(**values["constants"])
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"{path} does not describe a machine: {error}.") from error

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, in the form that `from_file` reads."""
        return asdict(self)


GIB = 1024**3

# Sustained matmul FLOP/s (under load, at the power limit): Stas Bekman, Machine Learning Engineering,
# compute/accelerator. For fp8 the source lists only short bursts, so these are scaled by sustained / burst of bf16.
_MATMUL_SOURCE = "matmuls: Bekman, Machine Learning Engineering"
_ATTENTION_SOURCE = "attention: estimated after arXiv"

_H100 = Machine(
    name="h100",
    peak_flops={"bf16": 989e12, "fp8": 1979e12},
    matmul_flops={"bf16": 755e12, "fp8": 1453e12 * 755 / 834},
    attention_flops=450e12,
    memory=80 * GIB,
    memory_bandwidth=3.35e12,
    link_bandwidth=450e9,
    network_bandwidth=50e9,
    source=f"NVIDIA H100 SXM data sheet, 400 Gb/s of network a GPU; {_MATMUL_SOURCE}; {_ATTENTION_SOURCE}:2407.08608",
)

MACHINES = {
    machine.name: machine
    for machine in (
        Machine(
            name="a100",
            peak_flops={"bf16": 312e12},
            matmul_flops={"bf16": 271e12},  # burst rate, which the A100 sustains: it stays below its power limit
            attention_flops=190e12,
            memory=80 * GIB,
            memory_bandwidth=2.039e12,
            link_bandwidth=300e9,
            network_bandwidth=25e9,
            source="NVIDIA A100 SXM data sheet, 200 Gb/s of network a GPU; "
            f"{_MATMUL_SOURCE}; {_ATTENTION_SOURCE}:2307.08691",
        ),
        _H100,
        replace(
            _H100,
            name="h200",
            memory=141e9,
            memory_bandwidth=4.8e12,
            # fused_tp's kernels against torch.mm, and against attention_flops over forward and backward.
            constants=replace(FITTED_CONSTANTS, fused_matmul=0.89, ring_attention=0.52),
            source=_H100.source.replace("H100", "H200") + "; fused_tp's kernels: benchmarks/results/gpu",
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
            source=f"NVIDIA DGX B200 data sheet, 400 Gb/s of network a GPU; {_MATMUL_SOURCE}; attention: estimated",
        ),
    )
}


def machine_of_gpu(name: str) -> Machine | None:
    """Return the Machine for torch's device name, such as "NVIDIA H100 80GB HBM3"; None if it is unknown."""
    return next((machine for key, machine in MACHINES.items() if key in name.lower()), None)


def find_machine(name: str | Path | Machine) -> Machine:
    """Return the Machine called `name` (case-insensitive), or read it from the JSON or YAML file `name`.

    Raises:
        ValueError: there is no such name or file.
    """
    if isinstance(name, Machine):
        return name
    if str(name).lower() in MACHINES:
        return MACHINES[str(name).lower()]
    if Path(name).suffix in (".json", ".yaml", ".yml"):
        return Machine.from_file(name)
    raise ValueError(f"Unknown machine {str(name)!r}; use {join_words(MACHINES)}, or a JSON or YAML file of a Machine.")
