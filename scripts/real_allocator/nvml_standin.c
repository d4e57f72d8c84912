/* Stands in for libnvidia-ml.so.1: knows no device and no process. The allocator asks it whether a device shares memory
 * over a fabric (no), and, for the message of an OutOfMemoryError, which processes use the device (none: on a card of
 * one's own the message has a further sentence here, "Including non-PyTorch memory, this process has ... in use. "). */

int nvmlInit_v2(void) { return 0; }

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
    (void)bus;
    *device = 0;
    return 0;
}

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned int *count, void *processes) {
    (void)device, (void)processes;
    *count = 0;
    return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return 0;
}

/* NVML_ERROR_NOT_SUPPORTED */
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return 3; }
int nvmlDeviceGetGpuFabricInfoV(void) { return 3; }
