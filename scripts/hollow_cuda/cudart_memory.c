/* The functions of libcudart.so.13, and the driver functions (libcuda.so.1) behind it, that a caching allocator needs:
 * a device that only counts memory. cudart_device.c has the other functions.
 *
 * Memory    Addresses grow from FIRST_ADDRESS, aligned to 2 MiB. They are never reused and never dereferenced. So the
 *           newer of two segments has the higher address, and an address identifies its segment. cudaMalloc and
 *           cuMemCreate count exact bytes against the same `capacity`, and fail beyond it.
 * Events    An event is ready at once, since work takes no time. After standin_hold_events(), it is ready only after a
 *           later call of standin_complete_events(), or after a wait for it. A real cudaFree waits for the device; this
 *           one does not.
 * Devices   There is one, unless values_memory.c replaces the functions that are marked WEAK here.
 */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

/* -- memory ------------------------------------------------------------------------------------------------------- */

#define FIRST_ADDRESS 0x100000000000ull
#define PAGE (2ull << 20)
#define MOST_REGIONS (1u << 20)
#define MOST_DEVICES 2
#define WEAK __attribute__((weak))

typedef struct {
    unsigned long long base, size;
    int device;
} Region;

static Region regions[MOST_REGIONS]; /* sorted by address, since addresses only grow; freed ones remain with size 0 */
static size_t region_count;
static size_t capacity[MOST_DEVICES], total[MOST_DEVICES], used[MOST_DEVICES];
static __thread int current;

int standin_devices(void);
int standin_expands(void);
cudaError_t standin_why_none(void);
void standin_count(int device, long long more_bytes);
size_t standin_used(int device);

WEAK int standin_devices(void) { return 1; }
WEAK int standin_expands(void) { return 1; } /* whether the driver has virtual memory for expandable segments */
WEAK cudaError_t standin_why_none(void) { return cudaErrorNoDevice; }
WEAK void standin_count(int device, long long more_bytes) { used[device] += more_bytes; }
WEAK size_t standin_used(int device) { return used[device]; }

void standin_set_device_memory(int device, size_t capacity_bytes, size_t total_bytes) {
    capacity[device] = capacity_bytes;
    total[device] = total_bytes;
}

size_t standin_total(int device) { return total[device]; }

