/* The part of the ACL runtime that torch_npu needs to hold tensors and to run single operations.
 *
 * Device memory is host memory, streams and events are done at once. Compiled against the headers of the torch_npu
 * wheel, so that the prototypes are checked. Every other CANN function is a stand-in that returns 0 (stand_ins.py).
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "acl/acl.h"
#include "acl/acl_mdl.h"
#include "acl/acl_op_compiler.h"

static const size_t MEMORY = (size_t)16 << 30;
static const size_t ALIGNMENT = 512; /* of device memory, as the allocator of torch_npu expects it */

const char *aclrtGetSocName(void) { return "Ascend910B3"; }

aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion *version) {
  memset(version, 0, sizeof *version);
  strcpy(version->version, "8.5.0");
  strcpy(version->majorVersion, "8");
  strcpy(version->minorVersion, "5");
  strcpy(version->releaseVersion, "0");
  return ACL_SUCCESS;
}

/* Options are empty texts and 0. */

size_t aclGetCompileoptSize(aclCompileOpt option) { return 1; }

aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t size) {
  memset(value, 0, size);
  return ACL_SUCCESS;
}

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
  *value = 0;
  return ACL_SUCCESS;
}

/* One device. */

aclError aclrtGetDeviceCount(uint32_t *count) {
  *count = 1;
  return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t *device) {
  *device = 0;
  return ACL_SUCCESS;
}

aclError aclrtGetCurrentContext(aclrtContext *context) {
  static int only;
  *context = &only;
  return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
  if (flags) *flags = 0;
  *active = 1;
  return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr kind, size_t *available, size_t *total) {
  *available = *total = MEMORY;
  return ACL_SUCCESS;
}

/* Memory. */

aclError aclrtMalloc(void **pointer, size_t size, aclrtMemMallocPolicy policy) {
  return posix_memalign(pointer, ALIGNMENT, size + ALIGNMENT) ? ACL_ERROR_RT_MEMORY_ALLOCATION : ACL_SUCCESS;
}

aclError aclrtMallocAlign32(void **pointer, size_t size, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(pointer, size, policy);
}

aclError aclrtMallocHost(void **pointer, size_t size) { return aclrtMalloc(pointer, size, ACL_MEM_MALLOC_HUGE_FIRST); }

aclError aclrtFree(void *pointer) {
  free(pointer);
  return ACL_SUCCESS;
}

aclError aclrtFreeHost(void *pointer) { return aclrtFree(pointer); }

aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind) {
  memmove(to, from, size);
  return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(
    void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind, aclrtStream stream) {
  return aclrtMemcpy(to, room, from, size, kind);
}

aclError aclrtMemset(void *to, size_t room, int32_t value, size_t size) {
  memset(to, value, size);
  return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t size, aclrtStream stream) {
  return aclrtMemset(to, room, value, size);
}

/* Streams and events: everything has run when a call returns. */

aclError aclrtCreateStream(aclrtStream *stream) {
  *stream = malloc(1);
  return ACL_SUCCESS;
}

aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flags) {
  return aclrtCreateStream(stream);
}

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
  *status = ACL_STREAM_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flags) {
  *event = calloc(1, sizeof(struct timespec));
  return ACL_SUCCESS;
}

aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flags) { return aclrtCreateEventExWithFlag(event, flags); }

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
  *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

/* Capture of graphs: its state alone. What is captured and replayed is kept by capture.py. */

static aclrtStream capturing;
static aclmdlRI captured;

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode) {
  if (captured) return ACL_ERROR_RT_STREAM_CAPTURED;
  capturing = stream;
  captured = malloc(1);
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *graph) {
  int active = captured && stream == capturing;
  *status = active ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  if (graph) *graph = active ? captured : NULL;
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *graph) {
  if (!captured) return ACL_ERROR_RT_STREAM_NOT_CAPTURED;
  *graph = captured;
  captured = NULL;
  return ACL_SUCCESS;
}

aclError aclmdlRIDestroy(aclmdlRI graph) {
  free(graph);
  return ACL_SUCCESS;
}
