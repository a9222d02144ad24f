// Random valid plans for the view kernel, on memory of exactly the size that it may touch: built
// with a sanitizer, any access beyond it is a report. Each batch is made three times, and every
// number must come out the same:
//   by the C interface with the caller alone,
//   by the C interface with threads beside it,
//   by the block program, each part of its scratch memory allocated by itself (the product puts them
//   into one piece, where running over into the next would not show), with real threads a block if
//   asked for, so that ThreadSanitizer sees a missing sync().
// Usage: fuzz_views BATCHES SEED THREADS BLOCK_TEAMS BLOCK_LANES

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "exact_memory.h"
#include "threads_of_a_block.h"
#include "views.cpp"

using namespace fastaug;

std::mt19937 generator;

int whole(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator); }
double real(double low, double high) {
  return std::uniform_real_distribution<double>(low, high)(generator);
}
bool chance(double p) { return real(0, 1) < p; }

// --- what a batch is made of ---

double extreme() {
  const double numbers[] = {0, -0.0, 1e-9, -1e-9, 255, 256, -1, 1e6, -1e6, 2147483520.0};
  return numbers[whole(0, 9)];
}

Layer random_layer(int size) {
  Layer layer = {};
  double* numbers = layer.numbers;
  layer.operation = whole(NOTHING, CUTOUT);
  switch (layer.operation) {
    case MOVE: {
      const double angle = real(-4, 4), center = (size - 1) / 2.0;
      const double cos = std::cos(angle), sin = std::sin(angle);
      const double turn[6] = {cos, -sin, center * (1 - cos + sin) + 0.5,
                              sin, cos, center * (1 - sin - cos) + 0.5};
      const double shear[6] = {1, real(-3, 3), 0.5, real(-3, 3), 1, 0.5};
      const double shift[6] = {1, 0, real(-2.0 * size, 2.0 * size), 0, 1, extreme()};
      const double* chosen[] = {turn, shear, shift};
      std::memcpy(numbers, chosen[whole(0, 2)], sizeof turn);
      if (chance(0.1)) numbers[whole(0, 5)] = extreme();
      break;
    }
    case POSTERIZE: numbers[0] = 256 - std::ldexp(1, whole(0, 8)); break;
    case SOLARIZE: numbers[0] = whole(0, 256); break;
    case SOLARIZE_ADD: numbers[0] = whole(0, 127); break;
    case CUTOUT:
      for (int i = 0; i < 4; ++i) numbers[i] = chance(0.1) ? extreme() : whole(-5, size + 5);
      break;
    default: numbers[0] = chance(0.2) ? extreme() : real(0, 3);
  }
  return layer;
}

// A side of a box: inside the image, somewhat beyond, or far beyond on either side.
void random_side(int length, int* start, int* count) {
  const int kind = whole(0, 9);
  if (kind < 5) {
    *count = whole(1, length);
    *start = whole(0, length - *count);
  } else {
    *count = kind < 9 ? whole(1, 90) : whole(1, 400);
    *start = kind < 9 ? whole(-100, 100) : whole(-100000, 100000);
  }
}

// An image of its own for each view: nothing but the rows themselves may be read.
View random_view(std::vector<Exactly<byte>>& images) {
  View view = {};
  view.height = chance(0.1) ? 1 : whole(1, 70);
  view.width = chance(0.1) ? 1 : whole(1, 70);
  view.row_bytes = 3 * view.width + (chance(0.3) ? whole(1, 40) : 0);
  images.emplace_back((size_t)(view.height - 1) * view.row_bytes + 3 * view.width);
  for (size_t i = 0; i < images.back().count; ++i) images.back().data[i] = (byte)generator();
  view.pixels = images.back().data;
  random_side(view.height, &view.top, &view.box_height);
  random_side(view.width, &view.left, &view.box_width);
  view.flip = chance(0.5);
  return view;
}

