// Makes views by the functions of a library from what a file holds. Runs under qemu.
// Usage: arm_views LIBRARY REQUEST RESULT

#include <vector>

#include "arm_files.h"
#include "views.cpp"  // for struct Arguments

int main(int, char** argv) {
  const auto start = (void* (*)(const Arguments*))function_of(argv[1], "fastaug_views_start");
  const auto finish = (void (*)(void*))function_of(argv[1], "fastaug_views_finish");
  Reader request(argv[2]);
  Arguments a = {};
  const int* numbers = request.take<int>(4);  // views, dtype, threads, bytes of all images
  a.count = numbers[0], a.dtype = numbers[1], a.threads = numbers[2];
  a.form = *request.take<fastaug::Form>(1);
  auto* views = request.take<fastaug::View>(a.count);
  a.views = views;
  a.layers = request.take<fastaug::Layer>(a.count * a.form.layers);
  const fastaug::byte* images = request.take<fastaug::byte>(numbers[3]);
  for (long long i = 0; i < a.count; ++i) views[i].pixels = images + (size_t)views[i].pixels;
  std::vector<char> out(3 * a.count * a.form.size * a.form.size * (a.dtype == 0 ? 4 : 2));
  a.out = out.data();
  finish(start(&a));
  Writer(argv[3]).put(out.data(), out.size());
}
