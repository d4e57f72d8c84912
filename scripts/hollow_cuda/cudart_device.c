/* The functions of libcudart.so.13 that torch needs besides those in cudart_memory.c: properties of the device, copies,
 * kernels, streams, host memory. Sizes, addresses and the order of calls are real; computed values are not. stubs.py
 * generates the functions that only return success or "not supported".
 *
 * Kernels   are launched and compute nothing.
 * Copies    to the device and within it do nothing. A copy from the device returns zeros, or the value set by
 *           standin_answer(), with which a caller can supply the value that the device would have computed.
 *           values_memory.c replaces the copies (WEAK) if the device's memory holds values.
 * The device is described as an H100 SXM, or with HOLLOW_CARD=a100 as an A100 SXM. torch and bitsandbytes depend on its
 *           compute capability, its number of multiprocessors and its shared memory.
 */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* -- memory ------------------------------------------------------------------------------------------------------- */

/* Device addresses, which cudart_memory.c assigns, lie above FIRST; the host's heap and stacks lie above LAST. */
#define FIRST 0x100000000000ull
#define LAST 0x500000000000ull

void standin_set_device_memory(int device, size_t capacity_bytes, size_t total_bytes);
size_t standin_total(int device);
int standin_device_of(const void *address);
int standin_card(int device);

#define WEAK __attribute__((weak))

__attribute__((constructor(101))) static void set_memory(void) {
    const char *capacity = getenv("HOLLOW_CAPACITY");
    size_t bytes = capacity ? strtoull(capacity, NULL, 10) : 80ull << 30;
    standin_set_device_memory(0, bytes, bytes);
}

static int is_on_device(const void *address) {
    return (unsigned long long)address >= FIRST && (unsigned long long)address < LAST;
}

static char answer[8];
static int answered;

/* Makes the next copy of `size` <= 8 bytes from the device return the first `size` bytes of this number. */
void standin_answer(long long number) {
    memcpy(answer, &number, sizeof answer);
    answered = 1;
}

void standin_no_answer(void) { answered = 0; }

/* Copies the value set by standin_answer(), once; returns whether there was one. */
int standin_answers(void *to, size_t size) {
    if (!answered || size > sizeof answer) {
        return 0;
    }
    memcpy(to, answer, size);
    answered = 0;
    return 1;
}

cudaError_t standin_copy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind);

WEAK cudaError_t standin_copy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    if (kind == cudaMemcpyHostToHost) {
        memcpy(to, from, size);
    } else if (kind == cudaMemcpyDeviceToHost || (kind == cudaMemcpyDefault && !is_on_device(to))) {
        if (!standin_answers(to, size)) {
            memset(to, 0, size);
        }
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    return standin_copy(to, from, size, kind);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return standin_copy(to, from, size, kind);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++) {
        standin_copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, kind);
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void *to, int device, const void *from, int peer, size_t size, cudaStream_t stream) {
    return standin_copy(to, from, size, cudaMemcpyDeviceToDevice);
}

cudaError_t standin_fill(void *to, int value, size_t size);

WEAK cudaError_t standin_fill(void *to, int value, size_t size) { return cudaSuccess; }
cudaError_t cudaMemset(void *to, int value, size_t size) { return standin_fill(to, value, size); }

cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
    return standin_fill(to, value, size);
}

/* Pinned memory is ordinary host memory. */
cudaError_t cudaHostAlloc(void **address, size_t size, unsigned int flags) {
    return posix_memalign(address, 4096, size ? size : 1) ? cudaErrorMemoryAllocation : cudaSuccess;
}

cudaError_t cudaFreeHost(void *address) { return free(address), cudaSuccess; }

/* Managed memory (paged optimizers) is host memory too, and does not count against the device's capacity. */
cudaError_t cudaMallocManaged(void **address, size_t size, unsigned int flags) {
    return cudaHostAlloc(address, size, flags);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    memset(attributes, 0, sizeof *attributes);
    attributes->type = is_on_device(address) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    attributes->device = is_on_device(address) ? standin_device_of(address) : 0;
    attributes->devicePointer = is_on_device(address) ? (void *)address : NULL;
    return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    static char constants[1 << 16];
    return *address = constants, cudaSuccess;
}

/* -- the device ----------------------------------------------------------------------------------------------------- */

/* CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability", columns 8.0 and 9.0; datasheets of
 * H100 SXM and A100 SXM. */
enum {
    SHARED_PER_BLOCK = 48 << 10,
    REGISTERS = 64 << 10,
    THREADS_PER_MULTIPROCESSOR = 2048,
    THREADS_PER_BLOCK = 1024,
    MOST_BLOCKS_Z = 64,
    MOST_BLOCKS_IN_GRID = 2147483647,
    MOST_BLOCKS_IN_GRID_YZ = 65535,
    BLOCKS_PER_MULTIPROCESSOR = 32,
};

