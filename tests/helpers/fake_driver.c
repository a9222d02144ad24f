// Stands in for NVIDIA's driver, libcuda.so.1: every call goes to `hook`, which driver_calls.py sets.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

typedef long long Word;
int (*hook)(const char* function, Word* arguments);

#define CALL(...) return hook(__func__, (Word[]){__VA_ARGS__})
#define W(x) (Word)(x)

// NVRTC finds this one by its name, and wants things of a driver that are not here: no device.
int cuInit(unsigned flags) { return 100; }
int init_of_bindings(unsigned flags) { CALL(flags); }
int cuDeviceGet(int* device, int index) { CALL(W(device), index); }
int cuDevicePrimaryCtxRetain(void** context, int device) { CALL(W(context), device); }
int cuDeviceGetAttribute(int* value, int attribute, int device) { CALL(W(value), attribute, device); }
int cuCtxSetCurrent(void* context) { CALL(W(context)); }
int cuModuleLoadData(void** module, const void* image) { CALL(W(module), W(image)); }
int cuModuleGetFunction(void** function, void* module, const char* name) {
  CALL(W(function), W(module), W(name));
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  CALL(W(function), attribute, value);
}
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads_x,
                   unsigned threads_y, unsigned threads_z, unsigned shared, void* stream,
                   void** parameters, void** extra) {
  CALL(W(function), x, y, z, threads_x, threads_y, threads_z, shared, W(stream), W(parameters),
       W(extra));
}

// How cuda.bindings finds each function; what is not here stays null.
int cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long long flags,
                        void* status) {
  if (strcmp(name, "cuInit") == 0) name = "init_of_bindings";
  *function = dlsym(dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD), name);
  return 0;
}
