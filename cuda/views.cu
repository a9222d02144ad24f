// Views on a GPU: the block program, one block per view. NVRTC compiles it without CUDA headers.
// fastaug/views/launch.py plans the memory of a block, fastaug/views/cuda.py launches the kernel.
#include "views.h"

namespace fastaug {

// Byte offsets of the parts of a block's memory, all multiples of 16: in shared memory if the part's
// bit in in_shared is set, otherwise in the block's own piece of a buffer in global memory. The box is
// always there, next to the images, so that one kind of load reads both.
struct Places {
  long long tables, first, second, box;
  long long piece;  // bytes of global memory per block
  int in_shared;    // bits, in the order above
  int strip_rows;
};

// What a kernel knows to be in shared memory when it is compiled: with the address space, loads,
// stores and atomics are those of shared memory. fastaug/views/launch.py reads the names.
//   ALL     tables and both buffers
//   TABLES  the tables; each buffer may be in either memory
//   NONE    nothing: tables of very wide boxes do not fit
enum Shared { ALL, TABLES, NONE };

template <class T, Shared SHARED>
FASTAUG_FUNCTION void views_of_a_block(const View* views, const Layer* layers, long long count,
                                       T* out, byte* buffer, const Form& form,
                                       const Places& places) {
  extern __shared__ Sixteen shared[];
  byte* const piece = buffer + blockIdx.x * places.piece;
  const auto part = [&](int number, Shared known, long long at) {
    const bool is_shared = SHARED <= known || (SHARED != NONE && places.in_shared >> number & 1);
    return (is_shared ? (byte*)shared : piece) + at;
  };
  Cuda block;
  FASTAUG_ROLLED
  for (long long i = blockIdx.x; i < count; i += gridDim.x) {
    const Layer* const own = layers + i * form.layers;
    const View& view = views[i];
    ViewProgram<Cuda, T>(block, view, own, form, (float*)part(0, TABLES, places.tables),
                         part(1, ALL, places.first), part(2, ALL, places.second),
                         Room(view, own, form).box ? piece + places.box : nullptr,
                         places.strip_rows)
        .run(out + i * 3 * form.size * form.size);
  }
}

// At most 12 warps, and registers for two such blocks on an SM: 80 per thread. Without shared memory,
// for one: 168, since all addresses have 64 bits.
#define KERNEL(dtype, T, shared, SHARED)                                                        \
  extern "C" __global__ void __launch_bounds__(384, SHARED == NONE ? 1 : 2)                     \
      views_##dtype##_##shared(const View* views, const Layer* layers, long long count, T* out, \
                               byte* buffer, Form form, Places places) {                        \
    views_of_a_block<T, SHARED>(views, layers, count, out, buffer, form, places);               \
  }
#define KERNELS_OF(dtype, T)                                                                    \
  KERNEL(dtype, T, all, ALL) KERNEL(dtype, T, tables, TABLES) KERNEL(dtype, T, none, NONE)

// A training run needs only one: --define-macro=KERNELS='KERNEL(...)' compiles only that one.
#ifndef KERNELS
#define KERNELS KERNELS_OF(f32, float) KERNELS_OF(f16, f16) KERNELS_OF(bf16, bf16)
#endif
KERNELS

}  // namespace fastaug
