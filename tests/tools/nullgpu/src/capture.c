// Stream capture and CUDA graphs. While a stream captures, its work becomes a graph's nodes and is
// not done; calls that a GPU refuses meanwhile are refused here, and invalidate the capture. A
// launch of a graph does the work of its nodes, in the order in which they were captured.
#define _GNU_SOURCE
#include "capture.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime.h"

typedef struct {
  char* kind;
  char* name;
  size_t bytes;
  int device;
  NodeAction action;
  void* data;
} Node;

typedef struct {
  long number;
  int references;
  size_t count, room;
  Node* nodes;
} Graph;

struct Capture {
  Graph* graph;
  Stream* streams[MAX_CAPTURED_STREAMS];
  unsigned work[MAX_CAPTURED_STREAMS];
  int members;
  enum cudaStreamCaptureMode mode;
  long thread;
  int invalid;
  Capture* next;
};

static Capture* captures;
static volatile int ongoing;
static long graphs;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static long this_thread(void) { return syscall(SYS_gettid); }

static int refuse(Capture* capture, int error, const char* call) {
  char text[200];
  capture->invalid = 1;
  snprintf(text, sizeof text, "%s while a graph is captured", call);
  Stream* origin = capture->streams[0];
  nullgpu_note("error", origin->device, origin->number, text, (size_t)error);
  return error;
}

// --- what is refused

// With the lock held: the capture that forbids this thread calls that may be unsafe.
static Capture* forbidding(void) {
  if (thread_mode == cudaStreamCaptureModeRelaxed) {
    return NULL;
  }
  for (Capture* c = captures; c; c = c->next) {
    int own = c->thread == this_thread();
    int global = thread_mode == cudaStreamCaptureModeGlobal && c->mode == cudaStreamCaptureModeGlobal;
    if (own ? c->mode != cudaStreamCaptureModeRelaxed : global) {
      return c;
    }
  }
  return NULL;
}

int nullgpu_refuse_unsafe(const char* call) {
  if (!ongoing) {
    return 0;
  }
  pthread_mutex_lock(&lock);
  Capture* found = forbidding();
  int error = found ? refuse(found, cudaErrorStreamCaptureUnsupported, call) : 0;
  pthread_mutex_unlock(&lock);
  return error;
}

int nullgpu_refuse_stream_wait(const void* handle, const char* call) {
  if (!ongoing) {
    return 0;
  }
  pthread_mutex_lock(&lock);
  const Stream* stream = nullgpu_stream(handle);
  Capture* found = stream && stream->capture ? stream->capture : forbidding();
  int error = found ? refuse(found, cudaErrorStreamCaptureUnsupported, call) : 0;
  pthread_mutex_unlock(&lock);
  return error;
}

int nullgpu_refuse_captured(const void* handle, const char* call) {
  const Stream* stream = nullgpu_stream(handle);
  return stream && stream->capture ? nullgpu_refuse_stream_wait(handle, call) : 0;
}

int nullgpu_refuse_device_wait(int device, const char* call) {
  int error = 0;
  pthread_mutex_lock(&lock);
  for (Capture* c = captures; c; c = c->next) {
    if (c->streams[0]->device == device) {
      error = refuse(c, cudaErrorStreamCaptureUnsupported, call);
    }
  }
  pthread_mutex_unlock(&lock);
  return error;
}

// --- work

static Capture* capture_numbered(long number) {
  for (Capture* c = captures; c; c = c->next) {
    if (c->graph->number == number) {
      return c;
    }
  }
  return NULL;
}

static void add_node(Graph* graph, Node node) {
  if (graph->count == graph->room) {
    graph->room = graph->room ? 2 * graph->room : 64;
    graph->nodes = realloc(graph->nodes, graph->room * sizeof *graph->nodes);
  }
  graph->nodes[graph->count++] = node;
}

