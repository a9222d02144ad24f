// Streams, for the files that capture their work.
#pragma once

#include <stddef.h>

#define MAX_CAPTURED_STREAMS 16

typedef struct Capture Capture;

typedef struct Stream {
  int device;
  long number;
  int blocking;      // ordered with the legacy default stream
  Capture* capture;  // NULL: not capturing
  int member;        // its place among the streams of the capture
  unsigned clock[MAX_CAPTURED_STREAMS];  // how much of each stream's work comes before its next
} Stream;

// 0, 1 and 2 are the handles of the default streams: NULL.
Stream* nullgpu_stream(const void* handle);
