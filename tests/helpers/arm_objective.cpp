// Calls fastaug_objective of a library with what a file holds. Runs under qemu.
// Usage: arm_objective LIBRARY REQUEST RESULT

#include <vector>

#include "arm_files.h"
#include "objective.cpp"  // for struct Arguments

int main(int, char** argv) {
  const auto objective = (long long (*)(const Arguments*))function_of(argv[1], "fastaug_objective");
  Reader request(argv[2]);
  Arguments a = {};
  const int* numbers = request.take<int>(8);
  a.dtype = numbers[0], a.average = numbers[1], a.images = numbers[2], a.views = numbers[3];
  a.classes = numbers[4], a.threads = numbers[5];
  const bool need_mean = numbers[6];
  a.soft = numbers[7];
  const float* settings = request.take<float>(2);
  a.kl_weight = settings[0], a.smoothing = settings[1];
  const long long rows = a.images * a.views;
  const size_t item = a.dtype == 0 ? 4 : 2;
  a.view_stride = a.classes, a.image_stride = (long long)a.views * a.classes;
  a.logits = request.take<char>(rows * a.classes * item);
  if (a.soft) a.targets = request.take<float>(a.images * a.classes);
  else a.targets = request.take<long long>(a.images);
  std::vector<float> values(2 * a.images + 1);
  std::vector<char> gradient(rows * a.classes * item);
  a.nll = values.data(), a.kl = a.nll + a.images, a.mean = need_mean ? a.kl + a.images : nullptr;
  a.gradient = gradient.data();
  const long long wrong = objective(&a);
  Writer result(argv[3]);
  result.put(&wrong, 8);
  result.put(values.data(), 4 * values.size());
  result.put(gradient.data(), gradient.size());
}