typedef struct {
    const char *name;
    int major, multiprocessors, shared_per_block_optin, shared_per_multiprocessor, l2_bytes;
} Card;

static const Card CARDS[] = {{"h100", 9, 132, 227 << 10, 228 << 10, 50 << 20},
                             {"a100", 8, 108, 163 << 10, 164 << 10, 40 << 20}};

static const Card *described(void) {
    const char *name = getenv("HOLLOW_CARD");
    return &CARDS[name && !strcmp(name, CARDS[1].name)];
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "stand-in");
    properties->totalGlobalMem = standin_total(device);
    properties->warpSize = 32;
    const Card *card = described();
    properties->major = card->major;
    properties->multiProcessorCount = card->multiprocessors;
    properties->maxThreadsPerMultiProcessor = THREADS_PER_MULTIPROCESSOR;
    properties->maxBlocksPerMultiProcessor = BLOCKS_PER_MULTIPROCESSOR;
    properties->maxThreadsPerBlock = THREADS_PER_BLOCK;
    properties->sharedMemPerBlock = SHARED_PER_BLOCK;
    properties->sharedMemPerBlockOptin = card->shared_per_block_optin;
    properties->sharedMemPerMultiprocessor = card->shared_per_multiprocessor;
    properties->reservedSharedMemPerBlock = 1 << 10;
    properties->regsPerBlock = properties->regsPerMultiprocessor = REGISTERS;
    properties->totalConstMem = 64 << 10;
    properties->l2CacheSize = card->l2_bytes;
    properties->memoryBusWidth = 5120;
    properties->asyncEngineCount = 3;
    properties->unifiedAddressing = properties->concurrentKernels = 1;
    for (int axis = 0; axis < 3; axis++) {
        properties->maxThreadsDim[axis] = axis < 2 ? THREADS_PER_BLOCK : MOST_BLOCKS_Z;
        properties->maxGridSize[axis] = axis ? MOST_BLOCKS_IN_GRID_YZ : MOST_BLOCKS_IN_GRID;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = THREADS_PER_BLOCK; break;
    case cudaDevAttrMaxBlockDimZ: *value = MOST_BLOCKS_Z; break;
    case cudaDevAttrMaxGridDimX: *value = MOST_BLOCKS_IN_GRID; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = MOST_BLOCKS_IN_GRID_YZ; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = SHARED_PER_BLOCK; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = described()->shared_per_block_optin; break;
    case cudaDevAttrMultiProcessorCount: *value = described()->multiprocessors; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = THREADS_PER_MULTIPROCESSOR; break;
    case cudaDevAttrComputeCapabilityMajor: *value = described()->major; break;
    default: *value = 0;
    }
    return cudaSuccess;
}

/* The number of a device among all cards of the machine, including those hidden from this process. */
WEAK int standin_card(int device) { return device; }

cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int device) {
    return snprintf(id, size, "0000:%02x:00.0", standin_card(device)), cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }

/* -- kernels ---------------------------------------------------------------------------------------------------------- */

static int module; /* the handle of every module and library, whose contents are never read */

void **__cudaRegisterFatBinary(void *binary) { return (void **)&module; }

typedef struct {
    unsigned int x, y, z;
} Dimensions;

cudaError_t __cudaPopCallConfiguration(Dimensions *grid, Dimensions *block, size_t *shared, void **stream) {
    *grid = *block = (Dimensions){1, 1, 1};
    *shared = 0;
    *stream = NULL;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(void **kernel, const void *function) { return *kernel = (void *)function, cudaSuccess; }

cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
    return *kernel = (void *)&module, cudaSuccess;
}

cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *options, void **values,
                                unsigned int count, enum cudaLibraryOption *library_options, void **library_values,
                                unsigned int library_count) {
    return *library = (cudaLibrary_t)(void *)&module, cudaSuccess;
}

/* The real use of registers and shared memory is unknown. Some scratch sizes depend on the number of active blocks. */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = THREADS_PER_BLOCK;
    attributes->binaryVersion = attributes->ptxVersion = 90;
    attributes->numRegs = 32;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                                   size_t shared, unsigned int flags) {
    return *blocks = 2, cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads,
                                                          size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}

/* -- streams and events --------------------------------------------------------------------------------------------- */

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    static unsigned long long next = 0x1000;
    return *stream = (cudaStream_t)(next += 16), cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags) { return cudaStreamCreate(stream); }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority) {
    return cudaStreamCreate(stream);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { return *priority = 0, cudaSuccess; }

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned int flags) {
    return callback(stream, cudaSuccess, data), cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    return function(data), cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count) {
    *status = cudaStreamCaptureStatusNone;
    if (id) {
        *id = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags) {
    return cudaEventRecord(event, stream);
}
