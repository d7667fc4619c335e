"""What vmckpt.hypervisor uses of libvirt-python, whose own annotations are wrong."""

from collections.abc import Callable, Mapping
from typing import Any

class libvirtError(Exception):
    def get_error_code(self) -> int: ...

class virNetwork:
    def name(self) -> str: ...
    def isActive(self) -> int: ...

class virStoragePool:
    def XMLDesc(self, flags: int = 0) -> str: ...
    def isActive(self) -> int: ...

class virDomain:
    def name(self) -> str: ...
    def UUIDString(self) -> str: ...
    def XMLDesc(self, flags: int = 0) -> str: ...
    def state(self, flags: int = 0) -> list[int]: ...
    def isActive(self) -> int: ...
    def isPersistent(self) -> int: ...
    def autostart(self) -> int: ...
    def setAutostart(self, autostart: int) -> int: ...
    def snapshotNum(self, flags: int = 0) -> int: ...
    def create(self) -> int: ...
    def destroy(self) -> int: ...
    def undefine(self) -> int: ...
    def undefineFlags(self, flags: int = 0) -> int: ...
    def jobStats(self, flags: int = 0) -> dict[str, int | str | float | bool]: ...
    def abortJob(self) -> int: ...
    def startDirtyRateCalc(self, seconds: int, flags: int = 0) -> int: ...
    def memoryStats(self) -> dict[str, int]: ...
    def migrateToURI3(
        self, dconnuri: str | None, params: Mapping[str, object], flags: int = 0
    ) -> int: ...
    def migrate3(
        self, dconn: virConnect, params: Mapping[str, object], flags: int = 0
    ) -> virDomain: ...
    def setMetadata(
        self, kind: int, metadata: str | None, key: str, uri: str, flags: int = 0
    ) -> int: ...
    def abortJobFlags(self, flags: int = 0) -> int: ...
    def suspend(self) -> int: ...
    def resume(self) -> int: ...
    def migrateStartPostCopy(self, flags: int = 0) -> int: ...
    def migrateSetMaxSpeed(self, bandwidth: int, flags: int = 0) -> int: ...
    def migrateSetCompressionCache(self, cacheSize: int, flags: int = 0) -> int: ...
    def migrateSetMaxDowntime(self, downtime: int, flags: int = 0) -> int: ...
    def migrateGetMaxDowntime(self, flags: int = 0) -> int: ...

class virConnect:
    def close(self) -> int: ...
    def isAlive(self) -> int: ...
    def setKeepAlive(self, interval: int, count: int) -> int: ...
    def lookupByName(self, name: str) -> virDomain: ...
    def lookupByUUIDString(self, uuid: str) -> virDomain: ...
    def listAllDomains(self, flags: int = 0) -> list[virDomain]: ...
    def listAllNetworks(self, flags: int = 0) -> list[virNetwork]: ...
    def storagePoolLookupByName(self, name: str) -> virStoragePool: ...
    def domainListGetStats(
        self, doms: list[virDomain], stats: int = 0, flags: int = 0
    ) -> list[tuple[virDomain, dict[str, int | str]]]: ...
    def defineXML(self, xml: str) -> virDomain: ...
    def getCapabilities(self) -> str: ...
    def getMemoryStats(self, cell: int, flags: int = 0) -> dict[str, int]: ...
    def getHostname(self) -> str: ...
    def getLibVersion(self) -> int: ...
    def getVersion(self) -> int: ...
    def getInfo(self) -> list[Any]: ...
    def compareHypervisorCPU(
        self,
        emulator: str | None,
        arch: str | None,
        machine: str | None,
        virttype: str | None,
        xmlCPU: str,
        flags: int = 0,
    ) -> int: ...

def open(name: str | None = None) -> virConnect: ...
def openReadOnly(name: str | None = None) -> virConnect: ...
def registerErrorHandler(f: Callable[[Any, tuple[Any, ...]], None], ctx: Any) -> int: ...
def virEventRegisterDefaultImpl() -> int: ...
def virEventRunDefaultImpl() -> int: ...

