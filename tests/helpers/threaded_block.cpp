// The block program of cuda/objective.h with several real threads a block, beside the one-thread
// block of the product: both must give the same numbers.
#include <cstdio>
#include <random>
#include <vector>

#include "objective.h"
#include "threads_of_a_block.h"

using namespace fastaug;

struct Result {
  float nll, kl;
  std::vector<float> gradient;
};

template <Average AVERAGE, class Target>
Result with_one_thread(Shape shape, Weights weights, const float* z,
                       typename Target::Given target) {
  Result result{0, 0, std::vector<float>((size_t)shape.views * shape.classes)};
  std::vector<float> memory;
  const Layout at(shape.views, shape.width, 1, OneThread::row_stride(shape.width));
  OneThread block;
  Objective<OneThread, float, AVERAGE, Target>(block, shape, weights, z, shape.classes, target,
                                               result.gradient.data(), aligned(memory, at.size))
      .run(&result.nll, &result.kl);
  return result;
}

template <Average AVERAGE, class Target>
Result with_threads(Shape shape, Weights weights, const float* z, typename Target::Given target,
                    int teams, int lanes) {
  Result result{0, 0, std::vector<float>((size_t)shape.views * shape.classes)};
  std::vector<float> memory;
  const Layout at(shape.views, shape.width, teams, Threaded::row_stride(shape.width));
  float* shared = aligned(memory, at.size);
  run_block(teams, lanes, [&](Threaded& block) {
    Objective<Threaded, float, AVERAGE, Target>(block, shape, weights, z, shape.classes, target,
                                                result.gradient.data(), shared)
        .run(&result.nll, &result.kl);
  });
  return result;
}

bool near(float a, float b, float scale) { return std::fabs(a - b) <= 1e-5f * (scale + 1e-6f); }

// The last class of the targets, or any numbers.
ClassTarget::Given target_of(ClassTarget*, const std::vector<float>& numbers) {
  return (long long)numbers.size() - 1;
}
SoftTarget::Given target_of(SoftTarget*, const std::vector<float>& numbers) {
  return numbers.data();
}

template <Average AVERAGE, class Target = ClassTarget>
int compare(int views, int classes, int width, int teams, int lanes, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> z((size_t)views * classes), numbers(classes);
  for (float& x : z) x = 3 * normal(random);
  for (float& x : numbers) x = normal(random);
  const Shape shape = {views, classes, (width + LANES - 1) / LANES * LANES};
  const Weights weights = {0.7f, 0.1f};
  const typename Target::Given target = target_of((Target*)nullptr, numbers);
  const Result one = with_one_thread<AVERAGE, Target>(shape, weights, z.data(), target);
  const Result many = with_threads<AVERAGE, Target>(shape, weights, z.data(), target, teams, lanes);
  bool same = near(one.nll, many.nll, std::fabs(one.nll)) && near(one.kl, many.kl, one.kl);
  float largest = 0;
  for (float g : one.gradient) largest = std::fmax(largest, std::fabs(g));
  for (size_t i = 0; i < z.size(); ++i)
    same = same && near(one.gradient[i], many.gradient[i], largest);
  if (!same)
    std::printf("average %d, %s, %d views, %d classes, chunks of %d, %d teams of %d: differs\n",
                AVERAGE, Target::SOFT ? "soft" : "class", views, classes, shape.width, teams, lanes);
  return !same;
}

int main() {
  std::mt19937 random(0);
  int wrong = 0, cases = 0;
  // whole tiles and chunks; more teams than views and fewer; columns that end within a vector
  const int shapes[][3] = {{1, 1, 1}, {2, 7, 8}, {3, 37, 40}, {5, 37, 12}, {4, 100, 16}};
  const int blocks[][2] = {{1, 2}, {2, 1}, {3, 2}, {6, 1}};
  for (auto [views, classes, width] : shapes)
    for (auto [teams, lanes] : blocks) {
      wrong += compare<LOSSES>(views, classes, width, teams, lanes, random);
      wrong += compare<PROBS>(views, classes, width, teams, lanes, random);
      wrong += compare<LOGITS>(views, classes, width, teams, lanes, random);
      wrong += compare<NONE>(views, classes, width, teams, lanes, random);
      wrong += compare<LOSSES, SoftTarget>(views, classes, width, teams, lanes, random);
      wrong += compare<PROBS, SoftTarget>(views, classes, width, teams, lanes, random);
      wrong += compare<LOGITS, SoftTarget>(views, classes, width, teams, lanes, random);
      cases += 7;
    }
  std::printf("%d cases, %d differ\n", cases, wrong);
  return wrong != 0;
}
