// Which arithmetic cuBLAS is asked for: logged as math_mode, "fp32" or "tf32", before the product.
#include "nullgpu.h"

#define TF32_TENSOR_OP_MATH 3
#define COMPUTE_32F_FAST_TF32 77

static void note(int is_tf32) { nullgpu_note("math_mode", -1, 0, is_tf32 ? "tf32" : "fp32", 0); }

int cublasSetMathMode(void* handle, int mode) {
  note(mode == TF32_TENSOR_OP_MATH);
  return 0;
}

int cublasLtMatmulDescCreate(void** description, int compute_type, int scale_type) {
  static char dummy[64];
  *description = dummy;
  note(compute_type == COMPUTE_32F_FAST_TF32);
  return 0;
}
