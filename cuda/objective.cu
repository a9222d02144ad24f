// The objective on a GPU: the block program with one block per image. NVRTC compiles it without CUDA
// headers. fastaug/kernels/cuda.py chooses threads, width and shared memory, and launches it.
#include "objective.h"

namespace fastaug {

template <class T, Average AVERAGE, class Target>
FASTAUG_FUNCTION void image_of_a_block(const T* logits, long long image_stride,
                                       long long view_stride,
                                       const typename Target::Stored* targets, float* nll,
                                       float* kl, T* gradient, Shape shape, Weights weights) {
  extern __shared__ __align__(16) float shared[];
  const long long b = blockIdx.x;
  Cuda block;
  Objective<Cuda, T, AVERAGE, Target>(
      block, shape, weights, logits + b * image_stride, view_stride,
      AVERAGE == NONE ? typename Target::Given() : Target::of(targets, b, shape.classes),
      gradient ? gradient + b * shape.views * shape.classes : nullptr, shared)
      .run(nll + b, kl + b);
}

// Strides are in elements; targets are null for `none`; gradient is null for only the values.
// At most 16 warps, and registers for two blocks of them on an SM: one loads, the other computes.
#define KERNEL_OF(name, AVERAGE, T, Target)                                                        \
  extern "C" __global__ void __launch_bounds__(512, 2) name(                                       \
      const T* logits, long long image_stride, long long view_stride,                              \
      const Target::Stored* targets, float* nll, float* kl, T* gradient, int views, int classes,   \
      int width, float kl_weight, float smoothing) {                                               \
    image_of_a_block<T, AVERAGE, Target>(logits, image_stride, view_stride, targets, nll, kl,      \
                                         gradient, {views, classes, width},                        \
                                         {kl_weight, smoothing});                                  \
  }
#define KERNEL(average, AVERAGE, dtype, T) \
  KERNEL_OF(objective_##average##_##dtype, AVERAGE, T, ClassTarget)
#define SOFT_KERNEL(average, AVERAGE, dtype, T) \
  KERNEL_OF(objective_soft_##average##_##dtype, AVERAGE, T, SoftTarget)
#define KERNELS_OF(dtype, T) \
  FASTAUG_AVERAGES(KERNEL, dtype, T) FASTAUG_AVERAGES_OF_TARGETS(SOFT_KERNEL, dtype, T)

// A training run needs only one: --define-macro=KERNELS='KERNEL(...)' compiles in a tenth of the time.
#ifndef KERNELS
#define KERNELS KERNELS_OF(f32, float) KERNELS_OF(f16, f16) KERNELS_OF(bf16, bf16)
#endif
KERNELS

}  // namespace fastaug
