// Views on a GPU: the block program, one block per view. NVRTC compiles it without CUDA headers.
// fastaug/views/launch.py plans the memory of a block, fastaug/views/cuda.py launches the kernel.
#include "views.h"

namespace fastaug {

// Byte offsets of the parts of a block's memory: in shared memory if the part's bit in in_shared is
// set, otherwise in the block's own piece of a buffer in global memory.
struct Places {
  long long tables, first, second, box;
  long long piece;  // bytes of global memory per block
  int in_shared;    // bits, in the order above
  int strip_rows;
};

template <class T>
FASTAUG_FUNCTION void views_of_a_block(const View* views, const Layer* layers, long long count,
                                       T* out, byte* buffer, const Form& form,
                                       const Places& places) {
  extern __shared__ double shared[];
  byte* const piece = buffer + blockIdx.x * places.piece;
  const auto part = [&](int number, long long at) {
    return (places.in_shared >> number & 1 ? (byte*)shared : piece) + at;
  };
  Cuda block;
  FASTAUG_ROLLED
  for (long long i = blockIdx.x; i < count; i += gridDim.x) {
    const Layer* const own = layers + i * form.layers;
    const View& view = views[i];
    ViewProgram<Cuda, T>(block, view, own, form, (float*)part(0, places.tables),
                         part(1, places.first), part(2, places.second),
                         Room(view, own, form).box ? part(3, places.box) : nullptr,
                         places.strip_rows)
        .run(out + i * 3 * form.size * form.size);
  }
}

// At most 12 warps, and registers for two such blocks on an SM: 80 per thread.
#define KERNEL(dtype, T)                                                                        \
  extern "C" __global__ void __launch_bounds__(384, 2)                                          \
      views_##dtype(const View* views, const Layer* layers, long long count, T* out,            \
                    byte* buffer, Form form, Places places) {                                   \
    views_of_a_block<T>(views, layers, count, out, buffer, form, places);                       \
  }

// A training run needs only one: --define-macro=KERNELS='KERNEL(...)' compiles only that one.
#ifndef KERNELS
#define KERNELS KERNEL(f32, float) KERNEL(f16, f16) KERNEL(bf16, bf16)
#endif
KERNELS

}  // namespace fastaug