// With the lock held. The legacy default stream waits for all streams that are not "non-blocking".
// torch's streams are non-blocking: then the work is executed now, and does not become a node.
static int on_legacy_stream(int device, const char* kind, const char* name) {
  for (Capture* c = captures; c; c = c->next) {
    for (int i = 0; i < c->members; i++) {
      if (c->streams[i]->device == device && c->streams[i]->blocking) {
        return refuse(c, cudaErrorStreamCaptureImplicit, "work on the legacy default stream");
      }
    }
    if (c->streams[0]->device == device && c->thread == this_thread()) {
      char text[500];
      snprintf(text, sizeof text, "%s %s", kind, name);
      nullgpu_note("uncaptured", device, 0, text, 0);
    }
  }
  return NOT_CAPTURED;
}

int nullgpu_record(const void* handle, const char* kind, const char* name, size_t bytes,
                   NodeAction action, const void* data, size_t data_bytes) {
  if (!ongoing) {
    return NOT_CAPTURED;
  }
  Stream* stream = nullgpu_stream(handle);
  int result = NOT_CAPTURED;
  pthread_mutex_lock(&lock);
  if (!stream) {
    result = on_legacy_stream(nullgpu_current(), kind, name);
  } else if (stream->capture && stream->capture->invalid) {
    result = cudaErrorStreamCaptureInvalidated;
  } else if (stream->capture) {
    Capture* capture = stream->capture;
    char text[500];
    void* kept = data_bytes ? malloc(data_bytes) : NULL;
    if (kept) {
      memcpy(kept, data, data_bytes);
    }
    add_node(capture->graph,
             (Node){strdup(kind), strdup(name), bytes, stream->device, action, kept});
    stream->clock[stream->member] = ++capture->work[stream->member];
    snprintf(text, sizeof text, "%s %s", kind, name);
    nullgpu_note("captured", stream->device, stream->number, text, bytes);
    result = 0;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

// --- events

int nullgpu_record_position(const void* handle, CapturedPosition* position) {
  const Stream* stream = nullgpu_stream(handle);
  position->capture = 0;
  if (!stream || !stream->capture) {
    return NOT_CAPTURED;
  }
  pthread_mutex_lock(&lock);
  int error = stream->capture->invalid ? cudaErrorStreamCaptureInvalidated : 0;
  position->capture = stream->capture->graph->number;
  memcpy(position->clock, stream->clock, sizeof position->clock);
  pthread_mutex_unlock(&lock);
  return error;
}

int nullgpu_refuse_event_wait(const CapturedPosition* position, const char* call) {
  if (!position->capture) {
    return nullgpu_refuse_unsafe(call);
  }
  pthread_mutex_lock(&lock);
  Capture* capture = capture_numbered(position->capture);
  if (capture) {
    refuse(capture, cudaErrorCapturedEvent, call);
  }
  pthread_mutex_unlock(&lock);
  return cudaErrorCapturedEvent;
}

static int join(Stream* stream, Capture* capture) {
  if (capture->members == MAX_CAPTURED_STREAMS) {
    nullgpu_note("unimplemented", stream->device, stream->number, "17 streams of a capture", 0);
    return cudaErrorNotSupported;
  }
  stream->capture = capture;
  stream->member = capture->members;
  memset(stream->clock, 0, sizeof stream->clock);
  capture->streams[capture->members++] = stream;
  return 0;
}

static int wait_position(Stream* stream, const CapturedPosition* position) {
  Capture* capture = capture_numbered(position->capture);
  if (!position->capture) {
    return refuse(stream->capture, cudaErrorStreamCaptureIsolation,
                  "a wait for an event of before the capture");
  }
  if (!capture) {
    return cudaErrorCapturedEvent;
  }
  if (capture->invalid) {
    return cudaErrorStreamCaptureInvalidated;
  }
  if (stream->capture && stream->capture != capture) {
    return refuse(capture, cudaErrorStreamCaptureMerge, "a wait for an event of another capture");
  }
  int error = stream->capture ? 0 : join(stream, capture);
  for (int i = 0; i < MAX_CAPTURED_STREAMS && !error; i++) {
    stream->clock[i] = stream->clock[i] > position->clock[i] ? stream->clock[i]
                                                             : position->clock[i];
  }
  return error;
}

int nullgpu_wait_position(const void* handle, const CapturedPosition* position, int recorded) {
  Stream* stream = nullgpu_stream(handle);
  int captures_now = stream && stream->capture;
  if (!position->capture && (!captures_now || !recorded)) {
    return NOT_CAPTURED;
  }
  pthread_mutex_lock(&lock);
  Capture* capture = capture_numbered(position->capture);
  int error;
  if (!stream && capture) {
    error = refuse(capture, cudaErrorStreamCaptureImplicit,
                   "a wait of the legacy default stream for a captured event");
  } else {
    error = stream ? wait_position(stream, position) : cudaErrorCapturedEvent;
  }
  pthread_mutex_unlock(&lock);
  return error;
}

// --- the runtime's functions

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) {
  enum cudaStreamCaptureMode before = thread_mode;
  thread_mode = *mode;
  *mode = before;
  CHECKED;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
  RETURN_IF_BROKEN
  Stream* stream = nullgpu_stream(handle);
  if (!stream) {
    nullgpu_note("error", -1, 0, "capture of the legacy default stream", 900);
    return cudaErrorStreamCaptureUnsupported;
  }
  if (stream->capture) {
    return cudaErrorIllegalState;
  }
  Capture* made = calloc(1, sizeof *made);
  made->graph = calloc(1, sizeof *made->graph);
  made->mode = mode;
  made->thread = this_thread();
  pthread_mutex_lock(&lock);
  made->graph->number = ++graphs;
  made->graph->references = 1;
  made->next = captures;
  captures = made;
  join(stream, made);
  ongoing++;
  pthread_mutex_unlock(&lock);
  nullgpu_note("capture_begin", stream->device, stream->number, "", 0);
  return cudaSuccess;
}

static int all_work_is_joined(const Capture* capture) {
  for (int i = 0; i < capture->members; i++) {
    if (capture->streams[0]->clock[i] < capture->work[i]) {
      return 0;
    }
  }
  return 1;
}

static void (*release_hook)(const void* data);
static int call_python(const void* data, const void* stream);

static void release(Graph* graph) {
  if (--graph->references) {
    return;
  }
  for (size_t i = 0; i < graph->count; i++) {
    Node* node = &graph->nodes[i];
    if (node->action == call_python && release_hook) {
      release_hook(*(void**)node->data);
    }
    free(node->kind);
    free(node->name);
    free(node->data);
  }
  free(graph->nodes);
  free(graph);
}

static void forget(Capture* capture) {
  for (Capture** place = &captures; *place; place = &(*place)->next) {
    if (*place == capture) {
      *place = capture->next;
      break;
    }
  }
  for (int i = 0; i < capture->members; i++) {
    capture->streams[i]->capture = NULL;
  }
  ongoing--;
  free(capture);
}

static void (*end_hook)(long number);

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  Stream* stream = nullgpu_stream(handle);
  *graph = NULL;
  if (!stream || !stream->capture) {
    return cudaErrorIllegalState;
  }
  pthread_mutex_lock(&lock);
  Capture* capture = stream->capture;
  long number = capture->graph->number;
  Graph* captured = capture->graph;
  int error = 0;
  if (stream != capture->streams[0]) {
    error = refuse(capture, cudaErrorStreamCaptureUnmatched, "the end of another stream's capture");
    captured = NULL;  // the capture continues, invalid
  } else if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != this_thread()) {
    error = refuse(capture, cudaErrorStreamCaptureWrongThread, "an end by another thread");
  } else if (capture->invalid) {
    error = cudaErrorStreamCaptureInvalidated;
  } else if (!all_work_is_joined(capture)) {
    error = refuse(capture, cudaErrorStreamCaptureUnjoined, "an end with work not joined");
  }
  if (captured) {
    forget(capture);
  }
  pthread_mutex_unlock(&lock);
  if (captured && end_hook) {
    end_hook(number);
  }
  if (error) {
    if (captured) {
      release(captured);
    }
    return error;
  }
  *graph = (cudaGraph_t)captured;
  nullgpu_note("capture_end", stream->device, stream->number, "", captured->count);
  return cudaSuccess;
}

