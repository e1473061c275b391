"""What a machine can do: the rates that predictions are made of."""

from dataclasses import asdict, dataclass, replace
from typing import Any

# The disk of the host of an H200, which reads and writes in turn: 1.07 and 1.07 at once. It counts
# for one that nobody measured.
DISK_READ_GBPS, DISK_WRITE_GBPS = 1.8, 2.6

# Of a host to other hosts, each way, for all its GPUs together: one port of 100 Gbit/s.
NETWORK_GBPS = 12.5


def mapping_bytes(pinned_bytes: int) -> int:
    """Bytes of device memory that the driver takes to map pinned host memory.

    A process of 7B on an H200 took 142 MiB more with 108 GiB than one without, 260 with 193 GiB
    (benchmarks/results/driver-memory-h200.json).
    """
    return pinned_bytes // 1024


@dataclass(frozen=True)
class Machine:
    """One GPU with its host. Rates are what work of real size reaches, not peaks on paper.

    Attributes:
        name: for people: `NVIDIA H200, 16 cores`.
        device_memory_bytes: the GPU's total memory.
        device_context_bytes: memory of it that driver and libraries take before any tensor.
        host_memory_bytes: host memory that this process may use.
        cores: CPU cores that it may use.
        matmul_tflops: dense product in the compute dtype.
        attention_forward_tflops: causal attention over long rows, only the unmasked half counted.
        attention_backward_tflops: the same, backward.
        device_gbps: device memory, reads and writes together.
        to_device_gbps: copies from pinned host memory to the device.
        from_device_gbps: copies back.
        update_gbps: host memory during updates (26 bytes a parameter cross it).
        disk_write_gbps: of the disk of run folders; None: not measured.
        launch_seconds: from one piece of device work to the next when there is nothing to compute.
        measured: True if measured on this machine; False: published figures times usual
            efficiencies.
        unified: True if the device is the CPU, whose memory is the host's.
        disk_read_gbps: as `disk_write_gbps`.
        disk_both_gbps: read rate while equally many bytes are written.
        link_gbps: receive rate of a GPU in a gather on one host; None: not measured.
        network_gbps: receive rate of a GPU from another host, while all GPUs of its host receive;
            None: not measured.
        disk_space_bytes: bytes that planes may take on a disk; None: none may rest on one.
    """

    name: str
    device_memory_bytes: int
    device_context_bytes: int
    host_memory_bytes: int
    cores: int
    matmul_tflops: float
    attention_forward_tflops: float
    attention_backward_tflops: float
    device_gbps: float
    to_device_gbps: float
    from_device_gbps: float
    update_gbps: float
    disk_write_gbps: float | None
    launch_seconds: float
    measured: bool
    unified: bool = False
    disk_read_gbps: float | None = None
    disk_both_gbps: float | None = None
    disk_space_bytes: int | None = None
    link_gbps: float | None = None
    network_gbps: float | None = None

    def shared(
        self, on_host: int, link_gbps: float | None, network_gbps: float | None = None
    ) -> "Machine":
        """Each rank's share, of `on_host` ranks: host memory, update and disk rates are divided."""
        space, both = self.disk_space_bytes, self.disk_both_gbps
        return replace(
            self,
            host_memory_bytes=self.host_memory_bytes // on_host,
            cores=max(1, self.cores // on_host),
            update_gbps=self.update_gbps / on_host,
            disk_read_gbps=(self.disk_read_gbps or DISK_READ_GBPS) / on_host,
            disk_write_gbps=(self.disk_write_gbps or DISK_WRITE_GBPS) / on_host,
            disk_both_gbps=both and both / on_host,
            disk_space_bytes=space and space // on_host,
            link_gbps=link_gbps or None,
            network_gbps=network_gbps or None,
        )

    def as_dict(self) -> dict[str, Any]:
        """The machine as plain data."""
        return asdict(self)
