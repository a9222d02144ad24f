// The block program of cuda/objective.h with several real threads a block, beside the one-thread
// block of the product: both must give the same numbers. Built with ThreadSanitizer, a missing
// sync() is a report; with AddressSanitizer, an access outside of shared memory or the tensors is.
#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "objective.h"

using namespace fastaug;

class Barrier {
 public:
  explicit Barrier(int count) : count(count) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    const int round = rounds;
    if (++arrived == count) {
      arrived = 0;
      ++rounds;
      all_here.notify_all();
    } else {
      all_here.wait(lock, [&] { return round != rounds; });
    }
  }

 private:
  std::mutex mutex;
  std::condition_variable all_here;
  const int count;
  int arrived = 0, rounds = 0;
};

// What the threads of one block share; each team adds and compares in `slots` of its own.
struct Meeting {
  Meeting(int teams, int lanes) : block(teams * lanes), slots(teams * lanes) {
    for (int team = 0; team < teams; ++team) team_barriers.emplace_back(new Barrier(lanes));
  }
  Barrier block;
  std::vector<std::unique_ptr<Barrier>> team_barriers;
  std::vector<float> slots;
};

struct Threaded {
  typedef floats Value;
  static constexpr int LANES = fastaug::LANES;
  static constexpr int UNROLL = 2;
  static int row_stride(int width) { return width; }
  Meeting& meeting;
  const int thread, threads, team, teams, lane, lanes;

  Threaded(Meeting& meeting, int thread, int teams, int lanes)
      : meeting(meeting), thread(thread), threads(teams * lanes), team(thread / lanes),
        teams(teams), lane(thread % lanes), lanes(lanes) {}
  void sync() { meeting.block.wait(); }
  void will_read(const void*) {}
  void will_write(const void*) {}
  template <class Fold>
  float over_team(float x, Fold fold) {
    Barrier& barrier = *meeting.team_barriers[team];
    float* slots = &meeting.slots[team * lanes];
    slots[lane] = x;
    barrier.wait();
    float result = slots[0];
    for (int i = 1; i < lanes; ++i) result = fold(result, slots[i]);
    barrier.wait();
    return result;
  }
  float team_sum(float x) {
    return over_team(x, [](float a, float b) { return a + b; });
  }
  float team_max(float x) {
    return over_team(x, [](float a, float b) { return a > b ? a : b; });
  }
};

struct Result {
  float nll, kl;
  std::vector<float> gradient;
};

float* aligned(std::vector<float>& memory, int size) {
  memory.assign(size + 64, __builtin_nanf(""));
  return (float*)(((uintptr_t)memory.data() + 63) / 64 * 64);
}

template <Average AVERAGE>
Result with_one_thread(Shape shape, Weights weights, const float* z, int target) {
  Result result{0, 0, std::vector<float>((size_t)shape.views * shape.classes)};
  std::vector<float> memory;
  const Layout at(shape.views, shape.width, 1, OneThread::row_stride(shape.width));
  OneThread block;
  Objective<OneThread, float, AVERAGE>(block, shape, weights, z, shape.classes, target,
                                       result.gradient.data(), aligned(memory, at.size))
      .run(&result.nll, &result.kl);
  return result;
}

template <Average AVERAGE>
Result with_threads(Shape shape, Weights weights, const float* z, int target, int teams,
                    int lanes) {
  Result result{0, 0, std::vector<float>((size_t)shape.views * shape.classes)};
  std::vector<float> memory;
  const Layout at(shape.views, shape.width, teams, Threaded::row_stride(shape.width));
  float* shared = aligned(memory, at.size);
  Meeting meeting(teams, lanes);
  std::vector<std::thread> threads;
  for (int i = 0; i < teams * lanes; ++i)
    threads.emplace_back([&, i] {
      Threaded block(meeting, i, teams, lanes);
      Objective<Threaded, float, AVERAGE>(block, shape, weights, z, shape.classes, target,
                                          result.gradient.data(), shared)
          .run(&result.nll, &result.kl);
    });
  for (std::thread& thread : threads) thread.join();
  return result;
}

bool near(float a, float b, float scale) { return std::fabs(a - b) <= 1e-5f * (scale + 1e-6f); }

template <Average AVERAGE>
int compare(int views, int classes, int width, int teams, int lanes, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> z((size_t)views * classes);
  for (float& x : z) x = 3 * normal(random);
  const Shape shape = {views, classes, (width + LANES - 1) / LANES * LANES};
  const Weights weights = {0.7f, 0.1f};
  const int target = (int)(random() % classes);
  const Result one = with_one_thread<AVERAGE>(shape, weights, z.data(), target);
  const Result many = with_threads<AVERAGE>(shape, weights, z.data(), target, teams, lanes);
  bool same = near(one.nll, many.nll, std::fabs(one.nll)) && near(one.kl, many.kl, one.kl);
  float largest = 0;
  for (float g : one.gradient) largest = std::fmax(largest, std::fabs(g));
  for (size_t i = 0; i < z.size(); ++i)
    same = same && near(one.gradient[i], many.gradient[i], largest);
  if (!same)
    std::printf("average %d, %d views, %d classes, chunks of %d, %d teams of %d: differs\n",
                AVERAGE, views, classes, shape.width, teams, lanes);
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
      cases += 4;
    }
  std::printf("%d cases, %d differ\n", cases, wrong);
  return wrong != 0;
}