static enum cudaStreamCaptureStatus status_of(const Stream* stream) {
  if (!stream || !stream->capture) {
    return cudaStreamCaptureStatusNone;
  }
  return stream->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                  : cudaStreamCaptureStatusActive;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus* status) {
  *status = status_of(nullgpu_stream(handle));
  CHECKED;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* count) {
  const Stream* stream = nullgpu_stream(handle);
  *status = status_of(stream);
  int active = *status == cudaStreamCaptureStatusActive;
  if (id) {
    *id = active ? (unsigned long long)stream->capture->graph->number : 0;
  }
  if (graph) {
    *graph = active ? (cudaGraph_t)stream->capture->graph : NULL;
  }
  if (dependencies) {
    *dependencies = NULL;
  }
  if (edges) {
    *edges = NULL;
  }
  if (count) {
    *count = 0;
  }
  CHECKED;
}

// --- graphs

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  const Graph* own = (Graph*)graph;
  for (size_t i = 0; nodes && i < *count && i < own->count; i++) {
    nodes[i] = (cudaGraphNode_t)&own->nodes[i];
  }
  *count = own->count;
  CHECKED;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph,
                                          unsigned long long flags) {
  RETURN_IF_BROKEN
  ((Graph*)graph)->references++;
  *made = (cudaGraphExec_t)graph;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  release((Graph*)graph);
  CHECKED;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  release((Graph*)graph);
  CHECKED;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
  RETURN_IF_BROKEN
  const Graph* graph = (Graph*)handle;
  const Stream* own = nullgpu_stream(stream);
  if (own && own->capture) {
    nullgpu_note("unimplemented", -1, own->number, "a graph as a node of another one", 0);
    return cudaErrorStreamCaptureUnsupported;
  }
  int device = nullgpu_stream_device(stream);
  char text[500];
  snprintf(text, sizeof text, "graph %ld", graph->number);
  nullgpu_note("graph", device, nullgpu_stream_number(stream), text, graph->count);
  for (size_t i = 0; i < graph->count && !nullgpu_error(); i++) {
    const Node* node = &graph->nodes[i];
    snprintf(text, sizeof text, "%s %s", node->kind, node->name);
    nullgpu_note("replayed", node->device, nullgpu_stream_number(stream), text, node->bytes);
    nullgpu_maybe_fault(node->name);
    int error = node->action ? node->action(node->data, stream) : 0;
    if (error) {
      nullgpu_set_pending_error(error);
    }
  }
  return cudaSuccess;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t* made, void* data, cudaHostFn_t destroy,
                                 unsigned references, unsigned flags) {
  *made = (cudaUserObject_t)data;  // kept for good: it is a few bytes
  CHECKED;
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count) { CHECKED; }

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count,
                                      unsigned flags) {
  CHECKED;
}

// --- nodes of Python's, in functional mode

static int (*replay_hook)(const void* key, const void* stream);

static int call_python(const void* data, const void* stream) {
  return replay_hook(*(void**)data, stream);
}

// The graph that a stream captures; 0: none.
long nullgpu_capture_number(const void* handle) {
  const Stream* stream = nullgpu_stream(handle);
  return stream && stream->capture ? stream->capture->graph->number : 0;
}

// key: what the hook is called with when the graph is launched.
int nullgpu_record_python(const void* stream, const char* kind, const char* name, void* key) {
  return nullgpu_record(stream, kind, name, 0, call_python, &key, sizeof key);
}

void nullgpu_set_graph_hooks(int (*replay)(const void*, const void*), void (*freed)(const void*),
                             void (*ended)(long)) {
  replay_hook = replay;
  release_hook = freed;
  end_hook = ended;
}