VIR_CPU_COMPARE_IDENTICAL: int
VIR_CPU_COMPARE_INCOMPATIBLE: int
VIR_CPU_COMPARE_SUPERSET: int
VIR_DOMAIN_BLOCKED: int
VIR_DOMAIN_CRASHED: int
VIR_DOMAIN_JOB_AUTO_CONVERGE_THROTTLE: str
VIR_DOMAIN_JOB_DATA_PROCESSED: str
VIR_DOMAIN_JOB_DATA_REMAINING: str
VIR_DOMAIN_JOB_DATA_TOTAL: str
VIR_DOMAIN_JOB_DISK_BPS: str
VIR_DOMAIN_JOB_DOWNTIME: str
VIR_DOMAIN_JOB_DOWNTIME_NET: str
VIR_DOMAIN_JOB_MEMORY_BPS: str
VIR_DOMAIN_JOB_MEMORY_DIRTY_RATE: str
VIR_DOMAIN_JOB_MEMORY_ITERATION: str
VIR_DOMAIN_JOB_MEMORY_PAGE_SIZE: str
VIR_DOMAIN_JOB_NONE: int
VIR_DOMAIN_JOB_OPERATION: str
VIR_DOMAIN_JOB_OPERATION_BACKUP: int
VIR_DOMAIN_JOB_OPERATION_DUMP: int
VIR_DOMAIN_JOB_OPERATION_MIGRATION_IN: int
VIR_DOMAIN_JOB_OPERATION_MIGRATION_OUT: int
VIR_DOMAIN_JOB_OPERATION_RESTORE: int
VIR_DOMAIN_JOB_OPERATION_SAVE: int
VIR_DOMAIN_JOB_OPERATION_SNAPSHOT: int
VIR_DOMAIN_JOB_OPERATION_SNAPSHOT_REVERT: int
VIR_DOMAIN_JOB_OPERATION_START: int
VIR_DOMAIN_JOB_SETUP_TIME: str
VIR_DOMAIN_JOB_STATS_COMPLETED: int
VIR_DOMAIN_JOB_STATS_KEEP_COMPLETED: int
VIR_DOMAIN_JOB_TIME_ELAPSED: str
VIR_DOMAIN_JOB_TIME_ELAPSED_NET: str
VIR_DOMAIN_NOSTATE: int
VIR_DOMAIN_PAUSED: int
VIR_DOMAIN_PAUSED_MIGRATION: int
VIR_DOMAIN_PAUSED_STARTING_UP: int
VIR_DOMAIN_PAUSED_UNKNOWN: int
VIR_DOMAIN_PAUSED_USER: int
VIR_DOMAIN_PAUSED_POSTCOPY: int
VIR_DOMAIN_PMSUSPENDED: int
VIR_DOMAIN_RUNNING: int
VIR_DOMAIN_SHUTDOWN: int
VIR_DOMAIN_SHUTOFF: int
VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA: int
VIR_DOMAIN_UNDEFINE_NVRAM: int
VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA: int
VIR_ERR_INVALID_ARG: int
VIR_ERR_NO_DOMAIN: int
VIR_ERR_OPERATION_INVALID: int
VIR_ERR_OPERATION_UNSUPPORTED: int
VIR_MIGRATE_ABORT_ON_ERROR: int
VIR_MIGRATE_LIVE: int
VIR_MIGRATE_PARAM_BANDWIDTH: str
VIR_MIGRATE_PARAM_URI: str
VIR_MIGRATE_PEER2PEER: int
VIR_MIGRATE_PERSIST_DEST: int
VIR_MIGRATE_UNDEFINE_SOURCE: int
VIR_MIGRATE_UNSAFE: int
VIR_NODE_MEMORY_STATS_ALL_CELLS: int
VIR_DOMAIN_JOB_UNBOUNDED: int
VIR_DOMAIN_RUNNING_MIGRATION_CANCELED: int
VIR_DOMAIN_ABORT_JOB_POSTCOPY: int
VIR_DOMAIN_MIGRATE_MAX_SPEED_POSTCOPY: int
VIR_DOMAIN_PAUSED_POSTCOPY_FAILED: int
VIR_DOMAIN_RUNNING_POSTCOPY: int
VIR_DOMAIN_RUNNING_POSTCOPY_FAILED: int
VIR_DOMAIN_SHUTOFF_MIGRATED: int
VIR_DOMAIN_UNDEFINE_KEEP_NVRAM: int
VIR_DOMAIN_XML_INACTIVE: int
VIR_DOMAIN_XML_MIGRATABLE: int
VIR_DOMAIN_XML_SECURE: int
VIR_ERR_NO_STORAGE_POOL: int
VIR_MIGRATE_AUTO_CONVERGE: int
VIR_MIGRATE_COMPRESSED: int
VIR_MIGRATE_NON_SHARED_DISK: int
VIR_MIGRATE_PARALLEL: int
VIR_MIGRATE_PARAM_AUTO_CONVERGE_INCREMENT: str
VIR_MIGRATE_PARAM_AUTO_CONVERGE_INITIAL: str
VIR_MIGRATE_PARAM_BANDWIDTH_POSTCOPY: str
VIR_MIGRATE_PARAM_COMPRESSION: str
VIR_MIGRATE_PARAM_COMPRESSION_MT_LEVEL: str
VIR_MIGRATE_PARAM_COMPRESSION_XBZRLE_CACHE: str
VIR_MIGRATE_PARAM_DEST_XML: str
VIR_MIGRATE_PARAM_DISKS_URI: str
VIR_MIGRATE_PARAM_MIGRATE_DISKS: str
VIR_MIGRATE_PARAM_PARALLEL_CONNECTIONS: str
VIR_MIGRATE_PARAM_PERSIST_XML: str
VIR_MIGRATE_PARAM_TLS_DESTINATION: str
VIR_MIGRATE_POSTCOPY: int
VIR_MIGRATE_POSTCOPY_RESUME: int
VIR_MIGRATE_TLS: int
VIR_MIGRATE_ZEROCOPY: int
VIR_DOMAIN_AFFECT_CONFIG: int
VIR_DOMAIN_AFFECT_LIVE: int
VIR_DOMAIN_METADATA_ELEMENT: int
VIR_DOMAIN_DIRTYRATE_MEASURED: int
VIR_DOMAIN_STATS_DIRTYRATE: int
