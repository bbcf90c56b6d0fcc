/* Replaces NVIDIA's driver: prints what it is told to launch. */

#include <stdint.h>
#include <stdio.h>
#include <string.h>

static int nothing(void) { return 0; }

static int version(int* number) {
    *number = 13000;
    return 0;
}

static int launch(void* kernel, unsigned width, unsigned height, unsigned depth, unsigned threads, unsigned rows,
                  unsigned layers, unsigned shared, void* stream, void** parameters, void** extra) {
    const int64_t* work = parameters[0];
    printf("%p %u %u %u %u %u %u %u %p %d %lld %p\n", kernel, width, height, depth, threads, rows, layers, shared,
           stream, extra == NULL, (long long)work[0], (void*)work[1]);
    return stream == (void*)0xbad ? 400 : 0; /* CUDA_ERROR_INVALID_HANDLE */
}

int cuGetProcAddress_v2(const char* name, void** function, int cuda_version, uint64_t flags, void* status) {
    (void)cuda_version, (void)flags;
    *function = (void*)nothing;
    if (strcmp(name, "cuLaunchKernel") == 0) *function = (void*)launch;
    if (strcmp(name, "cuDriverGetVersion") == 0) *function = (void*)version;
    if (status) *(int*)status = 0;
    return 0;
}
