/* The rest of libcudart.so.13 that torch and bitsandbytes link to. No CUDA header here, so that none has to know its
 * arguments. */

#define SUCCEEDS(name) \
    int name(void) { return 0; }
#define NOT_SUPPORTED(name) \
    int name(void) { return 801; } /* cudaErrorNotSupported */

/* kernels: nothing is computed */
SUCCEEDS(__cudaLaunchKernel)
SUCCEEDS(cudaFuncSetAttribute)
SUCCEEDS(cudaKernelSetAttributeForDevice)
SUCCEEDS(cudaLaunchCooperativeKernel)
SUCCEEDS(cudaLaunchKernel)
SUCCEEDS(cudaLaunchKernelExC)
SUCCEEDS(cudaLibraryUnload)

/* memory of the device: it holds nothing */
SUCCEEDS(cudaMemPrefetchAsync)
SUCCEEDS(cudaMemcpyToSymbol)

SUCCEEDS(cudaHostRegister)
SUCCEEDS(cudaHostUnregister)
SUCCEEDS(cudaPeekAtLastError)
SUCCEEDS(cudaProfilerStart)
SUCCEEDS(cudaProfilerStop)
SUCCEEDS(cudaStreamDestroy)
SUCCEEDS(cudaStreamWaitEvent)

/* one device, one process, no graphs, no other allocator */
NOT_SUPPORTED(cudaDeviceEnablePeerAccess)
NOT_SUPPORTED(cudaDeviceGetDefaultMemPool)
NOT_SUPPORTED(cudaFreeAsync)
NOT_SUPPORTED(cudaGraphAddNode)
NOT_SUPPORTED(cudaGraphConditionalHandleCreate)
NOT_SUPPORTED(cudaGraphDebugDotPrint)
NOT_SUPPORTED(cudaGraphDestroy)
NOT_SUPPORTED(cudaGraphExecDestroy)
NOT_SUPPORTED(cudaGraphGetNodes)
NOT_SUPPORTED(cudaGraphInstantiateWithFlags)
NOT_SUPPORTED(cudaGraphLaunch)
NOT_SUPPORTED(cudaGraphNodeGetDependencies)
NOT_SUPPORTED(cudaIpcCloseMemHandle)
NOT_SUPPORTED(cudaIpcGetEventHandle)
NOT_SUPPORTED(cudaIpcGetMemHandle)
NOT_SUPPORTED(cudaIpcOpenEventHandle)
NOT_SUPPORTED(cudaIpcOpenMemHandle)
NOT_SUPPORTED(cudaMallocAsync)
NOT_SUPPORTED(cudaMemPoolGetAttribute)
NOT_SUPPORTED(cudaMemPoolSetAccess)
NOT_SUPPORTED(cudaMemPoolSetAttribute)
NOT_SUPPORTED(cudaMemPoolTrimTo)
NOT_SUPPORTED(cudaStreamBeginCapture)
NOT_SUPPORTED(cudaStreamBeginCaptureToGraph)
NOT_SUPPORTED(cudaStreamEndCapture)
NOT_SUPPORTED(cudaStreamUpdateCaptureDependencies)
