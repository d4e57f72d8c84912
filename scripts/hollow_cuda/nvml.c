/* A stand-in for libnvidia-ml.so.1. It reads from the ledger how much each process holds of each card. README.md lists
 * the variables. */
#include "ledger.h"

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, GPU_IS_LOST = 15 }; /* nvml.h: nvmlReturn_t */

static int numbers[MOST_CARDS] = {0, 1};

static int card_of(void *device) { return *(int *)device; }
static unsigned count(void) { return (unsigned)setting("HOLLOW_CARDS", 0, 1); }
static unsigned long long reserved(int card) { return setting("HOLLOW_RESERVED", card, 0); }
static unsigned long long total(int card) { return setting("HOLLOW_TOTAL", card, capacity_of(card)) + reserved(card); }

static unsigned long long left(int card) {
    unsigned long long room = total(card) - reserved(card), taken = held(card);
    return taken > room ? 0 : room - taken;
}

static int state_of(int card) { return (int)setting("HOLLOW_REFUSED", 0, MOST_CARDS) == card ? GPU_IS_LOST : OK; }

static int handle(int card, void **device) { return *device = &numbers[card], state_of(card); }

int nvmlInit_v2(void) { return OK; }
int nvmlInit(void) { return OK; }
int nvmlInitWithFlags(unsigned flags) { return OK; }
int nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(int error) {
    return error == NOT_SUPPORTED ? "Not Supported" : error == GPU_IS_LOST ? "GPU is lost" : "error of the stand-in";
}

int nvmlDeviceGetCount_v2(unsigned *number) { return *number = count(), OK; }
int nvmlDeviceGetCount(unsigned *number) { return nvmlDeviceGetCount_v2(number); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    return index < count() ? handle((int)index, device) : INVALID;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    for (unsigned card = 0; card < count(); card++) {
        if (!strcmp(uuid, UUIDS[card])) {
            return handle((int)card, device);
        }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
    unsigned card = 0;
    sscanf(bus, "%*x:%x", &card);
    return card < count() ? handle((int)card, device) : NOT_FOUND;
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
    return snprintf(text, size, "%s", UUIDS[card_of(device)]), state_of(card_of(device));
}

int nvmlDeviceGetIndex(void *device, unsigned *index) { return *index = (unsigned)card_of(device), OK; }
int nvmlDeviceGetName(void *device, char *text, unsigned size) {
    return snprintf(text, size, "NVIDIA A100-SXM4-80GB"), OK;
}

int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *pending) { return NOT_SUPPORTED; }

/* The card is an A100 SXM: 108 multiprocessors of 64 cores, and the boost clock of its data sheet. */
int nvmlDeviceGetNumGpuCores(void *device, unsigned *number) { return *number = 108 * 64, OK; }
int nvmlDeviceGetMaxClockInfo(void *device, int which, unsigned *mhz) { return *mhz = 1410, OK; }

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { return *major = 8, *minor = 0, OK; }

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} MemoryV2;

int nvmlDeviceGetMemoryInfo_v2(void *device, MemoryV2 *memory) {
    int card = card_of(device);
    if (getenv("HOLLOW_UNIFIED")) {
        return NOT_SUPPORTED;
    }
    unsigned long long used = total(card) - left(card) - reserved(card);
    *memory = (MemoryV2){memory->version, total(card), reserved(card), left(card), used};
    return state_of(card);
}

typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} Process;

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *number, Process *processes) {
    unsigned found = 0, room = *number;
    for (int i = 0; i < MOST_PROCESSES && !getenv("HOLLOW_BLIND"); i++) {
        Holder holder = holders(card_of(device))[i];
        if (!lives(holder.pid)) {
            continue;
        }
        if (found < room && processes) {
            processes[found] = (Process){(unsigned)holder.pid, holder.used, ~0u, ~0u};
        }
        found++;
    }
    *number = found;
    return found > room ? TOO_SMALL : OK;
}

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *number, Process *processes) {
    return nvmlDeviceGetComputeRunningProcesses_v3(device, number, processes);
}

int nvmlDeviceGetComputeRunningProcesses_v2(void *device, unsigned *number, Process *processes) {
    return nvmlDeviceGetComputeRunningProcesses_v3(device, number, processes);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *number, void *processes) {
    return *number = 0, OK;
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) { return snprintf(text, size, "580.95.05"), OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = (int)setting("HOLLOW_DRIVER", 0, 13000), OK; }

int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(void) { return OK; } /* state 0: no fabric */
