"""Factory of instances: gives each its own resources, and reclaims those of removed instances."""

from __future__ import annotations

from dataclasses import dataclass, field

from banaserve.base.clock import Clock
from banaserve.base.errors import MigrationError
from banaserve.base.platform.linux import available_memory_bytes
from banaserve.base.platform.run_dir import RunDir
from banaserve.base.types import InstanceId, Role
from banaserve.kvstore.sizes import format_size
from banaserve.serving.instances.instance import Instance
from banaserve.serving.instances.lasting_calls import LastingCalls
from banaserve.serving.launch.engine_settings import EngineSettings
from banaserve.serving.launch.launcher import Launcher
from banaserve.serving.monitoring import metrics
from banaserve.serving.monitoring.engine_series import EngineSeries


@dataclass(frozen=True, slots=True)
class InstanceFactory:
    """Factory of instances, and their vLLM metrics.

    Attributes:
        instance_bytes: Memory of one instance, in bytes; 0 if it is not the machine's memory.
        lasting: Lasting calls to the engines, of all its instances.
    """

    series: EngineSeries
    launcher: Launcher
    run: RunDir
    clock: Clock
    instance_bytes: int = 0
    lasting: LastingCalls = field(default_factory=LastingCalls)

    def check_memory(self, num_instances: int) -> None:
        """Return if this machine's memory, or the room on the nodes, suffices for more instances.

        Raises:
            MigrationError: There is not enough memory or room.
        """
        num_free = self.launcher.num_free_places()
        if num_free is not None:
            if num_instances > num_free:
                raise MigrationError(
                    f"{num_instances} more instances, and the nodes have room for {num_free}: add "
                    "one with `banaserve nodes add`"
                )
            return
        needed = num_instances * self.instance_bytes
        available = available_memory_bytes()
        if needed > available:
            raise MigrationError(
                f"{num_instances} more instances need about {format_size(needed)} of memory and "
                f"{format_size(available)} are available: free some, or add fewer"
            )

    def make(self, instance_id: InstanceId, role: Role, settings: EngineSettings) -> Instance:
        """Make an instance without starting it.

        Raises:
            MigrationError: No devices are left for the instance.
        """
        self.launcher.reserve(instance_id)
        self.series.add(instance_id)
        made_with = (self.launcher, self.series, self.run, self.clock, self.lasting)
        return Instance(instance_id, role, settings, *made_with)

    def discard(self, instance_id: InstanceId) -> None:
        """Release the devices and metrics of an instance that has been removed."""
        self.launcher.release(instance_id)
        self.series.forget(instance_id)
        metrics.forget(instance_id)
