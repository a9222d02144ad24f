// The objective on a CPU: the block program with one thread a block, images shared out to threads.
// A plain C interface, so that it compiles in seconds and knows nothing of torch.
#include <atomic>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "objective.h"

namespace fastaug {
namespace {

// The tiles of an image (p and v) should stay in a core's second-level cache.
constexpr long long TILE_BYTES = 256 * 1024;

struct Call {
  const void* logits;
  const long long* targets;
  void* gradient;
  float *nll, *kl;
  long long images, image_stride, view_stride;
  Shape shape;
  Weights weights;
  std::atomic<long long> next;
};

struct Release {
  void operator()(float* memory) const { ::operator delete[](memory, std::align_val_t(64)); }
};

// Kept by each thread from call to call: fresh memory costs a page fault for every 4 KB.
float* shared_memory(int floats_needed) {
  thread_local std::unique_ptr<float[], Release> memory;
  thread_local int size = 0;
  if (size < floats_needed) {
    memory.reset(static_cast<float*>(
        ::operator new[](sizeof(float) * floats_needed, std::align_val_t(64))));
    size = floats_needed;
  }
  return memory.get();
}

template <class T, Average AVERAGE>
void images_of_a_thread(void* data) {
  Call& call = *static_cast<Call*>(data);
  const Layout layout(call.shape.views, call.shape.width, 1,
                      OneThread::row_stride(call.shape.width));
  float* shared = shared_memory(layout.size);
  const long long tile = (long long)call.shape.views * call.shape.classes;
  OneThread block;
  for (long long b; (b = call.next.fetch_add(1, std::memory_order_relaxed)) < call.images;) {
    Objective<OneThread, T, AVERAGE>(
        block, call.shape, call.weights, static_cast<const T*>(call.logits) + b * call.image_stride,
        call.view_stride, AVERAGE == NONE ? 0 : call.targets[b],
        call.gradient ? static_cast<T*>(call.gradient) + b * tile : nullptr, shared)
        .run(call.nll + b, call.kl + b);
  }
}

typedef void (*Work)(void*);

template <class T>
Work work_for(int average) {
  switch (average) {
    case LOSSES: return images_of_a_thread<T, LOSSES>;
    case PROBS: return images_of_a_thread<T, PROBS>;
    case LOGITS: return images_of_a_thread<T, LOGITS>;
    default: return images_of_a_thread<T, NONE>;
  }
}

int chunk_width(int views, int classes) {
  const long long fits = TILE_BYTES / (2 * sizeof(float) * views);
  const long long width = classes < fits ? classes : fits;
  return (int)((width + LANES - 1) / LANES * LANES);
}

}  // namespace
}  // namespace fastaug

// OpenMP's entry, as compilers call it: threads that torch has already started.
typedef void (*Parallel)(void (*)(void*), void*, unsigned threads, unsigned flags);

// dtype: 0 fp32, 1 fp16, 2 bf16; average: as in objective.h; strides in elements; gradient: null for
// the values alone; parallel: null starts threads. Returns -1, or the first image whose target is no
// class: then nothing is computed.
extern "C" long long fastaug_objective(int dtype, int average, const void* logits,
                                       long long image_stride, long long view_stride,
                                       const long long* targets, long long images, int views,
                                       int classes, float kl_weight, float smoothing, float* nll,
                                       float* kl, void* gradient, int threads, Parallel parallel) {
  using namespace fastaug;
  if (average != NONE)
    for (long long b = 0; b < images; ++b)
      if (targets[b] < 0 || targets[b] >= classes) return b;
  Call call = {logits, targets, gradient, nll, kl, images, image_stride, view_stride,
               {views, classes, chunk_width(views, classes)}, {kl_weight, smoothing}, {0}};
  const Work work = dtype == 0   ? work_for<float>(average)
                    : dtype == 1 ? work_for<f16>(average)
                                 : work_for<bf16>(average);
  if (threads <= 1) {
    work(&call);
  } else if (parallel) {
    parallel(work, &call, (unsigned)threads, 0);
  } else {
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(work, &call);
    work(&call);
    for (std::thread& other : others) other.join();
  }
  return -1;
}
