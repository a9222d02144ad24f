// Stream capture: what is legal while a CUDA graph is captured, and the graphs themselves.
#pragma once

#include <stddef.h>

#include "streams.h"

#define NOT_CAPTURED (-1)

typedef int (*NodeAction)(const void* data, const void* stream);  // returns a CUDA error

// Work on a stream: NOT_CAPTURED if the caller must do it now, 0 if it has become a node of a
// graph, else the error that the call must return. action may be NULL; its data are copied.
int nullgpu_record(const void* stream, const char* kind, const char* name, size_t bytes,
                   NodeAction action, const void* data, size_t data_bytes);

// The error of a call that may not be made while a graph is captured; 0: it may.
int nullgpu_refuse_unsafe(const char* call);
int nullgpu_refuse_stream_wait(const void* stream, const char* call);
// Only if this stream captures.
int nullgpu_refuse_captured(const void* stream, const char* call);
int nullgpu_refuse_device_wait(int device, const char* call);

// Events of a capture. The position is 0 for an event that was recorded outside of captures.
typedef struct {
  long capture;
  unsigned clock[MAX_CAPTURED_STREAMS];
} CapturedPosition;

int nullgpu_record_position(const void* stream, CapturedPosition* position);
int nullgpu_refuse_event_wait(const CapturedPosition* position, const char* call);
// A stream waits for an event: NOT_CAPTURED, 0 if both are of one capture, or the error.
int nullgpu_wait_position(const void* stream, const CapturedPosition* position, int recorded);

#define RETURN_IF_REFUSED(refusal) \
  {                                \
    int refused_ = (refusal);      \
    if (refused_) {                \
      return refused_;             \
    }                              \
  }
#define RETURN_UNLESS_UNCAPTURED(result) \
  {                                      \
    int captured_ = (result);            \
    if (captured_ != NOT_CAPTURED) {     \
      return captured_;                  \
    }                                    \
  }
#define RETURN_IF_CAPTURED(...) RETURN_UNLESS_UNCAPTURED(nullgpu_record(__VA_ARGS__))
