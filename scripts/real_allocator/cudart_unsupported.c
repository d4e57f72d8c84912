/* Stands in for the functions that libc10_cuda.so links to and no replay calls: copies, peers, graphs, other processes,
 * and the allocator of `backend:cudaMallocAsync`. No CUDA header here, so that none has to know its arguments. */

#define NOT_SUPPORTED(name) \
    int name(void) { return 801; } /* cudaErrorNotSupported */

NOT_SUPPORTED(cudaDeviceEnablePeerAccess)
NOT_SUPPORTED(cudaDeviceGetDefaultMemPool)
NOT_SUPPORTED(cudaFreeAsync)
NOT_SUPPORTED(cudaGraphNodeGetDependencies)
NOT_SUPPORTED(cudaIpcCloseMemHandle)
NOT_SUPPORTED(cudaIpcGetMemHandle)
NOT_SUPPORTED(cudaIpcOpenMemHandle)
NOT_SUPPORTED(cudaMallocAsync)
NOT_SUPPORTED(cudaMemcpy)
NOT_SUPPORTED(cudaMemcpyAsync)
NOT_SUPPORTED(cudaMemcpyPeerAsync)
NOT_SUPPORTED(cudaMemPoolGetAttribute)
NOT_SUPPORTED(cudaMemPoolSetAccess)
NOT_SUPPORTED(cudaMemPoolSetAttribute)
NOT_SUPPORTED(cudaMemPoolTrimTo)
NOT_SUPPORTED(cudaStreamCreateWithPriority)
NOT_SUPPORTED(cudaStreamGetCaptureInfo)
NOT_SUPPORTED(cudaStreamWaitEvent)
