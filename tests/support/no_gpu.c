// SPDX-License-Identifier: Apache-2.0
// Stands in for libcuda.so.1 and libamdhip64.so where Triton's launchers look for them: keeps what a kernel would get.
#include <stdint.h>
#include <string.h>

int launches, count, sizes[256];
uint64_t values[256];

static int keep(void **arguments) {
  launches++;
  memset(values, 0, sizeof values);
  for (int i = 0; i < count; i++) memcpy(&values[i], arguments[i], sizes[i]);
  return 0;
}

int cuLaunchKernelEx(const void *config, void *kernel, void **arguments, void **extra) { return keep(arguments); }
int cuPointerGetAttribute(void *found, int attribute, uint64_t pointer) { *(uint64_t *)found = pointer; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "none"; return 0; }
int cuCtxGetCurrent(void **context) { *context = &launches; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 0; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &launches; return 0; }
int cuFuncSetAttribute(void *kernel, int attribute, int value) { return 0; }

static int launch(void *kernel, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned lds,
                  void *stream, void **arguments, void **extra) { return keep(arguments); }
static int attribute(void *found, int which, void *pointer) { *(void **)found = pointer; return 0; }
static const char *text(void) { return "none"; }

int hipGetProcAddress(const char *name, void **found, int version, uint64_t flags, void *status) {
  *found = !strcmp(name, "hipPointerGetAttribute") ? (void *)attribute : strstr(name, "Error") ? (void *)text : (void *)launch;
  return 0;
}
