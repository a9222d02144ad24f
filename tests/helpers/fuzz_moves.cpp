// FixedMatrix of cuda/moves.h against fp64, for test_view_moves.py: matrices of all operations, at
// positions over the whole view. Prints how many places were compared, how many of them fp64 would
// have to decide, and how many are wrong.
#include <cmath>
#include <cstdio>
#include <random>

#include "moves.h"

using namespace fastaug;

int main() {
  std::mt19937_64 random(0);
  const auto real = [&](double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random);
  };
  const int sizes[] = {1, 2, 7, 32, 33, 224, 600, 4096, 16384};
  long long compared = 0, close = 0, wrong = 0, unfit = 0;
  for (int number = 0; number < 3000; ++number) {
    const int size = sizes[number % 9];
    const double tie = 1 / 256., center = (size - 1) / 2.;
    double m[6] = {1, 0, tie, 0, 1, tie};
    const int kind = number / 9 % 6;
    if (kind == 0) {  // rotations, by whole degrees too
      const double degrees = number % 2 ? real(-180, 180) : std::floor(real(-180, 181));
      const double cosine = std::cos(degrees * M_PI / 180), sine = std::sin(degrees * M_PI / 180);
      m[0] = cosine, m[1] = -sine, m[2] = center * (1 - cosine + sine);
      m[3] = sine, m[4] = cosine, m[5] = center * (1 - sine - cosine);
    }
    if (kind == 1) m[3] = real(-.3, .3);
    if (kind == 2) m[1] = real(-.3, .3);
    if (kind == 3) m[2] = real(-size, size), m[5] = real(-size, size);
    if (kind == 4)  // close to integers: by few units of 2^-32, or exactly on one
      for (double& entry : m)
        entry = std::floor(real(-2, 3)) + (number % 2 ? 0 : std::floor(real(-9, 9)) * 0x1p-33);
    if (kind == 5)  // anything
      for (double& entry : m) entry = real(-1, 1) * std::exp2(std::floor(real(-40, 40)));
    m[2] += kind == 4 ? 0 : 0.5, m[5] += kind == 4 ? 0 : 0.5;
    const FixedMatrix fixed(m, size);
    if (!fixed.fits) {
      ++unfit;
      continue;
    }
    for (int i = 0; i < 4000; ++i) {
      // The far corner, where errors are largest, in every fourth case.
      const int x = i % 4 ? (int)(random() % size) : size - 1 - (int)(random() % (1 + size / 8));
      const int y = i % 4 ? (int)(random() % size) : size - 1 - (int)(random() % (1 + size / 8));
      const long long u = fixed.u(x, y), v = fixed.v(x, y);
      ++compared;
      if (fixed.is_close(u) || fixed.is_close(v)) ++close;
      else wrong += fixed.place(u, v) != exact_place(m, x, y, size);
    }
  }
  std::printf("%lld places, %lld close, %lld wrong, %lld matrices do not fit\n", compared, close,
              wrong, unfit);
  return wrong != 0;
}