/* The number, from 0, of the cudaMalloc or cuMemAddressReserve call that returned an address. */
size_t standin_region(const void *address) {
    size_t low = 0, high = region_count;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (regions[middle].base <= (unsigned long long)address) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

unsigned long long standin_region_base(size_t region) { return regions[region].base; }
int standin_device_of(const void *address) { return region_count ? regions[standin_region(address)].device : 0; }

static unsigned long long new_region(int device, size_t size) {
    if (region_count == MOST_REGIONS) {
        abort();
    }
    static unsigned long long next = FIRST_ADDRESS;
    regions[region_count++] = (Region){next, size, device};
    next += (size + 2 * PAGE - 1) / PAGE * PAGE; /* at least one page apart */
    return regions[region_count - 1].base;
}

static size_t room(int device) {
    size_t taken = standin_used(device);
    return taken > capacity[device] ? 0 : capacity[device] - taken;
}

static int refusals;

/* Makes the next `requests` requests for memory fail, however much is free. */
void standin_refuse(int requests) { refusals = requests; }

static int take(int device, size_t size) {
    if (refusals > 0) {
        refusals--;
        return 0;
    }
    if (size > room(device)) {
        return 0;
    }
    standin_count(device, size);
    return 1;
}

cudaError_t cudaMalloc(void **address, size_t size) {
    if (!take(current, size)) {
        return cudaErrorMemoryAllocation;
    }
    *address = (void *)new_region(current, size);
    return cudaSuccess;
}

cudaError_t cudaFree(void *address) {
    if (address) { /* cudaFree(NULL) only creates a context */
        Region *region = &regions[standin_region(address)];
        standin_count(region->device, -(long long)region->size);
        region->size = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *free_bytes = room(current);
    *total_bytes = total[current];
    return cudaSuccess;
}

/* -- the driver's virtual memory, which expandable segments use ---------------------------------------------------- */

static CUresult reserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
    if (!standin_expands()) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    *address = new_region(current, size);
    return CUDA_SUCCESS;
}

/* A handle is the allocation's size, with the device's number in its low bits: handles are only mapped, unmapped and
 * released. */
static CUresult create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *what,
                       unsigned long long flags) {
    if (!take(what->location.id, size)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = size | what->location.id;
    return CUDA_SUCCESS;
}

static CUresult release(CUmemGenericAllocationHandle handle) {
    int device = handle % MOST_DEVICES;
    standin_count(device, -(long long)(handle - device));
    return CUDA_SUCCESS;
}

static CUresult granularity(size_t *size, const CUmemAllocationProp *what, CUmemAllocationGranularity_flags option) {
    *size = PAGE;
    return CUDA_SUCCESS;
}

static CUresult attribute(int *value, CUdevice_attribute which, CUdevice device) {
    *value = 0; /* no GPUDirect RDMA, no fabric handles */
    return CUDA_SUCCESS;
}

static CUresult device_get(CUdevice *device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }

static CUresult text_of(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "error of the stand-in driver";
    return CUDA_SUCCESS;
}

static CUresult done(void) { return CUDA_SUCCESS; } /* for cuMemMap, cuMemUnmap, ...: ignores its arguments */
static CUresult not_supported(void) { return CUDA_ERROR_NOT_SUPPORTED; }

static const struct {
    const char *name;
    void *function;
} DRIVER[] = {
    {"cuMemAddressReserve", (void *)reserve},
    {"cuMemAddressFree", (void *)done},
    {"cuMemCreate", (void *)create},
    {"cuMemRelease", (void *)release},
    {"cuMemMap", (void *)done},
    {"cuMemUnmap", (void *)done},
    {"cuMemSetAccess", (void *)done},
    {"cuMemGetAllocationGranularity", (void *)granularity},
    {"cuDeviceGet", (void *)device_get},
    {"cuDeviceGetAttribute", (void *)attribute},
    {"cuGetErrorString", (void *)text_of},
};

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned int version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    *function = (void *)not_supported;
    for (size_t i = 0; i < sizeof DRIVER / sizeof *DRIVER; i++) {
        if (!strcmp(name, DRIVER[i].name)) {
            *function = DRIVER[i].function;
        }
    }
    if (result) {
        *result = cudaDriverEntryPointSuccess;
    }
    return cudaSuccess;
}

/* -- the device ----------------------------------------------------------------------------------------------------- */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = standin_devices();
    return *count ? cudaSuccess : standin_why_none();
}

cudaError_t cudaGetDevice(int *device) { return *device = current, cudaSuccess; }

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= standin_devices()) {
        return cudaErrorInvalidDevice;
    }
    current = device;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    const char *older = getenv("HOLLOW_DRIVER");
    return *version = older ? atoi(older) : CUDA_VERSION, cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = *greatest = 0, cudaSuccess; }

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = 0, cudaSuccess; }

/* -- streams and events --------------------------------------------------------------------------------------------- */

struct CUevent_st {
    unsigned long long recorded; /* its number among all recorded events; 0 if not recorded, or if waited for */
};

static unsigned long long recorded, completed;
static int held;

void standin_hold_events(void) { held = 1; }
void standin_complete_events(void) { completed = recorded; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
    *event = calloc(1, sizeof **event);
    return *event ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    event->recorded = ++recorded;
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    return !held || event->recorded <= completed ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    event->recorded = 0;
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    return *milliseconds = 0, cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }

/* -- errors --------------------------------------------------------------------------------------------------------- */

const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation       ? "out of memory"
           : error == cudaErrorNoDevice             ? "no CUDA-capable device is detected"
           : error == cudaErrorInsufficientDriver   ? "CUDA driver version is insufficient for CUDA runtime version"
                                                    : "error of the stand-in runtime";
}

const char *cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