Form random_form() {
  Form form = {};
  form.size = whole(8, 40);
  form.layers = chance(0.3) ? 0 : whole(1, 4);
  form.border = whole(REFLECT, CONSTANT);
  form.filter = {whole(0, 1), whole(0, 1)};
  for (int c = 0; c < 3; ++c) {
    form.mean[c] = (float)real(0, 200);
    form.factor[c] = (float)real(0.01, 1);
  }
  return form;
}

// --- the block program, with one thread or several ---

template <class T>
void by_block(const View& view, const Layer* layers, const Form& form, T* out, int teams,
              int lanes) {
  const int strip = whole(1, 3);
  with_exact_memory(view, layers, form, strip, [&](float* scratch, byte* first, byte* second,
                                                   byte* box) {
#ifndef FUZZ_BLOCK_THREADS
    OneThread block;
    ViewProgram<OneThread, T>(block, view, layers, form, scratch, first, second, box, strip)
        .run(out);
#else
    run_block(teams, lanes, [&](Threaded& block) {
      ViewProgram<Threaded, T>(block, view, layers, form, scratch, first, second, box, strip)
          .run(out);
    });
#endif
  });
}

// --- comparing ---

float to_number(float x) { return x; }
float to_number(bf16 x) { return widen(ushorts{x.bits})[0]; }
float to_number(f16 x) {
  halves bits = {};
  std::memcpy(&bits, &x, sizeof x);
  return widen(bits)[0];
}

template <class T>
bool batch(int dtype, int threads, int teams, int lanes) {
  const Form form = random_form();
  const int count = whole(1, 7);
  std::vector<Exactly<byte>> images;
  Exactly<View> views(count);
  Exactly<Layer> layers((size_t)count * form.layers);
  for (int i = 0; i < count; ++i) views.data[i] = random_view(images);
  for (size_t i = 0; i < layers.count; ++i) layers.data[i] = random_layer(form.size);
  const size_t numbers = 3 * (size_t)form.size * form.size;
  Exactly<T> alone(count * numbers), beside(count * numbers), block(count * numbers);
  for (const Exactly<T>* made : {&alone, &beside, &block})
    std::memset((void*)made->data, 0xff, sizeof(T) * made->count);  // not a number, if left out

  Arguments arguments = {views.data, layers.data, count, form, dtype, alone.data, 0};
  fastaug_views_finish(fastaug_views_start(&arguments));
  arguments.out = beside.data, arguments.threads = threads;
  void* started = fastaug_views_start(&arguments);
  for (int i = 0; i < count; ++i)
    by_block(views.data[i], layers.data + (size_t)i * form.layers, form, block.data + i * numbers,
             teams, lanes);
  fastaug_views_finish(started);

  bool good = std::memcmp(alone.data, beside.data, sizeof(T) * alone.count) == 0 &&
              std::memcmp(alone.data, block.data, sizeof(T) * alone.count) == 0;
  // Levels of 0 to 255 with a bicubic's overshoot, times a factor of at most 1.
  for (size_t i = 0; i < alone.count; ++i) good = good && std::fabs(to_number(alone.data[i])) < 700;
  if (!good) std::printf("a batch of %d views of %d pixels is wrong\n", count, form.size);
  return good;
}

int main(int, char** given) {
  const int batches = std::atoi(given[1]), threads = std::atoi(given[3]);
  const int teams = std::atoi(given[4]), lanes = std::atoi(given[5]);
  generator.seed(std::atoi(given[2]));
  int wrong = 0;
  for (int i = 0; i < batches; ++i) {
    const int dtype = whole(0, 2);
    wrong += !(dtype == 0   ? batch<float>(dtype, threads, teams, lanes)
               : dtype == 1 ? batch<f16>(dtype, threads, teams, lanes)
                            : batch<bf16>(dtype, threads, teams, lanes));
  }
  std::printf("%d batches, %d wrong, vectors of %d\n", batches, wrong, LANES);
  return wrong != 0;
}
