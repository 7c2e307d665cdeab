"""Texts of out-of-memory errors by back end, in lower case, each with the place that defines it.

Paths without a repository are those of PyTorch.
"""

# Memory of the device that computes. The allocators of CUDA, HIP and XPU raise `torch.OutOfMemoryError`; the texts are
# for older versions, and for errors that a process or a library passes on by text.
DEVICE_TEXTS = {
    # CPU
    "defaultcpuallocator: can't allocate memory": "c10/core/impl/alloc_cpu.cpp, alloc_cpu",
    "defaultcpuallocator: not enough memory": "c10/core/impl/alloc_cpu.cpp, alloc_cpu, on Windows",
    # CUDA
    "cuda out of memory": "c10/cuda/CUDACachingAllocator.cpp, malloc",
    "cuda error: out of memory": "c10/cuda/CUDAException.cpp, c10_cuda_check_implementation: cudaErrorMemoryAllocation",
    "cuda driver error: out of memory": "c10/cuda/driver_api.h, C10_CUDA_DRIVER_CHECK: expandable segments, cuMemCreate",
    "cuda_error_out_of_memory": "cuda.h, the name of the driver's code 2, which cuGetErrorName returns",
    "cublas_status_alloc_failed": "aten/src/ATen/cuda/Exceptions.cpp, _cublasGetErrorEnum",
    "cusolver_status_alloc_failed": "aten/src/ATen/cuda/Exceptions.cpp, cusolverGetErrorMessage",
    "cudnn_status_alloc_failed": "cudnn.h, cudnnGetErrorString",
    "cufft_alloc_failed": "aten/src/ATen/native/cuda/CuFFTUtils.h, _cudaGetErrorEnum",
    "triton error [cuda]: out of memory": "triton-lang/triton, third_party/nvidia/backend/driver.c, gpuAssert",
    # HIP. Builds of PyTorch for it replace CUDA by HIP in the files above.
    "hip out of memory": "c10/hip/HIPCachingAllocator.cpp, malloc",
    "hip error: out of memory": "c10/hip/HIPException.cpp, c10_hip_check_implementation: hipErrorOutOfMemory",
    "hip driver error: out of memory": "c10/hip/driver_api.h, C10_HIP_DRIVER_CHECK",
    "hiperroroutofmemory": "hip_runtime_api.h, the name of code 2, which hipGetErrorName returns",
    "hipblas_status_alloc_failed": "aten/src/ATen/hip/Exceptions.cpp, _hipblasGetErrorEnum",
    "rocblas_status_memory_error": "ROCm/rocBLAS, rocblas_status_to_string",
    "miopenstatusallocfailed": "ROCm/MIOpen, miopenGetErrorString",
    "triton error [hip]: code: 2, message: out of memory": "triton-lang/triton, third_party/amd/backend/driver.c, gpuAssert",
    "triton error [hip]:  code: 2, messsage: out of memory": "the same, as earlier versions spell it",
    # Intel GPUs: codes of Unified Runtime and Level Zero in messages of SYCL, "level_zero backend failed with error: 39
    # (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)".
    "xpu out of memory": "c10/xpu/XPUCachingAllocator.cpp, malloc",
    "ur_result_error_out_of_device_memory": "oneapi-src/unified-runtime, ur_api.h, ur_result_t 39",
    "ze_result_error_out_of_device_memory": "oneapi-src/level-zero, ze_api.h, ze_result_t",
    # Ascend NPUs
    "npu out of memory": "Ascend/pytorch, torch_npu/csrc/core/npu/NPUCachingAllocator.cpp, malloc",
    "acl_error_rt_memory_allocation": "Ascend CANN, acl/error_codes/rt_error_codes.h, code 207001",
    # Apple GPUs. The second refuses a tensor above the largest buffer of the device; smaller batches have none.
    "mps backend out of memory": "aten/src/ATen/mps/MPSAllocator.mm, alloc_buffer_block",
    "invalid buffer size: ": "aten/src/ATen/mps/MPSAllocator.mm, alloc_buffer_block",
    "kiogpucommandbuffercallbackerroroutofmemory": "Apple Metal, MTLCommandBuffer.error, Insufficient Memory",
}
HOST_TEXTS = {
    "std::bad_alloc": "C++ standard library, std::bad_alloc::what",
    "out of host memory": "oneapi-src/level-zero, ze_api.h, description of ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY",
    "ur_result_error_out_of_host_memory": "oneapi-src/unified-runtime, ur_api.h, ur_result_t 38",
    "ze_result_error_out_of_host_memory": "oneapi-src/level-zero, ze_api.h, ze_result_t",
    "pi_error_out_of_host_memory": "intel/llvm before Unified Runtime, sycl/detail/pi.h",
}
# Messages with several causes. oneDNN raises the first four when memory runs out, when the processor has no kernel for
# a dtype, and when code cannot be generated. Threads also fail at process limits, mappings at vm.max_map_count. A CUDA
# library that could not initialize had no memory for its workspace, or does not match the driver. Resources of an Intel
# GPU are memory, registers, local memory and handles.
AMBIGUOUS_TEXTS = {
    "could not create a primitive": "oneapi-src/oneDNN, dnnl.hpp",
    "could not create a memory": "oneapi-src/oneDNN, dnnl.hpp",
    "could not execute a primitive": "oneapi-src/oneDNN, dnnl.hpp",
    "could not initialize a primitive": "oneapi-src/oneDNN, dnnl.hpp",
    "cannot allocate memory": "C library, strerror(ENOMEM)",
    "resource temporarily unavailable": "C library, strerror(EAGAIN)",
    "can't start new thread": "CPython, Modules/_threadmodule.c",
    "thread constructor failed": "C++ standard library of LLVM, std::thread",
    "failed to map segment": "C library, elf/dl-load.c",
    "cublas_status_not_initialized": "aten/src/ATen/cuda/Exceptions.cpp, _cublasGetErrorEnum",
    "cudnn_status_not_initialized": "cudnn.h, cudnnGetErrorString",
    "ur_result_error_out_of_resources": "oneapi-src/unified-runtime, ur_api.h, ur_result_t 40",
    "pi_error_out_of_resources": "intel/llvm before Unified Runtime, sycl/plugins, which had one code for both",
}
