// The objective on a CPU: the block program with one thread per block, images divided among threads.
// A plain C interface, so that it compiles in seconds and knows nothing of torch.
//
// Throws nothing: an exception in a thread would end the process, and so would any one in a prebuilt
// library (old_glibc.cpp). A lack of memory is a return value.
#include <atomic>
#include <cstdlib>
#include <pthread.h>

#include "objective.h"

namespace fastaug {
namespace {

// Size of both tiles of an image: a core's share of the L3 cache. Chunks that fit into the L2 cache
// would be loaded and computed three times, which takes 1.4 to 1.8 times as long.
#ifndef FASTAUG_TILE_BYTES
#define FASTAUG_TILE_BYTES (3072 * 1024)
#endif

struct Call {
  const void* logits;
  const void* targets;
  void* gradient;
  float *nll, *kl;
  long long images, image_stride, view_stride;
  Shape shape;
  Weights weights;
  int threads;
  std::atomic<int> next_share;
};

// Kept by each thread from call to call: fresh memory costs a page fault for every 4 KB.
struct Scratch {
  float* memory = nullptr;
  int size = 0;
  ~Scratch() { free(memory); }
};

// Null if there is no memory.
float* shared_memory(int floats_needed) {
  thread_local Scratch scratch;
  if (scratch.size < floats_needed) {
    free(scratch.memory);
    const size_t bytes = (sizeof(float) * floats_needed + 63) / 64 * 64;
    scratch.memory = static_cast<float*>(aligned_alloc(64, bytes));
    scratch.size = scratch.memory ? floats_needed : 0;
  }
  return scratch.memory;
}

template <class T, Average AVERAGE, class Target>
void images_of_a_thread(void* data) {
  Call& call = *static_cast<Call*>(data);
  const Layout layout(call.shape.views, call.shape.width, 1,
                      OneThread::row_stride(call.shape.width));
  float* shared = shared_memory(layout.size);
  if (!shared) return;  // other threads may have memory for its share
  const long long tile = (long long)call.shape.views * call.shape.classes;
  OneThread block;
  const T* const logits = static_cast<const T*>(call.logits);
  const auto targets = static_cast<const typename Target::Stored*>(call.targets);
  // A share is every `threads`-th image, so that a thread knows its next image and can prefetch it.
  // If fewer threads start than requested, some process several shares.
  for (int share; (share = call.next_share.fetch_add(1, std::memory_order_relaxed)) < call.threads;)
    for (long long b = share; b < call.images; b += call.threads) {
      const long long next = b + call.threads;
      Objective<OneThread, T, AVERAGE, Target>(
          block, call.shape, call.weights, logits + b * call.image_stride, call.view_stride,
          AVERAGE == NONE ? typename Target::Given() : Target::of(targets, b, call.shape.classes),
          call.gradient ? static_cast<T*>(call.gradient) + b * tile : nullptr, shared,
          next < call.images ? logits + next * call.image_stride : nullptr)
          .run(call.nll + b, call.kl + b);
    }
}

typedef void (*Work)(void*);

#define CASE(name, AVERAGE, T, Target) \
  case AVERAGE: return images_of_a_thread<T, AVERAGE, Target>;
template <class T>
Work work_for(int average) {
  switch (average) { FASTAUG_AVERAGES(CASE, T, ClassTarget) }
  return nullptr;
}
// Only fp32: each dtype would take the compiler another second and a half, on a user's machine.
Work soft_work_for(int average) {
  switch (average) { FASTAUG_AVERAGES_OF_TARGETS(CASE, float, SoftTarget) }
  return nullptr;
}
#undef CASE

int chunk_width(int views, int classes) {
  const long long fits = FASTAUG_TILE_BYTES / (2 * sizeof(float) * views);
  const long long width = classes < fits ? classes : fits > 0 ? fits : 1;
  return (int)((width + LANES - 1) / LANES * LANES);
}

}  // namespace
}  // namespace fastaug

// OpenMP's entry point, as compilers call it: uses the threads that torch has already started.
typedef void (*Parallel)(void (*)(void*), void*, unsigned threads, unsigned flags);

// One struct, because a call from Python takes longer for each argument. native.py packs it.
struct Arguments {
  int dtype;    // 0 fp32, 1 fp16, 2 bf16
  int average;  // as in objective.h
  const void* logits;
  long long image_stride, view_stride;  // in elements
  const void* targets;  // [B] classes, or [B, C] fp32
  long long images;
  int views, classes;
  float kl_weight, smoothing;
  float *nll, *kl;
  float* mean;     // of nll + kl_weight * kl, then gradient is that of the mean; null: of each image
  void* gradient;  // null: only the values
  int threads;
  int soft;           // 1: targets are [B, C], and dtype is fp32
  Parallel parallel;  // null: start threads
};

// Returns -1; the first image whose target is not a class, then nothing is computed; -2 without
// memory.
extern "C" long long fastaug_objective(const Arguments* a) {
  using namespace fastaug;
  if (a->average != NONE && !a->soft)
    for (long long b = 0; b < a->images; ++b)
      if (ClassTarget(static_cast<const long long*>(a->targets)[b], a->classes).index < 0) return b;
  Call call = {a->logits, a->targets, a->gradient, a->nll, a->kl, a->images, a->image_stride,
               a->view_stride, {a->views, a->classes, chunk_width(a->views, a->classes)},
               {a->kl_weight, a->smoothing, a->mean ? 1.f / a->images : 1.f},
               a->threads > 1 ? a->threads : 1, {0}};
  const Work work = a->soft         ? soft_work_for(a->average)
                    : a->dtype == 0 ? work_for<float>(a->average)
                    : a->dtype == 1 ? work_for<f16>(a->average)
                                    : work_for<bf16>(a->average);
  if (a->threads <= 1) {
    work(&call);
  } else if (a->parallel) {
    a->parallel(work, &call, (unsigned)a->threads, 0);
  } else {
    struct Start {
      Work work;
      Call* call;
    } start = {work, &call};
    const auto run = [](void* data) -> void* {
      static_cast<Start*>(data)->work(static_cast<Start*>(data)->call);
      return nullptr;
    };
    pthread_t others[256];
    int started = 0;
    while (started < 256 && started < a->threads - 1 &&
           !pthread_create(&others[started], nullptr, run, &start))
      ++started;
    work(&call);
    while (started) pthread_join(others[--started], nullptr);
  }
  // A thread with memory works until no share is left.
  if (call.next_share < call.threads) return -2;
  if (a->mean) {
    double sum = 0;
    // With weight 0, an infinite kl must not count: 0 times infinity is NaN.
    for (long long b = 0; b < a->images; ++b)
      sum += a->nll[b] + (a->kl_weight ? a->kl_weight * a->kl[b] : 0);
    *a->mean = (float)(sum / a->images);
  }
  return -1;
}
