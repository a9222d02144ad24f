// Any bytes as a packed plan for the view kernel, under libFuzzer and the sanitizers. The records are
// taken as they are (`Form`, `View` and `Layer`, as fastaug/views/packed_plan.py packs them), except
// for what Python makes itself: the pointers and the sizes of the images. What Python refuses is
// refused here: LONGEST_SIDE and MAX_NUMBER come from packed_plan.py.
//
// Input: Form; dtype, views, height and width of the image, bytes between its rows (a byte each);
// then a View and its Layers for each view.

#include <cstdint>
#include <cstdlib>
#include <vector>

#if defined(__x86_64__) && __clang_major__ < 15
// It has no _Float16. With F16C, only its bits are used.
#ifndef __F16C__
#error "build with -march=native, or a newer clang"
#endif
#include <immintrin.h>
#define _Float16 short
#endif

#include "exact_memory.h"
#include "views.cpp"

using namespace fastaug;

// Smaller than Python's bounds, so that an input takes less than a millisecond.
constexpr int MAX_SIZE = 48, MAX_LAYERS = 4, MAX_VIEWS = 3;
constexpr long long MAX_BOX = 1 << 14;

struct Input {
  const uint8_t* data;
  size_t size;

  template <class T>
  T next() {
    T value = {};
    const size_t count = size < sizeof value ? size : sizeof value;
    std::memcpy((void*)&value, data, count);
    data += count, size -= count;
    return value;
  }
};

bool is_allowed(const Form& form) {
  // normalization.py allows a mean of 0 to 1 and a standard deviation of at most 1, of pixels / 255.
  // Tiny means are left out: what becomes subnormal is 0 in bf16 where a CPU converts it.
  for (int c = 0; c < 3; ++c) {
    const float mean = form.mean[c], factor = form.factor[c];
    const bool has_mean = mean == 0 || (mean >= 1e-6f && mean <= 255);
    if (!has_mean || !(factor >= 0.0039f && factor <= 1e30f)) return false;
  }
  return form.size >= 1 && form.size <= MAX_SIZE && form.layers >= 0 && form.layers <= MAX_LAYERS &&
         form.border >= REFLECT && form.border <= CONSTANT && form.filter.cubic >> 1 == 0 &&
         form.filter.antialias >> 1 == 0;
}

bool is_allowed(const View& view) {
  const auto is_near = [](long long place) { return std::llabs(place) <= LONGEST_SIDE; };
  return view.box_height >= 1 && view.box_height <= LONGEST_SIDE && view.box_width >= 1 &&
         view.box_width <= LONGEST_SIDE && (long long)view.box_height * view.box_width <= MAX_BOX &&
         is_near(view.top) && is_near(view.left);
}

bool is_allowed(const Layer& layer) {
  for (double number : layer.numbers)
    if (!(std::fabs(number) <= MAX_NUMBER)) return false;
  return true;
}

template <class T>
void run(const std::vector<View>& views, const std::vector<Layer>& layers, const Form& form,
         int dtype) {
  const size_t numbers = 3 * (size_t)form.size * form.size;
  Exactly<T> out(views.size() * numbers), alone(numbers);
  Arguments arguments = {views.data(), layers.data(), (long long)views.size(), form, dtype,
                         out.data, 0};
  fastaug_views_finish(fastaug_views_start(&arguments));
  for (size_t i = 0; i < views.size(); ++i) {
    const Layer* const own = layers.data() + i * form.layers;
    const int strip = 1 + (int)i % 3;
    with_exact_memory(views[i], own, form, strip, [&](float* scratch, byte* first, byte* second,
                                                      byte* box) {
      OneThread block;
      ViewProgram<OneThread, T>(block, views[i], own, form, scratch, first, second, box, strip)
          .run(alone.data);
    });
    if (std::memcmp(alone.data, out.data + i * numbers, sizeof(T) * numbers)) std::abort();
  }
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input = {data, size};
  const Form form = input.next<Form>();
  if (!is_allowed(form)) return -1;  // libFuzzer does not keep it
  const int dtype = input.next<uint8_t>() % 3, count = 1 + input.next<uint8_t>() % MAX_VIEWS;
  const int height = 1 + input.next<uint8_t>(), width = 1 + input.next<uint8_t>();
  const int row_bytes = 3 * width + input.next<uint8_t>();
  Exactly<byte> image((size_t)(height - 1) * row_bytes + 3 * width);
  for (size_t i = 0; i < image.count; ++i) image.data[i] = (byte)(i * 37 + i / 251);
  std::vector<View> views;
  std::vector<Layer> layers;
  for (int i = 0; i < count; ++i) {
    View view = input.next<View>();
    view.pixels = image.data, view.row_bytes = row_bytes;
    view.height = height, view.width = width;
    if (!is_allowed(view)) return -1;
    views.push_back(view);
    for (int j = 0; j < form.layers; ++j) {
      layers.push_back(input.next<Layer>());
      if (!is_allowed(layers.back())) return -1;
    }
  }
  if (dtype == 0) run<float>(views, layers, form, dtype);
  else if (dtype == 1) run<f16>(views, layers, form, dtype);
  else run<bf16>(views, layers, form, dtype);
  return 0;
}
